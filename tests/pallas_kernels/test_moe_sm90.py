# SPDX-License-Identifier: Apache-2.0
"""The sm90 mixture of experts: bits on a Hopper GPU, logic interpreted, lowering everywhere."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.models import layers
from detjax.models.abstract import why_unsupported
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.gradients.api import expert_token_sum
from detjax.pallas_kernels.linear import sm90 as sm90_linear
from detjax.pallas_kernels.linear.api import linear, linear_swiglu
from detjax.pallas_kernels.linear.quantized import LARGEST, QuantizedRows, W8A8Matrix
from detjax.pallas_kernels.linear.sm90_quantize_rows import scales_shape
from detjax.pallas_kernels.linear.tiles import OperandType
from detjax.pallas_kernels.moe import portable, sm90
from detjax.pallas_kernels.moe.expert_weights import ClampedExperts, ExpertWeights
from detjax.pallas_kernels.moe.sm90_combine import unsort_rows
from detjax.pallas_kernels.moe.sm90_grouped import grouped_matmul_few, routed_matmul_few
from detjax.pallas_kernels.moe.sm90_schedule import COUNT, EXPERT, START, sort_rows
from detjax.pallas_kernels.moe.sm90_tiles import GroupedTiles, MlpTiles, choose_tiles, fill_stages
from detjax.pallas_kernels.rms_norm.sm90 import rms_norm
from detjax.pallas_kernels.sm90_hardware import SMEM_BYTES
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.pallas_kernels.swiglu.sm90 import swiglu
from detjax.testing.bitwise import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
)
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config
from detjax.testing.shapes import MOE_SHAPES, MoeShape

BF16, I32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int32)
EPS = 1e-6
INTERPRET = plgpu.InterpretGPUParams()
SMALL = MoeShape(
    name="small", hidden_size=256, width=128, num_experts=16, top_k=4, renormalise=True
)


def struct(*dims: int, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def lower_for_hopper(fn, *shapes) -> str:
    text = jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text  # a kernel, and not XLA's own operations
    return text


def wide_rows(num_rows: int, width: int, seed: int = 0) -> jax.Array:
    """bf16 rows of wide exponents, so that their sums depend on their order."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, width), np.float32)
    return jnp.asarray(x * np.exp(rng.standard_normal(x.shape, np.float32)), BF16)


@functools.cache
def weights(shape: MoeShape, num_local: int | None = None) -> ExpertWeights:
    """Gates and ups, and downs, of the first experts."""
    num = num_local or shape.num_experts
    rng = np.random.default_rng(1)

    def drawn(*dims):
        return jnp.asarray(rng.standard_normal(dims, np.float32) * 0.05, BF16)

    return ExpertWeights(
        drawn(num, 2 * shape.width, shape.hidden_size), drawn(num, shape.hidden_size, shape.width)
    )


def some_ids(num_rows: int, shape: MoeShape, seed: int = 2) -> np.ndarray:
    keys = np.random.default_rng(seed).random((num_rows, shape.num_experts))
    return np.argsort(keys, axis=1)[:, : shape.top_k].astype(np.int32)


def swapped(cols: int, *, wgs: int = 1, k: int = 64, by_slot: bool = False, is_few: bool = False):
    def product(is_gated):
        tiles = GroupedTiles(
            is_swapped=True, is_gated=is_gated, cols=cols, num_wgs=wgs, k=k, delay=1
        )
        return fill_stages(tiles)

    return MlpTiles(
        gate_up=product(True), down=product(False), is_few=is_few, by_slot=by_slot or is_few
    )


def tall(*, cols: int = 128, wgs: int = 2, delay: int = 0):
    def product(is_gated):
        tiles = GroupedTiles(
            is_swapped=False, is_gated=is_gated, cols=cols, num_wgs=wgs, k=64, delay=delay
        )
        return fill_stages(tiles)

    return MlpTiles(gate_up=product(True), down=product(False), is_few=False, by_slot=False)


FEW = {"few": swapped(8, is_few=True), "few_wgs2": swapped(8, is_few=True, wgs=2, k=128)}
VARIANTS = {
    "placed_8": swapped(8, by_slot=True),
    "placed_16_wgs2": swapped(16, by_slot=True, wgs=2),
    "sorted_24": swapped(24),
    "sorted_104_wgs2": swapped(104, wgs=2),
    "tall": tall(),
    "tall_delay": tall(delay=1),
    "tall_one_warpgroup": tall(wgs=1),
}


def chosen(shape: MoeShape, num_rows: int) -> MlpTiles:
    return choose_tiles(
        num_rows=num_rows, top_k=shape.top_k, num_experts=shape.num_experts,
        width=shape.width, hidden=shape.hidden_size,
    )  # fmt: skip


# --- without a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", quick_and_slow((8, 64), (1, 9, 256, 257, 1000, 4000)))
@pytest.mark.parametrize(
    "shape", quick_and_slow(MOE_SHAPES[:1], MOE_SHAPES[1:]), ids=lambda s: s.name
)
def test_chosen_tiles_lower(shape, num_rows):
    num, width, hidden = shape.num_experts, shape.width, shape.hidden_size
    rows, ids = struct(num_rows, hidden), struct(num_rows, shape.top_k, dtype=I32)
    ws = struct(num_rows, shape.top_k, dtype=jnp.float32)
    matrices = ExpertWeights(struct(num, 2 * width, hidden), struct(num, hidden, width))
    lower_for_hopper(functools.partial(sm90.expert_mlp, first_expert=0), rows, ids, matrices)
    lower_for_hopper(
        functools.partial(sm90.expert_mlp_add_rms_norm, eps=EPS),
        rows, ids, ws, matrices, rows, struct(hidden),
    )  # fmt: skip
    lower_for_hopper(
        functools.partial(
            sm90.route_mlp_add_rms_norm,
            top_k=shape.top_k, renormalise=shape.renormalise, eps=EPS,
        ),
        rows, struct(num_rows, num, dtype=jnp.float32), matrices, rows, struct(hidden),
    )  # fmt: skip


