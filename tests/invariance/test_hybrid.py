# SPDX-License-Identifier: Apache-2.0
"""Whole answers of a hybrid: gated DeltaNet, then attention with an output gate.

Pages of 16 tokens, which are then the blocks behind which states are kept; sizes are small. All of
it compiles, so it is slow. `test_families.py` has the claims with pages of 128 tokens.
"""

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
from detjax.models.config import LinearAttentionConfig
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels import portable
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import dummy_config, dummy_model

PAGE, VOCAB = 16, 128
PROFILE = NumericsProfile(attention_block=PAGE, attention_split=64)
LINEAR = LinearAttentionConfig(
    num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=16, conv_width=4, layers=(True, False)
)
CONFIG = dataclasses.replace(
    dummy_config(intermediate_size=128, vocab_size=VOCAB, num_layers=2, qk_norm=True),
    linear_attention=LINEAR,
    has_output_gate=True,
)
SIZES = {"batch_size": 4, "prefill_chunk": PAGE, "max_len": 96}


@cache
def model(dp: int = 1, tp: int = 1) -> LoadedModel:
    return dummy_model(CONFIG, dp=dp, tp=tp, profile=PROFILE)


def request(first: int, length: int, **sampling) -> Request:
    prompt = tuple((first * first + 3 * i) % 97 for i in range(length))
    return Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=20, **sampling))


REQUESTS = [
    *(request(i, 3 + 9 * i, temperature=0.4 * i, seed=i) for i in range(5)),
    request(4, 39, temperature=1.0, seed=9),  # shares pages, and states, with another
]


@cache
def alone() -> list[Completion]:
    """Each request by itself, on one device: the canonical answers."""
    engine = Engine(model(), EngineConfig(**SIZES | {"batch_size": 1}))
    return [engine.generate([request])[0] for request in REQUESTS]


def assert_alone(got: list[Completion], claim: str) -> None:
    for g, w in zip(got, alone(), strict=True):
        assert g.token_ids == w.token_ids, f"{claim}: request {w.request_idx}"
        assert_bitwise_equal(np.stack(g.logprobs), np.stack(w.logprobs), claim=claim)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)], ids=str)
def test_answers_are_bitwise_mesh_and_batch_invariant(mesh):
    dp, tp = mesh
    engine = Engine(model(dp, tp), EngineConfig(**SIZES))
    assert_alone(engine.generate(REQUESTS), f"(dp, tp) = {mesh}")


SCHEDULES = {
    "chunks and preemption": {"prefill_chunk": 7, "num_pages": 7},
    "windows": {
        "mode": "dvr", "max_draft_fraction": 1.0, "verify_window": 6, "decode_steps": 3,
    },
    "windows of 8-bit drafts": {
        "mode": "dvr", "max_draft_fraction": 1.0, "verify_window": 6, "draft_weights": "int8",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("name", SCHEDULES)
def test_answers_are_bitwise_schedule_invariant(name):
    """Chunks off the grid, a cache too small for all, drafts that are rejected across blocks.

    The second time a prompt's pages, and the states on them, are in the cache.
    """
    engine = Engine(model(), EngineConfig(**SIZES | SCHEDULES[name]))
    for when in ("cold", "warm"):
        assert_alone(engine.generate(REQUESTS), f"{name}, {when}")
    stats = engine.stats()
    assert stats.prefix_tokens > 0
    assert stats.num_preempted > 0 if "num_pages" in SCHEDULES[name] else stats.accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.invariance
def test_8_bit_drafts_of_two_ranks_change_no_bit():
    """Of matrices that ranks share by rows, "linear_in", and by columns, "linear_o"."""
    engine = Engine(model(tp=2), EngineConfig(**SIZES | SCHEDULES["windows of 8-bit drafts"]))
    assert_alone(engine.generate(REQUESTS), "two ranks")
    assert engine.stats().accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.invariance
def test_prompt_lookup_changes_no_bit():
    """A text of two tokens, so that drafts are found and verified."""
    sampling = SamplingParams(max_tokens=20, allowed_token_ids=(1, 2))
    asked = [Request(prompt_token_ids=(1, 2, 1) * 9, sampling=sampling)]
    (want,) = Engine(model(), EngineConfig(**SIZES | {"batch_size": 1})).generate(asked)
    engine = Engine(model(), EngineConfig(**SIZES, has_prompt_lookup=True, verify_window=5))
    (got,) = engine.generate(asked)
    assert got.digest() == want.digest()
    assert_alone(engine.generate(REQUESTS), "lookup")
    assert engine.stats().drafts["ngram"].num_windows > 0


@pytest.mark.slow
@pytest.mark.invariance
def test_rejected_drafts_across_ends_of_blocks_change_nothing():
    """Every other draft is another token, so windows roll back before, at and behind a block."""
    config = EngineConfig(
        **SIZES, mode="dvr", max_draft_fraction=1.0, verify_window=6, self_check="off"
    )

    def wrong(token_ids, positions):
        return jnp.where(positions % 3 == 0, (token_ids + 1) % VOCAB, token_ids)

    engine = Engine(model(), config, candidates=wrong)
    assert_alone(engine.generate(REQUESTS), "drafts of which a third is wrong")
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.slow
@pytest.mark.control
def test_control_a_decode_that_reads_states_in_bfloat16_is_seen(monkeypatch):
    """As elsewhere, where decode and prefill keep the state in their own ways."""
    want, right = alone(), portable.delta_rule

    def wrong(rows, filters, gates, row_pages, state_pages, page_table, positions, *rest):
        if positions.shape[1] == 1:
            state_pages = state_pages.astype(jnp.bfloat16).astype(jnp.float32)
        return right(rows, filters, gates, row_pages, state_pages, page_table, positions, *rest)

    monkeypatch.setattr(portable, "delta_rule", wrong)
    own = dummy_model(CONFIG, profile=dataclasses.replace(PROFILE))
    engine = Engine(own, EngineConfig(**SIZES, self_check="off"))
    got = engine.generate(REQUESTS)
    assert any(g.digest() != w.digest() for g, w in zip(got, want, strict=True))
