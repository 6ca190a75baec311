# SPDX-License-Identifier: Apache-2.0
"""Tells the L2 cache what is read once, so that it gives that up first.

A layer of a large model streams more weights, keys and values through the L2 than it holds. Without
a hint they push out what launches read again: activations, partial sums, gains, page tables, and
the descriptors of the launches themselves. A hint moves no bit.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import nvvm

EVICT_FIRST = 0x12F0000000000000
"""The policy that `createpolicy.fractional.L2::evict_first` makes for all of a load, on sm_90."""

HINTS = True
"""Whether loads carry it."""

_TensorLoad = nvvm.CpAsyncBulkTensorGlobalToSharedClusterOp


def evict_first(array, *, is_interpreted: bool) -> None:
    """Let every later TMA load of the kernel from an array carry the hint.

    # WHY: Mosaic's copies take no hint, but the operation that they emit does. This wraps the
    `async_copy` of the one kernel that is being lowered.

    Args:
        array: Of device memory, an operand of the kernel.
        is_interpreted: Whether the kernel is interpreted: then there is nothing to do.
    """
    if is_interpreted or not HINTS:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def mark(ctx, ref):
        marked, plain_copy = _outside(ref), ctx.async_copy

        def async_copy(*, src_ref, **options):
            plain_copy(src_ref=src_ref, **options)
            if src_ref == marked:
                _hint_last_load()

        ctx.async_copy = async_copy

    mark(array)


def _outside(ref) -> Any:
    """The kernel's name of an argument of a custom operation, as Mosaic makes one of inline code.

    With the semantics of lanes there is none around it.
    """
    block = ref.owner
    is_inside = isinstance(block, ir.Block) and isinstance(
        block.owner.opview, mgpu.dialect.CustomPrimitiveOp
    )
    return block.owner.opview.operands[ir.BlockArgument(ref).arg_number] if is_inside else ref


def _hint_last_load() -> None:
    """Put the load that was emitted last again, with the hint."""
    block = ir.InsertionPoint.current.block
    load = [op for op in block.operations if isinstance(op, _TensorLoad)][-1]
    assert load.l2CacheHint is None, "this load has been seen before"
    nvvm.cp_async_bulk_tensor_shared_cluster_global(
        load.dstMem,
        load.tmaDescriptor,
        list(load.coordinates),
        load.mbar,
        list(load.im2colOffsets),
        multicast_mask=load.multicastMask,
        l2_cache_hint=mgpu.c(EVICT_FIRST, ir.IntegerType.get_signless(64)),
        predicate=load.predicate,
        mode=load.mode,
        is_cta_only=load.isCTAOnly,
        group=load.group,
    )
    load.operation.erase()
