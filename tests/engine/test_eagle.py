# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head changes the time of an answer and no bit of it, and drafts what it should."""

import dataclasses

import jax
import numpy as np
import pytest

from detjax.engine.config import EngineConfig, ReplicaConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running import head_programs
from detjax.engine.running.program_key import program_keys
from detjax.engine.running.programs import ProgramCache
from detjax.models.heads.features import text_states
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels import portable, reference
from detjax.testing.drafts import commit_drafts_unseen, drafts_of, every_third_wrong, mixed_requests
from detjax.testing.dummies import assert_same_completions, dummy_config, dummy_model
from detjax.testing.eagle import dummy_eagle, dummy_head, dummy_tensors, reference_drafts
from detjax.testing.programs import plain_key

VOCAB, WINDOW, PAGES = 12, 4, 6  # so small a vocabulary that some drafts are right by chance
MODEL = dummy_config(vocab_size=VOCAB, num_layers=4)
HEAD = dummy_eagle(MODEL, draft_vocab_size=9)
SIZES = {
    "batch_size": 2, "prefill_chunk": 64, "max_len": 384, "num_pages": PAGES,
    "verify_window": WINDOW, "verify_rows": 2, "verify_patience": 0, "self_check": "off",
}  # fmt: skip
SEED = 1
EAGLE3 = {"draft_weights": "eagle3"}


@pytest.fixture(scope="module")
def model():
    return dummy_model(MODEL)


@pytest.fixture(scope="module")
def head(model):
    return dummy_head(model, HEAD)


@pytest.fixture(scope="module")
def programs(model, head):
    return ProgramCache(model, num_pages=PAGES, num_slots=2, window_len=WINDOW, draft_model=head)


@pytest.fixture(scope="module")
def engine(model, head, programs):
    def make(**changes) -> Engine:
        config = EngineConfig(**SIZES | changes)
        return Engine(model, config, programs=programs, draft_model=head)

    return make


def requests() -> list[Request]:
    """Prompts around a page and a chunk."""
    return mixed_requests(VOCAB, (5, 120, 64, 130, 20), max_tokens=30)


@pytest.fixture(scope="module")
def plain(engine) -> list[Completion]:
    return engine().generate(requests())


# --------------------------------------------------------------------------------------- bits


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("mode", ["invariant", "dvr"])
def test_a_head_changes_no_bit(engine, plain, mode):
    made = engine(mode=mode, **EAGLE3)
    assert_same_completions(made.generate(requests()), plain)
    counts = made.stats().drafts["eagle3"]
    assert counts.num_windows > 20
    assert 0.02 < counts.acceptance < 0.6, "windows of every length must have been accepted"


@pytest.mark.slow
@pytest.mark.invariance
def test_a_head_of_nans_changes_no_bit(model, programs, plain, head):
    host = head.take_weights_to_host()
    try:
        head.put_weights_back(
            {
                name: w if name == "draft_ids" else np.full_like(w, np.nan)
                for name, w in host.items()
            }
        )
        made = Engine(model, EngineConfig(**SIZES, **EAGLE3), programs=programs, draft_model=head)
        assert_same_completions(made.generate(requests()[:2]), plain[:2])
    finally:
        head.put_weights_back(host)


@pytest.mark.slow
@pytest.mark.invariance
def test_several_tokens_a_launch_and_drafts_that_stop_and_begin_again_change_no_bit(engine):
    asked = [
        Request(prompt_token_ids=(7, 8, 9), sampling=SamplingParams(max_tokens=60)),
        Request(prompt_token_ids=(9, 9), sampling=SamplingParams(max_tokens=20)),
    ]
    expected = engine().generate(asked)
    made = engine(max_draft_batch=1, decode_steps=3, **EAGLE3)
    assert_same_completions(made.generate(asked), expected)
    counts = made.stats().drafts["eagle3"]
    assert 5 < counts.num_windows < 45
    assert made.stats().decode_tokens > 60


