# SPDX-License-Identifier: Apache-2.0
"""Calls that follow a forward program in the same launch: choices, adjustments, prompt logprobs."""

import dataclasses
from collections import abc
from collections.abc import Callable

import jax
import numpy as np

from detjax.engine.config import ReplicaConfig
from detjax.engine.requests.sequence import PrefillRow, Row, attributing_errors, max_committed
from detjax.engine.running.choice_programs import pack_windows
from detjax.engine.running.device_state import Call
from detjax.engine.running.launch_operands import VerifyOperands
from detjax.engine.running.program_key import (
    AnyKey,
    ChoiceKey,
    InstallKey,
    ProgramKey,
    ScoreKey,
    choice_of,
    install_rows,
)
from detjax.engine.sampling.adjustments import (
    AdjustedRows,
    AdjustedSlots,
    count_uses,
    num_words,
    pack_record,
    recent_tokens,
)
from detjax.engine.sampling.guides import SEEN_TO


class FollowUpCalls:
    """Makes the calls that follow a forward program, from the rows of its launch."""

    def __init__(
        self,
        config: ReplicaConfig,
        *,
        vocab_size: int,
        adjusted_shape: AdjustedSlots,
        program: Callable[[AnyKey], Callable],
        no_bans: Callable[[int], jax.Array],
    ):
        """Make none yet.

        Args:
            config: Of each replica.
            vocab_size: Of the model.
            adjusted_shape: `ProgramCache.adjusted_shape`.
            program: `ReadyPrograms.get`.
            no_bans: `DeviceState.no_bans`.
        """
        self._config, self._vocab_size = config, vocab_size
        self._adjusted_shape, self._program, self._no_bans = adjusted_shape, program, no_bans

    def choice_key(
        self, key: ProgramKey, rows: abc.Sequence[abc.Sequence[Row]]
    ) -> ChoiceKey | None:
        """The program that chooses for these rows; None where the forward program does."""
        asking = [
            row.seq for part in rows for row in part if row.seq.needs_choice and _commits(row)
        ]
        if not asking:
            return None
        assert key.logit_rows, "the scheduler has given these rows several tokens a launch"
        with_filters, num_top = choice_of(
            is_filtered=any(seq.is_filtered for seq in asking),
            num_top=max(seq.request.sampling.logprobs for seq in asking),
        )
        length = key.length if key.kind == "verify" else 1
        return ChoiceKey(
            rows=key.logit_rows // length,
            length=length,
            with_filters=with_filters,
            num_top=num_top,
        )

    def choice_call(
        self,
        choice_key: ChoiceKey,
        key: ProgramKey,
        rows: abc.Sequence[abc.Sequence[Row]],
        windows: VerifyOperands | None,
    ) -> Call:
        """A choice program with its operands."""
        size, no_slot = choice_key.rows, self._config.num_slots
        slots = np.full((self._config.num_replicas * size, 2), no_slot, np.int32)
        banned: np.ndarray | None = None
        for replica, part in enumerate(rows):
            for i, row in enumerate(part):
                seq, at = row.seq, replica * size + i
                if not _commits(row):
                    continue
                slots[at] = seq.slot, seq.slot if seq.is_adjusted else no_slot
                if seq.guide is not None:
                    if banned is None:
                        words = num_words(self._vocab_size)
                        banned = np.zeros((len(slots), words), np.int32)
                    with attributing_errors(seq):
                        banned[at] = seq.guide.banned(seq.output_ids)
        program = self._program(choice_key)
        if windows is not None:
            return program, (pack_windows(windows, slots[:, 1]),)
        return program, (slots, self._no_bans(size) if banned is None else banned)

    def install_call(self, rows: abc.Sequence[abc.Sequence[PrefillRow]]) -> Call | None:
        """Puts adjustments of sequences whose prompts end here into their slots."""
        if not any(row.is_last and row.seq.is_adjusted for part in rows for row in part):
            return None
        size = install_rows(self._config)
        shapes = self._adjusted_shape
        count = self._config.num_replicas * size
        slot = np.full(count, self._config.num_slots, np.int32)
        values = jax.tree.map(lambda x: np.zeros((count, *x.shape[1:]), x.dtype), shapes)
        for replica, part in enumerate(rows):
            for i, row in enumerate(part):
                seq, at = row.seq, replica * size + i
                if not (row.is_last and seq.is_adjusted):
                    continue
                slot[at] = seq.slot
                prompt_ids, output_ids = seq.request.prompt_token_ids, seq.output_ids
                sampling = seq.request.sampling
                if seq.guide is not None:
                    sampling = dataclasses.replace(sampling, **SEEN_TO)
                with attributing_errors(seq):
                    values.record[at] = pack_record(
                        sampling,
                        prompt_len=len(prompt_ids),
                        end_token_ids=seq.end_token_ids,
                        vocab_size=self._vocab_size,
                    )
                    values.recent[at] = recent_tokens(output_ids)
                    values.uses[at] = count_uses(prompt_ids, output_ids, values.uses.shape[1])
        program = self._program(InstallKey(rows=size))
        return program, (AdjustedRows(slot=slot, slots=values),)

    def score_call(self, key: ProgramKey, num_top: int, targets: np.ndarray) -> Call:
        """Computes the logprobs of `targets` from the hidden states of a prefill."""
        score = ScoreKey(rows=key.rows, length=key.length, mode=key.mode, num_top=num_top)
        return self._program(score), (targets,)


def _commits(row: Row) -> bool:
    """Whether the token chosen for a row is wanted: not behind a piece of a prompt."""
    return not isinstance(row, PrefillRow) or max_committed(row) > 0
