# SPDX-License-Identifier: Apache-2.0
"""The engine: many requests at once, each with its own answer, while the host runs a step ahead.

Which requests share a step, in which slot, how a prompt is cut and which drafts are tried is
decided here and in the scheduler, and none of it can change a bit of a deterministic answer.
"""

import hashlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from detjax.models.fast import quantise_params
from detjax.models.loading import LoadedModel
from detjax.models.paths import Kernels
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import DP_AXIS
from detjax.serving import trace
from detjax.serving.metrics import EngineStats
from detjax.serving.ngram import propose_from_prompt
from detjax.serving.request import (
    Completion,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenEvent,
    TopLogprobs,
)
from detjax.serving.sampling import SamplingRows, is_filtered
from detjax.serving.scheduler import (
    DecodeRow,
    Plan,
    PrefillRow,
    Row,
    Sample,
    SampleState,
    Scheduler,
    SchedulerConfig,
    VerifyRow,
    propose_nothing,
)
from detjax.serving.steps import (
    BY_ROW,
    Candidates,
    CompiledSteps,
    EngineStep,
    StepKind,
    StepSizes,
    empty,
    empty_pages,
    keep_candidates,
    slots_shape,
    unpack,
)

MODES = ("invariant", "dvr", "fast")
DRAFT_WEIGHTS = ("full", "int8", "float8_e4m3fn")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes and policies of an engine. None of them changes a bit of a deterministic answer.

    Attributes:
        batch_size: Samples that run at once, over all replicas; a multiple of dp.
        prefill_chunk: Prompt tokens of one sample in one prefill step.
        max_len: Longest prompt plus completion, in tokens.
        mode: `invariant`: every step uses canonical kernels. `dvr`: fast steps draft, canonical
            ones verify; requests that are not deterministic keep what the fast steps gave. `fast`:
            no claim, and deterministic requests are refused.
        num_pages: Cache pages over all replicas, a multiple of dp; 0 is enough for `batch_size`
            samples of `max_len`.
        decode_batches: Further batch sizes, below `batch_size` and over all replicas, for which a
            decode step is compiled; the smallest that holds the rows runs.
        prefill_shapes: Further (samples, tokens of each) of a replica's prefill step, beside
            (1, `prefill_chunk`); the one that wastes least runs.
        step_tokens: Most tokens of a replica's step, padding included; 0 sets no limit.
        decode_patience: Steps in a row that decoding waits while there are prompts to prefill. For
            offline work, where one decode step of many samples costs less than many of a few.
        verify_rows: Most windows of one verification on a replica (G); no more than it has slots.
        verify_batches: Further numbers of windows, below `verify_rows`, for which it is compiled.
        verify_window: Tokens of a window (W): the last committed one and W - 1 drafts.
        verify_patience: Steps that a full window waits for others, while there is other work.
        verify_deadline: Steps after which a window is verified though it is not full.
        draft_share: In `dvr`, drafts are made while deterministic samples are at most this share of
            those that decode. Above it the decode step is canonical, which needs no verification:
            cheaper where canonical kernels are about as fast as others. None: 0 for full weights on
            `sm90`, whose canonical steps are the quicker ones (docs/kernels.md), else 1.
        draft_steps: Drafts of a sample in one launch, while nobody who runs wants anything else:
            the host launches once for all of them. Up to `verify_window` - 1. Above 1 it is refused
            where no drafts are made.
        draft_weights: What the drafts of `dvr` are computed with: the weights as they are, or
            8-bit ones, which take half as much memory again.
        has_prompt_lookup: In `invariant`, verify what followed the same tokens earlier in the
            text, many tokens a step.
        has_prefix_cache: Share full canonical pages between requests that begin alike.
        ageing_steps: Steps of waiting that one level of priority is worth.

    Raises:
        ValueError: If a value is out of range or does not go with another.
    """

    batch_size: int
    prefill_chunk: int
    max_len: int
    mode: str = "invariant"
    num_pages: int = 0
    decode_batches: tuple[int, ...] = ()
    prefill_shapes: tuple[tuple[int, int], ...] = ()
    step_tokens: int = 0
    decode_patience: int = 0
    verify_rows: int = 8
    verify_batches: tuple[int, ...] = ()
    verify_window: int = 32
    verify_patience: int = 4
    verify_deadline: int = 64
    draft_share: float | None = None
    draft_steps: int = 1
    draft_weights: str = "full"
    has_prompt_lookup: bool = False
    has_prefix_cache: bool = True
    ageing_steps: int = 200

    def __post_init__(self):
        """Check every range."""
        for name in ("batch_size", "prefill_chunk", "max_len", "verify_rows", "verify_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in (
            "num_pages",
            "step_tokens",
            "decode_patience",
            "verify_patience",
            "ageing_steps",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.verify_deadline < 1:
            raise ValueError(f"verify_deadline={self.verify_deadline} must be at least 1")
        for name, choices in (("mode", MODES), ("draft_weights", DRAFT_WEIGHTS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {choices}")
        if self.draft_weights != "full" and self.mode != "dvr":
            raise ValueError(
                f"draft_weights={self.draft_weights!r} needs mode='dvr', not {self.mode!r}"
            )
        if not 1 <= self.draft_steps <= max(1, self.verify_window - 1):
            raise ValueError(
                f"draft_steps={self.draft_steps} must be from 1 to verify_window - 1 = "
                f"{self.verify_window - 1}"
            )
        if self.draft_steps > 1 and self.mode != "dvr":
            raise ValueError(f"draft_steps={self.draft_steps} needs mode='dvr', not {self.mode!r}")
        if self.has_prompt_lookup and self.mode != "invariant":
            raise ValueError(f"has_prompt_lookup needs mode='invariant', not {self.mode!r}")
        if self.draft_share is not None and not 0 <= self.draft_share <= 1:
            raise ValueError(f"draft_share={self.draft_share} must be from 0 to 1")
        for batch in self.decode_batches:
            if not 1 <= batch < self.batch_size:
                raise ValueError(f"{batch} of decode_batches must be below {self.batch_size=}")
        for batch in self.verify_batches:
            if not 1 <= batch < self.verify_rows:
                raise ValueError(f"{batch} of verify_batches must be below {self.verify_rows=}")
        for shape in self.prefill_shapes:
            if len(shape) != 2 or min(shape) < 1:
                raise ValueError(f"{shape} of prefill_shapes must be (samples, tokens of each)")


OnToken = Callable[[TokenEvent], bool]
"""Told each token as it is released; True ends the sample."""


def ignore_token(event: TokenEvent) -> bool:
    """Let the sample go on."""
    return False


def ignore_compiling(name: str, done: int, total: int) -> None:
    """Show nothing."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Live:
    """What the engine itself knows of a sample. `new_*` is what this step has released."""

    sample: Sample
    on_token: OnToken
    ends: frozenset[int]
    is_filtered: bool
    num_top: int
    arrived_s: float
    released_s: float = 0.0
    new_ids: list[int] = field(default_factory=list)
    new_logprobs: list[np.float32] = field(default_factory=list)
    new_top: list[TopLogprobs] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.sample.request_id}.{self.sample.sample_idx}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """A program that was handed to the device. `rows` are by replica."""

    step: EngineStep
    rows: Sequence[Sequence[Row]]
    result: jax.Array
    launched_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrival:
    """A request on its way in."""

    request_id: int
    request: Request
    on_token: OnToken
    arrived_s: float


