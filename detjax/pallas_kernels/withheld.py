# SPDX-License-Identifier: Apache-2.0
"""What a backend has kernels for, and refuses until a run has shown the bits."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Withheld:
    """Why each is refused and what to do instead; empty where it is not.

    Attributes:
        later_gradients: Training with sinks, soft caps, and biases and clamps of experts.
    """

    later_gradients: str = ""
