# SPDX-License-Identifier: Apache-2.0
"""The parameter tree as data: names, shapes, shardings and where each row comes from.

Loading, random weights, checkpoints and the jitted step all read the one description that
`param_specs` gives. The tree of arrays (`Params`), matrices `(out, in)` as in Hugging Face:

```
{"embed": [V, D], "final_norm": [D], "lm_head": [Vp, D],
 "layers": [{"attn_norm": [D], "q": [H*C, D], "k": [Ks*C, D], "v": [Ks*C, D], "o": [D, H*C],
             "mlp_norm": [D], "gate": [F, D], "up": [F, D], "down": [D, F],
             "q_bias": [H*C], "k_bias": [Ks*C], "v_bias": [Ks*C],    # if config.qkv_bias
             "o_bias": [D],                                          # if config.o_bias
             "q_norm": [C], "k_norm": [C]}, ...]}                    # if config.qk_norm
```

`Ks` counts key/value slots: heads, some of them repeated so that every rank holds what its query
heads read (`kv_layout`). `Vp` is the vocabulary, with rows of zeros up to whole blocks a rank.
"""

import enum
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from detjax.models.config import ModelConfig

Params = dict[str, Any]
"""A nested dict and list of `jax.Array`, as the table above says."""

ROWS, COLUMNS, REPLICATED = PartitionSpec("tp", None), PartitionSpec(None, "tp"), PartitionSpec()
SHARDED_BIAS = PartitionSpec("tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """Where key/value heads stand on a tp-way mesh.

    Attributes:
        num_slots: Heads as stored, repeats included; a multiple of tp.
        group: Query heads that read one slot. Query head h reads slot `h // group`.
        heads: The model's key/value head in each slot.
    """

    num_slots: int
    group: int
    heads: tuple[int, ...]


def kv_layout(num_heads: int, num_kv_heads: int, tp: int) -> KVLayout:
    """Repeat key/value heads just enough that no rank's query heads need another rank's.

    `group = gcd(H / tp, H / K)`, `num_slots = H / group`, slot s holds head
    `s * group // (H / K)`. Where a rank's query heads line up with whole heads, nothing repeats.

    Raises:
        ValueError: If `num_kv_heads` or `tp` does not divide `num_heads`.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
    if num_heads % tp:
        raise ValueError(f"{tp=} must divide {num_heads=}")
    queries_a_head = num_heads // num_kv_heads
    group = math.gcd(num_heads // tp, queries_a_head)
    num_slots = num_heads // group
    heads = tuple(slot * group // queries_a_head for slot in range(num_slots))
    return KVLayout(num_slots=num_slots, group=group, heads=heads)


class ParamRole(enum.Enum):
    """What a parameter does, which decides how a random one is drawn."""

    MATRIX = "matrix"
    GAIN = "gain"
    BIAS = "bias"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRun:
    """Stored rows `[start, start + num_rows)` are the checkpoint's rows from `source` on."""

    start: int
    source: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One parameter: how it is stored, and where it comes from.

    Attributes:
        hf_name: Name of the tensor in a Hugging Face checkpoint. Two specs share one where
            embeddings are tied.
        hf_shape: Shape of that tensor.
        shape: Global shape as stored.
        partition: How `shape` is split over the mesh axes ("dp", "tp").
        runs: Stored rows in order of `start`; rows in no run are zero.
        role: What the parameter does.
    """

    hf_name: str
    hf_shape: tuple[int, ...]
    shape: tuple[int, ...]
    partition: PartitionSpec
    runs: tuple[RowRun, ...]
    role: ParamRole

    @property
    def is_rearranged(self) -> bool:
        """Whether stored rows differ from the checkpoint's: repeated heads or padding."""
        return self.shape != self.hf_shape


def possible_tps(config: ModelConfig) -> tuple[int, ...]:
    """Every tp that the dimensions allow: powers of two that divide heads, width and ffn."""
    common = math.gcd(config.num_heads, config.hidden_size, config.intermediate_size)
    return tuple(2**i for i in range(common.bit_length()) if common % 2**i == 0)


def check_tp(config: ModelConfig, tp: int) -> None:
    """Refuse a tp that the model's dimensions do not allow.

    Raises:
        ValueError: If `tp` is not a power of two, or does not divide a dimension that is split.
            The message names the dimension and the values that are possible.
    """
    possible = f"; this model can be split over tp in {possible_tps(config)}"
    if tp < 1 or tp & (tp - 1):
        raise ValueError(f"{tp=} must be a power of two{possible}")
    for name in ("num_heads", "hidden_size", "intermediate_size"):
        if getattr(config, name) % tp:
            raise ValueError(f"{tp=} must divide {name}={getattr(config, name)}{possible}")


def padded_vocab_size(vocab_size: int, *, tp: int, vocab_block: int) -> int:
    """`Vp`: the least multiple of `tp * vocab_block` that holds the vocabulary."""
    rows = tp * vocab_block
    return -(-vocab_size // rows) * rows


def param_specs(config: ModelConfig, *, tp: int, vocab_block: int) -> dict[str, Any]:
    """Describe every parameter, as a tree of `ParamSpec` in the structure of `Params`.

    Args:
        config: The model.
        tp: Ranks of the mesh axis "tp".
        vocab_block: Rows of `lm_head` that a rank must hold a multiple of, from the profile.

    Raises:
        ValueError: If `tp` does not fit the model (`check_tp`) or `vocab_block` is under 1.
    """
    check_tp(config, tp)
    if vocab_block < 1:
        raise ValueError(f"{vocab_block=} must be at least 1")
    vocab, width = config.vocab_size, config.hidden_size
    embed_name = "model.embed_tokens.weight"
    head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
    padded = padded_vocab_size(vocab, tp=tp, vocab_block=vocab_block)
    return {
        "embed": _spec(embed_name, (vocab, width), COLUMNS),
        "layers": [_layer_specs(config, i, tp=tp) for i in range(config.num_layers)],
        "final_norm": _spec("model.norm.weight", (width,), REPLICATED, role=ParamRole.GAIN),
        "lm_head": _spec(head_name, (vocab, width), ROWS, stored_rows=padded),
    }


def partition_specs(config: ModelConfig, *, tp: int, vocab_block: int) -> dict[str, Any]:
    """The tree of `PartitionSpec` that goes with `param_specs`: `in_specs` of a sharded step."""
    return jax.tree.map(
        lambda spec: spec.partition, param_specs(config, tp=tp, vocab_block=vocab_block)
    )


def stored_rows(tensor: jax.Array, spec: ParamSpec) -> jax.Array:
    """Arrange a checkpoint's tensor as `spec` stores it: rows repeated, or followed by zeros.

    Args:
        tensor: Of shape `spec.hf_shape`, any dtype.
        spec: What to make of it.
    """
    if not spec.is_rearranged:
        return tensor
    parts = [tensor[run.source : run.source + run.num_rows] for run in spec.runs]
    num_zeros = spec.shape[0] - sum(run.num_rows for run in spec.runs)
    zeros = jnp.zeros((num_zeros, *spec.shape[1:]), tensor.dtype)  # always the last rows
    return jnp.concatenate([*parts, zeros])


def checkpoint_rows(stored: jax.Array, spec: ParamSpec) -> jax.Array:
    """The inverse of `stored_rows`: drop padding, and all but the first of repeated heads."""
    if not spec.is_rearranged:
        return stored
    first = {run.source: run for run in reversed(spec.runs)}
    runs = [first[source] for source in sorted(first)]
    return jnp.concatenate([stored[run.start : run.start + run.num_rows] for run in runs])


def _spec(
    hf_name: str,
    hf_shape: tuple[int, ...],
    partition: PartitionSpec,
    *,
    role: ParamRole = ParamRole.MATRIX,
    stored_rows: int = 0,
) -> ParamSpec:
    """A tensor stored as it is, or followed by zeros up to `stored_rows`."""
    num_rows = max(stored_rows, hf_shape[0])
    return ParamSpec(
        hf_name=hf_name,
        hf_shape=hf_shape,
        shape=(num_rows, *hf_shape[1:]),
        partition=partition,
        runs=(RowRun(start=0, source=0, num_rows=hf_shape[0]),),
        role=role,
    )


def _kv_spec(
    hf_name: str, hf_shape: tuple[int, ...], layout: KVLayout, *, head_dim: int, role: ParamRole
) -> ParamSpec:
    """Rows of key/value heads, one run a slot where heads are repeated."""
    partition = ROWS if role is ParamRole.MATRIX else SHARDED_BIAS
    plain = _spec(hf_name, hf_shape, partition, role=role)
    if layout.num_slots * head_dim == hf_shape[0]:
        return plain
    runs = tuple(
        RowRun(start=slot * head_dim, source=head * head_dim, num_rows=head_dim)
        for slot, head in enumerate(layout.heads)
    )
    return ParamSpec(
        hf_name=hf_name,
        hf_shape=hf_shape,
        shape=(layout.num_slots * head_dim, *hf_shape[1:]),
        partition=partition,
        runs=runs,
        role=role,
    )


def _layer_specs(config: ModelConfig, layer_idx: int, *, tp: int) -> dict[str, ParamSpec]:
    """One layer."""
    prefix = f"model.layers.{layer_idx}."
    attn, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    width, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layout = kv_layout(config.num_heads, config.num_kv_heads, tp)
    matrix, gain, bias = ParamRole.MATRIX, ParamRole.GAIN, ParamRole.BIAS

    def kv(name: str, shape: tuple[int, ...], role: ParamRole) -> ParamSpec:
        return _kv_spec(attn + name, shape, layout, head_dim=head_dim, role=role)

    specs = {
        "attn_norm": _spec(f"{prefix}input_layernorm.weight", (width,), REPLICATED, role=gain),
        "q": _spec(f"{attn}q_proj.weight", (q_rows, width), ROWS),
        "k": kv("k_proj.weight", (kv_rows, width), matrix),
        "v": kv("v_proj.weight", (kv_rows, width), matrix),
        "o": _spec(f"{attn}o_proj.weight", (width, q_rows), COLUMNS),
        "mlp_norm": _spec(
            f"{prefix}post_attention_layernorm.weight", (width,), REPLICATED, role=gain
        ),
        "gate": _spec(f"{mlp}gate_proj.weight", (ffn, width), ROWS),
        "up": _spec(f"{mlp}up_proj.weight", (ffn, width), ROWS),
        "down": _spec(f"{mlp}down_proj.weight", (width, ffn), COLUMNS),
    }
    if config.qkv_bias:
        specs["q_bias"] = _spec(f"{attn}q_proj.bias", (q_rows,), SHARDED_BIAS, role=bias)
        specs["k_bias"] = kv("k_proj.bias", (kv_rows,), bias)
        specs["v_bias"] = kv("v_proj.bias", (kv_rows,), bias)
    if config.o_bias:
        specs["o_bias"] = _spec(f"{attn}o_proj.bias", (width,), REPLICATED, role=bias)
    if config.qk_norm:
        specs["q_norm"] = _spec(f"{attn}q_norm.weight", (head_dim,), REPLICATED, role=gain)
        specs["k_norm"] = _spec(f"{attn}k_norm.weight", (head_dim,), REPLICATED, role=gain)
    return specs
