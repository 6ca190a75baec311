# SPDX-License-Identifier: Apache-2.0
"""Programs of several devices are in one order on all of them, whichever engine or thread calls."""

import functools
import threading
from collections.abc import Callable

import jax
import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.parallel import dispatch
from detjax.testing.dummies import dummy_config, dummy_model

MEETING_S = 0.2
"""So long a call waits between two devices for another that may overtake it."""


class Queues:
    """Of each device, as XLA has them: a call is put into one after the other."""

    def __init__(self, devices: list[jax.Device]):
        self.of: dict[jax.Device, list[str]] = {device: [] for device in devices}
        self._others = threading.Condition()

    def put(self, name: str, devices: list[jax.Device], *, forwards: bool = True) -> None:
        """Put a call into every queue, and let any other go ahead between two of them."""
        for device in devices if forwards else reversed(devices):
            with self._others:
                self.of[device].append(name)
                self._others.notify_all()
                self._others.wait(MEETING_S)

    def crossed(self) -> list[tuple[str, str]]:
        """Pairs of calls that are in one order on a device and in another elsewhere."""
        before = {
            (queue[i], queue[j])
            for queue in self.of.values()
            for i in range(len(queue))
            for j in range(i + 1, len(queue))
        }
        return sorted((a, b) for a, b in before if a < b and (b, a) in before)


def at_once(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("first", "second"), [((0, 2), (0, 2)), ((0, 2), (1, 3)), ((0, 4), (2, 4))]
)
def test_calls_on_devices_in_common_are_in_one_order(first, second):
    devices = jax.devices("cpu")[:4]
    queues = Queues(devices)

    def call(name: str, span: tuple[int, int], *, forwards: bool) -> None:
        own = devices[slice(*span)]
        dispatch.ordered(own, queues.put)(name, own, forwards=forwards)

    at_once(
        functools.partial(call, "a", first, forwards=True),
        functools.partial(call, "b", second, forwards=False),
    )
    assert queues.crossed() == []


@pytest.mark.control
def test_control_without_that_two_calls_cross():
    devices = jax.devices("cpu")[:2]
    queues = Queues(devices)
    at_once(
        lambda: queues.put("a", devices),
        lambda: queues.put("b", devices, forwards=False),
    )
    assert queues.crossed() == [("a", "b")]


def test_devices_apart_do_not_wait_for_each_other():
    devices = jax.devices("cpu")[:4]
    both = threading.Barrier(2)
    at_once(
        *(
            functools.partial(dispatch.ordered(own, both.wait), timeout=30)
            for own in (devices[:2], devices[2:])
        )
    )
    assert not both.broken


def test_one_device_holds_nothing():
    """Its programs wait for no peer, and a replica on it goes on while a mesh is held."""
    devices, reached = jax.devices("cpu")[:2], False
    with dispatch.one_order(devices), dispatch.one_order(devices[:1]):
        reached = True
    assert reached


def test_a_call_that_raises_holds_nothing_on():
    devices = jax.devices("cpu")[:2]

    def fail() -> None:
        raise OSError("no memory")

    for _ in range(2):
        with pytest.raises(OSError, match="no memory"):
            dispatch.ordered(devices, fail)()


# ------------------------------------------------------------------------------- jitted programs


def over(devices: list[jax.Device]) -> jax.Array:
    mesh = jax.sharding.Mesh(np.asarray(devices), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return jax.device_put(np.arange(4, dtype=np.int32), sharding)


def is_held_while_traced(make: Callable) -> list[bool]:
    """Of each trace of a program over two devices, whether the devices are held meanwhile."""
    devices, held = jax.devices("cpu")[:2], []

    def increment(x: jax.Array) -> jax.Array:
        held.append(any(dispatch._lock_of(device).locked() for device in devices))
        return x + 1

    program = make(devices, jax.jit(increment))
    for _ in range(2):
        assert np.asarray(program(over(devices))).tolist() == [1, 2, 3, 4]
    return held


def test_a_program_is_compiled_while_nothing_is_held():
    assert is_held_while_traced(lambda devices, jitted: dispatch.OrderedJit(jitted)) == [False]


@pytest.mark.control
def test_control_a_plain_jit_is_compiled_while_its_devices_are_held():
    assert is_held_while_traced(dispatch.ordered) == [True]


def waits_for(devices: list[jax.Device], call: Callable[[], object]) -> bool:
    """Whether a call ends only once devices are free."""
    thread = threading.Thread(target=call)
    with dispatch.one_order(devices):
        thread.start()
        thread.join(timeout=5 * MEETING_S)
        has_waited = thread.is_alive()
    thread.join(timeout=60)
    assert not thread.is_alive()
    return has_waited


def test_a_jitted_program_and_a_move_between_meshes_wait_for_their_devices():
    devices = jax.devices("cpu")
    array, elsewhere = over(devices[:2]), over(devices[2:4]).sharding
    program = dispatch.OrderedJit(jax.jit(lambda x: x + 1))
    program(array)
    calls = [
        lambda: program(array),
        lambda: dispatch.put(array, array.sharding),
        lambda: dispatch.put(array, elsewhere),
    ]
    for call in calls:
        assert waits_for(devices[:2], call) and not waits_for(devices[4:6], call)
    moved = dispatch.put(array, elsewhere)
    assert moved.sharding == elsewhere and np.array_equal(np.asarray(moved), np.asarray(array))


# ---------------------------------------------------------------------------------------- engines


@functools.cache
def model() -> LoadedModel:
    config = dummy_config(num_layers=1, hidden_size=64, intermediate_size=128, vocab_size=128)
    return dummy_model(
        config, profile=NumericsProfile(attention_block=16, attention_split=64), tp=2
    )


def asked(i: int) -> Request:
    return Request(prompt_token_ids=tuple(range(i, i + 20)), sampling=SamplingParams(max_tokens=8))


def plain_engine() -> Engine:
    return Engine(
        model(), EngineConfig(batch_size=2, prefill_chunk=16, max_len=64, self_check="off")
    )


def engine(name: str, queues: Queues, *, forwards: bool) -> Engine:
    """An engine, each call of whose programs is put into the queues where XLA would put it."""
    made = plain_engine()
    devices, get = list(model().mesh.devices.flat), made.programs.get
    calls = iter(range(1000))

    def get_watched(key, params, *more):
        program = get(key, params, *more)

        def run(*operands):
            queues.put(f"{name}{next(calls)}", devices, forwards=forwards)
            return program(*operands)

        return run

    made.programs.get = get_watched
    return made


@pytest.mark.slow
def test_engines_on_one_model_run_their_programs_in_one_order():
    """They compile as they go, each while the other's steps are in flight."""
    alone = [plain_engine().generate([asked(i)])[0].digest() for i in range(2)]
    queues = Queues(list(model().mesh.devices.flat))
    made = [engine("a", queues, forwards=True), engine("b", queues, forwards=False)]
    digests: dict[int, str] = {}

    def run(i: int) -> None:
        digests[i] = made[i].generate([asked(i)])[0].digest()

    at_once(*(functools.partial(run, i) for i in range(2)))
    assert queues.crossed() == []
    assert [digests[i] for i in range(2)] == alone
    # They did run at once: neither's first call came after the other's last.
    (order, *_) = ["".join(name[0] for name in queue) for queue in queues.of.values()]
    assert "ab" in order and "ba" in order
