# SPDX-License-Identifier: Apache-2.0
"""Small engines at the places where a schedule could reach an answer."""

import gc
from functools import cache

import jax.numpy as jnp
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import Sequence
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.testing.dummies import dummy_config, dummy_model

PAGE, VOCAB = 16, 128
MOST_STEPS = 300
"""Many times what any request here takes."""


@cache
def model() -> LoadedModel:
    config = dummy_config(num_layers=1, intermediate_size=128, vocab_size=VOCAB)
    return dummy_model(config, profile=NumericsProfile(attention_block=PAGE, attention_split=64))


def request(first: int, length: int, max_tokens: int = 10, **sampling) -> Request:
    prompt = tuple((first + 3 * i) % 97 for i in range(length))
    return Request(
        prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


@cache
def lone_engine() -> Engine:
    return Engine(model(), EngineConfig(batch_size=1, prefill_chunk=PAGE, max_len=96))


@cache
def alone(asked: Request) -> Completion:
    return lone_engine().generate([asked])[0]


def wrong_at_every_third(token_ids, positions):
    """Drafts, one of three wrong."""
    return jnp.where(positions % 3 == 0, (token_ids + 1) % VOCAB, token_ids)


@pytest.mark.slow
@pytest.mark.invariance
def test_wrong_drafts_are_never_committed_and_right_ones_are():
    sizes = EngineConfig(
        batch_size=3, prefill_chunk=PAGE, max_len=96, mode="dvr", verify_window=6,
        max_draft_fraction=1.0,
    )  # fmt: skip
    made = Engine(model(), sizes, candidates=wrong_at_every_third)
    asked = [request(i, 5 + 9 * i, temperature=0.5 * i, seed=i) for i in range(4)]
    got = made.generate(asked)
    assert [c.digest() for c in got] == [alone(a).digest() for a in asked]
    stats = made.stats()
    assert stats.num_rollbacks > 4 and stats.accepted_tokens > 4


@pytest.mark.invariance
@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1])
def test_a_page_is_shared_only_once_its_last_key_is_there(length):
    """Who follows at the first token reads a page whose last key may be still to come."""
    sizes = EngineConfig(
        batch_size=2, prefill_chunk=PAGE, max_len=96, has_prompt_lookup=True, verify_window=4
    )
    made = Engine(model(), sizes, programs=_lookup_programs.get("all"))
    _lookup_programs["all"] = made.programs
    first = request(length, length)
    followers: list[Request] = []

    def follow(event) -> bool:
        if not followers:
            tail = tuple((5 * i) % 97 for i in range(PAGE))
            prompt = (*first.prompt_token_ids, event.token_id, *tail)
            followers.append(
                Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=6))
            )
            made.add_request(prompt, followers[0].sampling)
        return False

    made.add_request(first.prompt_token_ids, first.sampling, on_token=follow)
    outputs = made.drain()
    for request_id, asked in ((0, first), (1, followers[0])):
        tokens = [i for o in outputs if o.request_id == request_id for i in o.token_ids]
        logprobs = [p for o in outputs if o.request_id == request_id for p in o.logprobs]
        want = alone(asked)
        assert (tuple(tokens), tuple(logprobs)) == (want.token_ids, want.logprobs), request_id


_lookup_programs: dict = {}


def test_a_prompt_that_the_cache_holds_to_its_last_page_is_answered_again():
    """The last token's logits are computed anew, or the request would wait for ever."""
    made, asked = lone_engine(), request(40, 2 * PAGE)
    want = alone(asked)
    request_id = made.add_request(asked.prompt_token_ids, asked.sampling)
    outputs = []
    for _ in range(MOST_STEPS):
        outputs += made.step()
        if any(o.finish_reason for o in outputs):
            break
    assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
    tokens = [i for o in outputs if o.request_id == request_id for i in o.token_ids]
    assert tuple(tokens) == want.token_ids


def sequences_alive() -> int:
    """Sequences that anything in this process still knows."""
    gc.collect()
    return sum(isinstance(found, Sequence) for found in gc.get_objects())


@pytest.mark.slow
def test_an_engine_at_rest_knows_no_request():
    """No table holds a sequence any more, not only those that the counters tell of."""
    made = lone_engine()
    before = sequences_alive()
    for asked in (request(1, 4, 2, n=3), request(2, 4, 2)):
        made.add_request(asked.prompt_token_ids, asked.sampling)
    cancelled = made.add_request((1, 2, 3), SamplingParams(max_tokens=9))
    made.step()
    assert sequences_alive() > before
    made.cancel(cancelled)
    for _ in range(MOST_STEPS):
        made.step()
        if not made.has_work:
            break
    assert not made.has_work
    assert sequences_alive() == before
