# SPDX-License-Identifier: Apache-2.0
"""The parser of every command: one kind of message, `--version`, and options from a file."""

import argparse
import contextlib
import difflib
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from detjax import __version__
from detjax.cli.errors import InputError, bad_input
from detjax.cli.options import CONFIG, GPU_MEMORY_UTILIZATION, MODEL, PROMPT, Option, flag_like
from detjax.cli.vllm_flags import hint_of_value, hints
from detjax.models.hub import check_model


class CommandParser(argparse.ArgumentParser):
    """Reads the command line of `python -m detjax.VERB`. A mistake is an `InputError`."""

    def __init__(
        self,
        verb: str,
        *,
        description: str,
        epilog: str,
        usage: str | None = None,
        only_given: bool = False,
        stands_for_vllm: bool = False,
    ):
        """Make a parser with `--help`, `--version` and `--config`.

        Args:
            verb: Of the command.
            description: Says what it does.
            epilog: Examples and exit codes.
            usage: In place of the list of all options.
            only_given: The parsed arguments have no defaults.
            stands_for_vllm: The command stands for `vllm serve`, whose options get a hint.
        """
        self._stands_for_vllm = stands_for_vllm
        super().__init__(
            prog=f"python -m detjax.{verb}",
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS if only_given else None,
            allow_abbrev=False,
        )
        self.add_argument("--version", action="version", version=f"detjax {__version__}")
        CONFIG.add_to(self)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage.

        Raises:
            InputError: Always.
        """
        _, _, rest = message.partition("unrecognized arguments: ")
        first = rest.split("=")[0].split(" ")[0]
        near = self._nearest(first)
        hint = f"; did you mean {near}?" if near else "; see --help"
        of_vllm = hints(rest.split()) if self._stands_for_vllm and first.startswith("-") else []
        if of_vllm:
            hint = "".join(f"; {one}" for one in of_vllm)
        elif first and not first.startswith("-"):
            if PROMPT.flag in self._option_string_actions:
                hint = f"; a prompt is an option: {PROMPT.flag} {rest!r}"
            elif self._stands_for_vllm and "/" in first:
                hint = f"; a model is an option: {MODEL.flag} {first!r}"
            elif self._stands_for_vllm:
                hint = (
                    f"; it belongs to no option: a model is {MODEL.flag} NAME, and "
                    "--served-model-name takes one name"
                )
        message = message.removeprefix("argument ")
        if self._stands_for_vllm:
            hint = hint_of_value(message) or hint
        raise InputError(message + hint)

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Read the command line, and the file of `--config` where it gives one.

        Args:
            argv: The arguments; None takes those of the process.

        Raises:
            InputError: If a value cannot be read, or the file has an option that there is not.
        """
        given = list(sys.argv[1:] if argv is None else argv)
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        finder.add_argument(CONFIG.flag)
        try:
            path = finder.parse_known_args(given)[0].config
        except argparse.ArgumentError:
            path = None  # without a value: the parser itself says so
        if path is None:
            return self.parse_args(given)
        read = list(self._from_file(path, given))
        try:
            return self.parse_args([*read, *given])
        except InputError as error:
            flags = (word.partition("=")[0] for word in read if word.startswith("--"))
            is_of_file = any(flag in str(error).partition(":")[0].split("/") for flag in flags)
            raise InputError(
                f"{CONFIG.flag} {path}: {error}" if is_of_file else f"{error}"
            ) from error

    def _from_file(self, path: str, given: Sequence[str]) -> Iterator[str]:
        """The options of a file as arguments, but for those that are given."""
        known = {
            flag: action
            for action in self._actions
            for flag in (*action.option_strings, flag_like(action.dest))
            if action.option_strings and action.dest not in ("help", "version", CONFIG.name)
        }
        names: dict[argparse.Action, str] = {}
        for name, value in _read_toml(path).items():
            action = known.get(flag_like(name))
            if action is None and flag_like(name) in self._option_string_actions:
                raise InputError(
                    f"{CONFIG.flag} {path} has {name!r}, which is given on the command line alone"
                )
            if action is None:
                near = self._nearest(name)
                hint = f"did you mean {near.lstrip('-')}? " if near else ""
                raise InputError(
                    f"{CONFIG.flag} {path} has {name!r}, which is no option of {self.prog}; "
                    f"{hint}--help lists them"
                )
            if (other := names.setdefault(action, name)) != name:
                raise InputError(
                    f"{CONFIG.flag} {path} has {other!r} and {name!r}, which are one option; leave "
                    "one out"
                )
            if not any(_gives(argument, action) for argument in given):
                yield from _as_arguments(action, value, f"{CONFIG.flag} {path}: {name}")

    def _nearest(self, given: str) -> str:
        """The option that was meant: one that begins so, or is spelled much like it; or none."""
        known = [flag for action in self._actions for flag in action.option_strings]
        word = given.lstrip("-").replace("_", "-")
        names = {flag.lstrip("-"): flag for flag in known if flag.startswith("--")}
        begun = [name for name in names if len(word) > 1 and name.startswith(word)]
        alike = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
        return names[alike[0]] if alike else ""


