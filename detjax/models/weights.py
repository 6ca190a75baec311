# SPDX-License-Identifier: Apache-2.0
"""Weights onto a mesh: from safetensors, from a seed, and to and from orbax checkpoints.

Every path follows the description in `params.py`, moves bits and rounds at most once (a float32
checkpoint asked for in bfloat16, or a cast that is asked for by name), so a parameter has the same
bits on every mesh.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from huggingface_hub import errors as hub_errors
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from detjax.models.config import ModelConfig
from detjax.models.identity import folder_hash
from detjax.models.params import (
    COLUMNS,
    REPLICATED,
    ParamRole,
    Params,
    ParamSpec,
    checkpoint_rows,
    param_specs,
    stored_rows,
)
from detjax.numerics import NO_CAST

Progress = Callable[[str, int, int], None]
"""Called with what was just done, bytes done, and bytes in all."""

MODEL_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.jinja")
OTHER_FILES = ("consolidated*", "*/*")  # a second copy of the weights; subfolders

SOURCE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
CASTS = (NO_CAST, "bfloat16")
"""What `cast_weights` may be."""

INERT_TENSORS = re.compile(r".*\.rotary_emb\.inv_freq")  # older Llama files; recomputed by rope.py
EMBED_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"
COMPARE_ROWS = 4096

CHECKPOINT_FORMAT = 2
CHECKPOINT_FILE = "detjax_params.json"
CHECKPOINT_ARRAYS = "params"
CHECKPOINT_HASH = "arrays_sha256"


def ignore_progress(what: str, done: int, total: int) -> None:
    """Show nothing: the default `Progress`."""


# ------------------------------------------------------------------------------ finding a model


def resolve_model(name_or_path: str, *, revision: str | None = None) -> Path:
    """The folder of a model: an existing one, or a snapshot of a Hugging Face repository.

    A snapshot is downloaded into Hugging Face's cache, or taken from there when offline. Only
    safetensors, JSON and tokenizer files are fetched.

    Args:
        name_or_path: A folder, or an id such as `Qwen/Qwen3-8B`.
        revision: Branch, tag or commit of the repository; None is its main branch.

    Raises:
        FileNotFoundError: If there is no such folder, repository or revision, or it cannot be
            reached and is not in the cache.
        PermissionError: If the repository is gated.
        ValueError: If `revision` is given for a folder, or the name is no repository id.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{revision=} has no meaning for the folder {folder}; leave it out")
        return folder
    if folder.exists():
        raise ValueError(f"{folder} is a file; give the folder it stands in")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name_or_path,
                revision=revision,
                allow_patterns=list(MODEL_FILES),
                ignore_patterns=list(OTHER_FILES),
            )
        )
    except hub_errors.HFValidationError as error:
        raise ValueError(
            f"{name_or_path!r} is neither an existing folder nor a repository id (owner/name)"
        ) from error
    except hub_errors.GatedRepoError as error:
        raise PermissionError(
            f"{name_or_path!r} is gated: ask for access on its page at huggingface.co, then run "
            "`hf auth login` with a token of that account"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{name_or_path!r} has no {revision=}") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{name_or_path!r} is neither an existing folder nor a Hugging Face repository; check "
            "the spelling, or run `hf auth login` if it is private"
        ) from error
    except OSError as error:  # offline, no network, or the hub refused
        raise FileNotFoundError(
            f"{name_or_path!r} is not an existing folder, and Hugging Face could not be reached "
            f"({type(error).__name__}: {error}). Download it on a machine with a network and "
            "give its folder, or unset HF_HUB_OFFLINE"
        ) from error


# ------------------------------------------------------------------------ loading of safetensors


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """A tensor of an open file. `rows` is safetensors' slice object: indexing it reads."""

    file: Path
    rows: Any
    shape: tuple[int, ...]
    dtype: str


