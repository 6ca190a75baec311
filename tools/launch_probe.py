# SPDX-License-Identifier: Apache-2.0
"""What XLA's flags for launches do to a chain of empty kernels and to whole decode steps.

python tools/launch_probe.py                      # all settings, each a process of its own
python tools/launch_probe.py --only base pdl      # some of them

Every process computes the same steps; the digest of tokens and logprobs is compared with that of
the setting "base". Processes compile side by side and take turns on the device. Needs a Hopper GPU.
"""

import argparse
import fcntl
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path

from processes import run_settings

SETTINGS = {
    "base": "",
    "pdl": "--xla_gpu_enable_pdl=true",
    "pdl_launch": "--xla_gpu_enable_pdl_launch=true",
    "both": "--xla_gpu_enable_pdl=true --xla_gpu_enable_pdl_launch=true",
    "concurrent": "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT",
    "unroll": "--xla_gpu_command_buffer_unroll_loops=true --xla_gpu_enable_command_buffer=+WHILE",
}
"""XLA's flags by the name of a setting."""

NUM_EMPTY = 300
NUM_LAYERS = 8
"""Of Llama-3.1-8B's 32, so that six processes fit on one GPU and compile in time."""
LOOP_STEPS = 8


def _median_us(run, wait, calls: int) -> float:
    """Microseconds of a call, median of seven runs of `calls` dependent ones."""
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        wait([run() for _ in range(calls)][-1])
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(times[1:])


def measure(name: str, lock: Path, batches: list[int]) -> None:
    """Compile everything, take a turn on the device, print one line of JSON."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from benchmarks import step
    from detjax.pallas_kernels.backend import Backend
    from detjax.testing.programs import launches, plain_key, programs_for

    def empty_kernel(*, dependent: bool):
        def body(x_ref, o_ref):
            if dependent:
                plgpu.griddepcontrol_launch_dependents()
                plgpu.griddepcontrol_wait()
            o_ref[...] = x_ref[...] + 1.0

        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
            kernel_name=f"empty_{dependent}",
        )

        def chain(x):
            for _ in range(NUM_EMPTY):
                x = kernel(x)
            return x

        return jax.jit(chain)

    x = jnp.zeros(128, jnp.float32)
    chains = {
        "empty": empty_kernel(dependent=False).lower(x).compile(),
        "empty griddep": empty_kernel(dependent=True).lower(x).compile(),
    }
    config = step.dataclasses.replace(step.MODELS["llama3_8b"], num_layers=NUM_LAYERS)
    cases = [step.decode_case(b) for b in batches]
    runner = step.Runner(config, cases, Backend.SM90, 0)
    runner.compile_ahead(cases)

    loop_case = cases[0]
    key = plain_key("decode", rows=1, length=LOOP_STEPS, table_len=9)
    loop_programs = programs_for(runner.model, num_pages=runner.num_pages, num_slots=1)
    loop = loop_programs.get(key, runner.model.params)
    slots, sampling, packed = runner.operands("invariant", loop_case)
    # The last column of what a decode step is given: tokens of this launch.
    packed = jax.device_put(packed.at[:, -1].set(LOOP_STEPS), packed.sharding)

    found, bits = {"setting": name, "ready_s": time.perf_counter() - START}, hashlib.sha256()
    with lock.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for label, chain in chains.items():
            out = chain(x)
            found[f"{label}, us a launch"] = (
                _median_us(lambda run=chain: run(x), jax.block_until_ready, 20) / NUM_EMPTY
            )
            found[f"{label} right"] = bool((out == NUM_EMPTY).all())
        for case in cases:
            for _ in range(3):
                ids, logprobs = runner.choices("invariant", case)
                bits.update(ids.tobytes() + logprobs.tobytes())
            found[f"batch {len(case.rows)}, us"] = runner.wall_ms("invariant", case) * 1e3

        def run_loop():
            ((of_slots, *host),) = launches((slots, sampling, packed), 1)
            runner.pages, *_, result = loop(
                runner.model.params, runner.model.rope_tables, runner.pages, of_slots, *host
            )
            return result

        result = run_loop()
        bits.update(jax.device_get(result).tobytes())
        found[f"batch 1 x {LOOP_STEPS} in a launch, us a token"] = (
            _median_us(run_loop, jax.block_until_ready, 5) / LOOP_STEPS
        )
        fcntl.flock(turn, fcntl.LOCK_UN)
    found["digest"] = bits.hexdigest()[:16]
    print(json.dumps(found), flush=True)


def main() -> None:
    """Start a process a setting, and show a table."""
    parser = argparse.ArgumentParser(description="XLA flags for launches, timed")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=140.0, help="all are stopped then")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.lock, args.batch)
        return
    rows = run_settings(
        __file__,
        {name: SETTINGS[name] for name in args.only},
        arguments=["--batch", *map(str, args.batch)],
        environ={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        seconds=args.seconds,
    )
    base = rows.get("base", {}).get("digest")
    labels = list(dict.fromkeys(label for row in rows.values() for label in row))
    for label in (x for x in labels if x != "setting"):
        cells = [row.get(label, "") for row in rows.values()]
        cells = [f"{c:12.2f}" if isinstance(c, float) else f"{str(c)[:12]:>12}" for c in cells]
        print(f"{label:36}" + "".join(cells))
    print(f"{'setting':36}" + "".join(f"{name[:12]:>12}" for name in rows))
    same = all(row["digest"] == base for row in rows.values())
    print(f"all digests equal: {same}")
    sys.exit(0 if same and len(rows) == len(args.only) else 3)


START = time.perf_counter()

if __name__ == "__main__":
    main()
