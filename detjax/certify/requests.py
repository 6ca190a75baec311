# SPDX-License-Identifier: Apache-2.0
"""The requests: prompts that end around boundaries, greedy and sampled in turn."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.numerics import NumericsProfile

MAX_TOKENS = 8
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8},
    {"temperature": 1.2},
)
FILTERED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.02},
)
"""From the second round on; the check of programs has filters in any case."""

AnswerBits = tuple[tuple[int, int], ...]
"""(token id, bits of the float32 logprob) of each token."""


def make_requests(
    round_idx: int,
    *,
    vocab_size: int,
    max_len: int,
    profile: NumericsProfile,
    count: int = 8,
    draw: int = 0,
) -> list[Request]:
    """Make `count` requests, different in every round and in every draw of a round.

    Prompts end one token before, at and one after the ends of pages and splits, and at the longest
    possible length; other lengths are drawn.
    """
    page, split = profile.attention_block, profile.attention_split
    most = max_len - MAX_TOKENS
    rng = np.random.default_rng([29, round_idx, draw] if draw else [29, round_idx])
    kinds = FILTERED if round_idx else KINDS
    around = [5, page - 1, page - MAX_TOKENS // 2, page + 1, 2 * page, split - 3, split, most]
    if round_idx:
        around = [most - round_idx % page, page * (1 + round_idx % 7), split * (1 + round_idx % 3)]
    lengths = [n for n in dict.fromkeys(around) if 1 <= n <= min(most, 4 * split)][:count]
    lengths += rng.integers(1, min(most, 2 * page) + 1, count - len(lengths)).tolist()
    return [
        Request(
            prompt_token_ids=tuple(rng.integers(0, vocab_size, n).tolist()),
            sampling=SamplingParams(
                max_tokens=MAX_TOKENS, seed=2**33 + 1000 * round_idx + i, **kinds[i % len(kinds)]
            ),
        )
        for i, n in enumerate(lengths)
    ]


def check_max_len(max_len: int, profile: NumericsProfile) -> None:
    """Refuse a length with which no prompt fills a page, so that no prefix is ever shared.

    Raises:
        ValueError: If it is too short.
    """
    # The last token of a prompt is computed again, so a prompt that is shared has one more.
    least = profile.attention_block + 1 + MAX_TOKENS
    if max_len < least:
        raise ValueError(
            f"{max_len=} must be at least {least} for the cases of the prefix cache: a prompt that "
            f"fills a page of {profile.attention_block} tokens, a token more, and {MAX_TOKENS} "
            "that are generated"
        )


def answer_of(completion: Completion) -> AnswerBits:
    """Return the raw bits of a completion."""
    bits = np.asarray(completion.logprobs, np.float32).view(np.uint32)
    return tuple(zip(completion.token_ids, map(int, bits), strict=True))


def forced(
    requests: Sequence[Request], answers: Sequence[AnswerBits]
) -> list[tuple[Request, AnswerBits]]:
    """Make prompts that hold part of an answer, each with the one token that must follow.

    The noise remains that of the request's own prompt, so the longer prompt draws the same token.
    """
    found = []
    for request, answer in zip(requests, answers, strict=True):
        for j in sorted({len(answer) // 2, len(answer) - 1}):
            prompt = (*request.prompt_token_ids, *(token for token, _ in answer[:j]))
            keyed = request.sampling.for_prompt(request.prompt_token_ids)
            sampling = dataclasses.replace(keyed, max_tokens=1)
            asked = dataclasses.replace(request, prompt_token_ids=prompt, sampling=sampling)
            found.append((asked, answer[j : j + 1]))
    return found


def plain(requests: Sequence[Request]) -> list[Request]:
    """Return the same requests without a claim."""
    return [dataclasses.replace(r, is_deterministic=False) for r in requests]
