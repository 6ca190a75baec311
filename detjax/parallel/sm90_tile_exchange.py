# SPDX-License-Identifier: Apache-2.0
"""The ranks' sum in the epilogue of the product that it belongs to.

A CTA of a row-parallel product has one tile of the output, and so has the same CTA of every other
rank. Each sends its accumulator to its peers as it lies in registers, waits for theirs, and adds.
So a thread's words go to the same thread of the same CTA elsewhere, and no layout matters. Bias and
residual stream are added behind, as on one rank, and no launch of its own is needed.

How words travel, and why none is lost or read twice, says `sm90_slots`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from detjax.numerics import Reduction
from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels.linear import sm90 as linear
from detjax.pallas_kernels.linear.sm90_flat_matmul import RanksSum
from detjax.pallas_kernels.linear.tiles import MAX_RANKS_ROWS
from detjax.pallas_kernels.sm90_ptx import LANES, i32, i64
from detjax.parallel.mailbox import Mailbox
from detjax.parallel.sm90_slots import (
    join_words,
    receive,
    send,
    vector_of,
    words_to_send,
)

TILE_WORDS: int = 64 * MAX_RANKS_ROWS
"""Of a tile of 64 channels, so many that a region of slots holds."""

_RUN = 4
"""Words of a load or store: a thread's part of 64 channels by 8 rows."""

_MOST_WORDS = 64
"""That a thread waits for at once, so that they fit in registers beside the accumulator."""


def num_tiles(width: int) -> int:
    """Tiles of a product with so many outputs, each with a region of slots of its own."""
    return -(-width // 64)


@dataclass(frozen=True)
class TileExchange:
    """The ranks of `linear.sm90.linear_add_ranks`.

    `memory` is a `Mailbox` of a region a tile, of TILE_WORDS each.
    """

    def begin(self, memory: tuple, tile) -> tuple:
        """The parity of this exchange of a tile, and the addresses of its peers, in words."""
        peers, _, parities = memory
        words = [peers[d, half] for d in range(peers.shape[0]) for half in range(2)]
        return parities[tile], *words

    def add(self, total, memory: tuple, tile, begun: tuple, *, num_cols: int):
        """This rank's subtree and its peers'.

        # ORDER: ((d0 + d1) + (d2 + d3)) + ..., by XOR distance: additions commute, so this is the
        tree in order of rank, as `sm90_exchange.exchange_add_rms_norm` adds.
        """
        _, slots, parities = memory
        _, tiles, num_peers, region_words = slots.shape
        parity, *words = begun
        layout = plgpu.Layout.WGMMA
        whole = num_cols % 8 in (0, 7)  # a thread has two columns of every eight

        @plgpu.inline_mgpu(
            arg_types=(layout, plgpu.RefType(), plgpu.RefType(), *[ptx.SCALAR] * (2 + len(words))),
            return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=layout),
        )
        def emit(ctx, total, slots, parities, *scalars):
            parity, tile, *words = (value.registers.item() for value in scalars)
            registers = list(total.registers.flat)
            num_runs = len(registers) // 2  # of two rows of channels and two columns each
            runs = [registers[2 * i : 2 * i + 2] for i in range(num_runs)]
            lane = ptx.thread()
            live = None
            if not whole:
                # Columns past the last row are nobody's: their words stay at home.
                column = arith.muli(arith.andi(lane, i32(3)), i32(2))
                is_live = ptx.below(column, i32(num_cols - 8 * (num_runs - 1)))
                live = arith.extui(ptx.int_type(), is_live)
            region = arith.addi(arith.muli(parity, i32(tiles)), tile)
            first = arith.muli(region, i32(num_peers * region_words))
            first = arith.addi(first, arith.muli(lane, i32(_RUN)))
            first = arith.muli(arith.extui(ptx.int_type(64), first), i64(4))

            def offset(distance: int, run: int) -> int:
                return 4 * ((distance - 1) * region_words + run * LANES * _RUN)

            for distance in range(1, num_peers + 1):
                base = arith.addi(join_words(*words[2 * distance - 2 : 2 * distance]), first)
                for i, run in enumerate(runs):
                    sent = [word for register in run for word in words_to_send(register)]
                    send(sent, base, offset(distance, i), live if i == num_runs - 1 else None)
            base = arith.addi(ptx.address(slots, bits=64), first)
            for level in range(num_peers.bit_length()):
                # ORDER: level by level, as the butterfly: distance 1, then 2 and 3, then 4 to 7.
                distances = range(1 << level, 2 << level)
                each = max(1, _MOST_WORDS // (_RUN * len(distances)))
                for low in range(0, num_runs, each):
                    some = range(low, min(low + each, num_runs))
                    _add_level(runs, some, distances, base, offset, live)
            mgpu.utils.warpgroup_barrier()  # all threads have read the parity
            where = arith.index_cast(ir.IndexType.get(), tile)
            memref.store(arith.xori(parity, i32(1)), parities, [where])
            out = total.registers.copy()
            for i, register in enumerate(register for run in runs for register in run):
                out.flat[i] = register
            return mgpu.FragmentedArray(_registers=out, _layout=total.layout, _is_signed=None)

        return emit(total, slots, parities, parity, tile, *words)


def _add_level(runs: list, some: range, distances: range, base, offset, live) -> None:
    """Add what the peers at these distances have of some runs, each peer's subtree whole."""
    # The run of the last columns comes last, as some threads have none of it.
    places = [(base, offset(d, i)) for i in some for d in distances]
    has_last = live is not None and some[-1] == len(runs) - 1
    num_live = len(places) - len(distances) if has_last else None
    words = receive(places, _RUN, num_live, live if has_last else None)
    for at, i in enumerate(some):
        for half in range(2):
            terms = []
            for d in range(len(distances)):
                start = (at * len(distances) + d) * _RUN + 2 * half
                terms.append(vector_of(words[start : start + 2]))
            while len(terms) > 1:
                terms = [arith.addf(a, b) for a, b in zip(terms[0::2], terms[1::2], strict=True)]
            runs[i][half] = arith.addf(runs[i][half], terms[0])


def adds_tiles(x, w) -> bool:
    """Whether `linear_exchange_add` takes a product."""
    return linear.adds_ranks(x, w)


def linear_exchange_add(
    x, w, residual, bias, mailbox: Mailbox, *, reduction: Reduction
) -> jax.Array:
    """See `exchange.ExchangeKernel.linear_exchange_add`."""
    exchange = RanksSum(memory=mailbox, ranks=TileExchange())
    return linear.linear_add_ranks(x, w, residual, bias, exchange, reduction=reduction)
