# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.eval`: EleutherAI's lm-evaluation-harness, with the model `detjax`.

Takes what `lm-eval run` takes. The model is detjax where no other is named, and the batch size its
own choice, which changes no answer:

    python -m detjax.eval --tasks gsm8k --model_args model=Qwen/Qwen3-0.6B,tp=2 --batch_size 64
"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence

from jinja2 import TemplateError

from detjax.cli.errors import EXIT_CODES, OK, InputError, bad_input, exit_code
from detjax.models.bundled import BUNDLED_NAME
from detjax.models.hub import check_model

PROG = "python -m detjax.eval"
HELP = f"""\
usage: {PROG} [run] --tasks TASK [--model_args NAME=VALUE,...] [options of run]
       {PROG} ls tasks | validate --tasks TASK

Run lm-evaluation-harness on detjax. Responses and scores are the same at any batch size and mesh.

--model_args   `model` or `pretrained` is a folder, a Hugging Face id or {BUNDLED_NAME}.
               Others are max_gen_toks, add_bos_token, seed, and the options of detjax.LLM: tp, dp,
               mode, dtype, max_len, revision and others. vLLM's names are accepted too:
               tensor_parallel_size, data_parallel_size, max_model_len, max_length.
--batch_size   most sequences that run at once (default: detjax.LLM chooses). It changes no answer.

`{PROG} run --help` lists the options of the harness,
`{PROG} ls tasks` its tasks.

examples:
  {PROG} --tasks gsm8k --model_args pretrained=Qwen/Qwen3-0.6B --limit 100
  {PROG} --tasks hellaswag --model_args pretrained=Qwen/Qwen3-0.6B,tp=2 --apply_chat_template

{EXIT_CODES}
"""

LOG = logging.getLogger(__name__)

_SUBCOMMANDS = ("run", "ls", "validate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness's command line."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="")
        return OK
    return exit_code(lambda: _run(args))


def _run(args: Sequence[str]) -> int:
    check_limit(args)
    with bad_input("--model_args model: "):
        if (model := model_of(args)) is not None:
            name, revision = model
            check_model(name, revision=revision)
    with bad_input(kinds=(ImportError,)):
        # It registers the model, and says which extra is missing.
        from detjax.integrations import lm_eval as _  # noqa: F401, I001
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging
    setup_logging()
    before, sys.argv = sys.argv, [PROG, *with_defaults(args)]
    try:
        with bad_input(rephrase=_told, kinds=(TypeError, KeyError, ImportError)):
            cli = HarnessCLI()
            try:
                cli.execute(cli.parse_args())
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] == "detjax":
                    raise RuntimeError(f"this copy of detjax lacks {error.name}") from error
                raise
            except TemplateError as error:
                raise ValueError(f"a template does not fit the task's data: {error}") from error
    finally:
        sys.argv = before
    return OK


def _told(text: str) -> str:
    """What is wrong and how to go on; LOGLEVEL=DEBUG shows where."""
    LOG.debug("the run failed", exc_info=True)
    if text.startswith("Tasks not found"):
        return f"{text}; `{PROG} ls tasks` lists them, --include_path DIR adds tasks of your own"
    if text.startswith("No module named"):
        return f"{text}, which --model or --tasks needs; install it in this environment"
    return text


def model_of(args: Sequence[str]) -> tuple[str, str | None] | None:
    """The name and the revision in --model_args; None where another model is asked for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", "-M", default="detjax")
    parser.add_argument("--model_args", "-a", nargs="*", default=[])
    known, rest = parser.parse_known_args(args)
    if known.model != "detjax" or {"-h", "--help", "--config", "-C", *_SUBCOMMANDS[1:]} & set(rest):
        return None
    pairs = (pair.partition("=") for part in known.model_args for pair in part.split(","))
    given = {name: value for name, _, value in pairs}
    named = {given[name] for name in ("model", "pretrained") if name in given}
    if len(named) > 1:
        raise ValueError(
            f"--model_args has model={given['model']} and pretrained={given['pretrained']}, which "
            "say the same; give one"
        )
    return named.pop() if named else BUNDLED_NAME, given.get("revision")


def check_limit(args: Sequence[str]) -> None:
    """See that --limit is a number that a task can take, before a model or a task is opened.

    Text that is no number is left to the harness, which names the option.

    Raises:
        InputError: If it is not above 0.
    """
    # As the harness reads it, which takes `--lim` too.
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--limit", "-L", nargs="?")
    known, _ = parser.parse_known_args(args)
    try:
        limit = float(known.limit or "1")
    except ValueError:
        return
    if not 0 < limit < math.inf:
        raise InputError(
            f"--limit {known.limit} must be above 0: how many questions of each task, or below 1 "
            "which share of them"
        )


def with_defaults(args: Sequence[str]) -> list[str]:
    """The arguments with `run`, `--model detjax` and a batch size, where they say nothing else."""
    args = list(args)
    if args[0] not in _SUBCOMMANDS:
        args.insert(0, "run")
    given = {arg.partition("=")[0] for arg in args}
    if args[0] != "run" or given & {"--config", "-C"}:
        return args
    if not given & {"--model", "-M"}:
        args[1:1] = ["--model", "detjax"]
    if not given & {"--batch_size", "-b"}:
        args += ["--batch_size", "auto"]
    return args


if __name__ == "__main__":
    sys.exit(main())
