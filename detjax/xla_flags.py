# SPDX-License-Identifier: Apache-2.0
"""The compiler options that the claims rest on. Starts no JAX."""

import os

IN_PLACE_OPTIONS = {
    "xla_disable_hlo_passes": "rematerialization",
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
"""Of every program that donates what it reads.

Rematerialization clones reads of a donated argument behind its writer once a program comes near the
device's memory; dynamic-slice fusion hands a kernel a slice whose address is not aligned
(docs/upstream). `detjax.donation` refuses a program in which either has happened.
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
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for name, value in _ROUNDING.items():
        flag = f"--{name}={str(value).lower()}"
        if flag not in flags:
            flags = f"{flags} {flag}".strip()
    os.environ["XLA_FLAGS"] = flags
