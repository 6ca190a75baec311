# SPDX-License-Identifier: Apache-2.0
"""Rules of the source that ruff, pyright and import-linter do not have.

`source_exceptions.py` lists what may break a rule, and why. An exception that is not needed any
more fails here, so the list can only become shorter.
"""

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import vulture

import detjax
from detjax.engine.config import EngineConfig
from detjax.engine.heap import collected_later

from . import source_exceptions

ROOT = Path(__file__).parents[1]
MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 60, 150
MAX_PARAMETERS, MAX_TILE_FIELDS = 10, 12
MAX_LINE, MAX_WORDS = 160, 30
CHECKED = "detjax", "benchmarks", "tools", "examples"
"""Folders whose code has to have a user."""

HOMES = {
    "Completion": "detjax/engine/outputs/completion.py",
    "load_model": "detjax/opening.py",
}
"""The one module that may call each."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of each module of the package."""
    paths = sorted((ROOT / "detjax").rglob("*.py"))
    with collected_later():  # half a million nodes
        return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


@functools.cache
def walked() -> list[tuple[str, ast.AST]]:
    """The path and the nodes of each module of the package."""
    with collected_later():
        return [(path, node) for path, tree in modules().items() for node in ast.walk(tree)]


def nodes(kind: type) -> Iterator[tuple[str, ast.AST]]:
    return ((path, node) for path, node in walked() if isinstance(node, kind))


def is_kernel(path: str) -> bool:
    return Path(path).name.startswith("sm90")


def code_lines(function: Function) -> int:
    """Lines from `def` to the end; a docstring does not count."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def called_name(call: ast.Call) -> str:
    return ast.unparse(call.func).split(".")[-1]


def value_of(node: ast.expr) -> str:
    """A constant's value where it is arithmetic of numbers, else its source."""
    inner = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    if all(isinstance(one, inner) for one in ast.walk(node)):
        return repr(eval(compile(ast.Expression(node), "constant", "eval")))
    return ast.unparse(node)


