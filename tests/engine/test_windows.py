# SPDX-License-Identifier: Apache-2.0
"""Several windows in one launch, each drafted and verified on the device, change no bit."""

import dataclasses
import itertools

import numpy as np
import pytest

from detjax.engine.config import EngineConfig, ReplicaConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.programs import ProgramCache
from detjax.engine.scheduling.draft_choice import DraftChoice
from detjax.engine.self_check.evidence import CheckDifference
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.bundled import bundled_model_path
from detjax.models.config import LinearAttentionConfig
from detjax.models.heads.head import AnyDraftModel
from detjax.models.loading import load_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.adapters import random_adapter
from detjax.testing.drafts import commit_drafts_unseen, drafts_of, every_third_wrong, mixed_requests
from detjax.testing.dummies import assert_same_completions, dummy_config, dummy_model
from detjax.testing.eagle import dummy_eagle, dummy_head

VOCAB, WINDOW, PAGES = 12, 4, 6  # so small a vocabulary that some drafts are right by chance
MODEL = dummy_config(vocab_size=VOCAB, num_layers=4)
SIZES = {
    "batch_size": 2, "prefill_chunk": 64, "max_len": 384, "num_pages": PAGES,
    "verify_window": WINDOW, "verify_rows": 2, "verify_patience": 0, "self_check": "off",
}  # fmt: skip
EAGLE3 = {"draft_weights": "eagle3", "decode_steps": 4}
GREEDY = SamplingParams(max_tokens=90)


@pytest.fixture(scope="module")
def model():
    return dummy_model(MODEL)


@pytest.fixture(scope="module")
def head(model):
    return dummy_head(model, dummy_eagle(MODEL, draft_vocab_size=9))


@pytest.fixture(scope="module")
def programs(model, head):
    return ProgramCache(model, num_pages=PAGES, num_slots=2, window_len=WINDOW, draft_model=head)


@pytest.fixture(scope="module")
def engine(model, head, programs):
    def make(**changes) -> Engine:
        config = EngineConfig(**SIZES | changes)
        return Engine(model, config, programs=programs, draft_model=head)

    return make


def two() -> list[Request]:
    """Greedy over the end of a page, and sampled."""
    sampled = SamplingParams(max_tokens=70, temperature=0.9, seed=4)
    return [
        Request(prompt_token_ids=(1, 5, 2) * 20, sampling=GREEDY),
        Request(prompt_token_ids=(7, 8, 9), sampling=sampled),
    ]


@pytest.fixture(scope="module")
def plain(engine) -> list[Completion]:
    return engine().generate(two())


def launches_of(made: Engine) -> dict[str, int]:
    """Run until the end; how many launches of each kind of program there were."""
    counts: dict[str, int] = {}
    while made.has_work:
        made.step()
        for launch in made.launched:
            kind = launch.key.kind if launch.key.weights == "full" else launch.key.weights
            counts[kind] = counts.get(kind, 0) + 1
    return counts


# ------------------------------------------------------------------------------------------- bits


@pytest.mark.invariance
def test_several_windows_a_launch_change_no_bit(engine, plain):
    made = engine(**EAGLE3)
    assert_same_completions(made.generate(two()), plain)
    counts = made.stats().drafts["eagle3"]
    assert 0.02 < counts.acceptance < 0.6, "windows of every length must have been accepted"
    one = engine(**EAGLE3 | {"decode_steps": 1})
    assert_same_completions(one.generate(two()), plain)
    assert made.stats().num_launches < 0.6 * one.stats().num_launches


@pytest.mark.control
def test_control_windows_that_commit_their_drafts_unseen_give_other_bits(
    model, head, plain, monkeypatch
):
    commit_drafts_unseen(monkeypatch)
    unsafe = ProgramCache(model, num_pages=PAGES, num_slots=2, window_len=WINDOW, draft_model=head)
    made = Engine(model, EngineConfig(**SIZES, **EAGLE3), programs=unsafe, draft_model=head)
    answers = made.generate(two())
    assert made.stats().acceptance == 1.0
    assert all(a.digest() != b.digest() for a, b in zip(answers, plain, strict=True))


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("kind", ["right", "late", "half", "wrong"])
def test_drafts_that_are_known_change_no_bit(model, head, programs, plain, kind):
    (asked, _), (expected, _) = two(), plain
    text = np.array([*asked.prompt_token_ids, *expected.token_ids, *range(40)], np.int32)
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
    assert_same_completions(made.generate([asked]), [expected])
    counts = made.stats().drafts["eagle3"]
    assert kind != "right" or counts.acceptance == 1.0
    assert kind != "wrong" or counts.acceptance == 0.0


