# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step with the canonical backward pass, beside XLA's own, and its bits.

python -m benchmarks.training --backend sm90 --out training.jsonl
python -m benchmarks.training --backend portable --cases tiny --steps 2

Each case is a list of random sequences for the bundled model, as one microbatch and as two halves.
The exit status is 3 if the two cuts give the canonical weights other bits.
"""

import argparse
import concurrent.futures
import hashlib
import statistics
import sys
import time
from dataclasses import dataclass

import jax
import numpy as np
import optax

from benchmarks.common import Rows, environment
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel, load_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.training.batch import Batch, Scored, pack
from detjax.training.gradients import Backward
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


class Arm:
    """A trainer, and one cut of a case."""

    def __init__(self, model: LoadedModel, case: str, backward: Backward, parts: int):
        """Nothing is compiled yet."""
        self.case, self.backward, self.parts = case, backward, parts
        self._batches = batches_of(CASES[case], model.config.vocab_size, parts)
        self._trainer = Trainer(
            model, optax.adam(1e-5), mesh=model.mesh, clip_norm=1.0, remat=False, backward=backward
        )
        self._state: TrainState | None = None
        self.digest, self.compile_s = "", 0.0

    def start(self) -> None:
        """The first step, which compiles; its weights and moments are hashed."""
        began = time.perf_counter()
        self._state, _ = self._trainer.step(self._trainer.init(), self._batches)
        self.compile_s = time.perf_counter() - began
        found = hashlib.sha256()
        for leaf in jax.tree.leaves(jax.device_get(self._state)):
            found.update(np.asarray(leaf).tobytes())
        self.digest = found.hexdigest()[:16]

    def step_s(self) -> float:
        """Seconds of one more step, to its last result on the host."""
        assert self._state is not None  # after `start`
        began = time.perf_counter()
        self._state, _ = self._trainer.step(self._state, self._batches)
        jax.block_until_ready(self._state)
        return time.perf_counter() - began


def measure(model: LoadedModel, cases: list[str], steps: int, rows: Rows) -> bool:
    """Time each case; whether both cuts have the same canonical bits."""
    arms = [
        Arm(model, case, backward, parts)
        for case in cases
        for backward in Backward
        for parts in (1, 2)
    ]
    with concurrent.futures.ThreadPoolExecutor(len(arms)) as pool:
        for waiting in [pool.submit(arm.start) for arm in arms]:
            waiting.result()
    base = {}
    for arm in sorted(arms, key=lambda arm: arm.backward is Backward.CANONICAL):
        median = statistics.median([arm.step_s() for _ in range(steps)])
        base.setdefault((arm.case, arm.parts), median)  # XLA's comes first
        rows.keep(
            subject="training", case=arm.case, backward=arm.backward.value, parts=arm.parts,
            step_s=median, over_xla=median / base[arm.case, arm.parts], digest=arm.digest,
            first_s=arm.compile_s,
        )  # fmt: skip
    cuts = {case: {arm.digest for arm in arms if _is_canonical(arm, case)} for case in cases}
    return all(len(digests) == 1 for digests in cuts.values())


def _is_canonical(arm: Arm, case: str) -> bool:
    return arm.case == case and arm.backward is Backward.CANONICAL


def main() -> None:
    """Measure, and write rows; exit 3 if a bit differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=["short", "long"])
    parser.add_argument("--steps", type=int, default=5, help="timed, after the first")
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args()
    backend = Backend(args.backend)
    model = load_model(
        str(bundled_model_path()),
        profile=NumericsProfile(),
        mesh=make_mesh(1, 1, platform=backend.platform),
        backend=backend,
    )
    rows = Rows(environment(backend) | {"model": "novels-6m", "backend": args.backend}, args.out)
    is_same = measure(model, args.cases, args.steps, rows)
    print(f"both cuts have the same canonical bits: {is_same}")
    sys.exit(0 if is_same else 3)


if __name__ == "__main__":
    main()
