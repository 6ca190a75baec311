# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in the bits of the Hopper kernel, on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np

from detjax.pallas_kernels.hopper_sums import row_sum
from detjax.pallas_kernels.reference_library import call


def check_dtypes(x, w) -> None:
    """Refuse activations and weights that the kernels do not take.

    Raises:
        NotImplementedError: If they are of other dtypes.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float32) or w.dtype != jnp.bfloat16:
        raise NotImplementedError(
            "the reference backend takes bfloat16 or float32 with bfloat16 weights, not "
            f"{x.dtype} with {w.dtype}; use portable"
        )


def rms_norm(x, gain, *, eps: float) -> jax.Array:
    """See `api.rms_norm`.

    Raises:
        NotImplementedError: If rows or the gain are neither bfloat16 nor float32.
        ValueError: If `sm90.row_sum` defines no sum for D.
    """
    if {x.dtype, gain.dtype} - {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        raise NotImplementedError(
            "the reference backend normalises bfloat16 or float32 with gains of either, not "
            f"{x.dtype} with {gain.dtype}; use portable"
        )
    form = row_sum(x.shape[1])
    return call(
        "rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype), x, gain,
        eps=np.float32(eps), is_wide=form.is_wide, vec_len=form.vec_len, lanes=form.lanes,
        num_parts=form.num_parts,
    )  # fmt: skip


def join(total, residual, bias, dtype: jnp.dtype) -> jax.Array:
    """`round(residual + (total + bias))` in `dtype`; residual and bias may be None.

    A total of float32 activations is [3, M, D], the sums of their parts, which are added first.
    """
    none = jnp.zeros((0,), jnp.bfloat16)
    operands = (none if x is None else x for x in (residual, bias))
    name = "join" if total.ndim == 2 else "add_parts"
    return call(name, jax.ShapeDtypeStruct(total.shape[-2:], dtype), total, *operands)


def add_rms_norm(partial, residual, bias, gain, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`."""
    total = join(partial, residual, bias, residual.dtype)
    return total, rms_norm(total, gain, eps=eps)


def combine_add_rms_norm(
    leaf_sums, residual, bias, gain, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.combine_add_rms_norm`."""
    out = jax.ShapeDtypeStruct(leaf_sums.shape[1:], leaf_sums.dtype)
    partial = call("add_leaves", out, leaf_sums)
    return add_rms_norm(partial, residual, bias, gain, eps=eps)
