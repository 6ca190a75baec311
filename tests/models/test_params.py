# SPDX-License-Identifier: Apache-2.0
"""The description of the parameters fits every mesh, and its rows come from the right place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from detjax.models.config import ModelConfig, RopeConfig
from detjax.models.params import (
    MATRICES,
    TensorSpec,
    by_param,
    by_tensor,
    check_tp,
    checkpoint_rows,
    join,
    kv_layout,
    padded_vocab_size,
    param_specs,
    partition_specs,
    possible_tps,
    separate,
    stored_rows,
    tensor_specs,
)
from detjax.testing import assert_bitwise_equal
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config

CONFIG = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=32,
    num_layers=2,
    num_heads=24,
    num_kv_heads=3,
    head_dim=4,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    qkv_bias=True,
    o_bias=True,
    qk_norm=True,
    sliding_windows=(None, None),
    bos_token_id=None,
    eos_token_ids=(),
)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 24])
def test_every_rank_holds_the_heads_its_queries_read(num_kv_heads, tp):
    num_heads = 24
    layout = kv_layout(num_heads, num_kv_heads, tp)
    assert len(layout.heads) == layout.num_slots
    assert layout.num_slots % tp == 0
    assert layout.num_slots * layout.group == num_heads
    slots_a_rank, queries_a_rank = layout.num_slots // tp, num_heads // tp
    for head in range(num_heads):
        slot = head // layout.group
        assert layout.heads[slot] == head * num_kv_heads // num_heads
        assert slot // slots_a_rank == head // queries_a_rank, "on the rank of its query"


def test_heads_are_repeated_only_where_they_do_not_line_up():
    assert kv_layout(32, 8, 8).heads == tuple(range(8))
    assert kv_layout(32, 8, 1).group == 4
    assert kv_layout(32, 4, 8).heads == (0, 0, 1, 1, 2, 2, 3, 3)
    assert kv_layout(24, 3, 2).heads == (0, 0, 1, 1, 2, 2), "12 queries a rank, 8 a head"
    assert kv_layout(24, 1, 8).heads == (0,) * 8
    assert kv_layout(7, 1, 1).num_slots == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 3, 1), "num_heads=8 must be a multiple of num_kv_heads=3"),
        ((12, 3, 8), "tp=8 must divide num_heads=12"),
    ],
)
def test_impossible_head_layouts_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        kv_layout(*sizes)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_shard_divides_evenly(tp):
    specs = jax.tree.leaves(tensor_specs(CONFIG, tp=tp, vocab_block=16))
    for spec in specs:
        assert isinstance(spec, TensorSpec)
        for size, axis in zip(spec.shape, spec.partition, strict=False):
            assert axis is None or (axis == "tp" and size % tp == 0), spec


def test_shapes_and_partitions_are_those_of_the_table():
    specs = tensor_specs(CONFIG, tp=4, vocab_block=16)
    layer = specs["layers"][1]
    rows, columns, whole = PartitionSpec("tp", None), PartitionSpec(None, "tp"), PartitionSpec()
    expected = {
        "attn_norm": ((32,), whole),
        "q": ((96, 32), rows),
        "k": ((48, 32), rows),  # gcd(24 / 4, 24 / 3) = 2 queries a slot: 12 slots of 4 channels
        "v": ((48, 32), rows),
        "o": ((32, 96), columns),
        "mlp_norm": ((32,), whole),
        "gate": ((48, 32), rows),
        "up": ((48, 32), rows),
        "down": ((32, 48), columns),
        "q_bias": ((96,), PartitionSpec("tp")),
        "k_bias": ((48,), PartitionSpec("tp")),
        "v_bias": ((48,), PartitionSpec("tp")),
        "o_bias": ((32,), whole),
        "q_norm": ((4,), whole),
        "k_norm": ((4,), whole),
    }
    assert {key: (s.shape, s.partition) for key, s in layer.items()} == expected
    assert layer["k"].hf_shape == (12, 32)
    assert layer["k"].hf_name == "model.layers.1.self_attn.k_proj.weight"
    assert (specs["embed"].shape, specs["embed"].partition) == ((100, 32), columns)
    assert (specs["lm_head"].shape, specs["lm_head"].partition) == ((128, 32), rows)
    assert specs["lm_head"].hf_name == "lm_head.weight"
    assert (specs["final_norm"].shape, specs["final_norm"].partition) == ((32,), whole)
    assert len(specs["layers"]) == 2


def test_switches_decide_which_parameters_there_are():
    plain = dataclasses.replace(CONFIG, qkv_bias=False, o_bias=False, qk_norm=False)
    layer = tensor_specs(plain, tp=1, vocab_block=16)["layers"][0]
    assert set(layer) == {"attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"}
    qwen2 = dataclasses.replace(plain, qkv_bias=True)
    added = set(tensor_specs(qwen2, tp=1, vocab_block=16)["layers"][0]) - set(layer)
    assert added == {"q_bias", "k_bias", "v_bias"}


def test_tied_head_comes_from_the_embeddings():
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    specs = tensor_specs(tied, tp=2, vocab_block=16)
    assert specs["lm_head"].hf_name == specs["embed"].hf_name == "model.embed_tokens.weight"
    assert specs["lm_head"].shape == (128, 32)
    assert specs["embed"].shape == (100, 32)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_parameters_are_the_tensors_joined(tp):
    tensors = tensor_specs(CONFIG, tp=tp, vocab_block=16)
    specs = param_specs(CONFIG, tp=tp, vocab_block=16)
    layer, of_layer = specs["layers"][0], tensors["layers"][0]
    assert layer["qkv"].tensors == tuple(of_layer[name] for name in "qkv")
    assert layer["qkv"].shape == (sum(of_layer[name].shape[0] for name in "qkv"), 32)
    assert layer["gate_up"].shape == (96, 32)
    assert layer["qkv_bias"].partition == PartitionSpec("tp")
    partitions = partition_specs(CONFIG, tp=tp, vocab_block=16)
    assert jax.tree.structure(specs) == jax.tree.structure(partitions)
    assert [s.partition for s in jax.tree.leaves(specs)] == jax.tree.leaves(partitions)
    grouped = by_param(tensors)
    assert jax.tree.structure(grouped, is_leaf=lambda x: isinstance(x, tuple)) == (
        jax.tree.structure(specs)
    )
    assert by_tensor(grouped) == tensors


def test_a_rank_holds_its_own_rows_of_each_tensor():
    q, k, v = (np.arange(n)[:, None] + 100 * i for i, n in enumerate((8, 4, 4)))
    joined = join([jnp.asarray(part) for part in (q, k, v)], tp=2)
    expected = [q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]]
    assert (np.asarray(joined) == np.concatenate(expected)).all()
    for part, whole in zip(separate(joined, (4, 2, 2), tp=2), (q, k, v), strict=True):
        assert (np.asarray(part) == whole).all()


def test_matrices_are_those_that_may_be_narrowed():
    assert set(MATRICES) == {"qkv", "o", "gate_up", "down"}


@pytest.mark.parametrize(
    ("vocab_size", "tp", "block", "expected"),
    [(128256, 1, 128, 128256), (128256, 4, 128, 128512), (1, 8, 128, 1024), (1024, 8, 128, 1024)],
)
def test_padded_vocabulary_is_whole_blocks_on_every_rank(vocab_size, tp, block, expected):
    assert padded_vocab_size(vocab_size, tp=tp, vocab_block=block) == expected


@pytest.mark.parametrize("dtype", quick_and_slow(["bfloat16"], ["float32"]))
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8])
def test_rows_come_from_the_right_head_and_go_back(num_kv_heads, tp, dtype):
    config = dataclasses.replace(CONFIG, num_kv_heads=num_kv_heads)
    specs = tensor_specs(config, tp=tp, vocab_block=16)
    layout = kv_layout(24, num_kv_heads, tp)
    for spec in (specs["layers"][0]["k"], specs["layers"][0]["v_bias"], specs["lm_head"]):
        size = int(np.prod(spec.hf_shape))
        tensor = jnp.arange(1, size + 1, dtype=jnp.int32).astype(dtype).reshape(spec.hf_shape)
        stored = np.asarray(stored_rows(tensor, spec))
        assert stored.shape == spec.shape
        if spec is specs["lm_head"]:
            assert (stored[:100] == np.asarray(tensor)).all()
            assert not stored[100:].any()
        else:
            heads = np.asarray(tensor).reshape(num_kv_heads, 4, -1)
            assert (stored.reshape(layout.num_slots, 4, -1) == heads[list(layout.heads)]).all()
        back = checkpoint_rows(jnp.asarray(stored), spec)
        assert np.asarray(back).tobytes() == np.asarray(tensor).tobytes()


@pytest.mark.parametrize(("num_experts", "num_rows"), [(8, 64), (60, 64), (64, 64), (128, 128)])
def test_a_router_is_stored_in_whole_blocks_and_goes_back(num_experts, num_rows):
    config = dummy_config(experts=(num_experts, 2))
    spec = tensor_specs(config, tp=1, vocab_block=16)["layers"][1]["router"]
    assert (spec.hf_shape, spec.shape) == ((num_experts, 64), (num_rows, 64))
    tensor = jnp.arange(1, num_experts * 64 + 1, dtype=jnp.float32).reshape(num_experts, 64)
    stored = stored_rows(tensor, spec)
    assert not np.asarray(stored)[num_experts:].any()
    assert_bitwise_equal(stored[:num_experts], tensor, claim="the experts' rows come first")
    assert_bitwise_equal(checkpoint_rows(stored, spec), tensor, claim="and go back")


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (3, r"tp=3 must be a power of two; this model can be split over tp in \(1, 2, 4, 8\)"),
        (0, "tp=0 must be a power of two"),
        (-2, "tp=-2 must be a power of two"),
        (16, r"tp=16 must divide num_heads=24; this model can .* \(1, 2, 4, 8\)"),
    ],
)
def test_impossible_tp_is_refused_with_those_that_are_possible(tp, message):
    with pytest.raises(ValueError, match=message):
        tensor_specs(CONFIG, tp=tp, vocab_block=16)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 36}, r"tp=8 must divide hidden_size=36; .* \(1, 2, 4\)"),
        ({"intermediate_size": 50}, r"tp=8 must divide intermediate_size=50; .* \(1, 2\)"),
        (
            {"num_heads": 7, "num_kv_heads": 1},
            "tp=8 must divide num_heads=7; num_heads=7 cannot be halved, so this model is not "
            "split: give tp=1, and dp for more devices",
        ),
    ],
)
def test_tp_must_divide_every_dimension_that_is_split(keys, message):
    config = dataclasses.replace(CONFIG, **keys)
    with pytest.raises(ValueError, match=message):
        check_tp(config, 8)
    for tp in possible_tps(config):
        check_tp(config, tp)


def test_vocab_block_must_be_positive():
    with pytest.raises(ValueError, match="vocab_block=0 must be at least 1"):
        tensor_specs(CONFIG, tp=1, vocab_block=0)
