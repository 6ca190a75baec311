# SPDX-License-Identifier: Apache-2.0
"""The engine's own behaviour: its calls, what it releases and when, and faults that stay alone."""

import asyncio
import dataclasses
import json
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine.async_engine import AsyncEngine
from detjax.engine.config import EngineConfig, max_draft_fraction
from detjax.engine.engine import Engine
from detjax.engine.errors import EngineInUseError, EngineStoppedError
from detjax.engine.metrics import Histogram
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.running.programs import ProgramCache
from detjax.engine.scheduling import ngram
from detjax.engine.trace import Trace
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import dummy_config, dummy_model

PAGE = NumericsProfile().attention_block
MAX_LEN = 7 * PAGE
POISON = 127
"""A token whose embedding is NaN in `poisoned_model`."""


@cache
def model() -> LoadedModel:
    config = dummy_config(num_layers=1, hidden_size=64, intermediate_size=128, vocab_size=128)
    return dummy_model(config)


@cache
def poisoned_model() -> LoadedModel:
    whole = model()
    table = whole.params["embed"].at[POISON].set(jnp.nan)
    return dataclasses.replace(whole, params={**whole.params, "embed": table})


_PROGRAMS: dict[str, ProgramCache] = {}


def engine(of: LoadedModel | None = None, *, tracer=None, **changes) -> Engine:
    of = of or model()
    sizes = {"batch_size": 4, "prefill_chunk": PAGE, "max_len": MAX_LEN, "verify_window": 6}
    config = EngineConfig(**(sizes | changes))
    key = f"{id(of)} {config.batch_size} {config.num_pages} {config.verify_window}"
    given = {"tracer": tracer} if tracer else {}
    made = Engine(of, config, programs=_PROGRAMS.get(key), **given)
    _PROGRAMS[key] = made.programs
    return made


def request(first: int = 1, length: int = 20, *, max_tokens: int = 10, **sampling) -> Request:
    prompt = tuple((first + 3 * i) % 97 for i in range(length))
    return Request(
        prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


@cache
def alone(asked: Request) -> Completion:
    (completion,) = engine().generate([asked])
    return completion


def add(made: Engine, asked: Request, **given) -> int:
    return made.add_request(asked.prompt_token_ids, asked.sampling, **given)


def assert_canonical(outputs, asked: Request) -> None:
    """What was released, put together, is the answer that the request gets alone."""
    want = alone(asked)
    assert tuple(i for o in outputs for i in o.token_ids) == want.token_ids
    logprobs = np.array([p for o in outputs for p in o.logprobs], np.float32)
    assert_bitwise_equal(
        logprobs, np.array(want.logprobs, np.float32), claim="released logprobs are canonical"
    )
    assert outputs[-1].finish_reason is want.finish_reason and not outputs[-1].error


def of_request(outputs, request_id: int) -> list:
    return [o for o in outputs if o.request_id == request_id]


# ----------------------------------------------------------------------------------------- lengths


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["invariant", "dvr"])
def test_a_step_is_as_wide_as_the_longest_sample_and_no_bit_depends_on_it(mode):
    """Programs follow the lengths that there are, not `max_len`, and whoever runs beside."""
    pages = {"invariant": 40, "dvr": 42}[mode]  # programs of its own
    made = engine(
        decode_lens=(2 * PAGE, 5 * PAGE), mode=mode, max_draft_fraction=1.0, num_pages=pages
    )
    short, long = request(1, 20, max_tokens=10), request(5, 5 * PAGE - 30, max_tokens=50)
    longest = request(9, 6 * PAGE)
    (completion,) = made.generate([short])
    widths = [
        {key.table_len for key in made.programs if key.kind == kind}
        for kind in ("decode", "verify")
    ]
    assert widths == [{2}, {2} if mode == "dvr" else set()]
    assert completion.digest() == alone(short).digest()
    got = made.generate([long, short, longest])
    assert [c.digest() for c in got] == [alone(a).digest() for a in (long, short, longest)]
    assert {key.table_len for key in made.programs if key.kind == "decode"} == {2, 5, 7}
    assert {key.table_len for key in made.programs if key.kind == "prefill"} == {7}


