# SPDX-License-Identifier: Apache-2.0
"""Schedules of decode attention on one Hopper GPU, most at few rows: bits first, then times.

    python -m benchmarks.attention_few_rows [--seconds 85] [--shapes NAME ...]

Each shape is a process of its own, so that they compile side by side; a lock lets one alone have
the GPU while it is timed. A variant's outputs and cache are compared with those of the present
schedule, at contexts around the edges of pages and splits, where all that is not written holds NaN.
Exit status 3 if a bit differs. Variants marked `!` leave a stage out, for the time alone: their
bits are wrong, and are not compared.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import kernel_events, num_different, random_bf16
from detjax.compilation.xla_flags import EXACT_OPTIONS
from detjax.pallas_kernels.attention import (
    sm90,
    sm90_decode_cluster,
)
from detjax.pallas_kernels.attention.sm90_decode_job import DecodeConfig
from detjax.pallas_kernels.attention.sm90_new_token import NewToken

CHANNELS = 128
EDGES = (1, 63, 64, 127, 128, 129, 500, 512, 513, 1024, 1025, 1152, 0)
LONG_EDGES = (4096, 4000, 1025, 2049, 513, 1, 3585, 0)
TIMED = (0, 128, 512, 1024)
BYTES = 130e6  # of all layers' keys and values: more than the L2 holds


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Heads, sequences, and pages a sequence; what is compared and timed."""

    heads: tuple[int, int]
    batch: int
    pages: int
    variants: tuple[str, ...]
    timed: tuple[int, ...] = TIMED

    @property
    def num_layers(self) -> int:
        """So many that nothing stays in the L2."""
        layer = self.batch * self.pages * 2 * self.heads[1] * 128 * CHANNELS * 2
        return int(np.clip(np.ceil(BYTES / layer), 2, 48))


FEW = ("spread 4", "spread 8")
WARPGROUPS = ("warpgroups 2",)
PARTS = ("!now merge", "!now q", "!spread 8 q")
SHAPES = {
    "qwen b1": Shape((32, 4), 1, 9, FEW),
    "qwen b1 parts": Shape((32, 4), 1, 9, PARTS),
    "llama b1": Shape((32, 8), 1, 9, FEW),
    "qwen b8": Shape((32, 4), 8, 9, ("cluster 1", "cluster 2", "cluster 4", "spread 4")),
    "qwen b1 4096": Shape((32, 4), 1, 32, FEW, (2048, 4096)),
    "qwen b2": Shape((32, 4), 2, 9, FEW, (1024,)),
    "llama b8": Shape((32, 8), 8, 9, ("cluster 1",), (512, 1024)),
    "llama b2": Shape((32, 8), 2, 9, FEW, (1024,)),
    "qwen b16": Shape((32, 4), 16, 9, ("cluster 1",), (1024,)),
    "llama b1 4096": Shape((32, 8), 1, 32, FEW, (4096,)),
    "llama b64": Shape((32, 8), 64, 9, WARPGROUPS, (576, 1024)),
    "llama b256": Shape((32, 8), 256, 9, WARPGROUPS, (576, 1024)),
    "llama b1 32768": Shape((32, 8), 1, 256, WARPGROUPS, (8192, 32768)),
    "llama b8 16384": Shape((32, 8), 8, 128, WARPGROUPS, (8192, 16384)),
    "llama b64 8192": Shape((32, 8), 64, 64, WARPGROUPS, (4200, 8192)),
    "llama b64 4096": Shape((32, 8), 64, 32, WARPGROUPS, (2048, 4096)),
    "qwen b64": Shape((32, 4), 64, 9, WARPGROUPS, (576, 1024)),
    "qwen b8 4096": Shape((32, 4), 8, 32, ("cluster 2", "spread 4"), (4096,)),
}


def config_of(shape: Shape, variant: str) -> DecodeConfig:
    """A variant's schedule; "now" is the present one."""
    heads, kv_heads = shape.heads
    with mock.patch.object(sm90, "DECODE_WARPGROUPS", 1):
        now = sm90.decode_config(
            batch=shape.batch, query_len=1, kv_heads=kv_heads, group=heads // kv_heads,
            channels=CHANNELS, table_len=shape.pages, per_split=4,
        )  # fmt: skip
    kind, _, rest = variant.lstrip("!").partition(" ")
    number = [int(word) for word in rest.split() if word.isdigit()]
    if kind == "spread":
        return dataclasses.replace(now, spread=True, cluster=number[0], scores_ahead=False)
    if kind == "warpgroups":
        return dataclasses.replace(now, num_compute=number[0], scores_ahead=False)
    return dataclasses.replace(now, cluster=number[0]) if number else now


@contextlib.contextmanager
def omitted(variant: str):
    """Leave a stage out of what is lowered within, if the variant is marked `!`: the last word."""
    stage = variant.rpartition(" ")[2] if variant.startswith("!") else None
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        if stage == "q":
            stack.enter_context(mock.patch.object(NewToken, "prepare", lambda *_: None))
        if stage == "merge":
            merge = "merge_splits"
            stack.enter_context(mock.patch.object(sm90_decode_cluster, merge, lambda *_: None))
        yield
    jax.clear_caches()


