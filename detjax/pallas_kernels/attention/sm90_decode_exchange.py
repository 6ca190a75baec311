# SPDX-License-Identifier: Apache-2.0
"""What the CTAs of a cluster that share a split send each other, through shared memory."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels.attention import sm90_arithmetic as bits

SENT_ROWS = 8
"""Rows of queries that are exchanged: those of a warp's first half of registers."""
SPREAD = 4
"""CTAs of a split: one a block."""


def _is_first_warp():
    return ptx.below(ptx.thread(), ptx.i32(ptx.WARP))


def _address(ref, offset_bytes=0):
    """Where shared memory begins, and bytes from there."""
    if isinstance(offset_bytes, int):
        offset_bytes = ptx.i32(offset_bytes)
    return arith.addi(ptx.address(ref), offset_bytes)


def _in_cta(address, rank):
    """The address of the same shared memory of another CTA of the cluster."""
    [there] = ptx.asm(
        "mapa.shared::cluster.u32 $0, $1, $2;", [address, rank], returns=[ptx.int_type()],
        touches_memory=False, has_side_effects=False,
    )  # fmt: skip
    return there


def _store_remote(address, values, flag, rank) -> None:
    """Write one, two or four 32-bit values to a CTA of the cluster, and count them there."""
    address, vec = _in_cta(address, rank), {1: "", 2: ".v2", 4: ".v4"}[len(values)]
    names = ", ".join(f"${i + 1}" for i in range(len(values)))
    names = f"{{{names}}}" if vec else names
    last = len(values) + 1
    ptx.asm(
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes{vec}.b32 [$0], {names}, [${last}];",
        [address, *values, _in_cta(flag, rank)],
    )


