# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked: one prompt, as token ids, and how to continue it."""

from dataclasses import dataclass

from detjax.engine.requests.limits import integer, replace_field, token_ids_of
from detjax.engine.requests.sampling_params import SamplingParams

MAX_PRIORITY = 100
"""Farthest that a priority may be from 0: beyond it, others would wait for days."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt, as token ids, and how to continue it.

    Attributes:
        prompt_token_ids: At least one.
        sampling: How each next token is chosen.
        is_deterministic: Whether the answer must be the canonical one. Where every step is
            canonical (`invariant`) it is, asked for or not.
        priority: Higher goes first, from -100 to 100; a level is worth
            `config.AGEING_STEPS` steps of waiting.
        cache_salt: Prefixes are shared among requests of the same salt alone, so nobody learns from
            the time of an answer what another tenant has asked. It changes no bit.
        adapter: Hash of the adapter (LoRA) with which the model answers; "" is the model alone.
        predicted_token_ids: Tokens that the answer may begin with. An engine with
            `has_prompt_lookup` verifies them in windows, as drafts, which is quicker than decoding
            where they are right. They change no bit.

    Raises:
        ValueError: If a value has another type or is outside its range; the message names it.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    is_deterministic: bool = True
    priority: int = 0
    cache_salt: str = ""
    predicted_token_ids: tuple[int, ...] = ()
    adapter: str = ""

    def __post_init__(self):
        """Check every type, and the range of the priority."""
        for name in ("prompt_token_ids", "predicted_token_ids"):
            replace_field(self, name, token_ids_of(name, getattr(self, name)))
        replace_field(self, "priority", integer("priority", self.priority))
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ValueError(
                f"priority={self.priority} must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]"
            )
        for name, kind in (
            ("sampling", SamplingParams), ("is_deterministic", bool), ("cache_salt", str),
            ("adapter", str),
        ):  # fmt: skip
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a {kind.__name__}")