def assignments(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and value of the constants of a module. A logger has its module's name."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z][A-Z0-9_]+", target.id):
                if "getLogger" not in ast.unparse(value):
                    yield target.id, value_of(value)


def prose_lines(text: str) -> list[str]:
    """Lines of a page without code and tables, which cannot be wrapped."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [line for line in text.splitlines() if not line.startswith(("|", "![", "    "))]


def sentences(text: str) -> Iterator[str]:
    """Sentences of a page and of the cells of its tables, without code."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "`", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.))|\|", text):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(block.split()))


def num_words(sentence: str) -> int:
    """Words with a letter: figures are not counted."""
    return sum(bool(re.search(r"[^\W\d_]", word)) for word in sentence.split())


# ------------------------------------------------------- what breaks a rule, and by how much


def repeated_classes() -> dict[str, int]:
    """Names of several classes that other modules may use, and how many there are."""
    found: dict[str, int] = {}
    for _, node in nodes(ast.ClassDef):
        if not node.name.startswith("_"):
            found[node.name] = found.get(node.name, 0) + 1
    return {name: count for name, count in found.items() if count > 1}


def calls_elsewhere(homes: Mapping[str, str] = HOMES) -> dict[str, int]:
    """Calls of what one module has to call, in others; and what that module does not call."""
    found = {f"{home}:{name}": 1 for name, home in homes.items()}
    for path, node in nodes(ast.Call):
        if (name := called_name(node)) in homes:
            key, is_home = f"{path}:{name}", path == homes[name]
            found[key] = 0 if is_home else found.get(key, 0) + 1
    return {key: count for key, count in found.items() if count}


def long_functions() -> dict[str, int]:
    """Functions that do not fit on a screen, and their lines."""
    found: dict[str, int] = {}
    for path, node in nodes(Function):
        limit = MAX_KERNEL_LINES if is_kernel(path) else MAX_FUNCTION_LINES
        if (lines := code_lines(node)) > limit:
            found[f"{path}:{node.name}"] = lines
    return found


def many_parameters() -> dict[str, int]:
    """Functions with many parameters."""
    found: dict[str, int] = {}
    for path, node in nodes(Function):
        args = node.args
        count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
        if count > MAX_PARAMETERS:
            found[f"{path}:{node.name}"] = count
    return found


def many_tile_fields() -> dict[str, int]:
    """Dataclasses of kernels with many fields."""
    found: dict[str, int] = {}
    for path, node in nodes(ast.ClassDef):
        if path.startswith("detjax/pallas_kernels/") or is_kernel(path):
            count = sum(isinstance(line, ast.AnnAssign) for line in node.body)
            if count > MAX_TILE_FIELDS:
                found[f"{path}:{node.name}"] = count
    return found


def popped_refs() -> dict[str, int]:
    """Kernels that take their operands from a list by position."""
    found: dict[str, int] = {}
    for path, node in nodes(ast.Call):
        if ast.unparse(node.func).endswith("refs.pop"):
            found[path] = found.get(path, 0) + 1
    return found


def repeated_constants() -> dict[str, int]:
    """Constants that several modules define with one value."""
    found: dict[tuple[str, str], int] = {}
    for tree in modules().values():
        for constant in assignments(tree):
            found[constant] = found.get(constant, 0) + 1
    return {name: count for (name, _), count in found.items() if count > 1}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def long_lines() -> dict[str, int]:
    """Pages with long lines, and how many."""
    found = {
        str(page.relative_to(ROOT)): sum(
            len(line) > MAX_LINE for line in prose_lines(page.read_text())
        )
        for page in pages()
    }
    return {page: count for page, count in found.items() if count}


def long_sentences() -> dict[str, int]:
    """Pages with long sentences, and how many."""
    found = {
        str(page.relative_to(ROOT)): sum(
            num_words(sentence) > MAX_WORDS for sentence in sentences(page.read_text())
        )
        for page in pages()
    }
    return {page: count for page, count in found.items() if count}


def unused_code() -> dict[str, int]:
    """Names that nothing in the repository uses, tests included."""
    finder = vulture.Vulture(ignore_decorators=source_exceptions.RUN_BY_DECORATOR)
    finder.scavenge([ROOT / name for name in (*CHECKED, "tests")])
    found: dict[str, int] = {}
    for item in finder.get_unused_code(min_confidence=60):
        if item.filename.relative_to(ROOT).parts[0] in CHECKED:
            found[item.name] = found.get(item.name, 0) + 1
    return found


def can_fail(node: ast.AST) -> bool:
    """Whether code has an assertion, or expects an error."""
    is_call = isinstance(node, ast.Call)
    return isinstance(node, ast.Assert) or (
        is_call and called_name(node).lstrip("_").startswith(("assert_", "raises", "warns", "fail"))
    )


def names_that_can_fail(tree: ast.Module) -> set[str]:
    """Functions of a file that can fail, by themselves or by a function of the file they name."""
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    found: set[str] = set()
    named: list[tuple[str, set[str]]] = []
    for function in functions:
        inside = list(ast.walk(function))
        if any(map(can_fail, inside)):
            found.add(function.name)
        names = {getattr(node, "id", getattr(node, "attr", "")) for node in inside}
        named.append((function.name, names))
    while more := {name for name, names in named if name not in found and names & found}:
        found |= more
    return found


def silent_tests() -> dict[str, int]:
    """Tests that assert nothing, so that they pass whatever comes out."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, Function)}
        silent = names - names_that_can_fail(tree)
        found |= {f"{path.relative_to(ROOT)}:{n}": 1 for n in silent if n.startswith("test_")}
    return found


RULES = (
    repeated_classes, calls_elsewhere, long_functions, many_parameters, many_tile_fields,
    popped_refs, repeated_constants, long_lines, long_sentences, unused_code,
    silent_tests,
)  # fmt: skip
READ_ALL = unused_code, silent_tests
"""They take many seconds; `.ci/run` has a line for them."""


def faults(found: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """What breaks a rule by more than is allowed, and what is allowed for nothing."""
    worse = [
        f"{name}: {count}, allowed are {allowed.get(name, 0)}"
        for name, count in found.items()
        if count > allowed.get(name, 0)
    ]
    stale = [f"{name}: an exception that is not needed" for name in allowed if name not in found]
    return [*worse, *stale]


@pytest.mark.parametrize(
    "rule",
    [pytest.param(r, marks=pytest.mark.slow) if r in READ_ALL else r for r in RULES],
    ids=lambda rule: rule.__name__,
)
def test_source_follows_the_rule(rule):
    allowed: dict[str, int] = {}
    for exceptions in source_exceptions.EXCEPTIONS.get(rule.__name__, {}).values():
        assert not allowed.keys() & exceptions.keys()
        allowed |= exceptions
    assert not faults(rule(), allowed), rule.__doc__


def test_exceptions_are_of_rules():
    assert source_exceptions.EXCEPTIONS.keys() <= {rule.__name__ for rule in RULES}


def test_exceptions_cannot_grow_or_outlive_their_reason():
    assert faults({"a": 3}, {"a": 3}) == faults({"a": 2}, {"a": 3}) == []
    assert faults({"a": 4}, {"a": 3}) == ["a: 4, allowed are 3"]
    assert faults({}, {"a": 3}) == ["a: an exception that is not needed"]


def test_rules_find_what_they_are_for():
    elsewhere = calls_elsewhere({"load_on_devices": "detjax/opening.py", "no_such": "a.py"})
    assert len(elsewhere) >= 5 and elsewhere["a.py:no_such"] == 1
    function = ast.parse('def f(a):\n    """Say.\n\n    More.\n    """\n    return a\n').body[0]
    assert code_lines(function) == 2
    (size,) = assignments(ast.parse("SIZE = 2 ** 4\nLOG = logging.getLogger(__name__)"))
    assert size == ("SIZE", "16")
    words = "word " * 31
    assert max(map(num_words, sentences(f"Short. {words}\n\n| cell | `a b c` |"))) == 31
    assert max(map(num_words, sentences(f"- {words[:75]}\n- {words[:80]}"))) == 16
    assert prose_lines("a\n| b |\n```\nc\n```\n") == ["a", ""]
    source = "def test_a():\n    run()\ndef test_b():\n    check()\ndef check():\n    assert x\n"
    assert names_that_can_fail(ast.parse(source)) == {"test_b", "check"}


ENGINE_OPTIONS = {
    "batch_size": 4, "prefill_chunk": 32, "max_len": 256, "mode": "dvr", "num_pages": 40,
    "num_local_pages": 0,
    "decode_batches": (2,), "decode_lens": (128,), "prefill_shapes": ((2, 16),),
    "max_tokens_per_step": 512, "max_prefill_streak": 3, "verify_rows": 3, "verify_batches": (2,),
    "verify_window": 8, "verify_patience": 2, "verify_deadline": 32, "max_draft_fraction": 0.5,
    "max_draft_batch": 7, "adapts_drafts": False,
    "decode_steps": 2, "steps_ahead": 2, "draft_weights": "int8", "has_prompt_lookup": False,
    "has_prefix_cache": False, "max_waiting": 99, "self_check": "off",
}  # fmt: skip
"""A value of each option that is not the default's, where another goes with the rest."""


def test_every_engine_option_is_reachable_from_llm():
    assert ENGINE_OPTIONS.keys() == set(EngineConfig.__dataclass_fields__)
    llm = detjax.LLM(show_progress=False, cache_dir=None, **ENGINE_OPTIONS)
    assert {name: getattr(llm.config.engine, name) for name in ENGINE_OPTIONS} == ENGINE_OPTIONS
