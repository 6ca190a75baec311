# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.run_batch`: answer a file of requests in the format of OpenAI's batch API.

A line of the input is one request: `{"custom_id": "a", "method": "POST", "url":
"/v1/chat/completions", "body": {...}}`. Each answer is the one that python -m detjax.serve gives,
with its digest and fingerprint. It does not depend on the other requests of the file or on their
order.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from detjax.cli import options
from detjax.cli.command_line import CommandParser, description_of
from detjax.cli.errors import BAD_INPUT, EXIT_CODES, OK, InputError, bad_input, exit_code
from detjax.cli.options import Option, add_options, in_flags, read_lora_modules
from detjax.serve import (
    ENGINE_OPTIONS,
    ENGINE_TITLE,
    MODEL_OPTIONS,
    check_engine_options,
    check_model_files,
    log_to_stderr,
)
from detjax.server.batch_file import BatchOutput, check_models, read_batch

EXAMPLES = f"""\
examples:
  python -m detjax.run_batch -i requests.jsonl -o answers.jsonl
  python -m detjax.run_batch -i requests.jsonl -o answers.jsonl --skip-done

{EXIT_CODES}.
If requests were refused the exit code is {BAD_INPUT} too, and their lines of the output say why.
Each answer is written as soon as it is complete. At the end the lines are put in the order of the
input.
"""

_INPUT = Option(
    name="input_file", flags=("-i", "--input-file"), metavar="FILE", is_required=True,
    help="requests, one JSON object per line; - reads standard input",
)  # fmt: skip
_OUTPUT = replace(
    options.OUTPUT, parse=Path, flags=(*options.OUTPUT.flags, "--output-file"), is_required=True,
    help="file for the answers, one per line. It must be empty or not exist, except with "
    "--skip-done",
)  # fmt: skip
_SKIP_DONE = Option(
    name="skip_done", default=False,
    help="continue an interrupted run: requests that --output already answers are skipped. Refused "
    "ones are tried again",
)  # fmt: skip
_NOT_HERE = (options.WARM,)


def make_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser("run_batch", description=description_of(__doc__), epilog=EXAMPLES)
    add_options(parser, "requests", (_INPUT, _OUTPUT, _SKIP_DONE, options.SIGN, options.QUIET))
    add_options(parser, "model", MODEL_OPTIONS)
    engine = [option for option in ENGINE_OPTIONS if option not in _NOT_HERE]
    add_options(parser, ENGINE_TITLE, engine)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the file; return the exit code."""
    return exit_code(lambda: _run(make_parser().parse(argv)))


def _run(args: argparse.Namespace) -> int:
    check_engine_options(args)
    with bad_input(rephrase=partial(in_flags, options=ENGINE_OPTIONS), kinds=(ImportError,)):
        where = "standard input" if args.input_file == "-" else args.input_file
        if args.input_file == "-":
            lines = read_batch(sys.stdin, where)
        else:
            with Path(args.input_file).open(encoding="utf-8") as file:
                lines = read_batch(file, where)
        served = args.served_model_name or Path(args.model).name
        check_models(lines, [served, *read_lora_modules(args.lora_modules)], where)
        output = BatchOutput(args.output, lines, skips_done=args.skip_done)
        check_model_files(args)
        try:
            from detjax.server.batch import run_batch
        except ImportError as error:
            raise ImportError(f'{error}; pip install "detjax[serve]"') from error
        if not args.quiet:
            log_to_stderr("warning")
        num_refused = asyncio.run(run_batch(args, output))
    if num_refused:
        raise InputError(
            f"{num_refused} of {len(lines)} requests were refused; their lines in {args.output} "
            "say why"
        )
    return OK


if __name__ == "__main__":
    sys.exit(main())
