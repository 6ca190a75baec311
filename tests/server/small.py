# SPDX-License-Identifier: Apache-2.0
"""A server of a random model so small that its steps cost next to nothing, without sockets."""

import asyncio
import dataclasses
import functools
import json
from collections.abc import Sequence

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.sampling.grammars import Grammars
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel
from detjax.models.tokenizer import Tokenizer
from detjax.proof.identity import Identifier
from detjax.server.served_model import Limits, ServedModel
from detjax.server.service import Service
from detjax.testing.dummies import dummy_config, dummy_model

from .conftest import TEMPLATE

MAX_LEN = 128


CONFIG = EngineConfig(batch_size=8, prefill_chunk=64, max_len=MAX_LEN, max_waiting=64)


def small_model(*, eos_token_ids: tuple[int, ...] = ()) -> LoadedModel:
    """One layer, and the vocabulary of the bundled model's tokenizer."""
    config = dummy_config(num_layers=1, vocab_size=4096)
    return dummy_model(dataclasses.replace(config, eos_token_ids=eos_token_ids))


@functools.cache
def shared_engine() -> Engine:
    """Whose model and compiled programs services share."""
    return Engine(small_model(), CONFIG)


def engine_of(model: LoadedModel, tokenizer: Tokenizer, **options) -> Engine:
    """An engine that can do forms."""
    ends = model.config.eos_token_ids
    grammars = Grammars(tokenizer.backend.to_str, vocab_size=4096, eos_token_ids=ends)
    return Engine(model, CONFIG, grammars=grammars, **options)


def small_service(
    model: LoadedModel | None = None, *, template: str = TEMPLATE, **limits
) -> Service:
    """A service with an engine of its own; of the shared model, if not of another."""
    tokenizer = Tokenizer.from_folder(bundled_model_path())
    tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    if model is None:
        model = shared_engine()._model
        engine = Engine(model, CONFIG, programs=shared_engine().programs)
    else:
        engine = engine_of(model, tokenizer)
    served = ServedModel(
        name="small", engine=engine, tokenizer=tokenizer,
        vocab_size=4096, max_len=MAX_LEN, mode="invariant", fingerprint=model.fingerprint,
        identity=Identifier(model, tokenizer, name="small").identity(),
        end_token_ids=model.config.eos_token_ids,
    )  # fmt: skip
    return Service(served, Limits(**limits))


@dataclasses.dataclass(frozen=True)
class Answer:
    """Status and body; 0 where nobody was answered, as the client had left."""

    status: int
    body: bytes

    def json(self):
        return json.loads(self.body)


async def post(app, path: str, parts: Sequence[bytes], *, leaves: bool = False) -> Answer:
    """Send a body in parts to an ASGI application; `leaves`: and do not wait for the answer."""
    left, is_over, told = list(parts), asyncio.Event(), {"status": 0, "body": b""}

    async def receive():
        if left:
            part = left.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(left)}
        if not leaves:
            await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(event):
        if event["type"] == "http.response.start":
            told["status"] = event["status"]
        else:
            told["body"] += event.get("body", b"")
            if not event.get("more_body"):
                is_over.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)
    return Answer(**told)


def body(**fields) -> bytes:
    return json.dumps({"model": "small", "prompt": "sea", "max_tokens": 4} | fields).encode()