@pytest.mark.slow
@pytest.mark.invariance
def test_drafts_go_on_after_preemption_a_found_prefix_sleep_and_other_weights(engine):
    prompt = tuple(int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 140))
    asked = [Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=30))] * 2
    expected = engine().generate(asked)
    made = engine(**EAGLE3)
    made.add_request(prompt, asked[0].sampling)
    while made.stats().num_windows < 3:
        made.step()
    (seq,) = made._scheduler.running
    made._scheduler._preempt(seq)
    assert made.drain()[-1].finish_reason is not None and made.stats().num_preempted == 1
    assert_same_completions(made.generate(asked), expected)
    assert made.stats().prefix_tokens > 2 * 120
    made.sleep()
    made.wake_up()
    assert_same_completions(made.generate(asked), expected)
    made.load_weights(dummy_model(MODEL).params, version=1)  # the same, in other arrays
    before = made.stats().num_windows
    assert_same_completions(made.generate(asked), expected)
    assert made.stats().num_windows > before + 10


@pytest.mark.slow
@pytest.mark.invariance
def test_a_head_beside_logprobs_of_a_prompt_changes_no_bit(engine):
    sampling = SamplingParams(max_tokens=20, prompt_logprobs=2, logprobs=2)
    asked = [Request(prompt_token_ids=(1, 2, 3, 4, 5) * 15, sampling=sampling)]
    expected, actual = engine().generate(asked), engine(**EAGLE3).generate(asked)
    assert_same_completions(actual, expected)
    assert actual[0].prompt_logprobs == expected[0].prompt_logprobs
    assert actual[0].top_logprobs == expected[0].top_logprobs


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("kind", "acceptance"), [("right", 1.0), ("late", 0.3), ("half", 0.6), ("wrong", 0.0)]
)
def test_drafts_that_are_known_change_no_bit(model, head, programs, kind, acceptance):
    """Windows are accepted whole, or wrong from any place on; drafts go on behind the end."""
    sampling = SamplingParams(max_tokens=70, temperature=0.9, seed=4)
    asked = [Request(prompt_token_ids=(1, 5, 2) * 25, sampling=sampling)]
    (expected,) = Engine(model, EngineConfig(**SIZES), programs=programs).generate(asked)
    text = np.array([*asked[0].prompt_token_ids, *expected.token_ids, *range(WINDOW)], np.int32)
    tables = {
        "right": text,
        "late": np.roll(text, 1),
        "half": every_third_wrong(text, VOCAB),
        "wrong": (text + 1) % VOCAB,
    }
    known = ProgramCache(
        model, num_pages=PAGES, num_slots=2, window_len=WINDOW, candidates=drafts_of(tables[kind]),
        others=programs, draft_model=head,
    )  # fmt: skip
    made = Engine(model, EngineConfig(**SIZES, **EAGLE3), programs=known, draft_model=head)
    assert_same_completions(made.generate(asked), [expected])
    counts = made.stats().drafts["eagle3"]
    assert (
        counts.acceptance <= acceptance
        if kind == "late"
        else (abs(counts.acceptance - acceptance) < 0.15)
    )


@pytest.mark.slow
@pytest.mark.invariance
def test_a_head_on_two_replicas_changes_no_bit(plain):
    model = dummy_model(MODEL, dp=2)
    sizes = SIZES | {"batch_size": 4, "num_pages": 2 * PAGES}
    made = Engine(model, EngineConfig(**sizes, **EAGLE3), draft_model=dummy_head(model, HEAD))
    assert_same_completions(made.generate(requests()), plain)
    assert made.stats().drafts["eagle3"].num_windows > 20


# --------------------------------------------------------------------------------------- ranks


def on_ranks(dp: int, tp: int, **changes) -> Engine:
    """An engine whose prefill chunks are so long that ranks have rows of the residual stream."""
    model = dummy_model(MODEL, dp=dp, tp=tp)
    sizes = SIZES | {"batch_size": 2 * dp, "num_pages": dp * PAGES, "prefill_chunk": 128}
    return Engine(
        model, EngineConfig(**sizes | EAGLE3 | changes), draft_model=dummy_head(model, HEAD)
    )


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("dp", "tp", "mode"), [(1, 2, "dvr"), (2, 2, "invariant")])
def test_a_head_on_ranks_that_share_layers_changes_no_bit(plain, dp, tp, mode):
    made = on_ranks(dp, tp, mode=mode)
    assert_same_completions(made.generate(requests()), plain)
    counts = made.stats().drafts["eagle3"]
    assert counts.num_windows > 20 and counts.accepted_tokens > 5


