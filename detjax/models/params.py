# SPDX-License-Identifier: Apache-2.0
"""The parameters as data: one table says which there are, where they come from and how they lie.

Loading, random weights, checkpoints, 8-bit drafts, training and the jitted step all read `MODEL`
and `LAYER`. A parameter is one line there. From it follow two trees of one structure:

- `Params`, what a model computes with (`param_specs`): matrices `(out, in)` as in Hugging Face,
  and those that read the same activations stored as one, for fewer and fuller launches.

  ```
  {"embed": [V, D], "final_norm": [D], "lm_head": [Vp, D],
   "layers": [{"attn_norm": [D], "o": [D, H*C],
               "qkv": [(H + 2 Ks)*C, D],            # [(2 H + 2 Ks)*C, D] if config.has_output_gate
               "mlp_norm": [D], "gate_up": [2 F, D], "down": [D, F],
               "router": [Up, D],                   # if config.has_experts(i), and then no
               "expert_gate_up": [U, 2 F, D],       # "gate_up" and "down"; F is an expert's
               "expert_down": [U, D, F],
               "router_bias": [Up],                 # if config.has_clamped_experts
               "router_correction": [Up],           # if config.has_sigmoid_router
               "shared_gate_up": [2 S, D], "shared_down": [D, S], # if it has a shared expert
               "shared_gate": [64, D],              # likewise, with a gate, which is its first row
               "expert_gate_up_bias": [U, 2 F],     # likewise, of gates, then of ups
               "expert_down_bias": [U, D],          # likewise
               "qkv_bias": [(H + 2 Ks)*C],          # if config.qkv_bias
               "o_bias": [D],                       # if config.o_bias
               "sinks": [H],                        # if config.has_sinks
               "q_norm": [C], "k_norm": [C],        # if config.qk_norm
               "q_norm_whole": [H*C], "k_norm_whole": [K*C], # if config.is_qk_norm_whole
               "attn_norm_after": [D], "mlp_norm_after": [D]}, ...]} # if config.norms says AFTER
  ```                                               # (then no "attn_norm", "mlp_norm") or BOTH

  A layer with `config.is_linear(i)` has these in place of "qkv" to "o". X is all channels of its
  queries, of its keys or of its values, U its heads of values, and Y the convolution's width.

  ```
  {"linear_in": [X + X + X + X + U + Up, D],        # queries, keys, values, gates, b, a
   "conv_q": [X, 1, Y], "conv_k": [X, 1, Y], "conv_v": [X, 1, Y],
   "linear_decay": [U], "linear_step": [U], "linear_norm": [C], "linear_o": [D, X]}
  ```

- The tensors of a checkpoint (`tensor_specs`), each on its own: "q", "k" and "v" in place of "qkv".

"Up" of "linear_in" has rows of zeros up to whole blocks of a rank.

`Ks` counts key/value slots: heads, some of them repeated so that every rank holds what its query
heads read (`kv_layout`). `Vp` is the vocabulary, with rows of zeros up to whole blocks a rank. `Up`
is the number of experts, with rows of zeros up to whole blocks of `PRODUCT_BLOCK`. What products
with padding give is never read.

Each output column of a linear layer has its own sum, so which matrix it stands in cannot change its
bits. A rank's share is its rows of q, then of k, then of v (and of gate, then of up), so joining
needs no communication. Experts are whole on one rank: rank r of tp holds
`[r U / tp, (r + 1) U / tp)`.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from detjax.models.config import ModelConfig, NormPlacement

Params = dict[str, Any]
"""A nested dict and list of `jax.Array`, as the table above says."""


class ParamRole(enum.Enum):
    """What a parameter does. Decides how a random one is drawn, and what may be narrowed.

    Every parameter has the profile's weight dtype, but for what `TensorSpec.is_wide`; a `MATRIX`
    may have 8 bits in drafts.
    """

    TABLE = "table"  # rows are looked up
    MATRIX = "matrix"  # activations are multiplied by it
    GAIN = "gain"
    BIAS = "bias"
    EXPERT = "expert"  # of a mixture of experts: its router, or matrices, one an expert
    PROJECTION = "projection"  # a matrix that few families have
    FILTER = "filter"  # of a convolution: numbers a channel


class Split(enum.Enum):
    """How a parameter is shared by the ranks of "tp"."""

    ROWS = "rows"  # output channels: each rank computes its own heads, channels or tokens
    COLUMNS = "columns"  # input channels: the ranks' results are added or gathered
    WHOLE = "whole"  # every rank holds all of it


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        name: In the tree of `tensor_specs`.
        hf_name: In a Hugging Face checkpoint; in a layer, what follows `model.layers.<i>.`. Of an
            expert, `{}` is its number.
        axes: Its shape, in letters of `_sizes`.
        other_names: Families that name it otherwise, and how.
        is_in: Whether a model has it; of the first tensor of a parameter, `Param.is_in` says so.
    """

    name: str
    hf_name: str
    axes: str
    other_names: tuple[tuple[str, str], ...] = ()
    is_in: Callable[[ModelConfig], bool] = lambda _: True


