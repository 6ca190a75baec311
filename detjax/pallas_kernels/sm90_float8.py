# SPDX-License-Identifier: Apache-2.0
"""Float8 (e4m3fn) on Hopper: bfloat16 rounded to it, and its values as bfloat16, in registers.

A float8 whose fields lie where bfloat16 has its own is 2**-120 of its value: one product by a power
of two, which is exact, gives the value, subnormal ones included.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from detjax.pallas_kernels import float8_cache
from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels.sm90_rows import Arithmetic

FLOAT8_EXPONENT = 120
"""The fields of a float8 as those of a bfloat16 are 2**-120 of it."""
_SIGN, _REST = 0x80008000, 0x07F007F0
_BYTES_HIGH = (0x1404, 0x3424)
"""Selectors of `prmt` that spread two bytes of a word over the upper bytes of another's halves."""


def pure(text: str, *operands, returns=None):
    """An instruction that only computes."""
    [result] = ptx.asm(
        text, operands, returns=[returns or ptx.int_type()], touches_memory=False,
        has_side_effects=False,
    )  # fmt: skip
    return result


def permute(word, selector: int):
    """Bytes of a word and of zero, by a selector of `prmt`."""
    return pure("prmt.b32 $0, $1, $2, $3;", word, ptx.i32(0), ptx.i32(selector))


def multiply(a, b):
    """Two bfloat16 products.

    # ROUND: to bfloat16, to nearest, ties to even; subnormals are kept.
    """
    return pure("mul.rn.bf16x2 $0, $1, $2;", a, b)


def power(exponent: int, *, is_negative: bool = False):
    """A power of two in bfloat16, twice in a word."""
    bits = (exponent + 127) << 7 | (0x8000 if is_negative else 0)
    return ptx.i32(bits << 16 | bits)


def float8_fields(word, half: int):
    """Two float8 of a word, their fields where bfloat16 has its own."""
    spread = permute(word, _BYTES_HIGH[half])
    sign = arith.andi(spread, ptx.i32(_SIGN))
    rest = arith.andi(arith.shrui(spread, ptx.i32(4)), ptx.i32(_REST))
    return arith.ori(sign, rest)


def float8_values(word) -> list:
    """The four float8 of a word as two words of two bfloat16 each; exact."""
    return [multiply(float8_fields(word, half), power(FLOAT8_EXPONENT)) for half in range(2)]


def rounded_pair(low, high):
    """Two float32 as float8 in the lower half of a word, the first in its lowest byte.

    # ROUND: to nearest, ties to even; what is larger than 448 becomes 448, with its sign.
    """
    return pure(
        "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, $2, $1; cvt.u32.u16 $0, pair; }",
        low, high,
    )  # fmt: skip


def narrowed(x, math: Arithmetic) -> jax.Array:
    """Float32 in registers as the bits of float8, an even number of neighbours a thread."""
    if math.is_interpreted:
        return float8_cache.narrowed(x)

    @plgpu.inline_mgpu(
        arg_types=(math.layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.uint8, layout=math.layout),
    )
    def emit(ctx, x):
        registers = np.empty(x.registers.shape, object)
        for place, register in np.ndenumerate(x.registers):
            count = ir.VectorType(register.type).shape[0]
            scalars = [ptx.element(register, i) for i in range(count)]
            pairs = [rounded_pair(*scalars[i : i + 2]) for i in range(0, count, 2)]
            halves = [arith.trunci(ptx.int_type(16), pair) for pair in pairs]
            kind = ir.VectorType.get((len(halves),), ptx.int_type(16))
            as_bytes = ir.VectorType.get((count,), ptx.int_type(8))
            registers[place] = vector.bitcast(as_bytes, vector.from_elements(kind, halves))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=False)

    return emit(x)