def description_of(module_doc: str | None) -> str:
    """What the docstring of a command's module says of the command."""
    _, _, text = (module_doc or "").partition(": ")
    paragraphs = [part for part in text.split("\n\n") if not part.startswith("JAX is imported")]
    text = "\n\n".join(paragraphs).strip()
    return text[:1].upper() + text[1:]


def check_file(flag: str, name: str | Path) -> None:
    """See that a file can be written before there is something to write.

    Raises:
        InputError: If it cannot.
    """
    path = Path(name)
    if not str(name) or path.is_dir():
        raise InputError(f"{flag} {str(name)!r} is no file; give the name of one")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{flag} {name} is in a folder that does not exist; make it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise InputError(f"{flag} {name} cannot be written; give another file")


@contextlib.contextmanager
def output_of(name: str | None) -> Iterator[TextIO]:
    """The file of `--output`, open to write; standard output where there is none."""
    if name is None:
        yield sys.stdout
        return
    with Path(name).open("w", encoding="utf-8") as file:
        yield file


def check_name(model: str) -> None:
    """Refuse a `--model` without a name, which would be the folder where the command runs.

    Raises:
        InputError: If it has none.
    """
    if not model.strip():
        raise InputError(f"{MODEL.flag} is empty; give a folder, or a Hugging Face id")


def check_model_option(model: str, revision: str | None) -> None:
    """See that a model is there and can be read, before JAX starts: as `check_model`.

    Raises:
        InputError: If it is not.
    """
    check_name(model)
    with bad_input(f"{MODEL.flag}: "):
        check_model(model, revision=revision)


def check_share(share: float | None) -> None:
    """Refuse a `--gpu-memory-utilization` that is no share.

    Raises:
        InputError: If it is none.
    """
    if share is not None and not 0 < share <= 1:
        flag = GPU_MEMORY_UTILIZATION.flag
        raise InputError(f"{flag} {share:g} must be above 0 and at most 1, such as 0.9")


def check_replicas(batch_size: int | None, num_pages: int | None, dp: int) -> None:
    """Refuse rows and pages that replicas cannot share evenly.

    Raises:
        InputError: If so.
    """
    if batch_size is not None and batch_size % dp:
        raise InputError(
            f"--batch-size {batch_size} must be a multiple of --dp {dp}, so that each replica has "
            "as many rows"
        )
    if num_pages is not None and (num_pages < 0 or num_pages % dp):
        raise InputError(f"--cache-pages {num_pages} must be a multiple of --dp {dp}, or 0")


def check_counts(args: argparse.Namespace, options: Sequence[Option]) -> None:
    """Refuse a count below 1.

    Raises:
        InputError: If one is.
    """
    for option in options:
        value = getattr(args, option.name)
        if value is not None and value < 1:
            raise InputError(f"{option.flag} {value} must be at least 1")


def _read_toml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).expanduser().read_bytes()
    except (OSError, ValueError) as error:  # the latter: a null character in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{CONFIG.flag} {path} cannot be read: {reason}") from error
    try:
        return tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{CONFIG.flag} {path} is not TOML: {error}") from error


def _gives(argument: str, action: argparse.Action) -> bool:
    """Whether an argument is one of the option's flags, with or without a value behind it."""
    return any(
        argument.partition("=")[0] == flag
        or (not flag.startswith("--") and argument.startswith(flag) and argument[1] != "-")
        for flag in action.option_strings
    )


def _as_arguments(action: argparse.Action, value: Any, where: str) -> list[str]:
    """One option of a file, as it is written on the command line.

    Raises:
        InputError: If the option takes no such value.
    """
    flags = [flag for flag in action.option_strings if flag.startswith("--")]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{where} = {value!r} must be true or false")
        off = [flag for flag in flags if flag.startswith("--no-") and len(flags) > 1]
        return [flags[0]] if value else off[:1]
    values = value if isinstance(value, list) else [value]
    if (
        isinstance(value, list)
        and not isinstance(action, argparse._AppendAction)
        and (action.nargs is None)
    ):
        raise InputError(f"{where} = {value!r} must be one value, not a list")
    for one in values:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            hint = "; write JSON as text, '{...}'" if isinstance(one, dict) else ""
            raise InputError(f"{where} = {value!r} must be text or a number{hint}")
    if action.nargs is not None:
        return [flags[0], *map(str, values)]
    return [f"{flags[0]}={one}" for one in values]
