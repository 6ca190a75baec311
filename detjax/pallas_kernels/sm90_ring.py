# SPDX-License-Identifier: Apache-2.0
"""The ring of shared-memory stages between the warpgroup that loads and those that multiply.

Steps are counted from the start of the kernel, over all tiles of a CTA, so that no tile starts with
an empty ring. Step n uses slot `n % num_slots`.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Who may touch a slot: a pair of barriers for each.

    Attributes:
        full: Barriers [num_slots]; the copies of a step arrive.
        empty: Barriers [num_slots]; every warpgroup that has read a step arrives.
        num_slots: Stages of the ring.
    """

    full: Any
    empty: Any
    num_slots: int

    def slot(self, step):
        """The slot of a step, an int32 scalar."""
        return lax.rem(step, self.num_slots)

    def wait(self, step):
        """A reader waits until the copies of a step have arrived, and gets its slot."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def release(self, step) -> None:
        """A reader gives back the slot of a step."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def claim(self, step):
        """The loader waits until the slot of a step has been given back, and returns it."""
        slot = self.slot(step)

        @pl.when(step >= self.num_slots)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    def drain(self, num_steps) -> None:
        """The loader waits until all of its `num_steps` steps have been given back.

        # WHY: no CTA may leave while another of its cluster still writes to its memory, and a
        barrier with a phase that nobody awaited is an error in interpretation.
        """
        used = lax.min(num_steps, jnp.int32(self.num_slots))

        def wait(i, _):
            plgpu.barrier_wait(self.empty.at[self.slot(num_steps - used + i)])
            return ()

        lax.fori_loop(0, used, wait, ())
