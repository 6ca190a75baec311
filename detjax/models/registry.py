# SPDX-License-Identifier: Apache-2.0
"""Which families there are. A new one is a file beside `llama.py` and a line here."""

from typing import Any

from detjax.models.family import Family
from detjax.models.llama import LLAMA
from detjax.models.mistral import MISTRAL
from detjax.models.mixtral import MIXTRAL
from detjax.models.qwen2 import QWEN2
from detjax.models.qwen3 import QWEN3
from detjax.models.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
)


def supported_architectures() -> tuple[str, ...]:
    """Every value of `architectures` that can be loaded."""
    return tuple(name for family in FAMILIES for name in family.architectures)


def find_family(architectures: Any) -> Family:
    """The family that computes `architectures`, the list of one name in a `config.json`.

    Raises:
        ValueError: If it is not a list of one supported name; the message lists those that are.
    """
    for family in FAMILIES:
        for name in family.architectures:
            if architectures == [name]:
                return family
    raise ValueError(
        f"architectures={architectures!r} is not supported; detjax loads one of "
        f"{', '.join(supported_architectures())} (a list of one name in config.json)"
    )
