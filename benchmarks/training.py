# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step with the canonical backward pass, beside XLA's own, and its bits.

python -m benchmarks.training --backend sm90 --out training.jsonl
python -m benchmarks.training --backend portable --cases tiny --steps 2
python -m benchmarks.training --shapes novels_130m --cases long --remat
python -m benchmarks.training --shapes llama3_8b --layers 8 --lora-rank 16 --cases long --remat

Each case is a list of random sequences for the bundled model, or for random weights of `--shapes`.
All weights are trained, or an adapter of `--lora-rank`. The list is one microbatch by either
backward pass, and two halves by the canonical one. Each of them compiles in a process of its own,
side by side; then one after the other makes a step more, and is timed. On a GPU rows also have the
time of a step's kernels alone (`device_ms`, from CUPTI) and their number: the wall (`step_s`) has
the host's time too. The exit status is 3 if the two cuts give the canonical weights other bits, and
4 if a process had no answer within the patience.
"""

import argparse
import hashlib
import json
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
import optax

from benchmarks.common import Rows, environment, kernel_events
from benchmarks.step import MODELS as SHAPES
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel, load_model, random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.training.batch import Batch, Scored, pack
from detjax.training.gradients import Backward
from detjax.training.lora import LoraConfig
from detjax.training.trainer import Trainer, TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A step's sequences: their number, and the least and most rows of one."""

    sequences: int
    least: int
    most: int


CASES = {
    "short": Workload(sequences=512, least=30, most=63),  # of GRPO, as its sums
    "long": Workload(sequences=8, least=512, most=512),
    "tiny": Workload(sequences=4, least=3, most=9),
}


def batches_of(case: Workload, vocab_size: int, parts: int) -> list[Batch]:
    """The sequences in so many microbatches."""
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(case.sequences):
        count = int(rng.integers(case.least, case.most + 1)) + 1
        ids, weights = rng.integers(2, vocab_size, count), rng.standard_normal(count)
        sequences.append(
            Scored(token_ids=tuple(map(int, ids)), weights=(0.0, *map(float, weights[1:])))
        )
    size = case.sequences // parts
    return [pack(sequences[i : i + size], length=case.most) for i in range(0, len(sequences), size)]


ARMS = ((Backward.XLA, 1), (Backward.CANONICAL, 1), (Backward.CANONICAL, 2))
"""Backward passes, and into how many microbatches the sequences are cut."""


def run_arm(args: argparse.Namespace) -> None:
    """Compile and make a first step, whose state is hashed; on a line of input time more.

    The one before those that are timed finds the device as they do, after the wait.
    """
    backend, case = Backend(args.backend), args.cases[0]
    model = model_of(args, backend)
    batches = batches_of(CASES[case], model.config.vocab_size, args.parts)
    trainer = Trainer(
        model, optax.adam(1e-5), mesh=model.mesh, clip_norm=1.0, remat=args.remat,
        backward=Backward(args.backward), lora=lora_of(args),
    )  # fmt: skip
    state, first_s = timed_step(trainer, trainer.init(), batches)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(state)):
        digest.update(np.asarray(leaf).tobytes())
    found = {"case": case, "backward": args.backward, "parts": args.parts, "first_s": first_s}
    found["digest"] = digest.hexdigest()[:16]
    print(json.dumps({"card": environment(backend)} | found), flush=True)
    sys.stdin.readline()
    state, warm_s = timed_step(trainer, state, batches)
    seconds = []
    for _ in range(args.steps):
        state, step_s = timed_step(trainer, state, batches)
        seconds.append(step_s)
    timed = {"warm_s": warm_s, "step_s": statistics.median(seconds), "least_s": min(seconds)}
    if backend.platform != "cpu":
        timed |= device_time(trainer, state, batches, steps=args.steps)
    print(json.dumps(timed), flush=True)


def device_time(
    trainer: Trainer, state: TrainState, batches: list[Batch], *, steps: int
) -> dict[str, float]:
    """Milliseconds of a step's kernels, and how many there are, without what lies between them."""

    def run() -> None:
        own = state
        for _ in range(steps):
            own, _ = timed_step(trainer, own, batches)

    events = kernel_events(run)
    return {"device_ms": sum(us for _, us in events) / steps / 1e3, "kernels": len(events) / steps}


def model_of(args: argparse.Namespace, backend: Backend) -> LoadedModel:
    """The bundled model, or random weights of these shapes."""
    where = {"mesh": make_mesh(1, 1, platform=backend.platform), "backend": backend}
    profile = NumericsProfile()
    if not args.shapes:
        return load_model(str(bundled_model_path()), profile=profile, **where)
    config = SHAPES[args.shapes]
    config = config.with_layers(range(args.layers or config.num_layers))
    return random_model(config, seed=0, profile=profile, **where)


