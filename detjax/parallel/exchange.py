# SPDX-License-Identifier: Apache-2.0
"""The ranks' end of a row-parallel layer: add their subtrees, the residual stream, and normalise.

Three forms of the same additions; which one runs is chosen by size and hardware and changes no bit.

| form | for | how |
|---|---|---|
| butterfly | few rows, and the reference | `collectives.butterfly_sum`, then `add_rms_norm` |
| scatter | many rows | each rank adds and normalises its share of the rows; outputs are gathered |
| exchange | few rows, GPUs of one process | the product or a kernel behind it uses peer memory |
"""

import functools
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Activation, Array, Float32, Int32, UInt32
from detjax.numerics import Reduction
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS, LazyModule, module_name
from detjax.pallas_kernels.linear.quantized import QuantizedMatrix, W8A8Matrix
from detjax.pallas_kernels.moe.api import combine_experts_add_rms_norm
from detjax.pallas_kernels.rms_norm.api import combine_add_rms_norm, rms_norm
from detjax.pallas_kernels.sm90_hardware import NUM_SMS
from detjax.parallel.collectives import scatter_expert_rows
from detjax.parallel.mailbox import Mailbox
from detjax.parallel.mesh import DP_AXIS, TP_AXIS
from detjax.parallel.peer_access import why_no_peers

MAX_EXCHANGED_ROWS = 128
"""Rows with slots. Above, sending every partial to every rank costs more than it saves."""

MAX_CHOSEN_ROWS = 512
"""Rows of logits with slots."""

MAX_EXCHANGED_RANKS = 8

MAX_TILE_RANKS = 4
"""Ranks whose products and choices exchange themselves; more have the kernel behind a product and
XLA's gathers. Kernels for up to 8 exist and compile, but no more than four GPUs have run them."""


