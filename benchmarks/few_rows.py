# SPDX-License-Identifier: Apache-2.0
"""Which launches and tiles a few rows of Qwen3-30B-A3B save on one Hopper GPU: bits, then times.

    python -m benchmarks.few_rows [--seconds 150] [--out few_rows.jsonl]

Each setting turns constants of the kernels: free choices, that change no bit. First a chain of
layers without their attention (o to the next q, k and v) under every setting, compared with what
the kernels with none of them give; exit status 3 if a bit differs. Then their times at one row, in
one CUDA graph; the kernels of a step; steps at batch 1 of the whole model, and at 2 and 4 of a few
layers.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import Rows, environment, kernel_events, num_different, random_bf16
from benchmarks.step import MODELS, Case, Runner, decode_case, decode_floor_ms
from detjax.compilation.donation import compile_checked
from detjax.compilation.xla_flags import EXACT_OPTIONS
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.attention import sm90 as attention_sm90
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear import sm90 as linear_sm90
from detjax.pallas_kernels.linear import tiles as linear_tiles
from detjax.pallas_kernels.moe import sm90 as moe_sm90
from detjax.pallas_kernels.moe import sm90_tiles
from detjax.testing.programs import programs_for
from detjax.testing.shapes import MOE_SHAPES

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
EPS = 1e-6
SHAPE = MOE_SHAPES[0]
MODEL = "qwen3_30b_a3b"

WHERE = {
    "NARROW_ROWS": linear_tiles,
    "MAX_ADDED_ROWS": linear_sm90,
    "MAX_LATE_ROWS": sm90_tiles,
    "SPREAD_SPLITS": attention_sm90,
    "PREFETCHED": attention_sm90,
}
"""The constants, and where they stand."""

NONE = {
    "NARROW_ROWS": 0, "MAX_ADDED_ROWS": 0, "MAX_LATE_ROWS": 0, "SPREAD_SPLITS": False,
    "PREFETCHED": 0,
}  # fmt: skip
"""Eight launches a layer."""

ALL = NONE | {"NARROW_ROWS": 8, "MAX_ADDED_ROWS": 8, "MAX_LATE_ROWS": 8}
"""Six launches a layer."""

SETTINGS = {
    "none": NONE,
    "router adds subtrees": NONE | {"NARROW_ROWS": 8, "MAX_ADDED_ROWS": 8},
    "qkv adds experts": NONE | {"MAX_LATE_ROWS": 8},
    "all": ALL,
}
SPREAD = {"SPREAD_SPLITS": True}
STEP_SETTINGS = SETTINGS | {
    "all, spread": ALL | SPREAD,
    "all, spread, prefetch": ALL | SPREAD | {"PREFETCHED": attention_sm90.PREFETCHED},
}
SPREADS = "all, spread", "all, spread, prefetch"
BIT_ROWS = {"all": (3, 8)}
"""Other rows at which a setting's layer is compared."""

MOST = 8
"""Rows of the kernels that others are compared with."""


def turn(setting: str) -> None:
    """Set the constants, and forget what was traced with others."""
    for name, value in STEP_SETTINGS[setting].items():
        setattr(WHERE[name], name, value)
    jax.clear_caches()


# ----------------------------------------------------------------------------------------- layers


def layer(heads, residual, weights: dict) -> dict[str, jax.Array]:
    """A layer from o to the next q, k and v."""
    reduction = tree_reduction(heads.shape[1], NumericsProfile())
    leaf_sums = linear_sm90.linear_leaf_sums(heads, weights["o"], reduction=reduction)
    logits, total, x = linear_sm90.combine_norm_linear(
        leaf_sums, residual, weights["gain"], weights["router"], eps=EPS, out_dtype=F32
    )
    y, shares = moe_sm90.route_mlp(
        x, logits, weights["gate_up"], weights["down"], weights["qkv"],
        top_k=SHAPE.top_k, renormalise=SHAPE.renormalise,
    )  # fmt: skip
    qkv, after = moe_sm90.combine_experts_norm_linear(
        y, shares, total, weights["gain"], weights["qkv"], None, eps=EPS, out_dtype=BF16
    )
    return {
        "sum": total, "rows": x, "logits": logits, "shares": shares, "experts": y, "qkv": qkv,
        "sum after": after,
    }  # fmt: skip


