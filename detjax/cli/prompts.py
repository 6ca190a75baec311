# SPDX-License-Identifier: Apache-2.0
"""Reads prompts from the command line, standard input and files."""

import codecs
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detjax.cli.errors import InputError, check_unicode
from detjax.engine.requests.sampling_params import SamplingParams

PROMPT_BYTES = 2**23
"""Longest prompt: a million tokens are about half of it."""

_STANDARD_INPUT = "-"

_KINDS = ("prompt", "prompt_token_ids", "messages")
_DIRECT = ("tools", "add_generation_prompt", "continue_final_message")
"""Variables of a chat template that are keys of their own."""

_TEMPLATE_KEYS = (*_DIRECT, "chat_template_kwargs")
_KEYS = (*_KINDS, "id", "sampling", "lora", *_TEMPLATE_KEYS)
"""Of a line of a .jsonl file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptEntry:
    """What to continue: a text, token ids, or a conversation where there are messages.

    Attributes:
        origin: Where it was given, for messages about it.
        text: To continue.
        token_ids: To continue, in place of a text.
        messages: To answer.
        variables: What else the chat template sees.
        sampling: Fields of `SamplingParams`, as JSON has them, in place of the command's.
        lora: Name of the adapter that answers, "" the model alone; None where it is not said.
        extras: What its completions carry beside what they are: the `id`.
    """

    origin: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    lora: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """The prompt as a line of a .jsonl file has it."""
        variables = dict(self.variables)
        entry: dict[str, Any] = {key: variables.pop(key) for key in _DIRECT if key in variables}
        if variables:
            entry["chat_template_kwargs"] = variables
        if self.sampling:
            entry["sampling"] = self.sampling
        if self.lora is not None:
            entry["lora"] = self.lora
        if self.messages:
            return {"messages": self.messages, **entry, **self.extras}
        if self.token_ids:
            return {"prompt_token_ids": self.token_ids, **entry, **self.extras}
        return {"prompt": self.text, **entry, **self.extras}


def read_prompts(
    texts: Sequence[str],
    prompts_file: str | None,
    *,
    is_chat: bool = False,
    system_prompt: str | None = None,
) -> tuple[PromptEntry, ...]:
    """Read every prompt, those of `--prompt` first.

    Args:
        texts: Of `--prompt`.
        prompts_file: Of `--prompts-file`; None is no file.
        is_chat: Texts are asked as a user.
        system_prompt: Begins conversations that have no system message; texts are asked as a user.

    Raises:
        InputError: If there is none, one is empty, or a file or line cannot be read.
    """
    if texts.count(_STANDARD_INPUT) > 1:
        raise InputError("--prompt - was given twice; standard input can be read once")
    prompts = []
    for i, text in enumerate(texts):
        origin = "--prompt" if len(texts) == 1 else f"--prompt number {i + 1}"
        if text == _STANDARD_INPUT:
            origin, text = "standard input", _read_standard_input()
        check_unicode(text, origin)
        if len(text.encode()) > PROMPT_BYTES:
            raise _too_long(origin)
        prompts.append(PromptEntry(origin=origin, text=text))
    if prompts_file is not None:
        prompts.extend(_read_prompts_file(Path(prompts_file).expanduser()))
    if not prompts:
        raise InputError("there is no prompt; give --prompt TEXT, --prompt - or --prompts-file F")
    for prompt in prompts:
        if not prompt.text and not prompt.messages and not prompt.token_ids:
            raise InputError(f"{prompt.origin} is empty; give at least one character")
    if is_chat or system_prompt is not None:
        prompts = [_as_chat(prompt, system_prompt) for prompt in prompts]
    for prompt in prompts:
        if prompt.variables and not prompt.messages:
            key = next(iter(prompt.entry().keys() & set(_TEMPLATE_KEYS)))
            raise InputError(
                f"{prompt.origin} has `{key}`, which only a chat template reads; give `messages`, "
                "or --chat"
            )
    return tuple(prompts)


def _as_chat(prompt: PromptEntry, system_prompt: str | None) -> PromptEntry:
    """The conversation of a prompt, which begins with a system message if there is one."""
    if prompt.token_ids:
        raise InputError(f"{prompt.origin} has `prompt_token_ids`, and --chat asks texts alone")
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    if system_prompt is not None and messages[0].get("role") != "system":
        messages = ({"role": "system", "content": system_prompt}, *messages)
    return dataclasses.replace(prompt, text="", messages=messages)


def _read_standard_input() -> str:
    if sys.stdin is None:
        raise InputError("--prompt - reads standard input, which is closed; give the text itself")
    if sys.stdin.isatty():
        print("reading the prompt from the keyboard; end it with Ctrl-D", file=sys.stderr)
    content = sys.stdin.buffer.read(PROMPT_BYTES + 2)  # its line end is not part of it
    if len(content.rstrip(b"\r\n")) > PROMPT_BYTES:
        raise _too_long("standard input")
    text = _decode(content, "standard input")
    return text.removesuffix("\n").removesuffix("\r")


def _read_prompts_file(path: Path) -> Iterator[PromptEntry]:
    """Yield the prompts of a file, line by line."""
    readers = {".txt": _read_text_line, ".jsonl": _read_json_line}
    if path.suffix not in readers:
        raise InputError(f"--prompts-file {path} must end in .txt or .jsonl")
    found = False
    try:
        for number, line in enumerate(_lines(path), start=1):
            origin = f"{path} line {number}"
            if len(line) > PROMPT_BYTES:
                raise _too_long(origin)
            if line.strip():
                found = True
                yield readers[path.suffix](_decode(line, origin), origin)
    except OSError as error:
        raise InputError(f"--prompts-file {path} cannot be read: {error.strerror}") from error
    if not found:
        raise InputError(f"--prompts-file {path} has no prompt in it; give a line at least")


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, without their ends, each read no further than `PROMPT_BYTES` asks."""
    with path.open("rb") as file:
        is_first = True
        while line := file.readline(PROMPT_BYTES + 8):
            line = line.removeprefix(codecs.BOM_UTF8) if is_first else line
            is_first = False
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def _too_long(origin: str) -> InputError:
    return InputError(
        f"{origin} has more than {PROMPT_BYTES} bytes, more than any context holds; shorten it"
    )


