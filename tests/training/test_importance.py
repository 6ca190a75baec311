# SPDX-License-Identifier: Apache-2.0
"""Importance weights: exactly 1 for the canonical rollout, something else where bits differ."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.reproduce.policy import EXACT, Arm, findings, narrow
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import dummy_model
from detjax.training.importance import ImportanceWeights
from detjax.training.policy_gradient import BatchSizes, microbatches
from detjax.training.rollout import Sample
from detjax.training.weights import master_params

SIZES = BatchSizes(prompts=1, samples=5, microbatch=5, max_prompt=520, max_tokens=6)


@pytest.fixture
def samples(completions) -> list[Sample]:
    return [Sample(completion=c, reward=float(i % 2)) for i, c in enumerate(completions("tied"))]


def shaken(samples: list[Sample]) -> list[Sample]:
    """The same answers, as if a rollout had given them other log-probabilities."""
    return [
        Sample(
            completion=dataclasses.replace(
                s.completion, logprobs=tuple(np.float32(x - 0.25) for x in s.completion.logprobs)
            ),
            reward=s.reward,
        )
        for s in samples
    ]


@pytest.mark.slow
@pytest.mark.invariance
def test_weights_are_exactly_one_for_what_the_engine_sampled_and_not_for_other_bits(
    samples, model_named
):
    model = model_named("tied")
    copy = dummy_model(model.config, profile=model.profile)
    weights = ImportanceWeights(copy, cap=1.2)
    weights.load(master_params(model))
    for found, sample in zip(weights.of(samples), samples, strict=True):
        ones = np.ones(len(sample.completion.token_ids))
        assert_bitwise_equal(found, ones, claim="the rollout's ratio is 1")
    assert_bitwise_equal(
        microbatches([samples], SIZES, weights.of(samples))[0].weights,
        microbatches([samples], SIZES)[0].weights,
        claim="weights of 1 change no bit of a batch",
    )
    # The control: exp(0.25) is above the cap.
    assert all((found == 1.2).all() for found in weights.of(shaken(samples)))


def test_a_batch_is_weighted_token_by_token():
    sizes = BatchSizes(prompts=1, samples=2, microbatch=2, max_prompt=3, max_tokens=2)
    samples = [
        Sample(
            completion=Completion(
                request_idx=0, sequence_idx=i, prompt_token_ids=(5, 6, 7), token_ids=(8, 9),
                logprobs=(np.float32(-1), np.float32(-2)), top_logprobs=(),
                finish_reason=FinishReason.LENGTH,
            ),
            reward=float(i),
        )
        for i in range(2)
    ]  # fmt: skip
    ratios = [np.asarray([0.5, 0.0]), np.asarray([1.0, 2.0])]
    plain, weighted = (
        microbatches([samples], sizes, given)[0].weights.reshape(2, 4) for given in (None, ratios)
    )
    assert plain[:, 2:] == pytest.approx(np.asarray([[-0.25, -0.25], [0.25, 0.25]]), rel=1e-4)
    assert weighted[:, 2:] == pytest.approx(plain[:, 2:] * np.stack(ratios))
    assert not weighted[:, :2].any()


@pytest.mark.parametrize("cap", [0.9, float("inf"), float("nan")])
def test_a_cap_that_is_none_is_refused(cap, model_named):
    with pytest.raises(ValueError, match=f"cap={cap}"):
        ImportanceWeights(model_named("tied"), cap=cap)


def test_few_bits_have_few_values_a_row():
    w = jax.random.normal(jax.random.key(0), (3, 64))
    params = {"embed": w, "layers": [{"q": w, "attn_norm": w[0]}]}
    found = narrow(params, bits=3)
    assert all(len(np.unique(row)) <= 7 for row in np.asarray(found["layers"][0]["q"]))
    assert found["embed"] is w
    assert_bitwise_equal(found["layers"][0]["attn_norm"], w[0], claim="gains keep their bits")


def test_findings_name_each_arm():
    row = {"learning_rate": 1e-4, "held_out": 0.5, "kl_largest": 0.0, "rewards": [0.1, 0.4, 0.3]}
    exact, plain = Arm(name=EXACT, bits=16), Arm(name="uncorrected", bits=4)
    rows = [row | {"arm": exact.label, "kind": exact.name},
            row | {"arm": plain.label, "kind": plain.name, "held_out": 0.25,
                   "kl_largest": 0.01}]  # fmt: skip
    assert findings(rows) == [
        "learning rate 0.0001, held-out problems right: exact 0.500 (KL up to 0), uncorrected, "
        "fast with 4-bit weights 0.250 (KL up to 0.01); the worst uncorrected run ends 0.250 below "
        "the exact one (one seed; the exact run's reward spans 0.30 to 0.40 in its last half)"
    ]
