# SPDX-License-Identifier: Apache-2.0
"""A model ready to run: configuration, sharded weights, tables, and what claims it can make."""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Array, Float32
from detjax.compilation.kept_executables import read_ahead
from detjax.interpreter_exit import finishes_before_exit
from detjax.models.abstract import why_unsupported, why_weights_unsupported
from detjax.models.adapters.program import ADAPTERS
from detjax.models.config import ModelConfig
from detjax.models.decoder import check_mesh
from detjax.models.hf_config import load_config, read_quantization
from detjax.models.hub import resolve_model
from detjax.models.identity import copy_text_files
from detjax.models.params import Params, kv_layout, padded_vocab_size, partition_specs
from detjax.models.quantization.expand import describe_quantization
from detjax.models.quantization.scheme import MXFP4, QuantizationScheme, as_w8a8
from detjax.models.rope import model_rope_tables
from detjax.models.weights.dtypes import find_cast
from detjax.models.weights.host import put_on_devices, take_to_host
from detjax.models.weights.load import check_params, ignore_progress, load_params
from detjax.models.weights.named import load_named_params
from detjax.models.weights.packed import (
    MODES,
    MatrixForm,
    has_packed,
    with_packed_specs,
    with_scale_code_of,
)
from detjax.models.weights.random_weights import random_params
from detjax.models.weights.reading import readings
from detjax.models.weights.write import check_can_write, write_config, write_weights
from detjax.numerics import NO_CAST, NOT_QUANTIZED, Build, NumericsProfile, fingerprint
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.parallel.distributed import connect_devices
from detjax.parallel.exchange import (
    EXCHANGE_SPECS,
    modules_of,
    open_exchange,
    why_no_exchange,
)
from detjax.parallel.mesh import TP_AXIS

LOG = logging.getLogger(__name__)

_NO_WEIGHTS = ("exchange", ADAPTERS)
"""What `params` have besides the weights: buffers of the mesh, and adapters."""

