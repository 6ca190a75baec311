# SPDX-License-Identifier: Apache-2.0
"""The noise specification: which 32 random bits belong to a token.

Threefry-2x32 with 20 rounds (Salmon et al. 2011, SC'11), integers only, so the same on every
backend. `seed` comes from the request's seed and prompt, by blake2b of both
(`SamplingParams.for_prompt`); with `noise="common"` it is the request's own. In two 32-bit words:

    (low, high) = seed mod 2**32, seed div 2**32
    (k0, k1)    = threefry2x32(key=(low, high), counter=(sequence_idx, position))
    bits        = threefry2x32(key=(k0, k1),    counter=(token_id, 0))[0]
    u           = min((float32(bits) + 0.5) * 2**-32, 1 - 2**-24)
    noise       = -log(-log1p(-u))

`position` is the absolute position of the token being chosen. `u` lies in [2**-33, 1 - 2**-24], so
the noise is finite for every input: between -2.81 and 22.88.
"""

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(key: tuple, counter: tuple) -> tuple[jax.Array, jax.Array]:
    """Encrypt a counter of two 32-bit words; broadcasts. uint32 in, uint32 out."""
    k0, k1 = key
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(_PARITY))
    x0, x1 = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def row_key(
    seed_low: jax.Array, seed_high: jax.Array, sequence_idx: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Key of one choice: a function of the seed, the sample and the absolute position."""
    counter = (sequence_idx.astype(jnp.uint32), position.astype(jnp.uint32))
    return threefry2x32((seed_low, seed_high), counter)


def token_bits(key: tuple[jax.Array, jax.Array], token_ids: jax.Array) -> jax.Array:
    """32 random bits of each token under a row's key."""
    ids = token_ids.astype(jnp.uint32)
    return threefry2x32(key, (ids, jnp.zeros_like(ids)))[0]


def uniform(bits: jax.Array) -> jax.Array:
    """Map 32 bits into the open interval (0, 1)."""
    u = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return jnp.minimum(u, jnp.float32(1 - 2.0**-24))


def gumbel(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise of 32 bits; finite for every input."""
    return -jnp.log(-jnp.log1p(-uniform(bits)))