def run_layers(qkv, cos, sin, gains, pages, table, positions, *, config: DecodeConfig):
    """Attention of a new token in every layer."""
    outs = []
    for layer in range(pages.shape[0]):
        out, pages = sm90.decode_new_token(
            qkv, cos, sin, gains, pages, table, positions, jnp.int32(layer),
            eps=1e-6, config=config, is_interpreted=False,
        )  # fmt: skip
        outs.append(out)
    return jnp.stack(outs), pages


@jax.jit
def hide_unwritten(pages, written):
    """NaN at and after the new token's place, by page."""
    keys = jnp.arange(128)[None, None, None, None, :, None]
    return jnp.where(keys < written[None, :, None, None, None, None], pages, jnp.nan)


class Probe:
    """One shape: its data and its programs."""

    def __init__(self, name: str):
        """Lower all variants, and compile them."""
        self.name, self.shape = name, SHAPES[name]
        shape = self.shape
        (heads, kv_heads), batch = shape.heads, shape.batch
        self.num_pages = batch * shape.pages + 1
        self.page_shape = (shape.num_layers, self.num_pages, 2, kv_heads, 128, CHANNELS)
        rng = np.random.default_rng(0)
        order = rng.permutation(self.num_pages)[:-1].reshape(batch, shape.pages)
        self.table = order.astype(np.int32)
        angles = rng.standard_normal((batch, CHANNELS // 2))
        abstract = (
            jax.ShapeDtypeStruct((batch, heads + 2 * kv_heads, CHANNELS), jnp.bfloat16),
            *(jax.ShapeDtypeStruct(angles.shape, jnp.float32),) * 2,
            (jax.ShapeDtypeStruct((CHANNELS,), jnp.bfloat16),) * 2,
            jax.ShapeDtypeStruct(self.page_shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(self.table.shape, jnp.int32),
            jax.ShapeDtypeStruct((batch, 1), jnp.int32),
        )
        self.angles, self.qkv_shape = angles, abstract[0].shape
        self.programs, self.rows = {}, []
        for variant in ("now", *shape.variants):
            try:
                with omitted(variant):
                    run = functools.partial(run_layers, config=config_of(shape, variant))
                    lowered = jax.jit(run, donate_argnums=4).lower(*abstract)
                    self.programs[variant] = lowered.compile(EXACT_OPTIONS)
            except Exception as error:
                traceback.print_exc(limit=-3)
                self.keep(variant=variant, kind="failed", what=str(error)[:150])

    def keep(self, **row) -> None:
        """Print a row for the parent."""
        print("ROW " + json.dumps({"shape": self.name} | row), flush=True)

    def draw(self) -> None:
        """Put data on the device."""
        gains = tuple(1 + random_bf16((CHANNELS,), seed, 0.1) for seed in (1, 2))
        cos, sin = (jnp.asarray(f(self.angles), jnp.float32) for f in (np.cos, np.sin))
        self.new = random_bf16(self.qkv_shape, 3, 2.0), cos, sin, gains
        self.pages = random_bf16(self.page_shape, 4)
        self.device_table = jnp.asarray(self.table)

    def run(self, variant: str, pages, contexts):
        """Outputs and cache."""
        positions = jnp.asarray(contexts, jnp.int32)[:, None] - 1
        return self.programs[variant](*self.new, pages, self.device_table, positions)

    def pages_at(self, contexts):
        """A cache, NaN where nothing is written before the new token."""
        written = np.zeros(self.num_pages, np.int32)
        for context, sequence in zip(contexts, self.table, strict=True):
            for block, page in enumerate(sequence):
                written[page] = np.clip(context - 1 - 128 * block, 0, 128)
        return hide_unwritten(self.pages, jnp.asarray(written))

    def check(self) -> None:
        """Compare every variant's bits with the present schedule's."""
        shape = self.shape
        edges = [c for c in (EDGES if shape.pages == 9 else LONG_EDGES) if c <= 128 * shape.pages]
        if shape.batch == 1:
            cases = [(c,) for c in edges]
        else:
            cycle = itertools.islice(itertools.cycle(edges), 2 * len(edges) + shape.batch)
            cycle = list(cycle)
            cases = [cycle[i : i + shape.batch] for i in range(0, 2 * len(edges), shape.batch)][:4]
        differ = dict.fromkeys((v for v in self.programs if not v.startswith("!")), 0)
        where = {variant: [] for variant in differ}
        for contexts in cases:
            want = self.run("now", self.pages_at(contexts), contexts)
            nan = int(jnp.isnan(want[0]).sum())
            for variant in differ:
                found = self.run(variant, self.pages_at(contexts), contexts)
                count = sum(int(num_different(a, b)) for a, b in zip(found, want, strict=True))
                differ[variant] += count + nan
                if count + nan:
                    where[variant].append(tuple(contexts))
        for variant, count in differ.items():
            self.keep(
                variant=variant, kind="bits", differ=count, cases=len(cases),
                where=str(where[variant][:3]),
            )  # fmt: skip

    def time(self) -> None:
        """Device and wall time a layer of every variant, in turns."""
        layers, pages = self.shape.num_layers, self.pages
        for context in self.shape.timed:
            contexts = (context,) * self.shape.batch
            walls = {variant: [] for variant in self.programs}
            device = {}
            for turn in range(4):
                for variant in self.programs:
                    out, pages = self.run(variant, pages, contexts)
                    jax.block_until_ready(pages)
                    begin = time.perf_counter()
                    for _ in range(8):
                        out, pages = self.run(variant, pages, contexts)
                    jax.block_until_ready(pages)
                    if turn:
                        walls[variant].append((time.perf_counter() - begin) / 8 / layers * 1e6)
            for variant in self.programs:
                kept = [pages]

                def run(variant=variant, kept=kept, contexts=contexts):
                    for _ in range(3):
                        kept.append(self.run(variant, kept.pop(), contexts)[1])
                    jax.block_until_ready(kept)

                events = kernel_events(run)
                ours = [us for name, us in events if "attention" in name]
                a_layer = round(len(ours) / (3 * layers))
                device[variant] = statistics.median(
                    sum(ours[i : i + a_layer]) for i in range(0, len(ours), a_layer)
                )
                [pages] = kept
            for variant in self.programs:
                self.keep(
                    variant=variant, kind="time", context=context, us=device[variant],
                    wall_us=statistics.median(walls[variant]),
                )  # fmt: skip


def run_shape(name: str, lock: str) -> None:
    """A shape's process."""
    probe = Probe(name)
    with open(lock, "w") as file:
        # Bits side by side; times alone. A kernel that hangs ends its process, not the others.
        fcntl.flock(file, fcntl.LOCK_SH)
        signal.alarm(40)
        probe.draw()
        probe.check()
        signal.alarm(0)
        fcntl.flock(file, fcntl.LOCK_EX)
        signal.alarm(25)
        probe.time()


def main() -> None:
    """Start the processes, wait, and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=85.0, help="stop what runs after that")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--out", default="attention_few_rows.jsonl")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    lock = f"{options.out}.lock"
    if options.one:
        run_shape(options.one, lock)
        return
    start = time.time()
    logs = {name: Path(f"{options.out}.{name.replace(' ', '_')}.log") for name in options.shapes}
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    children = {}
    for name in options.shapes:
        command = [sys.executable, "-m", "benchmarks.attention_few_rows", "--one", name]
        with logs[name].open("w") as log:
            children[name] = subprocess.Popen(
                [*command, "--out", options.out], stdout=log, stderr=log, env=environment
            )
    for name, child in children.items():
        try:
            child.wait(max(0.1, options.seconds - (time.time() - start)))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            print(f"{name}: stopped for lack of time")
    rows, stopped = [], 0
    for name, log in logs.items():
        lines = log.read_text().splitlines()
        rows += [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]
        if children[name].returncode:
            stopped += 1
            print(f"{name}: exit {children[name].returncode}\n" + "\n".join(lines[-12:]))
    Path(options.out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    failed = summarise(rows) + stopped
    print(f"{failed} variants or shapes failed, {time.time() - start:.0f} s")
    sys.exit(3 if failed else 0)


def summarise(rows: list[dict]) -> int:
    """Print bits, then times; how many variants differ or do not compile."""
    failed = 0
    for row in rows:
        if row["kind"] == "failed":
            failed += 1
            print(f"{row['shape']:14}{row['variant']:14} DOES NOT COMPILE {row['what']}")
        if row["kind"] == "bits" and row["differ"]:
            failed += 1
            print(
                f"{row['shape']:14}{row['variant']:14} BITS DIFFER {row['differ']} {row['where']}"
            )
    checked = [row for row in rows if row["kind"] == "bits"]
    equal = sum(not row["differ"] for row in checked)
    print(f"bits: {equal} of {len(checked)} variants equal; us a layer: kernel / with gaps")
    timed = [row for row in rows if row["kind"] == "time"]
    for shape, of_shape in itertools.groupby(timed, key=lambda row: row["shape"]):
        of_shape = list(of_shape)
        contexts = list(dict.fromkeys(row["context"] for row in of_shape))
        print(f"{shape:16}" + "".join(f"{context:>15}" for context in contexts))
        for variant in dict.fromkeys(row["variant"] for row in of_shape):
            cells = [row for row in of_shape if row["variant"] == variant]
            print(
                f"  {variant:14}"
                + "".join(f"{row['us']:8.2f}/{row['wall_us']:6.2f}" for row in cells)
            )
    return failed


if __name__ == "__main__":
    main()
