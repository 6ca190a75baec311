# SPDX-License-Identifier: Apache-2.0
"""One order of programs on all devices, whoever calls them.

XLA puts a program of several devices into a queue of each, one device after the other. Two threads
that call at once could put theirs in one order on one device and in the other on the next: then
each device waits in a collective, or in an exchange kernel, for a peer that waits in the other
program. Engines on one model share mailboxes, too, whose parities count the programs in order. So
whoever calls a program of several devices holds all of them until it is in every queue.

Programs that are called one after the other also run so on GPUs. On CPUs of several processes they
run when their operands are there: see `finished`.

Nothing else happens while they are held but the call, which loads a new program as well: by then
every earlier one is in all queues, so one that loading has to wait for will end. Programs are
compiled without holding anything.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding


@contextlib.contextmanager
def one_order(devices: Collection[jax.Device]) -> Iterator[None]:
    """Hold devices while a program of theirs is called. One device needs no order.

    A thread that holds some may not ask for more.
    """
    with contextlib.ExitStack() as held:
        if len(devices) > 1:
            # In one order as well, so that no two threads wait for each other here.
            for device in sorted(devices, key=lambda device: (device.platform, device.id)):
                held.enter_context(_lock_of(device))
        yield


def ordered[**P, R](devices: Collection[jax.Device], program: Callable[P, R]) -> Callable[P, R]:
    """A program of these devices, each call of which is in one order with all others."""
    if len(devices) == 1:
        return program

    @functools.wraps(program)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with one_order(devices):
            return finished(devices, program(*args, **kwargs))

    return call


def finished[R](devices: Collection[jax.Device], result: R) -> R:
    """What a program gives; on CPUs of several processes, once it has ended.

    # WHY: there XLA begins a program when its operands are there, whatever was called before
    # (jaxlib 0.11.2, one device a process). Of two programs that need nothing of each other, one
    # process may begin the first and its peer the second. Gloo tells their messages apart by order
    # alone, and ends both processes: "Received data size doesn't match expected size".
    """
    if jax.process_count() > 1 and next(iter(devices)).platform == "cpu":
        jax.block_until_ready(result)
    return result


class OrderedJit:
    """A jitted program of several devices, each call of which is in one order with all others.

    Nothing is held while it is compiled, which a plain `jax.jit` does within its first call.
    """

    def __init__(self, jitted: Any):
        """Compile nothing yet.

        Args:
            jitted: What `jax.jit` returned, without static arguments.
        """
        self._jitted = jitted
        self._programs: dict[Any, tuple[jax.stages.Compiled, frozenset[jax.Device]]] = {}

    def __call__(self, *operands: Any) -> Any:
        """Run the program of these operands' shapes and shardings, on the devices they lie on."""
        leaves, tree = jax.tree.flatten(operands)
        key = tree, tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
        if key not in self._programs:
            placed = (x.sharding.device_set for x in leaves if isinstance(x, jax.Array))
            compiled = self._jitted.lower(*operands).compile()
            self._programs[key] = compiled, frozenset().union(*placed)
        program, devices = self._programs[key]
        with one_order(devices):
            result = program(*operands)
            return finished(devices, result) if len(devices) > 1 else result


def _mesh_devices(sharding: jax.sharding.Sharding) -> tuple[jax.Device, ...]:
    """The devices of a mesh in its order; none where there is no mesh of devices."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(sharding.mesh.devices.flat)
    return ()


@functools.cache
def _placing_program(sharding: NamedSharding) -> OrderedJit:
    return OrderedJit(jax.jit(_identity, out_shardings=sharding))


def _identity(array: jax.Array) -> jax.Array:
    return array


def put(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Put an array elsewhere, as `jax.device_put` does, in one order with programs.

    Between meshes of the same devices that is a program, with collectives where shards move.
    """
    have = _mesh_devices(array.sharding)
    if have and have == _mesh_devices(sharding):
        return _placing_program(sharding)(array)
    with one_order(array.sharding.device_set | sharding.device_set):
        return jax.device_put(array, sharding)


@functools.cache  # WHY: engines on other models, and trainers, have the same devices
def _lock_of(device: jax.Device) -> threading.Lock:
    return threading.Lock()
