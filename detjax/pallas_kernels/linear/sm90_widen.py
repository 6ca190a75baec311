# SPDX-License-Identifier: Apache-2.0
"""Codes of 4 or 8 bits become bfloat16 weights in the registers from which wgmma reads them.

Every step is exact but the one that `linear.quantized` rounds: the product of a code and its scale.
With a scale in bfloat16 that is one bfloat16 multiplication of two weights. With a scale in float32
it is a float32 multiplication, then a conversion.
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
    INT4_MAGIC,
    WORDS_PER_LINE,
    CodeType,
    unpack_codes,
)

ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one value a row of a block."""

REGISTERS = 16
"""Registers of a thread that hold its weights of a block, two in each."""

_INT4_MASK, _MAGIC_PAIR = 0x000F000F, 0x43004300  # the second is 128 twice in bfloat16
_INT8_FRACTION, _INT8_SIGN = 0x007F007F, 0x00800080
_FLOAT8_SIGN, _FLOAT8_REST = 0x80008000, 0x07F007F0
_FLOAT8_REBIAS = 0x7B807B80
"""2**120 twice in bfloat16: what an exponent of bfloat16 is biased by more than one of float8."""

_BYTES_LOW, _BYTES_HIGH = (0x4140, 0x4342), (0x1404, 0x3424)
"""Selectors of `prmt` that spread two bytes of a word over the halves of another."""