class ClusterExchange:
    """What CTAs of a cluster send each other: to all of their split, or to the first of all.

    Asynchronous stores count their bytes at the receiver's barrier, which waits for no other store.
    """

    def __init__(self, *, is_interpreted, meeting, flags):
        self.is_interpreted = is_interpreted
        self.meeting, self.flags = meeting, flags

    def start(self, wg) -> None:
        """Make the barriers; no one may send before `started`."""
        if self.is_interpreted:
            return

        @pl.when(wg == 0)
        def _init():
            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
            def emit(ctx, flags):
                with mgpu.utils.when(ptx.equals(mgpu.thread_idx(), ptx.i32(0))):
                    for i in range(3):
                        ptx.asm("mbarrier.init.shared.b64 [$0], 1;", [_address(flags, 8 * i)])
                    ptx.asm("fence.mbarrier_init.release.cluster;")

            emit(self.flags)

        # WHY: the fence releases what this waits for, so that the loads behind it need not wait.
        @plgpu.inline_mgpu()
        def arrive(ctx):
            ptx.asm("barrier.cluster.arrive.relaxed;")

        arrive()

    def started(self) -> None:
        """Wait until all CTAs of the cluster have made their barriers."""
        if not self.is_interpreted:

            @plgpu.inline_mgpu()
            def wait(ctx):
                ptx.asm("barrier.cluster.wait.acquire;")

            wait()

    def end(self, wg) -> None:
        """The loading warpgroup's turn of `started`."""
        pl.when(wg == 1)(self.started)

    def meet(self, which: int, turn, num_bytes) -> None:
        """Wait until all have sent."""
        if self.is_interpreted:
            plgpu.barrier_arrive(self.meeting.at[which])
            plgpu.barrier_wait(self.meeting.at[which])
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR, ptx.SCALAR))
        def emit(ctx, flags, parity, num_bytes):
            flag = _address(flags, 8 * which)
            # WHY: no warp may still wait for the phase before the one that may end from here on.
            mgpu.utils.warpgroup_barrier()
            parity, num_bytes = parity.registers.item(), num_bytes.registers.item()
            with mgpu.utils.when(ptx.equals(mgpu.thread_idx(), ptx.i32(0))):
                ptx.asm("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", [flag, num_bytes])
            ptx.asm(
                "{ .reg .pred done; WAIT: "
                "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1; "
                "@!done bra WAIT; }",
                [flag, parity],
            )

        emit(self.flags, jnp.int32(lax.rem(jnp.int32(turn), jnp.int32(2))), jnp.int32(num_bytes))

    def send_rows(self, x, ref, part, group, which: int, math: bits.AttentionArithmetic) -> None:
        """Send one value a row, to place `part` of `ref` in each CTA of the split."""
        if self.is_interpreted:
            ref[part] = x
            return

        @plgpu.inline_mgpu(
            arg_types=(math.row_layout, plgpu.RefType(), plgpu.RefType(), ptx.SCALAR)
        )
        def emit(ctx, x, ref, flags, group):
            lane = ptx.lane()
            with mgpu.utils.when(_is_first_warp()):
                # The four lanes of a row hold its value: each sends to one CTA.
                row, to = arith.divui(lane, ptx.i32(4)), arith.remui(lane, ptx.i32(4))
                rank = arith.addi(arith.muli(group.registers.item(), ptx.i32(SPREAD)), to)
                value = _bits_of(x.registers[0, 0, 0, 0, 0])
                at = _address(ref, arith.muli(row, ptx.i32(4)))
                _store_remote(at, [value], _address(flags, 8 * which), rank)

        emit(x, ref.at[part], self.flags, group)

    def send_weights(self, x, ref, part, group, which: int) -> None:
        """Send a block's weights, as each lane of the first warp has them."""
        if self.is_interpreted:
            ref[part] = x
            return

        @plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), ptx.SCALAR)
        )
        def emit(ctx, x, ref, flags, group):
            registers = list(x.registers[:, :, :, :, 0].flat)
            with mgpu.utils.when(_is_first_warp()):
                words = [_bits_of(r) for r in registers]
                base = arith.muli(ptx.lane(), ptx.i32(16))
                flag = _address(flags, 8 * which)
                for to in range(SPREAD):
                    rank = arith.addi(
                        arith.muli(group.registers.item(), ptx.i32(SPREAD)),
                        ptx.i32(to),
                    )
                    for i in range(0, len(words), 4):
                        at = _address(ref, arith.addi(base, ptx.i32(i * 128)))
                        _store_remote(at, words[i : i + 4], flag, rank)

        emit(x, ref.at[part], self.flags, group)

    def send_out(self, out, ref, split, first_channel, num_rows: int, channels: int) -> None:
        """Send a share of a split's output to the first CTA."""
        if self.is_interpreted:
            for row in range(num_rows):
                ref[split, pl.ds(row * channels + first_channel, out.shape[1])] = out[row]
            return

        @plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), ptx.SCALAR)
        )
        def emit(ctx, out, ref, flags, first):
            words = [ptx.words_of(r) for r in out.registers[:, :, :, :, 0].flat]
            with mgpu.utils.when(_is_first_warp()):
                lane = ptx.lane()
                row, pair = arith.divui(lane, ptx.i32(4)), arith.remui(lane, ptx.i32(4))
                col = arith.addi(first.registers.item(), arith.muli(pair, ptx.i32(2)))
                at = arith.addi(arith.muli(row, ptx.i32(channels)), col)
                for i, two in enumerate(words):
                    offset = arith.addi(at, ptx.i32(8 * i))
                    where = _address(ref, arith.muli(offset, ptx.i32(4)))
                    flag = _address(flags, 16)
                    _store_remote(where, two, flag, ptx.i32(0))

        emit(out, ref.at[split], self.flags, first_channel)

    def send_to_leader(self, x, ref) -> None:
        """Send one value a row to the first CTA."""
        num_rows = ref.shape[0]
        if self.is_interpreted:
            ref[...] = x[:num_rows]
            return

        @plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WGMMA.reduce(1), plgpu.RefType(), plgpu.RefType())
        )
        def emit(ctx, x, ref, flags):
            lane = ptx.lane()
            is_one = ptx.equals(arith.remui(lane, ptx.i32(4)), ptx.i32(0))
            with mgpu.utils.when(arith.andi(_is_first_warp(), is_one)):
                # Four lanes a row, four bytes a value: lane 4 r writes at byte 4 r.
                word = _bits_of(x.registers[0, 0, 0, 0, 0])
                _store_remote(_address(ref, lane), [word], _address(flags, 16), ptx.i32(0))

        emit(x, ref, self.flags)


def _bits_of(register):
    """A register of 32 bits as an integer."""
    if isinstance(register.type, ir.VectorType) and ir.VectorType(register.type).shape == [1]:
        [word] = ptx.words_of(register)
        return word
    return mgpu.utils.bitcast(register, ptx.int_type())


def read_weights(ref, math: bits.AttentionArithmetic, dtype):
    """A block's weights as an operand of wgmma, as the first warp sent them."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((bits.ROWS, bits.BLOCK), dtype, layout=math.layout),
    )
    def op(ctx, ref):
        i32 = ptx.int_type()
        four, pair = ir.VectorType.get((4,), i32), ir.VectorType.get((2,), ir.BF16Type.get())
        first = mgpu.utils.memref_ptr(ref)
        words = []
        for i in range(4):
            lane = arith.muli(ptx.lane(), ptx.i32(4))
            at = mgpu.utils.getelementptr(first, [arith.addi(lane, ptx.i32(i * 128))], i32)
            loaded = llvm.load(four, at)
            words += [ptx.element(loaded, j) for j in range(4)]
        registers = np.empty((1, 16, 1, 1, 1, 1, 1, 1, 1), dtype=object)
        for i, word in enumerate(words):
            registers[0, i, 0, 0, 0, 0, 0, 0, 0] = mgpu.utils.bitcast(word, pair)
        return bits.with_first_half(registers, mgpu.WGMMA_LAYOUT, bits.HALVES_AXIS[2])

    return op(ref)
