# SPDX-License-Identifier: Apache-2.0
"""Masters as kernels read them: what a checkpoint can hold, read back.

Most are rounded to the profile's weight dtype. Gains that are stored less a number are float32, and
a tied table may be the head times a factor (docs/numerics.md#families). Training and
`weights.serving_params` round alike, so that a saved model has the weights that were trained.
"""

import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32
from detjax.models.config import ModelConfig
from detjax.models.weights.reading import table_factor


def stored_gain(
    gain: Float32[Array, " D"], config: ModelConfig, dtype: jnp.dtype
) -> Activation[Array, " D"]:
    """A gain as a norm reads it.

    # ROUND: to `dtype`; or what a float32 file holds of it, to float32, and the sum with the number
    that the file leaves out, to float32.
    """
    if not config.gain_offset:
        return gain.astype(dtype)
    offset = jnp.float32(config.gain_offset)
    # WHY: a compiler may take the two for nothing.
    return lax.optimization_barrier(gain - offset) + offset


def stored_table(
    table: Float32[Array, "V D"], config: ModelConfig, dtype: jnp.dtype
) -> Activation[Array, "V D"]:
    """The table that tokens are looked up in, of a master that a tied head is rounded from.

    # ROUND: to `dtype`, then the product with the factor to float32 and to `dtype`.
    """
    rounded = table.astype(dtype)
    if (factor := tied_factor(config, dtype)) == 1:
        return rounded
    return (rounded.astype(jnp.float32) * jnp.float32(factor)).astype(dtype)


def tied_factor(config: ModelConfig, dtype: jnp.dtype) -> float:
    """What a tied table is the head times; of an untied one the master is the table."""
    return table_factor(config, dtype) if config.tie_word_embeddings else 1.0
