# SPDX-License-Identifier: Apache-2.0
"""The hash of weights: one for every mesh, another for every bit."""

import dataclasses

import jax
import numpy as np
import pytest

from detjax.models.weights.hashing import hash_weights
from detjax.parallel.mesh import make_mesh
from detjax.testing.dummies import dummy_config, dummy_model


def hash_of(config, params, tp: int) -> str:
    return hash_weights(params, config, make_mesh(1, tp), vocab_block=128)


def params_of(config, tp: int) -> dict:
    return dummy_model(config, tp=tp, seed=3).params


@pytest.mark.parametrize("is_tied", [False, True])
def test_one_hash_for_every_mesh(is_tied):
    config = dataclasses.replace(dummy_config(qkv_bias=True), tie_word_embeddings=is_tied)
    hashes = {hash_of(config, params_of(config, tp), tp) for tp in (1, 2, 4, 8)}
    assert len(hashes) == 1
    assert all(len(found) == 64 for found in hashes)


def test_every_bit_of_every_parameter_counts():
    config = dummy_config(qk_norm=True)
    params = params_of(config, 2)
    params = {name: leaf for name, leaf in params.items() if name != "exchange"}
    leaves, tree = jax.tree.flatten(params)
    found = {hash_of(config, params, 2)}
    for i, leaf in enumerate(leaves):
        words = np.asarray(leaf).view(np.uint16).copy()
        words.reshape(-1)[words.size // 2] ^= 1
        changed = jax.device_put(words.view(leaf.dtype), leaf.sharding)
        others = [*leaves[:i], changed, *leaves[i + 1 :]]
        found.add(hash_of(config, jax.tree.unflatten(tree, others), 2))
    assert len(found) == 1 + len(leaves)


def test_two_copies_of_a_tied_tensor_must_agree():
    config = dataclasses.replace(dummy_config(), tie_word_embeddings=True)
    params = params_of(config, 2)
    words = np.asarray(params["lm_head"]).view(np.uint16).copy()
    words[0, 0] ^= 1
    params["lm_head"] = jax.device_put(
        words.view(params["lm_head"].dtype), params["lm_head"].sharding
    )
    with pytest.raises(ValueError, match=r"two copies of model\.embed_tokens\.weight"):
        hash_of(config, params, 2)
