# SPDX-License-Identifier: Apache-2.0
"""Quantised tensors as the bfloat16 tensors that they stand for, computed where they are read.

A weight of code q, zero point z and scale s is

    bfloat16(float32(q - z) * float32(s))

with the product and the result each rounded to nearest, ties to even. q - z has at most 9
significant bits and a scale in bfloat16 or float16 at most 11, so the product is exact then, and
the weight is rounded once. compressed-tensors' `decompress` gives the same where the scale is
bfloat16.

So a quantised model **is** a bfloat16 model, its expansion: same kernels, same claims, same bits.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from detjax.models.quantization.mxfp4 import expand_mxfp4
from detjax.models.quantization.rounding import to_bfloat16
from detjax.models.quantization.scheme import MXFP4, STATIC, QuantizationScheme
from detjax.models.weights.files import StoredTensor, open_tensors
from detjax.numerics import NOT_QUANTIZED
from detjax.pallas_kernels.linear.quantized import FLOAT8_NAN, CodeType

WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of eight that each four bits of AWQ's words hold, from the lowest bits on."""

SCALE_DTYPES = ("BF16", "F16", "F32")
ROWS_AT_ONCE_BYTES = 2**22
"""Float32 bytes of a part that is expanded at once: what lies in a core's cache."""

FLOAT8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The value of each float8_e4m3fn, by its bits: ten times as quick as a conversion."""

SIGN_BIT = 128
"""What makes an int8 unsigned, as a difference or as a bit."""

INPUT_SCALES = ("input_scale", "activation_scale")
"""Names of the part that scales activations, where all rows have one scale."""

UNUSED_PARTS = (*INPUT_SCALES, "weight_shape", "g_idx", "input_zero_point")
"""Parts beside a weight that its expansion does not need, or only checks."""


def expand_tensors(
    tensors: Mapping[str, StoredTensor], scheme: QuantizationScheme | None
) -> dict[str, StoredTensor]:
    """The tensors with each quantised one replaced by its expansion under the name "X.weight".

    Args:
        tensors: Of `open_tensors`.
        scheme: Of the folder's config.json; None returns `tensors` as they are.

    Raises:
        ValueError: If a part of a quantised tensor is missing, or of a wrong shape or dtype; or
            nothing is quantised. The message names file and tensor.
    """
    if scheme is None:
        return dict(tensors)
    if scheme.layout == MXFP4:
        return expand_mxfp4(tensors)
    names = _PARTS[scheme.layout]
    if scheme.layout == "plain":
        names = _plain_names(tensors, names, scheme)
    layers = [name.removesuffix(f".{names.codes}") for name in tensors if _is_code(name, names)]
    layers = [layer for layer in layers if f"{layer}.{names.scales}" in tensors]
    if not layers:
        raise ValueError(
            f"config.json says {scheme.method}, but no tensor has scales named "
            f"*.{names.scales}; config.json and the weights are of different models"
        )
    found = dict(tensors)
    for layer in layers:
        parts = {name: found.pop(f"{layer}.{name}", None) for name in (*names, *UNUSED_PARTS)}
        found[f"{layer}.weight"] = _expanded(layer, parts, names, scheme)
    return found


def describe_quantization(folder: Path, scheme: QuantizationScheme | None) -> str:
    """What identity and fingerprint say of a folder's quantisation.

    Scales of activations are named by a hash, as they are no weights. `scheme` is the folder's, by
    which its weights are multiplied.
    """
    if scheme is None:
        return NOT_QUANTIZED
    if not (scheme.is_w8a8 and scheme.activations.endswith(STATIC)):
        return str(scheme)
    hasher = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        for name, tensor in sorted(open_tensors(folder, stack).items()):
            if name.endswith(tuple(f".{scale}" for scale in INPUT_SCALES)):
                value = np.asarray(tensor.rows[...]).astype(np.float32)
                hasher.update(f"{name}={value.tobytes().hex()};".encode())
    return f"{scheme}, sha256 of its scales {hasher.hexdigest()}"


@dataclass(frozen=True, slots=True)
class _Names:
    """What follows the layer's name: of the codes, the scales and the zero points."""

    codes: str
    scales: str
    zeros: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.codes, self.scales, self.zeros))


