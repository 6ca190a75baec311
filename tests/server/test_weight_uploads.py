# SPDX-License-Identifier: Apache-2.0
"""A trainer sends tensors in bodies; they answer as those of a folder, all of them or none."""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from detjax.models.params import tensor_specs
from detjax.proof.identity import Identifier
from detjax.server import weight_uploads
from detjax.server.options import WebOptions
from detjax.testing.dummies import dummy_model

from .conftest import Running, served
from .small import small_model, small_service

ADMIN = {"Authorization": "Bearer admin"}
BINARY = ADMIN | {"Content-Type": "application/octet-stream"}
PROMPT = [5, 17, 301, 9]
PAGES = "detjax-weights-*"


def tensors_of(seed: int) -> dict[str, np.ndarray]:
    """Random weights under the names and shapes that the small model's folder would have."""
    rng = np.random.default_rng(seed)
    specs = jax.tree.leaves(tensor_specs(small_model().config, tp=1, vocab_block=1))
    return {
        name: (rng.standard_normal(spec.hf_shape) * 0.1).astype(ml_dtypes.bfloat16)
        for spec in specs
        for name in spec.hf_names
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model = small_model()
    service = small_service(model)
    identifier = Identifier(model, service.model.tokenizer, name="small")
    history = service.model.engine.weight_history

    def identify():
        return identifier.identity(history.current)

    service._model = dataclasses.replace(service.model, identify=identify)
    options = WebOptions(admin_keys=("admin",))
    with served(service, None, options=options) as running:  # type: ignore[arg-type]
        yield running


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def answer(client: httpx.Client) -> dict:
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    response = client.post("/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    return response.json()


def told(response: dict) -> tuple[str, str]:
    proof = response["choices"][0]["detjax"]
    return proof["digest"], proof["weights"]


def start(client: httpx.Client, **fields) -> httpx.Response:
    return client.post("/start_weight_update", json=fields, headers=ADMIN)


def send(client: httpx.Client, tensors: dict[str, np.ndarray]) -> httpx.Response:
    return client.post("/update_weights", content=save(tensors), headers=BINARY)


def finish(client: httpx.Client) -> httpx.Response:
    return client.post("/finish_weight_update", json={}, headers=ADMIN)


def in_parts(tensors: dict[str, np.ndarray], count: int) -> list[dict[str, np.ndarray]]:
    names = list(tensors)
    return [{name: tensors[name] for name in names[i::count]} for i in range(count)]


def push(client: httpx.Client, tensors: dict[str, np.ndarray], count: int = 1) -> dict:
    assert start(client).status_code == 200
    for part in in_parts(tensors, count):
        assert send(client, part).status_code == 200
    response = finish(client)
    assert response.status_code == 200, response.text
    return response.json()


def test_more_bytes_than_the_model_has_are_refused_and_take_no_room(client):
    assert start(client).status_code == 200
    most = 4 * 1_000_000 + (16 << 20)  # the model has fewer weights
    for _ in range(2):
        response = client.post("/update_weights", content=b"0" * most, headers=BINARY)
        assert response.status_code == 413, response.text
        assert response.json()["error"]["code"] == "body_too_large"
    for part in in_parts(tensors_of(99), 2):
        assert send(client, part).status_code == 200
    assert finish(client).status_code == 200


def test_a_trainers_copy_of_tied_embeddings_has_room(monkeypatch):
    """PyTorch names a tied table twice, and a trainer sends both, in float32."""
    monkeypatch.setattr(weight_uploads, "_HEADER_BYTES", 16 << 10)  # a small model is smaller
    config = dataclasses.replace(small_model().config, tie_word_embeddings=True)
    service = small_service(dummy_model(config))
    specs = jax.tree.leaves(tensor_specs(config, tp=1, vocab_block=1))
    shapes = {name: spec.hf_shape for spec in specs for name in spec.hf_names}
    tensors = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    options = WebOptions(admin_keys=("admin",))
    with served(service, None, options=options) as own, own.client() as client:  # type: ignore[arg-type]
        push(client, tensors, count=2)
        assert start(client).status_code == 200
        more = tensors | {"model.more.weight": tensors["lm_head.weight"]}
        assert send(client, more).status_code == 413


@pytest.mark.invariance
def test_weights_that_were_sent_answer_as_those_of_a_folder(server, client, tmp_path):
    tensors = tensors_of(1)
    before, version = told(answer(client)), client.get("/version").json()["weight_version"]
    done = push(client, tensors, count=3)
    after = answer(client)
    assert told(after)[1] == done["weights"] == client.get("/version").json()["model"]["weights"]
    assert after["choices"][0]["detjax"]["weight_version"] == done["weight_version"] == version + 1

    save_file(tensors, tmp_path / "model.safetensors")
    engine = server.service.model.engine
    engine.load_folder(tmp_path, version=version + 2)
    assert told(answer(client))[0] == told(after)[0]
    # Controls: other weights have other answers, and one bit of one tensor is another hash.
    assert told(after)[0] != before[0] and told(after)[1] != before[1]
    engine.load_folder(tmp_path, version=version + 3)  # leaves the version's hash to the next push
    changed = tensors | {(name := next(iter(tensors))): tensors[name].copy()}
    changed[name].view(np.uint16).flat[0] ^= 1
    assert push(client, changed)["weights"] != done["weights"]


def test_until_it_is_finished_an_update_changes_nothing(client):
    push(client, tensors_of(2))
    before = told(answer(client))
    first, second = in_parts(tensors_of(3), 2)
    assert start(client).status_code == 200
    assert send(client, first).status_code == 200
    assert told(answer(client)) == before
    # Half of the tensors are not enough, and then have to come again.
    refused = finish(client)
    assert refused.status_code == 400 and "start it again" in refused.text
    assert send(client, second).status_code == finish(client).status_code == 409
    assert told(answer(client)) == before
    # A trainer that comes back starts again: what it sent before is forgotten.
    assert start(client).status_code == send(client, first).status_code == 200
    assert told(answer(client)) == before
    assert push(client, tensors_of(3), count=2)["success"]
    assert told(answer(client))[0] != before[0]


def test_float32_is_rounded_once_to_the_dtype_of_the_server(client):
    rounded = tensors_of(8)
    exact = {name: t.astype(np.float32) for name, t in rounded.items()}
    moved = {  # by less than half of the last bit, so that rounding takes each value back
        name: t * np.float32(1 + 2**-10) for name, t in exact.items()
    }
    done = push(client, rounded)
    assert push(client, moved)["weights"] == done["weights"]
    beyond = {name: t * np.float32(1 + 2**-7) for name, t in exact.items()}
    assert push(client, beyond)["weights"] != done["weights"]


def wrong_shape(tensors: dict) -> dict:
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    return tensors | {name: tensors[name][:-1].copy()}


def not_of_the_model(tensors: dict) -> dict:
    return tensors | {"model.other.weight": np.zeros(4, ml_dtypes.bfloat16)}


def values_that_would_change(tensors: dict) -> dict:
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    return tensors | {name: np.full(tensors[name].shape, 0.1, np.float16)}


@pytest.mark.parametrize(
    "change",
    [wrong_shape, not_of_the_model, values_that_would_change],
    ids=lambda one: one.__name__,
)
def test_tensors_that_do_not_fit_leave_the_old_weights(client, change):
    before = told(answer(client))
    assert start(client).status_code == 200
    assert send(client, change(tensors_of(4))).status_code == 200
    refused = finish(client)
    assert refused.status_code == 400, refused.text
    assert tempfile.gettempdir() not in refused.text, "no folder of the server's machine is named"
    assert told(answer(client)) == before


def test_bodies_that_are_no_tensors_are_refused(client):
    tensors = tensors_of(5)
    data = save(tensors)
    assert start(client).status_code == 200
    for body in (b"", b"x" * 100, data[:-1], data + b"x", data[: len(data) // 2]):
        refused = client.post("/update_weights", content=body, headers=BINARY)
        assert refused.status_code == 400, refused.text
        assert "safetensors" in refused.text and tempfile.gettempdir() not in refused.text
    info = {"update_info": {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]]}}
    refused = client.post("/update_weights", json=info, headers=ADMIN)
    assert refused.status_code == 400 and "NCCL" in refused.json()["error"]["message"]
    assert send(client, tensors).status_code == 200
    twice = send(client, dict(list(tensors.items())[:1]))
    assert twice.status_code == 400 and twice.json()["error"]["param"] == next(iter(tensors))
    # Control: what was refused left nothing behind.
    assert finish(client).status_code == 200


def test_starts_that_cannot_be_honoured_are_refused(client):
    now = client.get("/version").json()["weight_version"]
    for fields in ({"is_checkpoint_format": False}, {"mode": "keep"}, {"weight_version": now},
                   {"weight_version": "x"}, {"unknown": 1}):  # fmt: skip
        assert start(client, **fields).status_code == 400, fields
    assert start(client, weight_version=now + 5).json()["weight_version"] == now + 5
    assert send(client, tensors_of(6)).status_code == 200
    assert finish(client).json()["weight_version"] == now + 5


def test_keys_and_folders(server, client):
    for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
        assert client.post(path, json={}).status_code == 401
    found = set(Path(tempfile.gettempdir()).glob(PAGES))
    assert start(client).status_code == 200
    (own,) = set(Path(tempfile.gettempdir()).glob(PAGES)) - found
    assert own.stat().st_mode & 0o077 == 0, "nobody else may read weights"
    assert send(client, tensors_of(7)).status_code == finish(client).status_code == 200
    assert not own.exists()


def test_what_is_asked_before_weights_come_by_nccl_is_refused_with_the_reason(client):
    for verb, path in (("GET", "/server_info"), ("GET", "/get_world_size"),
                       ("POST", "/init_weight_transfer_engine"), ("POST", "/collective_rpc"),
                       ("POST", "/init_weight_update_communicator"),
                       ("POST", "/fetch_weights")):  # fmt: skip
        refused = client.request(verb, path)
        assert refused.status_code == 501
        assert "/start_weight_update" in refused.json()["error"]["message"]
