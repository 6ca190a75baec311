# SPDX-License-Identifier: Apache-2.0
"""What clients may ask of /v1/responses, text and calls of functions, as a chat completion."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from detjax.server.chat_request import ChatRequest, JsonSchema, Messages, ResponseFormat, Tools
from detjax.server.errors import RefusedError
from detjax.server.protocol import CommonFields, Name, StreamOptions, StructuredOutputs

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


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How much is thought.

    Attributes:
        effort: As `ChatRequest.reasoning_effort` has it.
        summary, generate_summary: Taken only as null: reasoning is told as it is.
    """

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses. A field that is not here is refused, as everywhere.

    Attributes:
        input: A text, or items: messages whose content is text or parts of text, calls of functions
            and what these returned, reasoning.
        tools: Functions that may be called.
        tool_choice: As chat completions have it; a function is {"type": "function", "name": ...}.
        instructions: A system message before them.
        reasoning: How much the model thinks.
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
        "include": ([], ["reasoning.encrypted_content"]),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
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
    reasoning: Reasoning | None = None
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
        for name in ("summary", "generate_summary"):
            if self.reasoning is not None and (value := getattr(self.reasoning, name)) is not None:
                raise RefusedError(
                    f"reasoning.{name}={value!r:.80} is not supported, as reasoning is told as it "
                    "is; leave it out",
                    field=f"reasoning.{name}",
                )
        for name in ("include_usage", "continuous_usage_stats"):
            if self.stream_options is not None and getattr(self.stream_options, name):
                raise RefusedError(
                    f"stream_options.{name}=true is of completions: a response always ends with "
                    "its usage; leave it out",
                    field=f"stream_options.{name}",
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
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            structured_outputs=self.structured_outputs,
        )


_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What a response calls the fields of the chat completion that answers it."""

_PLACE = re.compile(r"^messages\[(\d+)\]")
_LENGTH = re.compile(r"\bmax_tokens(?=[=,]|$)")
_TOOL = re.compile(r"^(tools\[\d+\])\.function(?=\.)")


@contextlib.contextmanager
def named_as_asked(asked: ResponsesRequest) -> Iterator[None]:
    """Let errors of the chat completion name the fields of the response."""
    try:
        yield
    except RefusedError as error:
        raise error_as_asked(error, asked) from error


def error_as_asked(error: RefusedError, asked: ResponsesRequest) -> RefusedError:
    """An error of a chat completion in the words of the request that it was made of."""

    def place(found: re.Match[str]) -> str:
        places = asked.messages()[1]
        index = int(found[1])
        return places[index] if index < len(places) else "input"

    message = _LENGTH.sub(_NAMES["max_tokens"], _PLACE.sub(place, str(error)))
    message, field = _TOOL.sub(r"\1", message), _TOOL.sub(r"\1", _PLACE.sub(place, error.field))
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
    if tool.get("function") is not None:
        raise RefusedError(
            f"tools[{index}].function is of chat completions: a tool of a response has its name, "
            "description and parameters beside its type",
            field=f"tools[{index}].function",
        )
    if not isinstance(name := tool.get("name"), str):
        raise RefusedError(
            f"tools[{index}].name={name!r:.80} must be the name of a function, as text",
            field=f"tools[{index}].name",
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
            if not isinstance(name := item.get("name"), str):
                raise RefusedError(
                    f"{where}.name={name!r:.80} must be the name of a function, as text",
                    field=f"{where}.name",
                )
            function = {"name": name, "arguments": item.get("arguments")}
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
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or kind not in TEXT_PARTS:
            raise RefusedError(
                f"{where}[{i}] is of type {kind!r:.80}: only {', '.join(TEXT_PARTS)} are supported",
                field=f"{where}[{i}]",
            )
        if not isinstance(text := part.get("text"), str):
            raise RefusedError(
                f"{where}[{i}].text is {text!r:.80}; give text", field=f"{where}[{i}].text"
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