@pytest.mark.slow
def test_what_a_launch_is_compiled_for_is_compiled_ahead_and_no_more():
    made = engine(decode_lens=(2 * PAGE, 4096), num_pages=41)
    made.compile()
    forward = [key for key in made.programs if isinstance(key, ProgramKey)]
    # 4096 tokens are more than max_len, whose own program does. The second prefill leaves hidden
    # states, for logprobs of a prompt.
    assert sorted((key.kind, key.table_len, key.leaves_hidden) for key in forward) == [
        ("decode", 2, False), ("decode", 7, False), ("prefill", 7, False), ("prefill", 7, True),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------ calls


@pytest.mark.slow
def test_requests_may_come_at_any_time_and_each_gets_its_own_answer():
    made = engine()
    asked = [request(i, 5 + 9 * i, max_tokens=4 + 5 * i) for i in range(5)]
    outputs, ids = [], []
    for one in asked:
        ids.append(add(made, one))
        outputs += made.step()
    outputs += made.drain()
    assert not made.has_work and made.step() == []
    for request_id, one in zip(ids, asked, strict=True):
        assert_canonical(of_request(outputs, request_id), one)


@pytest.mark.slow
def test_tokens_are_released_one_by_one_in_invariant_mode_and_by_windows_in_dvr():
    asked = request(max_tokens=24)
    for mode, most in (("invariant", 1), ("dvr", 6)):
        made = engine(mode=mode)
        add(made, asked)
        outputs = made.drain()
        assert_canonical(outputs, asked)
        assert max(len(o.token_ids) for o in outputs) <= most
        assert len(outputs) >= 24 / most


def test_a_dvr_engine_that_never_drafts_has_nothing_to_verify():
    made = engine(mode="dvr", max_draft_fraction=0.0)
    ids = [add(made, request(i, max_tokens=24), is_deterministic=i != 1) for i in range(3)]
    outputs = made.drain()
    for i in (0, 2):
        assert_canonical(of_request(outputs, ids[i]), request(i, max_tokens=24))
    stats = made.stats()
    assert stats.num_windows == stats.verify_launches == stats.draft_tokens == 0


@pytest.mark.parametrize(
    ("backend", "weights", "asked", "share"),
    [
        (Backend.SM90, "full", None, 0.0),
        (Backend.SM90, "int8", None, 1.0),
        (Backend.SM90, "full", 0.5, 0.5),
        (Backend.PORTABLE, "full", None, 1.0),
    ],
)
def test_drafts_are_made_where_they_are_cheaper_unless_told_otherwise(
    backend, weights, asked, share
):
    config = EngineConfig(
        batch_size=1, prefill_chunk=1, max_len=2, mode="dvr", draft_weights=weights,
        max_draft_fraction=asked,
    )  # fmt: skip
    beats = KERNELS[backend].steps_beat_xla
    assert max_draft_fraction(config, steps_beat_xla=beats) == share


@pytest.mark.parametrize("steps_ahead", [1, 2, 3])
def test_the_host_reads_results_some_steps_late(steps_ahead):
    made, asked = engine(steps_ahead=steps_ahead), request(length=3)
    request_id = add(made, asked)
    assert [made.step() for _ in range(steps_ahead)] == [[]] * steps_ahead
    outputs = made.step()
    assert len(outputs) == 1
    # Its end is foreseen, so nothing is computed behind it.
    assert_canonical(of_request(outputs + made.drain(), request_id), asked)
    assert made.stats().surplus_tokens == 0


@pytest.mark.parametrize("steps_ahead", [1, 2, 3])
def test_as_many_tokens_as_steps_ahead_lie_behind_an_end_that_nobody_foresaw(steps_ahead):
    asked = request(max_tokens=30)
    made = engine(steps_ahead=steps_ahead)
    (stopped,) = made.generate([asked], on_token=lambda event: True)
    assert stopped.token_ids == alone(asked).token_ids[:1]
    other = request(7)
    assert made.generate([other]) == [alone(other)]
    assert made.stats().surplus_tokens == steps_ahead


def test_a_cancelled_request_ends_with_what_was_released_and_frees_its_pages():
    made = engine()
    asked = request(max_tokens=50)
    first, other = add(made, asked), add(made, request(7))
    outputs = [o for _ in range(8) for o in made.step()]
    made.cancel(first)
    made.cancel(12345)
    outputs += made.drain()
    got = of_request(outputs, first)
    assert got[-1].finish_reason is FinishReason.CANCELLED and got[-1].token_ids == ()
    count = sum(len(o.token_ids) for o in got)
    assert 0 < count < 50
    assert tuple(i for o in got for i in o.token_ids) == alone(asked).token_ids[:count]
    assert_canonical(of_request(outputs, other), request(7))
    assert made.stats().num_pages_held == 0 and made.stats().num_cancelled == 1


def test_a_request_is_cancelled_before_it_began():
    made = engine()
    made.cancel(add(made, request()))
    (output,) = made.drain()
    assert output.finish_reason is FinishReason.CANCELLED


def test_generate_stops_samples_and_raises_what_the_consumer_raises():
    made = engine()

    def stop_second(event) -> bool:
        return event.request_idx == 1 and event.sequence_idx == 0

    asked = [request(), request(2, temperature=1.0, n=2, seed=3)]
    first, stopped, sibling = made.generate(asked, on_token=stop_second)
    assert first == alone(request()) and len(sibling.token_ids) == 10
    assert stopped.finish_reason is FinishReason.STOP and len(stopped.token_ids) == 1
    assert stopped.token_ids != sibling.token_ids[:1] or stopped.logprobs != sibling.logprobs

    def fail(event) -> bool:
        raise BrokenPipeError("reader gone")

    with pytest.raises(BrokenPipeError, match="reader gone"):
        made.generate(asked, on_token=fail)
    assert made.stats().num_pages_held == 0
    assert made.generate([request()]) == [first]


def test_generate_wants_the_engine_for_itself():
    made = engine()
    add(made, request())
    with pytest.raises(ValueError, match="the engine is at work on other requests"):
        made.generate([request()])
    made.drain()
    assert made.generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        ((), {}, "the prompt has no tokens"),
        ((1,) * MAX_LEN, {}, "896 tokens and its answer 1, more than the engine's max_len of 896"),
        ((1, 128), {}, "token id 128, outside the vocabulary of 128"),
        ((-1,), {}, "token id -1, outside"),
        ((1,), {"priority": 101}, r"priority=101 must be in \[-100, 100\]"),
    ],
)
def test_a_request_that_cannot_run_is_refused_when_it_is_added(prompt, given, message):
    made = engine()
    with pytest.raises(ValueError, match=message):
        made.add_request(prompt, SamplingParams(), **given)
    assert not made.has_work


