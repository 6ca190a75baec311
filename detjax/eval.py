# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.eval`: EleutherAI's lm-evaluation-harness, with the model `detjax`.

Takes what `lm-eval run` takes. The model is detjax where no other is named, and the batch size its
own choice, which changes no answer:

    python -m detjax.eval --tasks gsm8k --model_args model=Qwen/Qwen3-0.6B,tp=2 --batch_size 64
"""

import argparse
import sys
from collections.abc import Sequence

from detjax.cli.errors import BAD_INPUT, OK
from detjax.models.bundled import BUNDLED_NAME
from detjax.models.hub import check_model

_SUBCOMMANDS = ("run", "ls", "validate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness's command line."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if (model := model_of(args)) is not None:
            name, revision = model
            check_model(name, revision=revision)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    try:
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging

        from detjax.integrations import lm_eval as _  # noqa: F401  # registers the model
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    setup_logging()
    before, sys.argv = sys.argv, ["python -m detjax.eval", *with_defaults(args)]
    try:
        cli = HarnessCLI()
        cli.execute(cli.parse_args())
    finally:
        sys.argv = before
    return OK


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
    return given.get("model", BUNDLED_NAME), given.get("revision")


def with_defaults(args: Sequence[str]) -> list[str]:
    """The arguments with `run`, `--model detjax` and a batch size, where they say nothing else."""
    args = list(args)
    if not args or args[0] in ("-h", "--help"):
        return args
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
