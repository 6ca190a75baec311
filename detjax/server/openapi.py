# SPDX-License-Identifier: Apache-2.0
"""What the routes take, as an OpenAPI document, and as a page that loads nothing from elsewhere.

Both are made of the types that decode the requests.
"""

import html
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

import detjax
from detjax.server.answers import Json

_SCHEMAS = "#/components/schemas/"
_TEXTS: dict[str, str] = dict.fromkeys(
    ["/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"], "text/plain"
)
_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A route.

    Attributes:
        verb: GET or POST.
        path: With its parameters in braces.
        summary: What it does.
        body: The type of its body; None has none.
        is_open: It needs no key, where there are keys.
        is_admin: It needs an administrator's key. Fields that are all optional may come in the
            query, too.
    """

    verb: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None
    is_open: bool
    is_admin: bool = False

    @property
    def needs_body(self) -> bool:
        """Whether a request without a body is refused."""
        assert self.body is not None
        has_required = any(its.required for its in msgspec.structs.fields(self.body))
        return has_required or not self.is_admin


class Error(msgspec.Struct, kw_only=True):
    """What went wrong.

    Attributes:
        message: In words, with the value and the way out.
        type: As OpenAI names kinds of errors.
        param: The field that it is about.
        code: For programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer that is none."""

    error: Error


def document(operations: Sequence[Operation]) -> Json:
    """The OpenAPI document of some routes."""
    bodies = [one.body for one in operations if one.body is not None]
    _, found = msgspec.json.schema_components(
        [*bodies, ErrorBody], ref_template=_SCHEMAS + "{name}"
    )
    taken = {kind.__name__ for kind in bodies} | (found.keys() - {"Error", "ErrorBody"})
    schemas = {
        name: _described(_nullable(it) if name in taken else it) for name, it in found.items()
    }
    paths: dict[str, Json] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.verb.lower()] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "detjax", "version": detjax.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer"} for name in ("key", "admin_key")
            },
        },
    }


def _described(schema: Json) -> Json:
    """A schema whose description, which is a docstring, has no indentation of the source."""
    if "description" not in schema:
        return schema
    return schema | {"description": inspect.cleandoc(schema["description"])}


def _nullable(schema: Json) -> Json:
    """A record's schema with null for every optional field, which is the field's absence."""
    needed = schema.get("required", [])
    fields = {
        name: it if name in needed else _or_null(it)
        for name, it in schema.get("properties", {}).items()
    }
    return schema | {"properties": fields}


def _or_null(field: Json) -> Json:
    if {"type": "null"} in field.get("anyOf", []):
        return field
    default = {"default": field["default"]} if "default" in field else {}
    inner = {name: value for name, value in field.items() if name != "default"}
    return {"anyOf": [inner, {"type": "null"}]} | default


def _operation(one: Operation) -> Json:
    kind = _TEXTS.get(one.path, "application/json")
    answers: Json = {kind: {"schema": {"type": "string" if kind == "text/plain" else "object"}}}
    if one.path in _STREAMED:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}ErrorBody"}}}
    told: Json = {
        "operationId": f"{one.verb.lower()}_{one.path.strip('/').replace('/', '_') or 'page'}",
        "summary": one.summary,
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            "default": {"description": "Why there is none.", "content": error},
        },
        "security": []
        if one.is_open
        else [{"admin_key": []}]
        if one.is_admin
        else [{"key": []}, {}],
    }
    if one.body is not None:
        schema = {"$ref": _SCHEMAS + one.body.__name__}
        told["requestBody"] = {
            "required": one.needs_body,
            "content": {"application/json": {"schema": schema}},
        }
    names = [part[1:-1] for part in one.path.split("/") if part.startswith("{")]
    if names:
        text = {"in": "path", "required": True, "schema": {"type": "string"}}
        told["parameters"] = [{"name": name} | text for name in names]
    return told


# ------------------------------------------------------------------------------------------- page


def page(told: Json) -> bytes:
    """A document as a page of HTML, without a script."""
    schemas = told["components"]["schemas"]
    title = f"{told['info']['title']} {told['info']['version']}"
    lines = [
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>{html.escape(title)}</title><link rel=stylesheet href=/page.css>"
        f"<main><h1>{html.escape(title)}</h1>"
        '<p>The same for programs: <a href="/openapi.json">openapi.json</a>.</p><ul>'
    ]
    for path, verbs in told["paths"].items():
        for verb, one in verbs.items():
            body = one.get("requestBody", {}).get("content", {}).get("application/json")
            name = body["schema"]["$ref"].removeprefix(_SCHEMAS) if body else ""
            link = f' takes <a href="#{name}">{name}</a>' if name else ""
            lines.append(
                f"<li><code>{verb.upper()} {html.escape(path)}</code>{link}: "
                f"{html.escape(one['summary'])}</li>"
            )
    lines.append("</ul>")
    for name, schema in schemas.items():
        lines += _of_schema(name, schema)
    return "\n".join([*lines, "</main></html>"]).encode()


def _of_schema(name: str, schema: Json) -> Iterator[str]:
    yield f"<h2 id={name}>{name}</h2><pre>{html.escape(schema.get('description', ''))}</pre><table>"
    yield "<tr><th>field</th><th>type</th><th>if left out</th></tr>"
    for field, its in schema.get("properties", {}).items():
        is_needed = field in schema.get("required", [])
        default = "required" if is_needed else msgspec.json.encode(its.get("default")).decode()
        yield (
            f"<tr><td><code>{field}</code></td><td>{_type_of(its)}</td>"
            f"<td>{html.escape(default)}</td></tr>"
        )
    yield "</table>"


def _type_of(schema: Json) -> str:
    """A type in words, with links to records."""
    if (ref := schema.get("$ref")) is not None:
        name = ref.removeprefix(_SCHEMAS)
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type_of(one) for one in schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_type_of(schema['items'])}" if schema.get("items") else "list"
    return html.escape(str(schema.get("type", "any")))
