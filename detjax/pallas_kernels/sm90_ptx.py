# SPDX-License-Identifier: Apache-2.0
"""Inline PTX, and the scalars of MLIR that it takes. Call these where Mosaic emits inline code."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm

from detjax.pallas_kernels.sm90_hardware import LANES, WARP

SCALAR: Any = plgpu.Layout.WG_SPLAT(())
"""Layout of a scalar that all threads of a warpgroup have."""


def int_type(bits: int = 32) -> ir.IntegerType:
    """The type of an integer without a sign."""
    return ir.IntegerType.get_signless(bits)


def i32(value: int):
    """A constant of 32 bits, signed or not."""
    return mgpu.c(value - (1 << 32) if value >= 1 << 31 else value, int_type())


def i64(value: int):
    """A constant of 64 bits."""
    return mgpu.c(value, int_type(64))


def thread():
    """Which thread of its warpgroup this is."""
    return arith.remui(mgpu.utils.thread_idx(), i32(LANES))


def lane():
    """Which thread of its warp this is."""
    return arith.remui(mgpu.utils.thread_idx(), i32(WARP))


def warp():
    """Which warp of its warpgroup this is."""
    return arith.divui(thread(), i32(WARP))


def equals(a, b):
    """Whether two integers are equal."""
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def below(a, b):
    """Whether an integer without a sign is less than another."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def address(memory, *, bits: int = 32):
    """Where memory begins, as a number: of 32 bits if shared, of 64 if in device memory."""
    return llvm.ptrtoint(int_type(bits), mgpu.utils.memref_ptr(memory))


def element(x, i: int):
    """An element of a register that is a vector."""
    position = ir.DenseI64ArrayAttr.get([i])
    return vector.extract(x, dynamic_position=[], static_position=position)


def scalars_of(array) -> list:
    """The scalars that a thread holds of an array, in the order of its registers."""
    return [
        element(register, i)
        for register in array.registers.flat
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def words_of(register) -> list:
    """The 32-bit elements of a register as integers."""
    return [
        mgpu.utils.bitcast(element(register, i), int_type())
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def asm(
    text: str, operands: Sequence = (), *, returns: Sequence[ir.Type] = (),
    touches_memory: bool = True, has_side_effects: bool = True, apart: bool = False,
) -> list:  # fmt: skip
    """Emit an instruction, and return its results.

    Args:
        text: PTX; results are $0, $1, ..., then come the operands.
        operands: Integers of 32 or 64 bits, float32, or pointers.
        returns: Types of the results.
        touches_memory: Whether it must keep its place among loads and stores.
        has_side_effects: Whether it must run though nothing reads its results, and only once.
        apart: Whether a result may not share a register with an operand.
    """
    letters = {int_type(): "r", int_type(64): "l", ir.F32Type.get(): "f"}
    constraints = [("=&" if apart else "=") + letters[kind] for kind in returns]
    constraints += [letters.get(value.type, "l") for value in operands]
    constraints += ["~{memory}"] if touches_memory else []
    kind: Any = ir.Type.parse("!llvm.void")
    if returns:
        kind = returns[0] if len(returns) == 1 else llvm.StructType.get_literal(list(returns))
    result = llvm.inline_asm(
        kind, list(operands), text, ",".join(constraints), has_side_effects=has_side_effects
    )
    if len(returns) < 2:
        return [result][: len(returns)]
    return [llvm.extractvalue(kind, result, [i]) for i, kind in enumerate(returns)]


def read_now(ref, *index, is_interpreted: bool):
    """An int32 or float32 of device memory; the compiler may not put its load off to its use.

    Unlike the rest of this module it is called in a kernel's body.
    """
    if is_interpreted:
        return ref[index]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(SCALAR for _ in index)),
        return_type=plgpu.ShapeDtypeStruct((), ref.dtype, layout=SCALAR),
    )
    def emit(ctx, memory, *index):
        strides, _ = ir.MemRefType(memory.type).get_strides_and_offset()
        offset = i32(0)
        for i, stride in zip(index, strides, strict=True):
            offset = arith.addi(offset, arith.muli(i.registers.item(), i32(stride)))
        is_int = ref.dtype == jnp.int32
        kind = int_type() if is_int else ir.F32Type.get()
        where = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [offset], kind)
        [value] = asm("ld.b32 $0, [$1];", [where], returns=[kind], touches_memory=False)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True if is_int else None)

    return emit(ref, *(jnp.int32(i) for i in index))


def meet_cluster() -> None:
    """Wait for all threads of the cluster; what they wrote to shared memory is visible then.

    It is called in a kernel's body, as `read_now` is.
    """

    @plgpu.inline_mgpu()
    def emit(ctx):
        for step in ("arrive.release", "wait.acquire"):
            asm(f"barrier.cluster.{step};")

    emit()
