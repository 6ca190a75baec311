# SPDX-License-Identifier: Apache-2.0
"""The best score of each row on Hopper, without writing scores, and block statistics beside it."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.hopper_sums import first_operand
from detjax.pallas_kernels.log_softmax.sm90 import LOGIT_BLOCK, block_tile, stats_of
from detjax.pallas_kernels.sampling import sm90_reach
from detjax.pallas_kernels.sampling.sm90 import (
    bits_of,
    ids_of,
    num_blocks,
    scores_of,
)
from detjax.pallas_kernels.sm90_hardware import NUM_SMS

SKIP_NOISE = True
"""Whether a score is made only where it can be the best. The bits are the same without."""

CTAS_AN_SM = 16
"""Parts of rows for each streaming multiprocessor; the bits are the same with others."""

MIN_TURNS = 3
"""Tiles of a CTA from which it pays to look whether a score can be the best.

128256 tokens, 64 and 256 rows: 45.1 and 148 us, 53.2 and 202 without. At 8 rows, of two tiles each,
10.4 and 9.8.
"""

_NO_TOKEN = np.iinfo(np.int32).max


def _better(value, token, other_value, other_token):
    """The larger value, and of equal ones the smaller id: (value, id)."""
    is_other = (other_value > value) | ((other_value == value) & (other_token < token))
    return jnp.where(is_other, other_value, value), jnp.where(is_other, other_token, token)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScoredTile:
    """Blocks of a sampled row, one a warp, whose scores are made where they can be the best.

    Attributes:
        x: Logits.
        ids: Their tokens.
        maxima: Largest logit of each block.
        key: Of the row's noise.
        temperature: Above 0.
        reciprocal: Of the temperature.
        best_smem: A score of the row that each warp has found.
        tile: Layout.
        has_few: Whether the CTA has too few for a comparison to pay.
    """

    x: Any
    ids: Any
    maxima: Any
    key: tuple
    temperature: Any
    reciprocal: Any
    best_smem: Any
    tile: rows.Tile
    has_few: bool

    def fold(self, state: tuple) -> tuple:
        """The better of what each thread has and of these, as far as that can matter to the row."""
        bits = functools.partial(bits_of, self.ids, self.key, self.tile)
        if self.has_few or not SKIP_NOISE:
            return self._scored(bits(), state)
        whole, per_row = self.tile.whole, self.tile.per_row
        least = sm90_reach.limit(sm90_reach.shared_best(self.best_smem, whole))

        def with_bits(state):
            drawn = bits()
            reach = sm90_reach.score_reach(
                self.x, self.reciprocal, sm90_reach.noise_reach(drawn, whole), whole
            )
            can_win = sm90_reach.some_reach(reach, least, whole)
            return lax.cond(can_win, functools.partial(self._shared, drawn), _as_is, state)

        reach = sm90_reach.score_reach(self.maxima, self.reciprocal, sm90_reach.MAX_NOISE, per_row)
        return lax.cond(sm90_reach.some_reach(reach, least, per_row), with_bits, _as_is, state)

    def _scored(self, bits, state: tuple) -> tuple:
        scores = scores_of(self.x, bits, self.temperature, self.tile)
        return _better(*state, scores, self.ids)

    def _shared(self, bits, state: tuple) -> tuple:
        state = self._scored(bits, state)
        sm90_reach.share(jnp.max(state[0], axis=1), self.best_smem, self.tile.per_row)
        return state


def _as_is(state: tuple) -> tuple:
    return state


def _num_parts(num_rows: int, tiles: int) -> int:
    """Parts of a row, of at least one tile; a warpgroup merges them, so at most one a thread."""
    return min(tiles, rows.LANES, pl.cdiv(CTAS_AN_SM * NUM_SMS, num_rows))


class ScoredParts(NamedTuple):
    """What one pass over the logits finds: arrays, or inside a kernel their references."""

    values: Any  # [M, parts] f32: best score of each part of a row
    tokens: Any  # [M, parts] int32: its id
    maxima: Any  # [M, blocks] f32: of `block_stats`
    sums: Any  # [M, blocks] f32


class _PartMemory(NamedTuple):
    """Shared memory of a CTA, of one part of a row."""

    values: Any  # [held] f32
    tokens: Any  # [held] int32
    best: Any  # [NUM_WARPS] f32


def best_of_parts(logits, temperature, key, first_token_id, *, interpret: bool) -> ScoredParts:
    """One pass over the logits: best (score, id) of each part of a row, and block statistics."""
    num_rows, width = logits.shape
    blocks = num_blocks(width)
    # A greedy row moves bytes, so it has large tiles; a sampled one computes, and wants registers.
    is_large = num_rows * blocks >= 8 * 16 * NUM_SMS
    held_greedy = rows.most_rows(8 if is_large else 4, blocks)
    held_sampled = rows.most_rows(4, blocks)
    parts = _num_parts(num_rows, pl.cdiv(blocks, held_sampled))

    def body(
        logits_gmem,  # [M, blocks, LOGIT_BLOCK] f32
        t_gmem,  # [M] f32
        keys_gmem,  # [M] uint32 twice
        first_gmem,  # [1] int32
        found: ScoredParts,
        memory: _PartMemory,
    ):
        value_smem, token_smem, best_smem = memory
        row, part = lax.axis_index("row"), lax.axis_index("part")
        t = t_gmem[row]

        def choose(is_greedy):
            held = held_greedy if is_greedy else held_sampled
            tile, shape = block_tile(held, interpret), (held, LOGIT_BLOCK)
            tiles = pl.cdiv(blocks, held)
            count = lax.div(tiles - part + (parts - 1), jnp.int32(parts))
            first_id = first_gmem[0]
            scored_tile: Any = None
            if not is_greedy:
                scored_tile = functools.partial(
                    _ScoredTile, temperature=t, reciprocal=1.0 / t, best_smem=best_smem, tile=tile,
                    key=tuple(half[row] for half in keys_gmem), has_few=tiles < MIN_TURNS * parts,
                )  # fmt: skip
                for warp in range(sm90_reach.NUM_WARPS):
                    best_smem[warp] = -jnp.inf
                plgpu.commit_smem()

            def fold(turn, state):
                first = jnp.minimum((part + turn * parts) * held, blocks - held)
                x = tile.whole.load(logits_gmem.at[row, pl.ds(first, held)])
                m, total = stats_of(x, tile)
                found.maxima[row, pl.ds(first, held)] = m
                found.sums[row, pl.ds(first, held)] = total
                ids = ids_of(tile, first_id + first * LOGIT_BLOCK, shape)
                if is_greedy:
                    return _better(*state, x, ids)
                return scored_tile(x=x, ids=ids, maxima=m).fold(state)

            math = tile.whole
            none = math.full(shape, _NO_TOKEN, jnp.int32)
            value, token = lax.fori_loop(0, count, fold, (math.full(shape, -jnp.inf), none))
            best = jnp.max(value, axis=1)
            is_best = value == tile.over_columns(best, shape)
            value_smem[pl.ds(0, held)] = best
            token_smem[pl.ds(0, held)] = jnp.min(jnp.where(is_best, token, none), axis=1)
            plgpu.commit_smem()
            best, token = value_smem[0], token_smem[0]
            for i in range(1, held):
                best, token = _better(best, token, value_smem[i], token_smem[i])
            found.values[row, part] = best
            found.tokens[row, part] = token

        pl.when(t == 0.0)(lambda: choose(True))
        pl.when(t != 0.0)(lambda: choose(False))

    of_blocks = jax.ShapeDtypeStruct((num_rows, blocks), jnp.float32)
    out = ScoredParts(
        values=jax.ShapeDtypeStruct((num_rows, parts), jnp.float32),
        tokens=jax.ShapeDtypeStruct((num_rows, parts), jnp.int32),
        maxima=of_blocks, sums=of_blocks,
    )  # fmt: skip
    (found,) = rows.run_kernel(
        body,
        (
            logits.reshape(num_rows, blocks, LOGIT_BLOCK),
            temperature,
            tuple(key),
            first_operand(first_token_id),
        ),
        out=[out],
        grid={"part": parts, "row": num_rows},
        name="detjax_gumbel_argmax",
        is_interpreted=interpret,
        scratch_types=[
            _PartMemory(
                values=plgpu.SMEM((held_greedy,), jnp.float32),
                tokens=plgpu.SMEM((held_greedy,), jnp.int32),
                best=plgpu.SMEM((sm90_reach.NUM_WARPS,), jnp.float32),
            )
        ],
    )
    return found


MERGE_SCRATCH = [
    plgpu.SMEM((rows.LANES,), jnp.float32),
    plgpu.SMEM((rows.LANES,), jnp.int32),
]
"""What `merge_row` needs."""


def merge_row(values, tokens, smem, interpret: bool):
    """Best (score, id) of the parts of one row, in memory, by one warpgroup: two scalars."""
    (parts,), (value_smem, token_smem) = values.shape, smem
    math, size = rows.strided(rows.LANES, 1, interpret), rows.LANES

    def smallest(x):
        return rows.reduce_warps(
            x,
            math,
            first=lambda s: s[0],
            fold=arith.minsi,
            plain=(lambda t: t[:, 0], jnp.minimum),
        )

    def largest(x):
        return rows.reduce_warps(
            x,
            math,
            first=lambda s: s[0],
            fold=lambda a, b: rows.instruction("max.NaN.f32")(a, b),
            plain=(lambda t: t[:, 0], jnp.maximum),
        )

    value = rows.load_padded(values, parts, math, size=size, fill=-np.inf)
    token = rows.load_padded(tokens, parts, math, size=size, fill=_NO_TOKEN)
    best = largest(value)
    token = smallest(jnp.where(value == best, token, math.full((size,), _NO_TOKEN, jnp.int32)))
    value_smem[...] = best
    token_smem[...] = token
    plgpu.commit_smem()
    state = (value_smem[0], token_smem[0])
    for warp in range(1, 4):
        state = _better(*state, value_smem[32 * warp], token_smem[32 * warp])
    return state


def _merge_parts(values, tokens, interpret: bool):
    """Best (score, id) of each row from those of its parts."""
    num_rows, parts = values.shape
    if parts == 1:
        return values[:, 0], tokens[:, 0]

    def body(values_gmem, tokens_gmem, value_gmem, token_gmem, *smem):
        row = lax.axis_index("row")
        state = merge_row(values_gmem.at[row], tokens_gmem.at[row], smem, interpret)
        value_gmem[row], token_gmem[row] = state

    value, token = rows.run_kernel(
        body,
        (values, tokens),
        out=[
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        ],
        grid={"row": num_rows},
        name="detjax_gumbel_argmax_merge",
        is_interpreted=interpret,
        scratch_types=MERGE_SCRATCH,
    )
    return value, token


@functools.partial(jax.jit, static_argnames=("vocab_block", "interpret"))
def stats_and_choice(
    logits, temperature, key, *, first_token_id, vocab_block: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `api.stats_and_choice`: the logits are read once for the log-softmax and the choice.

    Raises:
        ValueError: If the share is not whole blocks of 128, or a block is another.

    Numerics:
        The bits of `block_stats` and of the first maximum of `gumbel_scores`: the same functions on
        the same layout. Comparisons are exact. A NaN is never the best: the engine ends a run
        with NaN logits.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if vocab_block != LOGIT_BLOCK:
        raise ValueError(f"sm90 sampling has blocks of {LOGIT_BLOCK} logits, not {vocab_block}")
    values, tokens, maxima, sums = best_of_parts(
        logits, temperature, key, first_token_id, interpret=interpret
    )
    return maxima, sums, *_merge_parts(values, tokens, interpret)
