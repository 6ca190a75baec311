# SPDX-License-Identifier: Apache-2.0
"""Layers of linear attention: what a configuration may say, and what is refused with its reason."""

import json
from pathlib import Path

import pytest

from detjax.models.abstract import why_unsupported
from detjax.models.adapters.adapter import check_can_adapt
from detjax.models.config import ModelConfig
from detjax.models.hf_config import config_from_hf
from detjax.models.params import check_tp, possible_tps
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.training.weights import why_not_trained

FOLDER = Path(__file__).parents[1] / "golden" / "hf" / "qwen3_5"
LINEAR, FULL = "linear_attention", "full_attention"


def values(**changes) -> dict:
    """The golden's config.json; None leaves a key out."""
    merged = {**json.loads((FOLDER / "config.json").read_text()), **changes}
    return {key: value for key, value in merged.items() if value is not None}


def config(**changes) -> ModelConfig:
    return config_from_hf(values(**changes))


def test_layers_are_those_of_layer_types_or_of_the_interval():
    assert config().linear_attention.layers == (True, True, True, False)
    by_interval = config(layer_types=None, full_attention_interval=2)
    assert by_interval.linear_attention.layers == (True, False, True, False)
    assert [by_interval.cache_index(i) for i in range(4)] == [0, 0, 1, 1]
    assert config().with_layers([0, 3]).linear_attention.layers == (True, False)
    assert config().rope.rotary_dim == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [LINEAR] * 3}, "must be a list of num_hidden_layers=4 names"),
        ({"layer_types": [LINEAR] * 3 + ["sliding_attention"]}, f"each '{FULL}' or '{LINEAR}'"),
        ({"layer_types": [LINEAR] * 4}, "has one kind of layer"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 must be a multiple of"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' is not supported"),
        ({"linear_gate": 1}, "linear_gate=1 is not a key that detjax knows"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_ranks_have_whole_heads_of_keys():
    assert possible_tps(config()) == (1, 2)
    with pytest.raises(ValueError, match="tp=4 must divide linear_num_key_heads=2"):
        check_tp(config(), 4)


@pytest.mark.parametrize("backend", [Backend.SM90, Backend.REFERENCE])
def test_other_backends_say_that_they_have_no_kernels(backend):
    why = why_unsupported(config(), NumericsProfile(), backend, 1)
    assert "linear attention" in why and "use backend portable" in why


def test_training_and_adapters_say_why_not():
    assert "linear attention" in why_not_trained(config())
    with pytest.raises(ValueError, match="adapters of a model with linear attention"):
        check_can_adapt(config())
