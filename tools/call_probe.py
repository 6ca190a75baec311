# SPDX-License-Identifier: Apache-2.0
"""What the host does in the call of a compiled decode step of a small model, and what shortens it.

python tools/call_probe.py                        # all settings, each a process of its own
python tools/call_probe.py --only plain kept      # some of them

Eleven requests run in the serving engine, as in `benchmarks.reproduce throughput`, and each call of
a decode step is timed. Settings differ in which operands a step writes in place, so that fewer
arrays change their address from call to call, and in XLA's flags. `drivers` lists what of CUDA a
call calls. Processes compile side by side and take turns on the device. Needs a GPU of Hopper, but
`--backend portable` tries the settings on a CPU.
"""

import argparse
import collections
import dataclasses
import fcntl
import hashlib
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from processes import run_settings

PROFILED = "--xla_enable_command_buffers_during_profiling=true"
SETTINGS = {
    "plain": "",
    "plain_1": "",
    "inline": "",
    "inline_1": "",
    "kept": "",
    "sent": "",
    "ring": "",
    "pinned": "",
    "skip_temp": "--xla_gpu_command_buffer_update_mode=SKIP_TEMP",
    "skip_profiled": "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED",
    "no_graph": "--xla_gpu_enable_command_buffer=",
    "drivers": PROFILED,
    "drivers_pinned": PROFILED,
}
"""XLA's flags by the name of a setting.

`_1`: one step ahead of the results that are read, not two. `inline`: the engine calls programs
itself. `kept`: steps write the cache alone in place, no slots. `sent`: the host sends the
rows of every step. `ring`: steps write their results into those of three steps ago, which the host
has read. `pinned`: results lie in the host's memory.
"""

PHASES = ("plan_s", "launch_s", "wait_s", "commit_s", "dispatch_s")
REQUESTS, PROMPT_LEN, REPEATS = 11, 512, 3
MIXTURES = (("fast", 0), ("invariant", 11), ("dvr", 1))
"""Mode, and deterministic requests."""


class Inline:
    """Calls what it is given at once, in place of the dispatch thread."""

    def submit(self, call, *operands) -> Future:
        """Call it; what it raises is raised here."""
        future: Future = Future()
        future.set_result(call(*operands))
        return future


@dataclasses.dataclass
class Calls:
    """Calls of one program: when each began and ended, and where its results lie."""

    name: str
    begins_s: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    addresses: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    wants_addresses: bool = False


def patch(setting: str, calls: dict[str, Calls]) -> None:
    """Make engines of this process run as a setting says, and note their calls."""
    import jax

    from detjax.compilation.donation import compile_checked
    from detjax.compilation.xla_flags import EXACT_OPTIONS, FAST_OPTIONS
    from detjax.engine import engine
    from detjax.engine.running import device_state, placed_rows, programs

    has_ring, is_pinned = setting == "ring", setting.endswith("pinned")

    def compile_timed(self, key, params, asked):
        function, operands = self.function(key), self.operands(key, params)
        options = FAST_OPTIONS if key.mode == "fast" else EXACT_OPTIONS
        donated = (2,) if setting == "kept" else programs.in_place(key)
        devices = list(self._model.mesh.devices.flat)
        is_ring = has_ring and key.kind == "decode"
        if is_ring:
            result = jax.eval_shape(function, *operands)[-1]
            sharding = operands[5].sharding
            old = jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding)

            def step(old, *operands):
                return function(*operands)

            jitted = jax.jit(step, donate_argnums=(0, *(i + 1 for i in donated)), keep_unused=True)
            compiled = compile_checked(jitted.lower(old, *operands), options, devices)
            results = collections.deque(
                jax.device_put(jax.numpy.zeros(old.shape, old.dtype), sharding) for _ in range(3)
            )
        else:
            shardings = None
            if is_pinned:
                state = tuple(operands[i] for i in donated)
                on_host = operands[5].sharding.with_memory_kind("pinned_host")
                shardings = (*jax.tree.map(lambda x: x.sharding, state), on_host)
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=shardings)
            lowered, results = jitted.lower(*operands), None
            compiled = compile_checked(lowered, options, devices)
        of_key = calls.setdefault(key.name, Calls(key.name))

        def call(*operands):
            if results is not None:
                operands = (results.popleft(), *operands)
            begin_s = time.perf_counter()
            out = compiled(*operands)
            of_key.seconds.append(time.perf_counter() - begin_s)
            of_key.begins_s.append(begin_s)
            if results is not None:
                results.append(out[-1])
            if of_key.wants_addresses:
                # What asks for an address waits, and on a CPU holds what its kernels wait for.
                small = jax.block_until_ready(jax.tree.leaves(out[1:]))
                of_key.addresses.append(tuple(x.unsafe_buffer_pointer() for x in small))
            return out

        return call

    programs.ProgramCache._compile = compile_timed
    engine.quickest_steps_ahead = lambda *_, **__: 1 if setting.endswith("_1") else 2
    if setting.startswith("inline"):
        device_state.ThreadPoolExecutor = lambda **_: Inline()
    if setting == "sent":
        placed_rows.PlacedRows.place = lambda self, step: step.packed


