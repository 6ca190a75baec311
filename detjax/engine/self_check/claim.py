# SPDX-License-Identifier: Apache-2.0
"""Whether an engine may still say that its answers are canonical."""

import shlex
from collections.abc import Callable, Sequence

from detjax.engine.config import ReplicaConfig
from detjax.engine.errors import SelfCheckError
from detjax.engine.metrics import EngineStats
from detjax.engine.self_check.evidence import CheckDifference, add_cause, keep_evidence
from detjax.models.loading import LoadedModel

FIRST_OPERATION = "first operation that differs"
"""How the line of an explanation begins that names the operation."""


def _explain_nothing(difference: CheckDifference) -> str:
    return ""


class Claim:
    """Holds until a self-check finds a difference; then never again in this engine.

    Attributes:
        difference: The first one; None while the claim holds.
        evidence: Path of the file that keeps it; empty where none could be written.
        explain: From the first difference to the operation that makes it, as text; what it says is
            kept with the evidence. `detjax.diverge` has one.
        cause: What it said.
    """

    def __init__(self, model: LoadedModel, config: ReplicaConfig, stats: EngineStats):
        """Let it hold."""
        self._model, self._config, self._stats = model, config, stats
        self.difference: CheckDifference | None = None
        self.evidence = ""
        self.explain: Callable[[CheckDifference], str] = _explain_nothing
        self.cause = ""

    def note(self, differences: Sequence[CheckDifference]) -> None:
        """Count differences, and keep evidence of the first that there ever was."""
        self._stats.num_self_check_differences += len(differences)
        if differences and self.difference is None:
            self.evidence = keep_evidence(differences[0], self._model, self._config)
            self.difference = differences[0]
            self.cause = self.explain(differences[0])
            if self.cause and self.evidence:
                add_cause(self.evidence, self.cause)

    @property
    def error(self) -> str:
        """Why no deterministic answer is made any more; empty while the claim holds."""
        if self.difference is None:
            return ""
        kept = f"; evidence: {self.evidence}" if self.evidence else ""
        if self.cause:
            named = [line for line in self.cause.splitlines() if line.startswith(FIRST_OPERATION)]
            kept = f"; {named[0]}{kept}" if named else kept
        elif self.evidence:
            command = f"python -m detjax.diverge --evidence {shlex.quote(self.evidence)}"
            kept += f", of which {command} names the operation"
        return (
            f"a self-check has found different bits on this machine: {self.difference}{kept}. No "
            "deterministic answer is made any more; start again with self_check='off' to go on "
            "without the claim, or ask with is_deterministic=False"
        )

    def refuse_if_broken(self) -> None:
        """Make no promise that is known to be false.

        Raises:
            SelfCheckError: After a difference.
        """
        if self.difference is not None:
            raise SelfCheckError(self.error)
