# SPDX-License-Identifier: Apache-2.0
"""A hash of weights as they lie on the devices, the same for every mesh and machine."""

import hashlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import blake3 as blake3_library
import jax
import numpy as np
from jax.sharding import Mesh

from detjax.models.config import ModelConfig
from detjax.models.params import Params, ParamSpec, TensorSpec, param_specs
from detjax.models.weights import blake3
from detjax.models.weights.blake3 import UNIT_BYTES
from detjax.pallas_kernels.linear.quantized import (
    AnyMatrix,
    QuantizedMatrix,
    W8A8Matrix,
    expanded,
    is_quantized,
)
from detjax.parallel.mesh import TP_AXIS


def hash_weights(params: Params, config: ModelConfig, mesh: Mesh, *, vocab_block: int) -> str:
    """Hash every weight that a model computes with: 64 hexadecimal digits.

    Sha256 over a line for each tensor of the checkpoint, in order of name: its name, its dtype, its
    shape and the BLAKE3 of its bytes (row-major, little-endian). Padding and repeated heads are
    left out, so the hash depends on no mesh. One Hopper GPU hashes whole units of 256 KiB where
    they lie; other tensors are copied to the host and hashed side by side.

    Args:
        params: As loaded for `config` on `mesh`; other entries are not hashed.
        config: The model.
        mesh: The mesh of `params`.
        vocab_block: As for `param_specs`.

    Raises:
        ValueError: If two copies of a tied tensor differ, or other processes hold a part.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"the weights lie on the devices of {jax.process_count()} processes, and one alone "
            "cannot hash them; ask in a single process"
        )
    tp = mesh.shape[TP_AXIS]
    specs = param_specs(config, tp=tp, vocab_block=vocab_block)
    own = {name: params[name] for name in specs}
    arrays = jax.tree.leaves(own, is_leaf=is_quantized)
    pairs = list(zip(jax.tree.leaves(specs), arrays, strict=True))
    places = [_places(spec, array, tp=tp) for spec, array in pairs]
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        on_host = [
            pool.submit(_host_hashes, spec, array, tp=tp)
            for (spec, array), where in zip(pairs, places, strict=True)
            if where is None
        ]
        on_device = _device_hashes(
            [(array, where) for (_, array), where in zip(pairs, places, strict=True) if where]
        )
    host, device = (iter(found) for found in ([f.result() for f in on_host], on_device))
    lines: dict[str, str] = {}
    for (spec, array), where in zip(pairs, places, strict=True):
        for name, line in _lines(spec, array, next(host if where is None else device)):
            if lines.setdefault(name, line) != line:
                raise ValueError(
                    f"the two copies of {name} in memory differ; load the weights again"
                )
    return hashlib.sha256("".join(lines[name] for name in sorted(lines)).encode()).hexdigest()


def _lines(spec: ParamSpec, array: AnyMatrix, hashes: list[str]) -> Iterator[tuple[str, str]]:
    """(name, line) of each tensor that a parameter is made of."""
    names = [(name, tensor) for tensor in spec.tensors for name in tensor.hf_names]
    for (name, tensor), digest in zip(names, hashes, strict=True):
        shape = ",".join(map(str, tensor.hf_shape))
        yield name, f"{name} {array.dtype.name} {shape} {digest}\n"


def _host_hashes(spec: ParamSpec, array: AnyMatrix, *, tp: int) -> list[str]:
    """BLAKE3 of each tensor, copied to the host."""
    array = _expanded(array)
    found = []
    for tensor, stored in zip(spec.tensors, _tensors(spec, array, tp=tp), strict=True):
        for rows in stored if tensor.num_experts else [stored]:
            hasher = blake3_library.blake3(max_threads=blake3_library.blake3.AUTO)
            for run in [None] if tensor.num_experts else _runs(tensor):
                part = rows if run is None else rows[run.start : run.start + run.num_rows]
                hasher.update(np.ascontiguousarray(part).view(np.uint8).reshape(-1).data)
            found.append(hasher.hexdigest())
    return found


def _expanded(array: AnyMatrix) -> jax.Array:
    """What a quantised matrix stands for, made for as long as it is hashed."""
    if not isinstance(array, QuantizedMatrix):
        return jax.jit(expanded)(array) if isinstance(array, W8A8Matrix) else array
    is_whole = len(array.codes.sharding.device_set) == 1
    if not (is_whole and _is_on_hopper(array)):
        return jax.jit(expanded)(array)
    from detjax.pallas_kernels.linear.sm90_expand import expand  # WHY: it imports Mosaic

    return expand(array)


def _runs(tensor: TensorSpec) -> list:
    """The runs of stored rows that hold the checkpoint's rows, each once and in order."""
    first = {run.source: run for run in reversed(tensor.runs)}
    return [first[source] for source in sorted(first)]


