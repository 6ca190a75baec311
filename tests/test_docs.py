# SPDX-License-Identifier: Apache-2.0
"""Pages name files, options, metrics and messages that exist, in short sentences."""

import ast
import functools
import importlib
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import detjax
from detjax.cli.parser import make_parser as make_generate_parser
from detjax.cli.vllm_flags import IN_PLACE_OF
from detjax.engine.metrics import EngineStats
from detjax.serve import make_parser as make_serve_parser
from detjax.server.metrics import EngineCollector
from detjax.server.served_model import ServedModel
from detjax.server.service import Service, ServiceState

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
LOG = [page for page in PAGES if page.parent.name == "log"]
"""Names of files in the log are those of its day."""

MAX_WORDS, MAX_COLUMNS = 40, 160
"""Aim at 30 words; a sentence of more than 40 is two."""
OF_USERS = {
    "aime24.jsonl",
    "chat_template.json",
    "gsm8k_test.jsonl",
    "tokenizer_config.json",
    "key.pem",
}
"""Files that a page names and that a user has."""
OF_OTHERS = {"jaxlib/mosaic/gpu/dump.cc"}
OF_ANSWERS = {"detjax.adapter", "detjax.sampling", "detjax.warnings", "detjax.weight_version"}
"""Fields of the object `detjax` in a choice of an answer."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parametrized(pages: list[Path]):
    return pytest.mark.parametrize("page", pages, ids=name_of)


@functools.cache
def repository() -> tuple[str, ...]:
    """Every file and folder that a page may name."""
    tops = ("detjax", "tests", "benchmarks", "tools", "docs", "examples", "notebooks", ".github")
    found = [path for top in tops for path in (ROOT / top).rglob("*")]
    found += ROOT.glob("*")
    return tuple(f"/{name_of(path)}" for path in found if "__pycache__" not in path.parts)


def prose(text: str) -> str:
    """A page without generated sections, code, tables, headings and figures."""
    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text, flags=re.S)
    text = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.S | re.M)
    kept = [line for line in text.splitlines() if not re.match(r"\s*(\||#|<!--|!\[)|    ", line)]
    return "\n".join(kept)


def sentences(text: str) -> list[str]:
    """What ends with a full stop, or is a paragraph or an item of a list."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose(text))
    text = re.sub(r"`[^`]*`", "X", text).replace("*", "")
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        block = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block)
        found += re.split(r'(?<=[.!?])["”)]?\s+(?=[A-Z"(0-9])', " ".join(block.split()))
    return found


def code_spans(text: str) -> list[str]:
    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text, flags=re.S)
    return re.findall(r"`([^`\n]+)`", re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.S | re.M))


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@parametrized(PAGES + TOP)
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"^\s*```.*?^\s*```", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{name_of(page)} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{name_of(page)} links to {target}"


@parametrized([page for page in PAGES if page not in LOG] + [ROOT / "README.md"])
def test_every_file_that_a_page_names_is_there(page):
    for span in code_spans(page.read_text()):
        is_path = re.fullmatch(r"[\w./*<>-]+\.(py|md|json|jsonl|ipynb|sh|yaml|toml|cc)", span)
        is_in_a_top = re.match(r"(detjax|tests|benchmarks|tools|docs|examples|notebooks)/", span)
        if not (is_path or is_in_a_top) or span in OF_USERS | OF_OTHERS:
            continue
        pattern = re.sub(r"\\\*|<\w+>", "[^/]*", re.escape(span.rstrip("/")))
        ends = re.compile(f"/{pattern}$")
        assert any(map(ends.search, repository())), f"{name_of(page)} names {span}"


@parametrized([page for page in PAGES if page not in LOG] + [ROOT / "README.md"])
def test_every_module_that_a_page_names_is_there(page):
    for span in code_spans(page.read_text()):
        is_module = re.fullmatch(r"(detjax|benchmarks)(\.[a-z]\w*)+", span)
        if not is_module or span in OF_ANSWERS:
            continue
        # The last parts may be names in a module: a function, a class, a constant.
        parts = span.split(".")
        tails = [parts[:length] for length in range(len(parts), 1, -1)]
        paths = [(ROOT / "/".join(tail), len(parts) - len(tail)) for tail in tails]
        found = [(p, rest) for p, rest in paths if p.is_dir() or p.with_suffix(".py").exists()]
        assert found, f"{name_of(page)} names {span}"
        path, rest = found[0]
        if rest:
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            assert re.search(rf"\b{parts[-rest]}\b", file.read_text()), f"{name_of(page)}: {span}"


