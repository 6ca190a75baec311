# SPDX-License-Identifier: Apache-2.0
"""Generate for many prompts: slots that are refilled as completions end.

Which requests share a step, in which slot, and how a prompt is cut into chunks is decided here, and
none of it can change a bit of an answer.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from detjax.models.layers import Tokens
from detjax.models.loading import LoadedModel
from detjax.parallel.mesh import DP_AXIS
from detjax.serving.kv_cache import PagePool
from detjax.serving.request import (
    Completion,
    FinishReason,
    Request,
    SamplingParams,
    TokenEvent,
)
from detjax.serving.sampling import Choice, SamplingRows, is_filtered
from detjax.serving.steps import StepShape, compile_step, empty_pages


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        batch_size: Sequences decoded at once, over all replicas; a multiple of dp.
        prefill_chunk: Prompt tokens of one sequence in one prefill step.
        max_len: Longest prompt plus completion, in tokens.

    Raises:
        ValueError: If a size is not positive.
    """

    batch_size: int
    prefill_chunk: int
    max_len: int

    def __post_init__(self):
        """Check every range."""
        for name in ("batch_size", "prefill_chunk", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """Where the time went. Mutable: the engine adds to it."""

    compile_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0


@dataclass(kw_only=True, slots=True)
class _Sequence:
    """One sample being generated. The engine alone changes it."""

    request_idx: int
    sample_idx: int
    request: Request
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[np.float32] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, np.float32], ...]] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt_token_ids

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            request_idx=self.request_idx,
            sample_idx=self.sample_idx,
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs),
            finish_reason=self.finish_reason,
        )


class _Replica:
    """The slots and pages of one data-parallel rank."""

    def __init__(self, num_slots: int, num_pages: int):
        self.slots: list[_Sequence | None] = [None] * num_slots
        self.pool = PagePool(num_pages)

    def free_slot(self) -> int | None:
        return next((i for i, s in enumerate(self.slots) if s is None), None)


_IDLE = (SamplingParams(), 0)
OnToken = Callable[[TokenEvent], bool]


