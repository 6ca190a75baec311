# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts under `diverge`: every tap of theirs is compared, and none differs.

Faults that are found, with dense layers, are in test_faults.py.
"""

import pytest

from detjax.diverge.divergence import Divergence
from detjax.diverge.find import find_divergence
from detjax.diverge.setting import Setting
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.serving.request import SamplingParams
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
