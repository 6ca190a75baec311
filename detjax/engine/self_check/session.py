# SPDX-License-Identifier: Apache-2.0
"""Probes on pages of the cache, computed by a program and by prefill, and compared."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from detjax.engine.config import ReplicaConfig
from detjax.engine.running.device_arrays import Slots
from detjax.engine.running.launch_operands import unpack_num_committed
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.self_check.device import join_checksums
from detjax.engine.self_check.evidence import CheckDifference
from detjax.engine.self_check.filled_places import FilledPlaces
from detjax.engine.self_check.probes import IdlePages, Placement, Probe
from detjax.engine.self_check.rows import Group, RowMaker, make_groups, scratch_slots
from detjax.models.loading import LoadedModel

RunsProgram = Callable[..., tuple[Slots, Any]]
"""`run(key, slots, sampling, *host, choice=...) -> (slots, result)`: a launch beside those of
sequences, with a choice program behind it or None."""
Checksums = Callable[[np.ndarray, np.ndarray | None], list[list[jax.Array]]]
"""From pages, int32 [dp, n], and those of local layers, to a number for the content of each:
`device.checksums`."""
MOST_PREFILLED = 2
"""New tokens of a probe where a prefill program itself is under test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckContext:
    """What a check may use.

    Attributes:
        run: Launches a program on the cache, with slots of its own.
        checksums: Of pages of the cache.
        idle: Pages that nobody holds.
        local_idle: The same of local layers; None where they have the pages of the others.
        filled: Places that need no other tokens before a test.
    """

    run: RunsProgram
    checksums: Checksums
    idle: IdlePages
    local_idle: IdlePages | None
    filled: FilledPlaces