@pytest.mark.slow
@pytest.mark.invariance
def test_every_sampling_parameter_and_mode_has_the_bits_of_no_drafts(engine):
    asked = mixed_requests(VOCAB, (5, 120, 64, 130, 20), max_tokens=30)
    expected = engine().generate(asked)
    for mode in ("invariant", "dvr"):
        made = engine(**EAGLE3 | {"mode": mode, "decode_steps": 3})
        assert_same_completions(made.generate(asked), expected)


@pytest.mark.slow
@pytest.mark.invariance
def test_an_end_inside_a_launch_ends_the_answer(engine, plain):
    token_ids = plain[0].token_ids
    for at in (4, 5, 6, 7, 8):
        end = token_ids[at]
        sampling = dataclasses.replace(GREEDY, stop_token_ids=(end,))
        asked = [dataclasses.replace(two()[0], sampling=sampling)]
        expected = engine().generate(asked)
        made = engine(**EAGLE3)
        assert_same_completions(made.generate(asked), expected)
        assert len(expected[0].token_ids) <= at + 1


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17, 31, 33])
def test_an_answer_of_any_length_ends_where_it_should(engine, max_tokens):
    sampling = dataclasses.replace(GREEDY, max_tokens=max_tokens)
    asked = [dataclasses.replace(one, sampling=sampling) for one in two()]
    expected = engine().generate(asked)
    assert_same_completions(engine(**EAGLE3).generate(asked), expected)


@pytest.mark.slow
@pytest.mark.invariance
def test_a_sequence_that_is_preempted_between_launches_goes_on_with_the_same_bits(engine, plain):
    made = engine(**EAGLE3)
    for one in two():
        made.add_request(one.prompt_token_ids, one.sampling)
    while made.stats().num_windows < 6:
        made.step()
    for seq in tuple(made._scheduler.running):
        made._scheduler._preempt(seq)
    ends = {output.request_id: output for output in made.drain() if output.finish_reason}
    assert made.stats().num_preempted == 2 and len(ends) == 2
    made.reset_prefix_cache()
    assert_same_completions(made.generate(two()), plain)


@pytest.mark.slow
@pytest.mark.invariance
def test_a_cache_with_too_few_pages_for_all_windows_changes_no_bit(model, head):
    sizes = SIZES | {"num_pages": 3, "max_len": 256}
    asked = [dataclasses.replace(one, sampling=GREEDY) for one in two()]
    asked[1] = dataclasses.replace(asked[1], prompt_token_ids=(7, 8, 9) * 25)
    expected = Engine(model, EngineConfig(**sizes), draft_model=head).generate(asked)
    made = Engine(model, EngineConfig(**sizes, **EAGLE3), draft_model=head)
    assert_same_completions(made.generate(asked), expected)
    assert made.stats().num_windows > 20


@pytest.mark.slow
@pytest.mark.invariance
def test_fewer_drafts_of_a_shorter_window_change_no_bit(engine, plain, monkeypatch):
    """The number of drafts changes; windows of each have a program of their own."""
    turn = itertools.cycle((3, 3, 1, 1, 0))
    monkeypatch.setattr(DraftChoice, "choose", lambda *args, **given: next(turn))
    made = engine(**EAGLE3, adapts_drafts=True)
    assert_same_completions(made.generate(two()), plain)
    lengths = {key.length for key in made._runner.programs if key.kind == "windows"}
    assert lengths == {2, WINDOW}, "one and three drafts"


@pytest.mark.slow
@pytest.mark.invariance
def test_windows_on_two_replicas_change_no_bit(plain):
    model = dummy_model(MODEL, dp=2)
    sizes = SIZES | {"batch_size": 4, "num_pages": 2 * PAGES}
    head = dummy_head(model, dummy_eagle(MODEL, draft_vocab_size=9))
    made = Engine(model, EngineConfig(**sizes, **EAGLE3), draft_model=head)
    assert_same_completions(made.generate(two()), plain)
    assert made.stats().num_windows > 20


