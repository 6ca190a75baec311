# SPDX-License-Identifier: Apache-2.0
"""What the options of the server say to others. No JAX."""

import argparse
from typing import Any


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `EngineConfig` that are given."""
    names = "mode", "max_len", "batch_size", "decode_batches", "max_waiting", "self_check"
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "decode_batches" in given:
        given["decode_batches"] = tuple(given["decode_batches"])
    return given
