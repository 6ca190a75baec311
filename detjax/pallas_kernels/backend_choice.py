# SPDX-License-Identifier: Apache-2.0
"""Which kernel set runs: chosen once, by the hardware and the model, and said aloud."""

from collections.abc import Callable
from dataclasses import dataclass

from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendChoice:
    """A backend and why it was chosen, to be printed."""

    backend: Backend
    reason: str


def choose_backend(
    requested: Backend | None = None,
    *,
    why_not_model: Callable[[Backend], str | None] = lambda backend: None,
) -> BackendChoice:
    """Choose by the hardware and the model, or check that `requested` can run here.

    Args:
        requested: None chooses.
        why_not_model: Says what a backend's kernels refuse in the model; asked where they can run.

    Raises:
        ValueError: If the requested backend cannot run here, with the reason.
    """

    def why_not(backend: Backend) -> str | None:
        return KERNELS[backend].why_not_here() or why_not_model(backend)

    if requested is not None:
        refusal = why_not(requested)
        if refusal is not None:
            raise ValueError(
                f"--backend {requested.value} cannot run here: {refusal}; "
                f"use --backend {list(KERNELS)[-1].value}"
            )
        return BackendChoice(backend=requested, reason="asked for")
    refusals = []
    for backend, kernels in KERNELS.items():
        refusal = why_not(backend)
        if refusal is None:
            reason = "; ".join([*dict.fromkeys(refusals), kernels.where_it_runs()])
            return BackendChoice(backend=backend, reason=reason)
        refusals.append(f"{refusal}")
    raise ValueError(f"no backend can run here: {'; '.join(refusals)}")
