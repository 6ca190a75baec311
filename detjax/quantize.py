# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.quantize`: makes an 8-bit or 4-bit copy of a model, by rounding to nearest.

The copy is in compressed-tensors' format, which detjax, vLLM and transformers read. Nothing is
calibrated, so the quality is that of plain rounding. Embeddings, lm_head, norms and routers keep
their bits.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import rich.console

from detjax import __version__
from detjax.cli.errors import BAD_INPUT, OK
from detjax.models.hub import check_model
from detjax.progress import show_progress

SCHEMES = {
    "fp8-dynamic": "float8_e4m3fn, a scale for each output channel; activations in 8 bits, too",
    "int8-w8a8": "int8, a scale for each output channel; activations in 8 bits, too",
    "int8-w8a16": "int8, a scale for each output channel",
    "int4-w4a16": "int4, a scale for each 128 input channels of an output channel",
}
EXAMPLES = """\
examples:
  python -m detjax.quantize --model Qwen/Qwen3-8B --scheme int4-w4a16 --out qwen3-8b-w4
  python -m detjax.generate --model qwen3-8b-w4 --prompt "The capital of France is"

exit codes: 0 written, 2 something given cannot be done
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m detjax.quantize",
        description=(__doc__ or "").split(": ", 1)[1],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"detjax {__version__}")
    parser.add_argument("--model", required=True, metavar="DIR_OR_ID",
                        help="folder in Hugging Face format, or id on Hugging Face")  # fmt: skip
    parser.add_argument("--revision", metavar="REVISION",
                        help="branch, tag or commit of an id (default: main)")  # fmt: skip
    parser.add_argument("--scheme", required=True, choices=SCHEMES, help="; ".join(
                        f"{name}: {what}" for name, what in SCHEMES.items()))  # fmt: skip
    parser.add_argument("--out", required=True, metavar="DIR", type=Path,
                        help="folder to make; must not exist or be empty")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Quantise; return the exit code."""
    args = make_parser().parse_args(argv)
    console = rich.console.Console(stderr=True)
    try:
        check_model(args.model)
        # WHY: these import JAX, which what has been checked above does not need.
        from detjax.models.hub import resolve_model
        from detjax.models.quantization.quantize import RECIPES, quantize_folder

        folder = resolve_model(args.model, revision=args.revision)
        with show_progress("quantising", console, _say) as progress:
            quantize_folder(folder, args.out, RECIPES[args.scheme], progress=progress)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    sizes = [sum(f.stat().st_size for f in p.glob("*.safetensors")) for p in (folder, args.out)]
    print(f"{args.out}: {sizes[1] / 1e9:.2f} GB of weights, from {sizes[0] / 1e9:.2f} GB")
    return OK


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
