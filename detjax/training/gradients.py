# SPDX-License-Identifier: Apache-2.0
"""How a backward pass adds: in one order for every cut of the batch, or as XLA likes.

Operations say what their gradients are made of: rows times a matrix, sums over tokens, and
derivatives of plain formulas. `CanonicalSums` and `XlaSums` compute these.
"""

import enum
import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.fixed_blocks import pad_axis
from detjax.pallas_kernels.gradients.api import expert_token_sum, token_sum
from detjax.pallas_kernels.gradients.leaves import TOKEN_LEAF
from detjax.pallas_kernels.linear.api import linear_partial
from detjax.parallel.collectives import butterfly_sum
from detjax.parallel.mesh import TP_AXIS
from detjax.training.batch import Batch

ROW_AXIS, COLUMN_AXIS = 0, 1

STEP_DEPTH, OUT_BLOCK = 16, 128
"""What K and N of a product are padded to with zeros, which change no bit."""

XLA_ROWS = 1024
"""Rows whose logits exist at the same time."""

WIDE_ROWS, WIDE_LEAVES = XLA_ROWS, 32
"""Rows, or leaves of them, that a GPU computes side by side: one shape, whatever there is."""


class Backward(enum.Enum):
    """Which order the sums of a backward pass have. The forward pass has the bits of serving."""

    CANONICAL = "canonical"  # of each sequence alone: no cut of the batch changes a bit
    XLA = "xla"  # XLA's, by the shapes of a microbatch: faster, and run-invariant alone


def with_gradient(kernel: Callable, gradient: Callable[..., tuple]) -> Callable:
    """`kernel`, whose arguments get the cotangents that `gradient(args, out, cotangent)` gives."""
    op = jax.custom_vjp(kernel)

    def forward(*args):
        out = kernel(*args)
        return out, (args, out)

    def backward(saved, cotangent):
        return gradient(*saved, cotangent)

    op.defvjp(forward, backward)
    return op


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLeaves:
    """Where the rows of a batch are among the leaves of its sequences.

    Attributes:
        places: Of each row, int32 [M]; past the last leaf for padding.
        sources: The row of each place, int32 [B T]; M where there is none.
        lengths: Rows of each sequence, int32 [B].
        batch: Sequences, those that fill it up to a power of two included.
        length: Rows of a sequence, filled up to a power of two of leaves.
    """

    places: Any
    sources: Any
    lengths: Any
    batch: int = field(metadata={"static": True})
    length: int = field(metadata={"static": True})

    @classmethod
    def of(cls, batch: Batch) -> "TokenLeaves":
        """Sequences in order, each from the first row of a leaf on."""
        (count,) = batch.lengths.shape
        sequences, length = _power_from(count), padded_length(batch.length)
        sequence, position = batch.places // batch.length, batch.places % batch.length
        is_real = batch.places < count * batch.length
        rows = jnp.arange(batch.places.shape[0], dtype=jnp.int32)
        places = jnp.where(is_real, sequence * length + position, sequences * length + rows)
        nothing = jnp.full(sequences * length, rows.size, jnp.int32)
        return cls(
            places=places,
            sources=nothing.at[places].set(rows, mode="drop", unique_indices=True),
            lengths=jnp.pad(batch.lengths, (0, sequences - count)),
            batch=sequences,
            length=length,
        )

    def cut(self, rows: jax.Array) -> jax.Array:
        """Put rows [M, ...] into leaves [B T / leaf, leaf, ...], zeros elsewhere. Copies only."""
        whole = jnp.take(rows, self.sources, axis=0, mode="fill", fill_value=0)
        return whole.reshape(-1, TOKEN_LEAF, *rows.shape[1:])

    def padded(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] of sequences of the batch, with zeros up to `batch` and `length`."""
        widths = [(0, self.batch - x.shape[0]), (0, self.length - x.shape[1])]
        return jnp.pad(x, widths + [(0, 0)] * (x.ndim - 2))

    def cut_padded(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] of `padded` in leaves, as `cut` has them."""
        return x.reshape(-1, TOKEN_LEAF, *x.shape[2:])

    def joined(self, leaves: jax.Array) -> jax.Array:
        """The inverse of `cut`; zeros for padding."""
        rows = leaves.reshape(-1, *leaves.shape[2:])
        return jnp.take(rows, self.places, axis=0, mode="fill", fill_value=0)


