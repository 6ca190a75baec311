# SPDX-License-Identifier: Apache-2.0
"""The `openai` client and a small server: fields, names in errors, models, defaults."""

import dataclasses
import json
import time

import openai
import pytest

from detjax.server.served_model import Limits
from detjax.server.service import Service

from .conftest import served
from .small import engine_of, small_model, small_service

BEGUN_S = int(time.time())
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = """\
{%- if tools %}tools {{ tools | map(attribute='function.name') | join(' ') }}\n{% endif %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}
    {%- else %}{% set content = '' %}{% endif %}
    {%- if message.role in ("user", "system") %}{{ message.role + ': ' + content + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- 'assistant: ' + content }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.function.name + ' ' + tool_call.function.arguments | tojson }}
        {%- endfor %}
        {{- '\n' }}
    {%- elif message.role == "tool" %}{{ 'tool: ' + content + '\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}assistant: {{ mood if mood is defined else '' }}{% endif %}"""
"""Of Qwen's kind: what is no text is dropped in silence."""

INCLUDE = ["reasoning.encrypted_content"]
NAMES = {"include": INCLUDE, "top_logprobs": None, "background": False, "truncation": "disabled"}


@pytest.fixture(scope="module")
def running():
    service = small_service(small_model(eos_token_ids=(1,)))
    defaults = {"temperature": 0.5, "top_p": 0.95, "top_k": 7}
    tokenizer = dataclasses.replace(service.model.tokenizer, chat_template=TEMPLATE)
    model = dataclasses.replace(service.model, tokenizer=tokenizer, default_sampling=defaults)
    service.open(model)
    with served(service, None) as running:  # type: ignore[arg-type]
        yield running


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0) as client:
        yield client


def test_a_model_is_found_by_its_name_and_tells_when_it_was_opened(client):
    model = client.models.retrieve("small")
    assert model == client.models.list().data[0]
    assert BEGUN_S <= model.created <= time.time()
    with pytest.raises(openai.NotFoundError, match="'a/b' is not served here; 'small' is"):
        client.models.retrieve("a/b")


