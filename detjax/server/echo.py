# SPDX-License-Identifier: Apache-2.0
"""The prompt in an answer: echoed with its tokens as OpenAI does, or scored as vLLM does."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from detjax.engine.outputs.request_output import PromptLogprobs, TokenEvent, TopLogprobs
from detjax.engine.outputs.text import TextStream
from detjax.models.tokenizer import Tokenizer

TokenText = Callable[[int], str]
"""A token for people."""


class EchoedToken(NamedTuple):
    """A token in OpenAI's legacy logprobs, which may be one of the prompt.

    Attributes:
        token_id: Which.
        text: What it adds to the text.
        logprob: None for the first of a prompt.
        top_logprobs: Of its position.
    """

    token_id: int
    text: str
    logprob: np.float32 | None
    top_logprobs: TopLogprobs


class Echo(NamedTuple):
    """What a text begins with before anything is generated, and its tokens if they are wanted."""

    text: str = ""
    tokens: tuple[EchoedToken, ...] = ()


NO_ECHO = Echo()


def echo_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], scores: PromptLogprobs) -> Echo:
    """The text of a prompt's tokens, and what each adds to it."""
    stream = TextStream(tokenizer)
    pieces = [stream.push(token_id).text for token_id in token_ids]
    pieces[-1] += stream.finish()
    logprobs = [(None, ()), *((one.logprob, one.top_logprobs) for one in scores)]
    tokens = tuple(
        EchoedToken(token_id, piece, *of_token)
        for token_id, piece, of_token in zip(token_ids, pieces, logprobs, strict=True)
    )
    return Echo("".join(pieces), tokens)


def legacy_logprobs(
    echoed: Sequence[EchoedToken],
    tokens: Sequence[tuple[TokenEvent, str]],
    offset: int,
    *,
    num_top: int,
    text_of: TokenText,
) -> dict[str, Any]:
    """Logprobs in the shape of /v1/completions.

    Args:
        echoed: Tokens of the prompt, which begin at 0; none where an earlier event has them.
        tokens: Generated tokens, each with the text that it adds itself.
        offset: Where the first of these begins in the text.
        num_top: How many of the most likely tokens are wanted; the token itself is there too.
        text_of: A token for people.
    """
    generated = [EchoedToken(e.token_id, text, e.logprob, e.top_logprobs) for e, text in tokens]
    found = [*echoed, *generated]
    offsets, at = [], 0 if echoed else offset
    for one in found:
        offsets.append(at)
        at += len(one.text)

    def top(one: EchoedToken) -> dict[str, float] | None:
        if one.logprob is None:
            return None
        listed: dict[str, float] = {}
        # WHY: OpenAI's shape has one entry a text, so of two tokens with one text the likelier.
        for token, value in (*one.top_logprobs[:num_top], (one.token_id, one.logprob)):
            listed.setdefault(text_of(token), float(value))
        return listed

    return {
        "tokens": [text_of(one.token_id) for one in found],
        "token_logprobs": [None if one.logprob is None else float(one.logprob) for one in found],
        "top_logprobs": [top(one) for one in found],
        "text_offset": offsets,
    }


def prompt_logprobs(
    token_ids: Sequence[int], scores: PromptLogprobs, *, num_top: int, text_of: TokenText
) -> list[dict[str, Any] | None]:
    """Logprobs of a prompt in vLLM's shape: null for the first token.

    Then of each token `{id: {logprob, rank, decoded_token}}`, its own first, and the most likely.
    """
    listed: list[dict[str, Any] | None] = [None]
    for token_id, one in zip(token_ids[1:], scores, strict=True):
        entries = {token_id: (one.logprob, one.rank)}
        for rank, (top_id, value) in enumerate(one.top_logprobs[:num_top], start=1):
            entries.setdefault(top_id, (value, rank))
        listed.append({
            str(i): {"logprob": float(value), "rank": rank, "decoded_token": text_of(i)}
            for i, (value, rank) in entries.items()
        })  # fmt: skip
    return listed