def _always(_: ModelConfig, __: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter: a line of the table.

    Attributes:
        name: In the tree of `param_specs`.
        role: What it does.
        split: How ranks share it.
        tensors: What it is made of, rank by rank and one after the other. Those that not every
            model has come last.
        is_in: Whether a layer of a model has it.
    """

    name: str
    role: ParamRole
    split: Split
    tensors: tuple[Tensor, ...]
    is_in: Callable[[ModelConfig, int], bool] = _always


def _mixtral(hf_name: str) -> tuple[tuple[str, str], ...]:
    return (("mixtral", f"block_sparse_moe.{hf_name}"),)


def _one(name: str, hf_name: str, axes: str) -> tuple[Tensor, ...]:
    return (Tensor(name, hf_name, axes),)


TABLE, MATRIX, GAIN, BIAS, EXPERT, PROJECTION, FILTER = ParamRole
ROWS, COLUMNS, WHOLE = Split

EXPERT_NDIM = 3
"""Axes of the weights of a layer's experts: one more than a matrix."""

PRODUCT_BLOCK = 64
"""Rows of a router, and of a rank's "linear_in", as stored are whole blocks of this: Hopper's
products compute no part of one."""

EMBED_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"

MODEL = (
    Param("embed", TABLE, COLUMNS, _one("embed", EMBED_NAME, "V D")),
    Param("final_norm", GAIN, WHOLE, _one("final_norm", "model.norm.weight", "D")),
    Param("lm_head", MATRIX, ROWS, _one("lm_head", HEAD_NAME, "V D")),
)
"""What stands once in a model. A tied "lm_head" comes from the tensor of "embed"."""

_QKV = (
    Tensor("q", "self_attn.q_proj.weight", "HC D"),
    Tensor("k", "self_attn.k_proj.weight", "KC D"),
    Tensor("v", "self_attn.v_proj.weight", "KC D"),
    Tensor("attn_gate", "self_attn.gate_proj.weight", "HC D", is_in=lambda c: c.has_output_gate),
)
_QKV_BIAS = (
    Tensor("q_bias", "self_attn.q_proj.bias", "HC"),
    Tensor("k_bias", "self_attn.k_proj.bias", "KC"),
    Tensor("v_bias", "self_attn.v_proj.bias", "KC"),
)
_GATE_UP = (
    Tensor("gate", "mlp.gate_proj.weight", "F D"),
    Tensor("up", "mlp.up_proj.weight", "F D"),
)

_Q_NORM_WHOLE = _one("q_norm_whole", "self_attn.q_norm.weight", "HC")
_K_NORM_WHOLE = _one("k_norm_whole", "self_attn.k_norm.weight", "KC")
_ATTN_NORM = _one("attn_norm", "input_layernorm.weight", "D")
_ATTN_NORM_AFTER = _one("attn_norm_after", "post_self_attn_layernorm.weight", "D")
_MLP_NORM = _one("mlp_norm", "post_attention_layernorm.weight", "D")
_MLP_NORM_AFTER = _one("mlp_norm_after", "post_mlp_layernorm.weight", "D")

_ROUTER_NAMES = (*_mixtral("gate.weight"), ("gpt_oss", "mlp.router.weight"))
_ROUTER = (Tensor("router", "mlp.gate.weight", "U D", _ROUTER_NAMES),)
_ROUTER_CORRECTION = _one("router_correction", "mlp.gate.e_score_correction_bias", "U")
_ROUTER_BIAS = _one("router_bias", "mlp.router.bias", "U")
_EXPERT_GATE_UP = (
    Tensor(
        "expert_gate", "mlp.experts.{}.gate_proj.weight", "XF D", _mixtral("experts.{}.w1.weight")
    ),
    Tensor("expert_up", "mlp.experts.{}.up_proj.weight", "XF D", _mixtral("experts.{}.w3.weight")),
)
_EXPERT_DOWN = (
    Tensor(
        "expert_down", "mlp.experts.{}.down_proj.weight", "D XF", _mixtral("experts.{}.w2.weight")
    ),
)


def _shared(name: str, part: str, axes: str) -> Tensor:
    other = (("glm4_moe", f"mlp.shared_experts.{part}.weight"),)
    return Tensor(name, f"mlp.shared_expert.{part}.weight", axes, other)


_SHARED_GATE_UP = (
    _shared("shared_gate_proj", "gate_proj", "SF D"),
    _shared("shared_up_proj", "up_proj", "SF D"),
)
_SHARED_DOWN = (_shared("shared_down", "down_proj", "D SF"),)
SHARED_TENSORS = tuple(tensor.name for tensor in (*_SHARED_GATE_UP, *_SHARED_DOWN))
"""Matrices of an expert that every row has."""
_SHARED_GATE = _one("shared_gate", "mlp.shared_expert_gate.weight", "SG D")

_LINEAR_IN = (
    Tensor("linear_q", "linear_attn.in_proj_q.weight", "LK D"),
    Tensor("linear_k", "linear_attn.in_proj_k.weight", "LK D"),
    Tensor("linear_v", "linear_attn.in_proj_v.weight", "LV D"),
    Tensor("linear_z", "linear_attn.in_proj_z.weight", "LV D"),
    Tensor("linear_b", "linear_attn.in_proj_b.weight", "LH D"),
    Tensor("linear_a", "linear_attn.in_proj_a.weight", "LH D"),
)
_LINEAR_WIDE = ("linear_decay", "linear_step", "linear_norm")
"""Parameters of linear attention that stay float32: what becomes an exponent, and a gain."""

_SIGMOID_WIDE = ("router", "router_correction")
"""Parameters of a router of sigmoids that stay float32, as transformers keeps them."""

_PLAIN_GAINS = ("linear_norm",)
"""Gains that are read as they are in families whose others are not."""

_EXPERT_GATE_UP_BIAS = _one("expert_gate_up_bias", "mlp.experts.{}.gate_up_proj.bias", "XE")
_EXPERT_DOWN_BIAS = _one("expert_down_bias", "mlp.experts.{}.down_proj.bias", "D")


def _has(name: str) -> Callable[[ModelConfig, int], bool]:
    """Whether a switch of the model is on."""
    return lambda config, _: getattr(config, name)


_HAS_QKV_BIAS, _HAS_O_BIAS = _has("qkv_bias"), _has("o_bias")
_HAS_QK_NORM_WHOLE = _has("is_qk_norm_whole")
_HAS_SINKS = _has("has_sinks")


def _normalises_before(config: ModelConfig, _: int) -> bool:
    return config.norms is not NormPlacement.AFTER


def _normalises_after(config: ModelConfig, _: int) -> bool:
    return config.norms is not NormPlacement.BEFORE


def _has_clamped_experts(config: ModelConfig, layer_idx: int) -> bool:
    return config.has_clamped_experts and config.has_experts(layer_idx)


def _has_sigmoid_router(config: ModelConfig, layer_idx: int) -> bool:
    return config.has_sigmoid_router and config.has_experts(layer_idx)


def _has_shared_expert(config: ModelConfig, layer_idx: int) -> bool:
    return config.has_shared_expert and config.has_experts(layer_idx)


def _has_shared_gate(config: ModelConfig, layer_idx: int) -> bool:
    experts = config.experts
    return experts is not None and experts.has_shared_gate and config.has_experts(layer_idx)


def _is_dense(config: ModelConfig, layer_idx: int) -> bool:
    return not config.has_experts(layer_idx)


def _is_full(config: ModelConfig, layer_idx: int) -> bool:
    return not config.is_linear(layer_idx)


def _normalises_heads(config: ModelConfig, layer_idx: int) -> bool:
    return config.qk_norm and not config.is_linear(layer_idx)


def _linear(name: str, role: ParamRole, split: Split, hf_name: str, axes: str) -> Param:
    """A parameter of linear attention that is one tensor."""
    return Param(
        name, role, split, _one(name, f"linear_attn.{hf_name}", axes), ModelConfig.is_linear
    )


LAYER = (
    Param("attn_norm", GAIN, WHOLE, _ATTN_NORM, _normalises_before),
    Param("qkv", MATRIX, ROWS, _QKV, _is_full),
    Param("qkv_bias", BIAS, ROWS, _QKV_BIAS, _HAS_QKV_BIAS),
    Param("q_norm", GAIN, WHOLE, _one("q_norm", "self_attn.q_norm.weight", "C"), _normalises_heads),
    Param("k_norm", GAIN, WHOLE, _one("k_norm", "self_attn.k_norm.weight", "C"), _normalises_heads),
    Param("q_norm_whole", GAIN, WHOLE, _Q_NORM_WHOLE, _HAS_QK_NORM_WHOLE),
    Param("k_norm_whole", GAIN, WHOLE, _K_NORM_WHOLE, _HAS_QK_NORM_WHOLE),
    Param("o", MATRIX, COLUMNS, _one("o", "self_attn.o_proj.weight", "D HC"), _is_full),
    Param("o_bias", BIAS, WHOLE, _one("o_bias", "self_attn.o_proj.bias", "D"), _HAS_O_BIAS),
    Param("sinks", BIAS, ROWS, _one("sinks", "self_attn.sinks", "H"), _HAS_SINKS),
    Param("linear_in", PROJECTION, ROWS, _LINEAR_IN, ModelConfig.is_linear),
    _linear("conv_q", FILTER, ROWS, "conv1d_q.weight", "LK 1 W"),
    _linear("conv_k", FILTER, ROWS, "conv1d_k.weight", "LK 1 W"),
    _linear("conv_v", FILTER, ROWS, "conv1d_v.weight", "LV 1 W"),
    _linear("linear_decay", BIAS, ROWS, "A_log", "LH"),
    _linear("linear_step", BIAS, ROWS, "dt_bias", "LH"),
    _linear("linear_norm", GAIN, WHOLE, "norm.weight", "LC"),
    _linear("linear_o", PROJECTION, COLUMNS, "out_proj.weight", "D LV"),
    Param("attn_norm_after", GAIN, WHOLE, _ATTN_NORM_AFTER, _normalises_after),
    Param("mlp_norm", GAIN, WHOLE, _MLP_NORM, _normalises_before),
    Param("gate_up", MATRIX, ROWS, _GATE_UP, _is_dense),
    Param("down", MATRIX, COLUMNS, _one("down", "mlp.down_proj.weight", "D F"), _is_dense),
    Param("mlp_norm_after", GAIN, WHOLE, _MLP_NORM_AFTER, _normalises_after),
    Param("router", EXPERT, WHOLE, _ROUTER, ModelConfig.has_experts),
    Param("router_bias", BIAS, WHOLE, _ROUTER_BIAS, _has_clamped_experts),
    Param("router_correction", BIAS, WHOLE, _ROUTER_CORRECTION, _has_sigmoid_router),
    Param("expert_gate_up", EXPERT, ROWS, _EXPERT_GATE_UP, ModelConfig.has_experts),
    Param("expert_gate_up_bias", BIAS, ROWS, _EXPERT_GATE_UP_BIAS, _has_clamped_experts),
    Param("expert_down", EXPERT, ROWS, _EXPERT_DOWN, ModelConfig.has_experts),
    Param("expert_down_bias", BIAS, ROWS, _EXPERT_DOWN_BIAS, _has_clamped_experts),
    Param("shared_gate_up", PROJECTION, ROWS, _SHARED_GATE_UP, _has_shared_expert),
    Param("shared_down", PROJECTION, ROWS, _SHARED_DOWN, _has_shared_expert),
    Param("shared_gate", EXPERT, WHOLE, _SHARED_GATE, _has_shared_gate),
)  # fmt: skip
"""What stands in every layer."""

TENSORS_OF = {param.name: tuple(tensor.name for tensor in param.tensors) for param in LAYER}
"""Names of the tensors that each parameter of a layer is made of, if a model has all of them."""


def tensors_in(tensors: Container[str], param: str) -> list[str]:
    """Those of the tensors of a layer that a parameter is made of, in order."""
    return [name for name in TENSORS_OF[param] if name in tensors]


MATRICES = tuple(param.name for param in LAYER if param.role is MATRIX)
"""Matrices of a layer with attention; "lm_head" is the other one."""

EXPERT_MATRICES = ("expert_gate_up", "expert_down")
"""Matrices of a layer's experts."""

ADAPTED_MATRICES = (
    *MATRICES, "linear_in", "linear_o", "shared_gate_up", "shared_down", "shared_gate",
)  # fmt: skip
"""Matrices of a layer that may have adapters, but for those of experts."""


def _sizes(config: ModelConfig) -> dict[str, int]:
    """The letters of `array_types`; "HC" and "KC" are heads times channels, "XF" an expert's F.

    "XE" are an expert's gates and ups, "SF" the shared expert's F and "SG" its gate. Of linear
    attention "LK" and "LV" are all channels of keys and of values, "LH" heads of values, "LC"
    channels of one, and "W" the convolution's width.
    """
    experts, linear = config.experts, config.linear_attention
    of_experts, of_linear = {}, {}
    if linear is not None:
        of_linear = {
            "LK": linear.num_key_heads * linear.key_dim,
            "LV": linear.num_value_heads * linear.value_dim,
            "LH": linear.num_value_heads,
            "LC": linear.value_dim,
            "W": linear.conv_width,
            "1": 1,
        }
    if experts is not None:
        of_experts = {"U": experts.num_experts, "XF": experts.width, "XE": 2 * experts.width}
        of_experts |= {"SF": experts.shared_width, "SG": 1}
    return {
        **of_experts,
        **of_linear,
        "H": config.num_heads,
        "D": config.hidden_size,
        "V": config.vocab_size,
        "F": config.intermediate_size,
        "C": config.head_dim,
        "HC": config.num_heads * config.head_dim,
        "KC": config.num_kv_heads * config.head_dim,
    }


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRun:
    """Stored rows `[start, start + num_rows)` are the checkpoint's rows from `source` on."""

    start: int
    source: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint, or those of a layer's experts: whence, and how it is stored.

    Attributes:
        hf_name: Name of the tensor in a Hugging Face checkpoint. Two specs share one where
            embeddings are tied. Of experts, `{}` in it is the number of each.
        hf_shape: Shape of that tensor.
        num_experts: Tensors that are stored along a first axis, one an expert; 0 is one tensor,
            without that axis.
        shape: Global shape as stored.
        partition: How `shape` is split over the mesh axes ("dp", "tp").
        runs: Stored rows in order of `start`; rows in no run are zero.
        role: What the parameter does.
        is_wide: Whether it is stored in float32, whatever the profile's weight dtype.
        offset: Added to each value as it is read.
    """

    hf_name: str
    hf_shape: tuple[int, ...]
    num_experts: int
    shape: tuple[int, ...]
    partition: PartitionSpec
    runs: tuple[RowRun, ...]
    role: ParamRole
    is_wide: bool = False
    offset: float = 0.0

    def dtype(self, weight_dtype: DTypeLike) -> jnp.dtype:
        """Of the stored tensor, given the profile's weight dtype."""
        return jnp.dtype(jnp.float32 if self.is_wide else weight_dtype)

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of the checkpoint's tensors that it is made of, in order."""
        if not self.num_experts:
            return (self.hf_name,)
        return tuple(self.hf_name.format(i) for i in range(self.num_experts))

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of all of them together."""
        return (self.num_experts, *self.hf_shape) if self.num_experts else self.hf_shape

    @property
    def is_rearranged(self) -> bool:
        """Whether stored rows differ from the checkpoint's: repeated heads or padding."""
        return self.shape != self.source_shape

    def rows_of_rank(self, tp: int) -> int:
        """Rows that `join` puts after those of other tensors: of a rank, or of an expert."""
        return self.shape[1] if self.num_experts else self.shape[0] // tp

    @property
    def unnamed(self) -> "TensorSpec":
        """The same for tensors that differ in nothing but their name: one program for all."""
        return dataclasses.replace(self, hf_name="")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One parameter as it is stored.

    Attributes:
        tensors: What it is made of: each rank's rows of the first, then of the next.
        shape: Global shape.
        partition: How `shape` is split over the mesh axes ("dp", "tp").
    """

    tensors: tuple[TensorSpec, ...]
    shape: tuple[int, ...]
    partition: PartitionSpec


def possible_tps(config: ModelConfig) -> tuple[int, ...]:
    """Every tp that the dimensions allow: powers of two that divide all that is split."""
    common = math.gcd(*_split_sizes(config).values())
    return tuple(2**i for i in range(common.bit_length()) if common % 2**i == 0)


def _split_sizes(config: ModelConfig) -> dict[str, int]:
    """The sizes that ranks share, by name."""
    sizes = {"num_heads": config.num_heads, "hidden_size": config.hidden_size}
    if config.has_dense_layers:
        sizes["intermediate_size"] = config.intermediate_size
    if config.experts is not None:
        sizes["num_experts"] = config.experts.num_experts
        if config.experts.shared_width:
            sizes["shared_width"] = config.experts.shared_width
    if config.linear_attention is not None:
        sizes["linear_num_key_heads"] = config.linear_attention.num_key_heads
    return sizes


def check_tp(config: ModelConfig, tp: int) -> None:
    """Refuse a tp that the model's dimensions do not allow.

    Raises:
        ValueError: If `tp` is not a power of two, or does not divide a dimension that is split.
            The message names the dimension and the values that are possible.
    """
    sizes = _split_sizes(config)
    possible = f"; this model can be split over tp in {possible_tps(config)}"
    if odd := [f"{name}={size}" for name, size in sizes.items() if size % 2]:
        possible = (
            f"; {' and '.join(odd)} cannot be halved, so this model is not split: give tp=1, and "
            "dp for more devices"
        )
    if tp < 1 or tp & (tp - 1):
        raise ValueError(f"{tp=} must be a power of two{possible}")
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(f"{tp=} must divide {name}={size}{possible}")


def padded_vocab_size(vocab_size: int, *, tp: int, vocab_block: int) -> int:
    """`Vp`: the least multiple of `tp * vocab_block` that holds the vocabulary."""
    rows = tp * vocab_block
    return -(-vocab_size // rows) * rows


def padded_router_size(num_experts: int) -> int:
    """`Up`: the least multiple of `PRODUCT_BLOCK` that holds the experts."""
    return -(-num_experts // PRODUCT_BLOCK) * PRODUCT_BLOCK


def tensor_specs(config: ModelConfig, *, tp: int, vocab_block: int) -> dict[str, Any]:
    """Describe every tensor of a checkpoint, as a tree of `TensorSpec`.

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

    def specs(lines: Iterable[Param], prefix: str) -> dict[str, TensorSpec]:
        return {
            tensor.name: _tensor_spec(config, line, tensor, prefix, tp=tp, vocab_block=vocab_block)
            for line in lines
            for tensor in line.tensors
            if tensor.is_in(config)
        }

    layers = [
        specs((line for line in LAYER if line.is_in(config, i)), f"model.layers.{i}.")
        for i in range(config.num_layers)
    ]
    return {**specs(MODEL, ""), "layers": layers}


def param_specs(config: ModelConfig, *, tp: int, vocab_block: int) -> dict[str, Any]:
    """Describe every parameter, as a tree of `ParamSpec` in the structure of `Params`.

    Arguments and errors are those of `tensor_specs`.
    """

    def joined(tensors: tuple[TensorSpec, ...]) -> ParamSpec:
        first = tensors[0]
        axis = 1 if first.num_experts else 0
        num_rows = sum(tensor.shape[axis] for tensor in tensors)
        return ParamSpec(
            tensors=tensors,
            shape=(*first.shape[:axis], num_rows, *first.shape[axis + 1 :]),
            partition=first.partition,
        )

    tensors = by_param(tensor_specs(config, tp=tp, vocab_block=vocab_block))
    return jax.tree.map(joined, tensors, is_leaf=lambda node: isinstance(node, tuple))


def num_params(config: ModelConfig) -> int:
    """Return how many weights a model has, tied embeddings once, from its configuration alone."""
    specs = param_specs(config, tp=1, vocab_block=1)
    if config.tie_word_embeddings:
        del specs["lm_head"]
    leaves = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, ParamSpec))
    return sum(math.prod(tensor.source_shape) for spec in leaves for tensor in spec.tensors)