_PARTS = {
    "plain": _Names("weight", "weight_scale", "weight_zero_point"),
    "packed": _Names("weight_packed", "weight_scale", "weight_zero_point"),
    "awq": _Names("qweight", "scales", "qzeros"),
    "gptq": _Names("qweight", "scales", "qzeros"),
}


def _plain_names(
    tensors: Mapping[str, StoredTensor], names: _Names, scheme: QuantizationScheme
) -> _Names:
    """DeepSeek's name of a scale says "inv", and it is the factor all the same."""
    if scheme.method == "fp8" and any(name.endswith(".weight_scale_inv") for name in tensors):
        return _Names(names.codes, "weight_scale_inv", names.zeros)
    return names


def _is_code(name: str, names: _Names) -> bool:
    return name.endswith(f".{names.codes}")


def _expanded(
    layer: str,
    parts: Mapping[str, StoredTensor | None],
    names: _Names,
    scheme: QuantizationScheme,
) -> StoredTensor:
    """One layer's weight."""
    codes, scales, zeros = (parts[name] for name in names)
    input_scale = next((parts[name] for name in INPUT_SCALES if parts[name] is not None), None)
    assert codes is not None and scales is not None
    shape = _matrix_shape(layer, codes, parts["weight_shape"], scheme)
    _check_parts(layer, parts, names, shape, scheme)
    _check_order(layer, parts["g_idx"], shape, scheme)
    rows = ExpandedRows(
        name=f"{layer!r} in {scales.file}",
        codes=codes.rows,
        scales=scales.rows,
        zeros=None if zeros is None else zeros.rows,
        shape=shape,
        scheme=scheme,
        input_scale=None if input_scale is None else input_scale.rows,
    )
    return StoredTensor(file=codes.file, rows=rows, shape=rows.shape, dtype="BF16")


