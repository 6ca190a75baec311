# SPDX-License-Identifier: Apache-2.0
"""Which dtypes weights may have in a file and on a device, and what is rounded in between."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from detjax.defaults import NO_CAST
from detjax.models.config import ModelConfig
from detjax.models.params import tensor_specs
from detjax.models.weights.reading import open_weights

SOURCE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
CASTS = (NO_CAST, "bfloat16")
"""What `cast_weights` may be."""


def find_cast(folder: Path, config: ModelConfig, *, cast_weights: str, dtype: DTypeLike) -> str:
    """Name the conversion of a folder's weights that `cast_weights` asks for, from their headers.

    Args:
        folder: As for `load_params`.
        config: The model.
        cast_weights: One of `CASTS`.
        dtype: The dtype of every parameter.

    Returns:
        Such as "float16 to bfloat16", which belongs in the fingerprint; `NO_CAST` if not asked for.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If there is nothing to convert, or `dtype` is not what to convert to.
    """
    if cast_weights not in CASTS:
        raise ValueError(f"{cast_weights=} must be one of {list(CASTS)}")
    if cast_weights == NO_CAST:
        return NO_CAST
    target = check_dtype(dtype)
    if target != jnp.dtype(cast_weights):
        raise ValueError(
            f"--cast-weights {cast_weights} does not go with {target.name} weights, which hold "
            "every checkpoint exactly; leave it out"
        )
    specs = jax.tree.leaves(tensor_specs(config, tp=1, vocab_block=1))
    wanted = {name for spec in specs for name in spec.hf_names}
    with contextlib.ExitStack() as stack:
        tensors = open_weights(folder, config, target, stack)
        found = {tensor.dtype for name, tensor in tensors.items() if name in wanted}
    sources = sorted(SOURCE_DTYPES[dtype] for dtype in found & {"F16", "F32"})
    if not sources:
        raise ValueError(
            f"--cast-weights {cast_weights} has nothing to convert: the weights in {folder} are "
            f"{', '.join(sorted(SOURCE_DTYPES.get(d, d) for d in found))}; leave it out"
        )
    return f"{' and '.join(sources)} to {cast_weights}"


def check_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Refuse a dtype that parameters cannot have.

    Raises:
        ValueError: If it is neither bfloat16 nor float32.
    """
    target = jnp.dtype(dtype)
    if target not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"dtype={target.name} is not supported; use bfloat16 or float32")
    return target


def check_conversion(name: str, source: str, *, dtype: jnp.dtype, can_cast: bool) -> None:
    """Refuse what would lose bits unasked.

    Args:
        name: Of the tensor, and where it comes from.
        source: Its dtype, as safetensors writes it.
        dtype: What it is to become.
        can_cast: Whether a cast was asked for.

    Raises:
        ValueError: If the dtype is not read at all, or not without a cast.
    """
    if source not in SOURCE_DTYPES:
        raise ValueError(
            f"{name} is {source}, which is not supported; detjax reads "
            f"{', '.join(SOURCE_DTYPES)}, and weights of 8 and 4 bits with scales in the format "
            "that quantization_config in config.json names"
        )
    if source == "F16" and dtype == jnp.bfloat16 and not can_cast:
        raise ValueError(
            f"{name} is float16, whose 11 significant bits do not fit the 8 of "
            "bfloat16: the weights would change. Ask for dtype float32, which holds them exactly "
            "(--dtype float32, backend portable), or for the rounding: --cast-weights bfloat16, "
            "load_model(cast_weights='bfloat16')"
        )


def converted(rows: np.ndarray, dtype: jnp.dtype, *, name: str) -> np.ndarray:
    """Values in another dtype; a finite one must not become infinite."""
    # ROUND: float32 and float16 to bfloat16 round (to nearest, ties to even); nothing else does.
    values = rows.astype(dtype, copy=False)
    if rows.dtype == np.float32 and dtype == jnp.bfloat16 and values.size:
        magnitude = values.view(np.uint16) & np.uint16(0x7FFF)
        if magnitude.max() >= 0x7F80 and (np.isfinite(rows) & (magnitude == 0x7F80)).any():
            raise ValueError(
                f"{name} holds a finite value that would become infinite in bfloat16, whose "
                "largest is 3.39e38; ask for dtype float32"
            )
    return values
