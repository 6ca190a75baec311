# SPDX-License-Identifier: Apache-2.0
"""From masters to any mesh and back: no bit is lost."""

import dataclasses
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.config import LinearAttentionConfig
from detjax.models.loading import load_model
from detjax.models.quantization.quantize import RECIPES, quantize_folder
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel import dispatch
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, count_different_bits
from detjax.testing.dummies import answers, dummy_config, dummy_model
from detjax.training.weights import master_params, serving_params

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
CONFIGS = {
    "gqa": dummy_config(num_layers=1, qkv_bias=True),
    "odd_kv_and_vocab": dummy_config(
        num_layers=1, num_heads=24, num_kv_heads=3, qk_norm=True, vocab_size=300
    ),
    "hybrid": dataclasses.replace(
        dummy_config(),
        has_output_gate=True,
        linear_attention=LinearAttentionConfig(
            num_key_heads=8,
            num_value_heads=16,
            key_dim=16,
            value_dim=32,
            conv_width=4,
            layers=(True, False),
        ),
    ),
}


@pytest.mark.parametrize("tp", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_masters_become_the_weights_a_mesh_would_load(name, tp):
    model = dummy_model(CONFIGS[name], tp=tp)
    found = serving_params(master_params(dummy_model(CONFIGS[name])), model)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(model.params), strict=True
    ):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), jax.tree_util.keystr(path)
        assert_bitwise_equal(a, b, claim=f"{jax.tree_util.keystr(path)} at tp {tp}")


@pytest.mark.parametrize(
    "case", ["gemma3", "granite", "glm4_moe", "gpt_oss", "qwen3_5", "qwen3_next"]
)
def test_masters_of_families_become_the_weights_that_were_read(case):
    """A tied table with a factor, gains of 1 + w, float32 routers, biases of padded routers.

    And parts of linear attention, padded and float32.
    """
    model = load_model(
        str(GOLDEN / case),
        profile=NumericsProfile(), mesh=make_mesh(1, 1), backend=Backend.PORTABLE, max_len=64,
    )  # fmt: skip
    masters = master_params(model)
    found = serving_params(masters, model)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found),
        jax.tree.leaves(model.own_weights()),
        strict=True,
    ):
        assert_bitwise_equal(a, b, claim=jax.tree_util.keystr(path))
    rows = len(found["embed"])
    is_scaled = case in ("gemma3", "granite")
    assert (count_different_bits(found["embed"], found["lm_head"][:rows]) > 0) == is_scaled or (
        not model.config.tie_word_embeddings
    )


@pytest.mark.parametrize("case", ["gemma3", "qwen3_5"])
def test_trained_gains_and_tables_are_saved_as_they_serve(case, tmp_path):
    """A gain far below 1 is what a float32 file holds of it; so the folder is read as it was.

    Decays, steps and gains of linear attention are the masters, not rounded.
    """
    model = load_model(
        str(GOLDEN / case),
        profile=NumericsProfile(), mesh=make_mesh(1, 1), backend=Backend.PORTABLE, max_len=64,
    )  # fmt: skip
    masters = master_params(model)
    moved = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(x.size), x.shape), masters)
    served = serving_params(moved, model)
    gain, small = (np.asarray(tree["final_norm"]) for tree in (moved, served))
    assert (np.abs(gain) < 0.5).any() and count_different_bits(gain, small)
    for name in ("linear_decay", "linear_step", "linear_norm") if case == "qwen3_5" else ():
        master, own = (np.asarray(tree["layers"][0][name]) for tree in (moved, served))
        assert_bitwise_equal(own, master, claim=name)
        assert count_different_bits(master.astype(jnp.bfloat16).astype(np.float32), master)
    model.replace_weights(served)
    model.save(tmp_path / "saved")
    again = load_model(
        str(tmp_path / "saved"),
        profile=NumericsProfile(), mesh=make_mesh(1, 1), backend=Backend.PORTABLE, max_len=64,
    )  # fmt: skip
    for a, b in zip(jax.tree.leaves(again.own_weights()), jax.tree.leaves(served), strict=True):
        assert_bitwise_equal(a, b, claim="weights of the saved model")


def test_masters_round_once_to_nearest_even():
    model = dummy_model(CONFIGS["gqa"])
    masters = master_params(model)
    masters["final_norm"] = (
        masters["final_norm"]
        .at[:3]
        .set(np.asarray([1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0], np.float32))
    )
    rounded = np.asarray(serving_params(masters, model)["final_norm"][:3], np.float32)
    assert_bitwise_equal(rounded, np.asarray([1.0, 1 + 2.0**-6, -0.0], np.float32), claim="ties")


@pytest.mark.slow
def test_an_engine_takes_masters_in_place():
    requests = [Request(prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=8))]
    other, model = dummy_model(CONFIGS["gqa"], seed=1), dummy_model(CONFIGS["gqa"], tp=2)
    engine = Engine(model, EngineConfig(batch_size=1, prefill_chunk=64, max_len=128))
    engine.load_weights(serving_params(master_params(other), model), version=7)
    (found,), (expected,) = engine.generate(requests), answers(other, requests)
    assert found.digest() == expected.digest()
    assert (found.weight_version, expected.weight_version) == (7, 0)


def test_weights_that_lie_quantised_on_the_devices_are_refused(tmp_path):
    """Their codes cannot move; expanded, they are bfloat16 weights like others."""
    shutil.copytree(GOLDEN / "llama2", tmp_path / "plain")
    quantize_folder(
        tmp_path / "plain", tmp_path / "q", RECIPES["int8-w8a16"], progress=ignore_progress
    )
    options: dict = {
        "profile": NumericsProfile(), "mesh": make_mesh(1, 1), "backend": Backend.PORTABLE,
    }  # fmt: skip
    packed = load_model(str(tmp_path / "q"), quantized_weights="packed", **options)
    with pytest.raises(ValueError, match="cannot be trained; load .* quantized_weights='expanded'"):
        master_params(packed)
    assert master_params(load_model(str(tmp_path / "q"), **options))


def test_masters_of_linear_attention_on_hopper_are_refused():
    model = dataclasses.replace(dummy_model(CONFIGS["hybrid"]), backend=Backend.SM90)
    with pytest.raises(ValueError, match="cannot be trained: linear attention on sm90 has no"):
        master_params(model)


def test_masters_of_a_split_model_are_refused():
    with pytest.raises(ValueError, match="tp=2 must be 1"):
        master_params(dummy_model(CONFIGS["gqa"], tp=2))


def test_masters_and_their_way_back_wait_for_programs_of_their_devices():
    """They are programs of several devices, in one order with those of engines."""
    one, two = dummy_model(CONFIGS["gqa"]), dummy_model(CONFIGS["gqa"], tp=2)
    masters = master_params(one)
    serving_params(masters, two)  # compiled now, so that nothing else takes time below
    thread = threading.Thread(target=serving_params, args=(masters, two))
    with dispatch.one_order(tuple(two.mesh.devices.flat)):
        thread.start()
        thread.join(timeout=1)
        assert thread.is_alive()
    thread.join(timeout=60)
    assert not thread.is_alive()
