# SPDX-License-Identifier: Apache-2.0
"""What a backend has kernels for, and refuses until a run has shown the bits."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Withheld:
    """Why each is refused and what to do instead; empty where it is not.

    Attributes:
        float8_cache: Keys and values of 8 bits.
        later_gradients: Training of GeGLU, gains in float32, scaled tables, shared experts,
            routers of sigmoids, sinks, soft caps and experts with biases.
        head_experts: Heads that draft with mixtures of experts.
        packed_mtp: MTP heads of models whose weights lie on the devices as they were quantised.
    """

    float8_cache: str = ""
    later_gradients: str = ""
    head_experts: str = ""
    packed_mtp: str = ""
