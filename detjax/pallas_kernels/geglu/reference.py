# SPDX-License-Identifier: Apache-2.0
"""GeGLU in the bits of a Hopper kernel: not there yet."""

from typing import NoReturn


def geglu(gate_up) -> NoReturn:
    """Refuse: see `api.geglu`."""
    raise NotImplementedError("the reference backend has no GeGLU; use portable")
