# SPDX-License-Identifier: Apache-2.0
"""Quantised weights as codes and as bfloat16: the same answers, memory, decode steps and prompts.

python -m benchmarks.quantized --folder /tmp/q --out rows.jsonl

A bfloat16 folder of 8B shapes with random weights is written, and quantised by each scheme. Each
folder is opened in each form of `quantized_weights`; "w8a8" is for those that ask for 8-bit
activations. Answers to prompts of 1 to 1000 tokens must have the same digests alone and together.
Packed and expanded weights must have equal digests, and all forms of a folder one hash of weights.
A decode step's time is that of `generate` with 150 tokens less that with 30, over 120; the prompts
are of 512 tokens, differ, and are cached. Prompts' times are of one prompt of 4000 tokens that is
not. A run is 512 requests of 512 tokens, none cached, and 128 new tokens each. Exit status 3 if an
answer or a hash differs. `--bits` measures no time, and `--layers` makes it a matter of a minute.
"""

import argparse
import functools
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.table

from benchmarks.common import Rows, environment
from benchmarks.start import write_random
from detjax import LLM, Request, SamplingParams
from detjax.models.quantization.quantize import RECIPES, quantize_folder
from detjax.models.weights.load import ignore_progress
from detjax.pallas_kernels.backend import Backend

LENGTHS = (7, 300, 1000, 33, 64, 65, 1, 129)
PROMPT_LEN, LONG_LEN = 512, 4000
FEW, MANY = 30, 150
RUN_REQUESTS, RUN_NEW = 512, 128
FORMS = ("bfloat16", "packed", "w8a8", "expanded")
ASK_FOR_8_BITS = ("int8-w8a8", "fp8-dynamic", "fp8-block")
STDERR = rich.console.Console(stderr=True)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """Tokens that no two prompts begin with alike."""
    return tuple((seed * 7919 + i * (31 + seed % 13)) % 250 + 3 for i in range(length))


def requests(count: int, num_tokens: int) -> list[Request]:
    """Prompts of `PROMPT_LEN` tokens, whose answers have exactly so many."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return [
        Request(prompt_token_ids=prompt(PROMPT_LEN, i), sampling=sampling) for i in range(count)
    ]


def seconds(llm: LLM, asked: list[Request]) -> float:
    """Of one call."""
    began = time.perf_counter()
    llm.engine.generate(asked)
    return time.perf_counter() - began


def step_ms(llm: LLM, batch: int) -> float:
    """Median milliseconds of a decode step of so many sequences."""
    llm.engine.generate(requests(batch, 1))  # fills the cache of prefixes
    llm.engine.generate(requests(batch, 2))
    found = [
        seconds(llm, requests(batch, MANY)) - seconds(llm, requests(batch, FEW)) for _ in range(3)
    ]
    return statistics.median(found) / (MANY - FEW) * 1e3


def prefill_ms(llm: LLM) -> float:
    """Median milliseconds from a long prompt to its first token."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)

    def one(seed: int) -> list[Request]:
        return [Request(prompt_token_ids=prompt(LONG_LEN, seed), sampling=sampling)]

    llm.engine.generate(one(1000))
    return statistics.median(seconds(llm, one(1001 + i)) for i in range(5)) * 1e3


def run_s(llm: LLM) -> float:
    """Seconds of a run of many requests."""
    sampling = SamplingParams(max_tokens=RUN_NEW, ignore_eos=True)
    return seconds(llm, [
        Request(prompt_token_ids=prompt(PROMPT_LEN, 5000 + i), sampling=sampling)
        for i in range(RUN_REQUESTS)
    ])  # fmt: skip


def digests(llm: LLM) -> tuple[tuple[str, ...], int]:
    """Of sampled answers, together; and how many differ when they are asked for alone."""
    sampling = SamplingParams(max_tokens=40, temperature=0.7, seed=1, ignore_eos=True)
    asked = [Request(prompt_token_ids=prompt(n, 2000 + n), sampling=sampling) for n in LENGTHS]
    together = tuple(answer.digest() for answer in llm.engine.generate(asked))
    alone = [llm.engine.generate([request])[0].digest() for request in asked]
    return together, sum(map(str.__ne__, together, alone))


