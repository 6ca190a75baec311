# SPDX-License-Identifier: Apache-2.0
"""The engine: many requests at once, each with its own answer, while the host runs a step ahead.

Which requests share a step, in which slot, how a prompt is cut and which drafts are tried is
decided here and in the scheduler, and none of it can change a bit of a deterministic answer.
"""

import hashlib
import itertools
import threading
import time
import warnings
from collections import abc, deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from detjax.models.loading import LoadedModel
from detjax.parallel.mesh import DP_AXIS
from detjax.serving import trace
from detjax.serving.config import EngineConfig, ReplicaSizes, check_config, max_draft_fraction
from detjax.serving.metrics import EngineStats
from detjax.serving.model_runner import Launch, ModelRunner, ignore_compiling, places
from detjax.serving.ngram import propose_from_prompt
from detjax.serving.programs import (
    Candidates,
    ProgramCache,
    keep_candidates,
    unpack,
)
from detjax.serving.request import (
    MAX_SEQUENCES,
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
    PrefillRow,
    Scheduler,
    SchedulerConfig,
    Sequence,
    SequenceError,
    SequenceState,
    VerifyRow,
    propose_nothing,
)

OnToken = Callable[[TokenEvent], bool]
"""Told each token as it is released; True ends the sequence.

It may call `add_request` and `cancel`, and must not call `step`, `drain`, `generate` or `reset`.
"""


def ignore_token(event: TokenEvent) -> bool:
    """Let the sequence go on."""
    return False


class EngineStoppedError(RuntimeError):
    """A step failed in a way that leaves the device or the host in doubt; `Engine.reset` helps."""


class EngineFullError(RuntimeError):
    """More requests wait than `EngineConfig.max_waiting` allows; try again later."""


MAX_TAKEN = MAX_SEQUENCES
"""Sequences that a step takes from the inbox, so that no step is long because many ask at once."""


class _Token(NamedTuple):
    """A token that a step has committed and not told yet."""

    position: int
    token_id: int
    logprob: np.float32
    top_logprobs: TopLogprobs


@dataclass(kw_only=True, slots=True, eq=False)
class _Live:
    """What the engine itself knows of a sequence."""

    seq: Sequence
    on_token: OnToken
    ends: frozenset[int]
    is_filtered: bool
    num_top: int
    arrived_s: float
    told_len: int  # of its tokens, the prompt's included, that its consumer knows
    released_s: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.seq.request_id}.{self.seq.sequence_idx}"

    @property
    def end(self) -> FinishReason | None:
        """Why the sequence ends with what it has committed, whatever its consumer says."""
        if self.seq.num_outputs and self.seq.tokens[-1] in self.ends:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.seq.tokens) >= self.seq.max_len else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrival:
    """A request on its way in."""

    request_id: int
    request: Request
    on_token: OnToken
    arrived_s: float


