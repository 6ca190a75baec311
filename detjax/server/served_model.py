# SPDX-License-Identifier: Apache-2.0
"""What a server serves, and what it takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from detjax.engine.async_engine import StepsRequests
from detjax.engine.requests.checks import RequestLimits
from detjax.models.tokenizer import Tokenizer
from detjax.proof.identity import Identity
from detjax.proof.signing import SigningKey
from detjax.server.protocol import NO_DEFAULTS
from detjax.server.served_adapters import ServedAdapters


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model and what is told of it.

    Attributes:
        name: That clients ask for.
        engine: An `Engine` or a `ReplicatedEngine`; nothing else may step it.
        tokenizer: Of the model.
        vocab_size: Of the model.
        max_len: Most tokens of a prompt and its answer.
        mode: `invariant`, `dvr` or `fast`.
        fingerprint: Of numerics and build; the same for every model, mesh, batch and mode.
        identity: What model, numerics and build these are.
        end_token_ids: The model's own.
        weight_version: Of the weights in `identity`.
        identify: Gives the identity as it is now, which takes a while after the weights have
            changed; None where it never changes.
        signing_key: Of receipts; None signs none.
        default_sampling: Fields of `SamplingParams` that requests leave out.
        adapters: That clients may ask for in place of the model; None has none.
    """

    name: str
    engine: StepsRequests
    tokenizer: Tokenizer
    vocab_size: int
    max_len: int
    mode: str
    fingerprint: str
    identity: Identity
    end_token_ids: tuple[int, ...]
    weight_version: int = 0
    identify: Callable[[], Identity] | None = None
    signing_key: SigningKey | None = None
    default_sampling: Mapping[str, Any] = NO_DEFAULTS
    adapters: ServedAdapters | None = None

    @property
    def limits(self) -> RequestLimits:
        """What is allowed of a request."""
        return RequestLimits(
            vocab_size=self.vocab_size,
            eos_token_ids=self.end_token_ids,
            max_len=self.max_len,
            max_len_name="this server's context",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a server takes.

    Attributes:
        body_bytes: Of a request.
        body_s: Seconds that a body may take to arrive.
        requests_per_key: At once, of one API key; 0 sets no limit.
        request_s: Seconds an answer may take; 0 sets no limit.
        stream_interval: Tokens of a sequence in an event of a stream; the first goes at once.
        logs_prompts: The log has the text of prompts.
        max_held: Requests that may wait while the server is paused, sleeps or gets other weights.
    """

    body_bytes: int = 8 << 20
    body_s: float = 60.0
    requests_per_key: int = 0
    request_s: float = 0.0
    stream_interval: int = 1
    logs_prompts: bool = False
    max_held: int = 4096
