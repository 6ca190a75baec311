# SPDX-License-Identifier: Apache-2.0
"""Latencies are what a client waited, a compiler's time included."""

import time

import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.testing.dummies import dummy_config, dummy_model


def engine() -> Engine:
    return Engine(
        dummy_model(dummy_config(num_layers=1)),
        EngineConfig(batch_size=1, prefill_chunk=16, max_len=128),
    )


@pytest.mark.slow
def test_latencies_are_what_was_waited_for_compiling_included():
    made = engine()
    request = Request(prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=3))
    begin_s = time.perf_counter()
    made.generate([request])
    wall_s, stats = time.perf_counter() - begin_s, made.stats()
    assert stats.num_compiled == 2
    assert 0 < stats.compile_s < stats.end_to_end_s.total <= wall_s
    served_s = stats.first_token_s.total + stats.between_tokens_s.total
    assert stats.compile_s < served_s <= wall_s
    assert stats.between_tokens_s.count == 2


@pytest.mark.slow
def test_what_is_compiled_while_requests_wait_is_named(monkeypatch):
    made, told = engine(), []
    get = made.programs.get

    def slow(key, *rest):
        told.append((made.stats().compiling, key))
        return get(key, *rest)

    monkeypatch.setattr(made.programs, "get", slow)
    sampling = SamplingParams(max_tokens=2, top_k=2, temperature=1.0)
    made.generate([Request(prompt_token_ids=(1, 2, 3), sampling=sampling)])
    named = {name for name, _ in told if name}
    assert len(named) == 3  # prefill, decode, and the choice behind both
    assert all(name == key.name for name, key in told if name)
    assert made.stats().compiling == ""


@pytest.mark.slow
def test_what_was_compiled_ahead_is_in_no_latency():
    made = engine()
    request = Request(prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=3))
    made.compile(requests=[request])
    compiled_s = made.stats().compile_s
    made.generate([request])
    assert made.stats().compile_s == compiled_s > made.stats().end_to_end_s.total > 0
