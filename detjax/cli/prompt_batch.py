# SPDX-License-Identifier: Apache-2.0
"""Turns prompts into requests that fit the model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from detjax.cli.arguments import GenerateArgs, about_form, sampling_params
from detjax.cli.errors import InputError, bad_input
from detjax.cli.options import read_lora_modules
from detjax.cli.prompts import PromptEntry
from detjax.engine.requests.checks import RequestLimits
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import draw_seed
from detjax.engine.requests.text_request import text_request
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.engine.scheduling.workload import Workload
from detjax.models.config import ModelConfig
from detjax.models.tokenizer import Tokenizer
from detjax.parallel.job_spec import find_job

MAX_COMPLETIONS = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBatch:
    """What to compute, apart from how.

    Attributes:
        requests: One for each prompt, in order.
        work: How much it is.
        extras: What completions of each prompt are written with.
        adapters: Name of the adapter that answers each prompt; "" is the model alone.
    """

    requests: tuple[Request, ...]
    work: Workload
    extras: tuple[Mapping[str, Any], ...]
    adapters: tuple[str, ...]

    def naming(self, hashes: Mapping[str, str]) -> "PromptBatch":
        """Return the batch with requests that name their adapters by these hashes."""
        requests = (
            dataclasses.replace(request, adapter=hashes.get(name, ""))
            for request, name in zip(self.requests, self.adapters, strict=True)
        )
        return dataclasses.replace(self, requests=tuple(requests))

    @property
    def seqs(self) -> tuple[tuple[int, int], ...]:
        """(prompt, sequence) of every completion that is made."""
        return tuple(
            (i, s) for i, r in enumerate(self.requests) for s in range(r.sampling.num_sequences)
        )


def seeded(args: GenerateArgs, prompts: Sequence[PromptEntry]) -> tuple[GenerateArgs, bool]:
    """Return the options with a seed, and whether it was drawn: where tokens are sampled by none.

    Raises:
        InputError: If it would be drawn in each of several processes.
    """
    if args.seed is not None:
        return args, False
    is_drawn = any(
        prompt.sampling.get("temperature", args.temperature) and prompt.sampling.get("seed") is None
        for prompt in prompts
    )
    with bad_input():
        job = find_job(args.coordinator, args.num_processes, args.process_id)
    if is_drawn and job is not None:
        raise InputError(
            f"--seed must be given where tokens are sampled in a job of {job.num_processes} "
            "processes, which draw the same noise"
        )
    return dataclasses.replace(args, seed=draw_seed() if is_drawn else 0), is_drawn


def make_prompt_batch(
    args: GenerateArgs, prompts: Sequence[PromptEntry], tokenizer: Tokenizer, config: ModelConfig
) -> PromptBatch:
    """Turn prompts into requests that fit the model.

    Raises:
        InputError: If a prompt has no tokens, too many, or some that the model does not know.
    """
    of_command = sampling_params(args)
    modules = read_lora_modules(args.lora_modules)
    context = config.max_position_embeddings
    max_len = args.max_len or context
    if max_len > context:
        raise InputError(
            f"--max-len {max_len} is above the model's context of {context} tokens; give at most "
            f"{context}, or leave it out"
        )
    limits = RequestLimits.of(config, max_len)
    if args.max_len is not None:
        limits = dataclasses.replace(limits, max_len_name="--max-len")
    requests = []
    for prompt in prompts:
        with bad_input(f"{prompt.origin}: "):
            ids = _encode(prompt, tokenizer, has_control=args.control_tokens)
            sampling = of_command.with_fields(prompt.sampling)
        with bad_input(rephrase=_with_truncation):
            requests.append(
                text_request(
                    ids,
                    sampling,
                    what=prompt.origin,
                    limits=limits,
                    is_deterministic=args.mode != "fast",
                    tokenizer=tokenizer,
                    seed=args.seed or 0,
                )
            )
    _check_forms(requests, tokenizer, config, of_command=of_command.structured_output)
    _check_number(sum(request.sampling.num_sequences for request in requests))
    _check_pages(args, prompts, requests)
    return PromptBatch(
        requests=tuple(requests),
        work=Workload.of(requests),
        extras=tuple(prompt.extras for prompt in prompts),
        adapters=tuple(_adapter_of(prompt, list(modules)) for prompt in prompts),
    )


def _with_truncation(message: str) -> str:
    """A message about a prompt that is too long also names the options that can help."""
    more = "raise --max-len, or " if "more than --max-len of" in message else ""
    cut = f"; {more}shorten the prompt (--truncate-prompt-tokens keeps its end)"
    return message.replace("; shorten the prompt", cut)


def _adapter_of(prompt: PromptEntry, names: Sequence[str]) -> str:
    """The adapter of a prompt: the one that it names, or the only one there is."""
    if prompt.lora is None:
        return names[0] if len(names) == 1 else ""
    if prompt.lora not in ("", *names):
        known = f"it has {', '.join(names)}" if names else "there is none"
        raise InputError(
            f"{prompt.origin}: `lora` is {prompt.lora!r:.80}, which is no name of --lora-modules; "
            f"{known}"
        )
    return prompt.lora


def _check_forms(
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    config: ModelConfig,
    *,
    of_command: StructuredOutput | None,
) -> None:
    """Compile the forms of output, so that a mistake is told before a model is loaded."""
    forms = {form for r in requests if (form := r.sampling.structured_output) is not None}
    if not forms:
        return
    from detjax.engine.sampling.grammars import Grammars

    grammars = Grammars(
        tokenizer.backend.to_str, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
    )
    for form in forms:
        with bad_input(rephrase=partial(about_form, form.kind) if form == of_command else str):
            grammars.check(form)


def _encode(prompt: PromptEntry, tokenizer: Tokenizer, *, has_control: bool) -> list[int]:
    if prompt.token_ids:
        return list(prompt.token_ids)
    if prompt.messages:
        return tokenizer.apply_chat_template(
            prompt.messages, variables=prompt.variables, has_control=has_control
        )
    return tokenizer.encode(prompt.text, has_control=has_control)


def _check_number(num_completions: int) -> None:
    if num_completions > MAX_COMPLETIONS:
        raise InputError(
            f"these are {num_completions} completions, more than {MAX_COMPLETIONS}; lower --n, or "
            "give the prompts in several runs"
        )


def _check_pages(
    args: GenerateArgs, prompts: Sequence[PromptEntry], requests: Sequence[Request]
) -> None:
    """Refuse a completion that may not fit in the pages of one replica."""
    if not args.num_pages:
        return
    from detjax.numerics import NumericsProfile

    page_len, room = NumericsProfile().attention_block, args.num_pages // args.dp
    for prompt, request in zip(prompts, requests, strict=True):
        length = len(request.prompt_token_ids) + request.sampling.max_tokens
        needed = math.ceil(length / page_len)
        if needed > room:
            raise InputError(
                f"--cache-pages {args.num_pages}: {prompt.origin} and its completion may have "
                f"{length} tokens, {needed} pages of {page_len}, and a replica has {room}; give "
                f"{needed * args.dp} or more, or lower --max-tokens"
            )
