# SPDX-License-Identifier: Apache-2.0
"""What a self-check found to differ, and the file that keeps it."""

import dataclasses
import json
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import LoadedModel
from detjax.numerics import Build

FOLDER_VARIABLE = "DETJAX_EVIDENCE_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckDifference:
    """Two computations of one thing that should have the same bits and have not.

    Attributes:
        program: What computed `found`, such as "decode invariant 8x1 to 16 pages", or "answer".
        row: Of the program, over all replicas; -1 for an answer, whose rows are not known any more.
        position: Of the first token that was computed, absolute.
        token_ids: That were computed from there; of an answer all of them.
        sampling: Parameters, and the index of the noise stream.
        what: That differs: "token and logprob", "keys and values", ...
        found: By the program, in hexadecimal.
        expected: By prefill, in hexadecimal.
    """

    program: str
    row: int
    position: int
    token_ids: tuple[int, ...]
    sampling: tuple[SamplingParams, int]
    what: str
    found: str
    expected: str

    def __str__(self) -> str:
        """Say it in a line."""
        where = self.program if self.row < 0 else f"{self.program}, row {self.row}"
        return (
            f"{where}, position {self.position}: {self.what} {self.found} instead of "
            f"{self.expected} by prefill"
        )


def evidence_folder() -> Path:
    """Where evidence is kept: `DETJAX_EVIDENCE_DIR`, else the user's folder for state."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "detjax" / "evidence"


def keep_evidence(difference: CheckDifference, model: LoadedModel, config: object) -> str:
    """Write a JSON file of a difference and of what made it.

    Args:
        difference: The first one.
        model: That ran.
        config: Of each replica of the engine.

    Returns:
        The path; empty, with a warning, where it cannot be written.
    """
    device = model.mesh.devices.flat[0]
    document = {
        "difference": dataclasses.asdict(difference),
        "fingerprint": model.fingerprint,
        "build": Build.current(model.backend.value, device).facts(),
        "profile": dataclasses.asdict(model.profile),
        "model": dataclasses.asdict(model.config),
        "folder": str(model.folder),
        "mesh": dict(model.mesh.shape),
        "engine": repr(config),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}.json"
    path = evidence_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, default=str), encoding="utf-8")
    except OSError as error:
        warnings.warn(
            f"evidence of a failed self-check cannot be written to {path} ({error.strerror}); set "
            f"{FOLDER_VARIABLE} to a folder that can: {difference}",
            RuntimeWarning,
            stacklevel=2,
        )
        return ""
    return str(path)


def add_cause(path: str, cause: str) -> None:
    """Put what made a difference into the file that keeps it."""
    file = Path(path)
    document = json.loads(file.read_text(encoding="utf-8")) | {"cause": cause.splitlines()}
    file.write_text(json.dumps(document, indent=1), encoding="utf-8")
