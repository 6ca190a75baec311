# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: those of a folder, mapped and checked against each other; one is written."""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
_DTYPES: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
}
"""Those that weights, or the codes of quantised ones, may have, by safetensors' names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of an open file. Indexing `rows` gives a part of the file as it is mapped: no copy.

    Of a dtype that NumPy does not have, `rows` is safetensors' slice object.
    """

    file: Path
    rows: Any
    shape: tuple[int, ...]
    dtype: str


def check_files(folder: Path) -> None:
    """See that every file of weights is there, without opening one.

    Raises:
        FileNotFoundError: Naming the one that is missing.
        ValueError: If the index of the files is damaged.
    """
    _tensor_files(folder)


def _tensor_files(folder: Path) -> tuple[dict[str, str] | None, list[Path]]:
    """File name by tensor where the folder has an index, and the files."""
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.is_file():
        return None, [single]
    if not index.is_file():
        raise FileNotFoundError(
            f"{folder} has neither {single.name} nor {index.name}; give a folder with safetensors "
            "weights (convert .bin files with transformers' save_pretrained)"
        )
    file_of = _read_index(index)
    files = [folder / name for name in sorted(set(file_of.values()))]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is named in {index.name} but missing; download it")
    return file_of, files


def open_tensors(folder: Path, stack: contextlib.ExitStack) -> dict[str, StoredTensor]:
    """Open the checkpoint's files until `stack` closes, and list their tensors."""
    file_of, files = _tensor_files(folder)
    if file_of is None:
        return dict(open_file(files[0], stack))
    tensors = {}
    for path in files:
        for tensor_name, tensor in open_file(path, stack):
            if tensor_name in tensors:
                raise ValueError(
                    f"{path} and {tensors[tensor_name].file} both hold {tensor_name!r}; the files "
                    "are of different checkpoints: download them again"
                )
            tensors[tensor_name] = tensor
    for tensor_name, tensor in tensors.items():
        listed = file_of.pop(tensor_name, None)
        if listed != tensor.file.name:
            raise ValueError(
                f"{tensor.file} holds {tensor_name!r}, which {INDEX_NAME} places in {listed!r}; "
                "the files are of different checkpoints: download them again"
            )
    if file_of:
        name, file = next(iter(file_of.items()))
        raise ValueError(
            f"{INDEX_NAME} places {name!r} in {file!r}, which lacks it; download both again"
        )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name to file name."""
    try:
        file_of = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
        names = dict(file_of).values()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error!r}); download it") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, which is not a file in the same folder")
    return dict(file_of)


def open_file(path: Path, stack: contextlib.ExitStack) -> Iterator[tuple[str, StoredTensor]]:
    """Open one file; its header must cover it exactly, which finds truncation."""
    try:
        handle = stack.enter_context(safe_open(path, framework="np"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); download it again") from error
    start, header = _read_header(path)
    # WHY: safetensors copies what it reads under Python's lock, at 1.2 GB/s on a GPU's host; what
    # is mapped goes to the GPU from several threads at 14.6.
    mapped = np.memmap(path, np.uint8, "r").view(np.ndarray)
    for name in handle.keys():
        rows = handle.get_slice(name)
        shape, dtype = tuple(rows.get_shape()), rows.get_dtype()
        if dtype in _DTYPES:
            first, stop = (start + offset for offset in header[name]["data_offsets"])
            rows = mapped[first:stop].view(_DTYPES[dtype]).reshape(shape)
        yield name, StoredTensor(file=path, rows=rows, shape=shape, dtype=dtype)


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where a file's tensors begin, and its header, which says where each of them lies.

    Refuses a header that names a tensor twice: safetensors takes the last one.
    """

    def names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path} is damaged: it names {twice!r} twice; download it again")
        return found

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length), object_pairs_hook=names_once)


def write_tensors(
    tensors: Mapping[str, np.ndarray], path: Path, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file that everybody may read who may read other new files of this process.

    # WHY: safetensors 0.8 writes mode 0600 whatever the umask, so a server of another user, or in
    # a container, could not read the model.

    Raises:
        OSError: If it cannot be written, as on a full disk. No part of a new file is left, and a
            file that was there stays.
    """
    is_new = not path.exists()
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except BaseException as error:
        if is_new:
            path.unlink(missing_ok=True)
        found = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, SafetensorError) and found is not None:  # which is no OSError
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    path.chmod(mode)