def load_params(
    folder: Path,
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    vocab_block: int,
    progress: Progress = ignore_progress,
    cast_weights: str = NO_CAST,
) -> Params:
    """Read a Hugging Face folder's safetensors onto `mesh`.

    Each distinct shard is read once, straight from its part of the file, so the host never holds
    more than one parameter's shards. Where embeddings are tied, on one rank and with no padding,
    "lm_head" is the very array of "embed".

    Args:
        folder: Holds `model.safetensors`, or `model.safetensors.index.json` and its files.
        config: The model; decides names and shapes.
        mesh: Has the axes "dp" and "tp".
        dtype: bfloat16 or float32, the dtype of every parameter.
        vocab_block: As for `param_specs`.
        progress: Called after each parameter.
        cast_weights: "bfloat16" allows float16 tensors to be rounded to it; `find_cast` names what
            is rounded.

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
    target = _check_dtype(dtype)
    specs = param_specs(config, tp=mesh.shape["tp"], vocab_block=vocab_block)
    leaves = jax.tree.leaves(specs)
    made = jax.tree.leaves(_separate(specs, mesh))
    total = sum(math.prod(spec.shape) for spec in made) * target.itemsize
    done = 0
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        can_cast = cast_weights != NO_CAST
        _check_tensors(folder, tensors, leaves, dtype=target, can_cast=can_cast)

        def load(spec: ParamSpec) -> jax.Array:
            nonlocal done
            array = _load_param(tensors[spec.hf_name], spec, mesh, dtype=target)
            done += math.prod(spec.shape) * target.itemsize
            progress(spec.hf_name, done, total)
            return array

        return _build(specs, mesh, load)


def find_cast(folder: Path, config: ModelConfig, *, cast_weights: str, dtype: DTypeLike) -> str:
    """Name the conversion of a folder's weights that `cast_weights` asks for, from their headers.

    Args:
        folder: As for `load_params`.
        config: The model.
        cast_weights: One of `CASTS`.
        dtype: The dtype of every parameter.

    Returns:
        Such as "float16 to bfloat16", which belongs in the fingerprint; `NO_CAST` if not asked for.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If there is nothing to convert, or `dtype` is not what to convert to.
    """
    if cast_weights not in CASTS:
        raise ValueError(f"{cast_weights=} must be one of {list(CASTS)}")
    if cast_weights == NO_CAST:
        return NO_CAST
    target = _check_dtype(dtype)
    if target != jnp.dtype(cast_weights):
        raise ValueError(
            f"--cast-weights {cast_weights} does not go with {target.name} weights, which hold "
            "every checkpoint exactly; leave it out"
        )
    wanted = {s.hf_name for s in jax.tree.leaves(param_specs(config, tp=1, vocab_block=1))}
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        found = {tensor.dtype for name, tensor in tensors.items() if name in wanted}
    sources = sorted(SOURCE_DTYPES[dtype] for dtype in found & {"F16", "F32"})
    if not sources:
        raise ValueError(
            f"--cast-weights {cast_weights} has nothing to convert: the weights in {folder} are "
            f"{', '.join(sorted(SOURCE_DTYPES.get(d, d) for d in found))}; leave it out"
        )
    return f"{' and '.join(sources)} to {cast_weights}"


def _separate(specs: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The specs less a tied "lm_head" that is stored just as "embed": on one rank, no padding."""
    embed, head = specs["embed"], specs["lm_head"]
    is_shared = (head.hf_name, head.shape) == (embed.hf_name, embed.shape) and mesh.shape["tp"] == 1
    return {key: specs[key] for key in specs if key != "lm_head" or not is_shared}


def _build(specs: dict[str, Any], mesh: Mesh, make: Callable[[ParamSpec], jax.Array]) -> Params:
    """Make every parameter, an "lm_head" that is shared with "embed" only once."""
    made = {key: jax.tree.map(make, part) for key, part in _separate(specs, mesh).items()}
    return {"lm_head": made["embed"], **made}


