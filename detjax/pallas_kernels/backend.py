# SPDX-License-Identifier: Apache-2.0
"""Which implementation of the kernels runs, chosen once and said aloud."""

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Backend(enum.Enum):
    """An implementation of every operation, of the one specification."""

    PORTABLE = "portable"  # generic Pallas in fixed blocks, interpreted on CPU
    SM90 = "sm90"  # Mosaic GPU for Hopper: TMA, wgmma, warp specialisation

    @property
    def platform(self) -> str:
        """The JAX platform whose devices run it."""
        return "gpu" if self is Backend.SM90 else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendChoice:
    """A backend and why it was chosen, to be printed."""

    backend: Backend
    reason: str


def choose_backend(
    requested: Backend | None = None, *, why_not_model: Callable[[], str | None] = lambda: None
) -> BackendChoice:
    """Choose by the hardware and the model, or check that `requested` can run here.

    Args:
        requested: None chooses.
        why_not_model: Says what sm90's kernels refuse in the model; asked on a Hopper GPU only.

    Raises:
        ValueError: If the requested backend cannot run here, with the reason.
    """
    if requested is Backend.PORTABLE:
        return BackendChoice(backend=requested, reason="asked for")
    device, why_not = _hopper()
    why_not = why_not or why_not_model()
    if why_not is None:
        reason = "asked for" if requested else f"{device} is a Hopper GPU"
        return BackendChoice(backend=Backend.SM90, reason=reason)
    if requested is Backend.SM90:
        raise ValueError(f"--backend sm90 cannot run here: {why_not}; use --backend portable")
    return BackendChoice(backend=Backend.PORTABLE, reason=f"{why_not}; runs on the CPU")


def _hopper() -> tuple[str, str | None]:
    """The GPU's name, and why sm90 cannot run on it, if so."""
    import jax  # here: names of backends are known without it

    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError:
        return "", "no GPU that JAX can use"
    if gpu.compute_capability != "9.0":
        return gpu.device_kind, f"{gpu.device_kind} is not a Hopper GPU (sm_90)"
    return gpu.device_kind, None
