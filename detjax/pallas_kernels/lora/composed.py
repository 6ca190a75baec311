# SPDX-License-Identifier: Apache-2.0
"""Products with adapters from the parts that every kernel set has; `api` says what they compute."""

import jax
import jax.numpy as jnp

from detjax.numerics import Reduction
from detjax.pallas_kernels.kernel_set import KernelSet
from detjax.pallas_kernels.lora.adapted import LowRankRows

F32 = jnp.dtype(jnp.float32)


def lora_project(
    kernels: KernelSet, x, a, slots, scales, *, reduction: Reduction, out_dtype: jnp.dtype
) -> jax.Array:
    """See `api.lora_project`."""
    leaf_sums = kernels.linear_leaf_sums(x, a, reduction=reduction)
    return kernels.lora_hidden(leaf_sums, slots, scales, out_dtype=out_dtype)


def lora_linear(
    kernels: KernelSet, x, w, bias, adapters: LowRankRows, *, out_dtype: jnp.dtype
) -> jax.Array:
    """See `api.lora_linear`."""
    base = kernels.linear(x, w, bias, out_dtype=F32)
    return kernels.lora_add(base, adapters.h, adapters.b, out_dtype=out_dtype)


def lora_linear_swiglu(kernels: KernelSet, x, w_gate_up, adapters: LowRankRows) -> jax.Array:
    """See `api.lora_linear_swiglu`."""
    return kernels.swiglu(lora_linear(kernels, x, w_gate_up, None, adapters, out_dtype=x.dtype))


def lora_linear_add_rms_norm(
    kernels: KernelSet, x, w, adapters: LowRankRows, residual, bias, gain, *,
    reduction: Reduction, eps: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.lora_linear_add_rms_norm`."""
    tree = kernels.linear_partial(x, w, reduction=reduction)
    total = kernels.lora_add(tree, adapters.h, adapters.b, out_dtype=F32)
    return kernels.add_rms_norm(total, residual, bias, gain, eps=eps)
