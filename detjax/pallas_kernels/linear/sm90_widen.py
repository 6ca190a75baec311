# SPDX-License-Identifier: Apache-2.0
"""Codes of 4 or 8 bits become bfloat16 weights in the registers from which wgmma reads them.

An unsigned code of at most 8 bits in the low byte of a bfloat16 is that code times 2**-133:
subnormal numbers below 128, and from there on the first binade, whose steps are as wide. So it
needs no conversion. One fma multiplies it by its scale times 2**133 and subtracts the zero point
times the scale: the product is exact, and only the result is rounded. That holds while the factor
is finite and the subtrahend exact (`Coding.has_small_scales`, no zero points, scales in bfloat16).
Else one fma subtracts the zero point exactly, and a product by the scale is what is rounded.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels.linear.quantized import (
    BLOCK,
    WORDS_PER_LINE,
    CodeType,
    Coding,
    unpack_codes,
)
from detjax.pallas_kernels.sm90_float8 import (
    FLOAT8_EXPONENT,
    float8_fields,
    multiply,
    permute,
    power,
    pure,
)

ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one value a row of a block."""

REGISTERS = 16
"""Registers of a thread that hold its weights of a block, two in each."""

_LOW_NIBBLES, _HIGH_NIBBLES = 0x000F000F, 0x00F000F0
_BYTES_LOW = (0x4140, 0x4342)
"""Selectors of `prmt` that spread two bytes of a word over the lower bytes of another's halves."""

_CODE_EXPONENT = 133
"""A code in the low byte of a bfloat16 is 2**-133 of itself."""

_APART = 6
"""Where a code and its scale are multiplied last, the code is 2**-6 of itself until then."""


