# SPDX-License-Identifier: Apache-2.0
"""Layers of linear attention: what a configuration may say, and what is refused with its reason."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detjax.models.abstract import why_unsupported
from detjax.models.config import ModelConfig
from detjax.models.hf_config import config_from_hf, load_config
from detjax.models.params import check_tp, possible_tps
from detjax.models.weights.load import load_params
from detjax.models.weights.named import load_named_params
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.training.lora import LoraConfig, adapted_tensors
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


VISION = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "image_token_id": 7, "video_token_id": 6, "vision_start_token_id": 5, "vision_end_token_id": 4,
    "tie_word_embeddings": False, "transformers_version": "5.24.0", "vision_config": {"depth": 1},
}  # fmt: skip


def published(**changes) -> dict:
    """The golden's config.json inside that of a model that sees images, as the hub has it."""
    text = values(mtp_num_hidden_layers=1, attn_output_gate=True, mamba_ssm_dtype="float32")
    del text["architectures"], text["transformers_version"]
    return {**VISION, "text_config": text, **changes}


def test_the_decoder_of_a_model_that_sees_images_is_the_same_model():
    assert config_from_hf(published()) == config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config=None must be an object"),
        ({"audio_config": {}}, "audio_config={} is not a key that detjax knows beside"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True contradicts the False in"),
        ({"model_type": "qwen3"}, "model_type='qwen3' does not go with"),
    ],
)
def test_a_model_of_other_parts_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(published(**changes))


def test_its_weights_are_read_by_their_longer_names(tmp_path):
    """Parts for images and for further tokens are left where they are."""
    held = load_file(FOLDER / "model.safetensors")
    longer = {name.replace("model.", "model.language_model.", 1): x for name, x in held.items()}
    spare = {name: np.zeros((2, 2), np.float32) for name in ("model.visual.a", "mtp.fc.weight")}
    (tmp_path / "config.json").write_text(json.dumps(published()))
    save_file(longer | spare, tmp_path / "model.safetensors")
    options = {"dtype": "bfloat16", "vocab_block": 64}
    mesh = make_mesh(1, 2)
    want = load_params(FOLDER, config(), mesh, **options)
    got = load_params(tmp_path, load_config(tmp_path), mesh, **options)
    named = load_named_params([*longer.items(), *spare.items()], config(), mesh, **options)
    for have in (got, named):
        for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
            assert_bitwise_equal(np.asarray(a), np.asarray(b), claim="weights by longer names")
    save_file(longer | held, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="and there, too; keep one"):
        load_params(tmp_path, config(), mesh, **options)


def test_ranks_have_whole_heads_of_keys():
    assert possible_tps(config()) == (1, 2)
    with pytest.raises(ValueError, match="tp=4 must divide linear_num_key_heads=2"):
        check_tp(config(), 4)


@pytest.mark.slow
def test_hopper_kernels_say_which_sizes_they_have():
    why = why_unsupported(config(), NumericsProfile(), Backend.SM90, 1)
    assert why is not None and "one of (32, 64, 128), not 16 and 32" in why
    heads = {"key_dim": 64, "value_dim": 64, "num_key_heads": 16, "num_value_heads": 32}
    linear = dataclasses.replace(config().linear_attention, **heads)
    sized = dataclasses.replace(
        config(), head_dim=64, hidden_size=512, intermediate_size=1024, linear_attention=linear
    )
    for backend in (Backend.SM90, Backend.REFERENCE):
        assert why_unsupported(sized, NumericsProfile(), backend, 1) is None


def test_training_on_hopper_and_adapters_say_why_not():
    assert why_not_trained(config(), Backend.SM90) == "linear attention on sm90"
    assert why_not_trained(config(), Backend.REFERENCE) is None
    with pytest.raises(ValueError, match="training of adapters of a model with linear attention"):
        adapted_tensors(config(), LoraConfig(rank=4, alpha=8.0))