_NOT_OF_WEIGHTS = {"max_position_embeddings", "bos_token_id", "eos_token_ids"}
"""Fields of a configuration that decide nothing of what weights compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """Weights on their devices and everything static about how they run.

    `weight_cast` names the conversion that was asked for when they were read, such as "float16 to
    bfloat16"; `quantization` names the format that the weights were expanded from. Both are in the
    fingerprint. `matrix_form` says how quantised matrices lie on the devices.
    """

    config: ModelConfig
    params: dict
    partition_specs: dict
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]]
    mesh: Mesh
    profile: NumericsProfile
    backend: Backend
    fingerprint: str
    folder: Path | None
    weight_cast: str = NO_CAST
    quantization: str = NOT_QUANTIZED
    matrix_form: MatrixForm = MatrixForm.EXPANDED

    @property
    def num_kv_slots(self) -> int:
        """Key/value heads in the cache, replicas included."""
        config, tp = self.config, self.mesh.shape[TP_AXIS]
        return kv_layout(config.num_heads, config.num_kv_heads, tp).num_slots

    @finishes_before_exit
    def replace_weights(self, weights: dict) -> None:
        """Put other weights in place. What runs the model uses them from its next step on.

        Args:
            weights: As `params` has them, same names, shapes, dtypes and shardings; without the
                buffers of the mesh (`exchange`), which stay. The old arrays are deleted.

        Raises:
            ValueError: If a weight does not fit or has a value that is not finite, naming it;
                nothing is replaced then.
        """
        old = self.own_weights()
        if jax.tree.structure(old) != jax.tree.structure(weights):
            raise ValueError(f"the weights' names differ from those of the model: {sorted(old)}")
        for (path, have), new in zip(
            jax.tree.leaves_with_path(old), jax.tree.leaves(weights), strict=True
        ):
            is_alike = (have.shape, have.dtype) == (new.shape, new.dtype)
            if not (is_alike and new.sharding.is_equivalent_to(have.sharding, have.ndim)):
                raise ValueError(
                    f"weight {jax.tree_util.keystr(path)} is {new.dtype}{new.shape} on "
                    f"{new.sharding}; the model's is {have.dtype}{have.shape} on {have.sharding}"
                )
        _check_finite(weights, self.mesh)
        kept = {id(leaf) for leaf in jax.tree.leaves(weights)}
        self.params.update(weights)
        for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(old)}.values():
            if id(leaf) not in kept:
                leaf.delete()

    @finishes_before_exit
    def named_weights(self, tensors: Iterable[tuple[str, Any]]) -> Params:
        """Make weights for `replace_weights` from tensors with Hugging Face names.

        Args:
            tensors: As `load_named_params` takes them. float16 is rounded to bfloat16 only if this
                model's weights were.

        Raises:
            ValueError: As `load_named_params` does, or if weights lie on the devices quantised.
        """
        self.refuse_packed("take tensors by name")
        return load_named_params(
            tensors,
            self.config,
            self.mesh,
            dtype=self.profile.param_dtype,
            vocab_block=self.profile.vocab_block,
            can_cast="float16" in self.weight_cast.split(),
        )

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder whose weights this model could not take, before anything is read.

        Names, shapes, dtypes and lengths are those of the files' headers. If the folder has a
        config.json it must be that of this model. Tokenizer and templates are not looked at.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If a file is damaged, of another model, or needs another cast.
        """
        profile = self.profile
        if (folder / "config.json").is_file():
            _check_config(folder, self.config)
        quantization = describe_quantization(folder, _scheme_of(folder, self.matrix_form))
        if quantization != self.quantization:
            raise ValueError(
                f"the weights in {folder} are in the format {quantization!r}, and the fingerprint "
                f"says {self.quantization!r}; give weights in the format of the first ones"
            )
        cast = find_cast(
            folder, self.config, cast_weights=self._cast_weights, dtype=profile.param_dtype
        )
        if cast != self.weight_cast:
            raise ValueError(
                f"the weights in {folder} would be cast {cast!r}, and the fingerprint says "
                f"{self.weight_cast!r}; convert them to the dtypes of the first weights"
            )
        check_params(
            folder,
            self.config,
            tp=self.mesh.shape["tp"],
            dtype=profile.param_dtype,
            vocab_block=profile.vocab_block,
            cast_weights=self._cast_weights,
        )

    @finishes_before_exit
    def read_folder(self, folder: Path) -> Params:
        """Make weights for `replace_weights` from a folder's safetensors.

        Raises:
            FileNotFoundError, ValueError: As `load_params` does, or if a file has changed
                meanwhile.
        """
        before = _file_states(folder)
        params = load_params(
            folder,
            self.config,
            self.mesh,
            dtype=self.profile.param_dtype,
            vocab_block=self.profile.vocab_block,
            cast_weights=self._cast_weights,
            form=self.matrix_form,
        )
        if changed := sorted(before.items() ^ _file_states(folder).items()):
            raise ValueError(
                f"{folder / changed[0][0]} changed while it was read; write weights to a folder of "
                "their own, and ask when it is complete"
            )
        return with_scale_code_of(params, self.own_weights())

    def refuse_packed(self, what: str) -> None:
        """Refuse what codes of quantised weights do not do.

        Raises:
            ValueError: If weights lie on the devices as codes.
        """
        if self.matrix_form is not MatrixForm.EXPANDED and has_packed(self.params):
            raise ValueError(
                f"weights that lie on the devices quantised cannot {what}; load the model with "
                "quantized_weights='expanded'"
            )

    @property
    def _cast_weights(self) -> str:
        """As `load_params` has it."""
        return self.weight_cast.rpartition(" to ")[2]

    def take_weights_to_host(self) -> Params:
        """Free the weights on the devices; their copy on the host, for `put_weights_back`."""
        return take_to_host(self.own_weights())

    def give_up_weights(self) -> None:
        """Free the weights on the devices; nobody has them then."""
        for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(self.own_weights())}.values():
            leaf.delete()

    def put_weights_back(self, host: Params) -> None:
        """Put the weights where they were."""
        self.params.update(put_on_devices(host, self.own_weights()))

    def own_weights(self) -> Params:
        """Return the weights, without the buffers of the mesh and adapters."""
        return {name: leaf for name, leaf in self.params.items() if name not in _NO_WEIGHTS}

    @finishes_before_exit
    def save(self, folder: Path | str) -> None:
        """Write the model as a folder in Hugging Face format: the same weights, bit for bit.

        transformers, vLLM and `load_model` read it, on any mesh. Configuration, tokenizer and chat
        template are those of the folder that the model was read from. So are tensors that the
        decoder does not read, such as those for images or of an MTP head. Weights that were
        quantised are written as the expansion that they stand for.

        Args:
            folder: Made here if need be; must not hold a model yet.

        Raises:
            ValueError: If `folder` holds a model; this one has random weights and so no
                configuration and tokenizer to copy; its weights are packed; or no value in a file
                is read as one of its weights.
            OSError: If it cannot be written to.
        """
        self.refuse_packed("be saved")
        if self.folder is None:
            raise ValueError(
                "this model has random weights: it has no config.json and no tokenizer to save; "
                "save one that load_model has read"
            )
        folder = Path(folder)
        check_can_write(folder)
        write_weights(
            folder,
            self.own_weights(),
            load_config(self.folder),  # `self.config` may be of a shorter context
            self.mesh,
            vocab_block=self.profile.vocab_block,
            source=self.folder,
        )
        if jax.process_index() == 0:
            copy_text_files(self.folder, folder)
            write_config(self.folder, folder, self.profile.param_dtype)  # last: now it is a model


