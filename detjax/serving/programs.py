# SPDX-License-Identifier: Apache-2.0
"""The compiled steps over one donated cache: prefill, decode and verify.

Each is the model's forward pass on rows of tokens, then the choice of tokens, which stay on the
device: a slot holds a sequence's newest tokens and its place, so the next step can be launched
before the result of the last one is read.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from detjax.array_types import Array, Int32
from detjax.kept_executables import compile_or_read
from detjax.lowered_kernels import lower
from detjax.models.decoder import last_hidden
from detjax.models.fast import quantised_specs
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.loading import LoadedModel
from detjax.models.paths import PATHS, Kernels
from detjax.parallel.distributed import gather_replicas
from detjax.parallel.mesh import DP_AXIS, TP_AXIS
from detjax.serving.adjustments import (
    AdjustedSlots,
    Adjustments,
    AdjustOperands,
    num_words,
)
from detjax.serving.device_arrays import (
    BY_ROW,
    PAGES_SPEC,
    Slots,
    adjusted_shape,
    pages_shape,
    rows_shape,
    sampling_shape,
    slots_shape,
)
from detjax.serving.launch_operands import (
    DecodeOperands,
    PrefillOperands,
    VerifyOperands,
    pack_choice,
    pack_verified,
)
from detjax.serving.logits_processors import ProcessedLogits, TextSoFar, process_logits
from detjax.serving.program_key import ProgramKey
from detjax.serving.prompt_logprobs import following_ids, score_tokens
from detjax.serving.sampling import SamplingRows, choose
from detjax.xla_flags import EXACT_OPTIONS, FAST_OPTIONS

_OPERANDS = {"prefill": PrefillOperands, "decode": DecodeOperands, "verify": VerifyOperands}

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


Process = Callable[[Any, Int32[Array, " B"]], ProcessedLogits | None]
"""From logits and the position of the last token of each row, what is sampled from."""


def _choose_last(
    ctx: ForwardContext,
    mode: Kernels,
    params,
    tables,
    kv_cache,
    tokens,
    rows,
    process: Process,
    *,
    wants_all: bool,
    **variant,
):
    """Run tokens and choose the one that follows the last of each row.

    Also returns the hidden states of every token, or of the last alone, and its position.
    """
    forward, local_logits = PATHS[mode]
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
    processed = process(logits, position)
    choice = choose(
        ctx, logits, rows, position + 1, processed=processed, exchange=params.get("exchange"),
        **variant,
    )  # fmt: skip
    return kv_cache, hidden, choice, position


def in_place(key: ProgramKey) -> tuple[int, ...]:
    """Which arguments a program donates: the cache and the slots; of a prefill sampling, too."""
    return (2, 3, 4) if key.kind == "prefill" else (2, 3)


def keep_candidates(token_ids: Int32[Array, " B"], positions: Int32[Array, " B"]):
    """Use drafts as they are."""
    return token_ids


class ProgramCache:
    """The engine's programs for one model and one size of cache, compiled when first wanted.

    Every program takes `(params, rope tables, cache, slots, sampling, *host arrays)` and returns
    `(cache, slots, result)`, a prefill `(cache, slots, sampling, result)`. Of its arguments it
    writes in place what it returns (`in_place`). The first host array is packed operands, and the
    result is packed too: see `launch_operands`. Where a row has adjustments, `AdjustedSlots` and
    `AdjustOperands` follow the host arrays, and the new `AdjustedSlots` stand before the result.
    Engines of the same sizes may share them.

    Attributes:
        num_pages: Cache pages over all replicas.
        num_slots: Slots over all replicas.
        window_len: Tokens of a verified window.
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
        candidates: Candidates = keep_candidates,
        others: "ProgramCache | None" = None,
    ):
        """Compile nothing yet.

        Args:
            model: On its mesh.
            num_pages: Cache pages over all replicas.
            num_slots: Slots over all replicas.
            window_len: Tokens of a verified window.
            candidates: Replaces drafts, for tests of disagreement; traced into the decode step.
            others: Programs of this model and these sizes with other candidates: their prefills,
                which make no drafts, are used here too.
        """
        self.num_pages, self.num_slots, self.window_len = num_pages, num_slots, window_len
        self._model = model
        self._context = forward_context(model)
        self._kv_cache = pages_shape(model, num_pages)
        self._slots = slots_shape(model, num_slots, window_len)
        self._sampling = sampling_shape(model, num_slots)
        self._candidates = candidates
        self._others = others
        self._programs: dict[ProgramKey, Callable] = {}
        self._compiling: dict[ProgramKey, threading.Lock] = {}
        self.checked: set[ProgramKey] = set()

    def __contains__(self, key: ProgramKey) -> bool:
        """Whether a program is compiled."""
        return key in self._programs

    def __iter__(self) -> Iterator[ProgramKey]:
        """The programs that are compiled now."""
        return iter(tuple(self._programs))

    def get(self, key: ProgramKey, params: dict, asked: int | None = None) -> Callable:
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

    def _make(self, key: ProgramKey, params: dict, asked: int | None) -> Callable:
        if self._others is not None and key.kind == "prefill":
            return self._others.get(key, params, asked)
        return self._compile(key, params, asked)

    @property
    def sizes(self) -> dict[str, int]:
        """What every program is compiled for, besides the model."""
        names = "num_pages", "num_slots", "window_len"
        return {name: getattr(self, name) for name in names}

    def is_for(self, model: LoadedModel, **sizes: int) -> bool:
        """Whether the programs are those of this model and these `sizes`."""
        return model is self._model and self.sizes == sizes

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
        of_state = [BY_ROW] * ((2 if key.kind == "prefill" else 1) + (key.text_len > 0))
        of_result = P() if jax.process_count() > 1 else BY_ROW
        return (
            (of_params, P(), PAGES_SPEC, BY_ROW, BY_ROW, *[BY_ROW] * num_host),
            (PAGES_SPEC, *of_state, of_result),
        )

    def operands(self, key: ProgramKey, params: dict) -> tuple:
        """Shapes of a program's operands."""
        tables = self._model.rope_tables
        state = self._kv_cache, self._slots, self._sampling
        return params, tables, *state, *self._host_shapes(key)

    def _compile(self, key: ProgramKey, params: dict, asked: int | None) -> Callable:
        jitted = jax.jit(self.function(key), donate_argnums=in_place(key))
        operands = self.operands(key, params)
        return compile_or_read(
            lambda: lower(jitted, operands),
            FAST_OPTIONS if key.mode == "fast" else EXACT_OPTIONS,
            operands,
            devices=list(self._model.mesh.devices.flat),
            root=__name__,
            traced_from=(type(self), sorted(vars(self)), key, self._context, self._candidates,
                         self.sizes, repr(self._model.mesh), self._specs(key)),
            asked=asked,
        )  # fmt: skip

    def _host_shapes(self, key: ProgramKey) -> tuple:
        rows = key.rows * self._model.mesh.shape[DP_AXIS]
        columns = _OPERANDS[key.kind].num_columns(table_len=key.table_len, length=key.length)
        host = rows_shape(self._model, rows, jnp.int32, columns)
        shapes: tuple = (host,)
        if key.kind == "prefill":
            next_id = (
                () if key.num_prompt_top is None else (rows_shape(self._model, rows, jnp.int32),)
            )
            shapes = host, sampling_shape(self._model, rows), *next_id
        return (*shapes, *self._adjust_shapes(key, rows)) if key.text_len else shapes

    def _adjust_shapes(self, key: ProgramKey, rows: int) -> tuple[AdjustedSlots, AdjustOperands]:
        model, vocab_size = self._model, self._model.config.vocab_size
        of_rows = adjusted_shape(model, rows, key.text_len)
        is_first, is_window = key.kind == "prefill", key.kind == "verify"
        banned = rows_shape(model, rows, jnp.int32, num_words(vocab_size))
        operands = AdjustOperands(
            slot=rows_shape(model, rows, jnp.int32),
            banned=None if is_window else banned,
            record=of_rows.record if is_first else None,
            token_ids=of_rows.token_ids if is_first else None,
        )
        return adjusted_shape(model, self.num_slots, key.text_len), operands

    def _prefill(
        self, key, params, tables, kv_cache, slots, sampling, packed, rows: SamplingRows, *rest
    ):
        """A chunk of each row, and the choice of the token after it.

        If asked for, also the logprobs of the tokens that follow those of the chunk; the host gives
        the one after its last, before what a step with adjustments has.
        """
        num_next = key.num_prompt_top is not None
        next_id, adjust = rest[:num_next], rest[num_next:]
        given = PrefillOperands.unpack(packed, table_len=key.table_len, length=key.length)
        step_idx = jnp.arange(key.length, dtype=jnp.int32)[None, :]
        is_token = step_idx < given.count[:, None]
        positions = jnp.where(is_token, given.start[:, None] + step_idx, -1)
        tokens = Tokens(ids=given.token_ids, positions=positions, page_table=given.page_table)

        def process(logits, last):
            if not adjust:
                return None
            _, of_rows = adjust
            text = TextSoFar(token_ids=of_rows.token_ids, last=last[:, None])
            records = Adjustments.unpack(of_rows.record)
            return process_logits(self._context, logits, text, records, of_rows.banned)

        kv_cache, hidden, choice, last = _choose_last(
            self._context, key.mode, params, tables, kv_cache, tokens, rows, process,
            wants_all=key.num_prompt_top is not None, **_variant(key),
        )  # fmt: skip
        put = {"mode": "drop", "unique_indices": False}
        slots = Slots(
            window=slots.window.at[given.slot, 0].set(choice.token_ids, **put),
            place=slots.placed(given.slot, last + 1),
        )
        sampling = jax.tree.map(lambda old, new: old.at[given.slot].set(new, **put), sampling, rows)
        result = pack_choice(choice)
        if key.num_prompt_top is not None:
            _, local_logits = PATHS[key.mode]
            targets = following_ids(given.token_ids, given.count, *next_id)
            scores = score_tokens(
                self._context, local_logits, params, hidden, targets, num_top=key.num_prompt_top
            )
            result = jnp.concatenate([result, scores], axis=1)
        if not adjust:
            return kv_cache, slots, sampling, result
        kept, of_rows = adjust
        token_ids = kept.token_ids.at[of_rows.slot].set(of_rows.token_ids, **put)
        kept = AdjustedSlots(
            record=kept.record.at[of_rows.slot].set(of_rows.record, **put),
            token_ids=token_ids.at[of_rows.slot, last + 1].set(choice.token_ids, **put),
        )
        return kv_cache, slots, sampling, kept, result

    def _decode(self, key, params, tables, kv_cache, slots: Slots, sampling, packed, *adjust):
        """A token of each row, or up to `key.length`, one after the other."""
        given = DecodeOperands.unpack(packed, table_len=key.table_len)
        if key.length == 1:
            return self._decode_one(key, params, tables, kv_cache, slots, sampling, given, *adjust)
        results = jnp.zeros((len(packed), key.length, 2 + 2 * key.num_top), jnp.int32)
        one_token = partial(self._decode_nth, key, params, tables, sampling, given, adjust[1:])
        return self._loop(key.length, one_token, (kv_cache, slots, *adjust[:1], results))

    def _loop(self, count: int, body: Callable, carry: tuple) -> tuple:
        """Run `body(i, carry) -> carry` so many times."""
        return lax.fori_loop(0, count, body, carry)

    def _decode_nth(
        self, key, params, tables, sampling, given: DecodeOperands, of_rows: tuple, i, carry
    ):
        """Token i of a launch of several, of each row that wants so many."""
        kv_cache, slots, *kept, results = carry
        # A row that has its tokens is padding.
        is_padding = i >= given.count
        rows = dataclasses.replace(given, slot=jnp.where(is_padding, len(slots.place), given.slot))
        for operands in of_rows:
            slot = jnp.where(is_padding, len(slots.place), operands.slot)
            kept.append(dataclasses.replace(operands, slot=slot))
        *state, result = self._decode_one(
            key, params, tables, kv_cache, slots, sampling, rows, *kept
        )
        return *state, results.at[:, i].set(result)

    def _decode_one(
        self, key, params, tables, kv_cache, slots: Slots, sampling, given: DecodeOperands, *adjust
    ):
        """A token of each row: committed, or put behind the drafts before it."""
        slot = given.slot
        is_draft = given.is_draft
        start, num_drafts = slots.unplaced(slot)
        # Of what is committed there is none in the slot: a window is verified first.
        offset = num_drafts * is_draft
        flat = slots.window.reshape(-1)
        place = partial(_place, slots.window.shape, slot)
        ids = flat.at[place(offset)].get(mode="fill", fill_value=0)
        position = jnp.where(start < 0, -1, start + offset)
        # WHY: not a slice alone, which XLA copies by a memory node of the graph, with longer gaps.
        page_table = jnp.where(position[:, None] < 0, 0, given.page_table)
        tokens = Tokens(ids=ids[:, None], positions=position[:, None], page_table=page_table)

        def process(logits, last):
            if not adjust:
                return None
            kept, operands = adjust
            text = self._text_so_far(key, kept, operands.slot, slots, start, offset, last[:, None])
            records = Adjustments.unpack(_of_slots(kept.record, operands.slot))
            return process_logits(self._context, logits, text, records, operands.banned)

        kv_cache, _, choice, _ = _choose_last(
            self._context,
            key.mode,
            params,
            tables,
            kv_cache,
            tokens,
            _rows_of(sampling, slot),
            process,
            wants_all=True,
            **_variant(key),
        )
        drafts = self._candidates(choice.token_ids, position + 1)
        token_ids = jnp.where(is_draft == 1, drafts, choice.token_ids)
        slots = Slots(
            window=flat.at[place(offset + is_draft)]
            .set(token_ids, mode="drop")
            .reshape(slots.window.shape),
            place=slots.placed(slot, start + 1 - is_draft, offset + is_draft),
        )
        result = pack_choice(dataclasses.replace(choice, token_ids=token_ids))
        if not adjust:
            return kv_cache, slots, result
        kept, operands = adjust
        # A draft is no part of the text yet.
        at = jnp.where(is_draft == 1, kept.token_ids.shape[1], position + 1)
        put = kept.token_ids.at[operands.slot, at].set(token_ids, mode="drop")
        return kv_cache, slots, dataclasses.replace(kept, token_ids=put), result

    def _text_so_far(
        self, key, kept: AdjustedSlots, slot, slots: Slots, start, num_drafts, last, drafts=None
    ) -> TextSoFar:
        """The texts of rows, with the drafts behind them; `drafts` are those of the slots."""
        length = min(key.text_len, key.table_len * self._context.profile.attention_block)
        token_ids = _of_slots(kept.token_ids, slot)[:, :length]
        if self.window_len > 1:
            if drafts is None:
                drafts = _of_slots(slots.window, slot)[:, 1:]
            place = jnp.arange(1, drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
            at = jnp.where(place <= num_drafts[:, None], start[:, None] + place, length)
            row_ids = jnp.arange(len(token_ids))[:, None]
            token_ids = token_ids.at[row_ids, at].set(drafts, mode="drop")
        return TextSoFar(token_ids=token_ids, last=last)

    def _verify(self, key, params, tables, kv_cache, slots: Slots, sampling, packed, *adjust):
        """The canonical choice at every position of each window, and how far the drafts agree.

        Runs the last committed token and the drafts as one row, which writes their keys and values
        over those of the draft steps. Choice i is of the position that draft i claims; the drafts
        before the first that disagrees are committed, and the choice made there.
        """
        length = key.length
        given = VerifyOperands.unpack(packed, table_len=key.table_len, length=length)
        slot, num_drafts = given.slot, given.num_drafts
        on_device = slots.window.at[slot].get(mode="fill", fill_value=0)
        drafts = jnp.where(given.is_given[:, None] == 1, given.token_ids, on_device)[:, 1:]
        ids = jnp.concatenate([on_device[:, :1], drafts], axis=1)
        start, _ = slots.unplaced(slot)
        step_idx = jnp.arange(length, dtype=jnp.int32)[None, :]
        is_token = (start[:, None] >= 0) & (step_idx <= num_drafts[:, None])
        positions = jnp.where(is_token, start[:, None] + step_idx, -1)
        tokens = Tokens(ids=ids, positions=positions, page_table=given.page_table)
        forward, local_logits = PATHS[key.mode]
        kv_cache, hidden = forward(self._context, params, tables, kv_cache, tokens)
        logits = local_logits(self._context, params, hidden.reshape(-1, hidden.shape[-1]))
        rows = jax.tree.map(lambda x: jnp.repeat(x, length), _rows_of(sampling, slot))
        processed = None
        if adjust:
            kept, operands = adjust
            text = self._text_so_far(
                key, kept, operands.slot, slots, start, num_drafts, positions, drafts
            )
            records = Adjustments.unpack(_of_slots(kept.record, operands.slot))
            processed = process_logits(self._context, logits, text, records)
        choice = choose(
            self._context, logits, rows, positions.reshape(-1) + 1, processed=processed,
            exchange=params.get("exchange"), **_variant(key),
        )  # fmt: skip
        chosen = choice.token_ids.reshape(-1, length)

        is_wrong = (chosen[:, :-1] != drafts) | (step_idx[:, :-1] >= num_drafts[:, None])
        is_wrong = jnp.pad(is_wrong, ((0, 0), (0, 1)), constant_values=True)
        num_accepted = jnp.argmax(is_wrong, axis=1).astype(jnp.int32)
        last = jnp.take_along_axis(chosen, num_accepted[:, None], axis=1)[:, 0]
        slots = Slots(
            window=slots.window.at[slot, 0].set(last, mode="drop"),
            place=slots.placed(slot, start + num_accepted + 1),
        )
        result = pack_verified(choice, num_accepted, length=length)
        if not adjust:
            return kv_cache, slots, result
        kept, operands = adjust
        is_committed = (start[:, None] >= 0) & (step_idx <= num_accepted[:, None])
        at = jnp.where(is_committed, start[:, None] + 1 + step_idx, kept.token_ids.shape[1])
        put = kept.token_ids.at[operands.slot[:, None], at].set(chosen, mode="drop")
        return kv_cache, slots, dataclasses.replace(kept, token_ids=put), result


def _place(shape: tuple[int, int], slot, offset) -> Int32[Array, " B"]:
    """Where [slot, offset] is in a flat window, and past its end where there is no such place.

    # WHY: XLA checks two indices in a launch of its own, and one where it is used.
    """
    num_slots, length = shape
    is_place = (slot >= 0) & (slot < num_slots) & (offset < length)
    return jnp.where(is_place, slot * length + offset, num_slots * length)


def _variant(key: ProgramKey) -> dict[str, Any]:
    return {"num_top": key.num_top, "with_filters": key.with_filters}


def _rows_of(sampling: SamplingRows, slot) -> SamplingRows:
    """The parameters of the slots that rows name."""
    return jax.tree.map(lambda x: _of_slots(x, slot), sampling)


def _of_slots(state, slot):
    """What the slots that rows name hold; zeros where there is no such slot."""
    return state.at[slot].get(mode="fill", fill_value=0)
