# SPDX-License-Identifier: Apache-2.0
"""The server as its clients see it: right answers, the same under load, and clear refusals."""

import asyncio
import base64
import concurrent.futures
import json
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import detjax
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason
from detjax.serve import make_parser
from detjax.server import output_deltas
from detjax.server.served_model import Limits
from detjax.server.service import Service, ServiceState

from .conftest import make_service, served, wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROMPT = "The old house by the sea"
BODY = {"model": "novels-6m", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}


def post(client, path="/v1/completions", **fields):
    return client.post(path, json=BODY | fields)


def answer(client, **fields):
    response = post(client, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def gone_quiet(running):
    """Wait until nothing runs; the statistics then."""
    deadline = time.monotonic() + 60
    while True:
        stats = running.service.stats()
        if not (stats.num_running or stats.num_waiting or running.service.num_open):
            return stats
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.invariance
def test_an_answer_has_the_bits_of_the_library(client, llm):
    sampling = detjax.SamplingParams(max_tokens=12, temperature=0.8, seed=2**32 + 5, n=2)
    (out,) = llm.generate([PROMPT], sampling)
    got = answer(client, temperature=0.8, seed=2**32 + 5, n=2, return_token_ids=True,
                 return_logprob_bytes=True)  # fmt: skip
    assert got["system_fingerprint"] == llm.config.fingerprint
    for choice, want in zip(got["choices"], out.outputs, strict=True):
        assert choice["detjax"]["digest"] == want.digest()
        assert (choice["text"], tuple(choice["token_ids"])) == (want.text, want.token_ids)
        exact = np.frombuffer(base64.b64decode(choice["detjax"]["logprobs_f32"]), "<f4")
        assert exact.tobytes() == np.asarray(want.logprobs, "<f4").tobytes()
        assert choice["detjax"]["sampling"]["seed"] == 2**32 + 5


@pytest.mark.invariance
def test_answers_do_not_depend_on_the_load(running, client):
    bodies = [
        {"prompt": f"{PROMPT} {i}" * (1 + i % 3), "temperature": 0.9 * (i % 2), "seed": i,
         "max_tokens": 4 + i % 9}
        for i in range(24)
    ]  # fmt: skip
    alone = [answer(client, **body)["choices"][0]["detjax"]["digest"] for body in bodies]

    def ask(body):
        with running.client() as own:
            return answer(own, **body)["choices"][0]["detjax"]["digest"]

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, bodies))
    assert together == alone and len(set(alone)) > 20


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"n": 2, "temperature": 0.9, "seed": 3},
                                    {"prompt": [PROMPT, "17+26="]}, {"logprobs": 2},
                                    {"stop": ["e"], "temperature": 0.9, "seed": 3}])  # fmt: skip
