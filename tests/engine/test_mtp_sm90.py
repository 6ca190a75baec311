# SPDX-License-Identifier: Apache-2.0
"""MTP heads on a Hopper GPU: no bit of an answer differs.

Heads have random weights. Two drafts of three are replaced by the right tokens, so windows of every
length are accepted.
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
from detjax.models.config import ExpertConfig, LinearAttentionConfig
from detjax.models.family import MtpLayout
from detjax.models.heads.quantize import quantize_head
from detjax.models.loading import LoadedModel
from detjax.models.registry import family_named
from detjax.pallas_kernels.backend import Backend
from detjax.testing.drafts import commit_drafts_unseen, drafts_of, every_third_wrong
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.mtp import random_mtp_head
from detjax.testing.quantized import quantized_model

pytestmark = pytest.mark.gpu

VOCAB = 1024
PLAIN = dummy_config(
    num_heads=8, num_kv_heads=2, head_dim=128, hidden_size=512, intermediate_size=1536,
    vocab_size=VOCAB, num_layers=2, qkv_bias=True,
)  # fmt: skip
LINEAR = LinearAttentionConfig(
    num_key_heads=4, num_value_heads=8, key_dim=64, value_dim=64, conv_width=4, layers=(True, False)
)
CONFIGS = {
    "mimo": PLAIN,
    "qwen3_5_text": dataclasses.replace(
        PLAIN, qkv_bias=False, qk_norm=True, linear_attention=LINEAR, has_output_gate=True
    ),
}
CONFIGS |= {
    "qwen3_next": dataclasses.replace(
        CONFIGS["qwen3_5_text"],
        experts=ExpertConfig(
            num_experts=8, top_k=2, width=256, renormalise=True, layers=(True, True),
            shared_width=256, has_shared_gate=True,
        ),
    ),
    "glm4_moe": dataclasses.replace(
        PLAIN,
        qk_norm=True,
        experts=ExpertConfig(
            num_experts=8, top_k=2, width=256, renormalise=True, layers=(False, True),
            shared_width=256, sigmoid_scale=2.5,
        ),
    ),
}  # fmt: skip
PACKED = "mimo as int4-w4a16"
CONFIGS[PACKED] = CONFIGS["mimo"]
DENSE = "mimo", "qwen3_5_text"
"""Whose heads ranks can share a model with."""
PROMPT = tuple(int(t) for t in np.random.default_rng(2).integers(0, VOCAB, 200))
ASKED = Request(
    prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=90, temperature=0.8, seed=5)
)
SIZES = {"batch_size": 4, "prefill_chunk": 128, "max_len": 384, "self_check": "off"}
DRAFTS = {"draft_weights": "mtp", "verify_window": 5, "verify_rows": 4, "verify_patience": 0}


def layout_of(family: str) -> MtpLayout:
    found = family_named(family.partition(" ")[0])
    assert found is not None and found.mtp is not None
    return found.mtp.behind(CONFIGS[family].num_layers)


@cache
def model(family: str, tp: int = 1) -> LoadedModel:
    made = dummy_model(CONFIGS[family], tp=tp, backend=Backend.SM90)
    return quantized_model(made, "int4-w4a16") if family == PACKED else made


@cache
def plain(family: str) -> Completion:
    """The answer without drafts."""
    (done,) = Engine(model(family), EngineConfig(**SIZES)).generate([ASKED])
    return done


def drafted(
    family: str, *, count: int = 4, tp: int = 1, **changes
) -> tuple[list[Completion], Engine]:
    """Answers to the request, so many times at once."""
    text = np.array([*PROMPT, *plain(family).token_ids, *range(8)], np.int32)
    mostly_right = drafts_of(every_third_wrong(text, VOCAB))
    layout = layout_of(family)
    made = Engine(
        model(family, tp), EngineConfig(**SIZES | DRAFTS | changes),
        draft_model=random_mtp_head(model(family, tp), layout), candidates=mostly_right,
    )  # fmt: skip
    return made.generate([ASKED] * count), made


@pytest.mark.invariance
@pytest.mark.parametrize(("mode", "steps"), [("invariant", 1), ("invariant", 4), ("dvr", 1)])
@pytest.mark.parametrize("family", CONFIGS)
def test_drafts_of_a_head_change_no_bit(family, mode, steps):
    """With four steps, as many windows are one launch."""
    answers, made = drafted(family, mode=mode, decode_steps=steps)
    assert [done.digest() for done in answers] == [plain(family).digest()] * 4
    assert 0.3 < made.stats().drafts["mtp"].acceptance < 0.9


@pytest.mark.gpus(2)
@pytest.mark.invariance
@pytest.mark.parametrize("family", DENSE)
def test_a_head_beside_ranks_that_share_layers_changes_no_bit(family):
    answers, made = drafted(family, tp=2)
    assert [done.digest() for done in answers] == [plain(family).digest()] * 4
    assert 0.3 < made.stats().drafts["mtp"].acceptance < 0.9


@pytest.mark.invariance
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_head_with_an_acceptance_of_its_own_changes_no_bit(family, is_int8):
    layout = layout_of(family)
    head = random_mtp_head(model(family), layout)
    if is_int8:
        quantize_head(head, "int8")
    made = Engine(model(family), EngineConfig(**SIZES | DRAFTS), draft_model=head)
    assert [done.digest() for done in made.generate([ASKED] * 2)] == [plain(family).digest()] * 2
    assert made.stats().drafts["mtp"].num_windows > 20


@pytest.mark.control
@pytest.mark.parametrize("family", CONFIGS)
def test_control_drafts_that_are_not_compared_give_another_answer(family, monkeypatch):
    commit_drafts_unseen(monkeypatch)
    (done,), _ = drafted(family, count=1)
    assert done.digest() != plain(family).digest()
