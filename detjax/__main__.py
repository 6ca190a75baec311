# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax`: lists the commands, and runs them: `python -m detjax generate ...`."""

import runpy
import sys
from collections.abc import Sequence

from detjax import __version__
from detjax.cli.errors import BAD_INPUT, OK
from detjax.cli.verbs import USAGE, VERBS, help_text, unknown_verb


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb as `python -m detjax.VERB` does; return the exit code of a list or a mistake."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return OK
    if args[0] == "--version":
        print(f"detjax {__version__}")
        return OK
    verb = VERBS.get(args[0])
    if verb is None:
        print(f"error: {unknown_verb(args[0])}\n{USAGE}", file=sys.stderr)
        return BAD_INPUT
    before, sys.argv = sys.argv, [verb.module, *args[1:]]
    try:
        # It ends the process, or raises SystemExit with its exit code.
        runpy.run_module(verb.module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
    return OK


if __name__ == "__main__":
    sys.exit(main())
