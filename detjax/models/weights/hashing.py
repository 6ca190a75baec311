# SPDX-License-Identifier: Apache-2.0
"""Sha256 of weights as they lie on the devices, the same for every mesh."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh

from detjax.models.config import ModelConfig
from detjax.models.params import Params, ParamSpec, TensorSpec, param_specs
from detjax.parallel.mesh import TP_AXIS


def hash_weights(params: Params, config: ModelConfig, mesh: Mesh, *, vocab_block: int) -> str:
    """Hash every weight that a model computes with: 64 hexadecimal digits.

    Sha256 over a line for each tensor of the checkpoint, in order of name: its name, its dtype, its
    shape and the sha256 of its bytes (row-major, little-endian). Padding and repeated heads are
    left out, so the hash depends on no mesh. Tensors are copied from the devices and hashed side by
    side.

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
    specs = param_specs(config, tp=mesh.shape[TP_AXIS], vocab_block=vocab_block)
    pairs = list(
        zip(jax.tree.leaves(specs), jax.tree.leaves({k: params[k] for k in specs}), strict=True)
    )
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda p: _digests(*p, tp=mesh.shape[TP_AXIS]), pairs))
    lines: dict[str, str] = {}
    for name, line in (found for part in digests for found in part):
        if lines.setdefault(name, line) != line:
            raise ValueError(f"the two copies of {name} in memory differ; load the weights again")
    return hashlib.sha256("".join(lines[name] for name in sorted(lines)).encode()).hexdigest()


def _digests(spec: ParamSpec, array: jax.Array, *, tp: int) -> list[tuple[str, str]]:
    """(name, line) of each tensor that a parameter is made of."""
    return [
        (name, _line(name, tensor, rows))
        for tensor, host in zip(spec.tensors, _tensors(spec, array, tp=tp), strict=True)
        for name, rows in zip(tensor.hf_names, host if tensor.num_experts else [host], strict=True)
    ]


def _tensors(spec: ParamSpec, array: jax.Array, *, tp: int) -> Iterator[np.ndarray]:
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


def _line(name: str, tensor: TensorSpec, stored: np.ndarray) -> str:
    """The line of one tensor of the checkpoint, as `tensor` stores it; of an expert, its rows."""
    hasher = hashlib.sha256()
    first = {run.source: run for run in reversed(tensor.runs)}
    for source in sorted(first):
        run = first[source]
        rows = stored if tensor.num_experts else stored[run.start : run.start + run.num_rows]
        hasher.update(np.ascontiguousarray(rows).view(np.uint8).reshape(-1).data)
    shape = ",".join(map(str, tensor.hf_shape))
    return f"{name} {stored.dtype.name} {shape} {hasher.hexdigest()}\n"
