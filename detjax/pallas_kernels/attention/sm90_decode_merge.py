# SPDX-License-Identifier: Apache-2.0
"""The merge of a sequence's splits, for elements of the output that lie side by side."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.attention import sm90_arithmetic as bits

LANES = 128  # elements of the output that a warpgroup merges at once, one a thread


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeLanes:
    """Merge of splits for LANES neighbouring elements of the output, one a thread: whole rows.

    Attributes:
        channels: Of a row.
        is_interpreted: Use plain operations, for interpretation on CPU.
    """

    channels: int
    is_interpreted: bool

    @property
    def rows(self) -> int:
        """Rows side by side."""
        return LANES // self.channels

    @property
    def layout(self):
        """A thread an element."""
        return plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    @property
    def math(self) -> bits.Arithmetic:
        """The arithmetic on such vectors."""
        return bits.Arithmetic(
            layout=None, row_layout=self.layout, is_interpreted=self.is_interpreted
        )

    def empty(self):
        """The state before any split: maximum, sum and output."""
        zero = self.math.full((LANES,), 0.0)
        return self.math.full((LANES,), bits.EMPTY_MAX), zero, zero

    def spread(self, read, first_row):
        """One scalar a row, `read(row)`, over its channels."""
        if self.is_interpreted:
            lane = lax.broadcasted_iota(jnp.int32, (LANES,), 0)
        else:
            lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=self.layout)
        value = self.math.cast(jnp.full((LANES,), read(first_row)), self.layout)
        for i in range(1, self.rows):
            other = self.math.cast(jnp.full((LANES,), read(first_row + i)), self.layout)
            value = jnp.where(lane < i * self.channels, value, other)
        return value

    def fold(self, state, other_m, other_sum, other_out):
        """Fold a split into the state, as `merge_scales` and `merge_outputs` do."""
        m, weight_sum, out = state
        m, weight_sum, a, b = self.math.merge_scales(m, weight_sum, other_m, other_sum)
        return m, weight_sum, self.math.fma(out, a, self.math.mul(other_out, b))

    def finish(self, state, is_row, dtype):
        """Divide by the sum, clear padded rows, make every zero +0, round once."""
        _, weight_sum, out = state
        out = self.math.mul(out, self.math.reciprocal(weight_sum))
        out = jnp.where(is_row & (out != 0.0), out, self.math.full((LANES,), 0.0))
        # ROUND: the only rounding of the output to the compute dtype.
        return out.astype(dtype)
