# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads: their tensors in both published forms, read and placed."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Int32
from detjax.models.heads.config import HeadConfig
from detjax.models.heads.eagle_config import load_eagle_config
from detjax.models.heads.head import DraftHead, check_head
from detjax.models.hub import find_model
from detjax.models.loading import LoadedModel
from detjax.models.params import Params
from detjax.models.rope import rope_tables
from detjax.models.weights.files import StoredTensor, open_tensors
from detjax.models.weights.load import ignore_progress
from detjax.parallel.mesh import TP_AXIS

_FLOATS = ("BF16", "F16", "F32")
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_EMBED = "embed_tokens.weight"
_VOCABULARY_MAPS = {"d2t": "I64", "t2d": "BOOL"}


def tensor_shapes(eagle: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's float tensors, by the names of SGLang's form; all but the embedding."""
    layer = eagle.layer
    width, heads = layer.hidden_size, layer.num_heads * layer.head_dim
    kv_heads = layer.num_kv_heads * layer.head_dim
    return {
        "fc.weight": (width, eagle.features_width),
        "norm.weight": (width,),
        "lm_head.weight": (eagle.draft_vocab_size, width),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * width),
        "midlayer.self_attn.k_proj.weight": (kv_heads, 2 * width),
        "midlayer.self_attn.v_proj.weight": (kv_heads, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, heads),
        "midlayer.mlp.gate_proj.weight": (layer.intermediate_size, width),
        "midlayer.mlp.up_proj.weight": (layer.intermediate_size, width),
        "midlayer.mlp.down_proj.weight": (width, layer.intermediate_size),
    }


def joined_params(tensors: Mapping[str, Any], *, xp: Any = jnp) -> Params:
    """Make the tree of weights from tensors with the names of `tensor_shapes`.

    Args:
        tensors: Arrays; `embed_tokens.weight` may be among them.
        xp: jax.numpy or NumPy, of which they are.
    """

    def of(*names: str) -> Any:
        parts = [tensors[f"midlayer.{name}.weight"] for name in names]
        return parts[0] if len(parts) == 1 else xp.concatenate(parts)

    params = {
        "fc": tensors["fc.weight"],
        "last_norm": tensors["norm.weight"],
        "lm_head": tensors["lm_head.weight"],
        "embed_norm": of("input_layernorm"),
        "hidden_norm": of("hidden_norm"),
        "mlp_norm": of("post_attention_layernorm"),
        "qkv": of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": of("self_attn.o_proj"),
        "gate_up": of("mlp.gate_proj", "mlp.up_proj"),
        "down": of("mlp.down_proj"),
    }
    return params | ({"embed": tensors[_EMBED]} if _EMBED in tensors else {})


# ---------------------------------------------------------------------------------------- reading


def load_eagle_head(
    name: str, *, model: LoadedModel, progress: Callable[[str, int, int], None] = ignore_progress
) -> DraftHead:
    """Load a head that drafts for a model, on its mesh, rounded to its dtype of weights.

    Args:
        name: A folder, or a Hugging Face id.
        model: That verifies.
        progress: Told how far loading is.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the head is for another model, or a tensor is missing, unknown or of another
            shape.
    """
    folder = find_model(name)
    eagle = load_eagle_config(folder, model.config)
    with contextlib.ExitStack() as stack:
        tensors = {_plain_name(key): tensor for key, tensor in open_tensors(folder, stack).items()}
        check_tensors(eagle, tensors)
        read = {}
        for done, (key, tensor) in enumerate(tensors.items(), start=1):
            read[key] = np.array(tensor.rows[:])
            progress("head", done, len(tensors))
    ids = draft_ids(eagle, read.pop("d2t", None), read.pop("t2d", None))
    return place_eagle_head(eagle, read, ids, model=model, folder=folder)


def _plain_name(name: str) -> str:
    """The name of a tensor in SGLang's form."""
    for prefix in _LAYER_PREFIXES:
        if name.startswith(prefix):
            return f"midlayer.{name.removeprefix(prefix)}"
    return name


def check_tensors(eagle: HeadConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that are not those of a head, before one is read.

    Raises:
        ValueError: Naming the first that is missing, unknown, or of another shape or dtype.
    """
    layer, num_drafted = eagle.layer, eagle.draft_vocab_size
    shapes = tensor_shapes(eagle)
    needed = set(shapes)
    shapes |= {
        "d2t": (num_drafted,), "t2d": (layer.vocab_size,),
        _EMBED: (layer.vocab_size, layer.hidden_size),
    }  # fmt: skip
    if num_drafted < layer.vocab_size:
        needed.add("d2t")
    if layer.hidden_size != eagle.target_hidden_size:
        needed.add(_EMBED)  # the model's rows are of another width
    if missing := sorted(needed - tensors.keys()):
        raise ValueError(f"the head has no tensor {missing[0]!r}; download it again")
    if unknown := sorted(tensors.keys() - shapes.keys()):
        raise ValueError(
            f"the head has a tensor {unknown[0]!r}, which no EAGLE-3 head has that detjax knows"
        )
    for name, tensor in tensors.items():
        dtypes = (_VOCABULARY_MAPS[name],) if name in _VOCABULARY_MAPS else _FLOATS
        if tensor.shape != shapes[name] or tensor.dtype not in dtypes:
            raise ValueError(
                f"{name!r} of the head is {tensor.dtype}{list(tensor.shape)}; it must be "
                f"{' or '.join(dtypes)} {list(shapes[name])} for this model"
            )


def draft_ids(
    eagle: HeadConfig, d2t: np.ndarray | None, t2d: np.ndarray | None
) -> Int32[np.ndarray, " X"]:
    """The token of each row of a head's `lm_head`.

    Args:
        eagle: What the head is.
        d2t: What is added to a row to get its token; None for 0.
        t2d: Whether each token has a row; None if the head does not say.

    Raises:
        ValueError: If a token is outside the vocabulary or has two rows, or the two disagree.
    """
    ids = np.arange(eagle.draft_vocab_size, dtype=np.int64)
    ids = ids if d2t is None else ids + d2t
    size = eagle.layer.vocab_size
    if outside := [int(one) for one in ids if not 0 <= one < size][:1]:
        raise ValueError(f"d2t names token {outside[0]}, and the vocabulary has {size}")
    if len(np.unique(ids)) < len(ids):
        raise ValueError("d2t names a token twice; download the head again")
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), np.sort(ids)):
        raise ValueError("t2d and d2t name different tokens; download the head again")
    return ids.astype(np.int32)


def place_eagle_head(
    eagle: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    ids: np.ndarray,
    *,
    model: LoadedModel,
    folder: Path | None = None,
) -> DraftHead:
    """Put a head's tensors on the mesh of the model that it drafts for.

    Args:
        eagle: What the head is.
        tensors: As `joined_params` takes them.
        ids: As `draft_ids` returns them.
        model: That verifies.
        folder: Where the head was read.

    Raises:
        ValueError: If the model has no such layers to read, its kernels refuse the head's layer or
            its ranks, or the ranks cannot share the channels of its embedding.
    """
    tp, profile, mesh = model.mesh.shape[TP_AXIS], model.profile, model.mesh
    if eagle.layer.hidden_size % tp:
        raise ValueError(
            f"hidden_size={eagle.layer.hidden_size} of the head must be a multiple of {tp=}: ranks "
            "share the channels of its embedding"
        )
    check_head(eagle, model)
    num_layers = model.config.num_layers
    if not all(1 <= layer < num_layers for layer in eagle.feature_layers):
        raise ValueError(
            f"feature_layers={eagle.feature_layers} must be from 1 to {num_layers - 1}: the model "
            f"has {num_layers} layers, and the output of the last one is not read"
        )
    whole, of_embed = NamedSharding(mesh, P()), model.partition_specs["embed"]
    values = joined_params(tensors, xp=np) | {"draft_ids": ids}
    params = {
        name: jax.device_put(
            value if name == "draft_ids" else value.astype(profile.param_dtype),
            NamedSharding(mesh, of_embed) if name == "embed" else whole,
        )
        for name, value in values.items()
    }
    layer = eagle.layer
    tables = rope_tables(layer.rope, head_dim=layer.head_dim, max_len=layer.max_position_embeddings)
    return DraftHead(
        head_config=eagle,
        params=params,
        shared={} if "embed" in params else {"embed": of_embed},
        rope_tables=(jax.device_put(tables[0], whole), jax.device_put(tables[1], whole)),
        mesh=mesh,
        profile=profile,
        backend=model.backend,
        folder=folder,
    )
