# SPDX-License-Identifier: Apache-2.0
"""Requests on their way in: checked, kept in the inbox, and made sequences by the next step."""

import time

import numpy as np

from detjax.engine.config import DRAFTS_OF_OTHERS, EngineConfig
from detjax.engine.errors import LayoutError
from detjax.engine.outputs.output_processor import OutputProcessor
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.checks import RequestLimits, check_vocabulary
from detjax.engine.requests.known_adapters import KnownAdapters
from detjax.engine.requests.request import Request
from detjax.engine.requests.request_states import Arrival, RequestStates
from detjax.engine.requests.sampling_params import (
    MAX_SEQUENCES,
    NO_TEXT,
    TEXT_FIELDS,
    SamplingParams,
)
from detjax.engine.requests.sequence import Listener, OnToken, Sequence
from detjax.engine.sampling.grammars import Grammars
from detjax.engine.sampling.sampling import SamplingRows
from detjax.engine.scheduling.scheduler import Scheduler
from detjax.engine.stat_logger import StatLogger
from detjax.models.config import ModelConfig

MAX_ADMITTED = MAX_SEQUENCES
"""Sequences that a step takes from the inbox, so that no step is long because many ask at once."""


class InputProcessor:
    """Takes requests, from any thread, and hands their sequences to the scheduler."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        states: RequestStates,
        scheduler: Scheduler,
        output_processor: OutputProcessor,
        stat_logger: StatLogger,
        grammars: Grammars | None,
        adapters: KnownAdapters,
    ):
        """Take nobody yet.

        Args:
            model: Of the model that is asked.
            config: Of the engine.
            states: Where requests are kept.
            scheduler: To which sequences are added.
            output_processor: Ends sequences that are refused or cancelled.
            stat_logger: Is told of arrivals.
            grammars: Compiles forms of output, if the engine knows a tokenizer.
            adapters: Which requests may name.
        """
        self._model, self._config, self._grammars = model, config, grammars
        self._adapters = adapters
        self._limits = RequestLimits.of(model, config.max_len)
        self._states, self._scheduler = states, scheduler
        self._output_processor, self._stat_logger = output_processor, stat_logger

    @property
    def num_queued(self) -> int:
        """Sequences that wait for a slot, or for the next step to see them."""
        return self._scheduler.num_waiting + self._states.num_in_inbox

    def check(self, request: Request, what: str) -> None:
        """Refuse a request that cannot run on this engine.

        Raises:
            ValueError: If it cannot, naming `what` of it.
        """
        self._limits.check_prompt(
            request.prompt_token_ids, what, num_wanted=min(request.sampling.max_tokens, 1)
        )
        self._adapters.get(request.adapter)
        self._check_predicted(request, what)
        self._check_texts(request.sampling, what)
        self._limits.check_sampling(request.sampling, what)
        self._check_form(request.sampling, what)
        vocab_size = self._limits.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(request.sampling, name) or 0) > vocab_size:
                raise ValueError(
                    f"{what} asks for {name}={count}, more than the vocabulary of {vocab_size}"
                )
        if request.is_deterministic and self._config.mode == "fast":
            raise ValueError(
                f"{what} is to be deterministic, and mode 'fast' makes no claim; use 'dvr' or "
                "'invariant', or is_deterministic=False"
            )

    def _check_predicted(self, request: Request, what: str) -> None:
        predicted = request.predicted_token_ids
        check_vocabulary(predicted, f"{what}, in predicted_token_ids,", self._limits.vocab_size)
        if predicted and not self._config.has_prompt_lookup:
            raise ValueError(
                f"{what} predicts its answer, which an engine with has_prompt_lookup alone can "
                "verify; leave predicted_token_ids out, or set has_prompt_lookup"
            )

    def _check_texts(self, sampling: SamplingParams, what: str) -> None:
        for name in TEXT_FIELDS:
            if (value := getattr(sampling, name)) != getattr(NO_TEXT, name):
                raise ValueError(
                    f"{what} has {name}={value!r}, and an engine knows tokens, not text: ask "
                    "detjax.LLM, or give the requests to detjax.engine.outputs.text_batch.TextBatch"
                )

    def _check_form(self, sampling: SamplingParams, what: str) -> None:
        if (form := sampling.structured_output) is None:
            return
        if self._grammars is None:
            raise ValueError(
                f"{what} has structured_output, and this engine was given no grammars, as it "
                "knows no tokenizer: ask detjax.LLM, or give Engine(grammars=...)"
            )
        self._grammars.check(form)
        ends = sampling.end_token_ids(self._model.eos_token_ids)
        self._grammars.check_masks(sampling, ends=ends)

    def enqueue(
        self, request_id: int, request: Request, on_token: OnToken, *, request_idx: int
    ) -> None:
        """Put a checked request into the inbox; events of its tokens carry `request_idx`."""
        arrival = Arrival(
            request_id=request_id,
            request=request,
            request_idx=request_idx,
            on_token=on_token,
            arrived_s=time.perf_counter(),
            # WHY: now, as it may be unloaded before a step makes the sequences.
            adapter=self._adapters.get(request.adapter),
        )
        self._states.put_in_inbox(arrival)

    def admit(self) -> None:
        """Make sequences of requests in the inbox, and end those that were cancelled."""
        states, num_admitted = self._states, 0
        while states.inbox and num_admitted < MAX_ADMITTED:
            arrival = states.inbox[0]
            num_admitted += arrival.request.sampling.num_sequences
            # It stays in the inbox until it is live. `Recovery` drops a request that is in both.
            self._arrive(arrival)
            states.pop_inbox()
        late = []
        while states.cancels:
            request_id = states.cancels[0]
            for seq in states.sequences_of(request_id):
                self._output_processor.finish(seq, FinishReason.CANCELLED)
            if any(arrival.request_id == request_id for arrival in tuple(states.inbox)):
                late.append(request_id)
            states.cancels.popleft()
        states.cancels.extend(late)

    def _arrive(self, arrival: Arrival) -> None:
        """Make the sequences of a request. Should one of its values raise, it fails alone."""
        prompt, sampling = arrival.request.prompt_token_ids, arrival.request.sampling
        self._stat_logger.stats.num_requests += 1
        try:
            # WHY: as every launch will lay them out, so that none raises for those beside it.
            np.asarray(prompt, np.int32)
            keyed = sampling.for_prompt(prompt)
            SamplingRows.pack([(keyed, sampling.num_sequences - 1)])
            ends = sampling.end_token_ids(self._model.eos_token_ids)
        except Exception as error:
            self._stat_logger.stats.num_failed += sampling.num_sequences
            self._output_processor.refuse(arrival, LayoutError(f"it cannot be laid out: {error!r}"))
            return
        seqs = [self._sequence(arrival, keyed, i, ends) for i in range(sampling.num_sequences)]
        for seq in seqs:
            self._scheduler.add(seq)
            self._stat_logger.note_arrival(seq)
        self._states.live[arrival.request_id] = dict(enumerate(seqs))

    def _sequence(
        self, arrival: Arrival, sampling: SamplingParams, sequence_idx: int, ends: frozenset[int]
    ) -> Sequence:
        request, mode = arrival.request, self._config.mode
        form, guide = request.sampling.structured_output, None
        if form is not None:
            assert self._grammars is not None  # checked
            guide = self._grammars.masked(request.sampling, ends=ends)
        most_len = len(request.prompt_token_ids) + request.sampling.max_tokens
        is_drafted = mode == "dvr" and request.is_deterministic
        is_drafted |= mode == "invariant" and self._config.draft_weights in DRAFTS_OF_OTHERS
        return Sequence(
            request_id=arrival.request_id,
            sequence_idx=sequence_idx,
            request=request,
            sampling=sampling,
            is_drafted=is_drafted,
            is_canonical=mode == "invariant" or is_drafted,
            guide=guide,
            adapter=arrival.adapter,
            max_len=min(most_len, self._config.max_len),
            end_token_ids=ends,
            listener=Listener(
                on_token=arrival.on_token,
                request_idx=arrival.request_idx,
                arrived_s=arrival.arrived_s,
            ),
        )
