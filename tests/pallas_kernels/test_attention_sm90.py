# SPDX-License-Identifier: Apache-2.0
"""Attention on sm90: its logic on a CPU, its bits on a GPU."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.attention import (
    portable,
    sm90,
    sm90_decode_run,
    sm90_prefill,
)
from detjax.pallas_kernels.attention.sm90_decode_cluster import merges_in_memory
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.output_gate.sm90 import sigmoid_gate
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope import sm90 as rope_sm90
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.testing.bitwise import assert_bitwise_equal, count_different_bits
from detjax.testing.cases import quick_and_slow
from detjax.testing.operation_cases import digest_of, operation_case
from detjax.testing.shapes import LAYOUTS

GOLDEN = Path(__file__).parents[1] / "golden"
PROFILE = NumericsProfile()
HOPPER_LAYOUTS = [name for name, layout in LAYOUTS.items() if layout.channels in sm90.CHANNELS]
CONTEXTS = (1, 127, 128, 129, 511, 512, 513, 4096, 20000)


def normal(shape, seed, scale=1.0):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
    return jnp.asarray(x, jnp.bfloat16)


def make_cache(num_pages, kv_heads, channels, seed=0):
    """One sequence's pages in random order, and a page of NaN that belongs to nobody."""
    order = np.random.default_rng(seed).permutation(num_pages + 1)
    pages = normal((1, num_pages + 1, 2, kv_heads, 128, channels), seed + 1)
    pages = pages.at[0, order[-1]].set(jnp.nan)
    return pages, jnp.asarray(order[None, :-1], jnp.int32)


def without_future(pages, table, length):
    """NaN wherever nothing has been written yet."""
    page, offset = divmod(length, 128)
    if offset:
        pages = pages.at[0, table[0, page], :, :, offset:].set(jnp.nan)
        page += 1
    return pages.at[0, table[0, page:]].set(jnp.nan)


def first_layer(pages, table, positions) -> CachePlace:
    return CachePlace(pages, table, jnp.asarray(positions, jnp.int32), layer=jnp.int32(0))


def attend(q, pages, table, positions, window=None, sinks=None, is_interpreted=False):
    return sm90.attention(
        q, first_layer(pages, table, positions), window=window, profile=PROFILE, sinks=sinks,
        is_interpreted=is_interpreted,
    )  # fmt: skip


def prefill(q, pages, table, positions, window=None, sinks=None, **options):
    return sm90_prefill.prefill(
        q, first_layer(pages, table, positions), sinks, window=window,
        config=sm90_prefill.PrefillConfig(**options), is_interpreted=False,
    )  # fmt: skip


def decode(q, pages, table, positions, window=None, sinks=None, **options):
    assert window is None
    return sm90.decode(
        q, first_layer(pages, table, positions), sinks,
        config=sm90.DecodeConfig(**options), is_interpreted=False,
    )  # fmt: skip


SLOW = pytest.mark.slow

# On a CPU.


@pytest.mark.quick_cases("2048-llama3_8b-None")
@pytest.mark.parametrize(
    ("layout", "window"),
    quick_and_slow(
        [("phi3_mini", 2047), ("llama3_8b", None)], [(name, None) for name in HOPPER_LAYOUTS]
    ),
)
@pytest.mark.parametrize("query_len", quick_and_slow((1, 2048), (4, 100)))
def test_every_variant_lowers_for_hopper(layout, query_len, window):
    dims = LAYOUTS[layout]
    shapes = (
        jax.ShapeDtypeStruct((2, query_len, dims.num_heads, dims.channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 40, 2, dims.num_kv_heads, 128, dims.channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 16), jnp.int32),
        jax.ShapeDtypeStruct((2, query_len), jnp.int32),
    )

    def f(q, *place):
        return sm90.attention(q, CachePlace(*place, layer=1), window=window, profile=PROFILE)

    text = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    group = dims.num_heads // dims.num_kv_heads
    kernel = "prefill"
    if sm90.is_decode(query_len, group, dims.channels, window):
        is_merged = query_len == 1 and dims.channels <= 128
        kernel = "cluster" if is_merged else "splits"
    assert f"attention_{kernel}_sm90" in text


