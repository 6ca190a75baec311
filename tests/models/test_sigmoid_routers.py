# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 and Qwen3-Next: what their configurations say, and which tensors are read and left."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detjax.models import abstract
from detjax.models.abstract import why_unsupported
from detjax.models.config import ModelConfig
from detjax.models.decoder import check_mesh
from detjax.models.hf_config import config_from_hf, load_config
from detjax.models.params import num_params, param_specs
from detjax.models.weights.load import load_params
from detjax.models.weights.named import load_named_params
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.training.weights import why_not_trained

from .published_configs import LOADED

HF = Path(__file__).parents[1] / "golden" / "hf"
PUBLISHED = {
    "GLM-4.5-Air": 106.852251264,
    "GLM-4.5": 352.797829024,
    "Qwen3-Next-80B-A3B-Instruct": 79.674391296,
}
"""Parameters in billions."""
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "vocab_block": 64}


def config(case: str, **changes) -> ModelConfig:
    values = json.loads((HF / case / "config.json").read_text())
    return config_from_hf({**values, **changes})


def assert_same_params(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bitwise_equal(np.asarray(a), np.asarray(b), claim="the same weights")


# ------------------------------------------------------------------------------ published sizes


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_their_parameters_and_a_plan(name):
    made = config_from_hf(LOADED[name][0])
    assert num_params(made) == round(PUBLISHED[name] * 1e9)
    assert why_unsupported(made, NumericsProfile(), Backend.PORTABLE, 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_kernels_take_published_sizes(name):
    made, profile = config_from_hf(LOADED[name][0]), NumericsProfile()
    assert why_unsupported(made, profile, Backend.REFERENCE, 1) is None
    for tp in (1, 2):
        assert abstract._why_not_traced(made, profile, Backend.SM90, tp) is None


def test_ranks_that_a_published_size_does_not_allow_are_named():
    """A dense layer of GLM-4.5-Air has four leaves, whose quarter no tile of Hopper has."""
    air, profile = config_from_hf(LOADED["GLM-4.5-Air"][0]), NumericsProfile()
    with pytest.raises(ValueError, match=r"tp=8 does not divide the 4 leaves of down_proj"):
        check_mesh(air, profile, 8)
    reason = abstract._why_not_traced(air, profile, Backend.SM90, 4)
    assert reason is not None and "N to be a multiple of 64, not 5472" in reason


# --------------------------------------------------------------------------------------- GLM-4.5


def test_glm_has_dense_layers_first_and_a_router_in_float32():
    made = config("glm4_moe")
    experts = made.experts
    assert experts is not None and experts.layers == (False, True, True)
    assert (experts.sigmoid_scale, experts.renormalise, experts.shared_width) == (2.5, True, 48)
    assert not experts.has_shared_gate and made.qk_norm and made.qkv_bias and not made.o_bias
    assert made.rope.rotary_dim == 16 and made.num_spare_layers == 1
    dense, mixed, _ = param_specs(made, tp=1, vocab_block=64)["layers"]
    assert "router_correction" not in dense and "down" in dense
    for name in ("router", "router_correction"):
        assert mixed[name].tensors[0].dtype(jnp.bfloat16) == jnp.float32
    assert mixed["expert_down"].tensors[0].dtype(jnp.bfloat16) == jnp.bfloat16
    assert config("glm4_moe", n_shared_experts=2).experts.shared_width == 96
    assert not config("glm4_moe", use_qk_norm=False).qk_norm
    assert config("glm4_moe", first_k_dense_replace=0).experts.layers == (True,) * 3
    assert config("glm4_moe", first_k_dense_replace=3).experts is None
    assert why_not_trained(made, Backend.SM90) is None


def test_softmax_routers_keep_the_weights_dtype():
    spec = param_specs(config("qwen3_next"), tp=1, vocab_block=64)["layers"][1]["router"]
    assert spec.tensors[0].dtype(jnp.bfloat16) == jnp.bfloat16


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("glm4_moe", {"n_group": 8}, "n_group=8 is not supported for 'glm4_moe'"),
        ("glm4_moe", {"topk_group": 4}, "topk_group=4 is not supported"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0 must be an integer of at least"),
        ("glm4_moe", {"n_routed_experts": None}, "n_routed_experts=None must be an integer"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "must be at most n_routed_experts=4"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor=0 must be a finite"),
        ("glm4_moe", {"routed_scaling_factor": "2"}, "routed_scaling_factor='2' must be a finite"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must be an integer"),
        ("glm4_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob='yes' must be true or false"),
        ("glm4_moe", {"use_qk_norm": 1}, "use_qk_norm=1 must be true or false"),
        ("glm4_moe", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1 must be"),
        ("glm4_moe", {"num_nextn_predict_layers": 2**20}, "must be at most 8192"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax' is not a key"),
        ("glm4_moe", {"q_lora_rank": 8}, "q_lora_rank=8 is not a key that detjax knows"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("qwen3_next", {"mlp_only_layers": [2]}, "must be a list of layers from 0 to 1"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "must be a multiple of"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_key_and_value(case, changes, message):
    with pytest.raises(ValueError, match=message):
        config(case, **changes)


def test_layers_that_predict_further_tokens_are_left_where_they_are(tmp_path):
    """As a published folder holds them, behind the decoder's; other layers are refused."""
    tensors = load_file(HF / "glm4_moe" / "model.safetensors")
    behind = {
        name.replace("layers.2.", "layers.3."): value
        for name, value in tensors.items()
        if "layers.2." in name
    }
    behind["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    made, mesh = load_config(HF / "glm4_moe"), make_mesh(1, 2)
    (tmp_path / "config.json").write_text((HF / "glm4_moe" / "config.json").read_text())
    save_file(tensors | behind, tmp_path / "model.safetensors")
    want = load_params(HF / "glm4_moe", made, mesh, **OPTIONS)
    assert_same_params(load_params(tmp_path, made, mesh, **OPTIONS), want)
    named = load_named_params([*tensors.items(), *behind.items()], made, mesh, **OPTIONS)
    assert_same_params(named, want)
    none = config("glm4_moe", num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"holds 'model.layers.3.*no place for"):
        load_params(tmp_path, none, mesh, **OPTIONS)
    with pytest.raises(ValueError, match=r"'model.layers.3.* is not a tensor of this model"):
        load_named_params([*tensors.items(), *behind.items()], none, mesh, **OPTIONS)
    further = {"model.layers.4.eh_proj.weight": behind["model.layers.3.eh_proj.weight"]}
    save_file(tensors | further, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds 'model.layers.4.*no place for"):
        load_params(tmp_path, made, mesh, **OPTIONS)


def test_a_routers_weights_are_those_of_the_checkpoint():
    """float32 that bfloat16 would round, with zeros up to a whole block."""
    stored = load_file(HF / "glm4_moe" / "model.safetensors")
    loaded = load_params(HF / "glm4_moe", load_config(HF / "glm4_moe"), make_mesh(1, 1), **OPTIONS)[
        "layers"
    ][1]
    for name, key in (("router", "weight"), ("router_correction", "e_score_correction_bias")):
        theirs = stored[f"model.layers.1.mlp.gate.{key}"]
        assert_bitwise_equal(np.asarray(loaded[name])[:4], theirs, claim=name)
        assert not np.asarray(loaded[name])[4:].any()
        assert (theirs != np.asarray(jnp.asarray(theirs, jnp.bfloat16), np.float32)).all()


# ------------------------------------------------------------------------------------ Qwen3-Next


def separate(joined: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Parts of a tensor that has rows of each for two heads in turn."""
    by_head = joined.reshape(2, sum(sizes), -1)
    parts = np.split(by_head, np.cumsum(sizes)[:-1], axis=1)
    return [part.reshape(-1, joined.shape[1]) for part in parts]


@pytest.mark.parametrize("tp", [1, 2])
def test_projections_joined_by_heads_are_cut_for_each_rank(tp, tmp_path):
    """Two heads of keys of 16 channels, four of values of 32. Read from a file, and as named."""
    made, mesh = load_config(HF / "qwen3_next"), make_mesh(1, tp)
    stored = load_file(HF / "qwen3_next" / "model.safetensors")
    prefix = "model.layers.0.linear_attn.in_proj_"
    parts = separate(stored[f"{prefix}qkvz.weight"], [16, 16, 64, 64])
    parts += separate(stored[f"{prefix}ba.weight"], [2, 2])
    assert [len(part) for part in parts] == [32, 32, 128, 128, 4, 4]
    loaded = load_params(HF / "qwen3_next", made, mesh, **OPTIONS)
    by_rank = np.asarray(loaded["layers"][0]["linear_in"]).reshape(tp, -1, 64)
    for rank in range(tp):
        share = [part.reshape(tp, -1, 64)[rank] for part in parts]
        own = np.concatenate(share)
        assert_bitwise_equal(by_rank[rank][: len(own)], own, claim=f"rank {rank} of {tp}")
        assert not by_rank[rank][len(own) :].any()
    spare = {"mtp.fc.weight": np.zeros((2, 2), np.float32)}
    named = load_named_params([*stored.items(), *spare.items()], made, mesh, **OPTIONS)
    assert_same_params(named, loaded)
    in_order = np.concatenate(parts[:4])
    assert (in_order != stored[f"{prefix}qkvz.weight"]).any(), "the rows change places"
    short = dict(stored)
    short[f"{prefix}qkvz.weight"] = short[f"{prefix}qkvz.weight"][:-1]
    (tmp_path / "config.json").write_text((HF / "qwen3_next" / "config.json").read_text())
    save_file(short, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"qkvz.*config.json makes it 320 rows"):
        load_params(tmp_path, made, mesh, **OPTIONS)
