# SPDX-License-Identifier: Apache-2.0
"""What a body may say: nothing is ignored in silence."""

import json
import typing

import openai.types.chat.completion_create_params
import openai.types.completion_create_params
import openai.types.responses.response_create_params
import pytest

from detjax.server.chat_request import ChatRequest
from detjax.server.errors import RefusedError
from detjax.server.protocol import CompletionRequest, StructuredOutputs, sampling_params
from detjax.server.records import NAMES_OF_OTHERS, parse
from detjax.server.responses import ResponsesRequest

OPENAI = {
    CompletionRequest: openai.types.completion_create_params.CompletionCreateParamsNonStreaming,
    ChatRequest: openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming,
    ResponsesRequest: (
        openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming
    ),
}
REQUIRED = {
    CompletionRequest: {"model": "m", "prompt": "x"},
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    ResponsesRequest: {"model": "m", "input": "x"},
}


def optional_fields(kind) -> list[str]:
    return sorted(set(typing.get_type_hints(OPENAI[kind])) - REQUIRED[kind].keys())


def body(**fields) -> bytes:
    return json.dumps({"model": "m", "prompt": "x"} | fields).encode()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temprature": 1}, "temprature"),
        ({"functions": []}, "functions"),  # of chat
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 65}, "logprobs"),
        ({"n": 1.5}, "n"),
        ({"stream_options": {"include_usage": True, "x": 1}}, "stream_options.x"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_a_field_that_is_not_known_or_of_another_type_is_named(fields, field):
    with pytest.raises(RefusedError) as refused:
        parse(body(**fields), CompletionRequest)
    assert refused.value.field == field and refused.value.status == 400
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty; send an object"),
        (r'{"prompt": "\ud800"}', r"\ud800 at byte 12 is one half of a surrogate pair"),
        (r'{"prompt": "a\uDC00 or more"}', r"\uDC00 at byte 13 is one half"),
        (r'{"prompt": "\ud83d\ud83d\ude00"}', r"\ud83d at byte 12 is one half"),
        (r'{"prompt": "\\\ud83d\u0041"}', r"\ud83d at byte 14 is one half"),
        (r'{"prompt": "\\ud800', "truncated"),
        (r'{"prompt": "\ud83d\ude00', "truncated"),
        ('{"prompt": "\xff"}', "byte 12 is 0xff, which is not UTF-8"),
        ('{"prompt": NaN}', "(byte 11), at 'NaN}'"),
        ('{"prompt": "x", "temperature": 1e999}', "temperature: Number out of range"),
        ('{"max_tokens": -1}', "max_tokens=-1: Expected `int` >= 0"),
        ('{"max_tokens": -1', "max_tokens: Expected `int` >= 0"),
        ('{"prompt": [[1, "a"]]}', 'prompt[0][1]="a": Expected `int`, got `str`'),
        ('{"stream_options": {"include_usage": 3, "x": null}}', "stream_options.include_usage=3:"),
        ("[" * 100_000, "got `array`"),
    ],
)
def test_what_is_wrong_in_a_body_is_told_with_its_place_and_value(text, said):
    with pytest.raises(RefusedError) as refused:
        parse(text.encode("latin-1"), CompletionRequest)
    assert said in str(refused.value)


@pytest.mark.parametrize("kind", REQUIRED)
def test_a_field_that_is_missing_is_named(kind):
    """A model's name is none: one model is served, with its adapters."""
    for name in REQUIRED[kind].keys() - {"model"}:
        fields = {key: value for key, value in REQUIRED[kind].items() if key != name}
        with pytest.raises(RefusedError) as refused:
            parse(json.dumps(fields).encode(), kind)
        assert refused.value.field == name
    fields = {key: value for key, value in REQUIRED[kind].items() if key != "model"}
    assert parse(json.dumps(fields).encode(), kind).model is None


