# SPDX-License-Identifier: Apache-2.0
"""One server of the bundled model for all tests of a worker, and clients of it."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn

import detjax
from detjax.server.app import OPEN_TO_ALL, make_app
from detjax.server.options import WebOptions
from detjax.server.served_model import Limits, ServedModel
from detjax.server.service import Service

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}tools {{ tools | map(attribute='function.name') | join(' ') }}\n{% endif %}"
    "assistant:"
)


@dataclasses.dataclass(frozen=True)
class Running:
    """A server in a thread of this process."""

    url: str
    service: Service
    llm: detjax.LLM

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, **({"timeout": 120} | options))


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


@contextlib.contextmanager
def served(
    service: Service, llm: detjax.LLM, *, api_keys=(), options: WebOptions = OPEN_TO_ALL
) -> Iterator[Running]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        make_app(service, dataclasses.replace(options, api_keys=tuple(api_keys))),
        log_config=None, access_log=False, lifespan="off",
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", service, llm)
    finally:
        server.should_exit = True
        thread.join()


def make_service(llm: detjax.LLM, *, signing_key=None, **limits) -> Service:
    tokenizer = dataclasses.replace(llm.tokenizer, chat_template=TEMPLATE)
    model = ServedModel(
        name="novels-6m", engine=llm.engine, tokenizer=tokenizer,
        vocab_size=llm.config.model.vocab_size, max_len=llm.config.engine.max_len,
        mode=llm.config.engine.mode, fingerprint=llm.config.fingerprint,
        identity=llm.identity(), identify=llm.identity,
        end_token_ids=llm.config.model.eos_token_ids, signing_key=signing_key,
    )  # fmt: skip
    return Service(model, Limits(**limits))


@pytest.fixture(scope="session")
def llm() -> detjax.LLM:
    # Tests ask it beside its server, which must not check answers at that time.
    return detjax.LLM(
        max_len=256, batch_size=4, max_waiting=64, show_progress=False, self_check="start"
    )


@pytest.fixture(scope="session")
def running(llm) -> Iterator[Running]:
    with served(make_service(llm, body_bytes=1 << 20), llm) as running:
        yield running


@pytest.fixture
def client(running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client
