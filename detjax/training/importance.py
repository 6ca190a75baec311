# SPDX-License-Identifier: Apache-2.0
"""Importance weights: the usual repair if rollout and trainer disagree, to compare with."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from detjax.models.loading import LoadedModel
from detjax.training.rollout import Sample
from detjax.training.score import Scorer
from detjax.training.weights import serving_params


class ImportanceWeights:
    """Truncated importance weights of sampled tokens.

    If the rollout has the trainer's bits, each weight is exactly 1, and the update is the one
    without weights, bit for bit.
    """

    def __init__(self, model: LoadedModel, *, cap: float = 2.0):
        """Score with the canonical kernels, whose log-probabilities are the trainer's.

        Args:
            model: A copy for this object alone. `load` replaces its weights.
            cap: The largest weight.

        Raises:
            ValueError: If `cap` is not a finite number from 1 on.
        """
        if not 1 <= cap < float("inf"):
            raise ValueError(f"{cap=} must be a finite number of at least 1")
        self._model, self._scorer, self._cap = model, Scorer(model), cap

    def load(self, params: dict[str, Any]) -> None:
        """Take a trainer's masters, in place."""
        self._model.replace_weights(serving_params(params, self._model))

    def of(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The weight of each token of each answer, float64: `min(exp(trainer - rollout), cap)`.

        Numerics:
            Log-probabilities are float32; their difference and the weight are float64.

        Reference:
            Yao et al. 2025, "On the rollout-training mismatch in modern RL systems": truncated
            importance sampling, here token by token.
        """
        scores = self._scorer.logprobs([sample.token_ids for sample in samples])
        return [
            np.minimum(
                np.exp(
                    sample.answer_values(score).astype(np.float64)
                    - np.stack(sample.completion.logprobs).astype(np.float64)
                ),
                self._cap,
            )
            for sample, score in zip(samples, scores, strict=True)
        ]