@pytest.mark.slow
def test_decode_lowers_for_any_batch_and_rows():
    pages = jax.ShapeDtypeStruct((1, 600, 2, 8, 128, 128), jnp.bfloat16)
    for batch, query_len, num_pages, kernel in (
        (64, 1, 9, "sequences"),
        (64, 16, 32, "sequences"),
        (64, 1, 33, "splits"),
        (1, 16, 9, "splits"),
        (1, 16, 4, "sequences"),
        (1, 1, 4, "cluster"),
        (1, 1, 9, "cluster"),
        (8, 1, 9, "cluster"),
        (16, 1, 9, "cluster"),
    ):
        shapes = (
            jax.ShapeDtypeStruct((batch, query_len, 32, 128), jnp.bfloat16),
            pages,
            jax.ShapeDtypeStruct((batch, num_pages), jnp.int32),
            jax.ShapeDtypeStruct((batch, query_len), jnp.int32),
        )
        text = jax.jit(attend).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert f"attention_{kernel}_sm90" in text
        assert ("attention_merge_sm90" in text) == (kernel == "splits")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """New tokens of each sequence, and the cache before them: NaN wherever nothing is written."""

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    gains: tuple | None
    pages: jax.Array
    table: jax.Array
    positions: jax.Array
    sinks: jax.Array | None = None
    num_behind: int = 0
    is_gated: bool = False

    @property
    def rotation(self):
        return Rotation(self.cos, self.sin, self.gains)

    @property
    def place(self):
        return CachePlace(self.pages, self.table, self.positions, jnp.int32(1))

    @property
    def num_heads(self) -> int:
        return self.qkv.shape[1] - 2 * self.pages.shape[3] - self.num_behind

    def with_gates(self, is_gated=False):
        """The same with a head behind the values for each query head: its gate, or nothing."""
        behind = normal((len(self.qkv), self.num_heads, self.qkv.shape[2]), 77)
        qkv = jnp.concatenate([self.qkv, behind], axis=1)
        return dataclasses.replace(self, qkv=qkv, num_behind=self.num_heads, is_gated=is_gated)

    def with_other_queries(self):
        """The same with angles of queries that are not those of keys."""
        cos, sin = self.cos, self.sin
        rows = (jnp.concatenate(pair, axis=1) for pair in ((cos, 1.5 * sin), (sin, 1.5 * cos)))
        return dataclasses.replace(self, **dict(zip(("cos", "sin"), rows, strict=True)))

    def apart(self, is_interpreted=False, **options):
        """Rotation and cache write, then attention, then gates."""
        channels = self.pages.shape[5]
        pages_ref = jax.new_ref(self.pages)
        q = rope_sm90.qk_norm_rope_write(
            self.qkv, self.rotation, self.place._replace(pages=pages_ref),
            num_heads=self.num_heads, eps=1e-5, interpret=is_interpreted,
        )  # fmt: skip
        pages = jax.freeze(pages_ref)
        q = q.reshape(*self.positions.shape, -1, channels)
        out = sm90.decode(
            q, self.place._replace(pages=pages), self.sinks, config=sm90.DecodeConfig(**options),
            is_interpreted=is_interpreted,
        )  # fmt: skip
        if self.is_gated:
            heads, gates = (x.reshape(len(self.qkv), -1) for x in (out, self.qkv))
            out = sigmoid_gate(heads, gates, interpret=is_interpreted).reshape(out.shape)
        return out, pages

    def at_once(self, is_interpreted=False, **options):
        """The same in one kernel."""
        return sm90.decode_new_token(
            self.qkv, self.rotation, self.place, sinks=self.sinks, eps=1e-5,
            num_heads=self.num_heads, config=sm90.DecodeConfig(**options),
            is_gated=self.is_gated, is_interpreted=is_interpreted,
        )  # fmt: skip


