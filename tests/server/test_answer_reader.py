# SPDX-License-Identifier: Apache-2.0
"""Reasoning and calls are read out of answers, however these are cut, and nothing is lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detjax.server.answer_reader import (
    AnswerReader,
    AnswerSyntax,
    ReasoningCount,
    Said,
    ToolCall,
    call_schema,
    read,
)

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "now")
]
QWEN = "... <tool_call> ... </think> ..."
LLAMA = "... <|python_tag|> ..."
MISTRAL = "... [TOOL_CALLS] ..."
HARMONY = "... <|start|>assistant<|channel|>final<|message|> ..."
ADD, NOW = ToolCall("add", '{"a": 1}'), ToolCall("now", "{}")
ADD_JSON, NOW_JSON = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}'


def form(template: str, *, tools=TOOLS, prompt: str = "", **options: bool) -> AnswerSyntax:
    return AnswerSyntax.of(template, tools, prompt=prompt, **{"is_forced": False} | options)


CASES = [
    (form(QWEN), "It is 43.\n", Said(content="It is 43.\n")),
    (form(QWEN), f"<tool_call>\n{ADD_JSON}\n</tool_call>", Said(calls=(ADD,))),
    (form(QWEN), f"Let me see.\n<tool_call>\n{ADD_JSON}\n</tool_call>\n<tool_call>\n{NOW_JSON}\n"
     "</tool_call>\n", Said(content="Let me see.", calls=(ADD, NOW))),
    (form(QWEN), f"<think>\nI add.\n</think>\n\nSo:\n<tool_call>{ADD_JSON}</tool_call>",
     Said("I add.", "So:", (ADD,))),
    (form(QWEN, tools=[]), "<think>\nHm  </think>\n\n43", Said("Hm", "43")),
    (form(QWEN, tools=[]), "\n <think>Hm", Said("Hm")),
    (form(QWEN, tools=[]), "  <thin", Said(content="  <thin")),
    (form(QWEN, tools=[]), "a <think>b</think>", Said(content="a <think>b</think>")),
    (form(QWEN, tools=[]), f"<tool_call>{ADD_JSON}</tool_call>",
     Said(content=f"<tool_call>{ADD_JSON}</tool_call>")),
    (form(QWEN, prompt="<|assistant|><think>\n"), "\nHm</think> 43", Said("Hm", "43")),
    (form(QWEN, prompt="<think>\n\n</think>\n\n"), "43", Said(content="43")),
    # Messages with channels, behind a prompt that ends with the beginning of one.
    (form(HARMONY), "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final"
     "<|message|>So: 43<|return|>", Said("I add.", "So: 43")),
    (form(HARMONY), "<|channel|>final<|message|>43", Said(content="43")),
    (form(HARMONY), "<|channel|>analysis<|message|>Hm\n<|end|><|start|>assistant<|channel|>analysis"
     "<|message|>so<|end|>", Said("Hm\n\nso")),
    (form(HARMONY), "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>"
     'commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
     Said("Hm", calls=(ADD,))),
    (form(HARMONY), ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
     Said(calls=(ADD,))),
    (form(HARMONY), "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant to="
     'functions.now<|channel|>commentary json<|message|>{}<|call|>',
     Said(content="I call.", calls=(NOW,))),
    (form(HARMONY), "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final"
     "<|message|>Two.", Said(content="One.\nTwo.")),
    (form(HARMONY), " to=rm<|channel|>commentary json<|message|>{}<|call|>",
     Said(content=" to=rm<|channel|>commentary json<|message|>{}")),
    (form(HARMONY, tools=[]), " to=functions.add<|message|>{}",
     Said(content=" to=functions.add<|message|>{}")),
    (form(HARMONY), "<|channel|>final", Said(content="<|channel|>final")),
    (form(HARMONY), "goes on <|end|>", Said(content="goes on ")),
    (form(HARMONY), "to the sea", Said(content="to the sea")),
    (form(HARMONY), "", Said()),
    (form(HARMONY, is_forced=True), ADD_JSON, Said(calls=(ADD,))),
    # What is no call stays text.
    (form(QWEN), "<tool_call>{</tool_call> x", Said(content="<tool_call>{</tool_call> x")),
    (form(QWEN), '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
     Said(content='<tool_call>{"name": "rm", "arguments": {}}</tool_call>')),
    (form(QWEN), '<tool_call>{"name": ["add"]}</tool_call>',
     Said(content='<tool_call>{"name": ["add"]}</tool_call>')),
    (form(QWEN), '<tool_call>{"name": "add", "arguments": NaN}</tool_call>',
     Said(content='<tool_call>{"name": "add", "arguments": NaN}</tool_call>')),
    # Arguments of a known function are as they are written, whatever they are.
    (form(QWEN), '<tool_call>{"name":"add","arguments":{"a":NaN}}</tool_call>',
     Said(calls=(ADD._replace(arguments='{"a":NaN}'),))),
    (form(QWEN), '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> x',
     Said(content="x", calls=(ADD,))),
    (form(QWEN), '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call> x',
     Said(content="x", calls=(ADD._replace(arguments='{"a": 1'),))),
    (form(QWEN), '<tool_call>{"name": "add", "arguments": {"a": "}</tool_c',
     Said(calls=(ADD._replace(arguments='{"a": "}</tool_c'),))),
    (form(QWEN), '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": "}"}</tool_call>',
     Said(calls=(ADD,))),
    (form(QWEN), f"<tool_call>{ADD_JSON} and</tool_call> more", Said(content="and more",
     calls=(ADD,))),
    (form(QWEN), '<tool_call>{"name": "add</tool_call>", "arguments": {}}',
     Said(content='<tool_call>{"name": "add</tool_call>", "arguments": {}}')),
    # Written in another order, a call is told when it is whole, and its arguments anew.
    (form(QWEN), '<tool_call>{"arguments": {"a":1}, "name": "add"}</tool_call>',
     Said(calls=(ADD,))),
    (form(QWEN), '<tool_call>{"arguments": {"a": NaN}, "name": "add"}</tool_call>',
     Said(content='<tool_call>{"arguments": {"a": NaN}, "name": "add"}</tool_call>')),
    (form(QWEN), '<tool_call>{"name": "add"', Said(content='<tool_call>{"name": "add"')),
    (form(QWEN), "<tool_call", Said(content="<tool_call")),
    (form(LLAMA), '{"name": "add", "parameters": {"a": 1}}', Said(calls=(ADD,))),
    (form(LLAMA), '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
     Said(calls=(ADD, NOW))),
    (form(LLAMA), '{"a": 1}', Said(content='{"a": 1}')),
    (form(LLAMA), '{"type": "function", "name": "add", "parameters": {"a": 1}}',
     Said(calls=(ADD,))),
    (form(LLAMA), '{"name": "add", "parameters": {"a": 1}} x', Said(content="x", calls=(ADD,))),
    (form(LLAMA), '{"name": "add", "parameters": {"a": 1}}; {"parameters": {}, "name": "now"}',
     Said(calls=(ADD, NOW))),
    (form(LLAMA), '{"name": "add", "parameters": {"a": 1}}; {"name": "rm", "parameters": {}}',
     Said(content='; {"name": "rm", "parameters": {}}', calls=(ADD,))),
    (form(LLAMA), '{"name": "add", "parameters": ', Said(content='{"name": "add", "parameters": ')),
    (form(LLAMA), "It is {43}", Said(content="It is {43}")),
    (form(MISTRAL), f"[TOOL_CALLS] [{ADD_JSON}, {NOW_JSON}]", Said(calls=(ADD, NOW))),
    (form(MISTRAL), f" [{ADD_JSON}]", Said(calls=(ADD,))),  # the special token is not shown
    (form(MISTRAL), '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "a}1"}, '
     '{"arguments": {}, "name": "now"}]', Said(calls=(ADD, NOW))),
    (form(MISTRAL), f"[TOOL_CALLS] [{ADD_JSON}, 5]", Said(content=", 5]", calls=(ADD,))),
    (form(MISTRAL), f"[TOOL_CALLS] [{ADD_JSON}", Said(calls=(ADD,))),
    (form(MISTRAL), f"[{ADD_JSON}] x", Said(content="x", calls=(ADD,))),
    (form(MISTRAL), "[TOOL_CALL", Said(content="[TOOL_CALL")),
    (form(MISTRAL), "[1, 2]", Said(content="[1, 2]")),
    # The arguments of a call that is forced are as they are written, and may be cut.
    (form(QWEN, is_forced=True), f"\n{ADD_JSON}", Said(calls=(ADD,))),
    (form("", is_forced=True), f"{ADD_JSON}\n", Said(calls=(ADD,))),
    (form("", is_forced=True), ADD_JSON[:-1], Said(calls=(ADD,))),
    (form("", is_forced=True), ADD_JSON[:-4], Said(calls=(ADD._replace(arguments='{"a":'),))),
    (form("", is_forced=True), ADD_JSON[:19], Said(calls=(ADD._replace(arguments=""),))),
    (form("", is_forced=True), '{"name": "ad', Said(content='{"name": "ad')),
    (form("", is_forced=True), ADD_JSON + " x", Said(content="x", calls=(ADD,))),
    (form("", is_forced=True), '{"name":"now","arguments":{"a":"}\\"{","b":{"c":[{}]}}}',
     Said(calls=(ToolCall("now", '{"a":"}\\"{","b":{"c":[{}]}}'),))),
    # One call alone is told where no others are wanted.
    (form(QWEN, is_single=True), f"<tool_call>{ADD_JSON}</tool_call><tool_call>{NOW_JSON}"
     "</tool_call> x", Said(content="x", calls=(ADD,))),
    (form(MISTRAL, is_single=True), f"[{NOW_JSON}, {ADD_JSON}]", Said(calls=(NOW,))),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_an_answer_says_the_same_however_it_is_cut(case):
    its, text, want = CASES[case]
    assert read(its, text) == want
    halves = [[text[:at], text[at:]] for at in range(len(text))]
    sized = [[text[i : i + n] for i in range(0, len(text), n)] for n in (1, 2, 3, 7)]
    for parts in halves + sized:
        reader, said = AnswerReader(its), Said()
        for part in parts:
            said = said.then(reader.push(part))
        assert said.then(reader.finish()) == want, parts


HEAD = '{"name": "add", "parameters": {'
SIGNS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", ADD_JSON, " ", "\n",
         "<", "{", "}", "[", "]", ";", ",", "x", '"', "<tool", "</thi", HEAD,
         '{"arguments": {}, "name": "now"}', '"id": 1']  # fmt: skip
FORMS = [CASES[0][0], CASES[9][0], form(LLAMA), form(MISTRAL), form("", is_forced=True),
         form(QWEN, is_single=True), form(MISTRAL, is_single=True)]  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    which=st.integers(0, len(FORMS) - 1),
    parts=st.lists(st.sampled_from(SIGNS), max_size=12),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
def test_any_text_is_read_the_same_however_it_is_cut(which, parts, cuts):
    text, reader, said = "".join(parts), AnswerReader(FORMS[which]), Said()
    rest = text
    for count in cuts:
        said, rest = said.then(reader.push(rest[:count])), rest[count:]
    said = said.then(reader.push(rest)).then(reader.finish())
    whole = read(FORMS[which], text)
    assert said == whole
    told = "".join([whole.reasoning, whole.content, *("".join(call) for call in whole.calls)])
    is_all = not FORMS[which].is_single
    assert not is_all or told.count("x") == text.count("x")
    assert told or not text.strip("</think>\n ")


CHANNELS = ["<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>", "analysis",
            "final", " to=functions.add", " to=rm", "json", '{"a": 1}', "x", "\n", " ", "<|", "|>",
            "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"]  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    parts=st.lists(st.sampled_from(CHANNELS), max_size=12),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
def test_any_messages_with_channels_are_read_the_same_however_they_are_cut(parts, cuts):
    text, reader, said = "".join(parts), AnswerReader(form(HARMONY)), Said()
    rest = text
    for count in cuts:
        said, rest = said.then(reader.push(rest[:count])), rest[count:]
    assert said.then(reader.push(rest)).then(reader.finish()) == read(form(HARMONY), text)


@pytest.mark.parametrize(
    ("its", "sign"),
    [
        (form("", is_forced=True), ""), (form(QWEN), "<tool_call>"), (form(LLAMA), ""),
        (form(MISTRAL), "[TOOL_CALLS] ["),
    ],
)  # fmt: skip
def test_the_arguments_of_a_call_are_told_while_they_are_written(its, sign):
    reader = AnswerReader(its)
    pieces = [sign + '{"name": "a', 'dd", "arguments": ', '{"a":', " 1", "}", "}"]
    assert [reader.push(piece) for piece in pieces] == [
        Said(), Said(), Said(calls=(ToolCall("add", '{"a":'),)), Said(arguments=" 1"),
        Said(arguments="}"), Said(),
    ]  # fmt: skip


def test_text_of_no_form_is_told_at_once():
    reader = AnswerReader(form(QWEN))
    assert [reader.push(piece).content for piece in ("It", " is", " 43", ".")] == [
        "It", " is", " 43", ".",
    ]  # fmt: skip
    assert form("plain").is_plain and form("plain", tools=[]).is_plain


def test_the_schema_of_a_call_is_of_the_functions_that_may_be_called():
    one = call_schema(TOOLS[:1])
    assert one["properties"]["name"]["enum"] == ["add"]
    assert [kind["properties"]["name"]["enum"] for kind in call_schema(TOOLS)["anyOf"]] == [
        ["add"], ["now"],
    ]  # fmt: skip
    bare: dict = {"type": "function", "function": {"name": "f"}}
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    assert call_schema([bare])["properties"]["arguments"] == none
    bare["function"]["parameters"] = {}
    assert call_schema([bare])["properties"]["arguments"] == {"type": "object"}
    assert json.dumps(one)


@pytest.mark.parametrize("num_tools", [1, 2])
def test_references_of_a_functions_parameters_are_to_where_they_have_come(num_tools):
    """As pydantic writes nested models; what is no reference stays."""
    parameters = {
        "properties": {
            "p": {"$ref": "#/$defs/P"}, "default": {"$ref": "#"}, "$ref": {"type": "null"},
        },
        "$defs": {"P": {"enum": [{"$ref": "#/$defs/P"}], "const": 1}},
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    schema = call_schema(tools + TOOLS[: num_tools - 1])
    root = "#/properties/arguments" if num_tools == 1 else "#/anyOf/0/properties/arguments"
    call = schema if num_tools == 1 else schema["anyOf"][0]
    assert call["properties"]["arguments"] == {
        "type": "object",
        "properties": {
            "p": {"$ref": f"{root}/$defs/P"}, "default": {"$ref": root}, "$ref": {"type": "null"},
        },
        "$defs": parameters["$defs"],
    }  # fmt: skip


def test_half_a_surrogate_pair_in_a_call_can_be_written():
    written = '{"arguments": {"x": "\\ud83d", "y": "\\ud83d\\ude00"}, "name": "add"}'
    (call,) = read(form(QWEN), f"<tool_call>{written}</tool_call>").calls
    assert call == ToolCall("add", '{"x": "\ufffd", "y": "\U0001f600"}')
    call.arguments.encode()


@pytest.mark.parametrize("sign", ["<|python_tag|>", ""])
def test_a_call_is_one_whether_its_sign_is_shown_or_not(sign):
    said = read(form(LLAMA), f'{sign}{{"name": "add", "parameters": {{"a": 1}}}}')
    assert (said.calls, said.content) == ((ADD,), "")


@pytest.mark.parametrize(
    ("syntax", "tokens", "num_thought"),
    [
        (form(QWEN), ["<think>", "I", " add", "</think>", "So"], 4),
        (form(QWEN), ["<", "think", ">", "I", "</", "think>", "So"], 6),
        (form(QWEN), ["\n", "<think>", "cut"], 3),
        (form(QWEN), ["<thin", "g> 43"], 0),
        (form(QWEN), ["So", " <think>", "Hm", "</think>"], 0),
        (form(QWEN, prompt="<think>\n"), ["Hm", "", "</think>", " 43"], 3),
        (form(LLAMA), ["<think>", "Hm"], 0),
        (form(HARMONY), ["<|channel|>", "final", "<|message|>", "43"], 0),
        (
            form(HARMONY),
            [
                *("<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>"),
                *("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "43"),
            ],
            5,
        ),
        (
            form(HARMONY),
            [
                *("<|channel|>", "commentary", "<|message|>", "See:", "<|end|>"),
                *("<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>", "Hm"),
            ],
            6,
        ),
    ],
)
def test_tokens_of_reasoning_are_counted_however_their_tags_are_cut(syntax, tokens, num_thought):
    count = ReasoningCount(syntax)
    for token in tokens:
        count.push(token)
    assert count.num_tokens == num_thought
