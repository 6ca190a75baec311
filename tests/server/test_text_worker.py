# SPDX-License-Identifier: Apache-2.0
"""Long work on text: done elsewhere, the same as here, within its limits, and not for nobody."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import pickle
import time
from collections.abc import Sequence

import pytest

from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.models.bundled import bundled_model_path
from detjax.models.tokenizer import Tokenizer
from detjax.server import text_worker
from detjax.server.app import make_app
from detjax.server.errors import RefusedError
from detjax.server.text_process import Setup
from detjax.server.text_tasks import Decode, Encode, Template, TextTools
from detjax.server.text_worker import TaskLimits, TextPool, Worker

from .conftest import TEMPLATE
from .small import body, post, small_service

LONG = "The old house by the sea. " * 40_000  # 1 MB, which takes half a second


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer.from_folder(bundled_model_path())
    return dataclasses.replace(made, chat_template=TEMPLATE)


@pytest.fixture
def texts(tokenizer):
    with contextlib.closing(TextPool(tokenizer, vocab_size=4096, eos_token_ids=(1,))) as made:
        yield made


def worker(tokenizer, **limits) -> Worker:
    made = TaskLimits(**({"task_s": 20.0} | limits))
    setup = Setup(
        tokenizer=pickle.dumps(tokenizer), vocab_size=4096, eos_token_ids=(1,), task_s=made.task_s,
        memory_bytes=made.memory_bytes, is_judge=False,
    )  # fmt: skip
    return Worker(setup, made, what="reading the text")


def is_alive(process_id: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, 0)
        return True
    return False


def test_long_work_has_the_result_of_short_work(tokenizer, texts):
    text = "17+26= <s> é 😀 " * 2_000
    messages, variables = (
        [{"role": "user", "content": text}],
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": 2**70}}}]},
    )
    tools = TextTools.of(tokenizer, 4096, (1,))

    async def ask():
        (ids,) = await texts.encode([text])
        (raw,) = await texts.encode([text], is_raw=True)
        return ids, raw, await texts.template(messages, variables), await texts.decode([ids])

    ids, raw, chat, (back,) = asyncio.run(ask())
    assert texts.medium.process_id is not None and texts.long.process_id is None
    assert [list(ids)] == Encode(texts=[text]).run(tools)
    assert [list(raw)] == Encode(texts=[text], is_raw=True).run(tools)
    assert list(chat) == Template(messages=messages, variables=variables).run(tools)
    assert [back] == Decode(prompts=[ids]).run(tools)


def test_what_is_short_starts_no_process(texts):
    async def ask():
        await texts.encode(["sea"] * 100)
        await texts.template([{"role": "user", "content": "sea"}], {})

    asyncio.run(ask())
    assert {w.process_id for w in (texts.medium, texts.long, texts.forms)} == {None}


def test_what_takes_too_long_is_refused_and_the_next_is_served(tokenizer):
    slow = worker(tokenizer, task_s=0.2)

    async def ask():
        await slow.run(pickle.dumps(Encode(texts=["sea"])))
        killed = slow.process_id
        begin_s = time.perf_counter()
        with pytest.raises(RefusedError, match=r"more than the 0\.2 s"):
            await slow.run(pickle.dumps(Encode(texts=[LONG * 8])))
        assert time.perf_counter() - begin_s < 2 and killed and not is_alive(killed)
        return await slow.run(pickle.dumps(Encode(texts=["sea"])))

    assert asyncio.run(ask()) == [tokenizer.encode("sea")]
    slow.close()


def test_what_takes_too_much_memory_is_refused_and_the_next_is_served(tokenizer):
    small = worker(tokenizer, memory_bytes=300 << 20)

    async def ask():
        with pytest.raises(RefusedError, match="300 MiB"):
            await small.run(pickle.dumps(Encode(texts=[LONG * 4])))
        return await small.run(pickle.dumps(Encode(texts=["sea"])))

    assert asyncio.run(ask()) == [tokenizer.encode("sea")]
    small.close()


def test_whoever_leaves_ends_its_work(tokenizer):
    left, unseen = worker(tokenizer), []

    async def ask():
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: unseen.append(what))
        await left.run(pickle.dumps(Encode(texts=["sea"])))
        killed = left.process_id
        running = asyncio.create_task(left.run(pickle.dumps(Encode(texts=[LONG * 8]))))
        waiting = asyncio.create_task(left.run(pickle.dumps(Encode(texts=[LONG * 4]))))
        await asyncio.sleep(0.2)
        begin_s = time.perf_counter()
        for one in (waiting, running):
            one.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert killed and not is_alive(killed) and time.perf_counter() - begin_s < 2
        return await left.run(pickle.dumps(Encode(texts=["sea"])))

    assert asyncio.run(ask()) == [tokenizer.encode("sea")]
    gc.collect()
    assert not unseen
    left.close()


def test_the_shortest_goes_first_and_what_is_too_much_is_refused(tokenizer):
    crowded, order = worker(tokenizer, waiting_bytes=3 << 20), []

    async def one(text: str):
        await crowded.run(pickle.dumps(Encode(texts=[text])))
        order.append(len(text))

    async def ask():
        running = asyncio.create_task(one(LONG))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(one(LONG[:n])) for n in (900_000, 10, 90_000)]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="try again later") as refused:
            await one(LONG * 2 + LONG[:100_000])
        assert refused.value.status == 429
        await asyncio.gather(running, *waiting)

    asyncio.run(ask())
    assert order == [len(LONG), 10, 90_000, 900_000]
    crowded.close()


def test_a_process_without_work_ends(tokenizer, monkeypatch):
    monkeypatch.setattr(text_worker, "IDLE_S", 0.1)
    idle = worker(tokenizer)

    async def ask():
        await idle.run(pickle.dumps(Encode(texts=["sea"])))
        process_id = idle.process_id
        await asyncio.sleep(0.5)
        assert process_id and not is_alive(process_id) and idle.process_id is None

    asyncio.run(ask())


HOSTILE: Sequence[tuple[str, str, str]] = [
    ("regex", "a?" * 32_768, "is refused: "),
    ("regex", "(a|aa)*b" * 4_000, "is refused: "),
    ("grammar", "start: r0\n" + "\n".join(f'r{i}: r{i + 1} | "a" r{i + 1} | ' for i in range(2000))
     + '\nr2000: "z"', "is refused: "),
    ("json_schema", json.dumps({"type": "string", "pattern": "(x?y?)" * 8_000}), "is refused: "),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "spec", "says"), HOSTILE)
def test_a_form_that_costs_too_much_is_refused_within_seconds(texts, kind, spec, says):
    begin_s = time.perf_counter()
    with pytest.raises(RefusedError, match=says):
        asyncio.run(texts.judge(StructuredOutput(kind=kind, spec=spec)))
    assert time.perf_counter() - begin_s < text_worker.FORM_LIMITS.task_s + 5


def test_ordinary_forms_pass(texts):
    forms = [
        StructuredOutput(kind="regex", spec="[a-z]{1,5000}"),
        StructuredOutput.of_choices([f"choice {i}" for i in range(1_000)]),
        StructuredOutput.of_schema({"enum": [f"item number {i}" for i in range(2_000)]}),
        StructuredOutput.of_schema({"type": "object", "properties": {
            f"f{i}": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]}
            for i in range(100)}}),
        StructuredOutput(kind="json_object"),
    ]  # fmt: skip

    async def judge():
        for form in forms:
            await texts.judge(form)
        await texts.judge(forms[0])

    asyncio.run(judge())
    assert texts._judged.keys() >= set(forms)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": LONG * 4}, {"structured_outputs": {"regex": "(x?y?)" * 5_000}},
     {"max_tokens": 100}, {"stream": True, "max_tokens": 100}],
    ids=["reading", "form", "generating", "stream"],
)  # fmt: skip
def test_a_client_that_leaves_takes_its_work_along(fields):
    service = small_service()

    async def leave():
        begin_s = time.perf_counter()
        answer = await post(make_app(service), "/v1/completions", [body(**fields)], leaves=True)
        assert answer.status in (0, 499, 400) and time.perf_counter() - begin_s < 3
        assert not service.num_open and not service._engine._sinks and not service._inboxes
        await service._engine.drain()

    asyncio.run(leave())
    stats = service.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_held) == (0, 0, 0)
    assert not any(w._lock._is_taken for w in (service.texts.long, service.texts.forms))
    service.texts.close()


def test_a_thousand_prompts_of_a_thousand_sequences_are_refused_before_any_is_read(monkeypatch):
    service = small_service()
    monkeypatch.setattr(service.texts, "encode", None)

    async def ask():
        return await post(make_app(service), "/v1/completions", [body(prompt=["a"] * 1024, n=1024)])

    answer = asyncio.run(ask())
    assert answer.status == 400 and b"max_waiting=64" in answer.body
