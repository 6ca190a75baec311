# SPDX-License-Identifier: Apache-2.0
"""What a client says in a conversation reaches the template, or is refused with its place."""

import copy
import json
import typing
from pathlib import Path
from types import SimpleNamespace

import openai.types.chat as openai_chat
import pytest

from detjax.models.chat_messages import messages_of
from detjax.models.chat_template import render_template
from detjax.models.tokenizer import Tokenizer

from .test_tokenizer import CONFIG, byte_level, write_folder

QWEN = """\
{%- if tools %}[tools {{ tools | map(attribute='function.name') | join }}]{% endif %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}
    {%- else %}{% set content = '' %}{% endif %}
    {%- if message.role in ("user", "system") %}
        {{- '<' + message.role + '>' + content + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<assistant>' + content }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '[' + tool_call.name + ' ' }}
            {%- if tool_call.arguments is string %}{{ tool_call.arguments }}
            {%- else %}{{ tool_call.arguments | tojson }}{% endif %}
            {{- ']' }}
        {%- endfor %}
        {{- '\\n' }}
    {%- elif message.role == "tool" %}{{ '<tool>' + content + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined %}[{{ enable_thinking }}]
{%- endif %}{% endif %}"""
"""Of Qwen's kind: what is no text is dropped in silence."""

LLAMA = """\
{%- for message in messages %}
    {%- if not 'tool_calls' in message %}{{ message.role }}: {{ message['content'] | trim }}
    {%- elif message.tool_calls | length != 1 %}{{ raise_exception("one tool call") }}
    {%- else %}{% set tool_call = message.tool_calls[0].function -%}
        call {{ tool_call.name }} {{ tool_call.arguments | tojson }}
    {%- endif %};{% endfor %}"""
"""Of Llama 3.1's kind: it trims, and asks whether there are tool calls."""

DEEPSEEK = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<call>' + tool['function']['name'] + ' ' + tool['function']['arguments'] }}
        {%- endfor %}
    {%- else %}{{ '<' + message['role'] + '>' + message['content'] }}{% endif %}
{%- endfor %}"""
"""Of DeepSeek's kind: it asks whether the content is none, and prints the text of arguments."""

MISTRAL = """\
{%- for message in messages %}
    {%- if message["tool_calls"] is defined and message["tool_calls"] is not none %}
        {%- for tool_call in message["tool_calls"] %}{% set out = tool_call.function | tojson %}
            {{- out[:-1] + ', "id": "' + tool_call.id + '"}' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}{{ message.tool_call_id + "=" + message.content }}
    {%- else %}{{ "[" + message.role + "]" + message.content }}{% endif %}
{%- endfor %}"""
"""Of Mistral's kind: a function is printed whole, with ids."""

DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.content }}{% endfor %}"
)


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


CALL = {
    "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
    "function_call": None,
    "tool_calls": [{
        "id": "abcdefghi", "type": "function",
        "function": {"name": "add", "arguments": '{"a":1, "b": "ö"}'},
    }],
}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": parts("4", "2")}


def rendered(template: str, *messages: dict) -> str:
    given = copy.deepcopy(messages)
    found = messages_of(messages, template)
    assert messages == given, "the caller's own messages have changed"
    assert messages_of(found, template) == found
    return render_template(template, {"messages": found}).text


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL, DEEPSEEK])
@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_parts_of_text_are_their_text(template, role):
    said = {"role": role, "content": parts("17 +", " 26", " =\n")}
    want = rendered(template, {"role": role, "content": "17 + 26 =\n"})
    assert rendered(template, said) == want and "17 + 26 =" in want