def _check_config(folder: Path, config: ModelConfig) -> None:
    """Refuse a config.json of another model. Length of context and end tokens stay as they are."""
    found = load_config(folder).shortened(config.max_position_embeddings)
    for field in dataclasses.fields(config):
        name, theirs, ours = field.name, getattr(found, field.name), getattr(config, field.name)
        if theirs == ours or name in _NOT_OF_WEIGHTS:
            continue
        if dataclasses.is_dataclass(theirs) and type(theirs) is type(ours):
            # Of a form of positions, or of experts, the part that differs.
            part = next(
                part.name
                for part in dataclasses.fields(theirs)
                if getattr(theirs, part.name) != getattr(ours, part.name)
            )
            name, theirs, ours = f"{name}.{part}", getattr(theirs, part), getattr(ours, part)
        raise ValueError(
            f"{folder / 'config.json'} has {name}={theirs!r}, and this model {name}={ours!r}; "
            "weights of another model need a server of their own"
        )


def _check_finite(weights: dict, mesh: Mesh) -> None:
    """Refuse NaN and infinity: every answer would be an error, and the old weights would be gone.

    Raises:
        ValueError: Naming the first such weight.
    """
    named = [
        (path, leaf)
        for path, leaf in jax.tree.leaves_with_path(weights)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    everywhere = NamedSharding(mesh, P())
    are_finite = jax.jit(_are_finite, out_shardings=everywhere)([leaf for _, leaf in named])
    for (path, _), is_finite in zip(named, np.asarray(are_finite), strict=True):
        if not is_finite:
            raise ValueError(
                f"weight {jax.tree_util.keystr(path)} has a value that is not finite; the old "
                "weights stay"
            )


def _are_finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])


