# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.audit FILE`: checks receipts by prefill, at a fraction of decoding's cost.

The answer is given to the model in windows of many tokens, and at each position the choice is made
again from the published noise. Prefill and decode have the same bits, so this is exact: every token
and every float32 logprob must be the receipt's.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from detjax.cli.receipts import add_options, run_command
from detjax.proof.receipt import Receipt

EXAMPLES = """\
examples:
  python -m detjax.generate --prompt "The old house" --temperature 1 --receipts answers.jsonl
  python -m detjax.audit answers.jsonl

exit codes: 0 all equal, 2 something given cannot be done, 3 an answer differs
"""

MAX_WINDOW = 128
"""Tokens of a window: enough that weights are read seldom."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check receipts; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m detjax.audit",
        description=(__doc__ or "").split(": ", 1)[1],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--window", type=int, metavar="N",
                        help=f"tokens of an answer in a step (default: {MAX_WINDOW})")  # fmt: skip
    args = parser.parse_args(argv)

    def engine_options(receipts: Sequence[Receipt]) -> dict[str, Any]:
        longest = max(len(receipt.token_ids) for receipt in receipts)
        window = args.window or min(MAX_WINDOW, 1 << max(longest - 1, 1).bit_length())
        return {"has_prompt_lookup": True, "verify_window": window}

    return run_command(args, what="audited", engine_options=engine_options, has_predictions=True)


if __name__ == "__main__":
    sys.exit(main())