@pytest.mark.parametrize("kind", REQUIRED)
def test_null_is_absent_for_every_optional_field_of_openai(kind):
    """Alone and all at once; every one of them is known."""
    plain = parse(json.dumps(REQUIRED[kind]).encode(), kind)
    names = optional_fields(kind)
    assert len(names) > 10
    for fields in ({name: None for name in names}, *({name: None} for name in names)):
        asked = parse(json.dumps(REQUIRED[kind] | fields).encode(), kind)
        asked.check()
        assert asked == plain, fields


@pytest.mark.parametrize("kind", REQUIRED)
def test_null_is_absent_for_every_field_of_our_own(kind):
    plain = parse(json.dumps(REQUIRED[kind]).encode(), kind)
    for name in set(kind.__struct_fields__) - REQUIRED[kind].keys():
        asked = parse(json.dumps(REQUIRED[kind] | {name: None}).encode(), kind)
        assert asked == plain, name


@pytest.mark.parametrize("kind", REQUIRED)
def test_a_null_asks_for_nothing_whatever_its_name(kind):
    """Clients of vLLM send all of its fields, null where they are not set."""
    plain = parse(json.dumps(REQUIRED[kind]).encode(), kind)
    for name in ("mm_processor_kwargs", "thinking_token_budget", "no_such_field"):
        assert parse(json.dumps(REQUIRED[kind] | {name: None}).encode(), kind) == plain
        with pytest.raises(RefusedError, match=f"unknown field '{name}'"):
            parse(json.dumps(REQUIRED[kind] | {name: {}}).encode(), kind)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("guided_choice", "use structured_outputs.choice in its place"),
        ("max_new_tokens", "use max_tokens in its place"),
        ("max_tokenz", "did you mean max_tokens?"),
        ("beam_width", "leave it out"),
        ("max_tokenz" * 7, "leave it out"),  # longer than what is looked for
        ("x" * 100_000, "leave it out"),
    ],
)
def test_an_unknown_field_is_refused_with_what_to_send_in_its_place(name, hint):
    with pytest.raises(RefusedError, match="detjax would have to ignore it") as error:
        parse(body(**{name: ["a"]}), CompletionRequest)
    assert str(error.value).endswith(f"; {hint}")


def test_fields_of_other_servers_are_none_of_ours_and_stand_for_fields_that_exist():
    ours = set(CompletionRequest.__struct_fields__)
    parts = set(StructuredOutputs.__struct_fields__)
    for name, (use, *others) in NAMES_OF_OTHERS.items():
        field, _, part = use.partition(".")
        assert name not in ours and field in ours and (not part or part in parts), name
        assert set(others) <= set(ResponsesRequest.__struct_fields__), name


def test_parts_of_a_field_are_not_taken_for_fields():
    fields = {"structured_outputs": {"regexp": "a"}}
    with pytest.raises(RefusedError, match="'structured_outputs.regexp'.*; leave it out"):
        parse(body(**fields), CompletionRequest)


def test_a_seed_of_minus_one_is_drawn_and_no_top_logprobs_need_no_logprobs():
    asked = parse(body(seed=-1), CompletionRequest)
    seeds = {sampling_params(asked, max_tokens=1, num_top=0).seed for _ in range(4)}
    assert len(seeds) == 4 and None not in seeds
    of_chat = REQUIRED[ChatRequest] | {"top_logprobs": 0}
    assert parse(json.dumps(of_chat).encode(), ChatRequest).check() is None
    with pytest.raises(RefusedError, match="needs logprobs"):
        parse(json.dumps(of_chat | {"top_logprobs": 1}).encode(), ChatRequest).check()


def test_the_effort_of_a_response_is_that_of_a_chat():
    def asked(**reasoning) -> ResponsesRequest:
        fields = REQUIRED[ResponsesRequest] | {"reasoning": reasoning}
        return parse(json.dumps(fields).encode(), ResponsesRequest)

    for effort in (None, "high"):
        response = asked(effort=effort, summary=None)
        response.check()
        assert response.as_chat().reasoning_effort == effort
    with pytest.raises(RefusedError, match="told as it is") as refused:
        asked(summary="auto").check()
    assert refused.value.field == "reasoning.summary"


