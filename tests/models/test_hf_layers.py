# SPDX-License-Identifier: Apache-2.0
"""What differs from layer to layer is read exactly, or refused by a message that names the key."""

import math
from typing import Any

import pytest

from detjax.models.config import ModelConfig, RopeKind
from detjax.models.hf_config import config_from_hf

BASE = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GELU = {"hidden_act": "gelu_pytorch_tanh"}
SLIDING, FULL = "sliding_attention", "full_attention"


def config_of(architecture: str, **keys: Any) -> ModelConfig:
    return config_from_hf({"architectures": [architecture], **BASE, **keys})


@pytest.mark.parametrize(
    ("keys", "without"),
    [
        ({}, (3,)),
        ({"no_rope_layer_interval": 2}, (1, 3)),
        ({"no_rope_layers": [0, 1, 1, 0]}, (0, 3)),
        ({"no_rope_layers": [1, 1, 1, 1, 0]}, ()),
    ],
)
def test_smollm3_layers_without_rotary_embedding(keys, without):
    config = config_of("SmolLM3ForCausalLM", **keys)
    kinds = [config.ropes[i].kind for i in config.layer_ropes or (0,) * 4]
    assert tuple(i for i, kind in enumerate(kinds) if kind is RopeKind.NONE) == without


@pytest.mark.parametrize(
    ("architecture", "keys", "windows"),
    [
        ("Gemma2ForCausalLM", {**GELU, "sliding_window": 8}, (8, None, 8, None)),
        ("Gemma3ForCausalLM", {**GELU, "sliding_window": 8}, (8, 8, 8, 8)),
        ("Gemma3ForCausalLM", {**GELU, "sliding_window": None}, (None,) * 4),
        (
            "Gemma3ForCausalLM",
            {**GELU, "sliding_window": 8, "sliding_window_pattern": 3},
            (8, 8, None, 8),
        ),
        ("Olmo3ForCausalLM", {"sliding_window": 8}, (8, 8, 8, None)),
        (
            "Olmo3ForCausalLM",
            {"sliding_window": 8, "layer_types": [FULL, SLIDING, FULL, SLIDING]},
            (None, 8, None, 8),
        ),
        ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": [FULL] * 4}, (None,) * 4),
    ],
)
def test_windows_by_layer(architecture, keys, windows):
    assert config_of(architecture, **keys).sliding_windows == windows


def test_exaone_rotates_layers_with_a_window_alone_unless_none_has_one():
    mixed = config_of("Exaone4ForCausalLM", sliding_window=8)
    assert [mixed.ropes[i].kind for i in mixed.layer_ropes] == [RopeKind.DEFAULT] * 3 + [
        RopeKind.NONE
    ]
    plain = config_of("Exaone4ForCausalLM", sliding_window=None)
    assert plain.ropes == (plain.rope,) and plain.layer_ropes == ()


@pytest.mark.parametrize("keys", [{"sliding_window": 8}, {}])
def test_exaone_with_a_window_that_no_layer_has_rotates_none(keys):
    """As modeling_exaone4 of transformers 4.57 and 5.24, which asks for the key alone."""
    config = config_of("Exaone4ForCausalLM", layer_types=[FULL] * 4, **keys)
    assert config.sliding_windows == (None,) * 4
    kinds = [config.ropes[i].kind for i in config.layer_ropes or (0,) * 4]
    assert kinds == [RopeKind.NONE] * 4


@pytest.mark.parametrize(
    ("architecture", "key", "usual", "other"),
    [
        ("Gemma2ForCausalLM", "sliding_window_pattern", 2, 6),
        ("Olmo3ForCausalLM", "sliding_window_pattern", 4, 2),
        ("GptOssForCausalLM", "sliding_window_pattern", 2, 3),
        ("Gemma3ForCausalLM", "attn_logit_softcapping", None, 50.0),
    ],
)
def test_a_key_that_transformers_does_not_read_changes_nothing(architecture, key, usual, other):
    keys = GELU if architecture.startswith("Gemma") else {}
    assert config_of(architecture, **keys, **{key: usual}) == config_of(architecture, **keys)
    with pytest.raises(ValueError, match=f"{key}={other}.*transformers does not read it there"):
        config_of(architecture, **keys, **{key: other})


