# SPDX-License-Identifier: Apache-2.0
"""The hash of weights: one for every mesh, another for every bit."""

import dataclasses
import hashlib

import blake3 as library
import jax
import numpy as np
import pytest

from detjax.models.weights import blake3, device_hashing, hashing
from detjax.models.weights.blake3 import UNIT_BYTES, UNIT_CHUNKS
from detjax.models.weights.device_hashing import hash_units
from detjax.models.weights.hashing import hash_weights
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model


def hash_of(config, params, tp: int) -> str:
    return hash_weights(params, config, make_mesh(1, tp), vocab_block=128)


def params_of(config, tp: int) -> dict:
    return dummy_model(config, tp=tp, seed=3).params


@pytest.mark.parametrize("is_tied", quick_and_slow([True], [False]))
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


def nodes_of(data: np.ndarray, firsts: np.ndarray, num_chunks: int) -> np.ndarray:
    """Chaining values of subtrees of `num_chunks` chunks, by NumPy: uint32 [subtrees, 8]."""
    words = np.ascontiguousarray(data).view(np.uint8).reshape(-1).view("<u4").reshape(-1, 16, 16)
    counters = (firsts[:, None] * num_chunks + np.arange(num_chunks)).reshape(-1)

    def like(value: int) -> np.ndarray:
        return np.full(len(words), value, np.uint32)

    nodes = [like(value) for value in blake3.IV]
    for i in range(16):
        flags = {0: blake3.CHUNK_START, 15: blake3.CHUNK_END}.get(i, 0)
        taken = list(words[:, i].T)
        nodes = blake3.compress(nodes, taken, counters.astype(np.uint32), like(flags), like)
    found = np.stack(nodes, axis=1)
    while len(found) > len(firsts):
        pairs = found.reshape(-1, 16)
        found = blake3._parents(pairs, np.full(len(pairs), blake3.PARENT, np.uint32))
    return found


@pytest.mark.parametrize("num_chunks", [2, 3, 5, 8, 13, 300])
def test_roots_are_those_of_the_library(num_chunks):
    data = np.random.default_rng(num_chunks).integers(0, 256, num_chunks * 1024, np.uint8)
    leaves = nodes_of(data, np.arange(num_chunks), 1)
    two = nodes_of(data[:2048], np.arange(2), 1)
    want = [library.blake3(part.tobytes()).digest() for part in (data, data[:2048])]
    assert blake3.roots([leaves, two]) == want
    if num_chunks > 2:  # the probe depends on order
        assert blake3.roots([leaves[::-1]]) != want[:1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernel_hashes_units_in_windows_of_any_width(dtype):
    rng = np.random.default_rng(1)
    num_units = 3
    bits = rng.integers(0, 256, num_units * UNIT_BYTES, np.uint8)
    array = jax.numpy.asarray(bits.view(dtype).reshape(num_units * 32, -1))
    firsts = np.arange(num_units)
    got = hash_units(array, firsts, window_units=2, interpret=True)
    assert np.array_equal(got, nodes_of(bits, firsts, UNIT_CHUNKS))
    assert blake3.roots([got]) == [library.blake3(bits.tobytes()).digest()]


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [None, (4, 2)])
def test_a_gpu_hashes_what_the_host_does(monkeypatch, experts):
    """Several windows, the last of them shorter, and each tensor of a joined matrix."""
    config = dummy_config(
        num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, intermediate_size=14336,
        num_layers=1, vocab_size=32064, experts=experts, expert_width=768,
    )  # fmt: skip
    params = dummy_model(config, backend=Backend.SM90).params
    taken = []
    places = hashing._places

    def seen(spec, array, *, tp):
        taken.append(places(spec, array, tp=tp) is not None)
        return places(spec, array, tp=tp)

    monkeypatch.setattr(hashing, "_places", seen)
    found = hash_of(config, params, 1)
    assert sum(taken) == 6  # the norms are below a unit
    monkeypatch.setattr(hashing, "_places", lambda *_, **__: None)
    assert found == hash_of(config, params, 1)


WHOLE_UNITS = {"head_dim": 64, "num_kv_heads": 8, "hidden_size": 2048, "intermediate_size": 512}
"""Matrices of two units of 256 KiB or more, so that a GPU hashes them."""


@pytest.mark.parametrize("experts", [None, (2, 1)])
@pytest.mark.parametrize("vocab_size", [256, 192])
def test_hashes_of_units_are_those_of_the_host(monkeypatch, experts, vocab_size):
    """192 rows are padded to 256: the hash leaves out the unit of zeros."""
    config = dummy_config(
        **WHOLE_UNITS, num_layers=1, vocab_size=vocab_size, experts=experts, expert_width=512
    )
    params = params_of(config, 1)
    want = hash_of(config, params, 1)
    arrays = []

    def by_numpy(array, firsts):
        arrays.append(array.shape)
        return nodes_of(np.asarray(array), firsts, UNIT_CHUNKS)

    monkeypatch.setattr(hashing, "_is_on_hopper", lambda _: True)
    monkeypatch.setattr(device_hashing, "hash_units", by_numpy)
    assert hash_of(config, params, 1) == want
    assert len(arrays) == 6


def test_the_hash_is_what_the_page_says():
    """Sha256 over a line for each tensor, with the BLAKE3 of its bytes."""
    config = dummy_config(num_layers=1, num_kv_heads=8)
    params = params_of(config, 1)
    layer, (q, k, v) = params["layers"][0], np.split(np.asarray(params["layers"][0]["qkv"]), 3)
    gate, up = np.split(np.asarray(layer["gate_up"]), 2)
    of_layer = {
        "input_layernorm": layer["attn_norm"], "post_attention_layernorm": layer["mlp_norm"],
        "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
        "self_attn.o_proj": layer["o"], "mlp.gate_proj": gate, "mlp.up_proj": up,
        "mlp.down_proj": layer["down"],
    }  # fmt: skip
    tensors = {f"model.layers.0.{name}.weight": array for name, array in of_layer.items()} | {
        "model.embed_tokens.weight": params["embed"],
        "model.norm.weight": params["final_norm"],
        "lm_head.weight": params["lm_head"][: config.vocab_size],
    }
    lines = ""
    for name, array in sorted(tensors.items()):
        shape = ",".join(map(str, array.shape))
        digest = library.blake3(np.asarray(array).tobytes()).hexdigest()
        lines += f"{name} bfloat16 {shape} {digest}\n"
    assert hash_of(config, params, 1) == hashlib.sha256(lines.encode()).hexdigest()
