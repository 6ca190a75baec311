# SPDX-License-Identifier: Apache-2.0
"""Hashes of models and of the code: the same wherever they lie, others for any other byte."""

import shutil

import pytest

from detjax.compilation import source
from detjax.models import identity
from detjax.models.bundled import bundled_model_path
from detjax.models.identity import copy_text_files, folder_hash, model_hash, text_files


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(bundled_model_path(), tmp_path / "model")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"]
)
@pytest.mark.parametrize("at", [0, -1])
def test_any_byte_that_counts_changes_the_hash_of_a_model(folder, name, at, monkeypatch):
    monkeypatch.setattr(identity, "PART_BYTES", 2**20)  # several parts
    expected = model_hash(bundled_model_path())
    (folder / "README.md").write_text("another one")
    assert model_hash(folder) == expected
    content = bytearray((folder / name).read_bytes())
    content[at] ^= 1
    (folder / name).write_bytes(content)
    assert model_hash(folder) != expected


def test_every_file_that_a_prompt_depends_on_counts_and_is_copied(folder, tmp_path):
    names = ["additional_chat_templates/tool_use.jinja", "chat_template.jinja"]
    names += ["chat_template.json", "special_tokens_map.json"]
    for name in names:
        before = model_hash(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
        assert model_hash(folder) != before
    (tmp_path / "copy").mkdir()
    copy_text_files(folder, tmp_path / "copy")
    assert text_files(tmp_path / "copy") == [
        name for name in text_files(folder) if name != "config.json"
    ]
    assert set(names) < set(text_files(folder))


def test_the_hash_of_a_folder_has_names_and_contents(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("x")
    before = folder_hash(tmp_path)
    (tmp_path / "a" / "empty").write_text("")
    with_empty = folder_hash(tmp_path)
    (tmp_path / "a" / "b" / "c").rename(tmp_path / "a" / "b" / "d")
    assert len({before, with_empty, folder_hash(tmp_path)}) == 3


def test_the_hash_of_the_code_has_every_file(tmp_path, monkeypatch):
    package, expected = source.Path(source.__file__).parents[1], source.source_hash()
    copy = tmp_path / "detjax"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "bundled"))
    shutil.copytree(package / "models" / "bundled", copy / "models" / "bundled")
    monkeypatch.setattr(source, "__file__", str(copy / "compilation" / "source.py"))
    of_copy = source.source_hash.__wrapped__
    assert of_copy() == expected
    (copy / "models" / "rope.py").write_text("")
    assert of_copy() != expected


def test_compiled_programs_of_another_build_lie_elsewhere(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    here = source.compile_key()
    assert source.compile_key() == here and len(here) == 16
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=2")
    assert source.compile_key() != here
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    monkeypatch.setattr(source, "source_hash", lambda: "another line of code")
    assert source.compile_key() != here
