# SPDX-License-Identifier: Apache-2.0
"""Parse a receipt from an untrusted line: bounded in size, with checked types.

Nothing here needs a model. A line that passes has a receipt's fields and hashes that fit them.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from detjax.escaping import escaped
from detjax.numerics import NumericsProfile
from detjax.proof.canonical_json import canonical_json

FORMAT = "detjax-receipt/2"
SECTIONS = ("model", "numerics", "build", "request", "answer")
MAX_LINE_BYTES = 32 << 20
"""Of a receipt: 128k tokens with 20 top logprobs each take 30 MiB."""
MAX_DEPTH = 8
"""Of objects and lists within each other; a receipt has 5."""

_KEYS = ("format", *SECTIONS, "sha256")
_SHOWN_CHARS = 200
_MAX_INT_DIGITS = 16

_Check = Callable[[Any], bool]


class ReceiptError(ValueError):
    """A damaged receipt: the message names the field that was changed."""


def shown(value: Any) -> str:
    """Format a value as one line of bounded length, without control characters."""
    text = escaped(value) if isinstance(value, str) else ascii(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def parse(line: bytes) -> dict[str, Any]:
    """Read a line's values and check fields, hashes and types.

    Raises:
        ReceiptError: If something is wrong, naming it.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ReceiptError(f"the receipt is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        values = json.loads(line.decode(), object_pairs_hook=_no_repeats, parse_int=_number)
    except (ValueError, RecursionError) as error:
        raise ReceiptError(f"the receipt is not JSON ({shown(str(error))})") from error
    if not isinstance(values, dict):
        raise ReceiptError("the receipt is not a JSON object")
    _check_keys(values)
    _check_depth(values)
    _check_hashes(values)
    for section, fields in _FIELDS.items():
        there = {
            name: check
            for name, check in _OPTIONAL.get(section, {}).items()
            if name in values[section]
        }
        _check_fields(section, values[section], {**fields, **there})
    _check_profile(values["numerics"]["profile"])
    return values


def _number(digits: str) -> int | float:
    """Parse a number of RFC 8785: a double, which above 2**53 is written without an exponent."""
    return int(digits) if len(digits) <= _MAX_INT_DIGITS else float(digits)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(ascii(name))} stands there twice")
        found[name] = value
    return found


def _check_keys(values: dict[str, Any]) -> None:
    for name in sorted(set(values) - {*_KEYS, "signature"}):
        raise ReceiptError(f"{shown(ascii(name))} is no field of a receipt")
    for name in _KEYS:
        if name not in values:
            raise ReceiptError(f"the field {name!r} is missing")
    if values["format"] != FORMAT:
        raise ReceiptError(f"format is {shown(values['format'])}, and this detjax reads {FORMAT!r}")
    for name in (*SECTIONS, "sha256"):
        if not isinstance(values[name], dict):
            raise ReceiptError(f"{name} is not an object")


def _check_depth(values: dict[str, Any]) -> None:
    if is_deeper(values, MAX_DEPTH):
        raise ReceiptError(f"the receipt has objects or lists more than {MAX_DEPTH} deep")


def is_deeper(value: dict[str, Any] | list[Any], depth: int) -> bool:
    """Whether objects and lists are within each other more than `depth` times."""
    level: list[Any] = [value]
    for _ in range(depth):
        nested = (item.values() if isinstance(item, dict) else item for item in level)
        level = [each for items in nested for each in items if isinstance(each, dict | list)]
        if not level:
            return False
    return True


# ------------------------------------------------------------------------------------------ hashes


def leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return (path, value) of each field, and of each field of a field."""
    for section in SECTIONS:
        for name, value in values[section].items():
            if isinstance(value, dict):
                for key, item in value.items():
                    yield f"{section}.{name}.{key}", item
            else:
                yield f"{section}.{name}", value


def hashes(values: Mapping[str, Any]) -> dict[str, str]:
    """Return sha256 of each field's canonical JSON, and of all, so that a change can be named."""
    found = {path: _hash(path, value) for path, value in leaves(values)}
    return found | {"all": _hash("all", {name: values[name] for name in SECTIONS})}


def _hash(path: str, value: Any) -> str:
    try:
        return hashlib.sha256(canonical_json(value)).hexdigest()
    except ValueError as error:  # such as an integer beyond 2**53
        raise ValueError(f"{shown(path)}: {error}") from error


