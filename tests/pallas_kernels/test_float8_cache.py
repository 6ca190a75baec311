# SPDX-License-Identifier: Apache-2.0
"""Keys and values of 8 bits: rounded once, when they are written, and read as they were written."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.attention.api import attention, rope_attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.float8_cache import narrow_rows, widened
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.api import rope_into_cache
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.testing import assert_bitwise_equal, count_different_bits
from detjax.testing.operation_cases import digest_of, operation_case

PROFILE = NumericsProfile(kv_cache_dtype="fp8_e4m3")
BACKENDS = [pytest.param(Backend.PORTABLE, marks=pytest.mark.slow), Backend.REFERENCE]
HEADS, KV_HEADS, CHANNELS = 4, 2, 64
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "float8_cache_bits.json").read_text())
"""Digests of `reference`, that `test_float8_cache_sm90.py` asks of a GPU."""
LENGTH = 140
"""Tokens of the sequence: over the end of a page."""
TABLE = np.asarray([[4, 1, 2]], np.int32)


def nearest_float8(x: np.ndarray) -> np.ndarray:
    """The nearest value of a float8, of two as near the one of even code: 448 at most."""
    codes = np.arange(127, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    middles, magnitude = (values[1:] + values[:-1]) / 2, np.abs(x.astype(np.float64))
    found = np.searchsorted(middles, magnitude)
    is_middle = magnitude == np.append(middles, np.inf)[found]
    found = (found + (is_middle & (found % 2 == 1))).astype(np.uint8)
    return found | (np.signbit(x.astype(np.float32)).astype(np.uint8) << 7)


def test_each_bfloat16_becomes_the_nearest_float8():
    patterns = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    x = patterns[np.isfinite(patterns.astype(np.float32))]
    got = np.asarray(narrow_rows(jnp.asarray(x).reshape(-1, 16))).reshape(-1)
    assert_bitwise_equal(got, nearest_float8(x), claim="to nearest, ties to even, at most 448")
    toward_zero = (x.view(np.uint16) & 0xFFF0).view(ml_dtypes.bfloat16)
    assert count_different_bits(nearest_float8(toward_zero), got) > 0, "the probe has no fractions"


def test_each_float8_is_read_exactly():
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    wide = widened(jnp.asarray(codes), jnp.dtype(jnp.bfloat16))
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16)
    assert_bitwise_equal(np.asarray(wide), want, claim="widening is exact")


# As one program each: every operation of its own would be compiled for every length.
STATIC = "window", "profile", "backend"
one_rope_attention = jax.jit(rope_attention, static_argnames=(*STATIC, "eps"))
one_rope_into_cache = jax.jit(rope_into_cache, static_argnames=("eps", "backend"))
one_attention = jax.jit(attention, static_argnames=STATIC)


class Text:
    """A sequence: its heads, angles and empty caches."""

    def __init__(self, seed: int = 0, channels: int = CHANNELS):
        rng = np.random.default_rng(seed)
        self.channels = channels
        heads = rng.standard_normal((LENGTH, HEADS + 2 * KV_HEADS, channels)) * 2
        heads[:, -KV_HEADS:] *= np.exp(rng.standard_normal((LENGTH, KV_HEADS, 1)))
        self.qkv = heads.astype(ml_dtypes.bfloat16)
        angles = rng.uniform(0, 6, (LENGTH, channels // 2))
        self.cos, self.sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
        q_gain, k_gain = rng.uniform(0.5, 3, (2, channels)).astype(ml_dtypes.bfloat16)
        self.gains = jnp.asarray(q_gain), jnp.asarray(k_gain)

    def pages(self, dtype) -> jax.Array:
        return jnp.zeros((2, 5, 2, KV_HEADS, 128, self.channels), dtype)

    def operands(self, pages, start: int, stop: int) -> tuple:
        # Cut by NumPy: each cut of another shape by JAX would be a program.
        qkv, cos, sin = (jnp.asarray(x[start:stop]) for x in (self.qkv, self.cos, self.sin))
        positions = jnp.asarray(np.arange(start, stop, dtype=np.int32)[None])
        place = CachePlace(pages, jnp.asarray(TABLE), positions, 1)
        return qkv, Rotation(cos, sin, self.gains), place

    def outputs(self, backend: Backend, chunks: list[int], window: int | None = None) -> tuple:
        """What all tokens see, and the pages, in chunks of these sizes."""
        outs, pages, start = [], self.pages(jnp.uint8), 0
        for size in chunks:
            out, pages = one_rope_attention(
                *self.operands(pages, start, start + size),
                window=window, eps=1e-5, profile=PROFILE, backend=backend,
            )  # fmt: skip
            outs.append(np.asarray(out)[0])
            start += size
        assert start == LENGTH
        return np.concatenate(outs), np.asarray(pages)

    def rounded(self, backend: Backend, window: int | None = None) -> np.ndarray:
        """Attention in bfloat16 over a cache whose entries were rounded by NumPy."""
        q, written = one_rope_into_cache(
            *self.operands(self.pages(jnp.bfloat16), 0, LENGTH), eps=1e-5, backend=backend
        )
        exact = np.asarray(written)
        codes = nearest_float8(exact.reshape(-1)).view(ml_dtypes.float8_e4m3fn)
        pages = jnp.asarray(codes.astype(ml_dtypes.bfloat16).reshape(exact.shape))
        assert count_different_bits(np.asarray(pages), exact) > 0, "the probe needs no rounding"
        place = self.operands(pages, 0, LENGTH)[2]
        out = one_attention(q[None], place, window=window, profile=PROFILE, backend=backend)
        return np.asarray(out)[0]


CHUNKS = {
    "whole": [140], "pages": [128, 12], "uneven": [124, 1, 15], "verify": [136, 1, 3],
    "decode": [124, *[1] * 16],
}  # fmt: skip


@pytest.mark.quick_cases("Backend.REFERENCE-uneven", "Backend.REFERENCE-decode")
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_query_attends_to_rounded_keys_of_its_own_chunk_too(backend, chunks):
    """Prefill, decode and verified windows are attention in bfloat16 over rounded entries."""
    text = Text()
    out, pages = text.outputs(backend, chunks)
    assert_bitwise_equal(out, text.rounded(backend), claim="attention over rounded entries")
    assert not pages[0].any() and not pages[1, [0, 3]].any(), "what nobody wrote has changed"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_that_attends_to_its_own_unrounded_keys_differs(backend):
    """The control: what other servers do, keys in bfloat16 until the chunk is done."""
    text = Text()
    wide, _ = one_rope_attention(
        *text.operands(text.pages(jnp.bfloat16), 0, LENGTH),
        window=None, eps=1e-5, profile=NumericsProfile(), backend=backend,
    )  # fmt: skip
    want, _ = text.outputs(backend, CHUNKS["decode"])
    rows = (np.asarray(wide)[0] != want).any(axis=(1, 2))
    assert rows.mean() > 0.9, "unrounded keys changed hardly a row"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_and_other_channels_attend_to_rounded_keys(backend):
    for channels, window in ((64, 50), (128, None)):
        text = Text(1, channels)
        out, _ = text.outputs(backend, [100, 40], window)
        assert_bitwise_equal(
            out, text.rounded(backend, window), claim="attention over rounded entries"
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_writes_nothing_and_company_changes_nothing(backend):
    text = Text()
    qkv, rotation, place = text.operands(text.pages(jnp.uint8), 0, 4)
    options = {"window": None, "eps": 1e-5, "profile": PROFILE, "backend": backend}
    alone, one = one_rope_attention(qkv, rotation, place, **options)
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x]), (qkv, rotation._replace(gains=None)))
    positions = jnp.concatenate([jnp.full((1, 4), -1, jnp.int32), place.positions])
    table = jnp.concatenate([jnp.full((1, 3), 3, jnp.int32), jnp.asarray(TABLE)])
    both, two = one_rope_attention(
        batch[0], batch[1]._replace(gains=rotation.gains),
        CachePlace(place.pages, table, positions, 1), **options,
    )  # fmt: skip
    assert_bitwise_equal(np.asarray(both[1:]), np.asarray(alone), claim="batch-invariant")
    assert_bitwise_equal(np.asarray(two), np.asarray(one), claim="padding writes nothing")
    assert not np.asarray(both[0]).any()


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_the_reference_keeps_the_bits_that_a_gpu_is_asked_for(name):
    assert digest_of(operation_case(name)(Backend.REFERENCE)) == GOLDEN["cases"][name]
