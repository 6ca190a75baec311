# SPDX-License-Identifier: Apache-2.0
"""Row kernels of the sm90 backend: lowering and arithmetic without a GPU, claims with one."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax.pallas_kernels.geglu import portable as portable_geglu
from detjax.pallas_kernels.geglu import sm90 as geglu
from detjax.pallas_kernels.log_softmax import portable as portable_log_softmax
from detjax.pallas_kernels.log_softmax import sm90 as log_softmax
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm import portable as portable_rms_norm
from detjax.pallas_kernels.rms_norm import sm90 as rms_norm
from detjax.pallas_kernels.rope import portable as portable_rope
from detjax.pallas_kernels.rope import sm90 as rope
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.pallas_kernels.sampling import noise
from detjax.pallas_kernels.sampling import portable as portable_sampling
from detjax.pallas_kernels.sampling import sm90 as sampling
from detjax.pallas_kernels.sampling import sm90_choice as choice
from detjax.pallas_kernels.sampling import sm90_token as token
from detjax.pallas_kernels.softcap import portable as portable_softcap
from detjax.pallas_kernels.softcap import sm90 as softcap
from detjax.pallas_kernels.swiglu import portable as portable_swiglu
from detjax.pallas_kernels.swiglu import sm90 as swiglu
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.testing.bitwise import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
    wide,
)
from detjax.testing.cases import quick_and_slow

EPS = 1e-5
BF16, F32, I32, U32 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint32


def struct(shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def array(shape, seed=0, dtype=BF16, spread=1.5):
    return jnp.asarray(wide(np.random.default_rng(seed), shape, spread)).astype(dtype)


def lower_for_hopper(fn, *shapes) -> str:
    text = jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text  # a kernel, and not XLA's own operations
    return text


def close(actual, expected, bound):
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert ((a == b) | np.isfinite(b)).all(), "infinities differ"
    a, b = a[np.isfinite(b)], b[np.isfinite(b)]
    assert (np.abs(a - b) <= bound * np.maximum(np.abs(b), 1)).all(), np.abs(a - b).max()


def write(pages, qkv, cos, sin, gains, table, positions, *, num_heads, interpret=False):
    """Run the fused kernel on a cache: (queries, cache)."""
    ref = jax.new_ref(pages)
    out = rope.qk_norm_rope_write(
        qkv, Rotation(cos, sin, gains), CachePlace(ref, table, positions, layer=1),
        num_heads=num_heads, eps=EPS, interpret=interpret,
    )  # fmt: skip
    return out, jax.freeze(ref)


# --- without a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", quick_and_slow((13,), (1, 1000)))
@pytest.mark.parametrize(
    "width", quick_and_slow((4096,), (64, 96, 128, 256, 320, 576, 896, 2560, 5120, 8192))
)
def test_rms_norm_lowers(width, num_rows):
    x, gain = struct((num_rows, width)), struct((width,))
    lower_for_hopper(lambda x, g: rms_norm.rms_norm(x, g, eps=EPS), x, gain)
    leaves = struct((8, num_rows, width), F32)
    lower_for_hopper(
        lambda s, x, g: rms_norm.combine_add_rms_norm(s, x, g, g, eps=EPS), leaves, x, gain
    )
    lower_for_hopper(
        lambda s, x, g: rms_norm.add_rms_norm(s[0], x, None, g, eps=EPS), leaves, x, gain
    )


@pytest.mark.parametrize("width", (32, 63, 80, 288, 8256))
def test_rms_norm_refuses_widths_without_a_sum(width):
    with pytest.raises(ValueError, match=str(width)):
        rms_norm.rms_norm(array((2, width)), array((width,)), eps=EPS)


def test_combine_refuses_leaves_that_are_no_tree():
    with pytest.raises(ValueError, match="3 leaf sums"):
        rms_norm.combine_add_rms_norm(
            array((3, 2, 128), dtype=F32), array((2, 128)), None, array((128,)), eps=EPS
        )


@pytest.mark.quick_cases("1-128-bfloat16")
@pytest.mark.parametrize("dtype", quick_and_slow((BF16,), (F32,)))
@pytest.mark.parametrize(
    ("num_rows", "width"),
    quick_and_slow(((1, 128), (3, 576)), ((3, 4096), (19, 64), (2, 896), (5, 96))),
)
def test_rms_norm_in_interpret_mode(num_rows, width, dtype):
    x, gain = array((num_rows, width), 1, dtype), array((width,), 2, dtype)
    bias, sums = array((width,), 3, dtype), array((4, num_rows, width), 4, F32)
    bound = 2.0**-7 if dtype == BF16 else 2.0**-18
    out = rms_norm.rms_norm(x, gain, eps=EPS, interpret=True)
    close(out, portable_rms_norm.rms_norm(x, gain, eps=EPS), bound)
    total, out = rms_norm.combine_add_rms_norm(sums, x, bias, gain, eps=EPS, interpret=True)
    tree = (sums[0] + sums[1]) + (sums[2] + sums[3])
    want = portable_rms_norm.add_rms_norm(tree, x, bias, gain, eps=EPS)
    close(total, want[0], bound)
    close(out, want[1], bound)


@pytest.mark.parametrize("warpgroups", quick_and_slow((2,), (1, 4)))
@pytest.mark.parametrize("num_ctas", quick_and_slow((2,), (2**30,)))
def test_schedules_in_interpret_mode(warpgroups, num_ctas):
    x, gain, sums = array((5, 4096), 1), array((4096,), 2), array((1, 5, 4096), 3, F32)
    schedule = rms_norm.NormSchedule(warpgroups=warpgroups, num_ctas=num_ctas)
    out = rms_norm.combine_add_rms_norm(
        sums, x, None, gain, eps=EPS, schedule=schedule, interpret=True
    )
    want = portable_rms_norm.add_rms_norm(sums[0], x, None, gain, eps=EPS)
    for a, b in zip(out, want, strict=True):
        close(a, b, 2.0**-7)


@pytest.mark.parametrize(
    ("heads", "channels"), quick_and_slow(((32, 128),), ((14, 64), (3, 96), (1, 256)))
)
def test_rope_lowers(heads, channels):
    half = struct((7, channels // 2), F32)
    lower_for_hopper(rope.rope, struct((7, heads, channels)), half, half)


@pytest.mark.parametrize("channels", (8, 48, 80, 288))
def test_rope_refuses_other_heads(channels):
    half = array((2, channels // 2), dtype=F32)
    with pytest.raises(ValueError, match=str(channels)):
        rope.rope(array((2, 4, channels)), half, half)


@pytest.mark.parametrize("has_norm", quick_and_slow((True,), (False,)))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "channels"), quick_and_slow(((32, 8, 128),), ((14, 2, 64),))
)
def test_fused_write_lowers_and_aliases_the_cache(heads, kv_heads, channels, has_norm):
    def step(pages, qkv, cos, sin, gain, table, positions):
        gains = (gain, gain) if has_norm else None
        return write(pages, qkv, cos, sin, gains, table, positions, num_heads=heads)

    text = lower_for_hopper(
        step,
        struct((2, 9, 2, kv_heads, 128, channels)),
        struct((6, heads + 2 * kv_heads, channels)),
        *[struct((6, channels // 2), F32)] * 2,
        struct((channels,)),
        struct((3, 4), I32),
        struct((3, 2), I32),
    )
    assert "output_operand_alias" in text


@pytest.mark.slow
@pytest.mark.parametrize("is_tuple", quick_and_slow((True,), (False,)))
@pytest.mark.parametrize("has_norm", quick_and_slow((True,), (False,)))
def test_fused_write_in_interpret_mode(has_norm, is_tuple):
    heads, kv_heads, channels, batch, length = 3, 2, 64, 3, 2
    num_tokens = batch * length
    qkv = array((num_tokens, heads + 2 * kv_heads, channels), 1)
    q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=1)
    cos, sin = (array((num_tokens, channels // 2), s, F32) for s in (2, 3))
    gains = (array((channels,), 4), array((channels,), 5)) if has_norm else None
    pages = array((2, 9, 2, kv_heads, 128, channels), 6)
    table = jnp.arange(9, dtype=I32)[::-1].reshape(3, 3)
    positions = jnp.asarray([[0, 1], [130, 131], [300, -1]], I32)
    out, cache = write(
        pages, (q, k, v) if is_tuple else qkv, cos, sin, gains, table, positions, num_heads=heads,
        interpret=True,
    )  # fmt: skip
    if has_norm:
        q, k = (
            portable_rms_norm.rms_norm(x.reshape(-1, channels), g, eps=EPS).reshape(x.shape)
            for x, g in zip((q, k), gains, strict=True)
        )
    q, k = portable_rope.rope(q, cos, sin), portable_rope.rope(k, cos, sin)
    close(out, q, 2.0**-6)
    want = np.array(pages)
    for m, position in enumerate(np.asarray(positions).reshape(-1)):
        if position >= 0:
            page = table[m // length, position // 128]
            want[1, page, 0, :, position % 128] = k[m]
            want[1, page, 1, :, position % 128] = v[m]
    close(cache, want, 2.0**-6)
    untouched = np.asarray(want == np.asarray(pages))
    assert_bitwise_equal(
        np.asarray(cache)[untouched], np.asarray(pages)[untouched], claim="nothing else is written"
    )


@pytest.mark.slow
def test_queries_with_angles_of_their_own_in_interpret_mode():
    """Each part has the bits of a launch in which all heads have its angles."""
    tokens, heads, kv_heads, channels = 2, 3, 1, 64
    qkv = array((tokens, heads + 2 * kv_heads, channels), 1)
    cos, sin = (array((2, tokens, channels // 2), seed, F32) for seed in (2, 3))
    pages = array((2, 3, 2, kv_heads, 128, channels), 4)
    table, positions = jnp.asarray([[2, 0]], I32), jnp.asarray([[127, 128]], I32)

    def run(cos, sin):
        operands = pages, qkv, cos, sin, None, table, positions
        return write(*operands, num_heads=heads, interpret=True)

    queries, cache = run(*(jnp.concatenate(list(rows), axis=1) for rows in (cos, sin)))
    of_keys, of_queries = (run(cos[i], sin[i]) for i in (0, 1))
    assert count_different_bits(of_keys[0], of_queries[0]) > 0
    assert count_different_bits(of_keys[1], of_queries[1]) > 0
    assert_bitwise_equal(queries, of_queries[0], claim="queries by their angles")
    assert_bitwise_equal(cache, of_keys[1], claim="keys and values by those of keys")


@pytest.mark.parametrize("width", quick_and_slow((14336,), (172, 768, 11008)))
def test_swiglu_lowers(width):
    lower_for_hopper(swiglu.swiglu, struct((5, 2 * width)))
    lower_for_hopper(swiglu.swiglu, struct((5, width)), struct((5, width)))


@pytest.mark.parametrize(("num_rows", "width"), quick_and_slow(((1, 172),), ((3, 768), (2, 2560))))
def test_swiglu_in_interpret_mode(num_rows, width):
    gate_up = array((num_rows, 2 * width), 1).at[0, :2].set(-100.0)
    out = swiglu.swiglu(gate_up, interpret=True)
    close(out, portable_swiglu.swiglu(gate_up), 2.0**-7)
    split = swiglu.swiglu(gate_up[:, :width], gate_up[:, width:], interpret=True)
    assert_bitwise_equal(split, out, claim="fused and split activations give the same bits")


def test_geglu_lowers():
    lower_for_hopper(geglu.geglu, struct((5, 2 * 1536)))


@pytest.mark.parametrize(("num_rows", "width"), [(1, 128), (3, 1536), (2, 132)])
def test_geglu_in_interpret_mode(num_rows, width):
    gate_up = array((num_rows, 2 * width), 1).at[0, :2].set(-100.0)
    out = geglu.geglu(gate_up, interpret=True)
    close(out, portable_geglu.geglu(gate_up), 2.0**-7)
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=1)
    exact = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    close(out, exact, 2.0**-7)
    assert (np.asarray(out, np.float32)[0, :2] == 0).all(), "a gate of -100 passes nothing"


def test_a_soft_cap_lowers():
    lower_for_hopper(functools.partial(softcap.softcap, cap=30.0), struct((5, 4000), jnp.float32))


@pytest.mark.parametrize("kernels", ["portable", "sm90"])
def test_a_soft_cap_is_within_float32_of_float64(kernels):
    """With 1 / (e + 1) off by less than 2**-21, as its factors are, and two roundings."""
    cap = 30.0
    logits = np.linspace(-300, 300, 3 * 512).reshape(3, 512).astype(np.float32)
    logits[0, :3] = np.inf, -np.inf, 1e30
    if kernels == "sm90":
        out = softcap.softcap(jnp.asarray(logits), cap=cap, interpret=True)
    else:
        out = portable_softcap.softcap(jnp.asarray(logits), cap=cap)
    exact = cap * np.tanh(logits.astype(np.float64) / cap)
    assert np.abs(np.asarray(out, np.float64) - exact).max() < cap * 2.0**-19
    assert np.asarray(out)[0, :3].tolist() == [cap, -cap, cap]
    assert np.abs(logits[1:] - exact[1:]).max() > 1  # the probe: a cap changes these logits


@pytest.mark.parametrize("kernels", ["portable", "sm90"])
def test_a_clamped_swiglu_is_its_formula_and_keeps_nan(kernels):
    """Against float64: gates above the limit, ups beyond it on both sides, and a NaN in each."""
    clamp = SwigluClamp(alpha=1.702, limit=2.0)
    gate, up = np.meshgrid(np.linspace(-9, 9, 256), np.linspace(-5, 5, 12))
    gate, up = (np.asarray(x, ml_dtypes.bfloat16) for x in (gate, up))
    gate[0, 3], up[1, 4] = np.nan, np.nan
    gate_up = jnp.asarray(np.concatenate([gate, up], axis=1))
    if kernels == "sm90":
        out = swiglu.swiglu(gate_up, clamp=clamp, interpret=True)
    else:
        out = portable_swiglu.swiglu(gate_up, clamp=clamp)
    c = np.minimum(np.float64(gate), 2)
    want = c / (1 + np.exp(-1.702 * c)) * (np.clip(np.float64(up), -2, 2) + 1)
    found = np.asarray(out, np.float64)
    assert np.isnan(found).sum() == 2 and np.isnan(found[0, 3]) and np.isnan(found[1, 4])
    np.testing.assert_allclose(found, want, rtol=2**-8, atol=1e-12)


def test_swiglu_refuses_other_widths():
    with pytest.raises(ValueError, match="64"):
        swiglu.swiglu(array((2, 128)))


@pytest.mark.parametrize(
    ("num_rows", "vocab"), quick_and_slow(((1, 512),), ((7, 128256), (300, 32000)))
)
def test_vocabulary_kernels_lower(num_rows, vocab):
    x, row, key = struct((num_rows, vocab), F32), struct((num_rows,), F32), struct((num_rows,), U32)
    parts = struct((num_rows, vocab // 128), F32)
    lower_for_hopper(lambda x: log_softmax.block_stats(x, vocab_block=128), x)
    lower_for_hopper(log_softmax.log_sum_exp, parts, parts)
    lower_for_hopper(log_softmax.log_probs, struct((num_rows, 21), F32), row)
    for op in (
        sampling.gumbel_scores,
        functools.partial(choice.stats_and_choice, vocab_block=128),
    ):
        lower_for_hopper(
            lambda x, t, a, b, i, op=op: op(x, t, (a, b), first_token_id=i),
            x, row, key, key, struct((), I32),
        )  # fmt: skip
    lower_for_hopper(
        lambda x, t, a, b: token.choose_token(x, t, (a, b), vocab_block=128), x, row, key, key
    )
    top_k = struct((num_rows,), I32)
    lower_for_hopper(sampling.nucleus_sums, x, row, top_k, row)
    # The whole vocabulary without padding, which no width of a product is.
    ranked = struct((num_rows, vocab - 64), F32)
    lower_for_hopper(sampling.nucleus_sums, ranked, row, top_k, row)
    uses = struct((num_rows, vocab), I32)
    lower_for_hopper(sampling.adjust_logits, x, x, uses, (row, row), (row, row))


def vocabulary_case(num_rows, vocab, seed=0):
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((num_rows, vocab)).astype(np.float32)
    logits[:, -150:] = -np.inf
    temperature = np.resize(np.float32([0.7, 0.0, 1.3]), num_rows)
    key = tuple(jnp.asarray(rng.integers(0, 2**32, num_rows, np.uint32)) for _ in range(2))
    return jnp.asarray(logits), jnp.asarray(temperature), key


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "vocab"), quick_and_slow(((3, 640),), ((1, 256),)))
def test_log_softmax_in_interpret_mode(num_rows, vocab):
    logits, _, _ = vocabulary_case(num_rows, vocab)
    maxima, sums = log_softmax.block_stats(logits, vocab_block=128, interpret=True)
    want = portable_log_softmax.block_stats(logits, vocab_block=128)
    assert_bitwise_equal(maxima, want[0], claim="maxima are exact")
    close(sums, want[1], 2.0**-20)
    lse = log_softmax.log_sum_exp(*want, interpret=True)
    close(lse, portable_log_softmax.log_sum_exp(*want), 2.0**-20)
    out = log_softmax.log_probs(logits[:, :9], lse, interpret=True)
    assert_bitwise_equal(out, logits[:, :9] - lse[:, None], claim="one subtraction an element")


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "vocab"), quick_and_slow(((3, 640),), ((1, 256),)))
def test_sampling_in_interpret_mode(num_rows, vocab):
    logits, temperature, key = vocabulary_case(num_rows, vocab)
    scores = sampling.gumbel_scores(logits, temperature, key, first_token_id=128, interpret=True)
    want = portable_sampling.gumbel_scores(logits, temperature, key, first_token_id=128)
    close(scores, want, 1e-5)
    maxima, sums, best, chosen = choice.stats_and_choice(
        logits, temperature, key, first_token_id=128, vocab_block=128, interpret=True
    )
    ids = np.argmax(np.asarray(scores), axis=1)
    assert_bitwise_equal(chosen, (128 + ids).astype(np.int32), claim="the first maximum wins")
    close(best, np.asarray(scores).max(axis=1), 1e-5)
    apart = log_softmax.block_stats(logits, vocab_block=128, interpret=True)
    for a, b in zip((maxima, sums), apart, strict=True):
        assert_bitwise_equal(a, b, claim="the pass that chooses gives the statistics of blocks")
    equal = jnp.full((2, 384), 1.5, F32)
    greedy = (jnp.zeros(2, F32), tuple(k[:1].repeat(2) for k in key))
    *_, chosen = choice.stats_and_choice(
        equal, *greedy, first_token_id=0, vocab_block=128, interpret=True
    )
    assert_bitwise_equal(chosen, np.zeros(2, np.int32), claim="of equal logits the first wins")


def token_in_steps(logits, temperature, key, **how):
    """Token, log-probability and log-sum-exp, by the operations that `choose_token` joins."""
    maxima, sums, _, ids = choice.stats_and_choice(
        logits, temperature, key, first_token_id=0, vocab_block=128, **how
    )
    lse = log_softmax.log_sum_exp(maxima, sums, **how)
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=1)
    return ids, log_softmax.log_probs(chosen, lse, **how)[:, 0], lse


@pytest.mark.slow
def test_the_token_and_its_logprob_in_interpret_mode():
    logits, temperature, key = vocabulary_case(3, 640)
    out = token.choose_token(logits, temperature, key, vocab_block=128, interpret=True)
    want = token_in_steps(logits, temperature, key, interpret=True)
    assert_bitwise_equal(out[0], want[0], claim="the same token")
    for a, b in zip(out[1:], want[1:], strict=True):
        close(a, b, 1e-6)


def test_noise_bits_in_interpret_mode():
    """At logit 0 and temperature 1 a score is the noise; a wrong bit moves it by far more."""
    _, _, key = vocabulary_case(2, 256)
    scores = sampling.gumbel_scores(
        jnp.zeros((2, 256), F32), jnp.ones(2, F32), key, first_token_id=384, interpret=True
    )
    ids = 384 + jnp.arange(256, dtype=I32)[None]
    bits = noise.token_bits(tuple(k[:, None] for k in key), ids)
    close(scores, noise.gumbel(bits), 1e-6)


@pytest.mark.slow
def test_nucleus_sums_in_interpret_mode():
    logits, temperature, _ = vocabulary_case(3, 640)
    ranked = -jnp.sort(-jnp.maximum(logits, -50.0), axis=1)
    rest = temperature, jnp.asarray([600, 5, 200], I32), jnp.full((3,), 0.9, F32)
    for width in (640, 600):  # a vocabulary of whole blocks, and one that is not, as Gemma 3's
        args = ranked[:, :width], *rest
        out, want = (
            sampling.nucleus_sums(*args, interpret=True), portable_sampling.nucleus_sums(*args),
        )  # fmt: skip
        for a, b in zip(out, want, strict=True):
            assert a.shape == b.shape
            close(a, b, 1e-5)


def adjustments_case(num_rows, vocab, seed=0):
    """Logits, biases and uses, and four factors and penalties a row; the first row asks nothing."""
    logits = np.asarray(vocabulary_case(num_rows, vocab, seed)[0]).copy()
    logits[:, 5] = -0.0
    rng = np.random.default_rng([1, seed])
    bias = np.where(rng.random(logits.shape) < 0.3, rng.normal(size=logits.shape), 0)
    uses = rng.integers(0, 6, logits.shape).astype(np.int32)
    per_row = rng.uniform(0.3, 1.9, (4, num_rows)).astype(np.float32)
    bias[0], per_row[:2, 0], per_row[2:, 0] = 0, 1, 0
    return tuple(map(jnp.asarray, (logits, bias.astype(np.float32), uses, *per_row)))


def adjust(x, bias, uses, above, below, per_use, once, **how):
    return sampling.adjust_logits(x, bias, uses, (above, below), (per_use, once), **how)


def adjusted_by_specification(x, bias, uses, above, below, per_use, once):
    """As docs/numerics.md has it; NumPy rounds every operation, and fuses none."""
    a = np.where(bias == 0, x, x + bias)
    b = np.where(uses > 0, a * np.where(a > 0, above[:, None], below[:, None]), a)
    lower = (b - per_use[:, None] * (uses - 1).astype(np.float32)) - once[:, None]
    return np.where(uses > 1, lower, b)


def check_adjusted(out, args):
    args = [np.asarray(a) for a in args]
    want = adjusted_by_specification(*args)
    assert want.dtype == np.float32
    assert_bitwise_equal(out, want, claim="the specified order, each operation rounded")
    assert_bitwise_equal(out[0], args[0][0], claim="a row that asks for nothing keeps its bits")
    x, bias, uses, above, below, per_use, once = args
    late = adjusted_by_specification(x, 0 * bias, uses, above, below, per_use, once) + bias
    assert count_different_bits(late, want), "the probe depends on the order"


@pytest.mark.parametrize(("num_rows", "vocab"), quick_and_slow(((3, 640),), ((1, 256),)))
def test_adjusted_logits_in_interpret_mode(num_rows, vocab):
    args = adjustments_case(num_rows, vocab)
    want = adjusted_by_specification(*map(np.asarray, args))
    out = adjust(*args, interpret=True)
    # XLA's CPU may fuse a product with a subtraction here; on a GPU every bit is compared.
    close(jnp.maximum(out, -99.0), np.maximum(want, -99), 1e-6)
    assert_bitwise_equal(out[0], args[0][0], claim="a row that asks for nothing keeps its bits")


@pytest.mark.parametrize(
    "call",
    (
        lambda x, t, key: sampling.gumbel_scores(x, t, key, first_token_id=0),
        lambda x, t, key: choice.stats_and_choice(x, t, key, first_token_id=0, vocab_block=128),
        lambda x, t, key: sampling.adjust_logits(x, x, x.astype(I32), (t, t), (t, t)),
    ),
    ids=("gumbel_scores", "stats_and_choice", "adjust_logits"),
)
def test_sampling_refuses_part_blocks(call):
    with pytest.raises(ValueError, match="200"):
        call(jnp.zeros((2, 200), F32), jnp.ones(2, F32), (jnp.zeros(2, U32),) * 2)


def test_log_softmax_refuses_other_blocks():
    with pytest.raises(ValueError, match="256"):
        log_softmax.block_stats(jnp.zeros((2, 512), F32), vocab_block=256)


# --- on a Hopper GPU -------------------------------------------------------------------------

SIZES = (1, 3, 16, 17, 70, 257)
MOST = 300


def check_rows(f, args, claim):
    """Rows keep their bits at every M, at other positions, and under permutation."""
    full = [np.asarray(x) for x in jax.tree.leaves(f(*args))]
    rng = np.random.default_rng(0)
    picks = [np.arange(n) for n in SIZES] + [MOST - n + np.arange(n) for n in SIZES]
    for which in [*picks, rng.permutation(MOST)]:
        got = jax.tree.leaves(f(*(np.asarray(a)[which] for a in args)))
        for a, b in zip(got, full, strict=True):
            assert_bitwise_equal(a, b[which], claim=f"{claim}: {len(which)} rows from {which[0]}")
    return full


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("width", (64, 128, 576, 896, 4096, 5120))
def test_rms_norm_is_bitwise_batch_invariant(width):
    x, gain = array((MOST, width), 1), array((width,), 2)
    assert_order_sensitive(np.asarray(x[:4], np.float32) ** 2)

    def alone(x):
        return rms_norm.rms_norm(x, gain, eps=EPS)

    [out] = check_rows(alone, (x,), f"rms_norm {width}")
    beside = x.at[1:].multiply(jnp.asarray(2.0**40, BF16))
    assert_bitwise_equal(alone(beside)[0], out[0], claim="neighbours of huge magnitude")
    x64 = np.asarray(x, np.float64)
    want = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + EPS) * np.asarray(gain, np.float64)
    assert (np.abs(np.asarray(out, np.float64) - want) <= 2.0**-8 * np.abs(want) + 1e-30).all()


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("leaves", (1, 8))
@pytest.mark.parametrize("width", (128, 4096))
def test_combine_add_rms_norm_equals_its_steps(width, leaves):
    x, gain, bias = array((MOST, width), 1), array((width,), 2), array((width,), 3)
    sums = array((leaves, MOST, width), 4, F32)

    def combined(by_row, x):
        return rms_norm.combine_add_rms_norm(jnp.moveaxis(by_row, 1, 0), x, bias, gain, eps=EPS)

    total, out = check_rows(combined, (jnp.moveaxis(sums, 1, 0), x), f"combine {width} {leaves}")
    tree = list(np.asarray(sums))
    while len(tree) > 1:
        tree = [a + b for a, b in zip(tree[0::2], tree[1::2], strict=True)]
    want = (np.asarray(x, np.float32) + (tree[0] + np.asarray(bias, np.float32))).astype(BF16)
    assert_bitwise_equal(total, want, claim="the residual is NumPy's tree, bias, residual, round")
    normed = rms_norm.rms_norm(jnp.asarray(total), gain, eps=EPS)
    assert_bitwise_equal(out, normed, claim="fused norm equals the norm of the sum")
    form = rms_norm.row_sum(width)
    for warpgroups in (1, 2, 4) if form.is_wide else ():
        for num_ctas in (100, 2**30):
            schedule = rms_norm.NormSchedule(warpgroups=warpgroups, num_ctas=num_ctas)
            got = rms_norm.combine_add_rms_norm(sums, x, bias, gain, eps=EPS, schedule=schedule)
            assert_bitwise_equal(got[1], out, claim=f"{schedule} changes no bit")


@pytest.mark.gpu
@pytest.mark.control
def test_another_order_of_a_row_differs():
    x, ones = array((64, 4096), 1, F32), jnp.ones(4096, F32)
    forward = rms_norm.rms_norm(x, ones, eps=EPS)
    backward = rms_norm.rms_norm(x[:, ::-1], ones, eps=EPS)[:, ::-1]
    assert count_different_bits(forward, backward)


@pytest.mark.gpu
@pytest.mark.control
def test_cublas_rows_depend_on_the_batch():
    x, w = array((4096, 4096), 1), array((4096, 64), 2)
    product = jax.jit(lambda x: jnp.dot(x, w, preferred_element_type=F32))
    assert count_different_bits(product(x)[:1], product(x[:1]))


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize(("heads", "kv_heads", "channels"), ((32, 8, 128), (14, 2, 64), (8, 2, 96)))
def test_fused_write_equals_norm_rope_and_scatter(heads, kv_heads, channels):
    qkv = array((MOST, heads + 2 * kv_heads, channels), 1)
    q, k, v = (np.asarray(x) for x in jnp.split(qkv, [heads, heads + kv_heads], axis=1))
    angles = np.asarray(array((MOST, channels // 2), 2, F32))
    cos, sin = np.cos(angles), np.sin(angles)
    gains = array((channels,), 3), array((channels,), 4)
    [alone] = check_rows(rope.rope, (q, cos, sin), "rope")
    x, c, s = q.astype(np.float32), cos[:, None], sin[:, None]
    a, b = x[..., : channels // 2], x[..., channels // 2 :]
    want = np.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(BF16)
    assert_bitwise_equal(alone, want, claim="rope is NumPy's float32 formula, rounded once")
    rng = np.random.default_rng(5)
    slots = rng.permutation(20 * 128)[:MOST].astype(np.int32)
    slots[::50] = -1
    table = rng.permutation(40)[:20].astype(np.int32)
    pages = array((2, 40, 2, kv_heads, 128, channels), 6)
    normed = [
        np.asarray(rms_norm.rms_norm(x.reshape(-1, channels), g, eps=EPS)).reshape(x.shape)
        for x, g in zip((q, k), gains, strict=True)
    ]
    for which in (np.arange(MOST), np.arange(1), np.arange(51)):
        for has_norm in (True, False):
            q1, k1 = (x[which] for x in (normed if has_norm else (q, k)))
            q1, k1 = (np.asarray(rope.rope(x, cos[which], sin[which])) for x in (q1, k1))
            cache = np.array(pages)
            for m, position in enumerate(slots[which]):
                if position >= 0:
                    page = table[position // 128]
                    cache[1, page, 0, :, position % 128] = k1[m]
                    cache[1, page, 1, :, position % 128] = v[which][m]
            got = write(
                pages, np.asarray(qkv)[which], cos[which], sin[which], gains if has_norm else None,
                np.tile(table, (len(which), 1)), slots[which][:, None], num_heads=heads,
            )  # fmt: skip
            claim = f"{len(which)} tokens, norm {has_norm}: one launch, same bits"
            assert_bitwise_equal(got[0], q1, claim=claim)
            assert_bitwise_equal(got[1], cache, claim=claim)


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("width", (132, 1536))
def test_geglu_is_bitwise_batch_invariant(width):
    check_rows(geglu.geglu, (array((MOST, 2 * width), 1),), f"geglu {width}")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("width", (132, 256000))
def test_a_soft_cap_is_bitwise_batch_invariant(width):
    kernel = functools.partial(softcap.softcap, cap=30.0)
    check_rows(kernel, (array((MOST, width), 1, jnp.float32),), f"soft cap {width}")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("width", (172, 11008, 14336))
def test_swiglu_is_bitwise_batch_invariant(width):
    gate_up = array((MOST, 2 * width), 1)
    [out] = check_rows(swiglu.swiglu, (gate_up,), f"swiglu {width}")
    split = swiglu.swiglu(gate_up[:, :width], gate_up[:, width:])
    assert_bitwise_equal(split, out, claim="fused and split activations give the same bits")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("vocab", (512, 32000, 128256))
def test_vocabulary_kernels_are_bitwise_batch_invariant(vocab):
    logits, temperature, key = vocabulary_case(MOST, vocab)
    assert_order_sensitive(np.exp(np.asarray(logits[:2, :512])))

    def both(x, t, a, b):
        return choice.stats_and_choice(x, t, (a, b), first_token_id=256, vocab_block=128)

    def scores(x, t, a, b):
        return sampling.gumbel_scores(x, t, (a, b), first_token_id=256)

    args = (logits, temperature, *key)
    maxima, sums, best, ids_chosen = check_rows(both, args, f"one pass over {vocab} logits")
    table = check_rows(scores, args, f"scores of {vocab}")[0]
    ids = np.argmax(table, axis=1)
    assert_bitwise_equal(ids_chosen, (256 + ids).astype(np.int32), claim="argmax of the scores")
    picked = np.take_along_axis(table, ids[:, None], axis=1)[:, 0]
    assert_bitwise_equal(best, picked, claim="best score is a score")
    apart = log_softmax.block_stats(logits, vocab_block=128)
    for a, b in zip(apart, (maxima, sums), strict=True):
        assert_bitwise_equal(a, b, claim="block_stats alone gives the bits of the fused pass")
    joined = check_rows(
        lambda x, t, a, b: token.choose_token(x, t, (a, b), vocab_block=128), args,
        f"tokens of {vocab}",
    )  # fmt: skip
    for a, b in zip(joined, token_in_steps(logits, temperature, key), strict=True):
        assert_bitwise_equal(a, b, claim="two launches have the bits of five")
    [lse] = check_rows(log_softmax.log_sum_exp, (maxima, sums), f"log_sum_exp of {vocab}")
    x64 = np.asarray(logits, np.float64)
    top = x64.max(axis=1, keepdims=True)
    want = (top + np.log(np.exp(x64 - top).sum(axis=1, keepdims=True)))[:, 0]
    assert (np.abs(lse - want) <= 2 * np.spacing(np.abs(want).astype(np.float32))).all()
    ranked = -jnp.sort(-jnp.maximum(logits, -50.0), axis=1)
    top_k = np.resize(np.int32([vocab, 1, 50]), MOST)
    nucleus = (ranked, temperature, top_k, jnp.full((MOST,), 0.9, F32))
    check_rows(sampling.nucleus_sums, nucleus, f"nucleus_sums of {vocab}")
    for num_tokens in (vocab - 64, vocab - 125):
        padded = jnp.where(jnp.arange(vocab) < num_tokens, ranked, -jnp.inf)
        counts = jnp.minimum(top_k, num_tokens)
        whole = sampling.nucleus_sums(padded, temperature, counts, nucleus[3])
        part = sampling.nucleus_sums(ranked[:, :num_tokens], temperature, counts, nucleus[3])
        for a, b in zip(part, whole, strict=True):
            assert_bitwise_equal(a, b[..., : a.shape[-1]], claim=f"{num_tokens} of {vocab} tokens")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("vocab", (512, 32000, 128256))
def test_adjusted_logits_are_bitwise_those_of_the_specification(vocab):
    args = adjustments_case(MOST, vocab)
    [out] = check_rows(adjust, args, f"adjusted logits of {vocab}")
    check_adjusted(out, args)
    half = vocab // 256 * 128
    for cols in (slice(0, half), slice(half, vocab)):
        got = adjust(*(a[:, cols] for a in args[:3]), *args[3:])
        assert_bitwise_equal(got, out[:, cols], claim="a rank's share of the vocabulary")
