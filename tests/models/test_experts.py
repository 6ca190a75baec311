# SPDX-License-Identifier: Apache-2.0
"""Weights of mixtures of experts: from every source, onto every mesh, and what is refused."""

import dataclasses
import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from detjax.models.abstract import why_unsupported
from detjax.models.config import ModelConfig
from detjax.models.decoder import check_mesh
from detjax.models.fast import quantise_params
from detjax.models.params import check_tp, param_specs, possible_tps, tensor_specs
from detjax.models.weights.hashing import hash_weights
from detjax.models.weights.load import load_params
from detjax.models.weights.named import load_named_params
from detjax.models.weights.random_weights import random_params
from detjax.models.weights.write import write_weights
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config

BLOCK = 16
QWEN = dummy_config(experts=(8, 3), num_layers=2, vocab_size=96, intermediate_size=128)
MIXTRAL = dataclasses.replace(
    QWEN, family="mixtral", experts=dataclasses.replace(QWEN.experts, layers=(True, True))
)
CONFIGS = {"qwen3_moe": dataclasses.replace(QWEN, family="qwen3_moe"), "mixtral": MIXTRAL}


@cache
def checkpoint(family: str) -> dict[str, np.ndarray]:
    """Every tensor by its Hugging Face name, with zeros of both signs."""
    rng, tensors = np.random.default_rng(1), {}
    for spec in jax.tree.leaves(tensor_specs(CONFIGS[family], tp=1, vocab_block=1)):
        for name in spec.hf_names:
            values = rng.standard_normal(spec.hf_shape)
            values.flat[:2] = 0.0, -0.0
            tensors[name] = values.astype(jnp.bfloat16)
    return tensors


