# SPDX-License-Identifier: Apache-2.0
"""Quantised tensors that stay quantised on the devices: codes, scales and zero points."""

import dataclasses
import enum
import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from detjax.models.params import ParamRole, ParamSpec, TensorSpec
from detjax.models.quantization.expand import SIGN_BIT, ExpandedRows
from detjax.models.quantization.scheme import STATIC
from detjax.models.weights.files import StoredTensor
from detjax.models.weights.place import ExpertRows, read_shard
from detjax.pallas_kernels.linear.quantized import (
    BLOCK,
    SCALE_LIMITS,
    WORDS_PER_LINE,
    CodeType,
    QuantizedMatrix,
    W8A8Matrix,
    are_small,
    can_pack,
    is_quantized,
    pack_codes,
)
from detjax.parallel.mesh import TP_AXIS

LOG = logging.getLogger(__name__)

LEAST_SCALE_ON_CPU = 1e-30
"""XLA flushes subnormal numbers on a CPU, and so cannot expand weights that are."""

_SEVERAL_SCALES = "weights that multiply the same activations have several scales of these"

MODES = ("auto", "packed", "expanded", "w8a8")
"""How quantised weights lie on the devices, as `MatrixForm`; auto is one of the first two."""


class MatrixForm(enum.Enum):
    """What a quantised matrix is on the devices."""

    EXPANDED = "the bfloat16 matrix that it stands for"
    PACKED = "its codes, which products widen to that matrix"
    W8A8 = "8-bit values, multiplied with activations of 8-bit values"


_MULTIPLIED = ParamRole.MATRIX, ParamRole.PROJECTION


def kept_form(
    param: ParamSpec, tensors: Mapping[str, StoredTensor], tp: int, form: MatrixForm
) -> MatrixForm:
    """How the tensors of a parameter lie on the devices, where `form` is that of the model.

    Raises:
        ValueError: If it is `W8A8` and a quantised tensor is of another kind.
    """
    if form is MatrixForm.PACKED and _stays_packed(param, tensors, tp):
        return form
    if form is not MatrixForm.W8A8:
        return MatrixForm.EXPANDED
    stored = [tensors[name] for spec in param.tensors for name in spec.hf_names]
    quantized = [it for it in stored if isinstance(it.rows, ExpandedRows)]
    if not quantized:
        return MatrixForm.EXPANDED
    is_matrix = all(
        (spec.role in _MULTIPLIED or spec.num_experts) and not _is_padded(spec)
        for spec in param.tensors
    )
    if is_matrix and len(quantized) == len(stored):
        return form
    if any(spec.role is not ParamRole.PROJECTION for spec in param.tensors):
        raise ValueError(
            f"{quantized[0].rows.name} is not a whole matrix of 8-bit weights that 8-bit "
            "activations can multiply; use quantized_weights='auto'"
        )
    # Published folders quantise q, k, v and the gates of linear attention, and neither b nor a.
    _warn_expanded(re.sub(r"\.\d+\.", ".*.", quantized[0].rows.name))
    return MatrixForm.EXPANDED


@functools.cache
def _warn_expanded(name: str) -> None:
    """Say once that a matrix of the model is multiplied by activations of 16 bits."""
    LOG.warning(
        "%s is a part of a matrix that is not 8-bit values as a whole: it lies on the devices as "
        "bfloat16, and is multiplied by bfloat16 activations",
        name,
    )


def _stays_packed(param: ParamSpec, tensors: Mapping[str, StoredTensor], tp: int) -> bool:
    """Whether the devices hold a parameter's codes: a matrix whose tensors are quantised alike."""
    specs = param.tensors
    if any(spec.role is not ParamRole.MATRIX or _is_padded(spec) for spec in specs):
        return False
    rows = [tensors[spec.hf_name].rows for spec in specs]
    if not all(isinstance(it, ExpandedRows) for it in rows):
        return False
    if any(it.code_type is CodeType.INT8 and it.scheme.has_zero_points for it in rows):
        return False  # no GPU has run them
    kinds = {(it.code_type, it.group_len, it.scale_dtype, it.scheme) for it in rows}
    return len(kinds) == 1 and all(
        can_pack(_rank_shape(spec, tp), it.group_len) for spec, it in zip(specs, rows, strict=True)
    )


def _is_padded(spec: TensorSpec) -> bool:
    return spec.shape[0] != sum(run.num_rows for run in spec.runs)


