# SPDX-License-Identifier: Apache-2.0
"""The compiler options that the claims rest on. Starts no JAX."""

import os
from pathlib import Path

IN_PLACE_OPTIONS = {
    "xla_disable_hlo_passes": "rematerialization",
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
"""Of every program that donates what it reads.

Rematerialization clones reads of a donated argument behind its writer once a program comes near the
device's memory; dynamic-slice fusion hands a kernel a slice whose address is not aligned
(docs/upstream). `detjax.compilation.donation` refuses a program in which either has happened.
"""

_ROUNDING = {"xla_allow_excess_precision": False}

EXACT_OPTIONS = _ROUNDING | IN_PLACE_OPTIONS
"""Of programs with a claim. Without the first XLA may drop a pair of converts, and with it a
rounding."""

FAST_OPTIONS = {"xla_allow_excess_precision": True} | IN_PLACE_OPTIONS
"""Of programs without a claim: XLA's default of rounding, and in place like the others."""


def configure_xla() -> None:
    """Make exact rounding the default of a JAX that has not started; the fingerprint holds it.

    Importing detjax does this. Programs with a claim are compiled with the options as well, for a
    JAX that started before.

    Raises:
        ValueError: If `XLA_FLAGS` is the name of a file, and the file cannot be read.
    """
    flags = given_flags()
    for name, value in _ROUNDING.items():
        flag = f"--{name}={str(value).lower()}"
        if flag not in flags.split():
            flags = f"{flags} {flag}".strip()
    os.environ["XLA_FLAGS"] = flags


def given_flags() -> str:
    """What `XLA_FLAGS` says. XLA takes a value that does not begin with "-" as a file's name."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if not flags or flags.startswith("-"):
        return flags
    try:
        return " ".join(Path(flags).read_text().split())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"XLA_FLAGS={flags!r} begins with no '-', so it names a file of flags, which cannot be "
            f"read: {error}; give flags, such as --xla_name=value, or a file that exists"
        ) from error
