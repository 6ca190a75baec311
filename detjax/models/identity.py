# SPDX-License-Identifier: Apache-2.0
"""What a folder holds, as one hash of everything in it that can change an answer."""

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PART_BYTES = 2**26
"""Files are hashed in parts of this size, side by side; part of what the hash is."""

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
)


def text_files(folder: Path) -> list[str]:
    """Names of all files in `folder` that are read of a model besides its weights."""
    names = [name for name in _TEXT_FILES if (folder / name).is_file()]
    templates = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return names + [path.relative_to(folder).as_posix() for path in templates]


def copy_text_files(source: Path, folder: Path) -> None:
    """Copy all of them but config.json.

    Raises:
        OSError: If one cannot be read or written.
    """
    for name in text_files(source):
        if name != "config.json":
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)


def model_hash(folder: Path) -> str:
    """Hash the configuration, the tokenizer and every byte of the weights in `folder`.

    It reads the weights once, with all processors; what is read stays in the system's cache for
    `load_params`. Where the folder lies and what else is in it does not count.

    Raises:
        OSError: If a file cannot be read.
    """
    names, index = text_files(folder), "model.safetensors.index.json"
    names += [index] if (folder / index).is_file() else []
    names += sorted(path.name for path in folder.glob("*.safetensors"))
    return _hash_of(folder, names)


def folder_hash(folder: Path) -> str:
    """Hash the name and every byte of every file under `folder`.

    Raises:
        OSError: If a file cannot be read.
    """
    paths = (path for path in folder.rglob("*") if path.is_file())
    return _hash_of(folder, sorted(path.relative_to(folder).as_posix() for path in paths))


def _hash_of(folder: Path, names: list[str]) -> str:
    parts = [
        (name, start)
        for name in names
        for start in range(0, max(1, (folder / name).stat().st_size), PART_BYTES)
    ]
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda part: _part_digest(folder / part[0], part[1]), parts))
    total = hashlib.sha256()
    for (name, start), digest in zip(parts, digests, strict=True):
        total.update(f"{name} {start} {digest}\n".encode())
    return total.hexdigest()


def _part_digest(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(PART_BYTES)).hexdigest()