def lora_of(args: argparse.Namespace) -> LoraConfig | None:
    """The adapter that is trained, if one is."""
    return LoraConfig(rank=args.lora_rank, alpha=16.0) if args.lora_rank else None


def timed_step(
    trainer: Trainer, state: TrainState, batches: list[Batch]
) -> tuple[TrainState, float]:
    """A step, and its seconds to the last result."""
    began = time.perf_counter()
    state, _ = trainer.step(state, batches)
    jax.block_until_ready(state)
    return state, time.perf_counter() - began


def start(args: argparse.Namespace, case: str, backward: Backward, parts: int) -> subprocess.Popen:
    """A process of one arm."""
    command = [
        sys.executable, "-m", "benchmarks.training", "--backend", args.backend, "--cases", case,
        "--steps", str(args.steps), "--backward", backward.value, "--parts", str(parts),
        "--layers", str(args.layers), "--lora-rank", str(args.lora_rank),
        *(["--shapes", args.shapes] if args.shapes else []), *["--remat"] * args.remat,
    ]  # fmt: skip
    shared = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=shared, text=True
    )


def ready_of(arms: Sequence[subprocess.Popen], patience_s: float) -> list[dict | None]:
    """What each arm says of its first step, None if nothing in time; it waits after that."""
    found: dict[subprocess.Popen, dict] = {}
    deadline = time.monotonic() + patience_s
    with selectors.DefaultSelector() as waiting:
        for arm in arms:
            assert arm.stdout is not None  # a pipe
            waiting.register(arm.stdout, selectors.EVENT_READ, arm)
        while waiting.get_map() and time.monotonic() < deadline:
            for key, _ in waiting.select(max(deadline - time.monotonic(), 0)):
                waiting.unregister(key.fileobj)
                if line := key.data.stdout.readline():
                    found[key.data] = json.loads(line)
                    print(f"ready: {line.strip()}", file=sys.stderr, flush=True)
    return [found.get(arm) for arm in arms]


def over_xla(timed: dict[str, float], of_xla: dict[str, float]) -> dict[str, float]:
    """How many times as long as XLA's arm an arm takes: its steps, and on a GPU its kernels."""
    names = {"over_xla": "step_s", "device_over_xla": "device_ms"}
    return {ratio: timed[name] / of_xla[name] for ratio, name in names.items() if name in of_xla}


def measure(args: argparse.Namespace) -> int:
    """Run all arms and write their rows; the exit status."""
    kinds = [(case, *arm) for case in args.cases for arm in ARMS]
    arms = [start(args, *kind) for kind in kinds]
    rows, base, digests = None, {}, {}
    ready = ready_of(arms, args.patience)
    for arm, first in zip(arms, ready, strict=True):
        if first is None:
            arm.kill()
            continue
        card = first.pop("card") | {
            "model": args.shapes or "novels-6m", "layers": args.layers or "all",
            "lora_rank": args.lora_rank, "remat": args.remat, "backend": args.backend,
        }  # fmt: skip
        rows = rows or Rows(card, args.out)
        timed = json.loads(arm.communicate("go\n")[0])
        base.setdefault(first["case"], timed if first["backward"] == "xla" else {})
        rows.keep(subject="training", **first, **timed, **over_xla(timed, base[first["case"]]))
        if first["backward"] == Backward.CANONICAL.value:
            digests.setdefault(first["case"], set()).add(first["digest"])
    is_same = all(len(found) == 1 for found in digests.values())
    print(f"both cuts have the same canonical bits: {is_same}")
    if missing := [kind for kind, first in zip(kinds, ready, strict=True) if first is None]:
        print(f"no answer within {args.patience} s: {missing}")
        return 4
    return 0 if is_same else 3


def main() -> None:
    """Measure, and write rows; exit 3 if a bit differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=["short", "long"])
    parser.add_argument("--shapes", choices=SHAPES, help="random weights, not the bundled model")
    parser.add_argument("--layers", type=int, default=0, help="with --shapes: fewer; all if 0")
    parser.add_argument("--lora-rank", type=int, default=0, help="train an adapter; 0 for weights")
    parser.add_argument(
        "--remat", action="store_true", help="keep one activation a layer, compute the rest again"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed, after the first")
    parser.add_argument("--patience", type=float, default=600, help="seconds until all are ready")
    parser.add_argument("--out", help="write JSON rows here")
    parser.add_argument("--backward", help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backward:
        run_arm(args)
        return
    sys.exit(measure(args))


if __name__ == "__main__":
    main()
