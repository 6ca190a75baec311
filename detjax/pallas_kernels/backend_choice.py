# SPDX-License-Identifier: Apache-2.0
"""Which kernel set runs: chosen once, by the hardware and the model, and said aloud."""

from collections.abc import Callable
from dataclasses import dataclass

from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS

MAX_UNASKED_CPU_PARAMS = 1_000_000_000
"""A larger model runs on a CPU only if its user asks for that: a token would take many seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendChoice:
    """A backend and why it was chosen, to be printed."""

    backend: Backend
    reason: str


def choose_backend(
    requested: Backend | None = None,
    *,
    why_not_model: Callable[[Backend], str | None] = lambda backend: None,
    num_params: int = 0,
) -> BackendChoice:
    """Choose by the hardware and the model, or check that `requested` can run here.

    Of the backends of a CPU the model alone decides. If something has to be installed for that one,
    nothing else is chosen: the same command would have other bits on the next machine.

    Args:
        requested: None chooses.
        why_not_model: Says what a backend's kernels refuse in the model; asked where they can run.
        num_params: Parameters of the model; 0 if there is none yet.

    Raises:
        ValueError: If the requested backend cannot run here, with the reason; or if nothing was
            requested and something has to be installed, or a model of more than
            `MAX_UNASKED_CPU_PARAMS` would run on a CPU.
    """
    if requested is not None:
        refusal = why_not_runnable(requested) or why_not_model(requested)
        if refusal is not None:
            raise ValueError(
                f"--backend {requested.value} cannot run here: {refusal}"
                f"{_others(requested, why_not_model)}"
            )
        return BackendChoice(backend=requested, reason="asked for")
    refusals: list[str] = []
    for backend, kernels in KERNELS.items():
        refusal = kernels.why_not_here() or why_not_model(backend)
        if refusal is not None:
            refusals.append(refusal)
            continue
        if backend.platform == "cpu" and num_params > MAX_UNASKED_CPU_PARAMS:
            raise ValueError(
                f"the model has {num_params / 1e9:.1f} billion parameters and would run on the "
                f"CPU, at many seconds per token: {'; '.join(refusals)}; use an H100 or H200, or "
                f"ask for the CPU with --backend {backend.value}"
            )
        if missing := kernels.what_to_install():
            raise ValueError(
                f"{missing}; --backend {_anywhere()} needs nothing, and gives other bits"
            )
        reason = "; ".join([*dict.fromkeys(refusals), kernels.where_it_runs()])
        return BackendChoice(backend=backend, reason=reason)
    raise ValueError(f"no backend can run here: {'; '.join(refusals)}")


def why_not_runnable(backend: Backend) -> str | None:
    """Say why a backend cannot run on this machine as it is, or None if it can."""
    kernels = KERNELS[backend]
    return kernels.why_not_here() or kernels.what_to_install()


def _others(refused: Backend, why_not_model: Callable[[Backend], str | None]) -> str:
    """What else runs the model here, and whether that has the bits which were asked for."""
    found = [
        f"; --backend {other.value} can, and gives "
        f"{'the same' if other.gives_bits_of(refused) else 'other'} bits"
        for other in KERNELS
        if other is not refused and (why_not_runnable(other) or why_not_model(other)) is None
    ]
    return "".join(found)


def _anywhere() -> str:
    """The name of the backend that runs on every machine, and takes every model."""
    return next(b.value for b, kernels in KERNELS.items() if kernels.takes_every_model)
