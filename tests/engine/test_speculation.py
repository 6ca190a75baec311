# SPDX-License-Identifier: Apache-2.0
"""Every source of drafts, right or wrong, changes the time of an answer and no bit of it."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine.config import EngineConfig, ReplicaConfig
from detjax.engine.engine import Engine
from detjax.engine.metrics import DraftCounts
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.draft_programs import DraftState
from detjax.engine.running.program_key import program_keys
from detjax.engine.running.programs import ProgramCache
from detjax.engine.scheduling.draft_choice import DraftChoice
from detjax.engine.speculative_config import SpeculativeConfig
from detjax.models.config import LinearAttentionConfig
from detjax.numerics import NumericsProfile
from detjax.testing.drafts import commit_drafts_unseen, mixed_requests
from detjax.testing.dummies import assert_same_completions, dummy_config, dummy_model

VOCAB, WINDOW, PAGES = 320, 4, 4
MODEL = dummy_config(vocab_size=VOCAB)
SIZES = {
    "batch_size": 2, "prefill_chunk": 64, "max_len": 256, "num_pages": PAGES,
    "verify_window": WINDOW, "verify_rows": 2, "verify_patience": 0, "self_check": "off",
}  # fmt: skip
DRAFT_MODEL = {"draft_weights": "draft_model"}
NGRAM = {"has_prompt_lookup": True}


@pytest.fixture(scope="module")
def model():
    return dummy_model(MODEL)


@pytest.fixture(scope="module")
def draft():
    """A model whose weights tests replace."""
    return dummy_model(MODEL)


@pytest.fixture(scope="module")
def programs(model, draft):
    return ProgramCache(model, num_pages=PAGES, num_slots=2, window_len=WINDOW, draft_model=draft)


@pytest.fixture(scope="module")
def engine(model, draft, programs):
    def make(**changes) -> Engine:
        given = {name: changes.pop(name) for name in ("drafters",) if name in changes}
        config = EngineConfig(**SIZES | changes)
        shared = changes.get("programs", programs)
        return Engine(model, config, programs=shared, draft_model=draft, **given)

    return make


def weights_of(kind: str) -> dict:
    """Weights of a draft model."""
    params = dummy_model(MODEL, seed=1 if kind == "other weights" else 0).params
    if kind == "NaN":
        params = jax.tree.map(lambda x: x * jnp.asarray(np.nan, x.dtype), params)
    return params


def requests() -> list[Request]:
    """Prompts around a page and a chunk."""
    return mixed_requests(VOCAB, (5, 120, 63, 130, 20), max_tokens=14, stop_token_ids=range(40))


@pytest.fixture(scope="module")
def plain(engine) -> list[Completion]:
    return engine(batch_size=2).generate(requests())


# ------------------------------------------------------------------------------- the draft model


@pytest.mark.invariance
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["invariant", "dvr"])
@pytest.mark.parametrize("kind", ["the same weights", "other weights", "NaN"])
def test_a_draft_model_changes_no_bit(engine, draft, plain, kind, mode):
    draft.replace_weights(weights_of(kind))
    made = engine(mode=mode, **DRAFT_MODEL)
    assert_same_completions(made.generate(requests()), plain)
    counts = made.stats().drafts["draft_model"]
    if kind == "the same weights":
        assert (
            counts.acceptance > 0.6
        )  # one request is filtered and penalised, which drafts are not
    else:
        assert counts.num_windows > 10 and counts.acceptance < 0.3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_agrees_has_no_hole_in_its_cache(engine, draft, temperature):
    """A hole behind each window that is accepted whole would cost most of the drafts after it."""
    draft.replace_weights(weights_of("the same weights"))
    made = engine(batch_size=2, **DRAFT_MODEL)
    sampling = SamplingParams(max_tokens=60, temperature=temperature, seed=7)
    asked = [Request(prompt_token_ids=(3, 1, 4, 1, 5), sampling=sampling)]
    made.generate(asked)
    counts = made.stats().drafts["draft_model"]
    assert counts.acceptance > 0.9
    assert counts.tokens_per_window > 3.5


@pytest.mark.invariance
def test_drafts_stop_at_high_batch_and_begin_again_with_what_was_missed(engine, draft, model):
    draft.replace_weights(weights_of("the same weights"))
    asked = [
        Request(prompt_token_ids=(7, 8, 9), sampling=SamplingParams(max_tokens=70)),
        Request(prompt_token_ids=(9, 9), sampling=SamplingParams(max_tokens=20)),
    ]
    expected = engine().generate(asked)
    made = engine(max_draft_batch=1, **DRAFT_MODEL)
    drafted_of_two = 0
    for request in asked:
        made.add_request(request.prompt_token_ids, request.sampling)
    outputs = []
    while made.has_work:
        outputs += made.step()
        if made.stats().decode_tokens < 36:
            drafted_of_two = made.stats().num_windows
    got = [
        [t for output in outputs if output.request_id == i for t in output.token_ids]
        for i in range(2)
    ]
    assert [tuple(ids) for ids in got] == [done.token_ids for done in expected]
    counts = made.stats().drafts["draft_model"]
    assert drafted_of_two <= 2 < counts.num_windows
    assert counts.acceptance > 0.9, "the model has read the 20 tokens that were made without it"


LINEAR = LinearAttentionConfig(
    num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=16, conv_width=4, layers=(True, False)
)
LAYERS = {
    "full attention": MODEL,
    "a window": dataclasses.replace(MODEL, sliding_windows=(24, None)),
    "linear attention": dataclasses.replace(MODEL, linear_attention=LINEAR, has_output_gate=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "steps_ahead"),
    [("full attention", 1), ("full attention", 2), ("a window", 1), ("linear attention", 1)],
)
def test_a_draft_model_of_the_same_weights_is_always_right_while_drafts_come_and_go(
    layers, steps_ahead
):
    """In float32, behind windows accepted whole, waits for pages, preemption and other lengths.

    Its cache holds large numbers where no step has written, so a draft that reads one is wrong.
    """
    profile = NumericsProfile(
        weight_dtype="float32", compute_dtype="float32", attention_block=16, attention_split=64
    )
    model, draft = (dummy_model(LAYERS[layers], profile=profile) for _ in range(2))
    sizes = SIZES | {
        "num_pages": 6, "max_len": 96, "has_prefix_cache": False, "verify_window": 16,
        "prefill_chunk": 16, "max_draft_batch": 1, "steps_ahead": steps_ahead,
    }  # fmt: skip
    made = Engine(model, EngineConfig(**sizes, **DRAFT_MODEL), draft_model=draft)
    state = made._runner._device._drafts
    for length in range(20, 56, 4):
        assert isinstance(state, DraftState)
        filled = jax.tree.map(lambda x: jnp.full_like(x, 100.0), state.pages)
        made._runner._device._drafts = dataclasses.replace(state, pages=filled)
        made.add_request((1,) * 16, SamplingParams(max_tokens=80))
        made.step()
        made.step()
        made.add_request((2,) * length, SamplingParams(max_tokens=80 - length))
        made.drain()
        state = made._runner._device._drafts
    stats = made.stats()
    assert stats.num_preempted > 2 and stats.decode_tokens > 100
    assert stats.drafts["draft_model"].num_windows > 30
    assert stats.drafts["draft_model"].acceptance == 1


@pytest.mark.invariance
def test_drafts_go_on_after_preemption_and_a_found_prefix(engine, draft):
    draft.replace_weights(weights_of("the same weights"))
    prompt = tuple(range(129))
    asked = [Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=30))] * 2
    expected = engine().generate(asked)
    made = engine(**DRAFT_MODEL)
    made.add_request(prompt, asked[0].sampling)
    while made.stats().num_windows < 3:
        made.step()
    (seq,) = made._scheduler.running
    made._scheduler._preempt(seq)
    outputs = made.drain()
    assert outputs[-1].finish_reason is not None and made.stats().num_preempted == 1
    assert_same_completions(made.generate(asked), expected)
    assert made.stats().prefix_tokens > 2 * 128
    assert made.stats().drafts["draft_model"].acceptance > 0.9


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
def test_a_draft_model_on_a_mesh_changes_no_bit(plain, dp, tp):
    model, draft = (dummy_model(MODEL, dp=dp, tp=tp) for _ in range(2))
    sizes = SIZES | {"batch_size": 2 * dp, "num_pages": PAGES * dp}
    made = Engine(model, EngineConfig(**sizes, **DRAFT_MODEL), draft_model=draft)
    assert_same_completions(made.generate(requests()), plain)
    assert made.stats().drafts["draft_model"].acceptance > 0.6


def test_only_programs_that_are_compiled_ahead_have_run(programs, plain):
    configs = [
        EngineConfig(**SIZES, **DRAFT_MODEL, mode=mode, max_draft_batch=most)
        for mode in ("invariant", "dvr")
        for most in (0, 1)
    ]
    ahead = {
        key
        for config in configs
        for key in program_keys(ReplicaConfig.of(config, dp=1, page_len=128, steps_beat_xla=False))
    }
    assert set(programs) <= ahead
    assert "decode fast draft_model 2x3 to 2 pages" in {key.name for key in ahead}


def test_drafts_go_on_after_sleep(engine, draft, plain):
    draft.replace_weights(weights_of("the same weights"))
    made = engine(**DRAFT_MODEL)
    made.sleep()
    made.wake_up()
    assert_same_completions(made.generate(requests()[:1]), plain[:1])
    assert made.stats().drafts["draft_model"].acceptance > 0.9


# --------------------------------------------------------------------------- drafters of the host


class Knowing:
    """Knows the answers, and drafts what its kind says."""

    name = "knowing"

    def __init__(self, answers: list[Completion]):
        self.after: dict[tuple[int, ...], tuple[int, ...]] = {}
        for request, done in answers:
            self.after[request.prompt_token_ids, done.sequence_idx] = done.token_ids

    def right(self, seq) -> tuple[int, ...]:
        answer = self.after[seq.request.prompt_token_ids, seq.sequence_idx]
        return answer[seq.num_outputs :]

    def draft(self, seq, most):
        return self.right(seq)[:most] or None


class AlwaysWrong(Knowing):
    def draft(self, seq, most):
        return tuple((token + 1) % VOCAB for token in self.right(seq)[:most]) or None


class RightButLate(Knowing):
    """Drafts the last committed token again, and what followed it."""

    def draft(self, seq, most):
        return (seq.tokens[-1], *self.right(seq))[:most] or None


class PastTheEnd(Knowing):
    """Drafts on behind the end token and the greatest length, more than is asked for."""

    def draft(self, seq, most):
        return (*self.right(seq), *range(50))


class OfOtherLengths(Knowing):
    def draft(self, seq, most):
        return self.right(seq)[: seq.num_outputs % (most + 1)]


@pytest.mark.invariance
@pytest.mark.parametrize("kind", [Knowing, AlwaysWrong, RightButLate, PastTheEnd, OfOtherLengths])
def test_a_drafter_of_the_host_changes_no_bit(engine, plain, kind):
    pairs = [(requests()[done.request_idx], done) for done in plain]
    made = engine(drafters=(kind(pairs),), **NGRAM)
    assert_same_completions(made.generate(requests()), plain)
    counts = made.stats().drafts["knowing"]
    assert counts.num_windows > 5
    acceptance = {Knowing: 1.0, AlwaysWrong: 0.0, OfOtherLengths: 1.0}
    if kind in acceptance:
        assert counts.acceptance == acceptance[kind]


@pytest.mark.invariance
def test_prompt_lookup_changes_no_bit(engine, plain):
    made = engine(**NGRAM)
    assert_same_completions(made.generate(requests()), plain)
    repeated = [Request(prompt_token_ids=(1, 2, 3) * 9, sampling=SamplingParams(max_tokens=12))]
    assert_same_completions(made.generate(repeated), engine().generate(repeated))
    assert made.stats().drafts["ngram"].num_windows > 0


@pytest.mark.invariance
def test_suffix_decoding_changes_no_bit_and_drafts_answers_of_before(engine, plain):
    speculative = SpeculativeConfig.of({"method": "suffix", "num_speculative_tokens": 3})
    made = engine(drafters=speculative.drafters(), **NGRAM)
    assert_same_completions(made.generate(requests()), plain)
    first = made.stats().drafts.get("suffix", DraftCounts())
    assert_same_completions(made.generate(requests()), plain)
    both = made.stats().drafts["suffix"]
    again = both.accepted_tokens - first.accepted_tokens
    assert again > 0.6 * (both.draft_tokens - first.draft_tokens) > 10


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_a_draft_outside_the_vocabulary_ends_its_sequence_alone(engine, plain, token):
    class Outside:
        name = "outside"

        def draft(self, seq, most):
            return (token,) if seq.request_id == 0 else None

    made = engine(drafters=(Outside(),), **NGRAM)
    for request in requests()[:2]:
        made.add_request(request.prompt_token_ids, request.sampling)
    outputs = made.drain()
    errors = [output.error for output in outputs if output.request_id == 0 and output.error]
    assert (
        f"the drafter 'outside' drafted {token}, which is no token of the vocabulary" in errors[0]
    )
    ids = [t for output in outputs if output.request_id == 1 for t in output.token_ids]
    assert tuple(ids) == plain[1].token_ids


# ---------------------------------------------------------------------------------------- control


@pytest.mark.slow
@pytest.mark.control
def test_control_committing_drafts_unseen_gives_other_bits(
    engine, model, draft, plain, monkeypatch
):
    """Acceptance by the draft's own argmax, not by equality with the canonical token."""
    commit_drafts_unseen(monkeypatch)
    draft.replace_weights(weights_of("other weights"))
    unsafe = ProgramCache(model, num_pages=PAGES, num_slots=2, window_len=WINDOW, draft_model=draft)
    made = Engine(model, EngineConfig(**SIZES, **DRAFT_MODEL), programs=unsafe, draft_model=draft)
    (done,) = made.generate(requests()[:1])
    assert made.stats().acceptance == 1.0
    assert done.digest() != plain[0].digest()


