# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of a request while it runs: tokens, their logprobs, and how it ended."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class FinishReason(enum.StrEnum):
    """Why a completion ended: the text that OpenAI's API has, where it has one."""

    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # `max_tokens`, or the end of the model's context
    CANCELLED = "cancelled"  # `Engine.cancel`
    ERROR = "error"  # this request alone failed; its output says why


TopLogprobs = tuple[tuple[int, np.float32], ...]
"""(token id, logprob) of the most likely tokens of one position, most likely first."""


class PromptLogprob(NamedTuple):
    """What the model thinks of a token of the prompt, given those before it.

    Attributes:
        logprob: float32, at temperature 1, unfiltered: the bits that the token would have had, had
            it been sampled there.
        rank: 1 for the most likely token of the vocabulary. Equal logits rank in order of their
            token ids.
        top_logprobs: Of the position, as many as were asked for.
    """

    logprob: np.float32
    rank: int
    top_logprobs: TopLogprobs

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have chosen this token."""
        return self.rank == 1


PromptLogprobs = tuple[PromptLogprob, ...]
"""Of the second token of a prompt, and so on; the first follows nothing and has no logprob."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """One generated token. `logprob` is of the token at temperature 1, unfiltered."""

    request_idx: int
    sequence_idx: int
    token_id: int
    logprob: np.float32
    top_logprobs: TopLogprobs


class WindowCounts(NamedTuple):
    """Windows of drafts of one sequence, from its begin; all 0 where nothing is drafted.

    Attributes:
        num_windows: Verified.
        num_rollbacks: Of these, windows in which a draft was wrong.
        num_drafts: Tokens drafted and verified.
        num_rolled_back: Of these, tokens that were not committed.
    """

    num_windows: int = 0
    num_rollbacks: int = 0
    num_drafts: int = 0
    num_rolled_back: int = 0

    def add(self, *, num_drafts: int, num_accepted: int) -> "WindowCounts":
        """With one more window."""
        return WindowCounts(
            self.num_windows + 1,
            self.num_rollbacks + (num_accepted < num_drafts),
            self.num_drafts + num_drafts,
            self.num_rolled_back + num_drafts - num_accepted,
        )


NO_WINDOWS = WindowCounts()


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What one step of the engine released of one sequence: final, never taken back.

    Attributes:
        request_id: From `Engine.add_request`.
        sequence_idx: Which of the request's `n` sequences.
        token_ids: New tokens; none where only the end is told.
        logprobs: Of each new token, float32.
        top_logprobs: Of each new token, as many as were asked for.
        finish_reason: Why the sequence ended; None while it goes on.
        exception: What went wrong where `finish_reason` is ERROR, one of `detjax.engine.errors`;
            else None.
        weight_version: Of the weights that computed it: see `Engine.load_weights`.
        windows: Of drafts, of the sequence so far.
        prompt_logprobs: Where they were asked for, with the first output of sequence 0 that has a
            token, or ends it without one; None elsewhere.
        num_cached_tokens: Tokens of the prompt that the prefix cache had. They follow from what
            else was asked, so no digest and no receipt has them.
    """

    request_id: int
    sequence_idx: int
    token_ids: tuple[int, ...]
    logprobs: tuple[np.float32, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: FinishReason | None
    exception: Exception | None
    weight_version: int
    windows: WindowCounts = NO_WINDOWS
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0

    @property
    def error(self) -> str:
        """What went wrong, in words; empty where nothing did."""
        return "" if self.exception is None else str(self.exception)