def _check_dtype(dtype: DTypeLike) -> jnp.dtype:
    target = jnp.dtype(dtype)
    if target not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"dtype={target.name} is not supported; use bfloat16 or float32")
    return target


def _open_tensors(folder: Path, stack: contextlib.ExitStack) -> dict[str, _Tensor]:
    """Open the checkpoint's files until `stack` closes, and list their tensors."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return dict(_open_file(single, stack))
    if not index.is_file():
        raise FileNotFoundError(
            f"{folder} has neither {single.name} nor {index.name}; give a folder with safetensors "
            "weights (convert .bin files with transformers' save_pretrained)"
        )
    file_of = _read_index(index)
    tensors = {}
    for name in sorted(set(file_of.values())):
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is named in {index.name} but missing; download it")
        for tensor_name, tensor in _open_file(path, stack):
            if tensor_name in tensors:
                raise ValueError(
                    f"{path} and {tensors[tensor_name].file} both hold {tensor_name!r}; the files "
                    "are of different checkpoints: download them again"
                )
            tensors[tensor_name] = tensor
    for tensor_name, tensor in tensors.items():
        listed = file_of.pop(tensor_name, None)
        if listed != tensor.file.name:
            raise ValueError(
                f"{tensor.file} holds {tensor_name!r}, which {index.name} places in {listed!r}; "
                "the files are of different checkpoints: download them again"
            )
    if file_of:
        name, file = next(iter(file_of.items()))
        raise ValueError(
            f"{index.name} places {name!r} in {file!r}, which lacks it; download both again"
        )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name to file name."""
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = dict(file_of).values()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error!r}); download it") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, which is not a file in the same folder")
    return dict(file_of)


def _open_file(path: Path, stack: contextlib.ExitStack) -> Iterator[tuple[str, _Tensor]]:
    """Open one file; its header must cover it exactly, which finds truncation."""
    try:
        handle = stack.enter_context(safe_open(path, framework="np"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); download it again") from error
    _check_names(path)
    for name in handle.keys():
        rows = handle.get_slice(name)
        yield (
            name,
            _Tensor(file=path, rows=rows, shape=tuple(rows.get_shape()), dtype=rows.get_dtype()),
        )


def _check_names(path: Path) -> None:
    """Refuse a header that names a tensor twice: safetensors takes the last one."""

    def names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path} is damaged: it names {twice!r} twice; download it again")
        return found

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        json.loads(file.read(length), object_pairs_hook=names_once)


def _check_tensors(
    folder: Path,
    tensors: dict[str, _Tensor],
    specs: list[ParamSpec],
    *,
    dtype: jnp.dtype,
    can_cast: bool,
) -> None:
    """Every tensor that is needed is there, of the right shape and dtype, and no other."""
    wanted = {spec.hf_name: spec.hf_shape for spec in specs}
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
        _check_conversion(name, tensor, dtype=dtype, can_cast=can_cast)


def _check_conversion(name: str, tensor: _Tensor, *, dtype: jnp.dtype, can_cast: bool) -> None:
    """Refuse what would lose bits unasked."""
    if tensor.dtype not in SOURCE_DTYPES:
        raise ValueError(
            f"{name!r} in {tensor.file} is {tensor.dtype}, which is not supported; detjax reads "
            f"{', '.join(SOURCE_DTYPES)} (load the checkpoint that is not quantised)"
        )
    if tensor.dtype == "F16" and dtype == jnp.bfloat16 and not can_cast:
        raise ValueError(
            f"{name!r} in {tensor.file} is float16, whose 11 significant bits do not fit the 8 of "
            "bfloat16: the weights would change. Ask for dtype float32, which holds them exactly "
            "(--dtype float32, backend portable), or for the rounding: --cast-weights bfloat16, "
            "load_model(cast_weights='bfloat16')"
        )


def _check_tied_head(embed: _Tensor, head: _Tensor) -> None:
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


