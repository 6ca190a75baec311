# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts as PEFT names and lays them out.

Models of transformers 4 have a linear module for each expert, and so do their adapters
(`target_modules`). transformers 5 has one parameter for all experts of a layer, whose adapters
(`target_parameters`) are one matrix A and one B:

    A [U r, I]: row e r + j is rank j of expert e
    B [O, r U]: column j U + e is rank j of expert e

PEFT before 0.19.1 takes a parameter [U, O, I] as [U, I, O], so A has rows of outputs and B of
inputs. The product is the same, and the shapes say which it is.
"""

from collections.abc import Sequence

import numpy as np

GATE_UP, DOWN = "gate_up_proj", "down_proj"
TENSORS = {GATE_UP: ("expert_gate", "expert_up"), DOWN: ("expert_down",)}
"""The parameters of transformers 5 for the experts of a layer, and the tensors of each."""


def parameter_module(layer: int) -> str:
    """The module that has the parameters of a layer's experts."""
    return f"model.layers.{layer}.mlp.experts"


def wrapped_names(module: str, parameters: Sequence[str]) -> dict[str, str]:
    """What PEFT calls the adapter of each parameter of a module.

    One wraps the module, the next wraps that one, in the order of the module: `GATE_UP`, `DOWN`.
    """
    depth = len(parameters)
    return {
        name: module + ".base_layer" * (depth - 1 - i)
        for i, name in enumerate(sorted(parameters, key=list(TENSORS).index))
    }


def split_parameter(
    a: np.ndarray, b: np.ndarray, *, num_experts: int, rank: int, shape: tuple[int, int], where: str
) -> tuple[np.ndarray, np.ndarray]:
    """A [U, r, I] and B [U, O, r] of a parameter [U, O, I].

    Args:
        a: As in the file.
        b: Likewise.
        num_experts: U.
        rank: r.
        shape: O and I.
        where: The file, for messages.

    Raises:
        ValueError: If the shapes do not say which side is which, or belong to another model.
    """
    num_out, num_in = shape
    columns = rank * num_experts
    fitting = [((columns, i), (o, columns)) for o, i in ((num_out, num_in), (num_in, num_out))]
    if (a.shape, b.shape) not in fitting:
        raise ValueError(
            f"{where} has shapes {a.shape} and {b.shape}, and the base model and "
            f"adapter_config.json make it {(columns, num_in)} and {(num_out, columns)}; the "
            "adapter is of another model"
        )
    if num_out == num_in:
        raise ValueError(
            f"{where} has shapes {a.shape} and {b.shape} for square matrices of experts, and "
            "releases of PEFT differ in which side is which; give an adapter of each expert "
            "(target_modules)"
        )
    rows = a.reshape(num_experts, rank, -1)
    columns = b.reshape(-1, rank, num_experts).transpose(2, 0, 1)
    if (a.shape, b.shape) == fitting[0]:
        return rows, columns
    return columns.swapaxes(1, 2), rows.swapaxes(1, 2)
