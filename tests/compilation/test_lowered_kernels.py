# SPDX-License-Identifier: Apache-2.0
"""Kernels that are lowered once: the same programs, and JAX's rule asked once for each."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas import mpmd
from jax.interpreters import mlir

from detjax.compilation import lowered_kernels
from detjax.compilation.lowered_kernels import lower
from detjax.compilation.mosaic_kernels import kernel_calls, share_kernels
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.attention import sm90 as attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.api import rms_norm
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.testing.bitwise import assert_bitwise_equal

BF16, F32, I32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)
CUDA = ("cuda",)


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch):
    """And nothing of these tests afterwards."""
    kept = lowered_kernels._Kept()
    monkeypatch.setattr(lowered_kernels, "_kept", lambda: kept)
    return kept


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The names of kernels that JAX's rule lowers."""
    names: list[str] = []
    plain = mlir._lowerings[mpmd.mpmd_map_p]

    def rule(ctx, *operands, **params):
        names.append(params["jaxprs"][0].debug_info.func_name)
        return plain.rule(ctx, *operands, **params)

    monkeypatch.setitem(mlir._lowerings, mpmd.mpmd_map_p, mlir_entry(rule, plain.inline))
    return names


def mlir_entry(rule, inline: bool) -> Any:
    return type(mlir._lowerings[mpmd.mpmd_map_p])(rule, inline)


def struct(shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def norm_and_products(eps: float = 1e-5):
    """A norm, and a product in two layers."""

    def run(x, gain, w):
        for _ in range(2):
            x = rms_norm(x, gain, eps=eps, backend=Backend.SM90)
            x = linear(x, w, out_dtype=BF16, backend=Backend.SM90)
        return x

    return jax.jit(run)


def decode_step(num_pages: int = 2):
    """Attention that writes its cache, and what follows it."""

    def run(qkv, cos, sin, pages, table, positions, w):
        for layer in range(2):
            out, pages = attention.rope_attention(
                qkv, Rotation(cos, sin), CachePlace(pages, table, positions, layer),
                window=None, eps=1e-5, profile=NumericsProfile(),
            )  # fmt: skip
            rows = out.reshape(out.shape[0], -1)
            qkv = linear(rows, w, out_dtype=BF16, backend=Backend.SM90).reshape(qkv.shape)
        return qkv, pages

    operands = (
        struct((4, 12, 128)), struct((4, 64), F32), struct((4, 64), F32),
        struct((2, 8, 2, 2, 128, 128)), struct((4, num_pages), I32), struct((4, 1), I32),
        struct((12 * 128, 8 * 128)),
    )  # fmt: skip
    return jax.jit(run, donate_argnums=3), operands


OF_NORM = struct((8, 512)), struct((512,)), struct((512, 512))


def as_jax_has_it(jitted, operands) -> str:
    program = jitted.trace(*operands).lower(lowering_platforms=CUDA)
    share_kernels(program)
    return program.as_text()


def as_here(jitted, operands) -> str:
    program = lower(jitted, operands, CUDA)
    share_kernels(program)
    return program.as_text()


@pytest.mark.quick_cases("<lambda>")
@pytest.mark.parametrize("make", [lambda: (norm_and_products(), OF_NORM), decode_step])
def test_a_program_is_that_of_jax_when_its_kernels_are_kept_too(make, asked):
    expected = as_jax_has_it(*make())
    count = len(asked)
    assert count >= 2
    jitted, operands = make()
    assert as_here(jitted, operands) == expected
    assert len(asked) == 2 * count
    # Another program, all of whose kernels are there, in a thread: JAX has a context for each.
    other = jax.jit(lambda *operands: jax.tree.leaves(jitted.__wrapped__(*operands))[0] + 1)
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(as_here, other, operands).result()
    assert len(asked) == 2 * count
    assert text == as_jax_has_it(other, operands) != expected
    assert len(asked) == 3 * count


@pytest.mark.slow
def test_another_program_lowers_what_is_new_alone(asked):
    lower(*decode_step(2), CUDA)
    first = list(asked)
    assert len(first) == len(set(first)) == 2  # in both layers
    lower(*decode_step(3), CUDA)
    assert len(asked) == 3 and "attention" in asked[2]


@pytest.mark.parametrize(
    ("jitted", "operands"),
    [
        (norm_and_products(eps=1e-6), OF_NORM),
        (norm_and_products(), (struct((9, 512)), *OF_NORM[1:])),
    ],
    ids=["another constant", "other shapes"],
)
def test_another_kernel_is_lowered(asked, jitted, operands):
    lower(norm_and_products(), OF_NORM, CUDA)
    assert as_here(jitted, operands) == as_jax_has_it(jitted, operands)
    names = set(share_kernels(lower(norm_and_products(), OF_NORM, CUDA)))
    assert set(share_kernels(lower(jitted, operands, CUDA))) - names


def test_what_is_more_than_a_call_is_left_to_jax(monkeypatch, nothing_is_kept):
    """Such as a kernel with scratch in device memory, which is cleared before."""
    jitted = norm_and_products()
    program = lower(jitted, OF_NORM, CUDA)
    module: Any = program.compiler_ir("stablehlo")
    (call, *_) = kernel_calls(module.operation)
    operands, results = list(call.operands), list(call.results)
    assert lowered_kernels._only_call(operands, results) == call
    assert lowered_kernels._only_call(operands[1:], results) is None
    assert lowered_kernels._only_call(operands, results[:-1]) is None
    assert lowered_kernels._only_call(operands, operands[:1]) is None  # of a block
    assert len(nothing_is_kept._programs) == 2


def test_the_least_used_kernels_go(monkeypatch, asked):
    monkeypatch.setattr(lowered_kernels, "MOST_KEPT", 2)
    for num_rows in (8, 9):
        lower(norm_and_products(), (struct((num_rows, 512)), *OF_NORM[1:]), CUDA)
    assert len(asked) == 4
    lower(norm_and_products(), (struct((9, 512)), *OF_NORM[1:]), CUDA)
    assert len(asked) == 4
    lower(norm_and_products(), OF_NORM, CUDA)
    assert len(asked) == 6


def test_other_devices_take_jaxs_rule():
    """What is interpreted on a CPU is not a kernel there."""
    x = jnp.asarray(np.linspace(-1, 1, 8 * 512).reshape(8, 512), BF16)
    gain = jnp.ones((512,), BF16)
    jitted = jax.jit(lambda x, gain: rms_norm(x, gain, eps=1e-5, backend=Backend.PORTABLE) * 2)
    compiled = lower(jitted, (x, gain)).compile()
    assert_bitwise_equal(compiled(x, gain), jitted(x, gain), claim="lowered here")
