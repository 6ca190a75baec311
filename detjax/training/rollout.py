# SPDX-License-Identifier: Apache-2.0
"""Samples from the engine, with the version of the weights that made them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.launch_times import quickest_decode_steps
from detjax.interpreter_exit import finishes_before_exit
from detjax.models.adapters.low_rank import Adapter
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.loading import LoadedModel
from detjax.models.tokenizer import Tokenizer
from detjax.training.batch import Scored
from detjax.training.lora import LoraConfig, adapts_experts, served_adapter
from detjax.training.tasks import AbstractTask, Problem
from detjax.training.weights import serving_params


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One answer to a problem, and its reward."""

    completion: Completion
    reward: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and the answer."""
        return self.completion.prompt_token_ids + self.completion.token_ids

    def scored(self, weight: float, *, ratios: np.ndarray | None = None) -> Scored:
        """The sequence with `weight` on every token of the answer, times its ratio if given."""
        prompt, answer = self.completion.prompt_token_ids, self.completion.token_ids
        factors = np.ones(len(answer)) if ratios is None else ratios
        weights = (0.0,) * len(prompt) + tuple(float(weight * factor) for factor in factors)
        return Scored(token_ids=prompt + answer, weights=weights)

    def answer_values(self, by_token: np.ndarray) -> np.ndarray:
        """Return the answer's part of values of tokens 1, 2, ... of the sequence."""
        return by_token[len(self.completion.prompt_token_ids) - 1 :]


MAX_PREFILL_TOKENS = 8192
"""Of prompts that one step computes."""


def keep_weights(params: dict[str, Any]) -> dict[str, Any]:
    """Sample with the masters as they are."""
    return params


class Rollout:
    """An engine for one task, whose weights follow a trainer's."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer,
        task: AbstractTask,
        *,
        mode: str,
        batch_size: int,
        max_prompt: int,
        max_tokens: int,
        change_weights: Callable[[dict[str, Any]], dict[str, Any]] = keep_weights,
        lora: LoraConfig | None = None,
    ):
        """Make the engine.

        Args:
            model: On the rollout's mesh. Its weights are replaced by `load`.
            tokenizer: Of the model.
            task: Rewards answers and names the token that ends them.
            mode: Of the engine. `fast` makes no claim on log-probabilities.
            batch_size: Samples that run at once.
            max_prompt: Longest prompt, in tokens.
            max_tokens: Longest answer, in tokens.
            change_weights: Change of the masters before the engine gets them, for experiments with
                rollouts of fewer bits.
            lora: The masters are those of such an adapter, which the engine serves unmerged; None
                has the weights themselves.

        Raises:
            ValueError: If the task's stop text is not one token.
        """
        if lora is not None:
            of_experts = lora.rank if adapts_experts(model.config, lora) else 0
            sizes = AdapterSizes(
                max_loras=1, max_lora_rank=lora.rank, max_expert_lora_rank=of_experts
            )
            model = open_adapters(model, sizes)
        self._lora, self._adapter = lora, ""
        self._model, self._tokenizer, self._task = model, tokenizer, task
        self._change_weights = change_weights
        self._mode, self._max_prompt, self._max_tokens = mode, max_prompt, max_tokens
        self._stop_ids: tuple[int, ...] = ()
        if task.stop:
            stop_ids = tokenizer.encode(task.stop)[-1:]
            if tokenizer.decode(stop_ids) != task.stop:
                raise ValueError(f"{task.stop!r}, which ends an answer, is not one token")
            self._stop_ids = tuple(stop_ids)
        rows = min(batch_size, max(1, MAX_PREFILL_TOKENS // max_prompt))
        steps = quickest_decode_steps(model, batch_size=batch_size, max_tokens=max_tokens)
        self._engine = Engine(
            model,
            EngineConfig(
                batch_size=batch_size,
                prefill_chunk=max_prompt,
                max_len=max_prompt + max_tokens,
                prefill_shapes=((rows, max_prompt),),
                # WHY: all prompts come at once, and nobody waits for the first answer.
                max_prefill_streak=batch_size,
                decode_steps=1 if mode == "dvr" else steps,
                mode=mode,
            ),
        )

    @finishes_before_exit
    def load(self, params: dict[str, Any], version: int) -> None:
        """Take a trainer's masters, in place. An adapter has its hash, and no version."""
        if self._lora is not None:
            self._serve(served_adapter(params, self._lora, dtype=self._model.profile.param_dtype))
            return
        changed = self._change_weights(params)
        self._engine.load_weights(serving_params(changed, self._model), version=version)

    @finishes_before_exit
    def save(self, folder: Path) -> None:
        """Write the model with the masters that `load` took last: `LoadedModel.save`."""
        self._model.save(folder)

    def _serve(self, adapter: Adapter) -> None:
        """Let requests name an adapter in place of the one before."""
        before, self._adapter = self._adapter, self._engine.add_adapter(adapter)
        if before not in ("", self._adapter):
            self._engine.remove_adapter(before)

    @finishes_before_exit
    def sample(
        self,
        problems: Sequence[Problem],
        *,
        seeds: Sequence[int],
        num_sequences: int,
        temperature: float,
    ) -> list[list[Sample]]:
        """Return `num_sequences` answers to each problem, unfiltered.

        Raises:
            ValueError: If a problem is longer than `max_prompt`, naming it.
        """
        prompts = [tuple(self._tokenizer.encode(problem.prompt)) for problem in problems]
        for problem, prompt in zip(problems, prompts, strict=True):
            if len(prompt) > self._max_prompt:
                raise ValueError(
                    f"the problem {problem.prompt[:40]!r} has {len(prompt)} tokens, more than "
                    f"max_prompt={self._max_prompt}; raise --max-prompt or leave it out"
                )
        requests = [
            Request(
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    max_tokens=self._max_tokens,
                    temperature=temperature,
                    seed=seed,
                    n=num_sequences,
                    stop_token_ids=self._stop_ids,
                ),
                is_deterministic=self._mode != "fast",
                adapter=self._adapter,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        groups: list[list[Sample]] = [[] for _ in problems]
        for completion in self._engine.generate(requests):
            problem = problems[completion.request_idx]
            text = self._tokenizer.decode(completion.token_ids)
            groups[completion.request_idx].append(
                Sample(
                    completion=completion,
                    reward=self._task.reward(problem, text),
                )
            )
        return groups

    def accuracy(self, problems: Sequence[Problem]) -> float:
        """Return the share of greedy answers that are right."""
        groups = self.sample(problems, seeds=[0] * len(problems), num_sequences=1, temperature=0.0)
        return float(np.mean([sample.reward for (sample,) in groups]))
