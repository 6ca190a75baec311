# SPDX-License-Identifier: Apache-2.0
"""Layers of linear attention under `diverge`: every tap of theirs is compared, and named."""

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import detjax.models
import detjax.pallas_kernels.portable
from detjax.diverge.cause import OPERATIONS
from detjax.diverge.divergence import Divergence
from detjax.diverge.find import find_divergence
from detjax.diverge.setting import Setting
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.config import LinearAttentionConfig
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.testing.dummies import dummy_config, dummy_model

PAGE = 16
PROMPT = tuple((7 * i + 3) % 320 for i in range(20))
LINEAR = LinearAttentionConfig(
    num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=16, conv_width=4, layers=(True, False)
)
CONFIG = dataclasses.replace(
    dummy_config(num_layers=2, qk_norm=True), linear_attention=LINEAR, has_output_gate=True
)


def find(b: str, *, is_deep: bool) -> Divergence:
    def load(setting: Setting) -> LoadedModel:
        profile = NumericsProfile(attention_block=PAGE, attention_split=2 * PAGE)
        return dummy_model(CONFIG, dp=setting.dp, tp=setting.tp, profile=profile)

    sampling = SamplingParams(max_tokens=5, temperature=0.8, seed=5)
    settings = Setting.parse(""), Setting.parse(b)
    return find_divergence(load, PROMPT, *settings, sampling=sampling, is_deep=is_deep)


def test_every_result_that_can_be_seen_has_a_description():
    root = Path(detjax.models.__file__).parent
    text = "".join(path.read_text() for path in root.glob("*.py"))
    names = set(re.findall(r'taps\.see\(\s*"([a-z_]+)"', text))
    assert {"attn_gate", "linear_in", "shared_expert", "final_norm"} < names
    # Of these the parts have names, and those of products have the product's before them.
    parts, of_products = {"qkv", "linear_in"}, {"partial", "sum", "residual"}
    unknown = {
        name
        for name in names - parts
        if not (OPERATIONS.keys() & {name} or name in of_products and f"o_{name}" in OPERATIONS)
    }
    assert unknown == set()


@pytest.mark.slow
@pytest.mark.invariance
def test_without_a_fault_no_operation_differs():
    """Deep: every tap of every position, on two ranks, in a batch and in chunks."""
    found = find("batch=3,row=1,chunk=7,tp=2", is_deep=True)
    assert not found.is_found and found.notes == (), str(found)


@pytest.mark.slow
@pytest.mark.control
def test_a_recurrence_that_forgets_its_state_in_one_batch_is_found(monkeypatch):
    sound = detjax.pallas_kernels.portable.delta_rule

    def forgetful(rows, filters, gates, row_pages, state_pages, table, positions, *rest):
        if positions.shape == (3, 1):
            state_pages = jnp.zeros_like(state_pages)
        return sound(rows, filters, gates, row_pages, state_pages, table, positions, *rest)

    monkeypatch.setattr(detjax.pallas_kernels.portable, "delta_rule", forgetful)
    found = find("batch=3,row=1", is_deep=True)
    assert found.site is not None, str(found)
    assert (found.site.name, found.site.position, found.site.layer) == ("attention", 20, 0)
    assert "the recurrence, or a row or state before it" in found.site.cause
    assert found.site.last_equal == "layer 0 linear_a"
    assert any("delta_rule" in kernel for kernel in found.site.b.kernels), found.site.b.kernels
