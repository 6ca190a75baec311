# SPDX-License-Identifier: Apache-2.0
"""What a traced program computes outside the kernels."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.extend import core

from detjax.pallas_kernels.reference_library import PREFIX

MOVES_BITS = frozenset(
    {
        "all_gather", "all_to_all", "argmax", "argmin", "axis_index", "bitcast_convert_type",
        "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "dynamic_slice",
        "dynamic_update_slice", "eq", "gather", "ge", "gt", "iota", "is_finite", "le", "lt", "max",
        "min", "ne", "optimization_barrier", "pad", "ppermute", "reduce_max", "reduce_min",
        "reshape", "reshard", "rev", "scatter", "select_n", "slice", "sort", "split", "squeeze",
        "stack", "stop_gradient", "top_k", "transpose", "unstack",
    }
)  # fmt: skip
"""Primitives that may take floats outside a kernel: copies, comparisons and exact widening."""


def equations_outside_kernels(jaxpr) -> Iterator:
    """Walk a jaxpr and everything it calls, but not kernels: `pallas_call` and C++ of detjax."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "pallas_call" or name.startswith(PREFIX):
            continue
        inner = list(_inner_jaxprs(equation))
        if not inner:
            yield equation
        for sub in inner:
            yield from equations_outside_kernels(sub)


def _inner_jaxprs(equation) -> Iterator:
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item


def float_arithmetic_outside_kernels(fn: Callable, *args) -> list[str]:
    """Name every operation outside a kernel that could round a float.

    A conversion to a narrower float rounds and counts; to a wider one it is exact and does not.
    """
    found = []
    for equation in equations_outside_kernels(jax.make_jaxpr(fn)(*args).jaxpr):
        name = equation.primitive.name
        floats = [v.aval for v in (*equation.invars, *equation.outvars) if _is_float(v)]
        if not floats:
            continue
        if name == "convert_element_type":
            if _is_exact(equation.invars[0].aval, equation.outvars[0].aval):
                continue
        elif name in MOVES_BITS:
            continue
        found.append(f"{name}: {equation.source_info.name_stack}")
    return found


def _is_exact(source, target) -> bool:
    """Whether a conversion widens a float, or turns a constant of the program into one."""
    if source.weak_type and source.shape == ():
        return True
    if not (_is_float_dtype(source) and _is_float_dtype(target)):
        return False
    old, new = jnp.finfo(source.dtype), jnp.finfo(target.dtype)
    return new.nmant >= old.nmant and new.maxexp >= old.maxexp and new.minexp <= old.minexp


def _is_float(variable) -> bool:
    return _is_float_dtype(variable.aval)


def _is_float_dtype(value) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)
