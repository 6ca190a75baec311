# SPDX-License-Identifier: Apache-2.0
"""Where a model's files are: a folder, or a snapshot of a Hugging Face repository. No JAX."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub

from detjax.defaults import EAGLE3, MTP
from detjax.models.bundled import BUNDLED, BUNDLED_NAME, bundled_model_path
from detjax.models.folder_kind import check_kind
from detjax.models.heads.eagle_config import check_is_head, refuse_head
from detjax.models.heads.mtp_config import find_mtp_layout
from detjax.models.hf_config import load_config
from detjax.models.weights.files import check_files

MODEL_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.jinja")
OTHER_FILES = ("consolidated*", "*/*")  # a second copy of the weights; subfolders
SMALL_FILES = ("*config.json",)


def find_model(name: str | Path, *, revision: str | None = None) -> Path:
    """Return the folder of a model.

    Args:
        name: A folder, a Hugging Face id, or `bundled` or `novels-6m`: the small model that comes
            with the package. A folder of the second name comes first.
        revision: Branch, tag or commit of a Hugging Face id; None takes its main branch.

    Raises:
        FileNotFoundError, PermissionError, ValueError: As `resolve_model` says.
    """
    if _is_bundled(name):
        if revision is not None:
            raise ValueError(f"{revision=} has no meaning for the bundled model; leave it out")
        return bundled_model_path()
    return resolve_model(str(name), revision=revision)


def check_model(name: str | Path, *, revision: str | None = None, head: str = "") -> None:
    """See that a model is there and can be read, before JAX starts and before it is downloaded.

    Of a folder: that its configuration is known and every file of weights is there. Of a Hugging
    Face id: that there is such a repository, and its configuration is known. Where `head` is
    "eagle3", that it is such a head; where it is "mtp", that it is a model which has one.

    Raises:
        FileNotFoundError, PermissionError, ValueError: As `resolve_model` and `load_config` say.
    """
    if _is_bundled(name) or Path(name).expanduser().exists():
        folder = find_model(name, revision=revision)
        check_files(folder)
    else:
        folder = _snapshot(str(name), revision, SMALL_FILES)
    if head == EAGLE3:
        check_is_head(folder)
        return
    refuse_head(folder)
    load_config(folder)
    if head == MTP:
        find_mtp_layout(folder)


def check_draft_model(name: str, model: str | Path, *, revision: str | None = None) -> None:
    """See that a draft model is there, and has as many tokens as the model, before JAX starts.

    Args:
        name: Of the draft model.
        model: That verifies.
        revision: Of `model`.

    Raises:
        FileNotFoundError, PermissionError, ValueError: As `check_model` says, or if it has not.
    """
    check_model(name)
    found, of_model = (
        load_config(
            find_model(one, revision=asked)
            if _is_bundled(one) or Path(one).expanduser().exists()
            else _snapshot(str(one), asked, SMALL_FILES)
        )
        for one, asked in ((name, None), (model, revision))
    )
    refuse_other_vocabulary(name, found.vocab_size, Path(model).name, of_model.vocab_size)


def refuse_other_vocabulary(draft: str, size: int, verifier: str, expected: int) -> None:
    """Refuse a draft model with more or fewer tokens than the model.

    Raises:
        ValueError: Naming both.
    """
    if size != expected:
        raise ValueError(
            f"the draft model {draft} has a vocabulary of {size} and {verifier} one of {expected}; "
            "a draft model needs the vocabulary of the model that it drafts for"
        )


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
        ValueError: If `revision` is given for a folder, the name is no repository id, or what is
            there is no model in Hugging Face format.
    """
    folder = Path(name_or_path).expanduser()
    if folder.exists():
        check_kind(folder)
        if revision is not None:
            raise ValueError(f"{revision=} has no meaning for the folder {folder}; leave it out")
        return folder
    return _snapshot(name_or_path, revision, MODEL_FILES)


def _is_bundled(name: str | Path) -> bool:
    return name == BUNDLED or (str(name) == BUNDLED_NAME and not Path(name).exists())


def _snapshot(name: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """The folder of a repository, in which at least these files are, as far as there are any."""
    with _hub_errors(name, revision):
        folder = Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(files),
                ignore_patterns=list(OTHER_FILES),
            )
        )
    check_kind(folder)
    return folder


@contextlib.contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Say what to do where Hugging Face has no such model, or does not give it."""
    from huggingface_hub import errors as hub_errors  # WHY: it imports a client of HTTP

    nowhere = f"{name!r} is neither an existing folder (looked for {Path(name).absolute()}) nor"
    try:
        # No family that detjax knows has a repository without an owner.
        if "/" not in name:
            raise ValueError(
                f"{nowhere} a repository id (owner/name) nor {BUNDLED_NAME!r}, the bundled model; "
                "check the spelling"
            )
        yield
    except hub_errors.HFValidationError as error:
        raise ValueError(
            f"{nowhere} a repository id (owner/name); check the spelling of the path"
        ) from error
    except hub_errors.GatedRepoError as error:
        raise PermissionError(
            f"{name!r} is gated: ask for access on its page at huggingface.co, then run "
            "`hf auth login` with a token of that account"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{name!r} has no {revision=}") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{nowhere} a Hugging Face repository; check the spelling, or run `hf auth login` "
            "if it is private"
        ) from error
    except OSError as error:  # offline, no network, or the hub refused
        raise FileNotFoundError(
            f"{name!r} is not an existing folder, and Hugging Face could not be reached. Check the "
            "network, unset HF_HUB_OFFLINE if it is set, or download the model elsewhere (`hf "
            f"download {name}`) and give its folder ({type(error).__name__}: {error})"
        ) from error
