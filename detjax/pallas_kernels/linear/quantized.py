# SPDX-License-Identifier: Apache-2.0
"""A matrix whose weights lie in memory as codes of 4 or 8 bits, in the order in which sm90 reads.

A weight of code q, zero point z and scale s is

    bfloat16(float32(q - z) * float32(s))

with the product and the result each rounded to nearest, ties to even: the expansion that
`models.quantization.expand` computes on the host. Kernels widen codes to these bfloat16 weights in
registers, so that a product of codes has the bits of the product of the expanded matrix.

Codes are stored by blocks of 64 x 64 weights. A wgmma operand of 64 x 16 lies in the registers of
128 threads. A thread's codes of a block are neighbours in memory, so that it loads 16 bytes at
once.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64
"""Rows and columns of a block of codes."""

WORDS_PER_LINE = 256
"""Words of the last axis of stored codes: the longest that one TMA box may have."""

SCALE_LIMITS = (2.0**-126, 2.0**-5)
"""Scales from the first to below the second let a kernel widen an integer by one operation."""

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The greatest magnitude of a row that is quantised to an 8-bit dtype."""

FLOAT8_CHUNK = 128
"""Input channels whose float8 products one accumulator of the tensor core adds.

The length of a group too, where activations have a scale for each group of channels.
"""

FLOAT8_NAN = 0x7F
"""The bits of a float8_e4m3fn that is no number, without its sign."""


