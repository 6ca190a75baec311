# SPDX-License-Identifier: Apache-2.0
"""Whether the sm90 kernels can run here. Imports none of them."""

import jax

from detjax.pallas_kernels.backend import Backend


def why_not_here() -> str | None:
    """It needs a GPU of compute capability 9.0, which alone has wgmma."""
    try:
        gpu = jax.devices(Backend.SM90.platform)[0]
    except RuntimeError:
        return "no GPU that JAX can use"
    if gpu.compute_capability != "9.0":
        return f"{gpu.device_kind} is not a Hopper GPU (sm_90)"
    return None