def _load_param(tensor: _Tensor, spec: ParamSpec, mesh: Mesh, *, dtype: jnp.dtype) -> jax.Array:
    """One parameter; devices that hold the same shard share one read."""
    read = functools.cache(functools.partial(_read_shard, tensor, spec, dtype))
    sharding = NamedSharding(mesh, spec.partition)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # jax passes None only for shapes it does not know
        bounds = (i.indices(n) for i, n in zip(index, spec.shape, strict=True))
        return read(tuple((start, stop) for start, stop, _ in bounds))

    array = jax.make_array_from_callback(spec.shape, sharding, shard, dtype)
    return array.block_until_ready()  # bounds what the host holds to one parameter


def _read_shard(
    tensor: _Tensor, spec: ParamSpec, dtype: jnp.dtype, bounds: tuple[tuple[int, int], ...]
) -> np.ndarray:
    """Stored rows and columns `bounds`, read run by run; rows in no run come last and are zero."""
    (low, high), others = bounds[0], tuple(slice(*b) for b in bounds[1:])
    parts = []
    for run in spec.runs:
        start, stop = max(low, run.start), min(high, run.start + run.num_rows)
        if start < stop:
            shift = run.source - run.start
            rows = tensor.rows[(slice(start + shift, stop + shift), *others)]
            parts.append(_converted(rows, dtype, name=f"{spec.hf_name!r} in {tensor.file}"))
    num_zeros = high - low - sum(len(part) for part in parts)
    if num_zeros:
        parts.append(np.zeros([num_zeros, *(stop - start for start, stop in bounds[1:])], dtype))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _converted(rows: np.ndarray, dtype: jnp.dtype, *, name: str) -> np.ndarray:
    """Values in another dtype; a finite one must not become infinite."""
    # ROUND: float32 and float16 to bfloat16 round (to nearest, ties to even); nothing else does.
    values = rows.astype(dtype, copy=False)
    if rows.dtype == np.float32 and dtype == jnp.bfloat16 and values.size:
        magnitude = values.view(np.uint16) & np.uint16(0x7FFF)
        if magnitude.max() >= 0x7F80 and (np.isfinite(rows) & (magnitude == 0x7F80)).any():
            raise ValueError(
                f"{name} holds a finite value that would become infinite in bfloat16, whose "
                "largest is 3.39e38; ask for dtype float32"
            )
    return values


# ------------------------------------------------------------------------------- random weights


