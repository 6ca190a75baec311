# SPDX-License-Identifier: Apache-2.0
"""Opening a model: its weights on the devices, kernels chosen by the hardware."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from detjax.compilation.loaded_code import one_moment
from detjax.defaults import AUTO, EAGLE3, HEADS, NO_CAST
from detjax.engine.speculative_config import SpeculativeConfig
from detjax.models.abstract import why_unsupported
from detjax.models.config import ModelConfig
from detjax.models.decoder import check_mesh
from detjax.models.heads.eagle import load_eagle_head
from detjax.models.heads.eagle_config import refuse_head
from detjax.models.heads.head import AnyDraftModel
from detjax.models.heads.mtp import load_mtp_head
from detjax.models.heads.quantize import quantize_head
from detjax.models.hf_config import load_config
from detjax.models.hub import find_model, refuse_other_vocabulary
from detjax.models.loading import LoadedModel, load_model
from detjax.models.params import check_tp, num_params
from detjax.models.tokenizer import Tokenizer
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.backend_choice import choose_backend
from detjax.parallel.gpu_memory import claim_gpu_memory
from detjax.parallel.mesh import configure_virtual_devices, devices_of_process, make_mesh
from detjax.progress import Progress


class MeshError(ValueError):
    """dp and tp do not go with the model, its numerics or the devices."""


def load_on_devices(
    folder: Path,
    *,
    profile: NumericsProfile,
    backend: str,
    dp: int,
    tp: int,
    cast_weights: str = NO_CAST,
    quantized_weights: str = "auto",
    max_len: int | None = None,
    progress: Progress = ignore_progress,
    num_processes: int = 1,
) -> tuple[LoadedModel, str]:
    """Choose the kernels and the mesh by the hardware, and load the weights.

    Without GPUs the mesh is of virtual CPU devices, which JAX makes when it starts.

    Args:
        folder: Of the model.
        profile: The numerics to run with.
        backend: A value of `Backend`, or "auto": `sm90` on a Hopper GPU where its kernels take the
            model, else `reference` where it takes the model, else `portable`.
        dp: Replicas.
        tp: Devices that share each layer.
        cast_weights: As `load_model` has it.
        quantized_weights: As `load_model` has it.
        max_len: As `load_model` has it.
        progress: Told how far loading is.
        num_processes: That share the mesh.

    Returns:
        The model, and why its backend was chosen.

    Raises:
        MeshError: If dp and tp do not go with the model, the profile or the devices.
        ValueError: If something else does not fit, naming it.
        FileNotFoundError: If a file is missing.
    """
    with one_moment():
        placement = choose_placement(
            load_config(folder), profile, backend=backend, dp=dp, tp=tp, num_processes=num_processes
        )
        model = load_model(
            str(folder),
            profile=profile,
            mesh=placement.mesh,
            backend=placement.backend,
            progress=progress,
            cast_weights=cast_weights,
            quantized_weights=quantized_weights,
            max_len=max_len,
        )
    return model, placement.reason


def load_drafts(
    speculative: SpeculativeConfig | None,
    *,
    model: LoadedModel,
    tokenizer: Tokenizer,
    progress: Progress = ignore_progress,
) -> AnyDraftModel | None:
    """Load what makes the drafts, if that has weights of its own; a head rounded as is asked.

    Args:
        speculative: Where drafts come from.
        model: That verifies.
        tokenizer: Of `model`.
        progress: Told how far loading is.

    Raises:
        ValueError, FileNotFoundError: As `load_draft_model`, `load_eagle_head`, `load_mtp_head` or
            `quantize_head` says.
    """
    if speculative is None:
        return None
    name = speculative.model
    if speculative.method in HEADS:
        is_eagle = speculative.method == EAGLE3
        head = (
            load_eagle_head(name, model=model, progress=progress)
            if is_eagle
            else load_mtp_head(model, progress=progress)
        )
        if speculative.quantization is not None:
            quantize_head(head, speculative.quantization)
        return head
    if not name:
        return None
    return load_draft_model(name, model=model, tokenizer=tokenizer, progress=progress)


def load_draft_model(
    name: str,
    *,
    model: LoadedModel,
    tokenizer: Tokenizer,
    progress: Progress = ignore_progress,
) -> LoadedModel:
    """Load a smaller model that drafts for another, on its mesh and with its kernels.

    Args:
        name: A folder in Hugging Face format, a Hugging Face id or the bundled model.
        model: That verifies.
        tokenizer: Of `model`.
        progress: Told how far loading is.

    Raises:
        ValueError: If the two have other vocabularies, naming both, or something else does not fit.
        FileNotFoundError: If a file is missing.
    """
    folder = find_model(name)
    refuse_head(folder)
    size, expected = load_config(folder).vocab_size, model.config.vocab_size
    verifier = "the model" if model.folder is None else model.folder.name
    refuse_other_vocabulary(name, size, verifier, expected)
    theirs = Tokenizer.from_folder(folder).backend.get_vocab(with_added_tokens=True)
    ours = tokenizer.backend.get_vocab(with_added_tokens=True)
    if unlike := sorted(theirs.items() ^ ours.items(), key=lambda pair: (pair[1], pair[0])):
        text, token_id = unlike[0]
        raise ValueError(
            f"the tokenizer of the draft model {name} differs from that of {verifier} in "
            f"{len(unlike)} entries, the first of them {text!r} as token {token_id}; a draft model "
            "needs the tokenizer of the model that it drafts for"
        )
    return load_model(
        str(folder),
        profile=model.profile,
        mesh=model.mesh,
        backend=model.backend,
        progress=progress,
        max_len=model.config.max_position_embeddings,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlacement:
    """Where a model runs.

    Attributes:
        mesh: Of `dp` times `tp` devices.
        backend: Which kernels run.
        reason: Why these.
    """

    mesh: Mesh
    backend: Backend
    reason: str


def choose_placement(
    config: ModelConfig,
    profile: NumericsProfile,
    *,
    backend: str,
    dp: int,
    tp: int,
    num_processes: int = 1,
) -> ModelPlacement:
    """Choose the kernels and the mesh by the hardware, for a model that may have no weights yet.

    Args:
        config: Of the model.
        profile: The numerics to run with.
        backend: As `load_on_devices` has it, like the others.
        dp: Replicas.
        tp: Devices that share each layer.
        num_processes: That share the mesh.

    Raises:
        MeshError: If dp and tp do not go with the model, the profile or the devices.
        ValueError: If the kernels cannot run the model, or cannot run here.
    """
    with _mesh_errors():
        check_tp(config, tp)
        check_mesh(config, profile, tp)
        configure_virtual_devices(devices_of_process(dp * tp, num_processes))
    claim_gpu_memory()
    choice = choose_backend(
        None if backend == AUTO else _backend(backend),
        why_not_model=lambda backend: why_unsupported(config, profile, backend, tp),
        num_params=num_params(config),
    )
    with _mesh_errors():
        mesh = make_mesh(dp, tp, platform=choice.backend.platform)
    return ModelPlacement(mesh=mesh, backend=choice.backend, reason=choice.reason)


@contextlib.contextmanager
def _mesh_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise MeshError(str(error)) from error


def _backend(name: str) -> Backend:
    names = [backend.value for backend in Backend]
    if name not in names:
        raise ValueError(f"backend={name!r} must be {AUTO!r} or one of {names}")
    return Backend(name)
