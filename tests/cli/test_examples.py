# SPDX-License-Identifier: Apache-2.0
"""The examples of every `--help`: all of them are read, and those run that need no network."""

import contextlib
import importlib
import io
import shlex
import sys

import pytest

from detjax import eval as eval_command
from detjax import serve
from detjax.cli import errors
from detjax.cli.parser import parse_args
from detjax.cli.verbs import VERBS, help_text

from .test_options import VERBS_OF_OURS, parser_of

FILES = {
    "prompts.jsonl": '{"prompt": "a"}\n{"prompt": "b", "sampling": {"max_tokens": 3}}\n',
    "prompts.txt": "a\nb\n",
    "old.jsonl": '{"text": "a", "correct": true}\n{"text": "b", "correct": false}\n',
    "requests.jsonl": '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}\n',
    "new.jsonl": '{"text": "a", "correct": true}\n{"text": "b", "correct": true}\n',
}
"""What the examples read and do not write themselves."""


def help_of(verb: str) -> str:
    return eval_command.HELP if verb == "eval" else parser_of(verb).format_help()


def examples(text: str) -> list[list[str]]:
    """The words of each command of ours in the examples of a help, what it is piped from first."""
    _, _, shown = text.replace("\\\n", " ").partition("examples:\n")
    lines = shown.partition("\n\n")[0].splitlines()
    return [shlex.split(line) for line in lines if "python -m detjax" in line]


def command_of(words: list[str]) -> tuple[str, list[str]]:
    """The verb of an example, and its arguments."""
    at = words.index("-m") + 1
    module = words[at]
    if module == "detjax":
        return words[at + 1], words[at + 2 :]
    (verb,) = [name for name, verb in VERBS.items() if verb.module == module]
    return verb, words[at + 1 :]


EXAMPLES = [
    pytest.param(words, id=f"{verb}-{number}")
    for verb in [*VERBS_OF_OURS, "eval"]
    for number, words in enumerate(examples(help_of(verb)))
] + [pytest.param(words, id=f"detjax-{i}") for i, words in enumerate(examples(help_text()))]


def test_every_help_has_an_example_of_its_own():
    for verb in [*VERBS_OF_OURS, "eval"]:
        assert verb in [command_of(words)[0] for words in examples(help_of(verb))]


@pytest.mark.parametrize("words", EXAMPLES)
def test_every_example_is_read(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verb, argv = command_of(words)
    argv = ["0" * 64 if word == "DIGEST" else word for word in argv]
    if "--help" in argv:
        return
    if verb == "eval":
        assert eval_command.model_of(argv) is not None
    elif verb == "generate":
        parse_args(argv)
    else:
        args = parser_of(verb).parse(argv)
        if verb == "serve":
            serve.check_options(args)


MADE = ("qwen3-8b-w4", "smollm2-135m")
"""Models that an example makes of one from the network."""


def needs_more(verb: str, argv: list[str]) -> str:
    """Why an example cannot run here; empty if it can."""
    if verb in ("serve", "eval"):
        return "serves until it is stopped, or downloads a task"
    if verb == "certify":
        return "takes minutes; tests/certify runs the command"
    if "--evidence" in argv:
        return "reads what a fault has left; tests/diverge makes one"
    if any("/" in word or word in MADE for word in argv):
        return "needs the network"
    return ""


@pytest.fixture
def place(tmp_path):
    """A folder with the files that the examples of one command read."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(words: list[str], digests: list[str]) -> int:
    """Run an example with few tokens; take its digest down."""
    verb, argv = command_of(words)
    argv = [digests[-1] if word == "DIGEST" else word for word in argv]
    if verb in ("generate", "diverge") and "--max-tokens" not in argv and "DIGEST" not in words:
        argv += ["--max-tokens", "8"]
    if "DIGEST" in words:
        argv += ["--max-tokens", "8"]
    module = VERBS[verb].module
    if verb in ("diverge", "compare"):
        module = f"{module}.__main__"
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = importlib.import_module(module).main(argv)
    if verb == "generate" and "digest " in said.getvalue():
        digests.append(said.getvalue().rpartition("digest ")[2].split()[0])
    assert code in (errors.OK, errors.BITS_DIFFER), said.getvalue()
    return code


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "verb",
    [
        "generate",
        "replay",
        "audit",
        "compare",
        "run_batch",
        pytest.param("diverge", marks=pytest.mark.nightly),
    ],
)
def test_examples_that_need_no_network_run(verb, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    digests: list[str] = []
    codes = {}
    if verb == "diverge":
        two = "-p a -p b --max-tokens 8 --receipts answers.jsonl"
        run(["-m", "detjax.generate", *two.split()], digests)
    for words in examples(help_of(verb)):
        own, argv = command_of(words)
        if needs_more(own, argv):
            continue
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once upon a time\n")))
        codes[" ".join(words)] = run(words, digests)
        capsys.readouterr()
    assert len(codes) >= 2
    # What is asked to differ does, and nothing else.
    differ = {words for words, code in codes.items() if code == errors.BITS_DIFFER}
    assert all("mode" in words or verb == "compare" for words in differ), differ
