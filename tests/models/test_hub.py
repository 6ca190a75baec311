# SPDX-License-Identifier: Apache-2.0
"""A model is found as a folder or as a repository, or the message says what to do."""

import shutil
from unittest.mock import Mock

import pytest
from huggingface_hub import errors as hub_errors

from detjax.models import hub
from detjax.models.bundled import bundled_model_path
from detjax.models.hub import resolve_model


def test_existing_folder_is_taken_as_it_is(tmp_path):
    assert resolve_model(str(tmp_path), revision=None) == tmp_path


def test_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="revision='main' has no meaning for the folder"):
        resolve_model(str(tmp_path), revision="main")


def test_file_in_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file; give the folder it stands in"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "../elsewhere", "two words"])
def test_impossible_name_is_refused(name):
    with pytest.raises(
        ValueError, match="neither an existing folder .* nor a repository id.*check the"
    ):
        resolve_model(name)


def test_snapshot_fetches_safetensors_and_text_only(monkeypatch, tmp_path):
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        return str(tmp_path)

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("owner/name", revision="v1") == tmp_path
    ((repo_id, options),) = calls
    assert (repo_id, options["revision"]) == ("owner/name", "v1")
    kept = list(
        hub.huggingface_hub.utils.filter_repo_objects(
            [
                "config.json",
                "model-00001-of-00002.safetensors",
                "model.safetensors.index.json",
                "tokenizer.model",
                "chat_template.jinja",
                "pytorch_model.bin",
                "consolidated.safetensors",
                "original/params.json",
                "onnx/model.safetensors",
                "model.gguf",
            ],
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        )
    )
    assert kept == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
        "chat_template.jinja",
    ]


def hub_error(kind: type, status: int) -> Exception:
    return kind("message", response=Mock(headers={}, status_code=status))


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (hub_error(hub_errors.GatedRepoError, 403), PermissionError, "is gated: ask for access"),
        (
            hub_error(hub_errors.RepositoryNotFoundError, 404),
            FileNotFoundError,
            "neither an existing folder .* nor a Hugging Face repository; check the spelling",
        ),
        (
            hub_error(hub_errors.RevisionNotFoundError, 404),
            FileNotFoundError,
            "'owner/name' has no revision='v1'",
        ),
        (
            hub_errors.LocalEntryNotFoundError("offline"),
            FileNotFoundError,
            r"could not be reached.*give its folder \(LocalEntryNotFoundError: offline\)",
        ),
        (
            hub_errors.OfflineModeIsEnabled("offline"),
            FileNotFoundError,
            "could not be reached.*unset HF_HUB_OFFLINE",
        ),
        (hub_error(hub_errors.HfHubHTTPError, 503), FileNotFoundError, "could not be reached"),
    ],
)
def test_hub_errors_say_what_to_do(monkeypatch, error, expected, message):
    def snapshot_download(repo_id, **options):
        raise error

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(expected, match=message):
        resolve_model("owner/name", revision="v1")


def test_a_name_without_an_owner_asks_nobody(monkeypatch):
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", None)
    with pytest.raises(ValueError, match=r"looked for .*/llama\) nor a .*'novels-6m'"):
        resolve_model("llama")


SHARD = "model-00002-of-00004.safetensors"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"q4.gguf": ""}, "holds a GGUF file, q4.gguf, for llama.cpp; give the folder or the id"),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "org/base"}', "a.safetensors": ""},
            "is an adapter \\(LoRA\\) of org/base, not a model; give that as the model",
        ),
        ({"adapter_config.json": "{"}, "is an adapter \\(LoRA\\) of its base model"),
        ({SHARD: "", "config.json": "{}"}, "holds 1 of 4 shards of a model and no model.safe"),
        (
            {"config.json": '{"quantization": {"bits": 4, "group_size": 64}}'}
            | {"model.safetensors": ""},
            "is a model in MLX's format",
        ),
        ({"weights.npz": "", "config.json": "{}"}, "is a model in MLX's format"),
        ({"consolidated.safetensors": ""}, "holds consolidated.safetensors"),
    ],
    ids=["gguf", "lora", "broken-lora", "shard", "mlx", "old-mlx", "mistral"],
)
@pytest.mark.parametrize("find", [resolve_model, hub.find_model, hub.check_model])
def test_a_folder_that_is_no_model_is_named_for_what_it_is(tmp_path, find, files, says):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"^{tmp_path} {says}"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("q4.gguf", "is a GGUF file, for llama.cpp; give the folder"),
        (SHARD, "is shard 2 of 4 of a model; give the folder that holds all of them"),
        ("model.safetensors", "is a file; give the folder it stands in"),
    ],
)
def test_a_file_that_is_no_model_is_named_for_what_it_is(tmp_path, name, says):
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=f"{name} {says}"):
        resolve_model(str(tmp_path / name))


def test_an_adapter_beside_whole_weights_is_no_matter(tmp_path):
    for name in ("adapter_config.json", "model.safetensors", "other.gguf"):
        (tmp_path / name).write_text("")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_model_is_checked_without_its_weights(monkeypatch, tmp_path):
    """Of a repository only the configuration is fetched; of a folder no file is opened."""
    kept = []

    def snapshot_download(repo_id, *, allow_patterns, **_):
        kept.extend(allow_patterns)
        return str(bundled_model_path())

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot_download)
    hub.check_model("owner/name")
    assert kept == ["*config.json"]
    shutil.copytree(bundled_model_path(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    hub.check_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor"):
        hub.check_model(tmp_path / "model")