def test_neutral_fields_and_nulls_change_nothing(client):
    plain = client.chat.completions.create(model="small", messages=HI, max_tokens=4, seed=1)
    asked = client.chat.completions.create(
        model="small", messages=HI, max_tokens=4, seed=1, store=False, parallel_tool_calls=True,
        service_tier="auto", metadata={"a": "b"}, safety_identifier="s", prompt_cache_key="k",
        tools=[], n=None, logprobs=None, stop=None, presence_penalty=None, stream=None,
        max_completion_tokens=None, extra_body={"user": None, "min_tokens": None},
    )  # fmt: skip
    assert asked.choices == plain.choices
    whole = client.responses.create(
        model="small", input="hi", max_output_tokens=4, store=False, tools=[],
        parallel_tool_calls=True, temperature=None, instructions=None, extra_body={"seed": 1},
        **NAMES,
    )  # fmt: skip
    assert whole.output_text == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/completions", {}, "prompt"),
        ("/completions", {"prompt": "sea " * 300}, "prompt"),
        ("/completions", {"prompt": "x", "stream_options": {"x": 1}}, "stream_options.x"),
        ("/chat/completions", {}, "messages"),
        ("/chat/completions", {"messages": HI, "store": True}, "store"),
        ("/chat/completions", {"messages": HI * 100}, "messages"),
        ("/responses", {}, "input"),
        ("/responses", {"input": "sea " * 300}, "input"),
        ("/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("/responses", {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ("/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ("/responses", {"input": [{"type": {"a": 1}}]}, "input"),
        ("/responses", {"input": [{"type": "function_call"}]}, "input[0].name"),
        ("/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"},
         {"type": "input_image"}]}]}, "input[0].content[1]"),
        ("/responses", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "input[0].content[0].text"),
        ("/responses", {"input": "x", "tools": [{"type": "function", "function": {}}]},
         "tools[0].function"),
        ("/responses", {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ("/responses", {"input": "x", "tools": [{"type": "function", "name": "f",
         "parameters": 5}]}, "tools[0].parameters"),
        ("/responses", {"input": "x", "tool_choice": "required"}, "tool_choice"),
        ("/completions", {"prompt": ["x", []]}, "prompt[1]"),
        ("/completions", {"prompt": ["x", [5], "sea " * 300]}, "prompt[2]"),
        ("/completions", {"prompt": ["x", [99999]]}, "prompt[1]"),
        ("/completions", {"prompt": [[]]}, "prompt"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_as_it_was_asked(client, path, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(path, body={"model": "small"} | fields, cast_to=object)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [
        ("/completions", {"prompt": "x"}, "max_tokens"),
        ("/chat/completions", {"messages": HI}, "max_tokens"),
        ("/chat/completions", {"messages": HI}, "max_completion_tokens"),
        ("/responses", {"input": "x"}, "max_output_tokens"),
    ],
)
def test_an_answer_that_is_too_long_is_told_which_field_to_lower(client, path, fields, limit):
    with pytest.raises(openai.BadRequestError, match=f"or lower {limit}$") as refused:
        client.post(path, body={"model": "small", limit: 10**6} | fields, cast_to=object)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_take_the_defaults_of_the_model_as_chat_does(client, stream):
    chat = client.chat.completions.create(model="small", messages=HI, max_tokens=9, seed=3)
    options = {"max_output_tokens": 9, "extra_body": {"seed": 3}}
    if stream:
        events = list(client.responses.create(model="small", input="hi", stream=True, **options))
        assert (events[0].response.temperature, events[0].response.top_p) == (0.5, 0.95)
        answer = events[-1].response
    else:
        answer = client.responses.create(model="small", input="hi", **options)
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.temperature, answer.top_p) == (0.5, 0.95)
    sampling = answer.detjax["sampling"]
    assert (sampling["top_p"], sampling["top_k"]) == (0.95, 7)
    assert answer.detjax["digest"] == chat.choices[0].detjax["digest"]
    other = client.responses.create(model="small", input="hi", top_p=1.0, **options)
    assert other.top_p == 1.0 and other.detjax["sampling"]["top_k"] == 7


def test_a_response_has_the_form_that_it_is_asked_for(client):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    answer = client.responses.create(
        model="small", input="hi", text={"format": form}, max_output_tokens=60
    )
    assert answer.output_text.lstrip().startswith("{")
    assert answer.detjax["sampling"]["structured_output"]["kind"] == "json_schema"


# ------------------------------------------------------------------------- forms and masks


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_ends_where_masks_leave_no_other_token(running, client, stream):
    tokenizer = running.service.model.tokenizer
    (yes,) = tokenizer.encode_raw(" yes")
    for fields in ({"min_tokens": 9}, {"allowed_token_ids": [yes]}):
        answer = client.completions.create(
            model="small", prompt="sea", max_tokens=12, stream=stream,
            extra_body={"structured_outputs": {"choice": [" yes", " no"]}} | fields,
        )  # fmt: skip
        told = list(answer) if stream else [answer]
        assert "".join(one.choices[0].text for one in told) in (" yes", " no")
        assert told[-1].choices[0].finish_reason == "stop"


def test_masks_and_a_form_that_leave_no_token_are_the_clients_fault(running, client):
    (a,) = running.service.model.tokenizer.encode_raw("a")

    def asked(regex):
        fields = {"structured_outputs": {"regex": regex}, "allowed_token_ids": [a]}
        return client.completions.create(
            model="small", prompt="sea", max_tokens=9, extra_body=fields
        )

    with pytest.raises(openai.BadRequestError, match="leaves no token to begin with") as refused:
        asked("b+")
    assert refused.value.param == "structured_outputs"
    with pytest.raises(openai.BadRequestError, match="no token is possible at position") as refused:
        asked("a[bc]d")
    assert refused.value.code == "no_token"


def test_a_regex_that_its_reader_gives_up_is_the_clients_fault(client):
    """No 5xx: clients ask again at one, and operators are called."""
    fields = {"structured_outputs": {"regex": "(a+)+" * 50 + "$"}}
    with pytest.raises(openai.BadRequestError, match="its structured output cannot go on: ") as it:
        client.completions.create(model="small", prompt="sea", max_tokens=4, extra_body=fields)
    assert it.value.code == "no_token"


def test_a_choice_may_have_thousands_of_texts(client):
    texts = [f" {i:04}" for i in range(3_000)]
    answer = client.completions.create(
        model="small", prompt="sea", max_tokens=12, temperature=1.0,
        extra_body={"structured_outputs": {"choice": texts}},
    )  # fmt: skip
    assert answer.choices[0].text in texts


# ------------------------------------------------------------------------- rendered templates


def test_a_rendered_template_is_a_prompt_with_its_control_tokens_if_asked_for(
    running, client, caplog
):
    """Control tokens of a plain prompt are text, and the answer says so."""
    tokenizer, texts = running.service.model.tokenizer, ["<|bos|>user: hi", "sea"]

    def asked(prompt, **fields):
        body = {"return_token_ids": True} | fields
        answer = client.completions.create(
            model="small", prompt=prompt, max_tokens=1, temperature=0, extra_body=body
        )
        return [
            (c.prompt_token_ids, c.detjax.get("warnings", []), c.detjax["digest"])
            for c in answer.choices
        ]

    (ids, warnings, as_text), (plain, *_) = asked(texts)
    assert ids == tokenizer.encode(texts[0]) and ids.count(0) == plain.count(0) == 1
    assert len(warnings) == 1 and "'<|bos|>'" in warnings[0]
    assert "add_special_tokens=false" in warnings[0]
    assert asked(texts[0])[0][1] == warnings
    assert len([r for r in caplog.records if "add_special_tokens" in r.getMessage()]) <= 1
    (ids, warnings, as_token), (plain, *_) = asked(texts, add_special_tokens=False)
    assert ids == [0, *tokenizer.encode_raw("user: hi")] == tokenizer.encode_raw(texts[0])
    assert plain == tokenizer.encode_raw("sea")
    assert not warnings and as_token != as_text
    assert not asked("sea")[0][1]
    by_ids = client.completions.create(model="small", prompt=ids, max_tokens=1, temperature=0)
    assert by_ids.choices[0].detjax["digest"] == as_token


# ------------------------------------------------------------------- stop texts, offsets, logprobs

BOS = {"0": 100.0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(("stop", "count"), [("<|bos|>", 1), (["x", "<|bos|><|bos|>"], 2)])
def test_a_stop_text_may_be_a_special_token(client, stream, is_deterministic, stop, count):
    """The model writes nothing else."""
    options = {"logit_bias": BOS, "max_tokens": 9, "stop": stop, "model": "small",
               "extra_body": {"is_deterministic": is_deterministic}}  # fmt: skip
    whole = client.completions.create(prompt="sea", stream=stream, **options)
    last = list(whole)[-1] if stream else whole
    sampling = last.choices[0].detjax["sampling"]
    assert last.choices[0].finish_reason == "stop" and sampling["max_tokens"] == 9
    chat = client.chat.completions.create(messages=HI, logprobs=True, **options)
    assert (chat.choices[0].message.content, chat.usage.completion_tokens) == ("", count)
    assert len(chat.choices[0].logprobs.content) == count
    shown = client.completions.create(
        prompt="sea", **options | {"extra_body": {"include_stop_str_in_output": True}}
    )
    assert shown.choices[0].text == "<|bos|>" * count


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_of_the_tokens_own_text_though_a_stop_text_holds_it_back(
    running, client, stream
):
    tokenizer = running.service.model.tokenizer
    readable = [i for i in range(4096) if tokenizer.token_bytes(i).isascii()][2:]
    options = {"model": "small", "prompt": "sea", "max_tokens": 24, "seed": 5, "logprobs": 1,
               "temperature": 1.0, "extra_body": {"allowed_token_ids": readable}}  # fmt: skip
    (plain,) = client.completions.create(**options).choices
    texts, offsets = plain.logprobs.tokens, plain.logprobs.text_offset
    assert all(plain.text[at:].startswith(t) for at, t in zip(offsets, texts, strict=True))
    first, last = offsets[3], offsets[12]
    stop = plain.text[first:last] + "\x00"  # begins three tokens in, and is not completed
    asked = client.completions.create(**options, stop=stop, stream=stream)
    found = [one.choices[0].logprobs for one in (asked if stream else [asked])]
    assert [at for one in found for at in one.text_offset] == offsets


def test_top_logprobs_of_completions_have_the_token_itself_and_of_two_the_likelier(client):
    options = {"model": "small", "prompt": "sea", "max_tokens": 24, "seed": 5, "temperature": 2.0}
    for count in (0, 1, 3):
        (choice,) = client.completions.create(**options, logprobs=count).choices
        found = choice.logprobs
        rows = zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
        sizes = set()
        for token, logprob, top in rows:
            assert top[token] >= logprob
            assert len(top) <= count + (logprob == min(top.values()))
            sizes.add(len(top))
        assert count + 1 in sizes


def test_a_bad_word_of_spaces_is_these_spaces(client):
    answer = client.completions.create(
        model="small", prompt="sea", max_tokens=4, extra_body={"bad_words": ["  ", "\n"]}
    )
    assert answer.usage.completion_tokens == 4


# ----------------------------------------------------------------------------------- conversations


def prompt_of(running, client, messages, **fields) -> str:
    """The prompt of a conversation, asked as a chat completion and at /tokenize."""
    asked = client.chat.completions.create(
        model="small",
        messages=messages,
        max_tokens=1,
        extra_body={"return_token_ids": True, **fields},
    )
    with running.client() as plain:
        told = plain.post("/tokenize", json={"messages": messages, **fields}).json()
    ids = asked.choices[0].prompt_token_ids
    assert asked.model_dump()["prompt_token_ids"] == ids, "as vLLM's server has it"
    assert ids == told["tokens"] and asked.usage.prompt_tokens == told["count"] == len(ids)
    return running.service.model.tokenizer.decode(ids)


CALLS = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("messages", "fields", "text"),
    [
        (
            [{"role": "developer", "content": [{"type": "text", "text": "Be "},
                                               {"type": "text", "text": "brief."}]},
             {"role": "user", "content": [{"type": "text", "text": "17 + 26?"}], "name": "me"}],
            {}, "system: Be brief.\nuser: 17 + 26?\nassistant: ",
        ),
        (
            [*HI, {"role": "assistant", "content": None, "refusal": None, "tool_calls": CALLS},
             {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]}],
            {"tools": TOOLS},
            'tools add\nuser: hi\nassistant: add {"a": 1}\ntool: 4\nassistant: ',
        ),
        ([*HI, {"role": "assistant", "content": "Well, "}], {"continue_final_message": True},
         "user: hi\nassistant: Well, "),
        (HI, {"add_generation_prompt": False}, "user: hi\n"),
        (HI, {"chat_template_kwargs": {"mood": "!"}}, "user: hi\nassistant: !"),
    ],
)  # fmt: skip
def test_all_that_a_conversation_says_is_in_its_prompt(running, client, messages, fields, text):
    assert prompt_of(running, client, messages, **fields) == text


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [*HI, {"role": "banana", "content": "x"}]}, "messages[1].role", "banana"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
        ({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[1]", "'image_url'"),
        ({"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "both true"),
        ({"messages": HI, "chat_template_kwargs": {"enable_thinking": True}},
         "chat_template_kwargs.enable_thinking", "no such variable"),
        ({"messages": HI, "chat_template_kwargs": {"messages": []}},
         "chat_template_kwargs.messages", "field of its own"),
        ({"messages": HI, "documents": [{"text": "x"}]}, "documents", "no such variable"),
        ({"messages": HI, "tools": [{"type": "custom", "custom": {"name": "x"}}]},
         "tools[0].type", "'custom'"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function", "name"),
    ],
)  # fmt: skip
def test_what_a_conversation_cannot_say_is_refused_by_name(client, fields, param, says):
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        client.post("/chat/completions", body={"model": "small"} | fields, cast_to=object)
    assert refused.value.param == param


def test_special_tokens_go_to_ids_and_back_as_with_vllm(running):
    """lm-eval's remote tokenizer asks so: nothing around a text, and no token lost."""
    tokenizer = running.service.model.tokenizer
    text = "<|bos|>user: hi<|eos|> 😀"
    with running.client() as plain:
        asked = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
        told = plain.post("/tokenize", json=asked).json()
        back = plain.post("/detokenize", json={"tokens": told["tokens"]}).json()
        chat = {"messages": HI, "add_special_tokens": False, "return_token_strs": True}
        of_chat = plain.post("/tokenize", json=chat).json()
        refused = plain.post("/tokenize", json=chat | {"add_special_tokens": True})
    assert {told["tokens"][0], told["token_strs"][0]} == {0, "<|bos|>"} and 1 in told["tokens"]
    assert back == {"prompt": text} and tokenizer.decode(told["tokens"]) == "user: hi 😀"
    assert len(of_chat["token_strs"]) == of_chat["count"]
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "add_special_tokens"


def test_each_event_counts_tokens_where_that_is_wanted(client):
    asked = {"model": "small", "max_tokens": 5, "stream": True}
    both = {"include_usage": True, "continuous_usage_stats": True}
    for chat in (False, True):
        ask = client.chat.completions.create if chat else client.completions.create
        what = {"messages": HI} if chat else {"prompt": ["hi", "sea"]}
        *chunks, last = ask(**asked, **what, stream_options=both)
        totals = [chunk.usage.completion_tokens for chunk in chunks]
        assert totals == sorted(totals) and totals[0] == 1 and len(set(totals)) > 3
        assert not last.choices and last.usage == chunks[-1].usage
        silent = list(ask(**asked, **what, stream_options={"continuous_usage_stats": False}))
        assert all(chunk.usage is None and chunk.choices for chunk in silent)


def test_a_stream_has_no_event_that_tells_nothing(thinking, client):
    """The first tells the role and the last the reason. Tags, and parts of characters, are none."""
    for own, said in ((thinking, SAYS), (client, "😀é")):
        chunks = own.chat.completions.create(
            model="small", messages=HI, tools=TOOLS, max_tokens=90, stream=True,
            extra_body={"structured_outputs": {"choice": [said]}},
        )  # fmt: skip
        deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks]
        assert len(deltas) > 2
        for delta in deltas[1:-1]:
            assert any(value for value in delta.values()), delta


def test_two_names_of_one_limit_may_say_the_same(client):
    asked = {"model": "small", "messages": HI, "max_tokens": 3}
    answer = client.chat.completions.create(**asked, max_completion_tokens=3)
    assert answer.usage.completion_tokens <= 3
    says = "max_tokens=3 and max_completion_tokens=4"
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        client.chat.completions.create(**asked, max_completion_tokens=4)
    assert refused.value.param == "max_tokens"


NO_PARAMETERS = [{"type": "function", "function": {"name": "now"}}]


def test_a_function_without_parameters_takes_none(thinking):
    answer = thinking.chat.completions.create(
        model="small", messages=HI, tools=NO_PARAMETERS, tool_choice="required", max_tokens=60,
        temperature=1, seed=1, extra_body={"ignore_eos": False},
    )  # fmt: skip
    said = told(answer)
    ((_, name, arguments),) = said["calls"]
    assert name == "now" and json.loads(arguments) == {} and said["reason"] == "tool_calls"


SAYS = """<think>
Hm</think>
See:
<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>"""


@pytest.fixture
def thinking(running):
    """A client of a server whose template thinks and calls as Qwen's does.

    Its engine is its own: of two servers on one engine, each would take the outputs of the other.
    """
    model = running.service.model
    template = TEMPLATE + "{# <think></think><tool_call> #}"
    tokenizer = dataclasses.replace(model.tokenizer, chat_template=template)
    engine = engine_of(model.engine._model, tokenizer, programs=model.engine.programs)
    other = Service(dataclasses.replace(model, tokenizer=tokenizer, engine=engine), Limits())
    with served(other, None) as own:  # type: ignore[arg-type]
        with openai.OpenAI(base_url=f"{own.url}/v1", api_key="k", max_retries=0) as client:
            yield client


def joined(chunks) -> dict:
    """The message of a stream."""
    message, calls, reason = {"content": "", "reasoning_content": ""}, {}, None
    for chunk in chunks:
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", "") or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls)
                calls[call.index] = [call.id, call.function.name, []]
            calls[call.index][2].append(call.function.arguments)
        reason = choice.finish_reason or reason
    message["num_deltas"] = [len(parts) for _, _, parts in calls.values()]
    joined = [(name, function, "".join(parts)) for name, function, parts in calls.values()]
    return message | {"calls": joined, "reason": reason}


def told(answer) -> dict:
    """The message of an answer in one piece."""
    (choice,) = answer.choices
    calls = [(call.id, call.function.name, call.function.arguments)
             for call in choice.message.tool_calls or ()]  # fmt: skip
    return {"content": choice.message.content or "", "calls": calls,
            "reasoning_content": getattr(choice.message, "reasoning_content", ""),
            "reason": choice.finish_reason}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, True])