@pytest.mark.slow
@pytest.mark.invariance
def test_cancelling_sleep_and_other_weights_between_launches_change_no_bit(plain):
    model = dummy_model(MODEL)  # whose weights change
    head = dummy_head(model, dummy_eagle(MODEL, draft_vocab_size=9))
    made = Engine(model, EngineConfig(**SIZES | EAGLE3), draft_model=head)
    gone = made.add_request((3, 1, 2), GREEDY)
    asked = two()[0]
    kept = made.add_request(asked.prompt_token_ids, asked.sampling)
    while made.stats().num_windows < 10:
        made.step()
    made.cancel(gone)
    ends = {o.request_id: o for o in made.drain() if o.finish_reason is not None}
    assert ends[kept].finish_reason is FinishReason.LENGTH
    made.sleep()
    made.wake_up()
    assert_same_completions(made.generate(two()), plain)
    made.load_weights(dummy_model(MODEL, seed=5).params, version=1)
    expected = Engine(dummy_model(MODEL, seed=5), EngineConfig(**SIZES)).generate(two())
    assert [done.token_ids for done in expected] != [done.token_ids for done in plain]
    assert_same_completions(made.generate(two()), expected)


@pytest.mark.slow
@pytest.mark.invariance
def test_more_sequences_than_a_verification_has_rows_change_no_bit(model, head, plain):
    sizes = SIZES | {"batch_size": 5, "num_pages": 15}
    asked = [*two(), *two(), *two()]
    made = Engine(model, EngineConfig(**sizes | EAGLE3), draft_model=head)
    assert_same_completions(made.generate(asked), [*plain, *plain, *plain])
    assert made.stats().num_windows > 60


def drafted_by(model, draft: AnyDraftModel, method: str, **changes) -> Engine:
    sizes = SIZES | {"draft_weights": method, "decode_steps": 4} | changes
    return Engine(model, EngineConfig(**sizes), draft_model=draft)


@pytest.mark.slow
@pytest.mark.invariance
def test_a_draft_model_of_the_models_own_weights_is_right_in_every_window(model, plain):
    """In float32 no draft can be wrong; each is if the draft model has not run what it should."""
    profile = NumericsProfile(weight_dtype="float32", compute_dtype="float32")
    exact = dummy_model(MODEL, profile=profile)
    expected = Engine(exact, EngineConfig(**SIZES)).generate(two())
    made = drafted_by(exact, dummy_model(MODEL, profile=profile), "draft_model")
    assert_same_completions(made.generate(two()), expected)
    assert made.stats().drafts["draft_model"].acceptance == 1.0
    smaller = dummy_model(dataclasses.replace(MODEL.with_layers(range(2))))
    made = drafted_by(model, smaller, "draft_model")
    assert_same_completions(made.generate(two()), plain)
    assert made.stats().num_windows > 20


@pytest.mark.slow
@pytest.mark.invariance
def test_windows_of_a_hybrid_change_no_bit():
    """The state of linear attention goes on from the last token that was committed."""
    page = 16
    linear = LinearAttentionConfig(
        num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=16, conv_width=4,
        layers=(True, False),
    )  # fmt: skip
    config = dummy_config(intermediate_size=128, vocab_size=VOCAB, num_layers=2, qk_norm=True)
    config = dataclasses.replace(config, linear_attention=linear, has_output_gate=True)
    profile = NumericsProfile(attention_block=page, attention_split=64)
    model = dummy_model(config, profile=profile)
    sizes = {"prefill_chunk": page, "max_len": 192, "num_pages": 24}
    expected = Engine(model, EngineConfig(**SIZES | sizes)).generate(two())
    made = drafted_by(model, dummy_model(config, profile=profile, seed=3), "draft_model", **sizes)
    assert_same_completions(made.generate(two()), expected)
    assert made.stats().num_windows > 20


@pytest.mark.slow
@pytest.mark.invariance
def test_windows_of_rows_with_adapters_and_without_change_no_bit(plain):
    adapters = [random_adapter(MODEL, seed=seed, rank=8) for seed in (1, 2)]
    sizes = SIZES | {"batch_size": 4, "num_pages": 2 * PAGES}
    asked = [
        dataclasses.replace(one, adapter=name)
        for name in ("", *(adapter.sha256 for adapter in adapters))
        for one in two()
    ]

    def answers(**options) -> tuple[list[Completion], Engine]:
        model = open_adapters(dummy_model(MODEL), AdapterSizes(max_loras=2, max_lora_rank=16))
        made = Engine(model, EngineConfig(**sizes | options), draft_model=dummy_model(MODEL))
        for adapter in adapters:
            made.add_adapter(adapter)
        return made.generate(asked), made

    expected, _ = answers()
    assert_same_completions(expected[:2], plain)
    assert len({done.digest() for done in expected}) == len(asked), "adapters change answers"
    found, made = answers(draft_weights="draft_model", decode_steps=4)
    assert_same_completions(found, expected)
    kinds = {(key.kind, key.has_adapters) for key in made._runner.programs}
    assert ("windows", True) in kinds