class CodeType(enum.Enum):
    """What a code is. The value is its name in messages and in the fingerprint."""

    INT4 = "int4"
    INT8 = "int8"
    FLOAT8 = "float8_e4m3fn"

    @property
    def num_bits(self) -> int:
        """Bits of a code."""
        return 4 if self is CodeType.INT4 else 8

    @property
    def middle(self) -> int:
        """The unsigned code of 0 where there are no zero points."""
        return {CodeType.INT4: 8, CodeType.INT8: 128, CodeType.FLOAT8: 0}[self]

    @property
    def block_words(self) -> int:
        """32-bit words of a block of codes."""
        return BLOCK * BLOCK * self.num_bits // 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """How a matrix is quantised: what a kernel must know to read it.

    Attributes:
        code_type: What a code is.
        group_len: Input channels of a group; 0 if a row has one scale.
        scale_bytes: Of a scale: 2 or 4.
        has_zeros: Whether groups have zero points.
        has_small_scales: As `QuantizedMatrix` has it.
    """

    code_type: CodeType
    group_len: int
    scale_bytes: int
    has_zeros: bool
    has_small_scales: bool

    def groups_of(self, depth: int) -> int:
        """Groups that so many columns from the start of a block are in."""
        return -(-depth // self.group_len) if self.group_len else 1

    def stage_bytes(self, num_rows: int, depth: int) -> int:
        """Bytes of so many rows and columns: codes, scales and zero points."""
        of_group = self.scale_bytes + (2 if self.has_zeros else 0)
        codes = num_rows * depth * self.code_type.num_bits // 8
        return codes + num_rows * self.groups_of(depth) * of_group


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedMatrix:
    """A matrix [N, K] as codes, scales and zero points. Leaves are arrays, or what JAX puts there.

    Attributes:
        codes: int32 [N / 64, K / 64, lines, 256], of `pack_codes`.
        scales: bfloat16 or float32 [G, N], one for each group of input channels.
        zeros: bfloat16 [G, N], the unsigned zero points of int4; None for `CodeType.middle`.
        code_type: What a code is.
        group_len: Input channels of a group; 0 if a row has one scale, so that G is 1.
        has_small_scales: Whether every scale is in `SCALE_LIMITS`. Changes no bit.
    """

    codes: Any
    scales: Any
    zeros: Any = None
    code_type: CodeType = field(metadata={"static": True})
    group_len: int = field(metadata={"static": True})
    has_small_scales: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input channels, N and K."""
        return self.codes.shape[0] * BLOCK, self.codes.shape[1] * BLOCK

    @property
    def ndim(self) -> int:
        """Two."""
        return 2

    @property
    def dtype(self) -> jnp.dtype:
        """Of the expansion: bfloat16."""
        return jnp.dtype(jnp.bfloat16)

    @property
    def coding(self) -> Coding:
        """How it is quantised."""
        return Coding(
            code_type=self.code_type, group_len=self.group_len,
            scale_bytes=self.scales.dtype.itemsize, has_zeros=self.zeros is not None,
            has_small_scales=self.has_small_scales,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def expand(self) -> jax.Array:
        """The bfloat16 matrix [N, K] that it stands for, by plain operations of XLA."""
        values = unpack_codes(self.codes, self.code_type)
        if self.zeros is not None:
            values = values - self._of_columns(self.zeros)
        elif self.code_type is not CodeType.FLOAT8:
            values = values - float(self.code_type.middle)
        # ROUND: the product, then the weight. XLA may not drop a conversion to fewer bits.
        products = values * self._of_columns(self.scales)
        return jax.lax.reduce_precision(products, exponent_bits=8, mantissa_bits=7).astype(
            jnp.bfloat16
        )

    def _of_columns(self, of_groups) -> jax.Array:
        """[G, N] as float32 [N, K]."""
        spread = of_groups.astype(jnp.float32).T
        return jnp.repeat(spread, self.shape[1] // spread.shape[1], axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class RowCoding:
    """How activations become 8-bit values.

    Attributes:
        dtype: int8 or float8_e4m3fn.
        group_len: Channels that share a scale: `FLOAT8_CHUNK`, or 0 for a whole row.
        bound: The most that a peak counts as; 0 for any.
        scale: float32 [], the scale of all rows; None where each has its own peak's.
    """

    scale: Any = None
    dtype: jnp.dtype = field(metadata={"static": True})
    group_len: int = field(default=0, metadata={"static": True})
    bound: float = field(default=0.0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class W8A8Matrix:
    """A matrix [N, K] of 8-bit values that multiplies activations of 8-bit values.

    Those of several experts are one in front of the other, [U, N, K], and so are their scales.

    Attributes:
        values: int8 or float8_e4m3fn [N, K].
        scales: float32 [N], one for each output channel. Of blocks, which are float8, [N / R, G],
            one for R output channels and each group of `FLOAT8_CHUNK` input channels.
        row_scale: float32 [], `RowCoding.scale` of the activations; None if they have their own.
        row_bound: `RowCoding.bound` of the activations.
    """

    values: Any
    scales: Any
    row_scale: Any = None
    row_bound: float = field(default=0.0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Output and input channels, N and K; of experts their number first."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Two, or three."""
        return self.values.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """Of the expansion: bfloat16."""
        return jnp.dtype(jnp.bfloat16)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def group_len(self) -> int:
        """Input channels that share a scale, also of activations; 0 for all of them."""
        return FLOAT8_CHUNK if self.scales.ndim == self.values.ndim else 0

    @property
    def row_coding(self) -> RowCoding:
        """How the activations that it multiplies are made."""
        return RowCoding(
            dtype=self.values.dtype, group_len=self.group_len, bound=self.row_bound,
            scale=self.row_scale,
        )  # fmt: skip

    @property
    def block_rows(self) -> int:
        """Output channels that share a scale."""
        axis = self.values.ndim - 2
        return self.values.shape[axis] // self.scales.shape[axis]

    def row_scales(self) -> jax.Array:
        """Scales of each output channel: [N, 1], or [N, G] of blocks."""
        of_blocks = self.scales if self.group_len else self.scales[..., None]
        return jnp.repeat(of_blocks, self.block_rows, axis=-2)

    def expand(self) -> jax.Array:
        """The bfloat16 matrix [N, K] that `models.quantization.expand` gives, by plain XLA."""
        scales = self.row_scales()
        scales = jnp.repeat(scales, self.shape[-1] // scales.shape[-1], axis=-1)
        products = self.values.astype(jnp.float32) * scales
        # ROUND: the product, then the weight. XLA may not drop a conversion to fewer bits.
        rounded = jax.lax.reduce_precision(products, exponent_bits=8, mantissa_bits=7)
        return rounded.astype(jnp.bfloat16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedRows:
    """Activations as 8-bit values, of `quantize_rows`.

    Attributes:
        values: int8 or float8_e4m3fn [M, K].
        scales: float32 [M], one for each row, or [G, M], one for each group of `FLOAT8_CHUNK`
            channels as well. sm90 allocates more, which nothing has written, as its kernels load
            whole tiles of scales.
    """

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and channels, M and K."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of a value."""
        return self.values.dtype

    @property
    def group_len(self) -> int:
        """Channels that share a scale; 0 for a whole row."""
        return FLOAT8_CHUNK if self.scales.ndim == 2 else 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class RowsToQuantize:
    """Activations that a product quantises first, or normalises and quantises.

    Attributes:
        values: [M, K].
        coding: What they become.
        gain: [K], of the norm; None for rows as they are.
        eps: Of the norm.
    """

    values: Any
    coding: RowCoding
    gain: Any = None
    eps: float = field(default=0.0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and channels, M and K."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of a value when it is quantised."""
        return self.coding.dtype

    @property
    def group_len(self) -> int:
        """Channels that will share a scale; 0 for a whole row."""
        return self.coding.group_len


def quantized_rows(
    x: QuantizedRows | RowsToQuantize, *, quantize_rows: Callable, rms_norm: Callable
) -> QuantizedRows:
    """Rows as 8-bit values, by these operations of a backend one after the other."""
    if isinstance(x, QuantizedRows):
        return x
    rows = x.values if x.gain is None else rms_norm(x.values, x.gain, eps=x.eps)
    return quantize_rows(rows, x.coding)


AnyMatrix = jax.Array | QuantizedMatrix | W8A8Matrix
"""Weights of a product."""


QUANTIZED = (QuantizedMatrix, W8A8Matrix)
"""Matrices of several arrays."""


def is_quantized(node: Any) -> bool:
    """Whether a node of a tree of weights is a matrix of several arrays."""
    return isinstance(node, QUANTIZED)


def expanded(w: AnyMatrix) -> jax.Array:
    """The matrix itself, or what a quantised one stands for."""
    return w.expand() if isinstance(w, QUANTIZED) else w


def block_rows_of(w: AnyMatrix) -> int:
    """Outputs that share a scale, if those of 8-bit weights do by blocks; else 0."""
    return w.block_rows if isinstance(w, W8A8Matrix) and w.group_len else 0


def operands_of(x, w) -> tuple:
    """Activations, weights, and the scales of both: None where there are none yet, or at all.

    Raises:
        ValueError: If only one of them is of 8-bit values, or they are of two kinds, by dtype or by
            which channels share a scale.
    """
    is_quantized = isinstance(x, QuantizedRows | RowsToQuantize)
    if not is_quantized and not isinstance(w, W8A8Matrix):
        return x, w, None, None
    if is_quantized and isinstance(w, W8A8Matrix):
        if x.dtype != w.values.dtype:
            raise ValueError(f"{x.dtype} is not multiplied by {w.values.dtype}")
        if x.group_len != w.group_len:
            raise ValueError(f"scales of {x.group_len=} do not go with those of {w.group_len=}")
        return x.values, w.values, getattr(x, "scales", None), w.scales
    raise ValueError(f"a {type(x).__name__} is not multiplied by a {type(w).__name__}")


def are_small(scales: np.ndarray) -> bool:
    """Whether every scale is in `SCALE_LIMITS`."""
    low, high = SCALE_LIMITS
    return bool(((scales >= low) & (scales < high)).all())


def can_pack(shape: tuple[int, int], group_len: int) -> bool:
    """Whether a matrix is whole blocks, and groups a power of two of columns, 16 at least."""
    is_whole = shape[0] % BLOCK == 0 and shape[1] % BLOCK == 0
    if not group_len:
        return is_whole
    fits = group_len >= 16 and group_len & (group_len - 1) == 0
    return is_whole and fits and shape[1] % group_len == 0


def packed_shape(shape: tuple[int, int], code_type: CodeType) -> tuple[int, int, int, int]:
    """Of the int32 words of a matrix [N, K] of whole blocks."""
    lines = code_type.block_words // WORDS_PER_LINE
    return shape[0] // BLOCK, shape[1] // BLOCK, lines, WORDS_PER_LINE


def pack_codes(codes: np.ndarray, code_type: CodeType) -> np.ndarray:
    """Store codes in the order in which threads read them.

    Args:
        codes: uint8 [N, K], whole blocks: unsigned codes of 4 or 8 bits, or the bits of a float8.
        code_type: What they are.

    Returns:
        int32 [N / 64, K / 64, lines, 256]. Of a block's row 16 w + 8 h + g and column 8 c + 2 q + e
        the thread is 32 w + 4 g + q. Its int4 is number 4 e + 2 (c % 2) + h of word c // 2; its
        byte is number 2 h + e of word c % 4 of the block's half c // 4.
    """
    num_rows, num_columns = codes.shape
    # Axes: block row, w, h, g, block column, c, q, e.
    split = codes.reshape(num_rows // BLOCK, 4, 2, 8, num_columns // BLOCK, 8, 4, 2)
    if code_type is CodeType.INT4:
        # Axes: block row, w, h, g, block column, c // 2, c % 2, q, e.
        split = split.reshape(*split.shape[:5], 4, 2, 4, 2)
        nibbles = split.transpose(0, 4, 1, 3, 7, 5, 8, 6, 2)
        packed = nibbles[..., 0] | nibbles[..., 1] << 4
    else:
        # Axes: block row, w, h, g, block column, c // 4, c % 4, q, e.
        split = split.reshape(*split.shape[:5], 2, 4, 4, 2)
        packed = split.transpose(0, 4, 5, 1, 3, 7, 6, 2, 8)
    words = np.ascontiguousarray(packed, dtype=np.uint8).reshape(-1).view("<i4")
    return words.reshape(packed_shape(codes.shape, code_type))


def unpack_codes(codes, code_type: CodeType) -> jax.Array:
    """The inverse of `pack_codes`, as float32 values [N, K]; of integers the unsigned codes."""
    num_rows, num_columns = codes.shape[0] * BLOCK, codes.shape[1] * BLOCK
    if code_type is CodeType.INT4:
        # Axes: block row, block column, w, g, q, c // 2, then the eight of a word: e, c % 2, h.
        words = codes.reshape(*codes.shape[:2], 4, 8, 4, 4)
        nibbles = jnp.stack([(words >> shift) & 15 for shift in range(0, 32, 4)], axis=-1)
        split = nibbles.reshape(*words.shape, 2, 2, 2).transpose(0, 2, 8, 3, 1, 5, 7, 4, 6)
        return split.astype(jnp.float32).reshape(num_rows, num_columns)
    # Axes: block row, block column, c // 4, w, g, q, c % 4, then the four of a word: h, e.
    words = codes.reshape(*codes.shape[:2], 2, 4, 8, 4, 4)
    dtype = jnp.uint8 if code_type is CodeType.INT8 else jnp.float8_e4m3fn
    values = jax.lax.bitcast_convert_type(words, dtype)
    split = values.reshape(*words.shape, 2, 2).transpose(0, 3, 7, 4, 1, 2, 6, 5, 8)
    return split.astype(jnp.float32).reshape(num_rows, num_columns)
