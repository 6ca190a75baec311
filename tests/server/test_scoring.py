# SPDX-License-Identifier: Apache-2.0
"""Prompt logprobs over HTTP: echo as OpenAI has it, prompt_logprobs as vLLM; the engine's bits."""

import base64
import concurrent.futures
import json

import numpy as np
import pytest

from detjax.testing import assert_bitwise_equal

pytestmark = pytest.mark.slow

SNOWMAN = "☃"
"""A character of three tokens, of a byte each."""
PROMPT = f"The old house {SNOWMAN} by the sea"
BODY = {"model": "novels-6m", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}


def answer(client, path="/v1/completions", **fields):
    response = client.post(path, json=BODY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(client, path="/v1/completions", **fields):
    text = client.post(path, json=BODY | {"stream": True} | fields).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def scores_of(llm, ids, top=3):
    (scores,) = llm.engine.score([ids], top=top)
    return scores


@pytest.mark.invariance
def test_an_echoed_prompt_has_the_logprobs_of_the_library(client, llm):
    got = answer(client, echo=True, logprobs=3, return_token_ids=True)
    (choice,) = got["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    scores, found = scores_of(llm, ids), choice["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert_bitwise_equal(
        np.array(found["token_logprobs"][1:], np.float32),
        np.array([one.logprob for one in scores]),
        claim="logprobs of prompt and answer over HTTP",
    )
    for top, one in zip(found["top_logprobs"][1:], scores, strict=True):
        likeliest = [p for _, p in one.top_logprobs]
        assert [np.float32(p) for p in top.values()][:3] == likeliest
        assert len(top) == 3 + (one.logprob not in likeliest)
    # An offset is where the token's text begins in the choice's.
    text, offsets = choice["text"], [*found["text_offset"], len(choice["text"])]
    assert text.startswith(PROMPT) and len(found["tokens"]) == len(ids)
    pieces = [text[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]
    assert "".join(pieces) == text
    data = [llm.tokenizer.token_bytes(token_id) for token_id in ids]
    parts = [i for i, part in enumerate(data) if not part.isascii()]
    assert [pieces[i] for i in parts] == ["", "", SNOWMAN]
    assert all(pieces[i].encode() == part for i, part in enumerate(data) if i not in parts)


def test_nothing_is_generated_where_only_the_prompt_is_scored(client, llm):
    ids = list(llm.tokenizer.encode(PROMPT))
    whole = answer(client, echo=True, logprobs=3)["choices"][0]
    got = answer(client, prompt=ids, echo=True, logprobs=3, max_tokens=0)
    (choice,) = got["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    for name, values in choice["logprobs"].items():
        assert values == whole["logprobs"][name][: len(ids)]
    assert got["usage"]["completion_tokens"] == 0
    plain = answer(client, echo=True, max_tokens=0)["choices"][0]
    assert plain["text"] == PROMPT and plain["logprobs"] is None
    # As long as the server takes, since nothing must be left to generate.
    longest = [5] * 256
    got = answer(client, prompt=longest, prompt_logprobs=0, max_tokens=0)["choices"][0]
    assert len(got["prompt_logprobs"]) == 256


def test_prompt_logprobs_have_the_shape_of_vllm(client, llm):
    got = answer(client, prompt_logprobs=2, return_token_ids=True, return_logprob_bytes=True)
    (choice,) = got["choices"]
    ids = choice["prompt_token_ids"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for entries, token_id, one in zip(rest, ids[1:], scores_of(llm, ids, top=2), strict=True):
        own = entries[str(token_id)]
        assert np.float32(own["logprob"]) == one.logprob and own["rank"] == one.rank
        assert next(iter(entries)) == str(token_id)
        for rank, (top_id, value) in enumerate(one.top_logprobs, 1):
            entry = entries[str(top_id)]
            assert (np.float32(entry["logprob"]), entry["rank"]) == (value, rank)
        assert len(entries) == 2 + (one.rank > 2)
        data = llm.tokenizer.token_bytes(token_id)
        in_bytes = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        assert own["decoded_token"] == (data.decode() if data.isascii() else in_bytes)
    exact = np.frombuffer(base64.b64decode(choice["detjax"]["prompt_logprobs_f32"]), "<f4")
    assert_bitwise_equal(
        exact, np.array([one.logprob for one in scores_of(llm, ids)]), claim="the exact bytes"
    )
    assert "prompt_logprobs" not in answer(client)["choices"][0]


@pytest.mark.parametrize("prompt", ["", [0, 1], [0]])
def test_an_echoed_prompt_without_text_has_its_tokens(client, llm, prompt):
    """Special tokens alone, as an empty prompt becomes."""
    ids = list(llm.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
    assert ids and set(ids) <= llm.tokenizer.special_ids
    asked = {"prompt": prompt, "echo": True, "logprobs": 1}
    whole = answer(client, **asked, return_token_ids=True)["choices"][0]
    found = whole["logprobs"]
    assert len(found["tokens"]) == len(ids) + len(whole["token_ids"])
    scores = scores_of(llm, [*ids, *whole["token_ids"]])
    assert found["token_logprobs"] == [None, *(float(one.logprob) for one in scores)]
    assert found["text_offset"][: len(ids) + 1] == [0] * (len(ids) + 1)
    parts = [event["choices"][0] for event in chunks(client, **asked)]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in found.items():
        pieces = [part["logprobs"][name] for part in parts if part["logprobs"]]
        assert [value for piece in pieces for value in piece] == values, name
    scored = answer(client, **asked, max_tokens=0)["choices"][0]
    assert len(scored["logprobs"]["tokens"]) == len(ids) and scored["text"] == ""


def test_of_several_answers_every_one_has_the_prompts_logprobs(client):
    asked = {"n": 3, "temperature": 0.9, "prompt_logprobs": 1, "echo": True, "logprobs": 1}
    got = answer(client, prompt=[PROMPT, "It was late"], **asked)["choices"]
    assert len(got) == 6
    for part in (got[:3], got[3:]):
        assert part[0]["prompt_logprobs"] == part[1]["prompt_logprobs"]
        assert part[0]["prompt_logprobs"] == part[2]["prompt_logprobs"]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_has_the_prompts_logprobs_with_the_first_chunk(client, n):
    asked = {"prompt_logprobs": 2, "echo": True, "logprobs": 2, "n": n, "temperature": 0.5}
    asked["seed"] = 3
    whole = answer(client, **asked)["choices"]
    found = [choice for event in chunks(client, **asked) for choice in event["choices"]]
    for want in whole:
        parts = [choice for choice in found if choice["index"] == want["index"]]
        assert "".join(part["text"] for part in parts) == want["text"]
        told = [part["prompt_logprobs"] for part in parts if "prompt_logprobs" in part]
        assert told == [want["prompt_logprobs"]]
        for name, values in want["logprobs"].items():
            pieces = [part["logprobs"][name] for part in parts if part["logprobs"]]
            assert [value for piece in pieces for value in piece] == values, name


def test_a_conversation_has_them_beside_its_choices(client, llm):
    messages = [{"role": "user", "content": "17+26="}]
    asked = {"messages": messages, "prompt_logprobs": 1, "return_token_ids": True}
    body = {key: value for key, value in (BODY | asked).items() if key != "prompt"}
    got = client.post("/v1/chat/completions", json=body).json()
    ids = got["choices"][0]["prompt_token_ids"]
    scores = scores_of(llm, ids, top=1)
    assert got["prompt_logprobs"][0] is None
    for entries, token_id, one in zip(got["prompt_logprobs"][1:], ids[1:], scores, strict=True):
        assert np.float32(entries[str(token_id)]["logprob"]) == one.logprob
    text = client.post("/v1/chat/completions", json=body | {"stream": True}).text
    first = json.loads(text.split("\n\n")[0].removeprefix("data: "))
    assert first["prompt_logprobs"] == got["prompt_logprobs"]


@pytest.mark.invariance
def test_scores_do_not_depend_on_the_load(running, client):
    """The same texts one after the other, and all at once beside answers under way."""
    bodies = [
        {"prompt": f"{PROMPT} {i}. " * (1 + i % 4), "max_tokens": i % 2, "echo": True,
         "logprobs": 2, "return_logprob_bytes": True}
        for i in range(24)
    ]  # fmt: skip

    def ask(body):
        with running.client() as mine:
            got = answer(mine, **body)["choices"][0]
            return got["logprobs"], got["detjax"]["prompt_logprobs_f32"]

    alone = [ask(body) for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, bodies)) == alone
    assert len({exact for _, exact in alone}) == 24


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "asks for nothing without echo=true or prompt_logprobs"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n", "n=2 must be 1 where max_tokens=0"),
        ({"prompt_logprobs": 65}, "prompt_logprobs", "<= 64"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", ">= 0"),
        ({"prompt": [5] * 257, "max_tokens": 0, "echo": True}, "prompt", "257 tokens"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(client, fields, field, message):
    response = client.post("/v1/completions", json=BODY | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert message in error["message"]
