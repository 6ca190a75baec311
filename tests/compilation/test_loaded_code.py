# SPDX-License-Identifier: Apache-2.0
"""The hash of loaded code: the same in every process that runs the same, another otherwise."""

import ast
import functools
import logging
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detjax.compilation import kept_programs, loaded_code, source
from detjax.compilation.loaded_code import (
    UnknownCodeError,
    loaded_code_hash,
    reached_modules,
    this_moment,
)

PACKAGE_FOLDER = Path(loaded_code.__file__).parent
PACKAGE_FILES = [path.relative_to(PACKAGE_FOLDER) for path in PACKAGE_FOLDER.rglob("*.py")]
ROOT = "detjax.compilation.kept_programs"
PROGRAMS = "detjax.engine.running.programs"


def hash_in_a_process(root: str, before: str = "", **env: str) -> str:
    code = (
        f"{before}\nfrom detjax.compilation.loaded_code import *\nprint(loaded_code_hash({root!r}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return found.stdout.strip()


@pytest.mark.slow
def test_processes_that_run_the_same_have_the_same_hash():
    """Whatever the seed of their sets, what they have imported before, and what they have run."""
    used = (
        "import detjax\n"
        "llm = detjax.LLM('bundled', num_pages=4, batch_size=1, show_progress=False)\n"
        "llm.generate('a', detjax.SamplingParams(max_tokens=2))"
    )
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(hash_in_a_process, PROGRAMS, PYTHONHASHSEED="1")
        other = pool.submit(hash_in_a_process, PROGRAMS, used, PYTHONHASHSEED="2")
    assert first.result() == other.result()
    assert len(first.result()) == 64


@pytest.mark.slow
def test_a_constant_that_a_process_has_set_counts_in_it():
    changed = "import detjax.compilation.source as s\ns.TOOLCHAIN = ('another',)"
    plain = hash_in_a_process(ROOT)
    assert plain == hash_in_a_process(ROOT, "import detjax.engine.running.programs")
    assert plain != hash_in_a_process(ROOT, changed)


def test_the_modules_are_those_that_are_reached():
    reached = reached_modules(PROGRAMS)
    assert PROGRAMS in reached
    assert {"detjax.pallas_kernels.backend", "detjax.models.decoder"} <= set(reached)
    assert "detjax.server" not in reached
    assert not [name for name in reached if name.startswith("detjax.cli")]


def parsed_imports(text: str) -> set[str]:
    """What `_imported` gives, by Python's own parser."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("detjax.")}


def modules_in(names: Iterable[str]) -> set[str]:
    return {name for name in names if loaded_code._file(name)}


@pytest.mark.parametrize("file", sorted(PACKAGE_FILES), ids=str)
def test_every_import_of_the_package_is_found(file):
    text = (PACKAGE_FOLDER / file).read_text(encoding="utf-8")
    assert modules_in(loaded_code._imported(text)) == modules_in(parsed_imports(text))


def test_imports_of_every_form_are_found():
    text = (
        "import detjax.numerics\n"
        "def f():\n    from detjax.models import (\n        decoder,  # the model\n"
        "        layers as other,\n    )\n"
        "from detjax.compilation import donation, source\nimport jax\nfrom jax import numpy\n"
    )
    found = modules_in(loaded_code._imported(text))
    assert found == modules_in(parsed_imports(text)) and len(found) == 7


def other_code(function: types.FunctionType) -> types.FunctionType:
    """A function as if its file said something else."""
    code = function.__code__.replace(co_consts=(*function.__code__.co_consts, "other"))
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def undecorated(function: Any) -> types.FunctionType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@pytest.mark.parametrize("what", ["constant", "new", "method", "defaults", "keywords", "class"])
def test_whatever_is_changed_in_a_module_counts(monkeypatch, what):
    from detjax.compilation import kept_programs

    cache = kept_programs.VerifiedCache
    before = loaded_code_hash(ROOT)
    if what == "constant":
        monkeypatch.setattr(kept_programs, "_ENDING", "-x")
    elif what == "new":
        monkeypatch.setattr(kept_programs, "more", 1, raising=False)
    elif what == "method":
        monkeypatch.setattr(cache, "file", other_code(undecorated(cache.file)))
    elif what == "defaults":
        monkeypatch.setattr(undecorated(cache.get), "__defaults__", ("key",))
    elif what == "keywords":
        monkeypatch.setattr(undecorated(source.compile_key), "__kwdefaults__", {"more": 1})
    else:
        monkeypatch.setattr(cache, "more", 1, raising=False)
    assert loaded_code_hash(ROOT) != before
    monkeypatch.undo()
    assert loaded_code_hash(ROOT) == before


def closed_over(value: object) -> Any:
    """A function as one of the package's modules would make it."""

    def inner():
        return value

    inner.__module__ = ROOT
    return inner


DIFFERENT = [
    (1, 2), (1, True), (1, 1.0), (0.0, -0.0), ("a", b"a"), ("1", 1), (None, False),
    ((1, 2), (2, 1)), ((1, (2,)), (1, 2)), ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}),
    (np.array([1, 2]), np.array([1, 3])), (np.array([1], np.int32), np.array([1], np.int64)),
    (np.zeros((2, 3)), np.zeros((3, 2))), (np.array([0.0]), np.array([-0.0])),
    (functools.partial(min, 1), functools.partial(min, 2)), (min, max), (np.sum, np.max),
    (closed_over(1), closed_over(2)), (functools.cache(closed_over(1)), closed_over(1)),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=map(str, range(len(DIFFERENT))))