def test_reasoning_and_calls_are_read_out_of_an_answer(thinking, stream, logprobs):
    answer = thinking.chat.completions.create(
        model="small", messages=HI, tools=TOOLS, max_tokens=90, stream=stream, logprobs=logprobs,
        extra_body={"structured_outputs": {"choice": [SAYS]}},
    )  # fmt: skip
    said = joined(answer) if stream else told(answer)
    ((name, *call),) = said.pop("calls")
    assert call == ["add", '{"a": 1}'] and len(name) == 9 and name.isalnum()
    assert not stream or said.pop("num_deltas")[0] > 3, "arguments come as they are written"
    assert said == {"content": "See:", "reasoning_content": "Hm", "reason": "tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_tokens_of_reasoning(thinking, running, stream):
    """From the first tag to the last."""
    form = {"structured_outputs": {"choice": [SAYS]}}
    asked = {"model": "small", "temperature": 0, "stream": stream}
    last = {"stream_options": {"include_usage": True}} if stream else {}
    chat = thinking.chat.completions.create(
        messages=HI, n=2, max_tokens=90, extra_body=form | {"return_token_ids": True},
        **asked, **last,
    )  # fmt: skip
    response = thinking.responses.create(input="hi", max_output_tokens=90, extra_body=form, **asked)
    ids = []
    for one in chat if stream else [chat]:
        ids += [i for choice in one.choices if choice.index == 0 for i in choice.token_ids]
        chat = one
    response = list(response)[-1].response if stream else response
    decode = running.service.model.tokenizer.decode
    num_thought = 1 + sum("</think>" not in decode(ids[: i + 1]) for i in range(len(ids)))
    assert 1 < num_thought < len(ids)
    assert chat.usage.completion_tokens_details.reasoning_tokens == 2 * num_thought
    assert response.usage.output_tokens_details.reasoning_tokens == num_thought
    plain = thinking.chat.completions.create(
        model="small", messages=HI,
        extra_body={"structured_outputs": {"choice": ["See: </think>"]}},
    )  # fmt: skip
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0


def test_without_tools_or_with_none_no_call_is_read(thinking):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = thinking.chat.completions.create(
            model="small", messages=HI, max_tokens=90, **fields,
            extra_body={"structured_outputs": {"choice": [SAYS]}},
        )  # fmt: skip
        said = told(answer)
        assert said["content"] == SAYS.partition("</think>\n")[2] and said["reason"] == "stop"
        assert said["reasoning_content"] == "Hm" and not said["calls"]


def thought(thinking, **fields) -> dict:
    """An answer behind a prompt that ends within reasoning."""
    messages = [*HI, {"role": "assistant", "content": "<think>"}]
    own = {"continue_final_message": True, "add_generation_prompt": False}
    extra = own | fields.pop("extra_body", {})
    return told(
        thinking.chat.completions.create(
            model="small", messages=messages, max_tokens=20, seed=1, extra_body=extra, **fields
        )
    )


ONE = {"name": "one", "schema": {"const": 1}}


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_body": {"structured_outputs": {"json": {"const": 1}}}},
        {"response_format": {"type": "json_schema", "json_schema": ONE}},
    ],
)
def test_json_is_the_answer_also_where_a_prompt_ends_within_reasoning(thinking, fields):
    said = thought(thinking, **fields)
    assert said["content"] == "1" and not said["reasoning_content"]


