# SPDX-License-Identifier: Apache-2.0
"""Answers from a file of JSON lines, or from a server."""

import json
import math
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from detjax.cli.errors import InputError, one_line
from detjax.proof.parsing import MAX_LINE_BYTES, is_deeper

MAX_DEPTH = 64
"""Of objects and lists within each other in a line. Python reads, compares and writes those."""

_REASONS = {"completed": "stop", "max_output_tokens": "length"}
"""What ended a response of /v1/responses, and the `finish_reason` that says so elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedAnswer:
    """One answer, with the fields that its line has.

    Attributes:
        key: Key that pairs it with the answer of the other set.
        sequence: Which answer to its prompt it is, if its line says so.
        prompt: Its text or token ids, to check the pair; None if the line has none.
        text: The answer; with calls, reasoning or a refusal, all of these as JSON.
        tokens: Its token ids, or their texts; None if the line has none.
        logprobs: One for each token, NaN where the line has null; or None.
        finish_reason: What ended it; None if the line does not say.
        score: The value of the named field, or None.
    """

    key: str
    sequence: Any = None
    prompt: Any
    text: str
    tokens: tuple[int | str, ...] | None
    logprobs: tuple[float, ...] | None
    finish_reason: Any = None
    score: float | None


def read_answers(path: Path, score: str | None) -> list[ComparedAnswer]:
    """Read a file: of `detjax.generate --format jsonl`, of OpenAI's API or its batches, or `text`.

    Args:
        path: Of the file.
        score: The field of each line that holds its score: a number, true or false.

    Raises:
        InputError: If the file or a line cannot be read.
    """
    try:
        with path.open("rb") as file:
            lines = [line for line in file if line.strip()]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    if not lines:
        raise InputError(f"{path} has no answers; each line is one as JSON")
    found = _named_apart(
        [
            (i, answer)
            for i, line in enumerate(lines)
            for answer in _read(line, f"{path}, line {i + 1}", i, score)
        ]
    )
    seen: dict[str, int] = {}
    for i, answer in found:
        if answer.key in seen:
            raise InputError(
                f"{path}, lines {seen[answer.key] + 1} and {i + 1} are both {answer.key!r}; give "
                "each answer an `id` of its own"
            )
        seen[answer.key] = i
    return [answer for _, answer in found]


def _named_apart(
    found: list[tuple[int, "ComparedAnswer"]],
) -> list[tuple[int, "ComparedAnswer"]]:
    """Name answers of one id, as `generate` writes several of a prompt, by their sequence too."""
    count = Counter(answer.key for _, answer in found)
    return [
        (i, replace(answer, key=f"{answer.key}, sequence {answer.sequence}"))
        if count[answer.key] > 1 and answer.sequence is not None
        else (i, answer)
        for i, answer in found
    ]


def _read(line: bytes, origin: str, number: int, score: str | None) -> list[ComparedAnswer]:
    if len(line) > MAX_LINE_BYTES:
        raise InputError(f"{origin} has {len(line)} bytes, more than {MAX_LINE_BYTES}")
    entry = _object(line, origin)
    return [answer_of(one, origin, number, score) for one in _choices(entry, origin, number)]


def _object(text: bytes, origin: str) -> dict[str, Any]:
    """Read a JSON object."""
    is_deep = False
    try:
        entry = json.loads(text)
    except RecursionError:
        entry, is_deep = {}, True
    except ValueError as error:
        raise InputError(f"{origin} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise InputError(f"{origin} is not a JSON object")
    if is_deep or is_deeper(entry, MAX_DEPTH):
        raise InputError(f"{origin} has objects or lists more than {MAX_DEPTH} deep; flatten it")
    return entry


def _choices(entry: dict[str, Any], origin: str, number: int) -> list[dict[str, Any]]:
    """Each choice of a response, alone or of a batch, with a name; else what the line is."""
    told, name = entry.get("response"), entry.get("custom_id")
    if name is None or not isinstance(told, dict):
        if "choices" not in entry and entry.get("object") != "response":
            return [entry]
        # The id of a response is one that the server has drawn.
        rest = {k: v for k, v in entry.items() if k not in ("id", "choices", "output", "object")}
        return _named_choices(entry, rest, f"line {number + 1}", origin)
    body = told.get("body")
    if not isinstance(body, dict) or told.get("status_code") != 200:
        said = one_line(json.dumps(body, ensure_ascii=False))
        raise InputError(
            f"{origin}: request {name!r} was refused, so it has no answer to compare; leave it out "
            f"of both files: {said[:200]}"
        )
    rest = {key: value for key, value in entry.items() if key not in ("id", "response", "error")}
    return _named_choices(body, rest, str(name), origin)


def _named_choices(
    body: Mapping[str, Any], rest: dict[str, Any], name: str, origin: str
) -> list[dict[str, Any]]:
    """The choices of a response, or its items as one, with what else a line has."""
    choices = body.get("choices")
    if isinstance(items := body.get("output"), list):  # of /v1/responses
        choices = [_of_items(items, origin) | {"finish_reason": _end_of(body)}]
    is_list = isinstance(choices, list) and all(isinstance(one, dict) for one in choices)
    if not choices or not is_list:
        raise InputError(f"{origin}: answer {name!r} has no `choices` of objects, nor `output`")
    places = [one.get("index", i) for i, one in enumerate(choices)]
    names = [f"{name}, choice {i}" if len(choices) > 1 else name for i in places]
    return [rest | one | {"id": key} for key, one in zip(names, choices, strict=True)]


def _end_of(body: Mapping[str, Any]) -> Any:
    """What ended a response of /v1/responses, as `finish_reason` has it."""
    details, status = body.get("incomplete_details"), body.get("status")
    reason = details.get("reason") if isinstance(details, dict) else None
    reason = status if reason is None else reason
    return _REASONS.get(reason, reason) if isinstance(reason, str) else reason


def _list_of(value: Any, name: str, origin: str) -> list[Any]:
    """A list that a line may have; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError(f"{origin}: `{name}` is {value!r:.60}, not a list")
    return value


