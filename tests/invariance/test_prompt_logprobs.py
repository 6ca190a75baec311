# SPDX-License-Identifier: Apache-2.0
"""Logprobs of prompts: the bits of decoding, whatever the chunk, batch, mesh and cache."""

import json
from functools import cache

import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import CompletionOutput
from detjax.engine.outputs.output_processor import OutputProcessor
from detjax.engine.outputs.prompt_logprobs import HEAD_ROWS
from detjax.engine.outputs.request_output import FinishReason, PromptLogprobs
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.training.score import Scorer

from .faults import order_by_company

PAGE, VOCAB, TOP = 16, 128, 3
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 70)


@cache
def model(dp: int = 1, tp: int = 1) -> LoadedModel:
    config = dummy_config(num_layers=1, intermediate_size=128, vocab_size=VOCAB)
    profile = NumericsProfile(attention_block=PAGE, attention_split=64)
    return dummy_model(config, dp=dp, tp=tp, profile=profile)


_PROGRAMS: dict = {}


def engine(dp: int = 1, tp: int = 1, **changes) -> Engine:
    sizes = {"batch_size": 4, "prefill_chunk": PAGE, "max_len": 96, "verify_window": 6}
    config = EngineConfig(**(sizes | changes))
    key = dp, tp, config.batch_size, config.num_pages
    made = Engine(model(dp, tp), config, programs=_PROGRAMS.get(key))
    _PROGRAMS[key] = made.programs
    return made


def sequences() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(5)
    return [tuple(int(t) for t in rng.integers(0, VOCAB, length)) for length in LENGTHS]


@cache
def expected() -> list[PromptLogprobs]:
    """Each sequence alone, in chunks of a page."""
    alone = engine()
    return [alone.score([sequence], top=TOP)[0] for sequence in sequences()]


def floats(scores: PromptLogprobs) -> np.ndarray:
    """Every float of some scores."""
    values = [[one.logprob, *(p for _, p in one.top_logprobs)] for one in scores]
    return np.array(values, np.float32).reshape(len(scores), 1 + TOP)


def assert_same(got: list[PromptLogprobs], want: list[PromptLogprobs], claim: str) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert_bitwise_equal(floats(g), floats(w), claim=claim)
        assert g == w, claim  # the ranks and the token ids


@pytest.mark.slow
def test_probe_depends_on_order():
    """The sums behind the logits change when added backwards, so equal bits are not luck."""
    w = np.asarray(model().params["lm_head"], np.float32)
    assert_order_sensitive(w * np.linspace(0.5, 2, w.shape[1], dtype=np.float32))
    assert len({one.logprob.tobytes() for scores in expected() for one in scores}) > 100


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("mode", quick_and_slow(["invariant"], ["dvr"]))
def test_prompt_logprobs_are_bitwise_path_consistent_with_decode(mode):
    """A completion scored as a prompt has the logprobs and top tokens that it was sampled with."""
    prompt = sequences()[4]
    made = engine(mode=mode)
    for params in ({"temperature": 0.9, "seed": 3}, {}):
        sampling = SamplingParams(max_tokens=40, logprobs=TOP, **params)
        (done,) = made.generate([Request(prompt_token_ids=prompt, sampling=sampling)])
        (scores,) = made.score([prompt + done.token_ids], top=TOP)
        tail = scores[len(prompt) - 1 :]
        assert_bitwise_equal(
            np.array([one.logprob for one in tail]),
            np.array(done.logprobs),
            claim=f"{mode}: a token's logprob in a prompt is the one it was sampled with",
        )
        assert tuple(one.top_logprobs for one in tail) == done.top_logprobs
        if sampling.temperature == 0:
            assert all(one.is_greedy for one in tail)
        else:
            assert not all(one.is_greedy for one in tail)


