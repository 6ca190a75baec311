# SPDX-License-Identifier: Apache-2.0
"""The comparisons and their results, as plain data."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from detjax.certify.coverage import COLUMNS
from detjax.certify.requests import AnswerBits

CLAIMS = {
    "run-invariant": "same build, same inputs, again, also in a new process: same bits",
    "batch-invariant": "no bit depends on which or how many other rows share the launch, nor on "
    "the row",
    "schedule-invariant": "nor on chunked prefill, shared prefixes, preemption, drafts",
    "path-consistent": "prefill, decode and verify give position t the same bits",
    "mesh-invariant": "nor on (dp, tp)",
    "machine-invariant": "nor on the machine: a CPU computes a GPU's bits by their definition",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One case of a claim, or its control.

    Attributes:
        claim: Of `CLAIMS`.
        case: The change that was tried.
        is_control: Whether it ran without the guarantee, so that it must differ.
        num_compared: Tokens with their logprobs, programs, or elements of arrays.
        num_different: How many of these differ.
        first: The first that differs, as text; empty if none does.
        seconds: Time of the case, compiling included.
        round_idx: The round of the requests.
        request_idx: Request of the first difference; -1 if it belongs to no request.
        setting: The setting of `detjax.diverge` that does the same; empty if there is none.
        cause: The first token, layer and operation that differ, as `detjax.diverge` found them.
    """

    claim: str
    case: str
    is_control: bool
    num_compared: int
    num_different: int
    first: str
    seconds: float
    round_idx: int
    request_idx: int = -1
    setting: str = ""
    cause: str = ""

    @property
    def is_well(self) -> bool:
        """Whether something was compared and nothing differs; a control must differ."""
        if self.is_control:
            return self.num_different > 0
        return self.num_compared > 0 and self.num_different == 0


class BitComparison(NamedTuple):
    """How many tokens or elements were compared, how many differ in a bit, and the first that does.

    `request_idx` belongs to the first; -1 if none differs or it belongs to no request.
    """

    num_compared: int
    num_different: int
    first: str
    request_idx: int = -1


def compare(got: Sequence[AnswerBits], want: Sequence[AnswerBits]) -> BitComparison:
    """Compare answers, token by token."""
    num_compared = num_different = 0
    first, request_idx = "", -1
    for idx, (mine, its) in enumerate(zip(got, want, strict=True)):
        num_compared += max(len(mine), len(its))
        for at in range(max(len(mine), len(its))):
            a, b = (answer[at] if at < len(answer) else None for answer in (mine, its))
            if a != b:
                num_different += 1
                if not first:
                    first = f"request {idx}, token {at}: {_show(a)} is not {_show(b)}"
                    request_idx = idx
    return BitComparison(num_compared, num_different, first, request_idx)


def _show(token: tuple[int, int] | None) -> str:
    return "nothing" if token is None else f"{token[0]} (logprob 0x{token[1]:08x})"


@dataclass(kw_only=True)
class Certificate:
    """The facts, outcomes and coverage of one run.

    Attributes:
        facts: Model, numerics, build, device, configuration: names and texts.
        probe: Whether the model's sums depend on their order; otherwise equal bits would be luck.
        outcomes: In order of time.
        not_applicable: Why a claim has no case here, by claim.
        coverage: (model, dtype, backend, mode, state), as `coverage_map` has it.
    """

    facts: dict[str, str]
    probe: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    not_applicable: dict[str, str] = field(default_factory=dict)
    coverage: list[tuple[str, str, str, str, str]] = field(default_factory=list)

    @property
    def is_proven(self) -> bool:
        """Whether every claim has cases and a control, and all have the right result."""
        return bool(self.outcomes) and all(map(self.is_claim_proven, self.claims()))

    def claims(self) -> list[str]:
        """Return the claims with an outcome."""
        return [claim for claim in CLAIMS if self.of(claim)]

    def of(self, claim: str) -> list[Outcome]:
        """The outcomes of a claim."""
        return [outcome for outcome in self.outcomes if outcome.claim == claim]

    def is_claim_proven(self, claim: str) -> bool:
        """Whether all cases hold and at least one control of the first round differs."""
        cases = [outcome for outcome in self.of(claim) if not outcome.is_control]
        controls = [outcome for outcome in self.of(claim) if outcome.is_control]
        return (
            bool(cases)
            and all(outcome.is_well for outcome in cases)
            and any(outcome.is_well for outcome in controls)
        )

    def json(self) -> dict[str, Any]:
        """Return one JSON document."""
        return {
            "proven": self.is_proven,
            "claims": {claim: self.is_claim_proven(claim) for claim in self.claims()},
            "not_applicable": self.not_applicable,
            "facts": self.facts,
            "probe": self.probe,
            "outcomes": [dataclasses.asdict(outcome) for outcome in self.outcomes],
            "coverage": [dict(zip(COLUMNS, row, strict=True)) for row in self.coverage],
        }
