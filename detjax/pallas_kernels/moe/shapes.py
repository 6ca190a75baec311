# SPDX-License-Identifier: Apache-2.0
"""Named mixtures of experts of real models, for tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeShape:
    """The experts of one layer."""

    name: str
    hidden_size: int
    width: int
    num_experts: int
    top_k: int
    renormalise: bool


SHAPES = (
    MoeShape(
        name="qwen3_30b_a3b",
        hidden_size=2048,
        width=768,
        num_experts=128,
        top_k=8,
        renormalise=True,
    ),
    MoeShape(
        name="mixtral_8x7b",
        hidden_size=4096,
        width=14336,
        num_experts=8,
        top_k=2,
        renormalise=True,
    ),
)
