# SPDX-License-Identifier: Apache-2.0
"""The thread that calls programs: the host goes on meanwhile, and nobody loses a bit by it."""

import copy
import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.errors import EngineStoppedError
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.programs import ProgramCache
from detjax.engine.trace import Trace
from detjax.models.loading import LoadedModel
from detjax.testing.dummies import dummy_config, dummy_model

PATIENCE_S = 60.0
"""After which a call gives up that would wait for ever."""
ASKED = Request(prompt_token_ids=tuple(range(20)), sampling=SamplingParams(max_tokens=12))


@cache
def model() -> LoadedModel:
    return dummy_model(dummy_config(num_layers=1, hidden_size=64, intermediate_size=128))


SIZES = EngineConfig(batch_size=4, prefill_chunk=64, max_len=128, verify_window=6, self_check="off")


@cache
def programs() -> ProgramCache:
    made = Engine(model(), SIZES)
    made.compile(requests=[ASKED])
    return made.programs


def engine(of: LoadedModel | None = None, **given) -> Engine:
    """An engine with compiled programs; a test may replace `get` of its copy of their cache."""
    given["programs"] = copy.copy(programs()) if of is None else None
    return Engine(of or model(), SIZES, **given)


@cache
def alone() -> Completion:
    (completion,) = engine().generate([ASKED])
    return completion


def before_each_call(made: Engine, does: Callable[[], object]) -> None:
    """Do something where the programs of an engine are called, ahead of each call."""
    get = made.programs.get

    def get_other(key, params, *asked):
        program = get(key, params, *asked)

        def run(*operands):
            does()
            return program(*operands)

        return run

    made.programs.get = get_other


@pytest.mark.slow
def test_a_step_returns_while_its_program_waits_to_be_called():
    """The control waits for the call itself, and gives up."""
    made, may_run = engine(), threading.Event()
    before_each_call(made, lambda: may_run.wait(PATIENCE_S))
    made.add_request(ASKED.prompt_token_ids, ASKED.sampling)
    assert made.step() == [] and made.stats().num_launches == 1
    settled = threading.Thread(target=made._runner.settle)
    settled.start()
    settled.join(0.2)
    assert settled.is_alive(), "nothing was waited for"
    may_run.set()
    settled.join(PATIENCE_S)
    assert not settled.is_alive()
    outputs = made.drain()
    assert tuple(i for o in outputs for i in o.token_ids) == alone().token_ids


def test_programs_are_called_in_order_by_one_thread_which_is_not_the_caller_s():
    made, threads = engine(), []
    before_each_call(made, lambda: threads.append(threading.current_thread()))
    assert made.generate([ASKED]) == [alone()]
    assert len(set(threads)) == 1 and threads[0] is not threading.current_thread()
    assert len(threads) == made.stats().num_launches >= 12


@pytest.mark.parametrize("num_calls", [1, 2, 7])
def test_what_a_call_raises_stops_the_engine_and_a_reset_starts_it_again(num_calls):
    made, count = engine(), 0

    def fail() -> None:
        nonlocal count
        count += 1
        if count == num_calls:
            raise MemoryError("no room for the step")

    before_each_call(made, fail)
    with pytest.raises(EngineStoppedError, match="MemoryError: no room for the step"):
        made.generate([ASKED])
    with pytest.raises(EngineStoppedError, match="no room for the step"):
        made.generate([ASKED])
    made.reset()
    assert made.generate([ASKED]) == [alone()]


@pytest.mark.quick_cases("False")
@pytest.mark.parametrize("is_settled", [True, False])
def test_weights_may_go_when_nothing_is_left_to_do(monkeypatch, is_settled):
    """The step behind an end that a consumer decides is to be called then; the control's is not."""
    want = alone()
    own = dataclasses.replace(model(), params=jax.tree.map(jnp.copy, model().params))
    made = engine(own)
    made.compile(requests=[ASKED])
    before_each_call(made, lambda: time.sleep(0.02))
    if not is_settled:
        monkeypatch.setattr(made._runner, "settle", lambda: None)
    (stopped,) = made.generate([ASKED], on_token=lambda event: True)
    for weight in jax.tree.leaves(own.params):
        weight.delete()
    time.sleep(0.1)
    assert stopped.token_ids == want.token_ids[:1]
    own.params.update(jax.tree.map(jnp.copy, model().params))
    if is_settled:
        assert made.generate([ASKED]) == [want]
    else:
        with pytest.raises(EngineStoppedError, match="deleted"):
            made.generate([ASKED])


def test_the_time_of_calls_is_counted_and_on_the_timeline(tmp_path):
    tracer = Trace()
    made = engine(tracer=tracer)
    before_each_call(made, lambda: time.sleep(0.01))
    made.generate([ASKED])
    stats = made.stats()
    assert 0.01 * stats.num_launches <= stats.dispatch_s < PATIENCE_S
    tracer.write(tmp_path / "trace.json")
    assert "dispatch thread" in (tmp_path / "trace.json").read_text()


def test_a_dropped_engine_frees_its_cache_at_once_and_leaves_no_thread():
    """Else the next engine of a notebook finds the GPU full until Python looks for cycles."""
    made = engine()
    made.generate([ASKED])
    cache, thread = weakref.ref(made._runner._device._arrays[0]), made._runner._device._thread
    (worker,) = thread._threads
    del thread
    gc.disable()
    try:
        del made
        worker.join(PATIENCE_S)
        assert cache() is None and not worker.is_alive()
    finally:
        gc.enable()
