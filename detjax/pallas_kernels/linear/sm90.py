# SPDX-License-Identifier: Apache-2.0
"""Linear layers on Hopper: one matrix-product kernel, tiles by M, and the rest of the tree."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.numerics import Reduction
from detjax.pallas_kernels.fixed_blocks import pad_axis
from detjax.pallas_kernels.linear import sm90_float32
from detjax.pallas_kernels.linear.joined import JoinedMatrix
from detjax.pallas_kernels.linear.quantized import BLOCK, Coding, QuantizedMatrix
from detjax.pallas_kernels.linear.sm90_expand import expand
from detjax.pallas_kernels.linear.sm90_flat_matmul import InputNorm, RanksSum
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import (
    MAX_NORM_ROWS,
    MAX_RANKS_ROWS,
    Added,
    FlatTiles,
    MatmulTiles,
    Product,
    Rows,
    choose_tiles,
)
from detjax.pallas_kernels.lora.adapted import LowRankRows
from detjax.pallas_kernels.rms_norm.sm90 import combine_add_rms_norm, joined, rms_norm, row_sum
from detjax.pallas_kernels.sm90_hardware import LANES, NUM_SMS

MAX_CODED_ROWS = 512
"""Up to here a product reads quantised weights as they lie; above, their expansion.

512 rows of `down` of 8B in int4 take 120 us by codes. The expansion alone takes some 50 us, and its
product 83 (H200, 2026-11).
"""

MAX_COMBINED_ROWS = 128
"""Up to here leaves, residual and norm are one kernel; above, float32 traffic costs."""

MAX_ADDED_TO_TREES = 64
"""Up to here a product of several leaves adds adapters: those that stream weights do."""

MAX_ADDED_ROWS = 4
"""Up to here a product finishes the sum that its input is, and normalises it; 8 is most."""

MAX_ROWS_BY_CODES, MAX_WIDTH_BY_CODES, MAX_SUBTREES_BY_CODES = 2, 5120, 4
"""The like of a product of codes: rows, their width, and subtrees. 0 rows turn it off.

Beyond these, registers spill beside the codes, or `ptxas` puts one wgmma after the other. A layer
of the 8B shape in int4 without its attention takes 70.6 us at 4 rows then, and 50.0 with a launch
that adds (one H200, 2026-11).
"""


def readable(x, w, *, leaf_len: int):
    """Weights as a product reads them: codes if it has few rows, else their expansion.

    Raises: As `check_supported`.
    """
    check_supported(x, w, leaf_len=leaf_len)
    if not isinstance(w, QuantizedMatrix) or _reads_codes(x, leaf_len):
        return w
    return expand(w)


def _reads_codes(x, leaf_len: int) -> bool:
    is_few = x.shape[0] <= MAX_CODED_ROWS
    return is_few and x.dtype == jnp.bfloat16 and leaf_len % BLOCK == 0


def _coding(x, w, leaf_len: int) -> Coding | None:
    """How the weights that a product reads are quantised."""
    is_coded = isinstance(w, QuantizedMatrix) and _reads_codes(x, leaf_len)
    return w.coding if is_coded else None


def check_supported(x, w, *, leaf_len: int) -> None:
    """Refuse what no tile of these kernels computes.

    Raises:
        NotImplementedError: For weights that are not bfloat16, activations that are neither that
            nor float32, a leaf that is not a multiple of 16 (the depth of one wgmma), or widths
            that TMA cannot address.
        ValueError: If K of `x` and `w` differ or K is not whole leaves.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float32) or w.dtype != jnp.bfloat16:
        raise NotImplementedError(
            "sm90 linear multiplies bfloat16 or float32 activations by bfloat16 weights, not "
            f"{x.dtype} by {w.dtype}; use portable"
        )
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"{x.shape=} and {w.shape=} must agree in their last axis, K")
    if leaf_len % 16:
        raise NotImplementedError(
            f"sm90 linear needs leaves of a multiple of 16, the depth of one wgmma, not {leaf_len};"
            " use portable"
        )
    if x.shape[1] % leaf_len:
        raise ValueError(f"K={x.shape[1]} must be whole leaves of {leaf_len}")
    if w.shape[0] % 64:
        raise NotImplementedError(
            f"sm90 linear needs N to be a multiple of 64, not {w.shape[0]}; use portable"
        )