def partition_specs(config: ModelConfig, *, tp: int, vocab_block: int) -> dict[str, Any]:
    """The tree of `PartitionSpec` that goes with `param_specs`: `in_specs` of a sharded step."""
    return jax.tree.map(
        lambda spec: spec.partition, param_specs(config, tp=tp, vocab_block=vocab_block)
    )


def _tensor_spec(
    config: ModelConfig, line: Param, tensor: Tensor, prefix: str, *, tp: int, vocab_block: int
) -> TensorSpec:
    """One tensor: key/value heads by slots; vocabulary, router and "linear_in" padded."""
    sizes, axes = _sizes(config), tensor.axes.split()
    hf_shape = tuple(sizes[axis] for axis in axes)
    num_experts = sizes["U"] if "{}" in tensor.hf_name else 0
    stored_shape = (num_experts, *hf_shape) if num_experts else hf_shape
    match line.split:
        case Split.ROWS:
            partition = PartitionSpec("tp", *[None] * (len(stored_shape) - 1))
        case Split.COLUMNS:
            partition = PartitionSpec(None, "tp")
        case Split.WHOLE:
            partition = PartitionSpec()
    num_rows = stored_shape[0]
    runs = (RowRun(start=0, source=0, num_rows=num_rows),)
    if line.split is ROWS and axes[0] == "V":
        num_rows = padded_vocab_size(config.vocab_size, tp=tp, vocab_block=vocab_block)
    if axes[0] in ("U", "SG"):
        num_rows = padded_router_size(num_rows)
    layout, head_dim = kv_layout(config.num_heads, config.num_kv_heads, tp), config.head_dim
    if line.split is ROWS and axes[0] == "KC" and layout.num_slots != config.num_kv_heads:
        num_rows = layout.num_slots * head_dim
        runs = tuple(
            RowRun(start=slot * head_dim, source=head * head_dim, num_rows=head_dim)
            for slot, head in enumerate(layout.heads)
        )
    if tensor is _LINEAR_IN[-1]:
        num_rows, runs = _filled_up(
            sum(sizes[one.axes.split()[0]] for one in _LINEAR_IN), num_rows, tp
        )
    is_tied = tensor.name == "lm_head" and config.ties_table
    hf_name = dict(tensor.other_names).get(config.family, tensor.hf_name)
    return TensorSpec(
        hf_name=EMBED_NAME if is_tied else prefix + hf_name,
        hf_shape=hf_shape,
        num_experts=num_experts,
        shape=(num_rows, *stored_shape[1:]),
        partition=partition,
        runs=runs,
        role=line.role,
        is_wide=_is_wide(config, line),
        offset=config.gain_offset if line.role is GAIN and line.name not in _PLAIN_GAINS else 0.0,
    )


