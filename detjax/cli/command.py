# SPDX-License-Identifier: Apache-2.0
"""The command, from its options to its exit code: what the other files here do, in order."""

import sys
import time
from pathlib import Path

from detjax.cli import report
from detjax.cli.arguments import GenerateArgs, engine_options, with_defaults
from detjax.cli.check import (
    check_runs,
    differences,
    plan_runs,
    show_check,
    show_elsewhere,
    show_plan,
)
from detjax.cli.display import Display
from detjax.cli.elsewhere import run_elsewhere
from detjax.cli.errors import BITS_DIFFER, OK, bad_input
from detjax.cli.job import make_job, seeded
from detjax.cli.model import OpensModel, read_model_files
from detjax.cli.output import SilentWriter, digest_of_all, make_writer, to_json
from detjax.cli.prompts import read_prompts
from detjax.cli.receipts import write_receipts
from detjax.cli.run import RunPlan, RunResult, run_job
from detjax.cli.warm import warm
from detjax.engine.trace import NO_TRACE, Trace
from detjax.models.generation_config import default_sampling


def run(args: GenerateArgs, *, open_model: OpensModel) -> int:
    """Do what the command line asks; return the exit code.

    Raises:
        InputError: If something given cannot be done.
    """
    prompts = read_prompts(args)
    folder, config, tokenizer = read_model_files(args)
    if args.generation_config == "auto":
        with bad_input():
            args = with_defaults(args, default_sampling(folder))
    args, is_drawn = seeded(args, prompts)
    job = make_job(args, prompts, tokenizer, config)
    max_len = job.work.max_len(config.max_position_embeddings)
    asked = engine_options(args, max_len=max_len)
    display = Display()
    elsewhere = run_elsewhere(args, prompts) if args.check_process else None
    started_s = time.perf_counter()
    with display.loading() as progress:
        model = open_model(args, folder, progress, max_len)
    load_s = time.perf_counter() - started_s
    plans = plan_runs(args, job, asked, lambda asked: model.size_engine(asked, job.work))
    if args.warm:
        display.facts(report.card(args, folder, config, model, plans[0].engine))
        with display.loading() as progress:
            compiled = warm(model.make_engine(plans[0].engine, NO_TRACE), progress)
        report.show_compiled(compiled, display)
        return OK
    wants_identity = args.format != "text" or args.receipts is not None
    identity = model.identify(tokenizer) if wants_identity else None
    display.facts(report.card(args, folder, config, model, plans[0].engine))
    if is_drawn:
        display.facts({"seed": f"{args.seed}, drawn: --seed {args.seed} gives these answers again"})
    if args.check:
        show_plan(plans, display)

    def run_again(plan: RunPlan) -> RunResult:
        silent = SilentWriter()
        return run_job(job, plan, model, tokenizer, writer=silent, display=display, is_live=False)

    timeline = Trace()
    first = run_job(
        job,
        plans[0],
        model,
        tokenizer,
        writer=make_writer(
            args.format,
            sys.stdout,
            has_headers=len(job.seqs) > 1,
            model={} if identity is None else identity.model,
            extras=job.extras,
        ),
        display=display,
        # Elsewhere than on a terminal text and lines of progress may go into one file.
        is_live=args.format == "text" and (sys.stdout.isatty() or not display.is_terminal),
        tracer=timeline if args.trace else NO_TRACE,
    )
    stats = report.run_stats(first, load_s)
    check = check_runs(first, plans, run_again, display) if args.check else None
    if args.format == "json":
        assert identity is not None
        print(to_json(report.document(args, identity, job, first, model, stats, check)), flush=True)
    if args.receipts is not None:
        assert identity is not None
        with bad_input("--receipts: "):
            write_receipts(args, identity, first.outputs, job)
    if args.trace:
        with bad_input("--trace: "):
            timeline.write(Path(args.trace))
    report.show_end(first, stats, display, with_digests=args.format == "text")
    if args.stats:
        report.show_stats(first.stats, display)
    digest = digest_of_all(first.outputs)
    if check is not None:
        show_check(check, digest, display)
    is_expected = args.expect_digest in (None, digest)
    if not is_expected:
        display.line(f"digest {digest} is not the expected {args.expect_digest}", style="bold red")
    elif args.expect_digest is not None:
        display.line(f"digest {digest} is the expected one", style="bold green")
    lines = () if check is None else check.lines
    if elsewhere is not None:
        lines += show_elsewhere(differences(first.outputs, elsewhere), display)
    return BITS_DIFFER if lines or not is_expected else OK
