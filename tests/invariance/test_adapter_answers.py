# SPDX-License-Identifier: Apache-2.0
"""Answers with adapters: whose adapters share the batch, the slots, the path and the mesh."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.scheduling import prefix_cache
from detjax.models.adapters.low_rank import Adapter
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.loading import LoadedModel
from detjax.models.params import TENSORS_OF
from detjax.testing import assert_order_sensitive
from detjax.testing.adapters import random_adapter
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model, mixed_requests

from .test_answers import assert_same

CONFIG = dummy_config(hidden_size=256, intermediate_size=768, qkv_bias=True, o_bias=True)
MAX_TOKENS = 5
COUNT = 8


@cache
def adapters() -> tuple[Adapter, ...]:
    """Of ranks below, at and above one block of 16."""
    return tuple(random_adapter(CONFIG, seed=i, rank=rank) for i, rank in enumerate((3, 16, 24)))


def engine_of(
    *, max_loras: int = 4, max_lora_rank: int = 32, dp: int = 1, tp: int = 1, **options
) -> Engine:
    """A new engine that knows all adapters."""
    sizes = AdapterSizes(max_loras=max_loras, max_lora_rank=max_lora_rank)
    model = open_adapters(dummy_model(CONFIG, dp=dp, tp=tp), sizes)
    options = {"batch_size": COUNT, "max_len": 256, **options}
    engine = Engine(model, EngineConfig(**options))
    for adapter in adapters():
        engine.add_adapter(adapter)
    return engine


def named(index: int) -> str:
    """Every fourth request has no adapter."""
    return "" if index % 4 == 3 else adapters()[index % 4].sha256


def requests(count: int = COUNT) -> list[Request]:
    plain = mixed_requests(count, vocab_size=CONFIG.vocab_size, max_tokens=MAX_TOKENS)
    return [dataclasses.replace(one, adapter=named(i)) for i, one in enumerate(plain)]


@cache
def lone_engine() -> Engine:
    return engine_of(batch_size=1)


@cache
def shared_engine() -> Engine:
    return engine_of()


@cache
def expected() -> list[Completion]:
    """Each request alone, the same engine for all."""
    return [
        dataclasses.replace(lone_engine().generate([one])[0], request_idx=i)
        for i, one in enumerate(requests())
    ]


@pytest.mark.slow
def test_probe_depends_on_order_and_every_adapter_changes_answers():
    one = adapters()[1].tensors[0, "down"]
    a = np.asarray(one.a, np.float32)
    assert_order_sensitive(a * np.linspace(0.5, 2, a.shape[1], dtype=np.float32))
    prompt = requests()[0].prompt_token_ids
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    shas = ["", *(adapter.sha256 for adapter in adapters())]
    asked = [
        Request(prompt_token_ids=prompt, sampling=sampling, adapter=adapter) for adapter in shas
    ]
    assert len({done.digest() for done in lone_engine().generate(asked)}) == len(shas)


@pytest.mark.slow
@pytest.mark.invariance
def test_answers_do_not_depend_on_the_adapters_in_the_batch():
    """All at once, in two orders."""
    engine = shared_engine()
    assert_same(engine.generate(requests()), expected(), "adapters and none in one batch")
    assert_same(engine.generate(requests()[::-1])[::-1], _reversed(), "in another order")


def _reversed() -> list[Completion]:
    """What is expected, numbered from the end."""
    return [dataclasses.replace(one, request_idx=COUNT - 1 - one.request_idx) for one in expected()]


@pytest.mark.slow
@pytest.mark.invariance
def test_rows_without_adapters_have_the_bits_of_a_model_without_room_for_them():
    plain = [one for one in requests() if not one.adapter]
    model = dummy_model(CONFIG)
    want = Engine(model, EngineConfig(batch_size=2, max_len=256)).generate(plain)
    got = [one for one, asked in zip(expected(), requests(), strict=True) if not asked.adapter]
    assert [one.digest() for one in got] == [one.digest() for one in want]


def test_a_step_of_rows_without_adapters_runs_a_program_without_them():
    engine = engine_of(batch_size=2)
    plain, adapted = requests()[3], requests()[0]
    assert not plain.adapter and adapted.adapter

    def ran() -> set[bool]:
        return {key.has_adapters for key in engine._runner.programs}

    engine.generate([plain])
    assert ran() == {False}
    engine.compile(requests=[adapted])
    assert ran() == {False, True}
    num_compiled = engine.stats().num_compiled
    engine.generate([adapted, plain, adapted])
    engine.generate([plain, plain])
    assert engine.stats().num_compiled == num_compiled


@pytest.mark.slow
@pytest.mark.invariance
def test_answers_do_not_depend_on_evictions_and_sizes_of_slots():
    """Fewer slots than adapters, so that each is loaded again and again; slots of 128 ranks."""
    engine = engine_of(max_loras=1, max_lora_rank=128, batch_size=3, prefill_chunk=37)
    assert_same(engine.generate(requests()), expected(), "one slot for three adapters")
    assert engine.stats().num_adapters_evicted >= 3


@pytest.mark.invariance
@pytest.mark.slow
def test_answers_do_not_depend_on_preemptions():
    """Two sequences of three pages each, in a cache of four."""
    tight = engine_of(batch_size=2, num_pages=4, max_len=384)
    long = [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, max_tokens=300))
        for one in (requests()[0], requests()[2])
    ]
    got = tight.generate(long)
    assert tight.stats().num_preempted > 0
    lone = engine_of(batch_size=1, max_len=384)
    want = [
        dataclasses.replace(lone.generate([one])[0], request_idx=i) for i, one in enumerate(long)
    ]
    assert_same(got, want, "preempted")


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("dp", "tp"), quick_and_slow([(2, 2)], [(1, 4), (1, 2), (4, 2)]))
def test_answers_with_adapters_are_bitwise_mesh_invariant(dp, tp):
    got = engine_of(dp=dp, tp=tp).generate(requests())
    assert_same(got, expected(), f"(dp, tp) = {dp, tp}")


@pytest.mark.slow
@pytest.mark.invariance
def test_prefill_of_an_answer_gives_the_bits_of_its_decoding():
    asked = requests()[:4]
    prefilled = [
        dataclasses.replace(
            one,
            prompt_token_ids=one.prompt_token_ids + done.token_ids[:-1],
            sampling=dataclasses.replace(
                one.sampling.for_prompt(one.prompt_token_ids), max_tokens=1
            ),
        )
        for one, done in zip(asked, expected(), strict=False)
    ]
    for got, want in zip(lone_engine().generate(prefilled), expected(), strict=False):
        assert got.token_ids[0] == want.token_ids[-1]
        assert got.logprobs[0].tobytes() == want.logprobs[-1].tobytes()


@pytest.mark.invariance
@pytest.mark.slow
def test_verified_windows_give_the_bits_of_decoding():
    """Predicted tokens, right and wrong."""
    asked = requests()[:4]
    engine = engine_of(has_prompt_lookup=True, verify_window=4)
    predicted = [
        dataclasses.replace(one, predicted_token_ids=(*done.token_ids[:3], 7))
        for one, done in zip(asked, expected(), strict=False)
    ]
    assert_same(engine.generate(predicted), expected()[:4], "windows of predicted tokens")
    assert engine.stats().accepted_tokens > 0


@pytest.mark.invariance
@pytest.mark.slow
def test_several_tokens_a_launch_change_no_bit():
    engine = engine_of(decode_steps=3)
    assert_same(engine.generate(requests()), expected(), "three tokens a launch")


@pytest.mark.slow
@pytest.mark.invariance
def test_scores_of_a_prompt_are_those_of_its_decoding():
    engine = shared_engine()
    done, sha = expected()[0], requests()[0].adapter
    scored = engine.score([done.prompt_token_ids + done.token_ids], adapter=sha)[0]
    got = [one.logprob for one in scored[-MAX_TOKENS:]]
    assert np.array_equal(np.array(got), np.array(done.logprobs))
    other = engine.score([done.prompt_token_ids + done.token_ids])[0]
    assert [one.logprob for one in other[-MAX_TOKENS:]] != got


def _same_prompt(*shas: str) -> list[Request]:
    """Two full pages and a little more."""
    ids = tuple(int(i) for i in np.random.default_rng(3).integers(0, CONFIG.vocab_size, 131))
    sampling = SamplingParams(max_tokens=2)
    return [Request(prompt_token_ids=ids, sampling=sampling, adapter=sha) for sha in shas]


@pytest.mark.slow
@pytest.mark.invariance
def test_cached_prefixes_are_shared_within_an_adapter_alone():
    first, second = (adapter.sha256 for adapter in adapters()[:2])
    asked = _same_prompt("", first, second)
    want = [lone_engine().generate([one])[0].digest() for one in asked]
    engine = shared_engine()
    before = engine.stats().prefix_tokens
    for _ in range(2):
        assert [engine.generate([one])[0].digest() for one in asked] == want
    assert engine.stats().prefix_tokens == before + 3 * 128


@pytest.mark.slow
@pytest.mark.control
def test_control_pages_of_another_adapter_change_answers(monkeypatch):
    first, second = (adapter.sha256 for adapter in adapters()[:2])
    asked = _same_prompt(first, second)
    want = [lone_engine().generate([one])[0].digest() for one in asked]
    monkeypatch.setattr(prefix_cache, "adapted_root", lambda root, adapter: root)
    engine = engine_of(batch_size=1)
    got = [engine.generate([one])[0].digest() for one in asked]
    assert got[0] == want[0] and got[1] != want[1]


def _merged(adapter: Adapter) -> LoadedModel:
    """The model with an adapter added to its weights, on the grid of bfloat16."""
    model = dummy_model(CONFIG)
    for i, layer in enumerate(model.params["layers"]):
        for name in ("qkv", "o", "gate_up", "down"):
            ranks = [
                one for tensor in TENSORS_OF[name] if (one := adapter.tensors.get((i, tensor)))
            ]
            added = [one.scale * one.b.astype(np.float32) @ one.a.astype(np.float32)
                     for one in ranks]  # fmt: skip
            wide = np.asarray(layer[name], np.float32) + np.concatenate(added)
            layer[name] = jax.device_put(jnp.asarray(wide, jnp.bfloat16), layer[name].sharding)
    return model


@pytest.mark.slow
@pytest.mark.control
def test_control_a_merged_adapter_gives_other_bits():
    """What serving without a definition of adapters does: close, and never equal."""
    asked = [one for one in requests() if one.adapter == adapters()[0].sha256]
    merged = Engine(_merged(adapters()[0]), EngineConfig(batch_size=1, max_len=256))
    got = merged.generate([dataclasses.replace(one, adapter="") for one in asked])
    want = [done for done, one in zip(expected(), requests(), strict=True) if one in asked]
    assert all(a.digest() != b.digest() for a, b in zip(got, want, strict=True))
    first = [(a.logprobs[0], b.logprobs[0]) for a, b in zip(got, want, strict=True)]
    assert all(abs(a - b) < 0.5 for a, b in first), "they compute the same function"


@pytest.mark.slow
def test_an_unloaded_adapter_is_refused_and_running_requests_go_on():
    engine = engine_of(batch_size=2)
    sha = adapters()[0].sha256
    prompt, sampling = requests()[0].prompt_token_ids, SamplingParams(max_tokens=4)
    engine.add_request(prompt, sampling, adapter=sha)
    engine.remove_adapter(sha)
    (done,) = [out for out in engine.drain() if out.finish_reason is not None]
    assert done.finish_reason is not None and done.error == ""
    with pytest.raises(ValueError, match="is not loaded"):
        engine.add_request(prompt, sampling, adapter=sha)
    with pytest.raises(ValueError, match="there is no adapter"):
        engine.remove_adapter(sha)
    assert engine.stats().num_adapters == 2
    plain = Engine(dummy_model(CONFIG), EngineConfig(max_len=256))
    with pytest.raises(ValueError, match="without room for adapters; give enable_lora=True"):
        plain.add_adapter(adapters()[0])
    with pytest.raises(ValueError, match="without room for adapters"):
        plain.add_request(prompt, sampling, adapter=sha)
    small = open_adapters(dummy_model(CONFIG), AdapterSizes())
    with pytest.raises(ValueError, match="has rank 24, more than the 16 of a slot"):
        Engine(small, EngineConfig(max_len=256)).add_adapter(adapters()[2])
    with pytest.raises(ValueError, match="another engine fills the slots"):
        Engine(small, EngineConfig(max_len=256))
    with pytest.raises(ValueError, match="adapters with mode='dvr' are not supported"):
        Engine(open_adapters(dummy_model(CONFIG), AdapterSizes()), EngineConfig(mode="dvr"))