def test_more_top_logprobs_than_tokens_are_refused():
    of = dummy_model(dummy_config(num_layers=1, vocab_size=40))
    made = Engine(of, EngineConfig(batch_size=1, prefill_chunk=8, max_len=64))
    with pytest.raises(ValueError, match="logprobs=41, more than the vocabulary of 40"):
        made.add_request((1,), SamplingParams(logprobs=41))


@pytest.mark.slow
def test_fast_mode_refuses_to_be_deterministic():
    made = engine(mode="fast")
    with pytest.raises(ValueError, match="mode 'fast' makes no claim"):
        add(made, request())
    add(made, request(), is_deterministic=False)
    assert made.drain()[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"num_pages": -1}, "num_pages=-1 must be at least 0"),
        ({"max_prefill_streak": -1}, "max_prefill_streak=-1 must be at least 0"),
        ({"mode": "quick"}, "mode='quick' must be one of"),
        ({"draft_weights": "int8"}, "needs mode='dvr'"),
        ({"mode": "dvr", "draft_weights": "int4"}, "draft_weights='int4' must be one of"),
        ({"max_waiting": 0}, "max_waiting=0 must be at least 1"),
        (
            {"max_len": 2**27, "verify_window": 16},
            "max_len=134217728 times verify_window=16 must be below 2\\*\\*31",
        ),
        ({"decode_steps": 0}, "decode_steps=0 must be at least 1"),
        ({"steps_ahead": 0}, "steps_ahead=0 must be at least 1, or None"),
        (
            {"mode": "dvr", "decode_steps": 6},
            "decode_steps=6 must be at most verify_window - 1 = 5 in dvr",
        ),
        (
            {"decode_steps": 2, "has_prompt_lookup": True},
            "decode_steps=2 does not go with has_prompt_lookup",
        ),
        ({"mode": "dvr", "has_prompt_lookup": True}, "needs mode='invariant', not 'dvr'"),
        ({"decode_batches": (4,)}, "4 of decode_batches must be below batch_size="),
        ({"decode_lens": (0,)}, "decode_lens"),
        ({"verify_batches": (8,)}, "8 of verify_batches must be at least 1 and below verify_rows="),
        ({"prefill_shapes": ((0, 4),)}, r"\(0, 4\) of prefill_shapes"),
        ({"verify_deadline": 0}, "verify_deadline=0 must be at least 1"),
        ({"max_len": 4096}, "longer than the model's context of 1024"),
        ({"max_tokens_per_step": 10}, "max_tokens_per_step=10 must be at least"),
    ],
)
def test_a_bad_configuration_names_the_value(changes, message):
    with pytest.raises(ValueError, match=message):
        engine(**changes)


