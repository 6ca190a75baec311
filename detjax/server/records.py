# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries as typed records; an error names the field."""

import difflib
import functools
import re
import typing
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import QueryParams

from detjax.server.errors import RefusedError

MAX_NAME = 64
"""Characters of an unknown field for which a field of nearly that name is looked for."""

MAX_PARTS = 200_000
"""Brackets and keys of a body: parsing so many takes 40 ms, in which nobody else is answered."""


def parse[T: msgspec.Struct](body: bytes, kind: type[T]) -> T:
    """Read a body.

    Raises:
        RefusedError: If it is no JSON, has a field that is not known, or one of another type or
            beyond its limit; if it has more than `MAX_PARTS` brackets and keys.
    """
    num_parts = body.count(b"[") + body.count(b"{") + body.count(b'":')
    if num_parts > MAX_PARTS:
        raise RefusedError(
            f"the body has {num_parts} brackets and keys, more than {MAX_PARTS}; send less at once"
        )
    try:
        if b"null" not in body:
            return msgspec.json.decode(body, type=kind)
        return msgspec.convert(_less_nulls(msgspec.json.decode(body), kind), kind)
    except msgspec.ValidationError as error:
        raise _invalid(error, _untyped(body), kind) from error
    except RecursionError as error:
        raise RefusedError("the body has too many brackets within brackets") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"the body is not JSON: {_why_not_json(body, error)}") from error


_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape of a text; the group is one half of a surrogate pair alone."""


_AT_BYTE = re.compile(r"\(byte (\d+)\)")


def _why_not_json(body: bytes, error: Exception) -> str:
    """What is wrong and where, also where the parser tells half of it."""
    if not body.strip():
        return "it is empty; send an object, with Content-Type: application/json"
    try:
        body.decode()
    except UnicodeDecodeError as found:
        return f"byte {found.start} is {body[found.start]:#04x}, which is not UTF-8 there"
    if half := next((found for found in _ESCAPE.finditer(body) if found[1]), None):
        return (
            f"{half[0].decode()} at byte {half.start()} is one half of a surrogate pair, which is "
            "no character; send both halves, or leave it out"
        )
    near = _AT_BYTE.search(str(error))
    shown = body[int(near[1]) :][:20].decode(errors="replace") if near else ""
    return f"{error}, at {shown!r}" if shown else str(error)


def convert[T: msgspec.Struct](value: Mapping[str, Any], kind: type[T]) -> T:
    """Read a record from what a body had.

    Raises:
        RefusedError: If a field is not known, or of another type.
    """
    try:
        return msgspec.convert(_less_nulls(value, kind), kind)
    except msgspec.ValidationError as error:
        raise _invalid(error, value, kind) from error


def read_query[T: msgspec.Struct](query: QueryParams, kind: type[T]) -> T:
    """Read a record from the query of a URL; a list's name may come several times.

    Raises:
        RefusedError: If a field is not known, of another type, or given twice.
    """
    lists = {
        its.encode_name
        for its in msgspec.structs.fields(kind)
        if its.default_factory is not msgspec.NODEFAULT
    }
    given: dict[str, Any] = {}
    for name in query:
        values = query.getlist(name)
        if len(values) > 1 and name not in lists:
            raise RefusedError(f"{name} is given {len(values)} times; give it once", field=name)
        given[name] = values if name in lists else values[0]
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(error, given, kind) from error


NAMES_OF_OTHERS = {
    "guided_choice": ("structured_outputs.choice",),
    "guided_grammar": ("structured_outputs.grammar",),
    "guided_json": ("structured_outputs.json",),
    "guided_regex": ("structured_outputs.regex",),
    "json_schema": ("structured_outputs.json",),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "regex": ("structured_outputs.regex",),
    "stop_sequences": ("stop",),
}
"""Fields of other servers, and of vLLM before 0.12, with those that mean the same here."""


def _in_its_place(field: str, kind: type[msgspec.Struct]) -> str:
    """What to do about a field that a record does not have; `field` may be a path."""
    known = [its.encode_name for its in msgspec.structs.fields(kind)]
    for use in NAMES_OF_OTHERS.get(field, ()):
        if use.partition(".")[0] in known:
            return f"use {use} in its place"
    # WHY: the search takes time by the length of what was sent.
    is_name = "." not in field and len(field) <= MAX_NAME
    near = difflib.get_close_matches(field, known, n=1, cutoff=0.8) if is_name else []
    return f"did you mean {near[0]}?" if near else "leave it out"


def _invalid(
    error: msgspec.ValidationError, given: Any, kind: type[msgspec.Struct]
) -> RefusedError:
    message, field = str(error), _field_of(str(error))
    if "unknown field" in message:
        hint = _in_its_place(field, kind)
        message = f"unknown field {field!r:.80}: detjax would have to ignore it; {hint}"
    elif field and "missing" not in message:
        shown = "" if given is None else f"={_shown(given, field)}"
        message = f"{field}{shown}: {message.partition(' - at ')[0]}"
    return RefusedError(message, field=field)


def _untyped(body: bytes) -> Any:
    """All that a body says; None where it cannot be read to its end."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _shown(given: Any, path: str) -> str:
    """What a body has at the path of a field, cut short."""
    for step in re.findall(r"[^.[\]]+", path):
        given = given[int(step) if isinstance(given, list) else step]
    return f"{msgspec.json.encode(given).decode():.80}"


def _less_nulls(value: Any, kind: type[msgspec.Struct]) -> Any:
    """A record as it was sent, without fields that are null, those of records in it too.

    Required fields, and what is in free objects, keep their nulls.
    """
    if not isinstance(value, dict):
        return value
    required, records = _kinds_of_fields(kind)
    kept = {name: one for name, one in value.items() if one is not None or name in required}
    for name in records.keys() & kept.keys():
        kept[name] = _less_nulls(kept[name], records[name])
    return kept


@functools.cache
def _kinds_of_fields(
    kind: type[msgspec.Struct],
) -> tuple[frozenset[str], Mapping[str, type[msgspec.Struct]]]:
    """The required fields of a record, and those fields that are records."""
    fields = msgspec.structs.fields(kind)
    records = {
        its.encode_name: one
        for its in fields
        for one in (its.type, *typing.get_args(its.type))
        if isinstance(one, type) and issubclass(one, msgspec.Struct)
    }
    return frozenset(its.encode_name for its in fields if its.required), records


_MISSING = ("unknown field `", "missing required field `")


def _field_of(message: str) -> str:
    """The path of the field that an error of msgspec is about: `stream_options.include_usage`."""
    path = message.rpartition("at `$.")[2].partition("`")[0] if "at `$." in message else ""
    names = [message.partition(said)[2].partition("`")[0] for said in _MISSING if said in message]
    return ".".join(filter(None, [path.partition("[...]")[0], *names]))
