# SPDX-License-Identifier: Apache-2.0
"""The requests of the production suite: prompts around every boundary, with every option."""

import dataclasses
from typing import Any

import numpy as np

from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams

PAGE, SPLIT = 128, 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnRequest:
    """One request of the pool: a prompt of `length` tokens of a text of its own.

    Attributes:
        idx: Names the text, and is the seed.
        length: Of the prompt.
        temperature: 0 is greedy.
        count: Tokens wanted.
        period: The prompt repeats after so many tokens, for prompt lookup; 0 if it does not.
        option_set: Name of other sampling parameters, of `OPTION_SETS`.
    """

    idx: int
    length: int
    temperature: float
    count: int
    period: int = 0
    option_set: str = "nothing"

    def request(self, texts: "Texts", *, is_deterministic: bool = True) -> Request:
        """The request."""
        return Request(
            prompt_token_ids=texts.prompt(self), sampling=self.sampling(texts.vocab_size),
            is_deterministic=is_deterministic,
        )  # fmt: skip

    def sampling(self, vocab_size: int) -> SamplingParams:
        """Its parameters, for a vocabulary of so many tokens."""
        plain: dict[str, Any] = {
            "max_tokens": self.count, "temperature": self.temperature, "seed": 2**33 + self.idx
        }  # fmt: skip
        return SamplingParams(**plain | option_sets(vocab_size)[self.option_set])


OPTION_SETS = "nothing", "penalties", "allowed", "filters", "ends"


def option_sets(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Sampling parameters by name, besides seed, length and temperature."""
    few = [vocab_size * i // 7 for i in range(1, 7)]  # in every part of the vocabulary
    return {
        "nothing": {},
        # Some tokens win until their own number is in their way.
        "penalties": {
            "logit_bias": tuple((token, 30.0 + i / 7) for i, token in enumerate(few)),
            "repetition_penalty": 1.3, "frequency_penalty": 0.9, "presence_penalty": 0.4,
        },
        "allowed": {
            "allowed_token_ids": tuple(range(3, vocab_size, max(1, vocab_size // 500))),
            "logprobs_mode": "processed",
        },
        "filters": {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "logprobs_mode": "processed"},
        # An end token that would come at once, and a second token that may not follow itself.
        "ends": {
            "logit_bias": ((few[2], 60.0), (few[4], 40.0), (few[5], 39.0)),
            "stop_token_ids": (few[2],), "min_tokens": 20,
            "bad_words_token_ids": ((few[4], few[4]),),
        },
    }  # fmt: skip


class Texts:
    """Random prompts, the same at every call."""

    def __init__(self, vocab_size: int):
        """Draw from `vocab_size` tokens."""
        self.vocab_size = vocab_size

    def prompt(self, drawn: DrawnRequest) -> tuple[int, ...]:
        """The tokens of the prompt of a request."""
        rng = np.random.default_rng([7, drawn.idx])
        tokens = rng.integers(0, self.vocab_size, drawn.period or drawn.length)
        return tuple(np.resize(tokens, drawn.length).tolist())


def _around(limit: int) -> list[int]:
    """Lengths one before, at and behind every page and split boundary, up to a limit."""
    pages = [n + d for n in range(PAGE, min(limit, 3 * SPLIT), PAGE) for d in (-1, 0)]
    splits = [n + d for n in range(SPLIT, limit, SPLIT) for d in (-2, -1, 0, 1)]
    return sorted({1, 2, 3, *pages, *splits})


def pool(limit: int, count: int, *, tokens: int, first: int) -> list[DrawnRequest]:
    """`count` requests whose prompts and answers fit in `limit`, greedy and sampled in turn."""
    around = [n for n in _around(limit - tokens) if n + tokens <= limit]
    others = np.random.default_rng([3, limit]).integers(1, limit - tokens, count).tolist()
    lengths = (around + others)[:count]
    return [
        DrawnRequest(idx=first + i, length=n, temperature=(0.0, 1.0, 0.8)[i % 3], count=tokens)
        for i, n in enumerate(lengths)
    ]


def with_option_sets(drawn_requests: list[DrawnRequest]) -> list[DrawnRequest]:
    """The same prompts, with every set of options in turn, one in five without."""
    return [
        dataclasses.replace(a, option_set=OPTION_SETS[i % len(OPTION_SETS)])
        for i, a in enumerate(drawn_requests)
    ]