@jax.jit
def chain(heads, residual, layers: list[dict]) -> list[dict[str, jax.Array]]:
    """What each of some layers gives; queries go on as heads."""
    found = []
    for weights in layers:
        found.append(layer(heads, residual, weights))
        heads, residual = found[-1]["qkv"][:, : heads.shape[1]], found[-1]["sum after"]
    return found


def draw_layers(num_layers: int) -> list[dict]:
    """Random weights of so many layers: other experts in each, more than the L2 holds."""
    num, width, hidden = SHAPE.num_experts, SHAPE.width, SHAPE.hidden_size
    shapes = {
        "o": ((hidden, 4096), 0.02),
        "router": ((num, hidden), 0.04),
        "gate_up": ((num, 2 * width, hidden), 0.04),
        "down": ((num, hidden, width), 0.06),
        "qkv": ((5120, hidden), 0.02),
        "gain": ((hidden,), 1.0),
    }
    drawn = {
        name: jnp.unstack(random_bf16((num_layers, *shape), seed, scale))
        for seed, (name, (shape, scale)) in enumerate(shapes.items())
    }
    return [{name: arrays[i] for name, arrays in drawn.items()} for i in range(num_layers)]


class Chains:
    """A chain of layers under every setting, its bits and its times."""

    def __init__(self, num_layers: int, rows: Rows):
        """Draw weights, and compile everything side by side."""
        self._layers, self._rows, self.failed = draw_layers(num_layers), rows, 0
        scale = jnp.exp(random_bf16((MOST, 4096), 20).astype(F32))
        heads = (random_bf16((MOST, 4096), 21) * scale).astype(BF16)
        # The stream nearly cancels the first product, so that what is left shows its order.
        product = jnp.dot(heads, self._layers[0]["o"].T, preferred_element_type=F32)
        self._operands = heads, (-product).astype(BF16)
        wanted = [("none", 1), ("none", MOST)]
        wanted += [(setting, m) for setting in SETTINGS for m in (1, *BIT_ROWS.get(setting, ()))]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            self._compiled = {
                (setting, m): pool.submit(self._lower(setting, m).compile, EXACT_OPTIONS)
                for setting, m in dict.fromkeys(wanted)
            }

    def _arguments(self, m: int) -> tuple:
        # Rows that are not timed go through one layer.
        layers = self._layers if m == 1 else self._layers[:1]
        return *(x[:m] for x in self._operands), layers

    def _lower(self, setting: str, m: int) -> jax.stages.Lowered:
        turn(setting)
        return chain.lower(*self._arguments(m))

    def _run(self, setting: str, m: int) -> list[dict[str, jax.Array]]:
        return self._compiled[setting, m].result()(*self._arguments(m))

    def check(self) -> list[str]:
        """Compare all results of each layer under every setting with those under none."""
        of_one, [of_most] = self._run("none", 1), self._run("none", MOST)
        lines = []

        def compare(case: str, m: int, found: list, want: list, *, must_differ: bool = False):
            counts = {
                name: sum(
                    int(num_different(a[name], b[name])) for a, b in zip(found, want, strict=True)
                )
                for name in want[0]
            }
            total = sum(counts.values())
            good = all(counts.values()) if must_differ else total == 0
            self.failed += not good
            kind = "control" if must_differ else "bits"
            self._rows.keep(subject="few_rows", kind=kind, case=case, m=m, holds=good, **counts)
            lines.append(
                f"{kind:8}{case:26}{m:2} rows {total:8d} different  {'ok' if good else 'FAILED'}"
            )

        def first_rows(m: int, start: int = 0) -> list[dict[str, jax.Array]]:
            return [{name: value[start : start + m] for name, value in of_most.items()}]

        compare("none", 1, of_one[:1], first_rows(1))
        compare("another row", 1, first_rows(1, 1), first_rows(1), must_differ=True)
        for setting, m in self._compiled:
            if setting != "none":
                found = self._run(setting, m)
                compare(setting, m, found, of_one if m == 1 else first_rows(m))
        return lines

    def time(self) -> list[str]:
        """Microseconds a layer of every setting at one row, in turns."""
        arguments, num = self._arguments(1), len(self._layers)
        programs = {setting: self._compiled[setting, 1].result() for setting in SETTINGS}
        times = {setting: [] for setting in programs}
        for _ in range(8):
            for setting, program in programs.items():
                jax.block_until_ready(program(*arguments))
                begin, found = time.perf_counter(), None
                for _ in range(20):
                    found = program(*arguments)
                jax.block_until_ready(found)
                times[setting].append((time.perf_counter() - begin) / (20 * num) * 1e6)
        us = {setting: statistics.median(values[1:]) for setting, values in times.items()}
        lines = []
        for setting, value in us.items():
            saved = us["none"] - value
            events = kernel_events(functools.partial(_run_twice, programs[setting], arguments))
            device = sum(t for _, t in events) / (2 * num)
            count = len(events) / (2 * num)
            self._rows.keep(
                subject="few_rows", kind="layer", setting=setting, us=value, saved_us=saved,
                kernels_us=device, launches=count,
            )  # fmt: skip
            lines.append(
                f"layer without attention  {setting:24}{value:8.2f} us  {saved:6.2f} saved  "
                f"{count:.1f} launches, {device:.2f} us of kernels"
            )
        return lines


