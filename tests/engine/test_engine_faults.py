# SPDX-License-Identifier: Apache-2.0
"""The whole engine on a device of integers: whatever raises, wherever, nobody else notices.

The programs are replaced by functions on integers that read and write the cache as attention does:
an entry depends on the one before it, a choice on every entry up to its own. A page that was never
computed, a draft's entry or a neighbour's changes the answer.
"""

import collections
import contextlib
import gc
import inspect
import signal
import sys
import threading
import tracemalloc
from functools import cache
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

import detjax.engine
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.errors import EngineFullError, EngineStoppedError
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running import device_state
from detjax.engine.running.launch_operands import DecodeOperands, PrefillOperands, VerifyOperands
from detjax.engine.running.programs import ProgramCache
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.testing import assert_bitwise_equal
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model

PAGE, VOCAB, MAX_LEN = 4, 50, 48
ENGINE = str(Path(detjax.engine.__file__).parent)


@cache
def model(dp: int = 1) -> LoadedModel:
    config = dummy_config(num_layers=1, vocab_size=VOCAB)
    profile = NumericsProfile(attention_block=PAGE, attention_split=16)
    return dummy_model(config, dp=dp, profile=profile)


# ----------------------------------------------------------------------------- a device of integers


class Buffer:
    """What a launch takes and gives back."""

    def __init__(self, content):
        self.content = content

    def is_deleted(self) -> bool:
        return self.content is None

    def donate(self):
        content, self.content = self.content, None
        assert content is not None, "Array has been deleted"
        return content


