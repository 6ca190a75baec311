# SPDX-License-Identifier: Apache-2.0
"""Whole answers with a cache of float8 on the backends of a CPU: one answer on every path."""

import dataclasses
from functools import cache

import jax.numpy as jnp
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.memory import cache_bytes
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.config import LinearAttentionConfig
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels import reference
from detjax.pallas_kernels.attention.reference import attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.float8_cache import narrow_rows, widened
from detjax.pallas_kernels.rope.reference import rope_into_cache
from detjax.pallas_kernels.rope.rotation import num_gated_heads
from detjax.testing.adapters import random_adapter
from detjax.testing.dummies import (
    answers,
    dummy_config,
    dummy_model,
    mixed_requests,
)
from detjax.testing.eagle import dummy_eagle, dummy_head

pytestmark = pytest.mark.slow

FLOAT8 = NumericsProfile(kv_cache_dtype="fp8_e4m3")
BACKENDS = (Backend.PORTABLE, Backend.REFERENCE)
SCHEDULES = {
    "batch": {"batch_size": 4, "prefill_chunk": 64},
    "chunks": {"batch_size": 2, "prefill_chunk": 37},
    "dvr": {"batch_size": 4, "prefill_chunk": 64, "mode": "dvr", "verify_window": 5},
}


def model(backend: Backend, profile: NumericsProfile = FLOAT8, tp: int = 1) -> LoadedModel:
    config = dummy_config(hidden_size=256, intermediate_size=768)
    return dummy_model(config, tp=tp, backend=backend, profile=profile)


def requests() -> list[Request]:
    """Longer than a page, and two with a prefix of a page that is not computed again."""
    some = mixed_requests(4, vocab_size=320, max_tokens=6)
    ids = some[3].prompt_token_ids[:128]
    return [
        *some,
        *(
            Request(prompt_token_ids=(*ids, *rest), sampling=SamplingParams(max_tokens=6))
            for rest in ((7, 8, 9), (7, 8, 10, 11))
        ),
    ]


def digests(given: LoadedModel, **sizes) -> list[str]:
    engine = Engine(given, EngineConfig(max_len=256, self_check="off", **sizes))
    return [one.digest() for one in engine.generate(requests())]


@cache
def alone(backend: Backend) -> list[str]:
    """Each request in an engine of its own, so that no prefix is found."""
    given, found = model(backend), []
    for one in requests():
        engine = Engine(given, EngineConfig(max_len=256, batch_size=1, prefill_chunk=64))
        found.append(engine.generate([one])[0].digest())
    return found


@pytest.mark.invariance
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_bitwise_batch_and_schedule_invariant(backend, schedule):
    """Prefixes are found in the cache by two of the requests; drafts are verified in windows."""
    assert digests(model(backend), **SCHEDULES[schedule]) == alone(backend)


@pytest.mark.invariance
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_bitwise_mesh_invariant(backend):
    assert digests(model(backend, tp=2), **SCHEDULES["batch"]) == alone(backend)


@pytest.mark.invariance
@pytest.mark.parametrize("source", ["draft_model", "eagle3"])
def test_drafts_of_another_model_change_no_bit(source):
    """Its cache is of float8 too, and its windows are verified against what is written."""
    config = dummy_config(num_layers=4)
    given = dummy_model(config, backend=Backend.REFERENCE, profile=FLOAT8)
    if source == "eagle3":
        draft = dummy_head(given, dummy_eagle(config, draft_vocab_size=9))
    else:
        draft = dummy_model(config, backend=Backend.REFERENCE, profile=FLOAT8)
    sizes = {
        "batch_size": 2, "prefill_chunk": 64, "max_len": 256, "verify_window": 4, "verify_rows": 2,
        "verify_patience": 0, "self_check": "off",
    }  # fmt: skip
    found = []
    for changes in ({}, {"draft_weights": source}):
        engine = Engine(given, EngineConfig(**sizes, **changes), draft_model=draft)
        found.append([one.digest() for one in engine.generate(requests()[:3])])
    assert found[0] == found[1]
    assert engine.stats().drafts[source].num_windows > 3


