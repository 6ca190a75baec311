# SPDX-License-Identifier: Apache-2.0
"""The cache of a model by kind of layer: keys and values, or rows and states.

Layers that read a bounded number of tokens back are *local*: those with a sliding window, and those
of linear attention. They may have fewer pages than the others, and a page table of their own.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from detjax.array_types import Array, Cached
from detjax.models.config import CacheKind, ModelConfig
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.delta_rule.sizes import states_of_page


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class HybridPages:
    """The cache of a model with local layers. A local page is one in all arrays but `kv`.

    All are split alike over a mesh: pages over "dp", heads (their fourth axis) over "tp".

    Attributes:
        kv: [L, N, 2, K, P, C]: keys and values of the layers that see all tokens; 8 bits are those
            of a float8.
        window: [L, n, 2, K, P, C]: those of layers with a sliding window; None without any.
        rows: [L, n, 1, K, P, X]: what linear attention keeps of each token, K heads of keys; None
            without any.
        states: float32 [L, n, Z, H, I, C]: the state behind each of Z blocks, H heads of values;
            likewise.
    """

    kv: Any
    window: Any = None
    rows: Any = None
    states: Any = None


CachePages = Cached[Array, "L N 2 K P C"] | HybridPages
"""The cache of a model; an array alone where no layer is local, or every layer."""


def kv_of(pages: CachePages, kind: CacheKind) -> Cached[Array, "L N 2 K P C"]:
    """Keys and values of the layers of a kind."""
    return getattr(pages, kind) if isinstance(pages, HybridPages) else pages


def with_kv(pages: CachePages, kind: CacheKind, kv: Cached[Array, "L N 2 K P C"]) -> CachePages:
    """The cache with other keys and values of the layers of a kind."""
    return dataclasses.replace(pages, **{kind: kv}) if isinstance(pages, HybridPages) else kv


def by_pages(pages: CachePages) -> list[tuple[Any, bool]]:
    """Each array of a cache, and whether it has local pages."""
    if not isinstance(pages, HybridPages):
        return [(pages, False)]
    local = (pages.window, pages.rows, pages.states)
    return [(pages.kv, False), *((array, True) for array in local if array is not None)]


@runtime_checkable
class MakesPages(Protocol):
    """Makes an array of all pages of a replica, or its shape."""

    def __call__(
        self, num_layers: int, *page: int, dtype: jnp.dtype, is_local: bool = False
    ) -> Any:
        """[`num_layers`, pages, *`page`]; `is_local` says which pages."""
        ...


def cache_of(
    config: ModelConfig, profile: NumericsProfile, *, num_kv_slots: int, make: MakesPages
) -> Any:
    """The cache of a model.

    Args:
        config: The model.
        profile: Its numerics, which say how long a page is.
        num_kv_slots: Heads of keys and values over all ranks.
        make: Makes each array.
    """
    linear, page_len, dtype = (
        config.linear_attention, profile.attention_block, profile.activation_dtype
    )  # fmt: skip
    page = 2, num_kv_slots, page_len, config.head_dim
    kv = make(config.num_cached_layers("kv"), *page, dtype=profile.cache_dtype)
    if not config.has_local_layers:
        return kv
    made: dict[str, Any] = {"kv": kv}
    if num_windows := config.num_cached_layers("window"):
        made["window"] = make(num_windows, *page, dtype=profile.cache_dtype, is_local=True)
    if linear is not None:
        num_linear, num_keys = config.num_cached_layers("linear"), linear.num_key_heads
        row = 1, num_keys, page_len, linear.row_width
        state = (
            states_of_page(page_len), linear.num_value_heads, linear.key_dim, linear.value_dim
        )  # fmt: skip
        float32 = jnp.dtype(jnp.float32)
        made["rows"] = make(num_linear, *row, dtype=dtype, is_local=True)
        made["states"] = make(num_linear, *state, dtype=float32, is_local=True)
    return HybridPages(**made)
