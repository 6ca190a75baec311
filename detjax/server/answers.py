# SPDX-License-Identifier: Apache-2.0
"""Answers in OpenAI's shapes: choices, chunks, logprobs, usage, and the proof beside them."""

import base64
import dataclasses
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detjax.engine.outputs.request_output import FinishReason, TokenEvent
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.server.answer_reader import AnswerSyntax, ReasoningCount, Said, read
from detjax.server.echo import NO_ECHO, Echo, echo_tokens, legacy_logprobs, prompt_logprobs
from detjax.server.output_deltas import OutputDelta
from detjax.server.receipts import receipt_line, weights_of
from detjax.server.served_adapters import ServedAdapter
from detjax.server.served_model import ServedModel

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How the answer to one request is written.

    Attributes:
        model: That answers.
        is_chat: Whether it is a chat completion.
        sampling: As it was used.
        is_deterministic: Whether the answer is canonical.
        num_top: Logprobs are wanted, with so many of the most likely; None if not.
        has_token_ids: Token ids are wanted.
        names_ids: Tokens of logprobs are named by their ids.
        has_logprob_bytes: Exact logprobs are wanted.
        has_receipt: A receipt is wanted.
        num_prompt_top: Logprobs of the prompt are wanted in vLLM's shape, with so many of the most
            likely; None if not.
        request_id: What the answer's id ends with.
        syntax: In which syntax the model writes; None where an answer is text alone.
        warnings: What the client may have meant otherwise.
        adapter: That answers with the model; None is the model alone.
    """

    model: ServedModel
    is_chat: bool
    sampling: SamplingParams
    is_deterministic: bool
    num_top: int | None
    has_token_ids: bool
    names_ids: bool
    has_logprob_bytes: bool
    has_receipt: bool
    request_id: str
    num_prompt_top: int | None = None
    syntax: AnswerSyntax | None = None
    warnings: tuple[str, ...] = ()
    adapter: ServedAdapter | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    sampling_values: Json = dataclasses.field(init=False)

    def __post_init__(self):
        """Write the sampling down once: a choice has all of it, which may be 100,000 tokens."""
        object.__setattr__(self, "sampling_values", self.sampling.as_dict())

    @property
    def adapter_hash(self) -> str:
        """As `Request` has it."""
        return "" if self.adapter is None else self.adapter.sha256

    def card(self, *, is_chunk: bool) -> Json:
        """What every answer and every chunk begins with."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": f"{kind}.chunk" if is_chunk and self.is_chat else kind,
            "created": self.created,
            "model": self.model.name if self.adapter is None else self.adapter.name,
            "system_fingerprint": self.model.fingerprint,
        }

    def choice(self, index: int, echo: str | None, deltas: Sequence[OutputDelta]) -> Json:
        """A whole choice, of all its deltas."""
        last, begin = deltas[-1], self.echo(echo, deltas[0])
        text = begin.text + "".join(delta.text for delta in deltas)
        tokens = [token for delta in deltas for token in delta.tokens]
        choice: Json = {"index": index, "finish_reason": _reason(last.finish_reason)}
        if self.is_chat:
            said = Said(content=text) if self.syntax is None else read(self.syntax, text)
            choice["message"] = {
                "role": "assistant",
                "content": said.content if said.content or not any(said) else None,
                "refusal": None,
                **self.said(said, index),
            }
            choice["finish_reason"] = _reason(last.finish_reason, has_calls=bool(said.calls))
        else:
            choice["text"] = text
        choice["logprobs"] = self.logprobs(tokens, len(begin.text), begin)
        if self.has_token_ids and last.completion is not None:
            choice["prompt_token_ids"] = list(last.completion.prompt_token_ids)
            choice["token_ids"] = list(last.completion.token_ids)
        return choice | self.proof(last)

    def said(self, said: Said, index: int, num_calls: int | None = None) -> Json:
        """Reasoning and calls of a message, where there are some.

        Args:
            said: All of it, or what is new.
            index: Of the choice.
            num_calls: Of a chunk, the calls that came before.
        """
        told: Json = {"reasoning_content": said.reasoning} if said.reasoning else {}
        calls: list[Json] = []
        for number, call in enumerate(said.calls, num_calls or 0):
            place = {} if num_calls is None else {"index": number}
            made = {"id": self._call_id(index, number), "type": "function"}
            calls.append(place | made | {"function": call._asdict()})
        if said.arguments:
            more = {"index": (num_calls or 0) - 1, "function": {"arguments": said.arguments}}
            calls.insert(0, more)
        return told | ({"tool_calls": calls} if calls else {})

    def _call_id(self, index: int, number: int) -> str:
        """The name of a call: nine letters and digits, which Mistral's template asks for."""
        return hashlib.sha256(f"{self.request_id} {index} {number}".encode()).hexdigest()[:9]

    def chunk(
        self,
        index: int,
        delta: OutputDelta,
        offset: int,
        *,
        is_first: bool,
        said: Said | None = None,
        num_calls: int = 0,
    ) -> Json:
        """A choice of a chunk: what is new.

        Args:
            index: Of the choice.
            delta: What is new.
            offset: Where its tokens begin in the text.
            is_first: Nothing came before.
            said: Of a conversation, what is new of what is said, if that is not the delta's text.
            num_calls: Calls that came before.
        """
        choice: Json = {"index": index, "finish_reason": None}
        if self.is_chat:
            said = Said(content=delta.text) if said is None else said
            choice["delta"] = {"role": "assistant"} if is_first else {}
            choice["delta"] |= {"content": said.content} | self.said(said, index, num_calls)
            num_calls += len(said.calls)
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self.logprobs(delta.tokens, offset)
        if self.has_token_ids:
            choice["token_ids"] = [event.token_id for event, _ in delta.tokens]
            if is_first:
                choice["prompt_token_ids"] = list(delta.prompt_token_ids)
        if delta.completion is not None:
            choice["finish_reason"] = _reason(delta.finish_reason, has_calls=num_calls > 0)
            choice |= self.proof(delta)
        return choice

    def proof(self, last: OutputDelta) -> Json:
        """What lets anybody ask again and compare; of the last delta, which has it all."""
        done = last.completion
        assert done is not None
        proof: Json = {
            "digest": done.digest(),
            "is_deterministic": self.is_deterministic,
            "weights": weights_of(self.model, done),
            "weight_version": done.weight_version,
            "sequence": done.sequence_idx,
            "rollbacks": {
                "windows": last.windows.num_windows,
                "windows_rolled_back": last.windows.num_rollbacks,
                "draft_tokens": last.windows.num_drafts,
                "draft_tokens_rolled_back": last.windows.num_rolled_back,
            },
            "sampling": self.sampling_values,
        }
        if self.adapter is not None:
            proof["adapter"] = self.adapter.sha256
        if self.warnings:
            proof["warnings"] = list(self.warnings)
        if self.has_logprob_bytes:
            proof["logprobs_f32"] = _exact(done.logprobs)
        if self.has_logprob_bytes and done.prompt_logprobs is not None:
            proof["prompt_logprobs_f32"] = _exact([p.logprob for p in done.prompt_logprobs])
        if self.has_receipt:
            proof["receipt"] = receipt_line(
                self.model, done, last.whole_text, self.sampling, self.adapter_hash
            )
        return {"detjax": proof}

    def echo(self, text: str | None, first: OutputDelta) -> Echo:
        """What an answer begins with, as its first delta has it: the prompt, if it is echoed.

        With `logprobs` it is the text of the prompt's tokens, so that each has its offset in it.
        Tokens without a text, as special ones, are among them.
        """
        if text is None or self.num_top is None or first.prompt_logprobs is None:
            return Echo(text or "")
        return echo_tokens(self.model.tokenizer, first.prompt_token_ids, first.prompt_logprobs)

    def of_prompt(self, delta: OutputDelta, *, is_first: bool = True) -> Json:
        """What vLLM's server tells of a prompt, where it is wanted.

        Of a conversation the ids, with the first delta; the logprobs with the delta that has them.
        """
        has_ids = self.is_chat and self.has_token_ids and is_first
        ids: Json = {"prompt_token_ids": list(delta.prompt_token_ids)} if has_ids else {}
        return ids | self._prompt_logprobs(delta)

    def _prompt_logprobs(self, first: OutputDelta) -> Json:
        scores = first.prompt_logprobs
        if self.num_prompt_top is None or scores is None:
            return {}
        ids, most = first.prompt_token_ids, self.num_prompt_top
        listed = prompt_logprobs(ids, scores, num_top=most, text_of=self.text)
        return {"prompt_logprobs": listed}

    def logprobs(
        self, tokens: Sequence[tuple[TokenEvent, str]], offset: int, echo: Echo = NO_ECHO
    ) -> Json | None:
        """Logprobs of some tokens, in the shape of the route; None where they are not wanted."""
        if self.num_top is None:
            return None
        if self.is_chat:
            return {"content": [self._of_chat(event) for event, _ in tokens], "refusal": None}
        return legacy_logprobs(echo.tokens, tokens, offset, num_top=self.num_top, text_of=self.name)

    def _of_chat(self, event: TokenEvent) -> Json:
        top = [self._of_token(*pair) for pair in event.top_logprobs]
        return self._of_token(event.token_id, event.logprob) | {"top_logprobs": top}

    def _of_token(self, token_id: int, logprob: np.float32) -> Json:
        data = self.model.tokenizer.token_bytes(token_id)
        return {"token": self.name(token_id), "logprob": float(logprob), "bytes": list(data)}

    def name(self, token_id: int) -> str:
        """A token as its logprob names it."""
        return f"token_id:{token_id}" if self.names_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """A token for people: its text, or where it has none of its own, its name or bytes."""
        data = self.model.tokenizer.token_bytes(token_id)
        if not data:
            return self.model.tokenizer.backend.id_to_token(token_id) or f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _exact(logprobs: Sequence[np.float32]) -> str:
    return base64.b64encode(np.asarray(logprobs, "<f4").tobytes()).decode()


