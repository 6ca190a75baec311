# SPDX-License-Identifier: Apache-2.0
"""A decode or prefill step with low-rank adapters, beside the same step of the model alone.

python -m benchmarks.adapters --decode 1 8 64 --prefill 512 --kernels --out adapters.jsonl
python -m benchmarks.adapters --model tiny --backend portable --decode 2 --prefill 64

Rows have adapters in turn, in every slot. `none` is the program with adapters, of whose rows none
has one, which an engine would not run; its tokens and logprobs must be those of the model alone.
"""

import argparse
import concurrent.futures
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.common import Rows, environment
from benchmarks.step import MODELS, Case, Runner, decode_case, prefill_case, show_kernels
from detjax.engine.running.device_arrays import BY_ROW
from detjax.engine.running.program_key import ProgramKey
from detjax.models.adapters.program import ADAPTERS, SLOTS
from detjax.models.adapters.stack import AdapterSizes, num_adapter_slots, open_adapters
from detjax.pallas_kernels.backend import Backend


class AdaptedRunner(Runner):
    """The steps of a model with adapters of random values."""

    def __init__(self, runner: Runner, sizes: AdapterSizes, most_rows: int):
        """Share the weights and the cache of a runner.

        Args:
            runner: Of the model alone; its cache is used by one of the two at a time.
            sizes: Of the adapters.
            most_rows: Of any case.
        """
        self._most_rows = most_rows
        self.model = open_adapters(runner.model, sizes)
        self.num_pages, self._max_len = runner.num_pages, 0
        self._programs, self._compile_s, self._operands = {}, {}, {}
        drawn = jax.tree.map(_random, self.model.params[ADAPTERS]["layers"])
        self.model.params[ADAPTERS] = {"layers": drawn}

    def key_of(self, impl: str, case: Case) -> ProgramKey:
        """The program with adapters, also where no row has one."""
        return dataclasses.replace(super().key_of(impl, case), has_adapters=True)

    def give(self, *, has_adapters: bool) -> None:
        """Give every row an adapter, or none."""
        count = self._most_rows
        slots = np.arange(count) % num_adapter_slots(self.model) if has_adapters else -1
        placed = jax.device_put(
            np.broadcast_to(np.asarray(slots, np.int32), count).copy(),
            NamedSharding(self.model.mesh, BY_ROW),
        )
        lora = {**self.model.params[ADAPTERS], SLOTS: placed}
        self._params = {"full": {**self.model.params, ADAPTERS: lora}}


def _random(array: jax.Array) -> jax.Array:
    """Small values of a shape, on its devices."""

    def draw():
        values = jax.random.normal(jax.random.key(0), array.shape, jnp.float32) * 0.02
        return values.astype(array.dtype)

    return jax.jit(draw, out_shardings=array.sharding)()


def time_case(alone: Runner, adapted: AdaptedRunner, case: Case, rows: Rows) -> bool:
    """Time a case with adapters, with none and without room for any; whether bits agree."""
    want = alone.choices("invariant", case)
    base_ms = alone.wall_ms("invariant", case)
    rows.keep(subject="adapters", impl="model alone", case=case.name, ms_p50=base_ms)
    adapted.pages = alone.pages
    is_same = True
    for impl, has_adapters in (("none", False), ("all", True)):
        adapted.give(has_adapters=has_adapters)
        got = adapted.choices("invariant", case)
        if not has_adapters:
            is_same = all(a.tobytes() == b.tobytes() for a, b in zip(got, want, strict=True))
            rows.keep(subject="adapters_bits", case=case.name, same_as_model_alone=is_same)
        ms = adapted.wall_ms("invariant", case)
        rows.keep(
            subject="adapters", impl=impl, case=case.name, ms_p50=ms, over_model_alone=ms / base_ms
        )
    alone.pages = adapted.pages
    return is_same


def compile_ahead(alone: Runner, adapted: AdaptedRunner, cases: list[Case]) -> None:
    """Compile all programs side by side."""
    adapted.give(has_adapters=True)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [
            pool.submit(runner.compiled, "invariant", case)
            for case in cases
            for runner in (alone, adapted)
        ]
        for one in waiting:
            one.result()


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument("--max-loras", type=int, default=8)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--layers", type=int, default=0, help="of the model; all if 0")
    parser.add_argument("--kernels", action="store_true", help="list the time of each kernel")
    parser.add_argument("--out", help="write JSON rows here")
    return parser.parse_args()


def main() -> None:
    """Check, time, and write rows; exit 3 if a bit differed."""
    args = parse_args()
    backend = Backend(args.backend)
    sizes = AdapterSizes(max_loras=args.max_loras, max_lora_rank=args.max_lora_rank)
    card = environment(backend) | {
        "model": args.model, "backend": args.backend, "data": "random weights, cache and adapters",
        "max_loras": args.max_loras, "max_lora_rank": args.max_lora_rank,
    }  # fmt: skip
    rows = Rows(card, args.out)
    cases = [decode_case(b) for b in args.decode] + [prefill_case(n) for n in args.prefill]
    config = MODELS[args.model]
    if args.layers:
        config = config.with_layers([0] * args.layers)
    alone = Runner(config, cases, backend, 0)
    adapted = AdaptedRunner(alone, sizes, max(len(case.rows) for case in cases))
    compile_ahead(alone, adapted, cases)
    is_same = True
    for case in cases:
        is_same &= time_case(alone, adapted, case, rows)
        if args.kernels:
            adapted.pages = alone.pages
            show_kernels(adapted, "invariant", case)
            alone.pages = adapted.pages
    sys.exit(0 if is_same else 3)


if __name__ == "__main__":
    main()
