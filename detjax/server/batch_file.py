# SPDX-License-Identifier: Apache-2.0
"""Files of requests in the format of OpenAI's batch API, answered as a server answers them.

A line is `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`, and its answer
`{"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": null}`.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detjax.cli.errors import check_unicode
from detjax.progress import Progress

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
OK_STATUS, BUSY_STATUS = 200, 429
RETRY_S = 0.5
_KEYS = ("custom_id", "method", "url", "body")
_SHOWN = 80
_REQUEST = "request_sha256"

Ask = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Sends a body to a path, and gives the status and the body of the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLine:
    """A request of a file.

    Attributes:
        number: Of the line, from 1.
        custom_id: Chosen by whoever wrote it; the answer has it.
        url: One of `URLS`.
        body: As a client would send it there.
    """

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


def read_batch(lines: Iterable[str], where: str) -> list[BatchLine]:
    """Read all requests of a file. Empty lines are passed over.

    Args:
        lines: Of the file.
        where: What messages call it.

    Raises:
        ValueError: If a line is not a request that can be answered, an id comes twice, or there is
            none. The message names the line.
    """
    found: dict[str, BatchLine] = {}
    for number, text in enumerate(_whole(lines, where), 1):
        if not text.strip():
            continue
        line = _read_line(text, number, f"{where}, line {number}")
        if (first := found.setdefault(line.custom_id, line)) is not line:
            raise ValueError(
                f"{where}, line {number}: custom_id {line.custom_id[:_SHOWN]!r} is that of line "
                f"{first.number}; give each request its own"
            )
    if not found:
        raise ValueError(f"{where} holds no request; give a line of JSON for each")
    return list(found.values())


def _whole(lines: Iterable[str], where: str) -> list[str]:
    try:
        return list(lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 ({error.reason})") from error


def _read_line(text: str, number: int, where: str) -> BatchLine:
    try:
        line = json.loads(text.removeprefix("\ufeff") if number == 1 else text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    if not isinstance(line, dict):
        raise ValueError(f"{where} is {text[:_SHOWN]!r}; give an object with {', '.join(_KEYS)}")
    if unknown := sorted(line.keys() - set(_KEYS)):
        raise ValueError(f"{where} has {unknown[0]!r}; a request has {', '.join(_KEYS)}")
    if not isinstance(line.get("custom_id"), str) or not line["custom_id"]:
        raise ValueError(f"{where} needs a custom_id, a text that its answer will have")
    check_unicode(line["custom_id"], f"{where}: custom_id")
    if line.get("method", "POST") != "POST":
        raise ValueError(f"{where}: method {line['method']!r} must be 'POST'")
    if line.get("url") not in URLS:
        raise ValueError(f"{where}: url {line.get('url')!r} must be one of {', '.join(URLS)}")
    body = line.get("body")
    if not isinstance(body, dict):
        raise ValueError(f"{where} needs a body, the object that a client would send")
    if body.get("stream"):
        raise ValueError(f"{where}: stream must be false: an answer is a line of a file")
    return BatchLine(number=number, custom_id=line["custom_id"], url=line["url"], body=body)


def check_models(lines: Sequence[BatchLine], served: Sequence[str], where: str) -> None:
    """Refuse a file with a request for a model that is not served.

    Raises:
        ValueError: Naming the line, and how to serve the model under that name.
    """
    for line in lines:
        if (asked := line.body.get("model")) not in (None, *served):
            raise ValueError(
                f"{where}, line {line.number} asks for model {str(asked)[:_SHOWN]!r}, and this is "
                f"{', '.join(map(repr, served))}; change the lines, or give --served-model-name"
            )


class BatchOutput:
    """The file of answers: each is written when it is there, and all are put in order at the end.

    So an interrupted run leaves whole lines, and another one goes on with them.
    """

    def __init__(self, path: Path, lines: Sequence[BatchLine], *, skips_done: bool):
        """Read what is there; nothing is written yet.

        Raises:
            ValueError: If the file holds something and is not to be gone on with, or holds answers
                to other requests.
        """
        self._path, self._lines = path, lines
        self._done: dict[str, str] = {}
        if path.exists() and path.stat().st_size:
            if not skips_done:
                raise ValueError(
                    f"{path} is not empty; give another file to write to, or --skip-done to go on "
                    "with these answers"
                )
            self._done = _read_done(path, {line.custom_id: line for line in lines})

    @property
    def waiting(self) -> list[BatchLine]:
        """Requests without an answer. What was refused is asked again."""
        return [line for line in self._lines if line.custom_id not in self._done]

    def open(self) -> None:
        """Write the answers that are kept, or see that a file can be written."""
        self._path.write_text("".join(self._done.values()), encoding="utf-8")

    def add(self, line: BatchLine, answer: Mapping[str, Any]) -> None:
        """Write an answer."""
        text = json.dumps(answer, ensure_ascii=False) + "\n"
        if not _is_unicode(text):  # an answer may repeat half of a surrogate pair
            text = json.dumps(answer) + "\n"
        self._done[line.custom_id] = text
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)

    def put_in_order(self) -> None:
        """Give answers the order of requests."""
        ordered = [self._done[line.custom_id] for line in self._lines]
        made = self._path.with_name(f"{self._path.name}.part")
        made.write_text("".join(ordered), encoding="utf-8")
        os.replace(made, self._path)


def _read_done(path: Path, asked: Mapping[str, BatchLine]) -> dict[str, str]:
    """Lines of answers that were given, by id. The last one may be cut short, even in a character.

    Raises:
        ValueError: If a line is no answer, or one to another request than that of its id.
    """
    done: dict[str, str] = {}
    *whole, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(whole, 1):
        try:
            text = line.decode().removesuffix("\r")
            answer = json.loads(text)
            custom_id, status = answer["custom_id"], answer["response"]["status_code"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number} is no answer of a batch; give another --output"
            ) from error
        if custom_id not in asked:
            raise ValueError(
                f"{path}, line {number} answers {str(custom_id)[:_SHOWN]!r}, which the input does "
                "not ask; give another --output"
            )
        # Files of earlier versions do not say it.
        if answer.get(_REQUEST, request := _request_sha256(asked[custom_id])) != request:
            raise ValueError(
                f"{path}, line {number} answers another request of id "
                f"{str(custom_id)[:_SHOWN]!r} than the input has now; give another --output"
            )
        if status == OK_STATUS:
            done[custom_id] = f"{text}\n"
    return done


async def answer_all(
    lines: Sequence[BatchLine],
    ask: Ask,
    output: BatchOutput,
    *,
    at_once: int,
    model: str,
    progress: Progress,
) -> int:
    """Ask for every line, and write each answer; how many were refused.

    Args:
        lines: To ask.
        ask: Reaches the server.
        output: Takes the answers.
        at_once: Requests that are under way together. The engine chooses among them.
        model: For bodies that name none.
        progress: Called after each answer.
    """
    turns, asking, done, refused = asyncio.Semaphore(at_once), 0, 0, 0

    async def answer(line: BatchLine) -> None:
        nonlocal asking, done, refused
        body = json.dumps({"model": model, **line.body}).encode()
        async with turns:
            asking += 1
            status, content = await ask(line.url, body)
            while status == BUSY_STATUS and asking > 1:  # there will be room
                await asyncio.sleep(RETRY_S)
                status, content = await ask(line.url, body)
            asking -= 1
        output.add(line, _answer_of(line, status, json.loads(content)))
        done, refused = done + 1, refused + (status != OK_STATUS)
        progress(line.custom_id, done, len(lines))

    async with asyncio.TaskGroup() as group:
        for line in lines:
            group.create_task(answer(line))
    return refused


def _answer_of(line: BatchLine, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the file of answers."""
    error = None
    if status != OK_STATUS:
        told = body.get("error", body)
        error = {"code": told.get("code"), "message": told.get("message")}
    name = f"batch_req_{line.number}"
    return {
        "id": name,
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": body.get("id", name), "body": body},
        "error": error,
        _REQUEST: _request_sha256(line),
    }


def _request_sha256(line: BatchLine) -> str:
    """A hash of what was asked, by which a continued run knows its answers."""
    asked = json.dumps([line.url, line.body], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()


def _is_unicode(text: str) -> bool:
    """Whether a file can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def in_process(app: Any) -> Ask:
    """Ask an ASGI application of this process."""

    async def ask(path: str, body: bytes) -> tuple[int, bytes]:
        status, content, given = 0, b"", asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not given.is_set():
                given.set()
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # a client that stays
            raise AssertionError

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal status, content
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                content += message.get("body", b"")

        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "scheme": "http", "headers": headers, "client": None, "server": None,
        }  # fmt: skip
        await app(scope, receive, send)
        return status, content

    return ask