class Engine:
    """Runs requests on one model in `invariant` mode: every step uses canonical kernels."""

    def __init__(self, model: LoadedModel, config: EngineConfig):
        """Allocate the cache.

        Raises:
            ValueError: If the batch does not divide over replicas or the context is too short.
        """
        self._dp = model.mesh.shape[DP_AXIS]
        if config.batch_size % self._dp:
            raise ValueError(
                f"batch_size={config.batch_size} must be a multiple of dp={self._dp}, so that "
                "each replica has as many slots"
            )
        context = model.config.max_position_embeddings
        if config.max_len > context:
            raise ValueError(
                f"max_len={config.max_len} is longer than the model's context of {context} tokens"
            )
        self._model = model
        self._config = config
        self._slots = config.batch_size // self._dp
        self._table_len = -(-config.max_len // model.profile.attention_block)
        self._replicas = [
            _Replica(self._slots, self._slots * self._table_len) for _ in range(self._dp)
        ]
        self._num_pages = self._dp * self._slots * self._table_len
        self._pages = empty_pages(model, self._num_pages)
        self._steps: dict[StepShape, Callable] = {}
        self.stats = EngineStats()

    def generate(
        self, requests: Sequence[Request], *, on_token: OnToken = lambda event: False
    ) -> list[Completion]:
        """Run requests to their end.

        Args:
            requests: Any number; slots are refilled in this order.
            on_token: Called with every token as it is made; True ends that sample.

        Returns:
            Completions in order of (request, sample).

        Raises:
            ValueError: If a request does not fit the model, before anything runs.
            FloatingPointError: If a logit is NaN, naming the request and the position.
        """
        for idx, request in enumerate(requests):
            self._check(idx, request)
        waiting = deque(
            _Sequence(request_idx=r, sample_idx=s, request=request)
            for r, request in enumerate(requests)
            for s in range(request.sampling.n)
        )
        everyone = list(waiting)
        num_top = max((r.sampling.num_top_logprobs for r in requests), default=0)
        with_filters = any(is_filtered(r.sampling) for r in requests)
        variant = {"num_top": num_top, "with_filters": with_filters}
        try:
            while waiting or self._running():
                while waiting and self._has_free_slot():
                    self._prefill(waiting, variant, on_token)
                if self._running():
                    self._decode(variant, on_token)
        finally:
            self._release_all()
        return [sequence.completion() for sequence in everyone]

    def _check(self, idx: int, request: Request) -> None:
        prompt, vocab_size = request.prompt_token_ids, self._model.config.vocab_size
        if not prompt:
            raise ValueError(f"prompt {idx} is empty; give at least one token")
        if len(prompt) >= self._config.max_len:
            raise ValueError(
                f"prompt {idx} has {len(prompt)} tokens, which leaves no room to generate in "
                f"max_len={self._config.max_len} (the model's context is "
                f"{self._model.config.max_position_embeddings})"
            )
        for token_id in prompt:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"prompt {idx} has token id {token_id}, outside the vocabulary of {vocab_size}"
                )

    def _running(self) -> bool:
        return any(s is not None for replica in self._replicas for s in replica.slots)

    def _has_free_slot(self) -> bool:
        return any(replica.free_slot() is not None for replica in self._replicas)

    def _release_all(self) -> None:
        for replica in self._replicas:
            for slot, sequence in enumerate(replica.slots):
                if sequence is not None:
                    replica.pool.give_back(sequence.pages)
                    replica.slots[slot] = None

    def _step(self, batch: int, length: int, *, num_top: int, with_filters: bool) -> Callable:
        shape = StepShape(
            batch=batch,
            length=length,
            table_len=self._table_len,
            num_pages=self._num_pages,
            num_top=num_top,
            with_filters=with_filters,
        )
        if shape not in self._steps:
            start = time.perf_counter()
            self._steps[shape] = compile_step(self._model, shape)
            self.stats.compile_s += time.perf_counter() - start
        return self._steps[shape]

    def _run(self, tokens: Tokens, rows: SamplingRows, variant: dict) -> Choice:
        step = self._step(*tokens.ids.shape, **variant)
        self._pages, choice = step(
            self._model.params, self._model.rope_tables, self._pages, tokens, rows
        )
        return Choice(
            token_ids=np.asarray(choice.token_ids),
            logprobs=np.asarray(choice.logprobs),
            top_ids=np.asarray(choice.top_ids),
            top_logprobs=np.asarray(choice.top_logprobs),
        )

    def _admit(self, replica: _Replica, sequence: _Sequence) -> None:
        """Give the sequence a slot and pages, sharing full prompt pages with its siblings."""
        slot = replica.free_slot()
        assert slot is not None
        page_len = self._model.profile.attention_block
        length = min(len(sequence.prompt) + sequence.sampling.max_tokens, self._config.max_len)
        shared: list[int] = []
        for sibling in replica.slots:
            if sibling is not None and sibling.request is sequence.request:
                # The last prompt token is run again: its logits choose the first new token.
                shared = sibling.pages[: (len(sequence.prompt) - 1) // page_len]
                break
        replica.pool.share(shared)
        sequence.pages = shared + replica.pool.take(-(-length // page_len) - len(shared))
        sequence.num_cached = len(shared) * page_len
        replica.slots[slot] = sequence

    def _prefill(self, waiting: deque[_Sequence], variant: dict, on_token: OnToken) -> None:
        """Admit one sequence a replica and run their prompts, a chunk at a time."""
        row_of: list[_Sequence | None] = []
        for replica in self._replicas:
            sequence = None
            if waiting and replica.free_slot() is not None:
                sequence = waiting.popleft()
                self._admit(replica, sequence)
            row_of.append(sequence)
        self._step(self._dp, self._config.prefill_chunk, **variant)
        start = time.perf_counter()
        rows = SamplingRows.pack([(s.sampling, s.sample_idx) if s else _IDLE for s in row_of])
        while any(s is not None and s.num_cached < len(s.prompt) for s in row_of):
            pieces = []
            for sequence in row_of:
                low = sequence.num_cached if sequence else 0
                prompt = sequence.prompt if sequence else ()
                pieces.append((low, prompt[low : low + self._config.prefill_chunk]))
            choice = self._run(self._chunk_tokens(row_of, pieces), rows, variant)
            for row, (sequence, (low, piece)) in enumerate(zip(row_of, pieces, strict=True)):
                if sequence is None or not piece:
                    continue
                sequence.num_cached = low + len(piece)
                self.stats.prefill_tokens += len(piece)
                if sequence.num_cached == len(sequence.prompt):
                    self._accept(sequence, choice, row, on_token)
        self.stats.prefill_s += time.perf_counter() - start

    def _chunk_tokens(
        self, row_of: list[_Sequence | None], pieces: list[tuple[int, tuple[int, ...]]]
    ) -> Tokens:
        length = self._config.prefill_chunk
        ids = np.zeros((len(row_of), length), np.int32)
        positions = np.full((len(row_of), length), -1, np.int32)
        for row, (low, piece) in enumerate(pieces):
            ids[row, : len(piece)] = piece
            positions[row, : len(piece)] = np.arange(low, low + len(piece))
        return Tokens(ids=ids, positions=positions, page_table=self._page_table(row_of))

    def _page_table(self, row_of: Sequence[_Sequence | None]) -> np.ndarray:
        table = np.zeros((len(row_of), self._table_len), np.int32)
        for row, sequence in enumerate(row_of):
            if sequence is not None:
                table[row, : len(sequence.pages)] = sequence.pages
        return table

    def _decode(self, variant: dict, on_token: OnToken) -> None:
        """One new token for every running sequence."""
        row_of = [s for replica in self._replicas for s in replica.slots]
        self._step(self._config.batch_size, 1, **variant)
        start = time.perf_counter()
        ids = np.zeros((len(row_of), 1), np.int32)
        positions = np.full((len(row_of), 1), -1, np.int32)
        for row, sequence in enumerate(row_of):
            if sequence is not None:
                ids[row] = sequence.token_ids[-1]
                positions[row] = sequence.num_cached
        tokens = Tokens(ids=ids, positions=positions, page_table=self._page_table(row_of))
        rows = SamplingRows.pack([(s.sampling, s.sample_idx) if s else _IDLE for s in row_of])
        choice = self._run(tokens, rows, variant)
        for row, sequence in enumerate(row_of):
            if sequence is not None:
                sequence.num_cached += 1
                self.stats.decode_tokens += 1
                self._accept(sequence, choice, row, on_token)
        self.stats.decode_s += time.perf_counter() - start

    def _accept(self, sequence: _Sequence, choice: Choice, row: int, on_token: OnToken) -> None:
        """Record a chosen token, tell the caller, and free the slot if it was the last."""
        token_id, logprob = int(choice.token_ids[row]), choice.logprobs[row]
        if np.isnan(logprob):
            raise FloatingPointError(
                f"request {sequence.request_idx} has a NaN logit at position "
                f"{sequence.num_cached}; check the weights for NaN or infinity"
            )
        wanted = sequence.sampling.num_top_logprobs
        top = tuple(
            (int(i), p)
            for i, p in zip(
                choice.top_ids[row, :wanted], choice.top_logprobs[row, :wanted], strict=True
            )
        )
        sequence.token_ids.append(token_id)
        sequence.logprobs.append(logprob)
        sequence.top_logprobs.append(top)
        event = TokenEvent(
            request_idx=sequence.request_idx,
            sample_idx=sequence.sample_idx,
            token_id=token_id,
            logprob=logprob,
            top_logprobs=top,
        )
        is_stopped = on_token(event)
        sequence.finish_reason = self._finish_reason(sequence, is_stopped)
        if sequence.finish_reason is not None:
            self._leave(sequence)

    def _finish_reason(self, sequence: _Sequence, is_stopped: bool) -> FinishReason | None:
        ends = (*self._model.config.eos_token_ids, *sequence.sampling.stop_token_ids)
        if is_stopped or sequence.token_ids[-1] in ends:
            return FinishReason.STOP
        num_tokens = len(sequence.token_ids)
        is_full = len(sequence.prompt) + num_tokens >= self._config.max_len
        if num_tokens >= sequence.sampling.max_tokens or is_full:
            return FinishReason.LENGTH
        return None

    def _leave(self, sequence: _Sequence) -> None:
        for replica in self._replicas:
            for slot, occupant in enumerate(replica.slots):
                if occupant is sequence:
                    replica.pool.give_back(sequence.pages)
                    replica.slots[slot] = None