def padded_length(length: int) -> int:
    """Rows of the least power of two of leaves that holds a sequence."""
    return TOKEN_LEAF * _power_from(-(-length // TOKEN_LEAF))


def _power_from(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << (count - 1).bit_length()


@runtime_checkable
class GradientSums(Protocol):
    """What the gradients of operations are made of."""

    def rows_times(
        self, x: jax.Array, w: jax.Array, *, widths: tuple[int, ...] = (), is_split: bool = False
    ) -> Float32[Array, "M O"]:
        """`x @ w.T`, unrounded: x is [M, I], w is [O, I].

        I may be several tensors, of `widths`, one after the other; with `is_split` ranks have
        shares of each.
        """
        ...

    def of_weights(self, a: jax.Array, b: jax.Array) -> Float32[Array, "X Y"]:
        """The sum over tokens of `a[t, x] * b[t, y]`."""
        ...

    def of_formula(
        self, formula: Callable, rows: tuple, shared: tuple, cotangents: Any
    ) -> tuple[tuple, tuple]:
        """Cotangents of rows, and of what all rows share, added over tokens.

        `formula(*rows, *shared)` has rows as results; its rows do not meet.
        """
        ...

    def map_rows(self, function: Callable, rows: tuple) -> jax.Array:
        """`function(*rows)`, for some rows at a time."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalSums:
    """Sums of one order: a row's by its width alone, those over tokens by each sequence alone.

    Attributes:
        leaves: Of the batch's tokens.
        profile: Gives the leaves of a row's sums.
        backend: Of the kernels.
        tp: Ranks that share the matrices of a layer; from 2 on inside `shard_map`.
    """

    leaves: TokenLeaves
    profile: NumericsProfile
    backend: Backend
    tp: int = 1

    def rows_times(
        self,
        x: Activation[Array, "M I"],
        w: Activation[Array, "O I"],
        *,
        widths: tuple[int, ...] = (),
        is_split: bool = False,
    ) -> jax.Array:
        """Each tensor's product, as a forward pass with leaves has it; they are added in order.

        # ORDER: ((q + k) + v), additions only. A joined matrix has other rows on each rank, and a
        tensor's are neighbours, so its tree is the one that ranks can share.
        """
        bounds = list(itertools.accumulate(widths))[:-1]
        cut = (jnp.split(part, bounds, axis=1) for part in (x, w))
        trees = (self._tree_of(*part, is_split=is_split) for part in zip(*cut, strict=True))
        return functools.reduce(operator.add, trees)

    def _tree_of(self, x: jax.Array, w: jax.Array, *, is_split: bool) -> jax.Array:
        """`linear.api.linear_partial`, and the exchange of ranks where they share its inputs."""
        num_out, tp = w.shape[0], self.tp if is_split else 1
        x, w = pad_axis(x, 1, STEP_DEPTH), pad_axis(pad_axis(w, 1, STEP_DEPTH), 0, OUT_BLOCK)
        reduction = tree_reduction(x.shape[1] * tp, self.profile)
        product = linear_partial(x, w, reduction=reduction, backend=self.backend)
        if tp > 1:
            product = butterfly_sum(product, TP_AXIS, tp, backend=self.backend)
        return product[:, :num_out]

    def of_weights(self, a: Activation[Array, "M X"], b: Activation[Array, "M Y"]) -> jax.Array:
        """The tree over leaves of tokens: `gradients.api.token_sum`."""
        own = self.leaves
        a, b = (own.cut(rows).reshape(own.batch, own.length, -1) for rows in (a, b))
        return token_sum(a, b, own.lengths, backend=self.backend)

    def of_experts(
        self,
        a: Activation[Array, "S X"],
        b: Activation[Array, "S Y"],
        expert_ids: Int32[Array, "M Q"],
        *,
        num_experts: int,
    ) -> Float32[Array, "U X Y"]:
        """`of_weights` of each expert's tokens, whose places are those of all tokens."""
        num_places = self.leaves.batch * self.leaves.length
        return expert_token_sum(
            a,
            b,
            expert_ids.reshape(-1),
            jnp.repeat(self.leaves.places, expert_ids.shape[1]),
            num_experts=num_experts,
            num_places=num_places,
            backend=self.backend,
        )

    def of_formula(self, formula, rows, shared, cotangents) -> tuple[tuple, tuple]:
        """Leaves as `by_leaf` takes them, which are added as a tree."""
        if not shared:
            return self._by_block(lambda *own: _pull(formula, *own)[0], rows, cotangents), ()
        cut = self.leaves.cut
        of_rows, of_shared = self.of_leaves(
            formula, tuple(map(cut, rows)), shared, jax.tree.map(cut, cotangents)
        )
        return tuple(map(self.leaves.joined, of_rows)), of_shared

    def of_leaves(self, formula, rows, shared, cotangents) -> tuple[tuple, tuple]:
        """`of_formula` of rows that are in leaves, [B T / leaf, leaf, ...]."""

        def one(rows, cotangents):
            return _pull(formula, rows, cotangents, shared)

        of_rows, parts = self.by_leaf(one, rows, cotangents)
        return of_rows, jax.tree.map(_tree, parts)

    def of_heads(self, parts: Float32[Array, "A T h C"]) -> Float32[Array, " C"]:
        """Add what tokens, and a rank's heads, give to a gain that all heads share.

        # ORDER: of each leaf first its tokens, as a perfect binary tree, then heads, in as many
        leaves as the greatest power of two up to the profile's that divides the heads of all ranks:
        a leaf left to right, leaves as a perfect binary tree. Then leaves of tokens, as all leaves.
        Additions only.
        """
        by_head = _tree(jnp.moveaxis(parts, 1, 0))  # [A, h, C]
        num_heads = by_head.shape[1] * self.tp
        leaves = math.gcd(num_heads, self.profile.num_leaves)
        by_leaf = by_head.reshape(len(by_head), leaves // self.tp, num_heads // leaves, -1)
        in_order = functools.reduce(operator.add, jnp.moveaxis(by_leaf, 2, 0))
        total = _tree(jnp.moveaxis(in_order, 1, 0))
        if self.tp > 1:
            total = butterfly_sum(total, TP_AXIS, self.tp, backend=self.backend)
        return _tree(total)

    def of_places(self, parts: Float32[Array, "Y X"]) -> Float32[Array, " X"]:
        """Add what each place gives.

        # ORDER: a leaf's tokens as a perfect binary tree, then leaves. Additions only.
        """
        return _tree(parts)

    def map_rows(self, function, rows):
        """As many rows as a leaf has at a time, whosever they are."""
        return self._by_block(function, *rows)

    def _by_block(self, function: Callable, *rows: Any) -> Any:
        """Call `function` on rows, a block at a time.

        # SHAPE: one, of a leaf's rows on a CPU and of more on a GPU. Rows do not meet, so they need
        not be those of one sequence: many short sequences are few blocks.
        """
        size = TOKEN_LEAF if self._is_on_cpu else WIDE_ROWS
        return self._cut_up(size, function, *rows)

    def by_leaf(self, function: Callable, *leaves: Any) -> Any:
        """Call `function` on one leaf after the other, or on some side by side on a GPU.

        # SHAPE: one body of one shape, whatever the number of leaves.
        """
        if self._is_on_cpu:
            return _one_by_one(function, leaves, is_hidden=True)
        return self._cut_up(WIDE_LEAVES, jax.vmap(function), *leaves)

    @property
    def _is_on_cpu(self) -> bool:
        return self.backend.platform == "cpu"

    def _cut_up(self, size: int, function: Callable, *operands: Any) -> Any:
        """Call `function` on `size` rows after the other, zeros behind the last."""
        count = len(jax.tree.leaves(operands)[0])
        cut = jax.tree.map(lambda x: in_chunks(x, size), operands)
        out = _one_by_one(function, cut, is_hidden=self._is_on_cpu)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], out)


def _pull(formula: Callable, rows: tuple, cotangents: Any, shared: tuple = ()) -> tuple:
    """Cotangents of rows and of what they share."""
    _, pull = jax.vjp(lambda rows, shared: formula(*rows, *shared), rows, shared)
    return pull(cotangents)


def _one_by_one(function: Callable, operands: tuple, *, is_hidden: bool) -> Any:
    """`lax.map` whose body is never inlined into its surroundings, nor fused with them.

    # SHAPE: on a CPU the bound is hidden from the compiler (`pallas_kernels.fixed_blocks`). On a
    # GPU a hidden bound would be read by the host each time. Of one leaf alone the compiler knows
    # the index, so it is run twice.
    """
    count = len(jax.tree.leaves(operands)[0])
    if count == 1:
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), operands)
        out = _one_by_one(function, twice, is_hidden=is_hidden)
        return jax.tree.map(lambda x: x[:1], out)

    def run(i, out):
        one = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), operands)
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_index_in_dim(whole, part, i, 0),
            out,
            function(*one),
        )

    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], operands))
    out = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)
    bound = lax.optimization_barrier(jnp.int32(count)) if is_hidden else count
    return lax.fori_loop(0, bound, run, out)


