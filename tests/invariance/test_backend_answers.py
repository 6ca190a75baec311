# SPDX-License-Identifier: Apache-2.0
"""Whole answers of the same small models on each backend of a CPU."""

import dataclasses
from functools import cache

import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.models.loading import LoadedModel
from detjax.pallas_kernels.backend import Backend
from detjax.testing.dummies import dummy_config, dummy_model, mixed_requests

from .faults import order_by_company, order_by_ranks

pytestmark = pytest.mark.slow

MODELS = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"experts": (8, 2), "hidden_size": 128},
}
BACKENDS = (Backend.PORTABLE, Backend.REFERENCE)
ALONE = {"batch_size": 1, "prefill_chunk": 64}
SCHEDULES = {
    "batch": {"batch_size": 4, "prefill_chunk": 64},
    "chunks": {"batch_size": 2, "prefill_chunk": 37},
    "dvr": {"batch_size": 4, "prefill_chunk": 64, "mode": "dvr", "verify_window": 5},
}


def model(name: str, backend: Backend, dp: int = 1, tp: int = 1) -> LoadedModel:
    sizes = {"hidden_size": 256, "intermediate_size": 768} | MODELS[name]
    return dummy_model(dummy_config(**sizes), dp=dp, tp=tp, backend=backend)


def requests() -> list[Request]:
    return [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, logprobs=3))
        for one in mixed_requests(5, vocab_size=320, max_tokens=6)
    ]


def digests(given: LoadedModel, **sizes) -> list[str]:
    engine = Engine(given, EngineConfig(max_len=256, self_check="off", **sizes))
    return [one.digest() for one in engine.generate(requests())]


@cache
def alone(name: str, backend: Backend) -> tuple[Completion, ...]:
    engine = Engine(model(name, backend), EngineConfig(max_len=256, **ALONE))
    return tuple(engine.generate([one])[0] for one in requests())


def expected(name: str, backend: Backend) -> list[str]:
    return [one.digest() for one in alone(name, backend)]


@pytest.mark.invariance
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_bitwise_batch_and_schedule_invariant(backend, name, schedule):
    assert digests(model(name, backend), **SCHEDULES[schedule]) == expected(name, backend)


@pytest.mark.invariance
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_bitwise_mesh_invariant(backend, name, mesh):
    assert digests(model(name, backend, *mesh), **SCHEDULES["batch"]) == expected(name, backend)


@pytest.mark.control
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_control_an_order_by_company_is_seen(monkeypatch, backend, name):
    want = expected(name, backend)
    order_by_company(monkeypatch, canonical_rows=1)
    assert digests(model(name, backend), **SCHEDULES["batch"]) != want


@pytest.mark.control
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_control_an_order_by_ranks_is_seen(monkeypatch, backend, name):
    want = expected(name, backend)
    order_by_ranks(monkeypatch)
    assert digests(model(name, backend, 1, 2), **SCHEDULES["batch"]) != want
