# SPDX-License-Identifier: Apache-2.0
"""Values of options that several layers have. Imports nothing: commands read them before JAX."""

AUTO = "auto"
"""Chosen by the hardware, the model or its folder."""

NO_CAST = "none"
"""The weight cast of a model whose weights were read as they are, or as its profile stores them."""

GPU_MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory for weights and cache together."""
MAX_LORAS, MAX_LORA_RANK = 8, 16
"""Adapters that may run at once, and their highest rank."""
