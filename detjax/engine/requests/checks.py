# SPDX-License-Identifier: Apache-2.0
"""What of a request can be checked when the model is known: one check, and one wording."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from detjax.engine.errors import PromptTooLongError
from detjax.engine.requests.limits import MAX_END_TOKENS
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.config import ModelConfig


def check_vocabulary(token_ids: Sequence[int], what: str, vocab_size: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        ValueError: If there is one, naming `what` and the id.
    """
    for token_id in (min(token_ids), max(token_ids)) if len(token_ids) else ():
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{what} has token id {token_id}, outside the vocabulary of {vocab_size}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """What a model and an engine allow of a request.

    Attributes:
        vocab_size: Of the model.
        eos_token_ids: The model's own end tokens.
        max_len: Most tokens of a prompt and its answer.
        max_len_name: What errors call `max_len`.
    """

    vocab_size: int
    eos_token_ids: Collection[int]
    max_len: int
    max_len_name: str

    @classmethod
    def of(cls, model: ModelConfig, max_len: int) -> "RequestLimits":
        """Return the limits of an engine with this `max_len`, which the context may be."""
        is_context = max_len == model.max_position_embeddings
        return cls(
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_len=max_len,
            max_len_name="the model's context" if is_context else "the engine's max_len",
        )

    def check_prompt(self, token_ids: Sequence[int], what: str, *, num_wanted: int) -> None:
        """Refuse a prompt that the model cannot read, or that leaves no room for its answer.

        Args:
            token_ids: Of the prompt.
            what: Names the prompt in errors.
            num_wanted: Tokens of the answer that must fit behind it.

        Raises:
            PromptTooLongError: If both are longer than `max_len`.
            ValueError: If there is no token, or one that the model does not have.
        """
        if not len(token_ids):
            raise ValueError(f"{what} has no tokens; give at least one")
        if len(token_ids) + num_wanted > self.max_len:
            answer = f" and its answer {num_wanted}" if num_wanted else ""
            fix = ", or lower max_tokens" if num_wanted > 1 else ""
            raise PromptTooLongError(
                f"{what} has {len(token_ids)} tokens{answer}, more than {self.max_len_name} of "
                f"{self.max_len}; shorten the prompt{fix}"
            )
        check_vocabulary(token_ids, what, self.vocab_size)

    def check_sampling(self, sampling: SamplingParams, what: str) -> None:
        """Refuse masks, biases and ends of tokens that there are not, and masks that leave none.

        Args:
            sampling: Without texts.
            what: Names its request in errors.

        Raises:
            ValueError: If it does, naming the field.
        """
        named = {
            "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
            "allowed_token_ids": sampling.allowed_token_ids,
            "stop_token_ids": sampling.stop_token_ids,
            "bad_words_token_ids": [i for word in sampling.bad_words_token_ids for i in word],
        }
        for name, ids in named.items():
            check_vocabulary(ids, f"{what}, in {name},", self.vocab_size)
        ends = sampling.end_token_ids(self.eos_token_ids) if sampling.min_tokens else frozenset()
        if len(ends) > MAX_END_TOKENS:
            raise ValueError(
                f"{what} has min_tokens={sampling.min_tokens} and {len(ends)} end tokens, more "
                f"than {MAX_END_TOKENS}"
            )
        banned = {word[0] for word in sampling.bad_words_token_ids if len(word) == 1} | ends
        allowed = set(sampling.allowed_token_ids)
        if len(banned) >= self.vocab_size or allowed and not allowed - banned:
            raise ValueError(
                f"{what} leaves no token: allowed_token_ids, bad_words and min_tokens together "
                "forbid every one"
            )
