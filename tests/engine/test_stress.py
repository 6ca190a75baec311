# SPDX-License-Identifier: Apache-2.0
"""A loaded engine gives every deterministic request the bits that it gets alone."""

from functools import cache

import jax.numpy as jnp
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.running.programs import ProgramCache
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel, load_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.load import LoadReport, LoadRequest, lone_answers, make_load, run_load

VOCAB = 128
MAX_LEN = 112
NUM_PAGES = 14
"""Two sequences of full length for eight slots: preemption is the rule."""


@cache
def model(dp: int = 1, tp: int = 1) -> LoadedModel:
    """Pages of 16 tokens, so that short prompts have several."""
    config = dummy_config(
        num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=64, intermediate_size=128,
        vocab_size=VOCAB,
    )  # fmt: skip
    profile = NumericsProfile(attention_block=16, attention_split=64)
    return dummy_model(config, dp=dp, tp=tp, profile=profile)


@cache
def questions():
    return make_load(
        240, seed=5, vocab_size=VOCAB, longest_prompt=MAX_LEN // 2, most_tokens=MAX_LEN // 2
    )


@cache
def expected():
    return lone_answers(model(), questions(), max_len=MAX_LEN)


def is_unfiltered(question: LoadRequest) -> bool:
    """Whether it runs on the programs without filters: half as many to compile."""
    return not question.request.sampling.is_filtered


_PROGRAMS: dict[str, ProgramCache] = {}


def engine(name: str = "", *, mesh: tuple[int, int] = (1, 1), candidates=None, **changes) -> Engine:
    """An engine with a small cache. Those with equal programs share them."""
    sizes = {"batch_size": 8, "prefill_chunk": 32, "max_len": MAX_LEN, "num_pages": NUM_PAGES}
    policies = {"verify_rows": 3, "verify_window": 6, "prefill_shapes": ((3, 16),)}
    config = EngineConfig(**(sizes | policies | changes))
    given = {"candidates": candidates} if candidates else {"programs": _PROGRAMS.get(name)}
    made = Engine(model(*mesh), config, **given)
    if not candidates:
        _PROGRAMS[name] = made.programs
    return made


def load(
    made: Engine,
    num_requests: int,
    *,
    seed: int,
    plain_share: float = 0.3,
    with_filters: bool = False,
) -> LoadReport:
    chosen = [i for i, q in enumerate(questions()) if with_filters or is_unfiltered(q)]
    report = run_load(
        made, [questions()[i] for i in chosen], [expected()[i] for i in chosen],
        num_requests=num_requests, seed=seed, plain_share=plain_share,
    )  # fmt: skip
    assert report.lost == []
    assert report.wrong == []
    assert_at_rest(made)
    return report


def assert_at_rest(made: Engine) -> None:
    """No page is held, no sequence known."""
    stats = made.stats()
    assert (stats.num_pages_held, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_finished + stats.num_failed + stats.num_cancelled > 0
    made.drain()
    assert not made.has_work


@pytest.mark.slow
@pytest.mark.invariance
def test_a_loaded_invariant_engine_is_bitwise_schedule_invariant():
    made = engine()
    report = load(made, 150, seed=1)
    assert report.num_plain_different == 0  # every step is canonical, asked for or not
    stats = made.stats()
    assert stats.num_preempted > 5 and stats.prefix_tokens > 300 and report.num_cancelled > 5


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_a_loaded_dvr_engine_is_bitwise_schedule_invariant(steps_ahead):
    made = engine(mode="dvr", steps_ahead=steps_ahead)
    report = load(made, 350, seed=2)
    assert report.num_plain_different > 0  # what the drafts would have been
    stats = made.stats()
    assert stats.num_rollbacks > 10 and stats.num_preempted > 10 and stats.num_windows > 500


@pytest.mark.slow
@pytest.mark.invariance
def test_a_loaded_engine_without_prefix_cache_and_with_limits_is_bitwise_schedule_invariant():
    made = engine(
        mode="dvr", has_prefix_cache=False, max_tokens_per_step=64, verify_patience=0,
        verify_deadline=3,
    )  # fmt: skip
    load(made, 300, seed=3)
    assert made.stats().prefix_tokens == 0


@pytest.mark.slow
@pytest.mark.invariance
def test_an_engine_that_drafts_now_and_then_is_bitwise_schedule_invariant():
    made = engine(mode="dvr", max_draft_fraction=0.6)
    load(made, 300, seed=10, plain_share=0.4)
    stats = made.stats()
    assert 0 < stats.accepted_tokens < stats.decode_tokens / 2


@pytest.mark.slow
@pytest.mark.invariance
def test_an_engine_that_makes_several_drafts_a_launch_is_bitwise_schedule_invariant():
    made = engine(mode="dvr", decode_steps=3, draft_weights="int8")
    asked = [i for i, q in enumerate(questions()) if is_unfiltered(q) and not q.stop][:12]
    completions = made.generate([questions()[i].request for i in asked])
    want = [c for i in asked for c in expected()[i]]
    assert [c.digest() for c in completions] == [c.digest() for c in want]
    assert any(key.kind == "decode" and key.length == 3 for key in made.programs)
    stats = made.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    load(made, 60, seed=12, plain_share=0.1)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    "changes",
    [{}, {"mode": "dvr", "max_draft_fraction": 0.4}, {"steps_ahead": 2}],
)
def test_an_engine_that_decodes_several_tokens_a_launch_is_bitwise_schedule_invariant(changes):
    made = engine(decode_steps=4, **changes)
    load(made, 80, seed=13, plain_share=0.3)
    lengths = {key.length for key in made.programs if key.kind == "decode"}
    assert lengths >= {1, 4}
    assert made.stats().surplus_tokens > 0  # behind an end


