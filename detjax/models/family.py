# SPDX-License-Identifier: Apache-2.0
"""What one family of models is, as data: `registry.py` lists them, `hf_config.py` reads them."""

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from detjax.models.config import Gating, NormPlacement


class BiasRule(enum.Enum):
    """Whether a family's linear layers have a bias."""

    NEVER = "never"
    ALWAYS = "always"
    AS_CONFIGURED = "attention_bias"  # the key of this name says
    OUT_AS_CONFIGURED = "attention_out_bias"


class WindowRule(enum.Enum):
    """Which layers of a family look back a limited number of tokens."""

    NEVER = "never"
    EVERY_LAYER = "every layer"  # `sliding_window`, unless null, holds for all layers
    BY_LAYER = "by layer"  # `use_sliding_window`, then `layer_types` or `max_window_layers`
    BY_PATTERN = "by pattern"  # `layer_types`, or all but each n-th (`window_step`)


class RopeRule(enum.Enum):
    """Which rotary embedding a layer of a family has."""

    ONE = "one"
    SOME_LAYERS = "some layers"  # where `no_rope_layers` has 1, or by `no_rope_layer_interval`
    WINDOWS_ALONE = "windows alone"  # layers without a window have none, if `sliding_window` is
    BY_WINDOW = "by window"  # layers with a window have one of their own, without scaling


class ExpertStack(enum.Enum):
    """How one tensor holds a layer's experts, where it does."""

    IN_TURN = "in turn"  # [U, inputs, outputs]; gates and ups in turn
    HALVES = "halves"  # [U, outputs, inputs]; gates, then ups