class Result:
    """What a launch computes, until it is read."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, dtype=None, copy=None):
        return self.values


def entry_of(before: int, token: int, position: int, mode: str) -> int:
    """What a token puts into the cache; fast kernels put something else there."""
    return hash((before, token, position, mode == "fast"))


def choice_of(entries: list[int], position: int, sampling: tuple, mode: str) -> tuple[int, float]:
    """The token at a position, and its logprob; fast kernels often choose another."""
    mixed = hash((*entries, position, *sampling))
    is_other = mode == "fast" and mixed % 3 == 0
    return (mixed + is_other) % VOCAB, np.float32(-(mixed % 1000) / 7)


def canonical(request: Request, sequence_idx: int) -> tuple[list[int], list[float]]:
    """All tokens and logprobs up to the length, whoever ends it before."""
    params = request.sampling.for_prompt(request.prompt_token_ids)
    sampling = (float(np.float32(params.temperature)), params.seed or 0, sequence_idx)
    entries, tokens, logprobs = [], list(request.prompt_token_ids), []
    most = min(len(tokens) + params.max_tokens, MAX_LEN)
    for position in range(most - 1):
        before = entries[-1] if entries else 0
        entries.append(entry_of(before, tokens[position], position, "invariant"))
        if position + 1 == len(tokens):
            token, logprob = choice_of(entries, position + 1, sampling, "invariant")
            tokens.append(token)
            logprobs.append(logprob)
    return tokens[len(request.prompt_token_ids) :], logprobs


class IntegerSteps(ProgramCache):
    """Programs that run at once, in the order of their launches."""

    def _compile(self, key, params, asked):
        body = {"prefill": self._prefill, "decode": self._decode, "verify": self._verify}[key.kind]

        def program(params, tables, kv_cache, slots, sampling, *rest):
            left, host = rest[: key.logit_rows > 0], rest[key.logit_rows > 0 :]
            content = kv_cache.donate(), dict(slots.content)
            result = body(key, *content, *map(np.asarray, host[:1]), *host[1:])
            state = [*map(Buffer, content), *[sampling] * (key.kind == "prefill")]
            # What a choice program reads: here, what was chosen.
            return *state, *(Buffer(result) for _ in left), Result(result)

        return program

    def _compile_choice(self, key, params, asked):
        """Says what the forward program said, and as many top logprobs as the key has."""
        dp = self._model.mesh.shape["dp"]

        def program(slots, sampling, adjusted, logits, *host):
            chosen = logits.content
            top = np.broadcast_to(
                np.arange(key.num_top, dtype="i4"), (*chosen.shape[:-1], key.num_top)
            )
            parts = [chosen[..., :2], top, top, chosen[..., 2:]]
            result = np.concatenate(parts, axis=-1)
            if key.length == 1:
                of_replica = result.reshape(dp, -1, result.shape[-1])
                padding = ((0, 0), (0, key.rows - of_replica.shape[1]), (0, 0))
                result = np.pad(of_replica, padding).reshape(dp * key.rows, -1)
            return slots, adjusted, Result(result)

        return program

    def _places(self, row: int, key, given):
        """Of a row: its slot or None, and where the cache has a position's entry."""
        dp = self._model.mesh.shape["dp"]
        slots, pages = self.num_slots // dp, self.num_pages // dp
        replica, table = row // key.rows, given.page_table[row]
        slot = int(given.slot[row])

        def place(position: int) -> int:
            return (replica * pages + int(table[position // PAGE])) * PAGE + position % PAGE

        return (replica * slots + slot if slot < slots else None), place

    def _run(self, kv_cache, place, position: int, tokens, sampling, mode: str) -> list:
        """Write tokens from a position on; the choice after each."""
        choices = []
        for i, token in enumerate(tokens, position):
            before = kv_cache[place(i - 1)] if i else 0
            kv_cache[place(i)] = entry_of(before, int(token), i, mode)
            entries = [kv_cache[place(j)] for j in range(i + 1)]
            choices.append(choice_of(entries, i + 1, sampling, mode))
        return choices

    @staticmethod
    def _row(key, choice) -> list[int]:
        token, logprob = choice
        return [token, int(np.float32(logprob).view(np.int32))]

    def _empty(self, count, key, extra: int = 0) -> np.ndarray:
        width = 2 + extra
        has_length = key.kind == "verify" or key.kind == "decode" and key.length > 1
        return np.zeros((count, key.length, width) if has_length else (count, width), "i4")

    def _prefill(self, key, kv_cache, slots, packed, sampling):
        given = PrefillOperands.unpack(packed, table_len=key.table_len, length=key.length)
        result = self._empty(len(packed), key)
        for row in range(len(packed)):
            start, count = int(given.start[row]), int(given.count[row])
            if not count:
                continue
            slot, place = self._places(row, key, given)
            seed = int(sampling.seed_low[row]) + (int(sampling.seed_high[row]) << 32)
            how = float(sampling.temperature[row]), seed, int(sampling.sequence_idx[row])
            tokens = given.token_ids[row, :count]
            choice = self._run(kv_cache, place, start, tokens, how, key.mode)[-1]
            result[row] = self._row(key, choice)
            if slot is not None:
                slots[slot] = ([choice[0]], start + count, how)
        return result

    def _decode(self, key, kv_cache, slots, packed):
        given = DecodeOperands.unpack(packed, table_len=key.table_len)
        result = self._empty(len(packed), key)
        for row in range(len(packed)):
            slot, place = self._places(row, key, given)
            is_draft, count = bool(given.is_draft[row]), int(given.count[row])
            for i in range(count if slot is not None else 0):
                window, start, how = slots[slot]
                at = len(window) - 1 if is_draft else 0
                (choice,) = self._run(kv_cache, place, start + at, [window[at]], how, key.mode)
                if is_draft:
                    slots[slot] = (window[: at + 1] + [choice[0]], start, how)
                else:
                    slots[slot] = ([choice[0]], start + 1, how)
                result[(row, i) if key.length > 1 else row] = self._row(key, choice)
        return result

    def _verify(self, key, kv_cache, slots, packed):
        given = VerifyOperands.unpack(packed, table_len=key.table_len, length=key.length)
        result = self._empty(len(packed), key, extra=1)
        for row in range(len(packed)):
            slot, place = self._places(row, key, given)
            if slot is None:
                continue
            window, start, how = slots[slot]
            drafts = given.token_ids[row].tolist() if given.is_given[row] else window
            drafts = drafts[1 : 1 + int(given.num_drafts[row])]
            choices = self._run(kv_cache, place, start, [window[0], *drafts], how, key.mode)
            chosen = [token for token, _ in choices]
            wrong = [i for i, draft in enumerate(drafts) if draft != chosen[i]]
            num_accepted = wrong[0] if wrong else len(drafts)
            for i, choice in enumerate(choices):
                result[row, i] = [*self._row(key, choice), num_accepted + 1]
            result[row, :, -1] = num_accepted + 1
            slots[slot] = ([chosen[num_accepted]], start + num_accepted + 1, how)
        return result


@pytest.fixture(autouse=True)
def integers(monkeypatch):
    """No array is allocated, and no annotation checked: a run takes milliseconds."""

    def pages(model, num_pages, num_local_pages=0):
        # What a page holds before it is written differs from place to place.
        return Buffer([-7 * place for place in range(num_pages * PAGE)])

    monkeypatch.setattr(device_state, "empty_pages", pages)
    monkeypatch.setattr(device_state, "empty", lambda model, shapes: Buffer({}))
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


_PROGRAMS: dict = {}


def engine(*, dp: int = 1, **changes) -> Engine:
    sizes = {"batch_size": 4, "prefill_chunk": 6, "max_len": MAX_LEN, "verify_window": 4}
    sizes["self_check"] = "off"  # the device of integers has no bits
    config = EngineConfig(**(sizes | changes))
    num_pages = config.num_pages or config.batch_size * -(-MAX_LEN // PAGE)
    key = dp, num_pages, config.batch_size, config.verify_window
    if key not in _PROGRAMS:
        _PROGRAMS[key] = IntegerSteps(
            model(dp), num_pages=num_pages, num_slots=config.batch_size,
            window_len=config.verify_window,
        )  # fmt: skip
    return Engine(model(dp), config, programs=_PROGRAMS[key])


def request(first: int = 1, length: int = 9, *, max_tokens: int = 8, **sampling) -> Request:
    prompt = tuple((first + 3 * i) % VOCAB for i in range(length))
    return Request(
        prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


def add(made: Engine, asked: Request, **given) -> int:
    return made.add_request(asked.prompt_token_ids, asked.sampling, **given)


def assert_canonical(outputs, asked: Request, sequence_idx: int = 0, *, is_whole: bool = True):
    """What was released is the answer, or its beginning."""
    tokens = [i for o in outputs for i in o.token_ids]
    logprobs = np.array([p for o in outputs for p in o.logprobs], np.float32)
    want, values = canonical(asked, sequence_idx)
    assert tokens == want[: len(tokens)]
    assert_bitwise_equal(
        logprobs, np.array(values[: len(tokens)], np.float32), claim="released logprobs"
    )
    assert not is_whole or len(tokens) == len(want)


def assert_at_rest(made: Engine) -> None:
    """Nothing is held, and no table remembers anybody."""
    assert not made.has_work
    stats = made.stats()
    assert (stats.num_pages_held, stats.num_running, stats.num_waiting) == (0, 0, 0)
    for name in ("live", "pending", "outputs", "inbox", "cancels", "abandoned"):
        assert not getattr(made._states, name), name
    assert made._input_processor.num_queued == 0 and not made._states.is_interrupted
    for pool in made._scheduler.pools:
        assert pool.num_available == pool.num_pages
    assert made._scheduler._waiting.num_entries <= 65


class RaiseAt:
    """Raises at the n-th place of `detjax.engine` where Python looks for interrupts.

    Those are the entries of functions, and where a function written in C has returned: its effect
    is there, and what was to be done with its result is not. Programs are called in another thread,
    which Python never interrupts.
    """

    def __init__(self, count: int, error: BaseException):
        self.left, self.error, self.did_raise = count, error, False

    def __enter__(self):
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _look(self, frame, event, arg):
        code = frame.f_code
        # Python drops what is raised while a generator is closed.
        is_place = event in ("call", "c_return") and not code.co_flags & inspect.CO_GENERATOR
        if is_place and code.co_filename.startswith(ENGINE):
            self.left -= 1
            if self.left == 0:
                self.did_raise = True
                raise self.error


# ------------------------------------------------------------------------------------ single faults


def test_the_device_of_integers_sees_a_wrong_page():
    """The control: an entry that is not the one that a request computes changes its answer."""
    made = engine()
    asked = request(length=12)
    made.generate([asked])
    (completion,) = made.generate([asked])
    assert list(completion.token_ids) == canonical(asked, 0)[0]
    assert made.stats().prefix_tokens == 8
    kv_cache, *_ = made._runner._device._arrays
    kv_cache.content = [5] * len(kv_cache.content)
    (completion,) = made.generate([asked])
    assert list(completion.token_ids) != canonical(asked, 0)[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("numpy refuses")])
def test_pages_that_were_scheduled_and_not_computed_serve_nobody(monkeypatch, error):
    made = engine()
    asked = request(length=20)

    def interrupted(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(made._runner._ready, "get", interrupted)
        with pytest.raises((KeyboardInterrupt, EngineStoppedError)):
            made.generate([asked])
    if made._stopped_by is not None:
        made.reset()
    (completion,) = made.generate([asked])
    assert list(completion.token_ids) == canonical(asked, 0)[0]
    assert made.stats().prefix_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("steps_ahead", [1, 2])
@pytest.mark.filterwarnings("ignore:a launch was interrupted:RuntimeWarning")
def test_an_interrupt_anywhere_in_generate_leaves_an_engine_that_works(stride, steps_ahead):
    """At one place after the other, until a run is through."""
    made, asked = (
        engine(steps_ahead=steps_ahead),
        [request(1, 10), request(2, 7, max_tokens=4, n=2)],
    )
    for count in range(1, 10_000, stride):
        try:
            with RaiseAt(count, KeyboardInterrupt()):
                made.generate(asked)
            break
        except KeyboardInterrupt:
            completions = made.generate(asked)
        for completion in completions:
            want = canonical(asked[completion.request_idx], completion.sequence_idx)[0]
            assert list(completion.token_ids) == want, count
        assert_at_rest(made)
    assert count > 1000


@pytest.mark.slow
@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("mode", "steps_ahead"), [("invariant", 1), ("dvr", 1), ("dvr", 2)])
@pytest.mark.filterwarnings("ignore:a launch was interrupted:RuntimeWarning")
def test_an_interrupt_anywhere_in_a_step_loses_no_token_and_tells_none_twice(
    mode, steps_ahead, stride
):
    asked = [request(1, 10), request(2, 7, max_tokens=4, n=2)]
    for count in range(1, 10_000, stride):
        made, told = engine(mode=mode, steps_ahead=steps_ahead), []
        ids = [add(made, one, on_token=told.append) for one in asked]
        with RaiseAt(count, KeyboardInterrupt()) as spot:
            try:
                outputs = made.drain()
            except KeyboardInterrupt:
                outputs = []
        outputs += made.drain()
        for request_id, one in zip(ids, asked, strict=True):
            for sequence_idx in range(one.sampling.n):
                key = request_id, sequence_idx
                got = [o for o in outputs if (o.request_id, o.sequence_idx) == key]
                assert_canonical(got, one, sequence_idx)
                heard = [e.token_id for e in told if (e.request_idx, e.sequence_idx) == key]
                want = canonical(one, sequence_idx)[0]
                # Its consumer may be interrupted in the moment in which it is told.
                assert heard == want or len(heard) == len(want) - 1
        assert_at_rest(made)
        if not spot.did_raise:
            break
    assert count > 500


def after_launch(made: Engine, monkeypatch, does) -> None:
    """Do something inside the call of every program, when it has taken the cache."""
    get = made.programs.get

    def get_other(key, params, *asked):
        program = get(key, params, *asked)

        def run(*operands):
            result = program(*operands)
            does()
            return result

        return run

    monkeypatch.setattr(made.programs, "get", get_other)


def test_a_launch_that_takes_the_cache_and_gives_none_back_is_mended(monkeypatch):
    """The cache is allocated anew and says so; nothing that was cached is believed."""
    made, asked = engine(), request(length=20)
    made.generate([asked])

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        after_launch(made, patch, interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.generate([asked])
    assert made._runner.is_lost
    before = made.stats().prefix_tokens
    with pytest.warns(RuntimeWarning, match="took the cache with it: the cache was allocated anew"):
        (completion,) = made.generate([asked])
    assert list(completion.token_ids) == canonical(asked, 0)[0]
    assert made.stats().prefix_tokens == before
    assert_at_rest(made)


@pytest.fixture
def ctrl_c():
    """Python's own handler: a shell's background jobs ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_while_a_launch_is_stored(monkeypatch, ctrl_c):
    """A signal that arrives inside the program's call comes when the new cache is stored."""
    made, asked = engine(), request()
    # WHY: one signal. Of the next launch, which may be ahead, it could come when the call is over.
    signals = [signal.SIGINT]
    with monkeypatch.context() as patch:
        after_launch(made, patch, lambda: signals and signal.raise_signal(signals.pop()))
        with pytest.raises(KeyboardInterrupt):
            made.generate([asked])
    assert not made._runner.is_lost
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (completion,) = made.generate([asked])
    assert list(completion.token_ids) == canonical(asked, 0)[0]


def test_a_request_that_cannot_be_laid_out_fails_alone():
    made = engine()
    bad, good = request(1, n=2), request(2)
    object.__setattr__(bad.sampling, "seed", 1.5)
    ids = [add(made, one) for one in (good, bad, good)]
    outputs = made.drain()
    of_bad = [o for o in outputs if o.request_id == ids[1]]
    assert [o.finish_reason for o in of_bad] == [FinishReason.ERROR] * 2
    assert of_bad[0].error.startswith("it cannot be laid out: TypeError")
    for request_id in (ids[0], ids[2]):
        assert_canonical([o for o in outputs if o.request_id == request_id], good)
    assert_at_rest(made)


def test_a_sequence_that_raises_in_scheduling_fails_alone():
    class Raising:
        name = "raising"

        def draft(self, seq, most):
            if seq.tokens[0] == 2:
                raise ZeroDivisionError("no draft")

    made = engine(has_prompt_lookup=True, verify_rows=2)
    made._scheduler._speculation._drafters = (Raising(),)
    ids = [add(made, request(first, max_tokens=20)) for first in (1, 2, 3)]
    outputs = made.drain()
    of_bad = [o for o in outputs if o.request_id == ids[1]]
    assert of_bad[-1].finish_reason is FinishReason.ERROR
    assert of_bad[-1].error == "it raised ZeroDivisionError('no draft')"
    for request_id, first in ((ids[0], 1), (ids[2], 3)):
        got = [o for o in outputs if o.request_id == request_id]
        assert_canonical(got, request(first, max_tokens=20))
    assert_at_rest(made)


def test_an_error_of_the_device_stops_the_engine_until_it_is_reset(monkeypatch):
    made = engine()
    asked = request()
    ids = [add(made, asked) for _ in range(6)]
    told = [o for _ in range(4) for o in made.step()]

    def lost(*_):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(made._runner._ready, "get", lost)
        with pytest.raises(
            EngineStoppedError, match="stopped: RuntimeError: device lost"
        ) as caught:
            made.step()
    assert str(caught.value.__cause__) == "device lost"
    for refused in (
        made.step, made.drain, made.compile, lambda: add(made, asked),
        lambda: made.generate([asked]), lambda: made.load_weights({}, version=1),
    ):  # fmt: skip
        with pytest.raises(EngineStoppedError, match=r"device lost; engine\.reset\(\)"):
            refused()
    made.cancel(ids[0])
    told += made.reset()
    for request_id in ids:
        outputs = [o for o in told if o.request_id == request_id]
        assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.ERROR]
        assert outputs[-1].error == "the engine has stopped: RuntimeError: device lost"
        assert_canonical(outputs, asked, is_whole=False)
    assert_at_rest(made)
    before = made.stats().prefix_tokens
    (completion,) = made.generate([asked])
    assert list(completion.token_ids) == canonical(asked, 0)[0]
    assert made.stats().prefix_tokens == before  # the old pages are forgotten


def test_requests_may_come_while_generate_runs_from_its_consumer_and_from_threads():
    made, asked, other = engine(), [request(1), request(2, max_tokens=20)], request(3, 5)
    ids: list[int] = []

    def ask(event) -> bool:
        if len(ids) < 3:
            ids.append(add(made, other))
            thread = threading.Thread(target=lambda: ids.append(add(made, other)))
            thread.start()
            thread.join()
        return False

    completions = made.generate(asked, on_token=ask)
    for one, completion in zip(asked, completions, strict=True):
        assert list(completion.token_ids) == canonical(one, 0)[0]
    assert made.has_work  # to tell of the others
    outputs = made.drain()
    assert len(ids) == 4
    for request_id in ids:
        assert_canonical([o for o in outputs if o.request_id == request_id], other)
    assert_at_rest(made)


def _generate_in_two_threads(made, asked, *, most_s: float):
    """Of two threads, the second of which has `most_s` in the middle of a step of the first."""
    found, threads = {}, []

    def run(i: int, on_token) -> None:
        try:
            (found[i],) = made.generate([asked[i]], on_token=on_token)
        except Exception as error:
            found[i] = error

    def call_beside(event) -> bool:
        if not threads:
            threads.append(threading.Thread(target=run, args=(1, lambda event: False)))
            threads[0].start()
            threads[0].join(most_s)
        return False

    run(0, call_beside)
    threads[0].join()
    return [list(getattr(found[i], "token_ids", ())) for i in (0, 1)]


def test_calls_of_several_threads_wait_for_each_other():
    asked = [request(1, max_tokens=20), request(2, max_tokens=20)]
    made, wanted = engine(), [canonical(one, 0)[0] for one in asked]
    assert wanted[0] != wanted[1]
    assert _generate_in_two_threads(made, asked, most_s=0.2) == wanted
    assert_at_rest(made)
    # The control: nobody waits, and a step is begun in the middle of another.
    made._turn = contextlib.nullcontext()
    assert _generate_in_two_threads(made, asked, most_s=60) != wanted


def test_an_idle_check_waits_for_a_step_of_another_thread():
    made, checked = engine(), []

    def check_beside(event) -> bool:
        if not checked:
            thread = threading.Thread(target=lambda: checked.append(made.check_idle()))
            thread.start()
            thread.join(0.2)
            assert not checked
        return False

    (completion,) = made.generate([request(1, max_tokens=20)], on_token=check_beside)
    assert list(completion.token_ids) == canonical(request(1, max_tokens=20), 0)[0]
    assert_at_rest(made)


def test_a_consumer_that_ends_generate_ends_nobody_else():
    made, other = engine(), request(3, max_tokens=20)
    ids: list[int] = []

    def fail(event) -> bool:
        if not ids:
            ids.append(add(made, other))
            return False
        if made.stats().num_running < 2:
            return False
        raise BrokenPipeError("reader gone")

    with pytest.raises(BrokenPipeError):
        made.generate([request(1, max_tokens=20)], on_token=fail)
    assert_canonical(made.drain(), other)
    assert_at_rest(made)


def test_what_was_released_before_a_step_raises_is_told_later(monkeypatch):
    made, asked = engine(), request()
    request_id = add(made, asked)
    take, count = made._runner.launch, 0

    def interrupted(batch):
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return take(batch)

    monkeypatch.setattr(made._runner, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.drain()
    outputs = made.drain()
    assert {o.request_id for o in outputs} == {request_id}
    assert_canonical(outputs, asked)


def test_what_is_compiled_ahead_is_not_compiled_by_a_step():
    """Whatever requests ask for."""
    made = engine(mode="dvr", max_draft_fraction=0.6, num_pages=60)
    made.compile()
    num_compiled = made.stats().num_compiled
    assert num_compiled == made.programs.num_compiled
    kinds = [{}, {"logprobs": 5}, {"temperature": 1.0, "top_k": 3}]
    kinds += [{"temperature": 1.0, "min_p": 0.1, "logprobs": 20}]
    for i, kind in enumerate(kinds * 3):
        add(made, request(i, **kind), is_deterministic=bool(i % 2))
        made.step()
    made.drain()
    made.generate([request(temperature=1.0, min_p=0.1, logprobs=20)])
    assert made.stats().num_compiled == num_compiled == made.programs.num_compiled


def test_more_requests_than_may_wait_are_refused():
    made = engine(max_waiting=5)
    for _ in range(2):
        add(made, request(n=2))
    with pytest.raises(EngineFullError, match="4 sequences wait, 2 more would, and max_waiting=5"):
        add(made, request(n=2))
    add(made, request())
    for _ in range(6):
        made.step()
    add(made, request(n=4))  # those who run do not wait
    made.drain()
    assert_at_rest(made)


def test_a_step_takes_a_bounded_number_of_those_who_ask_at_once():
    made = engine()
    ids = [add(made, request(max_tokens=1)) for _ in range(3000)]
    made.cancel(ids[-1])
    made.step()
    assert made.stats().num_waiting + made.stats().num_running == 1024
    for request_id in ids[:-1]:
        made.cancel(request_id)
    outputs = made.drain()
    ends = collections.Counter(o.request_id for o in outputs if o.finish_reason is not None)
    assert ends == collections.Counter(ids)
    assert outputs[-1].finish_reason is FinishReason.CANCELLED
    assert_at_rest(made)


def test_generate_serves_any_number_of_requests_by_priority():
    made = engine(max_waiting=5)
    asked = [
        Request(
            prompt_token_ids=(i % VOCAB,), sampling=SamplingParams(max_tokens=1),
            priority=int(i >= 2000),
        )
        for i in range(2200)
    ]  # fmt: skip
    order: list[int] = []

    def note(event) -> bool:
        order.append(event.request_idx)
        return False

    completions = made.generate(asked, on_token=note)
    assert [c.request_idx for c in completions] == list(range(2200))
    assert set(order[:150]) <= set(range(2000, 2200))
    assert_at_rest(made)


@pytest.mark.parametrize(
    "count",
    [pytest.param(900, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.nightly)],
)
def test_memory_does_not_grow_with_the_number_of_requests(count):
    made = engine(num_pages=24, mode="dvr")
    sizes = []
    tracemalloc.start()
    try:
        for i in range(count):
            request_id = add(
                made, request(i, 1 + i % 20, max_tokens=1 + i % 5, seed=i), priority=i % 3
            )
            if i % 7 == 0:
                made.cancel(request_id)
            if i % 4 == 3:
                made.step()
            if i % (count // 6) == 0:
                made.drain()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    made.drain()
    assert_at_rest(made)
    assert sizes[-1] < sizes[2] + 100_000, sizes


# ------------------------------------------------------------------------------------- many at once


class Fate:
    """What became of a request, by sequence."""

    def __init__(self, asked: Request, *, has_claim: bool, may_fail: bool):
        self.asked, self.has_claim, self.may_fail = asked, has_claim, may_fail
        self.outputs: dict[int, list] = {i: [] for i in range(asked.sampling.n)}

    def check(self) -> None:
        for sequence_idx, outputs in self.outputs.items():
            ends = [o.finish_reason for o in outputs if o.finish_reason is not None]
            assert len(ends) == 1 and outputs[-1].finish_reason is not None, "lost, or ended twice"
            assert ends[0] is not FinishReason.ERROR or self.may_fail, outputs[-1].error
            if not self.has_claim:
                continue
            assert_canonical(outputs, self.asked, sequence_idx, is_whole=False)
            tokens = [i for o in outputs for i in o.token_ids]
            stops = set(self.asked.sampling.stop_token_ids)
            assert not stops & set(tokens[:-1]), "went on behind its end"
            if ends[0] is FinishReason.LENGTH:
                assert len(tokens) == len(canonical(self.asked, sequence_idx)[0])
                assert tokens[-1] not in stops
            if ends[0] is FinishReason.STOP:
                assert tokens[-1] in stops


class Run:
    """An engine under random requests, cancellations, interrupts, errors and want of pages."""

    def __init__(self, seed: int):
        self.rng = rng = np.random.default_rng(seed)
        mode = str(rng.choice(["invariant", "invariant", "dvr", "dvr", "dvr", "fast"]))
        dp = int(rng.choice([1, 1, 1, 2]))
        self.has_lookup = mode == "invariant" and rng.random() < 0.3
        most_steps = 3 if mode == "dvr" else 4
        self.made = engine(
            dp=dp,
            batch_size=dp * int(rng.integers(1, 4)),
            num_pages=dp * int(rng.choice([0, 4, 7, 13])),
            mode=mode,
            prefill_shapes=((2, 4),) if rng.random() < 0.5 else (),
            verify_rows=int(rng.integers(1, 4)),
            verify_patience=int(rng.integers(0, 5)),
            verify_deadline=int(rng.choice([1, 8])),
            max_draft_fraction=float(rng.choice([0.0, 0.6, 1.0, 1.0])),
            decode_steps=1 if self.has_lookup else int(rng.integers(1, most_steps + 1)),
            steps_ahead=int(rng.choice([1, 1, 2, 3])),
            max_prefill_streak=int(rng.choice([0, 0, 3])),
            has_prompt_lookup=self.has_lookup,
            has_prefix_cache=bool(rng.random() < 0.8),
        )
        self.mode, self.num_pages = mode, self.made.stats().num_pages // dp
        self.fates: dict[int, Fate] = {}
        self.can_fail = False  # an error was injected
        self.num_raised = 0

    def new_request(self) -> Request:
        rng = self.rng
        length = int(rng.integers(1, 21))
        first = int(rng.integers(3))
        return Request(
            prompt_token_ids=tuple((first + i) % VOCAB for i in range(length)),
            sampling=SamplingParams(
                max_tokens=int(rng.integers(1, 14)),
                temperature=float(rng.choice([0.0, 1.0])),
                seed=int(rng.integers(2)),
                n=int(rng.choice([1, 1, 3])),
                stop_token_ids=tuple(map(int, rng.integers(0, VOCAB, rng.integers(0, 4)))),
                logprobs=int(rng.choice([0, 0, 3])),
            ),
            is_deterministic=self.mode != "fast" and bool(rng.random() < 0.7),
            priority=int(rng.integers(-1, 2)),
            cache_salt=str(rng.choice(["", "", "tenant"])),
        )

    def fate(self, asked: Request, *, fails: bool = False) -> Fate:
        is_large = -(-(len(asked.prompt_token_ids) + 18) // PAGE) >= self.num_pages
        has_claim = self.mode == "invariant" or asked.is_deterministic
        return Fate(asked, has_claim=has_claim, may_fail=is_large or fails)

    def arrive(self) -> None:
        asked, fails = self.new_request(), self.rng.random() < 0.1
        left = int(self.rng.integers(1, 8))

        def fail(event) -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError("disk full")
            return False

        given = {"on_token": fail} if fails else {}
        request_id = self.made.add_request(
            asked.prompt_token_ids, asked.sampling, is_deterministic=asked.is_deterministic,
            priority=asked.priority, cache_salt=asked.cache_salt, **given,
        )  # fmt: skip
        self.fates[request_id] = self.fate(asked, fails=fails)

    def cancel(self) -> None:
        if self.fates:
            self.made.cancel(int(self.rng.choice(list(self.fates))))

    def hear(self, outputs) -> None:
        for output in outputs:
            self.fates[output.request_id].outputs[output.sequence_idx].append(output)

    def step(self) -> None:
        for _ in range(self.rng.integers(1, 6)):
            self.hear(self.made.step())

    def generate(self) -> None:
        if self.made.has_work:
            self.hear(self.made.drain())
        asked = [self.new_request() for _ in range(self.rng.integers(1, 4))]
        fates = [self.fate(one) for one in asked]

        def ask(event) -> bool:
            if self.rng.random() < 0.05:
                self.arrive()
            return False

        try:
            completions = self.made.generate(asked, on_token=ask)
        except EngineStoppedError:
            raise
        except RuntimeError as error:
            is_large = "do not fit in the cache" in str(error) and any(f.may_fail for f in fates)
            assert is_large or "device lost" in str(error)
            return
        for completion in completions:
            if fates[completion.request_idx].has_claim:
                want = canonical(asked[completion.request_idx], completion.sequence_idx)[0]
                assert list(completion.token_ids) == want[: len(completion.token_ids)]

    def broken(self, error: BaseException) -> None:
        """Whatever the engine is asked to do, it raises somewhere in it."""
        does = self.step if self.rng.random() < 0.8 else self.generate
        spot = RaiseAt(int(np.exp(self.rng.uniform(0, 7))), error)
        try:
            with spot:
                does()
        except (KeyboardInterrupt, RuntimeError, RuntimeWarning):
            assert spot.did_raise
        self.num_raised += spot.did_raise
        if spot.did_raise and not isinstance(error, KeyboardInterrupt):
            for fate in self.fates.values():
                fate.may_fail = True
        if self.made._stopped_by is not None:
            with pytest.raises(EngineStoppedError):
                self.made.step()
            self.hear(self.made.reset())

    def go(self) -> None:
        for _ in range(self.rng.integers(5, 25)):
            at = self.rng.random()
            if at < 0.35:
                self.arrive()
            elif at < 0.43:
                self.cancel()
            elif at < 0.75:
                self.step()
            elif at < 0.8:
                self.generate()
            else:
                is_error = self.rng.random() < 0.3
                self.broken(RuntimeError("device lost") if is_error else KeyboardInterrupt())
        for _ in range(3000):
            if not self.made.has_work:
                break
            self.hear(self.made.step())
        assert_at_rest(self.made)
        for fate in self.fates.values():
            fate.check()


@pytest.mark.filterwarnings("ignore:a launch was interrupted:RuntimeWarning")
@pytest.mark.parametrize(
    "count", [*quick_and_slow([60], [150]), pytest.param(10_000, marks=pytest.mark.nightly)]
)
def test_whatever_happens_nobody_is_lost_and_every_answer_is_canonical(count):
    num_raised = 0
    for seed in range(count):
        run = Run(seed)
        try:
            run.go()
        except Exception as error:
            raise AssertionError(f"{seed=}: {error!r}") from error
        num_raised += run.num_raised
    assert num_raised > count