def _reason(reason: FinishReason | None, *, has_calls: bool = False) -> str | None:
    """As OpenAI names it; "error" and "cancelled" are ours."""
    if has_calls and reason is FinishReason.STOP:
        return "tool_calls"
    return None if reason is None else reason.value


class Usage:
    """Counts the tokens of a request, delta by delta."""

    def __init__(self, num_prompt: int, shape: Shape):
        """Begin with those of its prompts."""
        self._num_prompt, self._num_tokens = num_prompt, 0
        self._cached: dict[int, int] = {}
        self._is_chat, self._syntax = shape.is_chat, shape.syntax
        self._reasoning: dict[tuple[int, int], ReasoningCount] = {}

    def add(self, delta: OutputDelta) -> None:
        """Take a delta."""
        self._num_tokens += len(delta.tokens)
        if self._syntax is not None:
            place = delta.prompt_idx, delta.sequence_idx
            count = self._reasoning.setdefault(place, ReasoningCount(self._syntax))
            for _, own in delta.tokens:
                count.push(own)
        if delta.sequence_idx == 0:  # the others find what the first of a prompt has computed
            self._cached[delta.prompt_idx] = delta.num_cached

    def as_dict(self) -> Json:
        """As completions have it; a conversation's counts reasoning as well."""
        counts: Json = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        if self._is_chat:
            thought = sum(count.num_tokens for count in self._reasoning.values())
            counts["completion_tokens_details"] = {"reasoning_tokens": thought}
        return counts


def error_body(message: str, *, status: int, code: str, field: str) -> Json:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {"message": message, "type": kind, "param": field or None, "code": code or None}
    }
