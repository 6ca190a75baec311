# SPDX-License-Identifier: Apache-2.0
"""What a model's generation_config.json asks for is done, or refused by name."""

import json

import pytest

from detjax.models.bundled import bundled_model_path
from detjax.models.generation_config import default_sampling


def folder_with(tmp_path, **values):
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return tmp_path


def test_samples_have_what_the_file_says(tmp_path):
    qwen = {
        "bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 3], "pad_token_id": 1,
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0",
        "repetition_penalty": 1.05, "max_new_tokens": 2048, "num_beams": 1,
    }  # fmt: skip
    assert default_sampling(folder_with(tmp_path, **qwen)) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }  # fmt: skip
    assert default_sampling(folder_with(tmp_path, do_sample=True)) == {"temperature": 1.0}


def test_without_do_sample_an_answer_is_greedy(tmp_path):
    values = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert default_sampling(folder_with(tmp_path, **values)) == {"repetition_penalty": 1.1}
    assert default_sampling(tmp_path / "none") == default_sampling(bundled_model_path()) == {}


@pytest.mark.parametrize(
    ("key", "value"), [("num_beams", 4), ("suppress_tokens", [1]), ("typical_p", 0.9), ("new", 1)]
)
def test_what_is_not_done_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(ValueError, match=f"{key}=.*--generation-config none"):
        default_sampling(folder_with(tmp_path, **{key: value}))
    assert default_sampling(folder_with(tmp_path, **{key: None})) == {}
