# SPDX-License-Identifier: Apache-2.0
"""The programs of a draft model: a smaller model of the same vocabulary, whose tokens are verified.

It shares slots, page tables and sampling parameters with the model that verifies: page p of one
cache holds the tokens of page p of the other. It runs by the engine's own kernels where steps are
quicker by these, and by XLA's elsewhere. Its drafts make no claim either way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from detjax.array_types import Array, Int32
from detjax.defaults import EAGLE3
from detjax.engine.running.choice_programs import Program, rows_of
from detjax.engine.running.device_arrays import (
    BY_ROW,
    PAGES_SPEC,
    Slots,
    empty,
    of_slots,
    pages_shape,
    rows_shape,
    window_place,
)
from detjax.engine.running.launch_operands import DecodeOperands, PrefillOperands, pack_choice
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.sampling.sampling import SamplingRows, choose
from detjax.models.forward_paths import FORWARD_PATHS
from detjax.models.heads.head import AnyDraftModel, DraftHead
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.loading import LoadedModel
from detjax.models.params import Params
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.parallel.distributed import gather_replicas
from detjax.parallel.mesh import DP_AXIS, TP_AXIS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class DraftState:
    """What a draft model keeps on the devices.

    A window's last draft has no entry in the cache, as no step has run it. If it is accepted, the
    next window begins with it. `position` and `token` are of the first token of the last window, or
    of the last token of a prompt; tokens behind it are in the slot's window.

    Attributes:
        pages: The cache, as `device_arrays.pages_shape` has it.
        position: int32 [S].
        token: int32 [S].
    """

    pages: Any
    position: Any
    token: Any


DRAFT_SPECS = DraftState(pages=PAGES_SPEC, position=BY_ROW, token=BY_ROW)


class DraftPrograms:
    """Describes the programs of a draft model.

    - prefill: `(params, rope tables, state, PrefillOperands) -> state`.
    - decode: `(params, rope tables, state, slots, sampling, DecodeOperands) -> (state, slots,
      result)`. It puts up to `ProgramKey.length` drafts into the window of each row.

    Attributes:
        model: The draft model, on the mesh of the model that verifies.
        state: Shapes of `DraftState`.
        specs: How it lies on the mesh.
    """

    specs = DRAFT_SPECS

    def __init__(self, model: LoadedModel, *, num_pages: int, slots: Slots, sampling: SamplingRows):
        """Describe nothing yet. `slots` and `sampling` are shapes over all replicas."""
        self.model = model
        self._slots, self._sampling = slots, sampling
        self._context = ForwardContext(
            config=model.config,
            profile=model.profile,
            backend=model.backend,
            tp=model.mesh.shape[TP_AXIS],
        )
        beats_xla = KERNELS[model.backend].steps_beat_xla
        self._forward, self._local_logits = FORWARD_PATHS["invariant" if beats_xla else "fast"]
        num_slots = slots.place.shape[0]
        self.state = DraftState(
            pages=pages_shape(model, num_pages),
            position=rows_shape(model, num_slots, jnp.int32),
            token=rows_shape(model, num_slots, jnp.int32),
        )

    def empty_state(self) -> DraftState:
        """Allocate the state."""
        return empty(self.model, self.state)

    def params_beside(self, target: Params) -> Params:
        """The weights that its programs take, whatever those of the model that verifies."""
        return self.model.params

    @property
    def traced_from(self) -> tuple:
        """What programs follow from, besides their key and what describes it."""
        pages = tuple(part.shape for part in jax.tree.leaves(self.state.pages))
        return self._context, pages, self._slots.window.shape

    def program(self, key: ProgramKey, params: dict) -> Program:
        """Describe a program for weights like `params`."""
        mesh = self.model.mesh
        kind = PrefillOperands if key.kind == "prefill" else DecodeOperands
        columns = kind.num_columns(table_len=key.table_len, length=key.length)
        packed = rows_shape(self.model, key.rows * mesh.shape[DP_AXIS], jnp.int32, columns)
        of_model = self.model.partition_specs, P(), DRAFT_SPECS
        given = params, self.model.rope_tables, self.state
        if key.kind == "prefill":
            body, operands, out_specs = self._prefill, (*given, packed), DRAFT_SPECS
            in_specs, in_place = (*of_model, BY_ROW), (2,)
        else:
            of_result = P() if jax.process_count() > 1 else BY_ROW
            body, operands = (
                partial(draft_packed, self.draft),
                (*given, self._slots, self._sampling, packed),
            )
            in_specs, in_place = (*of_model, BY_ROW, BY_ROW, BY_ROW), (2, 3)
            out_specs = DRAFT_SPECS, BY_ROW, of_result
        specs = in_specs, out_specs
        return Program.on_mesh(mesh, partial(body, key), operands, specs, in_place)

    def _prefill(self, key: ProgramKey, params, tables, state: DraftState, packed) -> DraftState:
        """Keys and values of a chunk of each row."""
        given = PrefillOperands.unpack(packed, table_len=key.table_len, length=key.length)
        step_idx = jnp.arange(key.length, dtype=jnp.int32)[None, :]
        is_token = step_idx < given.count[:, None]
        positions = jnp.where(is_token, given.start[:, None] + step_idx, -1)
        tokens = Tokens(ids=given.token_ids, positions=positions, page_table=given.page_table)
        pages, _ = self._forward(self._context, params, tables, state.pages, tokens)
        last = jnp.maximum(given.count - 1, 0)
        token = jnp.take_along_axis(given.token_ids, last[:, None], axis=1)[:, 0]
        return DraftState(
            pages=pages,
            position=state.position.at[given.slot].set(given.start + last, mode="drop"),
            token=state.token.at[given.slot].set(token, mode="drop"),
        )

    def draft(
        self,
        count: int,
        params,
        tables,
        state: DraftState,
        slots: Slots,
        sampling,
        given: DecodeOperands,
    ) -> tuple[DraftState, Slots, Int32[Array, "B T 2"]]:
        """Up to `count` drafts behind those that a window has, one after the other."""
        slot, rows = given.slot, rows_of(sampling, given.slot)
        start, num_drafts = slots.unplaced(slot)
        first = jnp.where(start < 0, -1, start + num_drafts)
        place = partial(window_place, slots.window.shape, slot)
        window = slots.window.reshape(-1)
        newest = window.at[place(num_drafts)].get(mode="fill", fill_value=0)
        ids = jnp.stack([self._token_before(state, slots, slot, first), newest], axis=1)
        is_row = first[:, None] >= 0
        positions = jnp.where(is_row, jnp.stack([first - 1, first], axis=1), -1)
        draft = partial(self._draft, params, tables, rows, given)
        pages, choice = draft(state.pages, ids, positions)
        window = window.at[place(num_drafts + 1)].set(choice[:, 0], mode="drop")
        results = jnp.zeros((len(slot), count, 2), jnp.int32).at[:, 0].set(choice)

        def next_draft(i, carry):
            pages, window, results = carry
            position = jnp.where((first < 0) | (i >= given.count), -1, first + i)
            pages, choice = draft(pages, results[:, i - 1, :1], position[:, None])
            # WHY: no such place for a row that has its drafts.
            offset = jnp.where(position < 0, slots.window.shape[1], num_drafts + i + 1)
            window = window.at[place(offset)].set(choice[:, 0], mode="drop")
            return pages, window, results.at[:, i].set(choice)

        # WHY: kernels of peers write to the exchange by address, behind XLA's back, and a loop may
        # copy what it reads.
        carry, unroll = (pages, window, results), params.get("exchange") is not None
        pages, window, results = lax.fori_loop(1, count, next_draft, carry, unroll=unroll)
        state = DraftState(
            pages=pages,
            position=state.position.at[slot].set(start, mode="drop"),
            token=state.token.at[slot].set(of_slots(slots.window, slot)[:, 0], mode="drop"),
        )
        place_of = slots.placed(slot, start, num_drafts + given.count)
        return state, Slots(window=window.reshape(slots.window.shape), place=place_of), results

    def _token_before(self, state: DraftState, slots: Slots, slot, position) -> Int32[Array, " B"]:
        """The token before `position` of each row, which is in the last window or begins it."""
        offset = position - 1 - of_slots(state.position, slot)
        drafted = slots.window.reshape(-1).at[window_place(slots.window.shape, slot, offset)]
        in_window = drafted.get(mode="fill", fill_value=0)
        return jnp.where(offset == 0, of_slots(state.token, slot), in_window)

    def _draft(self, params, tables, rows: SamplingRows, given: DecodeOperands, pages, ids, at):
        """Run new tokens at positions `at` of each row, and choose what follows the last."""
        # WHY: not a slice alone, which XLA copies by a memory node of the graph, with longer gaps.
        page_table = jnp.where(at[:, -1:] < 0, 0, given.page_table)
        tokens = Tokens(ids=ids, positions=at, page_table=page_table)
        wanted = jnp.full(len(ids), ids.shape[1] - 1, jnp.int32) if ids.shape[1] > 1 else None
        ctx = self._context
        pages, hidden = self._forward(ctx, params, tables, pages, tokens, wanted=wanted)
        logits = self._local_logits(ctx, params, hidden[:, 0])
        # The noise of the token that will be verified: where both models agree on the likely
        # tokens, they choose the same one at any temperature.
        choice = choose(
            ctx, logits, rows, at[:, -1] + 1, num_top=0, with_filters=False,
            exchange=params.get("exchange"),
        )  # fmt: skip
        return pages, pack_choice(choice)


def draft_packed(
    draft: Callable, key: ProgramKey, params, tables, state, slots: Slots, sampling, packed
) -> tuple[Any, Slots, Int32[Array, "B T 2"]]:
    """Up to `key.length` drafts of each row, by `draft` of a draft model or head."""
    given = DecodeOperands.unpack(packed, table_len=key.table_len)
    state, slots, results = draft(key.length, params, tables, state, slots, sampling, given)
    # A process reads the results of its own devices alone.
    return state, slots, gather_replicas(results) if jax.process_count() > 1 else results


def check_draft_model(draft: AnyDraftModel, model: LoadedModel, *, max_len: int) -> None:
    """Refuse a draft model that cannot draft for a model.

    Args:
        draft: The smaller model.
        model: That verifies.
        max_len: Of the engine.

    Raises:
        ValueError: If the vocabularies have different sizes, the models lie on different meshes or
            backends, their pages differ, the draft model's context is too short, or an EAGLE-3 head
            is for a model with layers of linear attention.
    """
    has_eagle = isinstance(draft, DraftHead) and draft.head_config.method == EAGLE3
    if has_eagle and model.config.linear_attention is not None:
        raise ValueError(
            "an EAGLE-3 head on a model with layers of linear attention has not been proven; draft "
            "by --speculative prompt_lookup, --mode dvr or a smaller model"
        )
    for what, of_draft, of_model in (
        ("a vocabulary", draft.config.vocab_size, model.config.vocab_size),
        ("the backend", draft.backend.value, model.backend.value),
        ("the mesh", str(draft.mesh), str(model.mesh)),
        ("cache pages", draft.profile.attention_block, model.profile.attention_block),
    ):
        if of_draft != of_model:
            raise ValueError(
                f"the draft model ({_name(draft)}) has {what} of {of_draft} and the model "
                f"({_name(model)}) of {of_model}; a draft model needs the same"
            )
    if draft.config.max_position_embeddings < max_len:
        raise ValueError(
            f"max_len={max_len} is longer than the context of the draft model ({_name(draft)}), "
            f"{draft.config.max_position_embeddings} tokens; lower max_len"
        )


def _name(model: AnyDraftModel) -> str:
    """A model in errors."""
    return model.config.family if model.folder is None else model.folder.name