def _read_text_line(line: str, origin: str) -> PromptEntry:
    return PromptEntry(origin=origin, text=line)


def _read_json_line(line: str, origin: str) -> PromptEntry:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise InputError(f"{origin} must be an object, with one of {_named(_KINDS)}")
    for key in entry:
        if key in _SAMPLING_NAMES:
            raise InputError(f'{origin} has `{key}`; write "sampling": {{"{key}": ...}}')
        if key not in _KEYS:
            raise InputError(f"{origin} has the unknown key `{key:.60}`; known are {_named(_KEYS)}")
    if len(entry.keys() & set(_KINDS)) != 1:
        raise InputError(f"{origin} must have exactly one of {_named(_KINDS)}")
    check_unicode(json.dumps(entry, ensure_ascii=False), origin)
    return PromptEntry(
        origin=origin,
        text=_typed(entry, "prompt", str, "text", "", origin),
        token_ids=_token_ids(entry, origin),
        messages=_messages(entry, origin),
        variables=_variables(entry, origin),
        sampling=_sampling(entry, origin),
        lora=_typed(entry, "lora", str, "a name of --lora-modules", None, origin)
        if "lora" in entry
        else None,
        extras={"id": entry["id"]} if "id" in entry else {},
    )


_SAMPLING_NAMES = {its.name for its in dataclasses.fields(SamplingParams)}


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _typed(
    entry: Mapping[str, Any], key: str, kind: type, what: str, default: Any, origin: str
) -> Any:
    value = entry.get(key, default)
    if not isinstance(value, kind):
        raise InputError(f"{origin}: `{key}` must be {what}, not {value!r:.40}")
    return value


def _token_ids(entry: Mapping[str, Any], origin: str) -> tuple[int, ...]:
    ids = _typed(entry, "prompt_token_ids", list, "a list of token ids", [], origin)
    if any(type(token_id) is not int for token_id in ids):
        raise InputError(f"{origin}: `prompt_token_ids` must be integers")
    return tuple(ids)


def _messages(entry: Mapping[str, Any], origin: str) -> tuple[Mapping[str, Any], ...]:
    messages = entry.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InputError(f"{origin}: `messages` must be a list of objects with role and content")
    if "messages" in entry and not messages:
        raise InputError(f"{origin}: `messages` is empty; give at least one")
    return tuple(messages)


def _variables(entry: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """What the chat template sees beside the messages."""
    variables = dict(_typed(entry, "chat_template_kwargs", dict, "an object", {}, origin))
    for key, kind, what in (
        ("tools", list, "a list of objects"), ("add_generation_prompt", bool, "true or false"),
        ("continue_final_message", bool, "true or false"),
    ):  # fmt: skip
        if key in entry:
            if key in variables:
                raise InputError(f"{origin} has `{key}` twice, in `chat_template_kwargs` too")
            variables[key] = _typed(entry, key, kind, what, None, origin)
    return variables


def _sampling(entry: Mapping[str, Any], origin: str) -> dict[str, Any]:
    sampling = _typed(entry, "sampling", dict, "an object", {}, origin)
    for key in sampling:
        if key not in _SAMPLING_NAMES:
            raise InputError(
                f"{origin}: `sampling` has the unknown key `{key:.60}`; known are "
                f"{_named(sorted(_SAMPLING_NAMES))}"
            )
    return sampling


def _decode(content: bytes, origin: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{origin} is not valid UTF-8 at byte {error.start + 1} "
            f"(0x{content[error.start]:02x}); convert it to UTF-8"
        ) from error
