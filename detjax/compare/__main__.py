# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.compare A B`: how two sets of answers differ, and whether a score does."""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import rich.console
import rich.table

from detjax.cli import options
from detjax.cli.command_line import CommandParser, check_counts, check_file, output_of
from detjax.cli.errors import BITS_DIFFER, EXIT_CODES, OK, InputError, exit_code
from detjax.cli.options import Option, add_options
from detjax.cli.prompts import read_prompts
from detjax.compare.answers import ComparedAnswer, ServerQuery, ask_server, paired, read_answers
from detjax.compare.comparison import Comparison, Scores, compare

EPILOG = f"""\
A and B are files of JSON lines, or addresses of servers with OpenAI's API. A line is an answer: a
line of python -m detjax.generate --format jsonl or detjax.run_batch, a response of OpenAI's API
(completions, chat, responses), or an object with `text`. Calls, reasoning and refusals count as
text. Answers are paired by `id` (of a batch `custom_id`), else by prompt and sequence, else by line
number. The exit code is {BITS_DIFFER} if a text, finish_reason, token, logprob or score of --score
differs, by however little: the p-value of scores has no part in it.

examples:
  python -m detjax.compare old.jsonl new.jsonl
  python -m detjax.compare old.jsonl new.jsonl --score correct
  python -m detjax.compare http://127.0.0.1:8000 http://127.0.0.1:8001 --prompts-file prompts.txt

{EXIT_CODES}
"""

_SCORE = Option(
    name="score",
    metavar="FIELD",
    help="also compare this field of every line: a number, true or false",
)
_ALPHA = Option(
    name="alpha",
    parse=float,
    default=0.05,
    metavar="P",
    help="significance level: scores with a smaller p-value are reported as different",
)
_CONCURRENCY = Option(name="concurrency", parse=int, default=8, help="most requests at once")
_SERVERS = (
    replace(options.PROMPTS_FILE, help=".txt: one prompt per line. .jsonl: one object with "
            "`prompt` per line"),
    options.MAX_TOKENS,
    options.TEMPERATURE,
    replace(options.SEED, default=0, default_text=""),
    _CONCURRENCY,
    Option(name="api_key", metavar="KEY", default_text="the variable OPENAI_API_KEY",
           help="API key of both servers"),
)  # fmt: skip


def make_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(
        "compare",
        description="Compare two sets of answers to the same prompts: texts, tokens, bits, scores.",
        epilog=EPILOG,
    )
    parser.add_argument("a", metavar="A", help="file, or address of a server")
    parser.add_argument("b", metavar="B", help="the other file or server")
    add_options(parser, "two files", (_SCORE, _ALPHA))
    add_options(parser, "servers: what they are asked", _SERVERS)
    add_options(parser, "output", (options.FORMAT, options.OUTPUT))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return exit_code(lambda: _run(make_parser().parse(argv)))


def _run(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_file(options.OUTPUT.flag, args.output)
    found = _compared(args)
    with output_of(args.output) as out:
        if args.format == "json":
            print(json.dumps(found.as_dict()), file=out)
        else:
            console = rich.console.Console(file=out, highlight=False, soft_wrap=True)
            _show(found, args.alpha, console)
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
    check_counts(args, (options.MAX_TOKENS, _CONCURRENCY))
    prompts = read_prompts((), args.prompts_file)
    for prompt in prompts:
        if not prompt.text:
            raise InputError(f"{prompt.origin} has no `prompt`; give text")
        given = ("sampling", prompt.sampling), ("lora", prompt.lora)
        for name, value in given:
            if value not in (None, {}):
                raise InputError(
                    f"{prompt.origin} has `{name}`, and both servers are asked each prompt alike: "
                    "leave it out and give --max-tokens, --temperature and --seed; or ask each "
                    "server by a client, and compare the two files"
                )
    asked = ServerQuery(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        concurrency=args.concurrency,
    )
    texts = [prompt.text for prompt in prompts]
    key = os.environ.get("OPENAI_API_KEY") if args.api_key is None else args.api_key
    return [ask_server(url, texts, asked, key) for url in (args.a, args.b)]


def _show(found: Comparison, alpha: float, console: rich.console.Console) -> None:
    table = rich.table.Table("", "differ", "of")
    for what, count, total in (
        ("text", found.num_texts, found.num_answers),
        ("finish_reason", found.num_finish_reasons, found.num_with_finish_reasons),
        ("a token", found.num_tokens, found.num_with_tokens),
        ("a bit of a token or logprob", found.num_bits, found.num_with_bits),
    ):
        table.add_row(what, "not in both sets" if count is None else str(count), str(total))
    console.print(table)
    if found.first_tokens:
        firsts = found.first_tokens
        console.print(
            f"The first token that differs: {min(firsts)} at the earliest, "
            f"{statistics.median(firsts):g} in the median, {max(firsts)} at the latest (from 0)."
        )
    if left_out := found.num_answers - found.num_with_bits:
        console.print(
            f"{left_out} of {found.num_answers} answers lack tokens or logprobs in a set: their "
            "bits were not compared."
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
