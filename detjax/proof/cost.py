# SPDX-License-Identifier: Apache-2.0
"""How long an audit takes on a CPU, told before it begins."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from detjax.models.config import ModelConfig
from detjax.models.params import num_params
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear

_ROWS = 64
_OUTPUTS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What an audit computes.

    Attributes:
        num_tokens: Prompts and answers, with the padding of steps.
        num_products: Multiplications of matrices and attention.
        products_per_s: What this machine was measured to do.
    """

    num_tokens: int
    num_products: int
    products_per_s: float

    @property
    def seconds(self) -> float:
        """Without loading and compiling."""
        return self.num_products / self.products_per_s

    def __str__(self) -> str:
        """Return a sentence for people."""
        minutes = self.seconds / 60
        told = f"{minutes:.0f} min" if minutes >= 2 else f"{max(1, self.seconds):.0f} s"
        return (
            f"takes about {told} after compiling: {self.num_tokens:,} tokens with padding, "
            f"{self.num_products / 1e9:,.1f} billion products, {self.products_per_s / 1e9:.1f} "
            "billion a second on this machine"
        )


def products_of_token(config: ModelConfig) -> int:
    """Return the products of one token with the weights that it meets.

    Rows of an embedding are looked up, and a mixture multiplies by the chosen experts alone.
    """
    total = num_params(config)
    if not config.tie_word_embeddings:
        total -= config.vocab_size * config.hidden_size
    if config.experts is not None:
        idle = config.experts.num_experts - config.experts.top_k
        layers = sum(map(config.has_experts, range(config.num_layers)))
        total -= layers * idle * 3 * config.hidden_size * config.experts.width
    return total


def estimate_audit(
    config: ModelConfig,
    lengths: Sequence[tuple[int, int]],
    *,
    chunk: int,
    window: int,
    backend: Backend,
) -> Estimate:
    """Estimate an audit, and measure this machine for some tenths of a second.

    Args:
        config: Of the model.
        lengths: Tokens of each prompt, and of its answer as far as it is checked.
        chunk: Tokens of a step of prefill.
        window: Tokens of a window.
        backend: Whose products are measured.
    """
    padded = [
        -(-prompt // chunk) * chunk + -(-(answer - 1) // window) * window
        for prompt, answer in lengths
    ]
    per_pair = config.num_layers * config.num_heads * config.head_dim
    attended = sum(per_pair * num_tokens**2 for num_tokens in padded)  # half of them, twice
    return Estimate(
        num_tokens=sum(padded),
        num_products=products_of_token(config) * sum(padded) + attended,
        products_per_s=_products_per_s(config.hidden_size, backend),
    )


def _products_per_s(width: int, backend: Backend) -> float:
    """Products a second of rows with a matrix."""
    with jax.default_device(jax.devices(backend.platform)[0]):
        x, w = (
            jax.random.normal(jax.random.key(i), (rows, width), jnp.bfloat16)
            for i, rows in enumerate((_ROWS, _OUTPUTS))
        )

        def multiply() -> float:
            begin_s = time.perf_counter()
            linear(x, w, out_dtype=jnp.dtype(jnp.float32), backend=backend).block_until_ready()
            return time.perf_counter() - begin_s

        multiply()  # compiles
        return _ROWS * _OUTPUTS * width / min(multiply() for _ in range(3))
