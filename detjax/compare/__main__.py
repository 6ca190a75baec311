# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.compare A B`: how two sets of answers differ, and whether a score does."""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import rich.console
import rich.table

from detjax import __version__
from detjax.cli.arguments import GenerateArgs
from detjax.cli.errors import BAD_INPUT, BITS_DIFFER, OK, InputError, one_line
from detjax.cli.prompts import read_prompts
from detjax.compare.answers import ComparedAnswer, ServerQuery, ask_server, paired, read_answers
from detjax.compare.comparison import Comparison, Scores, compare

EPILOG = """\
A and B are files of JSON lines, or addresses of servers with OpenAI's API.
A line is an answer: of python -m detjax.generate --format jsonl, a response of OpenAI's API, or an
object with `text`. Answers are paired by `id`, else by prompt and sequence, else by line.

examples:
  python -m detjax.compare old.jsonl new.jsonl
  python -m detjax.compare old.jsonl new.jsonl --score correct
  python -m detjax.compare http://127.0.0.1:8000 http://127.0.0.1:8001 --prompts-file prompts.txt

exit codes: 0 nothing differs, 2 the input is wrong or cannot be done, 3 an answer differs
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m detjax.compare",
        description="Compare two sets of answers to the same prompts: texts, tokens, bits, scores.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"detjax {__version__}")
    parser.add_argument("a", metavar="A", help="a file, or the address of a server")
    parser.add_argument("b", metavar="B", help="another file or address")
    parser.add_argument("--score", metavar="FIELD", help="compare this field of every line: a "
                        "number, true or false")  # fmt: skip
    parser.add_argument("--alpha", type=float, default=0.05, metavar="P",
                        help="a difference of scores is called more than chance below this "
                        "p-value (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    servers = parser.add_argument_group("servers")
    servers.add_argument("--prompts-file", metavar="FILE", help="a prompt a line, or JSON lines "
                         "with `prompt`")  # fmt: skip
    for name, kind, default, said in (
        ("max-tokens", int, 64, "most tokens of an answer"),
        ("temperature", float, 0.0, "0 is greedy"),
        ("seed", int, 0, "seed of every answer"),
        ("concurrency", int, 8, "requests at once"),
    ):
        servers.add_argument(f"--{name}", type=kind, default=default, metavar="N",
                             help=f"{said} (default: {default})")  # fmt: skip
    servers.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY",
                         help="API key of both servers (default: OPENAI_API_KEY)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = make_parser().parse_args(argv)
    try:
        found = _compared(args)
    except InputError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return BAD_INPUT
    if args.json:
        print(json.dumps(found.as_dict()))
    else:
        _show(found, args.alpha)
    return OK if found.is_equal else BITS_DIFFER


def _compared(args: argparse.Namespace) -> Comparison:
    are_servers = [given.startswith(("http://", "https://")) for given in (args.a, args.b)]
    if not 0 < args.alpha < 1:
        raise InputError(f"--alpha {args.alpha} must be between 0 and 1")
    if not all(are_servers):
        if args.prompts_file is not None:
            raise InputError("--prompts-file is for two servers; a file has its answers already")
        if any(are_servers):
            raise InputError(f"{args.a} and {args.b}: compare two files, or two servers")
        sets = [read_answers(Path(given), args.score) for given in (args.a, args.b)]
        return compare(list(paired(*sets)))
    if args.score is not None:
        raise InputError("--score is a field of two files; a server's answers have none")
    return compare(list(paired(*_asked(args))))


def _asked(args: argparse.Namespace) -> list[list[ComparedAnswer]]:
    if args.prompts_file is None:
        raise InputError("two servers need prompts; give --prompts-file FILE")
    for name in ("max_tokens", "concurrency"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0")
    prompts = read_prompts(GenerateArgs(prompts_file=args.prompts_file))
    for prompt in prompts:
        if prompt.text is None:
            raise InputError(f"{prompt.origin} has no `prompt`; give text")
    asked = ServerQuery(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        concurrency=args.concurrency,
    )
    texts = [str(prompt.text) for prompt in prompts]
    return [ask_server(url, texts, asked, args.api_key) for url in (args.a, args.b)]


def _show(found: Comparison, alpha: float) -> None:
    console = rich.console.Console(highlight=False, soft_wrap=True)
    table = rich.table.Table("", f"of {found.num_answers} answers differ")
    for what, count in (
        ("text", found.num_texts),
        ("a token", found.num_tokens),
        ("a bit of a token or logprob", found.num_bits),
    ):
        table.add_row(what, "not in both sets" if count is None else str(count))
    console.print(table)
    if found.first_tokens:
        firsts = found.first_tokens
        console.print(
            f"The first token that differs: {min(firsts)} at the earliest, "
            f"{statistics.median(firsts):g} in the median, {max(firsts)} at the latest (from 0)."
        )
    if found.largest_gap:
        console.print(f"Before tokens differ, logprobs differ by up to {found.largest_gap:.3g}.")
    if found.scores is not None:
        console.print(_sentence(found.scores, alpha))


def _sentence(scores: Scores, alpha: float) -> str:
    verdict = "more than chance" if scores.p_value < alpha else "no more than chance"
    return (
        f"Scores: A {scores.mean_a:.4g}, B {scores.mean_b:.4g}; B is better at "
        f"{scores.num_better} and worse at {scores.num_worse} prompts. If both were equally good, "
        f"a difference as large would come up with probability {scores.p_value:.3g}: {verdict}."
    )


if __name__ == "__main__":
    sys.exit(main())