def _file_states(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Length, time of the last write and inode of each file of weights."""
    files = {path.name: path.stat() for path in folder.glob("*.safetensors")}
    return {name: (it.st_size, it.st_mtime_ns, it.st_ino) for name, it in files.items()}


@finishes_before_exit
def place_model(
    config: ModelConfig,
    make_params: Callable[[], dict],
    *,
    profile: NumericsProfile,
    mesh: Mesh,
    backend: Backend,
    folder: Path | None,
    weight_cast: str = NO_CAST,
    quantization: str = NOT_QUANTIZED,
    matrix_form: MatrixForm = MatrixForm.EXPANDED,
    max_len: int | None = None,
) -> LoadedModel:
    """Check that the model can run on the mesh, then make its weights there.

    In a job of several processes all come here, and wait for one another.

    Args:
        config: The model.
        make_params: Makes the weights.
        profile: The numerics to run with.
        mesh: Where.
        backend: Which kernels will run.
        folder: Where the weights come from.
        weight_cast: What was done to them when they were read, as the fingerprint says it.
        quantization: The format that they were expanded from, as the fingerprint says it.
        matrix_form: How matrices of that format lie on the devices.
        max_len: Shortens the model's context, and with it the tables of its rotary embedding, to
            what will be used; changes no bit. None leaves it as the model has it.

    Raises:
        ValueError: If the mesh is not of the backend's devices, a rank would not own whole heads,
            columns or leaves, or the backend's kernels refuse the model.
    """
    tp, config = mesh.shape[TP_AXIS], config.shortened(max_len)
    specs = partition_specs(config, tp=tp, vocab_block=profile.vocab_block)
    _check_backend(config, profile, mesh, backend)
    connect_devices(mesh)
    read_ahead(
        list(mesh.devices.flat),
        root=(__name__, *modules_of(backend)),
        asked_of=(config, profile, backend, weight_cast, quantization, max_len, repr(mesh)),
    )
    tables = model_rope_tables(config)
    params = make_params()
    specs = with_packed_specs(specs, params)
    if matrix_form is MatrixForm.W8A8:
        refused = why_weights_unsupported(config, profile, backend, tp, params=params, specs=specs)
        if refused is not None:
            raise ValueError(f"quantized_weights='w8a8' does not fit {backend.value}: {refused}")
    no_exchange = why_no_exchange(mesh, width=config.hidden_size, backend=backend)
    if no_exchange is not None and tp > 1:
        LOG.info("the ranks add through XLA's collectives: %s", no_exchange)
    if no_exchange is None:
        params["exchange"] = open_exchange(
            mesh,
            width=config.hidden_size,
            dtype=profile.activation_dtype,
            backend=backend,
            padded_vocab=padded_vocab_size(
                config.vocab_size, tp=tp, vocab_block=profile.vocab_block
            ),
        )
        specs["exchange"] = EXCHANGE_SPECS
    build = Build.current(backend.value, mesh.devices.flat[0])
    return LoadedModel(
        config=config,
        params=params,
        partition_specs=specs,
        rope_tables=tuple(jax.device_put(t, NamedSharding(mesh, P())) for t in tables),
        mesh=mesh,
        profile=profile,
        backend=backend,
        fingerprint=fingerprint(profile, build, weight_cast=weight_cast, quantization=quantization),
        folder=folder,
        weight_cast=weight_cast,
        quantization=quantization,
        matrix_form=matrix_form,
    )


def _check_backend(
    config: ModelConfig, profile: NumericsProfile, mesh: Mesh, backend: Backend
) -> None:
    """Refuse a mesh of other devices, and a model that cannot run on it."""
    platform = mesh.devices.flat[0].platform
    if platform != backend.platform:
        raise ValueError(
            f"backend {backend.value} runs on {backend.platform} devices and the mesh has "
            f"{platform} ones; make_mesh(..., platform={backend.platform!r})"
        )
    check_mesh(config, profile, mesh.shape[TP_AXIS])
    refused = why_unsupported(config, profile, backend, mesh.shape[TP_AXIS])
    if refused is not None:
        raise ValueError(f"backend {backend.value} cannot run this model: {refused}")


@finishes_before_exit
def load_model(
    name_or_path: str,
    *,
    profile: NumericsProfile,
    mesh: Mesh,
    backend: Backend,
    revision: str | None = None,
    progress: Callable[[str, int, int], None] = ignore_progress,
    cast_weights: str = NO_CAST,
    quantized_weights: str = "auto",
    max_len: int | None = None,
) -> LoadedModel:
    """Load a Hugging Face folder or id onto the mesh.

    Quantised weights are the bfloat16 weights that they stand for (`models.quantization`), in
    whichever form they lie on the devices.

    Args:
        name_or_path: A folder with config.json and safetensors, or a Hugging Face id.
        profile: The numerics to run with.
        mesh: Where to put the weights.
        backend: Which kernels will run.
        revision: Branch, tag or commit of a Hugging Face id; None takes its default branch.
        progress: Called with (what, bytes done, bytes in all) as tensors arrive.
        cast_weights: "bfloat16" rounds a checkpoint of float16 or float32 to it, to nearest and
            ties to even, and the fingerprint says so; "none" refuses float16 where the profile's
            weights are bfloat16.
        quantized_weights: How the matrices of a quantised model lie on the devices: "packed", as
            codes of 4 or 8 bits, "expanded", as bfloat16, or "auto", which packs them on Hopper
            GPUs. These change no bit. "w8a8" multiplies 8-bit weights with activations of
            8 bits, quantised as the checkpoint asks: another function, which the fingerprint
            names.
        max_len: Shortens the context to what will be used: `LoadedModel.config` has it. Positions
            keep their bits.

    Raises:
        ValueError: If the configuration, the weights or the mesh do not fit, naming which, or
            a cast was asked for where there is nothing to cast.
        FileNotFoundError: If a file is missing, naming it.
    """
    folder = resolve_model(name_or_path, revision=revision)
    config = load_config(folder)
    dtype, vocab_block = profile.param_dtype, profile.vocab_block
    stored = read_quantization(folder)
    form = _matrix_form(quantized_weights, stored, config, profile, backend)
    scheme = _scheme_of(folder, form)
    if scheme is not None:
        LOG.warning("%s is quantised: %s", folder.name, scheme)
    weight_cast = find_cast(folder, config, cast_weights=cast_weights, dtype=dtype)

    def make_params():
        return load_params(
            folder,
            config,
            mesh,
            dtype=dtype,
            vocab_block=vocab_block,
            progress=progress,
            cast_weights=cast_weights,
            form=form,
        )

    return place_model(
        config,
        make_params,
        profile=profile,
        mesh=mesh,
        backend=backend,
        folder=folder,
        weight_cast=weight_cast,
        quantization=describe_quantization(folder, scheme),
        matrix_form=form,
        max_len=max_len,
    )


def _scheme_of(folder: Path, form: MatrixForm) -> QuantizationScheme | None:
    """How a folder's weights are quantised, and multiplied where they lie in this form.

    Raises:
        ValueError: If `config.json` asks for another kind of activations.
    """
    scheme = read_quantization(folder)
    return scheme if scheme is None or form is not MatrixForm.W8A8 else as_w8a8(scheme)


def _matrix_form(
    mode: str,
    scheme: QuantizationScheme | None,
    config: ModelConfig,
    profile: NumericsProfile,
    backend: Backend,
) -> MatrixForm:
    """How quantised matrices lie on the devices.

    Raises:
        ValueError: If `mode` is unknown, or asks for what the model or the profile does not allow.
    """
    if mode not in MODES:
        raise ValueError(f"quantized_weights={mode!r} must be one of {list(MODES)}")
    is_bfloat16 = profile.param_dtype.name == "bfloat16"
    is_read_otherwise = bool(readings(config, profile.param_dtype))
    can_pack = scheme is not None and scheme.layout != MXFP4
    if mode in ("auto", "expanded"):
        packs = mode == "auto" and can_pack and is_bfloat16 and KERNELS[backend].reads_codes
        packs = packs and not is_read_otherwise
        return MatrixForm.PACKED if packs else MatrixForm.EXPANDED
    if scheme is None:
        raise ValueError(
            f"quantized_weights={mode!r} needs a quantised model, and this one is not; leave it out"
        )
    if scheme.layout == MXFP4:
        raise ValueError(
            f"quantized_weights={mode!r} does not go with {str(scheme)!r}: products read codes of "
            "matrices, and these are experts; use 'auto'"
        )
    if not is_bfloat16 or mode == "w8a8" and profile.activation_dtype.name != "bfloat16":
        raise ValueError(
            f"quantized_weights={mode!r} does not go with {profile.param_dtype.name} weights and "
            f"{profile.activation_dtype.name} compute; use 'expanded', or dtype bfloat16"
        )
    return MatrixForm.W8A8 if mode == "w8a8" else MatrixForm.PACKED


@finishes_before_exit
def random_model(
    config: ModelConfig, *, seed: int, profile: NumericsProfile, mesh: Mesh, backend: Backend
) -> LoadedModel:
    """A model of this configuration with random weights, the same on every mesh."""

    def make_params():
        return random_params(
            config, mesh, seed=seed, dtype=profile.param_dtype, vocab_block=profile.vocab_block
        )

    return place_model(
        config, make_params, profile=profile, mesh=mesh, backend=backend, folder=None
    )
