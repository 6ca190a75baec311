# SPDX-License-Identifier: Apache-2.0
"""Words that ranks write into one another's memory: how the exchange kernels send and wait.

A word of a slot says for itself whether it has arrived, so there is no flag, no fence and no second
round trip; NVLink is crossed once.

Why nothing is lost or read twice. Slots belong to regions, of which a CTA owns one at a time. They
are double: exchange e of a region uses those of parity e mod 2, and each rank counts for itself, so
ranks that run the same programs agree.

1. A slot holds EMPTY in every word until its peer writes it: at first because `open_exchange` fills
   it, later because the thread that read a word writes EMPTY back before it ends.
2. A peer writes the words of exchange e + 2 only after its exchange e + 1 of that region, which
   waited for this rank's words of e + 1. This rank sends those after its kernel of exchange e has
   ended, with every word of e read and emptied. So no slot is written before it is empty, though
   one peer runs ahead of another by up to one exchange.
3. A word that reads as EMPTY has not come; any other word is whole, since 32 bits are written at
   once. Data never equals EMPTY: it is one NaN, and the sender puts NVIDIA's default NaN in its
   place, which is what any sum of it is.
4. A CTA sends before it waits and waits for the same CTA of its peers alone, so CTAs need not
   all be resident at once.

A rank whose peer never sends gives up after about a minute with a launch failure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.sm90_ptx import i32, i64

EMPTY: int = 0xFFFFFFFF
"""A word that no peer has written."""

_DEFAULT_NAN = 0x7FFFFFFF
_MOST_POLLS = 1 << 26
"""About a minute: a poll takes a microsecond."""


def join_words(low, high):
    """An address of its two words."""
    kind = ptx.int_type(64)
    return arith.addi(arith.extui(kind, low), arith.shli(arith.extui(kind, high), i64(32)))


def words_to_send(register) -> list:
    """The 32-bit words of a vector of float32, none of them EMPTY."""
    (size,) = ir.VectorType(register.type).shape
    as_int = vector.bitcast(ir.VectorType.get((size,), ptx.int_type()), register)
    words = [ptx.element(as_int, i) for i in range(size)]
    is_empty = [ptx.equals(word, i32(EMPTY)) for word in words]
    return [
        arith.select(flag, i32(_DEFAULT_NAN), word)
        for flag, word in zip(is_empty, words, strict=True)
    ]


def vector_of(words: Sequence):
    """A vector of float32 from its words."""
    f32 = ir.F32Type.get()
    values = [arith.bitcast(f32, word) for word in words]
    return vector.from_elements(ir.VectorType.get((len(words),), f32), values)


def _vector(words: int) -> str:
    return {1: ".b32", 2: ".v2.b32", 4: ".v4.b32"}[words]


def _listed(registers: list[str]) -> str:
    return registers[0] if len(registers) == 1 else "{" + ", ".join(registers) + "}"


def send(words: list, address, offset: int = 0, live=None) -> None:
    """Write 1, 2 or 4 words to a peer, `offset` bytes from an address; if `live` is not 0."""
    registers = _listed([f"${1 + i}" for i in range(len(words))])
    store = f"st.relaxed.sys.global{_vector(len(words))} [$0 + {offset}], {registers};"
    if live is None:
        ptx.asm(store, [address, *words])
        return
    test = f"{{ .reg .pred live; setp.ne.u32 live, ${1 + len(words)}, 0; @live {store} }}"
    ptx.asm(test, [address, *words, live])


def receive(places: list[tuple], words: int, num_live: int | None = None, live=None) -> list:
    """Wait for runs of 1, 2 or 4 words in this rank's slots, all at once, and empty them.

    Args:
        places: Of each run, an address and bytes from it.
        words: Of a run.
        num_live: How many runs a thread always waits for, of the first; the others only if `live`
            is not 0, and are 0 otherwise. All if None.
        live: Whether they are waited for.

    Returns:
        The words, run after run.
    """
    total = len(places) * words
    addresses = list(dict.fromkeys(address for address, _ in places))
    operands = addresses + ([] if live is None else [live])
    where = [f"[${total + addresses.index(address)} + {offset}]" for address, offset in places]
    registers = [f"${i}" for i in range(total)]
    runs = [_listed(registers[i * words : (i + 1) * words]) for i in range(len(places))]
    first_maybe = len(places) if num_live is None or live is None else num_live
    guards = ["" if i < first_maybe else "@live " for i in range(len(places))]
    zeros = [f"mov.u32 {register}, 0;" for register in registers[first_maybe * words :]]
    loads = [
        f"{guard}ld.relaxed.sys.global{_vector(words)} {run}, {place};"
        for guard, run, place in zip(guards, runs, where, strict=True)
    ]
    empty = _listed([str(EMPTY)] * words)
    resets = [
        f"{guard}st.relaxed.sys.global{_vector(words)} {place}, {empty};"
        for guard, place in zip(guards, where, strict=True)
    ]
    text = [
        "{",
        ".reg .pred missing; .reg .pred stuck; .reg .pred live; .reg .u32 most; .reg .u32 polls;",
        "mov.u32 polls, 0;",
        *([f"setp.ne.u32 live, ${total + len(addresses)}, 0;"] if live is not None else []),
        *zeros,
        "POLL:",
        *loads,
        f"mov.u32 most, {registers[0]};",
        *(f"max.u32 most, most, {register};" for register in registers[1:]),
        f"setp.eq.u32 missing, most, {EMPTY};",
        "add.u32 polls, polls, 1;",
        f"setp.gt.u32 stuck, polls, {_MOST_POLLS};",
        "@stuck trap;",
        "@missing bra POLL;",
        *resets,
        "}",
    ]
    return ptx.asm("\n".join(text), operands, returns=[ptx.int_type()] * total, apart=True)


def _remote_slots(peers, distance: int):
    """Address of the slots of the rank whose index differs from this one's by `distance`, in XOR.

    `peers` is [tp - 1, 2]: the low and the high word of each.
    """
    index = ir.IndexType.get()
    return join_words(
        *(memref.load(peers, [mgpu.c(distance - 1, index), mgpu.c(i, index)]) for i in range(2))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSlots:
    """Where the words of one thread, of one chunk of one row, are in slots [2, R, tp - 1, W].

    Attributes:
        max_rows: R.
        num_peers: tp - 1.
        width: W, of all that a row has.
        vec_len: Words of a thread, of a chunk of 128 threads.
    """

    max_rows: int
    num_peers: int
    width: int
    vec_len: int

    @property
    def words(self) -> int:
        """Words of one load or store: 16 bytes at most."""
        return min(4, self.vec_len)

    def offsets(self, parity, row, chunk) -> list:
        """Bytes from the first slot to each run of `words`, a list for each peer.

        Runs of a warp stand side by side, so a store of a warp is one contiguous piece.
        """
        thread = ptx.thread()
        first = arith.addi(arith.muli(parity, i32(self.max_rows)), row)
        first = arith.muli(first, i32(self.num_peers * self.width))
        first = arith.addi(first, arith.muli(chunk, i32(rows.LANES * self.vec_len)))
        first = arith.addi(first, arith.muli(thread, i32(self.words)))
        first = arith.muli(arith.extui(ptx.int_type(64), first), i64(4))
        return [
            [
                arith.addi(first, i64(4 * (peer * self.width + run * rows.LANES)))
                for run in range(0, self.vec_len, self.words)
            ]
            for peer in range(self.num_peers)
        ]


def send_chunk(
    values, math: rows.Arithmetic, slots: RowSlots, peers_gmem, parity, row, chunk
) -> None:
    """Write a chunk of this rank's partial into the slots of every peer."""

    @plgpu.inline_mgpu(arg_types=(math.layout, plgpu.RefType(), ptx.SCALAR, ptx.SCALAR, ptx.SCALAR))
    def emit(ctx, values, peers, *place):
        (register,) = values.registers.flat
        words = words_to_send(register)
        offsets = slots.offsets(*(value.registers.item() for value in place))
        count = slots.words
        for distance, runs in enumerate(offsets, start=1):
            base = _remote_slots(peers, distance)
            for i, offset in enumerate(runs):
                send(words[i * count : (i + 1) * count], arith.addi(base, offset))

    emit(values, peers_gmem, parity, row, chunk)