def test_a_stream_is_the_answer_in_pieces(client, fields):
    whole = answer(client, **fields)
    response = post(client, stream=True, stream_options={"include_usage": True}, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    for want in whole["choices"]:
        parts = [c for e in chunks for c in e["choices"] if c["index"] == want["index"]]
        assert "".join(part["text"] for part in parts) == want["text"]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [want["finish_reason"]]
        assert parts[-1]["detjax"] == want["detjax"]
        if want["logprobs"]:
            for name, values in want["logprobs"].items():
                told = [v for p in parts if p["logprobs"] for v in p["logprobs"][name]]
                assert told == values, name


def test_an_event_has_as_many_tokens_as_the_server_is_told(client, llm):
    fields = {"max_tokens": 12, "temperature": 0.9, "seed": 3, "n": 2, "return_token_ids": True}
    whole = answer(client, **fields)
    with served(make_service(llm, stream_interval=5), llm) as other, other.client() as own:
        chunks = events(post(own, stream=True, **fields))
    for want in whole["choices"]:
        parts = [c for e in chunks for c in e["choices"] if c["index"] == want["index"]]
        assert [len(part["token_ids"]) for part in parts] == [1, 5, 5, 1]
        assert "".join(part["text"] for part in parts) == want["text"]
        assert parts[-1]["detjax"] == want["detjax"]


def test_choices_stand_in_the_order_of_the_prompts(client):
    got = answer(client, prompt=["17+26=", PROMPT], n=2, temperature=0.9, seed=3)
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
    alone = answer(client, n=2, temperature=0.9, seed=3)
    digests = [choice["detjax"]["digest"] for choice in got["choices"]]
    assert digests[2:] == [choice["detjax"]["digest"] for choice in alone["choices"]]


def test_token_ids_are_a_prompt_like_their_text(client, llm):
    ids = llm.tokenizer.encode(PROMPT)
    assert (
        answer(client, prompt=ids)["choices"][0]["detjax"]
        == (answer(client)["choices"][0]["detjax"])
    )
    assert len(answer(client, prompt=[ids, ids])["choices"]) == 2


def test_a_stop_string_ends_the_text_before_it(client):
    text = answer(client, max_tokens=40)["choices"][0]["text"]
    stop = text.split()[3]
    choice = answer(client, max_tokens=40, stop=stop)["choices"][0]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"


def test_chat_goes_through_the_template(client, llm):
    messages = [{"role": "user", "content": "17+26="}]
    body = {"model": "novels-6m", "messages": messages, "max_tokens": 6, "temperature": 0}
    got = client.post("/v1/chat/completions", json=body).json()
    count = client.post("/tokenize", json={"model": "novels-6m", "messages": messages}).json()
    assert llm.tokenizer.decode(count["tokens"]) == "user: 17+26=\nassistant:"
    want = answer(client, prompt=count["tokens"], max_tokens=6)
    assert got["choices"][0]["detjax"]["digest"] == want["choices"][0]["detjax"]["digest"]
    assert got["choices"][0]["message"]["content"] == want["choices"][0]["text"]
    assert count["count"] == got["usage"]["prompt_tokens"] and count["max_model_len"] == 256
    tools = body | {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}
    more = client.post("/v1/chat/completions", json=tools).json()
    assert more["usage"]["prompt_tokens"] > got["usage"]["prompt_tokens"]
    none = client.post("/v1/chat/completions", json=tools | {"tool_choice": "none"}).json()
    assert none["choices"][0]["detjax"] == got["choices"][0]["detjax"]


def test_tokens_there_and_back(client):
    asked = {"model": "novels-6m", "prompt": PROMPT, "return_token_strs": True}
    got = client.post("/tokenize", json=asked).json()
    assert got["count"] == len(got["tokens"]) == len(got["token_strs"])
    back = client.post("/detokenize", json={"model": "novels-6m", "tokens": got["tokens"]}).json()
    assert back["prompt"] == "<|bos|>" + PROMPT
    bad = client.post("/detokenize", json={"model": "novels-6m", "tokens": [10**9]})
    assert bad.status_code == 400 and "1000000000" in bad.text


def test_the_openai_client_understands_it(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        assert model.id == "novels-6m"
        whole = client.completions.create(
            model="novels-6m", prompt=PROMPT, max_tokens=8, logprobs=2, seed=3
        )
        (choice,) = whole.choices
        assert len(choice.logprobs.token_logprobs) == 8 and whole.usage.completion_tokens == 8
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
        chat = client.chat.completions.create(
            model="novels-6m", messages=[{"role": "user", "content": "hi"}], max_tokens=8,
            logprobs=True, top_logprobs=3, seed=3,
        )  # fmt: skip
        content = chat.choices[0].logprobs.content
        assert len(content) == 8 and all(len(entry.top_logprobs) == 3 for entry in content)
        pieces = client.chat.completions.create(
            model="novels-6m", messages=[{"role": "user", "content": "hi"}], max_tokens=8, seed=3,
            stream=True,
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        assert text == chat.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="'gpt' is not served"):
            client.completions.create(model="gpt", prompt="x")
        with pytest.raises(openai.BadRequestError, match="presence_penalty=9.0 must be"):
            client.completions.create(model="novels-6m", prompt="x", presence_penalty=9.0)


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"model": "other"}, 404, "'other' is not served here; 'novels-6m' is"),
        ({"prompt": "sea " * 300}, 400, "more than this server's context of 256"),
        ({"max_tokens": 1000}, 400, "1000, more than this server's context of 256"),
        ({"prompt": [[]]}, 400, "no tokens"),
        ({"prompt": [5, -1]}, 400, "token id -1, outside the vocabulary"),
        ({"unknown": 1}, 400, "unknown field 'unknown'"),
        ({"prompt": "x" * (1 << 20)}, 413, "larger than 1048576 bytes"),
        ({"priority": 1000}, 400, "priority=1000"),
        ({"prompt": ["x"] * 2000}, 400, "2000 prompts, more than 1024"),
        ({"cache_salt": 5}, 400, "cache_salt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_with_the_reason(client, fields, status, text, stream):
    response = post(client, stream=stream, **fields)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert text in error["message"] and error["type"]


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def access_log(monkeypatch) -> Iterator[list[str]]:
    """Its lines. A server that has run in this process keeps them from the root."""
    log, kept = logging.getLogger("detjax.server.access"), _Lines()
    monkeypatch.setattr(log, "handlers", [kept])
    level = log.level
    log.setLevel(logging.INFO)
    yield kept.lines
    log.setLevel(level)


def lines_of(access_log: list[str], request_id: str) -> list[str]:
    """Those of a request. The last is written behind its answer, and so may that of another be."""
    wait_for(lambda: any(line.endswith(f" {request_id}") for line in access_log))
    return [line for line in access_log if request_id in line]


def test_the_log_has_the_text_of_prompts_only_where_it_is_asked_for(client, llm, access_log):
    body = {"model": "novels-6m", "prompt": ["a secret\nof mine", "x"], "max_tokens": 1}
    answered = client.post("/v1/completions", json=body)
    assert answered.status_code == 200
    lines_of(access_log, answered.headers["x-request-id"])
    assert not any("secret" in line for line in access_log)
    with served(make_service(llm, logs_prompts=True), llm) as other, other.client() as own:
        answered = own.post("/v1/completions", json=body).headers["x-request-id"]
        first, second, last = lines_of(access_log, answered)
    assert first == f'{answered} prompt "a secret\\nof mine"' and second == f'{answered} prompt "x"'
    assert " 200 " in last


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_keeps_its_id_in_the_answer_its_header_and_the_log(client, access_log, stream):
    body = {"model": "novels-6m", "prompt": "x", "max_tokens": 2, "stream": stream}
    response = client.post("/v1/completions", json=body, headers={"X-Request-Id": "trace-7/a"})
    own = client.post("/v1/completions", json=body)
    assert response.headers["x-request-id"] == "trace-7/a"
    assert '"id":"cmpl-trace-7/a"' in response.text
    mine = own.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", mine) and f'"id":"cmpl-{mine}"' in own.text
    assert len(lines_of(access_log, "trace-7/a")) == len(lines_of(access_log, mine)) == 1
    refused = client.post("/v1/completions", json={}, headers={"X-Request-Id": "trace-8"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "trace-8")


@pytest.mark.parametrize("given", ["two words", "x" * 129, "café".encode()])
def test_an_id_that_cannot_stand_in_a_log_is_refused(client, given):
    response = client.get("/v1/models", headers={"X-Request-Id": given})
    assert response.status_code == 400 and "X-Request-Id" in response.json()["error"]["message"]


def test_routes_and_verbs_that_there_are_not(client):
    assert client.get("/v1/nothing").status_code == 404
    wrong = client.get("/v1/completions")
    assert wrong.status_code == 405 and "GET /v1/completions" in wrong.json()["error"]["message"]


def test_without_the_key_nobody_is_answered(llm):
    with served(make_service(llm), llm, api_keys=["k1", "k2"]) as running, running.client() as own:
        assert post(own).status_code == 401
        assert own.get("/metrics").status_code == 401
        assert own.get("/health").status_code == own.get("/version").status_code == 200
        for key, status in (("k1", 200), ("k2", 200), ("k", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            got = own.post("/v1/completions", json=BODY, headers=headers)
            assert got.status_code == status


def test_who_leaves_is_cancelled_and_gives_back_its_pages(running, client):
    before = gone_quiet(running).num_cancelled
    body = BODY | {"max_tokens": 200, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    assert gone_quiet(running).num_cancelled == before + 1
    try:
        running.client(timeout=0.05).post("/v1/completions", json=BODY | {"max_tokens": 200})
    except Exception as error:
        assert "timed out" in str(error)
    gone_quiet(running)
    assert post(client).status_code == 200


def test_a_full_queue_and_a_busy_key_are_told_when_to_come_back(llm):
    service = make_service(llm, requests_per_key=2)
    with served(service, llm) as running:

        def ask(i):
            with running.client() as own:
                return post(own, max_tokens=60, seed=i, temperature=1.0)

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            found = list(pool.map(ask, range(12)))
        refused = [response for response in found if response.status_code != 200]
        assert refused and len(refused) < 12
        for response in refused:
            assert response.status_code == 429 and response.headers["Retry-After"] == "1"
        with running.client() as own:
            # A client need not come back with what never fits.
            full = post(own, n=100, temperature=1.0)
            assert full.status_code == 400 and "100 sequences at once" in full.text
            assert full.json()["error"]["param"] == "n" and "Retry-After" not in full.headers


def test_an_answer_that_takes_too_long_is_given_up(llm):
    with served(make_service(llm, request_s=0.001), llm) as running, running.client() as own:
        late = post(own, max_tokens=100)
        assert late.status_code == 504 and "longer than 0.001 s" in late.text
        gone_quiet(running)


def test_metrics_are_prometheus(running, client):
    answer(client)
    families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}
    stats = running.service.stats()
    (sample,) = families["detjax_decode_tokens"].samples
    assert sample.value == stats.decode_tokens > 0
    first = families["detjax_time_to_first_token_seconds"].samples
    counts = [s.value for s in first if s.name.endswith("_bucket")]
    assert counts == sorted(counts) and counts[-1] == stats.first_token_s.count
    (ready,) = [s for s in families["detjax_state"].samples if s.labels["state"] == "ready"]
    assert ready.value == 1


def test_while_it_drains_nobody_new_is_let_in(llm):
    service = make_service(llm)
    with served(service, llm) as running, running.client() as own:
        assert own.get("/health").json() == {"status": "ready"}
        service.state = ServiceState.DRAINING
        assert own.get("/health").status_code == post(own).status_code == 503


def test_a_sequence_that_fails_fails_its_request_alone(running, client, monkeypatch):
    push = output_deltas.StreamedSequence.push

    def push_or_fail(self, event):
        if self._stream._stop_strings == ("planted",):
            raise RuntimeError("planted")
        return push(self, event)

    want = answer(client)["choices"][0]["detjax"]
    monkeypatch.setattr(output_deltas.StreamedSequence, "push", push_or_fail)

    def ask(i):
        with running.client() as own:
            return post(own, **({"stop": "planted"} if i % 2 else {}), stream=i == 3)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, range(6)))
    assert [response.status_code for response in found] == [200, 500, 200, 200, 200, 500]
    assert [found[i].json()["choices"][0]["detjax"] for i in (0, 2, 4)] == [want] * 3
    assert "planted" in found[1].json()["error"]["message"]
    assert "planted" in events(found[3])[-1]["error"]["message"]


def test_a_server_that_starts_says_so(llm):
    service = Service(None, Limits())
    with served(service, llm) as running, running.client() as own:
        assert own.get("/health").json() == {"status": "starting"}
        early = post(own)
        assert early.status_code == own.get("/v1/models").status_code == 503
        assert early.json()["error"]["code"] == "starting" and early.headers["Retry-After"] == "1"
        assert 'detjax_state{state="starting"} 1.0' in own.get("/metrics").text
        service.open(make_service(llm).model)
        assert own.get("/health").json() == {"status": "ready"} and post(own).status_code == 200


def test_no_body_brings_it_down(client):
    rng = np.random.default_rng(0)
    values = [None, 0, -1, 1e308, "", "x", [], {}, [[]], [None], True, "\ud800", 2**70, ["a", 1]]
    names = [*BODY, "n", "stop", "seed", "logprobs", "echo", "stream", "top_k", "min_p", "top_p",
             "messages", "stop_token_ids", "priority", "cache_salt", "logit_bias"]  # fmt: skip
    statuses = set()
    for i in range(300):
        body = dict(BODY) | {"max_tokens": 1}
        for name in rng.choice(names, size=int(rng.integers(1, 4)), replace=False):
            body[str(name)] = values[int(rng.integers(len(values)))]
        text = json.dumps(body).encode()
        if i % 5 == 0:
            at = int(rng.integers(len(text)))
            text = text[:at] + bytes(rng.integers(0, 256, 3, np.uint8)) + text[at:]
        path = "/v1/completions" if i % 3 else "/v1/chat/completions"
        statuses.add(client.post(path, content=text).status_code)
    assert 200 in statuses and 400 in statuses and max(statuses) < 500


def test_digest_is_that_of_a_completion(client):
    got = answer(client, return_token_ids=True, return_logprob_bytes=True)["choices"][0]
    done = Completion(
        request_idx=0, sequence_idx=0, prompt_token_ids=tuple(got["prompt_token_ids"]),
        token_ids=tuple(got["token_ids"]),
        logprobs=tuple(np.frombuffer(base64.b64decode(got["detjax"]["logprobs_f32"]), "<f4")),
        top_logprobs=(), finish_reason=FinishReason.LENGTH,
    )  # fmt: skip
    assert done.digest() == got["detjax"]["digest"]


def chat(**fields):
    message = {"role": "user", "content": "17+26="}
    return {"model": "novels-6m", "messages": [message], "max_tokens": 8, "temperature": 0} | fields


def test_the_openai_client_reads_responses(running, client):
    want = client.post("/v1/chat/completions", json=chat()).json()["choices"][0]
    asked = {"model": "novels-6m", "input": "17+26=", "max_output_tokens": 8, "temperature": 0}
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as own:
        whole = own.responses.create(**asked)
        assert whole.output_text == want["message"]["content"] and whole.status == "incomplete"
        assert whole.usage.output_tokens == 8
        with own.responses.stream(**asked) as stream:
            told = list(stream)
        text = "".join(e.delta for e in told if e.type == "response.output_text.delta")
        assert told[-1].type == "response.incomplete"
        assert text == told[-1].response.output_text == whole.output_text
        with pytest.raises(openai.BadRequestError, match='previous_response_id="resp_1" is not'):
            own.responses.create(**asked, previous_response_id="resp_1")
        with pytest.raises(openai.BadRequestError, match="store=true"):
            own.responses.create(**asked, store=True)
    got = client.post("/v1/responses", json=asked).json()
    assert got["detjax"]["digest"] == want["detjax"]["digest"]
    parts = [{"type": "input_text", "text": "17+"}, {"type": "input_text", "text": "26="}]
    listed = client.post("/v1/responses", json=asked | {
        "input": [{"role": "user", "content": parts}], "instructions": None})  # fmt: skip
    assert listed.json()["detjax"]["digest"] == want["detjax"]["digest"]
    image = [{"role": "user", "content": [{"type": "input_image"}]}]
    bad = client.post("/v1/responses", json=asked | {"input": image})
    assert bad.status_code == 400 and "content[0] is of type 'input_image'" in bad.text


def test_the_async_openai_client_asks_many_at_once(running, client):
    async def ask():
        async with openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0
        ) as own:

            async def one(i):
                options = {"seed": i % 4, "temperature": 0.8, "max_tokens": 6}
                if i % 2:
                    pieces = await own.completions.create(
                        model="novels-6m", prompt=PROMPT, stream=True, **options
                    )
                    return "".join([piece.choices[0].text async for piece in pieces])
                whole = await own.completions.create(model="novels-6m", prompt=PROMPT, **options)
                return whole.choices[0].text

            texts = await asyncio.gather(*map(one, range(16)))
            with pytest.raises(openai.NotFoundError):
                await own.chat.completions.create(model="gpt", messages=[])
            with pytest.raises(openai.BadRequestError):
                await own.completions.create(model="novels-6m", prompt=[5] * 999)
        return texts

    texts = asyncio.run(ask())
    assert all(texts[i] == texts[i % 4] for i in range(16)) and len(set(texts)) == 4
    for i in range(4):
        alone = answer(client, seed=i, temperature=0.8, max_tokens=6)
        assert alone["choices"][0]["text"] == texts[i]


def test_the_openai_client_is_told_of_a_wrong_key_and_a_full_server(llm):
    service = make_service(llm, requests_per_key=1)
    with served(service, llm, api_keys=["k"]) as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as own:
            with pytest.raises(openai.AuthenticationError):
                own.models.list()
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0) as own:
            pieces = own.completions.create(
                model="novels-6m", prompt=PROMPT, max_tokens=200, stream=True, temperature=0
            )
            with pytest.raises(openai.RateLimitError, match="as many as it may"):
                own.completions.create(model="novels-6m", prompt=PROMPT)
            pieces.close()
            gone_quiet(running)
            service.state = ServiceState.DRAINING
            with pytest.raises(openai.InternalServerError, match="draining"):
                own.completions.create(model="novels-6m", prompt=PROMPT)