@pytest.mark.parametrize("name", quick_and_slow(("tall",), (*FEW, *VARIANTS)))
def test_every_variant_lowers(name):
    tiles = (FEW | VARIANTS)[name]
    num_rows = 8 if tiles.is_few else 40
    matrices = ExpertWeights(*(struct(*w.shape) for w in weights(SMALL)[:2]))
    lower_for_hopper(
        functools.partial(sm90.expert_mlp, first_expert=0, tiles=tiles),
        struct(num_rows, SMALL.hidden_size), struct(num_rows, SMALL.top_k, dtype=I32), matrices,
    )  # fmt: skip


@pytest.mark.parametrize("shape", MOE_SHAPES, ids=lambda s: s.name)
def test_chosen_tiles_fit(shape):
    """Every choice divides the matrices and leaves two stages or more, whatever M."""
    for num_rows in (*range(1, 300), 512, 1000, 4000, 8192):
        tiles = chosen(shape, num_rows)
        for part, length, num_out in (
            (tiles.gate_up, shape.hidden_size, shape.width),
            (tiles.down, shape.width, shape.hidden_size),
        ):
            assert part.stages >= 3
            assert part.stages * part.stage_bytes + part.staged_bytes < SMEM_BYTES
            assert length % part.k == 0 == num_out % part.out_cols
        assert tiles.gate_up.tile_rows == tiles.down.tile_rows


@pytest.mark.parametrize("shape", MOE_SHAPES, ids=lambda s: s.name)
def test_a_rank_cuts_its_experts_as_one_device_cuts_all(shape):
    """A rank's experts get their share of the rows alone, though it is given all of them."""
    num, width, hidden = shape.num_experts, shape.width, shape.hidden_size
    others = []
    for num_rows, num_ranks in itertools.product((1, 8, 64, 257, 1000), (2, 4)):
        local = struct(num // num_ranks, 2 * width, hidden)
        given = struct(num_rows, hidden), shape.top_k, local
        assert sm90._tiles_for(*given, num_ranks) == chosen(shape, num_rows)
        others.append(sm90._tiles_for(*given) != chosen(shape, num_rows))
    assert any(others)  # the number of ranks decides it


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_says_how_many_ranks_share_its_experts(monkeypatch, tp):
    """Eight experts, so that the router is padded: routing is told their number too."""
    config = dummy_config(
        hidden_size=1024, intermediate_size=1024, num_heads=8, num_kv_heads=8, head_dim=128,
        vocab_size=1024, experts=(8, 2), expert_width=128,
    )  # fmt: skip
    told = {"num_ranks": set(), "num_experts": set()}

    def spy(function, name):
        def called(*operands, **options):
            told[name].add(options[name])
            return function(*operands, **options)

        monkeypatch.setattr(layers, function.__name__, called)

    spy(layers.expert_mlp, "num_ranks")
    spy(layers.route, "num_experts")
    assert why_unsupported(config, NumericsProfile(), Backend.SM90, tp) is None
    assert told == {"num_ranks": {tp}, "num_experts": {8}}


def test_refusals_name_the_value():
    x, ids = struct(8, 256), struct(8, 2, dtype=I32)
    with pytest.raises(NotImplementedError, match="float32"):
        lower_for_hopper(
            functools.partial(sm90.expert_mlp, first_expert=0),
            struct(8, 256, dtype=jnp.float32), ids,
            ExpertWeights(struct(4, 256, 256), struct(4, 256, 128)),
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match="not 256 and 96"):
        lower_for_hopper(
            functools.partial(sm90.expert_mlp, first_expert=0),
            x, ids, ExpertWeights(struct(4, 192, 256), struct(4, 256, 96)),
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match="4 of 2048"):
        lower_for_hopper(
            functools.partial(sm90.route, num_experts=2048, top_k=4, renormalise=True),
            struct(8, 2048, dtype=jnp.float32),
        )
    with pytest.raises(NotImplementedError, match="top_k=64"):
        lower_for_hopper(
            functools.partial(sort_rows, num_local=128, tile_rows=8),
            x, struct(8, 64, dtype=I32), struct(1, dtype=I32),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"self.cols=12"):
        swapped(12)


def sorted_slots(ids, first: int, num_local: int) -> np.ndarray:
    """Slots of local experts by expert, stably: numpy's word for it."""
    experts = ids.reshape(-1) - first
    order = np.argsort(experts, kind="stable")
    return order[(experts[order] >= 0) & (experts[order] < num_local)]


def expected_tiles(ids, first: int, num_local: int, tile_rows: int) -> list[tuple[int, int, int]]:
    tiles, start = [], 0
    for expert in range(num_local):
        count = int((ids == first + expert).sum())
        tiles += [
            (expert, start + i, min(tile_rows, count - i)) for i in range(0, count, tile_rows)
        ]
        start += count
    return tiles


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "first", "num_local"), [(5, 0, 16), (20, 4, 4), (270, 8, 8)])
def test_rows_are_sorted_as_numpy_sorts_them(num_rows, first, num_local):
    """One block; several, counted by each CTA; several, counted by a kernel before."""
    x, ids = wide_rows(num_rows, 64), some_ids(num_rows, SMALL)
    rows, places, work = sort_rows(
        x, jnp.asarray(ids), jnp.array([first], I32),
        num_local=num_local, tile_rows=8, interpret=True,
    )  # fmt: skip
    order = sorted_slots(ids, first, num_local)
    want = np.full(ids.size, -1)
    want[order] = np.arange(len(order))
    np.testing.assert_array_equal(places, want)
    np.testing.assert_array_equal(work.order[: len(order)], order)
    assert_bitwise_equal(
        rows[: len(order)],
        x[order // SMALL.top_k],
        claim="rows lie in order of expert, then of slot",
    )
    tiles = expected_tiles(ids, first, num_local, 8)
    assert work.num_tiles[0] == len(tiles)
    found = np.asarray(work.tiles)[[EXPERT, START, COUNT], : len(tiles)].T
    np.testing.assert_array_equal(found, tiles)


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [0, 3, 17])
def test_scales_go_with_their_rows(num_groups):
    """Of groups, more than are loaded at once, or of whole rows."""
    ids, values = some_ids(40, SMALL), np.random.default_rng(0).integers(-128, 128, (40, 128))
    shape = scales_shape(40, num_groups)
    scales = np.random.default_rng(1).random(shape).astype(np.float32)
    found, _, _ = sort_rows(
        QuantizedRows(values=jnp.asarray(values, jnp.int8), scales=jnp.asarray(scales)),
        jnp.asarray(ids), jnp.array([4], I32), num_local=8, tile_rows=8, interpret=True,
    )  # fmt: skip
    rows = sorted_slots(ids, 4, 8) // SMALL.top_k
    assert found.scales.shape == scales_shape(ids.size, num_groups)
    np.testing.assert_array_equal(found.values[: len(rows)], values[rows])
    np.testing.assert_array_equal(found.scales[..., : len(rows)], scales[..., rows])