class ExchangeKernel(Protocol):
    """Launches that add the ranks' subtrees through peer memory.

    Attributes:
        EMPTY: A word of a slot that no peer has written, uint32.
        TILE_WORDS: Words that a rank sends another for a tile, at most.
    """

    EMPTY: int
    TILE_WORDS: int

    def takes_width(self, width: int) -> bool:
        """Whether it exchanges rows of so many channels."""
        ...

    def slot_words(self, width: int, dtype: jnp.dtype) -> int:
        """Words that a rank sends another for a row of a residual stream of `dtype`."""
        ...

    def exchange_add_rms_norm(
        self, leaf_sums, residual, bias, gain, mailbox: Mailbox, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """See `exchange_add_rms_norm` of this module."""
        ...

    def num_tiles(self, width: int) -> int:
        """Tiles of a row-parallel product with so many outputs."""
        ...

    def adds_tiles(self, x, w) -> bool:
        """Whether `linear_exchange_add` takes a product."""
        ...

    def normalises_input(self, num_rows: int, width: int) -> bool:
        """Whether a product of so many rows does well to normalise them itself."""
        ...

    def linear_exchange_add(
        self, x, w, residual, bias, mailbox: Mailbox, *, reduction: Reduction
    ) -> jax.Array:
        """The residual stream of `linear_exchange_add_rms_norm` of this module, in one launch."""
        ...

    def takes_vocabulary(self, vocab_size: int, vocab_share: int) -> bool:
        """Whether `exchange_choose_token` takes a vocabulary, and a rank's share of it."""
        ...

    def choice_words(self, vocab_share: int) -> int:
        """Words that a rank with so many tokens sends another for a row of logits."""
        ...

    def exchange_choose_token(
        self, logits, temperature, key, first_token_id, mailbox: Mailbox, *, vocab_block: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `exchange_choose_token` of this module."""
        ...


EXCHANGE_KERNELS: dict[Backend, ExchangeKernel] = {
    Backend.SM90: cast(ExchangeKernel, LazyModule(f"{__package__}.sm90_exchange_kernels"))
}
"""Of the backends that have one; others exchange through XLA's collectives."""


def modules_of(backend: Backend) -> tuple[str, ...]:
    """Names of the modules that a backend runs and no other: roots of a hash of its code."""
    return module_name(KERNELS[backend]) + module_name(EXCHANGE_KERNELS.get(backend))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Mailboxes:
    """The `Mailbox` of every rank of a mesh.

    Kernels of peers write to it by address, behind XLA's back, so nothing but an exchange kernel
    may read it.

    Attributes:
        peers: uint32 [dp, tp, tp - 1, 2]; of each rank the addresses (low, high word) of its peers'
            slots, in order of XOR distance.
        slots: uint32 [dp, tp, 2, R, tp - 1, W]; W words of a region.
        parities: int32 [dp, tp, R]; which of its two slots the next exchange of a region uses.
    """

    peers: Any
    slots: Any
    parities: Any

    @property
    def of_rank(self) -> Mailbox:
        """This rank's, inside `shard_map`."""
        return Mailbox(self.peers[0, 0], self.slots[0, 0], self.parities[0, 0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """The mailboxes of a mesh, which are operands of its steps.

    Attributes:
        rows: A region a row of the residual stream; W from `slot_words`.
        tiles: A region a tile of a row-parallel product; None if products leave the sum to a
            kernel behind them, as where a GPU has fewer multiprocessors than there are tiles.
        choices: A region a row of logits; None if XLA gathers what a choice needs.
    """

    rows: Mailboxes
    tiles: Mailboxes | None
    choices: Mailboxes | None

    @property
    def max_rows(self) -> int:
        """Most rows of an exchange."""
        return self.rows.parities.shape[-1]


_BY_RANK = P(DP_AXIS, TP_AXIS)
EXCHANGE_SPECS = _BY_RANK
"""Of every array of an `Exchange`."""


def why_no_exchange(mesh: Mesh, *, width: int, backend: Backend) -> str | None:
    """Why the ranks of a mesh cannot use the exchange kernel, or None if they can.

    Args:
        mesh: The (dp, tp) mesh.
        width: Channels of the residual stream.
        backend: Which kernels run.
    """
    tp = mesh.shape[TP_AXIS]
    if tp == 1:
        return "one rank has nobody to exchange with"
    kernel = EXCHANGE_KERNELS.get(backend)
    if kernel is None:
        return f"the {backend.value} backend exchanges through XLA's collectives"
    if tp > MAX_EXCHANGED_RANKS:
        return f"{tp=} is more than {MAX_EXCHANGED_RANKS} GPUs of one machine"
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) > 1:
        return f"the mesh spans {len(processes)} processes, which have no addresses in common"
    if not kernel.takes_width(width):
        return f"{width} channels are not a row of whole warpgroups"
    for ranks in mesh.devices:
        if (why := why_no_peers(ranks)) is not None:
            return why
    return None


def open_exchange(
    mesh: Mesh,
    *,
    width: int,
    dtype: jnp.dtype,
    backend: Backend,
    padded_vocab: int | None = None,
    max_rows: int = MAX_EXCHANGED_ROWS,
    max_tile_ranks: int = MAX_TILE_RANKS,
) -> Exchange:
    """Allocate the mailboxes of a mesh and tell every rank where its peers' are.

    WHY: `plgpu.remote_ref` would exchange addresses on every execution of every call: a rendezvous
    of the host threads, an allocation, a copy and a barrier kernel (35 to 50 us each, 2026-11).

    Args:
        mesh: One for which `why_no_exchange` is None.
        width: Channels of the residual stream.
        dtype: Of the residual stream.
        backend: Which kernels run.
        padded_vocab: Rows of lm_head, of all ranks; None if nothing is chosen over ranks.
        max_rows: Most rows of an exchange.
        max_tile_ranks: Most ranks with mailboxes for tiles and choices.
    """
    shapes = exchange_shapes(
        mesh, width=width, dtype=dtype, backend=backend, padded_vocab=padded_vocab,
        max_rows=max_rows, max_tile_ranks=max_tile_ranks,
    )  # fmt: skip
    empty = EXCHANGE_KERNELS[backend].EMPTY

    def opened(boxes: Mailboxes | None) -> Mailboxes | None:
        return None if boxes is None else _open(boxes, empty)

    rows = _open(shapes.rows, empty)
    return Exchange(rows=rows, tiles=opened(shapes.tiles), choices=opened(shapes.choices))


def exchange_shapes(
    mesh: Mesh,
    *,
    width: int,
    dtype: jnp.dtype,
    backend: Backend,
    padded_vocab: int | None = None,
    max_rows: int = MAX_EXCHANGED_ROWS,
    max_tile_ranks: int = MAX_TILE_RANKS,
) -> Exchange:
    """Shapes and places of what `open_exchange` allocates, of the same arguments."""
    dp, tp = (mesh.shape[axis] for axis in (DP_AXIS, TP_AXIS))
    kernel = EXCHANGE_KERNELS[backend]
    sharding = NamedSharding(mesh, _BY_RANK)

    def made(regions: int, words: int) -> Mailboxes:
        def leaf(kind, *dims: int):
            return jax.ShapeDtypeStruct((dp, tp, *dims), kind, sharding=sharding)

        return Mailboxes(
            peers=leaf(jnp.uint32, tp - 1, 2),
            slots=leaf(jnp.uint32, 2, regions, tp - 1, words),
            parities=leaf(jnp.int32, regions),
        )

    tiles, choices = None, None
    if tp <= max_tile_ranks:
        # WHY: a CTA of a tile waits for those of other ranks, so all of them must be resident.
        if kernel.num_tiles(width) <= _fewest_cores(mesh):
            tiles = made(kernel.num_tiles(width), kernel.TILE_WORDS)
        if padded_vocab is not None and kernel.takes_vocabulary(padded_vocab, padded_vocab // tp):
            choices = made(MAX_CHOSEN_ROWS, kernel.choice_words(padded_vocab // tp))
    return Exchange(
        rows=made(max_rows, kernel.slot_words(width, dtype)),
        tiles=tiles,
        choices=choices,
    )


def _fewest_cores(mesh: Mesh) -> int:
    """Multiprocessors of the smallest GPU; as many as a Hopper has where there are no GPUs."""
    gpus = [device for device in mesh.devices.flat if device.platform == "gpu"]
    return min((device.core_count for device in gpus), default=NUM_SMS)


def _open(shapes: Mailboxes, empty: int) -> Mailboxes:
    sharding = shapes.slots.sharding
    mesh = sharding.mesh

    @functools.partial(jax.jit, out_shardings=(sharding, sharding))
    def fill():
        slots = jnp.full(shapes.slots.shape, empty, shapes.slots.dtype)
        return slots, jnp.zeros(shapes.parities.shape, shapes.parities.dtype)

    slots, parities = jax.block_until_ready(fill())  # before any peer may write
    address = {s.device: s.data.unsafe_buffer_pointer() for s in slots.addressable_shards}
    peers = np.empty(shapes.peers.shape, np.uint32)
    for replica, rank, i in np.ndindex(peers.shape[:3]):
        where = address[mesh.devices[replica, rank ^ (i + 1)]]
        peers[replica, rank, i] = where & 0xFFFFFFFF, where >> 32
    return Mailboxes(peers=jax.device_put(peers, sharding), slots=slots, parities=parities)


def exchange_add_rms_norm(
    exchange: Exchange,
    leaf_sums: Float32[Array, "A ... M D"],
    residual: Activation[Array, "M D"],
    bias: Activation[Array, " D"] | None,
    gain: Activation[Array, " D"],
    *,
    eps: float,
    backend: Backend,
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Add the ranks' subtrees through peer memory, then as `rms_norm.api.add_rms_norm`.

    `total = round(residual + (tree(ranks' tree(leaf_sums)) + bias))`, `out = rms_norm(total)`

    Call inside `shard_map`, on every rank, and never twice at once: each call of a program depends
    on the one before. The program must hold a collective of XLA's own as well, as a model's step
    does: only then does XLA load the kernel on all GPUs before one of them begins to wait in it.

    Args:
        exchange: This rank's share, from `open_exchange`.
        leaf_sums: This rank's subtrees in order, of `linear_leaf_sums`; A is a power of two.
        residual: The residual stream, the same on every rank.
        bias: The product's bias, added after the tree.
        gain: Scale of each channel.
        eps: Added to the mean square.
        backend: Which kernel runs: that of `open_exchange`.

    Returns:
        The new residual stream, and its normalised rows.

    Numerics:
        # ORDER: leaves as a tree, ranks as a tree, ((r0 + r1) + (r2 + r3)) + ..., then the bias,
        then the residual, float32: the bits of `butterfly_sum` and `add_rms_norm`.
        # ROUND: the residual stream, once.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Data that says itself whether it has arrived: Hu et al. 2025, arXiv:2507.04786 (NCCL's LL
        protocols); here no flag travels with it.
    """
    return EXCHANGE_KERNELS[backend].exchange_add_rms_norm(
        leaf_sums,
        residual,
        bias,
        gain,
        exchange.rows.of_rank,
        eps=eps,
    )


def adds_tiles(exchange: Exchange | None, x, w, *, backend: Backend) -> bool:
    """Whether `linear_exchange_add_rms_norm` takes a row-parallel product: few rows."""
    if exchange is None or exchange.tiles is None:
        return False
    kernel = EXCHANGE_KERNELS[backend]
    num_regions = exchange.tiles.parities.shape[-1]
    return kernel.num_tiles(w.shape[0]) <= num_regions and kernel.adds_tiles(x, w)


def linear_exchange_add_rms_norm(
    exchange: Exchange,
    x: Activation[Array, "M i"],
    w: Activation[Array, "D i"] | QuantizedMatrix | W8A8Matrix,
    residual: Activation[Array, "M D"],
    bias: Activation[Array, " D"] | None,
    gain: Activation[Array, " D"],
    *,
    reduction: Reduction,
    eps: float,
    backend: Backend,
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"] | None]:
    """A row-parallel layer whose product adds the ranks' subtrees through peer memory itself.

    `total = round(residual + (tree(ranks' tree(x @ w.T)) + bias))`, `out = rms_norm(total)`

    Call as `exchange_add_rms_norm`, whose conditions hold here too.

    Args:
        exchange: This rank's share, from `open_exchange`.
        x: This rank's columns of the activations: whole leaves. A product that `adds_tiles`.
        w: The same columns of the weights, (out, in).
        residual: The residual stream, the same on every rank.
        bias: The product's bias, added after the tree.
        gain: Scale of each channel.
        reduction: The leaves of the whole I, from `numerics.tree_reduction`.
        eps: Added to the mean square.
        backend: Which kernel runs: that of `open_exchange`.

    Returns:
        The new residual stream, and its normalised rows: None where the next product does better to
        normalise them in its own launch.

    Numerics:
        # ORDER: leaves as a tree, ranks as a tree, then the bias, then the residual, float32: the
        bits of `linear_leaf_sums` and `exchange_add_rms_norm`.
        # ROUND: the residual stream, once.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    kernel = EXCHANGE_KERNELS[backend]
    assert exchange.tiles is not None  # of whoever `adds_tiles`
    total = kernel.linear_exchange_add(
        x, w, residual, bias, exchange.tiles.of_rank, reduction=reduction
    )
    if kernel.normalises_input(*total.shape):
        return total, None
    return total, rms_norm(total, gain, eps=eps, backend=backend)


def exchanges_choice(exchange: Exchange | None, num_rows: int) -> bool:
    """Whether `exchange_choose_token` takes so many rows of logits."""
    return exchange is not None and exchange.choices is not None and num_rows <= MAX_CHOSEN_ROWS


def exchange_choose_token(
    exchange: Exchange,
    logits: Float32[Array, "M v"],
    temperature: Float32[Array, " M"],
    key: tuple[UInt32[Array, " M"], UInt32[Array, " M"]],
    *,
    vocab_block: int,
    backend: Backend,
) -> tuple[Int32[Array, " M"], Float32[Array, " M"], Float32[Array, " M"]]:
    """`sampling.api.choose_token` of logits that are spread over ranks, through peer memory.

    Call as `exchange_add_rms_norm`, whose conditions hold here too.

    Args:
        exchange: This rank's share, of which it `exchanges_choice`.
        logits: This rank's share; -inf past the vocabulary.
        temperature: Of each row; 0 is greedy.
        key: Of each row, from `noise.row_key`.
        vocab_block: Tokens of a block of the log-softmax, from the profile.
        backend: Which kernel runs: that of `open_exchange`.

    Returns:
        The token of each row, its log-probability, and the row's log-sum-exp, on every rank.

    Numerics:
        The bits of `choose_token` where one rank has the vocabulary: comparisons are exact, and
        blocks are added as one tree in order of token.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    assert exchange.choices is not None  # of whoever `exchanges_choice`
    return EXCHANGE_KERNELS[backend].exchange_choose_token(
        logits,
        temperature,
        key,
        lax.axis_index(TP_AXIS) * logits.shape[1],
        exchange.choices.of_rank,
        vocab_block=vocab_block,
    )


def is_scattered(num_rows: int, axis_size: int) -> bool:
    """Whether so many rows are shared out over the ranks: enough of them, and whole shares."""
    return num_rows > MAX_EXCHANGED_ROWS and num_rows % axis_size == 0


def scatter_add_rms_norm(
    partial: Float32[Array, "... M D"],
    residual: Activation[Array, "R D"],
    bias: Activation[Array, " D"] | None,
    gain: Activation[Array, " D"],
    axis_name: str,
    axis_size: int,
    *,
    eps: float,
    backend: Backend,
) -> tuple[Activation[Array, "m D"], Activation[Array, "M D"]]:
    """Add the ranks' subtrees and normalise, each rank a share of the rows.

    `total[m] = round(residual[m] + (tree(ranks' partial[m]) + bias))`, `out = rms_norm(total)`

    Call inside `shard_map`. A rank sends each other one the rows that are the other's, adds what it
    gets as the tree, normalises its rows and sends them to all: 4 bytes an element out and 2 back
    in bfloat16, where an all-reduce in bfloat16 moves 2 and 2. The residual stream stays where it
    is: a rank keeps its own rows only, which is all that the next layer needs of it.

    Args:
        partial: This rank's subtree of every row, from `linear_partial`: one, or three in parts.
        residual: The residual stream: all rows (R = M), or this rank's share (R = M / axis_size).
        bias: The product's bias, added after the tree.
        gain: Scale of each channel.
        axis_name: Mesh axis of the ranks.
        axis_size: How many.
        eps: Added to the mean square.
        backend: Which implementation of the additions runs.

    Returns:
        This rank's rows of the new residual stream, and all normalised rows.

    Raises:
        ValueError: If the rows do not divide over the ranks.

    Numerics:
        # ORDER: ((r0 + r1) + (r2 + r3)) + ..., float32, r = rank: the additions of `butterfly_sum`,
        each done by one rank instead of all; then as `add_rms_norm`.
        # ROUND: the residual stream, once.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Reduce-scatter and all-gather: Thakur, Rabenseifner and Gropp 2005, IJHPCA 19(1). Sharing
        out the rows of norms: Korthikanti et al. 2022, arXiv:2205.05198.
    """
    *parts, num_rows, width = partial.shape
    share, rest = divmod(num_rows, axis_size)
    if rest:
        raise ValueError(f"{num_rows} rows do not divide over {axis_size} ranks")
    blocks = partial.reshape(*parts, axis_size, share, width)
    blocks = lax.all_to_all(blocks, axis_name, split_axis=len(parts), concat_axis=0)
    if residual.shape[0] == num_rows:
        first = lax.axis_index(axis_name) * share
        residual = lax.dynamic_slice_in_dim(residual, first, share)
    total, out = combine_add_rms_norm(blocks, residual, bias, gain, eps=eps, backend=backend)
    return total, lax.all_gather(out, axis_name, axis=0, tiled=True)


def scatter_experts_add_rms_norm(
    y: Activation[Array, "M Q D"],
    weights: Float32[Array, "M Q"],
    residual: Activation[Array, "R D"],
    gain: Activation[Array, " D"],
    axis_name: str,
    axis_size: int,
    *,
    eps: float,
    backend: Backend,
) -> tuple[Activation[Array, "m D"], Activation[Array, "M D"]]:
    """`combine_experts_add_rms_norm` of rows from all ranks, each rank a share of the rows.

    Call inside `shard_map`.

    Args:
        y: From `expert_mlp`: this rank's experts, and all bits zero elsewhere.
        weights: Of every row's experts.
        residual: The residual stream: all rows (R = M), or this rank's share (R = M / axis_size).
        gain: Scale of each channel.
        axis_name: Mesh axis of the ranks.
        axis_size: How many; divides the rows.
        eps: Added to the mean square.
        backend: Which implementation of the additions runs.

    Returns:
        This rank's rows of the new residual stream, and all normalised rows.

    Numerics:
        # ORDER: ranks of a row's experts left to right, as `combine_experts_add_rms_norm`.
        # ROUND: the residual stream, once.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows = y.shape[0]
    share = num_rows // axis_size
    first = lax.axis_index(axis_name) * share
    own = scatter_expert_rows(y, axis_name)
    own_weights = lax.dynamic_slice_in_dim(weights, first, share)
    if residual.shape[0] == num_rows:
        residual = lax.dynamic_slice_in_dim(residual, first, share)
    total, out = combine_experts_add_rms_norm(
        own, own_weights, residual, gain, eps=eps, backend=backend
    )
    return total, lax.all_gather(out, axis_name, axis=0, tiled=True)
