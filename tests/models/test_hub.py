# SPDX-License-Identifier: Apache-2.0
"""A model is found as a folder or as a repository, or the message says what to do."""

from unittest.mock import Mock

import pytest
from huggingface_hub import errors as hub_errors

from detjax.models import hub
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
    with pytest.raises(ValueError, match="neither an existing folder nor a repository id"):
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
            "neither an existing folder nor a Hugging Face repository; check the spelling",
        ),
        (
            hub_error(hub_errors.RevisionNotFoundError, 404),
            FileNotFoundError,
            "'owner/name' has no revision='v1'",
        ),
        (
            hub_errors.LocalEntryNotFoundError("offline"),
            FileNotFoundError,
            r"could not be reached \(LocalEntryNotFoundError: offline\).*give its folder",
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
