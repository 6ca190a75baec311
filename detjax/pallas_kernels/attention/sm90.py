# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache on Hopper: prefill, and schedules of decode, of one arithmetic.

Decode has up to 64 query rows a key/value head. A CTA takes a split, whose partial result a second
kernel merges, or all splits of a sequence (`sm90_decode_listed`); or a cluster of CTAs takes a
sequence and merges its splits in shared memory (`sm90_decode_cluster`), or shares each split
(`sm90_decode_spread`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention import sm90_float32
from detjax.pallas_kernels.attention.sm90_decode_cluster import PARTIAL_BYTES, attend_clusters
from detjax.pallas_kernels.attention.sm90_decode_exchange import SENT_ROWS, SPREAD
from detjax.pallas_kernels.attention.sm90_decode_job import DecodeConfig, Job, Operands
from detjax.pallas_kernels.attention.sm90_decode_listed import (
    attend_sequences,
    attend_splits,
    rows_lie_in_place,
)
from detjax.pallas_kernels.attention.sm90_decode_spread import SPREAD_CHANNELS, attend_spread
from detjax.pallas_kernels.attention.sm90_new_token import NewToken
from detjax.pallas_kernels.attention.sm90_prefill import PrefillConfig, prefill
from detjax.pallas_kernels.float8_cache import holds_float8
from detjax.pallas_kernels.output_gate.sm90 import sigmoid_gate
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.rotation import Rotation, num_gated_heads
from detjax.pallas_kernels.rope.sm90 import rope_into_cache
from detjax.pallas_kernels.sm90_hardware import LANES, NUM_SMS

CHANNELS = (64, 96, 128, 256)
DECODE_CHANNELS = (64, 128, 256)
BUSY_PAIRS = 256  # of a sequence and a kv head, about two for each CTA
MAX_FOLDED_SPLITS = 8  # of a sequence, so that one long sequence does not hold up a batch
MAX_IN_CLUSTER = 8  # CTAs, as far as every Hopper GPU goes
MOST_NEW_TOKENS = 8  # of a sequence, that one launch rotates and attends from

# What a decode step does in one launch; each changes no bit.
FUSE_ROPE = True
"""Rotate the new token, and put it in the cache, inside attention."""
SPREAD_SPLITS = True
"""Share each split of few sequences among the CTAs of a cluster, a block each.

6.8 us a layer instead of 10.3 at batch 1 and 1024 keys.
"""
PREFETCHED = 12 << 20
"""Bytes of the next product's weights that shared splits ask into the L2 cache; 0 asks for none.

Decode of one sequence, Qwen3-30B-A3B: 2.60 ms a step, 2.66 without, 2.63 with 8 or 16 MiB.
"""
PREFETCHED_BEHIND = 4 << 20
"""Likewise, of clusters of two and more that share no split, behind the last page of each CTA.

8 sequences of 1024 keys, 16 layers, an H100: 3.206 ms a step, 3.226 without, 3.213 with 8 MiB. Of
16 or 64 sequences, whose CTAs are no clusters, such requests gain nothing.
"""
MOST_CTAS = 96
"""Of clusters of four and more: what is sure to be resident at once, whatever a GPC has of SMs."""
DECODE_WARPGROUPS = 2
"""Warpgroups of a CTA that take splits, or whole sequences of new tokens, in turn.

256 sequences of 576 keys: 152 us a layer, 176 with one (8 kv heads).
"""
KEYS_AT_ONCE = 32
"""Load a sequence's last page up to a multiple of so many keys; 128 loads all of it."""


def is_decode(query_len: int, group: int, channels: int, window: int | None) -> bool:
    """Whether splits, rather than query rows, are what is spread over CTAs.

    So they are where a sequence's rows fit one tile; not with a window, nor at 96 channels.
    """
    return query_len * group <= bits.ROWS and channels in DECODE_CHANNELS and window is None


def attention(
    q,
    place: CachePlace,
    *,
    window: int | None,
    profile: NumericsProfile,
    softcap: float | None = None,
    sinks=None,
    is_interpreted: bool = False,
) -> jax.Array:
    """See `api.attention`.

    Raises:
        NotImplementedError: For another dtype than bfloat16 or float32, other channels than 64, 96,
            128 and 256, another block than 128, or sinks or a soft cap of float32 activations.

    Numerics:
        Scores: wgmma, K in order, 16 at a time, float32. Weights: `ex2(fma(score, scale, -m))`
        with `scale = log2(e) / sqrt(C)` rounded to float32; with a soft cap, `ex2(capped - m)` of
        `sm90_rows.Arithmetic.soft_cap`. A block's weights are added in one
        fixed tree. Within a split the output is scaled by `ex2(m - new_m)` and takes the block's
        products on the tensor core's accumulator; splits are folded left to right by
        `fma(out, a, other * b)`, and a sink is one more. Division by multiplying with the rounded
        reciprocal of the sum; one rounding to bfloat16. Masked keys weigh exactly 0 and a fully
        masked block or split scales by exactly 1, so the rows that share a tile do not matter. What
        differs with float32 says `sm90_float32.attention`.
        Claims: run-invariant, batch-invariant, schedule-invariant, path-consistent,
        mesh-invariant. Holds while keys and values are finite.
    """
    pages, page_table = place.pages, place.page_table
    _check(q, pages, profile)
    # WHY: the layer is an operand, so that all layers share one compiled kernel.
    place = place._replace(layer=jnp.int32(place.layer))
    per_split = profile.attention_split // profile.attention_block
    if q.dtype == jnp.float32:
        if sinks is not None or softcap is not None:
            raise NotImplementedError("attention on sm90 has sinks and soft caps in bfloat16 alone")
        return sm90_float32.attention(
            q, place, window=window, per_split=per_split, is_interpreted=is_interpreted
        )
    group = q.shape[2] // pages.shape[3]
    if is_decode(q.shape[1], group, q.shape[3], window):
        config = decode_config(
            batch=q.shape[0], query_len=q.shape[1], kv_heads=pages.shape[3], group=group,
            channels=q.shape[3], table_len=page_table.shape[1], per_split=per_split,
            has_sinks=sinks is not None, reads_float8=holds_float8(pages),
        )  # fmt: skip
        config = dataclasses.replace(config, softcap=softcap)
        return decode(q, place, sinks, config=config, is_interpreted=is_interpreted)
    config = PrefillConfig(
        blocks_per_split=per_split, softcap=softcap, reads_float8=holds_float8(pages)
    )
    return prefill(q, place, sinks, window=window, config=config, is_interpreted=is_interpreted)


def rope_attention(
    qkv, rotation: Rotation, place: CachePlace,
    *, window: int | None, eps: float, profile: NumericsProfile, prefetch=None, sinks=None,
    is_gated: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.rope_attention`.

    Raises:
        NotImplementedError: As `attention`.

    Numerics:
        The functions of `rope_into_cache`, `attention` and `sigmoid_gate`, in one launch or in
        several.
        Claims: run-invariant, batch-invariant, schedule-invariant, path-consistent,
        mesh-invariant. Holds while keys and values are finite.
    """
    pages = place.pages
    _check(qkv, pages, profile)
    batch, query_len = place.positions.shape
    kv_heads, channels = pages.shape[3], pages.shape[5]
    num_heads = num_gated_heads(qkv, pages, is_gated)
    group = num_heads // kv_heads
    place = place._replace(layer=jnp.int32(place.layer))
    has_fused_kernel = FUSE_ROPE and qkv.dtype == jnp.bfloat16
    if (
        has_fused_kernel
        and query_len <= MOST_NEW_TOKENS
        and is_decode(query_len, group, channels, window)
    ):
        config = decode_config(
            batch=batch, query_len=query_len, kv_heads=kv_heads, group=group, channels=channels,
            table_len=place.page_table.shape[1],
            per_split=profile.attention_split // profile.attention_block, is_new=True,
            has_sinks=sinks is not None, reads_float8=holds_float8(pages),
        )  # fmt: skip
        if query_len == 1 or config.cluster:
            return decode_new_token(
                qkv, rotation, place, prefetch if config.prefetched else None, sinks,
                num_heads=num_heads, eps=eps, config=config, is_gated=is_gated,
                is_interpreted=False,
            )  # fmt: skip
    q, pages = rope_into_cache(qkv, rotation, place, num_heads=num_heads, eps=eps)
    q = q.reshape(batch, query_len, num_heads, channels)
    place = place._replace(pages=pages)
    out = attention(q, place, window=window, profile=profile, sinks=sinks)
    return _gated(out, qkv) if is_gated else out, pages


def _gated(out, qkv, is_interpreted: bool = False) -> jax.Array:
    """Gate results by the last heads of the rows, in a launch of its own."""
    rows, gates = (x.reshape(len(qkv), -1) for x in (out, qkv))
    return sigmoid_gate(rows, gates, interpret=is_interpreted).reshape(out.shape)


def decode_config(
    *,
    batch: int,
    query_len: int,
    kv_heads: int,
    group: int,
    channels: int,
    table_len: int,
    per_split: int,
    is_new: bool = False,
    has_sinks: bool = False,
    reads_float8: bool = False,
) -> DecodeConfig:
    """How decode spreads its work: for speed alone.

    `is_new` says that it rotates a new token, `has_sinks` that a second kernel merges, as only that
    has them.
    """
    # WHY: many small CTAs hide latency by their number, few by what each has in flight
    # (256 x 1024 tokens: 269.8 us against 279.2; 1 x 32768: 46.8 against 42.9).
    unroll = (4, 1) if batch * query_len * kv_heads * group >= 1024 else (16, 2)
    splits = -(-table_len // per_split)
    pairs = batch * kv_heads
    # A group that straddles a multiple of 8 rows may take 8 more.
    rows = 8 * (-(-group // 8) + (1 if 8 % group and group % 8 else 0))
    fits = group * channels >= LANES and splits * rows * channels * 4 <= PARTIAL_BYTES
    is_wide = channels > bits.SPAN_CHANNELS
    # A CTA a block, as long as there is one for each at once.
    spread = SPREAD_SPLITS and is_new and query_len == 1 and per_split == SPREAD
    spread = spread and channels in SPREAD_CHANNELS and group <= SENT_ROWS
    spread = spread and SPREAD * pairs <= MOST_CTAS and not (is_wide and reads_float8)
    fits = fits and (spread or not is_wide)
    cluster = 0
    if query_len > 1:
        fits = is_new and group * channels >= LANES and splits <= MAX_IN_CLUSTER and not is_wide
        # No GPU has run windows on pages of float8 in one launch.
        fits = fits and not reads_float8
    if fits and pairs <= NUM_SMS and not has_sinks:
        # A CTA a split, or a token to merge, as long as all CTAs are resident at once.
        cluster = 1
        while cluster < max(splits, query_len) and cluster < MAX_IN_CLUSTER:
            # WHY: 32 clusters of 4 are not: 18.6 us, and 11.2 in twos (8 x 1024 keys, 4 kv heads).
            if 2 * cluster * pairs > (MOST_CTAS if cluster > 1 else NUM_SMS):
                break
            cluster *= 2
    if spread := spread and bool(cluster):
        cluster = 2 * SPREAD if splits > 1 and 2 * SPREAD * pairs <= MOST_CTAS else SPREAD
        # WHY: of wide heads one turn is in flight. One sequence of 16 and 2 heads, by a cluster and
        # by splits: 10.4 and 13.0 us in one turn (1024 keys), 15.7 and 13.1 in two, 24.9 in four.
        # The table's length decides, and its sequences may be shorter.
        if is_wide and splits * SPREAD > 2 * cluster:
            cluster, spread = 0, False
    # WHY: with CTAs busy anyway, folding in registers saves a kernel (64 x 1024 tokens: 65.0 us
    # against 75.6), while a few short sequences need no merge. Others need all CTAs.
    most_folded = MAX_FOLDED_SPLITS if pairs >= BUSY_PAIRS else 1
    whole = not cluster and splits <= most_folded and not (has_sinks or is_wide)
    takes_turns = not cluster and (is_new or not whole) and not is_wide
    num_compute = DECODE_WARPGROUPS if takes_turns else 1
    return DecodeConfig(
        blocks_per_split=per_split,
        merge_unroll=unroll,
        whole_sequences=whole,
        num_compute=num_compute,
        cluster=cluster,
        spread=spread,
        scores_ahead=query_len == 1 and not (whole or spread or num_compute > 1 or is_wide),
        keys_at_once=KEYS_AT_ONCE,
        reads_float8=reads_float8,
        prefetched=PREFETCHED if spread else PREFETCHED_BEHIND if is_new and cluster > 1 else 0,
    )


@functools.partial(jax.jit, static_argnames=("config", "is_interpreted"))
def decode(
    q, place: CachePlace, sinks=None, *, config: DecodeConfig, is_interpreted: bool
) -> jax.Array:
    """See `sm90.attention`."""
    pages, page_table, positions, layer = place
    batch, query_len, num_heads, channels = q.shape
    kv_heads = pages.shape[3]
    group = num_heads // kv_heads
    num_rows = query_len * group
    padded_rows = -(-num_rows // 8) * 8
    row_positions = _row_positions(positions, group)
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
        page_table=page_table, positions=positions, layer=layer, sinks=sinks,
    )  # fmt: skip
    return _attend(job, operands).reshape(q.shape)


def _row_positions(positions, group: int) -> jax.Array:
    """Positions of the rows of a tile, [B, ROWS]: those of a token's heads, then the next's."""
    num_rows = positions.shape[1] * group
    rows = jnp.repeat(positions, group, axis=1)
    return jnp.pad(rows, ((0, 0), (0, bits.ROWS - num_rows)), constant_values=-1)


@functools.partial(
    jax.jit, static_argnames=("num_heads", "eps", "config", "is_gated", "is_interpreted")
)
def decode_new_token(
    qkv, rotation: Rotation, place: CachePlace, prefetch=None, sinks=None,
    *, num_heads: int, eps: float, config: DecodeConfig, is_gated: bool = False,
    is_interpreted: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Normalise and rotate inside the attention kernel; see `api.rope_attention`.

    The CTA that has the page of a new token puts its key and value there. Several tokens of a
    sequence are for clusters alone. Where the configuration says so, CTAs ask the weights
    `prefetch` into the L2 cache. A cluster gates what it merges; of other schedules gates take a
    launch.
    """
    pages, page_table, positions, layer = place
    kv_heads, _, channels = pages.shape[3:]
    batch, query_len = positions.shape
    group = num_heads // kv_heads
    padded_rows = -(-query_len * group // 8) * 8
    row_positions = positions
    if query_len > 1:
        row_positions = _row_positions(positions, group)
    elif not config.cluster:
        row_positions = jnp.broadcast_to(positions, (batch, bits.ROWS))
    pages_ref = jax.new_ref(bits.page_rows(pages))
    job = Job(
        batch=batch, query_len=query_len, kv_heads=kv_heads, group=group, channels=channels,
        num_pages=pages.shape[1], padded_rows=padded_rows, rows_apart=padded_rows,
        dtype=qkv.dtype, config=config, is_interpreted=is_interpreted,
        new_token=NewToken(
            kv_heads=kv_heads, group=group, channels=channels, query_len=query_len, eps=eps,
            is_float8=config.reads_float8, is_interpreted=is_interpreted,
        ),
    )  # fmt: skip
    operands = Operands(
        queries=(qkv, rotation.cos, rotation.sin, *(rotation.gains or ())), page_rows=pages_ref,
        row_positions=row_positions, page_table=page_table, positions=positions, layer=layer,
        prefetch=prefetch, sinks=sinks,
        gates=qkv.reshape(len(qkv), -1) if is_gated and config.cluster else None,
    )  # fmt: skip
    out = _attend(job, operands).reshape(batch, query_len, num_heads, channels)
    if is_gated and operands.gates is None:
        out = _gated(out, qkv, is_interpreted)
    return out, jax.freeze(pages_ref).reshape(pages.shape)


def _attend(job: Job, operands: Operands) -> jax.Array:
    """By the schedule of the configuration."""
    config, query_len = job.config, job.query_len
    if operands.sinks is not None and (config.cluster or config.whole_sequences):
        raise ValueError(f"{config=} has no sinks: they need neither a cluster nor whole sequences")
    is_window = query_len > 1
    if is_window and (config.spread or config.scores_ahead):
        raise ValueError(f"{config=} needs {query_len=} to be 1")
    if is_window and bool(config.cluster) is (job.new_token is None):
        raise ValueError(f"{query_len=} new tokens need a cluster, and others none: {config=}")
    if (config.cluster or config.scores_ahead) and config.whole_sequences:
        raise ValueError(
            f"{config=} has whole sequences, which need no cluster and no scores ahead"
        )
    if job.is_wide and (
        (config.cluster and not config.spread)
        or config.scores_ahead or config.whole_sequences or config.num_compute > 1
    ):  # fmt: skip
        raise ValueError(
            f"heads of {job.channels=} are computed by splits, one warpgroup a CTA, with no scores "
            f"ahead, and merged by a second kernel, or spread over a cluster: {config=}"
        )
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


def _check(x, pages, profile: NumericsProfile) -> None:
    """Refuse what the kernels do not do; the last axis of `x` is channels."""
    is_float8 = holds_float8(pages) and x.dtype == jnp.bfloat16
    if x.dtype not in (jnp.bfloat16, jnp.float32) or pages.dtype != x.dtype and not is_float8:
        raise NotImplementedError(
            f"attention on sm90 is bfloat16 or float32, not {x.dtype} with {pages.dtype}"
        )
    if x.shape[-1] not in CHANNELS:
        raise NotImplementedError(f"attention on sm90 has {CHANNELS} channels, not {x.shape[-1]}")
    if is_float8 and x.shape[-1] > bits.SPAN_CHANNELS:
        raise NotImplementedError(
            f"attention on sm90 has no heads of {x.shape[-1]} channels with a cache of float8; use "
            "kv_cache_dtype auto, or another backend"
        )
    if profile.attention_block != bits.BLOCK:
        raise NotImplementedError(f"{profile.attention_block=} must be {bits.BLOCK} on sm90")