def _check_hashes(values: Mapping[str, Any]) -> None:
    try:
        found, said = hashes(values), values["sha256"]
    except ValueError as error:
        raise ReceiptError(f"the receipt is damaged: {shown(str(error))}") from error
    wrong = [path for path in found.keys() | said.keys() if found.get(path) != said.get(path)]
    if not wrong:
        return
    first = min(set(wrong) - {"all"}, default="all")
    if "all" in wrong and first != "all":  # a field was changed; else it is a hash that was
        raise ReceiptError(f"{shown(first)} was changed: its sha256 is not the one beside it")
    raise ReceiptError(f"sha256.{shown(first)} was changed: the field's is {found.get(first)}")


# ------------------------------------------------------------------------------------------- types


def _matches(pattern: str) -> _Check:
    compiled = re.compile(pattern, re.ASCII)
    return lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None


def _or_null(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)


def _are_top_logprobs(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"ids", "logprobs_f32"}:
        return False
    ids = value["ids"]
    return (
        _is_text(value["logprobs_f32"]) and isinstance(ids, list) and all(map(_are_token_ids, ids))
    )


_SHA256 = _matches("[0-9a-f]{64}")

_FIELDS: dict[str, dict[str, tuple[str, _Check]]] = {
    "model": {
        "name": ("a text", _is_text),
        "hub_commit": ("40 hexadecimal digits or null", _or_null(_matches("[0-9a-f]{40}"))),
        "weights": ("a sha256", _SHA256),
        "config": ("a sha256", _SHA256),
        "tokenizer": ("a sha256 or null", _or_null(_SHA256)),
        "chat_template": ("a sha256 or null", _or_null(_SHA256)),
        "weight_cast": ("a text", _is_text),
        "quantization": ("a text", _is_text),
    },
    "numerics": {
        "fingerprint": ("a text", _is_text),
        "profile": ("an object", _is_object),
    },
    "build": {"backend": ("a text", _is_text)},
    "request": {
        "end_token_ids": ("a list of token ids", _are_token_ids),
        "is_deterministic": ("true", lambda value: value is True),
        "prompt_token_ids": ("a list of token ids", _are_token_ids),
        "sampling": ("an object", _is_object),
    },
    "answer": {
        "digest": ("a sha256", _SHA256),
        "finish_reason": ("'stop' or 'length'", lambda value: value in ("stop", "length")),
        "logprobs_f32": ("a text", _is_text),
        "text": ("a text", _is_text),
        "token_ids": ("a list of token ids", _are_token_ids),
        "top_logprobs": ("null or ids and logprobs_f32", _or_null(_are_top_logprobs)),
    },
}  # fmt: skip
"""What each field must be, and how to see it. `build` has other texts too, by the platform."""

_is_build_name = _matches("[a-z_][a-z0-9_]{0,63}")
"""The verdict has the names of fields that differ: one with a new line could write another one."""

_OPTIONAL: dict[str, dict[str, tuple[str, _Check]]] = {
    "request": {"adapter": ("a sha256", _SHA256)},
}
"""Fields that a section has where they say something."""


def _check_fields(
    section: str, values: Mapping[str, Any], fields: Mapping[str, tuple[str, _Check]]
) -> None:
    if section == "build" and _are_texts(values):
        texts = dict.fromkeys(filter(_is_build_name, values), fields["backend"])
        fields = texts | dict(fields)
    for name in sorted(set(values) - set(fields)):
        raise ReceiptError(f"{section} has {shown(ascii(name))}, which is no field of it")
    for name, (kind, check) in fields.items():
        if name not in values:
            raise ReceiptError(f"the field {section}.{name} is missing")
        if not check(values[name]):
            raise ReceiptError(f"{section}.{name} is {shown(values[name])}, which is not {kind}")


def _check_profile(profile: dict[str, Any]) -> None:
    """Check that this build knows the profile, and the type of each of its fields."""
    known = {field.name: type(field.default) for field in dataclasses.fields(NumericsProfile)}
    if "kv_cache_dtype" not in profile:  # where it is "auto" (`NumericsProfile.facts`)
        del known["kv_cache_dtype"]
    kinds: dict[str, tuple[str, _Check]] = {
        name: (kind.__name__, lambda value, kind=kind: type(value) is kind)
        for name, kind in known.items()
    }
    _check_fields("numerics.profile", profile, kinds)
    try:
        NumericsProfile(**profile)
    except ValueError as error:
        raise ReceiptError(f"numerics.profile: {error}") from error