TINY = MoeShape(name="tiny", hidden_size=128, width=128, num_experts=4, top_k=2, renormalise=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_rows", "first", "num_local"),
    [
        ("few", 3, 1, 2),
        ("placed_8", 9, 1, 2),
        pytest.param("sorted_24", 12, 0, 4, marks=pytest.mark.nightly),
        ("tall", 40, 0, 2),
        pytest.param("tall_one_warpgroup", 40, 2, 2, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_interpreted_experts_agree_with_portable(name, num_rows, first, num_local):
    tiles = (FEW | VARIANTS)[name]
    x, ids = wide_rows(num_rows, TINY.hidden_size), some_ids(num_rows, TINY)
    matrices = weights(TINY, num_local)
    y = sm90.expert_mlp(
        x, jnp.asarray(ids), matrices, first_expert=first, tiles=tiles, interpret=INTERPRET
    )
    want = np.asarray(
        portable.expert_mlp(x, jnp.asarray(ids), matrices, first_expert=first), np.float32
    )
    is_local = (ids >= first) & (ids < first + num_local)
    assert is_local.any()
    assert not np.asarray(y).view(np.uint16)[~is_local].any()
    np.testing.assert_allclose(np.asarray(y, np.float32), want, atol=np.abs(want).max() / 100)


@pytest.mark.slow
def test_interpreted_rows_by_their_experts_agree_with_portable():
    """A row each, of whichever expert; one has none."""
    x, w = wide_rows(9, TINY.width), weights(TINY).down
    ids = jnp.asarray([3, 0, 0, 2, 3, 3, 0, 2, 0], jnp.int32)
    got = np.asarray(sm90.expert_linear(x, ids, w, out_dtype=BF16, interpret=INTERPRET), np.float32)
    want = np.asarray(portable.expert_linear(x, ids, w, out_dtype=BF16), np.float32)
    # Tolerance: both are sums of 128 products in float32, rounded to 8 bits.
    np.testing.assert_allclose(got, want, atol=np.abs(want).max() / 100)


def clamped(shape: MoeShape, num_local: int) -> ClampedExperts:
    """Biases as large as the products, and a limit that half of them reach."""
    rng = np.random.default_rng(4)
    drawn = (rng.standard_normal((num_local, n)) for n in (2 * shape.width, shape.hidden_size))
    gate_up, down = (jnp.asarray(values, BF16) for values in drawn)
    clamp = SwigluClamp(alpha=1.702, limit=0.75)
    return ClampedExperts(gate_up_bias=gate_up, down_bias=down, clamp=clamp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_rows", "first", "num_local"),
    [("few", 3, 1, 2), ("placed_8", 9, 1, 2), ("tall", 40, 0, 2)],
)
def test_interpreted_experts_with_biases_agree_with_portable(name, num_rows, first, num_local):
    """An output is found beside its own bias, and gates and ups are clamped."""
    x, ids = wide_rows(num_rows, TINY.hidden_size), some_ids(num_rows, TINY)
    matrices, extras = weights(TINY, num_local), clamped(TINY, num_local)
    operands = x, jnp.asarray(ids)
    y = sm90.expert_mlp(
        *operands, matrices._replace(extras=extras), first_expert=first,
        tiles=(FEW | VARIANTS)[name], interpret=INTERPRET,
    )  # fmt: skip
    want, bare = (
        np.asarray(portable.expert_mlp(*operands, experts, first_expert=first), np.float32)
        for experts in (matrices._replace(extras=extras), matrices)
    )
    is_local = (ids >= first) & (ids < first + num_local)
    assert not np.asarray(y).view(np.uint16)[~is_local].any()
    np.testing.assert_allclose(np.asarray(y, np.float32), want, atol=np.abs(want).max() / 100)
    assert np.abs(bare - want).max() > np.abs(want).max() / 4


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 5])
def test_interpreted_routes_of_experts_with_biases_agree_with_portable(num_rows):
    x = wide_rows(num_rows, TINY.hidden_size)
    matrices = weights(TINY, 4)._replace(extras=clamped(TINY, 4))
    logits = jnp.asarray(router_logits(num_rows, TINY.num_experts))
    options = {"top_k": 2, "renormalise": True}
    y, ws = sm90.route_mlp(x, logits, matrices, **options, interpret=INTERPRET)
    want, want_ws = portable.route_mlp(x, logits, matrices, **options)
    want = np.asarray(want, np.float32)
    np.testing.assert_allclose(np.asarray(y, np.float32), want, atol=np.abs(want).max() / 100)
    np.testing.assert_allclose(ws, want_ws, rtol=1e-6)


def test_rows_of_half_a_chunk_more_are_moved_as_they_are():
    """2880 channels are 22.5 times 128: the last piece starts early."""
    y = wide_rows(5, 320)
    places = jnp.asarray([3, -1, 0, 4, 1], jnp.int32)
    want = np.where(np.asarray(places)[:, None] >= 0, np.asarray(y)[places], 0)
    assert_bitwise_equal(unsort_rows(y, places, interpret=True), want, claim="moved rows")


@pytest.mark.slow
@pytest.mark.parametrize("width", [128, 320, 384])
def test_interpreted_combination_agrees_with_portable(width):
    rng = np.random.default_rng(0)
    y, residual = wide_rows(3 * 4, width).reshape(3, 4, width), wide_rows(3, width, 1)
    ws = jnp.asarray(rng.random((3, 4)), jnp.float32)
    gain = jnp.asarray(rng.standard_normal(width), BF16)
    found = sm90.combine_experts_add_rms_norm(y, ws, residual, gain, eps=EPS, interpret=True)
    want = portable.combine_experts_add_rms_norm(y, ws, residual, gain, eps=EPS)
    for a, b in zip(found, want, strict=True):
        b = np.asarray(b, np.float32)
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=0.02, atol=1e-3)