def words_layout(code_type: CodeType):
    """The layout in which threads load the codes of a block: 16 bytes at once."""
    shape = (code_type.block_words // WORDS_PER_LINE, WORDS_PER_LINE)
    return plgpu.Layout.WG_STRIDED(shape, vec_size=4)


def widen(words, scales: list, zeros: list, code_type: CodeType, *, is_interpreted: bool):
    """The bfloat16 weights [64, 64] of a block of codes, as an operand of wgmma.

    Args:
        words: int32 [lines, 256], as stored, in `words_layout`.
        scales: For each group of columns in the block [64], bfloat16 or float32, in `ROW_LAYOUT`.
        zeros: The like of lifted zero points, bfloat16; empty if codes are symmetric.
        code_type: What the codes are.
        is_interpreted: Whether a CPU interprets the kernel.
    """
    if is_interpreted:
        return _interpreted(words, scales, zeros, code_type)

    @plgpu.inline_mgpu(
        arg_types=(words_layout(code_type), [ROW_LAYOUT] * len(scales), [ROW_LAYOUT] * len(zeros)),
        return_type=plgpu.ShapeDtypeStruct((BLOCK, BLOCK), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def emit(ctx, words, scales, zeros):
        del ctx
        pairs = _values(_all_words(words), [_pairs(z) for z in zeros], code_type)
        is_narrow = scales[0].mlir_dtype == ir.BF16Type.get()
        factors = [_pairs(s) if is_narrow else ptx.scalars_of(s) for s in scales]
        multiply = _multiply if is_narrow else _multiply_f32
        for i in range(REGISTERS):
            pairs[i] = multiply(pairs[i], factors[_group(i, len(scales))][i % 2])
        return _operand(pairs)

    return emit(words, scales, zeros)


def _interpreted(words, scales: list, zeros: list, code_type: CodeType):
    def of_columns(groups):
        rows = jnp.stack([group.astype(jnp.float32) for group in groups], axis=1)
        return jnp.repeat(rows, BLOCK // len(groups), axis=1)

    values = unpack_codes(words[None, None], code_type)
    if code_type is CodeType.INT4:
        values = values - (of_columns(zeros) - INT4_MAGIC if zeros else 8.0)
    return (values * of_columns(scales)).astype(jnp.bfloat16)


def _group(register: int, num_groups: int) -> int:
    """The group of columns of a block that a register's weights are in."""
    return register * num_groups // REGISTERS


def _all_words(words) -> list:
    return [word for register in words.registers.flat for word in ptx.words_of(register)]


def _values(words: list, zeros: list, code_type: CodeType) -> list:
    """The weights before they are scaled, two bfloat16 a register, in the order of wgmma's."""
    match code_type:
        case CodeType.INT4:
            found = []
            for i in range(REGISTERS):
                shifted = (
                    arith.shrui(words[i // 4], ptx.i32(4 * (i % 4))) if i % 4 else words[i // 4]
                )
                lifted = _fields(shifted, _INT4_MASK, _MAGIC_PAIR)
                of_group = zeros[_group(i, len(zeros))][i % 2] if zeros else ptx.i32(_splat(136.0))
                found.append(_subtract(lifted, of_group))
            return found
        case CodeType.INT8:
            return [_int8_pair(words[i // 2], i % 2) for i in range(REGISTERS)]
        case CodeType.FLOAT8:
            return [_float8_pair(words[i // 2], i % 2) for i in range(REGISTERS)]


def _int8_pair(word, half: int):
    """Two int8 of a word: 128 and the low seven bits, less 128, or less 256 if negative."""
    spread = _permute(word, _BYTES_LOW[half])
    return _subtract(
        _fields(spread, _INT8_FRACTION, _MAGIC_PAIR), _fields(spread, _INT8_SIGN, _MAGIC_PAIR)
    )


def _float8_pair(word, half: int):
    """Two float8 of a word: their fields where bfloat16 has them, times what the biases differ."""
    spread = _permute(word, _BYTES_HIGH[half])
    sign = arith.andi(spread, ptx.i32(_FLOAT8_SIGN))
    rest = arith.andi(arith.shrui(spread, ptx.i32(4)), ptx.i32(_FLOAT8_REST))
    return _multiply(arith.ori(sign, rest), ptx.i32(_FLOAT8_REBIAS))


def _splat(value: float) -> int:
    """A bfloat16 twice, as a word."""
    bits = int(np.float32(value).view(np.uint32)) >> 16
    return bits << 16 | bits


def _pairs(array) -> list:
    """The two bfloat16 of a thread's rows, each twice in a word."""
    narrow, wide = ptx.int_type(16), ptx.int_type()
    words = [arith.extui(wide, arith.bitcast(narrow, value)) for value in ptx.scalars_of(array)]
    return [arith.ori(word, arith.shli(word, ptx.i32(16))) for word in words]


def _fields(word, mask: int, others: int):
    return arith.ori(arith.andi(word, ptx.i32(mask)), ptx.i32(others))


def _pure(text: str, *operands, returns=None):
    """An instruction that only computes."""
    [result] = ptx.asm(
        text, operands, returns=[returns or ptx.int_type()], touches_memory=False,
        has_side_effects=False,
    )  # fmt: skip
    return result


def _permute(word, selector: int):
    return _pure("prmt.b32 $0, $1, $2, $3;", word, ptx.i32(0), ptx.i32(selector))


def _subtract(a, b):
    return _pure("sub.rn.bf16x2 $0, $1, $2;", a, b)


def _multiply(a, b):
    # ROUND: to bfloat16, to nearest, ties to even; subnormals are kept.
    return _pure("mul.rn.bf16x2 $0, $1, $2;", a, b)


def _multiply_f32(pair, scale):
    """Two bfloat16 times a float32."""
    f32 = ir.F32Type.get()
    low = arith.bitcast(f32, arith.shli(pair, ptx.i32(16)))
    high = arith.bitcast(f32, arith.andi(pair, ptx.i32(0xFFFF0000)))
    # ROUND: each product to float32, then both to bfloat16, to nearest, ties to even.
    low, high = (_pure("mul.rn.f32 $0, $1, $2;", x, scale, returns=f32) for x in (low, high))
    return _pure("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low)


def _operand(pairs: list) -> mgpu.FragmentedArray:
    """Words of two weights each as an array that wgmma reads from registers."""
    kind, layout = ir.VectorType.get((2,), ir.BF16Type.get()), fragmented_array.WGMMA_LAYOUT
    registers = np.empty(len(pairs), object)
    registers[:] = [mgpu.utils.bitcast(pair, kind) for pair in pairs]
    shape = layout.registers_shape((BLOCK, BLOCK))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape), _layout=layout, _is_signed=None
    )
