# SPDX-License-Identifier: Apache-2.0
"""Soft cap on logits in the bits of a Hopper kernel: not there yet."""

from typing import NoReturn


def softcap(logits, *, cap: float) -> NoReturn:
    """Refuse: see `api.softcap`."""
    raise NotImplementedError("the reference backend has no soft cap on logits; use portable")
