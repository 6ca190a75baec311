# SPDX-License-Identifier: Apache-2.0
"""Receipts over HTTP: whole, of the answer beside them, and equal on another mesh and load."""

import concurrent.futures
import json

import numpy as np
import pytest

import detjax
from detjax import audit, replay
from detjax.proof.receipt import Receipt
from tests.proof.test_receipt import make_key

from .conftest import make_service, served

COMPLETION = {"model": "novels-6m", "prompt": "The old house", "max_tokens": 8, "receipt": True}
CHAT = {"model": "novels-6m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8,
        "receipt": True}  # fmt: skip


def post(client, path: str, body: dict) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_each_choice_has_its_receipt(client, llm, path, body):
    asked = body | {"n": 2, "temperature": 0.9, "seed": 2**63 + 1, "stop": ["the"]}
    got = post(client, path, asked)
    assert [c["detjax"]["weights"] for c in got["choices"]] == [llm.identity().model["weights"]] * 2
    for i, choice in enumerate(got["choices"]):
        receipt = Receipt.from_json(choice["detjax"]["receipt"])
        assert receipt.answer["digest"] == choice["detjax"]["digest"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert receipt.answer["text"] == text
        assert receipt.sampling.seed == 2**63 + 1
        assert (receipt.sampling.n, receipt.sampling.noise_stream) == (1, i)


def test_a_stream_ends_with_the_receipt(client):
    asked = COMPLETION | {"seed": 3}
    whole = post(client, "/v1/completions", asked)["choices"][0]["detjax"]["receipt"]
    lines = client.post("/v1/completions", json=asked | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["detjax"]["receipt"] == whole
    assert all("detjax" not in event["choices"][0] for event in events[:-1])


@pytest.mark.slow
def test_text_with_special_tokens_is_that_of_its_receipt(client, tmp_path):
    asked = COMPLETION | {
        "skip_special_tokens": False, "allowed_token_ids": [0, 1, 300], "temperature": 2.0,
        "max_tokens": 12, "stop": ["<|bos|>omo", "m<|bos|>"], "logit_bias": {"0": 6},
        "logprobs": 0, "truncate_prompt_tokens": 2,
        "return_token_ids": True,
    }  # fmt: skip
    lines, texts = [], set()
    for seed in range(16):
        asked |= {"seed": seed // 2, "include_stop_str_in_output": seed % 2 == 1}
        choice = post(client, "/v1/completions", asked)["choices"][0]
        assert len(choice["prompt_token_ids"]) == 2
        told = client.post("/v1/completions", json=asked | {"stream": True}).text
        found = [json.loads(x[6:]) for x in told.splitlines() if x.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in found) == choice["text"]
        own = {0: len("<|bos|>"), 1: len("<|eos|>"), 300: len("om")}
        lens = [own[token_id] for token_id in choice["token_ids"]]
        assert choice["logprobs"]["text_offset"] == [sum(lens[:i]) for i in range(len(lens))]
        texts.add(choice["text"])
        receipt = Receipt.from_json(choice["detjax"]["receipt"])
        assert receipt.answer["text"] == choice["text"]
        assert receipt.sampling.truncate_prompt_tokens is None
        lines.append(choice["detjax"]["receipt"])
    assert any("<|eos|>" in text for text in texts)
    path = tmp_path / "receipts.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    assert audit.main([str(path), "--cache-dir", "none"]) == 0
    # Control: a text without them is not that of the answer.
    receipts = map(Receipt.from_json, lines)
    forged = next(one for one in receipts if one.answer["text"].startswith("<|bos|><|bos|>"))
    forged.request["sampling"]["skip_special_tokens"] = True
    path.write_text(forged.to_json() + "\n")
    assert audit.main([str(path), "--cache-dir", "none"]) == 3


def test_version_says_what_model_it_is(client, llm):
    known = client.get("/version").json()
    assert known["model"] == llm.identity().model | {"name": known["model"]["name"]}
    assert known["build"]["detjax"] == detjax.__version__


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"is_deterministic": False}, "would not be canonical"),
        ({"max_tokens": 0, "echo": True, "logprobs": 1}, "makes no token"),
    ],
)
def test_receipts_that_could_not_be_made_are_refused(client, fields, says):
    response = client.post("/v1/completions", json=COMPLETION | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "receipt")
    assert says in error["message"]


