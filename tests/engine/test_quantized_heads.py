# SPDX-License-Identifier: Apache-2.0
"""Heads whose matrices are rounded to 8 bits change no bit of an answer."""

import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.running.programs import ProgramCache
from detjax.models.heads.head import DraftHead
from detjax.models.heads.quantize import quantize_head
from detjax.models.loading import LoadedModel
from detjax.models.registry import family_named
from detjax.pallas_kernels.backend import Backend
from detjax.testing.drafts import commit_drafts_unseen, mixed_requests
from detjax.testing.dummies import assert_same_completions, dummy_config, dummy_model
from detjax.testing.eagle import dummy_eagle, dummy_head
from detjax.testing.mtp import random_mtp_head
from detjax.testing.programs import plain_key
from detjax.testing.quantized import quantized_model

VOCAB = 12  # so small that some drafts are right by chance
TARGET = dummy_config(vocab_size=VOCAB, num_layers=4)
HEAD = dummy_eagle(TARGET, draft_vocab_size=9)
SIZES = {
    "batch_size": 2, "prefill_chunk": 64, "max_len": 384, "num_pages": 12, "self_check": "off",
    "verify_window": 4, "verify_rows": 2, "verify_patience": 0,
}  # fmt: skip


def requests() -> list[Request]:
    return mixed_requests(VOCAB, (5, 120, 64, 130, 20), max_tokens=30)


def rounded(head: DraftHead) -> DraftHead:
    quantize_head(head, "int8")
    return head


def mtp_head(model: LoadedModel) -> DraftHead:
    family = family_named("mimo")
    assert family is not None and family.mtp is not None
    return random_mtp_head(model, family.mtp.behind(model.config.num_layers))


def assert_changes_no_bit(model: LoadedModel, head: DraftHead, **changes) -> None:
    """Of the answers to all requests, also after a sleep, with windows of several lengths."""
    expected = Engine(dummy_or(model), EngineConfig(**SIZES)).generate(requests())
    drafts = {"draft_weights": head.head_config.method, **changes}
    made = Engine(model, EngineConfig(**SIZES | drafts), draft_model=head)
    assert_same_completions(made.generate(requests()), expected)
    made.sleep()
    made.wake_up()
    assert_same_completions(made.generate(requests()), expected)
    counts = made.stats().drafts[head.head_config.method]
    assert counts.num_windows > 40 and 0.02 < counts.acceptance < 0.6


def dummy_or(model: LoadedModel) -> LoadedModel:
    """The model without drafts on one rank, where several share it."""
    return model if model.mesh.size == 1 else dummy_model(model.config, backend=model.backend)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("backend", "mode", "tp"),
    [
        (Backend.REFERENCE, "invariant", 1),
        (Backend.PORTABLE, "dvr", 1),
        (Backend.REFERENCE, "invariant", 2),
    ],
)
def test_a_rounded_eagle_head_changes_no_bit(backend, mode, tp):
    model = dummy_model(TARGET, tp=tp, backend=backend)
    assert_changes_no_bit(model, rounded(dummy_head(model, HEAD)), mode=mode)


@pytest.mark.slow
@pytest.mark.invariance
def test_a_rounded_mtp_head_changes_no_bit():
    model = dummy_model(dummy_config(vocab_size=VOCAB, num_layers=2, qkv_bias=True))
    assert_changes_no_bit(model, rounded(mtp_head(model)))


@pytest.mark.slow
@pytest.mark.invariance
def test_a_rounded_head_beside_an_8_bit_model_changes_no_bit():
    model = quantized_model(dummy_model(TARGET), "int8-w8a8")
    assert_changes_no_bit(model, rounded(dummy_head(model, HEAD)))


@pytest.mark.slow
@pytest.mark.control
def test_control_committing_its_drafts_unseen_gives_other_bits(monkeypatch):
    model = dummy_model(TARGET)
    (expected,) = Engine(model, EngineConfig(**SIZES)).generate(requests()[:1])
    commit_drafts_unseen(monkeypatch)
    config = EngineConfig(**SIZES, draft_weights="eagle3")
    made = Engine(model, config, draft_model=rounded(dummy_head(model, HEAD)))
    (done,) = made.generate(requests()[:1])
    assert done.digest() != expected.digest()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_program_of_a_rounded_head_is_never_taken_for_one_of_a_plain_head(kind):
    """A later process reads kept programs by these names."""
    model = dummy_model(TARGET)
    key = plain_key(kind, mode="fast", weights="eagle3", rows=2, length=3, table_len=3)

    def name_for(head: DraftHead) -> str | None:
        cache = ProgramCache(model, num_pages=6, num_slots=2, window_len=4, draft_model=head)
        assert cache.drafts is not None
        program = cache.drafts.program(key, head.params_beside(model.params))
        described = cache._executable_of(key, program, *cache.drafts.traced_from, is_fast=True)
        return described.name(None)

    plain, ours, again = (dummy_head(model, HEAD) for _ in range(3))
    names = [name_for(head) for head in (plain, rounded(ours), rounded(again))]
    assert None not in names and names[0] != names[1] == names[2]