class Engine:
    """Runs requests on one model.

    `add_request` and `cancel` may be called from any thread; everything else from one at a time.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        candidates: Candidates = keep_candidates,
        steps: CompiledSteps | None = None,
        tracer: trace.TracesEvents = trace.NO_TRACE,
    ):
        """Allocate the cache.

        Args:
            model: On its mesh.
            config: Sizes and policies.
            candidates: Replaces the drafts of `dvr`, to test that no draft can change an answer.
            steps: `steps` of another engine of this model and these sizes, whose compiled programs
                and candidates are used; None compiles new ones.
            tracer: Keeps a timeline.

        Raises:
            ValueError: If sizes do not divide over replicas or the context is too short.
        """
        self._dp = model.mesh.shape[DP_AXIS]
        _check_config(config, self._dp, model.config.max_position_embeddings)
        self._model = model
        self._config = config
        self._trace = tracer
        page_len = model.profile.attention_block
        self._table_len = -(-config.max_len // page_len)
        self._num_slots = config.batch_size // self._dp
        num_pages = config.num_pages or config.batch_size * self._table_len
        shapes = ((1, config.prefill_chunk), *config.prefill_shapes)
        verify_rows = min(config.verify_rows, self._num_slots)
        no_limit = (
            self._num_slots
            + verify_rows * config.verify_window
            + max(rows * length for rows, length in shapes)
        )
        self._draft_share = _draft_share(config, model.backend)
        if config.draft_steps > 1 and not self._draft_share:
            raise ValueError(
                f"draft_steps={config.draft_steps}: nothing drafts at draft_share 0, the default "
                "of full weights on sm90; give draft_share, 8-bit draft_weights or draft_steps=1"
            )
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_replicas=self._dp,
                num_slots=self._num_slots,
                num_pages=num_pages // self._dp,
                page_len=page_len,
                prefill_shapes=tuple(dict.fromkeys(shapes)),
                step_tokens=config.step_tokens or no_limit,
                decode_patience=config.decode_patience,
                verify_rows=verify_rows,
                verify_window=config.verify_window,
                verify_patience=config.verify_patience,
                verify_deadline=config.verify_deadline,
                draft_share=self._draft_share,
                draft_steps=config.draft_steps,
                ageing_steps=config.ageing_steps,
                has_prefix_cache=config.has_prefix_cache,
                is_synchronous=config.has_prompt_lookup,
            ),
            root_key=hashlib.sha256(f"{model.fingerprint} {model.config}".encode()).digest(),
            propose=propose_from_prompt if config.has_prompt_lookup else propose_nothing,
        )
        sizes = {*(b // self._dp for b in config.decode_batches), self._num_slots}
        self._decode_sizes = sorted(sizes)
        fewer = (batch for batch in config.verify_batches if batch < verify_rows)
        self._verify_sizes = sorted({*fewer, verify_rows})
        self._prefill_shapes = tuple(dict.fromkeys(shapes))
        step_sizes = StepSizes(
            num_pages=num_pages,
            num_slots=config.batch_size,
            table_len=self._table_len,
            window_len=config.verify_window,
        )
        self.steps = steps or CompiledSteps(model, step_sizes, candidates=candidates)
        if self.steps.sizes != step_sizes or not self.steps.is_for(model):
            raise ValueError(f"steps={self.steps.sizes} are not of this model and {step_sizes}")
        self._draft_params = model.params
        if config.draft_weights != "full":
            self._draft_params = self._quantised()
        self._pages = empty_pages(model, num_pages)
        self._slots = empty(model, slots_shape(model, config.batch_size, config.verify_window))
        # What each slot's row of the page table holds, and how much of it is up to date.
        self._tables = np.zeros((self._dp, self._num_slots, self._table_len), np.int32)
        self._num_synced = np.zeros((self._dp, self._num_slots), np.int32)
        self._last_rows: dict[EngineStep, tuple[np.ndarray, jax.Array | None]] = {}
        self._inbox: deque[_Arrival | int] = deque()
        self._ids = itertools.count()
        self._live: dict[Sample, _Live] = {}
        self._samples: dict[int, list[Sample]] = {}
        self._in_flight: list[_Launch] = []
        self._outputs: list[RequestOutput] = []
        self._least_top, self._always_filters = 0, False
        self._weight_version = 0
        self._stats = EngineStats(num_pages=num_pages)

    # ------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        is_deterministic: bool = True,
        priority: int = 0,
        on_token: OnToken = ignore_token,
    ) -> int:
        """Queue a request.

        Args:
            prompt_token_ids: At least one token.
            sampling: How each next token is chosen.
            is_deterministic: Whether the answer must be the canonical one.
            priority: Higher goes first; a level is worth `ageing_steps` steps of waiting.
            on_token: Told every token as it is released; True ends that sample. If it raises, that
                sample alone fails.

        Returns:
            The request's id, which its outputs carry.

        Raises:
            ValueError: If the request cannot run on this engine.
        """
        request = Request(
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            is_deterministic=is_deterministic,
            priority=priority,
        )
        self._check(request, "the prompt")
        return self._add(request, on_token)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step; its pages are free then. Unknown or ended: no effect."""
        self._inbox.append(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._inbox or self._outputs or self._scheduler.has_work)

    def load_weights(self, weights: dict, *, version: int) -> None:
        """Replace the model's weights in place, between requests. Outputs carry `version` from now.

        Cached prefixes are forgotten, and 8-bit drafts made anew. Other engines on the same model
        are not told.

        Args:
            weights: As `LoadedModel.replace_weights` takes them.
            version: Any number that tells these weights from others.

        Raises:
            ValueError: If a request is waiting or running, or a weight does not fit; nothing has
                changed then.
        """
        if self.has_work:
            raise ValueError("the engine is at work on requests of the old weights; drain() first")
        self._model.replace_weights(weights)
        if self._config.draft_weights != "full":
            self._draft_params = self._quantised()
        self._scheduler.forget_pages()
        self._weight_version = version

    def _quantised(self) -> dict:
        return quantise_params(self._model.params, jnp.dtype(self._config.draft_weights))

    def _add(self, request: Request, on_token: OnToken) -> int:
        request_id = next(self._ids)
        self._inbox.append(
            _Arrival(
                request_id=request_id,
                request=request,
                on_token=on_token,
                arrived_s=time.perf_counter(),
            )
        )
        return request_id

    def _check(self, request: Request, what: str) -> None:
        prompt, vocab_size = request.prompt_token_ids, self._model.config.vocab_size
        if not prompt:
            raise ValueError(f"{what} is empty; give at least one token")
        if len(prompt) >= self._config.max_len:
            raise ValueError(
                f"{what} has {len(prompt)} tokens, which leaves no room to generate in "
                f"max_len={self._config.max_len} (the model's context is "
                f"{self._model.config.max_position_embeddings})"
            )
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{what} has token id {token_id}, outside the vocabulary of {vocab_size}"
                )
        if request.is_deterministic and self._config.mode == "fast":
            raise ValueError(
                f"{what} is to be deterministic, and mode 'fast' makes no claim; use 'dvr' or "
                "'invariant', or is_deterministic=False"
            )

    def _take_inbox(self) -> None:
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, _Arrival):
                self._arrive(entry)
                continue
            for sample in self._samples.get(entry, ()):
                if sample in self._live:
                    self._stats.num_cancelled += 1
                    self._finish(sample, FinishReason.CANCELLED)

    def _arrive(self, arrival: _Arrival) -> None:
        request, mode = arrival.request, self._config.mode
        sampling, length = request.sampling, len(request.prompt_token_ids)
        is_drafted = mode == "dvr" and request.is_deterministic
        self._stats.num_requests += 1
        self._samples[arrival.request_id] = []
        for sample_idx in range(sampling.n):
            sample = self._scheduler.add(
                request,
                request_id=arrival.request_id,
                sample_idx=sample_idx,
                most_len=min(length + sampling.max_tokens, self._config.max_len),
                is_drafted=is_drafted,
                is_canonical=mode == "invariant" or is_drafted,
            )
            live = _Live(
                sample=sample,
                on_token=arrival.on_token,
                ends=frozenset((*self._model.config.eos_token_ids, *sampling.stop_token_ids)),
                is_filtered=is_filtered(sampling),
                num_top=sampling.num_top_logprobs,
                arrived_s=arrival.arrived_s,
            )
            self._live[sample] = live
            self._samples[arrival.request_id].append(sample)
            self._stats.prompt_tokens += length
            self._trace.request("b", live.key, f"request {live.key}", prompt_tokens=length)

    # ---------------------------------------------------------------------------------------- steps

    def step(self) -> list[RequestOutput]:
        """Launch a step, read the results of the one before, and return what those released."""
        begin_s = time.perf_counter()
        self._take_inbox()
        plan = self._scheduler.plan()
        for sample, reason in plan.failed:
            self._finish(sample, FinishReason.ERROR, reason)
        planned_s = time.perf_counter()
        launched = self._launch(plan)
        launched_s = time.perf_counter()
        waited = self._stats.wait_s
        finished, self._in_flight = self._in_flight, launched
        for launch in finished:
            self._retire(launch)
        outputs = self._release()
        self._observe(begin_s, planned_s, launched_s, self._stats.wait_s - waited, bool(launched))
        return outputs

    def drain(self) -> list[RequestOutput]:
        """Step until nothing is left to do; return everything that was released on the way."""
        outputs = []
        while self.has_work:
            outputs += self.step()
        return outputs

    def generate(
        self, requests: Sequence[Request], *, on_token: OnToken = ignore_token
    ) -> list[Completion]:
        """Run requests to their end.

        Args:
            requests: Any number, served in this order where priorities are equal.
            on_token: Called with every token as it is released, `request_idx` being an index into
                `requests`; True ends that sample. What it raises ends the run.

        Returns:
            Completions in order of (request, sample).

        Raises:
            ValueError: If a request does not fit the engine, before anything runs; or if the
                engine is at work on others.
            FloatingPointError: If a logit is NaN, naming the request and the position.
            RuntimeError: If a request failed for another reason.
        """
        for idx, request in enumerate(requests):
            self._check(request, f"prompt {idx}")
        if self.has_work:
            raise ValueError("the engine is at work on other requests; drain() them first")
        # WHY: one variant for the whole list, so that fewer programs are compiled.
        self._least_top = max((r.sampling.num_top_logprobs for r in requests), default=0)
        self._always_filters = any(is_filtered(r.sampling) for r in requests)
        raised: list[BaseException] = []
        ids = [self._add(r, _as_index(i, on_token, raised)) for i, r in enumerate(requests)]
        first = ids[0] if ids else 0
        builders = {
            (i, s): _CompletionBuilder()
            for i, request in enumerate(requests)
            for s in range(request.sampling.n)
        }
        try:
            while self.has_work:
                for output in self.step():
                    builders[output.request_id - first, output.sample_idx].add(output)
                    if raised:
                        raise raised[0]
                    if output.finish_reason is FinishReason.ERROR:
                        raise _error_of(output, first)
        finally:
            self._abandon()
        return [
            builder.completion(request_idx=i, sample_idx=s, request=requests[i])
            for (i, s), builder in builders.items()
        ]

    def _abandon(self) -> None:
        """Forget whatever runs, so that the engine is as new but for its prefix cache."""
        self._inbox.clear()
        for sample in tuple(self._live):
            self._scheduler.end(sample)
        self._live.clear()
        self._samples.clear()
        self._outputs.clear()
        self._in_flight.clear()
        self._least_top, self._always_filters = 0, False

    # ------------------------------------------------------------------------------------ launching

    def _launch(self, plan: Plan) -> list[_Launch]:
        launches = []
        if any(plan.verifies):
            launches.append(self._launch_verify(plan.verifies))
        if any(plan.prefills):
            assert plan.prefill_shape is not None
            launches.append(self._launch_prefill(plan.prefills, plan.prefill_shape))
        if any(plan.decodes):
            launches += self._launch_decodes(plan.decodes)
        return launches

    def _launch_prefill(self, rows: list[list[PrefillRow]], shape: tuple[int, int]) -> _Launch:
        kernels: Kernels = "fast" if self._config.mode == "fast" else "invariant"
        step = self._step("prefill", rows, size=shape[0], length=shape[1], kernels=kernels)
        host, ids = self._host_rows(step)
        sampling = [_IDLE] * len(host)
        for at, row in self._places(step, rows):
            sample = row.sample
            count = len(row.token_ids)
            self._sync_pages(sample, is_new=True)
            # The token that follows an unfinished prompt is not wanted: no such slot.
            slot = sample.slot if row.is_last else self._num_slots
            host[at, :_HEAD] = slot, row.start, count
            host[at, _HEAD:] = self._tables[sample.replica, sample.slot]
            ids[at, :count] = row.token_ids
            sampling[at] = (sample.request.sampling, sample.sample_idx)
            self._stats.prefill_tokens += count
        packed = np.concatenate([host, ids], axis=1)
        return self._run(step, rows, packed, SamplingRows.pack(sampling))

    def _launch_decodes(self, rows: list[list[DecodeRow]]) -> list[_Launch]:
        """One launch; two where drafts have weights of their own and others decode too."""
        most_drafts = max(row.num_drafts for part in rows for row in part)
        length = self._config.draft_steps if most_drafts > 1 else 1
        if self._config.draft_weights == "full":
            return [self._launch_decode(rows, weights="full", length=length)]
        launches = []
        for is_draft in (False, True):
            some = [[r for r in part if r.is_draft is is_draft] for part in rows]
            if any(some):
                weights = self._config.draft_weights if is_draft else "full"
                launches.append(
                    self._launch_decode(some, weights=weights, length=length if is_draft else 1)
                )
        return launches

    def _launch_decode(self, rows: list[list[DecodeRow]], *, weights: str, length: int) -> _Launch:
        """A token of each row, or up to `length` drafts."""
        size = _smallest(self._decode_sizes, rows)
        is_committed = any(
            row.sample.is_drafted and not row.is_draft for part in rows for row in part
        )
        is_canonical = self._config.mode == "invariant" or is_committed
        kernels: Kernels = "invariant" if is_canonical else "fast"
        step = self._step(
            "decode", rows, size=size, length=length, kernels=kernels, weights=weights
        )
        host, _ = self._host_rows(step)
        for replica, part in enumerate(rows):
            for row in part:
                self._sync_pages(row.sample, is_new=False)
            if part:
                at = slice(replica * size, replica * size + len(part))
                slots = [r.sample.slot for r in part]
                host[at, 0] = slots
                host[at, 1] = [r.offset for r in part]
                host[at, 2] = [r.num_drafts for r in part]
                host[at, _HEAD:] = self._tables[replica, slots]
        return self._run(step, rows, self._placed(step, host))

    def _placed(self, step: EngineStep, host: np.ndarray) -> np.ndarray | jax.Array:
        """The rows of a decode step, on the devices if they are those of the last such step.

        Until a sample needs a page they do not change, and what stays where it is needs no transfer
        and no new address in the CUDA graph.
        """
        if jax.process_count() > 1:  # placing is collective there
            return host
        last, placed = self._last_rows.get(step, (None, None))
        if last is None or not np.array_equal(last, host):
            self._last_rows[step] = host, None
            return host
        if placed is None:
            placed = jax.device_put(host, NamedSharding(self._model.mesh, BY_ROW))
            self._last_rows[step] = host, placed
        return placed

    def _launch_verify(self, rows: list[list[VerifyRow]]) -> _Launch:
        size, length = _smallest(self._verify_sizes, rows), self._config.verify_window
        step = self._step("verify", rows, size=size, length=length, kernels="invariant")
        host, ids = self._host_rows(step)
        for at, row in self._places(step, rows):
            self._sync_pages(row.sample, is_new=False)
            host[at, :_HEAD] = row.sample.slot, row.num_drafts, row.given is not None
            host[at, _HEAD:] = self._tables[row.sample.replica, row.sample.slot]
            if row.given is not None:
                ids[at, 1 : 1 + len(row.given)] = row.given
        self._stats.verify_launches += 1
        return self._run(step, rows, np.concatenate([host, ids], axis=1))

    def _step(
        self,
        kind: StepKind,
        rows: Sequence[Sequence[Row]],
        *,
        size: int,
        length: int,
        kernels: Kernels,
        weights: str = "full",
    ) -> EngineStep:
        lives = [self._live[row.sample] for part in rows for row in part]
        return EngineStep(
            kind=kind,
            rows=size,
            length=length,
            mode=kernels,
            weights=weights,
            num_top=_rounded_top(max(self._least_top, *(live.num_top for live in lives))),
            with_filters=self._always_filters or any(live.is_filtered for live in lives),
        )

    def _host_rows(self, step: EngineStep) -> tuple[np.ndarray, np.ndarray]:
        """Rows of padding: no slot, no page, no token."""
        count = self._dp * step.rows
        host = np.zeros((count, _HEAD + self._table_len), np.int32)
        host[:, 0] = self._num_slots
        return host, np.zeros((count, step.length), np.int32)

    def _places(self, step: EngineStep, rows):
        """(row of the program, row of the plan)."""
        for replica, part in enumerate(rows):
            for i, row in enumerate(part):
                yield replica * step.rows + i, row

    def _sync_pages(self, sample: Sample, *, is_new: bool) -> None:
        """Bring the slot's row of the page table up to date."""
        at = sample.replica, sample.slot
        first, count = 0 if is_new else self._num_synced[at], len(sample.pages)
        if first != count:
            self._tables[at][first:count] = sample.pages[first:]
            self._num_synced[at] = count

    def _run(self, step: EngineStep, rows, *host) -> _Launch:
        program = self._program(step)
        params = self._params_of(step)
        launched_s = time.perf_counter()
        self._pages, self._slots, result = program(
            params, self._model.rope_tables, self._pages, self._slots, *host
        )
        result.copy_to_host_async()
        self._stats.num_launches += 1
        return _Launch(step=step, rows=rows, result=result, launched_s=launched_s)

    # ------------------------------------------------------------------------------------ compiling

    def compile(
        self,
        progress: Callable[[str, int, int], None] = ignore_compiling,
        *,
        with_filters: bool = False,
    ) -> None:
        """Compile the steps that requests will need, several at a time.

        Top logprobs are compiled when a request first asks for them, and so are filters.

        Args:
            progress: Told (what, done, total).
            with_filters: Compile for requests with a top-k, top-p or min-p, too.
        """
        variants = (False, True) if with_filters else (False,)
        steps = [step for variant in variants for step in self._steps_of_mode(variant)]
        wanted = [step for step in steps if step not in self.steps]
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(max_workers=max(4, os.cpu_count() or 1)) as pool:
            futures = {step: pool.submit(self._get, step) for step in wanted}
            for done, (step, future) in enumerate(futures.items(), start=1):
                future.result()
                progress(step.name, done, len(wanted))
        self._count_compiled(len(wanted), begin_s)

    def _steps_of_mode(self, with_filters: bool) -> list[EngineStep]:
        config, steps = self._config, []

        def add(kind: StepKind, rows: int, length: int, kernels: Kernels, weights="full"):
            steps.append(
                EngineStep(
                    kind=kind,
                    rows=rows,
                    length=length,
                    mode=kernels,
                    weights=weights,
                    num_top=0,
                    with_filters=with_filters,
                )
            )

        for rows, length in self._prefill_shapes:
            add("prefill", rows, length, "fast" if config.mode == "fast" else "invariant")
        for rows in self._decode_sizes:
            if config.mode == "invariant" or config.mode == "dvr" and self._draft_share < 1:
                add("decode", rows, 1, "invariant")
            if config.mode != "invariant":
                add("decode", rows, 1, "fast")
            drafted = {1, config.draft_steps} if config.mode == "dvr" else ()
            for length in sorted(drafted):
                if config.draft_weights != "full" or length > 1:
                    add("decode", rows, length, "fast", config.draft_weights)
        is_drafting = config.mode == "dvr" and self._draft_share > 0
        if is_drafting or config.has_prompt_lookup:
            for rows in self._verify_sizes:
                add("verify", rows, config.verify_window, "invariant")
        return steps

    def _get(self, step: EngineStep) -> Callable:
        return self.steps.get(step, self._params_of(step))

    def _params_of(self, step: EngineStep) -> dict:
        return self._model.params if step.weights == "full" else self._draft_params

    def _program(self, step: EngineStep) -> Callable:
        if step not in self.steps:
            begin_s = time.perf_counter()
            self._get(step)
            self._count_compiled(1, begin_s)
        return self._get(step)

    def _count_compiled(self, count: int, begin_s: float) -> None:
        end_s = time.perf_counter()
        self._stats.num_compiled += count
        self._stats.compile_s += end_s - begin_s
        self._trace.span(trace.HOST, "compile", begin_s, end_s, programs=count)

    # -------------------------------------------------------------------------------------- results

    def _retire(self, launch: _Launch) -> None:
        """Read the result of a launch and commit what it decided."""
        begin_s = time.perf_counter()
        packed = np.asarray(launch.result)
        end_s = time.perf_counter()
        self._stats.wait_s += end_s - begin_s
        self._trace.span(
            trace.DEVICE,
            launch.step.name,
            launch.launched_s,
            end_s,
            rows=sum(map(len, launch.rows)),
        )
        choice = unpack(packed, launch.step.num_top)
        counts = packed[..., -1]  # of a verification: tokens committed
        for at, row in self._places(launch.step, launch.rows):
            if not self._scheduler.is_current(row):
                self._stats.surplus_tokens += 1
                continue
            self._scheduler.retire(row)
            live = self._live[row.sample]
            match row:
                case VerifyRow():
                    self._count_window(row, int(counts[at, 0]))
                    for i in range(int(counts[at, 0])):
                        if not self._commit(live, choice, (at, i)):
                            break
                case DecodeRow(is_draft=True):
                    if not live.ends.isdisjoint(np.ravel(choice.token_ids[at])[: row.num_drafts]):
                        self._scheduler.close_window(row)
                case DecodeRow() | PrefillRow(is_last=True):
                    self._commit(live, choice, at)
            if row.sample.state is SampleState.RUNNING:
                self._scheduler.share_pages(row.sample)

    def _count_window(self, row: VerifyRow, num_committed: int) -> None:
        self._stats.num_windows += 1
        self._stats.draft_tokens += row.num_drafts
        self._stats.accepted_tokens += num_committed - 1
        self._stats.num_rollbacks += num_committed <= row.num_drafts

    def _commit(self, live: _Live, choice, at) -> bool:
        """Append a token and tell the consumer; False if the sample has ended."""
        sample = live.sample
        logprob = choice.logprobs[at]
        if logprob != logprob:
            where = f"a NaN logit at position {len(sample.tokens)}"
            self._finish(
                sample, FinishReason.ERROR, f"{where}; check the weights for NaN or infinity"
            )
            return False
        token_id = int(choice.token_ids[at])
        top = ()
        if live.num_top:
            ids, values = choice.top_ids[at], choice.top_logprobs[at]
            top = tuple((int(ids[k]), values[k]) for k in range(live.num_top))
        self._scheduler.commit(sample, token_id)
        live.new_ids.append(token_id)
        live.new_logprobs.append(logprob)
        live.new_top.append(top)
        self._stats.decode_tokens += 1
        reason, error = None, ""
        if live.on_token is not ignore_token:
            event = TokenEvent(
                request_idx=sample.request_id,
                sample_idx=sample.sample_idx,
                token_id=token_id,
                logprob=logprob,
                top_logprobs=top,
            )
            try:
                reason = FinishReason.STOP if live.on_token(event) else None
            except Exception as raised:
                reason, error = FinishReason.ERROR, f"its consumer raised {raised!r}"
        if reason is None and token_id in live.ends:
            reason = FinishReason.STOP
        if reason is None and len(sample.tokens) >= sample.most_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(sample, reason, error)
        return reason is None

    def _finish(self, sample: Sample, reason: FinishReason, error: str = "") -> None:
        """End a sample, free what it holds and note what to tell."""
        self._scheduler.end(sample)
        live = self._live.pop(sample)
        self._observe_release(live)
        self._stats.end_to_end_s.add(time.perf_counter() - live.arrived_s)
        self._stats.num_failed += reason is FinishReason.ERROR
        self._stats.num_finished += reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._trace.request(
            "e", live.key, f"request {live.key}", reason=reason.value, tokens=sample.num_outputs
        )
        self._outputs.append(self._output(live, reason, error))
        if not any(other in self._live for other in self._samples[sample.request_id]):
            del self._samples[sample.request_id]

    def _release(self) -> list[RequestOutput]:
        """What this step has to tell, in order of arrival where samples go on."""
        for live in self._live.values():
            if live.new_ids:
                self._observe_release(live)
                self._outputs.append(self._output(live, None, ""))
                live.new_ids, live.new_logprobs, live.new_top = [], [], []
        outputs, self._outputs = self._outputs, []
        return outputs

    def _output(self, live: _Live, reason: FinishReason | None, error: str) -> RequestOutput:
        return RequestOutput(
            request_id=live.sample.request_id,
            sample_idx=live.sample.sample_idx,
            token_ids=tuple(live.new_ids),
            logprobs=tuple(live.new_logprobs),
            top_logprobs=tuple(live.new_top),
            finish_reason=reason,
            error=error,
            weight_version=self._weight_version,
        )

    # -------------------------------------------------------------------------------- observability

    def stats(self) -> EngineStats:
        """Counters since the engine was made, and how things stand now. Do not change it."""
        stats, pools = self._stats, self._scheduler.pools
        stats.num_waiting = self._scheduler.num_waiting
        stats.num_running = len(self._scheduler.running)
        stats.num_pages_cached = sum(pool.num_cached for pool in pools)
        stats.num_pages_held = sum(pool.num_pages - pool.num_available for pool in pools)
        stats.num_pages_evicted = sum(pool.num_evicted for pool in pools)
        stats.num_preempted = self._scheduler.num_preempted
        stats.prefix_tokens = self._scheduler.num_prefix_tokens
        return stats

    def _observe(
        self, begin_s: float, planned_s: float, launched_s: float, wait_s: float, did_launch: bool
    ) -> None:
        end_s = time.perf_counter()
        stats = self._stats
        stats.plan_s += planned_s - begin_s
        stats.launch_s += launched_s - planned_s
        stats.commit_s += end_s - launched_s - wait_s
        if did_launch:
            stats.num_steps += 1
            stats.step_s.add(end_s - begin_s)
        self._trace.span(trace.HOST, "plan", begin_s, planned_s)
        self._trace.span(trace.HOST, "launch", planned_s, launched_s)
        self._trace.span(trace.HOST, "wait and commit", launched_s, end_s, wait_ms=wait_s * 1e3)

    def _observe_release(self, live: _Live) -> None:
        if not live.new_ids:
            return
        now_s = time.perf_counter()
        if live.released_s:
            self._stats.between_tokens_s.add(now_s - live.released_s)
        else:
            self._stats.first_token_s.add(now_s - live.arrived_s)
            self._trace.request("n", live.key, "first token")
        live.released_s = now_s


