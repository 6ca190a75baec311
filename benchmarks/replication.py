# SPDX-License-Identifier: Apache-2.0
"""What it costs a step to be done by two processes alike: `python -m benchmarks.replication`.

Two processes of this machine, each with an engine whose programs return at once, and a pause
between steps where a device would work. Prints microseconds a step: the processor's time that
process 0 takes beside its engine's step, and how much later process 1 begins its own. No GPU is
needed.
"""

import argparse
import json
import multiprocessing
import platform
import socket
import statistics
import time

import numpy as np

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.replicated_engine import ReplicatedEngine, follow
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.programs import ProgramCache
from detjax.models.loading import random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.parallel.watch import Watch, connect
from detjax.testing.dummies import dummy_config

PROMPT_LEN, MAX_LEN, PAUSE_S = 512, 1024, 0.004


class Result:
    """What a program has computed: zeros."""

    def __init__(self, *shape: int):
        self.values = np.zeros(shape, np.int32)

    def copy_to_host_async(self) -> None:
        """It is there."""

    def __array__(self, dtype=None, copy=None):
        return self.values


class InstantPrograms(ProgramCache):
    """Programs that compute nothing."""

    def _compile(self, key, params, asked):
        def program(params, tables, kv_cache, slots, sampling, *host):
            state = (kv_cache, slots, sampling)[: 3 if key.kind == "prefill" else 2]
            return *state, Result(len(host[0]), 2)

        return program


class TimedEngine(Engine):
    """Notes of each step when it began and what time of a processor it took, in nanoseconds."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.times: list[tuple[int, int]] = []
        # As in a job, where rows that stay as they are are handed over by the host each time.
        self._runner._placed.place = lambda key, packed: packed

    def step(self):
        begin, cpu = time.monotonic_ns(), time.thread_time_ns()
        outputs = super().step()
        self.times.append((begin, time.thread_time_ns() - cpu))
        return outputs


def make_engine(batch: int) -> TimedEngine:
    sizes = dummy_config(num_layers=1, hidden_size=64, intermediate_size=128, vocab_size=512)
    model = random_model(
        sizes, seed=0, profile=NumericsProfile(), mesh=make_mesh(1, 1), backend=Backend.PORTABLE
    )
    config = EngineConfig(batch_size=batch, prefill_chunk=256, max_len=MAX_LEN)
    num_pages = batch * MAX_LEN // model.profile.attention_block
    programs = InstantPrograms(
        model, num_pages=num_pages, num_slots=batch, window_len=config.verify_window
    )
    return TimedEngine(model, config, programs=programs)


def join(process_id: int, port: int) -> Watch:
    return connect(
        process_id, 2, host="localhost", port=port, join_s=120.0, announcement="", say=print
    )[0]  # fmt: skip


def run_follower(port: int, batch: int, times) -> None:
    engine = make_engine(batch)
    watch = join(1, port)
    follow(engine, watch)
    times.put(engine.times)
    watch.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    rows = [measure(batch, args.steps) for batch in args.batches]
    print(json.dumps({"machine": platform.processor() or platform.machine(), "rows": rows}))


def measure(batch: int, num_steps: int) -> dict:
    """Decode `num_steps` tokens of `batch` sequences with listeners, and time each step."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    its_times = context.Queue()
    child = context.Process(target=run_follower, args=(port, batch, its_times))
    child.start()
    own = make_engine(batch)
    engine = ReplicatedEngine(own, join(0, port))
    for i in range(batch):
        prompt = [(7 * i + 3 * j) % 512 for j in range(PROMPT_LEN)]
        sampling = SamplingParams(max_tokens=num_steps, temperature=1.0, seed=i)
        engine.add_request(prompt, sampling, on_token=lambda event: False)
    whole = []
    while engine.has_work:
        begin, cpu = time.monotonic_ns(), time.thread_time_ns()
        engine.step()
        whole.append((begin, time.thread_time_ns() - cpu))
        time.sleep(PAUSE_S)
    engine.close()
    others = its_times.get(timeout=120)
    child.join()
    assert len(others) == len(whole) == len(own.times)
    late = slice(-num_steps // 2, None)  # all are decoded
    beside = [all_ - own for (_, all_), (_, own) in zip(whole[late], own.times[late], strict=True)]
    lag = [its - mine for (mine, _), (its, _) in zip(whole[late], others[late], strict=True)]
    row = {"batch": batch, "steps": len(beside)}
    for name, values in (("beside_us", beside), ("lag_us", lag)):
        ordered = sorted(value / 1e3 for value in values)
        row[f"{name}_p10"] = round(ordered[len(ordered) // 10], 1)
        row[f"{name}_p50"] = round(statistics.median(ordered), 1)
        row[f"{name}_p90"] = round(ordered[int(0.9 * len(ordered))], 1)
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
