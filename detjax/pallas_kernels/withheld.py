# SPDX-License-Identifier: Apache-2.0
"""What a backend has kernels for, and refuses until a run has shown the bits."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Withheld:
    """Why each is refused and what to do instead; empty where it is not.

    Attributes:
        linear_ranks: Linear attention where ranks share a layer.
        shared_expert_ranks: Mixtures with a shared expert, where ranks share a layer.
        sigmoid_routers: Mixtures whose router takes sigmoids, and has float32 weights.
        head_ranks: Heads that draft where ranks share the model's layers.
        expert_gradients: A canonical backward pass of mixtures of experts.
        shared_training: Ranks of a trainer that share layers.
        local_pages: A page table of their own for local layers.
    """

    linear_ranks: str = ""
    shared_expert_ranks: str = ""
    sigmoid_routers: str = ""
    head_ranks: str = ""
    expert_gradients: str = ""
    shared_training: str = ""
    local_pages: str = ""
