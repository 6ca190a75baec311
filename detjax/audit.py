# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.audit FILE`: check receipts by prefill, at a fraction of the decode cost.

The answer is prefilled in windows of many tokens. Each token is chosen again, from its logits and
the noise of the receipt's seed. Prefill and decode have the same bits, so every token and every
float32 logprob must equal the receipt's. With --positions tokens are drawn at random, and each
answer is checked up to its last drawn token. Lines that are copies of others are checked once.
"""

import argparse
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from detjax.cli.command_line import CommandParser, check_counts, check_file, description_of
from detjax.cli.errors import InputError, exit_code
from detjax.cli.options import Option
from detjax.cli.receipts import CheckPlan, make_receipt_parser, run_command
from detjax.pallas_kernels.backend import Backend
from detjax.proof.windows import MOST_WINDOW, audit_options, cpu_audit_options, longest_first

if TYPE_CHECKING:  # imports JAX
    from detjax.proof.receipt import Receipt

_WINDOW = Option(
    name="window",
    parse=int,
    default_text=f"the length with the least padding, at most {MOST_WINDOW}",
    help="tokens of an answer per prefill window",
)
_POSITIONS = Option(
    name="positions",
    parse=int,
    default_text="all",
    help="draw N tokens at random from all answers. An answer is checked up to its last drawn "
    "token; an answer without one is not checked",
)
_SEED = Option(
    name="seed",
    metavar="TEXT",
    default_text="random, and printed",
    help="seed of the draw of --positions: any text, such as the value of a public beacon",
)
_RESULTS = Option(
    name="results",
    metavar="FILE",
    parse=Path,
    help="file for the result of each receipt. Receipts that have a result in it are skipped",
)


def make_parser() -> CommandParser:
    """The command line."""
    return make_receipt_parser(
        "audit",
        description_of(__doc__),
        "python -m detjax.audit answers.jsonl --positions 20 --seed beacon",
        (_WINDOW, _POSITIONS, _SEED, _RESULTS),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Check receipts; return the exit code."""
    return exit_code(lambda: _run(make_parser().parse(argv)))


def _run(args: argparse.Namespace) -> int:
    check_counts(args, (_WINDOW, _POSITIONS))
    if args.seed is not None and args.positions is None:
        raise InputError(f"{_SEED.flag} {args.seed} draws nothing without {_POSITIONS.flag}")
    if args.results is not None:
        check_file(_RESULTS.flag, args.results)
    return run_command(args, what="audited", plan=partial(_plan, args))


def _plan(
    args: argparse.Namespace,
    receipts: Sequence["Receipt"],
    answer_lens: Sequence[int],
    backend: Backend,
) -> CheckPlan:
    """Draw positions, and choose steps that fit what is checked."""
    from detjax.proof.positions import checked_lens, draw_positions

    lens, drawn, not_checked = answer_lens, "", ""
    if args.positions is not None:
        seed = secrets.token_hex(8) if args.seed is None else args.seed
        places = draw_positions(receipts, args.positions, seed)
        lens = checked_lens(len(receipts), places)
        drawn = f"{len(places)} positions of {sum(answer_lens)}, with --seed {seed}"
        not_checked = (
            f"{sum(answer_lens) - sum(lens)} tokens behind the last drawn one of each receipt, "
            "with which its text and end agree"
        )
    checked = [i for i, n in enumerate(lens) if n]
    sizes = [lens[i] for i in checked], [len(receipts[i].prompt_token_ids) for i in checked]
    if backend.platform == "cpu":
        options = cpu_audit_options(*sizes, num_replicas=args.dp, window=args.window)
    else:
        options = audit_options(*sizes, window=args.window)
    return CheckPlan(
        engine_options=options,
        order=longest_first(lens),
        has_predictions=True,
        checked_lens=lens,
        drawn=drawn,
        not_checked=not_checked,
        results=args.results,
    )


if __name__ == "__main__":
    sys.exit(main())
