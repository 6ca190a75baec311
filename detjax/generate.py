# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.generate`: continue prompts, and prove that the answer is always the same.

What chooses bits and what does not stand apart in `--help`. JAX is imported only once the command
line and the prompts are known to be good.
"""

import sys
from collections.abc import Sequence

from detjax.cli.command import run
from detjax.cli.errors import exit_code
from detjax.cli.model import OpensModel, open_model
from detjax.cli.parser import parse_args


def main(argv: Sequence[str] | None = None, *, open_model: OpensModel = open_model) -> int:
    """Run the command; return its exit code. See `--help` for what each means."""
    return exit_code(lambda: run(parse_args(argv), open_model=open_model))


if __name__ == "__main__":
    sys.exit(main())
