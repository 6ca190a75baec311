# SPDX-License-Identifier: Apache-2.0
"""Chats, tools and responses can be tried with the bundled model and its own template."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from detjax.server.service import Service

from .conftest import make_service, served

ROOT = Path(__file__).parents[2]
TOOL = {
    "type": "function",
    "function": {
        "name": "sea",
        "parameters": {
            "type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def client(llm):
    service = make_service(llm)
    model = dataclasses.replace(service.model, tokenizer=llm.tokenizer)
    with (
        served(Service(model, service.limits), llm) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_an_answer_goes_on_where_the_users_text_ends(client, llm):
    messages = [
        {"role": "system", "content": "Sums."},
        {"role": "user", "content": "17+26="},
        {"role": "assistant", "content": "43"},
        {"role": "user", "content": [{"type": "text", "text": "52+31="}]},
    ]
    assert llm.tokenizer.render_chat(messages) == "<|bos|>Sums.\n17+26=43\n52+31="
    answer = client.chat.completions.create(
        model="novels-6m", messages=messages, max_tokens=8, temperature=0, stop="\n"
    )
    plain = client.completions.create(
        model="novels-6m", prompt="Sums.\n17+26=43\n52+31=", max_tokens=8, temperature=0, stop="\n"
    )
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.choices[0].detjax["digest"] == plain.choices[0].detjax["digest"]


def test_a_tool_is_called_and_its_answer_goes_back(client, llm):
    messages = [{"role": "user", "content": "Is the sea deep?"}]
    call = client.chat.completions.create(
        model="novels-6m", messages=messages, tools=[TOOL], tool_choice="required", max_tokens=64,
        temperature=0,
    ).choices[0]  # fmt: skip
    assert call.finish_reason == "tool_calls"
    (made,) = call.message.tool_calls
    assert made.function.name == "sea" and "deep" in json.loads(made.function.arguments)
    told = call.message.model_dump(exclude_none=True)
    messages += [told, {"role": "tool", "tool_call_id": made.id, "content": "Very."}]
    messages.append({"role": "user", "content": "Is it blue?"})
    text = llm.tokenizer.render_chat(messages, variables={"tools": [TOOL]})
    assert text.startswith("<|bos|><tools>\n{") and text.endswith(
        "</tool_call>\n<tool_response>\nVery.\n</tool_response>\nIs it blue?"
    )
    answer = client.chat.completions.create(
        model="novels-6m", messages=messages, tools=[TOOL], max_tokens=4
    )
    assert answer.usage.prompt_tokens > 40


def test_a_response_answers_its_input(client):
    answer = client.responses.create(
        model="novels-6m", input="The old house by the sea", instructions="A tale.",
        max_output_tokens=8, temperature=0,
    )  # fmt: skip
    assert answer.output_text


@pytest.mark.slow
def test_the_example_runs_offline():
    found = subprocess.run(
        [sys.executable, "examples/chat.py"], cwd=ROOT, text=True, capture_output=True, check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert found.stdout.count("assistant: ") == found.stdout.count("digest: ") == 2
