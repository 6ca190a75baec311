# SPDX-License-Identifier: Apache-2.0
"""Group-relative policy optimisation on exactly what was sampled.

Rollout and trainer compute the same bits, so the ratio of their probabilities is 1 and there is
nothing to correct: no importance weights, no clipping, one update for each batch of samples.
Importance weights are an option, to see their effect on a rollout that computes other bits.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import jax
import numpy as np

from detjax.training.batch import Batch, by_sequence, pack
from detjax.training.importance import ImportanceWeights
from detjax.training.rollout import Rollout, Sample
from detjax.training.tasks import AbstractTask
from detjax.training.trainer import Trainer, TrainState

TEMPERATURE = 1.0
"""Of the samples. At any other the sampled distribution is not the one whose gradient is taken."""

MIN_STD = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """What one step samples and trains on.

    Attributes:
        prompts: Problems.
        samples: Answers to each: a group.
        microbatch: Sequences whose gradient is computed at once; divides `prompts * samples`.
        max_prompt: Longest prompt, in tokens.
        max_tokens: Longest answer, in tokens.

    Raises:
        ValueError: If a size is not positive, a group has one answer, or microbatches do not fit.
    """

    prompts: int
    samples: int
    microbatch: int
    max_prompt: int
    max_tokens: int

    def __post_init__(self):
        """Check every size."""
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.samples < 2:
            raise ValueError("samples=1 has nothing to be compared with; give at least 2")
        if self.prompts * self.samples % self.microbatch:
            raise ValueError(
                f"microbatch={self.microbatch} must divide {self.prompts * self.samples} sequences"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyDivergence:
    """How far the trainer's log-probabilities of sampled tokens are from the rollout's.

    Attributes:
        kl: Estimate of KL(rollout || trainer) in nats a token: the mean of `exp(d) - 1 - d`, with
            d = trainer - rollout. No term is negative, so it is 0.0 only if every d is.
        max_difference: The largest |d|.
        num_different: Tokens whose two log-probabilities differ in any bit.
        num_tokens: Tokens compared.

    Reference:
        Schulman 2020, "Approximating KL divergence", estimator k3.
    """

    kl: float
    max_difference: float
    num_different: int
    num_tokens: int


def divergence(rollout: np.ndarray, trainer: np.ndarray) -> PolicyDivergence:
    """Compare float32 log-probabilities of the same tokens."""
    difference = trainer.astype(np.float64) - rollout.astype(np.float64)
    return PolicyDivergence(
        kl=float(np.mean(np.expm1(difference) - difference)),
        max_difference=float(np.abs(difference).max()),
        num_different=int((rollout.view(np.uint32) != trainer.view(np.uint32)).sum()),
        num_tokens=difference.size,
    )


def advantages(rewards: Sequence[float]) -> np.ndarray:
    """Rewards of a group, less their mean, over their standard deviation; 0 if all are equal.

    Reference:
        Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    values = np.asarray(rewards, np.float64)
    return (values - values.mean()) / (values.std() + MIN_STD)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """The results of one step. `entropy` is the trainer's, in nats a token."""

    step: int
    weight_version: int
    reward: float
    entropy: float
    kl: float
    max_difference: float
    num_different: int
    num_tokens: int
    gradient_norm: float
    rollout_s: float
    train_s: float


def microbatches(
    groups: list[list[Sample]],
    sizes: BatchSizes,
    ratios: Sequence[np.ndarray | None] | None = None,
) -> list[Batch]:
    """The samples in order; the objective is the mean over answer tokens of advantage * logprob.

    With `ratios`, an array for each sample, the mean of ratio * advantage * logprob.
    """
    samples = [sample for group in groups for sample in group]
    num_tokens = sum(len(sample.completion.token_ids) for sample in samples)
    gains = np.concatenate([advantages([s.reward for s in group]) for group in groups])
    scored = [
        sample.scored(float(gain) / num_tokens, ratios=of_tokens)
        for sample, gain, of_tokens in zip(
            samples, gains, ratios or [None] * len(samples), strict=True
        )
    ]
    length = sizes.max_prompt + sizes.max_tokens - 1
    return [
        pack(scored[i : i + sizes.microbatch], length=length)
        for i in range(0, len(scored), sizes.microbatch)
    ]


def train(
    trainer: Trainer,
    state: TrainState,
    rollout: Rollout,
    task: AbstractTask,
    sizes: BatchSizes,
    *,
    seed: int,
    num_steps: int,
    on_step: Callable[[StepRow], None],
    importance: ImportanceWeights | None = None,
) -> TrainState:
    """Sample, reward, update, until `num_steps` updates have been made.

    Problems and noise are functions of (seed, step), so a restored state continues as the saving
    run would have.

    Args:
        trainer: Updates the weights.
        state: Start of the run; consumed.
        rollout: Samples answers; gets the state's weights first.
        task: Gives problems and rewards.
        sizes: Of a step.
        seed: 0 or more.
        num_steps: Updates in all, those before `state` included.
        on_step: Called after each update.
        importance: Weights for the tokens of a rollout that has other bits than the trainer; None
            uses none.

    Returns:
        The last state. The rollout has the weights of the one before.
    """
    for step in range(int(state.step), num_steps):
        start = time.perf_counter()
        rng = np.random.default_rng([seed, step])
        problems = [task.draw(rng) for _ in range(sizes.prompts)]
        rollout.load(state.params, version=step)
        groups = rollout.sample(
            problems,
            seeds=[int(s) for s in rng.integers(2**63, size=sizes.prompts)],
            num_sequences=sizes.samples,
            temperature=TEMPERATURE,
        )
        sampled = time.perf_counter()
        samples = [sample for group in groups for sample in group]
        ratios = None
        if importance is not None:
            importance.load(state.params)
            ratios = importance.of(samples)
        batches = microbatches(groups, sizes, ratios)
        state, output = trainer.step(state, batches)
        jax.block_until_ready(state.params)
        logprobs, entropy = (
            _answers(samples, batches, values) for values in (output.logprobs, output.entropy)
        )
        difference = divergence(
            np.concatenate([np.stack(s.completion.logprobs) for s in samples]), logprobs
        )
        on_step(
            StepRow(
                step=step,
                weight_version=samples[0].completion.weight_version,
                reward=float(np.mean([s.reward for s in samples])),
                entropy=float(entropy.mean(dtype=np.float64)),
                **asdict(difference),
                gradient_norm=output.gradient_norm,
                rollout_s=sampled - start,
                train_s=time.perf_counter() - sampled,
            )
        )
    return state


def _answers(samples: list[Sample], batches: list[Batch], values: np.ndarray) -> np.ndarray:
    """The values of all answers' tokens, sample after sample."""
    rows = [row for pair in zip(batches, values, strict=True) for row in by_sequence(*pair)]
    return np.concatenate([s.answer_values(row) for s, row in zip(samples, rows, strict=True)])
