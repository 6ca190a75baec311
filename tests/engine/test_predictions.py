# SPDX-License-Identifier: Apache-2.0
"""Predicted answers and single noise streams: less work, and not another bit."""

import dataclasses

import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.testing.bitwise import assert_bitwise_equal
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model, mixed_requests


@pytest.fixture(scope="module")
def model():
    return dummy_model(dummy_config())


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine(
        model,
        EngineConfig(
            batch_size=3, prefill_chunk=64, max_len=384, has_prompt_lookup=True,
            verify_window=8, verify_rows=2,
        ),
    )  # fmt: skip


REQUESTS = mixed_requests(8, vocab_size=320, max_tokens=20)


@pytest.fixture(scope="module")
def plain(model) -> list[Completion]:
    return Engine(model, EngineConfig(batch_size=1, prefill_chunk=64, max_len=384)).generate(
        REQUESTS
    )


def assert_same(actual: Completion, expected: Completion) -> None:
    assert actual.token_ids == expected.token_ids
    assert_bitwise_equal(
        np.array(actual.logprobs), np.array(expected.logprobs), claim="predictions change no bit"
    )
    assert actual.top_logprobs == expected.top_logprobs
    assert actual.finish_reason == expected.finish_reason


def predicting(done: Completion, kind: str) -> tuple[int, ...]:
    right = done.token_ids
    return {
        "right": right,
        "too long": right + (1, 2, 3) * 10,
        "short": right[:5],
        "wrong at first": (right[0] ^ 1, *right[1:]),
        "wrong in a window": (*right[:10], right[10] ^ 1, *right[11:]),
    }[kind]


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    "kind", quick_and_slow(["right", "wrong in a window"], ["too long", "short", "wrong at first"])
)
def test_what_is_predicted_changes_no_bit(engine, plain, kind):
    before = dataclasses.replace(engine.stats())
    asked = [
        dataclasses.replace(request, predicted_token_ids=predicting(done, kind))
        for request, done in zip(REQUESTS, plain, strict=True)
    ]
    for done, expected in zip(engine.generate(asked), plain, strict=True):
        assert_same(done, expected)
    stats = engine.stats()
    num_windows = stats.num_windows - before.num_windows
    num_wrong = stats.num_rollbacks - before.num_rollbacks
    if kind in ("right", "too long"):
        assert (num_windows, num_wrong) == (len(REQUESTS) * 3, 0)  # 19 tokens, up to 8 a window
    if kind == "wrong at first":
        # The first token is prefill's: what is predicted after another one is not believed.
        assert num_windows < len(REQUESTS)
    if kind == "wrong in a window":
        assert num_wrong >= len(REQUESTS)


@pytest.mark.slow
@pytest.mark.invariance
def test_a_noise_stream_alone_is_that_sequence_of_many(model):
    engine = Engine(model, EngineConfig(batch_size=4, prefill_chunk=64, max_len=384))
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=2**40 + 3, n=4)
    many = engine.generate([Request(prompt_token_ids=(5, 6, 7), sampling=sampling)])
    assert len({done.token_ids for done in many}) == 4  # the streams do differ
    alone = engine.generate(
        [
            Request(
                prompt_token_ids=(5, 6, 7),
                sampling=dataclasses.replace(sampling, n=1, noise_stream=i),
            )
            for i in (3, 1, 0, 2)
        ]
    )
    for done, i in zip(alone, (3, 1, 0, 2), strict=True):
        assert_same(done, many[i])


@pytest.mark.parametrize(
    ("request_fields", "says"),
    [
        ({"predicted_token_ids": (1, 320)}, "token id 320, outside the vocabulary"),
        ({"predicted_token_ids": (-1,)}, "token id -1"),
    ],
)
def test_predictions_are_tokens(engine, request_fields, says):
    request = Request(prompt_token_ids=(1,), sampling=SamplingParams(), **request_fields)
    with pytest.raises(ValueError, match=says):
        engine.generate([request])


def test_predictions_need_an_engine_that_verifies(model):
    engine = Engine(model, EngineConfig(batch_size=1, prefill_chunk=64, max_len=384))
    request = Request(prompt_token_ids=(1,), sampling=SamplingParams(), predicted_token_ids=(1,))
    with pytest.raises(ValueError, match="set has_prompt_lookup"):
        engine.generate([request])


@pytest.mark.parametrize("value", [-1, 2**32, 2**32 - 3])
def test_a_noise_stream_is_32_bits(value):
    with pytest.raises(ValueError, match="noise_stream"):
        SamplingParams(noise_stream=value, n=4)


def test_sampling_params_survive_json():
    sampling = SamplingParams(temperature=1.0, stop_token_ids=(1, 2), stop=("a",), seed=2**64 - 1)
    assert SamplingParams.from_dict(sampling.as_dict()) == sampling
    assert SamplingParams.from_dict(sampling.as_dict() | {"temperature": 1}) == sampling
    with pytest.raises(ValueError, match="speed=3 is no sampling parameter"):
        SamplingParams.from_dict({"speed": 3})
