# SPDX-License-Identifier: Apache-2.0
"""Chat messages as OpenAI's API has them, made into what a model's template reads.

A template prints what it knows and drops the rest in silence. So what a message says is brought
into the one form that all templates read, or refused, with the place where it is.
"""

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")

_NAMED = ", ".join(ROLES)

NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({"type": "object", "properties": {}})
"""What a function takes that has no `parameters`."""

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})

_EVERYONE = ("role", "content", "name")
_OF_ROLE = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id",)}
_OF_OTHERS = {
    role: {name for other, names in _OF_ROLE.items() if other != role for name in names}
    for role in ROLES
}
"""Fields that a template reads of other roles."""

_INSTEAD = {"function_call": "give tool_calls, and role 'tool' for what the function returned"}
_HINTS = ("prompt_cache_breakpoint", "cache_control")
"""Of a part of text; they decide nothing."""

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, and where each has it."""

_TESTS_NULL = re.compile(r"""\bcontent['"]?\]?\s+is\s+(?:not\s+)?none""")
_READS_OBJECTS = re.compile(
    r"""\b(?:arguments|tool_calls?|function|call)['"\])]*\s*(?:\|\s*(?:tojson|items)|\.items)"""
    r"""|\barguments['"\]]*\s+is\s+(?:not\s+)?(?:string|mapping)"""
)
_READS_THINKING = re.compile(r"""\.thinking\b|\[['"]thinking['"]\]""")
_PRINTS_TEXT = re.compile(r"""\barguments['"\])]*\s*(?:[-+]?[}%]\}|\+|~)""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """What a template does with messages, as its text shows.

    Attributes:
        words: Every run of letters, digits and underscores in it.
        literals: Those in quotes, among them the roles that it tells apart.
        tests_null: It asks whether a content is none, so a content of null stays null.
        reads_objects: It prints the arguments of tool calls as JSON itself, so they are objects.
        says_thinking: It reads what a model has thought as `thinking` (harmony).
    """

    words: frozenset[str]
    literals: frozenset[str]
    tests_null: bool
    reads_objects: bool
    says_thinking: bool


@functools.lru_cache(maxsize=16)
def habits_of(template: str) -> Habits:
    """What a template does."""
    reads_objects = _READS_OBJECTS.search(template) or not _PRINTS_TEXT.search(template)
    return Habits(
        words=frozenset(re.findall(r"\w+", template)),
        literals=frozenset(re.findall(r"""(?<=['"])[\w-]+(?=['"])""", template)),
        tests_null=_TESTS_NULL.search(template) is not None,
        reads_objects=bool(reads_objects),
        says_thinking="reasoning_content" not in template
        and bool(_READS_THINKING.search(template)),
    )


def messages_of(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages as a template reads them.

    Parts of text are joined; `developer` is `system` where the template has no developer; null
    fields are left out; arguments of tool calls are objects where the template prints JSON, else
    JSON. It may be applied again to what it returns.

    Raises:
        ValueError: If there is no message, or one has something that cannot be said in text, is
            missing or is not known. It begins with the place: `messages[2].content[0]`.
    """
    if not messages:
        raise ValueError("messages is empty; give at least one")
    habits = habits_of(template)
    return [_message(f"messages[{i}]", one, habits) for i, one in enumerate(messages)]


def tools_of(tools: Any) -> Any:
    """The tools as a template reads them: a function without `parameters` has an empty object."""
    if not isinstance(tools, list | tuple):
        return tools
    return [_with_parameters(tool) for tool in tools]


def _with_parameters(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or function.get("parameters") is not None:
        return tool
    return {**tool, "function": {**function, "parameters": dict(NO_PARAMETERS)}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Marked:
    """A conversation in which all that a template must print ends with a mark of its own.

    Attributes:
        messages: As `messages_of` returns them, with marks.
        tools: With marks; as they were if they have no names.
        marks: Where each is: `messages[2].content`.
    """

    messages: list[dict[str, Any]]
    tools: Any
    marks: dict[str, str]


def marked(messages: Sequence[Mapping[str, Any]], tools: Any) -> Marked:
    """Mark each message's content and calls, and each tool, so that one sees what is printed.

    A text beside calls has no mark: many templates leave it out, as they do with reasoning.
    """
    marks: dict[str, str] = {}

    def mark(text: Any, place: str) -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        sign = f"~~7305{len(marks)}~~"  # no filter of a template changes these characters
        marks[sign] = place
        return text + sign

    def mark_name(one: Any, place: str) -> Any:
        function = one.get("function") if isinstance(one, Mapping) else None
        if not isinstance(function, Mapping) or "name" not in function:
            return one
        return {**one, "function": {**function, "name": mark(function["name"], place)}}

    told = []
    for i, message in enumerate(messages):
        where, calls = f"messages[{i}]", message.get("tool_calls")
        if calls:
            more = {"tool_calls": [mark_name(call, f"{where}.tool_calls") for call in calls]}
        else:
            more = {"content": mark(message["content"], f"{where}.content")}
        told.append({**message, **more})
    is_list = isinstance(tools, list | tuple)
    named = [mark_name(tool, f"tools[{i}]") for i, tool in enumerate(tools)] if is_list else tools
    return Marked(messages=told, tools=named, marks=marks)


def _message(where: str, message: Mapping[str, Any], habits: Habits) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f'{where} is {message!r:.80}; give {{"role": ..., "content": ...}}')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES and role not in habits.literals:
        said = "missing" if role is None else f"{role!r:.80}"
        what = "give tool, with tool_call_id" if role == "function" else f"give one of {_NAMED}"
        raise ValueError(f"{where}.role is {said}; {what}")
    kept = {
        name: value
        for name, value in message.items()
        if name == "content"
        or not _says_nothing(value, NO_FIELDS if name in habits.words else message)
    }
    if role == "assistant":
        _rename(kept, "reasoning", "reasoning_content", habits)  # vLLM's name
        if not kept.get("content"):
            _rename(kept, "refusal", "content", habits)  # the text of an answer that refuses
    known = {*_EVERYONE, *_OF_ROLE.get(role, ())} | (habits.words - _OF_OTHERS.get(role, set()))
    for name, value in kept.items():
        if name not in known:
            raise ValueError(
                f"{where}.{name}: this model's chat template does not have it for the role "
                f"{role!r:.80}; {_INSTEAD.get(name, 'leave it out')}"
            )
        if name in ("name", "tool_call_id", "reasoning_content") and not isinstance(value, str):
            raise ValueError(f"{where}.{name} is {value!r:.80}; give text")
    if "reasoning_content" in kept and habits.says_thinking:
        kept["thinking"] = kept.pop("reasoning_content")
    if "tool_calls" in kept:
        kept["tool_calls"] = _tool_calls(f"{where}.tool_calls", kept["tool_calls"], habits)
    kept["content"] = _content(f"{where}.content", kept, habits)
    if role == "developer" and role not in habits.literals:
        kept["role"] = "system"
    return kept


def _says_nothing(value: Any, message: Mapping[str, Any] = NO_FIELDS) -> bool:
    """Whether a field is empty, or has nothing but what its message says elsewhere.

    LiteLLM sends back `provider_specific_fields`, with `refusal` and `reasoning_content` in it.
    """
    if value and isinstance(value, Mapping):
        return all(one is None or one == message.get(name) for name, one in value.items())
    return value is None or value == []


def _rename(kept: dict[str, Any], name: str, ours: str, habits: Habits) -> None:
    """Take a field under our name, unless the template reads its own or both are there."""
    if name in kept and name not in habits.words and kept.get(ours) in (None, "", kept[name]):
        kept[ours] = kept.pop(name)


def _content(where: str, message: Mapping[str, Any], habits: Habits) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and content:
        return "".join(_text(f"{where}[{i}]", part) for i, part in enumerate(content))
    says_more = any(name in message for name in ("tool_calls", "reasoning_content", "thinking"))
    if content is None and says_more:
        return None if habits.tests_null else ""
    if content is None and "content" in message and message.get("role") == "assistant":
        return ""  # an answer that was cut in its reasoning, which its client did not keep
    said = "missing" if content is None else f"{content!r:.80}"
    raise ValueError(f'{where} is {said}; give text, or a list of {{"type": "text", "text": ...}}')


def _text(where: str, part: Any) -> str:
    """The text of a part."""
    kind = part.get("type") if isinstance(part, Mapping) else part
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXTS:
        raise ValueError(
            f"{where} is of type {kind!r:.80}: this model takes parts of type 'text' alone"
        )
    name = _TEXTS[kind]
    known = ("type", name, *_HINTS)
    if unknown := [key for key in part if key not in known and not _says_nothing(part[key])]:
        raise ValueError(f"{where}.{unknown[0]} is not known; leave it out")
    if not isinstance(part.get(name), str):
        raise ValueError(f"{where}.{name} is {part.get(name)!r:.80}; give text")
    return part[name]


def _tool_calls(where: str, calls: Any, habits: Habits) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where} is {calls!r:.80}; give a list")
    return [_tool_call(f"{where}[{i}]", call, habits) for i, call in enumerate(calls)]


def _tool_call(where: str, call: Any, habits: Habits) -> dict[str, Any]:
    kind = call.get("type", "function") if isinstance(call, Mapping) else call
    if not isinstance(call, Mapping) or kind != "function":
        raise ValueError(f"{where} is of type {kind!r:.80}; only 'function' is supported")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}.function is {function!r:.80}; give an object with a name")
    arguments = _arguments(f"{where}.function.arguments", function.get("arguments"), habits)
    kept = {key: value for key, value in call.items() if value is not None}
    return kept | {"function": {**function, "arguments": arguments}}


def _arguments(where: str, given: Any, habits: Habits) -> dict[str, Any] | str:
    """As the template reads them. An empty text is no arguments.

    A text that is no object in JSON stays as it is: a model may write it, or be cut in it, and its
    client sends it back beside the error that it made.
    """
    found = given
    if isinstance(given, str):
        # WHY: OpenAI's API has JSON, transformers an object.
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(given or "{}")
        found = found if isinstance(found, Mapping) else given
    elif not isinstance(given, Mapping):
        raise ValueError(f"{where} is {given!r:.80}; give an object, as JSON")
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half of a surrogate pair, which no text can hold") from error
    if isinstance(found, str):
        return found
    if habits.reads_objects:
        return dict(found)
    return given if isinstance(given, str) and given else json.dumps(found, ensure_ascii=False)
