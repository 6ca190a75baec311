# SPDX-License-Identifier: Apache-2.0
"""Options, prompts and model folders at random: an exit code that means something, no traceback.

The engine is a fake; everything before it is real, the loading of weights included.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save

from detjax import generate
from detjax.cli import errors
from detjax.cli.errors import bad_input
from detjax.cli.model import OpenModel
from detjax.cli.parser import make_parser
from detjax.models import chat_template
from detjax.models.hf_config import config_from_hf
from detjax.models.loading import load_model
from detjax.models.params import tensor_specs
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh

CODES = {errors.OK, errors.BAD_INPUT, errors.BITS_DIFFER, errors.INTERRUPTED}

NUMBERS = ("0", "1", "2", "3", "7", "64", "-1", "1e3", "nan", "inf", "0.5", "1e-400", "9" * 30, "x")
TEXTS = ("a", "", "-", "hello world", "</s>", "\udcff", "\0", "é" * 30, "x" * 100, "\u2028")
NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 10**30, 2**63, 1e308, float("nan"), float("inf"), 0.5, "",
    "x", "<s>", "\ud800", "x" * 3000, [], [[]], {}, {"a": 1}, [1, 2], ["a"], {"content": 7},
    "{{ messages }}", "{{ 10 ** 100000000 % 7 }}", "{% for", "linear", "yarn", "llama3",
)  # fmt: skip


def choose(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


# -------------------------------------------------------------------------------- what is broken


NOT_RANDOM = {
    "--model",
    "--prompt",
    "--cache-dir",
    "--prompts-file",
    "--receipts",  # a file of that name
    "--sign",
    "--check-process",  # starts a process, which would take longer than all cases
}


def random_argv(rng: np.random.Generator, folder: Path) -> list[str]:
    """Options with values that fit, and some that do not."""
    argv: list[str] = []
    for action in make_parser()._actions[1:]:
        name = action.option_strings[0]
        if name in NOT_RANDOM or rng.random() > 0.07:
            continue
        if action.nargs == 0:
            argv.append(name)
        else:
            choices = action.choices or (TEXTS if rng.random() < 0.2 else NUMBERS)
            argv.append(f"{name}={choose(rng, tuple(choices))}")
    for _ in range(int(rng.integers(0, 3))):
        argv.append(f"--prompt={choose(rng, TEXTS)}")
    if rng.random() < 0.5:
        argv.append(f"--prompts-file={random_prompts(rng, folder)}")
    return [arg for arg in argv if "/" not in arg or arg.startswith("--prompts-file")]


def random_prompts(rng: np.random.Generator, folder: Path) -> Path:
    """A file of prompts, good or not."""
    lines = (
        '{"prompt": "a"}',
        '{"messages": [{"role": "user", "content": "a</s>b"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}',
        '{"messages": [{"role": 7}]}',
        '{"messages": [{}, 7]}',
        '{"prompt": "\\ud800"}',
        "[" * 5000,
        "plain",
        "",
        "\x00",
    )
    path = folder / f"p{choose(rng, ('.txt', '.jsonl', '.jsonl', ''))}"
    content = "\n".join(choose(rng, lines) for _ in range(int(rng.integers(0, 3)))).encode()
    path.write_bytes(broken_bytes(rng, content) if rng.random() < 0.2 else content)
    return path


def broken_bytes(rng: np.random.Generator, content: bytes) -> bytes:
    """Some bytes changed, cut out or put in."""
    data, at = bytearray(content), int(rng.integers(len(content) + 1))
    match int(rng.integers(4)):
        case 0:
            return bytes(data[:at])
        case 1:
            return bytes(data[:at]) + rng.bytes(int(rng.integers(1, 9))) + bytes(data[at:])
        case 2:
            return bytes(data[:at]) + bytes(data[at + int(rng.integers(1, 9)) :])
        case _:
            for _ in range(int(rng.integers(1, 4))):
                if data:
                    data[int(rng.integers(min(len(data), 600)))] ^= 1 << int(rng.integers(8))
            return bytes(data)


def broken_json(rng: np.random.Generator, content: bytes) -> bytes:
    """One value somewhere replaced, taken out or put in."""
    try:
        top = json.loads(content)
    except ValueError:
        return content
    value = top
    while isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = choose(rng, keys)
        if not isinstance(value[key], dict | list) or rng.random() < 0.2:
            action = rng.random()
            if action < 0.7:
                value[key] = choose(rng, NASTY)
            elif action < 0.85 or isinstance(value, list):
                del value[key]
            else:
                value[choose(rng, ("x", "", key + "x"))] = choose(rng, NASTY)
            break
        value = value[key]
    text = json.dumps(top)
    return text.replace('"', '"' + "[" * 3000, 1).encode() if rng.random() < 0.02 else text.encode()


def break_folder(rng: np.random.Generator, folder: Path) -> str:
    """Do something to a model's files; say what."""
    path = choose(rng, sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors")))
    content = path.read_bytes()
    action = rng.random()
    if action < 0.04:
        path.unlink()
    elif action < 0.08:
        path.unlink()
        if rng.random() < 0.3:
            path.mkdir()
        else:
            path.symlink_to(choose(rng, (path, "/dev/null", "/etc/passwd")))
    elif action < 0.4 or path.suffix == ".safetensors":
        path.write_bytes(broken_bytes(rng, content))
    else:
        path.write_bytes(broken_json(rng, content))
    return path.name


# ---------------------------------------------------------------------------------------- cases


@pytest.fixture
def fuzz(tmp_path, toy, fake_model, monkeypatch) -> Callable[[int, bool], int]:
    """Run a case by its number; the second argument says whether the folder is broken."""
    monkeypatch.setattr(chat_template, "RENDER_S", 0.5)
    monkeypatch.chdir(tmp_path)
    whole = toy.write_model(tmp_path / "whole", chat_template=toy.template)
    config = toy.config | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    (whole / "config.json").write_text(json.dumps(config))
    (whole / "generation_config.json").write_text('{"eos_token_id": [257]}')
    specs = jax.tree.leaves(tensor_specs(config_from_hf(config), tp=1, vocab_block=128))
    weights = save({spec.hf_name: np.zeros(spec.hf_shape, np.float32) for spec in specs})
    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    files["model.safetensors"] = weights
    mesh = make_mesh(1, 1)

    def open_model(args, files, progress, max_len) -> OpenModel:
        with bad_input():
            model = load_model(
                str(files.folder), profile=NumericsProfile(), mesh=mesh, backend=Backend.PORTABLE,
                max_len=max_len,
            )  # fmt: skip
        return fake_model(args=args, files=files, model=model, answer=toy.echo)

    def run(case: int, breaks_folder: bool) -> int:
        rng = np.random.default_rng(case)
        folder = tmp_path / str(case)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        broken = ""
        if breaks_folder:
            broken = break_folder(rng, folder)
            argv = ["--prompt=a"]
            if "tokenizer" in broken:
                argv.append("--chat")
        else:
            argv = random_argv(rng, tmp_path)
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin\n")))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = generate.main(["--model", str(folder), *argv], open_model=open_model)
            except SystemExit as end:  # --help
                code = int(str(end.code))
        said = err.getvalue()
        what = f"case {case}: {broken} {argv}\n{said}"
        assert code in CODES and "Traceback" not in said, what
        is_said = said.splitlines()[-1:] != [] and said.splitlines()[-1].startswith("error: ")
        assert is_said == (code == errors.BAD_INPUT), what
        return code

    return run


@pytest.mark.parametrize("num_cases", [250, pytest.param(5000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "breaks_folder",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["options", "folders"],
)
def test_any_input_ends_with_an_exit_code_that_means_something(fuzz, breaks_folder, num_cases):
    codes = [fuzz(case, breaks_folder) for case in range(num_cases)]
    # Neither is every case refused at its first option, nor is every one fine.
    assert codes.count(errors.OK) > num_cases // 50
    assert codes.count(errors.BAD_INPUT) > num_cases // 50
