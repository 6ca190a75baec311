# SPDX-License-Identifier: Apache-2.0
"""What sampling parameters cost a decode step: bits first, then time.

python -m benchmarks.sampling --decode 1 8 64 256 --out sampling.jsonl
python -m benchmarks.sampling --model tiny --backend portable --decode 1 3

`leaves nothing` is the step of a plain row as `benchmarks.step` measures it. `leaves logits` is the
engine's: it leaves the logits where a choice program reads them, whether one runs or not. The
others are followed by a choice program: adjustments alone, filters too, 64 top logprobs too. The
rows ask for a temperature alone, so all five choose the same tokens with the same logprobs, which
is checked before anything is timed. Wall time of 100 dependent steps, median of five runs, kinds in
turn.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.common import Rows, environment
from benchmarks.step import DECODE_STEPS, MODELS, Case, Runner, decode_case
from detjax.engine.running.device_arrays import BY_ROW, empty
from detjax.engine.running.program_key import CHOICES, ChoiceKey
from detjax.engine.sampling.adjustments import num_words
from detjax.pallas_kernels.backend import Backend
from detjax.testing.programs import launches, programs_for

KINDS = ("leaves nothing", "leaves logits", "adjustments", "filters", "64 top logprobs")


class Steps:
    """The kinds of step of one case."""

    def __init__(self, runner: Runner, case: Case, choice_rows: int):
        """Compile them. A choice program has `choice_rows`, at least as many as the case."""
        self._runner, self._case = runner, case
        model = runner.model
        self._programs = programs_for(model, num_pages=runner.num_pages, num_slots=len(case.rows))
        plain = runner.key_of("invariant", case)
        leaving = dataclasses.replace(plain, logit_rows=choice_rows)
        self._forward = {
            key.logit_rows: self._programs.get(key, model.params) for key in (plain, leaving)
        }
        self._choices = [
            self._programs.get(
                ChoiceKey(rows=choice_rows, length=1, with_filters=filters, num_top=num_top),
                model.params,
            )
            for filters, num_top in CHOICES
        ]
        self._logits = empty(model, self._programs.logits_shape(choice_rows))
        self._adjusted = empty(model, self._programs.adjusted_shape)
        rows = np.full((choice_rows, 2), len(case.rows), np.int32)
        rows[: len(case.rows), 0] = np.arange(len(case.rows))
        banned = np.zeros((choice_rows, num_words(model.config.vocab_size)), np.int32)
        self._given = jax.device_put((rows, banned), NamedSharding(model.mesh, BY_ROW))

    def run(self, kind: str, repeats: int) -> tuple[float, np.ndarray]:
        """Milliseconds a step, and the packed choices of the last one."""
        runner, params = self._runner, self._runner.model.params
        of_launches = launches(runner.operands("invariant", self._case), repeats)
        jax.block_until_ready((runner.pages, of_launches, self._adjusted))
        at = KINDS.index(kind)
        choose = self._choices[at - 2] if at > 1 else None
        begin_s = time.perf_counter()
        for slots, sampling, *host in of_launches:
            state = runner.model.rope_tables, runner.pages, slots, sampling
            if not at:
                runner.pages, slots, result = self._forward[0](params, *state, *host)
                continue
            leaving = self._forward[len(self._logits)]
            runner.pages, slots, self._logits, result = leaving(params, *state, self._logits, *host)
            if choose is not None:
                _, self._adjusted, result = choose(
                    slots, sampling, self._adjusted, self._logits, *self._given
                )
        jax.block_until_ready((runner.pages, result))
        return (time.perf_counter() - begin_s) / repeats * 1e3, np.asarray(result)


def chosen_bits(packed: np.ndarray, count: int) -> bytes:
    """Tokens and logprobs of the first rows."""
    return np.ascontiguousarray(packed[:count, :2]).tobytes()


def measure(steps: Steps, count: int, show: Callable[[str, float], None]) -> None:
    """Check the bits of all kinds, then time them in turn.

    Raises:
        AssertionError: If two kinds differ in a bit.
    """
    bits = {kind: chosen_bits(steps.run(kind, 1)[1], count) for kind in KINDS}
    differing = [kind for kind in KINDS if bits[kind] != bits[KINDS[0]]]
    assert not differing, f"other bits than a plain step: {differing}"
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(5):
        for kind in KINDS:
            times[kind].append(steps.run(kind, DECODE_STEPS)[0])
    for kind in KINDS:
        show(kind, statistics.median(times[kind]))


def main() -> int:
    """Measure the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--choice-rows", type=int, nargs="+", default=[1, 16, 64, 256],
        help="sizes of choice programs; the smallest that holds a batch runs",
    )  # fmt: skip
    parser.add_argument("--out", help="write the rows to this file")
    args = parser.parse_args()
    backend = Backend(args.backend)
    rows = Rows(environment(backend), args.out)
    cases = [decode_case(batch, args.context) for batch in args.decode]
    runner = Runner(MODELS[args.model], cases, backend, 0)
    for case in cases:
        count = len(case.rows)
        choice_rows = min(size for size in {*args.choice_rows, count} if size >= count)
        found: dict[str, float] = {}
        measure(Steps(runner, case, choice_rows), count, found.__setitem__)
        for kind, ms in found.items():
            rows.keep(
                subject="sampling", model=args.model, case=case.name, kind=kind,
                choice_rows=choice_rows, ms=ms, over_plain=ms / found[KINDS[0]],
                steps=DECODE_STEPS, bits="equal",
            )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
