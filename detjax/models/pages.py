# SPDX-License-Identifier: Apache-2.0
"""The cache of a model by kind of layer: keys and values, or rows and states."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from detjax.array_types import Activation, Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class HybridPages:
    """The cache where some layers have linear attention. A page is one in all three arrays.

    All are split alike over a mesh: pages over "dp", heads (their fourth axis) over "tp".

    Attributes:
        kv: [L, N, 2, K, P, C]: keys and values of the layers with attention.
        rows: [L, N, 1, K, P, X]: what the others keep of each token, K heads of keys.
        states: float32 [L, N, Z, H, I, C]: the state behind each of Z blocks, H heads of values.
    """

    kv: Any
    rows: Any
    states: Any


CachePages = Activation[Array, "L N 2 K P C"] | HybridPages
"""The cache of a model; an array alone where all layers have attention."""


def kv_of(pages: CachePages) -> Activation[Array, "L N 2 K P C"]:
    """Pages of the layers with attention."""
    return pages.kv if isinstance(pages, HybridPages) else pages


def with_kv(pages: CachePages, kv: Activation[Array, "L N 2 K P C"]) -> CachePages:
    """The cache with other pages of the layers with attention."""
    return dataclasses.replace(pages, kv=kv) if isinstance(pages, HybridPages) else kv
