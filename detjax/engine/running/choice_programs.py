# SPDX-License-Identifier: Apache-2.0
"""The compiled programs that follow a forward program where a row asks for more than it chose by.

A forward program leaves the logits of its rows on the device. A choice program reads them, chooses
by all sampling parameters, and writes its tokens over those that the forward program put into the
slots. What a row asks for is in arrays, so one program serves every mix of rows. Logprobs of a
prompt come from a program of their own, which reads the hidden states that a prefill has left.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Array, Int32
from detjax.engine.outputs.prompt_logprobs import score_tokens
from detjax.engine.running.device_arrays import (
    ADJUSTED_SPEC,
    BY_ROW,
    LOGITS_SPEC,
    Slots,
    adjusted_shape,
    logits_shape,
    of_slots,
    rows_shape,
    window_place,
)
from detjax.engine.running.launch_operands import (
    VerifyOperands,
    pack_choice,
    pack_verified,
    unpack_num_committed,
)
from detjax.engine.running.program_key import AnyKey, ChoiceKey, InstallKey, ScoreKey
from detjax.engine.sampling.adjustments import AdjustedRows, AdjustedSlots, Adjustments, num_words
from detjax.engine.sampling.logits_processors import Rank, TextSoFar, process_logits
from detjax.engine.sampling.sampling import SamplingRows, choose
from detjax.models.forward_paths import FORWARD_PATHS
from detjax.models.layers import ForwardContext
from detjax.models.loading import LoadedModel
from detjax.parallel.distributed import gather_replicas
from detjax.parallel.mesh import DP_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program that is not compiled yet.

    Attributes:
        local: The program on one device, inside `shard_map`.
        function: Of whole arrays, ready for `jax.jit`.
        operands: Their shapes.
        specs: How operands and results lie on the mesh.
        in_place: Which operands are donated.
    """

    local: Callable
    function: Callable
    operands: tuple
    specs: tuple[tuple, Any]
    in_place: tuple[int, ...]

    @classmethod
    def on_mesh(
        cls, mesh: Mesh, local: Callable, operands: tuple, specs: tuple[tuple, Any],
        in_place: tuple[int, ...] = (),
    ) -> "Program":  # fmt: skip
        """The program of one device, mapped over a mesh."""
        in_specs, out_specs = specs
        function = jax.shard_map(
            local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return cls(
            local=local, function=function, operands=operands, specs=specs, in_place=in_place
        )


def drafts_of(slots: Slots, slot, is_given, token_ids: Int32[Array, "B T"]) -> Int32[Array, "B D"]:
    """The drafts of windows: `token_ids` of the host where these are given, or those in slots."""
    on_device = of_slots(slots.window, slot)[:, : token_ids.shape[1]]
    return jnp.where(is_given[:, None] == 1, token_ids, on_device)[:, 1:]


def pack_windows(given: VerifyOperands, adjusted_slot: np.ndarray) -> np.ndarray:
    """What the host tells a choice program of windows: int32 [B, 4 + W].

    Args:
        given: Operands of the verification, on the host.
        adjusted_slot: int32 [B], the slot of each row's adjustments; out of range for none.
    """
    numbers = given.slot, adjusted_slot, given.num_drafts, given.is_given
    return np.concatenate([np.stack(numbers, axis=1), given.token_ids], axis=1).astype(np.int32)


def commit_window(
    slots: Slots, slot, start, drafts, num_drafts, chosen: Int32[Array, "B T"]
) -> tuple[Slots, Int32[Array, " B"]]:
    """Commit the drafts before the first that disagrees with a choice, and the choice made there.

    Args:
        slots: Of all sequences.
        slot: Of each row.
        start: Position of the last committed token.
        drafts: int32 [B, T - 1].
        num_drafts: How many of them there are.
        chosen: Choice i is of the position that draft i claims.

    Returns:
        The slots, and how many drafts were accepted.
    """
    step_idx = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :]
    is_wrong = (chosen[:, :-1] != drafts) | (step_idx >= num_drafts[:, None])
    is_wrong = jnp.pad(is_wrong, ((0, 0), (0, 1)), constant_values=True)
    num_accepted = jnp.argmax(is_wrong, axis=1).astype(jnp.int32)
    last = jnp.take_along_axis(chosen, num_accepted[:, None], axis=1)[:, 0]
    slots = Slots(
        window=slots.window.at[slot, 0].set(last, mode="drop"),
        place=slots.placed(slot, start + num_accepted + 1),
    )
    return slots, num_accepted