def _an_object(value: Any, name: str, origin: str) -> dict[str, Any]:
    """An object of a list that a line has."""
    if not isinstance(value, dict):
        raise InputError(f"{origin}: `{name}` has {value!r:.60}, which is no object")
    return value


def _of_items(items: Sequence[Any], origin: str) -> dict[str, Any]:
    """A choice that says what the items of /v1/responses say, in order: text, calls, reasoning."""
    texts, others, logprobs = [], [], []
    for item in map(partial(_an_object, name="output", origin=origin), items):
        if item.get("type") not in (None, "message"):
            # Ids are drawn, and a status is not said.
            told = {k: v for k, v in item.items() if k not in ("id", "call_id", "status")}
            others.append((item.get("type"), told))
            continue
        content = item.get("content")
        if content is None:
            raise InputError(f"{origin}: a message of `output` has no `content`; give its text")
        if isinstance(content, str):
            content = [{"text": content}]
        for part in _list_of(content, "content", origin):
            said = _an_object(part, name="content", origin=origin)
            text, refusal = said.get("text"), said.get("refusal")
            if isinstance(text, str):
                texts.append(text)
            elif not refusal:
                others.append(("content", said))
            others += [("refusal", refusal)] if refusal else []
            logprobs += _list_of(said.get("logprobs"), "logprobs", origin)
    text = "".join(texts)
    return {
        "text": json.dumps([text, *others], sort_keys=True) if others else text,
        "logprobs": {"content": logprobs} if logprobs else None,
    }


def _of_message(message: Mapping[str, Any], origin: str) -> Any:
    """What a chat's message says: its content, or with calls and reasoning all of it as JSON."""
    content = message.get("content")
    others = {
        name: message[name]
        for name in ("reasoning_content", "reasoning", "refusal", "function_call")
        if message.get(name)
    }
    if calls := message.get("tool_calls"):
        others["tool_calls"] = [
            one.get("function", one) if isinstance(one, dict) else one
            for one in _list_of(calls, "tool_calls", origin)
        ]
    if not others:
        return content
    return json.dumps({"content": content or ""} | others, sort_keys=True)


def answer_of(
    entry: Mapping[str, Any], origin: str, number: int, score: str | None
) -> ComparedAnswer:
    """Return the answer that an object holds.

    Raises:
        InputError: If it has no text, lacks the score, or has a logprob that is no float.
    """
    message = entry.get("message")
    text = _of_message(message, origin) if isinstance(message, dict) else entry.get("text")
    if not isinstance(text, str):
        raise InputError(f"{origin} has no `text`, nor `choices` with one")
    tokens, logprobs = _tokens(entry, origin)
    return ComparedAnswer(
        key=_key(entry, number),
        sequence=entry.get("sequence"),
        prompt=next(
            (entry[name] for name in ("prompt", "prompt_token_ids") if name in entry), None
        ),
        text=text,
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=entry.get("finish_reason"),
        score=None if score is None else _score(entry, score, origin),
    )


def _key(entry: Mapping[str, Any], number: int) -> str:
    if "id" in entry:
        return str(entry["id"])
    if "index" in entry and "sequence" in entry:
        return f"prompt {entry['index']}, sequence {entry['sequence']}"
    return f"line {number + 1}"