def test_sizes_must_divide_over_replicas():
    of = dummy_model(dummy_config(), dp=2)
    for changes in ({"batch_size": 3}, {"num_pages": 5}, {"decode_batches": (1,)}):
        with pytest.raises(ValueError, match="must be a multiple of dp=2"):
            Engine(
                of, EngineConfig(**({"batch_size": 4, "prefill_chunk": 8, "max_len": 64} | changes))
            )


def test_programs_are_shared_only_by_engines_of_the_same_sizes():
    with pytest.raises(ValueError, match="are not of this model"):
        config = EngineConfig(batch_size=2, prefill_chunk=8, max_len=64)
        Engine(model(), config, programs=engine().programs)


@pytest.mark.slow
def test_compiling_ahead_shows_progress_and_leaves_nothing_to_compile():
    made = engine(decode_batches=(1, 2), num_pages=30)
    told, checked = [], []
    made.compile(
        lambda name, done, total: told.append((name, done, total)),
        checked=lambda name, done, total: checked.append((name, done, total)),
    )
    total = len(told)
    num_checked = made.stats().num_self_checked
    assert [done for _, done, _ in checked] == list(range(1, num_checked + 1))
    assert {each for *_, each in checked} == {num_checked} and len(dict.fromkeys(checked)) > 1
    assert total >= len(set(made.programs)) > 0
    assert [done for _, done, _ in told] == list(range(1, total + 1))
    assert {each for *_, each in told} == {total}
    assert told[0][0] == "prefill invariant 1x128"
    compiled = made.stats().num_compiled
    made.generate([request(i) for i in range(4)])
    assert made.stats().num_compiled == compiled == total


# ------------------------------------------------------------------------------------ prefix cache


@pytest.mark.invariance
@pytest.mark.parametrize("mode", ["invariant", "dvr"])
def test_a_warm_prefix_cache_is_bitwise_schedule_invariant(mode):
    """Pages of prompts and of answers, decoded or verified, serve later requests unchanged."""
    made = engine(mode=mode)
    asked = request(5, 3 * PAGE - 20, max_tokens=40)
    assert made.generate([asked]) == [alone(asked)]
    assert made.stats().prefix_tokens == 0
    assert made.generate([asked]) == [alone(asked)]
    assert made.stats().prefix_tokens == 2 * PAGE  # full pages but for the last token
    # A prompt that goes on where the answer ended finds the answer's pages too.
    longer = Request(
        prompt_token_ids=asked.prompt_token_ids + alone(asked).token_ids,
        sampling=SamplingParams(max_tokens=5, temperature=0.5, seed=2),
    )
    before = made.stats().prefix_tokens
    assert made.generate([longer]) == [alone(longer)]
    assert made.stats().prefix_tokens - before == 3 * PAGE


