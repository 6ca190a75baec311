# SPDX-License-Identifier: Apache-2.0
"""Which implementation of the kernels runs, chosen once and said aloud."""

import enum
import os
from dataclasses import dataclass

import jax


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


def choose_backend(requested: Backend | None) -> BackendChoice:
    """Choose by the hardware, or check that `requested` can run here.

    Raises:
        ValueError: If the requested backend cannot run here, with the reason.
    """
    why_not = _why_not_sm90()
    if requested is Backend.SM90:
        raise ValueError(f"--backend sm90 cannot run here: {why_not}; use --backend portable")
    if requested is Backend.PORTABLE:
        return BackendChoice(backend=requested, reason="asked for")
    return BackendChoice(backend=Backend.PORTABLE, reason=f"{why_not}; runs on the CPU")


def configure_xla() -> None:
    """Set the compiler flags that the claims rest on; call before JAX starts.

    `--xla_allow_excess_precision=false`: without it XLA may drop a pair of converts, and with it a
    rounding to bfloat16. The fingerprint holds the flags.
    """
    flag = "--xla_allow_excess_precision=false"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _why_not_sm90() -> str:
    """What is missing for sm90."""
    try:
        gpus = jax.devices("gpu")
    except RuntimeError:
        return "no GPU that JAX can use"
    if gpus[0].compute_capability != "9.0":
        return f"{gpus[0].device_kind} is not a Hopper GPU (sm_90)"
    return "its kernels have not been proven as a whole model yet"
