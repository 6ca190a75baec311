# SPDX-License-Identifier: Apache-2.0
"""How much an engine will be asked, where that is known before the engine is made. No JAX."""

from collections.abc import Sequence
from dataclasses import dataclass

from detjax.engine.requests.request import Request

_LEAST_LEN = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """How much a list of requests asks for; `detjax.sizing.choose_sizes` sizes an engine for it.

    Attributes:
        num_sequences: Of all requests.
        longest: Most tokens of a prompt and its completion together.
        longest_prompt: Most tokens of a prompt.
    """

    num_sequences: int
    longest: int
    longest_prompt: int

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Workload":
        """Measure requests, of which there is at least one."""
        return cls(
            num_sequences=sum(r.sampling.num_sequences for r in requests),
            longest=max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests),
            longest_prompt=max(len(r.prompt_token_ids) for r in requests),
        )

    def max_len(self, context: int) -> int:
        """`longest` rounded up, in a context: work of about one length shares programs."""
        return min(context, max(_LEAST_LEN, 1 << (self.longest - 1).bit_length()))
