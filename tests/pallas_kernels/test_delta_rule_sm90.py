# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet of the sm90 backend: lowering and logic without a GPU, bits with one."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.delta_rule import api, portable, sm90
from detjax.pallas_kernels.delta_rule.operands import Filters, OutputNorm, ProjectedRows
from detjax.pallas_kernels.delta_rule.sm90_plan import begin_of, plan_sequences
from detjax.pallas_kernels.output_gate import api as gate_api
from detjax.pallas_kernels.output_gate import portable as portable_gate
from detjax.pallas_kernels.output_gate import sm90 as output_gate
from detjax.pallas_kernels.sm90_hardware import NUM_SMS
from detjax.testing.bitwise import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
)
from detjax.testing.cases import quick_and_slow
from detjax.testing.operation_cases import digest_of, operation_case

PAGE, BLOCK, WIDTH = 128, 64, 4
HYBRID_CASES = json.loads((Path(__file__).parents[1] / "golden" / "hybrid_bits.json").read_text())[
    "cases"
]
"""Digests of the reference backend."""

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


def struct(shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


class Sizes(NamedTuple):
    """Heads of keys, heads of values a head of keys, and channels."""

    keys: int
    group: int
    dim: int

    @property
    def mixed(self) -> int:
        return (2 + self.group) * self.dim

    @property
    def row(self) -> int:
        return -(-(self.mixed + 3 * self.group) // 8) * 8

    @property
    def state(self) -> tuple[int, ...]:
        return self.keys * self.group, self.dim, self.dim


QWEN35 = Sizes(keys=16, group=2, dim=128)
SMALL = Sizes(keys=2, group=2, dim=32)


class Layer(NamedTuple):
    """What a layer has beside its tokens."""

    filters: jax.Array
    gates: tuple[jax.Array, jax.Array]


def layer_of(sizes: Sizes, seed: int = 0, dtype=BF16) -> Layer:
    """A convolution, decays of a token to hundreds, and steps."""
    rng = np.random.default_rng(seed)
    filters = jnp.asarray(rng.standard_normal((sizes.keys, WIDTH, sizes.mixed)), dtype)
    decays, steps = (rng.uniform(-6, 1, (sizes.keys, sizes.group)) for _ in range(2))
    return Layer(filters, (jnp.asarray(decays, F32), jnp.asarray(steps, F32)))


def tokens_of(sizes: Sizes, length: int, seed: int, dtype=BF16) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((length, sizes.keys, sizes.row))
    drawn[..., sizes.mixed + 2 * sizes.group :] = 0
    return np.asarray(jnp.asarray(drawn, dtype))


def projected(sizes: Sizes, rows: np.ndarray) -> ProjectedRows:
    """Columns of a product whose rows these are; the gates are the values once more."""
    dim, group, count = sizes.dim, sizes.group, len(rows)
    bounds = 0, dim, 2 * dim, sizes.mixed, sizes.mixed + group, sizes.mixed + 2 * group
    q, k, v, b, a = (rows[..., i:j].reshape(count, -1) for i, j in itertools.pairwise(bounds))
    padding = np.full((count, 24), np.nan, rows.dtype)
    return ProjectedRows(
        columns=jnp.asarray(np.concatenate([q, k, v, v, b, a, padding], axis=1)),
        num_heads=sizes.keys, key_dim=dim, value_dim=dim, group=group, width=sizes.row,
    )  # fmt: skip


def as_weights(sizes: Sizes, filters: jax.Array) -> Filters:
    """Filters [K, Y, X] as weights have them."""
    parts = jnp.split(jnp.moveaxis(filters, 1, 2), [sizes.dim, 2 * sizes.dim], axis=1)
    return Filters(*(part.reshape(-1, 1, filters.shape[1]) for part in parts))


class Cache:
    """Pages of rows and states, not a number where nobody has written.

    With `has_norm` results are those behind the norm, and one token a sequence has its own kernel.
    """

    def __init__(
        self, sizes: Sizes, num_pages: int, *, dtype=BF16, kernels=sm90, has_norm=False, **options
    ):
        self.sizes, self.layer = sizes, layer_of(sizes, dtype=dtype)
        gain = np.random.default_rng(1).uniform(0.5, 2, sizes.dim)
        self.norm = OutputNorm(gain=jnp.asarray(gain, F32), eps=1e-6) if has_norm else None
        self.rows = jnp.full((2, num_pages, 1, sizes.keys, PAGE, sizes.row), jnp.nan, dtype)
        self.states = jnp.full((2, num_pages, PAGE // BLOCK, *sizes.state), jnp.nan, F32)
        self.kernels, self.options = kernels, options

    def step(self, rows: np.ndarray, positions: np.ndarray, table: np.ndarray) -> np.ndarray:
        """Results [B, T, H, C] of rows [B, T, K, X]."""
        batch, length = positions.shape
        rows, filters = rows.reshape(batch * length, *rows.shape[2:]), self.layer.filters
        if self.norm is not None:
            rows, filters = projected(self.sizes, rows), as_weights(self.sizes, filters)
        out, self.rows, self.states = self.kernels.delta_rule(
            rows, filters, self.layer.gates, self.rows, self.states, jnp.asarray(table, I32),
            jnp.asarray(positions, I32), 1, self.norm, **self.options,
        )  # fmt: skip
        return np.asarray(out).reshape(batch, length, *out.shape[1:])

    def run(self, tokens: np.ndarray, bounds, table, *, padded: int) -> np.ndarray:
        """Results of one sequence in chunks of at most `padded` tokens."""
        parts = []
        for low, high in itertools.pairwise(bounds):
            positions = np.full((1, padded), -1)
            positions[0, : high - low] = np.arange(low, high)
            rows = np.zeros((1, padded, *tokens.shape[1:]), tokens.dtype)
            rows[0, : high - low] = tokens[low:high]
            out = self.step(rows, positions, np.asarray(table)[None])[0]
            assert not out[high - low :].any(), "padding reads nothing"
            parts.append(out[: high - low])
        return np.concatenate(parts)


def whole_states(cache: Cache, table, length: int) -> np.ndarray:
    """States behind the whole blocks of a sequence."""
    blocks = range(length // BLOCK)
    return np.stack([np.asarray(cache.states[1, table[b // 2], b % 2]) for b in blocks])


# --- without a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "length", "width"), quick_and_slow(((3, 1, 4),), ((64, 1, 3), (1, 4096, 4)))
)
def test_kernels_lower_and_alias_the_cache(batch, length, width):
    sizes, tokens = QWEN35, batch * length

    def step(columns, filters, gates, gain, row_pages, state_pages, table, positions):
        rows = dataclasses.replace(projected(sizes, np.zeros((1, sizes.keys, sizes.row))),
                                   columns=columns)  # fmt: skip
        norm = OutputNorm(gain=gain, eps=1e-6)
        out, *pages = sm90.delta_rule(
            rows, as_weights(sizes, filters), gates, row_pages, state_pages, table, positions, 1,
            norm,
        )  # fmt: skip
        return output_gate.sigmoid_gate(out, out), *pages

    num_columns = (2 + 2 * sizes.group) * sizes.dim * sizes.keys + 2 * sizes.keys * sizes.group
    shapes = (
        struct((tokens, num_columns)),
        struct((sizes.keys, width, sizes.mixed)),
        (struct((sizes.keys, sizes.group), F32),) * 2,
        struct((sizes.dim,), F32),
        struct((2, 40, 1, sizes.keys, PAGE, sizes.row)),
        struct((2, 40, 2, *sizes.state), F32),
        struct((batch, 33), I32),
        struct((batch, length), I32),
    )
    text = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias") >= 2
    several = {"delta_rows", "delta_mix", "delta_rule", "gated_rms_norm"}
    found = {name for name in (*several, "delta_step") if f"detjax_{name}" in text}
    assert found == ({"delta_step"} if (length, width) == (1, 4) else several)
    assert "detjax_sigmoid_gate" in text


def test_other_sizes_are_refused():
    cache = Cache(SMALL._replace(dim=16), 1)
    with pytest.raises(NotImplementedError, match="16 and 16"):
        cache.run(tokens_of(cache.sizes, 1, 0), (0, 1), [0], padded=1)
    cache = Cache(SMALL, 1)
    cache.rows = cache.rows[:, :, :, :, :32]
    with pytest.raises(NotImplementedError, match="not of 32"):
        cache.run(tokens_of(cache.sizes, 1, 0), (0, 1), [0], padded=1)


@pytest.mark.parametrize("backend", (Backend.PORTABLE, Backend.REFERENCE))
def test_a_norm_behind_the_recurrence_is_the_gated_norm(backend):
    """Of the results and of the gates among the columns; rows that are arranged have no gates."""
    sizes = Sizes(keys=1, group=2, dim=64)
    cache, rows = Cache(sizes, 1, has_norm=True), tokens_of(sizes, 3, 3)
    columns, filters = projected(sizes, rows), as_weights(sizes, cache.layer.filters)
    of_cache = (
        cache.layer.gates, jnp.zeros_like(cache.rows), jnp.zeros_like(cache.states),
        jnp.zeros((1, 1), I32), jnp.arange(3, dtype=I32)[None],
    )  # fmt: skip
    options: dict = {"layer": 1, "backend": backend}
    got, *_ = api.delta_rule(columns, filters, *of_cache, **options, norm=cache.norm)
    out, *_ = api.delta_rule(columns, filters, *of_cache, **options)
    heads, gates = (x.reshape(-1, sizes.dim) for x in (out, columns.output_gates()))
    want = api.gated_rms_norm(heads, gates, cache.norm.gain, eps=1e-6, backend=backend)
    assert_bitwise_equal(got, want.reshape(got.shape), claim="one operation and two")
    other = api.gated_rms_norm(heads, gates[::-1], cache.norm.gain, eps=1e-6, backend=backend)
    assert count_different_bits(other.reshape(got.shape), got) > 0, "the gates of other heads"
    with pytest.raises(ValueError, match="needs the gates"):
        api.delta_rule(jnp.asarray(rows), filters, *of_cache, **options, norm=cache.norm)


def test_a_sequence_follows_the_one_that_writes_its_page():
    """A copy of a prompt in the same launch, its copy, and others; tables of 128-token pages."""
    table = np.asarray([[0, 1, 9], [0, 2, 9], [0, 1, 3], [4, 5, 9], [0, 1, 6], [7, 8, 9]])
    starts, counts = (0, 128, 256, 130, 256, 0), (256, 40, 3, 2, 1, 0)
    positions = np.full((6, 256), -1)
    for row, start, count in zip(positions, starts, counts, strict=True):
        row[:count] = np.arange(start, start + count)
    plan = np.asarray(plan_sequences(jnp.asarray(table, I32), jnp.asarray(positions, I32),
                                     page_len=PAGE))  # fmt: skip
    assert plan.tolist() == [
        [0, 255, 1, 4, 1, 0],  # then those whose state before is on its pages
        [128, 167, 2, 0, 2, 0],
        [256, 258, 4, 0, 3, 1],
        [130, 131, 6, 1, 5, 4],
        [256, 256, 6, 0, 6, 1],
        [-1, -1, 6, 1, 7, 7],  # padding has zeros to write
    ]


@pytest.mark.parametrize(
    ("first", "count", "begin"),
    [(70, 6, 70), (70, 5, 64), (70, 7, 64), (70, 64, 64), (64, 0, 64), (64, 64, 64), (0, 0, 0),
     (127, 63, 127), (191, np.nan, 128), (-1, 0, 0)],
)  # fmt: skip
def test_a_step_begins_at_a_state_only_behind_the_token_before(first, count, begin):
    assert begin_of(jnp.int32(first), jnp.asarray(count, BF16)) == begin


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (BF16, F32))
def test_results_in_interpret_mode_are_near_those_of_portable(dtype):
    """A prompt across blocks, in one chunk and in three; then two rows that need each other."""
    length = 131
    tokens, table = tokens_of(SMALL, length, 3, dtype), [1, 2]
    found = {}
    for name, bounds in (("whole", (0, length)), ("chunks", (0, 63, 66, length))):
        cache = Cache(SMALL, 4, dtype=dtype, interpret=True)
        out = cache.run(tokens, bounds, table, padded=length)
        found[name] = out, np.asarray(cache.rows), whole_states(cache, table, length)
    for what, a, b in zip(("results", "rows", "states"), *found.values(), strict=True):
        assert_bitwise_equal(a, b, claim=f"{what} of chunks are those of the whole, interpreted")
    cache = Cache(SMALL, 4, dtype=dtype, kernels=portable)
    want = cache.run(tokens, (0, length), table, padded=length)
    states = whole_states(cache, table, length)
    moved = (np.asarray(x)[..., : -SMALL.group] for x in (found["whole"][1], cache.rows))
    assert_bitwise_equal(*moved, claim="rows are moved alone")
    assert_order_sensitive(states[0, 0])
    # Tolerance: float32 sums of 32 terms over 131 updates, each 2**-24 of its largest.
    for got, expected in ((found["whole"][0], want), (found["whole"][2], states)):
        assert np.abs(got - expected).max() <= 2.0**-14 * np.abs(expected).max()
    cache = Cache(SMALL, 4, dtype=dtype, interpret=True)
    positions = np.full((2, PAGE), -1)
    positions[0], positions[1, :3] = np.arange(PAGE), np.arange(PAGE, length)
    rows = np.zeros((2, PAGE, *tokens.shape[1:]), tokens.dtype)
    rows[0], rows[1, :3] = tokens[:PAGE], tokens[PAGE:]
    out = cache.step(rows, positions, np.asarray([[1, 0], [1, 2]]))
    both = np.concatenate([out[0], out[1, :3]])
    assert_bitwise_equal(both, found["whole"][0], claim="a row reads the state of one before it")


@pytest.mark.slow
def test_one_token_in_interpret_mode_is_near_that_of_portable():
    sizes, outs = SMALL._replace(keys=1, group=1), []
    tokens = tokens_of(sizes, 2, 3)
    for kernels, options in ((sm90, {"interpret": True}), (portable, {})):
        outs.append(Cache(sizes, 1, kernels=kernels, **options).run(tokens, (0, 2), [0], padded=2))
    assert np.abs(outs[1]).max() > 2.0**-6
    # Tolerance: float32 sums of 32 terms over two updates.
    assert np.abs(outs[0] - outs[1]).max() <= 2.0**-20 * np.abs(outs[1]).max()


@pytest.mark.slow
def test_a_token_at_a_time_in_interpret_mode():
    """Steps of decode have a kernel of their own.

    The first begins at the start of its block, as a draft in place of its token has failed.
    """
    sizes, found = Sizes(keys=1, group=2, dim=64), []
    tokens, wrong = tokens_of(sizes, 4, 3), tokens_of(sizes, 4, 4)
    for kernels, options in ((sm90, {"interpret": True}), (portable, {})):
        cache = Cache(sizes, 1, kernels=kernels, has_norm=True, **options)
        cache.run(np.concatenate([tokens[:2], wrong[2:3]]), (0, 3), [0], padded=3)
        out = cache.run(tokens, (2, 3, 4), [0], padded=1)
        found.append((out.astype(np.float32), cache.states[1, 0, 0], cache.rows[1, 0, 0, :, :4]))
    (out, states, kept), (want, of_portable, rows) = found
    numbers = sizes.mixed + 2 * sizes.group
    assert_bitwise_equal(kept[..., :numbers], rows[..., :numbers], claim="rows are moved alone")
    counts = np.asarray(kept[:, 0, -sizes.group :], np.float32)
    assert (counts == 4).all(), "each head of values says how far its state has come"
    # Tolerance: float32 sums of 64 terms over four updates, then one rounding to bfloat16.
    assert np.abs(states - of_portable).max() <= 2.0**-19 * np.abs(of_portable).max()
    assert np.abs(out - want).max() <= 2.0**-7 * np.abs(want).max()


def two_tokens_of_one_launch(sizes: Sizes, **options) -> tuple[np.ndarray, np.ndarray]:
    """The last token of a block, and the next one as another row: together, and one after the
    other.
    """  # fmt: skip
    tokens, table = tokens_of(sizes, BLOCK + 1, 7), np.asarray([[0], [0]])
    cache = Cache(sizes, 1, **options)
    cache.run(tokens, (0, BLOCK - 1), [0], padded=BLOCK - 1)
    kept = cache.rows, cache.states
    apart = cache.run(tokens, (BLOCK - 1, BLOCK, BLOCK + 1), [0], padded=1)
    cache.rows, cache.states = kept
    both = cache.step(tokens[BLOCK - 1 :, None], np.asarray([[BLOCK - 1], [BLOCK]]), table)
    return both[:, 0], apart


def check_operands(sizes: Sizes, dtype, batch: int, length: int, **options) -> None:
    """Columns of a product and filters as weights, against rows and filters put in order."""
    rng, cache = np.random.default_rng(3), Cache(sizes, 2 * batch, dtype=dtype)
    projected = ProjectedRows(
        columns=None, num_heads=sizes.keys, key_dim=sizes.dim, value_dim=sizes.dim,
        group=sizes.group, width=sizes.row,
    )  # fmt: skip
    num_columns = sum(projected.part_widths) + 24
    columns = jnp.asarray(rng.standard_normal((batch * length, num_columns)), dtype)
    projected = dataclasses.replace(projected, columns=columns)
    channels = sizes.keys * sizes.dim
    filters = Filters(
        *(
            jnp.asarray(rng.standard_normal((n, 1, WIDTH)), dtype)
            for n in (channels, channels, sizes.group * channels)
        )
    )
    positions = np.tile(np.arange(length), (batch, 1))
    positions[-1, -1] = -1 if length > 1 else 0
    table = jnp.arange(2 * batch, dtype=I32).reshape(batch, 2)

    def run(rows, filters):
        return sm90.delta_rule(
            rows, filters, cache.layer.gates, cache.rows, cache.states, table,
            jnp.asarray(positions, I32), 1, **options,
        )  # fmt: skip

    got = run(projected, filters)
    want = run(projected.arranged(), filters.arranged(sizes.keys))
    for a, b, what in zip(got, want, ("results", "rows", "states"), strict=True):
        assert_bitwise_equal(a, b, claim=f"{what} of columns as they are")
    other = run(projected.arranged(), filters._replace(k=filters.q).arranged(sizes.keys))
    assert count_different_bits(other[0], got[0]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "length"), [(BF16, 1), (F32, 1), (BF16, 3)])
def test_columns_of_a_product_are_rows_in_interpret_mode(dtype, length):
    check_operands(SMALL, dtype, 1, length, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (5, 1), (2, 5), (2, 70)])
@pytest.mark.parametrize(
    "sizes", [QWEN35, Sizes(keys=3, group=4, dim=64), Sizes(keys=2, group=1, dim=32)]
)
def test_columns_of_a_product_are_rows(sizes, batch, length, dtype):
    check_operands(sizes, dtype, batch, length)


@pytest.mark.nightly
def test_a_token_that_needs_another_of_its_launch_in_interpret_mode():
    both, apart = two_tokens_of_one_launch(Sizes(keys=1, group=1, dim=32), interpret=True)
    # Tolerance: float32 sums of 32 terms over two updates, which XLA fuses in other ways.
    assert np.abs(both - apart).max() <= 2.0**-20 * np.abs(apart).max()
    assert np.abs(apart[1] - apart[0]).max() > 2.0**-6 * np.abs(apart).max()


@pytest.mark.parametrize("width", quick_and_slow((128,), (64,)))
def test_the_gated_norm_in_interpret_mode(width):
    rng = np.random.default_rng(1)
    x, gain = (jnp.asarray(rng.standard_normal(shape), F32) for shape in ((5, width), (width,)))
    z = jnp.asarray(3 * rng.standard_normal((5, width)), BF16)
    out = sm90.gated_rms_norm(x, z, gain, eps=1e-6, interpret=True)
    want = portable.gated_rms_norm(x, z, gain, eps=1e-6)
    assert np.abs(np.asarray(out - want, np.float32)).max() <= 2.0**-7 * np.abs(want).max()


def test_the_output_gate_in_interpret_mode():
    rng = np.random.default_rng(2)
    heads, gate = (jnp.asarray(3 * rng.standard_normal((3, 256)), BF16) for _ in range(2))
    out = output_gate.sigmoid_gate(heads, gate, interpret=True)
    want = portable_gate.sigmoid_gate(heads, gate)
    assert np.abs(np.asarray(out - want, np.float32)).max() <= 2.0**-7 * np.abs(want).max()
    # Behind other columns, as a product of queries, keys, values and gates has them.
    behind = jnp.concatenate([jnp.full((3, 72), jnp.nan, BF16), gate], axis=1)
    assert_bitwise_equal(
        output_gate.sigmoid_gate(heads, behind, interpret=True), out, claim="columns of a product"
    )
    assert_bitwise_equal(portable_gate.sigmoid_gate(heads, behind), want, claim="the same")


def test_fewer_gates_than_channels_are_refused():
    with pytest.raises(ValueError, match="a gate for each"):
        gate_api.sigmoid_gate(
            jnp.ones((3, 256), BF16), jnp.ones((3, 248), BF16), backend=Backend.PORTABLE
        )


def planted(cache: Cache, page: int) -> None:
    """Another state behind the last token of a page's first block."""
    cache.states = cache.states.at[1, page, 0].add(1.0)


def check_where_steps_begin(**options) -> None:
    """At the state of the block's place if it is that of the token before, else at the block's
    start: after drafts that failed, and where another sequence has left it.
    """  # fmt: skip
    sizes = Sizes(keys=1, group=1, dim=32)
    tokens, wrong = tokens_of(sizes, 8, 3), tokens_of(sizes, 8, 4)
    clean = Cache(sizes, 1, **options).run(tokens, (0, 8), [0], padded=8)
    cache = Cache(sizes, 1, **options)
    cache.run(wrong, (0, 4), [0], padded=4)  # another sequence had the page
    cache.run(tokens, (0, 3), [0], padded=4)
    # Drafts of which the first is right; and the step behind it, from the start of the block.
    mixed = np.concatenate([tokens[:4], wrong[4:]])
    cache.run(mixed, (3, 7), [0], padded=4)
    planted(cache, 0)
    out = cache.run(tokens, (4, 6), [0], padded=4)
    assert_bitwise_equal(out, clean[4:6], claim="a step behind failed drafts runs its block again")
    kept = cache.rows, cache.states
    out = cache.run(tokens, (6, 8), [0], padded=4)
    assert_bitwise_equal(out, clean[6:8], claim="a step goes on with the last one's state")
    cache.rows, cache.states = kept
    planted(cache, 0)
    out = cache.run(tokens, (6, 8), [0], padded=4)
    assert count_different_bits(out, clean[6:8]) > 0, "the probe: it does read that state"


@pytest.mark.slow
def test_steps_begin_where_they_should_in_interpret_mode():
    check_where_steps_begin(interpret=True)


# --- with a GPU ------------------------------------------------------------------------------


LENGTH = 300
"""Two pages and a part of the next: four blocks and 44 tokens."""

SCHEDULES = {
    "chunks": (0, 63, 64, 65, 70, 128, 130, 191, 200, 256, LENGTH),
    "decode": range(LENGTH + 1),
    "windows": (*range(0, LENGTH, 7), LENGTH),
}


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize(
    "sizes",
    (QWEN35, QWEN35._replace(group=1), SMALL._replace(dim=64), Sizes(keys=2, group=3, dim=128)),
    ids=str,
)
def test_bits_are_schedule_invariant_and_path_consistent(sizes, dtype):
    """Prefill in one piece, in chunks, token by token, and in windows of which drafts fail."""
    tokens, table = tokens_of(sizes, LENGTH, 4, dtype), [3, 0, 2]
    cache = Cache(sizes, 4, dtype=dtype, has_norm=True)
    whole = cache.run(tokens, (0, LENGTH), table, padded=LENGTH)
    rows, states = np.asarray(cache.rows), whole_states(cache, table, LENGTH)
    assert np.isfinite(np.asarray(whole, np.float32)).all() and np.abs(whole).max() > 0.05
    assert_order_sensitive(states[3, 0])
    for name, bounds in SCHEDULES.items():
        cache = Cache(sizes, 4, dtype=dtype, has_norm=True)
        padded = max(b - a for a, b in itertools.pairwise(bounds))
        out = cache.run(tokens, bounds, table, padded=padded)
        assert_bitwise_equal(out, whole, claim=f"{name}: results are those of the whole prompt")
        assert_bitwise_equal(np.asarray(cache.rows), rows, claim=f"{name}: rows")
        kept = whole_states(cache, table, LENGTH)
        assert_bitwise_equal(kept, states, claim=f"{name}: states behind blocks")


@pytest.mark.gpu
@pytest.mark.invariance
def test_rejected_drafts_change_no_bit():
    """Every window of 6 begins 2 tokens behind the last: 4 were other tokens, across blocks."""
    tokens, wrong = (tokens_of(QWEN35, 200, seed) for seed in (5, 6))
    table = [1, 0]
    want = Cache(QWEN35, 2).run(tokens, (0, 200), table, padded=200)
    cache, out = Cache(QWEN35, 2), []
    for start in range(0, 200, 2):
        count = min(6, 200 - start)
        rows, positions = np.zeros((1, 6, *tokens.shape[1:]), tokens.dtype), np.full((1, 6), -1)
        rows[0, :count] = wrong[start : start + count]
        rows[0, :2], positions[0, :count] = (
            tokens[start : start + 2],
            np.arange(start, start + count),
        )
        out.append(cache.step(rows, positions, np.asarray([table]))[0, :2])
    assert_bitwise_equal(np.concatenate(out), want, claim="drafts that failed leave nothing")


@pytest.mark.gpu
@pytest.mark.invariance
def test_steps_begin_where_they_should():
    check_where_steps_begin()


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("group", (1, 2, 3))
def test_a_step_has_the_bits_of_the_kernels_for_several_tokens(group):
    """At many places of a block, behind drafts that failed, of sequences of one launch."""
    sizes = QWEN35._replace(group=group)
    starts = np.asarray([0, 1, 2, 3, 30, 62, 63, 64, 65, 100, 127, 128, 129, 190, 191, 192])
    batch, before = len(starts), max(starts)
    tokens = [tokens_of(sizes, before + 2, 20 + i) for i in range(batch)]
    table = np.arange(2 * batch).reshape(batch, 2)
    rows = np.zeros((batch, before, *tokens[0].shape[1:]), tokens[0].dtype)
    positions = np.full((batch, before), -1)
    for i, start in enumerate(starts):
        # The token in place of the first new one is another's in every third sequence.
        known = start + (i % 3 == 0 and start < before)
        rows[i, :known], positions[i, :known] = tokens[i][:known], np.arange(known)
        rows[i, start:known] = tokens[i - 1][start:known]
    cache = Cache(sizes, 2 * batch, has_norm=True)
    cache.step(rows, positions, table)
    kept = cache.rows, cache.states
    new = np.stack([tokens[i][s : s + 2] for i, s in enumerate(starts)])
    at = starts[:, None] + np.arange(2)

    def run(padded: int):
        cache.rows, cache.states = kept
        if padded == 1:
            outs = [cache.step(new[:, i : i + 1], at[:, i : i + 1], table) for i in range(2)]
            return np.concatenate(outs, axis=1), np.asarray(cache.rows), np.asarray(cache.states)
        out = cache.step(new, at, table)
        return out, np.asarray(cache.rows), np.asarray(cache.states)

    found, want = run(1), run(2)
    for what, got, expected in zip(("results", "rows", "states"), found, want, strict=True):
        assert_bitwise_equal(got, expected, claim=f"{what} of steps")
    cache.rows, cache.states = kept
    planted(cache, table[4, 0])
    other = cache.step(new[:, :1], at[:, :1], table)
    assert count_different_bits(other, want[0][:, :1]) > 0, "the probe: it does read that state"


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("batch", (1, 4, 5))
def test_weights_that_are_asked_for_change_no_bit(batch):
    """Of one sequence, of as many as are one wave, and of more, which ask for none."""
    assert (batch * QWEN35.keys * QWEN35.group <= NUM_SMS) == (batch <= 4)
    table, found = np.arange(batch)[:, None], []
    weights = jnp.ones((4096, 2048), BF16), jnp.ones((1024, 2048), BF16), jnp.ones((64, 64), BF16)
    for behind in ((), weights):
        cache = Cache(QWEN35, batch, has_norm=True)
        cache.norm = dataclasses.replace(cache.norm, prefetch=behind)
        steps = [
            cache.step(
                np.stack([tokens_of(QWEN35, 3, 20 + i)[at : at + 1] for i in range(batch)]),
                np.full((batch, 1), at),
                table,
            )
            for at in range(3)
        ]
        found.append((*steps, np.asarray(cache.states[1, :, 0])))
    for asked, plain in zip(*found, strict=True):
        assert count_different_bits(asked, plain) == 0
    assert count_different_bits(found[0][0], found[0][1]) > 0, "the probe: tokens differ"


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("length", (1, 5))
def test_bits_are_batch_invariant(length):
    """64 sequences at all offsets in a block, together, each alone, and in another order."""
    batch = 64
    starts = np.asarray([(37 * i) % 120 for i in range(batch)])
    tokens = [tokens_of(QWEN35, 128, 10 + i) for i in range(batch)]
    cache = Cache(QWEN35, batch, has_norm=True)
    table = np.arange(batch)[::-1, None]
    positions = np.full((batch, 120), -1)
    rows = np.zeros((batch, 120, *tokens[0].shape[1:]), tokens[0].dtype)
    for i, start in enumerate(starts):
        positions[i, :start], rows[i, :start] = np.arange(start), tokens[i][:start]
    cache.step(rows, positions, table)
    before = cache.rows, cache.states
    new = np.stack([tokens[i][s : s + length] for i, s in enumerate(starts)])
    at = starts[:, None] + np.arange(length)[None]

    def together(order) -> np.ndarray:
        cache.rows, cache.states = before
        return cache.step(new[order], at[order], table[order])

    want = together(np.arange(batch))
    assert np.isfinite(np.asarray(want, np.float32)).all()
    order = np.random.default_rng(0).permutation(batch)
    assert_bitwise_equal(together(order), want[order], claim="in any order")
    for i in (0, 1, 31, 40, 63):
        alone = together(np.asarray([i]))
        assert_bitwise_equal(alone, want[i : i + 1], claim=f"sequence {i} alone")
    for _ in range(50):
        assert_bitwise_equal(together(np.arange(batch)), want, claim="again")


@pytest.mark.gpu
@pytest.mark.invariance
def test_rows_of_one_launch_that_need_each_other():
    """A copy of a prompt in the launch that computes it begins with its states."""
    tokens, other = tokens_of(QWEN35, 300, 7), tokens_of(QWEN35, 300, 8)
    want = Cache(QWEN35, 3).run(tokens, (0, 300), [0, 1, 2], padded=300)
    cache = Cache(QWEN35, 8)
    positions = np.full((4, 256), -1)
    rows = np.zeros((4, 256, *tokens.shape[1:]), tokens.dtype)
    rows[0], positions[0] = other[:256], np.arange(256)
    rows[1], positions[1] = tokens[:256], np.arange(256)
    for row in (2, 3):
        rows[row, :44], positions[row, :44] = tokens[256:], np.arange(256, 300)
    table = np.asarray([[3, 4, 5], [0, 1, 2], [0, 1, 6], [0, 1, 7]])
    out = cache.step(rows, positions, table)
    assert_bitwise_equal(out[1], want[:256], claim="the first")
    for row in (2, 3):
        assert_bitwise_equal(out[row, :44], want[256:], claim="a copy reads the first's states")


@pytest.mark.gpu
@pytest.mark.invariance
def test_a_token_that_needs_another_of_its_launch():
    both, apart = two_tokens_of_one_launch(QWEN35, has_norm=True)
    assert_bitwise_equal(both, apart, claim="a token reads the state that its launch leaves")


@pytest.mark.gpu
@pytest.mark.parametrize("name", HYBRID_CASES)
def test_bits_are_those_of_the_reference(name):
    """That a CPU has computed: digests, as a GPU's machine may have no C++ compiler."""
    found = operation_case(name)(Backend.SM90)
    assert digest_of(found) == HYBRID_CASES[name], [np.asarray(x).ravel()[:4] for x in found]


@pytest.mark.gpu
@pytest.mark.control
def test_control_another_order_of_sums_is_seen():
    """Portable kernels add the same terms in another order. In float32, as a y that is rounded
    another way is off by 2**-8.
    """  # fmt: skip
    length = 140
    tokens, table = tokens_of(QWEN35, length, 9, F32), [0, 1]
    cache = Cache(QWEN35, 2, dtype=F32)
    found = cache.run(tokens, (0, length), table, padded=length)
    with jax.default_device(jax.devices("cpu")[0]):
        other = Cache(QWEN35, 2, dtype=F32, kernels=portable)
        want = other.run(tokens, (0, length), table, padded=length)
    assert count_different_bits(found, want) > found.size // 4
    # Tolerance: an update rounds a sum at most 16 times in a row, each time by 2**-24 of a column's
    # length or less, on both sides. Fading and the rest of the update make no error longer, so they
    # add up; a query has the length c**-0.5.
    columns = np.linalg.norm(np.asarray(cache.states[1, :, :, :, :, :])[:1], axis=-2).max()
    bound = 2 * length * 16 * 2.0**-24 * columns * QWEN35.dim**-0.5
    assert np.abs(found - want).max() <= bound
