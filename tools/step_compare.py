# SPDX-License-Identifier: Apache-2.0
"""Steps with and without what changed last, in one process: every bit first, then the times.

python tools/step_compare.py                     # Llama-3.1-8B shapes on a Hopper GPU
python tools/step_compare.py --model tiny --backend portable --many 4

"before" loads whole last pages and runs every token of a prompt through the last layer. What is
not written in the cache is NaN.
"""

import argparse
import concurrent.futures
import contextlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import step
from detjax.models.decoder import forward, local_logits
from detjax.models.paths import PATHS
from detjax.pallas_kernels.attention import sm90
from detjax.pallas_kernels.backend import Backend
from detjax.serving.launch_operands import unpack_choice
from detjax.serving.request import SamplingParams
from detjax.testing.programs import operands_for, programs_for

VARIANTS = ("before", "now")


def forward_every_token(*operands, wanted=None):
    """`forward`, whose last layer computes every token."""
    pages, hidden = forward(*operands)
    if wanted is not None:
        hidden = jnp.take_along_axis(hidden, wanted[:, None, None], axis=1)
    return pages, hidden


@contextlib.contextmanager
def tracing(variant: str):
    """Programs that are traced here are those of a variant."""
    now = sm90.KEYS_AT_ONCE, PATHS["invariant"]
    if variant == "before":
        sm90.KEYS_AT_ONCE = 128
        PATHS["invariant"] = forward_every_token, local_logits
    yield
    sm90.KEYS_AT_ONCE, PATHS["invariant"] = now


class Steps:
    """The compiled steps of both variants over one cache."""

    def __init__(self, runner: step.Runner, cases: list[step.Case]):
        """Compile them side by side."""
        self.runner = runner
        self._programs = {
            (variant, count): programs_for(
                runner.model, num_pages=runner.num_pages, num_slots=count
            )
            for variant in VARIANTS
            for count in {len(case.rows) for case in cases}
        }
        for variant in VARIANTS:
            with tracing(variant), concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda case, v=variant: self._program(v, case), cases))

    def _program(self, variant: str, case: step.Case):
        programs = self._programs[variant, len(case.rows)]
        return programs.get(self.runner.key_of("invariant", case), self.runner.model.params)

    def run(self, variant: str, case: step.Case, operands: tuple, repeats: int = 1):
        """The result of the last of so many steps, and milliseconds of each."""
        runner, program = self.runner, self._program(variant, case)
        jax.block_until_ready((runner.pages, operands))
        result, begin = None, time.perf_counter()
        for _ in range(repeats):
            runner.pages, *_, result = program(
                runner.model.params, runner.model.rope_tables, runner.pages, *operands
            )
        jax.block_until_ready((runner.pages, result))
        return result, (time.perf_counter() - begin) / repeats * 1e3

    def operands_at(self, case: step.Case, contexts: np.ndarray) -> tuple:
        """Operands of a decode case at these contexts; NaN behind each in the cache."""
        runner, count = self.runner, len(case.rows)
        key = runner.key_of("invariant", case)
        held = -(-(case.start + case.length) // 128)
        pages = np.zeros((count, key.table_len), np.int32)
        pages[:, :held] = np.arange(count * held).reshape(count, held)
        last = pages[np.arange(count), (contexts - 1) // 128]
        is_unwritten = np.arange(128)[None] >= (contexts[:, None] - 1) % 128
        runner.pages = _poison(_clean(runner.pages), jnp.asarray(last), jnp.asarray(is_unwritten))
        return operands_for(
            runner.model, key,
            ids=(np.arange(count)[:, None] * 977 + 5) % runner.model.config.vocab_size,
            start=contexts - 1, table=pages,
            sampling=[(SamplingParams(temperature=0.7, seed=i), 0) for i in range(count)],
        )  # fmt: skip


@jax.jit(donate_argnums=0)
def _clean(pages):
    return jnp.where(jnp.isnan(pages), jnp.asarray(0.5, pages.dtype), pages)


@jax.jit(donate_argnums=0)
def _poison(pages, last, is_unwritten):
    where = is_unwritten[None, :, None, None, :, None]
    return pages.at[:, last].set(jnp.where(where, jnp.nan, pages[:, last]))


@jax.jit
def _sums(pages):
    """Two sums of the bits of each page's keys and values."""
    bits = lax.bitcast_convert_type(pages, jnp.uint16).astype(jnp.uint32)
    bits = bits.reshape(*pages.shape[:3], -1)
    place = jnp.arange(bits.shape[-1], dtype=jnp.uint32)
    return jnp.sum(bits, axis=-1), jnp.sum(bits * (2 * place + 1), axis=-1)


def same_bits(steps: Steps, case: step.Case, rng: np.random.Generator) -> bool:
    """Whether both variants give the same tokens, logprobs and pages."""
    runner, found, pages = steps.runner, [], []
    if case.length == 1:
        # Each sequence ends somewhere in its pages, in every one of the parts that are loaded.
        contexts = rng.integers(1, case.start + 2, len(case.rows)).astype(np.int32)
        contexts[0] = case.start + 1
        operands = steps.operands_at(case, contexts)
    else:
        operands = runner.operands("invariant", case)
        runner.pages = _clean(runner.pages)
    for variant in VARIANTS:
        result, _ = steps.run(variant, case, operands)
        choice = unpack_choice(np.asarray(result), 0)
        found.append((choice.token_ids, choice.logprobs.view(np.uint32)))
        pages.append(jax.device_get(_sums(runner.pages)))
    same = all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    is_finite = bool(np.isfinite(found[0][1].view(np.float32)).all())
    same = same and all(np.array_equal(a, b) for a, b in zip(*pages, strict=True))
    return same and is_finite


def main() -> None:
    """Check, time, and show a table; exit 3 if a bit differed."""
    parser = argparse.ArgumentParser(description="Steps before and now, bits first")
    parser.add_argument("--model", choices=step.MODELS, default="llama3_8b")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument("--many", type=int, default=256, help="the largest batch")
    args = parser.parse_args()
    cases = [step.decode_case(batch) for batch in (1, 8, 64) if batch <= args.many]
    cases += [step.decode_case(args.many, 576), step.decode_case(args.many, 600)]
    cases += [step.prefill_case(4000 if args.model != "tiny" else 200)]
    runner = step.Runner(step.MODELS[args.model], cases, Backend(args.backend), 0)
    begin = time.perf_counter()
    steps, rng, rows, good = Steps(runner, cases), np.random.default_rng(0), [], True
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    for case in cases:
        same = all(same_bits(steps, case, rng) for _ in range(2))
        good &= same
        operands = runner.operands("invariant", case)
        times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        repeats = case.repeats if case.length == 1 else 1
        for turn in range(8 if case.length == 1 else 5):
            for variant in VARIANTS:
                if case.length > 1:
                    time.sleep(0.7)  # a single call, which does not reach the power limit
                _, ms = steps.run(variant, case, operands, repeats)
                times[variant] += [ms] if turn else []
        pick = statistics.median if case.length == 1 else min
        before, now = (pick(times[variant]) for variant in VARIANTS)
        rows.append((case.name, same, before, now))
        print(rows[-1], flush=True)
    print(f"\n{'step':36}{'same bits':>10}{'before, ms':>12}{'now, ms':>10}{'ratio':>8}")
    for name, same, before, now in rows:
        print(f"{name:36}{same!s:>10}{before:12.3f}{now:10.3f}{now / before:8.3f}")
    sys.exit(0 if good else 3)


if __name__ == "__main__":
    main()