_HEAD = 3
_IDLE: tuple[SamplingParams, int] = (SamplingParams(), 0)


def _check_config(config: EngineConfig, dp: int, context: int) -> None:
    """Refuse what does not go with the mesh or the model."""
    for name in ("batch_size", "num_pages"):
        if getattr(config, name) % dp:
            raise ValueError(
                f"{name}={getattr(config, name)} must be a multiple of dp={dp}, so that each "
                "replica has as many"
            )
    for batch in config.decode_batches:
        if batch % dp:
            raise ValueError(f"{batch} of decode_batches must be a multiple of dp={dp}")
    if config.max_len > context:
        raise ValueError(
            f"max_len={config.max_len} is longer than the model's context of {context} tokens"
        )


def _draft_share(config: EngineConfig, backend: Backend) -> float:
    """The share asked for, or the one that is quickest as far as was measured."""
    if config.draft_share is not None:
        return config.draft_share
    return 0.0 if backend is Backend.SM90 and config.draft_weights == "full" else 1.0


def _smallest(sizes: Sequence[int], rows: Sequence[Sequence[Row]]) -> int:
    """The smallest of `sizes`, which ascend, that holds the rows of every replica."""
    most = max(len(part) for part in rows)
    return next(size for size in sizes if size >= most)


def _rounded_top(num_top: int) -> int:
    """Few sizes, so that few programs are compiled: 0, 4, 16 or 64."""
    return next(size for size in (0, 4, 16, 64) if size >= num_top)


