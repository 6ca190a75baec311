# SPDX-License-Identifier: Apache-2.0
"""The compiled steps over one donated cache: prefill, decode and verify.

Each is the model's forward pass on rows of tokens, then the choice of tokens, which stay on the
device: a slot holds a sequence's newest tokens and its place, so the next step can be launched
before the result of the last one is read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Activation, Array, Int32
from detjax.donation import compile_checked
from detjax.models.decoder import last_hidden
from detjax.models.fast import quantised_specs
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.loading import LoadedModel
from detjax.models.paths import PATHS, Kernels
from detjax.parallel.distributed import gather_replicas
from detjax.parallel.mesh import DP_AXIS, TP_AXIS
from detjax.serving.sampling import Choice, SamplingRows, choose
from detjax.xla_flags import EXACT_OPTIONS, FAST_OPTIONS

PAGES_SPEC = P(None, DP_AXIS, None, TP_AXIS, None, None)
BY_ROW = P(DP_AXIS)

ProgramKind = Literal["prefill", "decode", "verify"]

Candidates = Callable[[Int32[Array, " B"], Int32[Array, " B"]], Int32[Array, " B"]]
"""From the drafts of a step and their positions, the drafts to use instead."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """What the device knows of each running sequence, besides its sampling parameters.

    A step returns new slots and leaves the old ones alone: they are small, and what reads them
    late in the step must not find what the step has written.

    Attributes:
        window: int32 [S, W]: the last committed token, then the drafts that follow it.
        start: int32 [S], position of the last committed token.
    """

    window: Any
    start: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLayout:
    """Columns of the int32 array that the host gives a step, a row each: table, token ids, head.

    The head is the slot and two numbers of the step's kind.

    # WHY: parts begin at multiples of 64 columns, so that a part of a single row is an operand of a
    # kernel as it lies: XLA may pass its address, which has to be a multiple of 256 bytes.

    Attributes:
        table_len: Pages of a row.
        num_ids: Token ids of a row.
    """

    table_len: int
    num_ids: int

    @property
    def num_columns(self) -> int:
        """Of the whole array."""
        return self._head_at + 3

    @property
    def _ids_at(self) -> int:
        return -(-self.table_len // 64) * 64

    @property
    def _head_at(self) -> int:
        return self._ids_at + -(-self.num_ids // 64) * 64

    def padding(self, count: int, no_slot: int) -> np.ndarray:
        """Rows without a slot, a page or a token."""
        host = np.zeros((count, self.num_columns), np.int32)
        self.head(host)[:, 0] = no_slot
        return host

    def table(self, host):
        """The page table, [B, table_len]; a view of a NumPy array."""
        return host[:, : self.table_len]

    def ids(self, host):
        """The token ids, [B, num_ids]; a view of a NumPy array."""
        return host[:, self._ids_at : self._ids_at + self.num_ids]

    def head(self, host):
        """The slot and two numbers, [B, 3]; a view of a NumPy array."""
        return host[:, self._head_at :]


def pages_shape(model: LoadedModel, num_pages: int) -> jax.ShapeDtypeStruct:
    """Shape of the cache with `num_pages` pages over all replicas, and its sharding."""
    config, profile = model.config, model.profile
    shape = (
        config.num_layers,
        num_pages,
        2,
        model.num_kv_slots,
        profile.attention_block,
        config.head_dim,
    )
    sharding = NamedSharding(model.mesh, PAGES_SPEC)
    return jax.ShapeDtypeStruct(shape, profile.activation_dtype, sharding=sharding)


def slots_shape(model: LoadedModel, num_slots: int, window_len: int) -> Slots:
    """Shapes of `num_slots` slots over all replicas, and their sharding."""
    return Slots(
        window=_by_row(model, num_slots, jnp.int32, window_len),
        start=_by_row(model, num_slots, jnp.int32),
    )


def empty(model: LoadedModel, shapes: Any) -> Any:
    """Allocate zeros of these shapes, each shard on its device."""
    make = jax.jit(
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
        out_shardings=jax.tree.map(lambda s: s.sharding, shapes),
    )
    return make()


def empty_pages(model: LoadedModel, num_pages: int) -> Activation[Array, "L N 2 K P C"]:
    """Allocate the cache."""
    return empty(model, pages_shape(model, num_pages))


def forward_context(model: LoadedModel) -> ForwardContext:
    """What the layers need to know of a model besides its weights."""
    return ForwardContext(
        config=model.config,
        profile=model.profile,
        backend=model.backend,
        tp=model.mesh.shape[TP_AXIS],
    )


def _choose_last(
    ctx: ForwardContext, mode: Kernels, params, tables, pages, tokens, rows, **variant
):
    """Run tokens and choose the one that follows the last of each row."""
    forward, local_logits = PATHS[mode]
    pages, hidden = forward(ctx, params, tables, pages, tokens)
    last: Int32[Array, " B"] = jnp.argmax(tokens.positions, axis=1).astype(jnp.int32)
    position = jnp.max(tokens.positions, axis=1)
    logits = local_logits(ctx, params, last_hidden(hidden, last))
    return pages, choose(ctx, logits, rows, position + 1, **variant), position


def _by_row(model: LoadedModel, count: int, dtype, *tail: int) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(model.mesh, BY_ROW)
    return jax.ShapeDtypeStruct((count, *tail), dtype, sharding=sharding)


def sampling_shape(model: LoadedModel, count: int) -> SamplingRows:
    """Shapes of the sampling parameters of `count` rows or slots, and their sharding."""
    return SamplingRows(
        temperature=_by_row(model, count, jnp.float32),
        top_k=_by_row(model, count, jnp.int32),
        top_p=_by_row(model, count, jnp.float32),
        min_p=_by_row(model, count, jnp.float32),
        seed_low=_by_row(model, count, jnp.uint32),
        seed_high=_by_row(model, count, jnp.uint32),
        sequence_idx=_by_row(model, count, jnp.uint32),
    )


# ------------------------------------------------------------------------------- the engine's steps


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramKey:
    """Which program a launch runs.

    Attributes:
        kind: What it does.
        rows: Of each replica.
        length: Tokens a row: a prefill's chunk, a verification's window, or those that a row may
            decode in one launch.
        mode: Which kernels.
        table_len: Pages of the longest sequence that it takes. Changes how work is spread, and no
            bit.
        weights: "full", or the name of the 8-bit dtype that a `fast` step's weights have.
        num_top: How many of the most likely tokens it reports.
        with_filters: Whether a row has a top-k, top-p or min-p.
    """

    kind: ProgramKind
    rows: int
    length: int
    table_len: int
    mode: Kernels
    weights: str
    num_top: int
    with_filters: bool

    @property
    def name(self) -> str:
        """For people and traces."""
        how = f" {self.mode}" + ("" if self.weights == "full" else f" {self.weights}")
        name = f"{self.kind}{how} {self.rows}x{self.length}"
        return name if self.kind == "prefill" else f"{name} to {self.table_len} pages"

    @property
    def layout(self) -> HostLayout:
        """Columns of its host array."""
        return HostLayout(
            table_len=self.table_len, num_ids=0 if self.kind == "decode" else self.length
        )


def keep_candidates(token_ids: Int32[Array, " B"], positions: Int32[Array, " B"]):
    """Use drafts as they are."""
    return token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSizes:
    """Sizes that every program of an engine is compiled for.

    Attributes:
        num_pages: Cache pages over all replicas.
        num_slots: Slots over all replicas.
        window_len: Tokens of a verified window.
    """

    num_pages: int
    num_slots: int
    window_len: int


class ProgramCache:
    """The engine's programs for one model and one size of cache, compiled when first wanted.

    Every program takes `(params, rope tables, pages, slots, sampling, *host arrays)`, of which it
    donates the pages alone, and returns `(pages, slots, result)`, a prefill `(pages, slots,
    sampling, result)`; the result is int32, one row each (`unpack` reads it). Engines of the same
    sizes may share them.

    Raises:
        UnsafeProgramError: From `get`, if the compiler made a program that reads the cache after
            it was written over, or a kernel operand that is not aligned.
    """

    def __init__(
        self, model: LoadedModel, sizes: ProgramSizes, *, candidates: Candidates = keep_candidates
    ):
        """Compile nothing yet.

        Args:
            model: On its mesh.
            sizes: Of the engine.
            candidates: Replaces drafts, for tests of disagreement; traced into the decode step.
        """
        self.sizes = sizes
        self._model = model
        self._recipe = forward_context(model)
        self._pages = pages_shape(model, sizes.num_pages)
        self._slots = slots_shape(model, sizes.num_slots, sizes.window_len)
        self._sampling = sampling_shape(model, sizes.num_slots)
        self._candidates = candidates
        self._programs: dict[ProgramKey, Callable] = {}

    def __contains__(self, step: ProgramKey) -> bool:
        """Whether a step is compiled."""
        return step in self._programs

    def __iter__(self) -> Iterator[ProgramKey]:
        """The steps that are compiled."""
        return iter(self._programs)

    def get(self, step: ProgramKey, params: dict) -> Callable:
        """Return the program of a step, compiled if need be for weights like `params`."""
        if step not in self._programs:
            self._programs[step] = self._compile(step, params)
        return self._programs[step]

    def is_for(self, model: LoadedModel) -> bool:
        """Whether the programs are those of this model, with these weights' shapes and mesh."""
        return model is self._model

    def function(self, step: ProgramKey) -> Callable:
        """The step as a function of whole arrays, ready for `jax.jit`."""
        body = {"prefill": self._prefill, "decode": self._decode, "verify": self._verify}[step.kind]

        has_peers = jax.process_count() > 1

        def local_step(params, tables, pages, slots, sampling, *host):
            *state, result = body(step, params, tables, pages, slots, sampling, *host)
            # A process reads the results of its own devices alone.
            return *state, jax.tree.map(gather_replicas, result) if has_peers else result

        num_host = len(self._host_shapes(step))
        of_params = self._model.partition_specs
        if step.weights != "full":
            of_params = quantised_specs(of_params)
        of_state = [BY_ROW] * (2 if step.kind == "prefill" else 1)
        return jax.shard_map(
            local_step,
            mesh=self._model.mesh,
            in_specs=(of_params, P(), PAGES_SPEC, BY_ROW, BY_ROW, *[BY_ROW] * num_host),
            out_specs=(PAGES_SPEC, *of_state, P() if has_peers else BY_ROW),
            check_vma=False,
        )

    def operands(self, step: ProgramKey, params: dict) -> tuple:
        """Shapes of a step's operands."""
        tables = self._model.rope_tables
        state = self._pages, self._slots, self._sampling
        return params, tables, *state, *self._host_shapes(step)

    def _compile(self, step: ProgramKey, params: dict) -> Callable:
        jitted = jax.jit(self.function(step), donate_argnums=2)
        options = FAST_OPTIONS if step.mode == "fast" else EXACT_OPTIONS
        return compile_checked(jitted.lower(*self.operands(step, params)), options)

    def _host_shapes(self, step: ProgramKey) -> tuple:
        rows = step.rows * self._model.mesh.shape[DP_AXIS]
        host = _by_row(self._model, rows, jnp.int32, step.layout.num_columns)
        return (host, sampling_shape(self._model, rows)) if step.kind == "prefill" else (host,)

    def _prefill(self, step, params, tables, pages, slots, sampling, host, rows: SamplingRows):
        """A chunk of each row; `slot` is out of range where the chosen token is not wanted."""
        slot, start, count = step.layout.head(host).T
        page_table, ids = step.layout.table(host), step.layout.ids(host)
        step_idx = jnp.arange(step.length, dtype=jnp.int32)[None, :]
        positions = jnp.where(step_idx < count[:, None], start[:, None] + step_idx, -1)
        tokens = Tokens(ids=ids, positions=positions, page_table=page_table)
        pages, choice, last = _choose_last(
            self._recipe, step.mode, params, tables, pages, tokens, rows, **_variant(step)
        )
        put = {"mode": "drop", "unique_indices": False}
        slots = Slots(
            window=slots.window.at[slot, 0].set(choice.token_ids, **put),
            start=slots.start.at[slot].set(last + 1, **put),
        )
        sampling = jax.tree.map(lambda old, new: old.at[slot].set(new, **put), sampling, rows)
        return pages, slots, sampling, _pack(choice)

    def _decode(self, step, params, tables, pages, slots: Slots, sampling, host):
        """A token of each row, or up to `step.length`, one after the other.

        A row says its slot, where in the window its drafts begin (-1: its tokens are committed) and
        how many tokens it wants.
        """
        slot, offset, count = step.layout.head(host).T
        page_table = step.layout.table(host)
        if step.length == 1:
            rows = slot, offset, page_table
            return self._decode_one(step, params, tables, pages, slots, sampling, rows)
        packed = jnp.zeros((len(host), step.length, 2 + 2 * step.num_top), jnp.int32)

        def one_token(i, carry):
            pages, slots, packed = carry
            # A row that has its tokens is padding.
            rows = (
                jnp.where(i < count, slot, slots.start.shape[0]),
                jnp.where(offset < 0, offset, offset + i),
                page_table,
            )
            pages, slots, choice = self._decode_one(
                step, params, tables, pages, slots, sampling, rows
            )
            return pages, slots, packed.at[:, i].set(choice)

        return lax.fori_loop(0, step.length, one_token, (pages, slots, packed))

    def _decode_one(self, step, params, tables, pages, slots: Slots, sampling, rows):
        """A token of each row: committed, or put behind the drafts before it."""
        slot, offset, page_table = rows
        is_draft = (offset >= 0).astype(jnp.int32)
        offset = jnp.maximum(offset, 0)
        ids = slots.window.at[slot, offset].get(mode="fill", fill_value=0)
        start = slots.start.at[slot].get(mode="fill", fill_value=-1)
        position = jnp.where(start < 0, -1, start + offset)
        tokens = Tokens(ids=ids[:, None], positions=position[:, None], page_table=page_table)
        pages, choice, _ = _choose_last(
            self._recipe,
            step.mode,
            params,
            tables,
            pages,
            tokens,
            _rows_of(sampling, slot),
            **_variant(step),
        )
        drafts = self._candidates(choice.token_ids, position + 1)
        token_ids = jnp.where(is_draft == 1, drafts, choice.token_ids)
        slots = Slots(
            window=slots.window.at[slot, offset + is_draft].set(token_ids, mode="drop"),
            start=slots.start.at[slot].set(start + 1 - is_draft, mode="drop"),
        )
        choice = Choice(
            token_ids=token_ids,
            logprobs=choice.logprobs,
            top_ids=choice.top_ids,
            top_logprobs=choice.top_logprobs,
        )
        return pages, slots, _pack(choice)

    def _verify(self, step, params, tables, pages, slots: Slots, sampling, host):
        """The canonical choice at every position of each window, and how far the drafts agree.

        Runs the last committed token and the drafts as one row, which writes their keys and values
        over those of the draft steps. Choice i is of the position that draft i claims; the drafts
        before the first that disagrees are committed, and the choice made there.
        """
        slot, num_drafts, is_given = step.layout.head(host).T
        page_table, given = step.layout.table(host), step.layout.ids(host)
        length = step.length
        on_device = slots.window.at[slot].get(mode="fill", fill_value=0)
        drafts = jnp.where(is_given[:, None] == 1, given, on_device)[:, 1:]
        ids = jnp.concatenate([on_device[:, :1], drafts], axis=1)
        start = slots.start.at[slot].get(mode="fill", fill_value=-1)
        step_idx = jnp.arange(length, dtype=jnp.int32)[None, :]
        is_token = (start[:, None] >= 0) & (step_idx <= num_drafts[:, None])
        positions = jnp.where(is_token, start[:, None] + step_idx, -1)
        tokens = Tokens(ids=ids, positions=positions, page_table=page_table)
        forward, local_logits = PATHS[step.mode]
        pages, hidden = forward(self._recipe, params, tables, pages, tokens)
        logits = local_logits(self._recipe, params, hidden.reshape(-1, hidden.shape[-1]))
        rows = jax.tree.map(lambda x: jnp.repeat(x, length), _rows_of(sampling, slot))
        choice = choose(self._recipe, logits, rows, positions.reshape(-1) + 1, **_variant(step))
        chosen = choice.token_ids.reshape(-1, length)

        is_wrong = (chosen[:, :-1] != drafts) | (step_idx[:, :-1] >= num_drafts[:, None])
        is_wrong = jnp.pad(is_wrong, ((0, 0), (0, 1)), constant_values=True)
        num_right = jnp.argmax(is_wrong, axis=1).astype(jnp.int32)
        last = jnp.take_along_axis(chosen, num_right[:, None], axis=1)[:, 0]
        slots = Slots(
            window=slots.window.at[slot, 0].set(last, mode="drop"),
            start=slots.start.at[slot].set(start + num_right + 1, mode="drop"),
        )
        counts = jnp.broadcast_to(num_right[:, None] + 1, chosen.shape)[..., None]
        packed = _pack(choice).reshape(*chosen.shape, -1)
        return pages, slots, jnp.concatenate([packed, counts], axis=-1)


def _variant(step: ProgramKey) -> dict[str, Any]:
    return {"num_top": step.num_top, "with_filters": step.with_filters}


def _rows_of(sampling: SamplingRows, slot) -> SamplingRows:
    """The parameters of the slots that rows name."""
    return jax.tree.map(lambda x: x.at[slot].get(mode="fill", fill_value=0), sampling)


def _pack(choice: Choice) -> Int32[Array, "B n"]:
    """One array for the host to read: token ids, and the bits of logprobs."""
    as_int = lax.bitcast_convert_type
    return jnp.concatenate(
        [
            choice.token_ids[:, None],
            as_int(choice.logprobs, jnp.int32)[:, None],
            choice.top_ids,
            as_int(choice.top_logprobs, jnp.int32),
        ],
        axis=1,
    )


def unpack(packed: np.ndarray, num_top: int) -> Choice:
    """Read the result of a step on the host; any leading axes."""
    return Choice(
        token_ids=packed[..., 0],
        logprobs=packed[..., 1].view(np.float32),
        top_ids=packed[..., 2 : 2 + num_top],
        top_logprobs=np.ascontiguousarray(packed[..., 2 + num_top : 2 + 2 * num_top]).view(
            np.float32
        ),
    )
