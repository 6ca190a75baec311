# SPDX-License-Identifier: Apache-2.0
"""The one table of kernel sets. Another architecture is a module of kernels, and a line here.

A set is imported when it is first asked: no machine needs them all, and those of a GPU import
Mosaic.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any, cast

from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_set import KernelSet


class LazyModule:
    """A module that is imported when an attribute is first asked for."""

    def __init__(self, name: str, asked_first: Mapping[str, str] | None = None):
        """Keep the name.

        Args:
            name: Of the module.
            asked_first: Attributes that it has from another module, which alone is imported when
                one of them is asked for.
        """
        self.name, self.asked_first = name, dict(asked_first or {})

    def __getattr__(self, attribute: str) -> Any:
        """That of the module."""
        name = self.name
        if name not in sys.modules:
            name = self.asked_first.get(attribute, name)
        return getattr(importlib.import_module(name), attribute)


def _kernels(backend: Backend, **asked_first: str) -> KernelSet:
    """The module of `backend`'s name."""
    elsewhere = {attribute: f"{__package__}.{name}" for attribute, name in asked_first.items()}
    return cast(KernelSet, LazyModule(f"{__package__}.{backend.value}", elsewhere))


KERNELS: dict[Backend, KernelSet] = {
    Backend.SM90: _kernels(Backend.SM90, why_not_here="sm90_here"),
    Backend.REFERENCE: _kernels(Backend.REFERENCE),
    Backend.PORTABLE: _kernels(Backend.PORTABLE),
}
"""The kernel set of each backend, first choice first."""


def module_name(kernels: object) -> tuple[str, ...]:
    """The name of the module that a set is, for a hash of its code; none of one that is made up."""
    return (kernels.name,) if isinstance(kernels, LazyModule) else ()
