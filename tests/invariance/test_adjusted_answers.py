# SPDX-License-Identifier: Apache-2.0
"""Answers of requests with biases, penalties and masks: the same bits whatever runs beside them."""

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running import choice_programs
from detjax.engine.running.programs import keep_candidates
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import adjusted_requests, dummy_config, dummy_model

from .faults import order_by_company

MAX_TOKENS, VOCAB, PAGE = 12, 320, 4


def requests() -> list[Request]:
    return adjusted_requests(vocab_size=VOCAB, max_tokens=MAX_TOKENS)


@cache
def model(dp: int, tp: int) -> LoadedModel:
    # Small pages, so that a few tokens take several.
    profile = NumericsProfile(attention_block=PAGE, attention_split=64)
    return dummy_model(dummy_config(num_layers=1), dp=dp, tp=tp, profile=profile)


def engine(mesh=(1, 1), *, candidates=keep_candidates, **sizes) -> Engine:
    sizes = {"batch_size": 4, "prefill_chunk": 64, "max_len": 160, "verify_window": 8, **sizes}
    config = EngineConfig(**{"verify_rows": 2, **sizes})
    return Engine(model(*mesh), config, candidates=candidates)


@cache
def alone() -> list[Completion]:
    """Each request by itself: the canonical answers."""
    made = engine(batch_size=1)
    return [made.generate([request])[0] for request in requests()]


def assert_canonical(got: list[Completion], claim: str) -> None:
    for g, want in zip(got, alone(), strict=True):
        where = f"{claim}: request {want.request_idx}, {requests()[g.request_idx].sampling}"
        assert g.token_ids == want.token_ids, where
        assert_bitwise_equal(np.stack(g.logprobs), np.stack(want.logprobs), claim=where)
        assert g.finish_reason is want.finish_reason
        assert [[i for i, _ in t] for t in g.top_logprobs] == [
            [i for i, _ in t] for t in want.top_logprobs
        ]


def worse(token_ids, positions):
    """Every third draft is another token, so that windows are rolled back."""
    return jnp.where(positions % 3 == 0, (token_ids + 1) % VOCAB, token_ids)


DRAFTS = {"mode": "dvr", "max_draft_fraction": 1.0}
WAYS = {
    "among others": {},
    "single tokens of prompts": {"prefill_chunk": 37},
    "several tokens a launch": {"decode_steps": 4},
    "tp 2": {"mesh": (1, 2)},
    "tp 4": {"mesh": (1, 4)},
    "dp 2 and tp 2": {"mesh": (2, 2)},
    "drafts": DRAFTS,
    "drafts that are wrong": {**DRAFTS, "candidates": worse},
    "drafts on two ranks, several a launch": {**DRAFTS, "decode_steps": 3, "mesh": (1, 2)},
    "prompt lookup": {"has_prompt_lookup": True},
    "preemption": {"num_pages": 41},
}


SLOW = "among others", "tp 2", "drafts that are wrong", "prompt lookup", "preemption"


def way_cases() -> list:
    """Those that are run always, and the marks of the others."""
    marks = dict.fromkeys(SLOW, (pytest.mark.slow,))
    nightly = (pytest.mark.slow, pytest.mark.nightly)
    return [pytest.param(way, marks=marks.get(way, nightly)) for way in WAYS]


@pytest.mark.invariance
@pytest.mark.parametrize("way", way_cases())
def test_adjusted_answers_are_bitwise_schedule_invariant(way):
    sizes = dict(WAYS[way])
    made = engine(**sizes)
    assert_canonical(made.generate(requests()), way)
    stats = made.stats()
    if way == "drafts that are wrong":
        assert stats.num_rollbacks > 3
    if way == "preemption":
        assert stats.num_preempted > 0
        assert_canonical(made.generate(requests()), way)
    if "drafts" in way:
        assert stats.num_windows > 3
    if way == "prompt lookup":  # these answers repeat themselves little
        assert stats.num_windows > 0


@pytest.mark.slow
@pytest.mark.invariance
def test_what_a_request_asks_for_moves_no_draw_of_another():
    """The neighbour's answer is that of an engine on which nobody has adjustments."""
    plain = engine(batch_size=1).generate(requests()[-1:])
    assert plain[0].digest() == alone()[-1].digest()


@pytest.mark.slow
def test_adjustments_change_answers():
    """The probe: without them the answers are others, and penalties look at the text."""
    answers = alone()
    assert len({a.token_ids for a in answers}) == len(answers)
    banned = requests()[2].sampling
    assert len(answers[2].token_ids) > banned.min_tokens
    assert 4 not in answers[2].token_ids
    assert set(answers[3].token_ids) <= set(range(0, VOCAB, 3))
    assert answers[1].token_ids.count(300) > 3
    assert 2 < answers[4].token_ids.count(300) < 8, "a penalty of 1.9 for each use"


@pytest.mark.slow
@pytest.mark.control
@pytest.mark.parametrize("way", ["drafts that are wrong"])
def test_control_without_the_drafts_of_a_window_answers_differ(way, monkeypatch):
    """Were a window's tokens judged by the committed text alone, penalties would be too low."""
    with_drafts = choice_programs.TextSoFar

    def without(*, num_drafts, **fields):
        return with_drafts(num_drafts=jnp.zeros_like(num_drafts), **fields)

    monkeypatch.setattr(choice_programs, "TextSoFar", without)
    got = engine(**dict(WAYS[way])).generate(requests())
    assert [g.digest() for g in got] != [w.digest() for w in alone()]
    assert got[-1].digest() == alone()[-1].digest()


@pytest.mark.slow
@pytest.mark.control
def test_control_an_order_by_company_is_seen_among_others(monkeypatch):
    """The first of `WAYS` finds other bits where the order of a sum follows the launch."""
    want = [one.logprobs for one in alone()]
    order_by_company(monkeypatch, canonical_rows=64)
    found = engine(self_check="off").generate(requests())
    assert [one.logprobs for one in found] != want


@pytest.mark.slow
def test_the_best_are_those_of_the_greatest_sum():
    """n of best_of: best first, each with the noise of its own number."""
    base = SamplingParams(max_tokens=5, temperature=1.0, seed=3, n=4)
    made = engine(batch_size=4)
    prompt = requests()[0].prompt_token_ids
    every = made.generate([Request(prompt_token_ids=prompt, sampling=base)])
    sampling = dataclasses.replace(base, n=2, best_of=4)
    got = made.generate([Request(prompt_token_ids=prompt, sampling=sampling)])
    sums = {c.sequence_idx: sum(map(float, c.logprobs)) for c in every}
    want = sorted(sums, key=lambda s: -sums[s])[:2]
    assert [c.sequence_idx for c in got] == want != [0, 1]
    assert [c.digest() for c in got] == [every[s].digest() for s in want]
