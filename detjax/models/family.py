# SPDX-License-Identifier: Apache-2.0
"""What one family of models is, as data: `registry.py` lists them, `hf_config.py` reads them."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class BiasRule(enum.Enum):
    """Whether a family's linear layers have a bias."""

    NEVER = "never"
    ALWAYS = "always"
    AS_CONFIGURED = "attention_bias"  # the key of this name says


class WindowRule(enum.Enum):
    """Which layers of a family look back a limited number of tokens."""

    NEVER = "never"
    EVERY_LAYER = "every layer"  # `sliding_window`, unless null, holds for all layers
    BY_LAYER = "by layer"  # `use_sliding_window`, then `layer_types` or `max_window_layers`


ROUTER_TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""Keys of mixtures of experts that matter in training alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertKeys:
    """Which keys describe a family's mixtures of experts.

    Attributes:
        num_experts: Names of the key of the number of experts, the published one first.
        width: Key of an expert's gated channels.
        renormalise: Key of whether a token's weights add up to 1; None where they always do.
        layers: Whether `decoder_sparse_step` and `mlp_only_layers` leave layers dense.
    """

    num_experts: tuple[str, ...]
    width: str
    renormalise: str | None
    layers: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family of models, as data.

    Attributes:
        name: Hugging Face's `model_type`.
        architectures: Values of `architectures` that this family computes.
        defaults: Keys this family maps, each with transformers' value where it is absent.
        qkv_bias: Whether q, k and v have biases.
        o_bias: Whether the output projection of attention has one.
        qk_norm: Whether each head of q and k is normalised.
        windows: Which layers have a sliding window.
        checked: Further keys of this family, each with the only values that are supported.
        inert: Further keys of this family that cannot change a logit, `checked` being as it is.
        experts: The keys of its mixtures of experts; None has none.
    """

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    qkv_bias: BiasRule
    o_bias: BiasRule
    qk_norm: bool
    windows: WindowRule
    checked: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    experts: ExpertKeys | None = None
