# SPDX-License-Identifier: Apache-2.0
"""The options of all commands: one name is one thing, and `--help` shows every default."""

import argparse
import importlib
import itertools
import re

import pytest

from detjax.cli.arguments import OPTIONS
from detjax.cli.command_line import CommandParser
from detjax.cli.verbs import VERBS

_MODULES = {"generate": "detjax.cli.parser"}
NOT_OURS = {"eval"}
"""Options of another project's command."""
VERBS_OF_OURS = sorted(VERBS.keys() - NOT_OURS)

DIFFERENT = {
    ("diverge", "prompt", "action"): "one prompt is compared",
    ("diverge", "prompt", "help"): "one prompt is compared, and standard input is not read",
    ("diverge", "max_tokens", "default"): "every operation of every token is recorded",
    ("diverge", "model", "default"): "a receipt and an evidence name their model",
    ("audit", "lora_modules", "help"): "receipts name adapters by their hashes",
    ("replay", "lora_modules", "help"): "receipts name adapters by their hashes",
    ("generate", "lora_modules", "help"): "a line of the prompts names its adapter",
    ("audit", "model", "default"): "a receipt names its model",
    ("replay", "model", "default"): "a receipt names its model",
    ("grpo", "devices", "default"): "of the trainer, besides those of the engine",
    ("grpo", "devices", "help"): "of the trainer, besides those of the engine",
    ("grpo", "batch_size", "default"): "answers come together, and nobody waits for the first",
    ("grpo", "batch_size", "help"): "answers come together, and nobody waits for the first",
    ("grpo", "max_tokens", "default"): "a task has lengths of its own",
    ("grpo", "max_tokens", "help"): "a task has lengths of its own",
    ("grpo", "output", "default"): "results are files of a folder",
    ("grpo", "output", "help"): "results are files of a folder",
    ("grpo", "output", "metavar"): "results are files of a folder",
    ("grpo", "output", "type"): "results are files of a folder",
    ("quantize", "model", "default"): "there is no use in another small model",
    ("quantize", "output", "default"): "a model is a folder",
    ("quantize", "output", "help"): "a model is a folder",
    ("quantize", "output", "metavar"): "a model is a folder",
    ("quantize", "output", "type"): "a model is a folder",
    ("run_batch", "output", "flags"): "vLLM's command has another name for it",
    ("run_batch", "output", "default"): "an interrupted run is gone on with from its file",
    ("run_batch", "output", "help"): "an interrupted run is gone on with from its file",
    ("run_batch", "output", "type"): "an interrupted run is gone on with from its file",
    ("audit", "backend", "default"): "a receipt names its kernels",
    ("replay", "backend", "default"): "a receipt names its kernels",
    ("audit", "revision", "default"): "a receipt names its revision",
    ("replay", "revision", "default"): "a receipt names its revision",
    ("certify", "max_len", "default"): "longer sequences take a CPU too long",
    ("certify", "mode", "choices"): "what is proven is canonical",
    ("certify", "mode", "help"): "what is proven is canonical",
    ("replay", "mode", "choices"): "what is compared is canonical",
    ("replay", "mode", "help"): "what is compared is canonical",
    ("generate", "format", "choices"): "it has many results, a line each",
    ("generate", "format", "help"): "it has many results, a line each",
    ("compare", "prompts_file", "help"): "a server is asked texts alone",
    ("compare", "seed", "default"): "both servers are asked with one seed",
    ("compare", "api_key", "action"): "the key that is sent, not those that are taken",
    ("compare", "api_key", "default"): "the key that is sent, not those that are taken",
    ("compare", "api_key", "help"): "the key that is sent, not those that are taken",
    **{
        ("audit", "seed", what): "of a draw of positions: any text, as public beacons give it"
        for what in ("type", "metavar", "help", "default")
    },
}
"""(command, option, what) that differs from other commands, and why."""


def parser_of(verb: str) -> CommandParser:
    module = VERBS[verb].module
    for name in (_MODULES.get(verb, module), f"{module}.__main__"):
        made = getattr(importlib.import_module(name), "make_parser", None)
        if made is not None:
            return made()
    raise AssertionError(f"{verb} has no make_parser")


PARSERS = {verb: parser_of(verb) for verb in VERBS_OF_OURS}


