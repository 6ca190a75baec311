# SPDX-License-Identifier: Apache-2.0
"""The tensors of a head of multi-token prediction in the files of a model's folder. No JAX."""

import contextlib
from pathlib import Path

import numpy as np

from detjax.models.family import MtpLayout
from detjax.models.hf_config import read_quantization
from detjax.models.quantization.expand import expand_tensors
from detjax.models.weights.files import StoredTensor, open_tensors

_ROWS_AT_ONCE = 4096


def open_mtp_tensors(
    folder: Path, layout: MtpLayout, stack: contextlib.ExitStack
) -> dict[str, StoredTensor]:
    """Open a model's files until `stack` closes, and list the tensors of its head.

    Quantised ones are expanded to bfloat16. Copies of the model's tensors are left out.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If there is no head, or one with an embedding or output matrix of its own.
    """
    tensors = expand_tensors(open_tensors(folder, stack), read_quantization(folder))
    found = {name: one for name, one in tensors.items() if name.startswith(layout.prefix)}
    if not found:
        raise ValueError(
            f"{folder} has no MTP head: no tensor's name begins with {layout.prefix!r}. Some tools "
            "leave it out when they save a model; give the folder that was published"
        )
    for copy, original in layout.copies.items():
        if (one := found.pop(f"{layout.prefix}{copy}", None)) is not None:
            _check_copy(f"{layout.prefix}{copy}", one, original, tensors.get(original))
    return found


def _check_copy(
    name: str, copy: StoredTensor, original: str, of_model: StoredTensor | None
) -> None:
    """Refuse a tensor that stands in a checkpoint twice, and is not the same there."""
    if of_model is not None and (copy.shape, copy.dtype) == (of_model.shape, of_model.dtype):
        parts = [slice(i, i + _ROWS_AT_ONCE) for i in range(0, copy.shape[0], _ROWS_AT_ONCE)]
        pairs = ((np.asarray(copy.rows[part]), np.asarray(of_model.rows[part])) for part in parts)
        if all(ours.tobytes() == theirs.tobytes() for ours, theirs in pairs):
            return
    raise ValueError(
        f"{name!r} in {copy.file} is not {original!r} of the model: an MTP head with an embedding "
        "or an output matrix of its own is not supported; draft by another method of "
        "speculative_config"
    )
