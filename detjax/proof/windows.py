# SPDX-License-Identifier: Apache-2.0
"""Choose the windows of an audit: many tokens a step, little padding."""

import statistics
from collections.abc import Sequence
from typing import Any

STEP_TOKENS = 2048
"""Tokens of a step. More are hardly quicker, and need more memory: a step holds float32 logits of
each, 1 GiB for 128,256 tokens of vocabulary."""
LEAST_WINDOW, MOST_WINDOW = 16, 128
MOST_EXTRA, MOST_EXTRA_ON_CPU = 1.03, 1.15
"""Tokens computed, over the fewest possible, for which a longer window is taken. It reads keys and
values less often, and on a CPU it unpacks the weights less often."""
SHORT_PROMPT = 256
"""Prompts of fewer tokens fill no row of an ordinary prefill step."""


def choose_window(answer_lens: Sequence[int], *, on_cpu: bool = False) -> int:
    """Return the longest window that gives these answers about the least padding.

    Args:
        answer_lens: Tokens of each answer. The first follows its prompt's prefill.
        on_cpu: Whether a CPU computes.
    """
    lengths = [max(1, length - 1) for length in answer_lens]
    most = min(MOST_WINDOW, 1 << (max(lengths) - 1).bit_length())
    # WHY: a GPU's prefill kernel takes 64 rows at a time, so shorter windows save nothing there.
    least = LEAST_WINDOW if on_cpu else max(LEAST_WINDOW, min(most, 64))
    windows = [size for size in (LEAST_WINDOW, 32, 64, MOST_WINDOW) if least <= size <= most]
    computed = {size: sum(-(-length // size) * size for length in lengths) for size in windows}
    few = (MOST_EXTRA_ON_CPU if on_cpu else MOST_EXTRA) * min(computed.values(), default=0)
    return max((size for size in windows if computed[size] <= few), default=LEAST_WINDOW)


def cpu_audit_options(
    answer_lens: Sequence[int],
    prompt_lens: Sequence[int],
    *,
    num_replicas: int = 1,
    window: int | None = None,
) -> dict[str, Any]:
    """The like of `audit_options` on a CPU: one answer a step on each replica.

    A CPU computes the padding of a step like all else. The rows of one window share the unpacking
    of the weights, and more windows in a step would save nothing.
    """
    return {
        "has_prompt_lookup": True,
        "verify_window": window or choose_window(answer_lens, on_cpu=True),
        "verify_rows": 1,
        "batch_size": num_replicas,
        # A prompt has no token before its prefill.
        "prefill_chunk": choose_window([length + 1 for length in prompt_lens], on_cpu=True),
        # WHY: every token is compared with the receipt in any case. A check of programs on a cache
        # of the model's context took 48 s where the audit took 5 (135M parameters, 2026-11).
        "self_check": "off",
    }


def audit_options(
    answer_lens: Sequence[int], prompt_lens: Sequence[int], *, window: int | None = None
) -> dict[str, Any]:
    """Fields of `EngineConfig` for an audit on a GPU. None changes a bit.

    Args:
        answer_lens: Tokens of each answer.
        prompt_lens: Tokens of each prompt.
        window: Tokens of a window; None chooses.
    """
    window = window or choose_window(answer_lens)
    rows = max(1, STEP_TOKENS // window)
    options: dict[str, Any] = {
        "has_prompt_lookup": True, "verify_window": window, "verify_rows": rows,
    }  # fmt: skip
    if len(prompt_lens) >= rows and statistics.median(prompt_lens) < SHORT_PROMPT:
        options["prefill_shapes"] = ((rows, window),)
    return options


def longest_first(answer_lens: Sequence[int]) -> list[int]:
    """Return the order that keeps windows full longest; a long answer is many windows in a row."""
    return sorted(range(len(answer_lens)), key=lambda i: (-answer_lens[i], i))