def test_a_format_of_text_reads_as_none_does(thinking):
    said = thought(thinking, response_format={"type": "text"})
    assert said == thought(thinking)
    assert said["reasoning_content"] and not said["content"]


CHOSEN = {"type": "function", "function": {"name": "now"}}
FORCED = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
        "additionalProperties": False}}}
    for name in ("add", "now")
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", CHOSEN])
def test_an_answer_can_be_made_a_call(running, thinking, client, choice, stream):
    tokenizer = running.service.model.tokenizer
    spaces = [i for i in range(2, 4096) if not tokenizer.token_bytes(i).strip()]
    for own in (thinking, client):  # whatever the form of the template
        answer = own.chat.completions.create(
            model="small", messages=HI, tools=FORCED, tool_choice=choice, stream=stream,
            max_tokens=90, temperature=0, logit_bias={str(i): -100.0 for i in spaces},
        )  # fmt: skip
        said = joined(answer) if stream else told(answer)
        ((_, name, arguments),) = said["calls"]
        assert name in (["now"] if choice == CHOSEN else ["add", "now"])
        assert isinstance(json.loads(arguments)["a"], bool)
        assert not stream or said["num_deltas"][0] > 2  # while they are written
        assert (said["content"], said["reason"]) == ("", "tool_calls")