@pytest.mark.slow
@pytest.mark.invariance
def test_prompt_logprobs_are_bitwise_path_consistent_with_training():
    """Beside the trainer's scoring, and ranks beside a count over the logits of every token."""
    want = [s for s in sequences() if len(s) > 1]
    for got, logprobs in zip(expected()[1:], Scorer(model()).logprobs(want), strict=True):
        assert_bitwise_equal(
            np.array([one.logprob for one in got]), logprobs, claim="the trainer's logprobs"
        )
    whole = engine().score(want, top=64)
    for scores, sequence in zip(whole, want, strict=True):
        for one, token_id in zip(scores, sequence[1:], strict=True):
            ids = [i for i, _ in one.top_logprobs]
            assert (one.rank > 64) if token_id not in ids else (ids[one.rank - 1] == token_id)
            assert dict(one.top_logprobs).get(token_id, one.logprob) == one.logprob


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    "sizes",
    quick_and_slow(
        [{"prefill_shapes": ((2, 130),), "max_len": 90}],
        [{"prefill_chunk": 7}],
    ),
    ids=str,
)
def test_prompt_logprobs_are_bitwise_batch_and_schedule_invariant(sizes):
    """Chunks, rows, batchmates; more rows than there are logits of at the same time."""
    rows = max((r * n for r, n in sizes.get("prefill_shapes", ())), default=0)
    assert not rows or (rows > HEAD_ROWS and rows % HEAD_ROWS)
    assert_same(engine(**sizes).score(sequences(), top=TOP), expected(), str(sizes))


@pytest.mark.slow
@pytest.mark.invariance
def test_prompt_logprobs_are_bitwise_mesh_invariant():
    got = engine(dp=2, tp=2).score(sequences(), top=TOP)
    assert_same(got, expected(), "(dp, tp) = (2, 2)")


@pytest.mark.slow
@pytest.mark.invariance
def test_cached_prefixes_change_no_prompt_logprob_and_are_left_for_others():
    """Who wants logprobs reads no page of another; who does not, reads those that it has filled."""
    made, long = engine(), sequences()[-1]
    first = made.score([long], top=TOP)
    assert made.stats().prefix_tokens == 0
    again = made.score([long], top=TOP)
    assert made.stats().prefix_tokens == 0
    assert_same([*first, *again], [expected()[-1]] * 2, "with the prompt in the cache")
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=TOP, n=3, temperature=1.0)
    got = made.generate([Request(prompt_token_ids=long, sampling=sampling)])
    # Sequence 0 has the logprobs for all three, whose pages are those of the calls before.
    assert made.stats().prefix_tokens == 2 * (len(long) - 1) // PAGE * PAGE
    assert [done.prompt_logprobs for done in got] == [expected()[-1]] * 3


@pytest.mark.slow
@pytest.mark.invariance
def test_preemption_changes_no_prompt_logprob_and_none_is_computed_twice():
    """A cache too small for all: who comes back scores no further than it had not."""
    made = engine(num_pages=8)
    asked = [
        Request(
            prompt_token_ids=sequence[:30],
            sampling=SamplingParams(max_tokens=40, prompt_logprobs=TOP),
        )
        for sequence in sequences()[-3:]
    ]
    got = made.generate(asked)
    assert made.stats().num_preempted > 0
    assert_same(
        [done.prompt_logprobs or () for done in got],
        [scores[:29] for scores in expected()[-3:]],
        "after a preemption",
    )
    wanted = engine().generate(asked)
    assert [done.digest() for done in got] == [done.digest() for done in wanted]


