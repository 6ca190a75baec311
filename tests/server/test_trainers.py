# SPDX-License-Identifier: Apache-2.0
"""Requests as the clients of trainers send them: TRL 1.16's VLLMClient, SkyRL's remote client."""

import ast
import base64
from pathlib import Path

import numpy as np
import pytest

from detjax.models.bundled import bundled_model_path

PROMPTS = [[0, 18, 24, 12, 19], [0, 700, 41, 3]]
TRL = {
    "model": "novels-6m", "return_token_ids": True, "return_tokens_as_token_ids": True, "n": 2,
    "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "max_tokens": 5,
}  # fmt: skip
"""What VLLMClient.generate and VLLMClient.chat send, with GRPOTrainer's defaults."""


TINKER = {
    "n": 2, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 0, "temperature": 1.0,
    "max_tokens": 5, "seed": 7, "top_k": -1, "top_p": 1.0,
}  # fmt: skip
"""What SkyRL's RemoteInferenceClient.sample makes of a request in Tinker's shape."""


def id_of(token: str) -> int:
    """As trainers read the name of a token in `logprobs`."""
    kind, _, number = token.partition(":")
    assert kind == "token_id"
    return int(number)


def exact(choice: dict) -> list[float]:
    """The float32 logprobs of an answer, as Python's floats."""
    return np.frombuffer(base64.b64decode(choice["detjax"]["logprobs_f32"]), "<f4").tolist()


def asked(client, path: str, **fields) -> dict:
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("num_top", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_completions_as_trl_asks_for_them(client, num_top):
    got = asked(client, "/v1/completions", prompt=PROMPTS, logprobs=num_top, seed=7,
                return_logprob_bytes=True, **TRL)  # fmt: skip
    choices = got["choices"]
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == PROMPTS
    for choice in choices:
        told = choice["logprobs"]
        assert [id_of(token) for token in told["tokens"]] == choice["token_ids"]
        # JSON's numbers are exact: a trainer reads the float32 that was computed.
        assert told["token_logprobs"] == exact(choice)
        for token, value, top in zip(
            told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
        ):
            assert top[token] == value and num_top <= len(top) <= num_top + 1
    assert choices[0]["token_ids"] != choices[1]["token_ids"], "a group has different answers"


def test_a_token_is_named_by_its_text_unless_its_id_is_asked_for(client):
    plain = TRL | {"return_tokens_as_token_ids": False, "seed": 7, "logprobs": 0}
    by_text = asked(client, "/v1/completions", prompt=PROMPTS[0], **plain)["choices"][0]
    by_id = asked(client, "/v1/completions", prompt=PROMPTS[0],
                  **plain | {"return_tokens_as_token_ids": True})["choices"][0]  # fmt: skip
    assert by_text["detjax"]["digest"] == by_id["detjax"]["digest"]
    assert not any(token.startswith("token_id:") for token in by_text["logprobs"]["tokens"])
    assert by_text["logprobs"]["text_offset"] == by_id["logprobs"]["text_offset"]


def test_conversations_as_trl_asks_for_them(client):
    told = {"logprobs": True, "top_logprobs": 0, "seed": 7, "return_logprob_bytes": True}
    messages = [{"role": "user", "content": "17+26="}]
    got = asked(client, "/v1/chat/completions", messages=messages, **told, **TRL)
    assert got["prompt_token_ids"]
    for choice in got["choices"]:
        content = choice["logprobs"]["content"]
        assert [id_of(entry["token"]) for entry in content] == choice["token_ids"]
        assert [entry["logprob"] for entry in content] == exact(choice)


@pytest.mark.slow
def test_a_teachers_logprobs_as_trl_asks_for_them(client):
    asked_of_trl = {"model": "novels-6m", "prompt": PROMPTS, "max_tokens": 1, "temperature": 1.0}
    got = asked(client, "/v1/completions", prompt_logprobs=2, **asked_of_trl)
    for choice, prompt in zip(got["choices"], PROMPTS, strict=True):
        assert choice["prompt_logprobs"][0] is None
        for entries, token in zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True):
            ranks = sorted(entry["rank"] for entry in entries.values())
            assert str(token) in entries and ranks[:2] == [1, 2]
    # TRL's own default of 100 is more than the server gives, which it says.
    refused = client.post("/v1/completions", json=asked_of_trl | {"prompt_logprobs": 100})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


