# SPDX-License-Identifier: Apache-2.0
"""Each canonical program against prefill, at its real sizes, when it has been compiled.

A probe is a token at a position on pages of the real cache. The program under test runs it among
other rows; then prefill runs the same tokens, one sequence a row, on the same pages. Choices,
logprobs and what was written must have the same bits. Before the test other tokens are written
there, by the program or by one of more rows, so that a write that does not happen shows.
"""

from collections.abc import Callable, Iterable, Sequence

from detjax.engine.config import ReplicaConfig
from detjax.engine.running.program_key import (
    AnyKey,
    ChoiceKey,
    ProgramKey,
    choice_keys,
    program_keys,
)
from detjax.engine.self_check.evidence import CheckDifference
from detjax.engine.self_check.probes import FILTERED, Probe, make_probes, place_probes
from detjax.engine.self_check.session import CheckContext, Session, num_tokens
from detjax.models.loading import LoadedModel


def is_checkable(key: ProgramKey) -> bool:
    """Whether a program makes a claim."""
    return key.mode == "invariant" and key.weights == "full"


def leaves_for(choice: ChoiceKey, keys: Iterable[AnyKey]) -> ProgramKey | None:
    """The quickest canonical program that leaves logits for a choice program, if there is one."""
    kinds = ("verify",) if choice.length > 1 else ("decode", "prefill")
    found = [
        key
        for key in keys
        if isinstance(key, ProgramKey) and is_checkable(key) and key.kind in kinds
        and key.logit_rows == choice.rows * choice.length
    ]  # fmt: skip
    return min(
        found,
        key=lambda key: (key.kind, key.leaves_hidden, key.table_len, -key.rows),
        default=None,
    )


def checkable_keys(config: ReplicaConfig) -> list[AnyKey]:
    """The programs of a configuration that are compared: canonical ones, and choices behind them.

    A choice program that follows drafts alone makes no claim: what it chooses is verified.
    """
    forward: list[AnyKey] = [key for key in program_keys(config) if is_checkable(key)]
    choices = (key for key in choice_keys(config) if isinstance(key, ChoiceKey))
    return [*forward, *(key for key in choices if leaves_for(key, forward) is not None)]


def rank_in_check(key: ProgramKey) -> tuple[int, int]:
    """By what programs are sorted for a check."""
    # WHY: fewer new tokens first: what a longer program writes lies behind what a shorter one does.
    return num_tokens(key), key.table_len


def check_programs(
    model: LoadedModel,
    config: ReplicaConfig,
    keys: Sequence[ProgramKey],
    reference: ProgramKey,
    context: CheckContext,
    *,
    choice: tuple[bool, int] | None,
    on_checked: Callable[[ProgramKey], None],
) -> tuple[list[ProgramKey], list[CheckDifference]]:
    """Compare programs with a prefill program.

    Args:
        model: On its mesh.
        config: Of each replica.
        keys: To compare.
        reference: A prefill program.
        context: What it may use.
        choice: Of `program_key.CHOICES`: the choice program that follows each of them, and the
            reference. None compares what the programs themselves choose.
        on_checked: Told of each program, when it has been compared for the first time.

    Returns:
        The programs that were checked (those for whose probes there are pages), and what differed.
    """
    checked, found = [], []
    in_order = sorted(keys, key=rank_in_check)
    positions, probes = _probes_of_tables(model, config, in_order, is_filtered=choice is not None)
    # WHY: what a choice program does depends on no position, only on the sampling of its rows.
    probes = probes if choice is None else probes[: len(FILTERED)]
    while probes:
        placement, left = place_probes(
            probes,
            context.idle,
            num_company=config.num_slots,
            table_len=config.table_len,
            page_len=config.page_len,
            local=context.local_idle,
        )
        if placement is None:
            probes = probes[1:]
            continue
        probes, session = left, Session(model, config, reference, context, placement, choice)
        for key in in_order:
            of_key = [
                i
                for i, probe in enumerate(placement.probes)
                if probe.position in positions[key.table_len]
            ]
            if of_key:
                found += session.check(key, _writer(key, keys, len(of_key)), of_key)
                if key not in checked:
                    checked.append(key)
                    on_checked(key)
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
            num_new=max(num_tokens(key) for key in keys),
            vocab_size=model.config.vocab_size,
            profile=model.profile,
            is_filtered=is_filtered,
        )
        positions[table_len] = {probe.position for probe in made}
        for probe in made:
            probes.setdefault(probe.position, probe)
    return positions, list(probes.values())


def _writer(key: ProgramKey, keys: Sequence[ProgramKey], num_probes: int) -> ProgramKey:
    """Of the programs that write as many tokens, the one that does it in the least time.

    In as few launches as will do, a decode step if there is one, with no more rows than it needs.
    One that writes nothing is found all the same, as it is compared with prefill itself.
    """
    alike = [
        one
        for one in keys
        if one.kind in (key.kind, "decode")
        and (one.table_len, num_tokens(one)) == (key.table_len, num_tokens(key))
    ]
    return min(alike, key=lambda one: (one.kind != "decode", -(-num_probes // one.rows), one.rows))
