# SPDX-License-Identifier: Apache-2.0
"""`--lora-modules` of `detjax.generate`: each prompt with its adapter, checked in other ways."""

import json
from pathlib import Path

import pytest

from detjax import audit, generate, replay
from detjax.cli.errors import InputError
from detjax.cli.options import read_lora_modules
from detjax.models.bundled import bundled_model_path
from detjax.models.hf_config import load_config
from detjax.testing.adapters import write_adapter_folder
from detjax.testing.folders import SMALL_MIXTURE, write_model_folder

PROMPT = "The old house"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root, config = tmp_path_factory.mktemp("modules"), load_config(bundled_model_path())
    return {
        name: write_adapter_folder(root / name, config, seed=seed, rank=4)
        for seed, name in enumerate(("sea", "hill"))
    }


def run(capsys, *options: str) -> list[dict]:
    code = generate.main(["--format", "jsonl", "-q", "--max-tokens", "4", *options])
    told = capsys.readouterr()
    assert code == 0, told.err
    return [json.loads(line) for line in told.out.splitlines()]


@pytest.mark.slow
def test_prompts_have_adapters_of_their_own_and_are_the_same_in_other_runs(
    capsys, tmp_path, folders
):
    """One batch of both and none, checked against another order, batch size and neighbours."""
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    prompts = tmp_path / "prompts.jsonl"
    lines = ({"prompt": PROMPT, "lora": name} for name in ("sea", "hill", ""))
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    receipts = tmp_path / "receipts.jsonl"
    got = run(
        capsys, "--prompts-file", str(prompts), "--lora-modules", *modules, "--check", "--repeat",
        "2", "--receipts", str(receipts),
    )  # fmt: skip
    assert len({one["digest"] for one in got}) == 3
    assert [len(one.get("adapter", "")) for one in got] == [64, 64, 0]
    (alone,) = run(capsys, "-p", PROMPT, "--lora-modules", modules[1])
    assert alone["digest"] == got[1]["digest"] and alone["adapter"] == got[1]["adapter"]
    (plain,) = run(capsys, "-p", PROMPT)
    assert plain["digest"] == got[2]["digest"]
    command = [str(receipts), "--cache-dir", "none", "--lora-modules"]
    assert replay.main([*command, *modules]) == 0
    assert "0 receipts differ" in capsys.readouterr().out
    assert replay.main([*command, modules[0]]) == 2
    assert "receipt 2 was made with the adapter" in capsys.readouterr().err


@pytest.mark.slow
def test_receipts_of_adapters_of_experts_are_replayed_and_audited(capsys, tmp_path):
    base = write_model_folder(tmp_path / "base", SMALL_MIXTURE)
    adapter = write_adapter_folder(
        tmp_path / "sea", load_config(base), seed=1, rank=4, has_experts=True
    )
    receipts, modules = tmp_path / "receipts.jsonl", ["--lora-modules", f"sea={adapter}"]
    options = ["-m", str(base), "-p", PROMPT]
    (plain,) = run(capsys, *options)
    (adapted,) = run(
        capsys, *options, *modules, "--max-expert-lora-rank", "4", "--receipts", str(receipts)
    )
    assert adapted["digest"] != plain["digest"] and len(adapted["adapter"]) == 64
    for command in (replay, audit):
        assert command.main([str(receipts), "--model", str(base), *modules]) == 0
        assert "0 receipts differ" in capsys.readouterr().out
    other = write_adapter_folder(tmp_path / "hill", load_config(base), seed=2, rank=4)
    code = audit.main([str(receipts), "--model", str(base), "--lora-modules", f"sea={other}"])
    assert code == 2 and "was made with the adapter" in capsys.readouterr().err


@pytest.mark.slow
def test_names_and_folders_that_cannot_be_are_refused(capsys, tmp_path, folders):
    sea = folders["sea"]
    assert read_lora_modules([f"a={sea}", json.dumps({"name": "b", "path": str(sea)})]) == {
        "a": sea, "b": sea,
    }  # fmt: skip
    for given, message in (
        (["a"], "give NAME=DIR"),
        ([f"={sea}"], "give NAME=DIR"),
        (['{"name": 3}'], "give NAME=DIR"),
        (["{"], "is not JSON"),
        ([f"a={sea}", f"a={sea}"], "'a' is given twice"),
        (["a=/nowhere"], "a=/nowhere is no folder; give one that PEFT"),
    ):
        with pytest.raises(InputError, match=message):
            read_lora_modules(given)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT, "lora": "lake"}))
    assert generate.main(["--prompts-file", str(prompts), "--lora-modules", f"sea={sea}"]) == 2
    assert "`lora` is 'lake', which is no name of --lora-modules" in capsys.readouterr().err
    assert generate.main(["-p", PROMPT, "--max-loras", "3"]) == 2
    assert "--enable-lora" in capsys.readouterr().err
    small = ["-p", PROMPT, "--lora-modules", f"sea={sea}", "--max-lora-rank", "2"]
    assert generate.main(small) == 2
    assert "rank 4, more than max_lora_rank=2" in capsys.readouterr().err