def test_token_ids_as_skyrl_asks_for_them(client):
    sampling = {"max_tokens": 5, "temperature": 1.0, "logprobs": 0, "seed": 7}
    got = asked(client, "/inference/v1/generate", token_ids=PROMPTS[0], model="novels-6m",
                sampling_params=sampling)  # fmt: skip
    (choice,) = got["choices"]
    plain = asked(client, "/v1/completions", model="novels-6m", prompt=PROMPTS[0],
                  return_token_ids=True, **sampling)["choices"][0]  # fmt: skip
    assert choice["token_ids"] == plain["token_ids"]
    assert choice["detjax"]["digest"] == plain["detjax"]["digest"]
    assert choice["finish_reason"] == plain["finish_reason"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == plain["logprobs"]["token_logprobs"]
    assert [id_of(entry["token"]) for entry in content] == choice["token_ids"]
    few = {"max_tokens": 2, "output_kind": 2, "detokenize": False}
    scored = asked(client, "/inference/v1/generate", token_ids=PROMPTS[0], model="novels-6m",
                   sampling_params=TINKER)  # fmt: skip
    first, *rest = scored["prompt_logprobs"]
    assert first is None and len(rest) == len(PROMPTS[0]) - 1
    assert all(str(token) in one for token, one in zip(PROMPTS[0][1:], rest, strict=True))
    assert len(scored["choices"]) == TINKER["n"] and got["prompt_logprobs"] is None
    bare = asked(client, "/inference/v1/generate", token_ids=PROMPTS[0], request_id="a",
                 sampling_params=few)  # fmt: skip
    assert bare["request_id"] == "a" and bare["choices"][0]["logprobs"] is None


def test_token_ids_as_verl_asks_for_them(client):
    """By `examples/verl_rollouts.py`. At temperature 0.5 no processed logprob is the raw one."""
    sampling = {"max_tokens": 5, "temperature": 0.5, "top_p": 1.0, "top_k": -1, "logprobs": 0,
                "repetition_penalty": 1.0, "seed": 7, "logprobs_mode": "processed"}  # fmt: skip
    got = asked(client, "/inference/v1/generate", token_ids=PROMPTS[0], request_id="a" * 32,
                sampling_params=sampling)  # fmt: skip
    raw = asked(client, "/inference/v1/generate", token_ids=PROMPTS[0],
                sampling_params=sampling | {"logprobs_mode": "raw"})  # fmt: skip
    found, plain = (
        ([one["logprob"] for one in choice["logprobs"]["content"]], choice["token_ids"])
        for choice in (got["choices"][0], raw["choices"][0])
    )
    assert found[1] == plain[1] and len(found[0]) == 5
    assert all(a != b for a, b in zip(found[0], plain[0], strict=True))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"features": {"image": 1}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"sampling_params": {"output_kind": 1}}, "sampling_params.output_kind"),
        ({"sampling_params": {"echo": True}}, "sampling_params.echo"),
        ({"sampling_params": {"unknown": 1}}, "sampling_params.unknown"),
        ({"sampling_params": {"top_p": "a"}}, "sampling_params.top_p"),
        ({"sampling_params": {"top_p": 7.0}}, "top_p"),
        ({"model": "other"}, "model"),
        ({"token_ids": []}, "prompt"),
        ({"session_id": 1}, "session_id"),
    ],
)
def test_what_a_request_for_token_ids_cannot_have_is_refused(client, fields, param):
    body = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 2}} | fields
    refused = client.post("/inference/v1/generate", json=body)
    assert refused.status_code in (400, 404), refused.text
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize("name", ["skyrl_rollouts", "verl_rollouts"])
def test_an_example_finds_the_bundled_model_from_any_folder(name, tmp_path, monkeypatch):
    """They run in environments without detjax, so their own place says where it is."""
    monkeypatch.chdir(tmp_path)
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    found = {"Path": Path, "__file__": str(path)}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and "BUNDLED_MODEL" in ast.unparse(node.targets):
            exec(ast.unparse(node), found)
    assert found["BUNDLED_MODEL"] == bundled_model_path().resolve()
    assert 'add_argument("--model", type=Path, default=BUNDLED_MODEL)' in path.read_text()
