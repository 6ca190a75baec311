# SPDX-License-Identifier: Apache-2.0
"""Bits and speed of the sm90 attention kernels: `benchmarks/attention_probe.py SECTION`."""

import json
import os
import statistics
import sys
import traceback

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from detjax.pallas_kernels.attention import sm90_decode, sm90_prefill

ROWS = []
COPY_BANDWIDTH = 4.3e12


def report(**row):
    """Keep a row of results and print it."""
    ROWS.append(row)
    print(
        "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
        flush=True,
    )


def raw(x):
    """Bits of a bfloat16 array."""
    return np.asarray(x).view(np.uint16)


def same(name, a, b):
    """Report how many elements differ."""
    a, b = raw(a), raw(b)
    assert a.shape == b.shape, (name, a.shape, b.shape)
    bad = int((a != b).sum())
    nan = int(np.isnan(np.asarray(a).view(jnp.bfloat16).astype(np.float32)).sum())
    report(check=name, differ=bad, of=a.size, nan=nan, ok=bad == 0 and nan == 0)


def normal(shape, seed, scale=1.0):
    """Random bfloat16."""
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(
        jnp.bfloat16
    )


def cache(batch, num_pages, kv_heads, channels, seed=0, spare=3):
    """A cache whose pages lie in random order, with spare pages of NaN."""
    total = batch * num_pages + spare
    order = np.random.default_rng(seed).permutation(total)
    pages = normal((1, total, 2, kv_heads, 128, channels), seed + 1)
    table = order[: batch * num_pages].reshape(batch, num_pages).astype(np.int32)
    pages = pages.at[:, order[batch * num_pages :]].set(jnp.nan)
    return pages, jnp.asarray(table)


def run_decode(q, pages, table, pos, **kw):
    """Decode or verify."""
    return sm90_decode.decode(
        q, pages, table, pos, layer=0, config=sm90_decode.DecodeConfig(**kw), is_interpreted=False
    )


def run_prefill(q, pages, table, pos, **kw):
    """Prefill."""
    return sm90_prefill.prefill(
        q, pages, table, pos, layer=0, config=sm90_prefill.PrefillConfig(**kw), is_interpreted=False
    )


def poison(pages, table, length):
    """NaN in every key and value at and after `length` of the first sequence."""
    page, offset = divmod(length, 128)
    if offset:
        pages = pages.at[0, table[0, page], :, :, offset:].set(jnp.nan)
        page += 1
    return pages.at[0, table[0, page:]].set(jnp.nan) if page < table.shape[1] else pages


