# SPDX-License-Identifier: Apache-2.0
"""Files of requests in the format of OpenAI's batch API."""

import asyncio
import dataclasses
import json
import random

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import detjax
from detjax import run_batch
from detjax.cli.errors import BAD_INPUT, OK, InputError
from detjax.server.batch_file import (
    BatchOutput,
    answer_all,
    check_models,
    in_process,
    read_batch,
)


def request(custom_id: str, **changes) -> dict:
    body = {"model": "novels-6m", "prompt": "It was late", "max_tokens": 4}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return {**line, **changes}


def text_of(*lines: dict) -> list[str]:
    return [json.dumps(line) + "\n" for line in lines]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "requests, line 3 is not JSON"),
        ("[1]", r"line 3 is '\[1\]'; give an object with custom_id, method, url, body"),
        (request("c", priority=1), "line 3 has 'priority'; a request has custom_id"),
        (request(""), "line 3 needs a custom_id"),
        (request(7), "line 3 needs a custom_id"),
        (request("\ud800"), r"custom_id has \\ud800, one half of a surrogate pair"),
        (request("a"), "line 3: custom_id 'a' is that of line 1; give each request its own"),
        (request("c", method="GET"), "line 3: method 'GET' must be 'POST'"),
        (request("c", url="/v1/embeddings"), "line 3: url '/v1/embeddings' must be one of /v1/ch"),
        (request("c", body="x"), "line 3 needs a body, the object that a client would send"),
        (request("c", body={"stream": True}), "line 3: stream must be false"),
    ],
)
def test_a_line_that_is_no_request_is_named(line, message):
    text = line if isinstance(line, str) else json.dumps(line)
    with pytest.raises((ValueError, InputError), match=message):
        read_batch([*text_of(request("a")), "\n", text], "requests")
    assert len(read_batch([*text_of(request("a")), "\n"], "requests")) == 1


def test_the_mark_that_windows_puts_before_a_file_is_skipped():
    first, second = text_of(request("a"), request("b"))
    assert [one.custom_id for one in read_batch(["\ufeff" + first, second], "f")] == ["a", "b"]
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_batch([first, "\ufeff" + second], "f")


def test_a_file_of_another_encoding_is_named(tmp_path, capsys):
    path = tmp_path / "latin1.jsonl"
    path.write_bytes('{"custom_id": "é"}\n'.encode("latin1"))
    assert run_batch.main(["-i", str(path), "-o", str(tmp_path / "out")]) == BAD_INPUT
    assert f"{path} is not UTF-8" in capsys.readouterr().err


def test_a_file_without_requests_or_for_another_model_is_refused():
    with pytest.raises(ValueError, match="requests holds no request"):
        read_batch(["\n", " \n"], "requests")
    lines = read_batch(text_of(request("a"), request("b", body={"model": "gpt-4o"})), "requests")
    with pytest.raises(ValueError, match="line 2 asks for model 'gpt-4o', and this is 'novels-6m'"):
        check_models(lines, ["novels-6m"], "requests")
    check_models(lines, ["novels-6m", "gpt-4o"], "requests")


def answered(lines, path, ask, **options) -> int:
    output = BatchOutput(path, lines, skips_done=options.pop("skips_done", False))
    output.open()
    refused = asyncio.run(
        answer_all(
            output.waiting,
            ask,
            output,
            **{"at_once": 3, "model": "m", "progress": lambda *_: None} | options,
        )  # fmt: skip
    )
    output.put_in_order()
    return refused


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_have_the_order_of_the_input_and_a_file_is_gone_on_with(tmp_path):
    """Answers come in another order. What was refused, and a line that was cut, are asked again."""
    lines = read_batch(text_of(*(request(f"{i}", body={"i": i}) for i in range(7))), "requests")
    asked, path = [], tmp_path / "out.jsonl"

    def asking(*refused: int):
        async def ask(url: str, body: bytes) -> tuple[int, bytes]:
            given = json.loads(body)
            assert (url, given["model"]) == ("/v1/completions", "m")
            asked.append(given["i"])
            await asyncio.sleep(0.01 * (7 - given["i"]))
            if given["i"] in refused:
                return 400, b'{"error": {"code": "c", "message": "no"}}'
            return 200, json.dumps({"id": f"cmpl-{given['i']}"}).encode()

        return ask

    assert answered(lines, path, asking(2)) == 1
    rows = read(path)
    assert [row["custom_id"] for row in rows] == [line.custom_id for line in lines]
    assert rows[2]["error"] == {"code": "c", "message": "no"}
    assert rows[2]["response"]["status_code"] == 400
    assert rows[3]["response"] == {
        "status_code": 200, "request_id": "cmpl-3", "body": {"id": "cmpl-3"},
    }  # fmt: skip
    with pytest.raises(ValueError, match="not empty; give another file to write to, or --skip"):
        BatchOutput(path, lines, skips_done=False)
    whole = path.read_text()
    path.write_text(whole[:-20])
    asked.clear()
    assert answered(lines, path, asking(), skips_done=True) == 0
    assert sorted(asked) == [2, 6]
    assert [row["error"] for row in read(path)] == [None] * 7
    with pytest.raises(ValueError, match="line 1 answers '0', which the input does not ask"):
        BatchOutput(path, lines[1:], skips_done=True)
    other = [dataclasses.replace(lines[0], body={**lines[0].body, "max_tokens": 3}), *lines[1:]]
    with pytest.raises(ValueError, match="line 1 answers another request of id '0' than the input"):
        BatchOutput(path, other, skips_done=True)
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1 is no answer of a batch; give another --output"):
        BatchOutput(path, lines, skips_done=True)


