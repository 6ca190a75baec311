# SPDX-License-Identifier: Apache-2.0
"""The compiled steps over one donated cache: prefill, decode and verify.

Each is the model's forward pass on rows of tokens, then the choice of tokens for rows that ask for
no more than a temperature (`choice_programs` has the rest). Tokens stay on the device: a slot holds
a sequence's newest tokens and its place, so the next step can be launched before the result of the
last one is read.
"""

import dataclasses
import threading
from collections import abc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from detjax.array_types import Array, Int32
from detjax.compilation.kept_executables import Executable, compile_or_read, is_kept
from detjax.compilation.lowered_kernels import lower
from detjax.compilation.xla_flags import EXACT_OPTIONS, FAST_OPTIONS
from detjax.engine.config import DRAFTS_OF_OTHERS, ProgramSizes
from detjax.engine.running.choice_programs import (
    ChoicePrograms,
    Program,
    commit_window,
    drafts_of,
    rows_of,
)
from detjax.engine.running.device_arrays import (
    BY_ROW,
    LOGITS_SPEC,
    PAGES_SPEC,
    Slots,
    logits_shape,
    of_slots,
    pages_shape,
    rows_shape,
    sampling_shape,
    slots_shape,
    window_place,
)
from detjax.engine.running.draft_programs import DraftPrograms
from detjax.engine.running.head_programs import FEATURES_SPECS, Features, HeadPrograms, HeadState
from detjax.engine.running.launch_operands import (
    DecodeOperands,
    PrefillOperands,
    VerifyOperands,
    WindowsOperands,
    extend_live_range,
    pack_choice,
    pack_verified,
    sequence_slot,
)
from detjax.engine.running.program_key import AnyKey, ProgramKey, ScoreKey
from detjax.engine.sampling.sampling import SamplingRows, choose
from detjax.models.adapters.program import adapters_of
from detjax.models.decoder import last_hidden
from detjax.models.fast import quantised_specs
from detjax.models.forward_paths import FORWARD_PATHS, KernelMode
from detjax.models.heads.head import AnyDraftModel, DraftHead
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.loading import LoadedModel
from detjax.models.taps import FeatureTaps
from detjax.parallel.distributed import gather_replicas
from detjax.parallel.exchange import modules_of
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

_OPERANDS = {
    "prefill": PrefillOperands,
    "decode": DecodeOperands,
    "verify": VerifyOperands,
    "windows": WindowsOperands,
}

DRAFTS = "drafts"
"""Of params of a program of several windows: the weights of the draft model or head."""

Candidates = Callable[[Int32[Array, " B"], Int32[Array, " B"]], Int32[Array, " B"]]
"""From the drafts of a step and their positions, the drafts to use instead."""


def forward_context(model: LoadedModel) -> ForwardContext:
    """What the layers need to know of a model besides its weights."""
    return ForwardContext(
        config=model.config,
        profile=model.profile,
        backend=model.backend,
        tp=model.mesh.shape[TP_AXIS],
    )


def _choose_last(
    ctx: ForwardContext,
    mode: KernelMode,
    params,
    tables,
    kv_cache,
    tokens,
    rows,
    *,
    wants_all: bool,
):
    """Run tokens and choose the one that follows the last of each row.

    Also returns the hidden states of every token, or of the last alone, its position, and the
    logits behind it.
    """
    forward, local_logits = FORWARD_PATHS[mode]
    last: Int32[Array, " B"] = jnp.argmax(tokens.positions, axis=1).astype(jnp.int32)
    position = jnp.max(tokens.positions, axis=1)
    if wants_all or tokens.ids.shape[1] == 1:
        kv_cache, hidden = forward(ctx, params, tables, kv_cache, tokens)
        # WHY: XLA would copy the rows of one token each, in a launch of their own.
        of_last = hidden[:, 0] if tokens.ids.shape[1] == 1 else last_hidden(hidden, last)
    else:
        kv_cache, hidden = forward(ctx, params, tables, kv_cache, tokens, wanted=last)
        of_last = hidden[:, 0]
    logits = local_logits(ctx, params, of_last)
    choice = choose_plain(ctx, params, logits, rows, position + 1)
    return kv_cache, hidden, choice, position, logits


