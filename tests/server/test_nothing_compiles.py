# SPDX-License-Identifier: Apache-2.0
"""A server that is ready compiles nothing, whatever its clients send."""

import concurrent.futures

import jax
import pytest

from detjax.testing.cases import quick_and_slow

MODEL, COMPILED = "novels-6m", "/jax/core/compile/backend_compile_duration"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
COMPLETIONS = (
    {}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1}, {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.2}, {"logit_bias": {"5": 3.0}}, {"logprobs": 1}, {"logprobs": 5},
    {"n": 2, "temperature": 1.0}, {"echo": True, "logprobs": 2}, {"prompt_logprobs": 3},
    {"stop": ["e"]}, {"min_tokens": 2}, {"bad_words": ["the"]}, {"best_of": 3, "temperature": 1.0},
    {"structured_outputs": {"json": SCHEMA}, "max_tokens": 20},
    {"structured_outputs": {"regex": "[a-c]{2,4}"}}, {"stream": True, "temperature": 0.9},
)  # fmt: skip
CHATS = (
    {}, {"logprobs": True, "top_logprobs": 20}, {"temperature": 1.0, "top_p": 0.5},
    {"response_format": {"type": "json_object"}, "max_tokens": 20},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("count", quick_and_slow([60], [2000]))
def test_no_request_makes_a_ready_server_compile(running, count):
    engine, compiled = running.llm.engine, []
    engine.compile()
    num_compiled, is_over = engine.programs.num_compiled, False

    def listener(event: str, duration: float, **named) -> None:
        if event == COMPILED and not is_over:
            compiled.append(named)

    def ask(i: int) -> int:
        with running.client() as client:
            if i % 4 == 3:
                messages = [{"role": "user", "content": "night " * (i % 7 + 1)}]
                body = {"model": MODEL, "messages": messages, "max_tokens": 3} | CHATS[
                    i // 4 % len(CHATS)
                ]
                return client.post("/v1/chat/completions", json=body).status_code
            body = {"model": MODEL, "prompt": "The old house " * (i % 9 + 1), "max_tokens": 3}
            body |= COMPLETIONS[i % len(COMPLETIONS)]
            return client.post("/v1/completions", json=body).status_code

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for width in (1, 2, 6):  # so that steps have every number of rows
            with concurrent.futures.ThreadPoolExecutor(width) as pool:
                codes = list(pool.map(ask, range(count // 3)))
            assert set(codes) == {200}, codes
    finally:
        is_over = True
    assert compiled == [] and engine.programs.num_compiled == num_compiled
    with running.client() as client:
        assert client.get("/health").json() == {"status": "ready"}