def measure(setting: str, backend_name: str, lock: Path) -> None:
    """Compile everything, take a turn on the device, print one line of JSON."""
    from benchmarks import step
    from benchmarks.reproduce.experiment import RANDOM
    from benchmarks.reproduce.loads import TRAINED_LOAD, Server
    from benchmarks.serving import Ask
    from detjax.models.loading import random_model
    from detjax.numerics import NumericsProfile
    from detjax.pallas_kernels.backend import Backend
    from detjax.parallel.mesh import make_mesh

    calls: dict[str, Calls] = {}
    patch(setting, calls)
    backend = Backend(backend_name)
    is_gpu = backend is Backend.SM90
    config = step.MODELS["novels_130m"]
    if not is_gpu:
        config = dataclasses.replace(
            config, vocab_size=512, hidden_size=128, num_layers=1, num_heads=2, num_kv_heads=1,
            head_dim=64, intermediate_size=256,
        )  # fmt: skip
    model = random_model(
        config, seed=0, profile=NumericsProfile(),
        mesh=make_mesh(1, 1, platform=backend.platform), backend=backend,
    )  # fmt: skip
    lab: Any = None
    sizes = TRAINED_LOAD if is_gpu else dataclasses.replace(TRAINED_LOAD, num_slots=12, few=11)
    server = Server(
        model, name="novels_130m", weights=RANDOM, setting="", sizes=sizes, lab=lab
    )  # fmt: skip
    engines = {
        mode: server.engine(mode, max_prefill_streak=64, other_groups=(1,)) for mode, _ in MIXTURES
    }
    prompt_len, output_len = (PROMPT_LEN, 256) if is_gpu else (64, 24)
    found: dict[str, Any] = {"setting": setting, "ready_s": time.perf_counter() - START}
    bits = hashlib.sha256()
    with lock.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for mode, num_exact in MIXTURES:
            asks = [
                Ask(at_s=0.0, prompt_len=prompt_len, output_len=output_len,
                    is_deterministic=i < num_exact)
                for i in range(REQUESTS)
            ]  # fmt: skip
            engine, runs, told = engines[mode], [], []
            for repeat in range(REPEATS + 1):
                for one in calls.values():
                    for values in (one.begins_s, one.seconds, one.addresses):
                        values.clear()
                    one.wants_addresses = repeat == REPEATS
                told, counts = server.counted(engine, asks)
                rate = sum(t.num_tokens for t in told) / max(t.releases_s[-1] for t in told)
                decodes = [c for c in calls.values() if c.name.startswith("decode") and c.seconds]
                most = max(decodes, key=lambda c: len(c.seconds))
                us = sorted(1e6 * s for s in most.seconds)
                runs.append({
                    "rate": rate, "us": statistics.median(us), "p10": us[len(us) // 10],
                    "p90": us[len(us) * 9 // 10], "calls": len(us),
                    "step_us": 1e6 * statistics.median(
                        b - a for a, b in zip(most.begins_s, most.begins_s[1:], strict=False)
                    ),
                    "addresses": [len(set(x)) for x in zip(*most.addresses, strict=True)],
                    "sent": counts["decode_transfers"],
                    **{name: 1e6 * counts[name] / counts["num_launches"]
                       for name in PHASES},
                })  # fmt: skip
            for one in told:
                if one.ask.is_deterministic:
                    bits.update(one.digest.encode())
            looked = runs.pop()
            found[mode] = sorted(runs, key=lambda run: run["rate"])[len(runs) // 2]
            found[mode]["addresses"] = looked["addresses"]
            found[mode]["rates"] = [round(run["rate"]) for run in runs]
            if setting.startswith("drivers"):
                found[mode]["drivers"] = _driver_calls(
                    lambda engine=engine, asks=asks: server.counted(engine, asks), calls
                )
        fcntl.flock(turn, fcntl.LOCK_UN)
    found["digest"] = bits.hexdigest()[:16]
    print(json.dumps(found), flush=True)


def _driver_calls(run, calls: dict[str, Calls]) -> list[tuple[str, float, float]]:
    """(name, times a call of a program, microseconds a call) of what the host was seen to do."""
    import jax

    folder = tempfile.mkdtemp()
    for one in calls.values():
        one.seconds.clear()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 3
    with jax.profiler.trace(folder, profiler_options=options):
        run()
    path = next(Path(folder).rglob("*.xplane.pb"))
    data = jax.profiler.ProfileData.from_file(str(path))
    total: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for plane in data.planes:
        if "CPU" not in plane.name and "CUPTI" not in plane.name:
            continue
        for line in plane.lines:
            for event in line.events:
                entry = total[event.name.partition("#")[0][:48]]
                entry[0] += 1
                entry[1] += event.duration_ns / 1e3
    count = max(1, sum(len(one.seconds) for one in calls.values()))
    rows = sorted(total.items(), key=lambda item: -item[1][1])[:40]
    return [(name, round(n / count, 2), round(us / count, 1)) for name, (n, us) in rows]


def main() -> None:
    """Start a process a setting, and show a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--backend", choices=("sm90", "portable"), default="sm90")
    parser.add_argument("--seconds", type=float, default=170.0, help="all are stopped then")
    parser.add_argument("--memory", default="0.07", help="share of the GPU of each process")
    parser.add_argument("--out", type=Path, help="a file for what every setting found, as JSON")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.backend, args.lock)
        return
    rows = run_settings(
        __file__,
        {name: SETTINGS[name] for name in args.only},
        arguments=["--backend", args.backend],
        environ={"XLA_PYTHON_CLIENT_MEM_FRACTION": args.memory},
        seconds=args.seconds,
    )
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    for name, row in rows.items():
        for mode, _ in MIXTURES:
            for what, times, us in row[mode].get("drivers", [])[:24]:
                print(f"{name:14} {mode:10} {what:48} {times:8.2f} a call {us:8.1f} us")
    print("setting        mode        us a call (p10, p90)   us a step   tokens/s, every run   "
          "plan launch wait commit dispatch   addresses  rows sent  digest")  # fmt: skip
    for name, row in rows.items():
        for mode, _ in MIXTURES:
            run = row[mode]
            host = "".join(f"{run[x]:6.0f}" for x in PHASES)
            print(
                f"{name:14} {mode:10} {run['us']:6.0f} ({run['p10']:5.0f}, {run['p90']:5.0f})"
                f"     {run['step_us']:8.0f}  {str(run['rates']):24}{host}   {run['addresses']}"
                f"  {run['sent']:4}  {row['digest']}"
            )
    same = len({row["digest"] for row in rows.values()}) == 1
    print(f"all digests equal: {same}")
    sys.exit(0 if same and len(rows) == len(args.only) else 3)


START = time.perf_counter()

if __name__ == "__main__":
    main()