def random_params(
    config: ModelConfig, mesh: Mesh, *, seed: int, dtype: DTypeLike, vocab_block: int
) -> Params:
    """Draw weights on the devices, for benchmarks and tests: no file, no host copy.

    Matrices have mean 0 and variance `1 / fan_in`, gains are 1 plus a little, biases are small.

    Args:
        config: The model.
        mesh: Has the axes "dp" and "tp".
        seed: 0 to 2**32 - 1.
        dtype: bfloat16 or float32.
        vocab_block: As for `param_specs`.

    Raises:
        ValueError: If `seed` is out of range, or `dtype` or the mesh is not supported.

    Numerics:
        Same values on every mesh, by construction: a value is an integer made from threefry bits
        of (seed, tensor name, position in the checkpoint's tensor), times one constant, rounded
        to `dtype`. No sum of floats, no transcendental function.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"{seed=} must be in [0, 2**32)")
    target = _check_dtype(dtype)
    specs = param_specs(config, tp=mesh.shape["tp"], vocab_block=vocab_block)
    root = jax.random.key(seed)

    @functools.cache
    def compiled(spec: ParamSpec) -> Callable[[jax.Array], jax.Array]:
        draw = functools.partial(_random_tensor, spec=spec, dtype=target)
        return jax.jit(draw, out_shardings=NamedSharding(mesh, spec.partition))

    def make(spec: ParamSpec) -> jax.Array:
        key = jax.random.fold_in(root, zlib.crc32(spec.hf_name.encode()))
        return compiled(dataclasses.replace(spec, hf_name=""))(key)

    return _build(specs, mesh, make)


def _random_tensor(key: jax.Array, *, spec: ParamSpec, dtype: jnp.dtype) -> jax.Array:
    """The sum of the four bytes of each random word, centred: near normal, and an integer."""
    bits = jax.random.bits(key, spec.hf_shape, jnp.uint32)
    total = sum((bits >> jnp.uint32(8 * i)) & jnp.uint32(255) for i in range(1, 4))
    centred = (total + (bits & jnp.uint32(255))).astype(jnp.int32) - jnp.int32(510)
    noise = centred.astype(jnp.float32)  # exact; standard deviation 147.8
    match spec.role:
        case ParamRole.MATRIX:
            std = math.sqrt(4 * (256**2 - 1) / 12)
            values = noise * jnp.float32(1 / (std * math.sqrt(spec.hf_shape[1])))
        case ParamRole.GAIN:
            values = jnp.float32(1) + noise * jnp.float32(2**-12)  # exact, fused or not
        case ParamRole.BIAS:
            values = noise * jnp.float32(2**-13)
    return stored_rows(values.astype(dtype), spec)  # holds no -0.0: see _rearrange


# ----------------------------------------------------------------------------- orbax checkpoints


def save_params(
    folder: Path,
    params: Params,
    config: ModelConfig,
    mesh: Mesh,
    *,
    vocab_block: int,
    weight_cast: str = NO_CAST,
) -> None:
    """Write `params` as an orbax checkpoint that any mesh can restore.

    Tensors are stored under their Hugging Face names and in their shapes: key/value heads once,
    no padding, tied embeddings once. `detjax_params.json` beside them says which model and dtype,
    and is written last.

    Args:
        folder: Made here; must not hold a checkpoint yet.
        params: As loaded for `config` on `mesh` with `vocab_block`.
        config: The model.
        mesh: The mesh of `params`.
        vocab_block: As for `param_specs`.
        weight_cast: Of the model that the weights are of, so that it is not lost.

    Raises:
        ValueError: If `folder` holds a checkpoint.
    """
    folder = folder.absolute()
    if (folder / CHECKPOINT_ARRAYS).exists():
        raise ValueError(f"{folder} holds a checkpoint already; remove it or give another folder")
    specs = param_specs(config, tp=mesh.shape["tp"], vocab_block=vocab_block)
    tensors = {}
    for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        if spec.hf_name not in tensors:
            sharding = NamedSharding(mesh, _checkpoint_partition(spec))
            is_plain = not spec.is_rearranged
            tensors[spec.hf_name] = (
                array if is_plain else _rearrange(checkpoint_rows, array, spec, sharding)
            )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / CHECKPOINT_ARRAYS, tensors)
    if jax.process_index() == 0:
        facts = _checkpoint_facts(config, params["embed"].dtype, weight_cast)
        facts[CHECKPOINT_HASH] = folder_hash(folder / CHECKPOINT_ARRAYS)
        (folder / CHECKPOINT_FILE).write_text(json.dumps(facts, indent=2) + "\n")


def restore_params(
    folder: Path,
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    vocab_block: int,
    weight_cast: str = NO_CAST,
) -> Params:
    """Read what `save_params` wrote, onto any mesh that the model fits: the same bits.

    Nothing is converted here. `weight_cast` says how the weights that were saved had been read, and
    must be given to `place_model` too, whose fingerprint holds it.

    Raises:
        FileNotFoundError: If `folder` holds no finished checkpoint.
        ValueError: If it is of another model, dtype, cast or format, or a byte of it has changed;
            the message names what differs.
    """
    folder, target = folder.absolute(), _check_dtype(dtype)
    _check_facts(folder, _checkpoint_facts(config, target, weight_cast))
    specs = param_specs(config, tp=mesh.shape["tp"], vocab_block=vocab_block)
    abstract = {}
    for spec in jax.tree.leaves(specs):  # "embed" comes first, so a tied tensor lies as it asks
        sharding = NamedSharding(mesh, _checkpoint_partition(spec))
        tensor = jax.ShapeDtypeStruct(spec.hf_shape, target, sharding=sharding)
        abstract.setdefault(spec.hf_name, tensor)
    with ocp.StandardCheckpointer() as checkpointer:
        tensors = checkpointer.restore(folder / CHECKPOINT_ARRAYS, abstract)

    def place(spec: ParamSpec) -> jax.Array:
        tensor, sharding = tensors[spec.hf_name], NamedSharding(mesh, spec.partition)
        is_in_place = not spec.is_rearranged and tensor.sharding == sharding
        return tensor if is_in_place else _rearrange(stored_rows, tensor, spec, sharding)

    return _build(specs, mesh, place)


def _checkpoint_partition(spec: ParamSpec) -> PartitionSpec:
    """How a tensor in the checkpoint's shape is split: its rows may not divide by tp."""
    if not spec.is_rearranged:
        return spec.partition
    return COLUMNS if len(spec.hf_shape) == 2 else REPLICATED