def test_a_forced_call_takes_precedence_over_the_form_of_a_text(running, client):
    """openai-agents and instructor send both."""
    schema = {"name": "x", "schema": {"type": "object", "properties": {"z": {"type": "null"}}}}
    for form in ({"type": "text"}, {"type": "json_schema", "json_schema": schema}):
        answer = client.chat.completions.create(
            model="small", messages=HI, tools=FORCED, tool_choice="required", max_tokens=30,
            temperature=0, response_format=form,
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name in ("add", "now") and not answer.choices[0].message.content


def test_a_form_that_leaves_no_room_for_a_call_says_so(client):
    form = {"type": "json_object"}
    asked = {"model": "small", "messages": HI, "max_tokens": 4, "response_format": form}
    told = [
        client.chat.completions.create(**asked | more).choices[0].model_extra["detjax"]
        for more in ({"tools": FORCED}, {"tools": FORCED, "tool_choice": "none"}, {})
    ]
    assert ["warnings" in one for one in told] == [True, False, False]
    assert "calls no tool" in told[0]["warnings"][0]


@pytest.mark.quick_cases("False")
@pytest.mark.parametrize("stream", [False, True])
def test_of_several_calls_the_first_is_told_where_no_more_are_wanted(thinking, stream):
    counts = []
    for several in (None, True, False):
        answer = thinking.chat.completions.create(
            model="small", messages=HI, tools=TOOLS, max_tokens=100, stream=stream,
            extra_body={"structured_outputs": {"choice": [SAYS.partition("See:\n")[2] * 2]},
                        "parallel_tool_calls": several},
        )  # fmt: skip
        said = joined(answer) if stream else told(answer)
        counts.append(len(said["calls"]))
        assert said["reason"] == "tool_calls"
    assert counts == [2, 2, 1]


def test_a_call_that_was_read_goes_back_into_the_conversation(running, thinking):
    answer = thinking.chat.completions.create(
        model="small", messages=HI, tools=TOOLS, max_tokens=90,
        extra_body={"structured_outputs": {"choice": [SAYS]}},
    )  # fmt: skip
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}
    text = prompt_of(running, thinking, [*HI, message.model_dump(), result], tools=TOOLS)
    assert text == 'tools add\nuser: hi\nassistant: See:add {"a": 1}\ntool: 1\nassistant: '


