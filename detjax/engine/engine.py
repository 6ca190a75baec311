# SPDX-License-Identifier: Apache-2.0
"""The engine: many requests at once, each with its own answer, while the host runs a step ahead.

Which requests share a step, in which slot, how a prompt is cut and which drafts are tried is
decided by the scheduler, and none of it can change a bit of a deterministic answer.
"""

import dataclasses
import hashlib
import itertools
import os
import threading
from collections import abc
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import jax

from detjax.engine import trace
from detjax.engine.config import (
    DRAFT_MODEL,
    DRAFTS_OF_OTHERS,
    EngineConfig,
    ReplicaConfig,
    check_adapter_mode,
    check_config,
)
from detjax.engine.errors import (
    EngineFullError,
    EngineResetError,
    EngineStoppedError,
    RowError,
    StructuredOutputError,
)
from detjax.engine.heap import frozen_heap
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.generate_run import GenerateRun, OnCompletion, ignore_completion
from detjax.engine.outputs.output_processor import OutputProcessor
from detjax.engine.outputs.request_output import FinishReason, PromptLogprobs, RequestOutput
from detjax.engine.outputs_lease import OutputsLease
from detjax.engine.recovery import Recovery
from detjax.engine.requests.input_processor import MAX_ADMITTED, InputProcessor
from detjax.engine.requests.known_adapters import KnownAdapters
from detjax.engine.requests.request import Request
from detjax.engine.requests.request_states import RequestStates
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import OnToken, SequenceError, ignore_token
from detjax.engine.running.draft_programs import check_draft_model
from detjax.engine.running.launch_times import quickest_steps_ahead
from detjax.engine.running.memory import check_local_pages, local_reach
from detjax.engine.running.model_runner import Launch, ModelRunner
from detjax.engine.running.programs import Candidates, ProgramCache, keep_candidates
from detjax.engine.running.ready_programs import ignore_progress
from detjax.engine.sampling.grammars import Grammars
from detjax.engine.scheduling.drafters import HOST_DRAFTERS, Drafter
from detjax.engine.scheduling.scheduler import Scheduler
from detjax.engine.self_check.claim import Claim
from detjax.engine.self_check.evidence import CheckDifference
from detjax.engine.self_check.recheck import Rechecks
from detjax.engine.sleep import Sleep
from detjax.engine.stat_logger import StatLogger
from detjax.engine.step_loop import StepLoop
from detjax.engine.turns import one_thread_at_a_time, outputs_once
from detjax.engine.weight_history import WeightHistory
from detjax.interpreter_exit import finishes_before_exit, refuse_at_exit
from detjax.models.adapters.low_rank import Adapter
from detjax.models.adapters.stack import num_adapter_slots
from detjax.models.heads.head import AnyDraftModel, DraftHead
from detjax.models.loading import LoadedModel
from detjax.models.params import num_params
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.parallel.mesh import DP_AXIS, TP_AXIS


