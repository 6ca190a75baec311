# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.replay FILE`: run receipts again, in another batch and mesh, and compare.

Every token and every float32 logprob must have the same bits. Lines that are copies of others are
run once.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from detjax.cli.command_line import CommandParser, description_of
from detjax.cli.errors import InputError, exit_code
from detjax.cli.options import CANONICAL_MODE, Option
from detjax.cli.receipts import CheckPlan, make_receipt_parser, run_command
from detjax.pallas_kernels.backend import Backend

if TYPE_CHECKING:  # imports JAX
    from detjax.proof.receipt import Receipt

_SHUFFLE = Option(
    name="shuffle",
    parse=int,
    metavar="SEED",
    default_text="the order of the file",
    help="run the receipts in a random order, drawn with this seed",
)


def make_parser() -> CommandParser:
    """The command line."""
    return make_receipt_parser(
        "replay",
        description_of(__doc__),
        "python -m detjax.replay answers.jsonl --tp 2 --batch-size 3 --shuffle 1",
        (CANONICAL_MODE, _SHUFFLE),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run receipts again; return the exit code."""
    return exit_code(lambda: _run(make_parser().parse(argv)))


def _run(args: argparse.Namespace) -> int:
    if args.shuffle is not None and args.shuffle < 0:
        raise InputError(f"{_SHUFFLE.flag} {args.shuffle} must be at least 0")

    return run_command(args, what="replayed", plan=partial(_plan, args))


def _plan(
    args: argparse.Namespace,
    receipts: Sequence["Receipt"],
    answer_lens: Sequence[int],
    backend: Backend,
) -> CheckPlan:
    order = list(range(len(receipts)))
    if args.shuffle is not None:
        order = np.random.default_rng(args.shuffle).permutation(len(receipts)).tolist()
    return CheckPlan(
        engine_options={"mode": args.mode},
        order=order,
        has_predictions=False,
        checked_lens=answer_lens,
    )


if __name__ == "__main__":
    sys.exit(main())