def _rearrange(
    rows: Callable[[jax.Array, ParamSpec], jax.Array],
    array: jax.Array,
    spec: ParamSpec,
    sharding: NamedSharding,
) -> jax.Array:
    """Apply `stored_rows` or `checkpoint_rows` from one sharding to another, as integers.

    The partitioner may move rows by adding shards that are masked to 0; as floats that turns -0.0
    into 0.0 (measured on 8 CPU devices, jax 0.11.2). The casts are programs of their own, so
    nothing moves while it is a float.
    """
    words = lax.bitcast_convert_type(array, {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize])
    unnamed = dataclasses.replace(spec, hf_name="")  # one program for all layers
    words = _rearrange_words(words, rows=rows, spec=unnamed, sharding=sharding)
    moved = lax.bitcast_convert_type(words, array.dtype)
    return jax.device_put(moved, sharding)  # spells the sharding as asked; moves nothing


@functools.partial(jax.jit, static_argnames=("rows", "spec", "sharding"))
def _rearrange_words(
    words: jax.Array,
    *,
    rows: Callable[[jax.Array, ParamSpec], jax.Array],
    spec: ParamSpec,
    sharding: NamedSharding,
) -> jax.Array:
    return lax.with_sharding_constraint(rows(words, spec), sharding)


def _checkpoint_facts(config: ModelConfig, dtype: jnp.dtype, weight_cast: str) -> dict[str, Any]:
    """What `detjax_params.json` says, as JSON gives it back."""
    values = dataclasses.asdict(config)
    values["rope"]["kind"] = config.rope.kind.value
    facts = {
        "format": CHECKPOINT_FORMAT,
        "dtype": jnp.dtype(dtype).name,
        "weight_cast": weight_cast,
        "config": values,
    }
    return json.loads(json.dumps(facts))


def _check_facts(folder: Path, expected: dict[str, Any]) -> None:
    """The checkpoint must be finished, and be of this model, dtype and format."""
    path = folder / CHECKPOINT_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {folder} holds no finished checkpoint")
    try:
        found = json.loads(path.read_text())
        expected_hash = found.pop(CHECKPOINT_HASH, None)
        found_flat, expected_flat = _flat(found), _flat(expected)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); save the checkpoint again") from error
    for key in sorted(found_flat.keys() | expected_flat.keys()):
        if found_flat.get(key) != expected_flat.get(key):
            raise ValueError(
                f"{path} has {key}={found_flat.get(key)!r} but {expected_flat.get(key)!r} is asked "
                "for; restore with the model it was saved from, or load the weights again"
            )
    if folder_hash(folder / CHECKPOINT_ARRAYS) != expected_hash:
        raise ValueError(
            f"{folder / CHECKPOINT_ARRAYS} is damaged: its bytes are not those that were saved; "
            "copy it again, or load the weights again"
        )


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts with the config's fields beside the others; older files know of no cast."""
    return {"weight_cast": NO_CAST, **facts, **facts["config"], "config": None}
