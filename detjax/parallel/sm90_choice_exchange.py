# SPDX-License-Identifier: Apache-2.0
"""The token of each row and its log-probability on Hopper, where several ranks have the vocabulary.

Behind one pass over a rank's logits, one launch: a CTA sends a row's best token and its statistics
of blocks to its peers, waits for theirs, and does what one rank would with all of it.
How words travel, and why none is lost or read twice, says `sm90_slots`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.hopper_sums import first_operand
from detjax.pallas_kernels.log_softmax.sm90 import LOGIT_BLOCK, ROW_SCRATCH, row_log_sum_exp
from detjax.pallas_kernels.sampling.sm90_choice import (
    MERGE_SCRATCH,
    ScoredParts,
    best_of_parts,
    merge_row,
)
from detjax.parallel.mailbox import Mailbox
from detjax.parallel.sm90_slots import RowSlots, flip_parity, receive_chunk, send_chunk

_VEC = 4
_CHUNK = rows.LANES * _VEC
"""Blocks of the vocabulary that are sent at once."""


def choice_words(vocab_share: int) -> int:
    """Words that a rank with so many tokens sends another for a row.

    Maxima and sums of its blocks, in whole chunks, and a word a thread for the best token.
    """
    return 2 * pl.cdiv(vocab_share // LOGIT_BLOCK, _CHUNK) * _CHUNK + rows.LANES


def takes_vocabulary(vocab_size: int, vocab_share: int) -> bool:
    """Whether tokens are exact in float32, as which they travel, and a share is whole blocks."""
    return vocab_size < 1 << 24 and vocab_share % LOGIT_BLOCK == 0


def _put(values, ref, start, count: int, math: rows.Arithmetic) -> None:
    """Store the first `count` of a vector from `start` of memory; its last element is nobody's."""
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(math.layout, plgpu.RefType(), splat))
    def emit(ctx, values, memory, *start):
        index = ir.IndexType.get()
        (size,) = ir.MemRefType(memory.type).shape
        first = arith.index_cast(index, start[0].registers.item())
        layout = values.layout
        for register, thread in zip(
            values.registers.flat, layout.linear_thread_idxs(), strict=True
        ):
            for i in range(layout.vec_size):
                at = arith.addi(thread, mgpu.c(i, index))
                is_one = arith.cmpi(arith.CmpIPredicate.ult, at, mgpu.c(count, index))
                where = arith.select(is_one, arith.addi(first, at), mgpu.c(size - 1, index))
                position = ir.DenseI64ArrayAttr.get([i])
                value = vector.extract(register, dynamic_position=[], static_position=position)
                memref.store(value, memory, [where])

    emit(values, ref, start)


class _RowMemory(NamedTuple):
    """Shared memory of a CTA, of one row of logits on all ranks."""

    maxima: Any  # [ranks * blocks + 1] f32
    sums: Any  # [ranks * blocks + 1] f32
    best: Any  # [ranks, LANES] f32: a rank's best score, its token and its logit
    merge: Any  # of `merge_row`
    sum: Any  # of `row_log_sum_exp`


