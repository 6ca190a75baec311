# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels for Hopper that are lowered once in a process, not once in each program.

Lowering a kernel is a fifth to a third of a second of Python, and Python runs one thread at a time.
A program of a Llama has ten kernels, and most are in other programs too: a longer page table, say,
changes only attention. Here JAX asks for a kernel's lowering and gets the operation that it made
before, with new operands. So the lowered program is what it would be otherwise. Programs are
lowered one after the other: threads that take turns at Python only slow one another.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax._src.pallas import mpmd  # WHY: the primitive of a kernel, and its lowering, are not public
from jax.extend.mlir import ir
from jax.interpreters import mlir

from detjax.compilation.mosaic_kernels import is_kernel_call, kernel_calls, program_of_call

MOST_KEPT = 1024
"""Kernels that are kept; an engine of 8B shapes has about a hundred."""


def lower(
    jitted: Any, operands: Sequence[Any], platforms: tuple[str, ...] | None = None
) -> jax.stages.Lowered:
    """Trace and lower a function: `jitted.lower(*operands)`.

    Args:
        jitted: What `jax.jit` returns.
        operands: Arrays, or their shapes with shardings.
        platforms: Lower for these instead of that of the operands' devices.
    """
    # WHY: private, but it changes this call alone; to register another rule changes JAX for all.
    rules = ((mpmd.mpmd_map_p, _lower_kernel),)
    parameters = mlir.LoweringParameters(override_lowering_rules=rules)
    with _turn():
        traced = jitted.trace(*operands)
        return traced.lower(lowering_platforms=platforms, _private_parameters=parameters)


@functools.cache  # WHY: not a constant of this module: `loaded_code_hash` counts those
def _turn() -> threading.RLock:
    return threading.RLock()


def _lower_kernel(ctx: mlir.LoweringRuleContext, *operands, **params) -> Sequence[Any]:
    """JAX's rule for a kernel, or what it gave for the same one."""
    kept, key = _kept(), _key(ctx, params)
    program = kept.get(key)
    if program is not None:
        from jax.experimental.mosaic import gpu as mgpu  # WHY: slow, and no CPU needs it

        # As JAX's rule does: those who read the kernel need its dialect in the context.
        mgpu.dialect.register_dialect(ctx.module_context.context)
        return _emit(program, operands)
    results = mlir._lowerings[mpmd.mpmd_map_p].rule(ctx, *operands, **params)
    call = _only_call(operands, results)
    if call is not None:
        kept.put(key, program_of_call(call))
    return results


def _key(ctx: mlir.LoweringRuleContext, params: dict[str, Any]) -> Hashable:
    """All that JAX's rule reads.

    A jaxpr equals itself alone. It is one object where `jax.jit` has traced the kernel before.
    """
    module = ctx.module_context
    return (
        tuple(sorted(params.items())), tuple(ctx.avals_in), tuple(ctx.avals_out),
        module.axis_context, tuple(module.platforms), ctx.jaxpr_eqn_ctx,
    )  # fmt: skip


def _only_call(operands: Sequence[Any], results: Sequence[Any]) -> ir.Operation | None:
    """The call, if that is all that a rule has made of the operands."""
    if not results or not isinstance(results[0].owner, ir.Operation | ir.OpView):
        return None
    call = results[0].owner.operation
    if not is_kernel_call(call):
        return None
    is_all = list(call.operands) == list(operands) and list(call.results) == list(results)
    return call if is_all else None


def _emit(program: bytes, operands: Sequence[Any]) -> Sequence[Any]:
    """The call of a program of one, of these operands, where JAX is at."""
    module = ir.Module.parse(program)  # keeps its operations
    (call,) = kernel_calls(module.operation)
    types, attributes = [result.type for result in call.results], dict(call.attributes)
    return list(ir.Operation.create(call.name, types, list(operands), attributes).results)


class _Kept:
    """Programs of one call, by what they were lowered from; those used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs: OrderedDict[Hashable, bytes] = OrderedDict()

    def get(self, key: Hashable) -> bytes | None:
        with self._lock:
            if key in self._programs:
                self._programs.move_to_end(key)
            return self._programs.get(key)

    def put(self, key: Hashable, program: bytes) -> None:
        with self._lock:
            self._programs[key] = program
            if len(self._programs) > MOST_KEPT:
                self._programs.popitem(last=False)


@functools.cache
def _kept() -> _Kept:
    return _Kept()
