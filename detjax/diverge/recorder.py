# SPDX-License-Identifier: Apache-2.0
"""Taps that keep values, and the engine's programs with these values as further results."""

import dataclasses
from collections import abc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from detjax.engine.running.choice_programs import ChoicePrograms, Program
from detjax.engine.running.program_key import AnyKey, ChoiceKey, ProgramKey
from detjax.engine.running.programs import ProgramCache
from detjax.models.loading import LoadedModel
from detjax.models.pages import CachePages
from detjax.models.taps import Share, WatchedOps
from detjax.models.transformer import DecoderOps
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

_BY_RANK = P((DP_AXIS, TP_AXIS))
# Values that every rank should have alike come back from every rank.
_SPECS = {
    Share.WHOLE.value: _BY_RANK,
    Share.COLUMNS.value: P(DP_AXIS, TP_AXIS),
    Share.ROWS.value: _BY_RANK,
    Share.TERMS.value: _BY_RANK,
}

Values = dict[str, dict[str, jax.Array]]
"""What was seen, by how ranks share it and by its number in order."""


class Tap(NamedTuple):
    """The result of one operation. `layer` is None before the first layer and after the last."""

    layer: int | None
    name: str

    def __str__(self) -> str:
        """Return layer and name."""
        return self.name if self.layer is None else f"layer {self.layer} {self.name}"


class RecordedTaps:
    """Keeps the tapped values while one program is traced.

    Attributes:
        seen: (tap, how ranks share it) in the order of the program.
    """

    def __init__(self):
        """Begin with nothing."""
        self.seen: list[tuple[Tap, Share]] = []
        self._values: list[jax.Array] = []
        self._layer: int | None = None
        self._prefix = ""

    def begin(self) -> None:
        """Forget all values, because another program is traced."""
        self.seen, self._values = [], []
        self._set_layer(None)

    def watch(self, ops: DecoderOps, *, num_layers: int) -> DecoderOps:
        """See the results of `ops`."""
        return WatchedOps(ops, self, self._set_layer, num_layers=num_layers)

    def see(self, name: str, value: jax.Array, share: Share = Share.WHOLE) -> None:
        """Keep a value."""
        self.seen.append((Tap(self._layer, self._prefix + name), share))
        self._values.append(value)

    def values(self) -> Values:
        """Return the kept values, as results of the program."""
        grouped: Values = {share.value: {} for share in Share}
        for i, ((_, share), value) in enumerate(zip(self.seen, self._values, strict=True)):
            grouped[share.value][f"{i:06}"] = value
        return grouped

    def replace(self, values: Values) -> None:
        """Replace the kept values."""
        by_number = {number: v for group in values.values() for number, v in group.items()}
        self._values = [by_number[number] for number in sorted(by_number)]

    def _set_layer(self, layer_idx: int | None, prefix: str = "") -> None:
        self._layer, self._prefix = layer_idx, prefix


OnLaunch = Callable[[ProgramKey, abc.Sequence[Any], CachePages, dict[Tap, "Seen"]], None]
"""Told (program, host operands, the cache after the launch, what its taps saw)."""


OnChoice = Callable[[ChoiceKey, np.ndarray, dict[Tap, "Seen"]], None]
"""Told (choice program, its rows from the host, what its taps saw), behind the launch of rows."""


class Seen(NamedTuple):
    """A global value on the mesh, and how ranks share it."""

    value: np.ndarray
    share: Share


class _TappedChoices(ChoicePrograms):
    """Choice programs with tapped values as further results."""

    def __init__(self, programs: "TappedPrograms", taps: RecordedTaps, model, context):
        super().__init__(
            model,
            context,
            slots=programs._slots,
            sampling=programs._sampling,
            candidates=programs._candidates,
        )
        self._programs, self._taps = programs, taps

    def program(self, key: AnyKey, params: dict) -> Program:
        """Describe a program with its tapped values after its results."""
        plain = super().program(key, params)
        if not isinstance(key, ChoiceKey):
            return plain

        def tapped(*operands):
            self._taps.begin()
            results = plain.local(*operands)
            self._programs._seen[key] = list(self._taps.seen)
            return *results, self._taps.values()

        in_specs, out_specs = plain.specs
        return self._describe(
            tapped, plain.operands, in_specs, (*out_specs, _SPECS), plain.in_place
        )