# --------------------------------------------------------------------------------------- refusals


def other(**changes):
    return dummy_model(dataclasses.replace(MODEL, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 384}, "has a vocabulary of 384 and the model .* of 320"),
        ({"max_position_embeddings": 128}, "max_len=256 is longer than the context of the draft"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, EngineConfig(**SIZES, **DRAFT_MODEL), draft_model=other(**changes))


def test_a_missing_draft_model_is_named(model):
    with pytest.raises(ValueError, match="needs a draft model; give Engine"):
        Engine(model, EngineConfig(**SIZES, **DRAFT_MODEL))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "fast"}, "needs mode='dvr' or 'invariant', not 'fast'"),
        ({"verify_window": 1}, "needs verify_window=1 above 1"),
        ({"has_prompt_lookup": True}, "has_prompt_lookup=True off"),
        ({"max_draft_batch": -1}, "max_draft_batch=-1 must be at least 0"),
    ],
)
def test_options_that_do_not_go_with_a_draft_model_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{**SIZES, **DRAFT_MODEL, **changes})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "is no JSON object"),
        ("[]", "must be an object"),
        ({}, "neither a method nor a model"),
        ({"method": "medusa"}, "method='medusa' must be one of"),
        (
            {"method": "draft_model"},
            "method='draft_model' needs `model`, the folder or Hugging Face id of a",
        ),
        ({"method": "ngram", "model": "a"}, "leave it out"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0 must be"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "must be an integer from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens=True must"),
        ({"method": "ngram", "disable_by_batch_size": -1}, "disable_by_batch_size=-1 must be"),
        ({"method": "ngram", "tokens": 2}, "'tokens' is no field"),
        (
            {"method": "eagle3"},
            "method='eagle3' needs `model`, the folder or Hugging Face id of an EAGLE",
        ),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "must be a number from 0 to 1"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "from 2 to 65536"),
        (
            {"method": "ngram", "suffix_decoding_max_tree_depth": 9},
            "suffix_decoding_max_tree_depth is for method='suffix', not 'ngram'; leave it out",
        ),
    ],
)
def test_a_wrong_speculative_config_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of(given)


