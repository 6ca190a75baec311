# SPDX-License-Identifier: Apache-2.0
"""What a model is: the dimensions and switches that every family is described with."""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass


class RopeKind(enum.Enum):
    """How rotary frequencies are scaled, as Hugging Face names it (`rope_type`)."""

    DEFAULT = "default"
    LINEAR = "linear"  # positions divided by a factor
    LLAMA3 = "llama3"  # low frequencies divided by a factor, a ramp in between
    YARN = "yarn"  # NTK-by-parts, with a factor on cos and sin; arXiv:2309.00071


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding, Su et al. 2021, arXiv:2104.09864.

    Fields beyond `theta` and `kind` hold the parameters of that kind and 0 where it has none.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """The mixtures of experts of a model (Shazeer et al. 2017, arXiv:1701.06538).

    Attributes:
        num_experts: Of each such layer.
        top_k: Experts of a token.
        width: Gated channels of an expert.
        renormalise: Whether the weights of a token's experts add up to 1.
        layers: Per layer: whether its feed-forward layer is such a mixture.
    """

    num_experts: int
    top_k: int
    width: int
    renormalise: bool
    layers: tuple[bool, ...]


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

    def has_experts(self, layer_idx: int) -> bool:
        """Whether a layer's feed-forward layer is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer_idx]

    @property
    def has_dense_layers(self) -> bool:
        """Whether any feed-forward layer is dense, of width `intermediate_size`."""
        return not all(map(self.has_experts, range(self.num_layers)))

    def with_layers(self, layers: Sequence[int]) -> "ModelConfig":
        """The same model of some of its layers, or of one several times."""
        experts = self.experts
        if experts is not None:
            chosen = tuple(experts.layers[i] for i in layers)
            experts = dataclasses.replace(experts, layers=chosen)
        return dataclasses.replace(
            self,
            num_layers=len(layers),
            sliding_windows=tuple(self.sliding_windows[i] for i in layers),
            experts=experts,
        )
