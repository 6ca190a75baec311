# SPDX-License-Identifier: Apache-2.0
"""Attention of up to 64 query rows a key/value head: one pass over the cache.

Three schedules of one arithmetic, a file each: a CTA takes a split, whose partial result a second
kernel merges (`sm90_decode_splits`), or all splits of a sequence (`sm90_decode_sequences`); or a
cluster of CTAs takes a sequence and merges its splits in shared memory (`sm90_decode_cluster`).
"""

import functools

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_decode_cluster import attend_clusters
from detjax.pallas_kernels.attention.sm90_decode_job import DecodeConfig, Job, Operands
from detjax.pallas_kernels.attention.sm90_decode_merge import LANES
from detjax.pallas_kernels.attention.sm90_decode_sequences import attend_sequences
from detjax.pallas_kernels.attention.sm90_decode_splits import attend_splits, rows_lie_in_place
from detjax.pallas_kernels.attention.sm90_decode_spread import attend_spread
from detjax.pallas_kernels.attention.sm90_new_token import NewToken


@functools.partial(jax.jit, static_argnames=("config", "is_interpreted"))
def decode(
    q, pages, page_table, positions, layer, *, config: DecodeConfig, is_interpreted: bool
) -> jax.Array:
    """See `sm90.attention`."""
    batch, query_len, num_heads, channels = q.shape
    kv_heads = pages.shape[3]
    group = num_heads // kv_heads
    num_rows = query_len * group
    padded_rows = -(-num_rows // 8) * 8
    row_positions = jnp.pad(
        jnp.repeat(positions, group, axis=1),
        ((0, 0), (0, bits.ROWS - num_rows)),
        constant_values=-1,
    )
    if query_len == 1 and rows_lie_in_place(group, channels):
        # The heads as they lie: a copy starts at a multiple of 8 rows, so that it may hold rows of
        # other heads, whose results nothing reads.
        rows = q.reshape(batch * num_heads, channels)
        rows_apart = group
        if 8 % group and group % 8:
            padded_rows = -(-(group + 7) // 8) * 8
        row_positions = jnp.broadcast_to(positions, row_positions.shape)
    else:
        rows = q.reshape(batch, query_len, kv_heads, group, channels).transpose(0, 2, 1, 3, 4)
        rows = rows.reshape(batch * kv_heads, num_rows, channels)
        rows = jnp.pad(rows, ((0, 0), (0, padded_rows - num_rows), (0, 0)))
        rows = rows.reshape(-1, channels)
        rows_apart = padded_rows
    missing = max(padded_rows - rows.shape[0], -rows.shape[0] % 8)
    if missing:
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
    job = Job(
        batch=batch, query_len=query_len, kv_heads=kv_heads, group=group, channels=channels,
        num_pages=pages.shape[1], padded_rows=padded_rows, rows_apart=rows_apart, dtype=q.dtype,
        new_token=None, config=config, is_interpreted=is_interpreted,
    )  # fmt: skip
    operands = Operands(
        queries=(rows,), page_rows=bits.page_rows(pages), row_positions=row_positions,
        page_table=page_table, positions=positions, layer=layer,
    )  # fmt: skip
    return _attend(job, operands).reshape(q.shape)


@functools.partial(jax.jit, static_argnames=("eps", "config", "is_interpreted"))
def decode_new_token(
    qkv, cos, sin, gains, pages, page_table, positions, layer, prefetch=None,
    *, eps: float, config: DecodeConfig, is_interpreted: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Normalise and rotate inside the attention kernel; see `api.rope_attention`, with T = 1.

    The CTA of a sequence's last split puts the key and the value in the cache. Where the
    configuration says so, CTAs ask the weights `prefetch` into the L2 cache.
    """
    kv_heads, _, channels = pages.shape[3:]
    batch, num_heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
    group = num_heads // kv_heads
    padded_rows = -(-group // 8) * 8
    row_positions = positions
    if not config.cluster:
        row_positions = jnp.broadcast_to(positions, (batch, bits.ROWS))
    pages_ref = jax.new_ref(bits.page_rows(pages))
    job = Job(
        batch=batch, query_len=1, kv_heads=kv_heads, group=group, channels=channels,
        num_pages=pages.shape[1], padded_rows=padded_rows, rows_apart=padded_rows,
        dtype=qkv.dtype, config=config, is_interpreted=is_interpreted,
        new_token=NewToken(
            kv_heads=kv_heads, group=group, channels=channels, eps=eps,
            is_interpreted=is_interpreted,
        ),
    )  # fmt: skip
    operands = Operands(
        queries=(qkv, cos, sin, *(gains or ())), page_rows=pages_ref, row_positions=row_positions,
        page_table=page_table, positions=positions, layer=layer, prefetch=prefetch,
    )  # fmt: skip
    out = _attend(job, operands).reshape(batch, 1, num_heads, channels)
    return out, jax.freeze(pages_ref).reshape(pages.shape)


def _attend(job: Job, operands: Operands) -> jax.Array:
    """By the schedule of the configuration."""
    config, query_len = job.config, job.query_len
    if (config.cluster or config.scores_ahead) and (query_len != 1 or config.whole_sequences):
        raise ValueError(f"{config=} needs {query_len=} to be 1, and no whole sequences")
    has_turns = not config.cluster and (job.new_token is not None or not config.whole_sequences)
    if config.num_compute > 1 and not has_turns:
        raise ValueError(
            f"{config.num_compute=} needs no cluster, and whole sequences of new tokens alone"
        )
    if config.spread:
        return attend_spread(job, operands)
    if config.cluster:
        if job.group * job.channels < LANES:
            raise ValueError(
                f"a cluster merges {LANES} elements at once: {job.group=}, {job.channels=}"
            )
        return attend_clusters(job, operands)
    return (attend_sequences if config.whole_sequences else attend_splits)(job, operands)
