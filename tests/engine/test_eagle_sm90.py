# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads on a Hopper GPU: no bit of an answer differs.

Heads have random weights. Two drafts of three are replaced by the right tokens, so windows of every
length are accepted.
"""

from functools import cache

import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.program_key import ProgramKey
from detjax.models.heads.quantize import quantize_head
from detjax.models.loading import LoadedModel
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.quantized import W8A8Matrix
from detjax.testing.drafts import commit_drafts_unseen, drafts_of, every_third_wrong
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.eagle import dummy_eagle, dummy_head

pytestmark = pytest.mark.gpu

VOCAB = 1024
MODEL = dummy_config(
    num_heads=8, num_kv_heads=2, head_dim=128, hidden_size=512, intermediate_size=1536,
    vocab_size=VOCAB, num_layers=4,
)  # fmt: skip
HEAD = dummy_eagle(MODEL, draft_vocab_size=512)
PROMPT = tuple(int(t) for t in np.random.default_rng(2).integers(0, VOCAB, 200))
ASKED = Request(
    prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=90, temperature=0.8, seed=5)
)
SIZES = {"batch_size": 4, "prefill_chunk": 128, "max_len": 384, "self_check": "off"}
DRAFTS = {
    "draft_weights": "eagle3", "verify_window": 5, "verify_rows": 4, "verify_patience": 0,
}  # fmt: skip


@cache
def model(tp: int) -> LoadedModel:
    return dummy_model(MODEL, tp=tp, backend=Backend.SM90)


@cache
def plain() -> Completion:
    """The answer of one GPU without drafts."""
    (done,) = Engine(model(1), EngineConfig(**SIZES)).generate([ASKED])
    return done


def drafted(
    *, count: int = 4, tp: int = 1, is_int8: bool = False, **changes
) -> tuple[list[Completion], Engine]:
    """Answers to the request, so many times at once."""
    head = dummy_head(model(tp), HEAD)
    if is_int8:
        quantize_head(head, "int8")
    text = np.array([*PROMPT, *plain().token_ids, *range(8)], np.int32)
    mostly_right = drafts_of(every_third_wrong(text, VOCAB))
    made = Engine(
        model(tp), EngineConfig(**SIZES | DRAFTS | changes),
        draft_model=head, candidates=mostly_right,
    )  # fmt: skip
    return made.generate([ASKED] * count), made


@pytest.mark.invariance
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize(("mode", "steps"), [("invariant", 1), ("invariant", 4), ("dvr", 1)])
def test_drafts_of_a_head_change_no_bit(mode, steps, is_int8):
    """With four steps, as many windows are one launch."""
    answers, made = drafted(mode=mode, is_int8=is_int8, decode_steps=steps)
    assert [done.digest() for done in answers] == [plain().digest()] * 4
    assert 0.3 < made.stats().drafts["eagle3"].acceptance < 0.9


@pytest.mark.control
@pytest.mark.parametrize("steps", [1, 4])
def test_control_drafts_that_are_not_compared_give_another_answer(monkeypatch, steps):
    commit_drafts_unseen(monkeypatch)
    (done,), _ = drafted(count=1, decode_steps=steps)
    assert done.digest() != plain().digest()


@pytest.mark.parametrize("is_wrong", [False, pytest.param(True, marks=pytest.mark.control)])
def test_windows_of_one_launch_are_compared_with_prefill(is_wrong, monkeypatch):
    if is_wrong:
        commit_drafts_unseen(monkeypatch)
    config = EngineConfig(**SIZES | DRAFTS | {"decode_steps": 4, "self_check": "start"})
    made = Engine(model(1), config, draft_model=dummy_head(model(1), HEAD))
    made.compile(requests=[ASKED])
    kinds = {key.kind for key in made._runner.programs.checked if isinstance(key, ProgramKey)}
    assert "windows" in kinds
    assert (made._claim.difference is not None) is is_wrong


@pytest.mark.invariance
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_head_whose_own_drafts_are_verified_changes_no_bit(is_int8):
    head = dummy_head(model(1), HEAD)
    if is_int8:
        quantize_head(head, "int8")
    assert isinstance(head.params["down"], W8A8Matrix) is is_int8
    made = Engine(model(1), EngineConfig(**SIZES | DRAFTS), draft_model=head)
    assert [done.digest() for done in made.generate([ASKED] * 2)] == [plain().digest()] * 2
    assert made.stats().drafts["eagle3"].num_windows > 20


@pytest.mark.gpus(2)
@pytest.mark.invariance
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("mode", ["invariant", "dvr"])
def test_a_head_beside_ranks_that_share_layers_changes_no_bit(mode, is_int8):
    answers, made = drafted(mode=mode, tp=2, is_int8=is_int8)
    assert [done.digest() for done in answers] == [plain().digest()] * 4
    assert 0.3 < made.stats().drafts["eagle3"].acceptance < 0.9
