# SPDX-License-Identifier: Apache-2.0
"""What a decode step of a small model waits for: its kernels, its call, or its results.

python tools/ahead_probe.py novels_500m 1
python tools/ahead_probe.py novels_130m 11 --backend portable

The program of a step runs again and again. It is called by this thread or by a thread of its own,
and its results are read at once, or one to three steps late, or never. Then a trace tells the gaps
between the kernels of a step, and between steps, where the flag of XLA keeps the graphs:
XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true.
"""

import argparse
import collections
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import step
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import empty_pages
from detjax.models.loading import LoadedModel, random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.programs import operands_for, plain_key, programs_for

PAGES, CONTEXT = 4, 128
"""Of a sequence: pages, and tokens in them."""
NUM_STEPS, NUM_TRACED, REPEATS = 200, 60, 5


class Steps:
    """A decode program and the state that it writes in place."""

    def __init__(self, model: LoadedModel, num_rows: int):
        """Compile it."""
        self.model, self.num_rows = model, num_rows
        key = plain_key("decode", rows=num_rows, table_len=PAGES)
        num_pages = num_rows * PAGES
        programs = programs_for(model, num_pages=num_pages, num_slots=num_rows)
        self.program = programs.get(key, model.params)
        self.operands = operands_for(
            model, key,
            ids=np.full((num_rows, 1), 7, np.int32),
            start=np.full(num_rows, CONTEXT, np.int32),
            table=np.arange(num_pages, dtype=np.int32).reshape(num_rows, PAGES),
            sampling=[
                (SamplingParams(temperature=0.8, seed=r, noise="common"), 0)
                for r in range(num_rows)
            ],
        )  # fmt: skip
        self.state: tuple = ()
        self.calls_s: list[float] = []

    def begin(self) -> None:
        """Allocate the state anew."""
        slots, *self.given = jax.tree.map(jax.numpy.copy, self.operands)
        self.state = (empty_pages(self.model, self.num_rows * PAGES), slots)
        jax.block_until_ready((self.state, self.given))
        self.calls_s.clear()

    def call(self) -> jax.Array:
        """Call the program and start the copy of its result."""
        begin_s = time.perf_counter()
        model = self.model
        *state, result = self.program(model.params, model.rope_tables, *self.state, *self.given)
        self.calls_s.append(time.perf_counter() - begin_s)
        self.state = tuple(state)
        result.copy_to_host_async()
        return result

    def run(self, count: int, late: int | None, submit: Callable) -> float:
        """Seconds of a step whose results are read so many steps late; None: at the end."""
        self.begin()
        flight: collections.deque = collections.deque()
        begin_s = time.perf_counter()
        for _ in range(count):
            flight.append(submit(self.call))
            if late is not None and len(flight) > late:
                np.asarray(flight.popleft()())
        jax.block_until_ready([result() for result in flight])
        return (time.perf_counter() - begin_s) / count


def here(call: Callable) -> Callable:
    """Call at once."""
    result = call()
    return lambda: result


def gaps(run: Callable[[], object], console: Console) -> None:
    """Trace a run, and print the gaps between neighbouring kernels and copies of the device."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    folder = tempfile.mkdtemp()
    with jax.profiler.trace(folder, profiler_options=options):
        run()
    data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    events = sorted(
        (event.start_ns, event.start_ns + event.duration_ns, event.name[:32])
        for plane in data.planes if "GPU" in plane.name
        for line in plane.lines if "Stream" in line.name
        for event in line.events
    )  # fmt: skip
    if not events:
        console.print("no kernels in the trace: is this a CPU?")
        return
    late = events[len(events) // 2 :]  # without the begin
    found: dict[str, list[float]] = collections.defaultdict(list)
    end, last, busy = late[0][0], "", 0
    for begin, stop, name in late:
        if begin > end and last:
            found[f"{last} -> {name}"].append((begin - end) / 1e3)
        busy += max(0, stop - max(begin, end))
        if stop > end:
            end, last = stop, name
    total = end - late[0][0]
    console.print(f"{len(late)} kernels and copies, busy {busy / 1e3:.0f} of {total / 1e3:.0f} us")
    table = Table("gap", "times", "us, median", "us, all")
    for name, us in itertools.islice(sorted(found.items(), key=lambda x: -sum(x[1])), 8):
        table.add_row(name, str(len(us)), f"{statistics.median(us):.1f}", f"{sum(us):.0f}")
    console.print(table)


def main() -> None:
    """Time every way of reading, then trace two of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=step.MODELS, help="shapes; the weights are random")
    parser.add_argument("rows", type=int, help="sequences")
    parser.add_argument("--backend", choices=("sm90", "portable"), default="sm90")
    args = parser.parse_args()
    backend, config = Backend(args.backend), step.MODELS[args.model]
    if backend is not Backend.SM90:
        config = dataclasses.replace(config, num_layers=1, vocab_size=512)
    mesh = make_mesh(1, 1, platform=backend.platform)
    model = random_model(config, seed=0, profile=NumericsProfile(), mesh=mesh, backend=backend)
    steps, console = Steps(model, args.rows), Console()
    with ThreadPoolExecutor(1) as thread:

        def there(call: Callable) -> Callable:
            return thread.submit(call).result

        ways = [
            (f"{who}, results read {how}", late, submit)
            for who, submit in (("this thread", here), ("another thread", there))
            for how, late in (("at the end", None), *((f"{n} late", n) for n in range(4)))
        ]
        times: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        for _ in range(REPEATS):
            for name, late, submit in ways:
                step_s = steps.run(NUM_STEPS, late, submit)
                times[name].append((step_s, statistics.median(steps.calls_s)))
        table = Table("called by", "us a step", "us a call", title=f"{args.model}, {args.rows}")
        for name, both in times.items():
            step_s, call_s = map(statistics.median, zip(*both, strict=True))
            table.add_row(name, f"{1e6 * step_s:.0f}", f"{1e6 * call_s:.0f}")
        console.print(table)
        for late in (None, 1):
            gaps(lambda late=late: steps.run(NUM_TRACED, late, here), console)


if __name__ == "__main__":
    main()
