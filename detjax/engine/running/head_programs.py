# SPDX-License-Identifier: Apache-2.0
"""The programs of a head, which drafts from hidden states of the model that verifies.

Programs of that model leave the hidden states that the head reads. Entry p of the head's cache is
of the hidden states of position p and the token behind it; it lies on the page of position p. As
with a draft model, slots, page tables and sampling parameters are those of the model that verifies.

Ranks that share the model's layers have its hidden states whole, and each runs all of the head. The
drafts of rank 0 count: bits of the head make no claim, and a window must be the same on all ranks.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from detjax.array_types import Activation, Array, Int32
from detjax.engine.running.choice_programs import Program, rows_of
from detjax.engine.running.device_arrays import (
    BY_ROW,
    HEAD_PAGES_SPEC,
    Slots,
    empty,
    of_slots,
    pages_shape,
    rows_shape,
    window_place,
)
from detjax.engine.running.draft_programs import draft_packed
from detjax.engine.running.launch_operands import DecodeOperands, PrefillOperands, pack_choice
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.sampling.sampling import SamplingRows, choose_among, choose_plain
from detjax.models.heads.head import (
    DraftHead,
    draft_logits,
    head_pass,
    read_features,
    write_keys,
)
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.loading import LoadedModel
from detjax.models.params import Params
from detjax.parallel.mesh import DP_AXIS, TP_AXIS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Hidden states of the newest positions of each slot, from which nothing was drafted yet.

    Those of a verified window are of the last committed token and all drafts. How many of them
    count follows from where the next window begins.

    Attributes:
        states: Of those layers side by side, [S, W, X].
        position: Of the first of them, int32 [S].
    """

    states: Any
    position: Any

    def with_windows(self, slot, start, states: Activation[Array, "B T X"]) -> "Features":
        """Put those of windows that begin at positions `start`; T may be less than W."""
        return Features(
            states=self.states.at[slot, : states.shape[1]].set(states, mode="drop"),
            position=self.position.at[slot].set(start, mode="drop"),
        )


MOST_UNROLLED = 8
"""Drafts of a window that a GPU makes without a loop.

Positions, rotations and page tables of all are made at once then, and the launches are one graph.
Each draft is compiled once more.
"""


FEATURES_SPECS = Features(states=BY_ROW, position=BY_ROW)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class HeadState:
    """What a head keeps on the devices.

    Attributes:
        pages: Its keys and values, [1, N, 2, K, P, C].
        features: What it drafts from.
    """

    pages: Any
    features: Features


HEAD_SPECS = HeadState(pages=HEAD_PAGES_SPEC, features=FEATURES_SPECS)