def of_ranks(head, *seeds: int) -> None:
    """Give each rank the weights of another head."""
    parts = [dummy_head(dummy_model(MODEL), HEAD, seed=seed).params for seed in seeds]
    for name, value in head.params.items():
        shards = [
            jax.device_put(np.asarray(part[name]), device)
            for part, device in zip(parts, head.mesh.devices.flat, strict=True)
        ]
        head.params[name] = jax.make_array_from_single_device_arrays(
            value.shape, value.sharding, shards
        )


def drafted_by_unlike_ranks() -> Engine:
    model = dummy_model(MODEL, tp=4)
    head = dummy_head(model, HEAD)
    of_ranks(head, 0, 1, 2, 3)
    return Engine(model, EngineConfig(**SIZES, **EAGLE3), draft_model=head)


@pytest.mark.slow
@pytest.mark.invariance
def test_ranks_that_draft_differently_verify_the_drafts_of_the_first(plain):
    made = drafted_by_unlike_ranks()
    assert_same_completions(made.generate(requests()[:2]), plain[:2])
    assert made.stats().drafts["eagle3"].num_windows > 10


@pytest.mark.slow
@pytest.mark.control
def test_control_ranks_that_verify_their_own_drafts_give_other_bits(plain, monkeypatch):
    monkeypatch.setattr(head_programs, "of_first_rank", lambda results: results)
    made = drafted_by_unlike_ranks()
    answers = made.generate(requests()[:2])
    assert [done.digest() for done in answers] != [done.digest() for done in plain[:2]]


@pytest.mark.slow
@pytest.mark.invariance
def test_a_head_of_a_mixture_of_experts_changes_no_bit():
    config = dummy_config(vocab_size=VOCAB, num_layers=4, experts=(4, 2))
    model = dummy_model(config)
    expected = Engine(model, EngineConfig(**SIZES)).generate(requests()[:2])
    eagle = dummy_eagle(config, draft_vocab_size=VOCAB)
    eagle = dataclasses.replace(eagle, layer=dataclasses.replace(eagle.layer, experts=None))
    made = Engine(model, EngineConfig(**SIZES, **EAGLE3), draft_model=dummy_head(model, eagle))
    assert_same_completions(made.generate(requests()[:2]), expected)
    assert made.stats().drafts["eagle3"].num_windows > 5


@pytest.mark.slow
@pytest.mark.control
def test_control_committing_drafts_unseen_gives_other_bits(model, head, plain, monkeypatch):
    """Acceptance by the head's own argmax, not by equality with the canonical token."""
    commit_drafts_unseen(monkeypatch)
    unsafe = ProgramCache(model, num_pages=PAGES, num_slots=2, window_len=WINDOW, draft_model=head)
    made = Engine(model, EngineConfig(**SIZES, **EAGLE3), programs=unsafe, draft_model=head)
    (done,) = made.generate(requests()[:1])
    assert made.stats().acceptance == 1.0
    assert done.digest() != plain[0].digest()


# ----------------------------------------------------------------------------------- what it drafts