@pytest.mark.parametrize(
    ("template", "call", "result"),
    [
        (QWEN, '<assistant>[add {"a": 1, "b": "ö"}]', "<tool>42"),
        (LLAMA, 'call add {"a": 1, "b": "ö"};', "tool: 42;"),
        (MISTRAL, '{"name": "add", "arguments": {"a": 1, "b": "ö"}, "id": "abcdefghi"}',
         "abcdefghi=42"),
        (DEEPSEEK, '<call>add {"a":1, "b": "ö"}', "<tool>42"),
    ],
)  # fmt: skip
def test_tool_calls_and_their_answers_are_said(template, call, result):
    """As OpenAI's client has them, as transformers has them, and without content."""
    assert rendered(template, CALL, RESULT).replace("\n", "") == call + result
    function = {"name": "add", "arguments": {"a": 1, "b": "ö"}}
    other = {"role": "assistant", "tool_calls": [CALL["tool_calls"][0] | {"function": function}]}
    if template is DEEPSEEK:
        call = call.replace('"a":1', '"a": 1')
    assert rendered(template, other, RESULT).replace("\n", "") == call + result


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL, DEEPSEEK])
@pytest.mark.parametrize("arguments", ['{"a": ', "{bad", "[1]", "two"])
def test_a_call_whose_arguments_are_no_object_goes_back_as_it_is(template, arguments):
    """An answer that was cut in them, with the error that its client made of it."""
    call = CALL["tool_calls"][0]
    cut = CALL | {"tool_calls": [call | {"function": {"name": "add", "arguments": arguments}}]}
    said = rendered(template, cut, RESULT)
    assert json.dumps(arguments)[1:-1] in said or arguments in said
    assert "42" in said


def test_an_answer_of_null_says_nothing():
    """One that was cut in its reasoning, which its client did not keep."""
    said = {"role": "assistant", "content": None, "tool_calls": None}
    assert messages_of([said], QWEN) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL, DEEPSEEK])
def test_null_fields_of_a_message_are_absent(template):
    """Llama's template asks for `tool_calls`, whatever it is."""
    said = {"role": "assistant", "content": "hi"}
    dumped = openai_chat.ChatCompletionMessage(role="assistant", content="hi").model_dump()
    assert {"refusal", "tool_calls", "audio"} <= dumped.keys()
    assert rendered(template, dumped) == rendered(template, said)
    assert rendered(template, dumped | {"tool_calls": []}) == rendered(template, said)


def test_developer_is_system_where_a_template_has_none():
    said = {"role": "developer", "content": "Be brief."}
    assert rendered(QWEN, said) == "<system>Be brief.\n"
    assert rendered(DEVELOPER, said) == "DBe brief."


def test_reasoning_reaches_a_template_that_reads_it():
    said = {"role": "assistant", "content": "42", "reasoning_content": "17 + 25"}
    assert rendered("{{ messages[0].reasoning_content }}", said) == "17 + 25"
    assert rendered(QWEN, said) == "<assistant>42\n"


def test_a_role_and_a_field_of_the_template_are_taken():
    template = (
        "{% for m in messages %}{% if m.role == 'ipython' %}{{ m.mood }}{% endif %}{% endfor %}"
    )
    assert rendered(template, {"role": "ipython", "content": "", "mood": "!"}) == "!"


