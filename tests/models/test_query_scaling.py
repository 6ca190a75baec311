# SPDX-License-Identifier: Apache-2.0
"""Queries scaled by position: their tables, what a configuration may say, and who takes them."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from detjax.models.abstract import why_unsupported
from detjax.models.config import ModelConfig
from detjax.models.hf_config import config_from_hf
from detjax.models.rope import model_rope_tables
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.testing import assert_bitwise_equal
from detjax.training.weights import why_not_trained

FOLDER = Path(__file__).parents[1] / "golden" / "hf" / "ministral3"
BETA, ORIGINAL = 0.4, 64


def values(**changes) -> dict:
    """The golden's config.json with changes to its rotary parameters; None leaves a key out."""
    merged = json.loads((FOLDER / "config.json").read_text())
    rope = {**merged["rope_parameters"], **changes}
    return {**merged, "rope_parameters": {k: v for k, v in rope.items() if v is not None}}


def config(**changes) -> ModelConfig:
    return config_from_hf(values(**changes))


def test_tables_of_queries_are_those_of_keys_times_a_function_of_the_position():
    """To the last bit of float32: the factor comes before the only rounding."""
    of_keys, of_queries = np.split(np.stack(model_rope_tables(config())), 2, axis=2)
    plain = np.stack(model_rope_tables(config(llama_4_scaling_beta=0)))
    assert_bitwise_equal(of_keys, plain, claim="keys know nothing of it")
    assert_bitwise_equal(of_queries[:, :ORIGINAL], of_keys[:, :ORIGINAL], claim="a factor of 1")
    for position in (ORIGINAL, 2 * ORIGINAL - 1, 2 * ORIGINAL, 255):
        factor = 1 + BETA * math.log(1 + position // ORIGINAL)
        at = of_queries[:, position].astype(np.float64), of_keys[:, position].astype(np.float64)
        spacing = np.spacing(np.abs(of_queries[:, position])).astype(np.float64)
        assert (np.abs(at[0] - factor * at[1]) <= (0.51 + 0.51 * factor) * spacing).all()
        assert (at[0] != at[1]).any()


def test_a_context_without_scaled_queries_is_one_of_a_plain_model():
    whole = config()
    assert whole.query_rope is not None and whole.query_rope.growth == BETA
    assert whole.shortened(ORIGINAL + 1).query_rope == whole.query_rope
    short = whole.shortened(ORIGINAL)
    assert short == config(llama_4_scaling_beta=0).shortened(ORIGINAL)
    assert short.query_rope is None and short.max_position_embeddings == ORIGINAL
    assert whole.shortened(None) == whole.shortened(2**20) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama_4_scaling_beta": None}, "llama_4_scaling_beta=None is not supported; queries are"),
        ({"llama_4_scaling_beta": -0.1}, "llama_4_scaling_beta=-0.1 must be a finite number"),
        ({"llama_4_scaling_beta": "0.1"}, "llama_4_scaling_beta='0.1' must be a finite number"),
        ({"rope_type": "llama3"}, "with rope_type='llama3' and llama_4_scaling_beta=0.4 is not"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings=0 must be an"),
        ({"original_max_len": 3}, "original_max_len'.=3 is not read by rope_type='yarn'"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_scale_for_each_few_positions_is_refused():
    given = values(original_max_position_embeddings=1) | {"max_position_embeddings": 2**18}
    with pytest.raises(ValueError, match="must be at least a 4096th of max_position_embeddings"):
        config_from_hf(given)


def test_other_families_refuse_the_key():
    given = values() | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    with pytest.raises(ValueError, match="llama_4_scaling_beta'.=0.4 is not read by"):
        config_from_hf(given)


@pytest.mark.slow
def test_hopper_kernels_take_whole_and_shorter_texts():
    sizes = {"head_dim": 64, "hidden_size": 512, "intermediate_size": 1024}
    sized = dataclasses.replace(config(), **sizes)
    profile = NumericsProfile()
    assert why_unsupported(sized, profile, Backend.SM90, 1) is None
    assert why_unsupported(sized.shortened(ORIGINAL), profile, Backend.SM90, 1) is None
    assert why_unsupported(sized, profile, Backend.REFERENCE, 1) is None


def test_it_can_be_trained():
    assert why_not_trained(config(), Backend.SM90) is None