def _tensors(spec: ParamSpec, array: AnyMatrix, *, tp: int) -> Iterator[np.ndarray]:
    """The tensors on the host, as their specs store them."""
    whole = np.asarray(array)
    if len(spec.tensors) == 1:
        yield whole
        return
    by_rank = whole if spec.tensors[0].num_experts else whole.reshape(tp, -1, *whole.shape[1:])
    start = 0
    for tensor in spec.tensors:
        end = start + tensor.rows_of_rank(tp)
        yield by_rank[:, start:end].reshape(tensor.shape)
        start = end


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Units `[start, start + num_units)` of a parameter are one tensor."""

    start: int
    num_units: int


def _places(spec: ParamSpec, array: AnyMatrix, *, tp: int) -> list[_Place] | None:
    """Where each tensor of a parameter lies in units; None if the host must hash it.

    The host must, where the tensors of a parameter are no whole units one after the other, or where
    no Hopper GPU has all of them.
    """
    num_bytes = _num_bytes(array)
    if tp > 1 or not _is_on_hopper(array) or num_bytes % UNIT_BYTES:
        return None
    stride = sum(tensor.rows_of_rank(tp) for tensor in spec.tensors)
    row_bytes = num_bytes // (stride * max(1, spec.tensors[0].num_experts))
    places, offset = [], 0
    for tensor in spec.tensors:
        runs = _runs(tensor)
        is_whole = tensor.num_experts > 0 or len(runs) == 1
        rows = tensor.shape[1] if tensor.num_experts else runs[0].num_rows
        begin = offset if tensor.num_experts else offset + runs[0].start
        if not is_whole or rows * row_bytes < 2 * UNIT_BYTES:
            return None
        for expert in range(max(1, tensor.num_experts)):
            start, misplaced = divmod((expert * stride + begin) * row_bytes, UNIT_BYTES)
            if misplaced or rows * row_bytes % UNIT_BYTES:
                return None
            places.append(_Place(start=start, num_units=rows * row_bytes // UNIT_BYTES))
        offset += tensor.rows_of_rank(tp)
    return places


def _num_bytes(array: AnyMatrix) -> int:
    """Of a parameter, quantised or not, as it is hashed."""
    return math.prod(array.shape) * array.dtype.itemsize


def _is_on_hopper(array: AnyMatrix) -> bool:
    device = next(iter(jax.tree.leaves(array)[0].sharding.device_set))
    return device.platform == "gpu" and str(device.compute_capability).startswith("9.")


def _device_hashes(
    placed: list[tuple[AnyMatrix, list[_Place]]],
) -> list[list[str]]:
    """BLAKE3 of each tensor of each parameter, from units that a GPU hashes."""
    if not placed:
        return []
    from detjax.models.weights.device_hashing import hash_units  # WHY: it imports Mosaic

    trees: list[np.ndarray] = []
    for array, places in placed:
        firsts = np.zeros(_num_bytes(array) // UNIT_BYTES, np.int64)
        for place in places:
            firsts[place.start : place.start + place.num_units] = np.arange(place.num_units)
        # Replicas of "dp" hold the same.
        units = hash_units(_expanded(array).addressable_shards[0].data, firsts)
        trees += [units[place.start : place.start + place.num_units] for place in places]
    found = iter(blake3.roots(trees))
    return [[next(found).hex() for _ in places] for _, places in placed]