class TappedPrograms(ProgramCache):
    """Programs for one engine that report each launch and its taps to `on_launch`.

    They run the operations of `ProgramCache`, in its order and on its operands. Tapped values are
    further results. `find_divergence` compares their answers with those of plain programs.
    """

    def __init__(self, model: LoadedModel, *, num_pages: int, num_slots: int, window_len: int):
        """Compile nothing yet. Arguments as in `ProgramCache`."""
        super().__init__(model, num_pages=num_pages, num_slots=num_slots, window_len=window_len)
        self._taps = RecordedTaps()
        self._context = dataclasses.replace(self._context, taps=self._taps)
        self._choices = _TappedChoices(self, self._taps, model, self._context)
        self._seen: dict[AnyKey, list[tuple[Tap, Share]]] = {}
        self.on_launch: OnLaunch | None = None
        self.on_choice: OnChoice | None = None

    def get(self, key: AnyKey, params: dict, asked: int | None = None) -> Callable:
        """Return a program that reports its launches."""
        program = super().get(key, params, asked)
        match key:
            case ProgramKey():
                return partial(self._launch, key, program)
            case ChoiceKey():
                return partial(self._launch_choice, key, program)
        return program

    def order_of_results(self, key: ProgramKey) -> list[Tap]:
        """Return the taps of a traced program, in the order of its flat results."""
        numbered = sorted((share.value, i) for i, (_, share) in enumerate(self._seen[key]))
        return [self._seen[key][i][0] for _, i in numbered]

    def _launch(self, key: ProgramKey, program: Callable, *operands):
        params, tables, kv_cache, slots, sampling, *host = operands
        *results, values = program(params, tables, kv_cache, slots, sampling, *host)
        if self.on_launch is not None:
            given = host[key.logit_rows > 0 :]
            self.on_launch(key, given, results[0], self._seen_in(key, values))
        return tuple(results)

    def _launch_choice(self, key: ChoiceKey, program: Callable, *operands):
        *results, values = program(*operands)
        if self.on_choice is not None:
            self.on_choice(key, np.asarray(operands[4]), self._seen_in(key, values))
        return tuple(results)

    def _seen_in(self, key: AnyKey, values: Values) -> dict[Tap, Seen]:
        """Return the tapped values of a program."""
        flat = {number: v for group in values.values() for number, v in group.items()}
        return {
            tap: Seen(np.asarray(flat[f"{i:06}"]), share)
            for i, (tap, share) in enumerate(self._seen[key])
        }

    def _local_step(self, key: ProgramKey) -> Callable:
        local_step = super()._local_step(key)

        def tapped(*operands):
            self._taps.begin()
            results = local_step(*operands)
            self._seen[key] = list(self._taps.seen)
            return *results, self._taps.values()

        return tapped

    def _specs(self, key: ProgramKey) -> tuple[tuple, tuple]:
        of_operands, of_results = super()._specs(key)
        return of_operands, (*of_results, _SPECS)

    def _loop(self, count: int, body: Callable, carry: tuple) -> tuple:
        """Return the same loop with the values of each round next to its carry."""

        def one(carry, i):
            self._taps.begin()
            return body(i, carry), self._taps.values()

        carry, values = lax.scan(one, carry, jnp.arange(count, dtype=jnp.int32))
        self._taps.replace(jax.tree.map(_by_row, values))
        return carry


def _by_row(rounds: jax.Array) -> jax.Array:
    """Reorder [rounds, rows, ...] to [rows * rounds, ...], the rounds of a row in sequence."""
    return jnp.swapaxes(rounds, 0, 1).reshape(-1, *rounds.shape[2:])
