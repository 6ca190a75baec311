# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts under `diverge`: every tap of theirs is compared.

Faults that are found, with dense layers, are in test_faults.py.
"""

import pytest

import detjax.pallas_kernels.portable
from detjax.diverge.divergence import Divergence
from detjax.diverge.find import find_divergence
from detjax.diverge.setting import Setting
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.testing.dummies import dummy_config, dummy_model

PAGE = 16
PROMPT = tuple((7 * i + 3) % 320 for i in range(20))


def find(b: str, *, is_deep: bool) -> Divergence:
    def load(setting: Setting) -> LoadedModel:
        profile = NumericsProfile(
            attention_block=PAGE, attention_split=2 * PAGE, compute_dtype="float32"
        )
        config = dummy_config(num_layers=1, experts=(8, 3))
        return dummy_model(config, dp=setting.dp, tp=setting.tp, profile=profile)

    sampling = SamplingParams(max_tokens=5, temperature=0.8, seed=5)
    settings = Setting.parse(""), Setting.parse(b)
    return find_divergence(load, PROMPT, *settings, sampling=sampling, is_deep=is_deep)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.invariance
def test_without_a_fault_no_operation_differs():
    """Deep: every tap of every position, on two ranks, in a batch and in chunks."""
    found = find("batch=3,row=1,chunk=7,tp=2", is_deep=True)
    assert not found.is_found and found.notes == (), str(found)


@pytest.mark.slow
@pytest.mark.control
def test_experts_that_are_summed_backwards_in_one_batch_are_found(monkeypatch):
    """Of 64 sums 20 differ in their last bits, and no token nor logprob does: only taps see it."""
    # The model's operations take kernels from the set, not from the module that defines them.
    sound = detjax.pallas_kernels.portable.combine_experts_add_rms_norm

    def combine(y, weights, residual, gain, *, eps, shared):
        if y.shape[0] == 3:
            y, weights = y[:, ::-1], weights[:, ::-1]
        return sound(y, weights, residual, gain, eps=eps, shared=shared)

    monkeypatch.setattr(detjax.pallas_kernels.portable, "combine_experts_add_rms_norm", combine)
    found = find("batch=3,row=1", is_deep=True)
    assert found.token is None and found.site is not None, str(found)
    assert (found.site.name, found.site.position, found.site.layer) == ("down_residual", 20, 0)
    assert any("combine_experts" in kernel for kernel in found.site.b.kernels)
