# SPDX-License-Identifier: Apache-2.0
"""Adapters in a program: which adapter a sequence has, and weights that add it.

`params["lora"]` of a model with adapters is `{"slots": int32 [S], "layers": [{"qkv": AdapterStack,
"o": ..., "gate_up": ..., "down": ...}, ...]}`. "slots" says which adapter the sequence in each slot
of an engine has; -1 is none.
"""

from typing import Any

from detjax.array_types import Array, Int32
from detjax.pallas_kernels.lora.adapted import AdaptedMatrix

ADAPTERS, LAYERS, SLOTS = "lora", "layers", "slots"
"""Names in `params`."""


def adapters_of(params: dict[str, Any], slots: Int32[Array, " B"]) -> Int32[Array, " B"] | None:
    """Return the adapter of the sequence in each of these slots; None without adapters."""
    if ADAPTERS not in params:
        return None
    return params[ADAPTERS][SLOTS].at[slots].get(mode="fill", fill_value=-1)


def with_adapters(params: dict[str, Any], adapters: Int32[Array, " B"] | None) -> dict[str, Any]:
    """Return weights whose matrices add what each sequence's adapter says.

    Args:
        params: Of a model with adapters, or of another if `adapters` is None.
        adapters: The slot of each sequence's adapter, -1 for none; None in a program without them.
    """
    if adapters is None:
        return params
    layers = [
        layer
        | {
            name: AdaptedMatrix(base=layer[name], stack=stack, slots=adapters)
            for name, stack in stacks.items()
        }
        for layer, stacks in zip(params["layers"], params[ADAPTERS][LAYERS], strict=True)
    ]
    return {**params, "layers": layers}
