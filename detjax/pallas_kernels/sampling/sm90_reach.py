# SPDX-License-Identifier: Apache-2.0
"""Which tokens can still be a row's best: bounds of a score that need neither division nor logs.

A score is `s = RN(RN(x / T) + n)`, with noise `n = -log(-log1p(-u))` of 32 random bits. Let L be a
score that some token of the row has. A token whose `s < L` is neither the best nor equal to it, so
that its score need not be known. What is compared in place of s is its reach,

    reach = fma(x, R, n'),    R within an ulp of 1 / T,    n' >= n - 2**-13

and a token is left out only where `reach < limit(L)`, `limit(L) = L - 2**-20 * |L| - 2**-10`. All
of which that is not true stays in: NaN, and everything while L is infinite.

*Bounds of the noise.* `-log1p(-u) >= u`, so `n <= -log(u)`. As `u >= bits * 2**-32`, so does
`n <= 32 log(2) - log(2) * log2(bits)`, which is `noise_reach`. Float32 of the bits is off by 2**-24
of itself, `lg2.approx` by 2**-22 of its value, which is at most 32, the multiply-add by 2**-20:
together less than 2**-14; the logarithms of n itself add less than 2**-17. Bits of 0 give infinity.
For all bits at once `u >= 2**-33`: n is at most 33 log(2) = 22.87386, and below `MAX_NOISE`.

*Why no token is lost.* Let `s >= L`, L finite. Rounding is monotone, so `RN(x / T) + n` is at least
`L - 2**-24 |L|`. If `|x / T| <= |L| + 46`, then x * R is within 2**-22 (|L| + 46) of RN(x / T), and
with the last rounding the reach is at least `L - 2**-21 |L| - 2**-12`: over the limit, with its own
two roundings. Else, as n lies between -2.82 and 22.88, x / T is above |L| + 46, and the reach above
L. Where x * R would overflow below, so does the limit.
"""

import math as host_math

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import nvvm

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows as rows

MAX_NOISE = 22.875
"""Above the noise of every 32 bits."""

LOG_2_32 = 32 * host_math.log(2)
"""-log(u) of bits is this minus their own logarithm."""


def noise_reach(bits, math: rows.Arithmetic):
    """At least the noise of random bits, but for 2**-13."""
    log2 = math.apply(
        lambda v: rows.instruction("lg2.approx.ftz.f32")(v), jnp.log2, bits.astype(jnp.float32)
    )
    return math.fma(log2, math.full(bits.shape, -host_math.log(2)), math.full(bits.shape, LOG_2_32))


def score_reach(x, reciprocal, noise, math: rows.Arithmetic):
    """What a score may reach: `x / T` and `noise`, which is `noise_reach` or `MAX_NOISE`."""
    if isinstance(noise, float):
        noise = math.full(x.shape, noise)
    return math.fma(x, math.full(x.shape, reciprocal), noise)


def limit(score):
    """What a token must reach to have this score or more."""
    return (score - jnp.abs(score) * 2.0**-20) - 2.0**-10


def some_reach(reach, least, math: rows.Arithmetic):
    """Whether a warp has an element that is not below `least`: a scalar, one a warp."""
    if math.is_interpreted:
        return jnp.any(~(reach < least))

    @plgpu.inline_mgpu(
        arg_types=(math.layout, ptx.SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=ptx.SCALAR),
    )
    def emit(ctx, reach, least):
        i1, i32 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(32)
        least = least.registers.item()
        found = mgpu.c(0, i1)
        for value in ptx.scalars_of(reach):
            # Greater, equal, or unordered.
            found = arith.ori(found, arith.cmpf(arith.CmpFPredicate.UGE, value, least))
        found = nvvm.vote_sync(mgpu.c(-1, i32), found, nvvm.VoteSyncKind.any, results=[i1])
        return mgpu.FragmentedArray.splat(found, (), is_signed=False)

    return emit(reach, least)


NUM_WARPS = ptx.LANES // ptx.WARP


def share(values, slots, math: rows.Arithmetic) -> None:
    """Show the other warps what a warp holds, one value: `slots` has an element a warp.

    # WHY: relaxed, with no barrier. What another warp reads may be older, which is a score too.
    """
    if math.is_interpreted:
        slots[0] = jnp.max(values)
        return

    @plgpu.inline_mgpu(arg_types=(math.layout, plgpu.RefType()))
    def emit(ctx, values, memory):
        (value,) = ptx.scalars_of(values)
        offset = arith.muli(ptx.warp(), ptx.i32(4))
        where = arith.addi(ptx.address(memory), offset)
        ptx.asm("st.relaxed.cta.shared.f32 [$0], $1;", [where, value])

    emit(values, slots)


def shared_best(slots, math: rows.Arithmetic):
    """The greatest of what warps have shared: a scalar."""
    if math.is_interpreted:
        return jnp.max(slots[...])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=ptx.SCALAR),
    )
    def emit(ctx, memory):
        best = None
        for warp in range(NUM_WARPS):
            where = arith.addi(ptx.address(memory), ptx.i32(4 * warp))
            text = "ld.relaxed.cta.shared.f32 $0, [$1];"
            [value] = ptx.asm(text, [where], returns=[ir.F32Type.get()])
            best = value if best is None else rows.instruction("max.f32")(best, value)
        return mgpu.FragmentedArray.splat(best, ())

    return emit(slots)
