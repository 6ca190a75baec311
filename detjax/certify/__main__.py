# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.certify`: test the claims on this machine, for a model and an engine.

JAX is imported only once the command line is known to be good.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live

from detjax.certify.restart import NewProcess, new_process
from detjax.cli import options
from detjax.cli.command_line import (
    CommandParser,
    check_counts,
    check_file,
    check_model_option,
    check_share,
    description_of,
)
from detjax.cli.errors import BITS_DIFFER, EXIT_CODES, OK, bad_input, exit_code
from detjax.cli.options import Option, add_options, in_flags
from detjax.models.hf_config import config_from_hf

EXAMPLES = f"""\
examples:
  python -m detjax.certify
  python -m detjax.certify --devices 8 --minutes 10 --html page.html --report certificate.json
  python -m detjax.certify -m Qwen/Qwen3-0.6B --tp 2 --batch-size 64
  python -m detjax.certify --random-weights config.json --max-len 131072

Each claim has cases, whose bits must be equal, and a control without the guarantee, whose bits must
differ. A control whose bits are equal fails the check, because the cases could then find nothing.

{EXIT_CODES}
"""

_DEVICES = Option(
    name="devices", parse=int, default=2, help="number of virtual devices, if there is no GPU"
)
_MODEL = (
    options.MODEL,
    options.REVISION,
    Option(
        name="random_weights",
        metavar="CONFIG.json",
        help="use random weights for this config.json of a model, in place of --model",
    ),
    options.DTYPE,
    options.CAST_WEIGHTS,
    options.QUANTIZED_WEIGHTS,
    options.KV_CACHE_DTYPE,
    options.BACKEND,
)
_MESH = options.TP, options.DP, _DEVICES
_SIZES = options.BATCH_SIZE, options.PREFILL_CHUNK, options.DECODE_STEPS
_MAX_LEN = replace(
    options.MAX_LEN,
    default_text="768 on a CPU; on a GPU the model's context, or the tokens that the cache can "
    "hold if those are fewer",
)
_ENGINE = (
    options.CANONICAL_MODE,
    _MAX_LEN,
    *_SIZES,
    options.NUM_PAGES,
    options.GPU_MEMORY_UTILIZATION,
)
_OUTPUT = (
    Option(
        name="minutes",
        parse=float,
        default=0.0,
        default_text="one round",
        help="repeat with other requests for N minutes",
    ),
    options.REPORT,
    Option(
        name="html",
        metavar="FILE",
        parse=Path,
        help="also write the certificate as an HTML page",
    ),
)


def make_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser("certify", description=description_of(__doc__), epilog=EXAMPLES)
    add_options(parser, "model", _MODEL)
    text = "--tp and --dp give the first mesh. All other meshes of the devices are run after it."
    add_options(parser, "mesh", _MESH, text)
    add_options(
        parser, "engine", _ENGINE, "Sizes that are not given are those of python -m detjax.serve."
    )
    add_options(parser, "depth and output", _OUTPUT)
    parser.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return exit_code(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(given: list[str]) -> int:
    args = make_parser().parse(given)
    check_counts(args, (*_MESH, _MAX_LEN, *_SIZES))
    check_share(args.gpu_memory_utilization)
    for option in (options.REPORT, _OUTPUT[-1]):
        if (path := getattr(args, option.name)) is not None:
            check_file(option.flag, path)
    with bad_input(rephrase=partial(in_flags, options=(*_MESH, *_ENGINE))):
        if not args.answers:
            _check_model(args)
        return _run(args, given)


def _check_model(args: argparse.Namespace) -> None:
    """Refuse a model that cannot be, before JAX starts, here and in a new process."""
    if args.random_weights is None:
        check_model_option(args.model, args.revision)
    else:
        with bad_input(f"--random-weights {args.random_weights}: "):
            config_from_hf(json.loads(Path(args.random_weights).read_text()))


def _run(args: argparse.Namespace, given: Sequence[str]) -> int:
    if args.answers:
        return _answer(args)
    with new_process(given) as restarted:  # before JAX is imported, which takes a second or two
        return _certify(args, restarted)


def _answer(args: argparse.Namespace) -> int:
    """What the new process does."""
    import jax

    from detjax.certify.opening import start_devices
    from detjax.certify.run import print_answers

    start_devices(args)
    print(jax.default_backend(), flush=True)
    print_answers(args)
    return OK


def _certify(args: argparse.Namespace, restarted: NewProcess) -> int:
    from detjax.certify.certificate import Certificate
    from detjax.certify.opening import open_subject, start_devices
    from detjax.certify.page import render
    from detjax.certify.run import certify
    from detjax.certify.table import line, make_map, make_table

    console = Console()
    certificate = Certificate(facts={})
    with console.status("a new process begins"):
        restarted.wait_for_memory()
    start_devices(args)
    with console.status("loading"):
        subject = open_subject(args, args.dp, args.tp)
    live = Live(make_table(certificate), console=console, auto_refresh=False)
    with live:
        for outcome in certify(args, subject, certificate, restarted.answers):
            if not console.is_terminal:
                print(line(outcome), flush=True)
            now = f"{len(certificate.outcomes)} cases; the last: {outcome.case}"
            live.update(make_table(certificate, now=now), refresh=True)
        live.update(make_table(certificate), refresh=True)
    console.print(make_map(certificate))
    is_proven = certificate.is_proven and bool(certificate.probe)
    for outcome in certificate.outcomes:
        if not outcome.is_well and not outcome.is_control:
            console.print(f"{outcome.claim}, {outcome.case}: {outcome.first}", markup=False)
            if outcome.cause:
                console.print(outcome.cause, markup=False, highlight=False, soft_wrap=True)
    for claim, reason in certificate.not_applicable.items():
        console.print(f"{claim}: not applicable: {reason}", markup=False, soft_wrap=True)
    console.print("all claims hold" if is_proven else "NOT PROVEN", style="bold")
    if args.report is not None:
        args.report.write_text(json.dumps(certificate.json(), indent=1), encoding="utf-8")
    if args.html is not None:
        args.html.write_text(render(certificate), encoding="utf-8")
    return OK if is_proven else BITS_DIFFER


if __name__ == "__main__":
    sys.exit(main())