def router_logits(num_rows: int, num_experts: int) -> np.ndarray:
    """With padding that would be chosen if it were read: greater than all, or NaN."""
    logits = np.random.default_rng(num_rows).standard_normal((num_rows, 64)).astype(np.float32)
    logits[:, num_experts:] = 9
    logits[-1, num_experts:] = np.nan
    return logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "num_experts"),
    quick_and_slow([(3, 8)], [(3, 16), *((m, e) for m in (1, 8, 64) for e in (8, 16))]),
)
def test_padding_of_a_router_is_never_chosen(num_rows, num_experts):
    """Interpreted, and portable: ids and weights are those of the experts' columns alone."""
    logits = jnp.asarray(router_logits(num_rows, num_experts))
    route = functools.partial(sm90.route, interpret=True)
    for renormalise in (True, False):
        options = {"num_experts": num_experts, "top_k": 2, "renormalise": renormalise}
        ids, ws = route(logits, **options)
        want_ids, want_ws = portable.route(logits[:, :num_experts], **options)
        assert_bitwise_equal(ids, want_ids, claim="the choice is portable's")
        # XLA's exp differs with what is fused: two ulp above and below the fraction, and the sum.
        np.testing.assert_allclose(ws, want_ws, rtol=8 * 2.0**-23)
        for run, want in ((route, (ids, ws)), (portable.route, (want_ids, want_ws))):
            for got in (run(logits, **options), run(logits[:, :num_experts], **options)):
                for a, b in zip(got, want, strict=True):
                    assert_bitwise_equal(a, b, claim="padding has no part in a route")
            read, _ = run(logits, **options | {"num_experts": 64})
            assert (np.asarray(read) >= num_experts).any(axis=1).all()  # the control


BLOCKY = MoeShape(
    name="blocky", hidden_size=512, width=640, num_experts=4, top_k=2, renormalise=True
)
"""Rows of the second product are quantised by chunks of 512 channels, which overlap."""


EIGHT_BITS = (OperandType.FLOAT8_BLOCKS, OperandType.FLOAT8, OperandType.INT8)


@functools.cache
def weights_of(
    operands: OperandType, shape: MoeShape, num_local: int | None = None
) -> ExpertWeights:
    """8-bit values with scales of blocks or of outputs, of the first experts."""
    rng, found = np.random.default_rng(3), []
    for matrix in weights(shape, num_local)[:2]:
        num, rows, columns = matrix.shape
        of_outputs = (num, rows)
        if operands is OperandType.FLOAT8_BLOCKS:
            of_outputs = (num, rows // 128, columns // 128)
        most = LARGEST[operands.dtype.name]
        values = np.clip(np.asarray(matrix, np.float32) * (5 * most), -most, most)
        values = np.round(values) if operands is OperandType.INT8 else values
        scales = rng.uniform(0.9, 1.1, of_outputs) / (5 * most)
        found.append(
            W8A8Matrix(
                values=jnp.asarray(values, operands.dtype),
                scales=jnp.asarray(scales, jnp.float32),
            )
        )
    return ExpertWeights(*found)


def tiles_of(operands: OperandType, tiles: MlpTiles) -> MlpTiles:
    """The same for 8-bit operands."""

    def product(it: GroupedTiles) -> GroupedTiles:
        return fill_stages(dataclasses.replace(it, operands=operands, k=128, stages=0))

    return dataclasses.replace(tiles, gate_up=product(tiles.gate_up), down=product(tiles.down))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operands", "name", "num_rows", "first", "num_local"),
    [
        (OperandType.FLOAT8_BLOCKS, "few", 3, 1, 2),
        *(
            (operands, *case)
            for operands, case in itertools.product(
                EIGHT_BITS, (("placed_8", 9, 1, 2), ("sorted_24", 63, 0, 4), ("tall", 40, 0, 2))
            )
        ),
        (OperandType.INT8, "few", 3, 1, 2),
    ],
)
def test_interpreted_experts_of_8_bits_agree_with_portable(
    operands, name, num_rows, first, num_local
):
    """63 rows: scales of the last tile are copied past the end of what the rows have."""
    tiles = tiles_of(operands, (FEW | VARIANTS)[name])
    x, ids = wide_rows(num_rows, BLOCKY.hidden_size), some_ids(num_rows, BLOCKY)
    matrices = weights_of(operands, BLOCKY, num_local)
    y = sm90.expert_mlp(
        x, jnp.asarray(ids), matrices, first_expert=first, tiles=tiles, interpret=INTERPRET
    )
    want = np.asarray(
        portable.expert_mlp(x, jnp.asarray(ids), matrices, first_expert=first), np.float32
    )
    is_local = (ids >= first) & (ids < first + num_local)
    assert is_local.any()
    assert not np.asarray(y).view(np.uint16)[~is_local].any()
    np.testing.assert_allclose(np.asarray(y, np.float32), want, atol=np.abs(want).max() / 100)