class Engine:
    """Runs requests on one model.

    `add_request` and `cancel` may be called from any thread, and from `on_token`; everything else
    from one thread at a time.

    A call may be interrupted anywhere (Ctrl-C): the next one begins anew from what was committed,
    and answers have the same bits. Any other exception of a step stops the engine: see `reset`.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        candidates: Candidates = keep_candidates,
        programs: ProgramCache | None = None,
        tracer: trace.TracesEvents = trace.NO_TRACE,
    ):
        """Allocate the cache.

        Args:
            model: On its mesh.
            config: Sizes and policies.
            candidates: Replaces the drafts of `dvr`, to test that no draft can change an answer.
            programs: `programs` of another engine of this model and these sizes, whose compiled
                programs and candidates are used; None compiles new ones.
            tracer: Keeps a timeline.

        Raises:
            ValueError: If sizes do not divide over replicas or the context is too short.
        """
        dp = model.mesh.shape[DP_AXIS]
        check_config(config, dp, model.config.max_position_embeddings)
        share = max_draft_fraction(config, model.backend)
        sizes = ReplicaSizes.of(config, dp=dp, page_len=model.profile.attention_block)
        self._model = model
        self._config = config
        self._trace = tracer
        self._stats = EngineStats(num_pages=dp * sizes.num_pages)
        self._live: dict[Sequence, _Live] = {}
        self._runner = ModelRunner(
            model,
            config,
            sizes,
            dp=dp,
            max_draft_fraction=share,
            candidates=candidates,
            programs=programs,
            wants=self._live,
            stats=self._stats,
            tracer=tracer,
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_replicas=dp,
                num_slots=sizes.num_slots,
                num_pages=sizes.num_pages,
                page_len=sizes.page_len,
                prefill_shapes=sizes.prefill_shapes,
                max_tokens_per_step=sizes.max_tokens_per_step,
                max_prefill_streak=config.max_prefill_streak,
                verify_rows=sizes.verify_sizes[-1],
                verify_window=config.verify_window,
                verify_patience=config.verify_patience,
                verify_deadline=config.verify_deadline,
                max_draft_fraction=share,
                decode_steps=config.decode_steps,
                ageing_steps=config.ageing_steps,
                has_prefix_cache=config.has_prefix_cache,
                is_synchronous=config.has_prompt_lookup,
            ),
            root_key=hashlib.sha256(f"{model.fingerprint} {model.config}".encode()).digest(),
            propose=propose_from_prompt if config.has_prompt_lookup else propose_nothing,
        )
        # What is true of requests is in `_inbox`, `_cancels`, `_live`, `_news` and `_outputs`, each
        # changed by one operation at a time; after an interrupt `_mend` makes the rest of it.
        self._inbox: deque[_Arrival] = deque()
        self._num_in_inbox = 0
        self._lock = threading.Lock()  # of the two above, and of nothing that takes long
        self._cancels: deque[int] = deque()
        self._ids = itertools.count()
        self._sequences: dict[int, list[Sequence]] = {}
        self._news: dict[Sequence, list[_Token]] = {}
        self._in_flight: list[Launch] = []
        self._outputs: list[RequestOutput] = []
        self._unwanted: set[int] = set()  # requests of a `generate` that did not end
        self._is_torn = False  # a call has begun and not ended
        self._stopped = ""  # why
        self._weight_version = 0

    @property
    def programs(self) -> ProgramCache:
        """The compiled programs, which other engines of these sizes on this model may share."""
        return self._runner.programs

    # ------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        prompt_token_ids: abc.Sequence[int],
        sampling: SamplingParams,
        *,
        is_deterministic: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        on_token: OnToken = ignore_token,
    ) -> int:
        """Queue a request.

        While `generate` runs, it is served beside the list; what it releases is told by the next
        `step` or `drain`.

        Args:
            prompt_token_ids: At least one token.
            sampling: How each next token is chosen.
            is_deterministic: Whether the answer must be the canonical one.
            priority: Higher goes first; a level is worth `ageing_steps` steps of waiting.
            cache_salt: As `Request` has it.
            on_token: Told every token as it is released; True ends that sequence. If it raises,
                that sequence alone fails.

        Returns:
            The request's id, which its outputs carry.

        Raises:
            ValueError: If the request cannot run on this engine.
            EngineFullError: If too many wait.
            EngineStoppedError: If an error has stopped the engine.
        """
        self._refuse_if_stopped()
        request = Request(
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            is_deterministic=is_deterministic,
            priority=priority,
            cache_salt=cache_salt,
        )
        self._check(request, "the prompt")
        if self._num_queued + request.sampling.n > self._config.max_waiting:
            raise EngineFullError(
                f"{self._num_queued} sequences wait, and max_waiting={self._config.max_waiting}; "
                "try again later, or raise it"
            )
        request_id = next(self._ids)
        self._add(request_id, request, on_token)
        return request_id

    def cancel(self, request_id: int) -> None:
        """End a request at the next step; its pages are free then. Unknown or ended: no effect."""
        self._cancels.append(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        self._drop_unwanted()
        parts = self._inbox, self._cancels, self._outputs, self._live
        return self._is_torn or any(parts)

    def load_weights(self, weights: dict, *, version: int) -> None:
        """Replace the model's weights in place, between requests. Outputs carry `version` from now.

        Cached prefixes are forgotten, and 8-bit drafts made anew. Other engines on the same model
        are not told.

        Args:
            weights: As `LoadedModel.replace_weights` takes them.
            version: Any number that tells these weights from others.

        Raises:
            ValueError: If a request is waiting or running, or a weight does not fit; nothing has
                changed then but the prefix cache.
            EngineStoppedError: If an error has stopped the engine.
        """
        self._refuse_if_stopped()
        self._mend()
        if self.has_work:
            raise ValueError("the engine is at work on requests of the old weights; drain() first")
        # WHY: forgotten first, so that an interrupt leaves no page of other weights.
        self._scheduler.forget_pages()
        self._model.replace_weights(weights)
        self._runner.take_weights()
        self._weight_version = version

    @property
    def _num_queued(self) -> int:
        """Sequences that wait for a slot, or for the next step to see them."""
        return self._scheduler.num_waiting + self._num_in_inbox

    def _add(self, request_id: int, request: Request, on_token: OnToken) -> None:
        arrival = _Arrival(
            request_id=request_id,
            request=request,
            on_token=on_token,
            arrived_s=time.perf_counter(),
        )
        with self._lock:
            self._inbox.append(arrival)
            self._num_in_inbox += request.sampling.n

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
        if request.sampling.stop:
            raise ValueError(
                f"{what} has stop={request.sampling.stop!r}, and an engine knows tokens, not "
                "text: ask detjax.LLM, or give the requests to detjax.serving.text.TextBatch"
            )
        if request.sampling.num_top_logprobs > vocab_size:
            raise ValueError(
                f"{what} asks for num_top_logprobs={request.sampling.num_top_logprobs}, more than "
                f"the vocabulary of {vocab_size}"
            )
        if request.is_deterministic and self._config.mode == "fast":
            raise ValueError(
                f"{what} is to be deterministic, and mode 'fast' makes no claim; use 'dvr' or "
                "'invariant', or is_deterministic=False"
            )

    def _take_inbox(self) -> None:
        """Let some of those who wait outside in, and end those who were cancelled."""
        num_taken = 0
        while self._inbox and num_taken < MAX_TAKEN:
            arrival = self._inbox[0]
            num_taken += arrival.request.sampling.n
            # It stays in the inbox until it is known, and `_mend` drops whom it finds in both.
            self._arrive(arrival)
            with self._lock:
                self._inbox.popleft()
                self._num_in_inbox -= arrival.request.sampling.n
        late = []
        while self._cancels:
            request_id = self._cancels[0]
            for seq in self._sequences.get(request_id, ()):
                if seq in self._live:
                    self._stats.num_cancelled += 1
                    self._finish(seq, FinishReason.CANCELLED)
            if any(arrival.request_id == request_id for arrival in tuple(self._inbox)):
                late.append(request_id)
            self._cancels.popleft()
        self._cancels.extend(late)

    def _arrive(self, arrival: _Arrival) -> None:
        """Make the sequences of a request. Should one of its values raise, it fails alone."""
        sampling, prompt = arrival.request.sampling, arrival.request.prompt_token_ids
        self._stats.num_requests += 1
        try:
            # WHY: as every launch will lay them out, so that none raises for those beside it.
            SamplingRows.pack([(sampling, sampling.n - 1)])
            np.asarray(prompt, np.int32)
            ends = frozenset((*self._model.config.eos_token_ids, *sampling.stop_token_ids))
        except Exception as error:
            self._stats.num_failed += sampling.n
            error = f"it cannot be laid out: {error!r}"
            self._outputs += _refused(arrival, error, self._weight_version)
            return
        lives = {live.seq: live for live in self._new_sequences(arrival, ends)}
        self._stats.prompt_tokens += len(prompt) * len(lives)
        for live in lives.values():
            self._trace.request("b", live.key, f"request {live.key}", prompt_tokens=len(prompt))
        self._sequences[arrival.request_id] = list(lives)
        self._live.update(lives)

    def _new_sequences(self, arrival: _Arrival, ends: frozenset[int]) -> list[_Live]:
        request, mode = arrival.request, self._config.mode
        sampling, length = request.sampling, len(request.prompt_token_ids)
        is_drafted = mode == "dvr" and request.is_deterministic
        seqs = [
            self._scheduler.add(
                request,
                request_id=arrival.request_id,
                sequence_idx=sequence_idx,
                max_len=min(length + sampling.max_tokens, self._config.max_len),
                is_drafted=is_drafted,
                is_canonical=mode == "invariant" or is_drafted,
            )
            for sequence_idx in range(sampling.n)
        ]
        return [
            _Live(
                seq=seq,
                on_token=arrival.on_token,
                ends=ends,
                is_filtered=is_filtered(sampling),
                num_top=sampling.num_top_logprobs,
                arrived_s=arrival.arrived_s,
                told_len=length,
            )
            for seq in seqs
        ]

    # ---------------------------------------------------------------------------------------- steps

    def step(self) -> list[RequestOutput]:
        """Launch a step, read the results of the one before, and return what those released.

        Raises:
            EngineStoppedError: If the device, the compiler or the host's own code fails, now or
                before. What is under way stays so until `reset`.
        """
        return self._step(None)

    def _step(self, wanted: Container[int] | None) -> list[RequestOutput]:
        """A step that tells of the wanted requests; the others' outputs are kept. None: of all."""
        self._refuse_if_stopped()
        self._mend()
        self._is_torn = True
        try:
            self._advance()
        except SequenceError as error:
            # Nothing was launched, or not all: whoever was planned begins anew.
            self._mend()
            self._is_torn = True
            if error.seq in self._live:
                self._finish(error.seq, FinishReason.ERROR, f"it raised {error.__cause__!r}")
        except Exception as error:
            self._stopped = f"{type(error).__name__}: {error}"
            raise self._stopped_error() from error
        told = self._told()
        mine = [o for o in told if wanted is None or o.request_id in wanted]
        kept = [o for o in told if wanted is not None and o.request_id not in wanted]
        # WHY: Python looks for interrupts at calls and loops, and there is none from here to the
        # caller: what is told is told once.
        self._outputs, self._news, self._is_torn = kept, {}, False
        return mine

    def _advance(self) -> None:
        """Launch a step and commit the results of the one before."""
        begin_s = time.perf_counter()
        self._take_inbox()
        batch = self._scheduler.schedule()
        for seq, reason in batch.failed:
            self._finish(seq, FinishReason.ERROR, reason)
        planned_s = time.perf_counter()
        launched = self._runner.launch(batch)
        self._scheduler.launched()
        launched_s = time.perf_counter()
        waited = self._stats.wait_s
        finished, self._in_flight = self._in_flight, launched
        for launch in finished:
            self._retire(launch)
        self._observe(begin_s, planned_s, launched_s, self._stats.wait_s - waited, bool(launched))

    def drain(self) -> list[RequestOutput]:
        """Step until nothing is left to do; return everything that was released on the way.

        If a step raises, what was released before is told by the next `step`, `drain` or `reset`.
        """
        outputs: list[RequestOutput] = []
        try:
            while self.has_work:
                outputs += self.step()
        except BaseException:
            self._outputs[:0] = outputs
            raise
        return outputs

    def generate(
        self, requests: abc.Sequence[Request], *, on_token: OnToken = ignore_token
    ) -> list[Completion]:
        """Run requests to their end.

        Args:
            requests: Any number, served in this order where priorities are equal.
            on_token: Called with every token as it is released, `request_idx` being an index into
                `requests`; True ends that sequence. What it raises ends the run.

        Returns:
            Completions in order of (request, sequence).

        Raises:
            ValueError: If a request does not fit the engine, before anything runs; or if the
                engine is at work on others.
            FloatingPointError: If a logit is NaN, naming the request and the position.
            EngineStoppedError: As `step` does.
            RuntimeError: If a request failed for another reason.
        """
        self._refuse_if_stopped()
        self._mend()
        for idx, request in enumerate(requests):
            self._check(request, f"prompt {idx}")
        if self.has_work:
            raise ValueError("the engine is at work on other requests; drain() them first")
        # WHY: one variant for the whole list, so that fewer programs are compiled.
        self._runner.min_top = max((r.sampling.num_top_logprobs for r in requests), default=0)
        self._runner.always_filters = any(is_filtered(r.sampling) for r in requests)
        raised: list[BaseException] = []
        builders = {
            (i, s): _CompletionBuilder()
            for i, request in enumerate(requests)
            for s in range(request.sampling.n)
        }
        waiting = deque(sorted(range(len(requests)), key=lambda i: -requests[i].priority))
        indices: dict[int, int] = {}
        num_left = len(builders)
        try:
            while num_left:
                while waiting and self._num_queued < MAX_TAKEN:
                    i, request_id = waiting.popleft(), next(self._ids)
                    indices[request_id] = i
                    self._add(request_id, requests[i], _as_index(i, on_token, raised))
                for output in self._step(indices):
                    i = indices[output.request_id]
                    builders[i, output.sequence_idx].add(output)
                    num_left -= output.finish_reason is not None
                    if raised:
                        raise raised[0]
                    if output.finish_reason is FinishReason.ERROR:
                        raise _error_of(output, i)
        finally:
            self._unwanted.update(indices)
            self._runner.min_top, self._runner.always_filters = 0, False
            self._drop_unwanted()
        return [
            builder.completion(request_idx=i, sequence_idx=s, request=requests[i])
            for (i, s), builder in builders.items()
        ]

    # --------------------------------------------------------------------------- when a call breaks

    def reset(self) -> list[RequestOutput]:
        """End what is under way and begin anew, as after an error that has stopped the engine.

        Cache and slots are allocated again, and cached prefixes forgotten; weights and compiled
        programs stay. If the device is still broken, this raises and the engine stays stopped.

        Returns:
            What was not told yet, and the end of every request: ERROR, with the reason.
        """
        self._is_torn = True
        self._scheduler.forget_pages()  # first, lest an interrupt leave pages that are not there
        self._runner.reset()
        stopped = f"the engine has stopped: {self._stopped}"
        reason = stopped if self._stopped else "the engine was reset"
        self._mend()
        for seq in tuple(self._live):
            self._finish(seq, FinishReason.ERROR, reason)
        lost = {arrival.request_id: arrival for arrival in tuple(self._inbox)}
        for arrival in lost.values():
            self._outputs += _refused(arrival, reason, self._weight_version)
        self._keep_in_inbox(lambda arrival: arrival.request_id not in lost)
        self._cancels.clear()
        self._drop_unwanted()
        outputs = self._outputs
        self._outputs, self._news, self._is_torn, self._stopped = [], {}, False, ""
        return outputs

    def _stopped_error(self) -> EngineStoppedError:
        return EngineStoppedError(
            f"the engine has stopped: {self._stopped}; engine.reset() ends what is under way and "
            "allocates the cache anew"
        )

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise self._stopped_error()

    def _mend(self) -> None:
        """Make the host's tables anew from what is true of requests, if a call did not end."""
        if not self._is_torn:
            return
        ended = {
            (o.request_id, o.sequence_idx) for o in self._outputs if o.finish_reason is not None
        }
        known = {request_id for request_id, _ in ended} | {s.request_id for s in self._live}
        self._keep_in_inbox(lambda arrival: arrival.request_id not in known)
        for seq in tuple(self._live):
            news = self._news.get(seq)
            if (seq.request_id, seq.sequence_idx) in ended:
                self._forget(seq)
            elif news and news[-1].position == len(seq.tokens):
                seq.tokens.append(news[-1].token_id)
        self._in_flight = []
        self._sequences = {}
        for seq in self._live:
            self._sequences.setdefault(seq.request_id, []).append(seq)
        is_lost = self._runner.is_lost
        if is_lost:
            self._scheduler.forget_pages()
            self._runner.reset()
        self._scheduler.restart(self._live)
        for seq, live in tuple(self._live.items()):
            reason, error = live.end, ""
            if live.told_len < len(seq.tokens):
                reason, error = self._tell(live, self._news[seq][-1])
            if reason is not None:
                self._finish(seq, reason, error)
        self._is_torn = False
        if is_lost:
            warnings.warn(
                "a launch was interrupted and took the cache with it: the cache was allocated "
                "anew, and requests under way are computed again",
                RuntimeWarning,
                stacklevel=3,
            )

    def _drop_unwanted(self) -> None:
        """Forget the requests of a `generate` that did not end, and nobody else's."""
        if not self._unwanted:
            return
        was_torn, self._is_torn = self._is_torn, True
        for seq in tuple(self._live):
            if seq.request_id in self._unwanted:
                if not was_torn:
                    self._scheduler.end(seq)
                self._forget(seq)
        self._outputs = [o for o in self._outputs if o.request_id not in self._unwanted]
        self._keep_in_inbox(lambda arrival: arrival.request_id not in self._unwanted)
        self._unwanted.clear()
        self._is_torn = was_torn

    def _keep_in_inbox(self, is_kept: Callable[[_Arrival], bool]) -> None:
        """Forget other arrivals, while any thread may bring new ones."""
        with self._lock:
            self._inbox = deque(filter(is_kept, self._inbox))
            self._num_in_inbox = sum(arrival.request.sampling.n for arrival in self._inbox)

    def _forget(self, seq: Sequence) -> None:
        """Drop a sequence from the engine's own tables."""
        self._news.pop(seq, None)
        self._live.pop(seq, None)
        if not any(other in self._live for other in self._sequences.get(seq.request_id, ())):
            self._sequences.pop(seq.request_id, None)

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
        self._refuse_if_stopped()
        self._runner.compile(progress, with_filters=with_filters)

    # -------------------------------------------------------------------------------------- results

    def _retire(self, launch: Launch) -> None:
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
        for at, row in places(launch.step, launch.rows):
            if not self._scheduler.is_current(row):
                self._stats.surplus_tokens += 1
                continue
            self._scheduler.retire(row)
            live = self._live[row.seq]
            match row:
                case VerifyRow():
                    self._count_window(row, int(counts[at, 0]))
                    for i in range(int(counts[at, 0])):
                        if not self._commit(live, choice, (at, i)):
                            break
                case DecodeRow(is_draft=True):
                    drafts = np.ravel(choice.token_ids[at])[: row.num_tokens]
                    if not live.ends.isdisjoint(drafts):
                        self._scheduler.close_window(row)
                case DecodeRow() if launch.step.length > 1:
                    for i in range(row.num_tokens):
                        if not self._commit(live, choice, (at, i)):
                            self._stats.surplus_tokens += row.num_tokens - 1 - i
                            break
                case DecodeRow() | PrefillRow(is_last=True):
                    self._commit(live, choice, at)
            if row.seq.state is SequenceState.RUNNING:
                self._scheduler.share_pages(row.seq)

    def _count_window(self, row: VerifyRow, num_committed: int) -> None:
        self._stats.num_windows += 1
        self._stats.draft_tokens += row.num_drafts
        self._stats.accepted_tokens += num_committed - 1
        self._stats.num_rollbacks += num_committed <= row.num_drafts

    def _commit(self, live: _Live, choice, at) -> bool:
        """Append a token and tell the consumer; False if the sequence has ended."""
        seq = live.seq
        logprob = choice.logprobs[at]
        if logprob != logprob:
            where = f"a NaN logit at position {len(seq.tokens)}"
            self._finish(seq, FinishReason.ERROR, f"{where}; check the weights for NaN or infinity")
            return False
        token_id = int(choice.token_ids[at])
        top = ()
        if live.num_top:
            ids, values = choice.top_ids[at], choice.top_logprobs[at]
            top = tuple((int(ids[k]), values[k]) for k in range(live.num_top))
        # The news first: should an interrupt come between, `_mend` commits what it finds there.
        token = _Token(len(seq.tokens), token_id, logprob, top)
        self._news.setdefault(seq, []).append(token)
        self._scheduler.commit(seq, token_id)
        self._stats.decode_tokens += 1
        reason, error = self._tell(live, token)
        if reason is not None:
            self._finish(seq, reason, error)
        return reason is None

    def _tell(self, live: _Live, token: _Token) -> tuple[FinishReason | None, str]:
        """Tell the consumer of a committed token; whether the sequence ends here, and with what."""
        live.told_len = token.position + 1
        if live.on_token is ignore_token:
            return live.end, ""
        event = TokenEvent(
            request_idx=live.seq.request_id,
            sequence_idx=live.seq.sequence_idx,
            token_id=token.token_id,
            logprob=token.logprob,
            top_logprobs=token.top_logprobs,
        )
        try:
            return (FinishReason.STOP if live.on_token(event) else live.end), ""
        except Exception as raised:
            return FinishReason.ERROR, f"its consumer raised {raised!r}"

    def _finish(self, seq: Sequence, reason: FinishReason, error: str = "") -> None:
        """End a sequence, free what it holds and note what to tell."""
        live = self._live[seq]
        self._observe_release(live)
        # The end first: should an interrupt come between, `_mend` drops whom it finds there.
        self._outputs.append(self._output(live, reason, error))
        self._scheduler.end(seq)
        self._forget(seq)
        self._stats.end_to_end_s.add(time.perf_counter() - live.arrived_s)
        self._stats.num_failed += reason is FinishReason.ERROR
        self._stats.num_finished += reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._trace.request(
            "e", live.key, f"request {live.key}", reason=reason.value, tokens=seq.num_outputs
        )

    def _told(self) -> list[RequestOutput]:
        """What this step has to tell: ends, then in order of arrival where sequences go on."""
        going_on = [self._live[seq] for seq in self._news]  # few, though many may wait
        going_on.sort(key=lambda live: (live.seq.request_id, live.seq.sequence_idx))
        for live in going_on:
            self._observe_release(live)
        return [*self._outputs, *(self._output(live, None, "") for live in going_on)]

    def _output(self, live: _Live, reason: FinishReason | None, error: str) -> RequestOutput:
        news = self._news.get(live.seq, ())
        return RequestOutput(
            request_id=live.seq.request_id,
            sequence_idx=live.seq.sequence_idx,
            token_ids=tuple(token.token_id for token in news),
            logprobs=tuple(token.logprob for token in news),
            top_logprobs=tuple(token.top_logprobs for token in news),
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
        if live.seq not in self._news:
            return
        now_s = time.perf_counter()
        if live.released_s:
            self._stats.between_tokens_s.add(now_s - live.released_s)
        else:
            self._stats.first_token_s.add(now_s - live.arrived_s)
            self._trace.request("n", live.key, "first token")
        live.released_s = now_s


class _CompletionBuilder:
    """Puts the outputs of a sequence together."""

    def __init__(self):
        self._outputs: list[RequestOutput] = []

    def add(self, output: RequestOutput) -> None:
        self._outputs.append(output)

    def completion(self, *, request_idx: int, sequence_idx: int, request: Request) -> Completion:
        reason = self._outputs[-1].finish_reason
        assert reason is not None
        return Completion(
            request_idx=request_idx,
            sequence_idx=sequence_idx,
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
                    sequence_idx=event.sequence_idx,
                    token_id=event.token_id,
                    logprob=event.logprob,
                    top_logprobs=event.top_logprobs,
                )
            )
        except Exception as error:
            raised.append(error)
            return True

    return tell


def _refused(arrival: _Arrival, error: str, version: int) -> list[RequestOutput]:
    """The end of every sequence of a request that never began."""
    return [
        RequestOutput(
            request_id=arrival.request_id,
            sequence_idx=i,
            token_ids=(),
            logprobs=(),
            top_logprobs=(),
            finish_reason=FinishReason.ERROR,
            error=error,
            weight_version=version,
        )
        for i in range(arrival.request.sampling.n)
    ]


def _error_of(output: RequestOutput, index: int) -> Exception:
    message = f"request {index}: {output.error}"
    return FloatingPointError(message) if "NaN" in output.error else RuntimeError(message)
