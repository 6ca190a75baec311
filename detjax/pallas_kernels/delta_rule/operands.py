# SPDX-License-Identifier: Apache-2.0
"""What gated DeltaNet reads, as the product and the weights before it leave it."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def by_key_head(parts: list[jax.Array], num_heads: int) -> jax.Array:
    """Join columns [..., K * n] of several parts, head of keys by head of keys: [..., K, X]."""
    heads = [part.reshape(*part.shape[:-1], num_heads, -1) for part in parts]
    return jnp.concatenate(heads, axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedRows:
    """Rows of heads of keys as columns of a product: all queries, keys, values, gates, b, a.

    Attributes:
        columns: [M, O]; what stands behind a is not read.
        num_heads: Heads of keys, K.
        key_dim: Channels of a key, c.
        value_dim: Channels of a value, C.
        group: Heads of values of a head of keys, G.
        width: X of a row; what is behind a is zeros.
    """

    columns: Any
    num_heads: int = field(metadata={"static": True})
    key_dim: int = field(metadata={"static": True})
    value_dim: int = field(metadata={"static": True})
    group: int = field(metadata={"static": True})
    width: int = field(metadata={"static": True})

    @property
    def part_widths(self) -> tuple[int, ...]:
        """Columns of queries, keys, values, gates, b and a."""
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.group * self.value_dim
        return keys, keys, values, values, self.num_heads * self.group, self.num_heads * self.group

    @property
    def part_starts(self) -> tuple[int, ...]:
        """Where each begins."""
        widths = self.part_widths
        return tuple(sum(widths[:i]) for i in range(len(widths)))

    def parts(self) -> list[jax.Array]:
        """Each of them, [M, O]."""
        pairs = zip(self.part_starts, self.part_widths, strict=True)
        return [self.columns[:, start : start + width] for start, width in pairs]

    def arranged(self) -> jax.Array:
        """The rows, [M, K, X]: q, k, values, b and a of each head of keys, and zeros."""
        q, k, v, _, b, a = self.parts()
        rows = by_key_head([q, k, v, b, a], self.num_heads)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, self.width - rows.shape[2])))

    def output_gates(self) -> jax.Array:
        """Gates of the heads of values, [M, H, C]."""
        return self.parts()[3].reshape(len(self.columns), -1, self.value_dim)


class Filters(NamedTuple):
    """Numbers of the convolution, [channels, 1, Y] each, the oldest token first.

    Attributes:
        q: Of queries, [K c, 1, Y].
        k: Of keys, likewise.
        v: Of values, [H C, 1, Y].
    """

    q: Any
    k: Any
    v: Any

    def arranged(self, num_heads: int) -> jax.Array:
        """Head of keys by head of keys, [K, Y, X]."""
        return jnp.moveaxis(by_key_head([part[:, 0].T for part in self], num_heads), 0, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class OutputNorm:
    """The norm behind the recurrence, gated by the gates of `ProjectedRows`.

    Attributes:
        gain: [C] float32.
        eps: Added to the mean square.
        prefetch: Weights of the products behind it, which `sm90` asks into the L2 cache where few
            sequences leave the memory idle. They change no bit.
    """

    gain: Any
    eps: float = field(metadata={"static": True})
    prefetch: tuple = ()


def normalised(gated_rms_norm, out, rows: ProjectedRows, norm: OutputNorm) -> jax.Array:
    """Results [M, H, C] behind the norm, by a backend's `gated_rms_norm`: [M, H C]."""
    heads, gates = (x.reshape(-1, rows.value_dim) for x in (out, rows.output_gates()))
    return gated_rms_norm(heads, gates, norm.gain, eps=norm.eps).reshape(len(out), -1)


def arranged(rows, filters) -> tuple[jax.Array, jax.Array]:
    """Rows [M, K, X] and filters [K, Y, X], whichever way they are given."""
    if isinstance(rows, ProjectedRows):
        rows = rows.arranged()
    if isinstance(filters, Filters):
        filters = filters.arranged(rows.shape[1])
    return rows, filters
