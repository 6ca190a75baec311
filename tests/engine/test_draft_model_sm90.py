# SPDX-License-Identifier: Apache-2.0
"""Draft models on a Hopper GPU, where they run by the engine's own kernels: no bit differs.

A draft model with the model's own weights computes the bits that verification computes, in steps of
another length. So each of its drafts is right.
"""

import dataclasses
from functools import cache

import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.loading import LoadedModel
from detjax.pallas_kernels.backend import Backend
from detjax.testing.adapters import random_adapter
from detjax.testing.drafts import commit_drafts_unseen
from detjax.testing.dummies import dummy_config, dummy_model

pytestmark = pytest.mark.gpu

VOCAB = 1024
MODEL = dummy_config(
    num_heads=8, num_kv_heads=2, head_dim=128, hidden_size=512, intermediate_size=1536,
    vocab_size=VOCAB, num_layers=3,
)  # fmt: skip
PROMPT = tuple(int(t) for t in np.random.default_rng(2).integers(0, VOCAB, 200))
SIZES = {"batch_size": 4, "prefill_chunk": 128, "max_len": 384, "self_check": "off"}
DRAFTS = {
    "draft_weights": "draft_model", "verify_window": 4, "verify_rows": 4, "verify_patience": 0,
}  # fmt: skip


@cache
def model(tp: int, seed: int) -> LoadedModel:
    return dummy_model(MODEL, tp=tp, seed=seed, backend=Backend.SM90)


def asked(count: int) -> list[Request]:
    """Every other request is greedy."""
    heats = (0.8 * (i % 2) for i in range(count))
    return [
        Request(
            prompt_token_ids=PROMPT[i:],
            sampling=SamplingParams(max_tokens=80, temperature=heat, seed=i if heat else None),
        )
        for i, heat in enumerate(heats)
    ]


@cache
def plain() -> list[Completion]:
    """The answers of one GPU without drafts."""
    return Engine(model(1, 0), EngineConfig(**SIZES)).generate(asked(4))


def drafted(*, seed: int, tp: int = 1, **changes) -> tuple[list[Completion], float]:
    """Answers, and the share of accepted drafts of a model with the weights of a seed."""
    config = EngineConfig(**SIZES | DRAFTS | changes)
    made = Engine(model(tp, 0), config, draft_model=model(tp, seed))
    answers = made.generate(asked(4))
    counts = made.stats().drafts["draft_model"]
    assert counts.num_windows > 40
    return answers, counts.acceptance


@pytest.mark.invariance
@pytest.mark.parametrize(("mode", "steps"), [("invariant", 1), ("invariant", 4), ("dvr", 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_draft_model_changes_no_bit_and_its_own_weights_are_always_right(seed, mode, steps):
    """With four steps, as many windows are one launch."""
    answers, acceptance = drafted(seed=seed, mode=mode, decode_steps=steps)
    assert [one.digest() for one in answers] == [one.digest() for one in plain()]
    assert acceptance == 1 if seed == 0 else acceptance < 0.9


@pytest.mark.invariance
def test_windows_of_rows_with_adapters_and_without_change_no_bit():
    adapters = [random_adapter(MODEL, seed=seed, rank=8) for seed in (1, 2)]
    names = ("", adapters[0].sha256, adapters[1].sha256, "")
    wanted = [
        dataclasses.replace(one, adapter=name) for one, name in zip(asked(4), names, strict=True)
    ]

    def answers(**options) -> list[Completion]:
        adapted = open_adapters(
            dummy_model(MODEL, backend=Backend.SM90), AdapterSizes(max_loras=2, max_lora_rank=16)
        )
        made = Engine(adapted, EngineConfig(**SIZES | options), draft_model=model(1, 0))
        for adapter in adapters:
            made.add_adapter(adapter)
        found = made.generate(wanted)
        kinds = {(key.kind, key.has_adapters) for key in made._runner.programs}
        assert (("windows", True) in kinds) is bool(options)
        return found

    expected = answers()
    without = [one.digest() for one in plain()]
    is_changed = [one.digest() != two for one, two in zip(expected, without, strict=True)]
    assert is_changed == [False, True, True, False]
    found = answers(**DRAFTS, decode_steps=4)
    assert [one.digest() for one in found] == [one.digest() for one in expected]


@pytest.mark.control
def test_control_drafts_that_are_not_compared_give_other_answers(monkeypatch):
    commit_drafts_unseen(monkeypatch)
    answers, _ = drafted(seed=1)
    assert any(one.digest() != two.digest() for one, two in zip(answers, plain(), strict=True))


@pytest.mark.gpus(2)
@pytest.mark.invariance
@pytest.mark.parametrize("seed", [0, 1])
def test_a_draft_model_beside_ranks_that_share_layers_changes_no_bit(seed):
    answers, acceptance = drafted(seed=seed, tp=2)
    assert [one.digest() for one in answers] == [one.digest() for one in plain()]
    assert acceptance == 1 if seed == 0 else acceptance < 0.9
