# SPDX-License-Identifier: Apache-2.0
"""Whether an engine may still say that its answers are canonical."""

from collections.abc import Sequence

from detjax.models.loading import LoadedModel
from detjax.serving.config import ReplicaConfig
from detjax.serving.errors import SelfCheckError
from detjax.serving.metrics import EngineStats
from detjax.serving.self_check.evidence import Difference, keep_evidence


class Claim:
    """Holds until a self-check finds a difference; then never again in this engine.

    Attributes:
        difference: The first one; None while the claim holds.
        evidence: Path of the file that keeps it; empty where none could be written.
    """

    def __init__(self, model: LoadedModel, config: ReplicaConfig, stats: EngineStats):
        """Let it hold."""
        self._model, self._config, self._stats = model, config, stats
        self.difference: Difference | None = None
        self.evidence = ""

    def note(self, differences: Sequence[Difference]) -> None:
        """Count differences, and keep evidence of the first that there ever was."""
        self._stats.num_self_check_differences += len(differences)
        if differences and self.difference is None:
            self.evidence = keep_evidence(differences[0], self._model, self._config)
            self.difference = differences[0]

    @property
    def error(self) -> str:
        """Why no deterministic answer is made any more; empty while the claim holds."""
        if self.difference is None:
            return ""
        kept = f"; evidence: {self.evidence}" if self.evidence else ""
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
