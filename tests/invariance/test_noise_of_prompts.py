# SPDX-License-Identifier: Apache-2.0
"""One seed: answers to different prompts are independent, those to equal requests are equal."""

import dataclasses
import math
from collections import Counter
from functools import cache

import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import MAX_TEMPERATURE, SamplingParams
from detjax.engine.running.programs import ProgramCache
from detjax.models.loading import LoadedModel
from detjax.testing.bitwise import assert_bitwise_equal
from detjax.testing.dummies import dummy_config, dummy_model

from .faults import order_by_company

VOCAB, NUM_PROMPTS = 320, 32
HOT = SamplingParams(max_tokens=4, temperature=MAX_TEMPERATURE, seed=7)
PROMPTS = [(11, 12, i, 300 - i) for i in range(NUM_PROMPTS)]


@cache
def the_model() -> LoadedModel:
    return dummy_model(dummy_config(vocab_size=VOCAB))


@pytest.fixture
def model() -> LoadedModel:
    return the_model()


_PROGRAMS: dict[int, ProgramCache] = {}


def answers(model, sampling: SamplingParams = HOT, prompts=PROMPTS, **config) -> list[Completion]:
    """Of a new engine; those of one batch size, without other options, share their programs."""
    sizes = {"batch_size": 4, "prefill_chunk": 64, "max_len": 256} | config
    shares = config.keys() <= {"batch_size"}
    programs = _PROGRAMS.get(sizes["batch_size"]) if shares else None
    made = Engine(model, EngineConfig(**sizes), programs=programs)
    if shares:
        _PROGRAMS[sizes["batch_size"]] = made.programs
    requests = [Request(prompt_token_ids=tuple(p), sampling=sampling) for p in prompts]
    return made.generate(requests)


def most_alike(done: list[Completion]) -> int:
    """How many answers begin with the token that most of them begin with."""
    return max(Counter(completion.token_ids[0] for completion in done).values())


@cache
def plain_answers() -> list[Completion]:
    return answers(the_model())


@pytest.fixture
def plain() -> list[Completion]:
    return plain_answers()


@pytest.mark.slow
@pytest.mark.invariance
def test_prompts_of_one_seed_begin_independently(model, plain):
    """At the highest temperature draws are uniform, and five of 32 alike are rarer than 1e-4."""
    assert math.comb(NUM_PROMPTS, 5) / VOCAB**4 < 1e-4
    assert most_alike(plain) < 5


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.control
def test_control_with_common_noise_prompts_begin_alike(model):
    """What the noise was before it knew the prompt."""
    done = answers(model, dataclasses.replace(HOT, noise="common"))
    assert most_alike(done) == NUM_PROMPTS


def assert_same(actual: Completion, expected: Completion, what: str) -> None:
    assert actual.token_ids == expected.token_ids, what
    assert_bitwise_equal(np.array(actual.logprobs), np.array(expected.logprobs), claim=what)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("config", "order"),
    [
        ({"batch_size": 1}, 1),
        ({"batch_size": 8, "prefill_chunk": 16}, -1),
        ({"mode": "dvr", "verify_window": 4}, -1),
    ],
    ids=["alone", "other company", "dvr"],
)
def test_equal_requests_have_equal_answers(model, plain, config, order):
    """In another engine, batch and order, asked twice, so that the second is a cached prefix."""
    some = PROMPTS[:6][::order]
    twice = answers(model, prompts=[*some, *some], **config)
    for i, prompt in enumerate(some):
        want = plain[PROMPTS.index(prompt)]
        assert_same(twice[i], want, "asked once")
        assert_same(twice[i + len(some)], want, "asked again")


@pytest.mark.slow
@pytest.mark.control
def test_control_an_order_by_company_is_seen_in_equal_answers(model, plain, monkeypatch):
    """Where the order of a sum follows the launch, other company gives other logprobs."""
    order_by_company(monkeypatch, canonical_rows=64)
    found = answers(model, prompts=PROMPTS[:6], batch_size=8, self_check="off")
    assert [one.logprobs for one in found] != [one.logprobs for one in plain[:6]]


@pytest.mark.invariance
def test_the_rest_of_an_answer_is_drawn_with_the_noise_of_its_prompt(model, plain):
    """`for_prompt`; without it, the control, the text so far would be another prompt."""
    longer = [(*done.prompt_token_ids, *done.token_ids[:2]) for done in plain[:8]]
    kinds = {"rest": [], "other": []}
    for done, prompt in zip(plain, longer, strict=False):
        rest = HOT.for_prompt(done.prompt_token_ids)
        kinds["rest"] += answers(model, rest, [prompt])
        kinds["other"] += answers(model, HOT, [prompt])
    assert [d.token_ids[:2] for d in kinds["rest"]] == [d.token_ids[2:] for d in plain[:8]]
    assert [d.token_ids[:2] for d in kinds["other"]] != [d.token_ids[2:] for d in plain[:8]]