@pytest.mark.parametrize(
    ("operands", "num_rows"),
    [
        (OperandType.FLOAT8_BLOCKS, 1),
        pytest.param(OperandType.INT8, 3, marks=pytest.mark.slow),
        pytest.param(OperandType.INT8, 1, marks=pytest.mark.slow),
        pytest.param(OperandType.FLOAT8_BLOCKS, 3, marks=pytest.mark.slow),
        pytest.param(OperandType.FLOAT8, 3, marks=pytest.mark.slow),
    ],
)
def test_interpreted_experts_quantise_few_rows_themselves(operands, num_rows):
    """To the bits of launches that only quantise."""
    x = wide_rows(num_rows, BLOCKY.hidden_size)
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(num_rows, 4)), jnp.float32)
    experts = weights_of(operands, BLOCKY)
    whole = choose_tiles(
        num_rows=num_rows, top_k=BLOCKY.top_k, num_experts=BLOCKY.num_experts,
        width=BLOCKY.width, hidden=BLOCKY.hidden_size, operands=operands,
    )  # fmt: skip
    assert whole.gate_up.held and bool(whole.down.held) == (num_rows == 1)
    apart = dataclasses.replace(
        whole,
        gate_up=fill_stages(dataclasses.replace(whole.gate_up, held=0)),
        down=fill_stages(dataclasses.replace(whole.down, held=0)),
    )

    def run(x, tiles):
        y, _ = sm90.route_mlp(
            x, logits, experts, top_k=2, renormalise=True, tiles=tiles, interpret=INTERPRET
        )
        return y

    want = run(x, apart)
    assert_bitwise_equal(run(x, whole), want, claim="quantised in the product's launch")
    # Control: other rows, so that a scale shows.
    assert (np.asarray(run(x * 3, whole)) != np.asarray(want)).any()


def test_experts_of_8_bits_that_no_kernel_multiplies_are_refused():
    x, ids = wide_rows(3, BLOCKY.hidden_size), jnp.asarray(some_ids(3, BLOCKY))
    matrices = ExpertWeights(
        *(
            dataclasses.replace(w, scales=jnp.repeat(w.scales, 4, axis=1))
            for w in weights_of(OperandType.FLOAT8_BLOCKS, BLOCKY)[:2]
        )
    )
    with pytest.raises(NotImplementedError, match="multiple of 64 outputs, not 32"):
        sm90.expert_mlp(x, ids, matrices, first_expert=0)
    with pytest.raises(ValueError, match="self.cols=40 of int8"):
        tiles_of(OperandType.INT8, swapped(40))


@pytest.mark.slow
@pytest.mark.parametrize("num_columns", [4, 64])
def test_interpreted_routes_in_the_first_product_are_those_of_route(num_columns):
    """Rows that share experts; the product's lists and its outputs follow from them."""
    x = wide_rows(3, TINY.hidden_size)
    logits = jnp.asarray(router_logits(3, 4)[:, :num_columns])
    options = {"top_k": 2, "renormalise": True}
    rows, work, ids, ws = routed_matmul_few(
        x, weights(TINY)[0], logits, **options, tiles=FEW["few"].gate_up, interpret=INTERPRET
    )
    routes = sm90.route(logits, num_experts=4, **options, interpret=True)
    for found, want in zip((ids, ws), routes, strict=True):
        assert_bitwise_equal(found, want, claim="routing inside the product is `route`")
    want_rows, want = grouped_matmul_few(
        x, weights(TINY)[0], ids, jnp.zeros(1, I32), tiles=FEW["few"].gate_up, interpret=INTERPRET
    )
    assert_bitwise_equal(work.order, want.order, claim="the slots are sorted alike")
    assert_bitwise_equal(rows, want_rows, claim="so are the outputs")


# --- on a Hopper GPU -------------------------------------------------------------------------

QWEN = MOE_SHAPES[0]


@functools.cache
def every_expert(shape: MoeShape, num_rows: int) -> jax.Array:
    """Each row by each expert with the dense products, [E, M, D]."""
    x = wide_rows(num_rows, shape.hidden_size)

    def one(pair):
        hidden = sm90_linear.linear_swiglu(x, pair[0])
        return sm90_linear.linear(hidden, pair[1], None, out_dtype=BF16)

    return jax.jit(lambda *matrices: lax.map(one, matrices))(*weights(shape)[:2])


def expected_rows(shape: MoeShape, ids, rows=None) -> jax.Array:
    rows = np.arange(len(ids)) if rows is None else rows
    return every_expert(shape, 257)[ids, rows[:, None]]