def test_what_plain_requests_decoded_is_not_shared():
    made = engine(mode="dvr")
    asked = request(5, 3 * PAGE - 20, max_tokens=40)
    add(made, asked, is_deterministic=False)
    answer = tuple(i for o in made.drain() for i in o.token_ids)
    made.add_request(asked.prompt_token_ids + answer, SamplingParams(max_tokens=2))
    made.drain()
    assert made.stats().prefix_tokens == 2 * PAGE  # of the prompt alone


# ----------------------------------------------------------------------------------------- weights


def other_weights(of: LoadedModel, scale: float = 0.5) -> dict:
    """Copies of a model's weights, its embeddings scaled."""
    weights = jax.tree.map(jnp.copy, of.params)
    return {**weights, "embed": weights["embed"] * jnp.asarray(scale, jnp.bfloat16)}


def own_model() -> LoadedModel:
    """A copy whose weights may be replaced."""
    return dataclasses.replace(model(), params=jax.tree.map(jnp.copy, model().params))


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    "draft",
    [{}, {"mode": "dvr", "draft_weights": "int8"}],
)
def test_new_weights_answer_as_if_they_had_been_loaded(draft):
    """No page of the old weights is used; the control keeps them and gives another answer."""
    asked = request(5, PAGE + 40)
    fresh = dataclasses.replace(model(), params=other_weights(model()))
    (want,) = engine(fresh).generate([asked])
    assert want.digest() != alone(asked).digest(), "the weights make no difference"
    made = engine(own_model(), **draft)
    assert made.generate([asked]) == [alone(asked)]
    made.load_weights(other_weights(model()), version=3)
    assert made.generate([asked]) == [dataclasses.replace(want, weight_version=3)]
    assert made.stats().prefix_tokens == 0

    control = engine(own_model())
    control.generate([asked])
    control._model.replace_weights(other_weights(model()))
    assert control.generate([asked])[0].digest() != want.digest()


def test_weights_that_do_not_fit_change_nothing():
    made = engine(own_model())
    good, asked = other_weights(model()), request()
    narrow = {**good, "final_norm": good["final_norm"][:32]}
    with pytest.raises(ValueError, match=r"weight \['final_norm'\] is bfloat16\(32,\)"):
        made.load_weights(narrow, version=1)
    with pytest.raises(ValueError, match="names differ"):
        made.load_weights({"embed": good["embed"]}, version=1)
    add(made, asked)
    with pytest.raises(ValueError, match="at work on requests of the old weights"):
        made.load_weights(good, version=1)
    assert_canonical(made.drain(), asked)


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("mode", ["invariant", "dvr"])
def test_a_nan_logit_fails_its_request_alone(mode):
    made = engine(poisoned_model(), mode=mode)
    bad = dataclasses.replace(request(3), prompt_token_ids=(4, 5, POISON, 6))
    good = [request(first, 18, max_tokens=12) for first in (1, 2)]
    ids = [add(made, one) for one in (good[0], bad, good[1])]
    outputs = made.drain()
    (output,) = of_request(outputs, ids[1])
    assert output.finish_reason is FinishReason.ERROR and output.token_ids == ()
    assert output.error.startswith("a NaN logit at position 4; check the weights")
    for request_id, one in ((ids[0], good[0]), (ids[2], good[1])):
        assert POISON not in alone(one).token_ids
        assert_canonical(of_request(outputs, request_id), one)
    stats = made.stats()
    assert (stats.num_failed, stats.num_finished, stats.num_pages_held) == (1, 2, 0)
    with pytest.raises(FloatingPointError, match="request 1: a NaN logit at position 4"):
        made.generate([good[0], bad])
    again = made.generate(good)
    assert [c.digest() for c in again] == [alone(one).digest() for one in good]


def test_a_consumer_that_raises_fails_its_request_alone():
    made = engine()
    seen = []

    def fail_at_third(event) -> bool:
        seen.append(event.token_id)
        if len(seen) == 3:
            raise OSError("disk full")
        return False

    bad, good = add(made, request(), on_token=fail_at_third), add(made, request(9))
    outputs = made.drain()
    last = of_request(outputs, bad)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "its consumer raised OSError('disk full')" and len(seen) == 3
    assert_canonical(of_request(outputs, good), request(9))