def new_tokens(contexts, *, kv_heads, group, channels, with_norm, seed=0, counts=None) -> NewTokens:
    """Sequences of these lengths, the new tokens included; 0 is padding. Pages in random order.

    `counts` says how many tokens of each are new, 1 without it.
    """
    rng, batch = np.random.default_rng(seed), len(contexts)
    counts = np.minimum(contexts, 1 if counts is None else counts)
    query_len = max(1, *counts)
    steps = np.arange(query_len)
    first = (np.array(contexts) - counts)[:, None]
    positions = np.where(steps < counts[:, None], first + steps, -1)
    num_pages = max(1, *(-(-c // 128) for c in contexts))
    pages = np.array(normal((2, batch * num_pages + 1, 2, kv_heads, 128, channels), seed + 1))
    table = rng.permutation(batch * num_pages + 1)[:-1].reshape(batch, num_pages)
    for num_old, sequence in zip(first[:, 0], table, strict=True):
        for block, page in enumerate(sequence):
            pages[1, page, :, :, max(num_old - 128 * block, 0) :] = np.nan
    angles = rng.standard_normal((batch * query_len, channels // 2))
    gains = tuple(1 + normal((channels,), seed + 2 + i, 0.1) for i in range(2))
    return NewTokens(
        qkv=normal((batch * query_len, kv_heads * (group + 2), channels), seed + 4, 2.0),
        cos=jnp.asarray(np.cos(angles), jnp.float32),
        sin=jnp.asarray(np.sin(angles), jnp.float32),
        gains=gains if with_norm else None,
        pages=jnp.asarray(pages),
        table=jnp.asarray(table, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
    )


def assert_same(actual, expected, claim):
    """Compare output and cache."""
    for what, a, b in zip(("output", "cache"), actual, expected, strict=True):
        assert_bitwise_equal(a, b, claim=f"{claim}: {what}")


FUSED: tuple[dict[str, Any], ...] = (
    {},
    {"scores_ahead": True},
    {"whole_sequences": True},
    {"cluster": 1},
    {"cluster": 2},
    {"cluster": 2, "scores_ahead": True},
    {"keys_at_once": 32},
    {"whole_sequences": True, "keys_at_once": 32},
    {"whole_sequences": True, "num_compute": 2, "keys_at_once": 32},
    {"whole_sequences": True, "num_compute": 2, "num_ctas": 2},
    {"num_compute": 2, "keys_at_once": 32},
    {"num_compute": 2, "num_ctas": 2},
    {"cluster": 2, "scores_ahead": True, "keys_at_once": 32},
    {"cluster": 4, "spread": True},
    {"cluster": 4, "spread": True, "keys_at_once": 32},
)
"""Ways to do a decode step in one kernel, or in two."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param(options, marks=() if i == 5 else SLOW) for i, options in enumerate(FUSED)],
    ids=str,
)
def test_new_tokens_inside_decode_have_the_bits_of_two_kernels(options):
    case = new_tokens([600, 0, 128], kv_heads=2, group=4, channels=128, with_norm=True)
    actual, expected = case.at_once(is_interpreted=True, **options), case.apart(is_interpreted=True)
    assert_same(actual, expected, "rotated inside attention is rotated before it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contexts", "kv_heads", "group", "cluster"),
    [
        ([600, 0, 128], 2, 2, 4),  # two turns, padding, one full page
        ([1300, 513], 1, 8, 4),  # three turns of a cluster
        ([1300, 513], 1, 8, 8),  # two splits at once
    ],
)
def test_new_tokens_of_wide_heads_in_a_cluster_have_the_bits_of_two_kernels(
    contexts, kv_heads, group, cluster
):
    case = new_tokens(contexts, kv_heads=kv_heads, group=group, channels=256, with_norm=True)
    actual = case.at_once(is_interpreted=True, cluster=cluster, spread=True, keys_at_once=32)
    expected = case.apart(is_interpreted=True)
    assert_same(actual, expected, "splits shared by a cluster and splits of a CTA each")
    other = case.apart(is_interpreted=True, blocks_per_split=2)
    assert count_different_bits(other[0], expected[0]) > 0  # control


@pytest.mark.parametrize(
    ("options", "cluster"),
    [
        ({}, 8),
        ({"kv_heads": 4, "group": 2}, 8),
        ({"table_len": 4}, 4),  # one split
        ({"table_len": 16}, 8),
        ({"table_len": 17}, 0),  # no room for the partial results of five splits
        ({"batch": 6}, 8),
        ({"batch": 7}, 4),
        ({"batch": 7, "table_len": 9}, 0),  # three splits would take three turns
        ({"batch": 12}, 4),
        ({"batch": 13}, 0),  # more CTAs than are sure to be resident
        ({"group": 16}, 0),
        ({"is_new": False}, 0),
        ({"has_sinks": True}, 0),
        ({"reads_float8": True}, 0),
        ({"query_len": 2}, 0),
    ],
    ids=str,
)
def test_few_new_tokens_of_wide_heads_share_splits(options, cluster):
    asked: dict[str, Any] = {
        "batch": 1, "query_len": 1, "kv_heads": 2, "group": 8, "channels": 256, "table_len": 8,
        "per_split": 4, "is_new": True,
    }  # fmt: skip
    config = sm90.decode_config(**asked | options)
    assert (config.cluster, config.spread) == (cluster, cluster > 0)
    assert not config.scores_ahead and not config.whole_sequences and config.num_compute == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contexts", "counts", "kv_heads", "group", "channels", "cluster"),
    [
        ([600, 0, 130], [3, 3, 3], 2, 4, 128, 1),  # the last one's window is on two pages
        ([514, 2, 257], [4, 2, 1], 1, 4, 128, 2),  # on two splits, all there is, one token
        ([516, 0, 130], [5, 1, 2], 1, 3, 64, 2),  # two rows a vector, of three of a token
        ([1030], [8], 1, 1, 128, 4),
    ],
)
def test_windows_inside_decode_have_the_bits_of_two_kernels(
    contexts, counts, kv_heads, group, channels, cluster
):
    case = new_tokens(
        contexts, counts=counts, kv_heads=kv_heads, group=group, channels=channels, with_norm=True
    )
    actual = case.at_once(is_interpreted=True, cluster=cluster, keys_at_once=32)
    assert_same(actual, case.apart(is_interpreted=True), "a window in one launch and in three")
    assert np.asarray(actual[0])[np.asarray(case.positions) >= 0].astype(np.float32).all()


@pytest.mark.parametrize(
    ("options", "cluster"),
    [
        ({}, 8),
        ({"batch": 8}, 2),
        ({"table_len": 36}, 0),  # nine splits
        ({"reads_float8": True}, 0),
        ({"has_sinks": True}, 0),
        ({"channels": 256}, 0),
        ({"is_new": False}, 0),
    ],
    ids=str,
)
def test_windows_have_one_launch_where_a_gpu_has_run_it(options, cluster):
    asked: dict[str, Any] = {
        "batch": 1, "query_len": 5, "kv_heads": 8, "group": 4, "channels": 128, "table_len": 32,
        "per_split": 4, "is_new": True,
    }  # fmt: skip
    assert sm90.decode_config(**asked | options).cluster == cluster


@pytest.mark.slow
def test_new_tokens_whose_queries_have_other_angles_have_the_bits_of_two_kernels():
    plain = new_tokens([200, 0], kv_heads=2, group=4, channels=128, with_norm=False)
    case = plain.with_other_queries()
    expected = case.apart(is_interpreted=True)
    assert count_different_bits(expected[0], plain.apart(is_interpreted=True)[0]) > 0
    assert_same(case.at_once(is_interpreted=True), expected, "two kinds of angles")


@pytest.mark.slow
def test_what_stands_behind_values_is_not_read():
    case = new_tokens([200, 0], kv_heads=2, group=4, channels=128, with_norm=True)
    gated = case.with_gates()
    assert gated.qkv.shape[1] == 2 * 8 + 2 * 2
    expected = case.apart(is_interpreted=True)
    assert_same(gated.apart(is_interpreted=True), expected, "two kernels")
    assert_same(gated.at_once(is_interpreted=True), expected, "one kernel")


@pytest.mark.parametrize(
    ("channels", "group", "counts", "options"),
    quick_and_slow(
        [(64, 4, [3, 1, 3], {"cluster": 2})],  # two heads a vector, windows
        [
            (256, 2, [1, 1, 1], {"cluster": 4, "spread": True}),
            (128, 4, [1, 1, 1], {"cluster": 2}),
            (128, 4, [1, 1, 1], {}),  # a launch for the gates
        ],
    ),
    ids=str,
)
def test_gates_inside_decode_have_the_bits_of_a_launch_of_their_own(
    channels, group, counts, options
):
    case = new_tokens(
        [200, 0, 129], counts=counts, kv_heads=2, group=group, channels=channels, with_norm=True
    )
    gated = case.with_gates(is_gated=True)
    expected = gated.apart(is_interpreted=True)
    assert_same(gated.at_once(is_interpreted=True, **options), expected, f"gates, {options}")
    ungated = case.apart(is_interpreted=True)
    assert count_different_bits(ungated[0], expected[0]) > 0  # control


ENDS = (1, 32, 33, 64, 65, 96, 97, 128)
"""Keys written of a sequence's last page, around those that are loaded at once."""


AT_ENDS = [300, *ENDS[:3], *(128 + end for end in ENDS)]


def attend_at_ends(keys_at_once: int, num_compute: int = 1) -> np.ndarray:
    """Sequences of one page, and of a full one and another that ends there, after a longer one."""
    case = new_tokens(AT_ENDS, kv_heads=1, group=2, channels=64, with_norm=False)
    out, _ = case.at_once(
        is_interpreted=True, whole_sequences=True, num_ctas=2, keys_at_once=keys_at_once,
        num_compute=num_compute,
    )  # fmt: skip
    return np.asarray(out)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("keys_at_once", quick_and_slow([32], [64]))
def test_loading_the_written_keys_of_a_last_page_is_bitwise_schedule_invariant(keys_at_once):
    whole_pages = attend_at_ends(128)
    assert np.isfinite(whole_pages.astype(np.float32)).all()
    assert_bitwise_equal(
        attend_at_ends(keys_at_once), whole_pages, claim=f"{keys_at_once=} is for speed alone"
    )
    assert_bitwise_equal(
        attend_at_ends(keys_at_once, num_compute=2),
        whole_pages,
        claim="which warpgroup takes a sequence is for speed alone",
    )


@pytest.mark.slow
@pytest.mark.control
def test_control_a_load_that_leaves_out_written_keys_differs(monkeypatch):
    whole_pages = attend_at_ends(128)
    load = sm90_decode_run.load_written

    def load_less(num_written, *refs, at_once):
        load(jnp.maximum(num_written - at_once, 1), *refs, at_once=at_once)

    monkeypatch.setattr(sm90_decode_run, "load_written", load_less)
    jax.clear_caches()
    few = attend_at_ends(32)
    jax.clear_caches()
    differs = (few.view(np.uint16) != whole_pages.view(np.uint16)).any(axis=(1, 2, 3))
    # The new token is not among what is loaded.
    loaded = [-(-max((n - 1) % 128 + 1 - 32, 1) // 32) * 32 for n in AT_ENDS]
    assert differs.tolist() == [
        count < (n - 1) % 128 for count, n in zip(loaded, AT_ENDS, strict=True)
    ]
    assert differs.any()


def check_against_portable(
    positions, *, kv_heads, group, channels, window=None, run=attend, has_sinks=False, softcap=None
):
    """Compare with the portable kernel; what nobody may read is NaN."""
    positions = np.asarray(positions, np.int32)
    batch, num_pages = len(positions), 12
    table = np.random.default_rng(0).permutation(batch * num_pages).reshape(batch, num_pages)
    pages = np.array(normal((1, batch * num_pages, 2, kv_heads, 128, channels), 1))
    for row, sequence in zip(positions, table, strict=True):
        seen = row[row >= 0]
        for block, page in enumerate(sequence):
            stop = max(seen, default=-1) + 1 - 128 * block
            pages[0, page, :, :, max(stop, 0) :] = np.nan
            if window is not None and len(seen) and min(seen) - window + 1 >= 128 * (block + 1):
                pages[0, page] = np.nan
    operands = (jnp.asarray(pages), jnp.asarray(table, jnp.int32), jnp.asarray(positions))
    q = normal((*positions.shape, kv_heads * group, channels), 2)
    sinks = {"sinks": normal((kv_heads * group,), 3, 4.0)} if has_sinks else {}
    actual = run(q, *operands, window=window, is_interpreted=True, **sinks)
    place = CachePlace(*operands, layer=0)
    expected = portable.attention(
        q, place, window=window, profile=PROFILE, softcap=softcap, **sinks
    )
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if has_sinks or softcap:  # The probe: without them the outputs are others.
        bare = portable.attention(q, place, window=window, profile=PROFILE)
        assert np.linalg.norm(np.asarray(bare, np.float64) - b) > 2**-4 * np.linalg.norm(b)
    assert np.linalg.norm(b) > 0
    assert np.linalg.norm(a - b) <= 2**-8 * np.linalg.norm(b)
    assert (a[positions < 0] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "kv_heads", "group", "channels", "window"),
    [
        pytest.param([[600], [100]], 2, 2, 64, None, id="decode", marks=SLOW),
        pytest.param([[700], [1290]], 1, 4, 64, 300, id="decode-window", marks=SLOW),
        pytest.param(
            [[510, 511, 512], [5, 6, -1]], 2, 3, 64, None, id="verify-odd-group", marks=SLOW
        ),
        pytest.param([[700, 701, 702], [511, 512, -1]], 1, 4, 96, 130, id="verify-window-96"),
        pytest.param([[-1], [0]], 2, 3, 128, None, id="padding", marks=SLOW),
        pytest.param([[600], [100]], 1, 2, 256, None, id="decode-256", marks=SLOW),
        pytest.param([[510, 511, 512], [5, -1, -1]], 1, 3, 256, None, id="verify-256", marks=SLOW),
        pytest.param([[700], [290]], 1, 4, 256, 300, id="decode-window-256", marks=SLOW),
    ],
)
def test_few_rows_agree_with_portable(positions, kv_heads, group, channels, window):
    check_against_portable(
        positions, kv_heads=kv_heads, group=group, channels=channels, window=window
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "kv_heads", "group", "channels", "window"),
    [
        pytest.param([[1300], [-1], [5]], 2, 8, 64, None, id="decode"),
        pytest.param([[700], [1290]], 1, 8, 64, 128, id="decode-window"),
        pytest.param([[510, 511, 512], [5, 6, -1]], 2, 3, 64, None, id="verify-odd"),
        pytest.param([[510, 511, 512], [5, 6, -1]], 2, 4, 64, 128, id="verify-window"),
        pytest.param(np.arange(70)[None] + np.array([[500], [0]]), 1, 4, 64, 128, id="prefill"),
        pytest.param([[1300], [-1], [5]], 1, 8, 256, None, id="decode-256"),
    ],
)
def test_sinks_agree_with_portable(positions, kv_heads, group, channels, window):
    """Merged by the second kernel of decode, or by the one of prefill and of windows."""
    check_against_portable(
        positions, kv_heads=kv_heads, group=group, channels=channels, window=window, has_sinks=True
    )


def test_schedules_that_merge_in_a_cta_refuse_sinks():
    dims = jnp.zeros((1, 1, 8, 64), jnp.bfloat16), jnp.zeros((1, 4, 2, 1, 128, 64), jnp.bfloat16)
    q, pages = dims
    place = first_layer(pages, jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    config = sm90.DecodeConfig(whole_sequences=True)
    with pytest.raises(ValueError, match="has no sinks"):
        sm90.decode(q, place, jnp.zeros(8), config=config, is_interpreted=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "kv_heads", "group", "channels"),
    [
        pytest.param([[1300], [-1], [512]], 2, 4, 64, id="decode"),
        pytest.param([[510, 511, 512], [5, 6, -1]], 2, 3, 128, id="verify-odd-group", marks=SLOW),
    ],
)
def test_decode_of_whole_sequences_agrees_with_portable(positions, kv_heads, group, channels):
    def run(q, pages, table, positions, window, is_interpreted):
        config = sm90.DecodeConfig(whole_sequences=True)
        place = first_layer(pages, table, positions)
        return sm90.decode(q, place, config=config, is_interpreted=is_interpreted)

    check_against_portable(positions, kv_heads=kv_heads, group=group, channels=channels, run=run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "channels", "window"),
    [
        pytest.param([[600], [100]], 64, None, id="decode"),
        pytest.param(np.arange(70)[None] + 300, 128, 200, id="prefill"),
        pytest.param([[600, 601]], 256, None, id="verify-256"),
    ],
)
def test_soft_caps_agree_with_portable(positions, channels, window):
    cap = 3.0  # scores have a spread of 1 to 2

    def run(q, pages, table, positions, window, is_interpreted):
        return sm90.attention(
            q, first_layer(pages, table, positions), window=window, profile=PROFILE, softcap=cap,
            is_interpreted=is_interpreted,
        )  # fmt: skip

    check_against_portable(
        positions, kv_heads=1, group=2, channels=channels, window=window, run=run, softcap=cap
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cluster": 2}, "merged by a second kernel"),
        ({"whole_sequences": True}, "merged by a second kernel"),
        ({"num_compute": 2}, "one warpgroup a CTA"),
        ({"scores_ahead": True}, "no scores "),
    ],
    ids=str,
)
def test_schedules_that_wide_heads_do_not_take_are_refused(options, says):
    q, pages = (
        jnp.zeros((1, 1, 2, 256), jnp.bfloat16),
        jnp.zeros((1, 1, 2, 1, 128, 256), jnp.bfloat16),
    )
    place = first_layer(pages, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(ValueError, match=says):
        sm90.decode(q, place, config=sm90.DecodeConfig(**options), is_interpreted=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "window"), quick_and_slow([(96, 200)], [(64, None), (256, 200)])
)
def test_prefill_agrees_with_portable(channels, window):
    steps = np.arange(70)
    positions = np.stack([steps + 500, np.where(steps < 40, steps + 100, -1)])
    check_against_portable(positions, kv_heads=1, group=2, channels=channels, window=window)


def test_unsupported_combinations_are_refused():
    pages, table = make_cache(1, 1, 64)
    positions = jnp.zeros((1, 1), jnp.int32)
    q = normal((1, 1, 1, 64), 0)
    with pytest.raises(NotImplementedError, match="float16"):
        attend(q.astype(jnp.float16), pages, table, positions)
    with pytest.raises(NotImplementedError, match="channels"):
        attend(q[..., :8], pages[..., :8], table, positions)


# On a GPU.


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt of the longest context, prefilled at once."""

    q: jax.Array
    pages: jax.Array
    table: jax.Array
    positions: np.ndarray
    window: int | None
    sinks: jax.Array | None
    out: jax.Array

    @property
    def place(self):
        return self.table, self.positions, self.window, self.sinks

    def rows(self, at, run=attend, positions=None, **options):
        """Attend again from the rows at positions `at`, [B, T], a sequence each."""
        at = np.asarray(at)
        table = jnp.repeat(self.table, len(at), 0)
        positions = at if positions is None else positions
        return run(self.q[0, at], self.pages, table, positions, self.window, self.sinks, **options)

    def part(self, at: slice, pages):
        """Attend again from consecutive rows, over a cache without what comes after them."""
        positions = self.positions[:, at]
        return attend(self.q[:, at], pages, self.table, positions, self.window, self.sinks)


NARROW = (
    ("llama3_8b", None), ("llama3_8b", 700), ("qwen2_0b5", None), ("qwen2_0b5", 130),
    ("phi3_mini", 2047), ("gpt_oss_20b", None), ("gpt_oss_20b", 128),
)  # fmt: skip
WIDE = ("gemma3_4b", None), ("gemma3_4b", 1024), ("qwen3_5_4b", None)
"""Layouts and windows of prompts: heads of up to 128 channels, and of 256."""


def prompt_name(param) -> str:
    return f"{param[0]}-{param[1]}"


def prompts(*params):
    """Parametrise `whole` by these alone."""
    return pytest.mark.parametrize("whole", params, ids=prompt_name, indirect=True)


@pytest.fixture(scope="module", params=[*NARROW, *WIDE], ids=prompt_name)
def whole(request):
    """Of gpt-oss with sinks; its 8 heads make a tile of 8 rows of each for up to 8 tokens."""
    layout, window = request.param
    dims = LAYOUTS[layout]
    sinks = normal((dims.num_heads,), 8, 3.0) if layout == "gpt_oss_20b" else None
    longest = CONTEXTS[-1]
    pages, table = make_cache(-(-longest // 128), dims.num_kv_heads, dims.channels)
    pages = without_future(pages, table, longest)
    q = normal((1, longest, dims.num_heads, dims.channels), 7, 2.0)
    positions = np.arange(longest)[None]
    out = prefill(q, pages, table, positions, window, sinks)
    return Prompt(
        q=q, pages=pages, table=table, positions=positions, window=window, sinks=sinks, out=out
    )


@pytest.mark.gpu
@pytest.mark.invariance
def test_prefill_is_bitwise_run_invariant(whole):
    again = prefill(whole.q, whole.pages, *whole.place)
    assert_bitwise_equal(again, whole.out, claim="the same prefill twice has the same bits")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("num_rows", [1, 5, 8, 9])
def test_decode_and_verify_are_bitwise_path_consistent(whole, context, num_rows):
    at = slice(max(context - num_rows, 0), context)
    actual = whole.part(at, without_future(whole.pages, whole.table, context))
    assert_bitwise_equal(
        actual, whole.out[:, at], claim=f"{num_rows} rows ending at {context} are the prefill's"
    )


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("context", [100_000, 131_072])
def test_long_contexts_are_bitwise_path_consistent(context):
    dims, num_pages, num_rows = LAYOUTS["llama3_8b"], -(-context // 128), 300
    order = np.random.default_rng(0).permutation(num_pages)[None]
    keys = jax.random.split(jax.random.key(0))
    shape = (1, num_pages, 2, dims.num_kv_heads, 128, dims.channels)
    pages = without_future(jax.random.normal(keys[0], shape, jnp.bfloat16), order, context)
    q = 2 * jax.random.normal(keys[1], (1, num_rows, dims.num_heads, dims.channels), jnp.bfloat16)
    positions = np.arange(context - num_rows, context)[None]
    table = jnp.asarray(order, jnp.int32)
    chunk = attend(q, pages, table, positions)
    for count in (1, 5, 129):
        actual = attend(q[:, -count:], pages, table, positions[:, -count:])
        assert_bitwise_equal(
            actual, chunk[:, -count:], claim=f"{count} rows ending at {context} are the chunk's"
        )


@pytest.mark.gpu
@pytest.mark.invariance
def test_prefill_is_bitwise_schedule_invariant(whole):
    parts, start = [], 0
    for size in (100, 33, 256, 1000, 17, 6000, whole.out.shape[1]):
        stop = min(start + size, whole.out.shape[1])
        cut = without_future(whole.pages, whole.table, stop)
        at = slice(start, stop)
        parts.append(whole.part(at, cut))
        start = stop
    assert_bitwise_equal(
        jnp.concatenate(parts, axis=1), whole.out, claim="chunks of a prompt are the whole prompt"
    )


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("order", [range(8), (3, 6, 0, 7, 1, 5, 2, 4)], ids=["sorted", "mixed"])
def test_decode_is_bitwise_batch_invariant(whole, order):
    at = np.array([1, 4096, 129, 700, 512, 513, 20000, 2000])[list(order)] - 1
    actual = whole.rows(at[:, None])
    assert_bitwise_equal(actual[:, 0], whole.out[0, at], claim="a row alone is the row in a batch")


@pytest.mark.gpu
@pytest.mark.invariance
def test_decode_is_bitwise_run_invariant(whole):
    at = np.array([1, 4096, 129, 700, 512, 513, 20000, 2000])[:, None] - 1
    launches = [whole.rows(at) for _ in range(100)]
    for launch in launches:
        assert_bitwise_equal(launch[:, 0], whole.out[0, at[:, 0]], claim="a launch is any launch")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("query_len", [4, 90])
def test_padding_leaves_no_trace(whole, query_len):
    at = np.stack([np.arange(x - query_len, x) for x in (600, 5000, 128, 515)])
    positions = at.copy()
    positions[1, query_len // 2 :] = -1
    positions[2] = -1
    actual = whole.rows(at, positions=positions)
    rows = whole.out[0, at]
    expected = jnp.where((positions >= 0)[:, :, None, None], rows, jnp.zeros_like(rows))
    assert_bitwise_equal(actual, expected, claim="padded rows are +0 and change no other row")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("options", [{"num_ctas": 132}, {"num_ctas": 5}], ids=str)
@prompts(*WIDE)
def test_schedules_of_prefill_of_wide_heads_have_the_same_bits(whole, options):
    actual = prefill(whole.q, whole.pages, *whole.place, **options)
    assert_bitwise_equal(actual, whole.out, claim=f"{options} is a choice for speed alone")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("options", [{"merge_unroll": (4, 1)}, {"num_ctas": 5}, {"stages": 2}])
@prompts(WIDE[0], WIDE[2])
def test_schedules_of_decode_of_wide_heads_have_the_same_bits(whole, options):
    at = np.array([1, 4096, 129, 700, 512, 513, 20000, 2000]) - 1
    actual = whole.rows(at[:, None], run=decode, **options)
    assert_bitwise_equal(
        actual[:, 0], whole.out[0, at], claim=f"{options} is a choice for speed alone"
    )


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("options", [{"num_stages": 3}, {"num_ctas": 132, "query_buffers": 2}])
@prompts(*NARROW)
def test_schedules_of_prefill_have_the_same_bits(whole, options):
    actual = prefill(whole.q, whole.pages, *whole.place, **options)
    assert_bitwise_equal(actual, whole.out, claim=f"{options} is a choice for speed alone")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize(
    "options",
    [
        {"merge_unroll": (4, 1)},
        {"num_ctas": 5},
        {"stages": 3},
        {"whole_sequences": True},
        {"whole_sequences": True, "num_ctas": 5},
        {"scores_ahead": True},
        {"num_compute": 2},
        {"num_compute": 2, "num_ctas": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "whole", [("llama3_8b", None), ("qwen2_0b5", None)], ids=lambda p: p[0], indirect=True
)
def test_schedules_of_decode_have_the_same_bits(whole, options):
    """Windows and 96 channels go through prefill: `test_decode_and_verify...` covers them."""
    at = np.array([1, 4096, 129, 700, 512, 513, 20000, 2000]) - 1
    actual = whole.rows(at[:, None], run=decode, **options)
    assert_bitwise_equal(
        actual[:, 0], whole.out[0, at], claim=f"{options} is a choice for speed alone"
    )


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_new_tokens_inside_decode_are_bitwise_schedule_invariant(group, channels, with_norm):
    contexts = [1, 127, 128, 129, 0, 511, 512, 513, 1100, 1500]
    case = new_tokens(contexts, kv_heads=3, group=group, channels=channels, with_norm=with_norm)
    expected = case.apart()
    if group * channels >= sm90.LANES:
        assert_same(case.apart(cluster=2, scores_ahead=True), expected, "merged in a cluster")
    for options in (*FUSED, {"cluster": 8, "scores_ahead": True}):
        if "cluster" in options and group * channels < sm90.LANES:
            continue
        if "spread" in options and channels != 128:
            continue
        assert_same(case.at_once(**options), expected, f"one kernel, {options}")
    assert_same(case.with_gates().at_once(), expected, "heads behind the values")
    gated = case.with_gates(is_gated=True)
    for options in ({}, {"cluster": 2}, {"whole_sequences": True}):
        if group * channels >= sm90.LANES:
            assert_same(gated.at_once(**options), gated.apart(), f"gated, {options}")
    other = case.with_other_queries()
    assert_same(other.at_once(), other.apart(), "two kinds of angles")
    for few in ([1], [3000, 5, 4096]):
        case = new_tokens(few, kv_heads=3, group=group, channels=channels, with_norm=with_norm)
        assert_same(case.at_once(), case.apart(), f"one kernel or more, contexts {few}")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_new_tokens_of_wide_heads_are_bitwise_schedule_invariant(group, with_norm):
    contexts = [1, 127, 128, 129, 0, 511, 512, 513, 1100, 1500]
    case = new_tokens(contexts, kv_heads=3, group=group, channels=256, with_norm=with_norm)
    expected = case.apart()
    ways: tuple[dict[str, Any], ...] = (
        {}, {"keys_at_once": 32}, {"num_ctas": 5}, {"num_ctas": 1, "stages": 2},
        {"cluster": 4, "spread": True}, {"cluster": 8, "spread": True},
        {"cluster": 4, "spread": True, "keys_at_once": 32},
    )  # fmt: skip
    for options in ways:
        assert_same(case.at_once(**options), expected, f"one kernel, {options}")
    other = case.apart(blocks_per_split=2)
    assert count_different_bits(other[0], expected[0]) > 0  # control
    gated = case.with_gates(is_gated=True)
    expected = gated.apart()
    assert count_different_bits(case.apart()[0], expected[0]) > 0
    for options in ways:
        assert_same(gated.at_once(**options), expected, f"gated, {options}")


WIDE_CONTEXTS = (1, 2, 127, 128, 129, 480, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 4100, 8191)
"""Around the ends of blocks and splits; the last two are too long for a cluster to merge."""


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_seqs", range(1, 9))
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 8), (4, 2)])
def test_few_sequences_of_wide_heads_have_the_bits_of_two_kernels(kv_heads, group, num_seqs):
    """By the schedule that is chosen, which a table of up to four splits lets share them."""
    for longest in (2048, 8192):
        contexts = [n for n in WIDE_CONTEXTS if (n <= 2048) == (longest == 2048)]
        config = sm90.decode_config(
            batch=num_seqs, query_len=1, kv_heads=kv_heads, group=group, channels=256,
            table_len=longest // 128, per_split=4, is_new=True,
        )  # fmt: skip
        # Four splits in two turns, of clusters of eight.
        assert config.spread == (longest == 2048 and 8 * num_seqs * kv_heads <= sm90.MOST_CTAS)
        options: dict[str, Any] = dataclasses.asdict(config)
        for first in range(0, len(contexts), num_seqs):
            some = [int(n) for n in np.resize(contexts[first : first + num_seqs], num_seqs)]
            if num_seqs > 1:  # so that all tables have one length, and compile once
                some[-1] = longest
            case = new_tokens(some, kv_heads=kv_heads, group=group, channels=256, with_norm=True)
            expected = case.apart()
            for _ in range(5):
                assert_same(case.at_once(**options), expected, f"{config.cluster=}, {some}")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("cluster", [4, 8])
def test_steps_of_wide_heads_in_a_cluster_are_bitwise_run_invariant(cluster):
    """Steps on one cache, across the end of a page and of a split."""
    contexts = [505, 1, 250, 1000, 127, 0]
    one = new_tokens(contexts, kv_heads=2, group=8, channels=256, with_norm=True)
    other = one
    while int(one.positions.max()) < 128 * one.table.shape[1] - 1:
        positions = jnp.where(one.positions < 0, -1, one.positions + 1)
        out, pages = one.at_once(cluster=cluster, spread=True, keys_at_once=32)
        want, want_pages = other.apart()
        assert_same((out, pages), (want, want_pages), "a step is any step")
        one = dataclasses.replace(one, pages=pages, positions=positions)
        other = dataclasses.replace(other, pages=want_pages, positions=positions)


WIDE_BITS = json.loads((GOLDEN / "wide_heads_bits.json").read_text())["cases"]
"""Digests of the reference backend."""


@pytest.mark.gpu
@pytest.mark.golden
@pytest.mark.parametrize("name", WIDE_BITS)
def test_wide_heads_and_soft_caps_have_the_bits_of_the_reference(name):
    """That a CPU has computed: digests, as a GPU's machine may have no C++ compiler."""
    found = operation_case(name)(Backend.SM90)
    assert digest_of(found) == WIDE_BITS[name], [np.asarray(x).ravel()[:4] for x in found]


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 8])
def test_new_tokens_with_sinks_are_bitwise_path_consistent(num_seqs):
    """Splits of few and of many sequences, by one warpgroup or two, rotated inside or before."""
    contexts = np.resize([513, 1, 129, 1100, 512, 128, 700, 0], num_seqs)
    case = new_tokens(contexts, kv_heads=8, group=8, channels=64, with_norm=False)
    case = dataclasses.replace(case, sinks=normal((64,), 8, 3.0))
    expected = case.apart()
    for options in ({}, {"num_compute": 2, "keys_at_once": 32}, {"num_ctas": 5}):
        assert_same(case.at_once(**options), expected, f"one kernel, {options}")
        assert_same(case.apart(**options), expected, f"two kernels, {options}")
    bare = dataclasses.replace(case, sinks=None).apart()
    assert count_different_bits(bare[0], expected[0]) > 0  # control


WINDOW_HEADS = (1, 128), (2, 64), (3, 64), (4, 128), (7, 64), (8, 64), (8, 128)


def test_which_windows_merge_in_device_memory():
    """Of eight tokens and three splits, by the number of CTAs of a cluster."""
    found = {
        heads: [
            cluster
            for cluster in (1, 2, 4, 8)
            if merges_in_memory(
                query_len=8, group=heads[0], channels=heads[1], splits=3, cluster=cluster
            )
        ]
        for heads in WINDOW_HEADS
    }
    assert found == {
        (1, 128): [], (2, 64): [], (3, 64): [], (4, 128): [1], (7, 64): [1], (8, 64): [1],
        (8, 128): [1, 2],
    }  # fmt: skip
    # A single query goes through shared memory, whatever its heads are.
    assert not merges_in_memory(query_len=1, group=64, channels=128, splits=8, cluster=1)


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(("group", "channels"), WINDOW_HEADS)
def test_windows_inside_decode_are_bitwise_schedule_invariant(group, channels, with_norm):
    """Windows on one page and on two, on one split and on two, and padding among them.

    With up to eight tokens and three splits, partial results of one CTA for eight heads, and for
    four of 128 channels or seven of 64, need more than `PARTIAL_BYTES` and go through device
    memory; of two CTAs those for eight heads of 128 channels. All others go through shared memory.
    """
    contexts = [1, 127, 128, 130, 0, 511, 513, 516, 1100, 1500]
    case = new_tokens(
        contexts, counts=[1, 3, 8, 5, 8, 4, 2, 8, 1, 5], kv_heads=3, group=group,
        channels=channels, with_norm=with_norm,
    )  # fmt: skip
    expected = case.apart()
    for cluster in (1, 2, 4, 8):
        for _ in range(50):  # warps that write each other's rows do so once in a while
            assert_same(case.at_once(cluster=cluster), expected, f"windows, {cluster=}")
    loaded = case.at_once(cluster=4, keys_at_once=32)
    assert_same(loaded, expected, "windows, keys that are written")
    assert_same(case.with_gates().at_once(cluster=2), expected, "heads behind the values")
    gated = case.with_gates(is_gated=True)
    assert_same(gated.at_once(cluster=2), gated.apart(), "windows, gated")
    other = case.with_other_queries()
    assert count_different_bits(other.apart()[0], expected[0]) > 0
    assert_same(other.at_once(cluster=2), other.apart(), "windows, two kinds of angles")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("options", FUSED, ids=str)
def test_steps_in_place_are_bitwise_run_invariant(options):
    """Steps on one cache, each of which reads what the one before it wrote."""
    first = new_tokens(
        [1000, 1, 450, 513, 127, 0, 256, 900], kv_heads=8, group=4, channels=128, with_norm=False
    )
    one, other = first, first
    while int(one.positions.max()) < 128 * first.table.shape[1]:
        out, pages = one.at_once(**options)
        want, want_pages = other.apart()
        assert_same((out, pages), (want, want_pages), "a step is any step")
        positions = jnp.where(one.positions < 0, -1, one.positions + 1)
        one = dataclasses.replace(one, pages=pages, positions=positions)
        other = dataclasses.replace(other, pages=want_pages, positions=positions)


@pytest.mark.gpu
@pytest.mark.control
def test_control_another_split_length_differs(whole):
    at = whole.positions[:, :4096]
    operands = (whole.q[:, :4096], whole.pages, whole.table, at, whole.window, whole.sinks)
    other = prefill(*operands, blocks_per_split=8)
    assert count_different_bits(other, whole.out[:, :4096]) > 0


@pytest.mark.gpu
@pytest.mark.control
@pytest.mark.parametrize(
    "whole", [("gpt_oss_20b", None), ("gpt_oss_20b", 128)], ids=lambda p: str(p[1]), indirect=True
)
def test_control_rows_without_sinks_are_others(whole):
    at = np.array([1, 129, 513, 2000])[:, None] - 1
    bare = whole.rows(at, run=lambda *args: attend(*args[:5]))
    scale = np.abs(np.asarray(whole.out[0, at[:, 0]], np.float32)).max()
    distance = np.abs(np.asarray(bare[:, 0] - whole.out[0, at[:, 0]], np.float32)).max()
    assert distance > scale / 8


@pytest.mark.gpu
def test_prefill_is_close_to_float64(whole):
    q, pages, table, out = whole.q, whole.pages, whole.table, whole.out
    keys, values = (
        np.concatenate(
            [np.asarray(pages[0, p, i], np.float64) for p in np.asarray(table[0, :12])], axis=1
        )
        for i in range(2)
    )
    group = q.shape[2] // keys.shape[0]
    rows = np.array([0, 5, 127, 128, 130, 511, 512, 700, 1500])
    query, expected = np.asarray(q[0, rows], np.float64), np.zeros((9, *q.shape[2:]))
    for i, row in enumerate(rows):
        seen = slice(0 if whole.window is None else max(row - whole.window + 1, 0), row + 1)
        for h in range(q.shape[2]):
            scores = keys[h // group, seen] @ query[i, h] / np.sqrt(q.shape[3])
            weights = np.exp(scores - scores.max())
            sink = 0.0 if whole.sinks is None else np.exp(float(whole.sinks[h]) - scores.max())
            expected[i, h] = weights @ values[h // group, seen] / (weights.sum() + sink)
    error = np.linalg.norm(np.asarray(out[0, rows], np.float64) - expected)
    # Measured 1.3e-3: weights and output rounded to 8 bits, 2**-9 at most, each once.
    assert error <= 2.5e-3 * np.linalg.norm(expected)
