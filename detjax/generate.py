# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.generate`: continue prompts, and prove that the answer is always the same.

What chooses bits and what does not stand apart in `--help`. JAX is imported only once the command
line and the prompts are known to be good.
"""

import io
import os
import sys
import traceback
from collections.abc import Sequence

from detjax.cli.command import run
from detjax.cli.errors import BAD_INPUT, INTERNAL_ERROR, INTERRUPTED, READER_GONE, InputError
from detjax.cli.model import OpensModel, open_model
from detjax.cli.parser import parse_args


def main(argv: Sequence[str] | None = None, *, open_model: OpensModel = open_model) -> int:
    """Run the command; return its exit code. See `--help` for what each means."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        return run(parse_args(argv), open_model=open_model)
    except (InputError, FloatingPointError) as error:  # the latter: NaN in the weights
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # WHY: Python would try to flush again at exit, and report that this fails.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except Exception:
        traceback.print_exc()
        print("error: this is a fault of detjax; please report the lines above", file=sys.stderr)
        return INTERNAL_ERROR


if __name__ == "__main__":
    sys.exit(main())
