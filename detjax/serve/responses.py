# SPDX-License-Identifier: Apache-2.0
"""/v1/responses, as far as it is text in and text out: a chat completion in another form."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from detjax.serve.answers import Json, Usage
from detjax.serve.protocol import (
    ChatRequest,
    CommonFields,
    JsonSchema,
    Messages,
    Name,
    RefusedError,
    ResponseFormat,
    StreamOptions,
)
from detjax.serve.questions import Asked
from detjax.serve.service import Piece
from detjax.serve.streaming import AbstractWriter, Form, raise_failed

TEXT_PARTS = ("input_text", "output_text", "text")


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The form of an answer, as `ResponseFormat` has it, the schema beside its type."""

    type: str = "text"
    name: str = ""
    description: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> ResponseFormat:
        """The same as a chat completion has it."""
        if self.schema is None:
            return ResponseFormat(type=self.type)
        schema = JsonSchema(name=self.name, description=self.description, schema=self.schema)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How an answer is written.

    Attributes:
        format: Its form.
        verbosity: Taken only as "medium".
    """

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses. A field that is not here is refused, as everywhere.

    Attributes:
        input: A text, or messages whose content is text or parts of text.
        instructions: A system message before them.
        max_output_tokens: As many as the context has room for if not given.
        text: The form of the answer.
        temperature, top_p, seed, stream, is_deterministic, priority, cache_salt: As chat
            completions have them.
        stream_options: With `stream`; taken only with its values false.
        others: Taken only as `NEUTRAL` has them: nothing is kept, looked up or called.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CommonFields.NEUTRAL,
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "include": ([],),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": ({},),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    input: str | Messages
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    text: TextConfig | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    is_deterministic: bool | None = None
    priority: int = 0
    cache_salt: Name = ""
    access_programs: dict[str, Any] | None = None
    background: bool | None = None
    background_options: dict[str, Any] | None = None
    context_management: list[Any] | None = None
    conversation: str | dict[str, Any] | None = None
    image: dict[str, Any] | None = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        super().check()
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise RefusedError(
                f"text.verbosity={self.text.verbosity!r} is not supported: leave it out",
                field="text.verbosity",
            )
        if self.stream_options is not None and self.stream_options.include_usage:
            raise RefusedError(
                "stream_options.include_usage=true is of completions: a response always ends "
                "with its usage; leave it out",
                field="stream_options.include_usage",
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
            stream_options=self.stream_options,
            response_format=self.text.format.as_chat() if self.text and self.text.format else None,
            is_deterministic=self.is_deterministic,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""What a response calls the fields of the chat completion that answers it."""

_PLACE = re.compile(r"^messages\[(\d+)\]")


@contextlib.contextmanager
def named_as_asked(asked: ResponsesRequest) -> Iterator[None]:
    """Let errors of the chat completion name the fields of the response."""
    try:
        yield
    except RefusedError as error:
        raise _as_asked(error, asked) from error


def _as_asked(error: RefusedError, asked: ResponsesRequest) -> RefusedError:
    def place(found: re.Match[str]) -> str:
        index = int(found[1]) - bool(asked.instructions)
        if index < 0:
            return "instructions"
        return "input" if isinstance(asked.input, str) else f"input[{index}]"

    message = _PLACE.sub(place, str(error))
    field = _PLACE.sub(place, error.field)
    if (name := _NAMES.get(field)) is not None:
        message, field = message.replace(field, name), name
    return RefusedError(message, status=error.status, code=error.code, field=field)


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


def _card(asked: ResponsesRequest, card: Json, sampling: Json, status: str) -> Json:
    """What a response has, whole or begun; `sampling` as it was used."""
    return {
        "id": "resp_" + card["id"].partition("-")[2],
        "object": "response",
        "created_at": card["created"],
        "status": status,
        "model": card["model"],
        "system_fingerprint": card["system_fingerprint"],
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
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
    whole = _card(asked, card, proof["sampling"], status)
    if status == "incomplete":
        whole["incomplete_details"] = {"reason": "max_output_tokens"}
    whole["output"] = [_item(card, text, status)]
    whole["usage"] = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
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
        sampling = self._asked.shape.sampling_values
        begun = _card(self._request, self._card, sampling, "in_progress")
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
        usage = Usage(self._asked.num_prompt_tokens)
        for piece in self._pieces:
            usage.add(piece)
        counts = usage.as_dict()
        whole = _finished(self._request, self._card, text, reason, choice["detjax"], counts)
        return b"".join([
            self._at("response.output_text.done", text=text, logprobs=[]),
            self._at("response.content_part.done", part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=whole["output"][0]),
            self._event(f"response.{whole['status']}", response=whole),
        ])  # fmt: skip

    def error(self, error: RefusedError) -> bytes:
        """As `AbstractWriter` has it."""
        error = _as_asked(error, self._request)
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
