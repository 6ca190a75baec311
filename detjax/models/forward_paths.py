# SPDX-License-Identifier: Apache-2.0
"""The two ways through a model: canonical kernels, or whatever is quickest and promises nothing."""

from collections.abc import Callable
from typing import Literal

from detjax.models.decoder import forward, local_logits
from detjax.models.fast import forward_fast, local_logits_fast

KernelMode = Literal["invariant", "fast"]

FORWARD_PATHS: dict[KernelMode, tuple[Callable, Callable]] = {
    "invariant": (forward, local_logits),
    "fast": (forward_fast, local_logits_fast),
}
"""The forward pass and the logits of each, which take the same arguments."""
