# SPDX-License-Identifier: Apache-2.0
"""The matrix product of the sm90 backend: the kernel for few activations, or that for many."""

import functools

import jax

from detjax.pallas_kernels.linear.sm90_flat_matmul import (
    Fused,
    InputNorm,
    RanksSum,
    flat_matmul,
)
from detjax.pallas_kernels.linear.sm90_tall_matmul import tall_matmul
from detjax.pallas_kernels.linear.tiles import FlatTiles, MatmulTiles


@functools.partial(jax.jit, static_argnames=("leaf_len", "out_dtype", "tiles", "interpret"))
def matmul(
    x, w, bias, residual, fused: Fused | None = None, *,
    leaf_len: int, out_dtype, tiles: MatmulTiles, interpret=None,
):  # fmt: skip
    """Multiply and reduce: [M, N], or [groups, M, N] where CTAs share a tile's leaves.

    Args:
        x: Activations, bfloat16 [M, K], or `QuantizedRows`.
        w: Weights, bfloat16 [N, K]; for flat tiles also a `QuantizedMatrix` or a `JoinedMatrix`; of
            quantised rows a `W8A8Matrix`. With gated tiles F rows of gates, then F of ups, and the
            output is [M, F].
        bias: [N], or None.
        residual: [M, N], added last, or None.
        fused: What else it does. `InputNorm`: each CTA normalises the activations first, into
            shared memory; for flat tiles that hold their rows. Behind the product the results are
            the sum of activations and terms, if there are some, and the normalised rows, if they
            are kept. `RanksSum`: the
            subtrees of ranks are added to a tile's sum, before its bias; for flat tiles.
            `LowRankRows`: `B h` is added behind the bias; of tall tiles that have one leaf. Where
            CTAs share a tile's leaves it is one term more, the last.
        leaf_len: Length of a leaf of K.
        out_dtype: bfloat16 or float32.
        tiles: How it is cut; changes no bit.
        interpret: How to interpret the kernel, if so.

    Raises:
        ValueError: If the tiles do not divide the product, or take no such operand.

    Numerics:
        # ORDER: inside a leaf, k16 block by k16 block in one f32 wgmma accumulator that starts at
        zero; leaves as the perfect binary tree ((l0 + l1) + (l2 + l3)) + ..., f32; each node is
        left + right or (0 + left) + right, the same bits because wgmma's sums are never -0.
        Sums of int8 are exact in int32, so their order is free (`linear.w8a8`).
    """
    num_leaves = x.shape[1] // leaf_len
    if num_leaves & (num_leaves - 1):
        raise ValueError(f"{num_leaves} leaves must be a power of two")
    if num_leaves % tiles.groups:
        raise ValueError(f"{tiles.groups=} must divide the leaves, {num_leaves}")
    if leaf_len % tiles.k:
        raise ValueError(f"{tiles.k=} must divide {leaf_len=}")
    if tiles.is_gated and (num_leaves > 1 or bias is not None or residual is not None):
        raise ValueError("gated tiles take one leaf, no bias and no residual")
    options = {
        "leaf_len": leaf_len, "out_dtype": out_dtype, "tiles": tiles, "interpret": interpret,
    }  # fmt: skip
    if isinstance(tiles, FlatTiles):
        return flat_matmul(x, w, bias, residual, fused, **options)
    if isinstance(fused, InputNorm | RanksSum):
        raise ValueError(f"only flat tiles normalise activations or add ranks, not {tiles}")
    return tall_matmul(x, w, bias, residual, fused, **options)
