# SPDX-License-Identifier: Apache-2.0
"""Where a model's files are: a folder, or a snapshot of a Hugging Face repository."""

from pathlib import Path

import huggingface_hub
from huggingface_hub import errors as hub_errors

MODEL_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.jinja")
OTHER_FILES = ("consolidated*", "*/*")  # a second copy of the weights; subfolders


def resolve_model(name_or_path: str, *, revision: str | None = None) -> Path:
    """The folder of a model: an existing one, or a snapshot of a Hugging Face repository.

    A snapshot is downloaded into Hugging Face's cache, or taken from there when offline. Only
    safetensors, JSON and tokenizer files are fetched.

    Args:
        name_or_path: A folder, or an id such as `Qwen/Qwen3-8B`.
        revision: Branch, tag or commit of the repository; None is its main branch.

    Raises:
        FileNotFoundError: If there is no such folder, repository or revision, or it cannot be
            reached and is not in the cache.
        PermissionError: If the repository is gated.
        ValueError: If `revision` is given for a folder, or the name is no repository id.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{revision=} has no meaning for the folder {folder}; leave it out")
        return folder
    if folder.exists():
        raise ValueError(f"{folder} is a file; give the folder it stands in")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name_or_path,
                revision=revision,
                allow_patterns=list(MODEL_FILES),
                ignore_patterns=list(OTHER_FILES),
            )
        )
    except hub_errors.HFValidationError as error:
        raise ValueError(
            f"{name_or_path!r} is neither an existing folder nor a repository id (owner/name)"
        ) from error
    except hub_errors.GatedRepoError as error:
        raise PermissionError(
            f"{name_or_path!r} is gated: ask for access on its page at huggingface.co, then run "
            "`hf auth login` with a token of that account"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{name_or_path!r} has no {revision=}") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{name_or_path!r} is neither an existing folder nor a Hugging Face repository; check "
            "the spelling, or run `hf auth login` if it is private"
        ) from error
    except OSError as error:  # offline, no network, or the hub refused
        raise FileNotFoundError(
            f"{name_or_path!r} is not an existing folder, and Hugging Face could not be reached "
            f"({type(error).__name__}: {error}). Download it on a machine with a network and "
            "give its folder, or unset HF_HUB_OFFLINE"
        ) from error
