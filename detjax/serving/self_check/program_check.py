# SPDX-License-Identifier: Apache-2.0
"""Each canonical program against prefill, at its real sizes, when it has been compiled.

A probe is a token at a position on pages of the real cache. The program under test runs it among
other rows; then prefill runs the same tokens, one sequence a row, on the same pages. Choices,
logprobs and what was written must have the same bits. Before the test other tokens are written
there, by the program or by one of more rows, so that a write that does not happen shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detjax.models.loading import LoadedModel
from detjax.serving.config import ReplicaConfig
from detjax.serving.launch_operands import unpack_num_committed
from detjax.serving.program_key import ProgramKey
from detjax.serving.programs import Slots
from detjax.serving.self_check.evidence import Difference
from detjax.serving.self_check.probes import (
    Placement,
    Probe,
    make_probes,
    place_probes,
)
from detjax.serving.self_check.rows import Group, RowMaker, make_groups, nobodys_slots

Run = Callable[..., tuple[Slots, Any]]
"""`run(key, slots, sampling, *host) -> (slots, result)`: a launch beside those of sequences."""
Checksums = Callable[[np.ndarray], np.ndarray]
"""From pages, int32 [B], to a number for the content of each, uint32 [B]."""
MOST_PREFILLED = 2
"""New tokens of a probe where a prefill program itself is under test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """What a check may use.

    Attributes:
        run: Launches a program on the cache, with slots of its own.
        checksums: Of pages of the cache.
        idle: int32 [dp, m], pages that nobody holds, alike in number on each replica.
    """

    run: Run
    checksums: Checksums
    idle: np.ndarray


def is_checkable(key: ProgramKey) -> bool:
    """Whether a program makes a claim, and nothing but the cache, slots and rows decides it.

    Programs that adjust logits or score prompts are those of the same steps with more behind the
    logits; they are not compared.
    """
    is_plain = not key.text_len and key.num_prompt_top is None
    return key.mode == "invariant" and key.weights == "full" and is_plain


def check_programs(
    model: LoadedModel,
    config: ReplicaConfig,
    keys: Sequence[ProgramKey],
    reference: ProgramKey,
    reach: Reach,
) -> tuple[list[ProgramKey], list[Difference]]:
    """Compare programs with a prefill program.

    Args:
        model: On its mesh.
        config: Of each replica.
        keys: All with the `num_top` and `with_filters` of the reference.
        reference: A prefill program.
        reach: What it may use.

    Returns:
        The programs that were checked (those for whose probes there are pages), and what differed.
    """
    checked, found = [], []
    # WHY: fewer new tokens first: what a longer program writes lies behind what a shorter one does.
    in_order = sorted(keys, key=lambda key: (_num_tokens(key), key.table_len))
    positions, probes = _probes_of_tables(
        model, config, in_order, is_filtered=reference.with_filters
    )
    while probes:
        placement, left = place_probes(
            probes,
            reach.idle,
            num_company=config.num_slots,
            num_pages=config.num_pages,
            table_len=config.table_len,
            page_len=config.page_len,
        )
        if placement is None:
            probes = probes[1:]
            continue
        probes, session = left, _Session(model, config, reference, reach, placement)
        for key in in_order:
            of_key = [
                i
                for i, probe in enumerate(placement.probes)
                if probe.position in positions[key.table_len]
            ]
            if of_key:
                found += session.check(key, _widest(key, keys), of_key)
                if key not in checked:
                    checked.append(key)
    return checked, found


def _probes_of_tables(
    model: LoadedModel, config: ReplicaConfig, keys: Sequence[ProgramKey], *, is_filtered: bool
) -> tuple[dict[int, set[int]], list[Probe]]:
    """Positions to check by the length of a table, and a probe at each of all of them.

    Programs of several tables share what they can: prefill of a probe is computed once.
    """
    most = min(model.config.max_position_embeddings, config.table_len * config.page_len)
    positions: dict[int, set[int]] = {}
    probes: dict[int, Probe] = {}
    for table_len in sorted({key.table_len for key in keys}, reverse=True):
        made = make_probes(
            num_positions=min(most, table_len * config.page_len),
            num_new=max(_num_tokens(key) for key in keys),
            vocab_size=model.config.vocab_size,
            profile=model.profile,
            is_filtered=is_filtered,
        )
        positions[table_len] = {probe.position for probe in made}
        for probe in made:
            probes.setdefault(probe.position, probe)
    return positions, list(probes.values())