def test_the_commands_of_the_documentation_run(running, llm):
    """Every curl of docs/server.md and `--help`, with this server's address.

    Those of an administrator and of adapters need another server: `test_admin.py` and
    `test_adapters.py` send them.
    """
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    texts = [(ROOT / "docs" / "server.md").read_text(), make_parser().format_help()]
    commands = [found for text in texts for found in
                re.findall(r"^ *(curl (?:.*\\\n)*.*)$", text, re.MULTILINE)]  # fmt: skip
    commands = [one for one in commands if "$KEY" not in one and '"model": "sql"' not in one]
    assert len(commands) >= 5
    (want,) = llm.generate([PROMPT], detjax.SamplingParams(max_tokens=32))
    digests = []
    for command in commands:
        asked = command.replace("http://127.0.0.1:8000", running.url)
        assert running.url in asked
        ran = subprocess.run(asked + " --fail-with-body -s", shell=True, capture_output=True)
        assert ran.returncode == 0, (asked, ran.stdout)
        digests += re.findall(rb'"digest":"(\w+)"', ran.stdout)
    assert want.outputs[0].digest().encode() in digests


def test_a_canonical_answer_in_dvr_counts_its_rollbacks():
    llm = detjax.LLM(mode="dvr", max_len=256, batch_size=4, show_progress=False)
    with served(make_service(llm), llm) as running, running.client() as own:
        prompts = [f"{PROMPT} {i}" for i in range(6)]
        got = answer(own, prompt=prompts, max_tokens=60, temperature=0.9, seed=1)
        stats = gone_quiet(running)
        counts = [choice["detjax"]["rollbacks"] for choice in got["choices"]]
        assert all(count["windows"] >= 2 for count in counts)
        for name, total in (("windows", stats.num_windows), ("draft_tokens", stats.draft_tokens),
                            ("windows_rolled_back", stats.num_rollbacks)):  # fmt: skip
            assert sum(count[name] for count in counts) == total
        wrong = stats.draft_tokens - stats.accepted_tokens
        assert sum(count["draft_tokens_rolled_back"] for count in counts) == wrong
        plain = answer(own, max_tokens=20, is_deterministic=False)["choices"][0]["detjax"]
        assert plain["rollbacks"]["windows"] == 0 and not plain["is_deterministic"]