@pytest.mark.filterwarnings("ignore:a launch was interrupted:RuntimeWarning")
@pytest.mark.parametrize("num_launches", [1, 2, 5])
def test_an_interrupt_between_a_launch_and_its_cache_leaves_an_engine_that_works(num_launches):
    """The arrays are deleted, as they were donated; answers have their bits again all the same."""
    made, count = engine(), 0
    asked = [request(5, 40), request(6, 20)]
    program_of = made._runner._ready.get

    def interrupted(key):
        program = program_of(key)

        def run(*operands):
            nonlocal count
            result = program(*operands)
            count += 1
            if count == num_launches:
                raise KeyboardInterrupt
            return result

        return run

    made._runner._ready.get = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.generate(asked)
    assert made._runner.is_lost
    got = made.generate(asked)
    assert [c.digest() for c in got] == [alone(one).digest() for one in asked]
    assert made.stats().num_pages_held == 0


@pytest.mark.slow
def test_a_request_that_outgrows_the_cache_fails_alone():
    made = engine(num_pages=4)
    long = request(1, 4 * PAGE - 30, max_tokens=60)
    bad = add(made, long)
    good = add(made, request(2, 20, max_tokens=10))
    outputs = made.drain()
    last = of_request(outputs, bad)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "its 513 tokens do not fit in the cache of 4 pages of 128"
    assert_canonical(of_request(outputs, good), request(2, 20, max_tokens=10))
    with pytest.raises(RuntimeError, match="request 0: its 513 tokens do not fit"):
        made.generate([long])


# ------------------------------------------------------------------------------------------ asyncio


def test_streams_run_side_by_side_and_a_cancelled_consumer_cancels_its_request():
    made = engine()
    asked = [request(i, max_tokens=20) for i in range(3)]

    async def read(front: AsyncEngine, one: Request) -> list:
        return [o async for o in front.stream(one.prompt_token_ids, one.sampling)]

    async def run() -> list:
        front = AsyncEngine(made)
        tasks = [asyncio.create_task(read(front, one)) for one in asked]
        while made.stats().decode_tokens < 6:
            await asyncio.sleep(0.001)
        tasks[1].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        await front.drain()
        return done

    first, cancelled, last = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert_canonical(first, asked[0])
    assert_canonical(last, asked[2])
    assert made.stats().num_cancelled == 1 and made.stats().num_pages_held == 0


def test_what_breaks_the_engine_reaches_every_stream(monkeypatch):
    made = engine()

    def broken():
        raise RuntimeError("device lost")

    async def run() -> list:
        front = AsyncEngine(made)
        monkeypatch.setattr(made, "step", broken)
        streams = [front.stream((1,), SamplingParams()) for _ in range(2)]
        return await asyncio.gather(*(anext(s) for s in streams), return_exceptions=True)

    assert [str(error) for error in asyncio.run(run())] == ["device lost", "device lost"]


def test_draining_an_engine_that_an_error_stops_raises_it_and_ends():
    made = engine()
    asked = request(max_tokens=20)

    def lost(batch):
        raise RuntimeError("device lost")

    async def run() -> None:
        front = AsyncEngine(made)
        stream = front.stream(asked.prompt_token_ids, asked.sampling, cache_salt="tenant")
        await anext(stream)
        made._runner.launch = lost
        for _ in range(2):
            with pytest.raises(EngineStoppedError, match="device lost"):
                await asyncio.wait_for(front.drain(), timeout=60)
        with pytest.raises(EngineStoppedError, match="device lost"):
            async for _ in stream:  # a token may have come before
                pass
        with pytest.raises(EngineStoppedError, match="device lost"):
            await anext(front.stream(asked.prompt_token_ids, asked.sampling))
        del made._runner.launch
        (end,) = [o for o in made.reset() if o.finish_reason is not None]
        assert end.finish_reason is FinishReason.ERROR
        again = front.stream(asked.prompt_token_ids, asked.sampling)
        assert_canonical([o async for o in again], asked)

    asyncio.run(run())