def _matrix_shape(
    layer: str, codes: StoredTensor, stored: StoredTensor | None, scheme: QuantizationScheme
) -> tuple[int, int]:
    """Output and input channels of a layer. Only compressed-tensors' words may end in padding."""
    if len(codes.shape) != 2:
        raise ValueError(f"{layer!r} in {codes.file} has shape {codes.shape}, not that of a matrix")
    (n, k), per_word = codes.shape, WORD_BITS // scheme.num_bits
    match scheme.layout:
        case "plain":
            return n, k
        case "awq":
            return k * per_word, n
        case "gptq":
            return k, n * per_word
    if stored is None or stored.dtype != "I64" or stored.shape != (2,):
        raise ValueError(f"{layer!r} in {codes.file} lacks its weight_shape, two 64-bit integers")
    rows, columns = (int(size) for size in stored.rows)
    if (rows, -(-columns // per_word)) != (n, k):
        raise ValueError(
            f"'{layer}.weight_shape' in {stored.file} is [{rows}, {columns}], which does not go "
            f"with a packed weight of shape {codes.shape}"
        )
    return rows, columns


def _check_parts(
    layer: str,
    parts: Mapping[str, StoredTensor | None],
    names: _Names,
    shape: tuple[int, int],
    scheme: QuantizationScheme,
) -> None:
    """Refuse parts whose shapes or dtypes do not go together."""
    codes, scales, zeros = (parts[name] for name in names)
    assert codes is not None and scales is not None
    is_transposed, per_word = scheme.layout in ("awq", "gptq"), WORD_BITS // scheme.num_bits
    groups = scale_shape(shape, scheme)
    word = "F8_E4M3" if scheme.is_float else "I8"
    code = word if scheme.layout == "plain" else "I32"
    _check_part(f"{layer}.{names.codes}", codes, dtypes=(code,), shape=codes.shape)
    _check_part(
        f"{layer}.{names.scales}",
        scales,
        dtypes=SCALE_DTYPES,
        shape=groups[::-1] if is_transposed else groups,
    )
    if scheme.has_zero_points != (zeros is not None):
        raise ValueError(
            f"{layer!r} in {codes.file} {'lacks' if zeros is None else 'has'} zero points "
            f"({names.zeros}), but config.json says that weights are "
            f"{'not ' if scheme.has_zero_points else ''}symmetric"
        )
    if zeros is not None:
        n = groups[0] if scheme.layout == "plain" else -(-groups[0] // per_word)
        of_zeros = (n, groups[1])
        _check_part(
            f"{layer}.{names.zeros}",
            zeros,
            dtypes=("I8",) if scheme.layout == "plain" else ("I32",),
            shape=of_zeros[::-1] if is_transposed else of_zeros,
        )


def _check_order(
    layer: str, order: StoredTensor | None, shape: tuple[int, int], scheme: QuantizationScheme
) -> None:
    """GPTQ may say of each input channel which group it is in; only their order is supported."""
    if order is None:
        return
    expected = np.arange(shape[1]) // (scheme.block[1] or shape[1])
    if not np.array_equal(np.asarray(order.rows), expected):
        raise ValueError(
            f"'{layer}.g_idx' in {order.file} puts channels into groups out of their order "
            "(desc_act), which is not supported; quantise without desc_act"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpandedRows:
    """A quantised matrix `(output, input channels)`; indexing it gives bfloat16 of that part.

    Attributes:
        name: For errors.
        codes: As the file has them.
        scales: As the file has them.
        zeros: As the file has them; None if weights are symmetric.
        shape: Output and input channels.
        scheme: How to read them.
        input_scale: Of activations, as the file has it; None if the file has none.
    """

    name: str
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    shape: tuple[int, int]
    scheme: QuantizationScheme
    input_scale: np.ndarray | None = None

    def __getitem__(self, index: Any) -> np.ndarray:
        """Expand some rows and columns; rows may be numbers, those of a few heads."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        if isinstance(rows, np.ndarray):
            lowest = int(rows.min(initial=self.shape[0]))
            between = self[slice(lowest, int(rows.max(initial=lowest)) + 1), columns]
            return between[rows - lowest]
        (first, stop, _), (left, right, _) = (
            part.indices(size) for part, size in zip((rows, columns), self.shape, strict=True)
        )
        out = np.empty((stop - first, right - left), ml_dtypes.bfloat16)
        step = max(1, ROWS_AT_ONCE_BYTES // (4 * max(1, right - left)))
        for at in range(first, stop, step):
            end = min(at + step, stop)
            out[at - first : end - first] = self._part(at, end, left, right)
        return out

    def _part(self, first: int, stop: int, left: int, right: int) -> np.ndarray:
        values = self._codes_of(first, stop, left, right)
        if not self.scheme.is_float:
            zeros = self._spread(self._zeros_of(first, stop, left, right), left, right)
            values = np.subtract(values, zeros, dtype=np.float32)
        # ROUND: the product, then the weight, each to nearest, ties to even. Where the scale has
        # 16 bits the first is exact.
        scales = self._scales_of(first, stop, left, right).astype(np.float32)
        values *= self._spread(scales, left, right)
        return to_bfloat16(values)

    @property
    def code_type(self) -> CodeType:
        """What a code is."""
        if self.scheme.is_float:
            return CodeType.FLOAT8
        return CodeType.INT4 if self.scheme.num_bits == 4 else CodeType.INT8

    @property
    def group_len(self) -> int:
        """Input channels of a group; 0 if a row has one scale."""
        return self.scheme.block[1]

    @property
    def block_rows(self) -> int:
        """Rows that share a scale; 0 if all do."""
        return self.scheme.block[0]

    def moved(self, order: np.ndarray) -> "ExpandedRows":
        """Rows in another order, or some of them: `order` says which row each is."""
        if np.array_equal(order, np.arange(self.shape[0])):
            return self
        return MovedRows(
            name=self.name, codes=self.codes, scales=self.scales, zeros=self.zeros,
            shape=(len(order), self.shape[1]), scheme=self.scheme, input_scale=self.input_scale,
            whole=self, order=order,
        )  # fmt: skip

    def row_scale(self) -> float:
        """The scale of all activations.

        Raises:
            ValueError: If the file has none, or it is no positive number.
        """
        found = None if self.input_scale is None else np.asarray(self.input_scale[...])
        values = np.zeros(1, np.float32) if found is None else found.astype(np.float32).reshape(-1)
        if values.size != 1 or not 0 < values[0] < np.inf:
            raise ValueError(
                f"{self.name} has the {INPUT_SCALES[0]} {found}, which is not one positive number, "
                f"and config.json says that activations are {self.scheme.activations}; use "
                "quantized_weights='auto'"
            )
        return float(values[0])

    @property
    def scale_dtype(self) -> np.dtype:
        """bfloat16 if the file has that, else float32, which holds every scale."""
        is_narrow = self.scales.dtype == ml_dtypes.bfloat16
        return np.dtype(ml_dtypes.bfloat16 if is_narrow else np.float32)

    def unsigned_codes(self, rows: slice, columns: slice) -> np.ndarray:
        """uint8 of some rows and columns: unsigned integers, or the bits of a float8.

        Raises:
            ValueError: If a float8 is no number.
        """
        bounds = *rows.indices(self.shape[0])[:2], *columns.indices(self.shape[1])[:2]
        if self.scheme.layout != "plain":
            return self._codes_of(*bounds).astype(np.uint8)
        found = np.ascontiguousarray(self.codes[rows, columns]).view(np.uint8)
        if not self.scheme.is_float:
            return found ^ np.uint8(SIGN_BIT)
        if ((found & np.uint8(FLOAT8_NAN)) == FLOAT8_NAN).any():
            raise ValueError(f"a weight of {self.name} is not a number; download the file again")
        return found

    def group_scales(self, rows: slice, groups: slice) -> np.ndarray:
        """Scales [rows, groups] of some rows, of `scale_dtype`."""
        found = self._scales_of(*self._bounds(rows, groups)).astype(self.scale_dtype)
        return np.broadcast_to(found, (rows.stop - rows.start, found.shape[1]))

    def group_zeros(self, rows: slice, groups: slice) -> np.ndarray:
        """Unsigned zero points [rows, groups] of some rows, int16."""
        found = np.asarray(self._zeros_of(*self._bounds(rows, groups)))
        return found + np.int16(SIGN_BIT) if self.scheme.layout == "plain" else found

    def _bounds(self, rows: slice, groups: slice) -> tuple[int, int, int, int]:
        size = self.group_len or self.shape[1]
        return rows.start, rows.stop, groups.start * size, groups.stop * size

    def _codes_of(self, first: int, stop: int, left: int, right: int) -> np.ndarray:
        """As float32 of float8, or as integers."""
        words, bits = self.codes, self.scheme.num_bits
        match self.scheme.layout:
            case "packed":
                return unpack(words[first:stop], bits, left, right, axis=1)
            case "gptq":
                return unpack(words[:, first:stop], bits, left, right, axis=0).T
            case "awq":
                found = unpack(words[left:right], bits, first, stop, axis=1, order=AWQ_ORDER)
                return found.T
            case _:
                found = words[first:stop, left:right]
                return FLOAT8[found.view(np.uint8)] if self.scheme.is_float else found

    def _zeros_of(self, first: int, stop: int, left: int, right: int) -> np.ndarray | np.int16:
        scheme, zeros = self.scheme, self.zeros
        middle = np.int16(1 << (scheme.num_bits - 1))
        if zeros is None:
            return middle if scheme.layout == "packed" else np.int16(0)
        groups = slice(*self._groups(left, right))
        match scheme.layout:
            case "packed":
                # Both code and zero point are stored with half the range added: it cancels.
                found = unpack(zeros[:, groups], scheme.num_bits, first, stop, axis=0)
            case "gptq":
                found = unpack(zeros[groups], scheme.num_bits, first, stop, axis=1).T
            case "awq":
                found = unpack(
                    zeros[groups], scheme.num_bits, first, stop, axis=1, order=AWQ_ORDER
                ).T
            case _:
                found = zeros[first:stop, groups].astype(np.int16)
        return found + np.int16(scheme.zero_offset)

    def _scales_of(self, first: int, stop: int, left: int, right: int) -> np.ndarray:
        groups, (rows, _) = slice(*self._groups(left, right)), self.scheme.block
        if self.scheme.layout in ("awq", "gptq"):
            scales = self.scales[groups, first:stop].T
        elif rows > 1:
            low, high = first // rows, -(-stop // rows)
            scales = np.repeat(self.scales[low:high, groups], rows, axis=0)
            scales = scales[first - low * rows : stop - low * rows]
        elif rows == 1:
            scales = self.scales[first:stop].reshape(stop - first, -1)[:, groups]
        else:
            scales = self.scales[...].reshape(1, 1)
        if not np.isfinite(scales).all():
            raise ValueError(f"a scale of {self.name} is not finite; download the file again")
        return scales

    def _groups(self, left: int, right: int) -> tuple[int, int]:
        """The groups of input channels that some channels stand in."""
        size = self.scheme.block[1]
        return (left // size, -(-right // size)) if size else (0, 1)

    def _spread(self, of_groups, left: int, right: int):
        """One value for each input channel, from one for each group; or one for all."""
        size = self.scheme.block[1]
        if not size or not of_groups.ndim:
            return of_groups
        spread = np.repeat(of_groups, size, axis=1)
        first = left - left // size * size
        return spread[:, first : first + right - left]


@dataclass(frozen=True, kw_only=True, slots=True)
class MovedRows(ExpandedRows):
    """Rows of a quantised matrix as a decoder reads them, which stay quantised.

    Attributes:
        whole: The matrix of the checkpoint.
        order: Which row of it each row is.
    """

    whole: ExpandedRows
    order: np.ndarray

    def __getitem__(self, index: Any) -> np.ndarray:
        """Expand some rows and columns."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return self.whole[self.order[rows], columns]

    @property
    def block_rows(self) -> int:
        """Rows that share a scale; 0 if all do.

        Runs of so many rows lie in a block of the checkpoint each, and so do all that follow.
        """
        size = self.whole.block_rows
        blocks = self.order // size if size else self.order
        while size > 1:
            runs = blocks[: len(blocks) // size * size].reshape(-1, size)
            if len(blocks) % size == 0 and (runs == runs[:, :1]).all():
                break
            size //= 2
        return size

    def unsigned_codes(self, rows: slice, columns: slice) -> np.ndarray:
        """As of any rows."""
        return self._moved(self.whole.unsigned_codes, rows, columns)

    def group_scales(self, rows: slice, groups: slice) -> np.ndarray:
        """As of any rows."""
        return self._moved(self.whole.group_scales, rows, groups)

    def group_zeros(self, rows: slice, groups: slice) -> np.ndarray:
        """As of any rows."""
        return self._moved(self.whole.group_zeros, rows, groups)

    def _moved(self, read: Callable, rows: slice, columns: slice) -> np.ndarray:
        order = self.order[rows]
        lowest = int(order.min(initial=self.whole.shape[0]))
        between = read(slice(lowest, int(order.max(initial=lowest)) + 1), columns)
        return between[order - lowest]


def scale_shape(shape: tuple[int, int], scheme: QuantizationScheme) -> tuple[int, ...]:
    """The shape of a matrix's scales: one for each block of output and input channels."""
    (n, k), (rows, columns) = shape, scheme.block
    return (-(-n // rows) if rows else 1, -(-k // columns) if columns else 1)


def unpack(
    words: np.ndarray,
    num_bits: int,
    first: int,
    stop: int,
    *,
    axis: int,
    order: tuple[int, ...] = (),
) -> np.ndarray:
    """Elements `first` to `stop` along an axis of words of 32 bits.

    Args:
        words: int32, two axes.
        num_bits: Of an element: 4 or 8.
        first: First element along `axis`.
        stop: The one behind the last.
        axis: The axis along which words hold several elements.
        order: The element of a word that each `num_bits` hold, from the lowest bits on; as they
            come if empty.

    Returns:
        int16, unsigned values.
    """
    per_word = WORD_BITS // num_bits
    low, high = first // per_word, -(-stop // per_word)
    part = words[low:high] if axis == 0 else words[:, low:high]
    part = np.ascontiguousarray(part).view(np.uint32)
    shape = list(part.shape)
    shape[axis] *= per_word
    out = np.empty(shape, np.int16)
    mask = np.uint32((1 << num_bits) - 1)
    for i, element in enumerate(order or range(per_word)):
        into = out[element::per_word] if axis == 0 else out[:, element::per_word]
        np.bitwise_and(part >> np.uint32(i * num_bits), mask, out=into, casting="unsafe")
    begin = first - low * per_word
    inside = slice(begin, begin + stop - first)
    return out[inside] if axis == 0 else out[:, inside]


def _check_part(
    name: str, part: StoredTensor, *, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    where = f"{name!r} in {part.file}"
    if part.dtype not in dtypes:
        raise ValueError(
            f"{where} is {part.dtype}, but config.json makes it {' or '.join(dtypes)}; they are of "
            "different models"
        )
    if _squeezed(part.shape) != _squeezed(shape):
        raise ValueError(
            f"{where} has shape {part.shape}, but the weight and config.json make it {shape}"
        )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its ones at the end: `(N, 1)` is also written `(N,)`, and `(1,)` as `()`."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