def choose_plain(ctx: ForwardContext, params, logits, rows: SamplingRows, positions):
    """Choose for rows that ask for no more than a temperature."""
    exchange = params.get("exchange")
    return choose(ctx, logits, rows, positions, num_top=0, with_filters=False, exchange=exchange)


def in_place(key: ProgramKey) -> tuple[int, ...]:
    """Which arguments a program donates: what it returns and was given."""
    of_logits = (5,) if key.logit_rows else ()
    if key.kind == "prefill":
        return (2, 3, 4, *of_logits)
    of_features = (5 + len(of_logits),) if key.leaves_features else ()
    return (2, 3, *of_logits, *of_features)


def keep_candidates(token_ids: Int32[Array, " B"], positions: Int32[Array, " B"]):
    """Use drafts as they are."""
    return token_ids


class ProgramCache:
    """The engine's programs for one model and one size of cache, compiled when first wanted.

    A forward program takes `(params, rope tables, cache, slots, sampling, logits, features, *host
    arrays)` and returns `(cache, slots, sampling, logits, hidden, features, result)`: logits,
    hidden states and features where the key says so, `sampling` of a prefill alone. A verification
    puts features into slots; those of a prefill are of all its tokens. It writes in place
    what it returns and was given (`in_place`). The first host array is packed operands, and the
    result is packed too: see `launch_operands`. What follows a forward program is described in
    `choice_programs`. Engines of the same sizes may share the programs.

    A program of several windows takes `(params, rope tables, cache, slots, sampling, draft state,
    WindowsOperands)` and returns `(cache, slots, draft state, result)`. Its params have those of
    the draft model under `DRAFTS`.

    Attributes:
        num_pages: Cache pages over all replicas.
        num_local_pages: The same of local layers; 0 where they have the pages of the others.
        num_slots: Slots over all replicas.
        window_len: Tokens of a verified window.
        drafts: Describes the programs of the draft model; None where there is none.
        checked: Programs that have been compared with prefill.

    Raises:
        UnsafeProgramError: From `get`, if the compiler made a program that reads the cache after
            it was written over, or a kernel operand that is not aligned.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_pages: int,
        num_slots: int,
        window_len: int,
        num_local_pages: int = 0,
        candidates: Candidates = keep_candidates,
        others: "ProgramCache | None" = None,
        draft_model: AnyDraftModel | None = None,
    ):
        """Compile nothing yet.

        Args:
            model: On its mesh.
            num_pages: Cache pages over all replicas.
            num_slots: Slots over all replicas.
            window_len: Tokens of a verified window.
            num_local_pages: Pages of local layers over all replicas; 0 gives them the pages, and
                the page table, of the others.
            candidates: Replaces drafts of `dvr` and of a head, for tests of disagreement; traced
                into the step that makes them.
            others: Programs of this model and these sizes with other candidates: their prefills,
                which make no drafts, are used here too.
            draft_model: Or head. Makes drafts for `model`, on its mesh.
        """
        self.num_pages, self.num_slots, self.window_len = num_pages, num_slots, window_len
        self._model = model
        self._context = forward_context(model)
        self.num_local_pages = num_local_pages
        self._kv_cache = pages_shape(model, num_pages, num_local_pages)
        self._slots = slots_shape(model, num_slots, window_len)
        self._sampling = sampling_shape(model, num_slots)
        self._candidates = candidates
        self._others = others
        self._choices = ChoicePrograms(
            model,
            self._context,
            slots=self._slots,
            sampling=self._sampling,
            candidates=candidates,
        )
        self.drafts = self._draft_programs(draft_model)
        self._programs: dict[AnyKey, Callable] = {}
        self._compiling: dict[AnyKey, threading.Lock] = {}
        self.checked: set[AnyKey] = set()

    def _draft_programs(
        self, draft_model: AnyDraftModel | None
    ) -> DraftPrograms | HeadPrograms | None:
        shapes: dict[str, Any] = {"slots": self._slots, "sampling": self._sampling}
        match draft_model:
            case None:
                return None
            case DraftHead():
                shapes["candidates"] = self._candidates
                return HeadPrograms(draft_model, self._model, num_pages=self.num_pages, **shapes)
        return DraftPrograms(draft_model, num_pages=self.num_pages, **shapes)

    def __contains__(self, key: AnyKey) -> bool:
        """Whether a program is compiled."""
        return key in self._programs

    def __iter__(self) -> Iterator[ProgramKey]:
        """The forward programs that are compiled now."""
        return (key for key in tuple(self._programs) if isinstance(key, ProgramKey))

    @property
    def num_compiled(self) -> int:
        """How many programs of all kinds are compiled now."""
        return len(self._programs)

    def get(self, key: AnyKey, params: dict, asked: int | None = None) -> Callable:
        """Return a program, compiled if need be for weights like `params`.

        Several threads may ask: one compiles, and the others wait for it. `asked` is as
        `kept_executables.compile_or_read` has it.
        """
        if key not in self._programs:
            # WHY: not a defaultdict, in which two threads that miss at once get a lock each.
            with self._compiling.setdefault(key, threading.Lock()):
                if key not in self._programs:
                    self._programs[key] = self._make(key, params, asked)
        return self._programs[key]

    def _make(self, key: AnyKey, params: dict, asked: int | None) -> Callable:
        if not isinstance(key, ProgramKey):
            return self._compile_choice(key, params, asked)
        if key.weights in DRAFTS_OF_OTHERS or key.kind == "windows":
            return self._compile_draft(key, params, asked)
        if self._others is not None and key.kind == "prefill":
            return self._others.get(key, params, asked)
        return self._compile(key, params, asked)

    @property
    def sizes(self) -> ProgramSizes:
        """What every program is compiled for, besides the model."""
        return ProgramSizes(
            num_pages=self.num_pages,
            num_local_pages=self.num_local_pages,
            num_slots=self.num_slots,
            window_len=self.window_len,
        )

    def is_for(
        self, model: LoadedModel, draft_model: AnyDraftModel | None, sizes: ProgramSizes
    ) -> bool:
        """Whether these are programs of this model, a draft model if any, and these `sizes`."""
        drafts = None if self.drafts is None else self.drafts.model
        has_drafts = draft_model is None or drafts is draft_model
        return model is self._model and has_drafts and self.sizes == sizes

    def function(self, key: ProgramKey) -> Callable:
        """The program as a function of whole arrays, ready for `jax.jit`."""
        in_specs, out_specs = self._specs(key)
        return jax.shard_map(
            self._local_step(key),
            mesh=self._model.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _local_step(self, key: ProgramKey) -> Callable:
        """The program on one device, inside `shard_map`."""
        body = {"prefill": self._prefill, "decode": self._decode, "verify": self._verify}[key.kind]

        has_peers = jax.process_count() > 1

        def local_step(params, tables, kv_cache, slots, sampling, *host):
            *state, result = body(key, params, tables, kv_cache, slots, sampling, *host)
            # A process reads the results of its own devices alone.
            return *state, jax.tree.map(gather_replicas, result) if has_peers else result

        return local_step

    def _specs(self, key: ProgramKey) -> tuple[tuple, tuple]:
        """How operands and results of a program lie on the mesh."""
        num_host = len(self._host_shapes(key))
        of_params = self._model.partition_specs
        if key.weights != "full":
            of_params = quantised_specs(of_params)
        of_logits = [LOGITS_SPEC] * (key.logit_rows > 0)
        of_state = [BY_ROW] * (2 if key.kind == "prefill" else 1)
        of_hidden = [BY_ROW] * (key.leaves_hidden + (key.leaves_features and key.kind == "prefill"))
        of_features = [FEATURES_SPECS] * _puts_features(key)
        of_host = [BY_ROW] * num_host
        of_result = P() if jax.process_count() > 1 else BY_ROW
        return (
            (of_params, P(), PAGES_SPEC, BY_ROW, BY_ROW, *of_logits, *of_features, *of_host),
            (PAGES_SPEC, *of_state, *of_logits, *of_hidden, *of_features, of_result),
        )

    def operands(self, key: ProgramKey, params: dict) -> tuple:
        """Shapes of a program's operands."""
        tables = self._model.rope_tables
        state = self._kv_cache, self._slots, self._sampling
        logits = (self.logits_shape(key.logit_rows),) if key.logit_rows else ()
        features = (self._features_shape,) if _puts_features(key) else ()
        return params, tables, *state, *logits, *features, *self._host_shapes(key)

    @property
    def _features_shape(self) -> Features:
        assert isinstance(self.drafts, HeadPrograms)
        return self.drafts.state.features

    def logits_shape(self, rows: int) -> jax.ShapeDtypeStruct:
        """Shape of the logits that programs of so many rows a replica leave, and its sharding."""
        return logits_shape(self._model, rows * self._model.mesh.shape[DP_AXIS])

    @property
    def adjusted_shape(self) -> Any:
        """Shapes of `AdjustedSlots`."""
        return self._choices.adjusted

    def _compile(self, key: ProgramKey, params: dict, asked: int | None) -> Callable:
        # WHY: of the logits nothing is read, and jit would drop what is not.
        jitted = jax.jit(self.function(key), donate_argnums=in_place(key), keep_unused=True)
        program = self._executable(key, params)
        return compile_or_read(lambda: lower(jitted, program.operands), program, asked=asked)

    def _executable(self, key: ProgramKey, params: dict) -> Executable:
        return Executable(
            options=FAST_OPTIONS if key.mode == "fast" else EXACT_OPTIONS,
            operands=self.operands(key, params),
            devices=tuple(self._model.mesh.devices.flat),
            root=self._roots,
            traced_from=(type(self), sorted(vars(self)), key, self._context, self._candidates,
                         self.sizes, repr(self._model.mesh), self._specs(key),
                         *self._feature_layers(key)),
        )  # fmt: skip

    @property
    def _roots(self) -> tuple[str, ...]:
        """Modules that programs are traced from: this one reaches the candidates as well."""
        return __name__, *modules_of(self._model.backend)

    def is_kept(self, key: ProgramKey, params: dict) -> bool:
        """Whether an earlier process has kept a program, so that it need not be compiled."""
        return is_kept(self._executable(key, params))

    def _compile_choice(self, key: AnyKey, params: dict, asked: int | None) -> Callable:
        is_fast = isinstance(key, ScoreKey) and key.mode == "fast"
        program = self._choices.program(key, params)
        return self._compile_other(key, program, ChoicePrograms, is_fast=is_fast, asked=asked)

    def _compile_draft(self, key: ProgramKey, params: dict, asked: int | None) -> Callable:
        assert self.drafts is not None
        has_claim = key.kind == "windows"
        program = (self.windows_program if has_claim else self.drafts.program)(key, params)
        described_by = type(self.drafts), *self.drafts.traced_from
        return self._compile_other(key, program, *described_by, is_fast=not has_claim, asked=asked)

    def _compile_other(
        self,
        key: AnyKey,
        program: Program,
        *described_by: Any,
        is_fast: bool,
        asked: int | None,
    ) -> Callable:
        """Compile a program that is no forward program of the model."""
        jitted = jax.jit(program.function, donate_argnums=program.in_place)
        executable = self._executable_of(key, program, *described_by, is_fast=is_fast)
        return compile_or_read(lambda: lower(jitted, program.operands), executable, asked=asked)

    def _executable_of(
        self, key: AnyKey, program: Program, *described_by: Any, is_fast: bool
    ) -> Executable:
        return Executable(
            options=FAST_OPTIONS if is_fast else EXACT_OPTIONS,
            operands=program.operands,
            devices=tuple(self._model.mesh.devices.flat),
            root=self._roots,
            traced_from=(*described_by, key, self._context, self._candidates, self.sizes,
                         repr(self._model.mesh), program.specs),
        )  # fmt: skip

    def _host_shapes(self, key: ProgramKey) -> tuple:
        rows = key.rows * self._model.mesh.shape[DP_AXIS]
        columns = _OPERANDS[key.kind].num_columns(
            table_len=key.table_len, length=key.length, num_tables=1 + (self.num_local_pages > 0)
        )
        host = rows_shape(self._model, rows, jnp.int32, columns)
        return (host, sampling_shape(self._model, rows)) if key.kind == "prefill" else (host,)

    def _feature_layers(self, key: ProgramKey) -> tuple[int, ...]:
        """Layers whose inputs a program leaves."""
        if not key.leaves_features:
            return ()
        assert isinstance(self.drafts, HeadPrograms)
        return self.drafts.feature_layers

    def _reads_last(self, key: ProgramKey) -> bool:
        """Whether a program leaves what the last layer makes of every token."""
        return self._context.config.num_layers in self._feature_layers(key)

    def _watched(self, key: ProgramKey) -> tuple[ForwardContext, FeatureTaps | None]:
        """The context of a program, and what sees the hidden states that it leaves."""
        if not key.leaves_features:
            return self._context, None
        taps = FeatureTaps(self._feature_layers(key))
        return dataclasses.replace(self._context, taps=taps), taps

    def _prefill(self, key, params, tables, kv_cache, slots, sampling, *rest):
        """A chunk of each row, and the choice of the token after it."""
        *left, packed, rows = rest
        given = PrefillOperands.unpack(packed, table_len=key.table_len, length=key.length)
        step_idx = jnp.arange(key.length, dtype=jnp.int32)[None, :]
        is_token = step_idx < given.count[:, None]
        positions = jnp.where(is_token, given.start[:, None] + step_idx, -1)
        owner = sequence_slot(given.slot, len(slots.place))
        tokens = Tokens(
            ids=given.token_ids, positions=positions, page_table=given.page_table,
            local_table=given.local_table, adapters=_adapters_of(key, params, owner),
        )  # fmt: skip
        context, taps = self._watched(key)
        kv_cache, hidden, choice, last, logits = _choose_last(
            context, key.mode, params, tables, kv_cache, tokens, rows,
            wants_all=key.leaves_hidden or self._reads_last(key),
        )  # fmt: skip
        put = {"mode": "drop", "unique_indices": False}
        slots = Slots(
            window=slots.window.at[given.slot, 0].set(choice.token_ids, **put),
            place=slots.placed(given.slot, last + 1),
        )
        sampling = jax.tree.map(lambda old, new: old.at[given.slot].set(new, **put), sampling, rows)
        leaves = [hidden] * key.leaves_hidden
        if taps is not None:
            leaves.append(taps.features().reshape(*given.token_ids.shape, -1))
        return kv_cache, slots, sampling, *_left(left, logits), *leaves, pack_choice(choice)

    def _decode(self, key, params, tables, kv_cache, slots: Slots, sampling, *rest):
        """A token of each row, or up to `key.length`, one after the other."""
        *left, packed = rest
        given = DecodeOperands.unpack(packed, table_len=key.table_len)
        if key.length == 1:
            kv_cache, slots, logits, result = self._decode_one(
                key, params, tables, kv_cache, slots, sampling, given
            )
            return kv_cache, slots, *_left(left, logits), result
        results = jnp.zeros((len(packed), key.length, 2), jnp.int32)
        one_token = partial(self._decode_nth, key, params, tables, sampling, given)
        return self._loop(key.length, one_token, (kv_cache, slots, results))

    def _loop(self, count: int, body: Callable, carry: tuple) -> tuple:
        """Run `body(i, carry) -> carry` so many times."""
        return lax.fori_loop(0, count, body, carry)

    def _decode_nth(self, key, params, tables, sampling, given: DecodeOperands, i, carry):
        """Token i of a launch of several, of each row that wants so many."""
        kv_cache, slots, results = carry
        # A row that has its tokens is padding.
        is_padding = i >= given.count
        rows = dataclasses.replace(given, slot=jnp.where(is_padding, len(slots.place), given.slot))
        kv_cache, slots, _, result = self._decode_one(
            key, params, tables, kv_cache, slots, sampling, rows
        )
        return kv_cache, slots, results.at[:, i].set(result)

    def _decode_one(
        self, key, params, tables, kv_cache, slots: Slots, sampling, given: DecodeOperands
    ):
        """A token of each row: committed, or put behind the drafts before it."""
        slot = given.slot
        is_draft = given.is_draft
        start, num_drafts = slots.unplaced(slot)
        # Of what is committed there is none in the slot: a window is verified first.
        offset = num_drafts * is_draft
        flat = slots.window.reshape(-1)
        place = partial(window_place, slots.window.shape, slot)
        ids = flat.at[place(offset)].get(mode="fill", fill_value=0)
        position = jnp.where(start < 0, -1, start + offset)
        # WHY: not a slice alone, which XLA copies by a memory node of the graph, with longer gaps.
        page_table, *local = (jnp.where(position[:, None] < 0, 0, table) for table in given.tables)
        tokens = Tokens(
            ids=ids[:, None], positions=position[:, None], page_table=page_table,
            local_table=local[0] if local else None, adapters=_adapters_of(key, params, slot),
        )  # fmt: skip
        kv_cache, _, choice, _, logits = _choose_last(
            self._context, key.mode, params, tables, kv_cache, tokens,
            rows_of(sampling, slot), wants_all=True,
        )  # fmt: skip
        drafts = self._candidates(choice.token_ids, position + 1)
        token_ids = jnp.where(is_draft == 1, drafts, choice.token_ids)
        slots = Slots(
            window=flat.at[place(offset + is_draft)]
            .set(token_ids, mode="drop")
            .reshape(slots.window.shape),
            place=slots.placed(slot, start + 1 - is_draft, offset + is_draft),
        )
        return (
            kv_cache,
            slots,
            logits,
            pack_choice(dataclasses.replace(choice, token_ids=token_ids)),
        )

    def _verify(self, key, params, tables, kv_cache, slots: Slots, sampling, *rest):
        """A window of each row."""
        *left, packed = rest
        features = [left.pop()] if key.leaves_features else []
        given = VerifyOperands.unpack(packed, table_len=key.table_len, length=key.length)
        state = kv_cache, slots, features
        kv_cache, slots, features, logits, result = self._verify_rows(
            key, params, tables, state, sampling, given
        )
        for table in given.tables:
            result = extend_live_range(table, result)
        return kv_cache, slots, *_left(left, logits), *features, result

    def _verify_rows(
        self, key, params, tables, state: tuple, sampling, given: VerifyOperands
    ) -> tuple:
        """The canonical choice at every position of each window, and how far the drafts agree.

        Runs the last committed token and the drafts as one row, which writes their keys and values
        over those of the draft steps. Choice i is of the position that draft i claims; the drafts
        before the first that disagrees are committed, and the choice made there.

        Returns:
            The cache, slots and features as `state` has them, the logits and the result.
        """
        kv_cache, slots, features = state
        length, slot, num_drafts = key.length, given.slot, given.num_drafts
        drafts = drafts_of(slots, slot, given.is_given, given.token_ids)
        first = of_slots(slots.window, slot)[:, :1]
        ids = jnp.concatenate([first, drafts], axis=1)
        start, _ = slots.unplaced(slot)
        step_idx = jnp.arange(length, dtype=jnp.int32)[None, :]
        is_token = (start[:, None] >= 0) & (step_idx <= num_drafts[:, None])
        positions = jnp.where(is_token, start[:, None] + step_idx, -1)
        tokens = Tokens(
            ids=ids, positions=positions, page_table=given.page_table,
            local_table=given.local_table, adapters=_adapters_of(key, params, slot),
        )  # fmt: skip
        forward, local_logits = FORWARD_PATHS[key.mode]
        context, taps = self._watched(key)
        kv_cache, hidden = forward(context, params, tables, kv_cache, tokens)
        logits = local_logits(self._context, params, hidden.reshape(-1, hidden.shape[-1]))
        if taps is not None:
            states = taps.features().reshape(*ids.shape, -1)
            features = [old.with_windows(slot, start, states) for old in features]
        rows = jax.tree.map(lambda x: jnp.repeat(x, length), rows_of(sampling, slot))
        choice = choose_plain(self._context, params, logits, rows, positions.reshape(-1) + 1)
        slots, num_accepted = commit_window(
            slots, slot, start, drafts, num_drafts, choice.token_ids.reshape(-1, length)
        )
        return kv_cache, slots, features, logits, pack_verified(choice, num_accepted, length=length)

    def windows_program(self, key: ProgramKey, params: dict) -> Program:
        """Describe the program of several windows for weights like `params`."""
        drafts = self.drafts
        assert drafts is not None
        packed, *_ = self._host_shapes(key)
        of_params = {**self._model.partition_specs, DRAFTS: drafts.model.partition_specs}
        of_state = PAGES_SPEC, BY_ROW, BY_ROW, drafts.specs
        tables = self._model.rope_tables, drafts.model.rope_tables
        given = self._kv_cache, self._slots, self._sampling, drafts.state
        of_result = P() if jax.process_count() > 1 else BY_ROW
        specs = (of_params, P(), *of_state, BY_ROW), (PAGES_SPEC, BY_ROW, drafts.specs, of_result)
        return Program.on_mesh(
            self._model.mesh, partial(self._windows, key), (params, tables, *given, packed), specs,
            in_place=(2, 3, 5),
        )  # fmt: skip

    def _windows(self, key, params, tables, kv_cache, slots: Slots, sampling, drafts, packed):
        """Windows of each row, one after the other: drafts, then their verification."""
        given = WindowsOperands.unpack(packed, table_len=key.table_len)
        results = jnp.zeros((len(packed), key.windows, key.length, 3), jnp.int32)
        start, _ = slots.unplaced(given.slot)
        last = start + given.most_tokens
        one_window = partial(self._nth_window, key, params, tables, sampling, given, last)
        carry = kv_cache, slots, drafts, results
        kv_cache, slots, drafts, results = self._loop(key.windows, one_window, carry)
        results = gather_replicas(results) if jax.process_count() > 1 else results
        return kv_cache, slots, drafts, results

    def _nth_window(self, key, params, tables, sampling, given: WindowsOperands, last, i, carry):
        """Window i of a launch of several, which commits no token behind position `last`."""
        kv_cache, slots, drafts, results = carry
        of_model, of_drafts = tables
        start, _ = slots.unplaced(given.slot)
        room = last - start - 1  # of d drafts d + 1 tokens may be committed
        # A row that has its windows, or all its tokens, is padding.
        slot = jnp.where((i >= given.count) | (room < 0), len(slots.place), given.slot)
        num_drafts = jnp.clip(room, 0, key.length - 1)
        drafting = DecodeOperands(
            slot=slot, is_draft=jnp.ones_like(slot), count=num_drafts,
            page_table=given.page_table, local_table=given.local_table,
        )  # fmt: skip
        assert self.drafts is not None
        drafts, slots, _ = self.drafts.draft(
            key.length - 1, params[DRAFTS], of_drafts, drafts, slots, sampling, drafting
        )
        window = VerifyOperands(
            slot=slot, num_drafts=num_drafts, is_given=jnp.zeros_like(slot),
            page_table=given.page_table, local_table=given.local_table,
            token_ids=jnp.zeros((len(slot), key.length), jnp.int32),
        )  # fmt: skip
        features = [drafts.features] if isinstance(drafts, HeadState) else []
        kv_cache, slots, features, _, result = self._verify_rows(
            key, params, of_model, (kv_cache, slots, features), sampling, window
        )
        if isinstance(drafts, HeadState):
            drafts = dataclasses.replace(drafts, features=features[0])
        return kv_cache, slots, drafts, results.at[:, i].set(result)


def _adapters_of(key: ProgramKey, params: dict, slots) -> jax.Array | None:
    """The adapter of the sequence in each of these slots; None where rows have none."""
    return adapters_of(params, slots) if key.has_adapters else None


def _puts_features(key: ProgramKey) -> bool:
    """Whether a program puts features into slots, as a verification does."""
    return key.leaves_features and key.kind == "verify"


def _left(given: abc.Sequence, logits) -> list:
    """The array in which logits are left, if there is one, with these in its first rows."""
    return [
        logits if len(array) == len(logits) else array.at[: len(logits)].set(logits)
        for array in given
    ]