def float64(q, pages, table, pos):
    """Attention of one sequence's rows in float64."""
    q, pages = (
        np.asarray(q.astype(jnp.float32), np.float64),
        np.asarray(pages[0].astype(jnp.float32), np.float64),
    )
    k = np.concatenate([pages[p, 0] for p in np.asarray(table[0])], axis=1)
    v = np.concatenate([pages[p, 1] for p in np.asarray(table[0])], axis=1)
    heads, channels = q.shape[2:]
    group = heads // k.shape[0]
    out = np.zeros(q.shape[1:])
    for t, p in enumerate(np.asarray(pos[0])):
        for h in range(heads):
            s = k[h // group, : p + 1] @ q[0, t, h] / np.sqrt(channels)
            w = np.exp(s - s.max())
            out[t, h] = w @ v[h // group, : p + 1] / w.sum()
    return out


def bits(heads=32, kv_heads=8, channels=128, longest=20000, variants=None):
    """The claims."""
    tag = f"h{heads}k{kv_heads}c{channels}"
    pages, table = cache(1, -(-longest // 128), kv_heads, channels)
    q = normal((1, longest, heads, channels), 7, 2.0)
    pos = jnp.arange(longest, dtype=jnp.int32)[None]
    pages = poison(pages, table, longest)
    whole = run_prefill(q, pages, table, pos)
    for name, kw in (variants or {}).items():
        same(f"{tag} prefill variant {name}", run_prefill(q, pages, table, pos, **kw), whole)
    some = jnp.asarray([0, 5, 127, 128, 130, 511, 512, 700, 1500])
    want = float64(q[:, some], pages[:, :, :, :, :, :], table[:, :12], pos[:, some])
    got = np.asarray(whole[0, some].astype(jnp.float32), np.float64)
    report(
        check=f"{tag} prefill error", error=float(np.linalg.norm(got - want) / np.linalg.norm(want))
    )
    for length in (1, 127, 128, 129, 511, 512, 513, 4096, longest):
        cut = poison(pages, table, length)
        at = slice(length - 1, length)
        one = run_decode(q[:, at], cut, table, pos[:, at])
        same(f"{tag} decode == prefill at {length}", one, whole[:, at])
        first = max(length - 5, 0)
        win = run_decode(q[:, first:length], cut, table, pos[:, first:length])
        same(f"{tag} verify == prefill at {length}", win, whole[:, first:length])
    parts, start = [], 0
    for size in (100, 33, 256, 1000, 17, 6000, longest):
        stop = min(start + size, longest)
        cut = poison(pages, table, stop)
        parts.append(run_prefill(q[:, start:stop], cut, table, pos[:, start:stop]))
        start = stop
    same(f"{tag} chunks == whole", jnp.concatenate(parts, axis=1), whole)
    # Batch: eight lengths of one cache in one launch, then in another order, with padding between.
    lengths = np.array([1, 4096, 129, 700, 512, 513, longest, 2000])
    for order in (np.arange(8), np.array([3, 6, 0, 7, 1, 5, 2, 4])):
        at = lengths[order] - 1
        got = run_decode(
            q[0, at][:, None], pages, jnp.repeat(table, 8, 0), jnp.asarray(at, jnp.int32)[:, None]
        )
        same(f"{tag} decode batch {order[0]}", got[:, 0], whole[0, at])
    at = np.stack([np.arange(x - 4, x) for x in (600, 5000, 128, 515)])
    p = at.astype(np.int32)
    p[1, 2:] = -1
    p[2, 0] = -1
    got = run_decode(q[0, at], pages, jnp.repeat(table, 4, 0), jnp.asarray(p))
    want = jnp.where((p >= 0)[:, :, None, None], whole[0, at], 0)
    same(f"{tag} verify batch with padding", got, want)
    at = np.stack([np.arange(x - 90, x) for x in (600, 5000, 128, 515)])
    p = at.astype(np.int32)
    p[1, 40:] = -1
    p[2, :] = -1
    got = run_prefill(q[0, at], pages, jnp.repeat(table, 4, 0), jnp.asarray(p))
    same(
        f"{tag} prefill batch with padding",
        got,
        jnp.where((p >= 0)[:, :, None, None], whole[0, at], 0),
    )
    other = run_prefill(q[:, :4096], pages, table, pos[:, :4096], blocks_per_split=8)
    report(
        check=f"{tag} control: splits of 1024",
        differ=int((raw(other) != raw(whole[:, :4096])).sum()),
        of=other.size,
    )


def milliseconds(f, *args, iterations=15):
    """Median device time of the whole and of the attention kernels alone."""
    f = jax.jit(f)
    jax.block_until_ready(f(*args))
    _, runs = profiler.measure(f, iterations=iterations, aggregate=False)(*args)
    runs = [runs] if runs and isinstance(runs[0], tuple) else runs
    total = statistics.median(sum(t for _, t in r) for r in runs)
    mine = statistics.median(sum(t for n, t in r if "attention" in n) for r in runs)
    parts = {}
    for name, _ in runs[0]:
        parts[name[:40]] = statistics.median(sum(t for n, t in r if n == name) for r in runs) * 1e3
    return total, mine, parts


PREFILL_VARIANTS = {
    "default": {},
    "persistent": {"num_ctas": 132, "query_buffers": 2},
    "CONTROL split 1024": {"blocks_per_split": 8},
    "CONTROL one split": {"blocks_per_split": 1024},
}


def time_prefill(lengths=(8192, 2048, 16384), heads=32, kv_heads=8, channels=128):
    """Prefill against cuDNN."""
    for length in lengths:
        pages, table = cache(1, length // 128, kv_heads, channels)
        q = normal((1, length, heads, channels), 7)
        k, v = (
            normal((1, length, kv_heads, channels), 8),
            normal((1, length, kv_heads, channels), 9),
        )
        pos = jnp.arange(length, dtype=jnp.int32)[None]
        flops = 4 * heads * channels * length * (length + 1) / 2

        def cudnn(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

        base = milliseconds(cudnn, q, k, v)[0]
        report(time="cudnn", tokens=length, channels=channels, ms=base, tflops=flops / base / 1e9)
        for name, kw in PREFILL_VARIANTS.items():
            if "CONTROL" in name and length != 8192:
                continue
            try:
                total, mine, _ = milliseconds(
                    lambda *a, kw=kw: run_prefill(*a, **kw), q, pages, table, pos
                )
                report(
                    time=name,
                    tokens=length,
                    channels=channels,
                    ms=mine,
                    tflops=flops / mine / 1e9,
                    over_cudnn=base / mine,
                    total_ms=total,
                )
            except Exception as error:
                traceback.print_exc(limit=-2)
                report(time=name, failed=str(error)[:200])
        again = milliseconds(cudnn, q, k, v)[0]
        report(time="cudnn again", tokens=length, ms=again, tflops=flops / again / 1e9)


def time_decode(heads=32, kv_heads=8, channels=128, variants=None):
    """Decode against the copy bandwidth."""
    for batch, length in ((64, 4096), (256, 1024), (1, 32768), (8, 1024)):
        pages, table = cache(batch, length // 128, kv_heads, channels)
        q = normal((batch, 1, heads, channels), 7)
        pos = jnp.full((batch, 1), length - 1, jnp.int32)
        size = 2 * batch * length * kv_heads * channels * 2
        for name, kw in (variants or {"default": {}}).items():
            try:
                total, mine, parts = milliseconds(
                    lambda *a, kw=kw: run_decode(*a, **kw), q, pages, table, pos
                )
                report(
                    time=f"decode {name}",
                    batch=batch,
                    tokens=length,
                    us=mine * 1e3,
                    share=size / mine / 1e-3 / COPY_BANDWIDTH,
                    total_us=total * 1e3,
                )
                if name == "default":
                    print(parts)
            except Exception as error:
                traceback.print_exc(limit=-2)
                report(time=name, failed=str(error)[:200])


SECTIONS = {
    "bits128": lambda: bits(
        variants={k: v for k, v in PREFILL_VARIANTS.items() if "CONTROL" not in k}
    ),
    "bits64": lambda: bits(8, 2, 64, 5000),
    "bits64odd": lambda: bits(14, 2, 64, 5000),
    "prefill": time_prefill,
    "decode": lambda: time_decode(
        variants={
            "default": {},
            "merge 4,2": {"merge_unroll": (4, 2)},
            "merge 4,1": {"merge_unroll": (4, 1)},
            "merge 2,1": {"merge_unroll": (2, 1)},
            "merge 32,2": {"merge_unroll": (32, 2)},
        }
    ),
}

if __name__ == "__main__":
    name = sys.argv[1]
    print("=====", name, jax.devices()[0].device_kind, flush=True)
    try:
        SECTIONS[name]()
    finally:
        out = os.environ.get("OUT", ".")
        with open(f"{out}/attention_{name}.json", "w") as file:
            json.dump(ROWS, file)
        checks = [r for r in ROWS if "ok" in r]
        print(f"{name}: {sum(r['ok'] for r in checks)} of {len(checks)} checks hold")
