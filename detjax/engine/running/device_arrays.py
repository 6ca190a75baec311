# SPDX-License-Identifier: Apache-2.0
"""The arrays that stay on the devices from step to step: pages of the cache, slots, sampling."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Array, Int32
from detjax.compilation.kept_executables import Executable, compile_or_read
from detjax.engine.sampling.adjustments import RECENT_LEN, AdjustedSlots, record_len
from detjax.engine.sampling.sampling import SamplingRows
from detjax.models.heads.head import AnyDraftModel, DraftHead
from detjax.models.loading import LoadedModel
from detjax.models.pages import CachePages, cache_of
from detjax.models.params import padded_vocab_size
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

PAGES_SPEC = P(None, DP_AXIS, None, TP_AXIS, None, None)
HEAD_PAGES_SPEC = P(None, DP_AXIS)
"""Of a head, which every rank runs whole."""
BY_ROW = P(DP_AXIS)
LOGITS_SPEC = P(DP_AXIS, TP_AXIS)
"""Of rows of the padded vocabulary."""
ADJUSTED_SPEC = AdjustedSlots(record=BY_ROW, recent=BY_ROW, uses=LOGITS_SPEC)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """What the device knows of each running sequence, besides its sampling parameters.

    A step writes them in place, so that their addresses stay in its CUDA graph; `compile_checked`
    refuses a program that reads late what it has written.

    Attributes:
        window: int32 [S, W]: the last committed token, then the drafts that follow it.
        place: int32 [S]: position of the last committed token times W, plus how many drafts follow
            it. One number, as each array that a step writes is a launch, and so is joining two.
    """

    window: Any
    place: Any

    @classmethod
    def without_drafts(cls, window, start) -> "Slots":
        """Slots whose last committed tokens, at positions `start`, no draft follows."""
        return cls(window=window, place=start * window.shape[1])

    def unplaced(self, slot) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
        """Of the slots that rows name: (position, drafts behind it); position -1 for no slot."""
        place = self.place.at[slot].get(mode="fill", fill_value=-1)
        return place // self.window.shape[1], place % self.window.shape[1]

    def placed(self, slot, start, num_drafts=0) -> Int32[Array, " S"]:
        """`place` with these of the slots that rows name."""
        place = start * self.window.shape[1] + num_drafts
        return self.place.at[slot].set(place, mode="drop")


def rows_shape(model: LoadedModel, count: int, dtype, *tail: int) -> jax.ShapeDtypeStruct:
    """Shape of an array with a row for each of `count` of all replicas, and its sharding."""
    sharding = NamedSharding(model.mesh, BY_ROW)
    return jax.ShapeDtypeStruct((count, *tail), dtype, sharding=sharding)


def pages_shape(model: AnyDraftModel, num_pages: int, num_local_pages: int = 0) -> Any:
    """Shapes of the cache, and their sharding.

    Args:
        model: Whose cache it is.
        num_pages: Over all replicas.
        num_local_pages: The same of local layers; 0 where they have as many as the others.
    """
    config, is_head = model.config, isinstance(model, DraftHead)
    spec = HEAD_PAGES_SPEC if is_head else PAGES_SPEC
    if is_head:  # a layer of attention, whatever its model's are
        windows = (None,) * config.num_layers
        config = dataclasses.replace(config, linear_attention=None, sliding_windows=windows)
    sharding = NamedSharding(model.mesh, spec)

    def shape(
        num_layers: int, *page: int, dtype: jnp.dtype, is_local: bool = False
    ) -> jax.ShapeDtypeStruct:
        count = num_local_pages if is_local and num_local_pages else num_pages
        return jax.ShapeDtypeStruct((num_layers, count, *page), dtype, sharding=sharding)

    return cache_of(config, model.profile, num_kv_slots=model.num_kv_slots, make=shape)


def slots_shape(model: LoadedModel, num_slots: int, window_len: int) -> Slots:
    """Shapes of `num_slots` slots over all replicas, and their sharding."""
    return Slots(
        window=rows_shape(model, num_slots, jnp.int32, window_len),
        place=rows_shape(model, num_slots, jnp.int32),
    )


def logits_shape(model: LoadedModel, count: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """Shape of a number for each token of the padded vocabulary in `count` rows of all replicas."""
    width = padded_vocab_size(
        model.config.vocab_size,
        tp=model.mesh.shape[TP_AXIS],
        vocab_block=model.profile.vocab_block,
    )
    sharding = NamedSharding(model.mesh, LOGITS_SPEC)
    return jax.ShapeDtypeStruct((count, width), dtype, sharding=sharding)


def adjusted_shape(model: LoadedModel, num_slots: int) -> AdjustedSlots:
    """Shapes of what is kept of `num_slots` adjusted sequences over all replicas."""
    return AdjustedSlots(
        record=rows_shape(model, num_slots, jnp.int32, record_len(model.config.vocab_size)),
        recent=rows_shape(model, num_slots, jnp.int32, RECENT_LEN),
        uses=logits_shape(model, num_slots, jnp.int32),
    )


def of_slots(state, slot):
    """What the slots that rows name hold; zeros where there is no such slot."""
    return state.at[slot].get(mode="fill", fill_value=0)


def window_place(shape: tuple[int, int], slot, offset) -> Int32[Array, "..."]:
    """Where [slot, offset] is in a flat window, and past its end where there is no such place.

    # WHY: XLA checks two indices in a launch of its own, and one where it is used.
    """
    num_slots, length = shape
    is_place = (slot >= 0) & (slot < num_slots) & (offset < length)
    return jnp.where(is_place, slot * length + offset, num_slots * length)


def sampling_shape(model: LoadedModel, count: int) -> SamplingRows:
    """Shapes of the sampling parameters of `count` rows or slots, and their sharding."""
    return SamplingRows(
        temperature=rows_shape(model, count, jnp.float32),
        top_k=rows_shape(model, count, jnp.int32),
        top_p=rows_shape(model, count, jnp.float32),
        min_p=rows_shape(model, count, jnp.float32),
        seed_low=rows_shape(model, count, jnp.uint32),
        seed_high=rows_shape(model, count, jnp.uint32),
        sequence_idx=rows_shape(model, count, jnp.uint32),
    )


def empty(model: LoadedModel, shapes: Any) -> Any:
    """Allocate zeros of these shapes, each shard on its device."""
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, _empty(tuple(leaves), model.mesh)())


@functools.cache
def _empty(shapes: tuple[jax.ShapeDtypeStruct, ...], mesh: Mesh) -> Callable[[], list]:
    """Compiled once for all engines of these sizes."""
    zeros = jax.jit(
        lambda: [jnp.zeros(shape.shape, shape.dtype) for shape in shapes],
        out_shardings=[shape.sharding for shape in shapes],
    )
    program = Executable(
        options={}, operands=shapes, devices=tuple(mesh.devices.flat), root=__name__,
        traced_from=("zeros", repr(mesh)),
    )  # fmt: skip
    return compile_or_read(zeros.lower, program)


def empty_pages(model: LoadedModel, num_pages: int, num_local_pages: int = 0) -> CachePages:
    """Allocate the cache: `pages_shape`."""
    return empty(model, pages_shape(model, num_pages, num_local_pages))
