# SPDX-License-Identifier: Apache-2.0
"""Requests whose sampling has texts, for callers that have a tokenizer: an engine has none."""

import dataclasses
from collections.abc import Iterable, Sequence

from detjax.engine.requests.checks import check_token_ids
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import (
    NO_TEXT,
    TEXT_FIELDS,
    SamplingParams,
    last_tokens,
)
from detjax.models.tokenizer import Tokenizer


def token_sampling(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return the sampling as an engine, which knows no text, can run it.

    Bad words become token sequences: of the word alone, and of the word after a space. Other ways
    to cut the same text into tokens stay possible.

    Raises:
        ValueError: If a bad word has too many tokens.
    """
    bare = [word.lstrip(" ") or word for word in sampling.bad_words]
    spaced = [prefix + word for word in bare for prefix in ("", " ")]
    words = (tokenizer.backend.encode(w, add_special_tokens=False).ids for w in spaced)
    return dataclasses.replace(
        sampling,
        **{name: getattr(NO_TEXT, name) for name in TEXT_FIELDS},
        bad_words_token_ids=(*sampling.bad_words_token_ids, *map(tuple, words)),
    )


def text_request(
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    what: str,
    vocab_size: int,
    max_len: int,
    limit: str,
    is_deterministic: bool,
    tokenizer: Tokenizer,
    eos_token_ids: Iterable[int],
) -> Request:
    """Return the request for a prompt, with `max_tokens` no more than fits behind it.

    Its prompt is truncated as the sampling says, and its sampling says so no more.

    Args:
        token_ids: Of the prompt.
        sampling: May have `stop` strings.
        what: Names the prompt in errors.
        vocab_size: Of the model.
        max_len: Most tokens of a prompt and its completion.
        limit: Names `max_len` in errors.
        is_deterministic: As `Request` has it.
        tokenizer: Of the model.
        eos_token_ids: Of the model.

    Raises:
        ValueError: If the prompt has no tokens, too many, or some that the model does not know, or
            its sampling does.
    """
    check_token_ids(
        token_sampling(sampling, tokenizer), what, vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
    )  # fmt: skip
    try:
        request = Request(
            prompt_token_ids=tuple(token_ids), sampling=sampling, is_deterministic=is_deterministic
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is neither a text nor token ids: {error}") from error
    token_ids, sampling = request.prompt_token_ids, request.sampling
    if not token_ids:
        raise ValueError(f"{what} has no tokens; give some text")
    token_ids = last_tokens(
        token_ids, sampling.truncate_prompt_tokens, max_tokens=sampling.max_tokens, max_len=max_len
    )
    if len(token_ids) + min(sampling.max_tokens, 1) > max_len:
        left = " and one must be left to generate" if sampling.max_tokens else ""
        raise ValueError(
            f"{what} has {len(token_ids)} tokens, but {limit} is {max_len}{left}; shorten it"
        )
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{what} has token id {token_id}, but the model's vocabulary is {vocab_size}; the "
                "tokenizer is of another model"
            )
    room = min(sampling.max_tokens, max_len - len(token_ids))
    if sampling.min_tokens > room:
        raise ValueError(
            f"{what} has min_tokens={sampling.min_tokens}, and {limit} leaves room for {room} "
            "tokens behind it; lower it, or shorten the prompt"
        )
    used = dataclasses.replace(sampling, max_tokens=room, truncate_prompt_tokens=None)
    return dataclasses.replace(request, prompt_token_ids=token_ids, sampling=used)