@pytest.mark.slow
@pytest.mark.invariance
def test_an_interrupt_loses_no_prompt_logprob():
    """One after each way of ending a step: what is told is whole, and told once."""
    long = sequences()[-1]
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=TOP)
    for at in range(1, 7):  # nothing is in flight in the first step
        made, outputs, step = engine(), [], 0
        made.add_request(long, sampling)
        while made.has_work:
            if step == at:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(OutputProcessor, "process_output", _interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        made.step()
            outputs += made.step()
            step += 1
        told = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert_same(told, [expected()[-1]], f"an interrupt in step {at}")


def _interrupted(processor, launch):
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.control
def test_control_an_order_by_company_is_seen_by_path_and_chunk(monkeypatch):
    """The comparisons of the quick tests above find other bits, on every machine."""
    want = np.concatenate([floats(scores) for scores in expected()])
    order_by_company(monkeypatch, canonical_rows=PAGE)
    sizes = {"batch_size": 4, "max_len": 96, "verify_window": 6, "self_check": "off"}
    made = Engine(model(), EngineConfig(**sizes, prefill_chunk=PAGE))
    prompt = sequences()[4]
    sampling = SamplingParams(max_tokens=4, logprobs=TOP)
    (done,) = made.generate([Request(prompt_token_ids=prompt, sampling=sampling)])
    (scores,) = engine().score([prompt + done.token_ids], top=TOP)
    decoded = np.array(done.logprobs)
    tail = np.array([one.logprob for one in scores[len(prompt) - 1 :]])
    assert count_different_bits(tail, decoded) > 0, "path"
    pieces = Engine(
        model(), EngineConfig(**sizes, prefill_chunk=PAGE, prefill_shapes=((2, 130),)),
        programs=made.programs,
    )  # fmt: skip
    found = np.concatenate([floats(scores) for scores in pieces.score(sequences(), top=TOP)])
    assert count_different_bits(found, want) > 0, "batch and chunk"


@pytest.mark.slow
@pytest.mark.control
def test_control_fast_steps_change_bits_with_the_chunk():
    """Without the guarantee the same comparison fails."""
    a = engine(mode="fast", prefill_chunk=1).score(sequences(), top=TOP)
    b = engine(mode="fast", prefill_chunk=64).score(sequences(), top=TOP)
    assert any(not np.array_equal(floats(x), floats(y)) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------ the interface


def test_scores_survive_json():
    asked = Request(
        prompt_token_ids=sequences()[3],
        sampling=SamplingParams(max_tokens=2, prompt_logprobs=TOP),
    )
    (done,) = engine().generate([asked])
    assert done.prompt_logprobs == expected()[3]
    out = CompletionOutput(
        completion=done, text="", fingerprint="f", sampling=asked.sampling, is_deterministic=True
    )
    assert CompletionOutput.from_dict(json.loads(json.dumps(out.as_dict()))) == out


@pytest.mark.slow
def test_requests_that_do_not_ask_run_the_programs_that_they_always_ran():
    made, launched = engine(), []
    run = made._runner._run
    made._runner._run = lambda key, *rest, **named: launched.append(key) or run(key, *rest, **named)
    sampling = SamplingParams(max_tokens=4, logprobs=TOP)
    (done,) = made.generate([Request(prompt_token_ids=sequences()[5], sampling=sampling)])
    assert done.prompt_logprobs is None
    assert launched and not any(key.leaves_hidden for key in launched)
    launched.clear()
    made.score(sequences()[:3], top=TOP)
    # A single token has no logprob, and no program that would report it.
    assert {key.leaves_hidden for key in launched} == {False, True}


@pytest.mark.slow
def test_a_cancelled_prompt_has_no_logprobs():
    made = engine()
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=TOP)
    cancelled = made.add_request(sequences()[-1], sampling)
    kept = made.add_request(sequences()[-2], sampling)
    made.step()
    made.cancel(cancelled)
    outputs = {o.request_id: o for o in made.drain()}
    assert outputs[cancelled].finish_reason is FinishReason.CANCELLED
    assert outputs[cancelled].prompt_logprobs is None
    assert outputs[kept].finish_reason is FinishReason.LENGTH and outputs[kept].token_ids == ()
    assert len(outputs[kept].prompt_logprobs or ()) == LENGTHS[-2] - 1


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1, or 0 with prompt_logprobs"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "n=2 must be 1 where max_tokens=0"),
        ({"prompt_logprobs": 65}, r"prompt_logprobs=65 must be None or in \[0, 64\]"),
        ({"prompt_logprobs": True}, "prompt_logprobs=True must be an integer"),
    ],
)
def test_what_has_no_meaning_is_refused(sampling, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**sampling)


@pytest.mark.slow
def test_a_sequence_as_long_as_the_context_is_scored_and_a_longer_one_refused():
    made = engine()
    tokens = tuple(i % VOCAB for i in range(97))
    (scores,) = made.score([tokens[:96]], top=TOP)
    assert len(scores) == 95 and len(scores[0].top_logprobs) == TOP
    with pytest.raises(ValueError, match="has 97 tokens, more than the engine's max_len of 96"):
        made.score([tokens])
    with pytest.raises(ValueError, match="has 96 tokens and its answer 1, more than"):
        made.generate([Request(prompt_token_ids=tokens[:96], sampling=SamplingParams())])
    with pytest.raises(ValueError, match="prompt 0 has no tokens"):
        made.score([()])
