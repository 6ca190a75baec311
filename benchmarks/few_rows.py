# SPDX-License-Identifier: Apache-2.0
"""Which launches and tiles a few rows of Qwen3-30B-A3B save on one Hopper GPU: bits, then times.

    python -m benchmarks.few_rows [--seconds 150] [--out few_rows.jsonl]

Each setting turns constants of the kernels: free choices, that change no bit. First every setting's
layer (subtrees of o to the next q, k and v) against that of the present kernels, at 1 to 8 rows;
exit status 3 if a bit differs. Then the step of a model of few layers at batch 1 with each of them,
the time of its kernels, steps at other batches, and the whole model with all of them.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import Rows, environment, kernel_events, num_different, random_bf16
from benchmarks.step import MODELS, Case, Runner, decode_case, decode_floor_ms
from detjax.donation import compile_checked
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear import sm90 as linear_sm90
from detjax.pallas_kernels.linear import tiles as linear_tiles
from detjax.pallas_kernels.moe import sm90 as moe_sm90
from detjax.pallas_kernels.moe import sm90_tiles
from detjax.pallas_kernels.moe.shapes import SHAPES
from detjax.testing.programs import programs_for
from detjax.xla_flags import EXACT_OPTIONS

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
EPS = 1e-6
SHAPE = SHAPES[0]
MODEL = "qwen3_30b_a3b"

WHERE = {
    "NARROW_ROWS": linear_tiles,
    "TREE_CTAS": linear_tiles,
    "MAX_ADDED_ROWS": linear_sm90,
    "MAX_LATE_ROWS": sm90_tiles,
    "LISTS_ONE_ROW": sm90_tiles,
}
"""The constants, and where they stand."""

NONE = {
    "NARROW_ROWS": 0, "TREE_CTAS": 64, "MAX_ADDED_ROWS": 0, "MAX_LATE_ROWS": 0,
    "LISTS_ONE_ROW": True,
}  # fmt: skip
"""Eight launches a layer."""

ALL = {
    "NARROW_ROWS": 16, "TREE_CTAS": 128, "MAX_ADDED_ROWS": 8, "MAX_LATE_ROWS": 8,
    "LISTS_ONE_ROW": False,
}  # fmt: skip
"""Six launches a layer."""

SETTINGS = {
    "none": NONE,
    "o on 128 CTAs": NONE | {"TREE_CTAS": 128},
    "no list of one row": NONE | {"LISTS_ONE_ROW": False},
    "router adds subtrees": NONE | {"NARROW_ROWS": 16, "MAX_ADDED_ROWS": 8},
    "qkv adds experts": NONE | {"MAX_LATE_ROWS": 8},
    "all": ALL,
    "all, router of 16 CTAs": ALL | {"NARROW_ROWS": 8},
}
BITS = {"all": (1, 2, 3, 5, 8), "all, router of 16 CTAs": (1, 8)}
"""Rows of the settings whose layers are compared."""

BATCHES = (8,)


def turn(setting: str) -> None:
    """Set the constants, and forget what was traced with others."""
    for name, value in SETTINGS[setting].items():
        setattr(WHERE[name], name, value)
    jax.clear_caches()


# ------------------------------------------------------------------------------------------ bits


@jax.jit
def layer(heads, residual, weights: dict) -> dict[str, jax.Array]:
    """A layer from o to the next q, k and v."""
    reduction = tree_reduction(heads.shape[1], NumericsProfile())
    leaf_sums = linear_sm90.linear_leaf_sums(heads, weights["o"], reduction=reduction)
    logits, total, x = linear_sm90.combine_norm_linear(
        leaf_sums, residual, weights["gain"], weights["router"], eps=EPS, out_dtype=F32
    )
    y, shares = moe_sm90.route_mlp(
        x, logits, weights["gate_up"], weights["down"],
        top_k=SHAPE.top_k, renormalise=SHAPE.renormalise,
    )  # fmt: skip
    qkv, after = moe_sm90.combine_experts_norm_linear(
        y, shares, total, weights["gain"], weights["qkv"], None, eps=EPS, out_dtype=BF16
    )
    return {
        "sum": total, "rows": x, "logits": logits, "shares": shares, "experts": y, "qkv": qkv,
        "sum after": after,
    }  # fmt: skip


def compiled_layers(operands, weights: dict, counts) -> dict:
    """The layer at so many rows of the operands, compiled side by side."""
    lowered = {m: layer.lower(*(x[:m] for x in operands), weights) for m in counts}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(
            zip(lowered, pool.map(lambda low: low.compile(), lowered.values()), strict=True)
        )


def check_layers(rows: Rows) -> tuple[int, list[str]]:
    """Compare each setting's layer with that of none, and of its rows with each other's."""
    num, width, hidden = SHAPE.num_experts, SHAPE.width, SHAPE.hidden_size
    weights = {
        "o": random_bf16((hidden, 4096), 1, 0.02),
        "router": random_bf16((num, hidden), 2, 0.04),
        "gate_up": random_bf16((num, 2 * width, hidden), 3, 0.04),
        "down": random_bf16((num, hidden, width), 4, 0.06),
        "qkv": random_bf16((5120, hidden), 5, 0.02),
        "gain": random_bf16((hidden,), 6),
    }
    scale = jnp.exp(random_bf16((8, 4096), 7).astype(F32))
    heads = (random_bf16((8, 4096), 8) * scale).astype(BF16)
    operands = heads, random_bf16((8, hidden), 9)
    turn("none")
    alone, many = compiled_layers(operands, weights, (1, 8)).values()
    want, found_alone = many(*operands, weights), alone(*(x[:1] for x in operands), weights)
    failed, lines = 0, []

    def compare(case: str, found: dict, m: int) -> None:
        nonlocal failed
        different = {k: int(num_different(v, want[k][:m])) for k, v in found.items()}
        count = sum(different.values())
        failed += count > 0
        rows.keep(subject="few_rows", kind="bits", case=case, m=m, different=count, **different)
        lines.append(f"bits  {case:28}{m:2} rows {count:8d} different  {'' if count else 'ok'}")

    compare("none", found_alone, 1)
    for setting, counts in BITS.items():
        turn(setting)
        for m, run in compiled_layers(operands, weights, counts).items():
            compare(setting, run(*(x[:m] for x in operands), weights), m)
    other = {k: int(num_different(v[1:2], want[k][:1])) for k, v in want.items()}
    rows.keep(subject="few_rows", kind="control", case="another row", different=sum(other.values()))
    failed += not all(other.values())
    return failed, lines


# ----------------------------------------------------------------------------------------- times


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


def draw_model(num_layers: int) -> Runner:
    """Qwen3-30B-A3B with so many layers, random weights and cache."""
    config = MODELS[MODEL]
    assert config.experts is not None
    experts = dataclasses.replace(config.experts, layers=(True,) * num_layers)
    config = dataclasses.replace(
        config, num_layers=num_layers, experts=experts, sliding_windows=(None,) * num_layers
    )
    return Runner(config, [decode_case(max(BATCHES))], Backend.SM90, 0)


class Steps:
    """Compiled steps; what they choose must be what that of none chooses."""

    def __init__(self, steps: list[Step], rows: Rows):
        """Draw the models, and compile all steps side by side."""
        self._runners = {n: draw_model(n) for n in {step.num_layers for step in steps}}
        lowered = {step: self._lower(step) for step in steps}
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            self._compiled = {
                step: pool.submit(compile_checked, low, EXACT_OPTIONS)
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
        "--layers", type=int, default=8, help="of the model that every setting runs"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="start nothing after that")
    parser.add_argument("--out", help="write rows of JSON there")
    options = parser.parse_args()
    start = time.time()
    rows = Rows(environment(Backend.SM90), options.out)
    failed, lines = check_layers(rows)
    few, whole = options.layers, MODELS[MODEL].num_layers
    planned = [Step(setting, few, 1) for setting in SETTINGS]
    planned += [Step(setting, whole, 1) for setting in ("none", "all")]
    planned += [Step(setting, few, batch) for batch in BATCHES for setting in ("none", "all")]
    steps = Steps(planned, rows)
    print(f"compiled after {time.time() - start:.0f} s", flush=True)
    for step in planned:
        if time.time() - start > options.seconds:
            lines.append(f"not run for lack of time: {step}")
            continue
        kernels = step.num_layers == few and step.setting in ("none", "all")
        lines += steps.time(step, kernels=kernels)
    failed += steps.failed
    print("\n" + "\n".join(lines))
    print(f"{failed} checks failed, {time.time() - start:.0f} s")
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main()
