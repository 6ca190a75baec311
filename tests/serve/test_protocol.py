# SPDX-License-Identifier: Apache-2.0
"""What a body may say: nothing is ignored in silence."""

import json

import pytest

from detjax.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    RefusedError,
    parse,
    sampling_params,
)


def body(**fields) -> bytes:
    return json.dumps({"model": "m", "prompt": "x"} | fields).encode()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temprature": 1}, "temprature"),
        ({"functions": []}, "functions"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 65}, "logprobs"),
        ({"n": 1.5}, "n"),
        ({"stream_options": {"include_usage": True, "x": 1}}, "x"),
    ],
)
def test_a_field_that_is_not_known_or_of_another_type_is_named(fields, field):
    with pytest.raises(RefusedError) as refused:
        parse(body(**fields), CompletionRequest)
    assert refused.value.field == field and refused.value.status == 400
    assert field in str(refused.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"a": 1e999}'])
def test_what_is_no_request_is_refused(text):
    with pytest.raises(RefusedError):
        parse(text, CompletionRequest)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_a_completion_that_would_have_to_be_ignored_in_part_is_refused(fields, field):
    with pytest.raises(RefusedError) as refused:
        parse(body(**fields), CompletionRequest).check()
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_a_chat_that_would_have_to_be_ignored_in_part_is_refused(fields, field):
    text = json.dumps({"model": "m", "messages": [], **fields}).encode()
    with pytest.raises(RefusedError) as refused:
        parse(text, ChatRequest).check()
    assert refused.value.field == field


def test_values_that_ask_for_nothing_are_taken():
    asked = parse(
        body(presence_penalty=0, frequency_penalty=0.0, logit_bias={}, best_of=1, user="me"),
        CompletionRequest,
    )
    asked.check()
    sampling = sampling_params(asked, max_tokens=5, num_top=0)
    assert (sampling.temperature, sampling.seed, sampling.n) == (1.0, 0, 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"temperature": -1}, "temperature"), ({"n": 5000}, "n"), ({"stop": ["x"] * 17}, "stop")],
)
def test_sampling_out_of_range_is_named(fields, field):
    asked = parse(body(**fields), CompletionRequest)
    with pytest.raises(RefusedError) as refused:
        sampling_params(asked, max_tokens=5, num_top=0)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2, 3]], 2)],
)
def test_prompts_are_texts_or_ids_or_lists_of_them(prompt, count):
    assert len(parse(body(prompt=prompt), CompletionRequest).prompts()) == count


def test_an_empty_list_of_prompts_is_refused():
    with pytest.raises(RefusedError, match="empty list"):
        parse(body(prompt=[]), CompletionRequest).prompts()
