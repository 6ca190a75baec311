# SPDX-License-Identifier: Apache-2.0
"""A soft bound on logits on Hopper: one pass over pieces of a row."""

import functools

import jax

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.hopper_sums import cap_factors
from detjax.pallas_kernels.swiglu.sm90 import map_columns


@functools.partial(jax.jit, static_argnames=("cap", "interpret"))
def softcap(logits, *, cap: float, interpret: bool = False) -> jax.Array:
    """See `api.softcap`.

    Raises:
        ValueError: If there are under 128 logits a row, or no multiple of 4.

    Numerics:
        Elementwise in float32: `fma(rcp(ex2(x * A) + 1), -2 B, B)` with approximate ex2 and rcp,
        the product and the sum rounded.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    exponent, largest = cap_factors(cap)

    def capped(x, math: rows.Arithmetic):
        return math.soft_cap(x, exponent, largest)

    return map_columns(logits, capped, name="detjax_softcap", interpret=interpret)
