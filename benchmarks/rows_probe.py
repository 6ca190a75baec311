# SPDX-License-Identifier: Apache-2.0
"""Bits, then speed, of the sm90 row kernels on one GPU: `benchmarks/rows_probe.py [bits|time]`.

Covers RMSNorm, RoPE and the cache write, SwiGLU, log-softmax and sampling. A table comes last;
all rows go to `$OUT/rows_probe.json`.
"""

import functools
import json
import os
import statistics
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from detjax.pallas_kernels.log_softmax import sm90 as log_softmax
from detjax.pallas_kernels.rms_norm import sm90 as rms
from detjax.pallas_kernels.rope import sm90 as rope
from detjax.pallas_kernels.sampling import noise
from detjax.pallas_kernels.sampling import sm90 as sampling
from detjax.pallas_kernels.swiglu import sm90 as swiglu

ROWS, CHECKS, TIMES = [], [], []
SIZES = (1, 3, 17, 70, 257)
MOST = 1000
EPS = 1e-5
DEADLINE = time.time() + float(os.environ.get("BITS_SECONDS", "75"))
BF16, F32 = jnp.bfloat16, jnp.float32


def wide(shape, seed, dtype=BF16, spread=1.5):
    """Random values whose exponents vary, so that sums depend on order."""
    rng = np.random.default_rng(seed)
    scale = np.exp(np.float32(spread) * rng.standard_normal(shape, np.float32))
    return jnp.asarray((rng.standard_normal(shape, np.float32) * scale).astype(dtype))


def raw(x):
    x = np.ascontiguousarray(np.asarray(x))
    return x.reshape(-1).view(f"u{x.dtype.itemsize}").reshape(x.shape)


def check(name, ok, **row):
    CHECKS.append({"check": name, "ok": bool(ok), **row})
    if not ok:
        print("FAILED", name, row, flush=True)


def same(name, a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        x, y = raw(x), raw(y)
        bad = int((x != y).sum()) if x.shape == y.shape else -1
        check(f"{name} [{i}]", bad == 0, differ=bad, of=int(x.size))


def poisoned(f, *args):
    """Call `f` after memory of its outputs' size was filled with NaN and freed."""
    shapes = jax.tree.leaves(jax.eval_shape(f, *args)) * 2
    outs = [jax.device_put(np.full(s.size * s.dtype.itemsize, 0xFF, np.uint8)) for s in shapes]
    jax.block_until_ready(outs)
    del outs
    return f(*args)


def rows_of(args, which, axes):
    return [np.take(np.asarray(a), which, axis=axis) for a, axis in zip(args, axes, strict=True)]


def check_rows(name, f, args, axes, out_axes=None):
    """Every row equals itself at every M, at other positions, permuted and beside huge neighbours."""  # noqa: E501
    full = [np.asarray(x) for x in jax.tree.leaves(poisoned(f, *args))]
    check(
        f"{name} finite",
        all(np.isfinite(x.astype(np.float32)).all() for x in full if x.dtype.kind in "fV"),
    )
    rng = np.random.default_rng(0)
    for size in SIZES:
        for which in (np.arange(size), MOST - size + np.arange(size), rng.permutation(MOST)[:size]):
            got = jax.tree.leaves(poisoned(f, *rows_of(args, which, axes)))
            same(f"{name} M={size}", got, [x[which] for x in full])
    order = rng.permutation(MOST)
    same(f"{name} permuted", f(*rows_of(args, order, axes)), [x[order] for x in full])
    again = jax.tree.leaves(f(*args))
    same(f"{name} again", again, full)
    return full


def ulps(got, want):
    """Largest error in units of the last place of bfloat16 (or float32) at the reference."""
    bits = 8 if got.dtype == BF16 else 24
    want = np.asarray(want, np.float64)
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(want), 1e-30))) - bits + 1)
    return float((np.abs(np.asarray(got, np.float64) - want) / unit).max())