def test_a_failed_self_check_is_told_and_plain_requests_are_answered(llm, monkeypatch):
    monkeypatch.setattr(llm.engine._claim, "difference", "planted")
    with served(make_service(llm), llm) as running, running.client() as client:
        health = client.get("/health")
        assert health.status_code == 503 and "planted" in health.json()["reason"]
        assert health.json()["status"] == "self_check_failed"
        refused = post(client)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "self_check_failed"
        assert post(client, is_deterministic=False).status_code == 200


def test_the_tokens_of_a_prompt_that_the_cache_had_are_counted(client, llm):
    page_len = llm.config.profile.attention_block
    words = " ".join(f"word{i}" for i in range(page_len // 2))
    asked = {"prompt": words, "cache_salt": "counted", "n": 2, "temperature": 1, "seed": 1}
    counts = {}
    for name in ("first", "second"):
        whole = answer(client, **asked)
        counts[name] = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert "cached" not in str(whole["choices"])
    # All whole pages, but not the last token's, whose logits are needed.
    most = (whole["usage"]["prompt_tokens"] - 1) // page_len * page_len
    assert counts == {"first": 0, "second": most} and most >= page_len
    stream = post(client, stream=True, stream_options={"include_usage": True}, **asked)
    assert events(stream)[-1]["usage"] == whole["usage"]
    twice = answer(client, **asked | {"prompt": [words, words], "n": 1})
    assert twice["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 * most}
    messages = [{"role": "user", "content": words}]
    told = []
    asked_of = {"chat/completions": {"messages": messages}, "responses": {"input": words}}
    for path, fields in asked_of.items():
        for _ in range(2):
            body = {"model": "novels-6m", "cache_salt": path} | fields
            got = client.post(f"/v1/{path}", json=body).json()["usage"]
            kind = "prompt" if "prompt_tokens" in got else "input"
            told.append(got[f"{kind}_tokens_details"]["cached_tokens"])
        body |= {"stream": True, "stream_options": {"include_usage": kind == "prompt"}}
        last = client.post(f"/v1/{path}", json=body).text
        assert f'"cached_tokens":{told[-1]}' in last
    assert told[0::2] == [0, 0] and told[1] == told[3] >= page_len


def test_the_prefix_cache_is_forgotten_when_asked(client):
    asked = {"prompt": " ".join(f"page{i}" for i in range(48)), "cache_salt": "reset"}

    def cached() -> int:
        return answer(client, **asked)["usage"]["prompt_tokens_details"]["cached_tokens"]

    before = answer(client, **asked)["choices"]
    assert cached() > 0
    told = client.post("/reset_prefix_cache", json={"reset_running_requests": False})
    assert (told.status_code, told.json()) == (200, {"status": "reset"})
    refused = client.post("/reset_prefix_cache?reset_running_requests=true")
    assert refused.json()["error"]["param"] == "reset_running_requests"
    assert cached() == 0 and cached() > 0
    assert answer(client, **asked)["choices"][0]["detjax"] == before[0]["detjax"]
