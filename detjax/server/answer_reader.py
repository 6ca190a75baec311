# SPDX-License-Identifier: Apache-2.0
"""What an answer of a conversation says: reasoning, text, and calls of tools, while it is made.

A model writes all of it as text, in the form of its chat template. What is in no form stays text,
so nothing is lost.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from detjax.engine.outputs.text import overlap
from detjax.models.chat_messages import NO_PARAMETERS

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
CALLS, PYTHON_TAG = "[TOOL_CALLS]", "<|python_tag|>"
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
"""What ends a message of harmony; the last two begin another."""


class ToolCall(NamedTuple):
    """A call of a function, with its arguments as JSON."""

    name: str
    arguments: str


class Said(NamedTuple):
    """What is new of an answer; the parts are in the order of these fields.

    Attributes:
        reasoning: What the model thinks.
        content: What it answers.
        calls: What it asks for.
        arguments: More of those of the call that was told before; none where that was whole.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    arguments: str = ""

    def then(self, other: "Said") -> "Said":
        """Both, one after the other."""
        calls, arguments = self.calls, self.arguments + other.arguments
        if calls and other.arguments:
            *before, last = calls
            calls = (*before, last._replace(arguments=last.arguments + other.arguments))
            arguments = self.arguments
        return Said(
            reasoning=self.reasoning + other.reasoning,
            content=self.content + other.content,
            calls=calls + other.calls,
            arguments=arguments,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSyntax:
    """In which syntax a model writes what it thinks, says and calls.

    Attributes:
        tools: Functions that it may call.
        has_tags: Each call is JSON between `<tool_call>` and `</tool_call>` (Hermes, Qwen).
        is_json: An answer that is JSON altogether is a call, or a list of them (Llama 3.1; Mistral,
            behind `[TOOL_CALLS]`, which is a special token and not shown).
        is_forced: The answer is made to be one call, as `call_schema` has it.
        is_single: Of several calls the first alone is told.
        thinks: It may think first, between `<think>` and `</think>`.
        begins_thinking: The prompt ends with `<think>`.
        has_channels: An answer is messages with a channel each (harmony, of gpt-oss): `analysis` is
            what it thinks, a message to a function is a call. Its control tokens must be shown.
    """

    tools: frozenset[str] = frozenset()
    has_tags: bool = False
    is_json: bool = False
    is_forced: bool = False
    is_single: bool = False
    thinks: bool = False
    begins_thinking: bool = False
    has_channels: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether an answer is nothing but text."""
        calls = self.has_tags or self.is_json or self.is_forced
        return not (calls or self.thinks or self.begins_thinking or self.has_channels)

    @classmethod
    def of(
        cls,
        template: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        prompt: str,
        is_forced: bool,
        is_single: bool = False,
    ) -> "AnswerSyntax":
        """The syntax of a template.

        Args:
            template: Of the conversation.
            tools: As OpenAI's API has them; none where calls are not wanted.
            prompt: The end of it.
            is_forced: As the class has it.
            is_single: As the class has it.
        """
        has_tags = CALL in template and not is_forced
        is_json = CALLS in template or "python_tag" in template or "ipython" in template
        return cls(
            tools=frozenset(tool["function"]["name"] for tool in tools),
            has_tags=bool(tools) and has_tags,
            is_json=bool(tools) and is_json and not has_tags and not is_forced,
            is_forced=is_forced,
            is_single=is_single,
            thinks=THINK_END in template and not is_forced,
            begins_thinking=prompt.rstrip().endswith(THINK) and not is_forced,
            has_channels=CHANNEL in template and MESSAGE in template and not is_forced,
        )


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; there are none where it has no `parameters`."""
    if function.get("parameters") is None:
        return {**NO_PARAMETERS, "additionalProperties": False}
    return {"type": "object"} | function["parameters"]


def call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of a call of one of some functions."""
    is_one = len(tools) == 1
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool["function"]["name"]]},
                "arguments": _moved(
                    _parameters(tool["function"]),
                    "#/properties/arguments" if is_one else f"#/anyOf/{i}/properties/arguments",
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    return calls[0] if is_one else {"anyOf": calls}


_OF_NAMES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_NO_SCHEMAS = ("const", "default", "enum", "examples")


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references are to its new place in another."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        elif key in _OF_NAMES and isinstance(value, Mapping):
            moved[key] = {name: _moved(one, root) for name, one in value.items()}
        else:
            moved[key] = value if key in _NO_SCHEMAS else _moved(value, root)
    return moved


class AnswerReader:
    """Reads one answer, piece by piece. However it is cut, the parts are the same.

    A call of a known function is told from its name on, and its arguments as they are written, even
    if they end too soon. A call that is written in another order is told when it is whole. White
    space around reasoning and calls belongs to none of them.
    """

    def __init__(self, syntax: AnswerSyntax):
        """Nothing is read yet."""
        self._syntax = syntax
        self._held = ""
        self._state = self._reasoning if syntax.begins_thinking else self._begin
        if syntax.has_channels:
            self._state = self._begin_message
        self._trims = syntax.begins_thinking  # white space that comes next belongs to nothing
        self._channel = ""  # of the message that is being read; "call" if it is one of ours
        self._is_new, self._written = False, set[str]()  # of messages with channels
        self._is_over = False
        self._num_calls = 0
        self._is_told = True  # the call that is being read; others than the first may not be
        self._is_list = False
        self._scan = _Scan()

    def push(self, text: str) -> Said:
        """Read more; what is sure now."""
        self._held += text
        said = Said()
        while True:
            before = self._state, self._held
            said = said.then(self._state())
            if (self._state, self._held) == before:
                return said

    @property
    def is_reasoning(self) -> bool | None:
        """Whether what comes next is reasoning; None while the beginning does not say yet."""
        if self._state in (self._begin, self._begin_message, self._header, self._next_message):
            return None
        is_analysis = self._state == self._message and self._channel == "analysis"
        return is_analysis or self._state == self._reasoning

    def finish(self) -> Said:
        """The end: what was held back."""
        self._is_over = True
        return self.push("")

    def _begin(self) -> Said:
        """What kind of answer it is."""
        text = self._held.lstrip()
        if self._syntax.thinks and text.startswith(THINK):
            self._held, self._trims = text.removeprefix(THINK), True
            self._state = self._reasoning
        elif not self._is_over and (not text or self._syntax.thinks and THINK.startswith(text)):
            pass
        elif self._syntax.is_forced:
            self._state = self._forced
        else:
            self._state = self._whole if self._syntax.is_json else self._content
        return Said()

    def _forced(self) -> Said:
        """The beginning of a call that the answer is, up to its arguments."""
        if (opened := self._opened(self._held)) is not None:
            return opened
        if not self._is_over:
            return Said()
        self._state = self._content
        if (cut := _CUT_HEAD.fullmatch(self._held)) is None or (name := _decoded(cut[1])) is None:
            return Said()
        self._held = ""
        return self._told((ToolCall(name, ""),))

    def _opened(self, text: str) -> Said | None:
        """A call whose arguments begin; None if the text does not begin with one of ours."""
        found = _HEAD.match(text)
        if found is None or CALL_END in found[0]:
            return None
        name = _decoded(found[1])
        if name is None or not (self._syntax.is_forced or name in self._syntax.tools):
            return None
        self._held, self._scan, self._state = text[found.end() :], _Scan(), self._arguments
        return self._told((ToolCall(name, ""),))

    def _arguments(self) -> Said:
        """Its arguments, as they are written."""
        text, is_ended = self._held, False
        if self._syntax.has_tags:
            text, is_ended = self._before(CALL_END)
        count = self._scan.take(text)
        written, self._held = text[:count], self._held[count:]
        if self._scan.is_whole or is_ended:
            self._state = self._call_end
        return Said(arguments=written if self._is_told else "")

    def _call_end(self) -> Said:
        """The rest of a call, behind its arguments: other keys, which say nothing, and its end."""
        if self._syntax.has_tags:
            rest, end, after = self._held.partition(CALL_END)
            is_whole = bool(end)
        else:
            count = _Scan(depth=1).end_of(self._held)
            is_whole = count is not None
            rest, after = self._held[:count], self._held[count:] if is_whole else ""
        if not is_whole and not self._is_over:
            return Said()
        is_last = self._syntax.has_tags or self._syntax.is_forced
        self._held, self._trims = after, True
        self._state = self._content if is_last else self._next_call
        return Said(content=self._trimmed(_less_call(rest)))

    def _next_call(self) -> Said:
        """What follows a call where the answer is calls: another, the end of a list, or text."""
        text = self._held.lstrip()
        if self._is_list and text.startswith("]"):
            self._held, self._state = text[1:], self._content
            return Said()
        mark = "," if self._is_list else ";"
        if text.startswith(mark):
            if (opened := self._opened(text[1:])) is not None:
                return opened
            if not self._is_over:
                return Said()
            if found := self._calls_of("[" * self._is_list + text[1:]):
                self._held, self._state = "", self._content
                return self._told(found)
        if text or self._is_over:
            self._state = self._content
        return Said()

    def _reasoning(self) -> Said:
        text, is_ended = self._until(THINK_END)
        if is_ended:
            self._state, self._trims = self._answer, True
        return Said(reasoning=text)

    def _answer(self) -> Said:
        """What follows the reasoning."""
        self._held = self._held.lstrip()
        if self._held or self._is_over:
            self._state = self._whole if self._syntax.is_json else self._content
        return Said()

    def _content(self) -> Said:
        if not self._syntax.has_tags:
            text, self._held = self._held, ""
            return Said(content=self._trimmed(text))
        text, is_ended = self._until(CALL)
        if is_ended:
            self._state = self._call
        return Said(content=text)

    def _call(self) -> Said:
        if (opened := self._opened(self._held)) is not None:
            return opened
        written, end, rest = self._held.partition(CALL_END)
        if not end and not self._is_over:
            return Said()
        self._held, self._state = rest, self._content
        if found := self._calls_of(written):
            self._trims = True
            return self._told(found)
        return Said(content=CALL + written + end)

    def _whole(self) -> Said:
        """An answer that is a call or none of it is."""
        text = self._held.lstrip().removeprefix(CALLS).removeprefix(PYTHON_TAG).lstrip()
        self._is_list = text.startswith("[")
        if (opened := self._opened(text.removeprefix("["))) is not None:
            return opened
        starts = not text or text[0] in "[{" or any(s.startswith(text) for s in (CALLS, PYTHON_TAG))
        if starts and not self._is_over:
            return Said()
        self._state = self._content
        if found := self._calls_of(text):
            self._held = ""
            return self._told(found)
        return Said()

    def _begin_message(self) -> Said:
        """Whether a message begins, or the answer goes on in one of the prompt."""
        text = self._held.lstrip()
        signs = (START, CHANNEL, MESSAGE, "to=")
        if text.startswith(signs):
            self._state = self._header
        elif self._is_over or text and not any(sign.startswith(text) for sign in signs):
            self._channel, self._state = "final", self._message
        return Said()

    def _header(self) -> Said:
        """To whom a message is, and on which channel."""
        head, end, rest = self._held.partition(MESSAGE)
        if not end and not self._is_over:
            return Said()
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        self._held, self._state, self._is_new = rest, self._message, True
        self._channel = channel[1] if channel else "final"
        if recipient is None or recipient[1] == "assistant":
            return Said() if end else Said(content=head)
        name = recipient[1].removeprefix("functions.")
        if end and name in self._syntax.tools:
            self._channel = "call"
            return self._told((ToolCall(name, ""),))
        self._channel = "final"  # to nobody that is known: it stays text
        return Said(content=head + end)

    def _message(self) -> Said:
        """The text of a message."""
        found = [at for sign in MESSAGE_ENDS if (at := self._held.find(sign)) >= 0]
        text = self._held[: min(found)] if found else self._held
        if not found and not self._is_over:
            kept = max(overlap(text, sign) for sign in MESSAGE_ENDS)
            text = text[: len(text) - kept]
        self._held = self._held[len(text) :]
        if found:
            ended = next((s for s in MESSAGE_ENDS[:3] if self._held.startswith(s)), "")
            self._held, self._state = self._held.removeprefix(ended), self._next_message
        if self._channel == "call":
            return Said(arguments=text if self._is_told else "")
        kind = "reasoning" if self._channel == "analysis" else "content"
        if text and self._is_new and kind in self._written:
            text = "\n" + text  # behind another message's
        if text:
            self._is_new = False
            self._written.add(kind)
        return Said(reasoning=text) if kind == "reasoning" else Said(content=text)

    def _next_message(self) -> Said:
        """The beginning of another message; what is none stays text."""
        if self._held or self._is_over:
            self._state = self._begin_message
        return Said()

    def _told(self, calls: tuple[ToolCall, ...]) -> Said:
        if self._syntax.is_single:
            calls = calls[: max(0, 1 - self._num_calls)]
        self._num_calls += len(calls)
        self._is_told = bool(calls)
        return Said(calls=calls)

    def _before(self, sign: str) -> tuple[str, bool]:
        """What of the text is surely before a sign; whether the sign is there."""
        text, found, _ = self._held.partition(sign)
        kept = 0 if found or self._is_over else overlap(text, sign)
        return text[: len(text) - kept], bool(found)

    def _until(self, sign: str) -> tuple[str, bool]:
        """Take the text before a sign, without white space at the sign; whether it is there."""
        text, found, rest = self._held.partition(sign)
        if found:
            self._held = rest
            return self._trimmed(text.rstrip()), True
        sure, _ = self._before(sign)
        if not self._is_over:
            sure = sure.rstrip()
        self._held = text[len(sure) :]
        return self._trimmed(sure), False

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text

    def _calls_of(self, written: str) -> tuple[ToolCall, ...]:
        """The calls that some JSON is; none if it is anything else."""
        found: list[Any] = []
        for part in re.split(r";(?=\s*\{)", written.strip()):
            try:
                value = json.loads(part, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                return ()
            found += value if isinstance(value, list) else [value]
        calls = []
        for call in found:
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or name not in self._syntax.tools:
                return ()
            arguments = call.get("arguments", call.get("parameters", {}))
            if not isinstance(arguments, dict):
                return ()
            calls.append(ToolCall(name, _as_text(arguments)))
        return tuple(calls)


class ReasoningCount:
    """Counts the tokens of reasoning, with those of the tags or the header around it."""

    def __init__(self, syntax: AnswerSyntax):
        """No token yet."""
        self._reader, self._num_unsure = AnswerReader(syntax), 0
        self._may_begin = syntax.thinks or syntax.begins_thinking or syntax.has_channels
        self._has_channels = syntax.has_channels
        self.num_tokens = 0

    def push(self, text: str) -> None:
        """Take a token, with the text that it adds itself; often none."""
        if not self._may_begin:
            return
        before = self._reader.is_reasoning
        self._reader.push(text)
        now = self._reader.is_reasoning
        self._num_unsure += 1
        if before or now:
            self.num_tokens += self._num_unsure
        if before is not None or now is not None:
            self._num_unsure = 0
        self._may_begin = self._has_channels or now is not False


def _as_text(arguments: dict[str, Any]) -> str:
    """Arguments as JSON; half of a surrogate pair, which no text can hold, is U+FFFD."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_NAMED = r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*'
_HEAD = re.compile(_NAMED + r',\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)
"""A call up to its arguments, in the order in which templates show it."""
_CUT_HEAD = re.compile(_NAMED + r'(?:,\s*(?:"\w*(?:"\s*(?::\s*)?)?)?)?', re.DOTALL)
"""One that ends between its name and its arguments."""


_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _decoded(written: str) -> str | None:
    """A text in JSON; None if it is not valid."""
    try:
        return json.loads(written)
    except ValueError:
        return None


def _less_call(rest: str) -> str:
    """What behind a call's arguments is not of the call: neither its brace nor other keys."""
    text = rest.strip()
    if not text or text.startswith("}"):
        return text[1:]
    try:
        json.loads('{"": 0' + text)
    except (ValueError, RecursionError):
        return text
    return ""


class _Scan:
    """Finds the end of a JSON object, piece by piece."""

    def __init__(self, *, depth: int = 0):
        self._depth, self._is_text, self._is_escaped = depth, False, False
        self.is_whole = False

    def end_of(self, text: str) -> int | None:
        """Where the object ends in a text; None if it does not."""
        count = self.take(text)
        return count if self.is_whole else None

    def take(self, text: str) -> int:
        """Characters of a text that belong to the object."""
        for i, sign in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped, self._is_text = sign == "\\", sign != '"'
            elif sign == '"':
                self._is_text = True
            elif sign in "{}":
                self._depth += 1 if sign == "{" else -1
                if not self._depth:
                    self.is_whole = True
                    return i + 1
        return len(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read(syntax: AnswerSyntax, text: str) -> Said:
    """All that an answer says."""
    reader = AnswerReader(syntax)
    return reader.push(text).then(reader.finish())
