# SPDX-License-Identifier: Apache-2.0
"""Weights from named tensors that arrive one by one, as another program's trainer sends them."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from detjax.models.config import ModelConfig
from detjax.models.params import EMBED_NAME, HEAD_NAME, Params, TensorSpec, param_specs
from detjax.models.weights.assemble import assemble, made_once
from detjax.models.weights.dtypes import SOURCE_DTYPES, check_conversion, check_dtype
from detjax.models.weights.load import INERT_TENSORS
from detjax.models.weights.place import place_tensor, put_expert
from detjax.models.weights.reading import own_name, read_named, readings_by_source

STORED_NAMES = {dtype: stored for stored, dtype in SOURCE_DTYPES.items()}
MAX_NAMED = 3
"""Missing tensors that an error names."""


@runtime_checkable
class SupportsDlpack(Protocol):
    """A tensor that another library can read where it lies, such as torch's."""

    def __dlpack__(self) -> Any:
        """Give a capsule."""
        ...


@runtime_checkable
class SupportsArray(Protocol):
    """A tensor that NumPy can copy."""

    def __array__(self) -> np.ndarray:
        """Give an array."""
        ...


def load_named_params(
    tensors: Iterable[tuple[str, Any]],
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    vocab_block: int,
    can_cast: bool = False,
) -> Params:
    """Put tensors that come in any order onto `mesh`: the bits of `load_params`.

    The host holds one tensor at a time, and a tensor may be changed as soon as the next one is
    asked for.

    Args:
        tensors: Pairs of a name in a Hugging Face checkpoint and a tensor: a NumPy array, a
            `jax.Array`, or anything with `__dlpack__` or `__array__`, such as a torch tensor in
            float32, bfloat16 or float16. In a job of several processes each gives all of them.
        config: The model; decides names and shapes.
        mesh: Has the axes "dp" and "tp".
        dtype: bfloat16 or float32, the dtype of every parameter.
        vocab_block: As for `param_specs`.
        can_cast: Whether float16 may be rounded to bfloat16.

    Raises:
        ValueError: If a tensor is missing, unknown, given twice, of a wrong shape, or its dtype or
            a value of it cannot be turned into `dtype`; the message names it.

    Numerics:
        As `load_params` says: float32 to bfloat16 rounds once, to nearest, ties to even.
    """
    target = check_dtype(dtype)
    specs = param_specs(config, tp=mesh.shape["tp"], vocab_block=vocab_block)
    specs_of: dict[str, list[TensorSpec]] = {}
    for param in jax.tree.leaves(made_once(specs, mesh)):
        for spec in param.tensors:
            for name in spec.hf_names:
                specs_of.setdefault(name, []).append(spec)
    seen, placed = set[str](), dict[TensorSpec, jax.Array]()
    digests = dict[str, str]()
    for name, value in _as_read(tensors, config, target, can_cast=can_cast):
        if INERT_TENSORS.fullmatch(name):
            continue
        if name in seen:
            raise ValueError(f"{name!r} is given twice; give each tensor once")
        is_tied_head = name == HEAD_NAME and HEAD_NAME not in specs_of
        own = EMBED_NAME if is_tied_head else name
        if own not in specs_of:
            raise ValueError(
                f"{name!r} is not a tensor of this model; names are those of its Hugging Face "
                f"checkpoint, such as {EMBED_NAME!r}, without a prefix that a wrapper adds"
            )
        seen.add(name)
        array, shape = _host_array(name, value), specs_of[own][0].hf_shape
        if array.shape != shape:
            raise ValueError(f"{name!r} has shape {array.shape}, but this model's is {shape}")
        stored = STORED_NAMES.get(array.dtype.name, array.dtype.name)
        of_spec = specs_of[own][0].dtype(target)
        check_conversion(repr(name), stored, dtype=of_spec, can_cast=can_cast)
        if own == EMBED_NAME and HEAD_NAME not in specs_of:
            raw = array.reshape(-1).view(np.uint8)
            digests[name] = f"{stored} {hashlib.sha256(raw).hexdigest()}"
        if not is_tied_head:
            for spec in specs_of[name]:
                if spec.num_experts:
                    placed[spec] = put_expert(
                        placed.get(spec), array, spec, mesh, dtype=target, name=name
                    )
                else:
                    placed[spec] = place_tensor(array, spec, mesh, dtype=of_spec, name=repr(name))
    if missing := [name for name in specs_of if name not in seen]:
        raise ValueError(
            f"{len(missing)} of {len(specs_of)} tensors are missing: "
            f"{', '.join(map(repr, missing[:MAX_NAMED]))}{', ...' * (len(missing) > MAX_NAMED)}"
        )
    if len(set(digests.values())) > 1:
        raise ValueError(
            f"this model's embeddings are tied, but {HEAD_NAME!r} differs from {EMBED_NAME!r}; "
            "leave it out, or give the same bits"
        )
    return assemble(specs, mesh, placed.__getitem__)


def _as_read(
    tensors: Iterable[tuple[str, Any]], config: ModelConfig, dtype: jnp.dtype, *, can_cast: bool
) -> Iterator[tuple[str, Any]]:
    """The decoder's tensors, from those of the checkpoint."""
    plan = readings_by_source(config, dtype)
    for given, value in map(_pair, tensors):
        name = own_name(given, config)
        if name is None:
            continue
        if name not in plan:
            yield name, value
            continue
        array = _host_array(name, value)
        if array.dtype == np.float16:
            check_conversion(repr(name), "F16", dtype=dtype, can_cast=can_cast)
        yield from read_named(plan[name], array)


def _pair(item: Any) -> tuple[str, Any]:
    """A name and a tensor."""
    if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
        raise ValueError(
            f"tensors must be pairs of a name and a tensor, such as state_dict().items(), not "
            f"{item!r:.60}"
        )
    return item


def _host_array(name: str, value: Any) -> np.ndarray:
    """A copy of a tensor, whose own memory its owner may change."""
    try:
        if isinstance(value, np.ndarray | jax.Array):
            return np.array(value, order="C")
        if isinstance(value, SupportsDlpack):
            # WHY: NumPy's own `from_dlpack` knows no bfloat16.
            return np.array(jnp.from_dlpack(value), order="C")
        if isinstance(value, SupportsArray):
            # WHY: `__array__` may give its own memory, whatever it is asked for.
            return np.array(np.asarray(value), order="C")
    except Exception as error:
        raise ValueError(
            f"{name!r}, a {type(value).__name__}, cannot be read ({error}); give a plain array on "
            "one device: for torch tensor.detach().contiguous(), or .full_tensor() if it is sharded"
        ) from error
    raise ValueError(
        f"{name!r} is a {type(value).__name__}; give a NumPy, JAX or torch tensor, or another "
        "object with __dlpack__ or __array__"
    )