@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_a_response_names_the_item_that_cannot_be_said(client, instructions):
    items = [*HI, {"role": "banana", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match=r"input\[1\].role is 'banana'") as refused:
        client.responses.create(model="small", input=items, instructions=instructions)  # type: ignore[arg-type]
    assert refused.value.param == "input[1].role"


@pytest.mark.parametrize("fields", [{"tools": TOOLS}, {"continue_final_message": True}])
def test_tokenize_refuses_for_a_prompt_what_is_of_conversations(running, fields):
    (name,) = fields
    with running.client() as plain:
        answer = plain.post("/tokenize", json={"prompt": "x"} | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name


FUNCTIONS = [{"type": "function", "strict": True, **tool["function"]} for tool in FORCED]


@pytest.mark.quick_cases("required-True", "choice1-False")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "now"}])
def test_a_response_calls_a_function(thinking, choice, stream):
    asked = {"model": "small", "input": "hi", "tools": FUNCTIONS, "tool_choice": choice}
    answer = thinking.responses.create(stream=stream, max_output_tokens=90, temperature=0, **asked)
    deltas = []
    if stream:
        events = list(answer)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        kinds = [event.type for event in events if "delta" not in event.type]
        assert kinds[2:-1] == [
            "response.output_item.added", "response.function_call_arguments.done",
            "response.output_item.done",
        ]  # fmt: skip
        done = events[-3]
        answer = events[-1].response
        assert done.arguments == "".join(deltas) and len(deltas) > 1
    (item,) = answer.output
    assert item.type == "function_call" and item.name in ("add", "now")
    assert item.arguments.startswith("{") and item.call_id
    assert not stream or item.arguments == "".join(deltas)
    assert answer.tools[0].name == "add"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_reasoning_text_and_calls_as_items_which_go_back(thinking, stream):
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    form = {"extra_body": {"structured_outputs": {"choice": [SAYS]}}}
    got = thinking.responses.create(
        model="small", input="hi", tools=functions, max_output_tokens=90, stream=stream, **form
    )
    if stream:
        events = list(got)
        done = [e.item for e in events if e.type == "response.output_item.done"]
        assert [e.output_index for e in events if e.type == "response.output_item.added"] == [
            0, 1, 2,
        ]  # fmt: skip
        got = events[-1].response
        assert [item.to_dict() for item in done] == [item.to_dict() for item in got.output]
    thought, message, call = got.output
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call"]
    assert (thought.content[0].text, message.content[0].text) == ("Hm", "See:")
    assert (call.name, call.arguments) == ("add", '{"a": 1}') and got.status == "completed"
    items = [
        {"role": "user", "content": "hi"},
        *(item.to_dict() for item in got.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "1"},
    ]
    asked = {"max_output_tokens": 4, "temperature": 0, "stream": stream}
    back = thinking.responses.create(model="small", input=items, tools=functions, **asked)
    back = list(back)[-1].response if stream else back
    chat = thinking.chat.completions.create(
        model="small", messages=HI, tools=TOOLS, max_tokens=90, **form
    )
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    want = thinking.chat.completions.create(
        model="small", messages=[*HI, chat.choices[0].message.model_dump(), result], tools=TOOLS,
        max_tokens=4, temperature=0,
    )  # fmt: skip
    assert back.usage.input_tokens == want.usage.prompt_tokens
    assert back.detjax["digest"] == want.choices[0].detjax["digest"]