class _CompletionBuilder:
    """Puts the outputs of a sample together."""

    def __init__(self):
        self._outputs: list[RequestOutput] = []

    def add(self, output: RequestOutput) -> None:
        self._outputs.append(output)

    def completion(self, *, request_idx: int, sample_idx: int, request: Request) -> Completion:
        reason = self._outputs[-1].finish_reason
        assert reason is not None
        return Completion(
            request_idx=request_idx,
            sample_idx=sample_idx,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(i for o in self._outputs for i in o.token_ids),
            logprobs=tuple(p for o in self._outputs for p in o.logprobs),
            top_logprobs=tuple(t for o in self._outputs for t in o.top_logprobs),
            finish_reason=reason,
            weight_version=self._outputs[-1].weight_version,
        )


def _as_index(index: int, on_token: OnToken, raised: list[BaseException]) -> OnToken:
    """Tell `on_token` the index of the request, and keep what it raises."""
    if on_token is ignore_token:
        return ignore_token

    def tell(event: TokenEvent) -> bool:
        if raised:
            return True
        try:
            return on_token(
                TokenEvent(
                    request_idx=index,
                    sample_idx=event.sample_idx,
                    token_id=event.token_id,
                    logprob=event.logprob,
                    top_logprobs=event.top_logprobs,
                )
            )
        except Exception as error:
            raised.append(error)
            return True

    return tell


def _error_of(output: RequestOutput, first: int) -> Exception:
    message = f"request {output.request_id - first}: {output.error}"
    return FloatingPointError(message) if "NaN" in output.error else RuntimeError(message)