def test_a_speculative_config_says_what_an_engine_does():
    given = {"model": "small", "num_speculative_tokens": 5, "disable_by_batch_size": 8}
    made = SpeculativeConfig.of(json.dumps(given))
    assert made == SpeculativeConfig.of(made) == SpeculativeConfig.of(given)
    assert made.method == "draft_model"
    config = EngineConfig(**made.engine_options())
    assert (config.verify_window, config.max_draft_batch, config.verify_rows) == (6, 8, 8)
    assert config.verify_batches == (1,) and config.draft_weights == "draft_model"
    lookup = EngineConfig(**SpeculativeConfig(method="ngram").engine_options())
    assert lookup.has_prompt_lookup and lookup.draft_weights == "full"


# ------------------------------------------------------------------------------- chosen by itself


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("options", [DRAFT_MODEL, NGRAM], ids=["draft model", "ngram"])
def test_a_chosen_number_of_drafts_changes_no_bit(engine, draft, monkeypatch, options):
    """Over a run with no drafts, few and a full window, as a clock that lies has them chosen."""
    draft.replace_weights(weights_of("the same weights"))
    asked = [
        Request(
            prompt_token_ids=(3, 1, 4, 1, i),
            sampling=SamplingParams(max_tokens=150, temperature=0.8, seed=i),
        )
        for i in range(2)
    ]
    expected = engine(max_len=256).generate(asked)
    chosen = itertools.cycle([3] * 5 + [1] * 7 + [0] * 6)
    monkeypatch.setattr(DraftChoice, "choose", lambda *_, has_prefill: next(chosen))
    knowing = Knowing([(asked[done.request_idx], done) for done in expected])
    made = engine(adapts_drafts=True, drafters=(knowing,), **options)
    assert_same_completions(made.generate(asked), expected)
    assert 10 < made.stats().num_windows
    if options is DRAFT_MODEL:
        names = {key.name for key in made.programs if key.weights == "draft_model"}
        assert any(" 2x1 " in name for name in names) and any(" 2x3 " in name for name in names)


