# SPDX-License-Identifier: Apache-2.0
"""Text decoders of models that see images, by the names and keys of the published folders."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detjax.models.hf_config import config_from_hf, load_config
from detjax.models.weights.load import load_params
from detjax.models.weights.named import load_named_params
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal

HF = Path(__file__).parents[1] / "golden" / "hf"
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "image_token_index": 10, "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "spatial_merge_size": 2, "vision_config": {"model_type": "pixtral"},
    "vision_feature_layer": -1, "dtype": "bfloat16", "transformers_version": "5.0.0.dev0",
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
    "mm_tokens_per_image": 256, "vision_config": {"model_type": "siglip_vision_model"},
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
}  # fmt: skip
WRAPPED = {"ministral3": MISTRAL3, "mistral_window": MISTRAL3, "gemma3": GEMMA3}
SPARE = "vision_tower.a", "multi_modal_projector.linear_1.weight"
NAMINGS = {
    "older": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "newer": {"model.": "model.language_model."},
}


def text_of(case: str) -> dict:
    """The golden's config.json as a part of another file."""
    text = json.loads((HF / case / "config.json").read_text())
    for key in ("architectures", "transformers_version", "dtype"):
        text.pop(key)
    return text


def published(case: str, **changes) -> dict:
    return {**WRAPPED[case], "text_config": text_of(case), **changes}


@pytest.mark.parametrize("case", WRAPPED)
def test_the_decoder_of_a_model_that_sees_images_is_the_same_model(case):
    assert config_from_hf(published(case)) == load_config(HF / case)


def test_a_decoder_that_does_not_say_what_it_is_has_the_first_family():
    text = text_of("mistral_window")
    del text["model_type"]
    assert config_from_hf(published("mistral_window", text_config=text)).family == "mistral"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"model_type": "llama"}}, "model_type='llama' in 'text_config' of "
         "'Mistral3ForConditionalGeneration' is not supported; detjax has 'mistral' and 'minis"),
        ({"text_config": {"model_type": ["ministral3"]}}, r"model_type=\['ministral3'\] in"),
        ({"text_config": 3}, "text_config=3 must be an object"),
        ({"audio_config": {}}, "audio_config={} is not a key that detjax knows beside"),
        ({"model_type": "mistral"}, "model_type='mistral' does not go with"),
        ({"eos_token_id": 5}, "eos_token_id=5 contradicts the 2 in 'text_config'"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(published("ministral3", **changes))


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("case", ["ministral3", "gemma3"])
def test_weights_are_read_by_their_longer_names(case, naming, tmp_path):
    """Parts for images are left where they are. A tied head has no tensor."""
    held, config = load_file(HF / case / "model.safetensors"), load_config(HF / case)
    longer = dict(held)
    for own, prefix in NAMINGS[naming].items():
        longer = {
            name.replace(own, prefix, 1) if name.startswith(own) and name in held else name: x
            for name, x in longer.items()
        }
    assert longer.keys() != held.keys()
    spare = {name: np.zeros((2, 2), np.float32) for name in SPARE}
    (tmp_path / "config.json").write_text(json.dumps(published(case)))
    save_file(longer | spare, tmp_path / "model.safetensors")
    mesh, options = make_mesh(1, 2), {"dtype": "bfloat16", "vocab_block": 64}
    want = load_params(HF / case, config, mesh, **options)
    got = load_params(tmp_path, load_config(tmp_path), mesh, **options)
    named = load_named_params([*longer.items(), *spare.items()], config, mesh, **options)
    for have in (got, named):
        for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
            assert_bitwise_equal(np.asarray(a), np.asarray(b), claim="weights by longer names")