def _score(entry: Mapping[str, Any], name: str, origin: str) -> float:
    value = entry.get(name)
    if not isinstance(value, int | float) or not math.isfinite(_float(value, name, origin)):
        raise InputError(f"{origin}: `{name}` is {value!r:.60}, not a number, true or false")
    return float(value)


def _float(value: float, name: str, origin: str) -> float:
    """A number of JSON, whose integers have any length, as a float."""
    try:
        return float(value)
    except OverflowError as error:
        raise InputError(f"{origin}: `{name}` is {value!r:.60}, more than a float holds") from error


def _tokens(
    choice: Mapping[str, Any], origin: str
) -> tuple[tuple[int | str, ...] | None, tuple[float, ...] | None]:
    """Return token ids, or else their texts, and logprobs, from detjax's or OpenAI's format."""
    told = choice.get("logprobs")
    tokens: Any = choice.get("token_ids")
    logprobs = told
    if isinstance(told, dict) and isinstance(content := told.get("content"), list):
        content = [_an_object(one, "logprobs", origin) for one in content]
        tokens = tokens or [one.get("token") for one in content]
        logprobs = [one.get("logprob") for one in content]
    elif isinstance(told, dict):
        tokens, logprobs = tokens or told.get("tokens"), told.get("token_logprobs")
    # The first token of an echoed prompt has null.
    whole = isinstance(logprobs, list) and all(isinstance(p, int | float | None) for p in logprobs)
    return (
        tuple(tokens) if isinstance(tokens, list) else None,
        tuple(math.nan if p is None else _float(p, "logprobs", origin) for p in logprobs)
        if whole and logprobs is not None
        else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerQuery:
    """How to ask a server, by OpenAI's completions.

    Attributes:
        max_tokens: Of each answer.
        temperature: 0 is greedy.
        seed: Of every answer.
        concurrency: Requests at once.
        timeout_s: Of one request.
    """

    max_tokens: int
    temperature: float
    seed: int
    concurrency: int
    timeout_s: float = 600.0


def ask_server(
    url: str, prompts: Sequence[str], asked: ServerQuery, api_key: str | None
) -> list[ComparedAnswer]:
    """Ask a server each prompt.

    Raises:
        InputError: If the server cannot be reached, refuses a request, or answers otherwise than
            OpenAI's API.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    models = _fetch(f"{base}/v1/models", headers, None, 30.0).get("data")
    first = models[0] if isinstance(models, list) and models else None
    model = first.get("id") if isinstance(first, dict) else None
    if not isinstance(model, str):
        raise InputError(f"{url} lists no model at /v1/models; give the address of OpenAI's API")

    def answer(number: int) -> ComparedAnswer:
        body = {
            "model": model, "prompt": prompts[number], "max_tokens": asked.max_tokens,
            "temperature": asked.temperature, "seed": asked.seed, "logprobs": 0,
        }  # fmt: skip
        told = _fetch(f"{base}/v1/completions", headers, body, asked.timeout_s)
        choices = _choices(told | {"prompt": prompts[number]}, url, number)
        if len(choices) != 1:
            raise InputError(f"{url} answers prompt {number + 1} {len(choices)} times; n is 1")
        return answer_of(choices[0], url, number, None)

    with ThreadPoolExecutor(max_workers=asked.concurrency) as pool:
        return list(pool.map(answer, range(len(prompts))))


def _fetch(url: str, headers: Mapping[str, str], body: Any, timeout_s: float) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        told = one_line(error.read(2000).decode(errors="replace"))
        raise InputError(f"{url} answers {error.code}: {told}") from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"{url} does not answer: {error}; start the server, or check its address"
        ) from error
    return _object(text, f"the answer of {url}")


def paired(
    a: Iterable[ComparedAnswer], b: Iterable[ComparedAnswer]
) -> Iterator[tuple[ComparedAnswer, ComparedAnswer]]:
    """Pair answers by key.

    Raises:
        InputError: If one set lacks an answer of the other, or two prompts differ.
    """
    first, second = ({answer.key: answer for answer in answers} for answers in (a, b))
    for name, here, there in (("A", first, second), ("B", second, first)):
        missing = [key for key in here if key not in there]
        if missing:
            raise InputError(
                f"{len(missing)} answers of {name} are not in the other set, such as "
                f"{missing[0]!r}; give both sets the same answers, with an `id` each"
            )
    for key, answer in first.items():
        other = second[key]
        if None not in (answer.prompt, other.prompt) and answer.prompt != other.prompt:
            raise InputError(
                f"{key!r} has another prompt in B than in A: {str(other.prompt)!r:.80}; "
                "give each answer an `id`"
            )
        yield answer, other
