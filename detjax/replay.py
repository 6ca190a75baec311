# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.replay FILE`: run receipts again, in another batch and mesh, and compare.

Every token and every float32 logprob must have the same bits.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from detjax.cli.receipts import add_options, run_command

if TYPE_CHECKING:  # imports JAX
    from detjax.proof.receipt import Receipt

EXAMPLES = """\
examples:
  python -m detjax.generate --prompt "The old house" --receipts answers.jsonl
  python -m detjax.replay answers.jsonl --tp 2 --batch-size 3 --shuffle 1

exit codes: 0 all equal, 2 something given cannot be done, 3 an answer differs
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run receipts again; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m detjax.replay",
        description=(__doc__ or "").split(": ", 1)[1],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--mode", choices=("invariant", "dvr"), default="invariant",
                        help="dvr drafts with fast kernels and verifies")  # fmt: skip
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="ask in another order")
    args = parser.parse_args(argv)

    def order(receipts: Sequence["Receipt"]) -> Sequence[int]:
        if args.shuffle is None:
            return range(len(receipts))
        return np.random.default_rng(args.shuffle).permutation(len(receipts)).tolist()

    return run_command(
        args,
        what="replayed",
        engine_options=lambda receipts: {"mode": args.mode},
        has_predictions=False,
        order=order,
    )


if __name__ == "__main__":
    sys.exit(main())