@pytest.mark.parametrize(
    ("message", "place", "says"),
    [
        ({}, "[1].role", "missing"),
        ({"content": "x"}, "[1].role", "missing"),
        ({"role": "banana", "content": "x"}, "[1].role", "'banana'; give one of system"),
        ({"role": "function", "content": "x"}, "[1].role", "'function'; give tool, with tool_"),
        ({"role": 5, "content": "x"}, "[1].role", "5"),
        ({"role": "user"}, "[1].content", "missing"),
        ({"role": "user", "content": None}, "[1].content", "missing"),
        ({"role": "assistant", "tool_calls": []}, "[1].content", "missing"),
        ({"role": "tool", "tool_call_id": "x"}, "[1].content", "missing"),
        ({"role": "user", "content": 5}, "[1].content", "5"),
        ({"role": "user", "content": []}, "[1].content", r"\[\]"),
        ({"role": "user", "content": {"type": "text"}}, "[1].content", "type"),
        ({"role": "user", "content": ["x"]}, "[1].content[0]", "'x'"),
        ({"role": "user", "content": [{"text": "x"}]}, "[1].content[0]", "None"),
        ({"role": "user", "content": [{"type": "text"}]}, "[1].content[0].text", "None"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "[1].content[0].text", "5"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]},
         "[1].content[0].y", "not known"),
        ({"role": "user", "content": "x", "mood": "!"}, "[1].mood", "leave it out"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "[1].tool_calls", "'user'"),
        ({"role": "user", "content": "x", "name": 5}, "[1].name", "5"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "[1].tool_call_id", "5"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "[1].refusal", "leave it out"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "no"}]},
         "[1].content[0].text", "not known"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "[1].content[0].refusal", "None"),
        ({"role": "assistant", "content": "x", "provider_specific_fields": {"a": 1}},
         "[1].provider_specific_fields", "leave it out"),
        ({"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"},
         "[1].reasoning", "leave it out"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}},
         "[1].function_call", "give tool_calls"),
        ({"role": "assistant", "tool_calls": {}}, "[1].tool_calls", "list"),
        ({"role": "assistant", "tool_calls": ["x"]}, "[1].tool_calls[0]", "'x'"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]},
         "[1].tool_calls[0]", "'custom'"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]},
         "[1].tool_calls[0].function", "None"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
         "[1].tool_calls[0].function.arguments", "object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
         "[1].tool_calls[0].function.arguments", "None"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused_with_its_place(message, place, says):
    with pytest.raises(ValueError, match=says) as refused:
        messages_of([{"role": "user", "content": "x"}, message], QWEN.replace("reasoning", ""))
    assert str(refused.value).startswith(f"messages{place}")


def openai_parts() -> dict[str, typing.Any]:
    """A part of each type that OpenAI has, by its type."""
    names = [name for name in dir(openai_chat) if "ContentPart" in name and name.endswith("Param")]
    hints = {name: getattr(openai_chat, name).__dict__.get("__annotations__") for name in names}
    kinds = [typing.get_type_hints(getattr(openai_chat, n))["type"] for n in names if hints[n]]
    return {kind: {"type": kind, kind: {}} for hint in kinds for kind in typing.get_args(hint)}


