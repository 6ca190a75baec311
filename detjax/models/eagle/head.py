# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head: its weights, and its pass over tokens. No claim: what it drafts is verified."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Activation, Array, Cached, Float32, Int32
from detjax.models.abstract import why_unsupported
from detjax.models.config import ModelConfig
from detjax.models.eagle.config import NUM_FEATURES, EagleConfig, load_eagle_config
from detjax.models.fast import attention_layer, product, rms_norm, swiglu
from detjax.models.hub import find_model
from detjax.models.layers import ForwardContext, Tokens, embed_tokens, rope_rows
from detjax.models.loading import LoadedModel
from detjax.models.params import Params
from detjax.models.rope import rope_tables
from detjax.models.weights.files import StoredTensor, open_tensors
from detjax.models.weights.host import put_on_devices, take_to_host
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.api import rope_into_cache
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.parallel.mesh import TP_AXIS

_FLOATS = ("BF16", "F16", "F32")
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_EMBED = "embed_tokens.weight"
_EMBED_SPEC = P(None, TP_AXIS)
_VOCABULARY_MAPS = {"d2t": "I64", "t2d": "BOOL"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleHead:
    """A head on the mesh of the model that it drafts for. Every rank has all of it.

    Attributes:
        eagle: What it is.
        params: Its weights: matrices (out, in), those that read the same rows joined, and
            `draft_ids`, the token of each row of `lm_head`. Without `embed` it uses the model's.
        rope_tables: Cosines and sines by position.
        mesh: Where.
        profile: As the model's.
        backend: As the model's.
        folder: Where it was read; None for random weights.
    """

    eagle: EagleConfig
    params: Params
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]]
    mesh: Mesh
    profile: NumericsProfile
    backend: Backend
    folder: Path | None

    @property
    def config(self) -> ModelConfig:
        """Its decoder layer."""
        return self.eagle.layer

    @property
    def num_kv_slots(self) -> int:
        """Key/value heads in its cache."""
        return self.config.num_kv_heads

    @property
    def partition_specs(self) -> dict[str, P]:
        """How `params_beside` lie on the mesh: embeddings as the model's, by channels."""
        return {name: P() for name in self.params} | {"embed": _EMBED_SPEC}

    def params_beside(self, target: Params) -> Params:
        """The weights of its programs: its own, and the embedding of the model if it has none."""
        return {"embed": target["embed"]} | self.params

    def take_weights_to_host(self) -> Params:
        """Free the weights on the devices; their copy on the host, for `put_weights_back`."""
        return take_to_host(self.params)

    def put_weights_back(self, host: Params) -> None:
        """Put the weights where they were."""
        self.params.update(put_on_devices(host, self.params))


AnyDraftModel = LoadedModel | EagleHead
"""What drafts for a model with weights of its own."""