def windows_of(made: Engine) -> list[tuple[list[int], int]]:
    """Of a run of one sequence: the drafts of each window, and the tokens that it committed."""
    drafts, committed = [], []
    while made.has_work:
        made.step()
        for launch in made.launched:
            if launch.key.weights == "eagle3":
                ((row,),) = launch.rows
                drafts.append(launch.read().choice[0, : row.num_tokens, 0].tolist())
            elif launch.key.kind == "verify":
                committed.append(int(launch.read().choice[0, 0, -1]))
    return list(zip(drafts, committed, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm_before_residual", "tp", "by_kernels"),
    [(False, 1, False), (True, 1, False), (False, 2, False), (True, 1, True), (False, 2, True)],
)
def test_drafts_are_those_of_the_head_on_the_whole_text(
    norm_before_residual, tp, by_kernels, monkeypatch
):
    """Over chunks of a prompt, a page and windows of every length the head has no hole.

    By XLA's operations, and by the engine's own as on Hopper.
    """
    for kernels in (portable, reference):
        monkeypatch.setattr(kernels, "steps_beat_xla", by_kernels)
    profile = NumericsProfile(weight_dtype="float32", compute_dtype="float32")
    model = dummy_model(MODEL, tp=tp, profile=profile)
    eagle = dataclasses.replace(HEAD, norm_before_residual=norm_before_residual)
    made = Engine(
        model,
        EngineConfig(**SIZES | {"prefill_chunk": 16}, **EAGLE3),
        draft_model=dummy_head(model, eagle, seed=SEED),
    )
    prompt = tuple(int(t) for t in np.random.default_rng(3).integers(0, VOCAB, 120))
    sampling = SamplingParams(max_tokens=60, frequency_penalty=1.0)
    (done,) = made.generate([Request(prompt_token_ids=prompt, sampling=sampling)])
    made.reset_prefix_cache()
    made.add_request(prompt, sampling)
    windows = windows_of(made)
    tokens = [*prompt, *done.token_ids]
    alone = dummy_model(MODEL, profile=profile)
    states = text_states(alone, eagle.feature_layers, (1, len(tokens)))
    features = np.asarray(states(np.array([tokens]))[0])[0]
    tensors, embed = dummy_tensors(eagle, seed=SEED), np.asarray(alone.params["embed"])
    num_known, counts = len(prompt) + 1, set()
    for drafts, num_committed in windows:
        expected = reference_drafts(
            eagle, tensors, embed, features[: num_known - 1], tokens[:num_known], count=len(drafts)
        )
        assert drafts == expected, f"after {num_known} tokens"
        num_known += num_committed
        counts.add(num_committed)
    assert num_known > 128 + 10 and len(counts) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefill", "verify"])
def test_a_step_without_a_head_is_the_same_program(model, programs, kind):
    key = plain_key(kind, rows=2, length=WINDOW, table_len=3)
    alone = ProgramCache(model, num_pages=PAGES, num_slots=2, window_len=WINDOW)
    texts = [
        jax.jit(one.function(key)).lower(*one.operands(key, model.params)).as_text()
        for one in (programs, alone)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_only_programs_that_are_compiled_ahead_have_run(programs, plain):
    configs = [
        EngineConfig(**SIZES | {"decode_steps": steps}, **EAGLE3, mode=mode, max_draft_batch=most)
        for mode, steps, most in (("invariant", 1, 0), ("invariant", 3, 1), ("dvr", 1, 0))
    ]
    ahead = {
        key
        for config in [*configs, EngineConfig(**SIZES)]
        for key in program_keys(ReplicaConfig.of(config, dp=1, page_len=128, steps_beat_xla=False))
    }
    assert set(programs) <= ahead
    names = {key.name for key in ahead}
    assert "decode fast eagle3 2x3 to 3 pages" in names
    assert "verify invariant 2x4 with features to 3 pages" in names


# ----------------------------------------------------------------------------------------- refusals


def test_a_head_where_a_model_is_wanted_is_refused(model, head):
    with pytest.raises(ValueError, match="'draft_model' does not go with an EAGLE-3 head"):
        Engine(model, EngineConfig(**SIZES, draft_weights="draft_model"), draft_model=head)
    with pytest.raises(ValueError, match="'eagle3' does not go with a model"):
        Engine(model, EngineConfig(**SIZES, **EAGLE3), draft_model=dummy_model(MODEL))


def test_a_head_that_reads_layers_which_there_are_not_is_refused(model):
    eagle = dataclasses.replace(HEAD, feature_layers=(1, 2, 4))
    with pytest.raises(ValueError, match=r"\(1, 2, 4\) must be from 1 to 3: the model has 4"):
        dummy_head(model, eagle)


def test_a_head_whose_channels_ranks_cannot_share_is_refused():
    eagle = dataclasses.replace(HEAD, layer=dataclasses.replace(HEAD.layer, hidden_size=65))
    with pytest.raises(ValueError, match=r"hidden_size=65 of the head must be a multiple of tp=2"):
        dummy_head(dummy_model(MODEL, tp=2), eagle)
