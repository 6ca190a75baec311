# SPDX-License-Identifier: Apache-2.0
"""The document of the routes is true: what it allows is decoded, and nothing of it is a fault."""

import asyncio
import dataclasses
import json
import re
from pathlib import Path

import httpx
import numpy as np
import pytest

from detjax.server.app import OPEN_TO_ALL, PAGE_PATHS, make_app
from detjax.server.chat_request import ChatRequest
from detjax.server.protocol import CompletionRequest
from detjax.server.records import parse
from detjax.server.served_model import Limits
from detjax.server.service import Service

from .conftest import served
from .small import post, small_service

OF_THE_CALLER = {"user", "metadata", "safety_identifier", "prompt_cache_key", "session_id"}
"""Fields of which the text speaks: they decide nothing."""
POSTS = (
    "/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions", "/v1/responses",
    "/inference/v1/generate",
)  # fmt: skip


@pytest.fixture(scope="module")
def starting():
    """One without a model, whose document is there all the same, without the key."""
    service = Service(None, Limits())
    with served(service, None, api_keys=["key"]) as running, running.client() as client:  # type: ignore[arg-type]
        yield client


@pytest.fixture(scope="module")
def told(starting):
    return starting.get("/openapi.json").json()


def test_every_route_is_in_the_document(told):
    app = make_app(Service(None, Limits()), dataclasses.replace(OPEN_TO_ALL))
    routes = {
        (route.path.replace(":path", ""), verb)  # type: ignore[attr-defined]
        for route in app.routes
        for verb in route.methods - {"HEAD"}  # type: ignore[attr-defined]
        if route.path not in PAGE_PATHS  # type: ignore[attr-defined]
    }
    found = {(path, verb.upper()) for path, verbs in told["paths"].items() for verb in verbs}
    assert found == routes and len(routes) > 15
    for path in POSTS:
        one = told["paths"][path]["post"]
        assert (
            one["summary"] and "$ref" in one["requestBody"]["content"]["application/json"]["schema"]
        )


def test_descriptions_have_no_indentation_of_the_source(told):
    found = [s["description"] for s in told["components"]["schemas"].values() if "description" in s]
    assert any("\nAttributes:\n    " in text for text in found)
    assert not any("\n    Attributes:" in text for text in found)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_the_fields_are_those_that_are_decoded(told, kind):
    schema = told["components"]["schemas"][kind.__name__]
    assert list(schema["properties"]) == list(kind.__struct_fields__)
    assert schema["additionalProperties"] is False
    values = {"prompt": "x"} if kind is CompletionRequest else {"messages": []}
    assert sorted(values) == sorted(schema["required"])
    for name, field in schema["properties"].items():
        if name not in values:
            assert {"type": "null"} in field["anyOf"], name
            default = parse(json.dumps(values | {name: field["default"]}).encode(), kind)
            assert getattr(default, name) == getattr(parse(json.dumps(values).encode(), kind), name)


def test_the_page_has_every_route_and_field_and_loads_nothing(starting, told):
    answer = starting.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    for path in told["paths"]:
        assert f" {path}</code>" in answer.text
    for schema in told["components"]["schemas"].values():
        for name in schema.get("properties", {}):
            assert f"<code>{name}</code>" in answer.text
    assert "<script" not in answer.text and "://" not in answer.text


def test_the_manual_has_every_field(told):
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    named = set(re.findall(r"`([a-z_]+)", "\n".join(rows)))
    for path in POSTS:
        (content,) = told["paths"][path]["post"]["requestBody"]["content"].values()
        schema = told["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        missing = schema["properties"].keys() - named - OF_THE_CALLER
        assert not missing, (path, missing)


def drawn(schema, schemas, rng: np.random.Generator, depth: int = 0):
    """A value of a schema; small, and often at its edges."""
    if "$ref" in schema:
        return drawn(schemas[schema["$ref"].rpartition("/")[2]], schemas, rng, depth)
    if "anyOf" in schema:
        return drawn(schema["anyOf"][int(rng.integers(len(schema["anyOf"])))], schemas, rng, depth)
    match schema.get("type"):
        case "null":
            return None
        case "boolean":
            return bool(rng.integers(2))
        case "integer":
            low, high = schema.get("minimum", -2), schema.get("maximum", 70)
            return int(rng.choice([low, high, rng.integers(low, high + 1), 2**31, 2**63]))
        case "number":
            return float(rng.choice([0, 1, -1, 0.5, 2.5, 1e-30, 1e30, -1e300]))
        case "string":
            return "".join(rng.choice(list('a Z9{}"<|\\\0é你\u2028😀'), int(rng.integers(0, 9))))
        case "array":
            count = 0 if depth > 4 else int(rng.integers(0, 4))
            return [drawn(schema.get("items", {}), schemas, rng, depth + 1) for _ in range(count)]
        case "object" if "properties" in schema:
            return {
                name: drawn(field, schemas, rng, depth + 1)
                for name, field in schema["properties"].items()
                if name in schema.get("required", [])
                or rng.random() < 3 / len(schema["properties"])
            }
        case "object":
            keys = ["role", "content", "type", "text", "function", "name", "5", "x"]
            found = rng.choice(keys, int(rng.integers(0, 4)), replace=False)
            inner = schema.get("additionalProperties")
            inner = inner if isinstance(inner, dict) else {}
            return {str(key): drawn(inner, schemas, rng, depth + 1) for key in found}
    if depth > 4:
        return "user"
    kinds = [{"type": kind} for kind in ("null", "integer", "string", "array", "object")]
    return drawn(kinds[int(rng.integers(5))], schemas, rng, depth + 1)


OF_LENGTH = {"/v1/chat/completions": {"max_tokens": 2}, "/v1/responses": {"max_output_tokens": 2}}


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_what_the_document_allows_is_answered_or_refused_and_no_fault(told, count):
    """A real model and every route; a refusal has a message."""
    rng, schemas = np.random.default_rng(count), told["components"]["schemas"]
    service = small_service(request_s=60.0)
    app, statuses = make_app(service), []

    async def ask(path: str) -> None:
        (content,) = told["paths"][path]["post"]["requestBody"]["content"].values()
        asked = drawn(content["schema"], schemas, rng)
        if rng.random() < 0.95:
            asked["model"] = "small"
        lengths = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
        for name in lengths & asked.keys():
            asked[name] = min(asked[name] or 0, 2) or None
        # Else an answer is as long as the context, in every one of `n` sequences.
        if path != "/v1/completions" and not any(asked.get(name) for name in lengths):
            asked |= OF_LENGTH.get(path, {})
        if "messages" in asked and rng.random() < 0.7:
            asked["messages"] = [{"role": "user", "content": "hi"}]
        raw = json.dumps(asked).encode("utf-8", "surrogatepass")
        told_back = await post(app, path, [raw])
        assert told_back.status < 500, (path, json.dumps(asked), told_back.body)
        if told_back.status != 200:
            assert told_back.json()["error"]["message"], (path, asked)
        statuses.append(told_back.status)

    async def run() -> None:
        for i in range(count):
            await ask(POSTS[i % len(POSTS)])

    asyncio.run(run())
    assert {200, 400, 404} <= set(statuses)
    assert statuses.count(200) > count / 20
    assert httpx.codes.INTERNAL_SERVER_ERROR not in statuses
