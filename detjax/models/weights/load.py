# SPDX-License-Identifier: Apache-2.0
"""Weights from a Hugging Face folder's safetensors, each shard straight from its part of a file."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from detjax.defaults import NO_CAST
from detjax.models.config import ModelConfig
from detjax.models.params import (
    EMBED_NAME,
    HEAD_NAME,
    Params,
    ParamSpec,
    TensorSpec,
    param_specs,
)  # fmt: skip
from detjax.models.weights.ahead import map_ahead
from detjax.models.weights.assemble import assemble, assemble_one, assemble_params, made_once
from detjax.models.weights.dtypes import check_conversion, check_dtype
from detjax.models.weights.files import StoredTensor
from detjax.models.weights.host import is_on_cpu
from detjax.models.weights.packed import MatrixForm, kept_form, place_packed, place_w8a8
from detjax.models.weights.place import ExpertRows, place_joined, place_tensor
from detjax.models.weights.reading import open_weights
from detjax.pallas_kernels.linear.quantized import AnyMatrix
from detjax.parallel.gpu_memory import claimed_share, memory_limit

Progress = Callable[[str, int, int], None]
"""Called with what was just done, bytes done, and bytes in all.

WHY: not that of `detjax.progress`, which imports rich: programs whose code leads there are not
kept on disk.
"""

INERT_TENSORS = re.compile(r".*\.rotary_emb\.inv_freq")  # older Llama files; recomputed by rope.py
COMPARE_ROWS = 4096
NUM_READERS = 8
"""Tensors that are on their way to a GPU at once."""
NUM_CPU_READERS = 2
"""Parameters that are read at once where CPU devices take them."""


def ignore_progress(what: str, done: int, total: int) -> None:
    """Show nothing: the default `Progress`."""


def load_params(
    folder: Path,
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    vocab_block: int,
    progress: Progress = ignore_progress,
    cast_weights: str = NO_CAST,
    form: MatrixForm = MatrixForm.EXPANDED,
) -> Params:
    """Read a Hugging Face folder's safetensors onto `mesh`.

    Each distinct shard is read once, straight from its part of the file, so the host never holds
    more than one tensor's shards, or those of one projection of a layer's experts: on GPUs those of
    `NUM_READERS` tensors, which several threads send at once. Where embeddings
    are tied, on one rank and with no padding, "lm_head" is the very array of "embed".

    Args:
        folder: Holds `model.safetensors`, or `model.safetensors.index.json` and its files.
        config: The model; decides names and shapes.
        mesh: Has the axes "dp" and "tp".
        dtype: bfloat16 or float32, the dtype of every parameter.
        vocab_block: As for `param_specs`.
        progress: Called after each tensor, and once for one projection of a layer's experts.
        cast_weights: "bfloat16" allows float16 tensors to be rounded to it; `find_cast` names what
            is rounded.
        form: How matrices that are quantised lie on the devices, where `kept_form` says so; the
            others become the bfloat16 matrices that they stand for.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged, a tensor is missing, unexpected or of a wrong shape, or
            its dtype or a value of it cannot be turned into `dtype`. The message names file and
            tensor.

    Numerics:
        float32 and float16 to bfloat16 round to nearest, ties to even. float16's exponents all fit,
        its subnormals become normal numbers; float32's subnormals stay subnormal. A finite float32
        that would become infinite is refused, and so is float16 without `cast_weights`. bfloat16
        and float16 to float32 are exact.
    """
    target = check_dtype(dtype)
    specs = param_specs(config, tp=mesh.shape["tp"], vocab_block=vocab_block)
    wanted = [tensor for spec in jax.tree.leaves(specs) for tensor in spec.tensors]
    made = jax.tree.leaves(made_once(specs, mesh))
    total = sum(math.prod(spec.shape) for spec in made) * target.itemsize
    done = 0
    with contextlib.ExitStack() as stack:
        tensors = open_weights(folder, config, dtype, stack)
        can_cast = cast_weights != NO_CAST
        check_tensors(folder, tensors, wanted, dtype=target, can_cast=can_cast)

        forms = _forms(tensors, made, mesh.shape["tp"], form)
        _check_room(folder, made, forms, mesh, dtype=target)

        def read(spec: TensorSpec) -> AnyMatrix:
            return place_stored(tensors, spec, mesh, dtype=target, form=forms[spec.hf_name])

        def note(*read: TensorSpec) -> None:
            nonlocal done
            for spec in read:
                done += math.prod(spec.shape) * target.itemsize
                progress(spec.hf_name.format("*"), done, total)

        if is_on_cpu(mesh):

            def read_param(spec: ParamSpec) -> AnyMatrix:
                if len(spec.tensors) == 1 or forms[spec.tensors[0].hf_name] != MatrixForm.EXPANDED:
                    return assemble_one(spec, mesh=mesh, make=read)
                return _place_joined(tensors, spec, mesh, dtype=target)

            def note_param(spec: ParamSpec) -> None:
                note(*spec.tensors)

            params = map_ahead(read_param, made, NUM_CPU_READERS, stack)
            return assemble_params(specs, mesh, _noting(params, note_param))

        in_order = [tensor for spec in made for tensor in spec.tensors]
        return assemble(specs, mesh, _noting(map_ahead(read, in_order, NUM_READERS, stack), note))


def _forms(
    tensors: Mapping[str, StoredTensor], made: list[ParamSpec], tp: int, form: MatrixForm
) -> dict[str, MatrixForm]:
    """How each tensor will lie on the devices, by its name in the checkpoint."""
    return {
        tensor.hf_name: kept
        for spec in made
        for kept in [kept_form(spec, tensors, tp, form)]
        for tensor in spec.tensors
    }


def _check_room(
    folder: Path,
    made: list[ParamSpec],
    forms: Mapping[str, MatrixForm],
    mesh: Mesh,
    *,
    dtype: jnp.dtype,
) -> None:
    """Refuse weights that are larger than the memory of a GPU, before any is read.

    Their size is not more than they will take: codes count as 4 bits, and every matrix as if the
    ranks shared it.

    Raises:
        ValueError: If so.
    """
    limit = memory_limit(mesh.local_devices)
    if limit is None:
        return
    bits = {MatrixForm.EXPANDED: None, MatrixForm.PACKED: 4, MatrixForm.W8A8: 8}
    total = 0
    for tensor in (tensor for spec in made for tensor in spec.tensors):
        of_one = bits[forms[tensor.hf_name]] or tensor.dtype(dtype).itemsize * 8
        total += math.prod(tensor.shape) * of_one // 8
    tp = mesh.shape["tp"]
    if total // tp > limit:
        raise ValueError(
            f"the weights of {folder.name} take at least {total / tp / 2**30:.1f} GiB of each GPU "
            f"at tp={tp}, and JAX has {limit / 2**30:.1f} GiB, {claimed_share():.0%} of the GPU; "
            "use more GPUs (--tp), a quantised checkpoint, or a higher gpu_memory_utilization "
            "(--gpu-memory-utilization) in a new process"
        )


def _noting[Spec](
    made: Iterator[AnyMatrix], note: Callable[[Spec], None]
) -> Callable[[Spec], AnyMatrix]:
    """Gives what is made next, and notes what it is."""

    def load(spec: Spec) -> AnyMatrix:
        matrix = next(made)
        note(spec)
        return matrix

    return load


def place_stored(
    tensors: Mapping[str, StoredTensor],
    spec: TensorSpec,
    mesh: Mesh,
    *,
    dtype: jnp.dtype,
    form: MatrixForm = MatrixForm.EXPANDED,
) -> AnyMatrix:
    """Put what `spec` makes of a checkpoint's tensors onto the devices, in this form.

    `dtype` is that of most weights.
    """
    sources = [tensors[name] for name in spec.hf_names]
    rows, name = _rows_of(tensors, spec)
    if form is MatrixForm.PACKED:
        return place_packed(rows, spec, mesh, name=name)
    if form is MatrixForm.W8A8:
        return place_w8a8([source.rows for source in sources], spec, mesh, name=name)
    return place_tensor(rows, spec, mesh, dtype=spec.dtype(dtype), name=name)


def _place_joined(
    tensors: Mapping[str, StoredTensor], spec: ParamSpec, mesh: Mesh, *, dtype: jnp.dtype
) -> jax.Array:
    """The matrix that a parameter of several tensors is, on CPU devices."""
    rows, names = zip(*(_rows_of(tensors, tensor) for tensor in spec.tensors), strict=True)
    return place_joined(rows, spec, mesh, dtype=spec.tensors[0].dtype(dtype), names=names)


def _rows_of(tensors: Mapping[str, StoredTensor], spec: TensorSpec) -> tuple[Any, str]:
    """What `place_tensor` reads, and its name for errors."""
    sources = [tensors[name] for name in spec.hf_names]
    name = f"{spec.hf_names[0]!r} in {sources[0].file}"
    if spec.num_experts:
        return ExpertRows([source.rows for source in sources]), f"{name} and on"
    return sources[0].rows, name


def check_params(
    folder: Path,
    config: ModelConfig,
    *,
    tp: int,
    dtype: DTypeLike,
    vocab_block: int,
    cast_weights: str = NO_CAST,
) -> None:
    """Refuse a folder that `load_params` would refuse by its files' headers; read no weight.

    `tp` is the ranks of the mesh; the others are as `load_params` has them.

    Raises:
        FileNotFoundError, ValueError: As `load_params` does, but for values.
    """
    specs = param_specs(config, tp=tp, vocab_block=vocab_block)
    wanted = [tensor for spec in jax.tree.leaves(specs) for tensor in spec.tensors]
    with contextlib.ExitStack() as stack:
        tensors = open_weights(folder, config, dtype, stack)
        can_cast = cast_weights != NO_CAST
        check_tensors(folder, tensors, wanted, dtype=check_dtype(dtype), can_cast=can_cast)


def check_tensors(
    folder: Path,
    tensors: dict[str, StoredTensor],
    specs: list[TensorSpec],
    *,
    dtype: jnp.dtype,
    can_cast: bool,
) -> None:
    """Refuse tensors unless all that `specs` need are there, of their shapes, and no others.

    Args:
        folder: Of the tensors.
        tensors: By name.
        specs: What is to be made of them.
        dtype: Of most weights.
        can_cast: Whether float16 may become bfloat16.

    Raises:
        ValueError: Naming the first that is missing, unknown, or of another shape or dtype.
    """
    wanted = {name: spec.hf_shape for spec in specs for name in spec.hf_names}
    target_of = {name: spec.dtype(dtype) for spec in specs for name in spec.hf_names}
    if missing := [name for name in wanted if name not in tensors]:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(wanted)} tensors, such as {missing[0]!r}; "
            "config.json and the weights are of different models, or a file was not downloaded"
        )
    if HEAD_NAME not in wanted and HEAD_NAME in tensors:
        _check_tied_head(tensors[EMBED_NAME], tensors[HEAD_NAME])
        wanted[HEAD_NAME] = wanted[EMBED_NAME]
    for name, tensor in tensors.items():
        if INERT_TENSORS.fullmatch(name):
            continue
        if name not in wanted:
            raise ValueError(
                f"{tensor.file} holds {name!r}, which this model has no place for; config.json "
                "and the weights are of different models"
            )
        if tensor.shape != wanted[name]:
            raise ValueError(
                f"{name!r} in {tensor.file} has shape {tensor.shape}, but config.json makes it "
                f"{wanted[name]}; they are of different models"
            )
        where = f"{name!r} in {tensor.file}"
        target = target_of.get(name, dtype)
        check_conversion(where, tensor.dtype, dtype=target, can_cast=can_cast)


def _check_tied_head(embed: StoredTensor, head: StoredTensor) -> None:
    """A tied checkpoint may carry a copy of the embeddings as output head, but only a copy."""
    is_same = (embed.shape, embed.dtype) == (head.shape, head.dtype) and all(
        embed.rows[i:stop].tobytes() == head.rows[i:stop].tobytes()
        for i in range(0, embed.shape[0], COMPARE_ROWS)
        for stop in [min(i + COMPARE_ROWS, embed.shape[0])]
    )
    if not is_same:
        raise ValueError(
            f"config.json ties the embeddings, but {head.file} holds a {HEAD_NAME!r} that differs "
            f"from {EMBED_NAME!r}; set tie_word_embeddings to false, or remove the tensor"
        )