def _run_twice(program, arguments) -> None:
    jax.block_until_ready([program(*arguments) for _ in range(2)])


# ------------------------------------------------------------------------------------------ steps


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A decode step of so many layers, under a setting."""

    setting: str
    num_layers: int
    batch: int

    @property
    def case(self) -> Case:
        """What `Runner` calls it."""
        return decode_case(self.batch)


def draw_model(num_layers: int, most_rows: int) -> Runner:
    """Qwen3-30B-A3B with so many layers, random weights and cache."""
    config = MODELS[MODEL]
    assert config.experts is not None
    experts = dataclasses.replace(config.experts, layers=(True,) * num_layers)
    config = dataclasses.replace(
        config, num_layers=num_layers, experts=experts, sliding_windows=(None,) * num_layers
    )
    return Runner(config, [decode_case(most_rows)], Backend.SM90, 0)


class Steps:
    """Compiled steps; what they choose must be what that of none chooses."""

    def __init__(self, steps: list[Step], rows: Rows):
        """Draw the models, and compile all steps side by side."""
        most: dict[int, int] = {}
        for step in steps:
            most[step.num_layers] = max(step.batch, most.get(step.num_layers, 1))
        self._runners = {n: draw_model(n, most_rows) for n, most_rows in most.items()}
        lowered = {step: self._lower(step) for step in steps}
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            self._compiled = {
                step: pool.submit(compile_checked, low, EXACT_OPTIONS, jax.devices()[:1])
                for step, low in lowered.items()
            }
        self._rows, self.failed = rows, 0
        self._first: dict[tuple[int, int], tuple[bytes, float]] = {}

    def _lower(self, step: Step) -> jax.stages.Lowered:
        runner = self._runners[step.num_layers]
        turn(step.setting)
        programs = programs_for(runner.model, num_pages=runner.num_pages, num_slots=step.batch)
        key = runner.key_of("invariant", step.case)
        jitted = jax.jit(programs.function(key), donate_argnums=2)
        return jitted.lower(*programs.operands(key, runner.model.params))

    def _run(self, step: Step, repeats: int) -> jax.Array:
        """Dependent steps; the last one's result."""
        runner, compiled = self._runners[step.num_layers], self._compiled[step].result()
        operands, result = runner.operands("invariant", step.case), None
        for _ in range(repeats):
            runner.pages, *_, result = compiled(
                runner.model.params, runner.model.rope_tables, runner.pages, *operands
            )
        assert result is not None
        return jax.block_until_ready(result)

    def _wall_ms(self, step: Step) -> float:
        """Median of seven runs of 20 steps."""
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            self._run(step, 20)
            times.append((time.perf_counter() - begin) / 20 * 1e3)
        return statistics.median(times)

    def time(self, step: Step, *, kernels: bool) -> list[str]:
        """Compare with the first step of so many layers and rows, and time."""
        chosen = np.asarray(self._run(step, 1)).tobytes()
        self._run(step, 20)
        ms, runner, n = self._wall_ms(step), self._runners[step.num_layers], step.num_layers
        first, before = self._first.setdefault((n, step.batch), (chosen, ms))
        same, saved = chosen == first, (before - ms) * 1e3 / n
        self.failed += not same
        floor = decode_floor_ms(runner.model, runner.model.params, step.case)
        parts = self._kernels(step) if kernels else []
        self._rows.keep(
            subject="few_rows", kind="step", setting=step.setting, num_layers=n, batch=step.batch,
            same=same, ms_p50=ms, floor_ms=floor, floor_over_measured=floor / ms,
            saved_us_a_layer=saved, kernels=[(name, round(us, 2)) for name, us in parts],
        )  # fmt: skip
        lines = [
            f"{n:3} layers, batch {step.batch}  {step.setting:24}{ms:8.3f} ms{floor / ms:6.2f}"
            f"{saved:8.2f} us a layer saved  {'ok' if same else 'BITS DIFFER'}"
        ]
        if parts:
            short = "  ".join(f"{name.replace('detjax_', '')} {us:.1f}" for name, us in parts)
            lines.append(f"    us: {short}; together {sum(us for _, us in parts):.1f}")
        return lines

    def _kernels(self, step: Step) -> list[tuple[str, float]]:
        """(kernel, microseconds) in order, of a layer from its attention to the next one's."""

        def run():
            self._run(step, 4)

        events = kernel_events(run)
        starts = [i for i, (name, _) in enumerate(events) if name.startswith("attention")]
        layers = [events[a:b] for a, b in itertools.pairwise(starts)]
        length = min(len(events) for events in layers)
        # The last layer of a step is followed by the next step's beginning.
        layers = [events for events in layers if len(events) == length]
        times = [statistics.median(us for _, us in turns) for turns in zip(*layers, strict=True)]
        names = [name.replace("_mosaic_gpu_kernel", "") for name, _ in layers[0]]
        return list(zip(names, times, strict=True))