def tensor_shapes(eagle: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's float tensors, by the names of SGLang's form; all but the embedding."""
    layer = eagle.layer
    width, heads = layer.hidden_size, layer.num_heads * layer.head_dim
    kv_heads = layer.num_kv_heads * layer.head_dim
    return {
        "fc.weight": (width, NUM_FEATURES * eagle.target_hidden_size),
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
        "final_norm": tensors["norm.weight"],
        "lm_head": tensors["lm_head.weight"],
        "attn_norm": of("input_layernorm"),
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
) -> EagleHead:
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


def check_tensors(eagle: EagleConfig, tensors: Mapping[str, StoredTensor]) -> None:
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
    eagle: EagleConfig, d2t: np.ndarray | None, t2d: np.ndarray | None
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
    eagle: EagleConfig,
    tensors: Mapping[str, np.ndarray],
    ids: np.ndarray,
    *,
    model: LoadedModel,
    folder: Path | None = None,
) -> EagleHead:
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
    withheld = KERNELS[model.backend].withheld.head_ranks
    if tp > 1 and withheld:
        raise ValueError(f"an EAGLE-3 head with {tp=}: {withheld}")
    if eagle.layer.hidden_size % tp:
        raise ValueError(
            f"hidden_size={eagle.layer.hidden_size} of the head must be a multiple of {tp=}: ranks "
            "share the channels of its embedding"
        )
    num_layers = model.config.num_layers
    if not all(1 <= layer < num_layers for layer in eagle.feature_layers):
        raise ValueError(
            f"feature_layers={eagle.feature_layers} must be from 1 to {num_layers - 1}: the model "
            f"has {num_layers} layers, and the output of the last one is not read"
        )
    refused = why_unsupported(eagle.layer, profile, model.backend, 1)  # every rank runs all of it
    if refused is not None:
        raise ValueError(f"backend {model.backend.value} cannot run this EAGLE-3 head: {refused}")
    whole = NamedSharding(mesh, P())
    values = joined_params(tensors, xp=np) | {"draft_ids": ids}
    params = {
        name: jax.device_put(
            value if name == "draft_ids" else value.astype(profile.param_dtype),
            NamedSharding(mesh, _EMBED_SPEC) if name == "embed" else whole,
        )
        for name, value in values.items()
    }
    layer = eagle.layer
    tables = rope_tables(layer.rope, head_dim=layer.head_dim, max_len=layer.max_position_embeddings)
    return EagleHead(
        eagle=eagle,
        params=params,
        rope_tables=(jax.device_put(tables[0], whole), jax.device_put(tables[1], whole)),
        mesh=mesh,
        profile=profile,
        backend=model.backend,
        folder=folder,
    )


# ------------------------------------------------------------------------------------------ passes


def project_features(
    params: Params, features: Activation[Array, "M X"]
) -> Activation[Array, "M D"]:
    """Make one hidden state of the three of each token."""
    return product(features, params["fc"], features.dtype)


def write_keys(
    ctx: ForwardContext,
    eagle: EagleConfig,
    params: Params,
    tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    pages: Cached[Array, "L N 2 K P C"],
    tokens: Tokens,
    hidden: Activation[Array, "M D"],
) -> Cached[Array, "L N 2 K P C"]:
    """Put the head's keys and values of tokens into its cache; arguments as `eagle_pass`'s."""
    _, rows = _layer_rows(ctx, eagle, params, tokens, hidden)
    cos, sin = rope_rows(tables, tokens.positions)
    qkv = product(rows, params["qkv"], rows.dtype)
    _, pages = rope_into_cache(
        qkv.reshape(qkv.shape[0], -1, ctx.config.head_dim),
        Rotation(cos, sin),
        CachePlace(pages, tokens.page_table, tokens.positions, layer=0),
        eps=ctx.config.rms_norm_eps,
        backend=ctx.backend,
    )
    return pages


def eagle_pass(
    ctx: ForwardContext,
    eagle: EagleConfig,
    params: Params,
    tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    pages: Cached[Array, "L N 2 K P C"],
    tokens: Tokens,
    hidden: Activation[Array, "M D"],
    wanted: Int32[Array, " B"],
) -> tuple[Cached[Array, "L N 2 K P C"], Activation[Array, "B D"]]:
    """Run the head on tokens, each with the hidden state of the token before it.

    Args:
        ctx: The head's layer.
        eagle: What the head is.
        params: Its weights.
        tables: Cosines and sines by position.
        pages: Its cache.
        tokens: Each at the position of the token before it, whose hidden state it is given with.
        hidden: As `project_features` gives it, or this pass of the draft before.
        wanted: Which token of each sequence something is drafted from.

    Returns:
        The cache, and what the layer leaves of the wanted tokens, without the last norm.
    """
    residual, rows = _layer_rows(ctx, eagle, params, tokens, hidden)
    cos, sin = rope_rows(tables, tokens.positions)
    pages, heads = attention_layer(ctx, params, rows, cos, sin, pages, tokens, 0)
    at = jnp.arange(len(wanted), dtype=jnp.int32) * tokens.ids.shape[1] + wanted
    heads, residual = (jnp.take(x, at, axis=0, mode="clip") for x in (heads, residual))
    eps, dtype = ctx.config.rms_norm_eps, residual.dtype
    residual = residual + product(heads, params["o"], dtype)
    gated = swiglu(product(rms_norm(residual, params["mlp_norm"], eps), params["gate_up"], dtype))
    return pages, residual + product(gated, params["down"], dtype)


def draft_logits(
    ctx: ForwardContext, params: Params, hidden: Activation[Array, "B D"], *, width: int
) -> Float32[Array, "B V"]:
    """Float32 logits of `width` tokens of the model's vocabulary; -inf for those without a row."""
    rows = rms_norm(hidden, params["final_norm"], ctx.config.rms_norm_eps)
    logits = product(rows, params["lm_head"], jnp.float32)
    everywhere = jnp.full((len(hidden), width), -jnp.inf, jnp.float32)
    return everywhere.at[:, params["draft_ids"]].set(logits)


def _layer_rows(
    ctx: ForwardContext,
    eagle: EagleConfig,
    params: Params,
    tokens: Tokens,
    hidden: Activation[Array, "M D"],
) -> tuple[Activation[Array, "M D"], Activation[Array, "M E"]]:
    """What the layer adds to, and the rows that it projects: embeddings and hidden states."""
    eps = ctx.config.rms_norm_eps
    embedded = embed_tokens(ctx, params["embed"], tokens.ids.reshape(-1))
    normed = rms_norm(hidden, params["hidden_norm"], eps)
    rows = jnp.concatenate([rms_norm(embedded, params["attn_norm"], eps), normed], axis=1)
    return (normed if eagle.norm_before_residual else hidden), rows