def options_of(verb: str) -> dict[str, argparse.Action]:
    return {
        action.dest: action
        for action in PARSERS[verb]._actions
        if action.option_strings and action.help is not argparse.SUPPRESS
    }


def definition(action: argparse.Action) -> dict[str, object]:
    """What an option is, as far as a user sees it."""
    told = re.fullmatch(r"(.*?)(?: \((?:default: (.*)|required)\))?", action.help or "", re.DOTALL)
    assert told is not None
    return {
        "flags": tuple(action.option_strings),
        "action": type(action).__name__,
        "type": action.type,
        "choices": action.choices,
        "metavar": action.metavar,
        "nargs": action.nargs,
        "help": told[1],
        "default": told[2],
    }


WHAT = tuple(definition(options_of("serve")["model"]))
NAMES = sorted({name for verb in PARSERS for name in options_of(verb)})


def usual(name: str, what: str) -> set[object]:
    """What an option is in the commands that are not listed as different."""
    return {
        definition(options_of(verb)[name])[what]
        for verb in PARSERS
        if name in options_of(verb) and (verb, name, what) not in DIFFERENT
    }


@pytest.mark.parametrize("name", NAMES)
def test_an_option_of_several_commands_has_one_definition(name):
    for what in WHAT:
        assert len(usual(name, what)) <= 1, (name, what, usual(name, what))


@pytest.mark.parametrize(("verb", "name", "what"), DIFFERENT)
def test_a_listed_difference_is_one(verb, name, what):
    assert definition(options_of(verb)[name])[what] not in usual(name, what)
    assert usual(name, what)


def test_one_flag_is_one_option():
    """No flag names one value in a command and another one in the next."""
    names: dict[str, set[str]] = {}
    for verb in PARSERS:
        for name, action in options_of(verb).items():
            for flag in action.option_strings:
                names.setdefault(flag, set()).add(name)
    assert {flag: of for flag, of in names.items() if len(of) > 1} == {}


@pytest.mark.parametrize("verb", VERBS_OF_OURS)
def test_help_shows_the_default_of_every_option(verb):
    for name, action in options_of(verb).items():
        if name not in ("help", "version") and not action.required:
            assert definition(action)["default"], f"{verb} --{name}: {action.help}"
    shown = " ".join(PARSERS[verb].format_help().split())
    count = shown.count("(default: ") + shown.count("(required)")
    assert count == len(options_of(verb)) - 2


@pytest.mark.parametrize("verb", VERBS_OF_OURS)
def test_a_shown_default_is_the_one_that_is_used(verb):
    """A number or a choice in `--help` is the value of a command line that says nothing."""
    generate = {name: option.default for name, option in OPTIONS.items()}
    for name, action in options_of(verb).items():
        shown = definition(action)["default"]
        default = generate.get(name) if verb == "generate" else action.default
        if default in (None, argparse.SUPPRESS, "", [], ()) or (verb, name) in FOLLOWS:
            continue
        value = ("on" if default else "off") if isinstance(default, bool) else str(default)
        assert str(shown).startswith(value), f"{verb} --{name}: {shown} is not {value}"


FOLLOWS = {("generate", "compute"), ("certify", "minutes")}
"""Defaults that are shown in words: that of --dtype, and one round."""


@pytest.mark.parametrize(
    ("verb", "vllm", "name"),
    [
        *itertools.product(
            ["serve", "certify", "generate"], ["--max-model-len"], ["max_len"]
        ),
        *itertools.product(
            ["serve", "certify", "generate", "replay", "audit"],
            ["--tensor-parallel-size", "--data-parallel-size", "--max-num-seqs"],
            [None],
        ),
        *itertools.product(
            ["serve", "certify", "generate"], ["--gpu-memory-utilization", "--kv-memory"], [None]
        ),
        ("serve", "--max-num-batched-tokens", None),
        ("serve", "--served-model-name", None),
        ("serve", "--uvicorn-log-level", None),
    ],
)  # fmt: skip
def test_options_are_taken_in_the_spelling_of_vllm(verb, vllm, name):
    flags = {flag: n for n, a in options_of(verb).items() for flag in a.option_strings}
    assert vllm in flags
    assert name in (None, flags[vllm])
