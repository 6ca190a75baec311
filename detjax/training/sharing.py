# SPDX-License-Identifier: Apache-2.0
"""Layers that ranks of a trainer share as those of a server do: heads and channels."""

from detjax.models.config import ModelConfig
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.training.gradients import Backward


def why_layers_not_shared(
    config: ModelConfig, profile: NumericsProfile, tp: int, backward: Backward
) -> str | None:
    """Why ranks cannot share the layers of a model in training, or None if they can."""
    if tp == 1:
        return None
    if backward is Backward.XLA:
        return f"{tp=} needs the canonical backward pass: XLA's has no order over ranks"
    if config.experts is not None:
        return f"{tp=} must be 1: ranks do not share mixtures of experts in training yet"
    if config.is_qk_norm_whole:
        return f"{tp=} must be 1: the norm of all heads has no backward pass over ranks"
    if config.num_kv_heads % tp:
        return f"{tp=} must divide num_kv_heads={config.num_kv_heads} of a model that is trained"
    widths = {
        "num_heads * head_dim": config.num_heads * config.head_dim,
        "num_kv_heads * head_dim": config.num_kv_heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
    }
    for name, width in widths.items():
        leaves = tree_reduction(width, profile).num_leaves
        if leaves % tp:
            return f"{tp=} must divide the {leaves} leaves of {name}={width}"
    return None
