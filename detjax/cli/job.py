# SPDX-License-Identifier: Apache-2.0
"""Turns prompts into requests that fit the model."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from detjax.cli.arguments import GenerateArgs, sampling_params
from detjax.cli.errors import InputError, bad_input
from detjax.cli.prompts import Prompt
from detjax.models.config import ModelConfig
from detjax.models.tokenizer import Tokenizer
from detjax.serving.request import Request

MAX_COMPLETIONS = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to compute, apart from how: the requests, and what ends a completion.

    Attributes:
        requests: One for each prompt, in order.
        stop_strings: Texts that end a completion.
        end_ids: Tokens that end one.
        max_len: Longest prompt and completion together that may come up.
    """

    requests: tuple[Request, ...]
    stop_strings: tuple[str, ...]
    end_ids: frozenset[int]
    max_len: int

    @property
    def seqs(self) -> tuple[tuple[int, int], ...]:
        """(prompt, sequence) of every completion, in the order in which they are written."""
        return tuple((i, s) for i, r in enumerate(self.requests) for s in range(r.sampling.n))


def make_job(
    args: GenerateArgs, prompts: Sequence[Prompt], tokenizer: Tokenizer, config: ModelConfig
) -> Job:
    """Turn prompts into requests that fit the model.

    Raises:
        InputError: If a prompt has no tokens, too many, or some that the model does not know.
    """
    end_ids = frozenset(config.eos_token_ids)
    if tokenizer.eos_id is not None:
        end_ids |= {tokenizer.eos_id}
    sampling = dataclasses.replace(sampling_params(args), stop_token_ids=tuple(sorted(end_ids)))
    context = config.max_position_embeddings
    requests = []
    for prompt in prompts:
        with bad_input(f"{prompt.origin}: "):
            ids = _encode(prompt, tokenizer, has_control=args.control_tokens)
        _check_ids(ids, prompt.origin, config)
        room = min(sampling.max_tokens, context - len(ids))
        requests.append(
            Request(
                prompt_token_ids=tuple(ids),
                sampling=dataclasses.replace(sampling, max_tokens=room),
                is_deterministic=args.mode != "fast",
            )
        )
    _check_number(len(requests) * sampling.n)
    _check_pages(args, prompts, requests)
    longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)
    return Job(
        requests=tuple(requests),
        stop_strings=args.stop,
        end_ids=end_ids,
        max_len=_rounded_len(longest, context),
    )


def _encode(prompt: Prompt, tokenizer: Tokenizer, *, has_control: bool) -> list[int]:
    if prompt.messages:
        return tokenizer.apply_chat_template(prompt.messages, has_control=has_control)
    return tokenizer.encode(prompt.text, has_control=has_control)


def _check_ids(ids: Sequence[int], origin: str, config: ModelConfig) -> None:
    context = config.max_position_embeddings
    if not ids:
        raise InputError(f"{origin} has no tokens; give some text")
    if len(ids) >= context:
        raise InputError(
            f"{origin} has {len(ids)} tokens, but the model's context is {context} and one must "
            "be left to generate; shorten it"
        )
    if max(ids) >= config.vocab_size:
        raise InputError(
            f"{origin} has token id {max(ids)}, but the model's vocabulary is {config.vocab_size}; "
            "the tokenizer is of another model"
        )


def _check_number(num_completions: int) -> None:
    if num_completions > MAX_COMPLETIONS:
        raise InputError(
            f"these are {num_completions} completions, more than {MAX_COMPLETIONS}; lower --n, or "
            "give the prompts in several runs"
        )


def _check_pages(
    args: GenerateArgs, prompts: Sequence[Prompt], requests: Sequence[Request]
) -> None:
    """Refuse a completion that may not fit in the pages of one replica."""
    from detjax.numerics import NumericsProfile

    if not args.cache_pages:
        return
    page_len, room = NumericsProfile().attention_block, args.cache_pages // args.dp
    for prompt, request in zip(prompts, requests, strict=True):
        length = len(request.prompt_token_ids) + request.sampling.max_tokens
        needed = math.ceil(length / page_len)
        if needed > room:
            raise InputError(
                f"--cache-pages {args.cache_pages}: {prompt.origin} and its completion may have "
                f"{length} tokens, {needed} pages of {page_len}, and a replica has {room}; give "
                f"{needed * args.dp} or more, or lower --max-tokens"
            )


def _rounded_len(longest: int, context: int) -> int:
    """Round up to a power of two: prompts of about the same length share compiled programs."""
    return min(context, max(256, 1 << (longest - 1).bit_length()))