def _filled_up(all_rows: int, num_rows: int, tp: int) -> tuple[int, tuple[RowRun, ...]]:
    """Rows as stored of a parameter's last tensor, and where they come from.

    Each rank's share of `all_rows` ends with zeros up to whole blocks of `PRODUCT_BLOCK`.
    """
    own = num_rows // tp
    stored = own + -(all_rows // tp) % PRODUCT_BLOCK
    if stored == own:
        return num_rows, (RowRun(start=0, source=0, num_rows=num_rows),)
    return tp * stored, tuple(
        RowRun(start=rank * stored, source=rank * own, num_rows=own) for rank in range(tp)
    )


def _is_wide(config: ModelConfig, line: Param) -> bool:
    """Whether a parameter is float32, whatever the weights' dtype.

    So is a gain if what is added to it or multiplied with it would be rounded in bfloat16.
    """
    if line.role is GAIN and line.name not in _LINEAR_WIDE:
        scale = config.logits_scale if line.name == "final_norm" else 1.0
        return config.gain_offset != 0 or math.frexp(scale)[0] != 0.5
    is_of_router = config.has_sigmoid_router and line.name in _SIGMOID_WIDE
    return is_of_router or line.name in _LINEAR_WIDE


def stored_rows[A: (jax.Array, np.ndarray)](tensor: A, spec: TensorSpec) -> A:
    """Arrange a checkpoint's tensor as `spec` stores it: rows repeated, or with zeros behind runs.

    Args:
        tensor: Of the rows of `spec.source_shape`, any dtype. NumPy's stays on the host.
        spec: What to make of it.
    """
    if not spec.is_rearranged:
        return tensor
    xp: Any = np if isinstance(tensor, np.ndarray) else jnp
    parts = []
    starts = [run.start for run in spec.runs]
    for run, end in zip(spec.runs, [*starts[1:], spec.shape[0]], strict=True):
        parts.append(tensor[run.source : run.source + run.num_rows])
        num_zeros = end - run.start - run.num_rows
        if num_zeros:
            parts.append(xp.zeros((num_zeros, *tensor.shape[1:]), tensor.dtype))
    return xp.concatenate(parts)


def checkpoint_rows(stored: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """The inverse of `stored_rows`: drop padding, and all but the first of repeated heads."""
    if not spec.is_rearranged:
        return stored
    first = {run.source: run for run in reversed(spec.runs)}
    runs = [first[source] for source in sorted(first)]
    return np.concatenate([stored[run.start : run.start + run.num_rows] for run in runs])


def join(parts: Sequence[jax.Array], *, tp: int) -> jax.Array:
    """Store tensors as one parameter: each rank's rows of the first, then of the next.

    Of experts, [U, F, D] each: every expert's rows of the first, then of the next.
    """
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim == EXPERT_NDIM:
        return jnp.concatenate(parts, axis=1)
    if tp == 1:
        return jnp.concatenate(parts)
    by_rank = [part.reshape(tp, -1, *part.shape[1:]) for part in parts]
    joined = jnp.concatenate(by_rank, axis=1)
    return joined.reshape(-1, *joined.shape[2:])


def separate(stored: jax.Array, sizes: Sequence[int], *, tp: int) -> list[jax.Array]:
    """The inverse of `join`; `sizes` are `TensorSpec.rows_of_rank` of each tensor."""
    if len(sizes) == 1:
        return [stored]
    bounds = [sum(sizes[:i]) for i in range(1, len(sizes))]
    if stored.ndim == EXPERT_NDIM:
        return list(jnp.split(stored, bounds, axis=1))
    by_rank = stored.reshape(tp, -1, *stored.shape[1:])
    parts = jnp.split(by_rank, bounds, axis=1)
    return [part.reshape(-1, *stored.shape[1:]) for part in parts]


def by_param(tensors: dict[str, Any]) -> dict[str, Any]:
    """From the tree of `tensor_specs` that of `param_specs`: a tuple of tensors at each leaf."""

    def grouped(entries: dict[str, Any], lines: tuple[Param, ...]) -> dict[str, tuple]:
        return {
            line.name: tuple(entries[one.name] for one in line.tensors if one.name in entries)
            for line in lines
            if line.tensors[0].name in entries
        }

    layers = [grouped(layer, LAYER) for layer in tensors["layers"]]
    return {**grouped(tensors, MODEL), "layers": layers}


def by_tensor(parts: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `by_param`."""

    def named(entries: dict[str, Any], lines: tuple[Param, ...]) -> dict[str, Any]:
        return {
            tensor.name: part
            for line in lines
            if line.name in entries
            for tensor, part in zip(line.tensors, entries[line.name], strict=False)
        }

    layers = [named(layer, LAYER) for layer in parts["layers"]]
    return {**named(parts, MODEL), "layers": layers}