@pytest.mark.parametrize("interval", [1, 4])
def test_a_sink_is_told_so_many_tokens_at_once_and_the_first_and_the_end_at_once(interval):
    asked = request(max_tokens=15, n=2)
    told: list = []

    async def run() -> None:
        front = AsyncEngine(engine())
        request_id = front.open(
            asked.prompt_token_ids, asked.sampling, sink=told.append, stream_interval=interval
        )
        await front.drain()
        front.close(request_id, has_ended=True)
        assert not front._merges

    asyncio.run(run())
    for want in engine().generate([asked]):
        mine = [o for o in told if o.sequence_idx == want.sequence_idx]
        assert tuple(i for o in mine for i in o.token_ids) == want.token_ids
        assert tuple(p for o in mine for p in o.logprobs) == want.logprobs
        assert [o.finish_reason for o in mine if o.finish_reason] == [want.finish_reason]
        sizes = [len(o.token_ids) for o in mine]
        assert sizes == {1: [1] * 15, 4: [1, 4, 4, 4, 2]}[interval]


def test_a_sink_that_wants_the_end_alone_is_told_nothing_else():
    asked, told, tokens = request(max_tokens=15), [], []

    def on_token(event) -> bool:
        tokens.append(event.token_id)
        return False

    async def run() -> None:
        front = AsyncEngine(engine())
        request_id = front.open(
            asked.prompt_token_ids, asked.sampling, sink=told.append, on_token=on_token,
            stream_interval=0,
        )  # fmt: skip
        await front.drain()
        front.close(request_id, has_ended=True)

    asyncio.run(run())
    assert [o.finish_reason for o in told] == [alone(asked).finish_reason]
    assert tuple(tokens) == alone(asked).token_ids


def test_a_pump_that_is_cancelled_loses_no_output():
    """As when a loop is shut down and another one begins: two steps never run at once."""
    made, asked = engine(), request(max_tokens=20)

    async def run() -> list:
        front = AsyncEngine(made)
        stream = front.stream(asked.prompt_token_ids, asked.sampling)
        outputs = [await anext(stream)]
        for _ in range(5):
            front._pump.cancel()
            await asyncio.sleep(0)  # its step still runs in a thread
            outputs.append(await anext(stream))
        return outputs + [o async for o in stream]

    assert_canonical(asyncio.run(run()), asked)


def test_two_async_engines_on_one_engine_lose_no_output():
    """The second is refused while the first has requests, and takes the engine over afterwards."""
    made, asked = engine(), [request(i, max_tokens=20) for i in range(3)]

    async def read(front: AsyncEngine, one: Request) -> list:
        return [o async for o in front.stream(one.prompt_token_ids, one.sampling)]

    async def run() -> list[list]:
        first, second = AsyncEngine(made), AsyncEngine(made)
        stream = first.stream(asked[0].prompt_token_ids, asked[0].sampling)
        outputs = [await anext(stream)]
        with pytest.raises(EngineInUseError, match="one AsyncEngine for each engine"):
            await read(second, asked[1])
        assert made.stats().num_requests == 1
        outputs += [o async for o in stream]
        # At once, though the pump of the first may still step.
        return [outputs, await read(second, asked[1]), await read(first, asked[2])]

    for outputs, one in zip(asyncio.run(run()), asked, strict=True):
        assert_canonical(outputs, one)


# -------------------------------------------------------------------------------------- completions


