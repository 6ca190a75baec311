# SPDX-License-Identifier: Apache-2.0
"""An administrator replaces weights, pauses a server and lets it sleep; no answer is mixed."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import detjax
from detjax import audit
from detjax.cli.errors import InputError
from detjax.models import loading
from detjax.models.bundled import bundled_model_path
from detjax.serve import check_files, check_options, make_parser
from detjax.server.app import OPEN_TO_ALL, make_app
from detjax.server.options import WebOptions, web_options
from detjax.server.service import ServiceState
from detjax.server.turns import Hold

from .conftest import Running, make_service, served, wait_for
from .small import body, post, small_service

ADMIN = {"Authorization": "Bearer admin"}
USER = {"Authorization": "Bearer user"}
ASKED = {
    "model": "novels-6m", "prompt": "The old house by the sea", "max_tokens": 12,
    "temperature": 0.8, "seed": 5, "return_token_ids": True, "return_logprob_bytes": True,
}  # fmt: skip
WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"


def write(folder: Path, change: Callable[[dict], None]) -> Path:
    """The bundled model with changed tensors."""
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json",
                 "tokenizer_config.json", "chat_template.jinja"):  # fmt: skip
        shutil.copy(bundled_model_path() / name, folder)
    tensors = load_file(bundled_model_path() / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder


def scaled(factor: float) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        tensors[NORM] = (tensors[NORM].astype(np.float32) * factor).astype(tensors[NORM].dtype)

    return change


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for i, factor in enumerate((1.0, 0.5, 2.0)):
        write(root / "allowed" / f"step{i}", scaled(factor))
    write(root / "outside", scaled(4.0))
    return root


@pytest.fixture(scope="module")
def expected(root) -> list[dict]:
    """What a fresh model of each folder answers, and the hash of its weights."""
    found = []
    sampling = detjax.SamplingParams(max_tokens=12, temperature=0.8, seed=5)
    for i in range(3):
        llm = detjax.LLM(
            str(root / "allowed" / f"step{i}"), max_len=256, batch_size=4, show_progress=False
        )
        out = llm.generate(ASKED["prompt"], sampling)[0].outputs[0]
        found.append({"digest": out.digest(), "weights": llm.identity().model["weights"],
                      "token_ids": list(out.token_ids)})  # fmt: skip
    assert len({one["digest"] for one in found}) == 3, "the control: other weights answer otherwise"
    return found


@pytest.fixture(scope="module")
def own_llm(root) -> detjax.LLM:
    return detjax.LLM(
        str(root / "allowed" / "step0"), max_len=256, batch_size=4, max_waiting=64,
        show_progress=False, self_check="start",
    )  # fmt: skip


@pytest.fixture
def server(own_llm, root) -> Iterator[Running]:
    """With the weights of step0, whatever a test before has done."""
    engine = own_llm.engine
    engine.wake_up(weights=True, cache=False)
    engine.load_folder(root / "allowed" / "step0", version=engine.weight_version + 1)
    engine.wake_up()
    options = WebOptions(admin_keys=("admin",), weights_dirs=((root / "allowed").resolve(),))
    service = make_service(own_llm)
    service._model = dataclasses.replace(service.model, weight_version=engine.weight_version)
    with served(service, own_llm, api_keys=["user"], options=options) as running:
        yield running


@contextlib.contextmanager
def slow_steps(running: Running, step_s: float = 0.02) -> Iterator[None]:
    """Steps that take a while, so that answers are open while something else happens."""
    engine = running.service.model.engine
    step = engine.step

    def slow():
        time.sleep(step_s)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.step


def update(client: httpx.Client, folder: Path, **fields) -> httpx.Response:
    asked = {"model_path": str(folder)} | fields
    return client.post("/update_weights_from_disk", json=asked, headers=ADMIN)


def answer(client: httpx.Client, **fields) -> dict:
    response = client.post("/v1/completions", json=ASKED | fields, headers=USER)
    assert response.status_code == 200, response.text
    return response.json()


def told(response: dict) -> dict:
    choice = response["choices"][0]
    return {"digest": choice["detjax"]["digest"], "weights": choice["detjax"]["weights"],
            "token_ids": choice["token_ids"]}  # fmt: skip


def num_cached(response: dict) -> int:
    return response["usage"]["prompt_tokens_details"]["cached_tokens"]


def events(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


# ------------------------------------------------------------------------------------------- keys


def test_without_an_admin_key_there_are_no_routes(client):
    assert OPEN_TO_ALL.admin_keys == ()
    assert client.post("/update_weights_from_disk", json={"model_path": "/"}).status_code == 404
    for path in ("/sleep", "/wake_up", "/pause", "/resume"):
        assert client.post(path).status_code == 404
    assert client.get("/is_sleeping").status_code == client.get("/is_paused").status_code == 404
    assert "/sleep" not in client.get("/openapi.json").json()["paths"]


def test_a_key_opens_its_own_routes_alone(server):
    with server.client() as client:
        for path in ("/update_weights_from_disk", "/sleep", "/wake_up", "/pause", "/resume"):
            for headers in ({}, USER, {"Authorization": "Bearer"}):
                assert client.post(path, json={}, headers=headers).status_code == 401, path
        for path in ("/is_sleeping", "/is_paused"):
            assert client.get(path, headers=USER).status_code == 401
            assert client.get(path, headers=ADMIN).status_code == 200
        asked = client.post("/v1/completions", json=ASKED, headers=ADMIN)
        assert asked.status_code == 401
        document = client.get("/openapi.json").json()
        assert document["paths"]["/sleep"]["post"]["security"] == [{"admin_key": []}]
        assert server.service.state is ServiceState.READY


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--admin-api-key", " "], "--admin-api-key is empty"),
        (["--admin-api-key", "a", "--api-key", "a"], "give each a key of its own"),
        (["--weights-dir", "."], "--weights-dir . needs --admin-api-key"),
    ],
)
def test_options_that_do_not_go_together_are_refused(monkeypatch, argv, says):
    monkeypatch.delenv("DETJAX_ADMIN_API_KEY", raising=False)
    assert_refused(argv, says)


def test_the_key_may_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DETJAX_ADMIN_API_KEY", "of the environment")
    args = make_parser().parse(["--weights-dir", str(tmp_path)])
    check_options(args)
    options = web_options(args)
    assert options.admin_keys == ("of the environment",)
    assert options.weights_dirs == (tmp_path.resolve(),)
    assert_refused(["--api-key", "of the environment"], "give each a key of its own")


def test_a_folder_of_weights_that_is_not_there_is_refused_at_the_start():
    args = make_parser().parse(["--admin-api-key", "a", "--weights-dir", "no"])
    with pytest.raises(FileNotFoundError, match="--weights-dir no is no folder"):
        check_files(args)


def assert_refused(argv: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_options(make_parser().parse(argv))


# ---------------------------------------------------------------------------------------- weights


@pytest.mark.slow
@pytest.mark.invariance
def test_an_update_answers_as_a_fresh_server_with_these_weights(server, root, expected, tmp_path):
    with server.client() as client:
        before = client.get("/v1/models", headers=USER).json()["data"][0]
        assert told(answer(client)) == expected[0]
        long = {"prompt": ASKED["prompt"] * 30, "max_tokens": 2}
        assert [num_cached(answer(client, **long)) > 0 for _ in range(2)] == [False, True]
        response = update(client, root / "allowed" / "step1")
        assert response.status_code == 200, response.text
        done = response.json()
        assert done["success"] is True and done["weights"] == expected[1]["weights"]
        new = answer(client, receipt=True)
        assert told(new) == expected[1]
        assert num_cached(answer(client, **long)) == 0
        assert new["choices"][0]["detjax"]["weight_version"] == done["weight_version"]
        after = client.get("/v1/models", headers=USER).json()["data"][0]
        assert after["weights"] == expected[1]["weights"] != before["weights"]
        assert after["weight_version"] == done["weight_version"] == before["weight_version"] + 1
        version = client.get("/version").json()
        assert version["model"]["weights"] == expected[1]["weights"]
        assert version["weight_version"] == done["weight_version"]
        metrics = client.get("/metrics", headers=USER).text
        assert f"detjax_weight_version {float(done['weight_version'])}" in metrics
        assert f'detjax_weights{{weights="{expected[1]["weights"]}"}} 1.0' in metrics
    path = tmp_path / "receipt.jsonl"
    path.write_text(new["choices"][0]["detjax"]["receipt"] + "\n")
    of_new = ["--model", str(root / "allowed" / "step1"), "--cache-dir", "none"]
    assert audit.main([str(path), *of_new]) == 0
    # Control: the old weights are not those of the receipt.
    of_old = ["--model", str(root / "allowed" / "step0"), "--cache-dir", "none"]
    assert audit.main([str(path), *of_old]) != 0


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_weights_in_a_body_answer_as_those_of_their_folder(server, root, expected, mode):
    """The control is what the server answers before, and until the update is finished."""
    data = (root / "allowed" / "step1" / WEIGHTS).read_bytes()
    with server.client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        long = {"prompt": ASKED["prompt"] * 30, "max_tokens": 2}
        assert [num_cached(answer(client, **long)) > 0 for _ in range(2)] == [False, True]
        begun = client.post("/start_weight_update", json={"mode": mode}, headers=ADMIN)
        assert begun.status_code == 200, begun.text
        assert client.post("/update_weights", content=data, headers=ADMIN).status_code == 200
        assert told(answer(client)) == expected[0]
        event = threading.Event()
        with slow_steps(server):
            open_ = pool.submit(stream, server, event, max_tokens=60)
            assert event.wait(60)
            done = client.post("/finish_weight_update", json={}, headers=ADMIN)
        assert done.status_code == 200, done.text
        assert done.json()["weights"] == expected[1]["weights"]
        last = open_.result()[-1]
        assert ("error" in last) == (mode == "abort")
        if mode == "wait":
            assert last["choices"][0]["detjax"]["weights"] == expected[0]["weights"]
        assert told(answer(client)) == expected[1]
        assert num_cached(answer(client, **long)) == 0


def test_versions_go_up(server, root, expected):
    folder = root / "allowed" / "step1"
    with server.client() as client:
        now = client.get("/version").json()["weight_version"]
        assert update(client, folder, weight_version=str(now + 7)).status_code == 200
        for version in (now + 7, now, "x", -1, 2**53):
            refused = update(client, folder, weight_version=version)
            assert refused.status_code == 400, version
            assert refused.json()["error"]["param"] == "weight_version"
        assert told(answer(client)) == expected[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"flush_cache": False}, {"keep_pause": True}, {"is_async": True}, {"manifest": {"a": 1}},
        {"load_format": "dummy"}, {"mode": "keep"}, {"mode": "wait", "abort_all_requests": True},
        {"unknown": 1}, {"torch_empty_cache": True}, {"recapture_cuda_graph": True},
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused(server, root, fields):
    with server.client() as client:
        refused = update(client, root / "allowed" / "step1", **fields)
        assert refused.status_code == 400 and refused.json()["error"]["message"]


def test_folders_that_are_not_allowed_are_refused(server, root, expected):
    allowed = root / "allowed"
    (allowed / "link").symlink_to(root / "outside")
    (allowed / "linked").mkdir()
    (allowed / "linked" / WEIGHTS).symlink_to(root / "outside" / WEIGHTS)
    (allowed / "loop").symlink_to(allowed / "loop")
    outside = [
        root / "outside", allowed / ".." / "outside", allowed / "link", allowed / "linked",
        "/", "/etc", "", ".", "~", f"{allowed}step1", root,
    ]  # fmt: skip
    with server.client() as client:
        for folder in outside:
            refused = update(client, folder)
            assert refused.status_code == 403, (folder, refused.text)
            assert refused.json()["error"]["code"] == "folder_not_allowed"
        for folder in (allowed / "no", allowed / "step1" / WEIGHTS, allowed / "loop",
                       f"{allowed}/\0", allowed / ("x" * 5000)):  # fmt: skip
            refused = update(client, folder)
            assert refused.status_code == 400, (folder, refused.text)
            assert refused.json()["error"]["param"] == "model_path"
        assert told(answer(client)) == expected[0]
    for name in ("link", "loop"):
        (allowed / name).unlink()
    shutil.rmtree(allowed / "linked")


def one_nan(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[NORM][3] = np.nan
    save_file(tensors, folder / WEIGHTS)


def cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def retype(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {NORM: np.ones_like(tensors[NORM], np.int32)}, folder / WEIGHTS)


def half(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {NORM: tensors[NORM].astype(np.float16)}, folder / WEIGHTS)


def infinite(folder: Path) -> None:
    """In its header all is well: the value of one element alone does not fit."""
    tensors = load_file(folder / WEIGHTS)
    values = tensors[NORM].astype(np.float32)
    values[-1] = np.float32(3.4e38)
    assert np.isinf(values.astype(ml_dtypes.bfloat16)[-1])
    save_file(tensors | {NORM: values}, folder / WEIGHTS)


def reshape(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {NORM: tensors[NORM][:-1]}, folder / WEIGHTS)


def less(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[NORM]
    save_file(tensors, folder / WEIGHTS)


def more(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"model.extra.weight": tensors[NORM]}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut, "damaged or cut short"), (other_config, "rms_norm_eps=0.5"), (reshape, "shape"),
        (no_weights, "has neither"), (retype, "I32"), (half, "float16"), (less, "lacks 1 of"),
        (more, "model.extra.weight"), (infinite, "infinit"),
        (one_nan, "is not finite; the old weights stay"),
    ],
)  # fmt: skip
def test_a_failed_update_leaves_the_old_weights_and_open_requests_whole(
    server, root, expected, spoil, says
):
    folder = write(root / "allowed" / spoil.__name__, scaled(0.5))
    spoil(folder)
    with server.client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        with slow_steps(server):
            opened = [pool.submit(answer, client) for _ in range(2)]
            wait_for(lambda: server.service.turns.num_running == 2)
            # An update that the headers refuse aborts nobody.
            mode = "wait" if spoil in (infinite, one_nan) else "abort"
            refused = update(client, folder, mode=mode)
        assert refused.status_code == 400, refused.text
        assert says in refused.json()["error"]["message"], refused.text
        assert [told(one.result()) for one in opened] == [expected[0]] * 2
        assert told(answer(client)) == expected[0]
        assert client.get("/health/ready").status_code == 200
        assert client.get("/version").json()["model"]["weights"] == expected[0]["weights"]


def test_a_file_that_changes_while_it_is_read_is_refused(server, root, expected, monkeypatch):
    folder = write(root / "allowed" / "changing", scaled(0.5))

    def touched(path: Path) -> None:
        data = (path / WEIGHTS).read_bytes()
        (path / "next").write_bytes(data)
        (path / "next").rename(path / WEIGHTS)

    load = loading.load_params

    def load_and_touch(path, *args, **options):
        found = load(path, *args, **options)
        touched(path)
        return found

    monkeypatch.setattr(loading, "load_params", load_and_touch)
    with server.client() as client:
        refused = update(client, folder)
        assert refused.status_code == 400
        assert "changed while it was read" in refused.json()["error"]["message"]
        assert told(answer(client)) == expected[0]


def test_a_device_without_room_gets_its_old_weights_back(server, root, expected, monkeypatch):
    def full(*args, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(loading, "load_params", full)
    with server.client() as client:
        refused = update(client, root / "allowed" / "step1")
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "change_failed"
        assert told(answer(client)) == expected[0]


def test_a_server_whose_weights_are_lost_says_so(server, root, monkeypatch):
    def full(*args, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_params", full)
        patch.setattr(loading, "put_on_devices", full)
        with server.client() as client:
            assert update(client, root / "allowed" / "step1").status_code == 500
            health = client.get("/health")
            assert health.status_code == 503 and health.json()["status"] == "failed"
            assert "could not be put back" in health.json()["reason"]


# ---------------------------------------------------------------------------------- open requests


def stream(running: Running, begun: threading.Event, **fields) -> list[dict]:
    """The events of a stream, which says when it has begun."""
    asked = ASKED | {"stream": True} | fields
    with running.client() as client:
        lines = []
        with client.stream("POST", "/v1/completions", json=asked, headers=USER) as response:
            for line in response.iter_lines():
                lines.append(line)
                begun.set()
        return events("\n".join(lines))


@pytest.mark.invariance
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_no_answer_is_of_two_weights(server, root, expected, mode):
    with server.client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        begun = [threading.Event() for _ in range(3)]
        with slow_steps(server):
            open_ = [pool.submit(stream, server, event, max_tokens=60) for event in begun]
            assert all(event.wait(60) for event in begun)
            updating = pool.submit(update, client, root / "allowed" / "step1", mode=mode)
            wait_for(lambda: server.service.state is not ServiceState.READY or updating.done())
            late = pool.submit(answer, client)
            found = [one.result() for one in open_]
        done = updating.result()
        assert done.status_code == 200 and done.json()["num_paused_requests"] == 3
        for one in found:
            if mode == "abort":
                assert one[-1]["error"]["code"] == "aborted"
                assert not any("detjax" in event["choices"][0] for event in one[:-1])
                continue
            ids = [i for event in one for i in event["choices"][0]["token_ids"]]
            assert ids[:12] == expected[0]["token_ids"] and len(ids) == 60
            assert one[-1]["choices"][0]["detjax"]["weights"] == expected[0]["weights"]
        assert told(late.result()) == expected[1]
        assert server.service.stats().num_pages_held == 0


def test_two_updates_at_once_are_one(server, root, expected):
    with server.client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        begun = threading.Event()
        with slow_steps(server):
            opened = pool.submit(stream, server, begun, max_tokens=60)
            assert begun.wait(60)
            first = pool.submit(update, client, root / "allowed" / "step1")
            wait_for(lambda: server.service.state is ServiceState.UPDATING)
            for path in ("/sleep", "/wake_up", "/pause", "/resume"):
                assert client.post(path, headers=ADMIN).status_code == 409, path
            second = update(client, root / "allowed" / "step2")
            ready = client.get("/health/ready")
            opened.result()
        assert second.status_code == 409 and second.json()["error"]["code"] == "busy"
        assert ready.status_code == 503 and ready.json()["status"] == "updating"
        assert first.result().status_code == 200
        assert told(answer(client)) == expected[1]


def test_an_update_whose_client_leaves_while_it_waits_is_taken_back(server, root, expected):
    with server.client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        begun = threading.Event()
        with slow_steps(server):
            opened = pool.submit(stream, server, begun, max_tokens=100)
            assert begun.wait(60)
            with pytest.raises(httpx.ReadTimeout), server.client(timeout=0.3) as hasty:
                update(hasty, root / "allowed" / "step1")
            wait_for(lambda: server.service.state is ServiceState.READY)
            assert not opened.done()
        assert opened.result()[-1]["choices"][0]["finish_reason"] == "length"
        assert told(answer(client)) == expected[0]


# ---------------------------------------------------------------------------------- sleep and pause


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_server_sleeps_and_wakes_with_the_same_bits(server, expected, mode):
    with server.client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        begun = threading.Event()
        with slow_steps(server):
            opened = pool.submit(stream, server, begun, max_tokens=40)
            assert begun.wait(60)
            slept = client.post("/sleep", params={"level": 1, "mode": mode}, headers=ADMIN)
        assert slept.status_code == 200, slept.text
        last = opened.result()[-1]
        assert ("error" in last) == (mode == "abort")
        assert client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
        assert all(leaf.is_deleted() for leaf in weights_of(server))
        assert client.get("/health").json() == {"status": "sleeping"}
        ready = client.get("/health/ready")
        assert ready.status_code == 503 and "not on the devices" in ready.json()["reason"]
        assert client.post("/tokenize", json={"prompt": "a"}, headers=USER).status_code == 200
        assert client.post("/sleep", headers=ADMIN).status_code == 200
        late = pool.submit(answer, client)
        wait_for(lambda: server.service.turns.num_held == 1)
        assert "detjax_http_requests_held 1.0" in client.get("/metrics", headers=USER).text
        for _ in range(2):
            woken = client.post("/wake_up", headers=ADMIN)
            assert woken.status_code == 200 and woken.json() == {"status": "ready"}
        assert told(late.result()) == expected[0] == told(answer(client))
        assert client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}


def test_a_server_that_is_awake_is_woken_at_once(server):
    """It waits for no open request, and so lets other operations have their turn."""
    with server.client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        with slow_steps(server, step_s=0.1):
            late = pool.submit(answer, client, max_tokens=60, ignore_eos=True)
            wait_for(lambda: server.service.turns.num_running == 1)
            assert client.post("/wake_up", headers=ADMIN).json() == {"status": "ready"}
            assert not late.done()
        late.result()


def weights_of(running: Running) -> list:
    params = running.llm.model.params
    return jax.tree.leaves({name: leaf for name, leaf in params.items() if name != "exchange"})


def test_weights_that_were_given_up_come_by_an_update(server, root, expected):
    with server.client() as client:
        assert client.post("/sleep?level=2", headers=ADMIN).status_code == 200
        refused = client.post("/wake_up", headers=ADMIN)
        assert refused.status_code == 409 and "load weights first" in refused.text
        assert client.post("/wake_up?tags=weights", headers=ADMIN).status_code == 200
        folder = write(root / "allowed" / "spoilt", scaled(0.5))
        cut(folder)
        assert update(client, folder).status_code == 400
        done = update(client, root / "allowed" / "step2")
        assert done.status_code == 200 and done.json()["weights"] == expected[2]["weights"]
        model = client.get("/v1/models", headers=USER).json()["data"][0]
        assert model["weights"] == expected[2]["weights"]
        assert model["weight_version"] == done.json()["weight_version"]
        assert client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
        woken = client.post("/wake_up?tags=kv_cache", headers=ADMIN)
        assert woken.json() == {"status": "ready"}
        assert told(answer(client)) == expected[2]


def test_a_pause_lets_requests_wait(server, expected):
    with server.client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        assert client.post("/pause", json={"mode": "wait"}, headers=ADMIN).status_code == 200
        assert client.get("/is_paused", headers=ADMIN).json() == {"is_paused": True}
        assert client.get("/health").json() == {"status": "paused"}
        late = [pool.submit(answer, client) for _ in range(3)]
        wait_for(lambda: server.service.turns.num_held == 3)
        assert client.post("/pause", headers=ADMIN).status_code == 200
        for _ in range(2):
            assert client.post("/resume", headers=ADMIN).status_code == 200
        assert [told(one.result()) for one in late] == [expected[0]] * 3


def test_a_pause_as_skyrl_asks_for_it_keeps_no_open_request(server, expected):
    """SkyRL's query and its empty body; open requests are told, and go on."""
    keep = "/pause?mode=keep&clear_cache=false"
    with server.client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        with slow_steps(server):
            running = pool.submit(answer, client)
            wait_for(lambda: server.service.turns.num_running == 1)
            refused = client.post(keep, headers=ADMIN)
        assert refused.status_code == 409 and refused.json()["error"]["param"] == "mode"
        assert "with 1 open requests" in refused.json()["error"]["message"]
        assert told(running.result()) == expected[0]
        wait_for(lambda: server.service.turns.num_running == 0)
        assert client.post(keep, headers=ADMIN).json() == {"status": "paused"}
        late = pool.submit(answer, client)
        wait_for(lambda: server.service.turns.num_held == 1)
        assert client.post("/resume", headers=ADMIN).status_code == 200
        assert told(late.result()) == expected[0]


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/sleep", "level=3"), ("/sleep", "level=x"), ("/sleep", "mode=keep"), ("/sleep", "a=1"),
        ("/sleep", "level=1&level=2"), ("/wake_up", "tags=all"), ("/pause", "mode=kept"),
        ("/pause", "clear_cache=perhaps"), ("/resume", "now=1"),
    ],
)  # fmt: skip
def test_queries_that_say_something_else_are_refused(server, path, query):
    with server.client() as client:
        refused = client.post(f"{path}?{query}", headers=ADMIN)
        assert refused.status_code == 400 and refused.json()["error"]["message"]
        assert server.service.state is ServiceState.READY


def test_requests_that_wait_have_limits(own_llm, root, server):
    options = WebOptions(admin_keys=("admin",))
    service = make_service(own_llm, request_s=0.3, max_held=1)
    with served(service, own_llm, options=options) as running, running.client() as client:
        assert client.post("/pause", headers=ADMIN).status_code == 200
        with concurrent.futures.ThreadPoolExecutor() as pool:
            first = pool.submit(client.post, "/v1/completions", json=ASKED)
            wait_for(lambda: service.turns.num_held == 1)
            second = client.post("/v1/completions", json=ASKED)
            assert second.status_code == 429 and "paused" in second.text
            assert first.result().status_code == 504


def test_a_server_that_stops_refuses_requests_that_wait():
    async def scenario() -> None:
        service = small_service()
        app = make_app(service, WebOptions(admin_keys=("admin",)))
        service.turns.begin(Hold.PAUSED)
        late = asyncio.create_task(post(app, "/v1/completions", [body()]))
        while not service.turns.num_held:
            await asyncio.sleep(0.001)
        assert await service.drain(5.0) == 0
        refused = await late
        assert refused.status == 503 and refused.json()["error"]["code"] == "draining"

    asyncio.run(scenario())