@pytest.mark.parametrize(
    ("architecture", "key", "copy"),
    [
        ("Qwen2MoeForCausalLM", "num_experts", "num_local_experts"),
        ("Qwen3NextForCausalLM", "num_experts", "num_local_experts"),
        ("Qwen3_5MoeForCausalLM", "num_experts", "num_local_experts"),
        ("Glm4MoeForCausalLM", "n_routed_experts", "num_experts"),
        ("GptOssForCausalLM", "num_experts_per_tok", "experts_per_token"),
    ],
)
def test_a_name_of_experts_that_transformers_does_not_read_may_repeat_alone(
    architecture, key, copy
):
    assert config_of(architecture, **{key: 32, copy: 32}) == config_of(architecture, **{key: 32})
    with pytest.raises(ValueError, match=f"{copy}=31 differs from {key}=.*; give {key}"):
        config_of(architecture, **{copy: 31})


def test_gemma3_has_two_bases_in_both_forms_of_its_file():
    older = config_of(
        "Gemma3ForCausalLM", **GELU, rope_theta=1e6, rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window_pattern=2,
    )  # fmt: skip
    nested = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    newer = config_of(
        "Gemma3ForCausalLM", **GELU, rope_parameters=nested,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
    )  # fmt: skip
    assert older == newer
    assert [(rope.theta, rope.factor) for rope in older.ropes] == [(1e6, 8.0), (1e4, 1.0)]
    assert older.layer_ropes == (1, 0, 1, 0)


def test_multipliers_of_granite_are_kept_out_of_the_residual_stream():
    config = config_of(
        "GraniteForCausalLM", embedding_multiplier=12.0, residual_multiplier=0.25,
        attention_multiplier=0.125, logits_scaling=8.0, rms_norm_eps=1e-5,
    )  # fmt: skip
    assert config.embedding_scale == 48
    assert config.rms_norm_eps == 1e-5 * 16
    assert config.logits_scale == 0.125
    assert config.rope.scale**2 == pytest.approx(0.125 * math.sqrt(16), rel=1e-15)


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers=.1, 0. must be a list"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers=.* of 0 and 1"),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window=True is not supp"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG'"),
        (
            "Exaone4ForCausalLM",
            {"sliding_window": None, "layer_types": [SLIDING] * 4},
            "layer_types.0.='sliding_attention' contradicts",
        ),
        ("Olmo3ForCausalLM", {"rope_parameters": {FULL: {}}}, "rope_parameters=.* must have"),
        ("Gemma2ForCausalLM", {"hidden_act": "silu"}, "hidden_act='silu' is not supported"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling=0 must be a finite number"),
        ("GraniteForCausalLM", {"residual_multiplier": "1"}, "residual_multiplier='1' must be"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 2}, "partial_rotary_factor=2 rotates"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 0.01}, "partial_rotary_factor=0.01 rotates"),
        ("Olmo2ForCausalLM", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not a key"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "short_factor.* has 1 numbers, and .* make 8 pairs",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [0] * 8, "long_factor": [1] * 8}},
            "short_factor=0 must be a finite number above 0",
        ),
    ],
)
def test_bad_values_are_refused_by_name(architecture, keys, message):
    with pytest.raises(ValueError, match=message):
        config_of(architecture, **keys)


def test_longrope_has_its_original_context():
    scaling = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [9.0] * 8}
    config = config_of("Phi3ForCausalLM", rope_scaling=scaling, original_max_position_embeddings=64)
    assert (config.max_position_embeddings, config.rope.original_max_position) == (64, 64)
    factor = math.sqrt(1 + math.log(4) / math.log(64))
    assert config.rope.attention_factor == pytest.approx(factor, rel=1e-15)
