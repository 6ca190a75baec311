# SPDX-License-Identifier: Apache-2.0
"""Adapters in the bits of Hopper's kernels: not there yet."""

from typing import NoReturn

import jax.numpy as jnp


def _refuse() -> NoReturn:
    raise NotImplementedError("the reference backend has no adapters; use portable or sm90")


def lora_hidden(leaf_sums, slots, scales, *, out_dtype: jnp.dtype):
    """Refuse: see `api.lora_hidden`."""
    _refuse()


def lora_add(base, h, b, *, out_dtype: jnp.dtype):
    """Refuse: see `api.lora_add`."""
    _refuse()
