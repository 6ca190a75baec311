# SPDX-License-Identifier: Apache-2.0
"""Whether the sm90 kernels can run here. Imports none of them."""

import importlib.util
import os
from pathlib import Path

import jax

from detjax.pallas_kernels.backend import Backend

DRIVER = Path("/proc/driver/nvidia/version")
"""There is such a file where NVIDIA's driver is loaded, also in a container with its GPUs."""

PLUGINS = "jax_cuda13_plugin", "jax_cuda12_plugin"
"""What JAX needs to use a GPU."""


def why_not_here() -> str | None:
    """It needs a GPU of compute capability 9.0, which alone has wgmma."""
    try:
        gpu = jax.devices(Backend.SM90.platform)[0]
    except RuntimeError:
        return _why_no_gpu()
    if gpu.compute_capability != "9.0":
        return f"{gpu.device_kind} is not a Hopper GPU (sm_90)"
    return None


def _why_no_gpu() -> str:
    """Say why JAX has no GPU, and where there is one, what to do."""
    if not DRIVER.exists():
        return "no GPU that JAX can use"
    if not any(map(importlib.util.find_spec, PLUGINS)):
        return (
            "JAX cannot use the NVIDIA GPU that is here, as it was installed without CUDA: pip "
            'install "jax[cuda13]", or cuda12 for an older driver'
        )
    found = [
        f"{name}={os.environ[name]}"
        for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
        if name in os.environ
    ]
    seen = f" ({', '.join(found)})" if found else ""
    return f"JAX cannot use the NVIDIA GPU that is here{seen}"
