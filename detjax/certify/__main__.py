# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.certify`: prove the claims here, for a model and an engine configuration.

JAX is imported only after the command line has been checked.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from detjax import __version__
from detjax.certify.restart import NewProcess, new_process
from detjax.cli.errors import BAD_INPUT, BITS_DIFFER, OK, one_line
from detjax.engine.config import MODES
from detjax.models.hf_config import config_from_hf
from detjax.models.hub import check_model

EXAMPLES = """\
examples:
  python -m detjax.certify
  python -m detjax.certify --devices 8 --minutes 10 --html certificate.html --json certificate.json
  python -m detjax.certify --model Qwen/Qwen3-0.6B --tp 2 --batch-size 64
  python -m detjax.certify --random-weights config.json --max-len 131072

Each claim has cases, which must not differ in a bit, and a control without the guarantee, which
must differ. exit codes: 0 all proven, 2 the input is wrong or cannot be done, 3 a bit differs or a
control shows nothing
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m detjax.certify",
        description=(__doc__ or "").split("\n\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"detjax {__version__}")
    add = parser.add_argument
    add("--model", default="novels-6m", metavar="DIR_OR_ID",
        help="a folder in Hugging Face format, or an id (default: the small model)")  # fmt: skip
    add("--revision", help="branch, tag or commit of an id")
    add("--random-weights", metavar="CONFIG.json",
        help="a model of this configuration with random weights, in place of --model")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--cast-weights", choices=("none", "bfloat16"), default="none")
    add("--backend", choices=("auto", "portable", "sm90"), default="auto")
    add(
        "--tp",
        type=int,
        default=1,
        help="devices that share each layer, on the first mesh; the other meshes follow",
    )
    add("--dp", type=int, default=1, help="replicas on the first mesh")
    add(
        "--devices",
        type=int,
        default=2,
        help="number of virtual devices if there is no GPU (default: 2)",
    )
    engine = parser.add_argument_group("engine (default: as detjax.serve chooses)")
    engine.add_argument("--mode", choices=[m for m in MODES if m != "fast"], default="invariant")
    engine.add_argument("--max-len", type=int, help="most tokens of a prompt and its answer")
    engine.add_argument("--batch-size", type=int, help="sequences that run at once")
    engine.add_argument("--prefill-chunk", type=int)
    engine.add_argument("--decode-steps", type=int)
    engine.add_argument("--cache-pages", type=int, dest="num_pages")
    engine.add_argument("--kv-memory", type=float, default=0.9, metavar="SHARE",
                        help="of the GPU's memory, for weights and cache together")  # fmt: skip
    out = parser.add_argument_group("depth and output")
    out.add_argument("--minutes", type=float, default=0.0, metavar="N",
                     help="continue with other requests so long (default: one round)")  # fmt: skip
    out.add_argument("--json", type=Path, metavar="FILE", help="write the certificate")
    out.add_argument("--html", type=Path, metavar="FILE", help="write it as a page for people")
    add("--answers", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    args = parser.parse_args(given)
    for name in ("tp", "dp", "devices", "max_len", "batch_size", "prefill_chunk", "decode_steps"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    for path in (args.json, args.html):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.absolute().parent}")
    try:
        if not args.answers:
            _check_given(args)
        return _run(args, given)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return BAD_INPUT


def _check_given(args: argparse.Namespace) -> None:
    """Refuse impossible models and sizes before JAX starts, here and in a new process."""
    if args.random_weights is None:
        check_model(args.model, revision=args.revision)
    else:
        config_from_hf(json.loads(Path(args.random_weights).read_text()))
    if not 0 < args.kv_memory <= 1:
        raise ValueError(f"--kv-memory {args.kv_memory} must be above 0 and at most 1")


def _run(args: argparse.Namespace, given: Sequence[str]) -> int:
    if args.answers:
        return _answer(args)
    with new_process(given) as restarted:  # before JAX is imported, which takes a second or two
        return _certify(args, restarted)


def _answer(args: argparse.Namespace) -> int:
    """Answer the requests, in the new process."""
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
    console.print("all claims hold" if is_proven else "NOT PROVEN", style="bold")
    if args.json is not None:
        args.json.write_text(json.dumps(certificate.json(), indent=1), encoding="utf-8")
    if args.html is not None:
        args.html.write_text(render(certificate), encoding="utf-8")
    return OK if is_proven else BITS_DIFFER


if __name__ == "__main__":
    sys.exit(main())
