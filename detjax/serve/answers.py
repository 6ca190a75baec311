# SPDX-License-Identifier: Apache-2.0
"""Answers in OpenAI's shapes: choices, chunks, logprobs, usage, and the proof beside them."""

import base64
import dataclasses
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from detjax.models.tokenizer import Tokenizer
from detjax.serve.service import Piece
from detjax.serving.request import (
    Completion,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    TokenEvent,
    TopLogprobs,
)
from detjax.serving.text import TextStream

Json = dict[str, Any]

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


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

    text: str
    tokens: tuple[EchoedToken, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How the answer to one request is written.

    Attributes:
        tokenizer: Of the model.
        model: The served name.
        fingerprint: `system_fingerprint` of every answer.
        is_chat: Whether it is a chat completion.
        sampling: As it was used.
        is_deterministic: Whether the answer is canonical.
        num_top: Logprobs are wanted, with so many of the most likely; None if not.
        has_token_ids: Token ids are wanted.
        has_logprob_bytes: Exact logprobs are wanted.
        num_prompt_top: Logprobs of the prompt are wanted in vLLM's shape, with so many of the most
            likely; None if not.
    """

    tokenizer: Tokenizer
    model: str
    fingerprint: str
    is_chat: bool
    sampling: SamplingParams
    is_deterministic: bool
    num_top: int | None
    has_token_ids: bool
    has_logprob_bytes: bool
    num_prompt_top: int | None = None
    request_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def card(self, *, is_chunk: bool) -> Json:
        """What every answer and every chunk begins with."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": f"{kind}.chunk" if is_chunk and self.is_chat else kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[tuple[TokenEvent, str]],
        done: Completion,
        echo: Echo,
    ) -> Json:
        """A whole choice."""
        choice: Json = {"index": index, "finish_reason": finish_reason(done)}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = echo.text + text
        choice["logprobs"] = self.logprobs(tokens, len(echo.text), echo.tokens)
        return choice | self.proof(done)

    def chunk(self, index: int, piece: Piece, offset: int, *, is_first: bool) -> Json:
        """A choice of a chunk: what is new."""
        choice: Json = {"index": index, "finish_reason": None}
        if self.is_chat:
            choice["delta"] = {"role": "assistant"} if is_first else {}
            choice["delta"]["content"] = piece.text
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self.logprobs(piece.tokens, offset)
        if self.has_token_ids:
            choice["token_ids"] = [event.token_id for event, _ in piece.tokens]
        if piece.completion is not None:
            choice["finish_reason"] = finish_reason(piece.completion)
            choice |= self.proof(piece.completion)
        return choice

    def proof(self, done: Completion) -> Json:
        """What lets anybody ask again and compare."""
        sampling = dataclasses.asdict(self.sampling)
        proof: Json = {
            "digest": done.digest(),
            "is_deterministic": self.is_deterministic,
            "weight_version": done.weight_version,
            "sequence": done.sequence_idx,
            "sampling": sampling | {"stop_token_ids": list(self.sampling.stop_token_ids)},
        }
        if self.has_logprob_bytes:
            proof["logprobs_f32"] = _exact(done.logprobs)
        if self.has_logprob_bytes and done.prompt_logprobs is not None:
            proof["prompt_logprobs_f32"] = _exact([p.logprob for p in done.prompt_logprobs])
        found: Json = {"detjax": proof}
        if self.has_token_ids:
            found["prompt_token_ids"] = list(done.prompt_token_ids)
            found["token_ids"] = list(done.token_ids)
        return found

    def logprobs(
        self,
        tokens: Sequence[tuple[TokenEvent, str]],
        offset: int,
        echoed: Sequence[EchoedToken] = (),
    ) -> Json | None:
        """Logprobs of some tokens, in the shape of the route; None where they are not wanted.

        `offset` is where the first of `tokens` begins in the text; `echoed` begin at 0.
        """
        if self.num_top is None:
            return None
        if self.is_chat:
            return {"content": [self._of_chat(event) for event, _ in tokens], "refusal": None}
        found = [*echoed, *(EchoedToken(e.token_id, text, e.logprob, e.top_logprobs)
                            for e, text in tokens)]  # fmt: skip
        offsets, at = [], 0 if echoed else offset
        for one in found:
            offsets.append(at)
            at += len(one.text)
        return {
            "tokens": [self.text(one.token_id) for one in found],
            "token_logprobs": [None if p is None else float(p) for _, _, p, _ in found],
            "top_logprobs": [self._top(one) for one in found] if self.num_top else None,
            "text_offset": offsets,
        }

    def _top(self, one: EchoedToken) -> Json | None:
        """The most likely tokens of a position; None for the first of a prompt."""
        if one.logprob is None:
            return None
        top = one.top_logprobs[: self.num_top]
        return {self.text(token): float(value) for token, value in top}

    def echo(self, text: str, token_ids: Sequence[int], scores: PromptLogprobs | None) -> Echo:
        """The prompt as an answer begins with it; `text` where its logprobs are not wanted."""
        if not text or self.num_top is None or scores is None:
            return Echo(text, ())
        stream = TextStream(self.tokenizer)
        pieces = [stream.push(token_id).text for token_id in token_ids]
        pieces[-1] += stream.finish()
        logprobs = [(None, ()), *((one.logprob, one.top_logprobs) for one in scores)]
        tokens = tuple(
            EchoedToken(token_id, piece, *of_token)
            for token_id, piece, of_token in zip(token_ids, pieces, logprobs, strict=True)
        )
        return Echo("".join(pieces), tokens)

    def prompt_logprobs(self, token_ids: Sequence[int], scores: PromptLogprobs | None) -> Json:
        """Logprobs of the prompt in vLLM's shape, if they are wanted: null for the first token."""
        if self.num_prompt_top is None or scores is None:
            return {}
        listed: list[Json | None] = [None]
        for token_id, one in zip(token_ids[1:], scores, strict=True):
            entries = {token_id: (one.logprob, one.rank)}
            for rank, (top_id, value) in enumerate(one.top_logprobs[: self.num_prompt_top], 1):
                entries.setdefault(top_id, (value, rank))
            listed.append(
                {
                    str(i): {"logprob": float(value), "rank": rank, "decoded_token": self.text(i)}
                    for i, (value, rank) in entries.items()
                }  # fmt: skip
            )
        return {"prompt_logprobs": listed}

    def _of_chat(self, event: TokenEvent) -> Json:
        top = [self._of_token(*pair) for pair in event.top_logprobs]
        return self._of_token(event.token_id, event.logprob) | {"top_logprobs": top}

    def _of_token(self, token_id: int, logprob: np.float32) -> Json:
        data = self.tokenizer.token_bytes(token_id)
        return {"token": self.text(token_id), "logprob": float(logprob), "bytes": list(data)}

    def text(self, token_id: int) -> str:
        """A token for people: its text, or where it has none of its own, its name or bytes."""
        data = self.tokenizer.token_bytes(token_id)
        if not data:
            return self.tokenizer.backend.id_to_token(token_id) or f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _exact(logprobs: Sequence[np.float32]) -> str:
    return base64.b64encode(np.asarray(logprobs, "<f4").tobytes()).decode()


def finish_reason(done: Completion) -> str:
    """As OpenAI names it; "error" and "cancelled" are ours."""
    return _REASONS.get(done.finish_reason, done.finish_reason.value)


def usage(num_prompt: int, num_tokens: int) -> Json:
    """Tokens of a request."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }


def error_body(message: str, *, status: int, code: str, field: str) -> Json:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {"message": message, "type": kind, "param": field or None, "code": code or None}
    }
