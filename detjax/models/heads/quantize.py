# SPDX-License-Identifier: Apache-2.0
"""Heads whose matrices have 8 bits: rounded where they lie, and multiplied by the W8A8 kernels."""

import logging
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from detjax.defaults import EAGLE3, HEAD_QUANTIZATIONS
from detjax.models.config import Gating
from detjax.models.fast import narrowed
from detjax.models.heads.head import DraftHead
from detjax.models.params import MATRICES
from detjax.pallas_kernels.linear.api import linear, linear_swiglu, norm_linear, norm_linear_swiglu
from detjax.pallas_kernels.linear.quantized import W8A8Matrix

LOG = logging.getLogger(__name__)

_OWN_MATRICES = (*MATRICES, "shared_gate_up", "shared_down", "fc", "join", "lm_head")
_GATED = ("gate_up", "shared_gate_up")
_PROBED_ROWS = (1, 200)


def quantize_head(head: DraftHead, quantization: str) -> None:
    """Round the matrices of a head to 8 bits in place, with a scale for each output channel.

    A matrix is rounded as `quantise_params` rounds, and multiplies rows of `w8a8.quantize_rows`.
    The embedding, routers, experts and what the head uses of the model stay as they are. So does a
    matrix whose shape the kernels refuse; a warning names it.

    Args:
        head: With plain matrices on its mesh. Each is freed when it is rounded.
        quantization: One of `HEAD_QUANTIZATIONS`.

    Raises:
        ValueError: If `quantization` is another, or the kernels refuse every matrix.
    """
    for name in matrices_to_quantize(head, quantization):
        head.params[name] = _rounded(head.params.pop(name), quantization)


def matrices_to_quantize(head: DraftHead, quantization: str) -> list[str]:
    """Names of the matrices that `quantize_head` rounds; arguments and errors as there."""
    if quantization not in HEAD_QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r} must be one of {list(HEAD_QUANTIZATIONS)}")
    names = [name for name in _OWN_MATRICES if name in head.params]
    why_not = {name: _why_refused(head, name, quantization) for name in names}
    if all(why_not.values()):
        raise ValueError(
            f"quantization={quantization!r}: backend {head.backend.value} multiplies no matrix of "
            f"{head.head_config.name} by 8-bit activations ({why_not[names[0]]}); leave "
            "quantization out"
        )
    for name, why in why_not.items():
        if why is not None:
            LOG.warning("%r of %s stays as it is: %s", name, head.head_config.name, why)
    return [name for name, why in why_not.items() if why is None]


def _rounded(w: jax.Array, quantization: str) -> W8A8Matrix:
    parts = narrowed(w, quantization)
    return W8A8Matrix(values=parts["q"], scales=parts["scale"])


def _why_refused(head: DraftHead, name: str, quantization: str) -> str | None:
    """What the kernels refuse in a matrix, or None: traced, so that they check their own limits."""
    num_out, num_in = head.params[name].shape
    dtype = head.profile.activation_dtype
    matrix = W8A8Matrix(
        values=jax.ShapeDtypeStruct((num_out, num_in), jnp.dtype(quantization)),
        scales=jax.ShapeDtypeStruct((num_out,), jnp.float32),
    )
    gain = jax.ShapeDtypeStruct((num_in,), dtype)
    # Multiplied with rows that the same operation normalises.
    behind_norm = ("gate_up", "lm_head" if head.head_config.method == EAGLE3 else "qkv")
    for rows in _PROBED_ROWS:
        x = jax.ShapeDtypeStruct((rows, num_in), dtype)
        try:
            if name in behind_norm:
                jax.eval_shape(_product(head, name, has_norm=True), x, gain, matrix)
            jax.eval_shape(_product(head, name, has_norm=False), x, matrix)
        except (NotImplementedError, ValueError) as error:
            return str(error).partition(";")[0]  # what follows is of models
    return None


def _product(head: DraftHead, name: str, *, has_norm: bool) -> Callable:
    """What multiplies by a matrix of the head."""
    backend, eps = head.backend, head.config.rms_norm_eps
    if name in _GATED and head.config.gating is not Gating.GEGLU:
        if has_norm:
            return partial(norm_linear_swiglu, eps=eps, backend=backend)
        return partial(linear_swiglu, backend=backend)
    dtype = jnp.dtype(jnp.float32) if name == "lm_head" else head.profile.activation_dtype
    if has_norm:
        return partial(norm_linear, eps=eps, out_dtype=dtype, backend=backend)
    return partial(linear, out_dtype=dtype, backend=backend)