def write_sharded(folder, tensors: dict[str, np.ndarray], num_files: int = 3) -> None:
    """Tensors dealt out over files, so that a layer's experts lie in all of them."""
    file_of = {name: f"part-{i % num_files}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(file_of.values()):
        save_file({n: tensors[n] for n in tensors if file_of[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def expected(config: ModelConfig, family: str) -> dict[str, np.ndarray]:
    """A layer's experts as they should lie: gate, then up, expert after expert."""
    tensors, e = checkpoint(family), config.experts
    if family == "mixtral":
        block, (gate, up, down) = "block_sparse_moe", ("w1", "w3", "w2")
    else:
        block, (gate, up, down) = "mlp", ("gate_proj", "up_proj", "down_proj")
    start = f"model.layers.1.{block}"

    def stacked(name):
        return np.stack(
            [tensors[f"{start}.experts.{i}.{name}.weight"] for i in range(e.num_experts)]
        )

    router = tensors[f"{start}.gate.weight"]
    return {
        "router": np.concatenate([router, np.zeros((64 - 8, 64), router.dtype)]),
        "expert_gate_up": np.concatenate([stacked(gate), stacked(up)], axis=1),
        "expert_down": stacked(down),
    }


def assert_same(params, other, claim: str) -> None:
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(other), strict=True
    ):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), path
        assert_bitwise_equal(a, b, claim=f"{claim}: {jax.tree_util.keystr(path)}")


@pytest.mark.parametrize("family", CONFIGS)
def test_names_of_tensors_are_those_of_the_family(family):
    names = set(checkpoint(family))
    dense = {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"}
    own = {
        "qwen3_moe": {
            "model.layers.1.mlp.gate.weight",
            "model.layers.1.mlp.experts.7.up_proj.weight",
        },
        "mixtral": {
            "model.layers.0.block_sparse_moe.gate.weight",
            "model.layers.1.block_sparse_moe.experts.0.w3.weight",
        },
    }  # fmt: skip
    assert own[family] <= names
    assert dense <= names if family == "qwen3_moe" else not dense & names
    assert len(names) == 3 + 2 * 6 + {"qwen3_moe": 3 + 25, "mixtral": 50}[family]


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("qwen3_moe", 4),
        pytest.param("mixtral", 1, marks=pytest.mark.slow),
        pytest.param("mixtral", 8, marks=pytest.mark.slow),
    ],
)
def test_every_source_gives_the_same_weights_in_place(family, tp, tmp_path):
    """Sharded files, tensors in any order, and a folder saved from another mesh."""
    config, tensors, mesh = CONFIGS[family], checkpoint(family), make_mesh(1, tp)
    sizes = {"dtype": jnp.bfloat16, "vocab_block": BLOCK}
    write_sharded(tmp_path, tensors)
    loaded = load_params(tmp_path, config, mesh, **sizes)
    for name, want in expected(config, family).items():
        assert_bitwise_equal(loaded["layers"][1][name], want, claim=name)
    share = loaded["layers"][1]["expert_down"].addressable_shards[0].data.shape
    assert share == (8 // tp, 64, 48)
    shuffled = sorted(tensors.items(), key=lambda item: item[0][::-1])
    assert_same(load_named_params(shuffled, config, mesh, **sizes), loaded, "named tensors")
    digest = hash_weights(loaded, config, mesh, vocab_block=BLOCK)
    other = make_mesh(1, 2)
    elsewhere = load_params(tmp_path, config, other, **sizes)
    assert hash_weights(elsewhere, config, other, vocab_block=BLOCK) == digest
    write_weights(tmp_path / "saved", elsewhere, config, other, vocab_block=BLOCK, source=tmp_path)
    assert_same(load_params(tmp_path / "saved", config, mesh, **sizes), loaded, "a saved folder")
    changed = dict(tensors)
    name = next(n for n in sorted(tensors) if ".experts.5." in n)
    changed[name] = -changed[name]
    moved = load_named_params(changed.items(), config, mesh, **sizes)
    assert hash_weights(moved, config, mesh, vocab_block=BLOCK) != digest


def test_a_missing_expert_is_named(tmp_path):
    tensors = dict(checkpoint("qwen3_moe"))
    name = "model.layers.1.mlp.experts.6.down_proj.weight"
    del tensors[name]
    sizes = {"dtype": jnp.bfloat16, "vocab_block": BLOCK}
    write_sharded(tmp_path, tensors)
    for load in (
        lambda: load_params(tmp_path, CONFIGS["qwen3_moe"], make_mesh(1, 1), **sizes),
        lambda: load_named_params(tensors.items(), CONFIGS["qwen3_moe"], make_mesh(1, 1), **sizes),
    ):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            load()


@pytest.mark.slow
def test_random_weights_are_the_same_on_every_mesh():
    sizes = {"seed": 3, "dtype": jnp.bfloat16, "vocab_block": BLOCK}
    one, four = (random_params(QWEN, make_mesh(1, tp), **sizes) for tp in (1, 4))
    layer = one["layers"][1]
    for name in ("router", "expert_gate_up", "expert_down"):
        assert_bitwise_equal(four["layers"][1][name], layer[name], claim=name)
    experts = np.asarray(layer["expert_down"], np.float32)
    assert len({expert.tobytes() for expert in experts}) == 8
    assert 0.8 < experts.std() * 48**0.5 < 1.2


def test_tp_must_divide_the_experts():
    six = dataclasses.replace(QWEN, experts=dataclasses.replace(QWEN.experts, num_experts=6))
    assert possible_tps(six) == (1, 2) and possible_tps(QWEN) == (1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"tp=4 must divide num_experts=6; .* \(1, 2\)"):
        check_tp(six, 4)


def test_the_width_of_dense_layers_counts_only_where_there_are_some():
    odd = dataclasses.replace(MIXTRAL, intermediate_size=7)
    check_mesh(odd, NumericsProfile(), 8)
    assert possible_tps(odd) == (1, 2, 4, 8)
    assert "gate_up" not in param_specs(odd, tp=8, vocab_block=1)["layers"][0]
    mixed = dataclasses.replace(QWEN, intermediate_size=7)
    with pytest.raises(ValueError, match="must divide intermediate_size=7"):
        check_tp(mixed, 2)


def test_some_layers_of_a_model():
    """Which are sparse goes with them."""
    config = dataclasses.replace(QWEN, sliding_windows=(None, 8)).with_layers([1, 0, 1])
    assert (config.num_layers, config.sliding_windows) == (3, (8, None, 8))
    assert config.experts is not None and config.experts.layers == (True, False, True)


TRAINED = dummy_config(  # tools/train_tiny.py --size moe
    num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=256, experts=(8, 2), expert_width=384
)
EXCHANGED = dummy_config(  # tests/parallel/test_exchange_sm90.py
    num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512, intermediate_size=1536,
    vocab_size=1024, experts=(16, 4), expert_width=256,
)  # fmt: skip
MIXTRAL_8X7B = dummy_config(
    num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, intermediate_size=14336,
    vocab_size=32000, experts=(8, 2), expert_width=14336,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "tps"),
    quick_and_slow(
        [(TRAINED, (1,))], [(TRAINED, (2,)), (EXCHANGED, (1, 2, 4)), (MIXTRAL_8X7B, (1, 2, 4, 8))]
    ),
)
def test_hopper_takes_any_number_of_experts(config, tps):
    for num_experts in {config.experts.num_experts, 24}:
        config = dataclasses.replace(
            config, experts=dataclasses.replace(config.experts, num_experts=num_experts)
        )
        for tp in tps:
            assert why_unsupported(config, NumericsProfile(), Backend.SM90, tp) is None


def test_hopper_refuses_widths_and_numbers_that_no_kernel_has():
    take = partial(why_unsupported, profile=NumericsProfile(), backend=Backend.SM90, tp=1)
    narrow = dataclasses.replace(TRAINED.experts, width=96)
    assert "not 256 and 96; use portable" in take(dataclasses.replace(TRAINED, experts=narrow))
    many = dataclasses.replace(TRAINED.experts, num_experts=1088)
    assert "not 2 of 1088; use portable" in take(dataclasses.replace(TRAINED, experts=many))


def test_8_bit_drafts_are_refused():
    layer = {"router": jnp.zeros((8, 64))}
    with pytest.raises(ValueError, match="8-bit drafts of a mixture of experts are not supported"):
        quantise_params({"layers": [layer]}, jnp.dtype(jnp.int8))