@functools.partial(jax.jit, static_argnames=("vocab_block",))
def exchange_choose_token(
    logits, temperature, key, first_token_id, mailbox: Mailbox, *, vocab_block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `exchange.exchange_choose_token`.

    Args:
        logits: float32 [M, v], this rank's share; -inf past the vocabulary.
        temperature: float32 [M]; 0 is greedy.
        key: Of each row, from `noise.row_key`.
        first_token_id: Of this rank's share, an int32 scalar: its index in the group times v.
        mailbox: Of a region a row, of `choice_words(v)` words.
        vocab_block: Tokens of a block, 128.

    Raises:
        ValueError: If blocks or slots are others, or rows too many.

    Numerics:
        The bits of `choose_token` on one rank: the same functions over blocks in order of rank.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows, width = logits.shape
    _, max_rows, num_peers, words = mailbox.slots.shape
    if vocab_block != LOGIT_BLOCK:
        raise ValueError(f"sm90 sampling has blocks of {LOGIT_BLOCK} logits, not {vocab_block}")
    if num_rows > max_rows:
        raise ValueError(f"{num_rows} rows are more than the {max_rows} that have slots")
    if words != choice_words(width):
        raise ValueError(f"{mailbox.slots.shape=} are not slots of {width} tokens a rank")
    num_ranks, blocks = num_peers + 1, width // LOGIT_BLOCK
    first_id = first_operand(first_token_id)
    parts = best_of_parts(logits, temperature, key, first_id, interpret=False)
    chunks = [(i, min(_CHUNK, blocks - i * _CHUNK)) for i in range(pl.cdiv(blocks, _CHUNK))]
    wide, narrow = rows.strided(_CHUNK, _VEC, False), rows.strided(rows.LANES, 1, False)
    wide_slots, narrow_slots = (
        RowSlots(max_rows=max_rows, num_peers=num_peers, width=words, vec_len=vec_len)
        for vec_len in (_VEC, 1)
    )
    # Of the words behind all chunks of statistics, which are counted by a word a thread.
    scalars_at = 2 * len(chunks) * _VEC

    def body(
        parts: ScoredParts,
        logits_gmem,  # [M, v] f32
        first_gmem,  # [1] int32
        mailbox: Mailbox,
        token_gmem,  # [M] int32
        logprob_gmem,  # [M] f32
        lse_gmem,  # [M] f32
        memory: _RowMemory,
    ):
        peers_gmem, slots_gmem, parities_gmem = mailbox
        max_smem, sum_smem, best_smem, of_merge, of_sum = memory
        row, first = lax.axis_index("row"), first_gmem[0]
        rank = lax.div(first, width)
        parity = parities_gmem[row]
        value, token = merge_row(parts.values.at[row], parts.tokens.at[row], of_merge, False)
        # No token is chosen of a row of NaN.
        logit = logits_gmem[row, jnp.minimum(token - first, width - 1)]
        thread, shape = narrow.iota((rows.LANES,), 0), (rows.LANES,)
        best = jnp.where(
            thread == 0,
            narrow.full(shape, value),
            jnp.where(
                thread == 1,
                narrow.full(shape, token.astype(jnp.float32)),
                narrow.full(shape, logit),
            ),
        )
        place = parity, row, jnp.int32(scalars_at)
        send_chunk(best, narrow, narrow_slots, peers_gmem, *place)
        best_smem.at[rank][...] = best
        of_blocks = [(parts.maxima, max_smem, -jnp.inf), (parts.sums, sum_smem, 0.0)]
        for which, (blocks_gmem, kept, fill) in enumerate(of_blocks):
            for i, count in chunks:
                own = rows.load_padded(
                    blocks_gmem.at[row, pl.ds(i * _CHUNK, count)],
                    count,
                    wide,
                    size=_CHUNK,
                    fill=fill,
                )
                chunk = jnp.int32(which * len(chunks) + i)
                send_chunk(own, wide, wide_slots, peers_gmem, parity, row, chunk)
                _put(own, kept, rank * blocks + i * _CHUNK, count, wide)

        for distance in range(1, num_ranks):
            peer, only = rank ^ distance, range(distance, distance + 1)
            (best,) = receive_chunk(only, narrow, narrow_slots, shape, slots_gmem, *place)
            best_smem.at[peer][...] = best
            for which, (_, kept, _) in enumerate(of_blocks):
                for i, count in chunks:
                    chunk = jnp.int32(which * len(chunks) + i)
                    (got,) = receive_chunk(
                        only, wide, wide_slots, (_CHUNK,), slots_gmem, parity, row, chunk
                    )
                    _put(got, kept, peer * blocks + i * _CHUNK, count, wide)
        plgpu.commit_smem()
        flip_parity(parities_gmem, row, parity)

        value, token, logit = (best_smem[0, i] for i in range(3))
        for other in range(1, num_ranks):
            # Ranks are in order of token, so of equal ones the first has the lowest.
            of_other = [best_smem[other, i] for i in range(3)]
            is_better = of_other[0] > value
            value, token, logit = (
                jnp.where(is_better, new, old)
                for new, old in zip(of_other, (value, token, logit), strict=True)
            )
        all_blocks = pl.ds(0, num_ranks * blocks)
        lse = row_log_sum_exp(max_smem.at[all_blocks], sum_smem.at[all_blocks], of_sum, False)
        token_gmem[row] = token.astype(jnp.int32)
        logprob_gmem[row], lse_gmem[row] = logit - lse, lse

    of_rows = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    statistics = plgpu.SMEM((num_ranks * blocks + 1,), jnp.float32)
    token, logprob, lse = rows.run_kernel(
        body,
        (parts, logits, first_id, mailbox),
        out=[jax.ShapeDtypeStruct((num_rows,), jnp.int32), of_rows, of_rows],
        grid={"row": num_rows},
        name="detjax_exchange_choose_token",
        is_interpreted=False,
        scratch_types=[
            _RowMemory(
                maxima=statistics,
                sums=statistics,
                merge=MERGE_SCRATCH,
                sum=ROW_SCRATCH,
                best=plgpu.SMEM((num_ranks, rows.LANES), jnp.float32),
            ),
        ],
    )
    return token, logprob, lse