@pytest.mark.invariance
def test_adapters_have_one_answer():
    config = dummy_config(hidden_size=256, intermediate_size=768)
    adapter = random_adapter(config, seed=1, rank=8)
    asked = [
        dataclasses.replace(one, adapter=adapter.sha256 if i % 2 else "")
        for i, one in enumerate(requests()[:4])
    ]
    found = []
    for sizes in ({"batch_size": 1, "prefill_chunk": 64}, {"batch_size": 4, "prefill_chunk": 37}):
        given = open_adapters(model(Backend.REFERENCE), AdapterSizes(max_loras=2, max_lora_rank=16))
        got = answers(given, asked, adapters=(adapter,), max_len=256, **sizes)
        found.append([one.digest() for one in got])
    assert found[0] == found[1]


@pytest.mark.invariance
def test_hybrids_have_one_answer():
    """Rows and states of linear attention stay as they are; keys and values are of float8."""
    linear = LinearAttentionConfig(
        num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=16, conv_width=4,
        layers=(True, False),
    )  # fmt: skip
    config = dataclasses.replace(
        dummy_config(intermediate_size=128, num_layers=2, qk_norm=True), linear_attention=linear,
        has_output_gate=True,
    )  # fmt: skip
    found = []
    for profile, sizes in (
        (FLOAT8, {"batch_size": 1, "prefill_chunk": 64}),
        (FLOAT8, {"batch_size": 3, "prefill_chunk": 128}),
        (NumericsProfile(), {"batch_size": 3, "prefill_chunk": 128}),
    ):
        given = dummy_model(config, backend=Backend.PORTABLE, profile=profile)
        engine = Engine(given, EngineConfig(max_len=256, self_check="off", **sizes))
        found.append([one.digest() for one in engine.generate(requests()[:3])])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_float8_is_another_profile_and_takes_half_of_the_bytes(backend):
    eight, sixteen = model(backend), model(backend, NumericsProfile())
    assert 2 * cache_bytes(eight, 16) == cache_bytes(sixteen, 16)
    assert eight.fingerprint != sixteen.fingerprint
    assert digests(sixteen, **SCHEDULES["batch"]) != alone(backend)


def unrounded_chunk(
    qkv, rotation, place, *, window, eps, profile, prefetch=None, sinks=None, is_gated=False
):
    """`rope_attention` whose new tokens see one another before they are rounded."""
    assert not is_gated
    wide = place._replace(pages=widened(place.pages, qkv.dtype))
    num_heads = num_gated_heads(qkv, wide.pages, is_gated)
    q, pages = rope_into_cache(qkv, rotation, wide, num_heads=num_heads, eps=eps)
    q = q.reshape(*place.positions.shape, *q.shape[1:])
    seen = wide._replace(pages=pages)
    return attention(q, seen, window=window, profile=profile, sinks=sinks), narrow_rows(pages)


@pytest.mark.control
def test_control_a_chunk_that_sees_its_own_keys_unrounded_depends_on_the_chunk(monkeypatch):
    """What other servers do: the same requests, and the answer depends on where a chunk ends."""
    backend = Backend.REFERENCE
    want = alone(backend)
    monkeypatch.setattr(reference, "rope_attention", unrounded_chunk)
    whole = digests(model(backend), batch_size=1, prefill_chunk=256)
    pieces = digests(model(backend), batch_size=1, prefill_chunk=16)
    assert whole != pieces and whole != want


def test_heads_and_profiles_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="does not go with activations of float32"):
        NumericsProfile(compute_dtype="float32", kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match="must be one of 'auto', 'fp8_e4m3', 'fp8'"):
        NumericsProfile(kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ValueError, match="must be 'fp8_e4m3' in a profile"):
        NumericsProfile(kv_cache_dtype="fp8")
    profile = dataclasses.replace(FLOAT8, kv_cache_dtype="auto")
    assert profile.cache_dtype == jnp.bfloat16 and FLOAT8.cache_dtype == jnp.uint8
    assert "kv_cache_dtype" not in profile.facts()
    assert FLOAT8.facts()["kv_cache_dtype"] == "fp8_e4m3"