ROUTER_TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""Keys of mixtures of experts that matter in training alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertKeys:
    """Which keys describe a family's mixtures of experts.

    Attributes:
        num_experts: Names of the key of the number of experts, the published one first.
        top_k: Likewise of a token's experts.
        copies: Further names of each of the two, which transformers does not read: a file may
            repeat the number there.
        width: Key of an expert's gated channels.
        renormalise: Key of whether a token's weights add up to 1; None where they always do.
        layers: Whether `decoder_sparse_step` and `mlp_only_layers` leave layers dense.
        clamp: Keys of `alpha` and `limit` of a `SwigluClamp`; None where experts gate as others.
        shared_width: Key of the gated channels of an expert that every token has, which has a gate;
            None where there is none.
        num_shared: Key of how many times an expert's width such an expert has, without a gate; None
            where there is none.
        first_dense: Key of how many layers at the start are dense; None of those of none.
        sigmoid_scale: Key of the factor on weights that are sigmoids; None weighs by a softmax.
    """

    num_experts: tuple[str, ...]
    width: str
    renormalise: str | None
    layers: bool
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    clamp: tuple[str, str] | None = None
    shared_width: str | None = None
    num_shared: str | None = None
    first_dense: str | None = None
    sigmoid_scale: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayout:
    """How checkpoints of a family hold a head of multi-token prediction.

    One layer like the model's that attend reads a matrix times a hidden state and the embedding of
    the token behind it, each normalised, side by side (DeepSeek-AI 2024, arXiv:2412.19437).

    Attributes:
        count: Key of how many such heads there are.
        prefix: How names of its tensors begin; "{}" stands for the number of the model's layers.
        layer: How names of its layer's begin behind that.
        names: Of tensors beside it, less ".weight", by the names of `DraftHead.params`: gains of
            the norms of the embedding, of the hidden state and before the output matrix, and the
            matrix `join`.
        is_hidden_first: Whether that reads the hidden state, then the embedding.
        hands_normalised: As `HeadConfig` has it.
        checked: Further keys of it, each with the only values that are supported.
        copies: Tensors that a checkpoint may hold for it once more, and which of the model's each
            must equal.
    """

    count: str
    prefix: str
    layer: str
    names: Mapping[str, str]
    is_hidden_first: bool
    hands_normalised: bool
    checked: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)

    def behind(self, num_layers: int) -> "MtpLayout":
        """The same of a model with so many layers."""
        return dataclasses.replace(self, prefix=self.prefix.format(num_layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapper:
    """A published model that has a family's decoder among other parts, such as one for images.

    Attributes:
        architecture: Its `architectures`.
        model_type: Its `model_type`.
        section: Key under which the decoder's own configuration stands.
        inert: Further keys, of the other parts.
        names: How names of the decoder's tensors begin, and what stands there without the wrapper.
    """

    architecture: str
    model_type: str
    section: str
    inert: frozenset[str]
    names: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family of models, as data.

    Attributes:
        name: Hugging Face's `model_type`.
        architectures: Values of `architectures` that this family computes.
        defaults: Keys this family maps, each with transformers' value where it is absent.
        qkv_bias: Whether q, k and v have biases.
        o_bias: Whether the output projection of attention has one.
        qk_norm: Whether each head of q and k is normalised; a family that maps `use_qk_norm` is
            told by it.
        windows: Which layers have a sliding window.
        window_step: By pattern, each so-many-th layer has none; 0 of a family whose file says it
            with `sliding_window_pattern`.
        checked: Further keys of this family, each with the only values that are supported.
        unread: Keys that other families map and transformers does not read for this one, each with
            the only values that say what is computed.
        inert: Further keys of this family that cannot change a logit, `checked` being as it is.
        experts: The keys of its mixtures of experts; None has none.
        norms: Where a layer normalises.
        is_qk_norm_whole: Whether q and k are normalised over all heads at once.
        gating: What gates the feed-forward layer.
        gain_offset: Added to every gain.
        scales_embedding: Whether embeddings are multiplied by the root of their width, rounded to
            the weights' dtype.
        ropes: Which rotary embedding a layer has.
        default_rope: `rope_parameters` where the file has none.
        partial_rotary: Share of a head's channels that are rotated where `partial_rotary_factor` is
            absent; None rotates all, whatever the file says.
        is_interleaved: Whether rotary embedding pairs channels 2c and 2c + 1.
        tensor_names: Of a layer's tensors: detjax's name, less ".weight", and the checkpoint's.
        fused: Projections that a checkpoint stores as one, by its name, less ".weight".
        fused_by_head: Likewise of linear attention: for each head of keys, its rows of each part.
        has_sinks: Whether each query head has a score that takes part in its softmax.
        stacked: How one tensor holds a layer's experts; None where each has its own. A checkpoint
            may have either.
        has_linear_attention: Whether `layer_types`, or all but each `full_attention_interval`-th,
            are layers of linear attention.
        has_output_gate: Whether `q_proj` holds a gate behind the queries of each head.
        scales_queries: Whether queries are scaled by position, with `llama_4_scaling_beta` of the
            rotary parameters.
        wrapper: A published model whose text decoder is of this family; None has none.
        spare_tensors: How names of tensors begin that a checkpoint may hold and no text needs.
        spare_layers: Names of the key of how many layers a checkpoint may hold behind those of the
            decoder, which predict further tokens and no text needs; empty where there are none.
        rope_inert: Keys of rotary parameters that cannot change a logit of a text.
        mtp: How its checkpoints hold a head that predicts further tokens; None has none.
    """

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    qkv_bias: BiasRule = BiasRule.NEVER
    o_bias: BiasRule = BiasRule.NEVER
    qk_norm: bool = False
    windows: WindowRule = WindowRule.NEVER
    window_step: int = 0
    checked: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unread: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    experts: ExpertKeys | None = None
    norms: NormPlacement = NormPlacement.BEFORE
    is_qk_norm_whole: bool = False
    gating: Gating = Gating.SWIGLU
    gain_offset: float = 0.0
    scales_embedding: bool = False
    ropes: RopeRule = RopeRule.ONE
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary: float | None = None
    is_interleaved: bool = False
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_by_head: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    has_sinks: bool = False
    stacked: ExpertStack | None = None
    has_linear_attention: bool = False
    has_output_gate: bool = False
    scales_queries: bool = False
    wrapper: Wrapper | None = None
    spare_tensors: tuple[str, ...] = ()
    spare_layers: tuple[str, ...] = ()
    rope_inert: frozenset[str] = frozenset()
    mtp: MtpLayout | None = None
