# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, alone and with the norm before it and the cache write after it."""

from detjax.array_types import Activation, Array, Cached, Float32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.rotation import Rotation, check_tokens, num_query_heads


def rope(
    x: Activation[Array, "M H C"],
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    *,
    backend: Backend,
) -> Activation[Array, "M H C"]:
    """Rotate each pair of channels (c, c + C/2) by its token's angle.

    `out[m, h, c] = round(x[m, h, c] * cos[m, c] - x[m, h, c + C/2] * sin[m, c])`
    `out[m, h, c + C/2] = round(x[m, h, c + C/2] * cos[m, c] + x[m, h, c] * sin[m, c])`

    Args:
        x: Queries or keys.
        cos: Rows of the host's table, one a token.
        sin: Likewise.
        backend: Which implementation runs.

    Numerics:
        float32, rounded once. The tables are float64 on the host, rounded to float32.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Su et al. 2021, arXiv:2104.09864, in Hugging Face's half-split layout. Hugging Face rounds
        the tables to bfloat16 in a bfloat16 model; here they stay float32.
    """
    return KERNELS[backend].rope(x, cos, sin)


def rope_into_cache(
    qkv: Activation[Array, "M J C"],
    rotation: Rotation,
    place: CachePlace,
    *,
    eps: float,
    backend: Backend,
    num_heads: int | None = None,
) -> tuple[Activation[Array, "M H C"], Cached[Array, "L N 2 K P C"]]:
    """Normalise and rotate queries and keys, and put keys and values in their pages.

    `q' = rope(rms_norm(q))`, `pages[layer, page, 0, :, offset] = rope(rms_norm(k))` and
    `pages[layer, page, 1, :, offset] = v`, with `page = page_table[b, position // P]` and
    `offset = position % P`.

    Args:
        qkv: Heads of queries, then keys, then values: J = H + 2 K. What stands behind them is not
            read.
        rotation: Angles of these tokens, and gains of the norms of queries and keys.
        place: Of these tokens in the cache, which is updated in place where the caller donates it.
            Of padding nothing is written.
        eps: Of the norms.
        backend: Which implementation runs.
        num_heads: H; None if nothing stands behind the values.

    Raises:
        ValueError: If tokens are not as many as positions, or heads fewer than `num_heads` says.

    Numerics:
        `rms_norm` with heads as rows, its result rounded, then `rope`; the rest moves bits.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    check_tokens(qkv, *rotation, *place[:3])
    num_heads = num_query_heads(qkv, place.pages, num_heads)
    return KERNELS[backend].rope_into_cache(qkv, rotation, place, num_heads=num_heads, eps=eps)
