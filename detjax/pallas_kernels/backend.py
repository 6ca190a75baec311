# SPDX-License-Identifier: Apache-2.0
"""Which implementation of the kernels runs, chosen once and said aloud."""

import enum
from dataclasses import dataclass
from typing import NoReturn

import jax


class Backend(enum.Enum):
    """An implementation of every operation, of the one specification."""

    PORTABLE = "portable"  # generic Pallas in fixed blocks, interpreted on CPU
    SM90 = "sm90"  # Mosaic GPU for Hopper: TMA, wgmma, warp specialisation


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
    if requested is Backend.SM90:
        raise ValueError(
            "--backend sm90 cannot run here: this build has no sm90 kernels yet; "
            "use --backend portable"
        )
    if requested is Backend.PORTABLE:
        return BackendChoice(backend=Backend.PORTABLE, reason="asked for")
    gpus = sum(device.platform == "gpu" for device in jax.devices())
    if gpus:
        reason = f"{gpus} GPU(s) present, but this build has no sm90 kernels yet; runs on the CPU"
    else:
        reason = "no GPU here; runs on the CPU"
    return BackendChoice(backend=Backend.PORTABLE, reason=reason)


def refuse(operation: str, backend: Backend) -> NoReturn:
    """Fail closed on a backend that does not have `operation`.

    Raises:
        NotImplementedError: Always, naming the operation and the backends that have it.
    """
    raise NotImplementedError(f"{operation} is not implemented on {backend.value}; use portable")
