# SPDX-License-Identifier: Apache-2.0
"""The list of runs that a launch of decode takes: of splits, or of whole sequences."""

import jax
import jax.numpy as jnp
from jax import lax

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_decode_job import DecodeConfig, Job, Memory, Run, Work

SEQ, FIRST_BLOCK, BLOCKS, FULL_BLOCKS, LAST, PAGES = range(6)
"""Columns of the list of runs; a run's pages are the last columns."""


def run_list(
    positions: jax.Array, page_table: jax.Array, config: DecodeConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The runs of all sequences in one list, with integer operations alone.

    A run is what a CTA takes: a split, or a sequence, which then has one even if it is padding.
    The same for every layer, so XLA computes it once a step.

    Returns:
        The list [W, PAGES + pages of a run]; each sequence's first entry and number of runs [B, 2];
        the list's length [1].
    """
    batch, num_pages = page_table.shape
    per_run = config.blocks_per_split
    last = positions.max(axis=1)
    first = jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max).min(axis=1)
    blocks = last // bits.BLOCK + 1
    # Those before the first new token's own, which it may have to be put in (see `NewToken`).
    full = jnp.where(last < 0, 0, first // bits.BLOCK)
    if config.whole_sequences:
        return _one_run_each(page_table, blocks, full, last)
    runs = -(-blocks // per_run)
    ends = jnp.cumsum(runs)
    index = jnp.arange(batch * -(-num_pages // per_run), dtype=jnp.int32)
    seq = (index[:, None] >= ends[None, :]).astype(jnp.int32).sum(axis=1)
    seq = jnp.minimum(seq, batch - 1)
    first_block = (index - (ends - runs)[seq]) * per_run
    num_blocks = jnp.clip(blocks[seq] - first_block, 0, per_run)
    num_full = jnp.clip(full[seq] - first_block, 0, num_blocks)
    block = jnp.clip(first_block[:, None] + jnp.arange(per_run)[None], 0, num_pages - 1)
    columns = jnp.stack([seq, first_block, num_blocks, num_full, last[seq]], axis=1)
    table = jnp.concatenate([columns, page_table[seq[:, None], block]], axis=1)
    limits = jnp.stack([ends - runs, runs], axis=1)
    return table.astype(jnp.int32), limits.astype(jnp.int32), ends[-1:].astype(jnp.int32)


def _one_run_each(page_table, blocks, full, last) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`run_list` where sequence i has run i: no place to look for."""
    batch, num_pages = page_table.shape
    seq = jnp.arange(batch, dtype=jnp.int32)
    blocks = jnp.clip(blocks, 0, num_pages)
    columns = [seq, jnp.zeros_like(seq), blocks, jnp.clip(full, 0, blocks), last]
    table = jnp.concatenate([jnp.stack(columns, axis=1), page_table], axis=1)
    limits = jnp.stack([seq, jnp.ones_like(seq)], axis=1)
    return table.astype(jnp.int32), limits.astype(jnp.int32), jnp.full((1,), batch, jnp.int32)


def _listed_run(job: Job, table_ref, item) -> Run:
    """An item of `run_list`: an entry and a key/value head."""
    entry = lax.div(item, jnp.int32(job.kv_heads))
    first_block, blocks, full, last = (
        table_ref[entry, i] for i in (FIRST_BLOCK, BLOCKS, FULL_BLOCKS, LAST)
    )
    return Run(
        seq=entry if job.config.whole_sequences else table_ref[entry, SEQ],
        kv_head=lax.rem(item, jnp.int32(job.kv_heads)),
        partial=item, first_block=first_block, blocks=blocks, full=full, last=last,
        page=lambda j: table_ref[entry, PAGES + j],
    )  # fmt: skip


def listed_work(job: Job, memory: Memory, cta, *, num_items, num_ctas: int) -> Work:
    """Every `num_ctas`-th item of the list of runs, from the `cta`-th."""
    return Work(
        job=job,
        memory=memory,
        num_turns=lax.div(num_items - cta + (num_ctas - 1), jnp.int32(num_ctas)),
        run_at=lambda turn: _listed_run(job, memory.table, turn * num_ctas + cta),
        layer=lambda: memory.layer[0],
    )
