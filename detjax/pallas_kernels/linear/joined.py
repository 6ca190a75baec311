# SPDX-License-Identifier: Apache-2.0
"""Two matrices of the same rows that one product multiplies, each where it lies."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedMatrix:
    """Weights (out, in) whose rows lie in two arrays.

    Attributes:
        first: [N, K], of the first outputs.
        second: [O, K], of the outputs behind them.
    """

    first: Any
    second: Any

    @property
    def shape(self) -> tuple[int, int]:
        """All outputs, and K."""
        return self.first.shape[0] + self.second.shape[0], self.first.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """Of both."""
        return self.first.dtype
