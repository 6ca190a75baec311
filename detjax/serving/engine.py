# SPDX-License-Identifier: Apache-2.0
"""The engine: many requests at once, each with its own answer, while the host runs a step ahead.

Which requests share a step, in which slot, how a prompt is cut and which drafts are tried is
decided here and in the scheduler, and none of it can change a bit of a deterministic answer.
"""

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from detjax.models.loading import LoadedModel
from detjax.parallel.mesh import DP_AXIS
from detjax.serving import trace
from detjax.serving.config import EngineConfig, ReplicaSizes, check_config, draft_share
from detjax.serving.launcher import Launch, Launcher, ignore_compiling, places
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
from detjax.serving.sampling import is_filtered
from detjax.serving.scheduler import (
    DecodeRow,
    PrefillRow,
    Sample,
    SampleState,
    Scheduler,
    SchedulerConfig,
    VerifyRow,
    propose_nothing,
)
from detjax.serving.steps import (
    Candidates,
    CompiledSteps,
    keep_candidates,
    unpack,
)

OnToken = Callable[[TokenEvent], bool]
"""Told each token as it is released; True ends the sample."""


def ignore_token(event: TokenEvent) -> bool:
    """Let the sample go on."""
    return False


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
        dp = model.mesh.shape[DP_AXIS]
        check_config(config, dp, model.config.max_position_embeddings)
        share = draft_share(config, model.backend)
        sizes = ReplicaSizes.of(config, dp=dp, page_len=model.profile.attention_block)
        self._model = model
        self._config = config
        self._trace = tracer
        self._stats = EngineStats(num_pages=dp * sizes.num_pages)
        self._live: dict[Sample, _Live] = {}
        self._launcher = Launcher(
            model,
            config,
            sizes,
            dp=dp,
            draft_share=share,
            candidates=candidates,
            steps=steps,
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
                step_tokens=sizes.step_tokens,
                decode_patience=config.decode_patience,
                verify_rows=sizes.verify_sizes[-1],
                verify_window=config.verify_window,
                verify_patience=config.verify_patience,
                verify_deadline=config.verify_deadline,
                draft_share=share,
                decode_steps=config.decode_steps,
                ageing_steps=config.ageing_steps,
                has_prefix_cache=config.has_prefix_cache,
                is_synchronous=config.has_prompt_lookup,
            ),
            root_key=hashlib.sha256(f"{model.fingerprint} {model.config}".encode()).digest(),
            propose=propose_from_prompt if config.has_prompt_lookup else propose_nothing,
        )
        self._inbox: deque[_Arrival | int] = deque()
        self._ids = itertools.count()
        self._samples: dict[int, list[Sample]] = {}
        self._in_flight: list[Launch] = []
        self._outputs: list[RequestOutput] = []
        self._weight_version = 0

    @property
    def steps(self) -> CompiledSteps:
        """The compiled programs, which other engines of these sizes on this model may share."""
        return self._launcher.steps

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
        self._launcher.take_weights()
        self._scheduler.forget_pages()
        self._weight_version = version

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
        launched = self._launcher.launch(plan)
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
        self._launcher.least_top = max((r.sampling.num_top_logprobs for r in requests), default=0)
        self._launcher.always_filters = any(is_filtered(r.sampling) for r in requests)
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
        self._launcher.least_top, self._launcher.always_filters = 0, False

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
        self._launcher.compile(progress, with_filters=with_filters)

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
            live = self._live[row.sample]
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
