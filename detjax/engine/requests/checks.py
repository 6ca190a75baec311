# SPDX-License-Identifier: Apache-2.0
"""What of a sampling can be checked when the model is known."""

from collections.abc import Iterable

from detjax.engine.requests.limits import MAX_END_TOKENS
from detjax.engine.requests.sampling_params import SamplingParams


def check_token_ids(
    sampling: SamplingParams, what: str, *, vocab_size: int, eos_token_ids: Iterable[int]
) -> None:
    """Refuse masks and biases of tokens that there are not, and masks that leave none.

    Args:
        sampling: Without texts.
        what: Names its request in errors.
        vocab_size: Of the model.
        eos_token_ids: Of the model.

    Raises:
        ValueError: If it does, naming the field.
    """
    named = {
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words_token_ids": [i for word in sampling.bad_words_token_ids for i in word],
    }
    for name, ids in named.items():
        for token_id in (min(ids), max(ids)) if ids else ():
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{what} has {name} of token {token_id}, outside the vocabulary of {vocab_size}"
                )
    ends = sampling.end_token_ids(eos_token_ids) if sampling.min_tokens else frozenset()
    if len(ends) > MAX_END_TOKENS:
        raise ValueError(
            f"{what} has min_tokens={sampling.min_tokens} and {len(ends)} end tokens, more than "
            f"{MAX_END_TOKENS}"
        )
    banned = {word[0] for word in sampling.bad_words_token_ids if len(word) == 1} | ends
    allowed = set(sampling.allowed_token_ids)
    if len(banned) >= vocab_size or allowed and not allowed - banned:
        raise ValueError(
            f"{what} leaves no token: allowed_token_ids, bad_words and min_tokens together forbid "
            "every one"
        )