class ChoicePrograms:
    """Describes the programs that follow forward programs, for one model and its slots.

    - `InstallKey`: `(adjusted slots, AdjustedRows) -> adjusted slots`.
    - `ChoiceKey` of one choice a row: `(slots, sampling, adjusted slots, logits, rows, banned) ->
      (slots, adjusted slots, result)`. `rows` is int32 [B, 2]: the slot of each row, and the slot
      of its adjustments, out of range where it has none. `banned` is int32 [B, n]: bits of tokens
      that a grammar forbids. Where the rows' tokens belong is in their slots, as the forward
      program left them.
    - `ChoiceKey` of windows of W tokens: `(slots, sampling, adjusted slots, logits, rows, forward
      result) -> (slots, adjusted slots, result)`. `rows` is int32 [B, 4 + W], as `pack_windows`
      has it.
    - `ScoreKey`: `(params, hidden, targets) -> scores`.

    Attributes:
        adjusted: Shapes of `AdjustedSlots`.
    """

    def __init__(
        self,
        model: LoadedModel,
        context: ForwardContext,
        *,
        slots: Slots,
        sampling: SamplingRows,
        candidates: Callable,
    ):
        """Describe nothing yet. `slots` and `sampling` are shapes over all replicas."""
        self._model, self._context, self._candidates = model, context, candidates
        self._slots, self._sampling = slots, sampling
        self.adjusted = adjusted_shape(model, slots.place.shape[0])

    def program(self, key: AnyKey, params: dict) -> Program:
        """Describe a program for weights like `params`."""
        match key:
            case InstallKey():
                return self._install_program(key)
            case ScoreKey():
                return self._score_program(key, params)
            case ChoiceKey(length=1):
                return self._choice_program(key)
            case ChoiceKey():
                return self._window_program(key)
        raise AssertionError(key)

    # ------------------------------------------------------------------------------ descriptions

    def _describe(
        self, body: Callable, operands: tuple, in_specs: tuple, out_specs, in_place: tuple = ()
    ) -> Program:
        return Program.on_mesh(self._model.mesh, body, operands, (in_specs, out_specs), in_place)

    def _rows(self, count: int, *tail: int) -> jax.ShapeDtypeStruct:
        count *= self._model.mesh.shape[DP_AXIS]
        return rows_shape(self._model, count, jnp.int32, *tail)

    def _logits(self, rows: int) -> jax.ShapeDtypeStruct:
        return logits_shape(self._model, rows * self._model.mesh.shape[DP_AXIS])

    def _install_program(self, key: InstallKey) -> Program:
        of_rows = adjusted_shape(self._model, self._rows(key.rows).shape[0])
        operands = self.adjusted, AdjustedRows(slot=self._rows(key.rows), slots=of_rows)
        specs = ADJUSTED_SPEC, AdjustedRows(slot=BY_ROW, slots=ADJUSTED_SPEC)
        return self._describe(_install, operands, specs, ADJUSTED_SPEC, (0,))

    def _choice_program(self, key: ChoiceKey) -> Program:
        banned = self._rows(key.rows, num_words(self._context.config.vocab_size))
        operands = (
            self._slots, self._sampling, self.adjusted, self._logits(key.rows),
            self._rows(key.rows, 2), banned,
        )  # fmt: skip
        specs = BY_ROW, BY_ROW, ADJUSTED_SPEC, LOGITS_SPEC, BY_ROW, BY_ROW
        return self._describe(
            partial(self._choose, key), operands, specs, self._result_specs(), (0, 2)
        )

    def _window_program(self, key: ChoiceKey) -> Program:
        of_result = P() if jax.process_count() > 1 else BY_ROW
        sharding = NamedSharding(self._model.mesh, of_result)
        result = self._rows(key.rows, key.length, 3)
        operands = (
            self._slots, self._sampling, self.adjusted, self._logits(key.rows * key.length),
            self._rows(key.rows, 4 + key.length),
            jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding),
        )  # fmt: skip
        specs = BY_ROW, BY_ROW, ADJUSTED_SPEC, LOGITS_SPEC, BY_ROW, of_result
        return self._describe(
            partial(self._choose_window, key), operands, specs, self._result_specs(), (0, 2)
        )

    def _result_specs(self) -> tuple:
        return BY_ROW, ADJUSTED_SPEC, P() if jax.process_count() > 1 else BY_ROW

    def _score_program(self, key: ScoreKey, params: dict) -> Program:
        targets = self._rows(key.rows, key.length)
        model = self._model
        hidden = rows_shape(
            model, targets.shape[0], model.profile.activation_dtype,
            key.length, model.config.hidden_size,
        )  # fmt: skip
        _, local_logits = FORWARD_PATHS[key.mode]

        def score(params, hidden, targets):
            scores = score_tokens(
                self._context, local_logits, params, hidden, targets, num_top=key.num_top
            )
            return gather_replicas(scores) if jax.process_count() > 1 else scores

        specs = model.partition_specs, BY_ROW, BY_ROW
        of_result = P() if jax.process_count() > 1 else BY_ROW
        return self._describe(score, (params, hidden, targets), specs, of_result)

    # ------------------------------------------------------------------------------------ bodies

    def _choose(
        self, key: ChoiceKey, slots: Slots, sampling, adjusted: AdjustedSlots, logits, rows, banned
    ):
        """The choice of each row, over the one that the forward program has made."""
        slot, adjusted_slot = rows.T
        start, num_drafts = slots.unplaced(slot)
        # A draft lies behind what is committed, and its place counts it already.
        position, offset = start + num_drafts, jnp.maximum(num_drafts - 1, 0)
        text = TextSoFar(
            uses=of_slots(adjusted.uses, adjusted_slot),
            recent=of_slots(adjusted.recent, adjusted_slot),
            drafts=of_slots(slots.window, slot)[:, 1:],
            num_drafts=offset[:, None],
            position=position[:, None],
        )
        records = Adjustments.unpack(of_slots(adjusted.record, adjusted_slot))
        processed = process_logits(self._context, logits, text, records, banned)
        choice = choose(
            self._context, logits, rows_of(sampling, slot), position,
            num_top=key.num_top, with_filters=key.with_filters, processed=processed,
        )  # fmt: skip
        drafts = self._candidates(choice.token_ids, position)
        token_ids = jnp.where(num_drafts > 0, drafts, choice.token_ids)
        place = window_place(slots.window.shape, slot, num_drafts)
        window = slots.window.reshape(-1).at[place].set(token_ids, mode="drop")
        slots = Slots(window=window.reshape(slots.window.shape), place=slots.place)
        # A draft is no part of the text yet.
        num_new = jnp.where(num_drafts > 0, 0, 1)
        adjusted = self._extend(adjusted, adjusted_slot, text.recent, token_ids[:, None], num_new)
        return (
            slots,
            adjusted,
            self._result(pack_choice(dataclasses.replace(choice, token_ids=token_ids))),
        )

    def _choose_window(
        self, key: ChoiceKey, slots: Slots, sampling, adjusted: AdjustedSlots, logits, rows, result
    ):
        """The choices of whole windows, and what they commit, over those of the forward program."""
        slot, adjusted_slot, num_drafts, is_given = rows[:, :4].T
        length = key.length
        if jax.process_count() > 1:  # a process has the results of all replicas
            first = lax.axis_index(DP_AXIS) * key.rows
            result = lax.dynamic_slice_in_dim(result, first, key.rows)
        placed, _ = slots.unplaced(slot)
        start = placed - unpack_num_committed(result)
        drafts = drafts_of(slots, slot, is_given, rows[:, 4:])
        place = jnp.arange(length, dtype=jnp.int32)[None, :]
        place = jnp.broadcast_to(place, (key.rows, length))
        position = start[:, None] + 1 + place
        text = TextSoFar(
            uses=of_slots(adjusted.uses, adjusted_slot),
            recent=of_slots(adjusted.recent, adjusted_slot),
            drafts=drafts,
            num_drafts=place,
            position=position,
        )
        records = Adjustments.unpack(of_slots(adjusted.record, adjusted_slot))
        processed = process_logits(self._context, logits, text, records)
        of_rows = jax.tree.map(lambda x: jnp.repeat(x, length), rows_of(sampling, slot))
        choice = choose(
            self._context, logits, of_rows, position.reshape(-1),
            num_top=key.num_top, with_filters=key.with_filters, processed=processed,
        )  # fmt: skip
        chosen = choice.token_ids.reshape(-1, length)
        slots, num_accepted = commit_window(slots, slot, start, drafts, num_drafts, chosen)
        adjusted = self._extend(adjusted, adjusted_slot, text.recent, chosen, num_accepted + 1)
        return slots, adjusted, self._result(pack_verified(choice, num_accepted, length=length))

    def _extend(
        self, adjusted: AdjustedSlots, slot, recent, token_ids: Int32[Array, "B T"], num_new
    ) -> AdjustedSlots:
        """Put the first `num_new` tokens of each row behind its text."""
        place = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
        rank = Rank.of(adjusted.uses.shape[1])
        column = rank.columns(jnp.where(place < num_new[:, None], token_ids, -1))
        at = jnp.arange(recent.shape[1], dtype=jnp.int32)[None, :] + num_new[:, None]
        texts = jnp.concatenate([recent, token_ids], axis=1)
        return AdjustedSlots(
            record=adjusted.record,
            recent=adjusted.recent.at[slot].set(
                jnp.take_along_axis(texts, at, axis=1), mode="drop"
            ),
            uses=adjusted.uses.at[slot[:, None], column].add(2, mode="drop"),
        )

    def _result(self, result):
        # A process reads the results of its own devices alone.
        return gather_replicas(result) if jax.process_count() > 1 else result


def _install(adjusted: AdjustedSlots, rows: AdjustedRows) -> AdjustedSlots:
    def put(old, new):
        return old.at[rows.slot].set(new, mode="drop")

    return jax.tree.map(put, adjusted, rows.slots)


def rows_of(sampling: SamplingRows, slot) -> SamplingRows:
    """The parameters of the slots that rows name."""
    return jax.tree.map(lambda x: of_slots(x, slot), sampling)
