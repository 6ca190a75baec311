# SPDX-License-Identifier: Apache-2.0
"""What the choice of a token costs on a Hopper GPU, with all noise and without: bits, then times.

    python -m benchmarks.choice [--seconds 40] [--out choice.jsonl]

Each setting turns constants of the kernel: free choices, that change no bit. Logits of 128256
tokens: greedy; at temperature 0.8 normal ones, three times as wide ones, and those of a sure model
(one token of a row 30 above the others, 2.5 wide). First all results of every setting are
compared with those of the kernel that makes all noise, and its tokens with the argmax of written
scores; a bound planted too small must choose other tokens. Exit status 3 if not so.
"""

import argparse
import concurrent.futures
import inspect
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import Rows, device_us, environment, num_different
from detjax.compilation.xla_flags import EXACT_OPTIONS
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.sampling import sm90_choice, sm90_reach
from detjax.pallas_kernels.sampling.sm90 import gumbel_scores

VOCAB = 128256
BATCHES = 1, 8, 64, 256
RESULTS = "maxima", "sums", "best score", "token"

SETTINGS: dict[str, dict[str, Any]] = {
    "all noise": {"SKIP_NOISE": False, "CTAS_AN_SM": 16},
    "now": {"SKIP_NOISE": True, "CTAS_AN_SM": 16, "MIN_TURNS": sm90_choice.MIN_TURNS},
    "skip": {"SKIP_NOISE": True, "CTAS_AN_SM": 16, "MIN_TURNS": 1},
    "skip, 8 CTAs": {"SKIP_NOISE": True, "CTAS_AN_SM": 8, "MIN_TURNS": 1},
    "skip, 24 CTAs": {"SKIP_NOISE": True, "CTAS_AN_SM": 24, "MIN_TURNS": 1},
}

CASES = {"greedy": 0.0, "normal": 0.8, "3 wide": 0.8, "sure": 0.8}
"""Temperatures."""


def draw(case: str, num_rows: int, seed: int) -> tuple[jax.Array, ...]:
    """Logits, temperatures and the two words of each row's key."""

    @jax.jit
    def make(key):
        of_logits, of_tokens, *of_keys = jax.random.split(key, 4)
        logits = jax.random.normal(of_logits, (num_rows, VOCAB))
        if case == "3 wide":
            logits = 3 * logits
        if case == "sure":
            token = jax.random.randint(of_tokens, (num_rows,), 0, VOCAB)
            logits = (2.5 * logits).at[jnp.arange(num_rows), token].set(30.0)
        temperature = jnp.full((num_rows,), CASES[case], jnp.float32)
        return logits, temperature, *(jax.random.bits(k, (num_rows,), jnp.uint32) for k in of_keys)

    return make(jax.random.key(seed))


def lowered(setting: dict[str, Any], num_rows: int) -> jax.stages.Lowered:
    """The choice of so many rows, traced with these constants."""
    for name, value in setting.items():
        setattr(sm90_choice, name, value)
    traced = inspect.unwrap(sm90_choice.stats_and_choice)

    @jax.jit
    def run(logits, temperature, a, b):
        return traced(logits, temperature, (a, b), first_token_id=0, vocab_block=128)

    f32, u32 = jnp.float32, jnp.uint32
    shapes = ((num_rows, VOCAB), f32), ((num_rows,), f32), ((num_rows,), u32), ((num_rows,), u32)
    return run.lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))


def lowered_with_a_small_bound(num_rows: int) -> jax.stages.Lowered:
    """The control: noise is believed to be 26 less than it may be, which is all its range."""
    right = sm90_reach.LOG_2_32
    sm90_reach.LOG_2_32 = right - 26.0
    try:
        return lowered(SETTINGS["skip"], num_rows)
    finally:
        sm90_reach.LOG_2_32 = right


@jax.jit
def first_of_written(logits, temperature, a, b):
    """Token of the first of the greatest scores, which are written."""
    scores = gumbel_scores(logits, temperature, (a, b), first_token_id=0)
    return jnp.argmax(scores, axis=1).astype(jnp.int32)


def main() -> None:
    """Check, then time; exit 3 if a bit differed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="start nothing after that")
    parser.add_argument("--out", help="write rows of JSON there")
    options = parser.parse_args()
    start = time.time()
    rows = Rows(environment(Backend.SM90), options.out)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        programs = {
            (name, m): pool.submit(lowered(setting, m).compile, EXACT_OPTIONS)
            for m in BATCHES
            for name, setting in SETTINGS.items()
        }
        control = lowered_with_a_small_bound(64).compile(EXACT_OPTIONS)
        programs = {key: program.result() for key, program in programs.items()}
    print(f"compiled after {time.time() - start:.0f} s", flush=True)

    failed, lines = 0, []
    arguments = {m: {case: draw(case, m, m) for case in CASES} for m in BATCHES}
    for m in BATCHES:
        for case, operands in arguments[m].items():
            want = programs["all noise", m](*operands)
            counts = {
                f"{name}: {part}": int(num_different(a, b))
                for name in SETTINGS
                for part, a, b in zip(RESULTS, programs[name, m](*operands), want, strict=True)
            }
            counts["written scores"] = int(num_different(first_of_written(*operands), want[3]))
            different = sum(counts.values())
            failed += different > 0
            rows.keep(subject="choice", kind="bits", case=case, m=m, different=different)
            if different:
                lines.append(f"{case}, {m} rows: {[k for k, v in counts.items() if v]} DIFFER")
    operands = arguments[64]["normal"]
    seen = int(num_different(control(*operands)[3], programs["all noise", 64](*operands)[3]))
    failed += seen == 0
    rows.keep(subject="choice", kind="control", case="a bound too small", m=64, different=seen)
    lines.append(f"control, a bound that is too small: {seen} of 64 tokens differ")
    lines.append(f"{'case':10}{'rows':>6}" + "".join(f"{name:>16}" for name in SETTINGS) + "  us")
    for m in BATCHES:
        for case in CASES:
            if time.time() - start > options.seconds:
                lines.append(f"not timed for lack of time: {case}, {m} rows")
                continue
            # Two of them, so that at 256 rows none lies in the L2.
            turns = [arguments[m][case], draw(case, m, m + 1)]
            us = {name: device_us(programs[name, m], turns) for name in SETTINGS}
            rows.keep(subject="choice", kind="us", case=case, m=m, **us)
            lines.append(f"{case:10}{m:6}" + "".join(f"{value:16.2f}" for value in us.values()))
    print("\n" + "\n".join(lines))
    print(f"{failed} checks failed, {time.time() - start:.0f} s")
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main()