def test_half_of_a_surrogate_pair_is_refused_in_its_line_alone(tmp_path):
    prompts = {"a": "a", "b": "\ud800", "c": "\U0001f600"}
    asks = (request(name, body={"prompt": prompt}) for name, prompt in prompts.items())
    lines = read_batch(text_of(*asks), "requests")
    asked, path = [], tmp_path / "out.jsonl"

    async def ask(url: str, body: bytes) -> tuple[int, bytes]:
        prompt = json.loads(body)["prompt"]
        asked.append(prompt)
        if prompt == prompts["b"]:  # told as a server tells it, and repeated as no server does
            return 400, json.dumps({"error": {"code": None, "message": f"half: {prompt}"}}).encode()
        return 200, b"{}"

    for num_asked in (3, 1):
        asked.clear()
        assert answered(lines, path, ask, skips_done=num_asked == 1) == 1
        assert len(asked) == num_asked
        assert [row["response"]["status_code"] for row in read(path)] == [200, 400, 200]
        assert read(path)[1]["error"]["message"] == "half: \ud800"


def test_a_file_that_was_cut_inside_a_character_is_gone_on_with(tmp_path):
    lines = read_batch(text_of(request("a"), request("b")), "requests")
    path, asked = tmp_path / "out.jsonl", []

    async def ask(url: str, body: bytes) -> tuple[int, bytes]:
        asked.append(body)
        return 200, json.dumps({"text": "\u65e5\u672c"}).encode()

    assert answered(lines, path, ask) == 0 and len(asked) == 2
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex("\u672c".encode()) + 2])
    assert answered(lines, path, ask, skips_done=True) == 0 and len(asked) == 3
    assert path.read_bytes() == whole
    path.write_bytes(whole.replace("\u672c".encode(), b"\xe6\x9c"))
    with pytest.raises(ValueError, match="line 1 is no answer of a batch; give another --output"):
        BatchOutput(path, lines, skips_done=True)


def test_a_request_that_finds_no_room_is_asked_again(tmp_path):
    """While others are under way; alone it is refused."""
    lines = read_batch(text_of(request("a"), request("b")), "requests")
    free, calls = asyncio.Event(), []

    async def ask(url: str, body: bytes) -> tuple[int, bytes]:
        calls.append(body)
        if len(calls) == 1:
            await free.wait()
            return 200, b"{}"
        if len(calls) == 2:
            free.set()
            return 429, b"{}"
        return 200, b"{}"

    async def full(url: str, body: bytes) -> tuple[int, bytes]:
        return 429, b'{"error": {"code": null, "message": "full"}}'

    assert answered(lines, tmp_path / "out", ask) == 0 and len(calls) in (2, 3)
    assert answered(lines[:1], tmp_path / "full", full) == 1


def test_an_application_is_asked_in_this_process():
    async def route(asked: Request) -> JSONResponse:
        return JSONResponse({"got": await asked.json(), "type": asked.headers["content-type"]}, 201)

    ask = in_process(Starlette(routes=[Route("/v1/completions", route, methods=["POST"])]))
    status, body = asyncio.run(ask("/v1/completions", b'{"a": 1}'))
    assert status == 201
    assert json.loads(body) == {"got": {"a": 1}, "type": "application/json"}
    assert asyncio.run(ask("/other", b"{}"))[0] == 404


@pytest.mark.slow
@pytest.mark.invariance
def test_a_file_has_the_digests_of_lone_requests_in_any_order(tmp_path, capsys):
    """Batches of 8 and of 2; another seed is the control."""
    prompts = ["It was late", "17+26=", "The old house by the sea"]
    lines = [
        request(
            f"{i}", body={"prompt": prompts[i % 3], "max_tokens": 6, "temperature": 0.7, "seed": i}
        )
        for i in range(9)
    ]
    refused = request("bad", body={"prompt": "a", "temperature": -1})

    def run(name: str, given: list[dict], *options: str, code: int = OK) -> dict[str, str]:
        source, out = tmp_path / f"{name}.in", tmp_path / f"{name}.out"
        source.write_text("".join(text_of(*given)))
        argv = ["-i", str(source), "-o", str(out), "--max-len", "64", *options]
        assert run_batch.main(argv) == code
        rows = read(out)
        assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in given]
        return {
            row["custom_id"]: row["response"]["body"]["choices"][0]["detjax"]["digest"]
            for row in rows
            if row["error"] is None
        }

    found = run("all", [*lines, refused], "--batch-size", "8", code=BAD_INPUT)
    assert "1 of 10 requests were refused; their lines in" in capsys.readouterr().err
    shuffled = random.Random(1).sample(lines, len(lines))
    assert run("shuffled", shuffled, "--batch-size", "2") == found
    llm = detjax.LLM("novels-6m", batch_size=1, max_len=64)
    for line in lines:
        body = line["body"]
        sampling = detjax.SamplingParams(max_tokens=6, temperature=0.7, seed=body["seed"])
        (out,) = llm.generate([body["prompt"]], sampling)
        assert out.outputs[0].digest() == found[line["custom_id"]]
    assert len(set(found.values())) == 9
