# SPDX-License-Identifier: Apache-2.0
"""From masters to any mesh and back: no bit is lost."""

import threading

import jax
import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.parallel import dispatch
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import answers, dummy_config, dummy_model
from detjax.training.weights import master_params, serving_params

CONFIGS = {
    "gqa": dummy_config(num_layers=1, qkv_bias=True),
    "odd_kv_and_vocab": dummy_config(
        num_layers=1, num_heads=24, num_kv_heads=3, qk_norm=True, vocab_size=300
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