# -------------------------------------------------------------------------------------- scheduling


def test_launches_of_windows_replace_drafts_and_verifications(engine):
    made = engine(**EAGLE3)
    for one in two():
        made.add_request(one.prompt_token_ids, one.sampling)
    counts = launches_of(made)
    assert counts["windows"] > 2
    # The last tokens of an answer leave no room for several windows.
    assert counts.get("eagle3", 0) < counts["windows"] + 12


def test_a_request_that_needs_a_choice_program_has_a_window_a_launch(engine):
    made = engine(**EAGLE3)
    made.add_request((1, 2, 3), dataclasses.replace(GREEDY, top_p=0.9, temperature=1.0, seed=1))
    counts = launches_of(made)
    assert "windows" not in counts and counts["verify"] > 5


@pytest.mark.parametrize(
    ("tp", "asked", "max_len", "windows"),
    [(1, 4, 384, 4), (2, 4, 384, 1), (1, 1, 384, 1), (1, 400, 384, 31), (1, 4, 6, 1)],
)
def test_as_many_windows_as_steps_where_one_rank_has_a_layer(tp, asked, max_len, windows):
    config = EngineConfig(**SIZES | EAGLE3 | {"decode_steps": asked, "max_len": max_len})
    of = {"dp": 1, "page_len": 128, "steps_beat_xla": False}
    assert ReplicaConfig.of(config, **of, tp=tp).windows == windows
    without = dataclasses.replace(config, draft_weights="full")
    assert ReplicaConfig.of(without, **of, tp=tp).windows == 1


# ------------------------------------------------------------------------------------- self-check


def checked(model, draft, method: str = "eagle3", **changes) -> tuple[int, CheckDifference | None]:
    """Check the programs of an engine: how many of windows there are, and what was found."""
    sizes = SIZES | {"self_check": "start", "verify_batches": (1,), "adapts_drafts": True}
    config = EngineConfig(**sizes | EAGLE3 | {"draft_weights": method} | changes)
    made = Engine(model, config, draft_model=draft)
    made.compile()
    kinds = [getattr(key, "kind", "") for key in made._runner.programs.checked]
    return kinds.count("windows"), made._claim.difference


@pytest.mark.slow
def test_programs_of_windows_are_compared_with_prefill(model, head):
    """Of one and two rows, one and three drafts: each writes as many tokens as drafts are right."""
    assert checked(model, head) == (4, None)
    own = dummy_model(MODEL)
    assert checked(model, own, "draft_model") == (4, None)
    assert checked(model, dummy_model(MODEL, seed=3), "draft_model") == (4, None)
    few = dummy_config(vocab_size=3, num_layers=4)  # replicas accept different numbers of tokens
    model = dummy_model(few, dp=2)
    head = dummy_head(model, dummy_eagle(few, draft_vocab_size=3))
    sizes = {"batch_size": 4, "num_pages": 2 * PAGES, "decode_lens": (256,)}
    assert checked(model, head, **sizes) == (8, None)


@pytest.mark.slow
def test_what_a_launch_of_windows_leaves_behind_its_tokens_is_no_difference():
    """A trained model that drafts for itself accepts more in one launch than in another."""
    trained = load_model(
        str(bundled_model_path()), profile=NumericsProfile(), mesh=make_mesh(1, 1),
        backend=Backend.PORTABLE,
    )  # fmt: skip
    sizes = {"batch_size": 8, "max_len": 256, "num_pages": 0, "verify_rows": 8}
    assert checked(trained, trained, "draft_model", **sizes) == (4, None)


@pytest.mark.slow
@pytest.mark.control
def test_control_windows_that_commit_drafts_unseen_are_found_by_the_check(model, head, monkeypatch):
    commit_drafts_unseen(monkeypatch)
    _, difference = checked(model, head)
    assert difference is not None