def words_layout(code_type: CodeType):
    """The layout in which threads load the codes of a block: 16 bytes at once."""
    shape = (code_type.block_words // WORDS_PER_LINE, WORDS_PER_LINE)
    return plgpu.Layout.WG_STRIDED(shape, vec_size=4)


def widen(words, scales: list, zeros: list, coding: Coding, *, is_interpreted: bool):
    """The bfloat16 weights [64, 64] of a block of codes, as an operand of wgmma.

    Args:
        words: int32 [lines, 256], as stored, in `words_layout`.
        scales: For each group of columns in the block [64], bfloat16 or float32, in `ROW_LAYOUT`.
        zeros: The like of zero points, bfloat16; empty if codes are symmetric.
        coding: How they are quantised.
        is_interpreted: Whether a CPU interprets the kernel.
    """
    code_type = coding.code_type
    if is_interpreted:
        return _interpreted(words, scales, zeros, code_type)

    @plgpu.inline_mgpu(
        arg_types=(words_layout(code_type), [ROW_LAYOUT] * len(scales), [ROW_LAYOUT] * len(zeros)),
        return_type=plgpu.ShapeDtypeStruct((BLOCK, BLOCK), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def emit(ctx, words, scales, zeros):
        del ctx
        codes = _spread_codes(_all_words(words), code_type)
        if scales[0].mlir_dtype != ir.BF16Type.get():
            values = _exact_values(codes, [_pairs(z) for z in zeros], code_type)
            factors = [_apart_f32(s, code_type) for s in scales]
            return _operand(_of_groups(_multiply_f32, values, factors))
        factors = [_pairs(s) for s in scales]
        if coding.has_small_scales and not zeros:
            return _operand(_scaled_at_once(codes, factors, code_type))
        values = _exact_values(codes, [_pairs(z) for z in zeros], code_type)
        if code_type is not CodeType.FLOAT8:
            factors = [[_times_power(word, _APART) for word in pair] for pair in factors]
        return _operand(_of_groups(multiply, values, factors))

    return emit(words, scales, zeros)


def _interpreted(words, scales: list, zeros: list, code_type: CodeType):
    def of_columns(groups):
        rows = jnp.stack([group.astype(jnp.float32) for group in groups], axis=1)
        return jnp.repeat(rows, BLOCK // len(groups), axis=1)

    values = unpack_codes(words[None, None], code_type)
    values = values - (of_columns(zeros) if zeros else float(code_type.middle))
    return (values * of_columns(scales)).astype(jnp.bfloat16)


def _all_words(words) -> list:
    return [word for register in words.registers.flat for word in ptx.words_of(register)]


def _of_groups(combine, pairs: list, of_groups: list) -> list:
    """Combine each register with what its row has in its group of columns."""
    return [
        combine(pair, of_groups[i * len(of_groups) // REGISTERS][i % 2])
        for i, pair in enumerate(pairs)
    ]


def _spread_codes(words: list, code_type: CodeType) -> list:
    """Two codes a register, in the order of wgmma's: integers in low bytes, float8 in fields."""
    if code_type is CodeType.INT8:
        return [permute(words[i // 2], _BYTES_LOW[i % 2]) for i in range(REGISTERS)]
    if code_type is CodeType.FLOAT8:
        return [float8_fields(words[i // 2], i % 2) for i in range(REGISTERS)]
    found = []
    for word in words:
        for part in (word, arith.shrui(word, ptx.i32(8))):
            found += [arith.andi(part, ptx.i32(m)) for m in (_LOW_NIBBLES, _HIGH_NIBBLES)]
    return found


def _exponent(register: int, code_type: CodeType) -> int:
    """Minus the power of two that the codes of a register are multiplied by."""
    if code_type is CodeType.FLOAT8:
        return FLOAT8_EXPONENT
    is_high = code_type is CodeType.INT4 and register % 2
    return _CODE_EXPONENT - (4 if is_high else 0)


def _scaled_at_once(codes: list, factors: list, code_type: CodeType) -> list:
    """Weights by one operation each.

    # ROUND: once, of (code - middle) * scale, exact before.
    """
    exponents = [_exponent(i, code_type) for i in range(2)]
    lifted = [
        [_times_power(word, e) for word, e in zip(pair, exponents, strict=True)] for pair in factors
    ]
    if code_type is CodeType.FLOAT8:
        return _of_groups(multiply, codes, lifted)
    minus_middle = power(code_type.middle.bit_length() - 1, is_negative=True)
    offsets = [[multiply(word, minus_middle) for word in pair] for pair in factors]
    both = [list(zip(a, b, strict=True)) for a, b in zip(lifted, offsets, strict=True)]
    return _of_groups(lambda code, ab: _fma(code, *ab), codes, both)


def _exact_values(codes: list, zeros: list, code_type: CodeType) -> list:
    """A float8's value, or (code - zero point) / 64: two bfloat16 a register, without rounding."""
    if code_type is CodeType.FLOAT8:
        return [multiply(code, power(FLOAT8_EXPONENT)) for code in codes]
    powers = [power(_exponent(i, code_type) - _APART) for i in range(2)]
    minus = power(-_APART, is_negative=True)
    offsets = [[multiply(word, minus) for word in pair] for pair in zeros]
    if not zeros:
        middle = code_type.middle.bit_length() - 1 - _APART
        offsets = [[power(middle, is_negative=True)] * 2]
    both = [list(zip(powers, pair, strict=True)) for pair in offsets]
    return _of_groups(lambda code, ab: _fma(code, *ab), codes, both)


def _apart_f32(scales, code_type: CodeType) -> list:
    """A thread's two float32 scales, times 64 for integers."""
    found = ptx.scalars_of(scales)
    if code_type is CodeType.FLOAT8:
        return found
    f32 = ir.F32Type.get()
    factor = arith.constant(f32, ir.FloatAttr.get(f32, 2.0**_APART))
    return [pure("mul.rn.f32 $0, $1, $2;", x, factor, returns=f32) for x in found]


def _times_power(word, exponent: int):
    """Two bfloat16 times a power of two, exactly: in steps that bfloat16 can hold."""
    while exponent:
        step = min(exponent, 127)
        word, exponent = multiply(word, power(step)), exponent - step
    return word


def _pairs(array) -> list:
    """The two bfloat16 of a thread's rows, each twice in a word."""
    narrow, wide = ptx.int_type(16), ptx.int_type()
    words = [arith.extui(wide, arith.bitcast(narrow, value)) for value in ptx.scalars_of(array)]
    return [arith.ori(word, arith.shli(word, ptx.i32(16))) for word in words]


def _fma(a, b, c):
    return pure("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, c)


def _multiply_f32(pair, scale):
    """Two bfloat16 times a float32."""
    f32 = ir.F32Type.get()
    low = arith.bitcast(f32, arith.shli(pair, ptx.i32(16)))
    high = arith.bitcast(f32, arith.andi(pair, ptx.i32(0xFFFF0000)))
    # ROUND: each product to float32, then both to bfloat16, to nearest, ties to even.
    low, high = (pure("mul.rn.f32 $0, $1, $2;", x, scale, returns=f32) for x in (low, high))
    return pure("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low)


def _operand(pairs: list) -> mgpu.FragmentedArray:
    """Words of two weights each as an array that wgmma reads from registers."""
    kind, layout = ir.VectorType.get((2,), ir.BF16Type.get()), fragmented_array.WGMMA_LAYOUT
    registers = np.empty(len(pairs), object)
    registers[:] = [mgpu.utils.bitcast(pair, kind) for pair in pairs]
    shape = layout.registers_shape((BLOCK, BLOCK))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape), _layout=layout, _is_signed=None
    )