def _one_leaf_tiles(
    x, w, bias, fused: InputNorm | LowRankRows | None, *, out_dtype, is_gated: bool = False
) -> MatmulTiles:
    """Tiles of a product of one leaf, chosen by M."""
    rows = Rows.GIVEN
    if isinstance(fused, InputNorm):
        rows = Rows.SUMMED if fused.terms or fused.keeps_rows else Rows.NORMALISED
    product = Product(
        num_rows=x.shape[0],
        num_out=w.shape[0],
        num_leaves=1,
        leaf_len=x.shape[1],
        out_bytes=jnp.dtype(out_dtype).itemsize,
        has_bias=bias is not None,
        is_gated=is_gated,
        rows=rows,
        added=Added.ADAPTERS if isinstance(fused, LowRankRows) else Added.NOTHING,
        coding=_coding(x, w, x.shape[1]),
    )
    return choose_tiles(product)


def _multiply_one_leaf(
    x, w, bias, fused: InputNorm | LowRankRows | None, *,
    out_dtype, is_gated: bool = False, interpret=None,
):  # fmt: skip
    """`matmul` of one leaf."""
    tiles = _one_leaf_tiles(x, w, bias, fused, out_dtype=out_dtype, is_gated=is_gated)
    return matmul(
        x, w, bias, None, fused,
        leaf_len=x.shape[1], out_dtype=out_dtype, tiles=tiles, interpret=interpret,
    )  # fmt: skip


def joins_matrices(x, first, second, *, out_dtype: jnp.dtype) -> bool:
    """See `api.joins_matrices`: rows of bfloat16 few enough for tiles that stream weights."""
    if {x.dtype, first.dtype, second.dtype} != {jnp.dtype(jnp.bfloat16)}:
        return False
    w = JoinedMatrix(first=first, second=second)
    tiles = _one_leaf_tiles(x, w, None, None, out_dtype=out_dtype)
    if not isinstance(tiles, FlatTiles):
        return False
    return first.shape[0] % (tiles.out_rows * tiles.num_wgs) == 0


