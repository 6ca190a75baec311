# SPDX-License-Identifier: Apache-2.0
"""Requests whose sampling has texts, for callers that have a tokenizer: an engine has none."""

import dataclasses
from collections.abc import Sequence

from detjax.engine.requests.checks import RequestLimits
from detjax.engine.requests.limits import token_ids_of
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
    to cut the same text into tokens stay possible. Without texts it is returned as it is.

    Raises:
        ValueError: If a bad word has too many tokens.
    """
    no_text = {name: getattr(NO_TEXT, name) for name in TEXT_FIELDS}
    if all(getattr(sampling, name) == value for name, value in no_text.items()):
        return sampling
    bare = [word.lstrip(" ") or word for word in sampling.bad_words]
    spaced = [prefix + word for word in bare for prefix in ("", " ")]
    words = (tokenizer.backend.encode(w, add_special_tokens=False).ids for w in spaced)
    return dataclasses.replace(
        sampling, **no_text, bad_words_token_ids=(*sampling.bad_words_token_ids, *map(tuple, words))
    )


def text_request(
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    what: str,
    limits: RequestLimits,
    is_deterministic: bool,
    tokenizer: Tokenizer,
    seed: int = 0,
    adapter: str = "",
) -> Request:
    """Return the request for a prompt, with `max_tokens` no more than fits behind it.

    Its prompt is truncated as the sampling says, and its sampling says so no more.

    Args:
        token_ids: Of the prompt.
        sampling: May have `stop` strings.
        what: Names the prompt in errors.
        limits: Of the model, and of the engine if there is one.
        is_deterministic: As `Request` has it.
        tokenizer: Of the model.
        seed: Where the sampling has none, as `SamplingParams.seed_or` takes it.
        adapter: As `Request` has it.

    Raises:
        ValueError: If the prompt has no tokens, too many, or some that the model does not know, or
            its sampling does.
    """
    limits.check_sampling(token_sampling(sampling, tokenizer), what)
    try:
        ids = token_ids_of("prompt_token_ids", token_ids)
    except ValueError as error:
        raise ValueError(f"{what} is neither a text nor token ids: {error}") from error
    ids = last_tokens(
        ids,
        sampling.truncate_prompt_tokens,
        max_tokens=sampling.max_tokens,
        max_len=limits.max_len,
    )
    limits.check_prompt(ids, what, num_wanted=min(sampling.max_tokens, 1))
    room = min(sampling.max_tokens, limits.max_len - len(ids))
    if sampling.min_tokens > room:
        raise ValueError(
            f"{what} has min_tokens={sampling.min_tokens}, and {limits.max_len_name} leaves room "
            f"for {room} tokens behind it; lower it, or shorten the prompt"
        )
    used = dataclasses.replace(
        sampling, seed=sampling.seed_or(seed), max_tokens=room, truncate_prompt_tokens=None
    )
    return Request(
        prompt_token_ids=ids, sampling=used, is_deterministic=is_deterministic, adapter=adapter
    )
