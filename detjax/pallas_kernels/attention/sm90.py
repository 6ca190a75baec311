# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache on Hopper: three schedules of one arithmetic."""

import jax
import jax.numpy as jnp

from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_decode import DecodeConfig, decode
from detjax.pallas_kernels.attention.sm90_prefill import PrefillConfig, prefill

CHANNELS = (64, 96, 128)
DECODE_CHANNELS = (64, 128)
BUSY_PAIRS = 256  # of a sequence and a kv head, about two for each CTA
MOST_FOLDED_SPLITS = 8  # that a CTA may take, so that one long sequence does not hold up a batch


def is_decode(query_len: int, group: int, channels: int, window: int | None) -> bool:
    """Whether splits, rather than query rows, are what is spread over CTAs.

    So they are where a sequence's rows fit one tile; not with a window, nor at 96 channels.
    """
    return query_len * group <= bits.ROWS and channels in DECODE_CHANNELS and window is None


def attention(
    q,
    pages,
    page_table,
    positions,
    layer,
    *,
    window: int | None,
    profile: NumericsProfile,
    is_interpreted: bool = False,
) -> jax.Array:
    """See `api.attention`.

    Raises:
        NotImplementedError: For another dtype than bfloat16, other channels than 64, 96 and 128, or
            another block than 128.

    Numerics:
        Scores: wgmma, K in order, 16 at a time, float32. Weights: `ex2(fma(score, scale, -m))`
        with `scale = log2(e) / sqrt(C)` rounded to float32. A block's weights are added in one
        fixed tree. Within a split the output is scaled by `ex2(m - new_m)` and takes the block's
        products on the tensor core's accumulator; splits are folded left to right by
        `fma(out, a, other * b)`. Division by multiplying with the rounded reciprocal of the sum;
        one rounding to bfloat16. Masked keys weigh exactly 0 and a fully masked block or split
        scales by exactly 1, so the rows that share a tile do not matter.
        Claims: run-invariant, batch-invariant, schedule-invariant, path-consistent,
        mesh-invariant. Holds while keys and values are finite.
    """
    if q.dtype != jnp.bfloat16 or pages.dtype != jnp.bfloat16:
        raise NotImplementedError(f"attention on sm90 is bfloat16, not {q.dtype}, {pages.dtype}")
    if q.shape[3] not in CHANNELS:
        raise NotImplementedError(f"attention on sm90 has {CHANNELS} channels, not {q.shape[3]}")
    if profile.attention_block != bits.BLOCK:
        raise NotImplementedError(f"{profile.attention_block=} must be {bits.BLOCK} on sm90")
    per_split = profile.attention_split // profile.attention_block
    operands = (q, pages, page_table, positions, layer)
    if is_decode(q.shape[1], q.shape[2] // pages.shape[3], q.shape[3], window):
        # WHY: many small CTAs hide latency by their number, few by what each has in flight
        # (256 x 1024 tokens: 269.8 us against 279.2; 1 x 32768: 46.8 against 42.9).
        unroll = (4, 1) if q.shape[0] * q.shape[1] * q.shape[2] >= 1024 else (16, 2)
        # WHY: with CTAs busy anyway, folding in registers saves a kernel (64 x 1024 tokens: 65.0 us
        # against 75.6), while a few short sequences need no merge. Others need all CTAs.
        splits = -(-page_table.shape[1] // per_split)
        is_busy = q.shape[0] * pages.shape[3] >= BUSY_PAIRS
        config = DecodeConfig(
            blocks_per_split=per_split,
            merge_unroll=unroll,
            whole_sequences=splits <= (MOST_FOLDED_SPLITS if is_busy else 1),
        )
        return decode(*operands, config=config, is_interpreted=is_interpreted)
    config = PrefillConfig(blocks_per_split=per_split)
    return prefill(*operands, window=window, config=config, is_interpreted=is_interpreted)