def linear(x, w, bias, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.linear`.

    Numerics:
        # ORDER: k16 block by k16 block in one f32 wgmma accumulator, then the bias; K is not split.
        # ROUND: once, to `out_dtype`.
        Tiles, clusters and which operand is swapped are chosen by M and N for speed; they change no
        bit, because wgmma adds a k16 block to an accumulator in one way whatever its N is.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (K, dtypes, build).
    """
    if (x.dtype, w.dtype) == (jnp.bfloat16, jnp.float32):
        # ORDER: of each part of the weights, then the parts, smallest first, then the bias.
        if (num_out := w.shape[0]) < LANES:  # a router of few experts
            w = pad_axis(w, 0, LANES)
            bias = None if bias is None else pad_axis(bias, 0, LANES)
        parts = sm90_float32.split_rows(w).reshape(-1, w.shape[1])
        sums = linear(x, parts, None, out_dtype=jnp.dtype(jnp.float32))
        return sm90_float32.add_weight_parts(sums, bias, out_dtype=out_dtype)[:, :num_out]
    w = readable(x, w, leaf_len=x.shape[1])
    if x.dtype == jnp.float32:
        return sm90_float32.linear(x, w, bias, out_dtype=out_dtype)
    return _multiply_one_leaf(x, w, bias, None, out_dtype=out_dtype)


def adds_adapters(x, w) -> bool:
    """Whether products add rows' adapters themselves: those of bfloat16, weights not coded."""
    return x.dtype == jnp.bfloat16 and not isinstance(w, QuantizedMatrix)


def linear_with_adapters(
    x, w, bias, adapters: LowRankRows, *, out_dtype, is_gated: bool = False
) -> jax.Array:
    """`linear` or `linear_swiglu` with what `adapters` add to each sum before it is rounded.

    Numerics:
        # ORDER: `linear`'s, the bias included; the adapters' product k16 block by k16 block in an
        accumulator of its own, added where it is not zero.
        # ROUND: as `linear` and `linear_swiglu`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    check_supported(x, w, leaf_len=x.shape[1])
    return _multiply_one_leaf(x, w, bias, adapters, out_dtype=out_dtype, is_gated=is_gated)


def linear_swiglu(x, w_gate_up) -> jax.Array:
    """See `api.linear_swiglu`.

    Numerics:
        # ORDER: gate and up as in `linear`, k16 block by k16 block in one f32 wgmma accumulator.
        # ROUND: gate and up to bfloat16, in registers; then the instructions of `swiglu`, and one
        rounding. The bits are those of `linear` and `swiglu` one after the other.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    w_gate_up = readable(x, w_gate_up, leaf_len=x.shape[1])
    if x.dtype == jnp.float32:
        return sm90_float32.linear_swiglu(x, w_gate_up)
    return _multiply_one_leaf(x, w_gate_up, None, None, out_dtype=x.dtype, is_gated=True)


def normalises_input(num_rows: int, width: int) -> bool:
    """Whether a product of so many rows normalises them itself: few rows, each a warpgroup wide."""
    return num_rows <= MAX_NORM_ROWS and row_sum(width).is_wide


def norm_linear(x, gain, w, bias, *, eps: float, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.norm_linear`: one launch for rows that `normalises_input`.

    Numerics:
        # ORDER, # ROUND: those of `rms_norm`, in one launch by the same instructions in every CTA;
        then those of `linear`.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (K, dtypes, build).
    """
    w = readable(x, w, leaf_len=x.shape[1])
    if x.dtype == jnp.float32:
        return sm90_float32.norm_linear(x, gain, w, bias, eps=eps, out_dtype=out_dtype)
    if not normalises_input(*x.shape):
        return linear(rms_norm(x, gain, eps=eps), w, bias, out_dtype=out_dtype)
    return _multiply_one_leaf(x, w, bias, InputNorm(gain=gain, eps=eps), out_dtype=out_dtype)


def norm_linear_swiglu(x, gain, w_gate_up, *, eps: float) -> jax.Array:
    """See `api.norm_linear_swiglu`: one launch for rows that `normalises_input`.

    Numerics:
        # ORDER, # ROUND: those of `rms_norm`, as in `norm_linear`; then those of `linear_swiglu`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    w_gate_up = readable(x, w_gate_up, leaf_len=x.shape[1])
    if x.dtype == jnp.float32:
        return sm90_float32.norm_linear_swiglu(x, gain, w_gate_up, eps=eps)
    if not normalises_input(*x.shape):
        return linear_swiglu(rms_norm(x, gain, eps=eps), w_gate_up)
    norm = InputNorm(gain=gain, eps=eps)
    return _multiply_one_leaf(x, w_gate_up, None, norm, out_dtype=x.dtype, is_gated=True)


def adds_input(num_rows: int, width: int) -> bool:
    """Whether a product of so many rows finishes the sum that its input is."""
    return num_rows <= MAX_ADDED_ROWS and row_sum(width).is_wide


def sum_norm_linear(
    residual, w, bias, norm: InputNorm, *, out_dtype, is_gated: bool = False, interpret=None
) -> tuple[jax.Array, ...]:
    """Add terms to a few rows of the residual stream, normalise and multiply, in one launch.

    Args:
        residual: [M, K].
        w: Weights, (out, in).
        bias: Of the product, or None.
        norm: The terms, and the norm of the sum.
        out_dtype: Of the product.
        is_gated: Whether `w` is gates and ups, and their product gated.
        interpret: How to interpret it, if so.

    Returns:
        The product, the sum if there are terms, and its normalised rows if they are kept.

    Numerics:
        The sum is that of `norm.read_row`, in every CTA; then as `norm_linear`.
    """
    w = readable(residual, w, leaf_len=residual.shape[1])
    return _multiply_one_leaf(
        residual, w, bias, norm, out_dtype=out_dtype, is_gated=is_gated, interpret=interpret
    )


def _read_leaves(residual_gmem, terms_gmem, row, columns, math):
    """The residual stream with the rest of a tree, as `combine_add_rms_norm` adds it."""
    [leaves_gmem] = terms_gmem
    leaves = [math.load(leaves_gmem.at[k, row, columns]) for k in range(leaves_gmem.shape[0])]
    return joined(leaves, math.load(residual_gmem.at[row, columns]), None, residual_gmem.dtype)


def defers_sum(x, w, *, reduction: Reduction) -> bool:
    """See `api.defers_sum`: few rows, if CTAs share a tree."""
    groups = _residual_tiles(x, w, reduction, has_bias=False).groups
    return groups > 1 and adds_input(x.shape[0], w.shape[0])


def _adds_subtrees(leaf_sums, residual, w) -> bool:
    """Whether a product adds the rest of a tree to its rows."""
    if residual.dtype == jnp.float32 or not adds_input(*residual.shape):
        return False
    if not isinstance(w, QuantizedMatrix):
        return True
    num_rows, width = residual.shape
    # WHY: zero points take registers; gates of one row of 5120 channels spilled 12 bytes.
    most_width = MAX_WIDTH_BY_CODES if w.zeros is None else 4096
    is_small = num_rows <= MAX_ROWS_BY_CODES and width <= most_width
    return is_small and len(leaf_sums) <= MAX_SUBTREES_BY_CODES


def combine_norm_linear(
    leaf_sums, residual, gain, w, bias=None, *,
    eps: float, out_dtype, is_gated: bool = False, interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """See `api.combine_norm_linear`: one launch for rows whose subtrees a product adds.

    Without sums to add, for rows that it `normalises_input` of.

    Numerics:
        # ORDER, # ROUND: those of `combine_add_rms_norm` or `rms_norm`, by the same instructions in
        every CTA; then those of `linear` or `linear_swiglu`.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (K, dtypes, build).
    """
    options: dict = {"out_dtype": out_dtype, "is_gated": is_gated, "interpret": interpret}
    if leaf_sums is None:
        is_narrow = residual.dtype == w.dtype == jnp.bfloat16
        if is_narrow and normalises_input(*residual.shape):
            norm = InputNorm(gain=gain, eps=eps, keeps_rows=True)
            out, x = sum_norm_linear(residual, w, bias, norm, **options)
            return out, residual, x
        total, x = residual, rms_norm(residual, gain, eps=eps)
    elif _adds_subtrees(leaf_sums, residual, w):
        norm = InputNorm(
            gain=gain, terms=(leaf_sums,), eps=eps, read_row=_read_leaves, keeps_rows=True
        )
        out, total, x = sum_norm_linear(residual, w, bias, norm, **options)
        return out, total, x
    else:
        total, x = combine_add_rms_norm(leaf_sums, residual, None, gain, eps=eps)
    out = linear_swiglu(x, w) if is_gated else linear(x, w, bias, out_dtype=out_dtype)
    return out, total, x


def linear_leaf_sums(
    x, w, *, reduction: Reduction, adapters: LowRankRows | None = None, interpret=None
) -> jax.Array:
    """See `api.linear_leaf_sums`: a part is what one of the CTAs that share a tile's tree adds.

    Up to `MAX_ADDED_TO_TREES` rows it may have adapters, which are the last part if CTAs share a
    tree, and else in the sum.

    Numerics:
        See `linear_partial`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant: of the tree's sum;
        how it is spread over groups may vary with M.
    """
    w = readable(x, w, leaf_len=reduction.leaf_len)
    num_leaves = x.shape[1] // reduction.leaf_len
    if num_leaves & (num_leaves - 1):
        raise ValueError(f"a rank's {num_leaves} leaves must be a power of two")
    if x.dtype == jnp.float32:
        return sm90_float32.linear_leaf_sums(x, w, reduction=reduction)
    product = Product(
        num_rows=x.shape[0],
        num_out=w.shape[0],
        num_leaves=num_leaves,
        leaf_len=reduction.leaf_len,
        out_bytes=4,
        added=Added.ADAPTERS if adapters else Added.NOTHING,
        coding=_coding(x, w, reduction.leaf_len),
    )
    sums = matmul(
        x, w, None, None, adapters,
        leaf_len=reduction.leaf_len, out_dtype=jnp.float32, tiles=choose_tiles(product),
        interpret=interpret,
    )  # fmt: skip
    return sums.reshape(-1, x.shape[0], w.shape[0])


def linear_partial(x, w, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_partial`.

    Numerics:
        # ORDER: each leaf k16 block by k16 block in its own f32 wgmma accumulator, added to 0;
        # leaves as ((l0 + l1) + (l2 + l3)) + ..., f32, in registers, in shared memory or by
        # `combine_partials`: which of them does a node does not change what it adds.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    sums = linear_leaf_sums(x, w, reduction=reduction)
    return sums[0] if sums.shape[0] == 1 else combine_partials(sums)


def _residual_tiles(
    x, w, reduction: Reduction, *, has_bias: bool, added: Added = Added.NOTHING
) -> MatmulTiles:
    product = Product(
        num_rows=x.shape[0],
        num_out=w.shape[0],
        num_leaves=x.shape[1] // reduction.leaf_len,
        leaf_len=reduction.leaf_len,
        out_bytes=2,
        has_bias=has_bias,
        has_residual=True,
        added=added,
        coding=_coding(x, w, reduction.leaf_len),
    )
    return choose_tiles(product)


def defers_norm(x, w, *, reduction: Reduction) -> bool:
    """See `api.defers_norm`: up to 8 rows, if no CTAs share a tree; any of float32.

    What normalises float32 cuts its result for the product, so it belongs to that.
    """
    if x.dtype == jnp.float32:
        return True
    is_one_launch = _residual_tiles(x, w, reduction, has_bias=False).groups == 1
    return is_one_launch and normalises_input(x.shape[0], w.shape[0])


def linear_add(x, w, residual, bias, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_add`.

    Numerics:
        The tree of `linear_partial`, then the bias, then the residual, all in float32.
        # ROUND: once, to the residual's dtype.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant. For tp = 1; at
        tp > 1 the ranks' partials are added first, and the same sum comes out.
    """
    w = readable(x, w, leaf_len=reduction.leaf_len)
    if x.dtype == jnp.float32:
        return sm90_float32.linear_add(x, w, residual, bias, reduction=reduction)
    tiles = _residual_tiles(x, w, reduction, has_bias=bias is not None)
    if tiles.groups > 1:
        sums = linear_leaf_sums(x, w, reduction=reduction)
        return combine_residual(sums, residual, bias)
    return matmul(
        x,
        w,
        bias,
        residual,
        leaf_len=reduction.leaf_len,
        out_dtype=residual.dtype,
        tiles=tiles,
    )


def adds_ranks(x, w) -> bool:
    """Whether `linear_add_ranks` takes a product: few rows of bfloat16, whole tiles.

    A CTA waits for those of other ranks, so a GPU must have a multiprocessor for each tile
    (`parallel.exchange` asks).
    """
    has_whole_tiles = w.shape[0] % 64 == 0
    return x.dtype == jnp.bfloat16 and x.shape[0] <= MAX_RANKS_ROWS and has_whole_tiles


def linear_add_ranks(x, w, residual, bias, peers: RanksSum, *, reduction: Reduction) -> jax.Array:
    """`linear_add` of a product whose leaves are split over ranks, in one launch.

    Args:
        x: This rank's columns of the activations, [M, i]: whole leaves.
        w: The same columns of the weights, (out, in).
        residual: The residual stream, [M, D].
        bias: Added after the tree, or None.
        peers: Adds the ranks' subtrees of a tile.
        reduction: The leaves of the whole I.

    Numerics:
        # ORDER: this rank's subtree as `linear_partial`, the ranks' by `peers`, then the bias, then
        the residual, all in float32.
        # ROUND: once, to the residual's dtype.
        Claims: run-invariant, batch-invariant, path-consistent, and mesh-invariant if `peers` add
        the rest of the tree.
    """
    w = readable(x, w, leaf_len=reduction.leaf_len)
    tiles = _residual_tiles(x, w, reduction, has_bias=bias is not None, added=Added.RANKS)
    return matmul(
        x, w, bias, residual, peers,
        leaf_len=reduction.leaf_len, out_dtype=residual.dtype, tiles=tiles,
    )  # fmt: skip


def linear_add_rms_norm(
    x, w, residual, bias, gain, *, reduction: Reduction, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.linear_add_rms_norm`.

    Numerics:
        Those of `linear_partial`, then of `add_rms_norm`: up to `MAX_COMBINED_ROWS` rows
        `combine_add_rms_norm` finishes the tree, above them `linear_add` does.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    w = readable(x, w, leaf_len=reduction.leaf_len)
    if x.dtype == jnp.float32:
        return sm90_float32.linear_add_rms_norm(
            x, w, residual, bias, gain, reduction=reduction, eps=eps
        )
    if x.shape[0] > MAX_COMBINED_ROWS:
        total = linear_add(x, w, residual, bias, reduction=reduction)
        return total, rms_norm(total, gain, eps=eps)
    leaf_sums = linear_leaf_sums(x, w, reduction=reduction)
    return combine_add_rms_norm(leaf_sums, residual, bias, gain, eps=eps)


def _tree(terms: list):
    """Add a power-of-two list pairwise."""
    # ORDER: ((t0 + t1) + (t2 + t3)) + ..., additions only, so nothing can fuse.
    while len(terms) > 1:
        terms = [left + right for left, right in zip(terms[0::2], terms[1::2], strict=True)]
    return terms[0]


@functools.partial(jax.jit, static_argnames=("out_dtype", "interpret"))
def _combine(terms: tuple, residual, bias, *, out_dtype, interpret=None) -> jax.Array:
    """Add all groups of all terms, each [groups, ..., M, N], as one tree."""
    groups, *shape = terms[0].shape
    num_out = shape[-1]
    if num_out % LANES:
        return _combine_narrow(terms, residual, bias, out_dtype=out_dtype, interpret=interpret)
    size = terms[0].size // groups
    block = 2048 if size >= 2048 * 2 * NUM_SMS else 512
    while num_out % block:
        block //= 2
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=min(4, block // 128))

    def body(
        terms_gmem,  # of each term [groups, ... M N] f32
        bias_gmem,  # [N], or None
        residual_gmem,  # [... M N], or None
        out_gmem,  # [... M N]
    ):
        start = lax.axis_index("block") * block
        here = pl.ds(start, block)

        def load(ref):
            return plgpu.load(ref, layout=layout, optimized=False)

        total = _tree([load(t.at[g, here]) for t in terms_gmem for g in range(t.shape[0])])
        if bias is not None:
            values = load(bias_gmem.at[pl.ds(lax.rem(start, num_out), block)])
            total = total + values.astype(jnp.float32)
        if residual is not None:
            total = load(residual_gmem.at[here]).astype(jnp.float32) + total
        out_gmem[here] = total.astype(out_dtype)  # ROUND: once, if the output is narrower

    flat_terms = tuple(t.reshape(t.shape[0], size) for t in terms)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size,), out_dtype),
        grid=(size // block,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="detjax_linear_combine",
        interpret=interpret,
    )(flat_terms, bias, None if residual is None else residual.reshape(size)).reshape(shape)


def _combine_narrow(terms: tuple, residual, bias, *, out_dtype, interpret) -> jax.Array:
    """`_combine` where a block of `LANES` elements may cross the end of a row.

    All rows become one row of the kernel, with zeros behind it that are cut off again.
    """
    shape = terms[0].shape[1:]
    size = math.prod(shape)

    def one_row(x, *leading: int) -> jax.Array:
        flat = x.reshape(*leading, 1, size)
        return jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -size % LANES)])

    out = _combine(
        tuple(one_row(term, term.shape[0]) for term in terms),
        None if residual is None else one_row(residual),
        None if bias is None else one_row(jnp.broadcast_to(bias, shape)).reshape(-1),
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return out[0, :size].reshape(shape)


def combine_partials(leaf_sums) -> jax.Array:
    """Continue the tree over the first axis: [groups, ..., M, N] to [..., M, N], float32.

    Numerics:
        # ORDER: ((g0 + g1) + (g2 + g3)) + ..., f32, element by element.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    return _combine((leaf_sums,), None, None, out_dtype=jnp.float32)


def combine_residual(leaf_sums, residual, bias) -> jax.Array:
    """Continue the tree, add the bias and the residual stream, and round once.

    Numerics:
        # ORDER: residual + (tree + bias), f32.
        # ROUND: once, to the residual's dtype.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    return _combine((leaf_sums,), residual, bias, out_dtype=residual.dtype)


def add_partials(a, b) -> jax.Array:
    """See `api.add_partials`."""
    return _combine((a[None], b[None]), None, None, out_dtype=jnp.float32)
