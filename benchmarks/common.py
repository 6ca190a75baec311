# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the environment card, rows of JSON, and device time from CUPTI.

Import this before anything that starts JAX: it sets the compiler flags that the claims rest on.
"""

import collections
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from detjax.numerics import Build, NumericsProfile, fingerprint
from detjax.pallas_kernels.backend import Backend

COPY_BYTES_PER_S = 4.3e12
"""Device-to-device copy on an H200, read and written bytes; the floors of decode refer to it."""

MATRIX_FLOP_PER_S = 790e12
"""bfloat16 products on an H200, as the share of prefill is counted."""


def output_of(*command: str) -> str:
    """First line that a command prints, or "unknown"."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip().partition("\n")[0] or "unknown"


def environment(backend: Backend) -> dict[str, str]:
    """The card that every row carries."""
    device = jax.devices(backend.platform)[0]
    return {
        "gpu": device.device_kind,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "commit": output_of("git", "describe", "--always", "--dirty=+"),
        "fingerprint": fingerprint(NumericsProfile(), Build.current(backend.value, device)),
        "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


class Rows:
    """Rows of results: printed as they come, and appended to a file, so none is lost."""

    def __init__(self, card: dict[str, str], out: str | None):
        """Print the card; append to `out` if there is one."""
        self.rows: list[dict] = []
        self._card, self._out = card, out
        print("  ".join(f"{name}={value}" for name, value in card.items()), flush=True)

    def keep(self, **row) -> None:
        """Add a row."""
        self.rows.append(row | self._card)
        print("  ".join(f"{name}={_short(value)}" for name, value in row.items()), flush=True)
        if self._out:
            with open(self._out, "a", encoding="utf-8") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_rivals(*arguments: str, timeout_s: float) -> tuple[list[dict], str | None]:
    """Run `benchmarks.rivals_torch`; its rows, and why there are not more, if so.

    Call before JAX has taken the GPU's memory.
    """
    command = [sys.executable, "-m", "benchmarks.rivals_torch", *arguments]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        out, why_not = run.stdout, None
        if run.returncode:
            last = run.stderr.strip().rpartition("\n")[2]
            why_not = f"exit status {run.returncode}: {last[-300:]}"
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        out = out.decode() if isinstance(out, bytes) else out
        why_not = f"stopped after {timeout_s:.0f} s"
    # The last line of a process that was stopped may be cut short.
    lines = [line for line in out.splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")], why_not


def kernel_events(run: Callable[[], None]) -> list[tuple[str, float]]:
    """(kernel, microseconds) of every kernel that `run` runs on the device, in order, from CUPTI.

    `run` must wait for the device.

    Raises:
        RuntimeError: If nothing ran there.
    """
    from jax.experimental.mosaic.gpu import profiler

    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        run()
    finally:
        events = cupti._cupti_get_timings(True)
    if not events:
        raise RuntimeError("CUPTI saw no kernel")
    return [(name, milliseconds * 1e3) for name, milliseconds in events]


def device_us(
    compiled: Callable, arguments: Sequence[tuple], *, repeats: int = 15, only: str = ""
) -> float:
    """Median device time of a call, of all kernels whose name contains `only`.

    Args:
        compiled: A jitted or compiled function.
        arguments: Operands of one call each, used in turn, so that they need not lie in the L2.
        repeats: Calls.
        only: Part of a kernel's name; all count if empty.
    """
    turn = itertools.cycle(arguments)
    for _ in arguments:
        jax.block_until_ready(compiled(*next(turn)))
    outs = []

    def run():
        outs.extend(compiled(*next(turn)) for _ in range(repeats))
        jax.block_until_ready(outs)

    events = kernel_events(run)
    kernels, rest = divmod(len(events), repeats)
    if rest:
        raise RuntimeError(f"{len(events)} kernels in {repeats} calls")
    calls = [events[i : i + kernels] for i in range(0, len(events), kernels)]
    return statistics.median(sum(us for name, us in call if only in name) for call in calls)


def by_kernel(events: list[tuple[str, float]], *, repeats: int) -> list[tuple[str, float, float]]:
    """(kernel, launches, microseconds) a call, longest first."""
    total = collections.defaultdict(lambda: [0, 0.0])
    for name, us in events:
        total[name][0] += 1
        total[name][1] += us
    rows = [(name, count / repeats, us / repeats) for name, (count, us) in total.items()]
    return sorted(rows, key=lambda row: -row[2])


def copy_bytes_per_s() -> float:
    """Bytes read and written a second by a bitwise NOT of 1 GiB of int32: the ruler for copies."""
    data = jnp.arange(2**28, dtype=jnp.int32)
    us = device_us(jax.jit(jnp.bitwise_not), [(data,)], repeats=5)
    return 2 * data.nbytes / us * 1e6


def random_bf16(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> jax.Array:
    """Normal bfloat16 values, drawn on the device."""

    @jax.jit
    def draw():
        return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(jnp.bfloat16)

    return draw()


@jax.jit
def num_different(a: jax.Array, b: jax.Array) -> jax.Array:
    """How many elements differ in any bit."""
    bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    return jnp.sum(lax.bitcast_convert_type(a, bits) != lax.bitcast_convert_type(b, bits))
