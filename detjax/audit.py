# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.audit FILE`: check receipts by prefill, at a fraction of the decode cost.

The model gets the answer in windows of many tokens. At each position the choice is made again
from the published noise. Prefill and decode have the same bits, so this is exact: every token and
every float32 logprob must equal the receipt's.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from detjax.cli.receipts import add_options, run_command
from detjax.proof.windows import MOST_WINDOW, audit_options, longest_first

if TYPE_CHECKING:  # imports JAX
    from detjax.proof.receipt import Receipt

EXAMPLES = """\
examples:
  python -m detjax.generate --prompt "The old house" --temperature 1 --receipts answers.jsonl
  python -m detjax.audit answers.jsonl

exit codes: 0 all equal, 2 something given cannot be done, 3 an answer differs
"""


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
                        help="tokens of an answer in a window (default: what pads least, "
                        f"{MOST_WINDOW} at most)")  # fmt: skip
    args = parser.parse_args(argv)
    if args.window is not None and args.window < 1:
        parser.error(f"--window {args.window} must be at least 1")

    def answer_lens(receipts: Sequence["Receipt"]) -> list[int]:
        return [len(receipt.token_ids) for receipt in receipts]

    def engine_options(receipts: Sequence["Receipt"]) -> dict[str, Any]:
        prompt_lens = [len(receipt.prompt_token_ids) for receipt in receipts]
        return audit_options(answer_lens(receipts), prompt_lens, window=args.window)

    return run_command(
        args,
        what="audited",
        engine_options=engine_options,
        has_predictions=True,
        order=lambda receipts: longest_first(answer_lens(receipts)),
    )


if __name__ == "__main__":
    sys.exit(main())
