# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads of both published forms are read as they are, or refused by name."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detjax.defaults import EAGLE3
from detjax.models.heads.eagle import load_eagle_head
from detjax.models.heads.eagle_config import default_feature_layers, load_eagle_config
from detjax.models.hub import check_model
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.eagle import dummy_eagle, dummy_head, write_dummy_head

TARGET = dummy_config(num_layers=8)
HEAD = dummy_eagle(TARGET, draft_vocab_size=100)


@pytest.fixture(scope="module")
def model():
    return dummy_model(TARGET)


@pytest.fixture
def folder(tmp_path):
    return write_dummy_head(tmp_path / "head", HEAD)


def changed(folder, **changes):
    """A folder whose config.json has other values; None leaves a key out."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return folder


def with_tensors(folder, **changes):
    """A folder with other tensors; None leaves one out."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
    return folder


def as_speculators(folder):
    """The same head in the form of speculators, with an embedding of its own."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    layer = {
        key: value
        for key, value in values.items()
        if key not in ("architectures", "draft_vocab_size", "eagle_config", "norm_before_residual",
                       "target_hidden_size")
    }  # fmt: skip
    path.write_text(
        json.dumps(
            {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.3.0",
                "speculators_config": {
                    "algorithm": "eagle3",
                    "default_proposal_method": "greedy",
                    "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
                },
                "transformer_layer_config": layer,
                "draft_vocab_size": values["draft_vocab_size"],
                "norm_before_residual": True,
                "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            }
        )
    )
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    rows = TARGET.vocab_size, TARGET.hidden_size
    named["embed_tokens.weight"] = np.full(rows, 0.5, np.float16)
    save_file(named, folder / "model.safetensors")
    return folder


def test_a_written_head_is_read_as_it_was(model, folder):
    read, made = load_eagle_head(str(folder), model=model), dummy_head(model, HEAD)
    assert read.head_config == HEAD
    assert read.params.keys() == made.params.keys()
    for name, value in made.params.items():
        np.testing.assert_array_equal(np.asarray(read.params[name]), np.asarray(value))
    assert "embed" in read.params_beside(model.params)


def test_the_form_of_speculators_is_read(model, folder):
    read = load_eagle_head(str(as_speculators(folder)), model=model)
    assert read.head_config.norm_before_residual
    assert read.head_config.feature_layers == (2, 4, 5)
    np.testing.assert_array_equal(
        np.asarray(read.params["qkv"]), np.asarray(dummy_head(model, HEAD).params["qkv"])
    )
    assert float(read.params_beside(model.params)["embed"][0, 0]) == 0.5


def test_layers_that_nobody_names_are_the_published_ones(folder):
    assert load_eagle_config(changed(folder, eagle_config=None), TARGET).feature_layers == (2, 4, 5)
    assert default_feature_layers(32) == (2, 16, 29)
    with pytest.raises(ValueError, match="a model of 6 layers has no layers"):
        default_feature_layers(6)


def test_a_head_without_maps_drafts_the_whole_vocabulary(model, tmp_path):
    whole = dummy_eagle(TARGET, draft_vocab_size=TARGET.vocab_size)
    folder = with_tensors(write_dummy_head(tmp_path, whole), d2t=None, t2d=None)
    ids = load_eagle_head(str(changed(folder, draft_vocab_size=None)), model=model).params
    np.testing.assert_array_equal(np.asarray(ids["draft_ids"]), np.arange(TARGET.vocab_size))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no EAGLE-3 head"),
        ({"vocab_size": 384}, "vocab_size=384 must be 320 for this model"),
        ({"target_hidden_size": 128}, "target_hidden_size=128 must be 64"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 must be 1"),
        ({"attention_bias": True}, "attention_bias=True must be False"),
        ({"draft_vocab_size": 321}, "draft_vocab_size=321 must be at most vocab_size=320"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0 must be an integer"),
        ({"norm_before_residual": 1}, "norm_before_residual=1 must be true or false"),
        ({"fc_norm": True}, "fc_norm=True is not a key that detjax knows"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1 are not supported"),
        ({"eagle_config": {"depth": 3}}, "depth=3 is not a key that detjax knows of eagle_config"),
        ({"model_type": "qwen3"}, "model_type='qwen3' must be 'llama'"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}},
            r"\[0, 1, 7\] must be from 0 to 6: the model has 8 layers",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
            r"\[1, 2\] must be a list of 3 layers",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        load_eagle_config(changed(folder, **changes), TARGET)


def test_speculators_of_another_algorithm_are_refused(folder):
    as_speculators(folder)
    with pytest.raises(ValueError, match="has algorithm='eagle'; it must be 'eagle3'"):
        load_eagle_config(changed(folder, speculators_config={"algorithm": "eagle"}), TARGET)
    changed(folder, speculators_config={"algorithm": "eagle3"})
    with pytest.raises(ValueError, match="norm_before_fc=True is not a key"):
        load_eagle_config(changed(folder, norm_before_fc=True), TARGET)
    changed(folder, norm_before_fc=None)
    with pytest.raises(ValueError, match="norm_before_residual is missing"):
        load_eagle_config(changed(folder, norm_before_residual=None), TARGET)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fc.weight", None, "the head has no tensor 'fc.weight'"),
        ("d2t", None, "the head has no tensor 'd2t'"),
        ("midlayer.extra", np.zeros(2, np.float32), "has a tensor 'midlayer.extra', which no"),
        ("norm.weight", np.zeros(3, np.float32), r"'norm.weight' of the head is F32\[3\]; it must"),
        ("norm.weight", np.zeros(64, np.int32), "'norm.weight' of the head is I32"),
        ("d2t", np.full(100, 300), "d2t names token 320, and the vocabulary has 320"),
        ("d2t", -np.arange(100), "d2t names a token twice"),
        ("d2t", np.zeros(100, np.int64), "t2d and d2t name different tokens"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(model, folder, name, value, message):
    with pytest.raises(ValueError, match=message):
        load_eagle_head(str(with_tensors(folder, **{name: value})), model=model)


def test_a_folder_without_weights_or_configuration_is_named(model, tmp_path, folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors"):
        load_eagle_head(str(folder), model=model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="give the folder of an EAGLE-3 head"):
        load_eagle_head(str(tmp_path / "empty"), model=model)


def test_a_head_is_no_model_and_a_model_is_no_head(folder):
    check_model(folder, head=EAGLE3)
    with pytest.raises(ValueError, match="is an EAGLE-3 head, not a model; give it as the model"):
        check_model(folder)
    with pytest.raises(ValueError, match="is no EAGLE-3 head: there is neither"):
        check_model("novels-6m", head=EAGLE3)
