# SPDX-License-Identifier: Apache-2.0
"""`--check`: computes a batch in other ways, and compares every bit with the first."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detjax.cli.arguments import GenerateArgs
from detjax.cli.display import MAX_LINES, Display
from detjax.cli.prompt_batch import PromptBatch
from detjax.cli.run import RunPlan, RunResult
from detjax.engine.config import DRAFTS_OF_OTHERS, EngineConfig
from detjax.engine.outputs.completion import Completion, CompletionOutput

_BATCH_SIZES = (1, 3, 2, 5, 8, 17)
_NUM_CHUNKS = (2, 5, 1, 3, 7)
_LONGEST_CHUNK = 512


def plan_runs(
    args: GenerateArgs,
    batch: PromptBatch,
    asked: Mapping[str, Any],
    size: Callable[[Mapping[str, Any]], EngineConfig],
) -> tuple[RunPlan, ...]:
    """Return the runs: the first as asked, the others each at another size, order and chunk.

    Args:
        args: The options.
        batch: To compute.
        asked: Fields of `EngineConfig` that are not to be chosen.
        size: Chooses the others.
    """
    first = RunPlan(
        engine=size(asked), order_name="as given", order=tuple(range(len(batch.requests)))
    )
    return first, *(
        _other_run(i, batch, asked, size, dp=args.dp, mode=args.mode)
        for i in range(args.repeat - 1)
    )


def _other_run(
    number: int,
    batch: PromptBatch,
    asked: Mapping[str, Any],
    size: Callable[[Mapping[str, Any]], EngineConfig],
    *,
    dp: int,
    mode: str,
) -> RunPlan:
    """Return one of the runs to compare with the first."""
    batch_size = _BATCH_SIZES[number % len(_BATCH_SIZES)] * dp
    chunk = math.ceil(batch.work.longest_prompt / _NUM_CHUNKS[number % len(_NUM_CHUNKS)])
    changes = {"batch_size": batch_size, "prefill_chunk": min(chunk, _LONGEST_CHUNK)}
    has_drafts = mode == "dvr" or asked.get("draft_weights") in DRAFTS_OF_OTHERS
    if has_drafts and not number % 2:
        changes |= {
            "mode": "invariant",
            "decode_steps": 1,
            "draft_weights": "full",
            "adapts_drafts": False,
        }
    order_name, order = _other_order(number, len(batch.requests))
    num_neighbours = max(0, batch_size - len(batch.seqs))
    before = num_neighbours * (number % 3) // 2
    return RunPlan(
        engine=size({**asked, **changes}),
        order_name=order_name,
        order=(None,) * before + order + (None,) * (num_neighbours - before),
    )


def _other_order(number: int, num_requests: int) -> tuple[str, tuple[int, ...]]:
    """Return an order of the requests, and its name."""
    indices, half = tuple(range(num_requests)), num_requests // 2
    if num_requests == 1:
        return "only one", indices
    orders = (
        ("reversed", indices[::-1]),
        ("second half first", indices[half:] + indices[:half]),
        ("odd ones first", indices[1::2] + indices[::2]),
        ("as given", indices),
    )
    return orders[number % len(orders)]


def show_plan(plans: Sequence[RunPlan], display: Display) -> None:
    """Write what the runs differ in."""
    display.table(
        "runs to compare",
        ("run", "mode", "batch size", "prefill chunk", "order of prompts", "neighbours"),
        (
            (
                number,
                plan.engine.mode,
                plan.engine.batch_size,
                plan.engine.prefill_chunk,
                plan.order_name,
                plan.num_neighbours,
            )
            for number, plan in enumerate(plans, start=1)
        ),
    )


def differences(
    expected: Sequence[CompletionOutput], actual: Sequence[CompletionOutput]
) -> list[str]:
    """Return a line for each completion of which a bit differs, with the first such place."""
    lines = []
    for one, other in zip(expected, actual, strict=True):
        found = _first_difference(one.completion, other.completion)
        if found:
            where = f"prompt {one.completion.request_idx}, sequence {one.completion.sequence_idx}"
            lines.append(f"{where}, {found}")
    return lines


def _first_difference(one: Completion, other: Completion) -> str:
    """Describe the first place where two completions differ; empty where none does."""
    for i, (id_1, id_2) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if id_1 != id_2:
            return f"token {i}: id {id_1} (0x{id_1:08x}) against {id_2} (0x{id_2:08x})"
        bits_1, bits_2 = _bits(one.logprobs[i]), _bits(other.logprobs[i])
        if bits_1 != bits_2:
            return f"token {i}: logprob {bits_1} against {bits_2}"
        if found := _top_difference(one.top_logprobs[i], other.top_logprobs[i]):
            return f"token {i}: {found}"
    if len(one.token_ids) != len(other.token_ids):
        return f"length: {len(one.token_ids)} tokens against {len(other.token_ids)}"
    if one.finish_reason is not other.finish_reason:
        return f"end: {one.finish_reason.value} against {other.finish_reason.value}"
    return ""


def _top_difference(
    one: Sequence[tuple[int, np.float32]], other: Sequence[tuple[int, np.float32]]
) -> str:
    for rank, ((id_1, logprob_1), (id_2, logprob_2)) in enumerate(zip(one, other, strict=True)):
        if id_1 != id_2 or _bits(logprob_1) != _bits(logprob_2):
            first, second = f"{id_1} {_bits(logprob_1)}", f"{id_2} {_bits(logprob_2)}"
            return f"top logprob {rank}: id {first} against {second}"
    return ""


def _bits(value: np.float32) -> str:
    return f"{float(value)!r} (0x{int(np.float32(value).view(np.uint32)):08x})"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """How many runs were compared, and what differs between the first and another."""

    num_runs: int
    lines: tuple[str, ...]


def check_runs(
    first: RunResult,
    plans: Sequence[RunPlan],
    run_again: Callable[[RunPlan], RunResult],
    display: Display,
) -> CheckResult:
    """Run every plan but the first, which has been run, and compare with it."""
    lines = []
    for number, plan in enumerate(plans[1:], start=2):
        found = differences(first.outputs, run_again(plan).outputs)
        verdict = f"{len(found)} completions differ from run 1" if found else "equal to run 1"
        display.line(f"run {number} of {len(plans)}: {verdict}")
        lines.extend(f"run {number} differs from run 1 at {line}" for line in found)
    return CheckResult(num_runs=len(plans), lines=tuple(lines))


def show_check(result: CheckResult, digest: str, display: Display) -> None:
    """Write the verdict."""
    for line in result.lines[:MAX_LINES]:
        display.line(line, style="red")
    if len(result.lines) > MAX_LINES:
        display.line(f"and {len(result.lines) - MAX_LINES} more", style="red")
    if result.lines:
        display.line(f"check failed: the {result.num_runs} runs are not equal", style="bold red")
    else:
        display.line(f"all {result.num_runs} runs equal, digest {digest}", style="bold green")


def show_new_process(lines: Sequence[str], display: Display) -> tuple[str, ...]:
    """Write the verdict on the run of another process; return its lines."""
    for line in lines[:MAX_LINES]:
        display.line(f"the new process differs at {line}", style="red")
    verdict, style = ("check failed: a new process gave other bits", "bold red")
    if not lines:
        verdict, style = ("a new process, which compiled anew, gave the same bits", "bold green")
    display.line(verdict, style=style)
    return tuple(lines)