IMPORT = re.compile(r"^\s*from (detjax[\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def code_of(path: Path) -> str:
    """The Python in a page's fences, or in the cells of a notebook."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


def imports_of(code: str) -> list[tuple[str, str]]:
    """(module, name) of what is imported from detjax."""
    return [
        (found[1], name)
        for found in IMPORT.finditer(code)
        for name in re.findall(r"\w+", found[2] or found[3])
    ]


@parametrized(
    [page for page in PAGES if page not in LOG]
    + [ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.ipynb"))]
)
def test_every_name_that_a_page_or_a_notebook_imports_is_there(page):
    for module, name in imports_of(code_of(page)):
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


@pytest.mark.control
def test_control_imports_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("from detjax.no import A\n```python\nfrom detjax.a import (\n  B, c\n)\n```\n")
    assert imports_of(code_of(page)) == [("detjax.a", "B"), ("detjax.a", "c")]
    book = tmp_path / "book.ipynb"
    book.write_text(json.dumps({"cells": [{"source": ["from detjax import D, e\n", "x = 1"]}]}))
    assert imports_of(code_of(book)) == [("detjax", "D"), ("detjax", "e")]


@parametrized([page for page in PAGES if page not in LOG])
def test_sentences_are_short_and_lines_fit_a_screen(page):
    text = page.read_text()
    long = [one for one in sentences(text) if len(one.split()) > MAX_WORDS]
    assert not long, f"{name_of(page)}: more than {MAX_WORDS} words: {long[0]}"
    wide = [line for line in prose(text).splitlines() if len(line) > MAX_COLUMNS]
    assert not wide, f"{name_of(page)}: more than {MAX_COLUMNS} columns: {wide[0]}"


def test_a_long_sentence_and_a_file_that_is_not_there_are_seen():
    many = " ".join(["word"] * (MAX_WORDS + 1))
    found = sentences(f"Short. {many.capitalize()}. End.")
    assert [len(one.split()) for one in found] == [1, MAX_WORDS + 1, 1]
    page = "| a table |\n\n```\na = 1\n```\n\n- One `a b`.\n- Two."
    assert [one for one in sentences(page) if one] == ["One X.", "Two."]
    assert not any(name.endswith("/not_there.py") for name in repository())


def test_the_page_of_metrics_has_every_metric_and_no_other():
    model = Mock(spec=ServedModel, weight_version=0)
    model.name, model.identity = "m", SimpleNamespace(model={"weights": "0" * 64})
    service = Mock(spec=Service, state=ServiceState.READY, stats=EngineStats, model=model)
    service.num_open, service.turns = 0, SimpleNamespace(num_held=0)
    told = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in EngineCollector(service).collect()
    }
    named = set(code_spans((ROOT / "docs" / "metrics.md").read_text()))
    ours = {name for name in named if re.fullmatch(r"detjax_\w*[a-z]", name)}
    assert ours == {name for name in told if name.startswith("detjax_")}
    assert {name.removeprefix("vllm:") for name in told if name.startswith("vllm:")} <= named


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text, re.M)}
    assert set(detjax.__all__) <= listed


def test_options_that_stand_for_those_of_vllm_exist():
    text = (ROOT / "docs" / "from_vllm.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    flags = {flag for action in make_serve_parser()._actions for flag in action.option_strings}
    names = {name for row in rows for name in re.findall(r"`(--[\w-]+)`", row[1])}
    assert len(names) > 25 and names <= flags, names - flags
    theirs = {name for row in rows for name in re.findall(r"`(--[\w-]+)`", row[0])}
    assert theirs.isdisjoint(IN_PLACE_OF.keys() & flags), "ours need no hint"
    assert IN_PLACE_OF.keys() <= theirs, IN_PLACE_OF.keys() - theirs
    fields = set(detjax.SamplingParams.__dataclass_fields__)
    _, _, sampling = text.partition("vLLM's `SamplingParams`")
    table = sampling.partition("\n\n")[0]
    used = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.strip("| ").split(" | ")[1])
    }
    assert len(used) > 20 and used <= fields, used - fields
    made = {name for name in re.findall(r"`(?:detjax\.)?([A-Z]\w+)\(", text)}
    assert made and made <= set(detjax.__all__), made


@functools.cache
def messages() -> tuple[str, ...]:
    """Every text in the package; what an f-string computes is a space."""
    found = []
    for path in (ROOT / "detjax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [one.value if isinstance(one, ast.Constant) else " " for one in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def test_messages_that_troubleshooting_explains_are_written_by_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    quoted = [m for row in rows for m in re.findall(r"`([^`]+)`", row[0]) if " " in m]
    assert len(quoted) > 20
    for message in quoted:
        parts = map(re.escape, message.removeprefix("error: ").split("..."))
        pattern = re.compile(".*".join(part.strip("\\ ") for part in parts), re.S)
        assert any(map(pattern.search, messages())), message


def test_the_container_installs_extras_and_serves_with_options_that_exist():
    text = (ROOT / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert set(asked.split(",")) <= set(extras["optional-dependencies"])
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    python, flag, module, *options = json.loads(entry)
    assert (Path(python).name, flag, module) == ("python", "-m", "detjax.serve")
    make_serve_parser().parse_args(options)
    for source in re.findall(r"^COPY (.*) \S+$", text, re.M):
        assert all((ROOT / name).exists() for name in source.split())


def test_commands_on_the_pages_name_options_that_exist():
    flags = {flag for action in make_generate_parser()._actions for flag in action.option_strings}
    for page in PAGES:
        if page in LOG:
            continue
        for command in re.findall(r"python -m detjax\.generate ([^\n`]*)", page.read_text()):
            named = set(re.findall(r"(?<!\S)(--[\w-]+)", command.partition("#")[0]))
            assert named <= flags, (name_of(page), named - flags)