def forward(ids, rows=None, tiles: MlpTiles | None = None) -> jax.Array:
    rows = np.arange(len(ids)) if rows is None else rows
    x = wide_rows(257, QWEN.hidden_size)[rows]
    return sm90.expert_mlp(x, jnp.asarray(ids), weights(QWEN), first_expert=0, tiles=tiles)


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", (*range(1, 18), 31, 33, 64, 65, 100, 128, 129, 200, 256, 257))
def test_experts_have_the_bits_of_the_dense_products(num_rows):
    """A row's bits do not depend on how many rows there are, or its experts get."""
    x = wide_rows(4, QWEN.hidden_size)
    terms = np.asarray(x, np.float32) * np.asarray(weights(QWEN)[0][0, :4], np.float32)
    assert_order_sensitive(terms)
    ids = some_ids(257, QWEN)[:num_rows]
    assert_bitwise_equal(
        forward(ids),
        expected_rows(QWEN, ids),
        claim="an expert's row has the bits of the dense products",
    )


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_slots", (1, 8, 100, 513, 4096))
def test_rows_by_their_experts_have_the_bits_of_the_dense_products(num_slots):
    """What a canonical backward pass multiplies."""
    w = weights(QWEN).down
    x = wide_rows(num_slots, w.shape[2])
    terms = np.asarray(x[:1], np.float32) * np.asarray(w[0, :8], np.float32)
    assert_order_sensitive(terms)
    ids = np.random.default_rng(num_slots).integers(0, QWEN.num_experts, num_slots)
    got = np.asarray(
        sm90.expert_linear(x, jnp.asarray(ids, jnp.int32), w, out_dtype=BF16), np.float32
    )
    for expert in np.unique(ids)[:8]:
        want = np.asarray(sm90_linear.linear(x, w[expert], None, out_dtype=BF16), np.float32)
        own = ids == expert
        assert_bitwise_equal(got[own], want[own], claim=f"rows of expert {expert}")


@pytest.mark.gpu
@pytest.mark.invariance
def test_sums_over_the_tokens_of_experts_have_the_bits_of_the_reference():
    """The gradient of an expert's matrix in a canonical backward pass."""
    a, b = wide_rows(600, 128, seed=1), wide_rows(600, 256, seed=2)
    rng = np.random.default_rng(3)
    ids = np.argsort(rng.random((300, 6)), axis=1)[:, :2].reshape(-1)
    operands = a, b, jnp.asarray(ids, jnp.int32), jnp.repeat(jnp.arange(300, dtype=jnp.int32), 2)
    sizes = {"num_experts": 6, "num_places": 512}
    got = np.asarray(expert_token_sum(*operands, **sizes, backend=Backend.SM90))
    with jax.default_device(jax.devices("cpu")[0]):
        host = (jnp.asarray(np.asarray(x)) for x in operands)
        want = np.asarray(expert_token_sum(*host, **sizes, backend=Backend.REFERENCE))
    assert_bitwise_equal(got, want, claim="a GPU's sum over an expert's tokens")


OSS = MoeShape(name="gpt_oss", hidden_size=576, width=192, num_experts=8, top_k=4, renormalise=True)
"""Widths that are no multiples of 128, as 2880 of gpt-oss."""


