# SPDX-License-Identifier: Apache-2.0
"""The cache of a model by kind of layer: keys and values, or rows and states."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from detjax.array_types import Array, Cached
from detjax.models.config import ModelConfig
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.delta_rule.sizes import states_of_page


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class HybridPages:
    """The cache where some layers have linear attention. A page is one in all three arrays.

    All are split alike over a mesh: pages over "dp", heads (their fourth axis) over "tp".

    Attributes:
        kv: [L, N, 2, K, P, C]: keys and values of the layers with attention; 8 bits are those of a
            float8.
        rows: [L, N, 1, K, P, X]: what the others keep of each token, K heads of keys.
        states: float32 [L, N, Z, H, I, C]: the state behind each of Z blocks, H heads of values.
    """

    kv: Any
    rows: Any
    states: Any


CachePages = Cached[Array, "L N 2 K P C"] | HybridPages
"""The cache of a model; an array alone where all layers have attention."""


def kv_of(pages: CachePages) -> Cached[Array, "L N 2 K P C"]:
    """Pages of the layers with attention."""
    return pages.kv if isinstance(pages, HybridPages) else pages


def with_kv(pages: CachePages, kv: Cached[Array, "L N 2 K P C"]) -> CachePages:
    """The cache with other pages of the layers with attention."""
    return dataclasses.replace(pages, kv=kv) if isinstance(pages, HybridPages) else kv


def cache_of(
    config: ModelConfig, profile: NumericsProfile, *, num_kv_slots: int, make: Callable[..., Any]
) -> Any:
    """The cache of a model, each array made by `make(layers, *dims of a page, dtype=...)`.

    Args:
        config: The model.
        profile: Its numerics, which say how long a page is.
        num_kv_slots: Heads of keys and values over all ranks.
        make: Of an array of all pages.
    """
    linear, page_len, dtype = (
        config.linear_attention, profile.attention_block, profile.activation_dtype
    )  # fmt: skip
    num_linear = 0 if linear is None else sum(linear.layers)
    num_layers = config.num_layers - num_linear
    kv = make(num_layers, 2, num_kv_slots, page_len, config.head_dim, dtype=profile.cache_dtype)
    if linear is None:
        return kv
    states = states_of_page(page_len), linear.num_value_heads, linear.key_dim, linear.value_dim
    return HybridPages(
        kv=kv,
        rows=make(num_linear, 1, linear.num_key_heads, page_len, linear.row_width, dtype=dtype),
        states=make(num_linear, *states, dtype=jnp.dtype(jnp.float32)),
    )
