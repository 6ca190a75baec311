# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.quantize`: make an 8-bit or 4-bit copy of a model, by rounding to nearest.

The copy is in the format of compressed-tensors, which detjax, vLLM and transformers read. There is
no calibration, so the quality is that of rounding to nearest. Embeddings, lm_head, norms, routers
and linear attention are not quantised; `ignore` in the copy's config.json lists the linear modules
among them.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from detjax.cli import options
from detjax.cli.command_line import CommandParser, check_model_option, description_of
from detjax.cli.display import Display
from detjax.cli.errors import EXIT_CODES, OK, bad_input, exit_code
from detjax.cli.options import Option, add_options

SCHEMES = {
    "fp8-dynamic": "float8_e4m3fn, one scale per output channel, 8-bit activations",
    "fp8-block": "float8_e4m3fn, one scale per block of 128 x 128, 8-bit activations",
    "int8-w8a8": "int8, one scale per output channel, 8-bit activations",
    "int8-w8a16": "int8, one scale per output channel",
    "int4-w4a16": "int4, one scale per output channel and group of input channels",
}
EXAMPLES = f"""\
examples:
  python -m detjax.quantize -m Qwen/Qwen3-8B --scheme int4-w4a16 -o qwen3-8b-w4
  python -m detjax.generate -m qwen3-8b-w4 -p "The capital of France is"

{EXIT_CODES}
"""

_MODEL = replace(options.MODEL, default=None, is_required=True)
_SCHEME = Option(
    name="scheme",
    choices=tuple(SCHEMES),
    is_required=True,
    help="format of the weights. " + ". ".join(f"{name}: {what}" for name, what in SCHEMES.items()),
)
_GROUP_SIZE = Option(
    name="group_size",
    default=128,
    choices=(32, 64, 128),
    parse=int,
    help="input channels that share a scale, for int4-w4a16 only",
)
_OUTPUT = replace(
    options.OUTPUT,
    metavar="DIR",
    parse=Path,
    is_required=True,
    help="folder for the copy; it must be empty or not exist",
)


def make_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser("quantize", description=description_of(__doc__), epilog=EXAMPLES)
    add_options(parser, "model", (_MODEL, options.REVISION))
    add_options(parser, "output", (_SCHEME, _GROUP_SIZE, _OUTPUT, options.QUIET))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Quantise; return the exit code."""
    return exit_code(lambda: _run(make_parser().parse(argv)))


def _run(args: argparse.Namespace) -> int:
    check_model_option(args.model, args.revision)
    with bad_input():
        # WHY: these import JAX, which what has been checked above does not need.
        from detjax.models.hub import find_model
        from detjax.models.quantization.quantize import RECIPES, quantize_folder
        from detjax.models.tokenizer_files import TOKENIZER_FILE, read_backend

        recipe = RECIPES[args.scheme]
        if recipe.group_size and recipe.block_rows == 1:
            recipe = replace(recipe, group_size=args.group_size)
        elif args.group_size != _GROUP_SIZE.default:
            raise ValueError(
                f"--group-size {args.group_size} is of int4-w4a16; {args.scheme} has no choice"
            )
        folder = find_model(args.model, revision=args.revision)
        read_backend(folder / TOKENIZER_FILE)  # nobody could open a copy without one
        with Display(is_quiet=args.quiet).progress("quantising") as progress:
            quantize_folder(folder, args.output, recipe, progress=progress)
    sizes = [sum(f.stat().st_size for f in p.glob("*.safetensors")) for p in (folder, args.output)]
    print(f"{args.output}: {_size(sizes[1])} of weights, from {_size(sizes[0])}")
    return OK


def _size(num_bytes: int) -> str:
    """Bytes in gigabytes, of a small model in megabytes."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