@functools.cache
def every_clamped_expert(clamp: SwigluClamp) -> jax.Array:
    """Each row of `OSS` by each expert with the dense products, biases and clamp, [E, M, D]."""
    x, extras = wide_rows(257, OSS.hidden_size), clamped(OSS, OSS.num_experts)
    options: dict = {"out_dtype": BF16}
    rows = []
    for e, (gate_up, down) in enumerate(zip(*weights(OSS)[:2], strict=True)):
        hidden = sm90_linear.linear(x, gate_up, extras.gate_up_bias[e], **options)
        hidden = swiglu(hidden, clamp=clamp)
        rows.append(sm90_linear.linear(hidden, down, extras.down_bias[e], **options))
    return jnp.stack(rows)


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", (1, 2, 3, 4, 8, 9, 16, 33, 64, 65, 128, 257))
def test_experts_with_biases_have_the_bits_of_the_dense_products(num_rows):
    """Routed in the first product's launch, alone and in company."""
    x, extras = wide_rows(257, OSS.hidden_size), clamped(OSS, OSS.num_experts)
    terms = np.asarray(x[:4], np.float32) * np.asarray(weights(OSS)[0][0, :4], np.float32)
    assert_order_sensitive(terms)
    logits = jnp.asarray(router_logits(257, OSS.num_experts))
    want_ids, want_ws = sm90.route(logits, num_experts=8, top_k=4, renormalise=True)
    experts = weights(OSS)._replace(extras=extras)
    want = every_clamped_expert(extras.clamp)[want_ids, np.arange(257)[:, None]]
    for first in (0, 5) if num_rows < 200 else (0,):
        at = slice(first, first + num_rows)
        y, ws = sm90.route_mlp(x[at], logits[at], experts, top_k=4, renormalise=True)
        assert_bitwise_equal(y, want[at], claim=f"{num_rows} rows from {first}: dense products")
        assert_bitwise_equal(ws, want_ws[at], claim="weights are those of `route`")
        y = sm90.expert_mlp(x[at], want_ids[at], experts, first_expert=0)
        assert_bitwise_equal(y, want[at], claim="given the ids")
        # Control: a clamp a little wider lets other values through.
        other = every_clamped_expert(dataclasses.replace(extras.clamp, limit=0.76))
        assert count_different_bits(other[want_ids, np.arange(257)[:, None]][at], want[at]) > 0


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", (1, 2, 8, 9, 64, 257, 1500))
@pytest.mark.parametrize("operands", EIGHT_BITS, ids=lambda it: it.name.lower())
def test_experts_of_8_bits_have_the_bits_of_the_dense_products(operands, num_rows):
    """By rows that are routed as well, alone and in company."""
    matrices, ids = weights_of(operands, QWEN), some_ids(num_rows, QWEN)
    x = wide_rows(num_rows, QWEN.hidden_size)
    found = sm90.expert_mlp(x, jnp.asarray(ids), matrices, first_expert=0)
    for expert in (0, 77, QWEN.num_experts - 1):
        rows, ranks = np.nonzero(ids == expert)
        gate_up, down = (jax.tree.map(lambda leaf, e=expert: leaf[e], w) for w in matrices[:2])
        options: dict = {"backend": Backend.SM90}
        want = linear(linear_swiglu(x, gate_up, **options), down, out_dtype=BF16, **options)
        assert_bitwise_equal(
            found[rows, ranks], want[rows], claim=f"expert {expert} has the dense products' bits"
        )
    rng = np.random.default_rng(num_rows)
    logits = jnp.asarray(rng.standard_normal((num_rows, QWEN.num_experts)), jnp.float32)
    options = {"top_k": QWEN.top_k, "renormalise": True}
    y, _ = sm90.route_mlp(x, logits, matrices, **options)
    ids, _ = sm90.route(logits, num_experts=QWEN.num_experts, **options)
    want = sm90.expert_mlp(x, ids, matrices, first_expert=0)
    assert_bitwise_equal(y, want, claim="rows routed in the product's launch")
    # Control: a row's bits are those of its own scales.
    other = sm90.expert_mlp(x * 1.1, jnp.asarray(ids), matrices, first_expert=0)
    assert count_different_bits(other, want) > 0


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("name", [*FEW, *VARIANTS])
def test_tiles_change_no_bit(name):
    tiles = (FEW | VARIANTS)[name]
    ids = some_ids(8 if tiles.is_few else 257, QWEN)
    assert_bitwise_equal(
        forward(ids, tiles=tiles), expected_rows(QWEN, ids), claim="tiles change no bit"
    )


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", [2, 8, 9, 64, 257])
def test_company_changes_no_bit(num_rows):
    """Rows deranged; experts that take all rows, so that most have none; one that takes all."""
    ids = some_ids(257, QWEN)[:num_rows]
    rolled = np.roll(np.arange(num_rows), 1)
    assert not (rolled == np.arange(num_rows)).any()
    assert_bitwise_equal(
        forward(ids[rolled], rolled),
        forward(ids)[rolled],
        claim="whoever shares an expert changes no bit",
    )
    all_rows = np.tile(np.arange(QWEN.top_k, dtype=np.int32) * 3 + 5, (num_rows, 1))
    assert_bitwise_equal(
        forward(all_rows),
        expected_rows(QWEN, all_rows),
        claim="whoever shares an expert changes no bit",
    )
    one = np.full((num_rows, QWEN.top_k), 77, np.int32)
    assert_bitwise_equal(
        forward(one), expected_rows(QWEN, one), claim="whoever shares an expert changes no bit"
    )


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", [1, 8, 64, 257])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_the_rows_of_their_experts_and_zeros(num_rows, num_ranks):
    ids, num_local = some_ids(257, QWEN)[:num_rows], QWEN.num_experts // num_ranks
    x = wide_rows(257, QWEN.hidden_size)[:num_rows]
    for rank in range(num_ranks):
        first = rank * num_local
        local = ExpertWeights(*(w[first : first + num_local] for w in weights(QWEN)[:2]))
        y = sm90.expert_mlp(
            x, jnp.asarray(ids), local, first_expert=jnp.int32(first), num_ranks=num_ranks
        )
        is_local = (ids >= first) & (ids < first + num_local)
        zeros = jnp.zeros((), BF16)
        assert_bitwise_equal(
            y,
            jnp.where(is_local[..., None], expected_rows(QWEN, ids), zeros),
            claim="a rank has its experts' rows and zeros",
        )


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", [8, 64, 257])
def test_a_row_of_nan_meets_no_other(num_rows):
    ids = some_ids(257, QWEN)[:num_rows]
    x = wide_rows(257, QWEN.hidden_size)[:num_rows].at[3].set(jnp.nan)
    y = sm90.expert_mlp(x, jnp.asarray(ids), weights(QWEN), first_expert=0)
    others = np.delete(np.arange(num_rows), 3)
    assert_bitwise_equal(y[others], expected_rows(QWEN, ids)[others], claim="NaN stays in its row")
    assert np.isnan(np.asarray(y[3], np.float32)).all()


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("renormalise", [True, False])
def test_routes_break_ties_by_id_and_know_no_batch(renormalise):
    logits = np.random.default_rng(0).standard_normal((257, QWEN.num_experts)).astype(np.float32)
    logits[::2] = np.round(logits[::2] * 2) / 2
    logits[::4, 7], logits[5] = -0.0, np.nan
    run = functools.partial(
        sm90.route, num_experts=QWEN.num_experts, top_k=QWEN.top_k, renormalise=renormalise
    )
    ids, ws = run(jnp.asarray(logits))
    rest = np.delete(np.arange(257), 5)
    order = np.argsort(-logits, axis=1, kind="stable")[:, : QWEN.top_k]
    np.testing.assert_array_equal(np.asarray(ids)[rest], order[rest])
    assert 0 <= np.asarray(ids[5]).min() and np.asarray(ids[5]).max() < QWEN.num_experts
    exact = np.exp(logits[rest].astype(np.float64))
    terms = np.take_along_axis(exact, order[rest], 1)
    exact = terms / (terms if renormalise else exact).sum(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(ws)[rest], exact, rtol=1e-6)
    for count in (1, 2, 6, 100):
        for found, whole in zip(run(jnp.asarray(logits[-count:])), (ids, ws), strict=True):
            assert_bitwise_equal(found, whole[-count:], claim="a route knows no batch")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("width", [128, 896, 2048, 4096])
