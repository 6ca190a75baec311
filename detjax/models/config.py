# SPDX-License-Identifier: Apache-2.0
"""What a model is: the dimensions and switches that every family is described with."""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from detjax.pallas_kernels.swiglu.clamp import SwigluClamp


class RopeKind(enum.Enum):
    """How rotary frequencies are scaled, as Hugging Face names it (`rope_type`)."""

    DEFAULT = "default"
    LINEAR = "linear"  # positions divided by a factor
    LLAMA3 = "llama3"  # low frequencies divided by a factor, a ramp in between
    YARN = "yarn"  # NTK-by-parts, with a factor on cos and sin; arXiv:2309.00071
    LONGROPE = "longrope"  # each frequency divided by a factor of its own; arXiv:2402.13753
    NONE = "none"  # all angles are 0: positions are not encoded; a layer, never a file, says so


CacheKind = Literal["kv", "window", "linear"]
"""Parts of the cache: keys and values; those of layers that see a window; of linear attention."""


class NormPlacement(enum.Enum):
    """Where a layer normalises: rows that its operations read, their results, or both."""

    BEFORE = "before"
    AFTER = "after"
    BOTH = "both"


class Gating(enum.Enum):
    """What gates the feed-forward layer."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"  # GELU by tanh


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding, Su et al. 2021, arXiv:2104.09864.

    Fields from `factor` to `short_factors` hold the parameters of a kind, and 0 or nothing where it
    has none.

    Attributes:
        theta: Base of the frequencies.
        kind: How they are scaled.
        factor: Of linear, llama3 and yarn.
        original_max_position: Context before scaling.
        low_freq_factor: Of llama3.
        high_freq_factor: Of llama3.
        beta_fast: Of yarn.
        beta_slow: Of yarn.
        attention_factor: On cosines and sines of channels that are rotated.
        truncate: Of yarn.
        short_factors: Of longrope, one a frequency.
        rotary_dim: Channels of a head that are rotated; 0 rotates all.
        is_interleaved: Whether a checkpoint pairs channels 2c and 2c + 1 rather than halves.
        scale: On the cosines and sines of all channels: scores are `scale**2` times as large.
        growth: At position p they are multiplied by `1 + growth ln(1 + p // original_max_position)`
            too; 0 but for queries.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    rotary_dim: int = 0
    is_interleaved: bool = False
    scale: float = 1.0
    growth: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """The mixtures of experts of a model (Shazeer et al. 2017, arXiv:1701.06538).

    Attributes:
        num_experts: Of each such layer.
        top_k: Experts of a token.
        width: Gated channels of an expert.
        renormalise: Whether the weights of a token's experts add up to 1.
        layers: Per layer: whether its feed-forward layer is such a mixture.
        clamp: Of experts that gate with a clamped SwiGLU; they and their router have biases then.
        shared_width: Gated channels of the expert that every token has beside its own; 0 has none.
        has_shared_gate: Whether its result is multiplied by the sigmoid of a product of the row.
        sigmoid_scale: Factor on the weights, of a router that weighs by sigmoids and adds a
            correction to them for the choice alone; it has float32 weights. 0 weighs by a softmax.
    """

    num_experts: int
    top_k: int
    width: int
    renormalise: bool
    layers: tuple[bool, ...]
    clamp: SwigluClamp | None = None
    shared_width: int = 0
    has_shared_gate: bool = False
    sigmoid_scale: float = 0.0


ROW_ALIGNMENT = 8
"""Numbers of which rows of linear attention are a multiple."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttentionConfig:
    """Gated DeltaNet in place of attention (Yang et al. 2024, arXiv:2412.06464).

    Attributes:
        num_key_heads: Of queries and of keys.
        num_value_heads: A multiple of that; value head h reads key head `h // (values / keys)`.
        key_dim: Channels of a head of queries or keys.
        value_dim: Channels of a head of values.
        conv_width: Tokens that the convolution before it reads.
        layers: Per layer: whether it has this and no attention.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layers: tuple[bool, ...]

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def row_width(self) -> int:
        """Numbers of a key head that the cache keeps of a token: q, k, v, b and a.

        One a head of values that kernels use themselves lies behind them, and zeros that fill 16
        bytes of any dtype, at which a GPU's copies begin.
        """
        width = 2 * self.key_dim + self.group * (self.value_dim + 3)
        return -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. No field says anything of a batch, a mesh or a schedule."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many tokens back a query sees, itself included; None sees all."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    experts: ExpertConfig | None = None
    """Mixtures of experts; None has none, so every feed-forward layer is dense."""
    other_ropes: tuple[RopeConfig, ...] = ()
    """Rotary embeddings of layers that have another than `rope`, or the one of all queries."""
    layer_ropes: tuple[int, ...] = ()
    """Per layer: 0 for `rope`, i for the i-th of `other_ropes`; empty if all keys have `rope`."""
    norms: NormPlacement = NormPlacement.BEFORE
    is_qk_norm_whole: bool = False
    """Whether q and k are normalised over all heads at once; `qk_norm` is false then."""
    gating: Gating = Gating.SWIGLU
    embedding_scale: float = 1.0
    """Factor on the rows of the embedding table, applied as they are read from a file."""
    gain_offset: float = 0.0
    """Added to every gain as it is read from a file; other than 0 keeps gains in float32."""
    logits_scale: float = 1.0
    """Factor on the gain of the last norm, applied as it is read from a file."""
    has_sinks: bool = False
    """Whether each query head has a learned score that takes part in the softmax of its keys."""
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    linear_attention: LinearAttentionConfig | None = None
    """Layers that keep a state in place of keys and values; None has none."""
    has_output_gate: bool = False
    """Whether the results of attention are multiplied by sigmoids of a projection of its rows."""
    num_spare_layers: int = 0
    """Layers that a checkpoint may hold behind the decoder's: they predict further tokens, and
    nobody reads them."""

    @property
    def ties_table(self) -> bool:
        """Whether "embed" and "lm_head" are the same numbers, too: a scaled table is another."""
        return self.tie_word_embeddings and self.embedding_scale == 1

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Rotary embeddings of all layers, in the order of `layer_ropes`."""
        return self.rope, *self.other_ropes

    @property
    def query_rope(self) -> RopeConfig | None:
        """The rotary embedding of queries, of a model where keys have another."""
        return self.other_ropes[0] if self.other_ropes and not self.layer_ropes else None

    def shortened(self, max_len: int | None) -> "ModelConfig":
        """The same model for texts of at most `max_len` tokens; None leaves its context."""
        if max_len is None or max_len >= self.max_position_embeddings:
            return self
        others, of_queries = self.other_ropes, self.query_rope
        if of_queries is not None and max_len <= of_queries.original_max_position:
            others = ()  # queries are not scaled yet
        return dataclasses.replace(self, max_position_embeddings=max_len, other_ropes=others)

    @property
    def has_clamped_experts(self) -> bool:
        """Whether mixtures of experts have biases and a clamped SwiGLU."""
        return self.experts is not None and self.experts.clamp is not None

    @property
    def has_shared_expert(self) -> bool:
        """Whether mixtures have an expert that every token has."""
        return self.experts is not None and self.experts.shared_width > 0

    @property
    def has_sigmoid_router(self) -> bool:
        """Whether mixtures of experts are chosen by sigmoids."""
        return self.experts is not None and self.experts.sigmoid_scale != 0

    def has_experts(self, layer_idx: int) -> bool:
        """Whether a layer's feed-forward layer is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer_idx]

    @property
    def has_dense_layers(self) -> bool:
        """Whether any feed-forward layer is dense, of width `intermediate_size`."""
        return not all(map(self.has_experts, range(self.num_layers)))

    def is_linear(self, layer_idx: int) -> bool:
        """Whether a layer has linear attention."""
        return self.linear_attention is not None and self.linear_attention.layers[layer_idx]

    @property
    def has_local_layers(self) -> bool:
        """Whether some layers read a bounded number of tokens back, and others read all."""
        is_local = [
            window is not None or self.is_linear(i) for i, window in enumerate(self.sliding_windows)
        ]
        return any(is_local) and not all(is_local)

    def local_reach(self, page_len: int) -> int:
        """How many tokens back local layers read at most, the token itself included.

        A layer of linear attention reads the state behind the page before, and that page's last
        rows.
        """
        windows = [window for window in self.sliding_windows if window is not None]
        states = [page_len + 1] if self.linear_attention is not None else []
        return max([*windows, *states], default=0)

    def cache_kind(self, layer_idx: int) -> CacheKind:
        """Which part of the cache a layer has."""
        if self.is_linear(layer_idx):
            return "linear"
        has_window = self.sliding_windows[layer_idx] is not None
        return "window" if has_window and self.has_local_layers else "kv"

    def cache_index(self, layer_idx: int) -> int:
        """Where a layer is among those that have the same part of the cache."""
        kind = self.cache_kind(layer_idx)
        return sum(self.cache_kind(i) == kind for i in range(layer_idx))

    def num_cached_layers(self, kind: CacheKind) -> int:
        """How many layers have a part of the cache."""
        return sum(self.cache_kind(i) == kind for i in range(self.num_layers))

    def with_layers(self, layers: Sequence[int]) -> "ModelConfig":
        """The same model of some of its layers, or of one several times."""
        experts = self.experts
        if experts is not None:
            chosen = tuple(experts.layers[i] for i in layers)
            experts = dataclasses.replace(experts, layers=chosen)
        linear = self.linear_attention
        if linear is not None:
            chosen = tuple(linear.layers[i] for i in layers)
            linear = dataclasses.replace(linear, layers=chosen)
        return dataclasses.replace(
            self,
            num_layers=len(layers),
            sliding_windows=tuple(self.sliding_windows[i] for i in layers),
            layer_ropes=tuple(self.layer_ropes[i] for i in layers) if self.layer_ropes else (),
            experts=experts,
            linear_attention=linear,
        )

    def facts(self) -> dict[str, Any]:
        """The configuration as JSON has it, without fields that a family rarely needs.

        A field with a default is left out where it holds it, so that a configuration that older
        releases could describe has the facts that they wrote.
        """
        return _facts(self, always=_FIRST_MODEL_FIELDS)


_FIRST_MODEL_FIELDS = frozenset({"experts"})
_FIRST_ROPE_FIELDS = frozenset(
    {"kind", "factor", "original_max_position", "low_freq_factor", "high_freq_factor"}
    | {"beta_fast", "beta_slow", "attention_factor", "truncate"}
)
"""Fields with defaults that were written from the first release on."""


def _facts(value: Any, *, always: frozenset[str] = frozenset()) -> Any:
    """A dataclass as a dict, less its defaults; lists for tuples and values for enums."""
    if isinstance(value, RopeConfig):
        always = _FIRST_ROPE_FIELDS
    if dataclasses.is_dataclass(value):
        return {
            field.name: _facts(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name in always or getattr(value, field.name) != field.default
        }
    if isinstance(value, tuple):
        return [_facts(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value