def receive_chunk(
    distances: range, math: rows.Arithmetic, slots: RowSlots, shape, slots_gmem, parity, row, chunk
) -> list:
    """Wait for the same chunk of the peers at these distances, and empty their slots."""
    layout: Any = math.layout
    kind = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ptx.SCALAR, ptx.SCALAR, ptx.SCALAR),
        return_type=[kind] * len(distances),
    )
    def emit(ctx, memory, *place):
        base = ptx.address(memory, bits=64)
        offsets = slots.offsets(*(value.registers.item() for value in place))
        runs = [(arith.addi(base, offset), 0) for d in distances for offset in offsets[d - 1]]
        words = receive(runs, slots.words)
        return [
            _array(words[i * slots.vec_len : (i + 1) * slots.vec_len], math, shape)
            for i in range(len(distances))
        ]

    return emit(slots_gmem, parity, row, chunk)


def _array(words: list, math: rows.Arithmetic, shape) -> mgpu.FragmentedArray:
    """A vector of float32 from the words of each thread."""
    layout: Any = math.layout
    layout = layout.to_mgpu()
    out = mgpu.FragmentedArray.splat(mgpu.c(0.0, ir.F32Type.get()), shape, layout=layout)
    registers = out.registers.copy()
    registers.flat[0] = vector_of(words)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def flip_parity(parities_gmem, row, parity) -> None:
    """Count an exchange of a row; every thread of the CTA writes the same word."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR, ptx.SCALAR))
    def emit(ctx, parities, *scalars):
        row, parity = (value.registers.item() for value in scalars)
        where = arith.index_cast(ir.IndexType.get(), row)
        memref.store(arith.xori(parity, i32(1)), parities, [where])

    emit(parities_gmem, row, parity)
