# SPDX-License-Identifier: Apache-2.0
"""What clients send is answered: bodies as they were recorded, to the byte but the model's name.

`client_requests.jsonl` is what langchain-openai 1.7.4 and litellm 1.110.2 sent for conversations,
streams, tools, forms, responses and errors. `openai` itself is in `test_openai_client.py`.
"""

import asyncio
import json
from pathlib import Path

import pytest

from detjax.server.app import make_app

from .small import post, small_model, small_service

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}\n{% endfor %}"
    "{% if tools %}{{ tools | map(attribute='function.name') | join }}{% endif %}assistant:"
)
LINES = (Path(__file__).parent / "client_requests.jsonl").read_text().splitlines()
REQUESTS = [json.loads(line) for line in LINES]


def called(answer: dict) -> list[str]:
    """The functions that an answer calls."""
    if "choices" not in answer:
        return [item["name"] for item in answer["output"] if item["type"] == "function_call"]
    message = answer["choices"][0].get("message", {})
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


def check(asked: dict, body: dict, told: bytes) -> str:
    """See that an answer is one of its kind; what kind it was."""
    if asked["status"] != 200:
        error = json.loads(told)["error"]
        assert error["message"] and error["param"] in ("messages", "temperature", "model")
        return "error"
    if body.get("stream"):
        is_response = asked["path"] == "/v1/responses"
        end = b'"type":"response.' if is_response else b"data: [DONE]\n\n"
        assert end in told[-4000 if is_response else -20 :] and b'"error":{' not in told
        has_usage = (body.get("stream_options") or {}).get("include_usage", is_response)
        assert (b'"usage":{' in told) == has_usage
        return "stream"
    answer = json.loads(told)
    if isinstance(body.get("tool_choice"), dict):
        choice = body["tool_choice"]
        name = choice.get("name") or choice["function"]["name"]
        assert called(answer) in ([name], [])
        return "call" if called(answer) else "cut"
    return "answer"


@pytest.mark.slow
def test_what_clients_send_is_answered():
    service = small_service(small_model(eos_token_ids=(1,)), template=TEMPLATE)
    app, kinds = make_app(service), []

    async def run() -> None:
        for asked in REQUESTS:
            told = await post(app, asked["path"], [asked["body"].encode()])
            assert told.status == asked["status"], (asked, told.body[:500])
            kinds.append((asked["client"], check(asked, json.loads(asked["body"]), told.body)))

    asyncio.run(run())
    for client in ("langchain-openai", "litellm"):
        assert {kind for who, kind in kinds if who == client} >= {
            "error",
            "stream",
            "call",
            "answer",
        }
