# SPDX-License-Identifier: Apache-2.0
"""Whole answers of a published model, whatever runs with them and wherever.

float32, in which every rounding reaches a logprob. The model has 9 heads, which no power of two
divides, so its meshes are those of replicas (dp).
"""

from functools import cache

import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.hf_config import load_config
from detjax.models.params import check_tp, possible_tps
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits

from ..real_model import goldens, real_folder, real_model
from .faults import order_by_company

MAX_TOKENS = 6
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 5, "seed": 2},
    {"temperature": 1.3, "top_p": 0.7, "seed": 3},
)
LENGTHS = (242, 42, 17, 130, 64, 1, 128, 33)
"""Of prompts: around a page and a chunk. All are the beginnings of one text, and share pages."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def requests() -> list[Request]:
    story = tuple(goldens()["texts"]["story"]["ids"])
    return [
        Request(
            prompt_token_ids=story[:length],
            sampling=SamplingParams(max_tokens=MAX_TOKENS, **KINDS[i % len(KINDS)]),
        )
        for i, length in enumerate(LENGTHS)
    ]


def engine(*, dp: int = 1, **sizes) -> Engine:
    sizes = {"batch_size": 8, "prefill_chunk": 64, "max_len": 256} | sizes
    return Engine(real_model("float32", dp=dp), EngineConfig(**sizes))


@cache
def together() -> Engine:
    return engine()


@cache
def alone() -> list[Completion]:
    """Each request in an engine that holds one, on one device: the canonical answers."""
    lone = engine(batch_size=1)
    return [lone.generate([request])[0] for request in requests()]


def assert_same(got: list[Completion], claim: str) -> None:
    for one, want in zip(got, alone(), strict=True):
        where = f"{claim}: request {want.request_idx}"
        assert one.token_ids == want.token_ids, where
        assert_bitwise_equal(np.stack(one.logprobs), np.stack(want.logprobs), claim=where)


def test_probe_depends_on_order():
    weights = np.asarray(real_model("float32").params["layers"][0]["down"], np.float32)
    assert_order_sensitive(weights * np.linspace(0.5, 2, weights.shape[1], dtype=np.float32))
    assert len({one.token_ids for one in alone()}) == len(LENGTHS)


@pytest.mark.invariance
def test_answers_are_bitwise_batch_invariant():
    assert_same(together().generate(requests()), "a batch of 8")
    assert_same(together().generate(requests()[::-1])[::-1], "a batch of 8 in another order")


@pytest.mark.invariance
@pytest.mark.parametrize("chunk", [37, 100])
def test_answers_are_bitwise_schedule_invariant(chunk):
    config = EngineConfig(batch_size=8, prefill_chunk=chunk, max_len=256)
    other = Engine(real_model("float32"), config, programs=together().programs)
    assert_same(other.generate(requests()), f"chunks of {chunk}")


@pytest.mark.invariance
def test_decode_is_bitwise_path_consistent_with_prefill():
    texts = [r.prompt_token_ids + one.token_ids for r, one in zip(requests(), alone(), strict=True)]
    for scored, one in zip(together().score(texts), alone(), strict=True):
        got = np.array([token.logprob for token in scored[-MAX_TOKENS:]])
        assert_bitwise_equal(got, np.stack(one.logprobs), claim="decoded and prefilled")


@pytest.mark.invariance
def test_answers_by_dvr_are_those_of_invariant():
    drafting = engine(mode="dvr", max_draft_fraction=1.0)
    assert_same(drafting.generate(requests()), "dvr")
    assert drafting.stats().num_windows > 0


@pytest.mark.invariance
def test_answers_are_bitwise_mesh_invariant():
    assert_same(engine(dp=2).generate(requests()), "two replicas")


def test_nine_heads_cannot_be_shared():
    """Every tp above 1 is refused, with the number that does not divide."""
    config = load_config(real_folder())
    assert possible_tps(config) == (1,)
    for tp in (2, 4, 8):
        with pytest.raises(ValueError, match=f"{tp=} must divide num_heads=9"):
            check_tp(config, tp)
    with pytest.raises(ValueError, match="tp=3 must be a power of two"):
        check_tp(config, 3)


@pytest.mark.control
def test_control_an_order_by_company_is_seen(monkeypatch):
    """The comparison of a batch with lone requests finds other bits where sums follow the rows."""
    alone()  # before the fault is planted
    order_by_company(monkeypatch, canonical_rows=64)
    faulty = engine(decode_batches=(1,), self_check="off")
    lone = [faulty.generate([request])[0] for request in requests()[1:4]]
    company = faulty.generate(requests()[1:4])
    assert sum(
        count_different_bits(np.stack(a.logprobs), np.stack(b.logprobs))
        for a, b in zip(lone, company, strict=True)
    )
