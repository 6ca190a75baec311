# SPDX-License-Identifier: Apache-2.0
"""The end of a row-parallel layer on Hopper in one launch: exchange, add, and normalise.

Every rank writes its partial into slots of its peers' memory and waits for theirs in its own. A CTA
owns one row; how words travel, and why none is lost or read twice, says `sm90_slots`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.rms_norm import sm90 as norm
from detjax.parallel.mailbox import Mailbox
from detjax.parallel.sm90_slots import RowSlots, flip_parity, receive_chunk, send_chunk


def slot_words(width: int, dtype: jnp.dtype) -> int:
    """Words of a row that a rank sends another: a float32 residual stream has parts."""
    return width * (rows.NUM_PARTS if dtype == jnp.float32 else 1)


def takes_width(width: int) -> bool:
    """Whether rows of so many channels are whole warpgroups."""
    return norm.row_sum(width).is_wide


@functools.partial(jax.jit, static_argnames=("eps",))
def exchange_add_rms_norm(
    leaf_sums, residual, bias, gain, mailbox: Mailbox, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `exchange.exchange_add_rms_norm`.

    Args:
        leaf_sums: This rank's subtrees, float32 [L, M, D] or [L, 3, M, D].
        residual: The residual stream.
        bias: The product's bias, or None.
        gain: Scale of each channel.
        mailbox: Of a region a row, of D or 3 D words.
        eps: Added to the mean square.

    Raises:
        ValueError: If the rows are narrow or too many.

    Numerics:
        # ORDER: this rank's leaves as a tree, then the ranks' subtrees in order of XOR distance,
        ((d0 + d1) + (d2 + d3)) + ...: additions commute, so this is the tree in order of rank.
        Parts so one by one; then they are added, the smallest first.
        # ROUND: the residual stream once; then as `rms_norm` does, by its own functions.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows, width = residual.shape
    num_leaves, num_parts = norm.num_terms(leaf_sums)
    _, max_rows, num_peers, words = mailbox.slots.shape
    form = norm.row_sum(width)
    if not takes_width(width):
        raise ValueError(f"the exchange kernel takes wide rows only, not {width=}")
    if num_rows > max_rows:
        raise ValueError(f"{num_rows} rows are more than the {max_rows} that have slots")
    if words != num_parts * width:
        raise ValueError(f"{mailbox.slots.shape=} are not slots of {num_parts} rows of {width=}")
    chunk = rows.LANES * form.vec_len
    warpgroups = norm.choose_schedule(
        num_rows=num_rows, num_chunks=form.num_parts, num_leaves=num_leaves * num_parts
    ).warpgroups
    if num_parts > 1 and warpgroups == 8:
        warpgroups = 4  # eight have 64 registers a thread, 232 bytes too few on 8 ranks
    each = form.num_parts // warpgroups
    math = rows.strided(chunk, form.vec_len, False)
    places = RowSlots(
        max_rows=max_rows, num_peers=num_peers, width=num_parts * width, vec_len=form.vec_len
    )

    def body(
        leaves_gmem,  # [L, M, D] or [L, 3, M, D] f32
        residual_gmem,  # [M, D]
        bias_gmem,  # [D], or None
        gain_gmem,  # [D]
        mailbox: Mailbox,
        total_gmem,  # [M, D]
        out_gmem,  # [M, D]
        sums_smem,  # [chunks, LANES] f32
        ready,  # all warpgroups have added their squares; None for one warpgroup
    ):
        row = lax.axis_index("cta")
        first_chunk = lax.axis_index("wg") * each if warpgroups > 1 else jnp.int32(0)
        columns = [pl.ds((first_chunk + i) * chunk, chunk) for i in range(each)]

        parity = mailbox.parities[row]

        def own_tree(part, i):
            leaves = norm.load_leaves(leaves_gmem, part, (row, columns[i]), math.load)
            return rows.pairwise(leaves, lambda a, b: a + b)

        def load_rest():
            return (
                [math.load(residual_gmem.at[row, c]) for c in columns],
                [math.load(gain_gmem.at[c]) for c in columns],
            )

        own = []
        for i in range(each):
            for part in range(num_parts):
                own.append(own_tree(part, i))
                place = (parity, row, first_chunk + (part * form.num_parts + i))
                send_chunk(own[-1], math, places, mailbox.peers, *place)
        # WHY: parts read all of it behind the wait: what would wait for it does not fit in
        # registers (5120 channels on 4 ranks spilled 120 bytes, 8192 on 8 720; 2026-11).
        is_late = num_parts > 1
        residuals, gains = ([], []) if is_late else load_rest()

        def ranks_sum(part, i):
            partial = own_tree(part, i) if is_late else own[i]
            at = part * form.num_parts + i
            for level in range(num_peers.bit_length()):
                # ORDER: level by level, as the butterfly: distance 1, then 2 and 3, then 4 to 7.
                distances = range(1 << level, 2 << level)
                others = receive_chunk(
                    distances, math, places, (chunk,),
                    mailbox.slots, parity, row, first_chunk + at,
                )  # fmt: skip
                partial = partial + rows.pairwise(others, lambda a, b: a + b)
            return partial

        values = []
        for i, c in enumerate(columns):
            partial = ranks_sum(num_parts - 1, i)
            for part in reversed(range(num_parts - 1)):
                # ORDER: the smallest part first, (p3 + p2) + p1.
                partial = partial + ranks_sum(part, i)
            if is_late and i == 0:
                residuals, gains = load_rest()
            b = None if bias_gmem is None else math.load(bias_gmem.at[c]).astype(jnp.float32)
            v = norm.joined([partial], residuals[i], b, residual.dtype)
            total_gmem[row, c] = v
            values.append(v.astype(jnp.float32))
            sums_smem[first_chunk + i, :] = rows.square_sums(values[-1], math)
        if warpgroups > 1:
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)
        else:
            plgpu.commit_smem()
        # All threads of the CTA have read it by now.
        flip_parity(mailbox.parities, row, parity)
        scale = norm.wide_scale(sums_smem, math, shape=(chunk,), width=width, eps=eps)
        for c, v, g in zip(columns, values, gains, strict=True):
            normed = math.mul(math.mul(v, scale), g.astype(jnp.float32))
            out_gmem[row, c] = normed.astype(residual.dtype)  # ROUND: once

    shape = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    options = {"num_threads": warpgroups, "thread_name": "wg"} if warpgroups > 1 else {}
    total, out = rows.run_kernel(
        body,
        (leaf_sums, residual, bias, gain, mailbox),
        out=[shape, shape],
        grid={"cta": num_rows},
        name="detjax_exchange_add_rms_norm",
        is_interpreted=False,
        scratch_types=[
            plgpu.SMEM((form.num_parts, rows.LANES), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups) if warpgroups > 1 else None,
        ],
        **options,
    )
    return total, out
