# SPDX-License-Identifier: Apache-2.0
"""Heads of multi-token prediction: their tensors in the folder of the model, read and placed."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from detjax.models.config import ModelConfig
from detjax.models.family import MtpLayout
from detjax.models.heads.config import HeadConfig
from detjax.models.heads.head import DraftHead, check_head
from detjax.models.heads.mtp_config import find_mtp_layout, mtp_config
from detjax.models.heads.mtp_files import open_mtp_tensors
from detjax.models.loading import LoadedModel
from detjax.models.params import Params, ParamSpec, TensorSpec, param_specs
from detjax.models.weights.assemble import assemble_one
from detjax.models.weights.files import StoredTensor
from detjax.models.weights.load import check_tensors, ignore_progress, place_stored
from detjax.models.weights.packed import has_packed
from detjax.models.weights.reading import AnyReading, Reading, read_by, readings
from detjax.pallas_kernels.linear.quantized import AnyMatrix
from detjax.parallel.mesh import TP_AXIS

_LAYER = "model.layers.0."
_GAINS = ("embed_norm", "hidden_norm", "last_norm")


def mtp_specs(layer: ModelConfig, layout: MtpLayout) -> dict[str, ParamSpec]:
    """Describe the weights of a head: those of its layer, three gains and the matrix `join`.

    Args:
        layer: Of its `HeadConfig`.
        layout: How checkpoints hold it.
    """
    of_model = param_specs(layer, tp=1, vocab_block=1)
    layer_specs: dict[str, ParamSpec] = of_model["layers"][0]
    (gain,), (table,) = of_model["final_norm"].tensors, of_model["embed"].tensors
    shape = layer.hidden_size, 2 * layer.hidden_size
    run = dataclasses.replace(table.runs[0], num_rows=shape[0])
    one = {name: dataclasses.replace(gain, hf_name=_name_of(name, layout)) for name in _GAINS}
    one["join"] = dataclasses.replace(  # read as it is, like a table
        table, hf_name=_name_of("join", layout), hf_shape=shape, shape=shape, runs=(run,)
    )
    alone = {name: ParamSpec(tensors=(x,), shape=x.shape, partition=P()) for name, x in one.items()}
    named = {name: _of_head(spec, layout) for name, spec in layer_specs.items()}
    return {name: _on_every_rank(spec) for name, spec in (named | alone).items()}


def _on_every_rank(spec: ParamSpec) -> ParamSpec:
    tensors = tuple(dataclasses.replace(one, partition=P()) for one in spec.tensors)
    return dataclasses.replace(spec, tensors=tensors, partition=P())


def _of_head(spec: ParamSpec, layout: MtpLayout) -> ParamSpec:
    """The same of the tensors of the head's layer."""
    tensors = (
        dataclasses.replace(one, hf_name=_in_head(one.hf_name, layout)) for one in spec.tensors
    )
    return dataclasses.replace(spec, tensors=tuple(tensors))


def _in_head(name: str, layout: MtpLayout) -> str:
    """The name in the head of what is a tensor of a model's first layer."""
    return layout.prefix + layout.layer + name.removeprefix(_LAYER)


def _name_of(param: str, layout: MtpLayout) -> str:
    """The name of a tensor beside the head's layer."""
    return f"{layout.prefix}{layout.names[param]}.weight"


def _head_readings(
    layer: ModelConfig, layout: MtpLayout, dtype: jnp.dtype
) -> dict[str, AnyReading]:
    """How tensors are made of the checkpoint's, as `readings` has it of the model's."""
    plan: dict[str, AnyReading] = {}
    for name, reading in readings(layer, dtype).items():
        if name.startswith(_LAYER):
            own = _in_head(name, layout)
            source = _in_head(reading.source, layout)
            plan[own] = dataclasses.replace(reading, name=own, source=source)
    for name in (_name_of(gain, layout) for gain in _GAINS if layer.gain_offset):
        plan[name] = Reading(
            name=name, source=name, source_rows=layer.hidden_size, start=0,
            num_rows=layer.hidden_size, offset=layer.gain_offset,
        )  # fmt: skip
    return plan


