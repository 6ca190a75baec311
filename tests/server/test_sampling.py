# SPDX-License-Identifier: Apache-2.0
"""Sampling fields over HTTP: the bits of the library under a load, and an effect."""

import concurrent.futures
import json
import re

import pytest

import detjax
from detjax.engine.sampling.structured_output import StructuredOutput

pytestmark = pytest.mark.slow

PROMPT = "The old house by the sea"
BODY = {"model": "novels-6m", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.9, "seed": 4}
SCHEMA = {"enum": ["blue", "grey"]}
SAME = {
    "temperature": 0.4, "seed": 2**33 + 1, "top_p": 0.5, "top_k": 3, "min_p": 0.3,
    "presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 3.0, "max_tokens": 5,
    "n": 2, "noise": "common",
}  # fmt: skip
"""Fields that are called and written alike, and show alone."""
GRAMMAR = 'start: ("sea" | "house") " "? ("is" | "was") " " /[a-z]{3,6}/'
REGEX = "[a-f]{3,9}(-[0-9]{2})?"
OTHERS = {
    "best_of": ({"best_of": 4, "n": 2}, {"best_of": 4, "n": 2}),
    "logprobs_mode": (
        {"logprobs_mode": "processed", "top_k": 5, "logit_bias": {"300": 3.0}},
        {"logprobs_mode": "processed", "top_k": 5, "logit_bias": ((300, 3.0),)},
    ),
    "choice": (
        {"structured_outputs": {"choice": ["blue", "grey"]}},
        {"structured_output": StructuredOutput.of_choices(["blue", "grey"])},
    ),
    "regex": (
        {"structured_outputs": {"regex": REGEX}},
        {"structured_output": StructuredOutput(kind="regex", spec=REGEX)},
    ),
    "grammar": (
        {"structured_outputs": {"grammar": GRAMMAR}},
        {"structured_output": StructuredOutput(kind="grammar", spec=GRAMMAR)},
    ),
    "stop": ({"stop": ["a"]}, {"stop": ("a",)}),
    "include_stop_str_in_output": (
        {"stop": ["a"], "include_stop_str_in_output": True},
        {"stop": ("a",), "include_stop_str_in_output": True},
    ),
    "skip_special_tokens": (
        {"allowed_token_ids": [0, 300], "skip_special_tokens": False},
        {"allowed_token_ids": (0, 300), "skip_special_tokens": False},
    ),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 2}, {"truncate_prompt_tokens": 2}),
    "min_tokens": ({"stop": ["a"], "min_tokens": 4}, {"stop": ("a",), "min_tokens": 4}),
    "logit_bias": ({"logit_bias": {"300": 100.0}}, {"logit_bias": ((300, 100.0),)}),
    "allowed_token_ids": ({"allowed_token_ids": [300, 301]}, {"allowed_token_ids": (300, 301)}),
    "bad_words": ({"bad_words": [",", "the"]}, {"bad_words": (",", "the")}),
    "stop_token_ids": (
        {"allowed_token_ids": [300, 301], "stop_token_ids": [300], "ignore_eos": True},
        {"allowed_token_ids": (300, 301), "stop_token_ids": (300,), "ignore_eos": True},
    ),
}  # fmt: skip
CASES = {name: ({name: value}, {name: value}) for name, value in SAME.items()} | OTHERS


def ask(running, fields):
    with running.client(timeout=600) as own:  # compiling takes long
        response = own.post("/v1/completions", json=BODY | fields)
    assert response.status_code == 200, response.text
    return [
        (choice["text"], choice["finish_reason"], choice["detjax"]["digest"])
        for choice in response.json()["choices"]
    ]


def expected(llm, options):
    sampling = detjax.SamplingParams(
        **({"max_tokens": 12, "temperature": 0.9, "seed": 4} | options)
    )
    (out,) = llm.generate([PROMPT], sampling)
    return [(one.text, one.finish_reason.value, one.digest()) for one in out.outputs]


@pytest.mark.invariance
def test_a_field_has_the_bits_of_the_library_under_a_load_and_an_effect(running, llm):
    # First, as one engine is stepped by the library and the server in turn, never at once.
    wanted = [expected(llm, options) for _, options in CASES.values()]
    with concurrent.futures.ThreadPoolExecutor(len(CASES)) as pool:
        told = list(pool.map(lambda case: ask(running, case[0]), CASES.values()))
    plain = ask(running, {})
    for name, got, want in zip(CASES, told, wanted, strict=True):
        assert got == want, name
        assert got != plain, f"{name} has no effect here, so this shows nothing"


def test_a_form_is_kept_by_answers_streams_and_conversations(client):
    form = {"type": "json_schema", "json_schema": {"name": "sea", "schema": SCHEMA}}
    ends = {"model": "novels-6m", "max_tokens": 20, "temperature": 0.9, "seed": 3}
    asked = ends | {"prompt": PROMPT, "structured_outputs": {"json": SCHEMA}}
    whole = client.post("/v1/completions", json=asked).json()["choices"][0]
    assert json.loads(whole["text"]) in ("blue", "grey")
    assert whole["detjax"]["sampling"]["structured_output"]
    streamed = client.post("/v1/completions", json=asked | {"stream": True}).text
    chunks = [json.loads(text) for text in re.findall(r"^data: (\{.*)$", streamed, re.M)]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    talk = ends | {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    said = client.post("/v1/chat/completions", json=talk).json()["choices"][0]
    assert json.loads(said["message"]["content"]) in ("blue", "grey")