@pytest.mark.slow
def test_each_completion_is_told_once_when_its_sequence_has_ended():
    """With the logprobs of its prompt, of sequences that are not returned as well."""
    made, told, num_tokens = engine(), [], []
    asked = [
        request(1, max_tokens=3),
        request(2, max_tokens=6, n=1, best_of=3, temperature=1.0, prompt_logprobs=0),
        Request(
            prompt_token_ids=(4, 5, 6), sampling=SamplingParams(max_tokens=0, prompt_logprobs=1)
        ),
    ]

    def on_token(event) -> bool:
        num_tokens.append(event.request_idx)
        return False

    def on_completion(done: Completion) -> None:
        assert num_tokens.count(done.request_idx) >= len(done.token_ids)
        told.append(done)

    returned = made.generate(asked, on_token=on_token, on_completion=on_completion)
    keys = [(done.request_idx, done.sequence_idx) for done in told]
    assert sorted(keys) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert keys.index((0, 0)) < keys.index((1, 0))  # as they end, not at the end of all
    num_logprobs = {
        (done.request_idx, len(done.prompt_logprobs or ())) for done in told if done.request_idx
    }
    assert num_logprobs == {(1, 19), (2, 2)}  # in the order in which they end, which may vary
    assert [done.request_idx for done in returned] == [0, 1, 2]
    assert all(any(done is one for one in told) for done in returned)
    assert returned == made.generate(asked)


def test_what_on_completion_raises_ends_the_run():
    made = engine()

    def fail(done: Completion) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        made.generate([request(), request(2, max_tokens=30)], on_completion=fail)
    assert made.stats().num_pages_held == 0 and not made.has_work
    assert made.generate([request()]) == [alone(request())]


# ------------------------------------------------------------------------------------ observability


@pytest.mark.slow
def test_counters_add_up():
    made = engine(mode="dvr", num_pages=6)
    asked = [request(i, PAGE - 8, max_tokens=PAGE + 12, temperature=0.5, seed=i) for i in range(8)]
    completions = made.generate(asked)
    stats, numbers = made.stats(), made.stats().numbers()
    assert stats.decode_tokens == sum(len(c.token_ids) for c in completions) == 1120
    assert stats.prompt_tokens == 960 and stats.num_finished == stats.num_requests == 8
    assert stats.num_preempted > 0
    assert stats.prefill_tokens + stats.prefix_tokens > 960  # preempted ones again
    assert stats.end_to_end_s.count == stats.first_token_s.count == 8
    assert 0 < stats.acceptance <= 1 and 0 < stats.windows_per_verify <= 8
    busy = stats.plan_s + stats.launch_s + stats.wait_s + stats.commit_s
    assert busy == pytest.approx(stats.step_s.total, rel=0.2)
    assert json.loads(json.dumps(numbers)) == numbers and "step_p99_s" in numbers


def test_a_histogram_is_right_to_a_fifth():
    histogram = Histogram()
    assert histogram.mean == histogram.quantile(0.5) == 0
    values = np.random.default_rng(0).lognormal(-6, 2, 5000)
    for value in values:
        histogram.add(float(value))
    for share in (0.5, 0.9, 0.99):
        exact = np.quantile(values, share)
        assert exact / 1.2 <= histogram.quantile(share) <= exact * 1.2
    assert histogram.quantile(1.0) == values.max()
    assert histogram.mean == pytest.approx(values.mean())


def test_the_trace_is_a_timeline_of_steps_and_requests(tmp_path):
    timeline = Trace()
    made = engine(mode="dvr", tracer=timeline)
    made.generate([request(max_tokens=12), request(2)])
    timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    names = {re.sub(r" .*", "", e["name"]) for e in spans}
    assert {"plan", "launch", "prefill", "decode", "verify"} <= names
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    lives = [(e["ph"], e["id"]) for e in events if e.get("cat") == "request"]
    for key in ("0.0", "1.0"):
        assert [phase for phase, k in lives if k == key] == ["b", "n", "e"]


@pytest.mark.parametrize(
    ("tokens", "most", "proposed"),
    [
        ([], 4, ()),
        ([1, 2, 3, 4], 4, ()),
        ([1, 2, 3, 9, 1, 2], 4, (3, 9, 1, 2)),
        ([1, 2, 3, 9, 1, 2], 1, (3,)),
        ([5, 1, 2, 7, 6, 1, 2, 8, 6, 1, 2], 1, (8,)),  # three tokens match, not two
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, (8, 1)),  # the newest copy
        ([4, 4, 4], 3, (4,)),
    ],
)
def test_prompt_lookup_proposes_what_followed(tokens, most, proposed):
    assert ngram.propose_from_prompt(tokens, most) == proposed
