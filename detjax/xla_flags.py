# SPDX-License-Identifier: Apache-2.0
"""The compiler options that the claims rest on. Starts no JAX."""

import os

EXACT_OPTIONS = {"xla_allow_excess_precision": False}
"""Of programs with a claim. Without it XLA may drop a pair of converts, and with it a rounding."""

FAST_OPTIONS = {"xla_allow_excess_precision": True}
"""XLA's default, for programs without a claim."""


def configure_xla() -> None:
    """Make `EXACT_OPTIONS` the default of a JAX that has not started; the fingerprint holds it.

    Importing detjax does this. Programs with a claim are compiled with the options as well, for a
    JAX that started before.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for name, value in EXACT_OPTIONS.items():
        flag = f"--{name}={str(value).lower()}"
        if flag not in flags:
            flags = f"{flags} {flag}".strip()
    os.environ["XLA_FLAGS"] = flags