class HeadPrograms:
    """Describes the programs of a head.

    - prefill: `(params, rope tables, state, hidden states, PrefillOperands) -> state`. Token i of
      a row is the one behind hidden state i. The hidden state behind the last of them, where a slot
      is named, is what the first window is drafted from.
    - decode: `(params, rope tables, state, slots, sampling, DecodeOperands) -> (state, slots,
      result)`. It runs what the last window committed, and puts up to `ProgramKey.length` drafts
      into the empty window of each row.

    Attributes:
        model: The head.
        state: Shapes of `HeadState`.
        specs: How it lies on the mesh.
    """

    specs = HEAD_SPECS

    def __init__(
        self,
        head: DraftHead,
        model: LoadedModel,
        *,
        num_pages: int,
        slots: Slots,
        sampling: SamplingRows,
        candidates: Callable,
    ):
        """Describe nothing yet.

        Args:
            head: That drafts.
            model: That verifies.
            num_pages: Cache pages over all replicas.
            slots: Shapes over all replicas.
            sampling: Shapes over all replicas.
            candidates: Replaces drafts, as `ProgramCache` has it.
        """
        self._candidates = candidates
        self.model, self._target = head, model
        self._slots, self._sampling = slots, sampling
        shared: dict = {"profile": model.profile, "backend": model.backend, "tp": 1}
        self._context = ForwardContext(config=head.config, **shared)
        num_slots, window_len = slots.window.shape
        width = head.head_config.features_width
        dtype = model.profile.activation_dtype
        self.state = HeadState(
            pages=pages_shape(head, num_pages),
            features=Features(
                states=rows_shape(model, num_slots, dtype, window_len, width),
                position=rows_shape(model, num_slots, jnp.int32),
            ),
        )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the model whose inputs its programs leave."""
        return self.model.head_config.feature_layers

    def empty_state(self) -> HeadState:
        """Allocate the state."""
        return empty(self._target, self.state)

    def params_beside(self, target: Params) -> Params:
        """The weights that its programs take, beside those of the model."""
        return self.model.params_beside(target)

    @property
    def traced_from(self) -> tuple:
        """What programs follow from, besides their key and what describes it."""
        head = self.model.head_config
        return self._context, head, self.state.pages.shape, self._slots.window.shape

    def program(self, key: ProgramKey, params: dict) -> Program:
        """Describe a program for weights like `params`."""
        model, mesh = self._target, self._target.mesh
        kind = PrefillOperands if key.kind == "prefill" else DecodeOperands
        columns = kind.num_columns(table_len=key.table_len, length=key.length)
        rows = key.rows * mesh.shape[DP_AXIS]
        packed = rows_shape(model, rows, jnp.int32, columns)
        of_model = self.model.partition_specs, P(), HEAD_SPECS
        given = params, self.model.rope_tables, self.state
        if key.kind == "prefill":
            width = self.state.features.states.shape[-1]
            dtype = model.profile.activation_dtype
            states = rows_shape(model, rows, dtype, key.length, width)
            body, operands, out_specs = self._prefill, (*given, states, packed), HEAD_SPECS
            in_specs, in_place = (*of_model, BY_ROW, BY_ROW), (2,)
        else:
            of_result = P() if jax.process_count() > 1 else BY_ROW
            body, operands = (
                partial(draft_packed, self.draft),
                (*given, self._slots, self._sampling, packed),
            )
            in_specs, in_place = (*of_model, BY_ROW, BY_ROW, BY_ROW), (2, 3)
            out_specs = HEAD_SPECS, BY_ROW, of_result
        specs = in_specs, out_specs
        return Program.on_mesh(mesh, partial(body, key), operands, specs, in_place)

    def _prefill(
        self, key: ProgramKey, params, tables, state: HeadState, states, packed
    ) -> HeadState:
        """Keys and values of a chunk of each row, and what its last token leaves."""
        given = PrefillOperands.unpack(packed, table_len=key.table_len, length=key.length)
        step_idx = jnp.arange(key.length, dtype=jnp.int32)[None, :]
        is_token = step_idx < given.count[:, None]
        positions = jnp.where(is_token, given.start[:, None] + step_idx, -1)
        tokens = Tokens(ids=given.token_ids, positions=positions, page_table=given.page_table)
        hidden = self._read(params, states)
        head = self.model.head_config
        pages = write_keys(self._context, head, params, tables, state.pages, tokens, hidden)
        last = jnp.take_along_axis(states, given.count[:, None, None], axis=1)[:, 0]
        old = state.features
        features = Features(
            states=old.states.at[given.slot, 0].set(last, mode="drop"),
            position=old.position.at[given.slot].set(given.start + given.count, mode="drop"),
        )
        return HeadState(pages=pages, features=features)

    def draft(
        self,
        count: int,
        params,
        tables,
        state: HeadState,
        slots: Slots,
        sampling,
        given: DecodeOperands,
    ) -> tuple[HeadState, Slots, Int32[Array, "B T 2"]]:
        """Up to `count` drafts of an empty window, one after the other."""
        slot, rows = given.slot, rows_of(sampling, given.slot)
        start, _ = slots.unplaced(slot)
        tokens, hidden, last = self._committed(state.features, slots, slot, start, params)
        draft = partial(self._draft, params, tables, rows, given)
        pages, hidden, choice = draft(state.pages, tokens, hidden, last, start + 1)
        results = jnp.zeros((len(slot), count, 2), jnp.int32).at[:, 0].set(choice)

        def next_draft(i, carry):
            pages, results, hidden = carry
            is_row = (start >= 0) & (i < given.count)
            ids, at = results[:, i - 1, :1], jnp.where(is_row, start - 1 + i, -1)
            pages, hidden, choice = draft(
                pages, (ids, at[:, None]), hidden, jnp.zeros_like(slot), start + 1 + i
            )
            return pages, results.at[:, i].set(choice), hidden

        carry = pages, results, hidden
        unroll = count <= MOST_UNROLLED and self._context.backend.platform == "gpu"
        pages, results, _ = lax.fori_loop(1, count, next_draft, carry, unroll=unroll)
        results = of_first_rank(results)
        slots = Slots(
            window=_with_drafts(slots.window, slot, results[..., 0], given.count),
            place=slots.placed(slot, start, given.count),
        )
        return HeadState(pages=pages, features=state.features), slots, results

    def _read(self, params, states: Activation[Array, "B T X"]) -> Activation[Array, "M D"]:
        """One hidden state of those of each token."""
        rows = states.reshape(-1, states.shape[-1])
        return read_features(self._context, self.model.head_config, params, rows)

    def _committed(self, features: Features, slots: Slots, slot, start, params):
        """What the last window committed: tokens and their positions, hidden states, the last."""
        first, window = of_slots(features.position, slot), of_slots(slots.window, slot)
        count = start - first
        step_idx = jnp.arange(window.shape[1], dtype=jnp.int32)[None, :]
        # Behind the drafts that were accepted comes the token that begins the next window.
        ids = jnp.where(step_idx == count[:, None] - 1, window[:, :1], jnp.roll(window, -1, axis=1))
        is_token = (start[:, None] >= 0) & (step_idx < count[:, None])
        positions = jnp.where(is_token, first[:, None] + step_idx, -1)
        states = of_slots(features.states, slot)
        hidden = self._read(params, states)
        return (ids, positions), hidden, jnp.clip(count - 1, 0, window.shape[1] - 1)

    def _draft(
        self,
        params,
        tables,
        rows: SamplingRows,
        given: DecodeOperands,
        pages,
        new: tuple[Int32[Array, "B T"], Int32[Array, "B T"]],
        hidden: Activation[Array, "M D"],
        wanted,
        position: Int32[Array, " B"],
    ):
        """Run new tokens and choose the one at `position`: (cache, hidden state, choice)."""
        ids, at = new
        # WHY: not a slice alone, which XLA copies by a memory node of the graph, with longer gaps.
        page_table = jnp.where(at[:, :1] < 0, 0, given.page_table)
        tokens = Tokens(ids=ids, positions=at, page_table=page_table)
        ctx, head = self._context, self.model.head_config
        pages, out, hidden = head_pass(ctx, head, params, tables, pages, tokens, hidden, wanted)
        logits = draft_logits(ctx, params, out)
        # The noise of the token that will be verified, as a draft model has it.
        if "draft_ids" in params:
            choice = choose_among(params["draft_ids"], logits, rows, position)
        else:
            choice = choose_plain(ctx, logits, rows, position)
        token_ids = self._candidates(choice.token_ids, position)
        return pages, hidden, pack_choice(dataclasses.replace(choice, token_ids=token_ids))


def of_first_rank(results: Int32[Array, "B T 2"]) -> Int32[Array, "B T 2"]:
    """What rank 0 of "tp" has, on every rank."""
    return lax.all_gather(results, TP_AXIS)[0] if lax.axis_size(TP_AXIS) > 1 else results


def _with_drafts(window: Int32[Array, "X Y"], slot, drafts: Int32[Array, "B T"], count):
    """The windows of slots, with drafts behind their first tokens."""
    offset = jnp.arange(1, drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
    # WHY: no such place for a row that has its drafts.
    offset = jnp.where(offset <= jnp.maximum(count, 1)[:, None], offset, window.shape[1])
    shape = window.shape[0], window.shape[1]
    place = window_place(shape, slot[:, None], offset)
    return window.reshape(-1).at[place].set(drafts, mode="drop").reshape(window.shape)
