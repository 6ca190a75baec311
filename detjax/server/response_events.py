# SPDX-License-Identifier: Apache-2.0
"""The answers of /v1/responses: items in one piece, or as server-sent events."""

from typing import Any

import msgspec

from detjax.server.answer_reader import AnswerReader, Said
from detjax.server.answers import Json, Usage
from detjax.server.errors import RefusedError
from detjax.server.output_deltas import OutputDelta
from detjax.server.request_reader import PreparedRequest
from detjax.server.responses import ResponsesRequest, error_as_asked
from detjax.server.streaming import AbstractEventWriter, AnswerFormat, raise_failed


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
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }
    return whole | {"detjax": proof}


def answer_format_of(asked: ResponsesRequest) -> AnswerFormat:
    """Makes a response of a chat completion."""

    def formatted(answer: Json) -> Json:
        choice = answer["choices"][0]
        status = _status(choice["finish_reason"])
        items = _items(answer, choice["message"], status)
        return _finished(asked, answer, items, status, choice["detjax"], answer["usage"])

    return formatted


class ResponseWriter(AbstractEventWriter):
    """The events of a response. One item is open at a time: reasoning, a message, or a call."""

    def __init__(self, request: ResponsesRequest, prepared: PreparedRequest):
        """Nothing is written yet."""
        self._request, self._prepared = request, prepared
        self._card = prepared.shape.card(is_chunk=False)
        syntax = prepared.shape.syntax
        self._reader = None if syntax is None else AnswerReader(syntax)
        self._usage = Usage(prepared.num_prompt_tokens, prepared.shape)
        self._items: list[Json] = []  # that are closed
        self._open: Json | None = None
        self._text = ""  # of the open one
        self._num_calls = 0
        self._last: OutputDelta | None = None
        self._num_events = 0

    def of(self, deltas: list[OutputDelta]) -> bytes:
        """As `AbstractEventWriter` has it."""
        for delta in deltas:
            raise_failed(delta)
        events = [] if self._last else self._begin()
        for delta in deltas:
            self._usage.add(delta)
            self._last = delta
            events += self._say(self._said(delta))
        return b"".join(events)

    def _said(self, delta: OutputDelta) -> Said:
        if self._reader is None:
            return Said(content=delta.text)
        said = self._reader.push(delta.text)
        return said if delta.completion is None else said.then(self._reader.finish())

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
        for call in self._prepared.shape.said(said._replace(arguments=""), 0, self._num_calls).get(
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
        sampling = self._prepared.shape.sampling_values
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
        """As `AbstractEventWriter` has it."""
        assert self._last is not None
        reason = self._last.finish_reason
        status = _status(None if reason is None else reason.value)
        events = []
        if self._open is None and not self._items:
            events += self._opened("message", _item(self._card, "", "in_progress"))
        events += self._closed(status)
        proof = self._prepared.shape.proof(self._last)["detjax"]
        counts = self._usage.as_dict()
        whole = _finished(self._request, self._card, self._items, status, proof, counts)
        return b"".join([*events, self._event(f"response.{status}", response=whole)])

    def error(self, error: RefusedError) -> bytes:
        """As `AbstractEventWriter` has it."""
        error = error_as_asked(error, self._request)
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
