# SPDX-License-Identifier: Apache-2.0
"""A Pallas kernel for Hopper that is lowered twice in a process has two texts.

python kernel_hash.py   # WRONG: the same kernel is lowered to two texts

The name that its dumps would have is an attribute of the kernel, with a count of the process in it.
Needs jax 0.11.2 and no GPU.
"""

import sys

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def double(x):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out, kernel_name="double")(x)


def lower() -> str:
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    return jax.jit(lambda x: double(x)).trace(x).lower(lowering_platforms=("cuda",)).as_text()


if __name__ == "__main__":
    first, again = lower(), lower()
    print("right" if first == again else "WRONG: the same kernel is lowered to two texts")
    sys.exit(first != again)
