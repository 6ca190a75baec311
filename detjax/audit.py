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

from detjax.cli.command_line import CommandParser, check_counts, description_of
from detjax.cli.errors import exit_code
from detjax.cli.options import Option
from detjax.cli.receipts import make_receipt_parser, run_command
from detjax.proof.windows import MOST_WINDOW, audit_options, longest_first

if TYPE_CHECKING:  # imports JAX
    from detjax.proof.receipt import Receipt

_WINDOW = Option(
    name="window",
    parse=int,
    default_text=f"what pads least, {MOST_WINDOW} at most",
    help="tokens of an answer in a window",
)


def make_parser() -> CommandParser:
    """The command line."""
    return make_receipt_parser(
        "audit",
        description_of(__doc__),
        "python -m detjax.audit answers.jsonl",
        (_WINDOW,),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Check receipts; return the exit code."""
    return exit_code(lambda: _run(make_parser().parse(argv)))


def _run(args: argparse.Namespace) -> int:
    check_counts(args, (_WINDOW,))

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
