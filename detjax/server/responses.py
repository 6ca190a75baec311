# SPDX-License-Identifier: Apache-2.0
"""/v1/responses, as far as it is text and calls of functions: a chat completion in another form."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from detjax.server.answers import Json, Usage
from detjax.server.protocol import (
    ChatRequest,
    CommonFields,
    JsonSchema,
    Messages,
    Name,
    RefusedError,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    Tools,
)
from detjax.server.questions import Asked
from detjax.server.reading import AnswerReader, Said
from detjax.server.service import Piece
from detjax.server.streaming import AbstractWriter, Form, raise_failed

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


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
        input: A text, or items: messages whose content is text or parts of text, calls of functions
            and what these returned, reasoning.
        tools: Functions that may be called.
        tool_choice: As chat completions have it; a function is {"type": "function", "name": ...}.
        instructions: A system message before them.
        max_output_tokens: As many as the context has room for if not given.
        text: The form of the answer.
        temperature, top_p, seed, stream, is_deterministic, priority, cache_salt,
        structured_outputs: As chat completions have them.
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
    structured_outputs: StructuredOutputs | None = None
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
    tools: Tools | None = None
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

    def messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The conversation, and where each message was in the request."""
        messages: list[dict[str, Any]] = []
        places: list[str] = []
        if self.instructions:
            messages, places = [{"role": "system", "content": self.instructions}], ["instructions"]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}], [*places, "input"]
        for i, item in enumerate(self.input):
            message = _message(i, item)
            before = messages[-1] if messages else {}
            # The text, the reasoning and the calls of one answer are items each.
            if message["role"] == before.get("role") == "assistant" and _goes_on(before, message):
                messages[-1] = before | message | _joined(before, message)
            else:
                messages.append(message)
                places.append(f"input[{i}]")
        return messages, places

    def chat_choice(self) -> str | dict[str, Any] | None:
        """The choice of a tool as a chat completion has it."""
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        return choice

    def as_chat(self) -> ChatRequest:
        """The same as a chat completion."""
        return ChatRequest(
            model=self.model,
            messages=self.messages()[0],
            tools=[_function(i, tool) for i, tool in enumerate(self.tools)] if self.tools else None,
            tool_choice=self.chat_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
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
            structured_outputs=self.structured_outputs,
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
        places = asked.messages()[1]
        index = int(found[1])
        return places[index] if index < len(places) else "input"

    message = _PLACE.sub(place, str(error))
    field = _PLACE.sub(place, error.field)
    if (name := _NAMES.get(field)) is not None:
        message, field = message.replace(field, name), name
    return RefusedError(message, status=error.status, code=error.code, field=field)


def _function(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat completions have it."""
    if tool.get("type") != "function":
        raise RefusedError(
            f"tools[{index}].type={tool.get('type')!r:.80} is not supported: 'function' is",
            field=f"tools[{index}].type",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


_ITEMS = {
    "message": {"role", "content", "phase"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"summary", "content", "encrypted_content"},
}
"""Kinds of items of an input, and what each may have beside its type, id and status."""


def _message(index: int, item: dict[str, Any]) -> dict[str, Any]:
    """A message of the template, of an item of the input."""
    where, kind = f"input[{index}]", item.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise RefusedError(
            f"{where} is of type {kind!r:.80}: only {', '.join(_ITEMS)} are supported",
            field="input",
        )
    given = {name for name, value in item.items() if value is not None}
    if unknown := given - _ITEMS[kind] - {"type", "id", "status"}:
        raise RefusedError(f"{where} has {sorted(unknown)!r:.200}: leave it out", field="input")
    match kind:
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            text = _text(f"{where}.output", item.get("output"))
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
        case "reasoning":
            if item.get("encrypted_content"):
                raise RefusedError(f"{where}.encrypted_content cannot be read", field="input")
            text = _text(f"{where}.content", item.get("content") or item.get("summary") or [])
            return {"role": "assistant", "reasoning_content": text}
    if not isinstance(item.get("role"), str):
        raise RefusedError(f"{where} must have a role", field="input")
    return {"role": item["role"], "content": _text(f"{where}.content", item.get("content"))}


def _text(where: str, content: Any) -> str:
    """A text, or the text of parts of it."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise RefusedError(f"{where} must be text, or parts of text", field="input")
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") in TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise RefusedError(
                f"{where} has a part that is no text: only text is supported", field="input"
            )
    return "".join(part["text"] for part in parts)


def _goes_on(before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether two items are of one answer: reasoning, then text, then calls."""
    if "content" not in before:  # reasoning alone
        return True
    return bool(message.get("tool_calls"))


def _joined(before: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """What both items of an answer have."""
    calls = [*before.get("tool_calls", ()), *message.get("tool_calls", ())]
    content = message.get("content")
    content = before.get("content") if content is None else content
    return {"content": content} | ({"tool_calls": calls} if calls else {})


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
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "usage": None,
    }


def _item(card: Json, text: str, status: str, number: int = 0) -> Json:
    """A message of an answer; the `number`-th of its items."""
    return {
        "id": f"msg_{card['id'].partition('-')[2]}" + (f"_{number}" if number else ""),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(text)] if status != "in_progress" else [],
    }


def _thought(card: Json, text: str, status: str) -> Json:
    """The reasoning of an answer."""
    part = {"type": "reasoning_text", "text": text}
    return {
        "id": "rs_" + card["id"].partition("-")[2],
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [part] if status != "in_progress" else [],
    }


def _call(call: Json, arguments: str, status: str) -> Json:
    """A call of a function, of that of a chat completion."""
    return {
        "id": f"fc_{call['id']}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": arguments,
        "status": status,
    }


def _items(card: Json, message: Json, status: str) -> list[Json]:
    """All items of an answer in one piece."""
    items = []
    if text := message.get("reasoning_content"):
        items.append(_thought(card, text, status))
    calls = message.get("tool_calls", [])
    if (text := message["content"]) or not (items or calls):
        items.append(_item(card, text or "", status, len(items)))
    return [*items, *(_call(call, call["function"]["arguments"], status) for call in calls)]


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": []}


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"


def _finished(
    asked: ResponsesRequest, card: Json, items: list[Json], status: str, proof: Json, counts: Json
) -> Json:
    """A response that has ended."""
    whole = _card(asked, card, proof["sampling"], status)
    if status == "incomplete":
        whole["incomplete_details"] = {"reason": "max_output_tokens"}
    whole["output"] = items
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
        status = _status(choice["finish_reason"])
        items = _items(answer, choice["message"], status)
        return _finished(asked, answer, items, status, choice["detjax"], answer["usage"])

    return form


class ResponseWriter(AbstractWriter):
    """The events of a response. One item is open at a time: reasoning, a message, or a call."""

    def __init__(self, request: ResponsesRequest, asked: Asked):
        """Nothing is written yet."""
        self._request, self._asked = request, asked
        self._card = asked.shape.card(is_chunk=False)
        form = asked.shape.form
        self._reader = None if form is None else AnswerReader(form)
        self._usage = Usage(asked.num_prompt_tokens)
        self._items: list[Json] = []  # that are closed
        self._open: Json | None = None
        self._text = ""  # of the open one
        self._num_calls = 0
        self._last: Piece | None = None
        self._num_events = 0

    def of(self, pieces: list[Piece]) -> bytes:
        """As `AbstractWriter` has it."""
        for piece in pieces:
            raise_failed(piece)
        events = [] if self._last else self._begin()
        for piece in pieces:
            self._usage.add(piece)
            self._last = piece
            events += self._say(self._said(piece))
        return b"".join(events)

    def _said(self, piece: Piece) -> Said:
        if self._reader is None:
            return Said(content=piece.text)
        said = self._reader.push(piece.text)
        return said if piece.completion is None else said.then(self._reader.finish())

    def _say(self, said: Said) -> list[bytes]:
        """The events of what is new."""
        events = []
        if said.arguments:
            events.append(self._delta(said.arguments))
        if said.reasoning:
            events += self._opened("reasoning", _thought(self._card, "", "in_progress"))
            events.append(self._delta(said.reasoning))
        if said.content:
            item = _item(self._card, "", "in_progress", self._number)
            events += [*self._opened("message", item), self._delta(said.content)]
        for call in self._asked.shape.said(said._replace(arguments=""), 0, self._num_calls).get(
            "tool_calls", ()
        ):
            events += [
                *self._closed("completed"),
                *self._opened("", _call(call, "", "in_progress")),
            ]
            if arguments := call["function"]["arguments"]:
                events.append(self._delta(arguments))
        self._num_calls += len(said.calls)
        return events

    @property
    def _number(self) -> int:
        return len(self._items)

    def _begin(self) -> list[bytes]:
        sampling = self._asked.shape.sampling_values
        begun = _card(self._request, self._card, sampling, "in_progress")
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def _opened(self, kind: str, item: Json) -> list[bytes]:
        """The events that open an item, unless one of its kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._closed("completed")
        self._open, self._text = item, ""
        events.append(
            self._event("response.output_item.added", output_index=self._number, item=item)
        )
        if kind == "message":
            events.append(self._at("response.content_part.added", part=_part("")))
        return events

    def _delta(self, text: str) -> bytes:
        assert self._open is not None
        self._text += text
        return self._at(f"{_EVENTS[self._open['type']]}.delta", delta=text, **self._more())

    def _more(self) -> Json:
        is_message = self._open is not None and self._open["type"] == "message"
        return {"logprobs": []} if is_message else {}

    def _closed(self, status: str) -> list[bytes]:
        """The events that close the open item, if there is one."""
        if (item := self._open) is None:
            return []
        kind, text = item["type"], self._text
        if kind == "function_call":
            told = {"arguments": text, "name": item["name"]}
            whole = item | {"arguments": text, "status": status}
        elif kind == "reasoning":
            told, whole = {"text": text}, _thought(self._card, text, status)
        else:
            told, whole = {"text": text}, item | {"content": [_part(text)], "status": status}
        events = [self._at(f"{_EVENTS[kind]}.done", **told, **self._more())]
        if kind == "message":
            events.append(self._at("response.content_part.done", part=_part(text)))
        number = self._number
        events.append(self._event("response.output_item.done", output_index=number, item=whole))
        self._items.append(whole)
        self._open = None
        return events

    def end(self) -> bytes:
        """As `AbstractWriter` has it."""
        assert self._last is not None
        reason = self._last.finish_reason
        status = _status(None if reason is None else reason.value)
        events = []
        if self._open is None and not self._items:
            events += self._opened("message", _item(self._card, "", "in_progress"))
        events += self._closed(status)
        proof = self._asked.shape.proof(self._last)["detjax"]
        counts = self._usage.as_dict()
        whole = _finished(self._request, self._card, self._items, status, proof, counts)
        return b"".join([*events, self._event(f"response.{status}", response=whole)])

    def error(self, error: RefusedError) -> bytes:
        """As `AbstractWriter` has it."""
        error = _as_asked(error, self._request)
        return self._event(
            "error", message=str(error), code=error.code or None, param=error.field or None
        )

    def _at(self, kind: str, **facts: Any) -> bytes:
        """An event of the open item."""
        assert self._open is not None
        at = {"item_id": self._open["id"], "output_index": self._number}
        if self._open["type"] != "function_call":
            at["content_index"] = 0
        return self._event(kind, **at, **facts)

    def _event(self, kind: str, **facts: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events} | facts
        self._num_events += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(body) + b"\n\n"


_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