@pytest.mark.parametrize(
    ("message", "same"),
    [
        ({"content": [{"type": "refusal", "refusal": "no"}]}, {"content": "no"}),
        ({"content": None, "refusal": "no"}, {"content": "no"}),
        ({"content": "x", "refusal": "x"}, None),
        ({"content": [{"type": "output_text", "text": "x"}]}, {"content": "x"}),
        ({"content": parts("x"), "reasoning": "r"}, {"content": "x", "reasoning_content": "r"}),
        ({"content": "x", "reasoning_content": "r", "refusal": None,
          "provider_specific_fields": {"refusal": None, "reasoning_content": "r"}},
         {"content": "x", "reasoning_content": "r"}),
        ({"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
         {"content": "x"}),
    ],
)  # fmt: skip
def test_what_clients_send_back_is_what_it_says(message, same):
    """vLLM says `reasoning`, LiteLLM says things twice, OpenAI has refusals."""
    if same is None:
        with pytest.raises(ValueError, match="refusal"):
            messages_of([{"role": "assistant"} | message], QWEN)
    else:
        (found,) = messages_of([{"role": "assistant"} | message], QWEN)
        assert found == {"role": "assistant"} | same


def test_reasoning_can_be_turned_off_whatever_the_template_calls_it(tmp_path):
    off, said = {"reasoning_effort": "none"}, "{{ messages[0].content }}"
    texts = {
        said: "hi",
        said + "{{ enable_thinking }}": "hiFalse",
        said + "{{ enable_thinking }}{{ reasoning_effort }}": "hinone",
    }
    for template, text in texts.items():
        assert with_template(tmp_path, template).render_chat([USER], variables=off) == text
    ours = with_template(tmp_path, said + "{{ enable_thinking }}")
    with pytest.raises(ValueError, match="^reasoning_effort: .* no such variable"):
        ours.render_chat([USER], variables={"reasoning_effort": "low"})


def test_every_part_of_openai_but_text_is_refused_by_its_type():
    found = openai_parts()
    assert {"text", "image_url", "input_audio", "refusal"} <= found.keys()
    for kind, part in (found | {"file": {"type": "file", "file": {}}}).items():
        if kind in ("text", "refusal"):
            continue
        with pytest.raises(ValueError, match=rf"^messages\[0\].content\[1\] is of type '{kind}'"):
            messages_of([{"role": "user", "content": [*parts("x"), part]}], QWEN)


@pytest.mark.parametrize("role", ["Developer", "System", "User", "Assistant", "Tool"])
def test_every_field_of_openais_messages_is_taken_or_refused_by_name(role):
    kind = getattr(openai_chat, f"ChatCompletion{role}MessageParam")
    plain = {"role": role.lower(), "content": "x"}
    for name in typing.get_type_hints(kind):
        if name in plain:
            continue
        assert messages_of([plain | {name: None}], QWEN) == messages_of([plain], QWEN)
        try:
            assert name in messages_of([plain | {name: "x"}], QWEN)[0]
        except ValueError as error:
            assert str(error).startswith(f"messages[0].{name}")


# ------------------------------------------------------------------------- through a tokenizer


def with_template(folder: Path, template: object) -> Tokenizer:
    config = {**CONFIG, "chat_template": template}
    return Tokenizer.from_folder(write_folder(folder, byte_level(), config))


USER = {"role": "user", "content": "hi"}
PAIR = SimpleNamespace(tools=[{"type": "function", "function": {"name": "f"}}])


def test_with_tools_the_template_of_that_name_is_taken(tmp_path):
    named = [
        {"name": "tool_use", "template": "t{{ tools[0].function.name }}{{ messages[0].content }}"},
        {"name": "default", "template": "d{{ messages[0].content }}"},
    ]
    ours = with_template(tmp_path, named)
    assert ours.render_chat([USER]) == "dhi"
    assert ours.render_chat([USER], variables={"tools": PAIR.tools}) == "tfhi"
    assert ours.render_chat([USER], variables={"tools": None}) == "dhi"
    told = [{"role": "user", "content": parts("h", "i")}]
    assert ours.decode(ours.apply_chat_template(told, variables={"tools": PAIR.tools})) == "tfhi"


@pytest.mark.parametrize("content", ["Sure", "Sure, ", "a<assistant>b", "a</s>b ", "⸨0⸩", " "])
def test_an_answer_goes_on_in_the_last_message(tmp_path, content):
    ours = with_template(tmp_path, QWEN)
    chat = [USER, {"role": "assistant", "content": content}]
    variables = {"continue_final_message": True}
    assert ours.render_chat(chat, variables=variables) == f"<user>hi\n<assistant>{content}"
    ids = ours.apply_chat_template(chat, variables=variables)
    assert not set(ids) & ours.special_ids
    assert ours.decode(ids) == f"<user>hi\n<assistant>{content}"
    trims = with_template(tmp_path, "{% for m in messages %}{{ m.content | trim }}!{% endfor %}")
    assert trims.render_chat(chat, variables=variables) == "hi!" + content.lstrip()


@pytest.mark.parametrize(
    ("template", "last", "variables", "says"),
    [
        (QWEN, USER, {"add_generation_prompt": True}, "are both true"),
        (QWEN, CALL, {}, "messages[0].content"),
        (QWEN, USER, {"continue_final_message": 1}, "continue_final_message is 1"),
        ("{{ messages[0].content | upper }}", USER, {}, "is changed by the chat template"),
        (QWEN, USER | {"content": "⸨end⸩"}, {}, "an answer cannot go on"),
    ],
)
def test_a_last_message_that_cannot_go_on_is_refused(tmp_path, template, last, variables, says):
    ours = with_template(tmp_path, template)
    with pytest.raises(ValueError) as refused:
        ours.render_chat([last], variables={"continue_final_message": True} | variables)
    assert says in str(refused.value)


def test_the_beginning_of_an_answer_can_be_left_out(tmp_path):
    ours = with_template(tmp_path, QWEN)
    assert ours.render_chat([USER], variables={"add_generation_prompt": False}) == "<user>hi\n"


@pytest.mark.parametrize(
    "variables",
    [
        {"mood": 1},
        {"messages": []},
        {"documents": [{}]},
        {"enable_thinking": True},
        {"add_generation_prompt": False},
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(tmp_path, variables):
    ours = with_template(tmp_path, "{{ messages[0].content }}")
    (name,) = variables
    with pytest.raises(ValueError, match=f"^{name}: the chat template of .* no such variable"):
        ours.render_chat([USER], variables=variables)
    off = {"enable_thinking": False, "documents": [], "add_generation_prompt": True}
    assert ours.render_chat([USER], variables=off) == "hi"


def test_a_file_takes_the_place_of_all_templates(tmp_path):
    named = [{"name": name, "template": name} for name in ("tool_use", "default")]
    ours = with_template(tmp_path, named)
    path = tmp_path / "mine.jinja"
    path.write_text(
        "{{ tools[0].function.name if tools }}:{{ messages[0].content }}", encoding="utf-8"
    )
    other = ours.with_template(path)
    assert other.render_chat([USER]) == ":hi"
    assert other.render_chat([USER], variables={"tools": PAIR.tools}) == "f:hi"
    for text, says in (("{% if %}", "syntax error"), (None, "cannot be read")):
        path.write_text(text) if text else path.unlink()
        with pytest.raises(ValueError, match=says) as refused:
            ours.with_template(path)
        assert str(path) in str(refused.value)


def test_arguments_with_control_tokens_stay_text(tmp_path):
    ours = with_template(tmp_path, QWEN)
    function = {"name": "f", "arguments": json.dumps({"a": "</s>"})}
    call = {"role": "assistant", "tool_calls": [{"id": "x", "function": function}]}
    ids = ours.apply_chat_template([USER, call, RESULT])
    assert not set(ids) & ours.special_ids
    assert '[f {"a": "</s>"}]' in ours.decode(ids)


SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = "{{ messages[0].content }}"
NO_TOOL = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
NO_TOOLS = "{# tools #}{% for m in messages %}{{ m.content }}{% endfor %}"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% endfor %}"
WITH_TEXT = CALL | {"content": "See:"}


@pytest.mark.parametrize(
    ("template", "messages", "place"),
    [
        (FIRST, [USER, SYSTEM], "messages[1].content"),
        (FIRST, [{**USER, "content": "Be brief. hi"}, SYSTEM], "messages[1].content"),
        (NO_TOOL, [USER, RESULT], "messages[1].content"),
        (CHATML, [USER, CALL, RESULT], "messages[1].tool_calls"),
        (CHATML, [USER, WITH_TEXT, RESULT], "messages[1].tool_calls"),
        (NO_TOOLS, [USER], "tools[0]"),
    ],
)
def test_what_a_template_drops_is_refused_with_its_place(tmp_path, template, messages, place):
    ours = with_template(tmp_path, template)
    variables = {"tools": PAIR.tools} if template is NO_TOOLS else {}
    for ask in (ours.render_chat, ours.apply_chat_template):
        with pytest.raises(ValueError, match="does not print it") as refused:
            ask(messages, variables=variables)
        assert str(refused.value).startswith(f"{place}: ")
    assert ours.render_chat([USER]).endswith("hi"), "what it prints is taken"


def test_a_template_may_leave_out_text_beside_calls_and_reasoning(tmp_path):
    ours = with_template(tmp_path, LLAMA)
    text = ours.render_chat([USER, WITH_TEXT | {"reasoning_content": "Hm"}, RESULT])
    assert "call add" in text and "See:" not in text


UPPER = "{% for m in messages %}{{ m.content | upper | tojson(ensure_ascii=true) }}{% endfor %}"


def test_a_template_may_change_what_it_prints(tmp_path):
    assert with_template(tmp_path, UPPER).render_chat([USER, SYSTEM]) == '"HI""BE BRIEF."'


def test_a_function_without_parameters_has_an_empty_object(tmp_path):
    ours = with_template(tmp_path, "{{ tools | tojson }}{{ messages[0].content }}")
    empty = {"type": "object", "properties": {}}
    for more in ({}, {"parameters": None}):
        tools = [{"type": "function", "function": {"name": "f"} | more}]
        text = ours.render_chat([USER], variables={"tools": tools}).removesuffix("hi")
        assert json.loads(text)[0]["function"] == {"name": "f", "parameters": empty}