def test_null_is_absent_in_records_of_a_request_and_stays_in_free_objects():
    schema = {"enum": [None, 1], "default": None}
    given = {
        "messages": [{"role": "assistant", "content": None}],
        "stream": True,
        "stream_options": {"include_usage": None, "include_obfuscation": None},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "description": None, "schema": schema, "strict": None},
        },
    }
    asked = parse(json.dumps({"model": "m"} | given).encode(), ChatRequest)
    asked.check()
    assert asked.messages == given["messages"]
    assert asked.stream_options is not None and not asked.stream_options.include_usage
    assert asked.response_format is not None and asked.response_format.json_schema is not None
    assert asked.response_format.json_schema.schema == schema


NAMED = {"type": "function", "function": {"name": "f"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NEUTRAL = {
    "store": (False, True), "service_tier": ("auto", "flex"),
    "prompt_cache_retention": ("in_memory", "24h"),
}  # fmt: skip
OF_KIND = {
    CompletionRequest: {"use_beam_search": (False, True), "length_penalty": (1, 2.0)},
    ChatRequest: {
        "echo": (False, True), "include_reasoning": (True, False),
        "add_special_tokens": (False, True),
        "modalities": (["text"], ["text", "audio"]), "functions": ([], [{"name": "f"}]),
        "function_call": ("none", {"name": "f"}), "verbosity": ("medium", "low"),
        "audio": (None, {"voice": "alloy", "format": "wav"}),
        "prediction": (None, {"type": "content", "content": "x"}), "web_search_options": (None, {}),
    },
    ResponsesRequest: {
        "background": (False, True),
        "include": (["reasoning.encrypted_content"], ["file_search_call.results"]),
        "previous_response_id": (None, "resp_1"), "truncation": ("disabled", "auto"),
        "top_logprobs": (0, 3),
        "conversation": (None, "conv_1"),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", REQUIRED)
def test_what_is_not_supported_is_taken_at_its_neutral_value_alone(kind):
    for name, (neutral, other) in (NEUTRAL | OF_KIND[kind]).items():
        parse(json.dumps(REQUIRED[kind] | {name: neutral}).encode(), kind).check()
        with pytest.raises(RefusedError, match=rf"^{name}=.* is not supported") as refused:
            parse(json.dumps(REQUIRED[kind] | {name: other}).encode(), kind).check()
        assert refused.value.field == name


@pytest.mark.parametrize("kind", REQUIRED)
def test_labels_of_the_caller_are_taken(kind):
    labels = {
        "user": "me",
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    assert parse(json.dumps(REQUIRED[kind] | labels).encode(), kind).check() is None


@pytest.mark.parametrize("kind", REQUIRED)
def test_a_stream_is_not_obfuscated(kind):
    def asked(value):
        options = {"stream": True, "stream_options": {"include_obfuscation": value}}
        return parse(json.dumps(REQUIRED[kind] | options).encode(), kind)

    (of_chat := asked(False)).check()
    assert of_chat.stream_options is not None
    refusing = asked(True).as_chat() if kind is ResponsesRequest else asked(True)
    with pytest.raises(RefusedError) as refused:
        refusing.check()
    assert refused.value.field == "stream_options.include_obfuscation"


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"a": 1e999}'])
def test_what_is_no_request_is_refused(text):
    with pytest.raises(RefusedError):
        parse(text, CompletionRequest)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"best_of": 2, "stream": True}, "best_of"),
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
        ({"tool_choice": "always", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice"),
        ({"tool_choice": NAMED | {"type": "custom"}, "tools": TOOLS}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS},
            "tool_choice",
        ),
        (
            {"tool_choice": NAMED, "tools": TOOLS, "structured_outputs": {"regex": "a"}},
            "tool_choice",
        ),
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
    assert (sampling.temperature, sampling.n) == (1.0, 1)


def test_a_sampled_request_without_a_seed_has_a_drawn_one_and_a_greedy_one_has_0():
    def seed_of(**fields) -> int | None:
        asked = parse(body(**fields), CompletionRequest)
        return sampling_params(asked, max_tokens=5, num_top=0).seed

    assert len({seed_of() for _ in range(20)}) == 20
    assert seed_of(temperature=0) == 0 and seed_of(seed=7) == 7 and seed_of(seed=0) == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 5000}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e30}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"logprobs_mode": "both"}, "logprobs_mode"),
        ({"noise": "of the prompt"}, "noise"),
    ],
)
def test_sampling_out_of_range_is_named(fields, field):
    asked = parse(body(**fields), CompletionRequest)
    with pytest.raises(RefusedError) as refused:
        sampling_params(asked, max_tokens=5, num_top=0)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "["}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
        ),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(fields, field):
    asked = parse(json.dumps({"model": "m", "messages": [], **fields}).encode(), ChatRequest)
    with pytest.raises(RefusedError) as refused:
        sampling_params(asked, max_tokens=5, num_top=0)
    assert refused.value.field == field