def main() -> None:
    """Check, then time; exit 3 if a bit differed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--layers", type=int, default=12, help="of the model that every setting runs"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="start nothing after that")
    parser.add_argument("--out", help="write rows of JSON there")
    options = parser.parse_args()
    start = time.time()
    rows = Rows(environment(Backend.SM90), options.out)

    def passed() -> float:
        return time.time() - start

    chains = Chains(options.layers, rows)
    lines = chains.check() + chains.time()
    failed = chains.failed
    print("\n".join(lines) + f"\nafter {passed():.0f} s", flush=True)
    del chains
    whole = MODELS[MODEL].num_layers
    few = options.layers
    planned = [
        [Step(setting, whole, 1) for setting in ("none", "all", *SPREADS)],
        [Step(setting, few, rows) for rows in (2, 4) for setting in ("none", "all")],
    ]
    for group in planned:
        if passed() > options.seconds - 50:
            lines.append(f"not run for lack of time: {group}")
            continue
        steps = Steps(group, rows)
        for step in group:
            lines += steps.time(step, kernels=True)
        failed += steps.failed
        print(f"after {passed():.0f} s", flush=True)
        del steps
    print("\n" + "\n".join(lines))
    print(f"{failed} checks failed, {time.time() - start:.0f} s")
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main()