def check_rms(width, leaves):
    x, gain, bias = wide((MOST, width), 1), wide((width,), 2, spread=0.3), wide((width,), 3)
    sums = wide((leaves, MOST, width), 4, F32)

    def alone(x):
        return rms.rms_norm(x, gain, eps=EPS)

    def combined(sums, x):
        return rms.combine_add_rms_norm(sums, x, bias, gain, eps=EPS)

    [out] = check_rows(f"rms_norm {width}", alone, (x,), (0,))
    x64 = np.asarray(x, np.float64)
    want = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + EPS) * np.asarray(gain, np.float64)
    error = ulps(out, want)
    check(f"rms_norm {width} float64", error <= 0.51, ulp=error)
    total, normed = check_rows(
        f"combine_add_rms_norm {width} L={leaves}", combined, (sums, x), (1, 0)
    )
    tree = [np.asarray(s) for s in sums]
    while len(tree) > 1:
        tree = [a + b for a, b in zip(tree[0::2], tree[1::2], strict=True)]
    want = (np.asarray(x, np.float32) + (tree[0] + np.asarray(bias, np.float32))).astype(BF16)
    same(f"residual of combine {width} is NumPy's", total, want)
    same(f"fused norm {width} is rms_norm of the sum", normed, alone(jnp.asarray(total)))
    one = rms.add_rms_norm(jnp.asarray(tree[0]), x, bias, gain, eps=EPS)
    same(f"add_rms_norm {width} of the tree", one, (total, normed))
    form = rms.row_sum(width)
    if form.is_wide:
        for warpgroups in (w for w in range(1, 9) if form.num_parts % w == 0):
            for num_ctas in (2**30, 264):
                schedule = rms.Schedule(warpgroups=warpgroups, num_ctas=num_ctas)
                got = rms.add_rms_norm(
                    jnp.asarray(tree[0]), x, bias, gain, eps=EPS, schedule=schedule
                )
                same(
                    f"add_rms_norm {width} {warpgroups} warpgroups, {num_ctas} CTAs",
                    got,
                    (total, normed),
                )
    huge = x.at[1:].multiply(jnp.asarray(2.0**40, BF16))
    same(f"rms_norm {width} beside huge rows", alone(huge)[:1], out[:1])
    reverse = np.asarray(rms.rms_norm(x[:, ::-1], gain[::-1], eps=EPS))[:, ::-1]
    wide_out = rms.rms_norm(x.astype(F32), jnp.ones(width, F32), eps=EPS)
    wide_reverse = np.asarray(rms.rms_norm(x.astype(F32)[:, ::-1], jnp.ones(width, F32), eps=EPS))[
        :, ::-1
    ]
    differ = int((raw(np.asarray(wide_out)) != raw(wide_reverse)).sum())
    check(
        f"CONTROL rms_norm {width} float32 of reversed channels differs",
        differ > 0,
        differ=differ,
        bf16=int((raw(reverse) != raw(out)).sum()),
    )


