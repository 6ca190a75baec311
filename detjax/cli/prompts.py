# SPDX-License-Identifier: Apache-2.0
"""Reads prompts from the command line, standard input and files."""

import codecs
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detjax.cli.arguments import GenerateArgs
from detjax.cli.errors import InputError, check_unicode
from detjax.serving.request import SamplingParams

PROMPT_BYTES = 2**23
"""Longest prompt: a million tokens are about half of it."""

_STANDARD_INPUT = "-"

_SAMPLING_NAMES = {f.name for f in dataclasses.fields(SamplingParams)} | {"logprobs"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What to continue: a text, or a conversation where there are messages.

    `origin` says where it was given, for messages about it.
    """

    origin: str
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()


def read_prompts(args: GenerateArgs) -> tuple[Prompt, ...]:
    """Read every prompt, those of `--prompt` first.

    Raises:
        InputError: If there is none, one is empty, or a file or line cannot be read.
    """
    if args.prompt.count(_STANDARD_INPUT) > 1:
        raise InputError("--prompt - was given twice; standard input can be read once")
    prompts = []
    for i, text in enumerate(args.prompt):
        origin = "--prompt" if len(args.prompt) == 1 else f"--prompt number {i + 1}"
        if text == _STANDARD_INPUT:
            origin, text = "standard input", _read_standard_input()
        check_unicode(text, origin)
        if len(text.encode()) > PROMPT_BYTES:
            raise _too_long(origin)
        prompts.append(Prompt(origin=origin, text=text))
    if args.prompts_file is not None:
        prompts.extend(_read_prompts_file(Path(args.prompts_file).expanduser()))
    if not prompts:
        raise InputError("there is no prompt; give --prompt TEXT, --prompt - or --prompts-file F")
    for prompt in prompts:
        if not prompt.text and not prompt.messages:
            raise InputError(f"{prompt.origin} is empty; give at least one character")
    return tuple(_as_chat(prompt) for prompt in prompts) if args.chat else tuple(prompts)


def _as_chat(prompt: Prompt) -> Prompt:
    if prompt.messages:
        return prompt
    user = {"role": "user", "content": prompt.text}
    return Prompt(origin=prompt.origin, messages=(user,))


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


def _read_prompts_file(path: Path) -> Iterator[Prompt]:
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


def _read_text_line(line: str, origin: str) -> Prompt:
    return Prompt(origin=origin, text=line)


def _read_json_line(line: str, origin: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin} is not JSON: {error}") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise InputError(f"{origin} must be an object with either `prompt` or `messages`")
    sampling = sorted(entry.keys() & _SAMPLING_NAMES)
    if sampling:
        raise InputError(
            f"{origin} has `{sampling[0]}`, but sampling is the same for every prompt; take it out "
            "and give the option on the command line"
        )
    check_unicode(json.dumps(entry, ensure_ascii=False), origin)
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str):
            raise InputError(f"{origin}: `prompt` must be text, not {entry['prompt']!r:.40}")
        return Prompt(origin=origin, text=entry["prompt"])
    messages = entry["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InputError(f"{origin}: `messages` must be a list of objects with role and content")
    if not messages:
        raise InputError(f"{origin}: `messages` is empty; give at least one")
    return Prompt(origin=origin, messages=tuple(messages))


def _decode(content: bytes, origin: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{origin} is not valid UTF-8 at byte {error.start + 1} "
            f"(0x{content[error.start]:02x}); convert it to UTF-8"
        ) from error