def test_values_that_differ_have_other_hashes(one, other):
    assert loaded_code_hash(ROOT, one) != loaded_code_hash(ROOT, other)
    assert loaded_code_hash(ROOT, one) != loaded_code_hash(ROOT)
    assert loaded_code_hash(ROOT, one) == loaded_code_hash(ROOT, one)


def test_values_of_the_same_content_have_the_same_hash():
    same = [
        (closed_over((1, "a")), closed_over((1, "a"))),
        ({3, 1, 2}, {2, 1, 3}),
        (np.arange(9), np.arange(9)),
        (functools.partial(min, 1), functools.partial(min, 1)),
    ]
    for one, other in same:
        assert loaded_code_hash(ROOT, one) == loaded_code_hash(ROOT, other)


def test_what_a_logger_says_does_not_count():
    logger = logging.getLogger("detjax.of_a_test")
    before = loaded_code_hash(ROOT, logger)
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.NullHandler())
    assert loaded_code_hash(ROOT, logger) == before
    assert loaded_code_hash(ROOT, logging.getLogger("detjax.another")) != before


def a_function():
    """Of a test: its file is no part of the package."""


class Outside:
    """Of a test."""

    def __init__(self):
        self.lock = 1


@pytest.mark.parametrize(
    "value", [a_function, Outside, Outside(), object, iter([1]), closed_over(a_function)]
)
def test_what_cannot_be_told_apart_is_an_error(value):
    if value is object:  # a type of Python's own counts by its name
        loaded_code_hash(ROOT, value)
        return
    with pytest.raises(UnknownCodeError, match="an argument"):
        loaded_code_hash(ROOT, value)


def test_a_function_of_a_test_in_a_module_is_an_error(monkeypatch):
    monkeypatch.setattr(source, "cpu_arch", a_function)
    with pytest.raises(UnknownCodeError, match=r"detjax\.compilation\.source\.cpu_arch is from "):
        loaded_code_hash(ROOT)


def test_threads_share_a_walk_that_begins_after_they_asked(monkeypatch):
    """And never one that began before: what a thread has changed counts in what it asks for."""
    walks: list[int] = []
    entered, go_on = threading.Event(), threading.Event()
    plain = loaded_code._Walk.add_module

    def add_module(self, module):
        if module.__name__ == reached_modules(ROOT)[0]:
            walks.append(1)
            if len(walks) == 1:
                entered.set()
                assert go_on.wait(60)
        plain(self, module)

    before = loaded_code_hash(ROOT)
    monkeypatch.setattr(loaded_code._Walk, "add_module", add_module)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(loaded_code_hash, ROOT)
        assert entered.wait(60)
        monkeypatch.setattr(kept_programs, "_ENDING", "-x")
        later = [pool.submit(loaded_code_hash, ROOT) for _ in range(8)]
        go_on.set()
        found = {its.result() for its in later}
        first.result()
    assert len(found) == 1
    assert before not in found
    assert 2 <= len(walks) < 9


def test_those_of_one_request_share_a_walk(monkeypatch):
    """Another request sees what has changed since."""
    walks: list[str] = []
    plain = loaded_code._Walk.add_module

    def add_module(self, module):
        walks.append(module.__name__)
        plain(self, module)

    before = loaded_code_hash(ROOT)
    with monkeypatch.context() as patched:
        patched.setattr(loaded_code._Walk, "add_module", add_module)
        asked = this_moment()
        assert {loaded_code_hash(ROOT, asked=asked) for _ in range(3)} == {before}
        assert len(walks) == len(set(walks)) == len(reached_modules(ROOT))
    monkeypatch.setattr(kept_programs, "_ENDING", "-x")
    assert loaded_code_hash(ROOT, asked=asked) == before
    later = loaded_code_hash(ROOT, asked=this_moment())
    assert later == loaded_code_hash(ROOT) != before


def test_code_counts_by_what_it_does_and_is_walked_once():
    def defined(text: str) -> types.CodeType:
        held: dict[str, Any] = {}
        exec(text, held)
        return held["f"].__code__

    one = defined("def f(x):\n    return [y + 1 for y in x]")
    same = defined("\n\n# lower in its file\ndef f(x):\n    return [y + 1 for y in x]")
    others = [
        defined("def f(x):\n    return [y + 1.0 for y in x]"),
        defined("def f(x):\n    return [y + True for y in x]"),
        defined("def f(x):\n    return [y + 2 for y in x]"),
        defined("def f(x):\n    return [y - 1 for y in x]"),
        defined("def f(x):\n    def g():\n        return 1\n    return g"),
        defined("def f(x):\n    def g():\n        return 2\n    return g"),
        defined("def f(x, y=0):\n    return [y + 1 for y in x]"),
    ]
    digests = [loaded_code._code_digest(code) for code in (one, *others)]
    assert loaded_code._code_digest(same) == digests[0]
    assert len(set(digests)) == len(digests)

    loaded_code_hash(ROOT)
    before = loaded_code._code_digest.cache_info()
    loaded_code_hash(ROOT)
    after = loaded_code._code_digest.cache_info()
    assert after.misses == before.misses and after.hits > before.hits + 10