def _rank_shape(spec: TensorSpec, tp: int) -> tuple[int, int]:
    """Rows and columns of a rank."""
    by_rows, by_columns = _axes(spec)
    rows, columns = spec.shape
    return rows // (tp if by_rows else 1), columns // (tp if by_columns else 1)


def _axes(spec: TensorSpec | ParamSpec) -> tuple[str | None, str | None]:
    """The mesh axes of rows and columns."""
    rows, columns, *_ = (*spec.partition, None, None)
    return rows, columns


def _partitions(spec: TensorSpec | ParamSpec, num_groups: int) -> tuple[Any, Any]:
    """How codes, and scales and zero points, are split."""
    rows, columns = _axes(spec)
    of_groups = PartitionSpec(columns if num_groups > 1 else None, rows)
    return PartitionSpec(rows, columns, None, None), of_groups


def place_packed(rows: ExpandedRows, spec: TensorSpec, mesh: Mesh, *, name: str) -> QuantizedMatrix:
    """Put a quantised tensor where its spec says, as it is.

    Args:
        rows: The tensor of the checkpoint.
        spec: Where rows and columns go.
        mesh: Has the axes "dp" and "tp".
        name: Of the tensor, and where it comes from, for errors.

    Raises:
        ValueError: If a scale is not finite, a weight is not a number, or a CPU cannot expand it.
    """
    num_groups = spec.shape[1] // rows.group_len if rows.group_len else 1
    of_codes, of_groups = _partitions(spec, num_groups)
    code_type = rows.code_type
    block_shape = (code_type.block_words // WORDS_PER_LINE, WORDS_PER_LINE)
    shape = (spec.shape[0] // BLOCK, spec.shape[1] // BLOCK, *block_shape)

    @functools.cache
    def codes(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        part = read_shard(_Source(rows.unsigned_codes), spec, np.uint8, name, bounds)
        return pack_codes(part, code_type)

    def groups(read: Callable, dtype, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        return np.ascontiguousarray(read_shard(_Source(read), spec, dtype, name, bounds).T)

    def make(shape, partition, read, dtype, unit, *, is_turned):
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # jax passes None only for shapes it does not know
            bounds = [i.indices(n)[:2] for i, n in zip(index[:2], shape, strict=False)]
            bounds = [(start * unit, stop * unit) for start, stop in bounds]
            return read(tuple(reversed(bounds) if is_turned else bounds))

        sharding = NamedSharding(mesh, partition)
        return jax.make_array_from_callback(shape, sharding, shard, dtype).block_until_ready()

    def of_each_group(read: Callable, dtype) -> jax.Array:
        read_bounds = functools.cache(functools.partial(groups, read, dtype))
        size = (num_groups, spec.shape[0])
        return make(size, of_groups, read_bounds, dtype, 1, is_turned=True)

    every = slice(0, rows.shape[0]), slice(0, num_groups)
    scales = rows.group_scales(*every).astype(np.float32)
    is_on_cpu = mesh.devices.flat[0].platform == "cpu"
    if is_on_cpu and ((scales != 0) & (np.abs(scales) < LEAST_SCALE_ON_CPU)).any():
        raise ValueError(
            f"{name} has scales under {LEAST_SCALE_ON_CPU:.0e}, whose products XLA takes for 0 on "
            "a CPU; load it with quantized_weights='expanded'"
        )
    bf16 = np.dtype(ml_dtypes.bfloat16)
    return QuantizedMatrix(
        codes=make(shape, of_codes, codes, jnp.int32, BLOCK, is_turned=False),
        scales=of_each_group(rows.group_scales, rows.scale_dtype),
        zeros=of_each_group(rows.group_zeros, bf16) if rows.scheme.has_zero_points else None,
        code_type=code_type,
        group_len=rows.group_len,
        has_small_scales=are_small(scales),
    )


class _Source:
    """What `read_shard` indexes with rows and columns."""

    def __init__(self, read: Callable[[slice, slice], np.ndarray]):
        self._read = read

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        return self._read(*index)


def _w8a8_partitions(
    spec: TensorSpec | ParamSpec, *, has_blocks: bool
) -> tuple[PartitionSpec, PartitionSpec]:
    """How values and scales are split: by rows, or by experts."""
    rows, columns = _axes(spec)
    of_values = PartitionSpec(rows or columns, *[None] * (len(spec.shape) - 1))
    return of_values, of_values if has_blocks else PartitionSpec(*of_values[:-1])


def _block_rows(rows: ExpandedRows, spec: TensorSpec, mesh: Mesh) -> int:
    """Rows that share a scale on the devices: each run of rows is whole blocks on each rank."""
    if spec.num_experts:  # ranks have whole experts
        return math.gcd(rows.block_rows, rows.shape[0])
    sizes = [rows.block_rows, spec.shape[0] // mesh.shape[TP_AXIS]]
    if not any(_axes(spec)):
        sizes[1] = spec.shape[0]
    sizes += [size for run in spec.runs for size in (run.start, run.source, run.num_rows)]
    return math.gcd(*sizes)


def place_w8a8(
    sources: Sequence[ExpandedRows], spec: TensorSpec, mesh: Mesh, *, name: str
) -> W8A8Matrix:
    """Put a tensor of 8-bit values and scales, or those of all experts, on the devices, as it is.

    Ranks own rows, also of a matrix whose spec splits columns: `models.layers` says why. Of experts
    they own whole ones.

    Args:
        sources: The tensors of the checkpoint, of a scheme that `as_w8a8` takes.
        spec: The shape, and whether it is split over ranks.
        mesh: Has the axes "dp" and "tp".
        name: Of the tensor, and where it comes from, for errors.

    Raises:
        ValueError: If a scale is not finite, a weight is not a number, a row is not whole blocks,
            or the tensors have several scales of activations.
    """
    rows, group_len = sources[0], sources[0].group_len
    if group_len and rows.shape[1] % group_len:
        raise ValueError(
            f"{name} has {rows.shape[1]} columns, which are not whole blocks of {group_len}; use "
            "quantized_weights='auto'"
        )
    partitions = _w8a8_partitions(spec, has_blocks=group_len > 0)
    of_values, of_scales = (NamedSharding(mesh, of) for of in partitions)
    is_float = rows.code_type is CodeType.FLOAT8
    num_groups = rows.shape[1] // group_len if group_len else 1
    block_rows = _block_rows(rows, spec, mesh) if group_len else 1
    dtype = np.dtype(ml_dtypes.float8_e4m3fn if is_float else np.int8)
    scale_shape = (*spec.shape[:-2], spec.shape[-2] // block_rows, num_groups)

    def read(of_tensor: Callable, dtype, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        parts = [_Source(functools.partial(of_tensor, it)) for it in sources]
        source = ExpertRows(parts) if spec.num_experts else parts[0]
        return read_shard(source, spec, dtype, name, bounds)

    def values(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # jax passes None only for shapes it does not know
        bounds = tuple(i.indices(n)[:2] for i, n in zip(index, spec.shape, strict=True))
        part = read(lambda of, *part: of.unsigned_codes(*part), np.uint8, bounds)
        return part.view(dtype) if is_float else (part ^ np.uint8(SIGN_BIT)).view(dtype)

    def of_groups(of: ExpandedRows, rows: slice, groups: slice) -> np.ndarray:
        return of.group_scales(rows, groups).astype(np.float32)

    def scales(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        index = (*index, slice(None))[: len(scale_shape)]
        bounds = [i.indices(n)[:2] for i, n in zip(index, scale_shape, strict=True)]
        first, stop = bounds[-2]
        bounds[-2] = first * block_rows, stop * block_rows
        found = read(of_groups, np.float32, tuple(bounds))[..., ::block_rows, :]
        return np.ascontiguousarray(found if group_len else found[..., 0])

    stored = scale_shape if group_len else scale_shape[:-1]
    make = jax.make_array_from_callback
    return W8A8Matrix(
        values=make(spec.shape, of_values, values, dtype).block_until_ready(),
        scales=make(stored, of_scales, scales, jnp.float32).block_until_ready(),
        row_scale=_row_scale(sources, mesh),
        row_bound=rows.scheme.activation_bound,
    )


def _row_scale(sources: Sequence[ExpandedRows], mesh: Mesh) -> jax.Array | None:
    """The scale of all activations on every device, where the checkpoint has one."""
    if not sources[0].scheme.activations.endswith(STATIC):
        return None
    values = {source.row_scale(): source.name for source in sources}
    if len(values) > 1:
        few = ", ".join(f"{value} of {name}" for value, name in sorted(values.items())[:2])
        raise ValueError(f"{_SEVERAL_SCALES} ({few}); use quantized_weights='auto'")
    [value] = values
    return _on_every_device(value, mesh)


def _on_every_device(value: float, mesh: Mesh) -> jax.Array:
    return jax.device_put(np.float32(value), NamedSharding(mesh, PartitionSpec()))


def join_packed(parts: Sequence[Any], spec: ParamSpec, mesh: Mesh) -> QuantizedMatrix | W8A8Matrix:
    """Store quantised tensors as one parameter: each rank's rows of the first, then of the next."""
    first = parts[0]
    if isinstance(first, W8A8Matrix):
        of_values, of_scales = _w8a8_partitions(spec, has_blocks=first.group_len > 0)
        found = [float(it.row_scale) for it in parts if it.row_scale is not None]
        if len(set(found)) > 1:
            names = ", ".join(tensor.hf_name for tensor in spec.tensors)
            raise ValueError(
                f"{_SEVERAL_SCALES}: {names} have {found}; use quantized_weights='auto'"
            )
        block_rows = math.gcd(*[it.block_rows for it in parts])
        repeats = tuple(it.block_rows // block_rows for it in parts)
        axis = first.ndim - 2
        joined = _joiner(mesh, of_scales, axis, repeats)
        return W8A8Matrix(
            values=_joiner(mesh, of_values, axis)([it.values for it in parts]),
            scales=joined([it.scales for it in parts]),
            # WHY: a copy, as the parts are deleted.
            row_scale=_on_every_device(found[0], mesh) if found else None,
            row_bound=first.row_bound,
        )
    of_codes, of_groups = _partitions(spec, first.scales.shape[0])
    return QuantizedMatrix(
        codes=_joiner(mesh, of_codes, 0)([part.codes for part in parts]),
        scales=_joiner(mesh, of_groups, 1)([part.scales for part in parts]),
        zeros=None
        if first.zeros is None
        else _joiner(mesh, of_groups, 1)([part.zeros for part in parts]),
        code_type=first.code_type,
        group_len=first.group_len,
        has_small_scales=all(part.has_small_scales for part in parts),
    )


@functools.cache
def _joiner(
    mesh: Mesh, partition: PartitionSpec, axis: int, repeats: tuple[int, ...] = ()
) -> Callable[[list], jax.Array]:
    """Concatenate arrays that lie alike along an axis, each rank its own parts.

    With `repeats` each element of a part comes so often.
    """

    def join_parts(parts: list) -> jax.Array:
        if repeats:
            pairs = zip(parts, repeats, strict=True)
            parts = [jnp.repeat(part, count, axis=axis) for part, count in pairs]
        return jnp.concatenate(parts, axis=axis)

    local = jax.shard_map(
        join_parts,
        mesh=mesh,
        in_specs=(partition,),
        out_specs=partition,
        check_vma=False,
    )
    return jax.jit(local, out_shardings=NamedSharding(mesh, partition))


def with_packed_specs(specs: Any, params: Any) -> Any:
    """The tree of `PartitionSpec` that goes with parameters of which some are packed."""

    def spec(array, of_plain):
        if not is_quantized(array):
            return of_plain
        return jax.tree.map(lambda leaf: leaf.sharding.spec, array)

    own = {name: params[name] for name in specs}
    return jax.tree.map(spec, own, specs, is_leaf=is_quantized)


def with_scale_code_of(params: Any, old: Any) -> Any:
    """New parameters with the `has_small_scales` of those whose programs are compiled.

    Raises:
        ValueError: If scales are outside of the limits that these programs were compiled for.
    """

    def align(path, new, have):
        if not isinstance(new, QuantizedMatrix) or not isinstance(have, QuantizedMatrix):
            return new
        if have.has_small_scales and not new.has_small_scales:
            raise ValueError(
                f"scales of weight {jax.tree_util.keystr(path)} are outside of {SCALE_LIMITS}, and "
                "those of the model's first weights were inside; load the model with the new "
                "weights, or with quantized_weights='expanded'"
            )
        return dataclasses.replace(new, has_small_scales=have.has_small_scales)

    return jax.tree_util.tree_map_with_path(align, params, old, is_leaf=is_quantized)


def has_packed(params: Any) -> bool:
    """Whether any matrix lies on the devices packed."""
    return any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
