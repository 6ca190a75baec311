"""XLA:GPU's DynamicSliceFusionRewriter hands a kernel a slice at an address that is not aligned.

python dynamic_slice_fusion.py   # INVALID_ARGUMENT: Input buffer 0 is not 256-byte aligned

The slice is 256 bytes long and begins 12 bytes into its array: the pass looks at the size, not at
the offset. With XLA_FLAGS=--xla_gpu_enable_dynamic_slice_fusion=false it prints "right". Needs jax
0.11.2 with CUDA, on a Hopper GPU, and nothing else.
"""

import sys

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def body(x_ref, out_ref):
    out_ref[...] = x_ref[...] + 1


add_one = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.int32))


def step(x):
    return add_one(x[3:131])


if __name__ == "__main__":
    got = jax.jit(step)(jnp.arange(131, dtype=jnp.int32)).tolist()
    want = list(range(4, 132))
    print(jax.devices()[0].device_kind, "right" if got == want else f"WRONG: {got}")
    sys.exit(got != want)