@pytest.mark.slow
@pytest.mark.invariance
def test_prompt_lookup_in_a_loaded_engine_is_bitwise_schedule_invariant():
    made = engine(has_prompt_lookup=True)
    report = load(made, 300, seed=4)
    assert report.num_plain_different == 0
    assert made.stats().num_windows > 20


@pytest.mark.slow
@pytest.mark.invariance
def test_drafts_of_8_bit_weights_change_no_bit():
    made = engine(mode="dvr", draft_weights="int8")
    load(made, 200, seed=6)
    assert made.stats().num_rollbacks > 20


def wrong_by_region(token_ids, positions):
    """Drafts that are never, seldom, often and always wrong, in turn every 12 positions."""
    rate = jnp.take(jnp.array([0, 100, 500, 1000]), positions // 12 % 4)
    is_wrong = (token_ids * 7919 + positions * 10473) % 1000 < rate
    return (token_ids + is_wrong.astype(token_ids.dtype)) % VOCAB


@pytest.mark.slow
@pytest.mark.invariance
def test_drafts_that_are_wrong_at_rates_from_0_to_100_percent_change_no_bit_and_progress():
    made = engine(mode="dvr", candidates=wrong_by_region)
    load(made, 200, seed=7, plain_share=0.0)
    stats = made.stats()
    assert stats.num_rollbacks > 300 and 0.1 < stats.acceptance < 0.9


@pytest.mark.slow
@pytest.mark.control
def test_control_fast_answers_depend_on_the_load():
    made = engine(mode="fast")
    report = load(made, 300, seed=8, plain_share=1.0)
    assert report.num_plain == report.num_sequences
    assert report.num_plain_different > 0


@pytest.mark.slow
@pytest.mark.invariance
def test_replicas_and_ranks_behind_one_queue_are_bitwise_mesh_invariant():
    made = engine("mesh", mesh=(2, 2), mode="dvr")
    load(made, 80, seed=9)


@cache
def bundled() -> LoadedModel:
    return load_model(
        str(bundled_model_path()), profile=NumericsProfile(), mesh=make_mesh(1, 1),
        backend=Backend.PORTABLE,
    )  # fmt: skip


@cache
def bundled_questions():
    """Prompts of up to two pages, many of which begin alike, and what each gets alone."""
    some = make_load(60, seed=12, vocab_size=4096, longest_prompt=160, most_tokens=10)
    some = [question for question in some if is_unfiltered(question)]
    return some, lone_answers(bundled(), some, max_len=256)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("mode", ["invariant", "dvr"])
def test_a_thousand_requests_of_the_bundled_model_are_bitwise_schedule_invariant(mode):
    made = Engine(
        bundled(),
        EngineConfig(
            batch_size=16, prefill_chunk=64, prefill_shapes=((4, 32),), max_len=256, mode=mode,
            num_pages=24, verify_rows=4, verify_window=8,
        ),
    )  # fmt: skip
    report = run_load(
        made, *bundled_questions(), num_requests=1000, seed=13, plain_share=0.25, max_waiting=32
    )
    assert report.lost == [] and report.wrong == []
    assert_at_rest(made)
    stats = made.stats()
    assert stats.prefix_tokens > 5000
    if mode == "dvr":
        assert stats.num_windows > 500 and stats.num_rollbacks > 5
