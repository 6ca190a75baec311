# SPDX-License-Identifier: Apache-2.0
"""A model that no device holds whole is made share by share.

That files are read so is in `tests/models/test_weights.py`; here, random weights of a 70B shape are
compiled, not drawn, and the compiler says what a device needs.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from detjax.models.params import tensor_specs
from detjax.models.weights.random_weights import random_tensor
from detjax.parallel.mesh import make_mesh
from detjax.testing.dummies import dummy_config

H200_BYTES = 141e9
LLAMA_70B = dummy_config(
    num_heads=64, num_kv_heads=8, head_dim=128, hidden_size=8192, intermediate_size=28672,
    num_layers=80, vocab_size=128256,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_each_device_makes_its_share_of_a_70b_model_only(tp):
    mesh, itemsize = make_mesh(1, tp), 2
    specs = jax.tree.leaves(tensor_specs(LLAMA_70B, tp=tp, vocab_block=128))
    whole_bytes = sum(math.prod(spec.shape) for spec in specs) * itemsize
    assert whole_bytes > H200_BYTES
    by_kind = {spec.unnamed: spec.hf_name for spec in specs}
    largest_temporary = 0
    for spec, name in by_kind.items():
        if len(spec.shape) == 1:
            continue
        draw = functools.partial(random_tensor, spec=spec, dtype=jnp.dtype(jnp.bfloat16))
        sharding = NamedSharding(mesh, spec.partition)
        compiled = jax.jit(draw, out_shardings=sharding).lower(jax.random.key(0)).compile()
        memory = compiled.memory_analysis()
        size = math.prod(spec.shape)
        assert memory.output_size_in_bytes == size * itemsize // tp, name
        # Four words of 32 bits for each element of a share: what threefry makes the bits from.
        assert memory.temp_size_in_bytes <= 1.1 * 4 * 4 * size / tp, name
        largest_temporary = max(largest_temporary, memory.temp_size_in_bytes)
    assert whole_bytes / tp + largest_temporary < H200_BYTES