class Engine:
    """Runs requests on one model.

    Any thread may call. `add_request` and `cancel` never wait; what steps, checks, compiles or
    loads waits for its turn, and `generate` and `score` have theirs until they end. A listener may
    add and cancel requests, and must not wait for another thread that steps.

    When the main thread ends, a call of another thread ends within a step: a daemon thread ends
    without a word, and any other thread gets `InterpreterExitError`.

    A call may be interrupted anywhere (Ctrl-C): the next one begins anew from what was committed,
    and answers have the same bits. Any other exception of a step stops the engine: see `reset`.
    """

    @finishes_before_exit
    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        candidates: Candidates = keep_candidates,
        programs: ProgramCache | None = None,
        tracer: trace.TracesEvents = trace.NO_TRACE,
        grammars: Grammars | None = None,
        drafters: abc.Sequence[Drafter] = HOST_DRAFTERS,
        draft_model: AnyDraftModel | None = None,
    ):
        """Allocate the cache.

        Args:
            model: On its mesh.
            config: Sizes and policies.
            candidates: Replaces the drafts of `dvr` and of a head, to test that no draft can
                change an answer.
            programs: `programs` of another engine of this model and these sizes, whose compiled
                programs and candidates are used; None compiles new ones.
            tracer: Keeps a timeline.
            grammars: Of the model's tokenizer, for requests with structured output.
            drafters: Sources of drafts on the host, where `config` has `has_prompt_lookup`.
            draft_model: On the mesh of `model`; makes the drafts where `config.draft_weights` is
                "draft_model", or the method of a `DraftHead`, and is not used elsewhere.

        Raises:
            ValueError: If sizes do not divide over replicas, the context is too short, or there is
                no draft model that goes with the model where there should be one.
        """
        dp = model.mesh.shape[DP_AXIS]
        check_config(config, dp, model.config.max_position_embeddings)
        replica = ReplicaConfig.of(
            config, dp=dp, tp=model.mesh.shape[TP_AXIS], page_len=model.profile.attention_block,
            steps_beat_xla=KERNELS[model.backend].steps_beat_xla, local_reach=local_reach(model),
            has_adapters=num_adapter_slots(model) > 0,
        )  # fmt: skip
        check_local_pages(model, config)
        check_adapter_mode(config.mode, has_adapters=num_adapter_slots(model) > 0)
        if jax.process_count() > 1:
            # WHY: each process plans its own steps, and their clocks differ.
            replica = dataclasses.replace(replica, adapts_drafts=False)
        draft_model = self._checked_draft_model(draft_model, model, config)
        self._model, self._config = model, config
        self._stats = EngineStats(
            num_pages=dp * replica.num_pages, num_local_pages=dp * replica.num_local_pages
        )
        self._scheduler = Scheduler(
            replica,
            root_key=hashlib.sha256(f"{model.fingerprint} {model.config}".encode()).digest(),
            drafters=drafters if config.has_prompt_lookup else (),
            num_adapter_slots=num_adapter_slots(model),
        )
        self._adapters = KnownAdapters(model)
        self._claim = Claim(model, replica, self._stats)
        self._runner = ModelRunner(
            model,
            replica,
            candidates=candidates,
            programs=programs,
            draft_model=draft_model,
            claim=self._claim,
            idle_pages=self._scheduler.idle_pages,
            stats=self._stats,
            tracer=tracer,
        )
        self._sleep = Sleep(model, self._runner)
        self._states = RequestStates()
        self._make_processors(replica, tracer, grammars)
        self._turn = threading.RLock()
        self._outputs_lease: OutputsLease = OutputsLease()
        self._request_ids = itertools.count()
        self._weight_history = WeightHistory()
        self._process_id = os.getpid()
        self._stopped_by: str | None = None  # not the exception, which keeps what it saw alive

    @staticmethod
    def _checked_draft_model(
        draft_model: AnyDraftModel | None, model: LoadedModel, config: EngineConfig
    ) -> AnyDraftModel | None:
        """The draft model, if the configuration wants one."""
        if config.draft_weights not in DRAFTS_OF_OTHERS:
            return None
        if draft_model is None:
            raise ValueError(
                f"draft_weights={config.draft_weights!r} needs a draft model; give "
                "Engine(draft_model=...), or speculative_config with a model to detjax.LLM"
            )
        have, needed = "a model", DRAFT_MODEL
        if isinstance(draft_model, DraftHead):
            have, needed = draft_model.head_config.name, draft_model.head_config.method
        if config.draft_weights != needed:
            raise ValueError(
                f"draft_weights={config.draft_weights!r} does not go with {have} as draft_model; "
                f"give {needed!r}"
            )
        check_draft_model(draft_model, model, max_len=config.max_len)
        return draft_model

    def _make_processors(
        self, replica: ReplicaConfig, tracer: trace.TracesEvents, grammars: Grammars | None
    ) -> None:
        """Make what takes requests through a step, around scheduler and runner."""
        scheduler = self._scheduler
        self._stat_logger = StatLogger(self._stats, tracer)
        self._rechecks = Rechecks(
            replica,
            runner=self._runner,
            pools=lambda: scheduler.pools,  # no cycle: a dropped engine frees its cache
            local_pages=lambda: scheduler.local_pages,
            claim=self._claim,
            stats=self._stats,
        )
        self._output_processor = OutputProcessor(
            self._states, self._scheduler, self._stat_logger, self._rechecks
        )
        self._input_processor = InputProcessor(
            self._model.config,
            self._config,
            states=self._states,
            scheduler=self._scheduler,
            output_processor=self._output_processor,
            stat_logger=self._stat_logger,
            grammars=grammars,
            adapters=self._adapters,
        )
        self._recovery = Recovery(
            self._states, self._scheduler, self._runner, self._output_processor
        )
        self._loop = StepLoop(
            self._states,
            self._scheduler,
            self._runner,
            input_processor=self._input_processor,
            output_processor=self._output_processor,
            rechecks=self._rechecks,
            claim=self._claim,
            stat_logger=self._stat_logger,
            steps_ahead=self._config.steps_ahead
            or quickest_steps_ahead(self._model, decode_steps=self._config.decode_steps),
        )

    @property
    def programs(self) -> ProgramCache:
        """The compiled programs, which other engines of these sizes on this model may share."""
        return self._runner.programs

    @property
    def outputs_lease(self) -> OutputsLease:
        """Which `AsyncEngine` steps this engine."""
        return self._outputs_lease

    @property
    def weight_history(self) -> WeightHistory:
        """Which weights have computed answers here."""
        return self._weight_history

    @property
    def weight_version(self) -> int:
        """Of the weights that compute now, which outputs carry."""
        return self._weight_history.version

    @property
    def num_checkpoint_params(self) -> int:
        """Most weights of a checkpoint, which may repeat tied embeddings as its output head."""
        config = self._model.config
        head = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
        return num_params(config) + head

    # ------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        prompt_token_ids: abc.Sequence[int],
        sampling: SamplingParams,
        *,
        is_deterministic: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        on_token: OnToken = ignore_token,
    ) -> int:
        """Queue a request.

        While `generate` runs, it is served beside the list; what it releases is told by the next
        `step` or `drain`.

        Args:
            prompt_token_ids: At least one token.
            sampling: How each next token is chosen.
            is_deterministic: Whether the answer must be the canonical one.
            priority: Higher goes first; a level is worth 200 steps of waiting.
            cache_salt: As `Request` has it.
            adapter: Hash of a loaded adapter, or "".
            on_token: Told every token as it is released; True ends that sequence. If it raises,
                that sequence alone fails.

        Returns:
            The request's id, which its outputs carry.

        Raises:
            ValueError: If the request cannot run on this engine.
            EngineFullError: If too many wait.
            EngineStoppedError: If an error has stopped the engine.
            SelfCheckError: If a self-check has failed and the request is deterministic.
        """
        request = Request(
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            is_deterministic=is_deterministic,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        self.check_request(request)
        return self.enqueue_request(request, on_token)

    def check_request(self, request: Request, *, num_ahead: int = 0) -> None:
        """Refuse what `add_request` would refuse, were `num_ahead` sequences more in the queue.

        Raises:
            ValueError, EngineFullError, EngineStoppedError, SelfCheckError: As `add_request` does.
        """
        self._refuse_if_stopped()
        self._sleep.refuse_if_asleep()
        if request.is_deterministic:
            self._claim.refuse_if_broken()
        self._input_processor.check(request, "the prompt")
        num_queued = self._input_processor.num_queued + num_ahead
        max_waiting = self._config.max_waiting
        if num_queued + request.sampling.num_sequences > max_waiting:
            raise EngineFullError(
                f"{num_queued} sequences wait, {request.sampling.num_sequences} more would, and "
                f"{max_waiting=}; try again later, or raise it",
                max_waiting=max_waiting,
            )

    def enqueue_request(self, request: Request, on_token: OnToken = ignore_token) -> int:
        """Queue a request that was checked; its id. Ids count up from 0 in the order of calls."""
        request_id = next(self._request_ids)
        self._weight_history.note_request()
        self._input_processor.enqueue(request_id, request, on_token, request_idx=request_id)
        return request_id

    def cancel(self, request_id: int) -> None:
        """End a request at the next step; its pages are free then. Unknown or ended: no effect."""
        self._states.cancels.append(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to emit."""
        if self._states.abandoned:
            with self._turn:
                self._recovery.drop_abandoned()
        return self._states.has_work

    @property
    def launched(self) -> abc.Sequence[Launch]:
        """The launches of the last step, whose results a later one reads."""
        return self._loop.launched

    @one_thread_at_a_time
    def load_weights(self, weights: dict, *, version: int) -> None:
        """Replace the model's weights in place, between requests. Outputs carry `version` from now.

        Cached prefixes are forgotten, and 8-bit drafts made anew. Other engines on the same model
        are not told.

        Args:
            weights: As `LoadedModel.replace_weights` takes them.
            version: Any number that tells these weights from others. Without a number of its own
                an answer has no receipt.

        Raises:
            ValueError: If a request is waiting or running, or a weight does not fit; nothing has
                changed then but the prefix cache.
            EngineStoppedError: If an error has stopped the engine.
        """
        self._refuse_if_at_work()
        # WHY: forgotten first, so that an interrupt leaves no page of other weights.
        self._forget_computed()
        self._model.replace_weights(weights)
        # Said first: what comes behind it can fail, and the new weights compute already.
        self._weight_history.replace(version)
        self._output_processor.weight_version = version
        self._sleep.note_weights()

    @one_thread_at_a_time
    def load_named_weights(self, tensors: abc.Iterable[tuple[str, Any]], *, version: int) -> None:
        """Replace the model's weights by tensors with Hugging Face names, one at a time.

        For trainers in another framework: `load_named_weights(module.state_dict().items(), ...)`.
        The old weights stay until every tensor has come and fits, so the devices need room for
        both. Then as `load_weights`. The bits are those of loading a folder with these tensors.

        Args:
            tensors: Pairs of a name and a tensor of NumPy, JAX or torch, or of anything else with
                `__dlpack__` or `__array__`, in any order. Each is copied before the next one is
                asked for. In a job of several processes each gives all of them.
            version: Any number that tells these weights from others.

        Raises:
            ValueError: If a request is waiting or running, or a tensor is missing, unknown, given
                twice, or does not fit, naming it; nothing has changed then.
            EngineStoppedError: If an error has stopped the engine.
        """
        self._refuse_if_at_work()
        self.load_weights(self._model.named_weights(tensors), version=version)

    @one_thread_at_a_time
    def load_folder(self, folder: Path, *, version: int) -> None:
        """Replace the model's weights by those of a folder's safetensors, then as `load_weights`.

        The folder's names, shapes and dtypes are checked first. While it is read the host keeps the
        old weights, so the devices need no room for both; if reading fails they are put back. The
        bits are those of opening the folder. Also while the engine is asleep, which it stays.

        Args:
            folder: `model.safetensors`, or `model.safetensors.index.json` and its files. They must
                stay as they are meanwhile.
            version: Any number that tells these weights from others.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If a request is waiting or running, a file is damaged or of another model,
                or a value does not fit; the old weights are in place then.
            EngineStoppedError: If an error has stopped the engine.
        """
        self._refuse_if_at_work()
        self._model.check_folder(folder)
        self._forget_computed()
        with self._sleep.weights_aside():
            self.load_weights(self._model.read_folder(folder), version=version)

    def load_adapter(self, folder: Path) -> str:
        """Read an adapter (LoRA) that PEFT has saved, so that requests may name it.

        From any thread. It stays in the host's memory until `remove_adapter`; the devices get it
        when a request needs it.

        Returns:
            Its hash, for `Request.adapter`.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the adapter is not of this model, asks for what is not supported, or the
                model was opened without room for adapters (`open_adapters`).
        """
        return self.add_adapter(self._adapters.read(folder))

    def add_adapter(self, adapter: Adapter) -> str:
        """Let requests name an adapter that is in memory; return its hash. From any thread.

        Raises:
            ValueError: If its rank does not fit, or the model has no room for adapters.
        """
        self._adapters.add(adapter)
        return adapter.sha256

    def remove_adapter(self, sha256: str) -> None:
        """Let no further request name an adapter; those that have it go on. From any thread.

        Raises:
            ValueError: If there is none of this hash.
        """
        self._adapters.remove(sha256)

    def check_folder(self, folder: Path) -> None:
        """Refuse what `load_folder` would refuse before it reads a weight. From any thread.

        Raises:
            FileNotFoundError, ValueError: As `load_folder` does.
        """
        self._model.check_folder(folder)

    @one_thread_at_a_time
    def sleep(self, *, keeps_weights: bool = True) -> None:
        """Free weights and cache on the devices until `wake_up`. Compiled programs stay.

        Args:
            keeps_weights: In the host's memory. Else others must be loaded before the engine wakes.

        Raises:
            ValueError: If a request is waiting or running.
            EngineStoppedError: If an error has stopped the engine.
        """
        self._refuse_if_at_work()
        self._forget_computed()
        self._sleep.sleep(keeps_weights=keeps_weights)

    @one_thread_at_a_time
    def wake_up(self, *, weights: bool = True, cache: bool = True) -> None:
        """Bring back what `sleep` has freed. Awake: no effect. Answers have the same bits.

        Args:
            weights: Those that the host has; no effect if it has none.
            cache: Needs weights on the devices, or now.

        Raises:
            AsleepError: If the cache is asked for and nobody has the weights.
        """
        self._refuse_if_stopped()
        self._sleep.wake_up(weights=weights, cache=cache)

    @property
    def is_asleep(self) -> bool:
        """Whether weights or cache are not on the devices; no request can run then."""
        return self._sleep.is_asleep

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the devices: also those of an update while it is asleep."""
        return self._sleep.has_weights

    def _forget_computed(self) -> None:
        """Forget what the weights of now have computed and no request holds."""
        self._rechecks.give_up()
        self._rechecks.forget()
        self._scheduler.forget_pages()

    def _refuse_if_at_work(self) -> None:
        self._refuse_if_stopped()
        self._recover()
        if self.has_work:
            raise ValueError("the engine is at work on requests of the old weights; drain() first")

    # ---------------------------------------------------------------------------------------- steps

    @outputs_once
    def step(self) -> list[RequestOutput]:
        """Launch a step, read the results of an earlier one, and return what those released.

        Raises:
            EngineStoppedError: If the device, the compiler or the host's own code fails, now or
                before. What is under way stays so until `reset`.
        """
        return self._step(None)

    def _step(self, wanted: Container[int] | None) -> list[RequestOutput]:
        """A step that tells of the wanted requests; the others' outputs are kept. None: of all."""
        self._refuse_if_stopped()
        self._recover()
        states = self._states
        states.is_interrupted = True
        try:
            self._loop.advance()
        except SequenceError as error:
            # Nothing was launched, or not all: the sequences that were scheduled begin anew.
            self._recover()
            states.is_interrupted = True
            if states.is_live(error.seq):
                raised = error.__cause__
                if not isinstance(raised, StructuredOutputError):
                    raised = RowError(f"it raised {raised!r}")
                self._output_processor.finish(error.seq, FinishReason.ERROR, raised)
        except Exception as error:
            self._stopped_by = f"{type(error).__name__}: {error}"
            raise self._stopped_error(self._stopped_by) from error
        outputs = self._output_processor.collect()
        mine = [o for o in outputs if wanted is None or o.request_id in wanted]
        kept = [o for o in outputs if wanted is not None and o.request_id not in wanted]
        # WHY: Python looks for interrupts at calls and loops, and there is none from here to the
        # caller: each output is returned once.
        states.outputs, states.pending, states.is_interrupted = kept, {}, False
        return mine

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes: requests of later steps compute their prompts anew.

        From any thread. What runs goes on, and no bit of an answer changes.
        """
        self._loop.forgets_prefixes = True

    @one_thread_at_a_time
    def check_idle(self) -> bool:
        """Check an answer again by prefill, or a chunk of it, if there is nothing else to do.

        For a server, between requests: `AsyncEngine` calls it. It takes at most 1 % of the time of
        all steps, and tells nobody; `stats` counts it, and a difference is as one of the programs
        is. `step`, `drain` and `generate` never do it.

        Returns:
            Whether to call again.

        Raises:
            EngineStoppedError: As `step` does.
        """
        if self._stopped_by is not None or self.has_work or self._claim.difference is not None:
            return False
        if self._sleep.is_asleep:
            return False
        states = self._states
        states.is_interrupted = True
        try:
            has_more = self._rechecks.advance()
        except Exception as error:
            self._stopped_by = f"{type(error).__name__}: {error}"
            raise self._stopped_error(self._stopped_by) from error
        states.is_interrupted = False
        return has_more

    def drain(self) -> list[RequestOutput]:
        """Step until nothing is left to do; return everything that was released on the way.

        If a step raises, what was released before is told by the next `step`, `drain` or `reset`.
        """
        outputs: list[RequestOutput] = []
        try:
            while self.has_work:
                outputs += self.step()
        except BaseException:
            self._states.outputs[:0] = outputs
            raise
        return outputs

    @one_thread_at_a_time
    def generate(
        self,
        requests: abc.Sequence[Request],
        *,
        on_token: OnToken = ignore_token,
        on_completion: OnCompletion = ignore_completion,
    ) -> list[Completion]:
        """Run requests to their end.

        Args:
            requests: Any number, served in this order where priorities are equal.
            on_token: Called with every token as it is released, `request_idx` being an index into
                `requests`; True ends that sequence. What it raises ends the run.
            on_completion: Called once with each completion, when its sequence has ended and the
                step that ended it is over; of a request with `best_of`, with all that are made.
                What it raises ends the run.

        Returns:
            Completions in order of (request, sequence).

        Raises:
            ValueError: If a request does not fit the engine, before anything runs; or if the
                engine is at work on others.
            FloatingPointError: If a logit is NaN, naming the request and the position.
            EngineStoppedError: As `step` does.
            SelfCheckError: If a self-check has failed or fails, and a request is deterministic.
            RuntimeError: If a request failed for another reason.
        """
        self._refuse_if_stopped()
        self._sleep.refuse_if_asleep()
        if any(request.is_deterministic for request in requests):
            self._claim.refuse_if_broken()
        self._recover()
        for idx, request in enumerate(requests):
            self._input_processor.check(request, f"prompt {idx}")
        if self.has_work:
            raise ValueError("the engine is at work on other requests; drain() them first")
        run = GenerateRun(requests, on_token, on_completion)
        try:
            with frozen_heap():
                while run.num_left:
                    self._enqueue_more(run, requests)
                    for output in self._step(run.request_ids):
                        run.add(output)
        finally:
            self._states.abandoned.update(run.request_ids)
            self._recovery.drop_abandoned()
        return run.completions()

    def _enqueue_more(self, run: GenerateRun, requests: abc.Sequence[Request]) -> None:
        while run.has_more and self._input_processor.num_queued < MAX_ADMITTED:
            request_id = next(self._request_ids)
            self._weight_history.note_request()
            i = run.pop_next(request_id)
            self._input_processor.enqueue(request_id, requests[i], run.listener, request_idx=i)

    def score(
        self, sequences: abc.Sequence[abc.Sequence[int]], *, top: int = 1, adapter: str = ""
    ) -> list[PromptLogprobs]:
        """Say how likely each token of given sequences is, after those before it (teacher-forced).

        The sequences are prefilled like prompts, in the same chunks and beside each other, and
        nothing is generated.

        Args:
            sequences: Token ids of each, at least one and at most `max_len`.
            top: How many of the most likely tokens to report at each position, at most 64.
            adapter: Hash of a loaded adapter, or "".

        Returns:
            Of each sequence, a `PromptLogprob` for every token after the first.

        Raises:
            ValueError: If a sequence does not fit the engine, before anything runs; or if the
                engine is at work on others.
            FloatingPointError: If a logit is NaN, naming the sequence and the position.
            EngineStoppedError: As `step` does.

        Numerics:
            In `invariant` and `dvr` the bits of a token's logprob are those with which it would be
            sampled there. Claims: run-, batch-, schedule- and mesh-invariant, path-consistent.
        """
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=top)
        requests = [
            Request(
                prompt_token_ids=tuple(sequence),
                sampling=sampling,
                is_deterministic=self._config.mode != "fast",
                adapter=adapter,
            )
            for sequence in sequences
        ]
        return [done.prompt_logprobs or () for done in self.generate(requests)]

    # --------------------------------------------------------------------------- when a call breaks

    @outputs_once
    def reset(self) -> list[RequestOutput]:
        """End what is under way and begin anew, as after an error that has stopped the engine.

        Cache and slots are allocated again, and cached prefixes forgotten; weights and compiled
        programs stay. If the device is still broken, this raises and the engine stays stopped.

        Returns:
            What was not told yet, and the end of every request: ERROR, with the reason.
        """
        self._sleep.refuse_if_asleep()
        states = self._states
        states.is_interrupted = True
        self._scheduler.forget_pages()  # first, lest an interrupt leave pages that are not there
        self._runner.reset()
        self._recover()
        stopped = f"the engine has stopped: {self._stopped_by}"
        why = "the engine was reset" if self._stopped_by is None else stopped
        self._recovery.end_all(EngineResetError(why))
        self._recovery.drop_abandoned()
        outputs = states.outputs
        states.outputs, states.pending, states.is_interrupted, self._stopped_by = (
            [],
            {},
            False,
            None,
        )
        return outputs

    def _refuse_if_forked(self) -> None:
        """Refuse what would wait for ever for threads and locks that a fork leaves behind."""
        if os.getpid() != self._process_id:
            raise EngineStoppedError(
                f"process {os.getpid()} was forked from {self._process_id}, which opened the "
                "engine, and has neither its threads nor its devices; open the model in each "
                "process, and start processes by 'spawn'"
            )

    def _refuse_if_stopped(self) -> None:
        self._refuse_if_forked()
        refuse_at_exit()
        if self._stopped_by is not None:
            raise self._stopped_error(self._stopped_by)

    def _stopped_error(self, cause: str) -> EngineStoppedError:
        return EngineStoppedError(
            f"the engine has stopped: {cause}; engine.reset() ends what is under way and allocates "
            "the cache anew"
        )

    def _recover(self) -> None:
        """Begin anew from what is true of requests, if a call did not end."""
        if self._states.is_interrupted:
            self._loop.drop_in_flight()
            self._rechecks.forget()
            self._recovery.recover()

    # ------------------------------------------------------------------------------------ compiling

    @one_thread_at_a_time
    def compile(
        self,
        progress: Callable[[str, int, int], None] = ignore_progress,
        requests: abc.Sequence[Request] | None = None,
        *,
        checked: Callable[[str, int, int], None] = ignore_progress,
    ) -> None:
        """Compile programs ahead, several at a time, and compare each that makes a claim.

        What is not compiled ahead is compiled by the step that first needs it, while all wait.

        Args:
            progress: Told (what, done, total) of what is compiled.
            requests: Those that will be asked, and no other: only what they can need is compiled.
                None compiles all programs, so that no request needs another.
            checked: Told the same of what is compared, from another thread.

        Raises:
            EngineStoppedError: If an error has stopped the engine.
        """
        self._refuse_if_stopped()
        self._sleep.refuse_if_asleep()
        self._runner.compile(progress, requests, checked)

    # -------------------------------------------------------------------------------- observability

    @property
    def self_check_error(self) -> str:
        """What a self-check has found to differ, with its evidence; empty while the claim holds."""
        return self._claim.error

    @property
    def self_check_cause(self) -> str:
        """The operation that makes the difference, as `explain_differences` told; else empty."""
        return self._claim.cause

    def explain_differences(self, explain: abc.Callable[[CheckDifference], str]) -> None:
        """Let the first difference that a self-check finds be explained, once, when it is found.

        Args:
            explain: Says what makes it, in lines of text, which are kept with the evidence:
                `detjax.diverge.evidence.explain`. It may take minutes, and nothing else runs.
        """
        self._claim.explain = explain

    def stats(self) -> EngineStats:
        """Counters since the engine was made, and how things stand now. Do not change it."""
        stats, pools = self._stats, self._scheduler.pools
        stats.num_waiting = self._scheduler.num_waiting
        stats.num_running = len(self._scheduler.running)
        stats.num_pages_cached = sum(pool.num_cached for pool in pools)
        stats.num_pages_held = sum(pool.num_pages - pool.num_available for pool in pools)
        stats.num_adapters = len(self._adapters)
        stats.num_adapters_evicted = self._scheduler.adapters.num_evicted
        stats.num_pages_evicted = sum(pool.num_evicted for pool in pools)
        local = [pages for pages in self._scheduler.local_pages if pages is not None]
        stats.num_local_pages_held = sum(pages.num_held for pages in local)
        stats.num_preempted = self._scheduler.num_preempted
        stats.prefix_tokens = self._scheduler.num_prefix_tokens
        return stats