def _tree(parts: Float32[Array, "A ..."]) -> jax.Array:
    """Add a power of two of leaves: ((l0 + l1) + (l2 + l3)) + ..., an exact zero as +0."""
    parts = jnp.where(parts == 0, jnp.zeros_like(parts), parts)
    while parts.shape[0] > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class XlaSums:
    """Sums as XLA makes them of all rows of a microbatch."""

    def rows_times(self, x, w, *, widths=(), is_split=False):
        """One product of all tensors, on one rank."""
        return product(x, w.astype(x.dtype), COLUMN_AXIS, COLUMN_AXIS)

    def of_weights(self, a, b):
        """One product."""
        return product(a, b, ROW_AXIS, ROW_AXIS)

    def of_formula(self, formula, rows, shared, cotangents):
        """The derivative of the whole."""
        return _pull(formula, rows, cotangents, shared)

    def map_rows(self, function, rows):
        """At most `XLA_ROWS` at a time."""
        count = rows[0].shape[0]
        cut = tuple(in_chunks(x, min(XLA_ROWS, count)) for x in rows)
        out = lax.map(lambda part: function(*part), cut)
        return out.reshape(-1, *out.shape[2:])[:count]


def in_chunks(x: jax.Array, num_rows: int) -> jax.Array:
    """Rows in chunks of `num_rows`, zeros after the last."""
    padded = pad_axis(x, 0, num_rows)
    return padded.reshape(-1, num_rows, *x.shape[1:])


def product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> Float32[Array, "X Y"]:
    """Contract an axis of each matrix, in float32, in XLA's order."""
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(
        a, b, axes, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def linear_gradients(
    sums: GradientSums,
    x: jax.Array,
    w: jax.Array,
    cotangent: jax.Array,
    param_dtype: jnp.dtype,
    *,
    widths: tuple[int, ...] = (),
    is_split: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of the inputs and the weights of `x @ w.T`; see `GradientSums.rows_times`."""
    w = w.astype(param_dtype).T
    of_x = sums.rows_times(cotangent, w, widths=widths, is_split=is_split)
    return of_x.astype(x.dtype), sums.of_weights(cotangent, x)


def sums_of(
    backward: Backward, batch: Batch, *, profile: NumericsProfile, backend: Backend, tp: int = 1
) -> GradientSums:
    """The sums of a backward pass over a batch."""
    if backward is Backward.XLA:
        return XlaSums()
    return CanonicalSums(leaves=TokenLeaves.of(batch), profile=profile, backend=backend, tp=tp)