def _widest(key: ProgramKey, keys: Sequence[ProgramKey]) -> ProgramKey:
    """Of the programs that write as many tokens, the one whose launches cost least.

    One that writes nothing is found all the same, as it is compared with prefill itself.
    """
    alike = [
        one
        for one in keys
        if one.kind in (key.kind, "decode")
        and (one.table_len, _num_tokens(one)) == (key.table_len, _num_tokens(key))
    ]
    return max(alike, key=lambda one: (one.kind == "decode", one.rows))


def _num_tokens(key: ProgramKey) -> int:
    """New tokens of a probe: a step of one token is run twice, the second after the first."""
    if key.kind == "prefill":
        return min(key.length, MOST_PREFILLED)
    return max(key.length, 2) if key.kind == "decode" else key.length


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What a program under test has given for one group, by replica and probe of the group.

    Attributes:
        ids: Tokens that it computed, [dp][g] tuples.
        choices: int32 [dp, g, T, X], as they are packed.
        has_all: Whether `choices` is of every token, else of the last.
        committed: int32 [dp, g], tokens that a window committed; None but for a verification.
    """

    ids: list[list[tuple[int, ...]]]
    choices: np.ndarray
    has_all: bool
    committed: np.ndarray | None = None


class _Session:
    """Checks on one placement. What prefill gives is computed once for all programs."""

    def __init__(
        self,
        model: LoadedModel,
        config: ReplicaConfig,
        reference: ProgramKey,
        reach: Reach,
        placement: Placement,
    ):
        self._config, self._reference, self._reach = config, reference, reach
        self._placement = placement
        self._rows = RowMaker(config, placement, vocab_size=model.config.vocab_size)
        self._num_choice = 2 + 2 * reference.num_top
        # By (probe, tokens): packed choices [dp, X]; and of what is written, checksums [dp, w].
        self._choices: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        self._written: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

    def check(self, key: ProgramKey, writer: ProgramKey, probes: Sequence[int]) -> list[Difference]:
        """Compare a program with prefill at some probes; `writer` puts the other tokens there."""
        if key == self._reference:
            return []
        for group in make_groups(probes, writer.rows):
            self._test(writer, group, is_other=True)
        before = self._checksums()
        groups = make_groups(probes, key.rows)
        outcomes = [self._test(key, group, is_other=False) for group in groups]
        written = self._checksums()
        found = []
        for group, outcome in zip(groups, outcomes, strict=True):
            if outcome.committed is not None:
                found += self._check_committed(key, group, outcome)
            found += self._compare(key, group, outcome, before, written)
        return found

    # ------------------------------------------------------------------------- the program's answer

    def _test(self, key: ProgramKey, group: Group, *, is_other: bool) -> _Outcome:
        probes = [self._placement.probes[i] for i in group.probes]
        count = _num_tokens(key)
        ids = [(p.other_ids if is_other else p.token_ids)[:count] for p in probes]
        if key.kind == "prefill":
            return self._test_prefill(key, group, ids)
        if key.kind == "verify":
            return self._test_verify(key, group, ids, is_other=is_other)
        return self._test_decode(key, group, [i[0] for i in ids])

    def _test_prefill(self, key, group, ids) -> _Outcome:
        chunks = [
            (row, probe, 0, tokens)
            for row, probe, tokens in zip(group.rows, group.probes, ids, strict=True)
        ]
        packed = self._run_prefill(key, chunks)[:, list(group.rows), None]
        dp = self._config.num_replicas
        return _Outcome(ids=[list(ids)] * dp, choices=packed, has_all=False)

    def _test_decode(self, key, group, first: Sequence[int]) -> _Outcome:
        slots, sampling = self._rows.slots(key, group, [(i,) for i in first])
        operands = self._rows.decode(key, group)
        results = []
        for _ in range(1 if key.length > 1 else 2):
            slots, result = self._reach.run(key, slots, sampling, operands)
            results.append(self._pick(key, group, result))
        choices = results[0] if key.length > 1 else np.stack(results, axis=2)
        dp, count = self._config.num_replicas, choices.shape[2]
        ids = [
            [(first[i], *choices[r, i, : count - 1, 0].tolist()) for i in range(len(first))]
            for r in range(dp)
        ]
        return _Outcome(ids=ids, choices=choices, has_all=True)

    def _test_verify(self, key, group, ids, *, is_other: bool) -> _Outcome:
        """A window of which the first draft is right, unless the tokens are the other ones."""
        slots, sampling = self._rows.slots(key, group, ids)
        operands = self._rows.verify(key, group, ids)
        _, result = self._reach.run(key, slots, sampling, operands)
        if not is_other:
            right = self._pick(key, group, result)[0, :, 0, 0].tolist()
            ids = [
                (tokens[0], draft, *tokens[2:])[: len(tokens)]
                for tokens, draft in zip(ids, right, strict=True)
            ]
            slots, sampling = self._rows.slots(key, group, ids)
            operands = self._rows.verify(key, group, ids)
            _, result = self._reach.run(key, slots, sampling, operands)
        packed = np.asarray(result).reshape(self._config.num_replicas, key.rows, key.length, -1)
        picked = packed[:, list(group.rows)]
        committed = np.stack([unpack_num_committed(part) for part in picked])
        dp = self._config.num_replicas
        return _Outcome(
            ids=[list(ids)] * dp, choices=picked[..., :-1], has_all=True, committed=committed
        )

    def _pick(self, key: ProgramKey, group: Group, result) -> np.ndarray:
        """The rows of a group, [dp, g, ...]."""
        packed = np.asarray(result)
        packed = packed.reshape(self._config.num_replicas, key.rows, *packed.shape[1:])
        return packed[:, list(group.rows)]

    def _checksums(self) -> np.ndarray:
        """Of the pages that the probes may write, [dp, K, w]."""
        pages = self._placement.written
        return self._reach.checksums(pages.reshape(-1)).reshape(pages.shape)

    # ----------------------------------------------------------------------------- prefill's answer

    def _run_prefill(self, key: ProgramKey, chunks) -> np.ndarray:
        """Packed choices of all rows, [dp, R, X]."""
        operands, rows = self._rows.prefill(key, chunks)
        _, result = self._reach.run(key, *nobodys_slots(self._config), operands, rows)
        return np.asarray(result).reshape(self._config.num_replicas, key.rows, -1)

    def _prefill(self, probe: int, ids: tuple[int, ...]) -> None:
        """Put tokens in the cache by prefill, and keep its choice."""
        length = self._reference.length
        packed = np.zeros(0)
        for offset in range(0, len(ids), length):
            chunk = (0, probe, offset, ids[offset : offset + length])
            packed = self._run_prefill(self._reference, [chunk])
        self._choices[probe, ids] = packed[:, 0]

    def _prefill_whole(self, probe: int, ids: tuple[int, ...]) -> None:
        """Put all that a program computes in the cache, and keep what is written too."""
        self._prefill(probe, ids)
        self._written[probe, ids] = self._checksums()[:, probe]

    # ---------------------------------------------------------------------------------- comparisons

    def _compare(self, key, group, outcome: _Outcome, before, written) -> list[Difference]:
        found = []
        for i, probe in enumerate(group.probes):
            for replica in range(self._config.num_replicas):
                ids = outcome.ids[replica][i]
                row = replica * key.rows + group.rows[i]

                def differ(what, got, want, ids=ids, row=row, probe=probe) -> None:
                    found.append(self._difference(key, row, probe, ids, what, got, want))

                choices, is_nan = outcome.choices[replica, i], False
                for j in _compared(len(ids), is_first=i == 0, has_all=outcome.has_all):
                    head = ids[: j + 1]
                    if head == ids and (probe, ids) not in self._written:
                        self._prefill_whole(probe, ids)
                    elif (probe, head) not in self._choices:
                        self._prefill(probe, head)
                    want = self._choices[probe, head][replica]
                    got = choices[j if outcome.has_all else 0]
                    is_nan |= _is_nan(got) or _is_nan(want)
                    if not is_nan and not np.array_equal(got, want):
                        differ("token and logprob", got, want)
                if is_nan:  # nothing is claimed of it
                    continue
                want = self._written[probe, ids][replica]
                if not np.array_equal(written[replica, probe], want):
                    differ("keys and values", written[replica, probe], want)
                elif np.array_equal(written[replica, probe], before[replica, probe]):
                    if self._are_unlike(probe, ids, replica):
                        differ("keys and values are not written", before[replica, probe], want)
        return found

    def _are_unlike(self, probe: int, ids: tuple[int, ...], replica: int) -> bool:
        """Whether prefill too writes the same for the other tokens, whose embeddings are alike."""
        other = self._placement.probes[probe].other_ids[: len(ids)]
        self._prefill_whole(probe, other)
        want = self._written[probe, ids]
        return not np.array_equal(self._written[probe, other][replica], want[replica])

    def _check_committed(self, key, group, outcome: _Outcome) -> list[Difference]:
        """Whether a verification commits the drafts before the first wrong one, and its own."""
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

    def _difference(self, key, row, probe, ids, what, got, want) -> Difference:
        its: Probe = self._placement.probes[probe]
        return Difference(
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