def num_tokens(key: ProgramKey) -> int:
    """New tokens of a probe: a step of one token is run twice, the second after the first."""
    if key.kind == "prefill":
        return min(key.length, MOST_PREFILLED)
    return max(key.length, 2) if key.kind == "decode" else key.windows * key.length


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What a program under test has given for one group, by replica and probe of the group.

    Attributes:
        ids: Tokens that it computed, [dp][g] tuples.
        choices: int32 [dp, g, T, X], as they are packed.
        has_all: Whether `choices` is of every token, else of the last.
        committed: int32 [dp, g], tokens that windows committed; None where there are none.
    """

    ids: list[list[tuple[int, ...]]]
    choices: np.ndarray
    has_all: bool
    committed: np.ndarray | None = None


_Tokens = tuple[int, tuple[int, ...]]
"""Which probe, and its new tokens."""


class _Checksums:
    """Of the pages that the probes may write; waited for when they are wanted."""

    def __init__(self, pieces: list[list[jax.Array]], shape: tuple[int, ...]):
        """Of pages of this shape, as `device.checksums` gives them."""
        self._pieces, self._shape = pieces, shape

    @cached_property
    def read(self) -> np.ndarray:
        """uint32 [dp, K, w]."""
        return join_checksums(self._pieces, self._shape)


class Session:
    """Checks on one placement. What prefill gives is computed once for all programs.

    Launches are handed over many at a time, and waited for when their results are needed, so that
    the device does not wait for the host.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: ReplicaConfig,
        reference: ProgramKey,
        context: CheckContext,
        placement: Placement,
        choice: tuple[bool, int] | None,
    ):
        self._config, self._reference, self._context = config, reference, context
        self._run, self._has_choice = partial(context.run, choice=choice), choice is not None
        self._placement = placement
        self._rows = RowMaker(config, placement, vocab_size=model.config.vocab_size)
        self._scratch_slots = scratch_slots(config)
        # By (probe, tokens): packed choices [dp, R, X] of which row 0 is the probe's, and of what
        # is written the checksums of all pages. The device may still be at them.
        self._choices: dict[_Tokens, jax.Array] = {}
        self._written: dict[_Tokens, _Checksums] = {}

    def check(
        self, key: ProgramKey, writer: ProgramKey, probes: Sequence[int]
    ) -> list[CheckDifference]:
        """Compare a program with prefill at some probes; `writer` puts the other tokens there."""
        if key == self._reference:
            return []
        filled, page_len = self._context.filled, self._config.page_len
        written = [i for i in probes if not filled.has(self._placement, i, page_len)]
        filled.take(self._placement, probes, page_len)
        for group in make_groups(written, writer.rows):
            self._test(writer, group, is_other=True)
        before = self._checksums()
        # A choice program finds the sampling of a row by its slot, and each row has its own.
        num_rows = min(key.rows, self._config.num_slots) if self._has_choice else key.rows
        groups = make_groups(probes, num_rows)
        tests = [self._test(key, group, is_other=False) for group in groups]
        written = self._checksums()
        outcomes = [read() for read in tests]
        if key.kind == "windows":
            # WHY: they write as many tokens as drafts were right. What lies behind is of another
            # launch each time, and a checksum is of a whole page.
            self._written.clear()
        self._prefill_all(groups, outcomes)
        found = []
        for group, outcome in zip(groups, outcomes, strict=True):
            if outcome.committed is not None:
                found += self._check_committed(key, group, outcome)
            found += self._compare(key, group, outcome, before.read, written.read)
        return found

    # ------------------------------------------------------------------------- the program's answer

    def _test(self, key: ProgramKey, group: Group, *, is_other: bool) -> Callable[[], _Outcome]:
        """Launch a program for a group; what is returned reads the outcome."""
        probes = [self._placement.probes[i] for i in group.probes]
        count = num_tokens(key)
        ids = [(p.other_ids if is_other else p.token_ids)[:count] for p in probes]
        if key.kind == "prefill":
            return self._test_prefill(key, group, ids)
        if key.kind == "verify":
            return self._test_verify(key, group, ids, is_other=is_other)
        if key.kind == "windows":
            return self._test_windows(key, group, [i[0] for i in ids])
        return self._test_decode(key, group, [i[0] for i in ids])

    def _test_prefill(self, key, group, ids) -> Callable[[], _Outcome]:
        chunks = [
            (row, probe, 0, tokens)
            for row, probe, tokens in zip(group.rows, group.probes, ids, strict=True)
        ]
        result = self._run_prefill(key, chunks)

        def read() -> _Outcome:
            packed = self._pick(key, group, result)[:, :, None]
            dp = self._config.num_replicas
            return _Outcome(ids=[list(ids)] * dp, choices=packed, has_all=False)

        return read

    def _test_decode(self, key, group, first: Sequence[int]) -> Callable[[], _Outcome]:
        slots, sampling = self._rows.slots(key, group, [(i,) for i in first])
        operands = self._rows.decode(key, group)
        results = []
        for _ in range(1 if key.length > 1 else 2):
            slots, result = self._run(key, slots, sampling, operands)
            results.append(result)

        def read() -> _Outcome:
            picked = [self._pick(key, group, result) for result in results]
            choices = picked[0] if key.length > 1 else np.stack(picked, axis=2)
            dp, count = self._config.num_replicas, choices.shape[2]
            ids = [
                [(first[i], *choices[r, i, : count - 1, 0].tolist()) for i in range(len(first))]
                for r in range(dp)
            ]
            return _Outcome(ids=ids, choices=choices, has_all=True)

        return read

    def _test_verify(self, key, group, ids, *, is_other: bool) -> Callable[[], _Outcome]:
        """A window of which the first draft is right, unless the tokens are the other ones."""
        slots, sampling = self._rows.slots(key, group, ids)
        operands = self._rows.verify(key, group, ids)
        _, result = self._run(key, slots, sampling, operands)
        if not is_other:
            right = self._pick(key, group, result)[0, :, 0, 0].tolist()
            ids = [
                (tokens[0], draft, *tokens[2:])[: len(tokens)]
                for tokens, draft in zip(ids, right, strict=True)
            ]
            slots, sampling = self._rows.slots(key, group, ids)
            operands = self._rows.verify(key, group, ids)
            _, result = self._run(key, slots, sampling, operands)

        def read() -> _Outcome:
            dp = self._config.num_replicas
            packed = np.asarray(result).reshape(dp, key.rows, key.length, -1)
            picked = packed[:, list(group.rows)]
            committed = np.stack([unpack_num_committed(part) for part in picked])
            return _Outcome(
                ids=[list(ids)] * dp, choices=picked[..., :-1], has_all=True, committed=committed
            )

        return read

    def _test_windows(self, key, group, first: Sequence[int]) -> Callable[[], _Outcome]:
        """Windows one after the other, whatever is drafted. Of the last one all is compared."""
        slots, sampling = self._rows.slots(key, group, [(i,) for i in first])
        slots, result = self._run(key, slots, sampling, self._rows.windows(key, group))

        def read() -> _Outcome:
            picked, left = self._pick(key, group, result), self._rows.drafts(slots, group)
            shape = *picked.shape[:2], num_tokens(key), picked.shape[-1] - 1
            choices, ids = np.zeros(shape, np.int32), []
            totals = picked[:, :, :, 0, -1].sum(axis=2)
            for replica in range(len(picked)):
                ids.append([])
                for i, windows in enumerate(picked[replica]):
                    *committed, _ = (
                        windows[w, : windows[w, 0, -1], :-1] for w in range(key.windows)
                    )
                    chosen = np.concatenate([*committed, windows[-1, :, :-1]])
                    choices[replica, i, : len(chosen)] = chosen
                    before = [first[i], *chosen[: len(chosen) - key.length, 0].tolist()]
                    # The last window's drafts are still behind its first token, or what follows it.
                    ids[-1].append((*before, *left[replica, i, 1 : key.length].tolist()))
            return _Outcome(ids=ids, choices=choices, has_all=True, committed=totals)

        return read

    def _pick(self, key: ProgramKey, group: Group, result) -> np.ndarray:
        """The rows of a group, [dp, g, ...]."""
        packed = np.asarray(result)
        # A choice program may have more rows than the program before it.
        packed = packed.reshape(self._config.num_replicas, -1, *packed.shape[1:])
        return packed[:, list(group.rows)]

    def _checksums(self) -> _Checksums:
        """Of the pages that the probes may write."""
        shape = self._placement.written.shape
        pages = [its.written.reshape(shape[0], -1) for its in self._placement.places]
        local = pages[1] if len(pages) > 1 else None
        return _Checksums(self._context.checksums(pages[0], local), shape)

    # ----------------------------------------------------------------------------- prefill's answer

    def _run_prefill(self, key: ProgramKey, chunks) -> jax.Array:
        """Packed choices of all rows, [dp * R, X]."""
        operands, rows = self._rows.prefill(key, chunks)
        _, result = self._run(key, *self._scratch_slots, operands, rows)
        return result

    def _prefill(self, probe: int, ids: tuple[int, ...]) -> None:
        """Put tokens in the cache by prefill, and keep its choice."""
        length = self._reference.length
        for offset in range(0, len(ids), length):
            chunk = (0, probe, offset, ids[offset : offset + length])
            self._choices[probe, ids] = self._run_prefill(self._reference, [chunk])

    def _prefill_all(self, groups: Sequence[Group], outcomes: Sequence[_Outcome]) -> None:
        """Let prefill compute all that is compared, where it has not yet.

        The last tokens of a probe are all that a program has computed of it, and what is written
        by then is kept too: of several probes at once, as each has pages of its own.
        """
        pending: dict[int, tuple[int, ...]] = {}
        for group, outcome in zip(groups, outcomes, strict=True):
            # WHY: shorter ones first, as prefill writes on all replicas, and a checksum is of a
            # whole page: windows of one replica may write more tokens of a probe than another's.
            for replica, (i, probe) in sorted(
                itertools.product(range(self._config.num_replicas), enumerate(group.probes)),
                key=lambda of, outcome=outcome: len(outcome.ids[of[0]][of[1][0]]),
            ):
                ids = outcome.ids[replica][i]
                for j in _compared(len(ids), is_first=i == 0, has_all=outcome.has_all):
                    head = ids[: j + 1]
                    known = self._written if head == ids else self._choices
                    if (probe, head) in known or pending.get(probe) == head:
                        continue
                    if probe in pending:
                        self._keep_written(pending)
                    self._prefill(probe, head)
                    if head == ids:
                        pending[probe] = ids
        self._keep_written(pending)

    def _keep_written(self, pending: dict[int, tuple[int, ...]]) -> None:
        """Keep the checksums of what prefill has just written of these probes; none is left."""
        if pending:
            sums = self._checksums()
            self._written |= {tokens: sums for tokens in pending.items()}
        pending.clear()

    def _choice(self, probe: int, ids: tuple[int, ...]) -> np.ndarray:
        """Packed choices of prefill, [dp, X]."""
        packed = np.asarray(self._choices[probe, ids])
        return packed.reshape(self._config.num_replicas, -1, packed.shape[1])[:, 0]

    def _written_by_prefill(self, probe: int, ids: tuple[int, ...]) -> np.ndarray:
        """Checksums, [dp, w]."""
        return self._written[probe, ids].read[:, probe]

    # ---------------------------------------------------------------------------------- comparisons

    def _compare(self, key, group, outcome: _Outcome, before, written) -> list[CheckDifference]:
        found = []
        for i, probe in enumerate(group.probes):
            for replica in range(self._config.num_replicas):
                ids = outcome.ids[replica][i]
                row = replica * key.rows + group.rows[i]

                def differ(what, got, want, ids=ids, row=row, probe=probe) -> None:
                    found.append(self._difference(key, row, probe, ids, what, got, want))

                choices, is_nan = outcome.choices[replica, i], False
                for j in _compared(len(ids), is_first=i == 0, has_all=outcome.has_all):
                    want = self._choice(probe, ids[: j + 1])[replica]
                    got = choices[j if outcome.has_all else 0]
                    is_nan |= _is_nan(got) or _is_nan(want)
                    if not is_nan and not np.array_equal(got, want):
                        differ("token and logprob", got, want)
                if is_nan:  # nothing is claimed of it
                    continue
                want = self._written_by_prefill(probe, ids)[replica]
                if not np.array_equal(written[replica, probe], want):
                    differ("keys and values", written[replica, probe], want)
                elif np.array_equal(written[replica, probe], before[replica, probe]):
                    if self._are_unlike(probe, ids, replica):
                        differ("keys and values are not written", before[replica, probe], want)
        return found

    def _are_unlike(self, probe: int, ids: tuple[int, ...], replica: int) -> bool:
        """Whether prefill too writes the same for the other tokens, whose embeddings are alike."""
        other = self._placement.probes[probe].other_ids[: len(ids)]
        self._prefill(probe, other)
        self._keep_written({probe: other})
        got, want = (self._written_by_prefill(probe, x)[replica] for x in (other, ids))
        return not np.array_equal(got, want)

    def _check_committed(self, key, group, outcome: _Outcome) -> list[CheckDifference]:
        """Whether windows commit the drafts before the first wrong one, and one token more."""
        found = []
        assert outcome.committed is not None
        for i, probe in enumerate(group.probes):
            for replica in range(self._config.num_replicas):
                ids, chosen = outcome.ids[replica][i], outcome.choices[replica, i, :, 0]
                right = np.append(chosen[: len(ids) - 1] == np.asarray(ids[1:]), False)
                want, got = int(np.argmin(right)) + 1, outcome.committed[replica, i]
                if got != want:
                    row = replica * key.rows + group.rows[i]
                    found.append(
                        self._difference(
                            key, row, probe, ids, "tokens committed", np.int32(got), np.int32(want)
                        )
                    )
        return found

    def _difference(self, key, row, probe, ids, what, got, want) -> CheckDifference:
        its: Probe = self._placement.probes[probe]
        return CheckDifference(
            program=key.name,
            row=row,
            position=its.position,
            token_ids=tuple(ids),
            sampling=its.sampling,
            what=what,
            found=_hex(got),
            expected=_hex(want),
        )


def _compared(count: int, *, is_first: bool, has_all: bool) -> Sequence[int]:
    """Which choices of a probe are compared: of a launch's first all, else the middle and the last.

    The last is always among them: its prefill writes all that the program has written.
    """
    if not has_all:
        return (count - 1,)
    return range(count) if is_first else sorted({count // 2, count - 1})


def _is_nan(packed: np.ndarray) -> bool:
    return bool(np.isnan(packed[1:2].view(np.float32)).any())


def _hex(values) -> str:
    """The bits of 32-bit integers, joined by commas."""
    bits = np.ascontiguousarray(np.atleast_1d(values)).view(np.uint32)
    return ",".join(f"{int(b):08x}" for b in bits)
