# SPDX-License-Identifier: Apache-2.0
"""/v1/responses, as far as it is text in and text out: a chat completion in another form."""

from typing import Annotated, Any

import msgspec

from detjax.serve.answers import Json, usage
from detjax.serve.protocol import ChatRequest, Messages, Name, RefusedError
from detjax.serve.questions import Asked
from detjax.serve.service import Piece
from detjax.serve.streaming import AbstractWriter, Form, raise_failed

TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses. A field that is not here is refused, as everywhere.

    Attributes:
        model: The served name.
        input: A text, or messages whose content is text or parts of text.
        instructions: A system message before them.
        max_output_tokens: As many as the context has room for if not given.
        temperature, top_p, seed, stream, is_deterministic, priority, cache_salt, user, metadata:
            As chat completions have them.
        store: Taken only as false and null: nothing is kept.
    """

    model: Name
    input: str | Messages
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stream: bool = False
    is_deterministic: bool | None = None
    priority: int = 0
    cache_salt: Name = ""
    user: str = ""
    metadata: dict[str, str] | None = None
    store: bool | None = None

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        if self.store:
            raise RefusedError(
                "store=true is not supported: no answer is kept; leave it out", field="store"
            )

    def as_chat(self) -> ChatRequest:
        """The same as a chat completion."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [_message(i, item) for i, item in enumerate(self.input)]
        return ChatRequest(
            model=self.model,
            messages=messages,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stream=self.stream,
            is_deterministic=self.is_deterministic,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


def _message(index: int, item: dict[str, Any]) -> dict[str, Any]:
    """A message of the template, of an item of the input."""
    where = f"input[{index}]"
    unknown = set(item) - {"type", "role", "content", "id", "status"}
    if item.get("type", "message") != "message" or unknown:
        what = f"has {sorted(unknown)}" if unknown else f"is of type {item['type']!r}"
        raise RefusedError(f"{where} {what}: only messages of text are supported", field="input")
    content = item.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
                raise RefusedError(
                    f"{where}.content has a part that is no text: only text is supported",
                    field="input",
                )
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str) or not isinstance(item.get("role"), str):
        raise RefusedError(f"{where} must have a role and a content of text", field="input")
    return {"role": item["role"], "content": content}


def _card(asked: ResponsesRequest, card: Json, status: str) -> Json:
    """What a response has, whole or begun."""
    return {
        "id": "resp_" + card["id"].partition("-")[2],
        "object": "response",
        "created_at": card["created"],
        "status": status,
        "model": card["model"],
        "system_fingerprint": card["system_fingerprint"],
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "metadata": asked.metadata or {},
        "error": None,
        "incomplete_details": None,
        "output": [],
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
        "usage": None,
    }


def _item(card: Json, text: str, status: str) -> Json:
    """The one message of an answer."""
    return {
        "id": "msg_" + card["id"].partition("-")[2],
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(text)] if status != "in_progress" else [],
    }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": []}


def _finished(
    asked: ResponsesRequest, card: Json, text: str, reason: str | None, proof: Json, counts: Json
) -> Json:
    """A response that has ended."""
    status = "incomplete" if reason == "length" else "completed"
    whole = _card(asked, card, status)
    if status == "incomplete":
        whole["incomplete_details"] = {"reason": "max_output_tokens"}
    whole["output"] = [_item(card, text, status)]
    whole["usage"] = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
    return whole | {"detjax": proof}


def form_of(asked: ResponsesRequest) -> Form:
    """Makes a response of a chat completion."""

    def form(answer: Json) -> Json:
        choice = answer["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        return _finished(asked, answer, text, reason, choice["detjax"], answer["usage"])

    return form


class ResponseWriter(AbstractWriter):
    """The events of a response."""

    def __init__(self, request: ResponsesRequest, asked: Asked):
        """Nothing is written yet."""
        self._request, self._asked = request, asked
        self._card = asked.shape.card(is_chunk=False)
        self._pieces: list[Piece] = []
        self._num_events = 0

    def of(self, pieces: list[Piece]) -> bytes:
        """As `AbstractWriter` has it."""
        for piece in pieces:
            raise_failed(piece)
        events = [] if self._pieces else self._begin()
        for piece in pieces:
            if piece.text:
                events.append(self._at("response.output_text.delta", delta=piece.text, logprobs=[]))
        self._pieces += pieces
        return b"".join(events)

    def _begin(self) -> list[bytes]:
        begun = _card(self._request, self._card, "in_progress")
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event(
                "response.output_item.added",
                output_index=0,
                item=_item(self._card, "", "in_progress"),
            ),
            self._at("response.content_part.added", part=_part("")),
        ]

    def end(self) -> bytes:
        """As `AbstractWriter` has it."""
        choice = self._asked.shape.choice(0, "", self._pieces)
        text, reason = choice["message"]["content"], choice["finish_reason"]
        num_prompt = self._asked.num_prompt_tokens
        num_tokens = sum(len(piece.tokens) for piece in self._pieces)
        counts = usage(num_prompt, num_tokens)
        whole = _finished(self._request, self._card, text, reason, choice["detjax"], counts)
        return b"".join([
            self._at("response.output_text.done", text=text, logprobs=[]),
            self._at("response.content_part.done", part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=whole["output"][0]),
            self._event(f"response.{whole['status']}", response=whole),
        ])  # fmt: skip

    def error(self, error: RefusedError) -> bytes:
        """As `AbstractWriter` has it."""
        return self._event(
            "error", message=str(error), code=error.code or None, param=error.field or None
        )

    def _at(self, kind: str, **facts: Any) -> bytes:
        """An event of the one part of the one message."""
        item_id = _item(self._card, "", "in_progress")["id"]
        return self._event(kind, item_id=item_id, output_index=0, content_index=0, **facts)

    def _event(self, kind: str, **facts: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events} | facts
        self._num_events += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(body) + b"\n\n"