def test_forms_are_those_of_the_sampling():
    schema = {"type": "object"}
    given = (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema},
            }
        },
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"response_format": {"type": "json_object"}},
    )
    kinds = []
    for fields in given:
        text = json.dumps({"model": "m", "messages": [], **fields}).encode()
        form = sampling_params(parse(text, ChatRequest), max_tokens=5, num_top=0).structured_output
        assert form is not None
        kinds.append(form.kind)
    assert kinds == ["json_schema", "json_schema", "choice", "json_object"]


def test_what_a_request_leaves_out_is_the_default_of_the_model():
    defaults = {"temperature": 0.6, "top_k": 20}
    asked = parse(body(top_k=0), CompletionRequest)
    sampling = sampling_params(asked, max_tokens=5, num_top=0, defaults=defaults)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 0, 1.0)


def test_every_sampling_field_of_a_request_is_passed_on():
    given = {
        "top_k": 3, "min_p": 0.5, "stop_token_ids": [4], "best_of": 3, "ignore_eos": True,
        "min_tokens": 2, "allowed_token_ids": [5, 6], "bad_words": ["x"], "logprobs_mode":
        "processed", "repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": -1.0,
        "include_stop_str_in_output": True, "stop": ["y"], "seed": 7, "n": 2, "temperature": 0.5,
        "top_p": 0.75, "noise": "common", "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }  # fmt: skip
    asked = parse(body(**given, logit_bias={"5": 1}), CompletionRequest)
    asked.check()
    sampling = sampling_params(asked, max_tokens=5, num_top=0)
    assert sampling.logit_bias == ((5, 1.0),)
    for name, value in given.items():
        value = tuple(value) if isinstance(value, list) else value
        assert getattr(sampling, name) == value, name


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2, 3]], 2)],
)
def test_prompts_are_texts_or_ids_or_lists_of_them(prompt, count):
    assert len(parse(body(prompt=prompt), CompletionRequest).prompts(10)) == count


def test_an_empty_list_of_prompts_is_refused():
    with pytest.raises(RefusedError, match="empty list"):
        parse(body(prompt=[]), CompletionRequest).prompts(10)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "x" * 1025}, "model"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"messages": [{"role": "user"}] * 16_385}, "messages"),
        ({"tools": [{}] * 1025}, "tools"),
        ({"messages": [{"content": [[]] * 200_000}]}, "brackets and keys, more than 200000"),
    ],
)
def test_what_a_body_has_too_much_of_is_named(fields, says):
    text = json.dumps({"model": "m", "messages": [], **fields}).encode()
    with pytest.raises(RefusedError, match=says):
        parse(text, ChatRequest)


def test_prompts_are_counted_before_they_are_read():
    with pytest.raises(RefusedError, match="1025 prompts, more than 1024"):
        parse(body(prompt=["x"] * 1025), CompletionRequest).prompts(4096)
    with pytest.raises(RefusedError, match="4097 tokens, more than 4096") as refused:
        parse(body(prompt=[5] * 4097), CompletionRequest).prompts(4096)
    assert refused.value.code == "context_length_exceeded"


def test_an_error_does_not_repeat_a_long_value():
    with pytest.raises(RefusedError) as refused:
        parse(body(**{"x" * 100_000: 1}), CompletionRequest)
    assert len(str(refused.value)) < 3_000 and len(refused.value.field) < 3_000
