# SPDX-License-Identifier: Apache-2.0
"""Pages of float8 in the kernels of Hopper have the bits of the same pages in bfloat16.

Interpreted on a CPU, then on a GPU.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.models.abstract import why_unsupported
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.attention import sm90, sm90_float8_pages, sm90_prefill
from detjax.pallas_kernels.attention.api import attention
from detjax.pallas_kernels.attention.sm90_decode_spread import SPREAD_CHANNELS
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.float8_cache import widened
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope import sm90 as rope_sm90
from detjax.pallas_kernels.rope.api import rope_into_cache
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.testing.bitwise import assert_bitwise_equal, count_different_bits
from detjax.testing.dummies import dummy_config
from detjax.testing.operation_cases import answer_cases, digest_of, operation_case

PROFILE = NumericsProfile(kv_cache_dtype="fp8_e4m3")
BF16 = jnp.dtype(jnp.bfloat16)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "float8_cache_bits.json").read_text())
"""Digests of the backend `reference`."""
NOT_A_NUMBER = 0x7F
"""The bits of a float8 that is none, where nobody has written."""


class Sequences:
    """Queries of some sequences, and their cache in float8; what nobody has written is no number.

    `contexts` are lengths with the new tokens, 0 for padding.
    """

    def __init__(self, contexts, *, query_len=1, kv_heads=2, group=4, channels=128, seed=0):
        rng, batch = np.random.default_rng(seed), len(contexts)
        num_pages = max(1, *(-(-c // 128) for c in contexts))
        shape = (2, batch * num_pages + 1, 2, kv_heads, 128, channels)
        pages = rng.integers(0x18, 0x50, shape).astype(np.uint8)
        pages |= rng.integers(0, 2, shape).astype(np.uint8) << 7
        table = rng.permutation(batch * num_pages + 1)[:-1].reshape(batch, num_pages)
        for context, sequence in zip(contexts, table, strict=True):
            for block, page in enumerate(sequence):
                pages[1, page, :, :, max(context - 128 * block, 0) :] = NOT_A_NUMBER
        positions = np.asarray(contexts)[:, None] - query_len + np.arange(query_len)
        positions = np.where(np.asarray(contexts)[:, None] > 0, np.maximum(positions, -1), -1)
        num_tokens, heads = batch * query_len, kv_heads * group
        draw = lambda *dims: jnp.asarray(rng.standard_normal(dims).astype(ml_dtypes.bfloat16))  # noqa: E731
        self.q = draw(batch, query_len, heads, channels)
        self.qkv = 3 * draw(num_tokens, heads + 2 * kv_heads, channels)
        angles = rng.uniform(0, 6, (num_tokens, channels // 2)).astype(np.float32)
        gains = draw(channels), draw(channels)
        cos, sin = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
        self.rotation = Rotation(cos, sin, gains)
        self.heads = heads
        self.place = CachePlace(
            jnp.asarray(pages), jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32),
            jnp.int32(1),
        )  # fmt: skip

    @property
    def wide(self) -> CachePlace:
        """The same cache in bfloat16."""
        return self.place._replace(pages=widened(self.place.pages, BF16))

    def decoded(self, place: CachePlace, *, interpret: bool, **options: Any):
        config = sm90.DecodeConfig(reads_float8=place.pages.dtype == jnp.uint8, **options)
        return sm90.decode(self.q, place, config=config, is_interpreted=interpret)

    def prefilled(self, place: CachePlace, *, interpret: bool, window=None, **options: Any):
        config = sm90_prefill.PrefillConfig(reads_float8=place.pages.dtype == jnp.uint8, **options)
        return sm90_prefill.prefill(
            self.q, place, window=window, config=config, is_interpreted=interpret
        )

    def new_tokens(self, *, interpret: bool, **options: Any) -> tuple:
        """Rotation, write and attention in one kernel: output and cache."""
        return sm90.decode_new_token(
            self.qkv, self.rotation, self.place, eps=1e-5, is_interpreted=interpret,
            num_heads=self.heads, config=sm90.DecodeConfig(reads_float8=True, **options),
        )  # fmt: skip

    def new_tokens_apart(self, *, interpret: bool) -> tuple:
        """Rotation and write, then attention in bfloat16 over what was written."""
        pages_ref = jax.new_ref(self.place.pages)
        q = rope_sm90.qk_norm_rope_write(
            self.qkv, self.rotation, self.place._replace(pages=pages_ref), num_heads=self.heads,
            eps=1e-5, interpret=interpret,
        )  # fmt: skip
        pages = jax.freeze(pages_ref)
        q = q.reshape(self.q.shape)
        wide = self.place._replace(pages=widened(pages, BF16))
        out = sm90.decode(q, wide, config=sm90.DecodeConfig(), is_interpreted=interpret)
        return out, pages


DECODES: tuple[dict[str, Any], ...] = (
    {"cluster": 2, "scores_ahead": True},
    {"whole_sequences": True, "num_ctas": 2},
    {"num_compute": 2, "num_ctas": 2},
    {"cluster": 1},
)
NEW_TOKENS: tuple[dict[str, Any], ...] = (
    {"whole_sequences": True, "num_compute": 2, "num_ctas": 2},
    {"cluster": 2, "scores_ahead": True},
    {"num_compute": 2, "num_ctas": 2},
    {"cluster": 4, "spread": True, "keys_at_once": 32},
)
CONTEXTS = [600, 0, 128, 65, 1]


@pytest.mark.slow
@pytest.mark.parametrize("options", DECODES, ids=str)
def test_decode_has_the_bits_of_the_same_pages_in_bfloat16(options):
    case = Sequences(CONTEXTS[:3])
    actual = case.decoded(case.place, interpret=True, **options)
    assert_bitwise_equal(
        actual, case.decoded(case.wide, interpret=True, **options), claim="float8 is read exactly"
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", NEW_TOKENS, ids=str)
def test_new_tokens_are_rounded_before_anything_reads_them(options):
    case = Sequences(CONTEXTS[:3])
    actual, expected = (
        case.new_tokens(interpret=True, **options),
        case.new_tokens_apart(interpret=True),
    )
    assert_bitwise_equal(actual[1], expected[1], claim="what is written")
    assert_bitwise_equal(actual[0], expected[0], claim="what is read")


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "window"), [(64, None), (96, 100)])
def test_prefill_has_the_bits_of_the_same_pages_in_bfloat16(channels, window):
    case = Sequences([200, 70], query_len=70, channels=channels)
    actual = case.prefilled(case.place, interpret=True, window=window)
    expected = case.prefilled(case.wide, interpret=True, window=window)
    assert_bitwise_equal(actual, expected, claim="float8 is read exactly")


def test_models_with_it_are_taken_but_for_wide_heads():
    assert why_unsupported(dummy_config(head_dim=64), PROFILE, Backend.SM90, 1) is None
    wide = dummy_config(head_dim=256, hidden_size=512, num_heads=2, num_kv_heads=1)
    reason = why_unsupported(wide, PROFILE, Backend.SM90, 1)
    assert reason is not None and "256" in reason, reason


GPU = [pytest.mark.gpu, pytest.mark.invariance]


class TestOnHopper:
    """The kernels themselves."""

    pytestmark = GPU

    @pytest.mark.parametrize("channels", [64, 128])
    @pytest.mark.parametrize("options", DECODES, ids=str)
    def test_decode_has_the_bits_of_the_same_pages_in_bfloat16(self, options, channels):
        case = Sequences([*CONTEXTS, 512, 513, 1100], channels=channels)
        actual = case.decoded(case.place, interpret=False, **options)
        want = case.decoded(case.wide, interpret=False, **options)
        assert_bitwise_equal(actual, want, claim="float8 is read exactly")
        assert np.isfinite(np.asarray(actual).astype(np.float32)).all()

    @pytest.mark.parametrize("query_len", [2, 16])
    def test_verified_windows_have_the_bits_of_the_same_pages_in_bfloat16(self, query_len):
        case = Sequences([600, 0, 128, 1100, 16, 33], query_len=query_len)
        for options in ({"num_compute": 2}, {"whole_sequences": True}):
            actual = case.decoded(case.place, interpret=False, **options)
            want = case.decoded(case.wide, interpret=False, **options)
            assert_bitwise_equal(actual, want, claim="float8 is read exactly")

    @pytest.mark.parametrize("channels", [64, 128])
    @pytest.mark.parametrize("options", NEW_TOKENS, ids=str)
    def test_new_tokens_are_rounded_before_anything_reads_them(self, options, channels):
        if "spread" in options and channels not in SPREAD_CHANNELS:
            with pytest.raises(ValueError, match="must be one of .* to spread a split"):
                Sequences([1], channels=channels).new_tokens(interpret=False, **options)
            return
        case = Sequences([*CONTEXTS, 512, 513, 1100], channels=channels)
        actual = case.new_tokens(interpret=False, **options)
        expected = case.new_tokens_apart(interpret=False)
        assert_bitwise_equal(actual[1], expected[1], claim="what is written")
        assert_bitwise_equal(actual[0], expected[0], claim="what is read")

    @pytest.mark.parametrize(("channels", "window"), [(64, None), (96, 100), (128, None)])
    def test_prefill_has_the_bits_of_the_same_pages_in_bfloat16(self, channels, window):
        for query_len, contexts in ((70, [200, 70, 900]), (1000, [1000, 1300])):
            case = Sequences(contexts, query_len=query_len, channels=channels)
            actual = case.prefilled(case.place, interpret=False, window=window)
            expected = case.prefilled(case.wide, interpret=False, window=window)
            assert_bitwise_equal(actual, expected, claim="float8 is read exactly")

    def test_many_sequences_take_turns(self):
        """More runs than CTAs, each warpgroup with several, of lengths that differ."""
        contexts = [int(n) for n in np.random.default_rng(1).integers(1, 700, 96)]
        case = Sequences(contexts, kv_heads=8)
        options = {"whole_sequences": True, "num_compute": 2}
        actual = case.new_tokens(interpret=False, **options)
        expected = case.new_tokens_apart(interpret=False)
        assert_bitwise_equal(actual[1], expected[1], claim="what is written")
        assert_bitwise_equal(actual[0], expected[0], claim="what is read")

    @pytest.mark.parametrize("name", GOLDEN["cases"])
    def test_bits_are_those_of_the_reference(self, name):
        """That a CPU has computed: digests, as a GPU's machine may have no C++ compiler."""
        found = operation_case(name)(Backend.SM90)
        assert digest_of(found) == GOLDEN["cases"][name], [np.asarray(x).ravel()[:4] for x in found]

    @pytest.mark.parametrize("name", GOLDEN["answers"])
    def test_whole_answers_are_those_of_the_reference(self, name):
        """Together and alone, in large and small chunks."""
        case = answer_cases()[name]
        for sizes in ({"batch_size": 8, "prefill_chunk": 256}, {"batch_size": 1}):
            found = [one.digest() for one in case.answers(Backend.SM90, **sizes)]
            assert found == GOLDEN["answers"][name], sizes

    def test_drafts_are_verified_against_rounded_keys(self):
        name = "float8 cache, head 64, q/k norm"
        case = answer_cases()[name]
        config = EngineConfig(batch_size=4, prefill_chunk=64, max_len=384, mode="dvr")
        engine = Engine(case.make(Backend.SM90), config)
        found = [one.digest() for one in engine.generate(case.requests)]
        assert found == GOLDEN["answers"][name]

    def test_control_a_chunk_that_reads_its_own_unrounded_keys_differs(self):
        case = Sequences([200], query_len=200)
        q, pages = rope_into_cache(
            case.qkv, case.rotation, case.place, eps=1e-5, backend=Backend.SM90
        )
        exact = case.wide
        _, unrounded = rope_into_cache(
            case.qkv, case.rotation, exact, eps=1e-5, backend=Backend.SM90
        )
        q = q.reshape(case.q.shape)
        want, other = (
            attention(
                q, case.place._replace(pages=p), window=None, profile=PROFILE, backend=Backend.SM90
            )
            for p in (pages, unrounded)
        )
        rows = np.asarray(want != other).any(axis=(0, 2, 3))
        assert rows.mean() > 0.9


@pytest.mark.slow
@pytest.mark.control
@pytest.mark.filterwarnings("ignore:invalid value")  # of memory that nobody has written
def test_control_keys_that_are_left_out_show(monkeypatch):
    """The interpreted test sees pages of which a group of keys was not widened."""
    case = Sequences(CONTEXTS[:3])
    options = DECODES[0]
    want = case.decoded(case.wide, interpret=True, **options)
    widen = sm90_float8_pages.widen_page

    def widen_less(codes, page, last_group, is_interpreted):
        widen(codes, page, jnp.maximum(last_group - 1, 0), is_interpreted)

    monkeypatch.setattr(sm90_float8_pages, "widen_page", widen_less)
    jax.clear_caches()
    got = case.decoded(case.place, interpret=True, **options)
    jax.clear_caches()
    assert count_different_bits(got, want) > 0