def test_combination_is_fma_in_order_of_rank(width):
    """Against float64: a product of a float32 and a bfloat16 is exact there, so it is an fma."""
    num_rows, top_k = 300, 8
    y = wide_rows(num_rows * top_k, width).reshape(num_rows, top_k, width)
    rng = np.random.default_rng(1)
    ws = rng.random((num_rows, top_k)).astype(np.float32)
    residual, gain = wide_rows(num_rows, width, 2), jnp.asarray(1 + rng.random(width), BF16)
    total, out = sm90.combine_experts_add_rms_norm(y, jnp.asarray(ws), residual, gain, eps=EPS)
    acc = np.zeros((num_rows, width), np.float32)
    for rank in range(top_k):
        wide = np.asarray(y[:, rank]).astype(np.float64) * ws[:, rank, None]
        acc = (wide + acc).astype(np.float32)
    want = (np.asarray(residual).astype(np.float32) + acc).astype(BF16)
    assert_bitwise_equal(
        total, jnp.asarray(want), claim="an fma a rank in order, then the norm, alone or in a batch"
    )
    assert_bitwise_equal(
        out,
        rms_norm(total, gain, eps=EPS),
        claim="an fma a rank in order, then the norm, alone or in a batch",
    )
    for count in (1, 9, 264):
        part = sm90.combine_experts_add_rms_norm(
            y[:count], jnp.asarray(ws[:count]), residual[:count], gain, eps=EPS
        )
        assert_bitwise_equal(
            part[0],
            total[:count],
            claim="an fma a rank in order, then the norm, alone or in a batch",
        )
        assert_bitwise_equal(
            part[1], out[:count], claim="an fma a rank in order, then the norm, alone or in a batch"
        )


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", [1, 8, 64, 257])
def test_merged_experts_have_the_bits_of_the_two(num_rows):
    ids = jnp.asarray(some_ids(257, QWEN)[:num_rows])
    x, residual = (wide_rows(257, QWEN.hidden_size, seed)[:num_rows] for seed in (0, 4))
    rng = np.random.default_rng(1)
    ws = jnp.asarray(rng.random(ids.shape), jnp.float32)
    gain = jnp.asarray(1 + rng.random(QWEN.hidden_size), BF16)
    y = sm90.expert_mlp(x, ids, weights(QWEN), first_expert=0)
    apart = sm90.combine_experts_add_rms_norm(y, ws, residual, gain, eps=EPS)
    merged = sm90.expert_mlp_add_rms_norm(x, ids, ws, weights(QWEN), residual, gain, eps=EPS)
    for a, b in zip(merged, apart, strict=True):
        assert_bitwise_equal(a, b, claim="merging changes no bit")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", [*range(1, 10), 257])
@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_in_the_first_product_has_the_bits_of_route(num_rows, renormalise):
    rng = np.random.default_rng(7)
    logits = jnp.asarray(rng.standard_normal((num_rows, QWEN.num_experts)), jnp.float32)
    x, residual = (wide_rows(257, QWEN.hidden_size, seed)[:num_rows] for seed in (0, 4))
    gain = jnp.asarray(1 + rng.random(QWEN.hidden_size), BF16)
    options = {"top_k": QWEN.top_k, "renormalise": renormalise}
    rest = (weights(QWEN), residual, gain)
    routes = sm90.route(logits, num_experts=QWEN.num_experts, **options)
    apart = sm90.expert_mlp_add_rms_norm(x, *routes, *rest, eps=EPS)
    merged = sm90.route_mlp_add_rms_norm(x, logits, *rest, **options, eps=EPS)
    for a, b in zip(merged, apart, strict=True):
        assert_bitwise_equal(a, b, claim="routing in the product changes no bit")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_experts", [33, 100, QWEN.num_experts])
def test_one_row_finds_its_experts_among_ties(num_experts):
    """What each CTA finds for itself, against `route` in a launch of its own."""
    gate_up, down = (w[:num_experts] for w in weights(QWEN)[:2])
    x = wide_rows(257, QWEN.hidden_size)[:1]
    rng = np.random.default_rng(num_experts)
    logits = np.round(rng.standard_normal((8, QWEN.num_experts + 64)) * 2) / 2
    logits[:, num_experts:] = 1e9  # behind the experts'
    logits[1, :num_experts], logits[2, :num_experts:2] = 0.0, -0.0
    logits[3, 5], logits[4, :20] = np.nan, -np.inf
    for some in jnp.asarray(logits, jnp.float32):
        options = {"top_k": QWEN.top_k, "renormalise": True}
        ids, ws = sm90.route(some[None], num_experts=num_experts, **options)
        want = sm90.expert_mlp(x, ids, ExpertWeights(gate_up, down), first_expert=0)
        y, weights_of_y = sm90.route_mlp(x, some[None], ExpertWeights(gate_up, down), **options)
        assert_bitwise_equal(y, want, claim="each CTA finds the experts of `route`")
        assert_bitwise_equal(weights_of_y, ws, claim="weights are those of `route`")


@pytest.mark.gpu
@pytest.mark.control
def test_control_ragged_dot_and_scatter_add_have_other_bits():
    ids = some_ids(257, QWEN)[:64]
    x = wide_rows(257, QWEN.hidden_size)[:64]
    slots = jnp.asarray(ids.reshape(-1))
    order = jnp.argsort(slots, stable=True)
    sizes = jnp.bincount(slots, length=QWEN.num_experts).astype(I32)
    gate_up, down = (w.swapaxes(1, 2) for w in weights(QWEN)[:2])

    @jax.jit
    def by_ragged_dot(x, gate_up, down):
        gate, up = jnp.split(lax.ragged_dot(x[order // QWEN.top_k], gate_up, sizes), 2, axis=1)
        y = lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)
        return jnp.zeros_like(y).at[order].set(y).reshape(64, QWEN.top_k, -1)

    assert count_different_bits(by_ragged_dot(x, gate_up, down), expected_rows(QWEN, ids)) > 0
    y = forward(ids)
    ws = jnp.asarray(np.random.default_rng(1).random(ids.shape), jnp.float32)
    residual, gain = wide_rows(64, QWEN.hidden_size, 4), jnp.ones(QWEN.hidden_size, BF16)
    total, _ = sm90.combine_experts_add_rms_norm(y, ws, residual, gain, eps=EPS)
    by_expert = np.argsort(ids, axis=1)
    acc = jnp.zeros(residual.shape, jnp.float32)
    for rank in range(QWEN.top_k):
        at = (np.arange(64), by_expert[:, rank])
        acc = acc.at[at[0]].add(ws[at][:, None] * y[at].astype(jnp.float32))
    assert count_different_bits((residual.astype(jnp.float32) + acc).astype(BF16), total) > 0
