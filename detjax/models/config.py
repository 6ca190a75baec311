# SPDX-License-Identifier: Apache-2.0
"""What a model is: the dimensions and switches that every family is described with."""

import enum
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
