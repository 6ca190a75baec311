# SPDX-License-Identifier: Apache-2.0
"""Masters as kernels read them: what a checkpoint can hold, read back.

Most are rounded to the profile's weight dtype. Gains that are stored less a number are float32, and
a tied table may be the head times a factor (docs/numerics.md#families). Training and
`weights.serving_params` round alike, so that a saved model has the weights that were trained.
"""

from typing import Any

import jax
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


def by_use(params: dict[str, Any], config: ModelConfig, dtype: jnp.dtype) -> dict[str, Any]:
    """Masters by use: of a tied table "lm_head", and "embed", the table that tokens look up.

    Each use has a sum over tokens of its own. Parameters that are by use already stay.
    """
    if not config.tie_word_embeddings or "lm_head" in params:
        return params
    master = params["embed"]
    if tied_factor(config, dtype) == 1:
        return params | {"lm_head": master}

    @jax.custom_vjp
    def scaled(master):
        return stored_table(master, config, dtype).astype(jnp.float32)

    scaled.defvjp(
        lambda master: (scaled(master), None), lambda _, own: (of_table(own, config, dtype),)
    )
    return params | {"lm_head": master, "embed": scaled(master)}


def of_uses(
    of_embed: Float32[Array, "V D"],
    of_head: Float32[Array, "V D"],
    *,
    config: ModelConfig,
    dtype: jnp.dtype,
) -> Float32[Array, "V D"]:
    """The gradient of a tied master, of those of its two uses, each a whole sum over tokens."""
    return of_table(of_embed, config, dtype) + of_head


def of_table(
    own: Float32[Array, "V D"], config: ModelConfig, dtype: jnp.dtype
) -> Float32[Array, "V D"]:
    """The cotangent of a master, of that of the table that it is times the factor.

    # ROUND: the product, before anything is added to it.
    """
    if (factor := tied_factor(config, dtype)) == 1:
        return own
    return lax.optimization_barrier(own * jnp.float32(factor))


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