def test_a_choice_is_told_whether_the_step_before_read_prompts(engine, draft, monkeypatch):
    draft.replace_weights(weights_of("the same weights"))
    told = []
    monkeypatch.setattr(
        DraftChoice, "choose", lambda *_, has_prefill: told.append(has_prefill) or 0
    )
    made = engine(adapts_drafts=True, **DRAFT_MODEL)
    sampling = SamplingParams(max_tokens=20, temperature=0.8, seed=1)
    made.generate([Request(prompt_token_ids=(3, 1, 4), sampling=sampling)])
    assert told[0] is True and not any(told[1:]) and len(told) > 10


def test_the_engine_notes_what_its_steps_take(engine, draft):
    draft.replace_weights(weights_of("the same weights"))
    made = engine(adapts_drafts=True, **DRAFT_MODEL)
    sampling = SamplingParams(max_tokens=200, temperature=0.8, seed=1)
    made.generate([Request(prompt_token_ids=(3, 1, 4), sampling=sampling)])
    rates = made._scheduler._speculation._choice.rates(1)
    assert rates.keys() >= {0, 3} and all(rate > 0 for rate in rates.values())


def test_choosing_drafts_without_a_source_of_them_is_refused():
    with pytest.raises(ValueError, match="adapts_drafts=True needs has_prompt_lookup, or"):
        EngineConfig(adapts_drafts=True)
