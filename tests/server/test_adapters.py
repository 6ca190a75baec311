# SPDX-License-Identifier: Apache-2.0
"""Adapters by vLLM's names: `LLM.generate(lora_request=...)`, `model` over HTTP, receipts."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import detjax
from detjax import audit, serve
from detjax.engine.engine import Engine
from detjax.models.bundled import bundled_model_path
from detjax.models.hf_config import load_config
from detjax.proof.receipt import Receipt
from detjax.server.options import WebOptions
from detjax.server.served_adapters import ServedAdapters
from detjax.testing.adapters import write_adapter_folder

from .conftest import Running, make_service, served

ADMIN = {"Authorization": "Bearer admin"}
PROMPT = "The old house by the sea"
SAMPLING = detjax.SamplingParams(max_tokens=8, temperature=0.8, seed=5)
ASKED = {
    "prompt": PROMPT, "max_tokens": 8, "temperature": 0.8, "seed": 5, "return_token_ids": True,
    "receipt": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root, config = tmp_path_factory.mktemp("adapters"), load_config(bundled_model_path())
    (root / "allowed").mkdir()
    for seed, name in enumerate(("allowed/sea", "allowed/hill", "outside")):
        write_adapter_folder(root / name, config, seed=seed, rank=4)
    write_adapter_folder(root / "allowed" / "dora", config, seed=9, rank=4, use_dora=True)
    write_adapter_folder(root / "wide", config, seed=9, rank=32)
    return root


@pytest.fixture(scope="module")
def lora_llm() -> detjax.LLM:
    return detjax.LLM(
        max_len=128, batch_size=4, max_waiting=64, show_progress=False, self_check="start",
        enable_lora=True, max_loras=2,
    )  # fmt: skip


def request_of(root: Path, name: str, number: int = 1) -> detjax.LoRARequest:
    return detjax.LoRARequest(name, number, str(root / "allowed" / name))


@pytest.fixture(scope="module")
def expected(lora_llm, root) -> dict[str, detjax.CompletionOutput]:
    """The answer of the model alone and of each adapter, one after the other."""
    found = {"novels-6m": lora_llm.generate(PROMPT, SAMPLING)[0].outputs[0]}
    for name in ("sea", "hill"):
        asked = request_of(root, name)
        found[name] = lora_llm.generate(PROMPT, SAMPLING, lora_request=asked)[0].outputs[0]
    assert len({one.digest() for one in found.values()}) == 3
    return found


@pytest.mark.slow
def test_generate_takes_vllms_lora_request_for_all_prompts_or_for_each(lora_llm, root, expected):
    sea, hill = request_of(root, "sea"), request_of(root, "hill", 2)
    outputs = lora_llm.generate([PROMPT] * 4, SAMPLING, lora_request=[hill, None, sea, hill])
    got = [one.outputs[0] for one in outputs]
    names = ("hill", "novels-6m", "sea", "hill")
    assert [one.digest() for one in got] == [expected[name].digest() for name in names]
    assert [one.adapter for one in got] == [expected[name].adapter for name in names]
    assert got[1].adapter == "" and len(got[0].adapter) == 64
    again = detjax.CompletionOutput.from_dict(got[0].as_dict())
    assert again.adapter == got[0].adapter
    with pytest.raises(ValueError, match="2 prompts and 1 lora_request"):
        lora_llm.generate([PROMPT] * 2, SAMPLING, lora_request=[sea])
    with pytest.raises(ValueError, match="lora_path, the third argument"):
        detjax.LoRARequest("sea", 0, str(root))
    with pytest.raises(ValueError, match="needs a name and the folder"):
        detjax.LoRARequest("sea", 1)
    with pytest.raises(ValueError, match="use_dora=True"):
        lora_llm.load_adapter(root / "allowed" / "dora")


@pytest.mark.slow
def test_rows_of_the_model_alone_have_the_bits_of_a_model_without_room(expected, llm):
    plain = llm.generate(PROMPT, SAMPLING)[0].outputs[0]
    assert plain.digest() == expected["novels-6m"].digest()
    with pytest.raises(ValueError, match="give enable_lora=True"):
        llm.generate(PROMPT, SAMPLING, lora_request=detjax.LoRARequest("a", 1, "/tmp"))
    with pytest.raises(ValueError, match="max_loras=3 is a size of adapters; set enable_lora, too"):
        detjax.LLM(max_loras=3, show_progress=False, max_len=64)


@pytest.mark.slow
def test_a_folder_is_read_again_when_its_files_change(lora_llm, tmp_path):
    config = load_config(bundled_model_path())
    folder = write_adapter_folder(tmp_path / "a", config, seed=20, rank=2)
    asked = detjax.LoRARequest("a", 1, str(folder))
    first = lora_llm.generate(PROMPT, SAMPLING, lora_request=asked)[0].outputs[0]
    known = lora_llm.engine.stats().num_adapters
    write_adapter_folder(folder, config, seed=21, rank=2)
    second = lora_llm.generate(PROMPT, SAMPLING, lora_request=asked)[0].outputs[0]
    assert first.adapter != second.adapter and first.digest() != second.digest()
    assert lora_llm.engine.stats().num_adapters == known, "the old one is forgotten"


@pytest.fixture(scope="module")
def server(lora_llm, root) -> Iterator[Running]:
    service = make_service(lora_llm)
    adapters = ServedAdapters(lora_llm.engine, "novels-6m")
    adapters.load("sea", root / "allowed" / "sea")
    service._model = dataclasses.replace(service.model, adapters=adapters)
    options = WebOptions(admin_keys=("admin",), weights_dirs=((root / "allowed").resolve(),))
    with served(service, lora_llm, options=options) as running:
        yield running


def answer(client: httpx.Client, model: str) -> dict:
    response = client.post("/v1/completions", json=ASKED | {"model": model})
    assert response.status_code == 200, response.text
    return response.json()


def load(client: httpx.Client, name: str, path: Path, **fields) -> httpx.Response:
    asked = {"lora_name": name, "lora_path": str(path)} | fields
    return client.post("/v1/load_lora_adapter", json=asked, headers=ADMIN)


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


@pytest.mark.slow
def test_the_model_of_a_request_may_be_an_adapter(server, expected, root):
    with server.client() as client:
        for name in ("sea", "novels-6m"):
            told = answer(client, name)
            proof = told["choices"][0]["detjax"]
            assert told["model"] == name and proof["digest"] == expected[name].digest()
            assert proof.get("adapter", "") == expected[name].adapter
        chat = {"model": "sea", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert client.post("/v1/chat/completions", json=chat).json()["model"] == "sea"
        wrong = client.post("/v1/completions", json=ASKED | {"model": "hill"})
        assert wrong.status_code == 404 and wrong.json()["error"]["code"] == "model_not_found"
        assert "'hill' is not served here; 'novels-6m' and 'sea' are" in wrong.text


@pytest.mark.slow
def test_adapters_are_loaded_and_unloaded_as_in_vllm(server, expected, root):
    allowed = root / "allowed"
    with server.client() as client:
        done = load(client, "hill", allowed / "hill")
        assert done.status_code == 200
        assert done.text == "Success: LoRA adapter 'hill' added successfully."
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [
            ("novels-6m", None), ("sea", "novels-6m"), ("hill", "novels-6m"),
        ]  # fmt: skip
        assert client.get("/v1/models/hill").json()["adapter"] == expected["hill"].adapter
        proof = answer(client, "hill")["choices"][0]["detjax"]
        assert proof["digest"] == expected["hill"].digest()
        assert "detjax_adapters " in client.get("/metrics").text
        assert load(client, "hill", allowed / "hill").status_code == 400
        assert load(client, "novels-6m", allowed / "hill").status_code == 400
        outside = load(client, "out", root / "outside")
        assert outside.status_code == 403 and outside.json()["error"]["param"] == "lora_path"
        refused = load(client, "dora", allowed / "dora")
        assert refused.status_code == 400 and "use_dora=True" in refused.json()["error"]["message"]
        gone = unload(client, "hill")
        assert gone.text == "Success: LoRA adapter 'hill' removed successfully."
        assert unload(client, "hill").status_code == 404
        asked = client.post("/v1/completions", json=ASKED | {"model": "hill"})
        assert asked.status_code == 404
        no_key = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b"})
        assert no_key.status_code == 401


def test_an_adapter_is_replaced_in_place_as_trainers_ask_for_it(server, expected, root):
    """By vLLM's field, then by SkyRL's route; one that does not load leaves the old one."""
    allowed = root / "allowed"

    def digest(client) -> str:
        return answer(client, "policy")["choices"][0]["detjax"]["digest"]

    def reload(client, name: str, folder: Path) -> httpx.Response:
        asked = {"lora_name": name, "lora_path": str(folder)}
        return client.post("/skyrl/v1/load_lora_adapter", json=asked, headers=ADMIN)

    with server.client() as client:
        assert load(client, "policy", allowed / "hill", load_inplace=True).status_code == 200
        assert digest(client) == expected["hill"].digest()
        assert load(client, "policy", allowed / "sea", load_inplace=True).status_code == 200
        assert digest(client) == expected["sea"].digest()
        assert answer(client, "sea")["choices"][0]["detjax"]["digest"] == digest(client)
        assert reload(client, "policy", allowed / "hill").status_code == 200
        assert digest(client) == expected["hill"].digest()
        assert answer(client, "sea")["choices"][0]["detjax"]["digest"] == expected["sea"].digest()
        for refused, field in ((reload(client, "policy", allowed / "dora"), "lora_path"),
                               (reload(client, "novels-6m", allowed / "sea"), "lora_name"),
                               (load(client, "policy", allowed / "sea"), "lora_name")):  # fmt: skip
            assert refused.status_code == 400 and refused.json()["error"]["param"] == field
        assert digest(client) == expected["hill"].digest()
        assert unload(client, "policy").status_code == 200


@pytest.mark.slow
def test_receipts_name_the_adapter_and_an_audit_needs_its_folder(server, root, tmp_path, capfd):
    with server.client() as client:
        lines = [
            answer(client, name)["choices"][0]["detjax"]["receipt"] for name in ("sea", "novels-6m")
        ]
    receipts = [Receipt.from_json(line) for line in lines]
    assert len(receipts[0].adapter) == 64 and receipts[1].adapter == ""
    assert "adapter" not in receipts[1].request
    file = tmp_path / "receipts.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines))
    command = [str(file), "--model", str(bundled_model_path()), "--cache-dir", "none"]
    folder = root / "allowed" / "sea"
    assert audit.main([*command, "--lora-modules", f"any={folder}"]) == 0
    assert "0 receipts differ" in capfd.readouterr().out
    assert audit.main(command) == 2
    assert "give its folder as NAME=DIR" in capfd.readouterr().err
    forged = dataclasses.replace(receipts[0], request=receipts[0].request | {"adapter": "0" * 64})
    file.write_text(forged.to_json() + "\n")
    assert audit.main([*command, "--lora-modules", f"any={folder}"]) == 2
    assert "was made with the adapter 0000" in capfd.readouterr().err
    swapped = {key: v for key, v in receipts[0].request.items() if key != "adapter"}
    file.write_text(dataclasses.replace(receipts[0], request=swapped).to_json() + "\n")
    assert audit.main(command) == 3, "the model alone answers otherwise"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "says"),
    [("wide", "rank 32, more than max_lora_rank=16"), ("allowed/dora", "use_dora=True")],
)
def test_a_server_that_refuses_an_adapter_has_compiled_nothing(
    root, monkeypatch, capsys, folder, says
):
    def compile(*args, **kwargs):
        raise AssertionError("a refused adapter must not cost minutes")

    monkeypatch.setattr(Engine, "compile", compile)
    modules = ["--lora-modules", f"sea={root / folder}"]
    assert serve.main(["--port", "0", "--cache-dir", "none", *modules]) == 2
    assert f"--lora-modules sea: {root}" in (said := capsys.readouterr().err) and says in said
