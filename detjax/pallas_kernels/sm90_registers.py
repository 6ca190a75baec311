# SPDX-License-Identifier: Apache-2.0
"""Registers that move from warpgroups that load to those that compute (PTX `setmaxnreg`)."""

from dataclasses import dataclass

from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.sm90_hardware import LANES

SM_REGISTERS = 1 << 16
"""Of an SM: a CTA alone there starts with as many for each thread, a multiple of 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisterShares:
    """What a thread has after `take` or `give`.

    Attributes:
        computing: Of a warpgroup that computes.
        loading: Of one that loads.
        num_computing: Such warpgroups of a CTA.
        num_loading: Likewise.
    """

    computing: int
    loading: int
    num_computing: int
    num_loading: int = 1

    def __post_init__(self):
        """Refuse shares that a warpgroup would wait for without end."""
        count = self.num_computing + self.num_loading
        at_start = SM_REGISTERS // (LANES * count) // 8 * 8
        total = self.computing * self.num_computing + self.loading * self.num_loading
        if total > at_start * count:
            raise ValueError(
                f"{self} need {total} registers of each {count} threads, and a CTA starts with "
                f"{at_start * count}: a warpgroup would wait for the rest without end"
            )
        if not self.loading <= at_start <= self.computing:
            raise ValueError(f"{self} must give registers of {at_start} away and take them")

    def take(self) -> None:
        """Called by each warpgroup that computes: waits until registers were given."""
        plgpu.set_max_registers(self.computing, action="increase")

    def give(self) -> None:
        """Called by each warpgroup that loads."""
        plgpu.set_max_registers(self.loading, action="decrease")