def check_rope(heads, kv_heads, channels):
    tag = f"h{heads}k{kv_heads}c{channels}"
    qkv = np.asarray(wide((MOST, heads + 2 * kv_heads, channels), 5))
    angles = np.asarray(wide((MOST, channels // 2), 6, F32))
    cos, sin = np.cos(angles), np.sin(angles)
    q_gain, k_gain = wide((channels,), 7, spread=0.3), wide((channels,), 8, spread=0.3)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    [out] = check_rows(f"rope {tag}", rope.rope, (q, cos, sin), (0, 0, 0))
    x, c, s = np.asarray(q, np.float32), np.asarray(cos)[:, None], np.asarray(sin)[:, None]
    a, b = x[..., : channels // 2], x[..., channels // 2 :]
    same(
        f"rope {tag} is NumPy's",
        out,
        np.concatenate([a * c - b * s, b * c + a * s], -1).astype(BF16),
    )
    num_pages, page_len, layers = 40, 128, 2
    rng = np.random.default_rng(1)
    table = jnp.asarray(rng.permutation(num_pages)[:20].reshape(1, 20), jnp.int32)
    slots = rng.permutation(20 * page_len)[:MOST].astype(np.int32)
    slots[::50] = -1
    positions = slots[:, None]
    pages_of = np.asarray(table)[0]
    pages = wide((layers, num_pages, 2, kv_heads, page_len, channels), 9)

    def unfused(which, has_norm):
        def normed(rows, gain):
            flat = rows.reshape(-1, channels)
            return rms.rms_norm(flat, gain, eps=EPS).reshape(rows.shape)

        q1, k1 = jnp.asarray(q[which]), jnp.asarray(k[which])
        if has_norm:
            q1, k1 = normed(q1, q_gain), normed(k1, k_gain)
        q1, k1 = rope.rope(q1, cos[which], sin[which]), rope.rope(k1, cos[which], sin[which])
        cache = np.array(pages)
        k2, v2 = np.asarray(k1), np.asarray(v[which])
        for m, position in enumerate(slots[which]):
            if position >= 0:
                page = int(pages_of[position // page_len])
                cache[1, page, 0, :, position % page_len] = k2[m]
                cache[1, page, 1, :, position % page_len] = v2[m]
        return q1, cache

    def fused(which, has_norm, is_tuple):
        @jax.jit
        def step(pages, *args):
            *x, cos, sin, table, positions = args
            ref = jax.new_ref(pages)
            out = rope.qk_norm_rope_write(
                tuple(x) if is_tuple else x[0], cos, sin, q_gain if has_norm else None,
                k_gain if has_norm else None, ref, table, positions, num_heads=heads, layer=1, eps=EPS,  # noqa: E501
            )  # fmt: skip
            return out, jax.freeze(ref)

        x = (q[which], k[which], v[which]) if is_tuple else (qkv[which],)
        here = np.tile(np.asarray(table), (len(which), 1))
        return step(pages, *x, cos[which], sin[which], here, positions[which])

    for which in (np.arange(MOST), np.arange(1), np.arange(51), rng.permutation(MOST)[:70]):
        for has_norm in (True, False):
            want = unfused(which, has_norm)
            same(f"fused {tag} M={len(which)} norm={has_norm}", fused(which, has_norm, False), want)
    same(f"fused {tag} of a tuple", fused(np.arange(51), True, True), unfused(np.arange(51), True))


def check_swiglu(width):
    gate_up = wide((MOST, 2 * width), 10).at[0, :64].set(-100.0).at[0, 64:128].set(-88.5)
    [out] = check_rows(f"swiglu {width}", swiglu.swiglu, (gate_up,), (0,))
    g, u = np.asarray(gate_up[:, :width], np.float64), np.asarray(gate_up[:, width:], np.float64)
    with np.errstate(over="ignore"):
        want = g / (1 + np.exp(-g)) * u
    keep = np.abs(want) > 1e-30
    error = ulps(out[keep], want[keep])
    check(f"swiglu {width} float64", error <= 0.51, ulp=error)
    same(
        f"swiglu {width} split equals fused",
        swiglu.swiglu(gate_up[:, :width], gate_up[:, width:]),
        out,
    )


def check_vocabulary(vocab):
    most = 300
    rng = np.random.default_rng(11)
    logits = 3 * rng.standard_normal((most, vocab), np.float32)
    logits[:, -128:] = -np.inf
    logits[1] = 2.5
    logits = jnp.asarray(logits)
    key = tuple(jnp.asarray(rng.integers(0, 2**32, most, np.uint32)) for _ in range(2))
    temperature = jnp.asarray(np.tile([0.0, 0.7, 1.0, 1.5], most // 4), F32)
    top_k = jnp.asarray(np.tile([vocab, 50, 1, 1000], most // 4), jnp.int32)
    top_p = jnp.full((most,), 0.9, F32)

    def stats(x):
        return log_softmax.block_stats(x, vocab_block=128)

    def scores(x, t, a, b):
        return sampling.gumbel_scores(x, t, (a, b), first_token_id=256)

    def choice(x, t, a, b):
        return sampling.gumbel_argmax(x, t, (a, b), first_token_id=256)

    def both(x, t, a, b):
        return sampling.stats_and_choice(x, t, (a, b), first_token_id=256, vocab_block=128)

    maxima, sums = stats(logits)
    lse = log_softmax.log_sum_exp(maxima, sums)
    table = scores(logits, temperature, *key)
    best, token = choice(logits, temperature, *key)
    ids = np.argmax(np.asarray(table), axis=1)
    same(f"argmax {vocab} is that of the scores", token, (ids + 256).astype(np.int32))
    same(f"best score {vocab}", best, np.take_along_axis(np.asarray(table), ids[:, None], 1)[:, 0])
    same(
        f"stats and argmax {vocab} in one pass",
        both(logits, temperature, *key),
        (maxima, sums, best, token),
    )
    x64 = np.asarray(logits, np.float64)
    top = x64.max(1, keepdims=True)
    want = (top + np.log(np.exp(x64 - top).sum(1, keepdims=True)))[:, 0]
    check(
        f"log_sum_exp {vocab} float64",
        ulps(np.asarray(lse), want) <= 2,
        ulp=ulps(np.asarray(lse), want),
    )
    picked = logits[:, :21]
    probs = log_softmax.log_probs(picked, lse)
    same(f"log_probs {vocab} is NumPy's", probs, np.asarray(picked) - np.asarray(lse)[:, None])
    bits = np.asarray(
        noise.token_bits(
            tuple(k[:4, None] for k in key), 256 + jnp.arange(vocab, dtype=jnp.int32)[None]
        )
    )
    u = np.minimum(
        (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24)
    ).astype(np.float64)
    got = np.asarray(
        scores(jnp.zeros((4, vocab), F32), jnp.ones(4, F32), *(k[:4] for k in key)), np.float64
    )
    error = np.abs(got + np.log(-np.log1p(-u))).max()
    check(f"noise {vocab} from the specification's bits, float64", error < 4e-6, error=float(error))
    ranked = jnp.asarray(-np.sort(-np.maximum(np.asarray(logits), -60.0), axis=1))
    nucleus = sampling.nucleus_sums(ranked, temperature, top_k, top_p)
    t64 = np.where(np.asarray(temperature) == 0, 1, np.asarray(temperature, np.float64))[:, None]
    r64 = np.asarray(ranked, np.float64)
    w64 = np.exp((r64 - r64[:, :1]) / t64)
    counted = np.where(np.arange(vocab)[None] < np.asarray(top_k)[:, None], w64, 0)
    before = np.cumsum(counted, 1) - counted
    error = float(np.abs(np.asarray(nucleus[1], np.float64) - before).max() / before.max())
    check(f"nucleus_sums {vocab} float64", error < 2e-6, error=error)
    for size in (1, 3, 64, 257):
        for which in (most - size + np.arange(size),):

            def some(*xs, which=which):
                return [np.asarray(x)[which] for x in xs]

            same(
                f"block_stats {vocab} M={size}", poisoned(stats, *some(logits)), some(maxima, sums)
            )
            same(
                f"log_sum_exp {vocab} M={size}",
                log_softmax.log_sum_exp(*some(maxima, sums)),
                np.asarray(lse)[which],
            )
            same(
                f"gumbel_scores {vocab} M={size}",
                poisoned(scores, *some(logits, temperature, *key)),
                np.asarray(table)[which],
            )
            same(
                f"gumbel_argmax {vocab} M={size}",
                choice(*some(logits, temperature, *key)),
                some(best, token),
            )
            same(
                f"stats and argmax {vocab} M={size}",
                both(*some(logits, temperature, *key)),
                some(maxima, sums, best, token),
            )
            same(
                f"nucleus_sums {vocab} M={size}",
                sampling.nucleus_sums(*some(ranked, temperature, top_k, top_p)),
                some(*nucleus),
            )
    half = vocab // 256 * 128
    parts = [scores(logits[:4, :half], temperature[:4], *(k[:4] for k in key))]
    parts.append(
        sampling.gumbel_scores(
            logits[:4, half:], temperature[:4], tuple(k[:4] for k in key), first_token_id=256 + half
        )
    )
    same(f"gumbel_scores {vocab} of two ranks", jnp.concatenate(parts, 1), table[:4])


def check_controls():
    x = wide((4096, 4096), 20)
    logits = 3 * jax.random.normal(jax.random.key(21), (64, 128256), F32)
    xla_rms = jax.jit(
        lambda x: (lambda v: v * jax.lax.rsqrt((v * v).mean(1, keepdims=True) + EPS))(x.astype(F32))
    )
    xla_lse = jax.jit(lambda x: jax.nn.logsumexp(x, axis=1))
    weights = wide((4096, 64), 22)
    xla_dot = jax.jit(lambda x: jnp.dot(x, weights, preferred_element_type=F32))
    counts = {}
    for name, f, x1 in (
        ("rms", xla_rms, x),
        ("logsumexp", xla_lse, logits),
        ("product by cuBLAS", xla_dot, x),
    ):
        counts[name] = int((raw(f(x1))[:1] != raw(f(x1[:1]))).sum())
    ours = log_softmax.log_sum_exp(*log_softmax.block_stats(logits, vocab_block=128))
    counts["logsumexp, XLA against ours"] = int((raw(xla_lse(logits)) != raw(ours)).sum())
    check("CONTROL XLA's rows depend on M somewhere", any(list(counts.values())[:3]), **counts)


def bits():
    jobs = [
        (check_vocabulary, (128256,)), (check_rope, (32, 8, 128)),
        *((check_rms, (w, l)) for w, l in ((4096, 8), (5120, 4), (128, 2), (64, 1), (576, 2), (896, 1))),  # noqa: E501
        (check_swiglu, (14336,)), (check_swiglu, (11008,)), (check_swiglu, (172,)),
        (check_rope, (14, 2, 64)), (check_rope, (8, 2, 96)), (check_vocabulary, (512,)),
        (check_controls, ()),
    ]  # fmt: skip

    def one(job):
        f, args = job
        start = time.time()
        if start > DEADLINE:
            check(f"{f.__name__}{args} ran", False, error="out of time")
            return
        try:
            f(*args)
        except Exception as error:
            check(f"{f.__name__}{args} ran", False, error=str(error)[:300])
            traceback.print_exc(limit=-4)
        print(f"{f.__name__}{args}: {time.time() - start:.1f} s", flush=True)

    with ThreadPoolExecutor(14) as pool:
        list(pool.map(one, jobs))


def microseconds(f, *args, iterations=20):
    """Median device time of all kernels of one call."""
    f = jax.jit(f)
    jax.block_until_ready(f(*args))
    _, runs = profiler.measure(f, iterations=iterations, aggregate=False)(*args)
    runs = [runs] if runs and isinstance(runs[0], tuple) else runs
    return 1e3 * statistics.median(sum(t for _, t in r) for r in runs), len(runs[0])


COPY = {}


def timed(name, num_bytes, ours: dict, xla, args):
    """Time variants of one operation and XLA's, and print a row."""
    row = {"time": name, "bytes": num_bytes}
    try:
        row["xla_us"], row["xla_kernels"] = microseconds(xla, *args) if xla else (None, None)
        for variant, f in ours.items():
            us, kernels = microseconds(f, *args)
            share = num_bytes / us * 1e-6 / COPY["tb_per_s"]
            row[variant] = {"us": us, "kernels": kernels, "share_of_copy": share}
    except Exception as error:
        traceback.print_exc(limit=-4)
        row["failed"] = str(error)[:300]
    TIMES.append(row)


def time_norms():
    def xla_add(p, x, g):
        v = (x.astype(F32) + p).astype(BF16)
        f = v.astype(F32)
        return v, (f * jax.lax.rsqrt((f * f).mean(1, keepdims=True) + EPS) * g.astype(F32)).astype(
            BF16
        )

    def xla_rms(x, g):
        f = x.astype(F32)
        return (f * jax.lax.rsqrt((f * f).mean(1, keepdims=True) + EPS) * g.astype(F32)).astype(
            BF16
        )

    def schedules(f, pairs):
        out = {"chosen": f}
        for w, c in pairs:
            schedule = rms.Schedule(warpgroups=w, num_ctas=c or 2**30)
            out[f"w{w} c{c or 'M'}"] = functools.partial(f, schedule=schedule)
        return out

    def add(p, x, g, schedule=None):
        return rms.add_rms_norm(p, x, None, g, eps=EPS, schedule=schedule)

    def alone(x, g, schedule=None):
        return rms.rms_norm(x, g, eps=EPS, schedule=schedule)

    def combine(s, x, g, schedule=None):
        return rms.combine_add_rms_norm(s, x, None, g, eps=EPS, schedule=schedule)

    g = wide((4096,), 1)
    large = [(1, 0), (2, 0), (4, 0), (1, 132 * 5), (2, 132 * 4), (4, 132 * 4)]
    for m in (8192, 1024, 64, 8, 1):
        x, p = wide((m, 4096), 2), wide((m, 4096), 3, F32)
        timed(
            f"add_rms_norm {m}x4096",
            m * 4096 * 10,
            schedules(add, large if m == 8192 else [(1, 0), (2, 0), (4, 0)]),
            xla_add,
            (p, x, g),
        )
        if m in (8192, 8):
            timed(
                f"rms_norm {m}x4096",
                m * 4096 * 4,
                schedules(alone, large if m == 8192 else [(1, 0), (4, 0)]),
                xla_rms,
                (x, g),
            )

    def xla_combine(s, x, g):
        t = [s[i] for i in range(8)]
        while len(t) > 1:
            t = [a + b for a, b in zip(t[0::2], t[1::2], strict=True)]
        return xla_add(t[0], x, g)

    for m in (256, 64, 8):
        x, s = wide((m, 4096), 2), wide((8, m, 4096), 3, F32)
        timed(
            f"combine_add_rms_norm {m}x4096 L=8",
            m * 4096 * 38,
            schedules(combine, [(2, 0), (4, 0)]),
            xla_combine,
            (s, x, g),
        )
    x = wide((8192 * 40, 128), 4)
    timed("rms_norm heads 327680x128", x.size * 4, {"chosen": alone}, xla_rms, (x, wide((128,), 5)))


def time_rope_and_swiglu():
    heads, kv, c = 32, 8, 128
    for m in (8192, 64, 8):
        qkv, cos, sin = (
            wide((m, heads + 2 * kv, c), 1),
            wide((m, c // 2), 2, F32),
            wide((m, c // 2), 3, F32),
        )
        pages = wide((1, 80, 2, kv, 128, c), 4)
        table = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32)[None], (m, 64))
        positions = jnp.arange(m, dtype=jnp.int32)[:, None]
        gain = wide((c,), 5)

        def fused(qkv, cos, sin, gain, table, positions, pages, has_norm=True):
            ref = jax.new_ref(pages)
            q = rope.qk_norm_rope_write(
                qkv,
                cos,
                sin,
                gain if has_norm else None,
                gain if has_norm else None,
                ref,
                table,
                positions,
                num_heads=heads,
                layer=0,
                eps=EPS,
            )
            return q, jax.freeze(ref)

        def xla(qkv, cos, sin, gain, table, positions, pages):
            def turn(x):
                f = x.astype(F32)
                f = (
                    (f * jax.lax.rsqrt((f * f).mean(-1, keepdims=True) + EPS) * gain.astype(F32))
                    .astype(BF16)
                    .astype(F32)
                )
                a, b = f[..., : c // 2], f[..., c // 2 :]
                cs, sn = cos[:, None], sin[:, None]
                return jnp.concatenate([a * cs - b * sn, b * cs + a * sn], -1).astype(BF16)

            q, k, v = turn(qkv[:, :heads]), turn(qkv[:, heads : heads + kv]), qkv[:, heads + kv :]
            at = positions[:, 0]
            kv_rows = jnp.stack([k, v], 1)
            return q, pages.at[0, table[jnp.arange(at.shape[0]), at // 128], :, :, at % 128].set(
                kv_rows
            )

        def kernels_only(f, donated):
            # The copy of the undonated cache is the same in both; it is left out of the sum.
            compiled = jax.jit(f)
            jax.block_until_ready(compiled(*donated))
            _, runs = profiler.measure(compiled, iterations=20, aggregate=False)(*donated)
            runs = [runs] if isinstance(runs[0], tuple) else runs
            total = [
                sum(t for n, t in r if "memcpy" not in n.lower() and "copy" not in n.lower())
                for r in runs
            ]
            return 1e3 * statistics.median(total), [n[:40] for n, _ in runs[0]]

        args = (qkv, cos, sin, gain, table, positions, pages)
        num_bytes = qkv.size * 4 + cos.size * 8
        row = {"time": f"qk_norm_rope_write {m}", "bytes": num_bytes}
        try:
            row["xla_us"], row["xla_names"] = kernels_only(xla, args)
            for name, f in (("norm", fused), ("no norm", lambda *a: fused(*a, has_norm=False))):
                us, names = kernels_only(f, args)
                row[name] = {
                    "us": us,
                    "names": names,
                    "share_of_copy": num_bytes / us * 1e-6 / COPY["tb_per_s"],
                }
        except Exception as error:
            traceback.print_exc(limit=-4)
            row["failed"] = str(error)[:300]
        TIMES.append(row)
        q = qkv[:, :heads]
        timed(
            f"rope {m}x32x128",
            q.size * 4 + cos.size * 8,
            {"chosen": rope.rope},
            None,
            (q, cos, sin),
        )
    for m in (8192, 64, 8):
        gu = wide((m, 28672), 6)

        def xla_swiglu(gu):
            g, u = gu[:, :14336].astype(F32), gu[:, 14336:].astype(F32)
            return (g / (1 + jnp.exp(-g)) * u).astype(BF16)

        timed(f"swiglu {m}x14336", m * 14336 * 6, {"chosen": swiglu.swiglu}, xla_swiglu, (gu,))


def time_vocabulary():
    v = 128256
    for m in (64, 1):
        x = 3 * jax.random.normal(jax.random.key(1), (m, v), F32)
        key = tuple(jax.random.bits(jax.random.key(i), (m,), jnp.uint32) for i in (2, 3))
        lse = jnp.zeros((m,), F32)

        def stats(x):
            return log_softmax.log_sum_exp(*log_softmax.block_stats(x, vocab_block=128))

        timed(
            f"log-sum-exp {m}x{v}",
            m * v * 4,
            {"stats+tree": stats, "stats": lambda x: log_softmax.block_stats(x, vocab_block=128)},
            lambda x: jax.nn.logsumexp(x, axis=1),
            (x,),
        )
        timed(
            f"log_probs {m}x21",
            m * 21 * 8,
            {"chosen": log_softmax.log_probs},
            None,
            (x[:, :21], lse),
        )
        for t0 in (0.0, 0.8):
            t = jnp.full((m,), t0, F32)

            def xla(x, t, a, b, t0=t0):
                ids = jnp.arange(v, dtype=jnp.int32)[None]
                scores = x / t[:, None] + noise.gumbel(
                    noise.token_bits((a[:, None], b[:, None]), ids)
                )
                return jnp.argmax(scores if t0 else x, axis=1)

            ours = {
                "argmax": lambda x, t, a, b: sampling.gumbel_argmax(x, t, (a, b), first_token_id=0),
                "stats+argmax": lambda x, t, a, b: sampling.stats_and_choice(
                    x, t, (a, b), first_token_id=0, vocab_block=128
                ),
                "scores": lambda x, t, a, b: sampling.gumbel_scores(x, t, (a, b), first_token_id=0),
            }
            timed(f"choose T={t0} {m}x{v}", m * v * 4, ours, xla, (x, t, *key))

        def xla_nucleus(x, t, k, p):
            w = jnp.exp((x - x[:, :1]) / t[:, None])
            counted = jnp.where(jnp.arange(v)[None] < k[:, None], w, 0)
            total = jnp.cumsum(counted, 1)
            return w, total - counted, p * total[:, -1]

        ranked = -jnp.sort(-x, axis=1)
        args = (
            ranked,
            jnp.full((m,), 0.8, F32),
            jnp.full((m,), v, jnp.int32),
            jnp.full((m,), 0.9, F32),
        )
        timed(
            f"nucleus_sums {m}x{v}",
            m * v * 12,
            {"chosen": sampling.nucleus_sums},
            xla_nucleus,
            args,
        )


def times():
    big = jax.random.normal(jax.random.key(0), (2**28,), BF16)
    found = {}
    for name, f, x in (
        ("negate bf16", lambda x: -x, big),
        ("negate int32", lambda x: ~x, big.view(jnp.int32)),
        ("negate int8", lambda x: ~x, big.view(jnp.int8)),
    ):
        us, _ = microseconds(f, x)
        found[name] = big.size * 4 / us * 1e-6
    COPY["tb_per_s"] = max(4.30, *found.values())
    TIMES.append({"time": "copy 1 GiB, read and write", "tb_per_s": found})
    print("copies, TB/s", found, flush=True)
    del big
    for section in (time_norms, time_rope_and_swiglu, time_vocabulary):
        try:
            section()
        except Exception:
            traceback.print_exc(limit=-4)


def table():
    print(f"copy {COPY.get('tb_per_s', 0):.2f} TB/s; us (share of copy); X = XLA's")
    for row in TIMES:
        cells = [
            f"{k} {v['us']:.1f} ({v['share_of_copy']:.2f})"
            for k, v in row.items()
            if isinstance(v, dict) and "us" in v
        ]
        x = row.get("xla_us")
        print(
            f"{row['time']}: X {x:.1f}; " if x else f"{row['time']}: ",
            "; ".join(cells),
            row.get("failed", ""),
        )


if __name__ == "__main__":
    sections = sys.argv[1:] or ["bits", "time"]
    print(jax.devices()[0].device_kind, jax.__version__, flush=True)
    start = time.time()
    try:
        if "bits" in sections:
            bits()
            print(f"bits took {time.time() - start:.0f} s", flush=True)
        if "time" in sections:
            times()
    finally:
        with open(f"{os.environ.get('OUT', '.')}/rows_probe.json", "w") as file:
            json.dump({"checks": CHECKS, "times": TIMES}, file)
        table()
        failed = [c["check"] for c in CHECKS if not c["ok"]]
        print(f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks hold; failed: {failed[:20]}")
        print([c for c in CHECKS if "CONTROL" in c["check"] or "float64" in c["check"]][:40])