def measure(
    folder: Path, mode: str, batches: list[int], cache_dir: str, *, is_timed: bool
) -> tuple[dict, tuple]:
    """A row of a folder, and what must be equal in both modes."""
    began = time.perf_counter()
    llm = LLM(
        folder, backend="sm90", max_len=4096, batch_size=max(batches), show_progress=False,
        cache_dir=cache_dir, quantized_weights=mode,
    )  # fmt: skip
    opened_s = time.perf_counter() - began
    params = jax.tree.leaves({k: v for k, v in llm.model.params.items() if k != "exchange"})
    row: dict[str, Any] = {
        "open_s": opened_s,
        "weights_gib": sum(leaf.nbytes for leaf in params) / 2**30,
    }
    if is_timed:
        row |= {
            "prefill_tokens": LONG_LEN,
            "prefill_ms": prefill_ms(llm),
            "step_ms": {str(batch): round(step_ms(llm, batch), 3) for batch in batches},
            "step_prompt_tokens": PROMPT_LEN,
            "run_s": run_s(llm),
            "run": f"{RUN_REQUESTS} x ({PROMPT_LEN} + {RUN_NEW})",
        }
    together, row["different_alone"] = digests(llm)
    same = together, llm.identity().model["weights"]
    del llm, params
    gc.collect()
    return row, same


def main() -> None:
    """Measure each scheme; exit 3 if packed and expanded weights answer otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantized", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--folder", default="/tmp/quantized", help="where folders are written")
    parser.add_argument("--schemes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--layers", type=int, default=0, help="the first so many; all if left out")
    parser.add_argument("--bits", action="store_true", help="compare answers, and time nothing")
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args()
    base = Path(args.folder)
    base /= f"{args.layers or 'all'}-layers"
    if not (base / "bf16").exists():
        base.mkdir(parents=True, exist_ok=True)
        write_random("llama3_8b", base / "bf16", args.layers)
    rows = Rows(environment(Backend.SM90), args.out)
    keep = functools.partial(rows.keep, subject="quantized", model="llama3_8b", layers=args.layers)
    programs = str(base / "programs")
    run = functools.partial(
        measure, batches=args.batches, cache_dir=programs, is_timed=not args.bits
    )
    is_good = True
    if "bfloat16" in args.forms:
        row, _ = run(base / "bf16", "auto")
        keep(scheme="bfloat16", weights="bfloat16", **row)
        is_good = not row["different_alone"]
    for scheme in args.schemes:
        folder = base / scheme
        began = time.perf_counter()
        if not folder.exists():
            quantize_folder(base / "bf16", folder, RECIPES[scheme], progress=ignore_progress)
        quantize_s = time.perf_counter() - began
        found: dict[str, tuple] = {}
        for form in args.forms:
            if form == "bfloat16" or form == "w8a8" and scheme not in ASK_FOR_8_BITS:
                continue
            row, found[form] = run(folder, form)
            row |= {"quantize_s": quantize_s, "answers": len(LENGTHS)}
            if form == "expanded" and "packed" in found:
                pairs = zip(found["packed"][0], found[form][0], strict=True)
                row["different_digests"] = sum(a != b for a, b in pairs)
            row["is_same_hash"] = len({weights for _, weights in found.values()}) == 1
            keep(scheme=scheme, weights=form, **row)
            is_good &= row["is_same_hash"]
            is_good &= not (row["different_alone"] or row.get("different_digests", 0))
    if not args.bits:
        show(rows.rows)
    sys.exit(0 if is_good else 3)


def show(rows: list[dict]) -> None:
    """A table of the rows."""
    batches = list(rows[0]["step_ms"])
    table = rich.table.Table(
        "scheme", "weights", "GiB", *[f"step {b}" for b in batches], "4000", "run"
    )
    for row in rows:
        steps = [f"{row['step_ms'][b]:.2f}" for b in batches]
        table.add_row(
            row["scheme"], row["weights"], f"{row['weights_gib']:.2f}", *steps,
            f"{row['prefill_ms']:.1f}", f"{row['run_s']:.2f}",
        )  # fmt: skip
    STDERR.print(table)


if __name__ == "__main__":
    main()