def test_a_server_with_a_key_signs(llm, tmp_path):
    with (
        served(make_service(llm, signing_key=make_key(tmp_path)), llm) as running,
        running.client() as client,
    ):
        line = post(client, "/v1/completions", COMPLETION)["choices"][0]["detjax"]["receipt"]
    signature = Receipt.from_json(line).signature
    assert signature is not None and signature.algorithm == "ed25519"


@pytest.mark.invariance
@pytest.mark.slow
@pytest.mark.parametrize("count", [64, pytest.param(1000, marks=pytest.mark.nightly)])
def test_receipts_of_a_loaded_server_replay_elsewhere(running, tmp_path, capsys, count):
    rng = np.random.default_rng(count)
    bodies = [
        COMPLETION | {
            "prompt": f"{i} " * int(rng.integers(1, 40)), "max_tokens": int(rng.integers(1, 24)),
            "temperature": float(rng.choice([0.0, 0.7, 1.3])), "seed": i, "n": 1 + i % 2,
            "top_p": float(rng.choice([1.0, 0.9])), "stop": ["he"] if i % 5 == 0 else [],
        }
        for i in range(count)
    ]  # fmt: skip

    def ask(body: dict) -> list[str]:
        with running.client(timeout=900) as own:
            choices = post(own, "/v1/completions", body)["choices"]
        return [choice["detjax"]["receipt"] for choice in choices]

    with concurrent.futures.ThreadPoolExecutor(max_workers=16) as pool:
        lines = [line for found in pool.map(ask, bodies) for line in found]
    path = tmp_path / "receipts.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    options = ["--tp", "2", "--batch-size", "7", "--shuffle", "3"]
    assert replay.main([str(path), "--cache-dir", "none", *options]) == 0
    assert audit.main([str(path), "--cache-dir", "none"]) == 0
    out = capsys.readouterr().out
    assert f"replayed {len(lines)} receipts" in out and f"audited {len(lines)} receipts" in out
    # Control: another seed, of the answer that was the least likely: another is drawn in its place.
    broken = min(map(Receipt.from_json, lines), key=lambda one: float(np.sum(one.logprobs)))
    broken.request["sampling"] |= {"seed": "123456789", "temperature": 1.3, "top_p": 1.0}
    path.write_text("".join([*(line + "\n" for line in lines[:5]), broken.to_json() + "\n"]))
    assert audit.main([str(path), "--cache-dir", "none"]) == 3
    assert "receipt 6: answer." in capsys.readouterr().err


def test_a_server_names_no_weights_that_it_has_not_hashed(llm, monkeypatch):
    """In place of weights that the owner of the engine loads while it serves."""
    with served(make_service(llm), llm) as running, running.client() as client:
        known = llm.identity().model["weights"]
        monkeypatch.setattr(llm.engine._output_processor, "weight_version", 7)
        plain = {name: value for name, value in COMPLETION.items() if name != "receipt"}
        proof = post(client, "/v1/completions", plain)["choices"][0]["detjax"]
        assert (proof["weight_version"], proof["weights"]) == (7, None)
        llm.engine.weight_history.replace(7)
        try:
            error = client.post("/v1/completions", json=COMPLETION).json()["error"]
        finally:
            llm.engine.weight_history.__init__()
            llm.engine.weight_history.note_request()
    assert known is not None and error["param"] == "receipt"
    assert "weight_version=7 answers, and the server has the hash of weight_ver" in error["message"]