class _SwappedHalves:
    """A matrix whose columns of the hidden state come first, as one where they come last."""

    def __init__(self, rows: Any):
        self._rows = rows

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        rows = np.asarray(self._rows[index[0]])
        return np.roll(rows, rows.shape[1] // 2, axis=1)[:, *index[1:]]


def open_mtp_head(
    folder: Path,
    layer: ModelConfig,
    layout: MtpLayout,
    dtype: jnp.dtype,
    stack: contextlib.ExitStack,
) -> dict[str, StoredTensor]:
    """Open a model's files until `stack` closes, and list the tensors of its head that are read.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If there is no head, or a tensor of it is missing, unknown or does not fit.
    """
    stored = open_mtp_tensors(folder, layout, stack)
    tensors = read_by(_head_readings(layer, layout, dtype), stored)
    specs = [one for spec in mtp_specs(layer, layout).values() for one in spec.tensors]
    check_tensors(folder, tensors, specs, dtype=dtype, can_cast=True)  # drafts may be rounded
    if layout.is_hidden_first:
        name = _name_of("join", layout)
        rows = _SwappedHalves(tensors[name].rows)
        tensors[name] = dataclasses.replace(tensors[name], rows=rows)
    return tensors


def load_mtp_head(
    model: LoadedModel, *, progress: Callable[[str, int, int], None] = ignore_progress
) -> DraftHead:
    """Load the head that lies in a model's own folder, rounded to its dtype of weights.

    Args:
        model: That verifies.
        progress: Told how far loading is.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the model has random weights or no head that is supported, or a tensor of it
            is missing, unknown or of another shape.
    """
    if model.folder is None:
        raise ValueError("a model with random weights has no MTP head; load one from a folder")
    layout = find_mtp_layout(model.folder)
    head_config = mtp_config(model.config, layout)
    check_mtp_head(head_config, model)
    layer, dtype = head_config.layer, model.profile.param_dtype
    specs = mtp_specs(layer, layout)
    with contextlib.ExitStack() as stack:
        tensors = open_mtp_head(model.folder, layer, layout, dtype, stack)

        def make(spec: TensorSpec) -> AnyMatrix:
            return place_stored(tensors, spec, model.mesh, dtype=dtype)

        params: Params = {}
        for done, (name, spec) in enumerate(specs.items(), start=1):
            params[name] = assemble_one(spec, mesh=model.mesh, make=make)
            progress("head", done, len(specs))
    return place_mtp_head(head_config, params, model)


def check_mtp_head(head_config: HeadConfig, model: LoadedModel) -> None:
    """Refuse a head that cannot run beside a model.

    Raises:
        ValueError: As `check_head` does, or if ranks share a layer of a head with experts or of a
            model whose weights are packed.
    """
    tp = model.mesh.shape[TP_AXIS]
    check_head(head_config, model)
    if tp > 1 and head_config.layer.experts is not None:
        raise ValueError(
            f"an MTP head with a mixture of experts and {tp=} is not supported: every rank runs "
            "the whole head; use tp=1, or another method of speculative_config"
        )
    if tp > 1 and has_packed(model.params):
        raise ValueError(
            f"an MTP head of a quantised model and {tp=} is not supported: no run has shown that "
            "it changes no bit; use tp=1, quantized_weights='expanded', or another method of "
            "speculative_config"
        )


def place_mtp_head(head_config: HeadConfig, params: Params, model: LoadedModel) -> DraftHead:
    """Return a head of weights on the mesh of the model, whose embedding and last matrix it uses.

    Args:
        head_config: What it is.
        params: As `mtp_specs` has them.
        model: That verifies.
    """
    shared = ["embed", "lm_head", *["final_norm"] * head_config.hands_normalised]
    return DraftHead(
        head_config=head_config,
        params=params,
        shared={name: model.partition_specs[name] for name in shared},
        rope_tables=model.rope_tables,
        mesh=model.mesh,
        profile=model.profile,
        backend=model.backend,
        folder=model.folder,
    )
