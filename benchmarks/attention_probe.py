# SPDX-License-Identifier: Apache-2.0
"""Bits and speed of the sm90 attention kernels: `python -m benchmarks.attention_probe SECTION...`.

Sections: bits_128, bits_64, bits_96, decode, prefill. Rows go to `$OUT/attention_SECTION.jsonl`.
"""

import collections
import contextlib
import fcntl
import functools
import json
import os
import signal
import statistics
import sys
import time
import traceback

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.attention import sm90, sm90_prefill
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear

PROFILE = NumericsProfile()
ROWS = []
SINK = []  # the file that rows go to
COPY_BANDWIDTH = 4.3e12
LAYOUTS = {"128": (32, 8, 128), "64": (14, 2, 64), "96": (12, 4, 96)}


def report(**row):
    """Keep a row of results and print it."""
    ROWS.append(row)
    for file in SINK:
        print(json.dumps(row), file=file, flush=True)
    print(
        "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
        flush=True,
    )


@contextlib.contextmanager
def gpu():
    """Have the GPU alone among processes that compile side by side; a hang ends the process."""
    with open(os.environ.get("GPU_LOCK", os.devnull), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.alarm(60)
        yield
        signal.alarm(0)


@contextlib.contextmanager
def attempt(**row):
    """Report a failure as a row and go on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc(limit=-3)
        report(**row, failed=str(error)[:200])


# Data.


def normal(shape, seed, scale=1.0):
    """Random bfloat16."""
    x = jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale
    return x.astype(jnp.bfloat16)


def cache(batch, num_pages, kv_heads, channels, *, layers=1, seed=0, spare=3):
    """A cache whose pages lie in random order, with spare pages of NaN."""
    total = batch * num_pages + spare
    order = np.random.default_rng(seed).permutation(total)
    shape = (total, 2, kv_heads, 128, channels)
    pages = jnp.stack([normal(shape, seed + 1 + i) for i in range(layers)])
    table = order[: batch * num_pages].reshape(batch, num_pages).astype(np.int32)
    return pages.at[:, order[batch * num_pages :]].set(jnp.nan), jnp.asarray(table)


def without_future(pages, table, length):
    """NaN in every key and value at and after `length` of the first sequence."""
    page, offset = divmod(length, 128)
    if offset:
        pages = pages.at[0, table[0, page], :, :, offset:].set(jnp.nan)
        page += 1
    return pages.at[0, table[0, page:]].set(jnp.nan) if page < table.shape[1] else pages


# Bits.


def decode(q, pages, table, positions, layer=0, *, window=None, **options):
    """Decode or verify: as the model would, or by a configuration of decode."""
    positions, layer = jnp.asarray(positions, jnp.int32), jnp.int32(layer)
    if not options:
        return sm90.attention(q, pages, table, positions, layer, window=window, profile=PROFILE)
    assert window is None, "decode has no window: prefill serves it"
    return sm90.decode(
        q, pages, table, positions, layer,
        config=sm90.DecodeConfig(**options), is_interpreted=False,
    )  # fmt: skip


def prefill(q, pages, table, positions, layer=0, *, window=None, **options):
    """Prefill."""
    return sm90_prefill.prefill(
        q, pages, table, jnp.asarray(positions, jnp.int32), jnp.int32(layer),
        window=window, config=sm90_prefill.PrefillConfig(**options), is_interpreted=False,
    )  # fmt: skip


def raw(x):
    """Bits of a bfloat16 array."""
    return np.asarray(x).view(np.uint16)


def same(name, actual, expected):
    """Report how many elements differ."""
    a, b = raw(actual), raw(expected)
    assert a.shape == b.shape, (name, a.shape, b.shape)
    bad = int((a != b).sum())
    nan = int(np.isnan(np.asarray(actual, np.float32)).sum())
    report(check=name, differ=bad, of=a.size, nan=nan, ok=bad == 0 and nan == 0)


def float64(q, pages, table, positions, window):
    """Attention of one sequence's rows in float64."""
    q = np.asarray(q.astype(jnp.float32), np.float64)
    last = int(np.max(positions)) // 128 + 1
    pages = np.asarray(pages[0, table[0, :last]].astype(jnp.float32), np.float64)
    keys, values = (np.concatenate(list(pages[:, i]), axis=1) for i in range(2))
    group = q.shape[2] // keys.shape[0]
    out = np.zeros(q.shape[1:])
    for t, position in enumerate(positions[0]):
        seen = slice(0 if window is None else max(position - window + 1, 0), position + 1)
        for h in range(q.shape[2]):
            scores = keys[h // group, seen] @ q[0, t, h] / np.sqrt(q.shape[3])
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ values[h // group, seen] / weights.sum()
    return out


def bits(layout, windows=(None, 700, 130), longest=3000):
    """Prefill, decode and verify of one prompt, in every batch and schedule, have the same bits."""
    heads, kv_heads, channels = LAYOUTS[layout]
    pages, table = cache(1, -(-longest // 128), kv_heads, channels)
    pages = without_future(pages, table, longest)
    q = normal((1, longest, heads, channels), 7, 2.0)
    positions = np.arange(longest)[None]
    for window in windows:
        with attempt(check=f"{layout} window {window}"):
            _bits(f"{heads}/{kv_heads}x{channels} w{window}", q, pages, table, positions, window)


def _bits(tag, q, pages, table, positions, window, launches=200):
    longest = q.shape[1]
    whole = prefill(q, pages, table, positions, window=window)
    some = np.array([0, 5, 127, 128, 130, 511, 512, 700, 1500])
    want = float64(q[:, some], pages, table, some[None], window)
    error = np.linalg.norm(np.asarray(whole[0, some], np.float64) - want) / np.linalg.norm(want)
    report(check=f"{tag} prefill error", error=float(error), ok=bool(error < 2.5e-3))
    lengths = np.array([1, 127, 128, 129, 511, 512, 513, 1500, longest])
    for length in (129, 513, longest):
        cut = without_future(pages, table, length)
        at = slice(length - 5, length)
        five = decode(q[:, at], cut, table, positions[:, at], window=window)
        same(f"{tag} verify == prefill at {length}", five, whole[:, at])
    # Nine lengths of one cache in one launch, then in another order, by splits and by sequences.
    by_both = [{}]
    if sm90.is_decode(1, 1, q.shape[3], window):
        by_both = [{"whole_sequences": x} for x in (False, True)]
    for order in (np.arange(9), np.array([3, 6, 0, 8, 7, 1, 5, 2, 4])):
        at = lengths[order] - 1
        operands = (q[0, at][:, None], pages, jnp.repeat(table, 9, 0), at[:, None])
        for options in by_both:
            got = decode(*operands, window=window, **options)
            same(f"{tag} decode batch {order[0]} {options}", got[:, 0], whole[0, at])
    at = np.stack([np.arange(x - 4, x) for x in (600, 2500, 128, 515)])
    rows = at.copy()
    rows[1, 2:] = -1
    rows[2] = -1
    want = jnp.where((rows >= 0)[:, :, None, None], whole[0, at], 0)
    for options in by_both:
        got = decode(q[0, at], pages, jnp.repeat(table, 4, 0), rows, window=window, **options)
        same(f"{tag} verify batch with padding {options}", got, want)
    parts, start = [], 0
    for size in (990, 30, 990, 990):
        stop = start + size
        cut = without_future(pages, table, stop)
        at = slice(start, stop)
        parts.append(prefill(q[:, at], cut, table, positions[:, at], window=window))
        start = stop
    same(f"{tag} chunks == whole", jnp.concatenate(parts, axis=1), whole)
    at = lengths - 1
    call = functools.partial(
        decode, q[0, at][:, None], pages, jnp.repeat(table, 9, 0), at[:, None], window=window
    )
    first = call()
    differ = sum((call() != first).any().astype(jnp.int32) for _ in range(launches))
    report(check=f"{tag} {launches} launches", differ=int(differ), ok=int(differ) == 0)


# Time.


def kernel_times(f, *args, repeats=3):
    """Microseconds of each kernel of a compiled function, from CUPTI: {name: (launches, us)}."""
    ext = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    ext._cupti_init()
    try:
        jax.block_until_ready([f(*args) for _ in range(repeats)])
    finally:
        timings = ext._cupti_get_timings(True)
    total = collections.defaultdict(lambda: [0, 0.0])
    for name, milliseconds in timings:
        total[name][0] += 1
        total[name][1] += milliseconds * 1e3
    return {name: (n / repeats, us / repeats) for name, (n, us) in total.items()}


SHAPES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 4096), (1, 32768))


def chain_data(batch, context, layout):
    """Queries, and for each of some layers keys, values and, if small, weights of o_proj."""
    heads, kv_heads, channels = LAYOUTS[layout]
    has_weights = batch * context <= 64 * 1024
    kv_bytes = 4 * batch * context * kv_heads * channels
    layers = 16 if has_weights else max(2, -(-200_000_000 // kv_bytes))
    pages, table = cache(batch, context // 128, kv_heads, channels, layers=layers)
    q = normal((batch, 1, heads, channels), 7)
    positions = jnp.full((batch, 1), context - 1, jnp.int32)
    width = heads * channels
    weights = [normal((width, width), 20 + i, width**-0.5) for i in range(layers * has_weights)]
    return q, pages, table, positions, weights


def attention_chain(q, pages, table, positions, weights, *, attend):
    """Attention of many layers, each with keys, values and weights of its own, in one program.

    So that nothing is in the L2 cache, as in a model; and the launch gaps count, since a CUDA graph
    runs it.
    """
    shape = q.shape
    for layer in range(pages.shape[0]):
        w = weights[layer] if weights else None
        q = attend(q, pages, table, positions, layer)
        if w is not None:
            q = linear(q.reshape(shape[0], -1), w, out_dtype=q.dtype, backend=Backend.SM90)
            q = q.reshape(shape)
    return q


def time_chain(compiled, args):
    """Microseconds a layer: attention's kernels, o_proj's, and all of it on the wall."""
    jax.block_until_ready([compiled(*args) for _ in range(3)])
    walls = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(10)])
        walls.append((time.perf_counter() - begin) / 10)
    kernels = kernel_times(compiled, *args)
    layers = args[1].shape[0]
    sums = (
        sum(us for name, (_, us) in kernels.items() if key in name) / layers
        for key in ("attention", "linear")
    )
    return *sums, statistics.median(walls) / layers * 1e6


def time_decode(variants, shapes=SHAPES, layout="128"):
    """Each variant `(q, pages, table, positions, layer)` at each shape."""
    _, kv_heads, channels = LAYOUTS[layout]
    programs = {}
    for batch, context in shapes:
        abstract = jax.eval_shape(functools.partial(chain_data, batch, context, layout))
        for name, attend in variants.items():
            with attempt(time=name, batch=batch, context=context, layout=layout):
                chain = jax.jit(functools.partial(attention_chain, attend=attend))
                programs[batch, context, name] = chain.lower(*abstract).compile()
    for batch, context in shapes:
        kv_bytes = 4 * batch * context * kv_heads * channels
        with gpu():
            args = jax.block_until_ready(chain_data(batch, context, layout))
            for name in variants:
                row = {"time": name, "batch": batch, "context": context, "layout": layout}
                if (batch, context, name) in programs:
                    us, o_us, wall_us = time_chain(programs[batch, context, name], args)
                    share = kv_bytes / us / 1e-6 / COPY_BANDWIDTH
                    report(**row, us=us, share=share, o_proj_us=o_us, layer_wall_us=wall_us)


def cudnn(q, k, v, pages, table, positions, *, window=None):
    """The rival: causal attention of a contiguous prompt."""
    size = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=size, implementation="cudnn"
    )


def paged(q, k, v, pages, table, positions, *, attend=prefill, **options):
    """One configuration of prefill, or another function of the same arguments."""
    return attend(q, pages, table, positions, **options)


def prefill_data(length, layout):
    """Contiguous queries, keys and values, and a cache of as many other keys and values."""
    heads, kv_heads, channels = LAYOUTS[layout]
    pages, table = cache(1, -(-length // 128), kv_heads, channels)
    shapes = ((1, length, n, channels) for n in (heads, kv_heads, kv_heads))
    q, k, v = (normal(shape, 7 + i) for i, shape in enumerate(shapes))
    return q, k, v, pages, table, jnp.arange(length, dtype=jnp.int32)[None]


def time_prefill(variants, lengths=(4000, 8192), window=None, layout="128"):
    """Each variant beside cuDNN: alone, and back to back, where power may limit the clock."""
    heads, _, channels = LAYOUTS[layout]
    calls = {"cudnn": cudnn, **variants}
    for length in lengths:
        abstract = jax.eval_shape(functools.partial(prefill_data, length, layout))
        programs = {}
        for name, call in calls.items():
            with attempt(time=f"prefill {name}", tokens=length, window=window, layout=layout):
                run = jax.jit(functools.partial(call, window=window))
                programs[name] = run.lower(*abstract).compile()
        span = length if window is None else min(window, length)
        flop = 4 * heads * channels * (span * (span + 1) / 2 + (length - span) * span)
        with gpu():
            args = jax.block_until_ready(prefill_data(length, layout))
            for name, program in programs.items():
                jax.block_until_ready([program(*args) for _ in range(3)])
                alone = []
                for _ in range(8):
                    time.sleep(0.02)
                    alone.append(_attention_us(kernel_times(program, *args, repeats=1)))
                jax.block_until_ready([program(*args) for _ in range(200)])
                us = statistics.median(alone)
                busy_us = _attention_us(kernel_times(program, *args, repeats=40))
                row = {"time": f"prefill {name}", "tokens": length, "window": window}
                report(**row, layout=layout, us=us, tflops=flop / us / 1e6, busy_us=busy_us)


def _attention_us(kernels):
    """What attention takes: our kernel, or all of a program that has none of ours."""
    ours = [us for name, (_, us) in kernels.items() if "attention" in name]
    return sum(ours or [us for _, us in kernels.values()])


SECTIONS = {
    "bits_128": lambda: bits("128"),
    "bits_64": lambda: bits("64"),
    "bits_96": lambda: bits("96"),
    "decode": lambda: time_decode({"default": decode}),
    "prefill": lambda: time_prefill(
        {"default": paged, "persistent": functools.partial(paged, num_ctas=132, query_buffers=2)}
    ),
}


def run(name, section):
    """Run a section and keep its rows."""
    print("=====", name, jax.devices()[0].device_kind, flush=True)
    with open(f"{os.environ.get('OUT', '.')}/attention_{name}.jsonl", "w") as file:
        SINK[:] = [file]
        section()
    checks = [row for row in ROWS if "ok" in row]
    print(f"{name}: {sum(row['ok'] for row in checks)} of {len(checks)} checks hold", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(name, SECTIONS[name])
