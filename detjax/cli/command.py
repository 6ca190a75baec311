# SPDX-License-Identifier: Apache-2.0
"""The command, from its options to its exit code: what the other files here do, in order."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from detjax.cli import report
from detjax.cli.arguments import GenerateArgs, engine_options, with_defaults
from detjax.cli.check import (
    CheckResult,
    check_runs,
    differences,
    plan_runs,
    show_check,
    show_new_process,
    show_plan,
)
from detjax.cli.command_line import output_of
from detjax.cli.display import Display
from detjax.cli.errors import BITS_DIFFER, OK, bad_input
from detjax.cli.model import OpenModel, OpensModel, read_model_files
from detjax.cli.new_process import run_in_new_process
from detjax.cli.output import (
    AbstractCompletionWriter,
    SilentWriter,
    TextSink,
    digest_of_all,
    make_writer,
    to_json,
)
from detjax.cli.prompt_batch import PromptBatch, make_prompt_batch, seeded
from detjax.cli.prompts import read_prompts
from detjax.cli.receipts import write_receipts
from detjax.cli.run import RunPlan, RunResult, run_batch
from detjax.cli.warm import warm
from detjax.compilation.loaded_code import one_moment
from detjax.engine.heap import collected_later, frozen_heap
from detjax.engine.trace import NO_TRACE, Trace, TracesEvents
from detjax.models.generation_config import default_sampling

if TYPE_CHECKING:  # imports JAX
    from detjax.llm import LLM
    from detjax.proof.identity import Identity


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """What is computed, and with what."""

    args: GenerateArgs
    batch: PromptBatch
    model: OpenModel
    display: Display
    load_s: float

    def first_run(
        self, plan: RunPlan, out: TextSink, tracer: TracesEvents
    ) -> tuple[RunResult, "Identity | None"]:
        """Compute the batch and write its completions; the identity is None if none is written."""
        args, display = self.args, self.display
        llm = self.model.make_llm(plan.engine, tracer=tracer)
        is_written = args.format != "text" or args.receipts is not None
        identity = llm.identity() if is_written else None
        writer = make_writer(
            args.format,
            out,
            has_headers=len(self.batch.seqs) > 1,
            model={} if identity is None else identity.model,
            extras=self.batch.extras,
        )
        is_text = args.format == "text" and args.output is None
        # Elsewhere than on a terminal text and lines of progress may go into one file.
        is_live = is_text and (sys.stdout.isatty() or not display.is_terminal)
        return self._run(plan, llm, writer, is_live=is_live), identity

    def run_again(self, plan: RunPlan) -> RunResult:
        """Compute the batch in another way, and write nothing."""
        return self._run(plan, self.model.make_llm(plan.engine), SilentWriter(), is_live=False)

    def _run(
        self, plan: RunPlan, llm: "LLM", writer: AbstractCompletionWriter, *, is_live: bool
    ) -> RunResult:
        return run_batch(
            self.batch, plan, llm, processes=self.model.processes,
            writer=writer, display=self.display, is_live=is_live,
        )  # fmt: skip


@one_moment()  # WHY: each module is hashed once for all of a start
def run(args: GenerateArgs, *, open_model: OpensModel) -> int:
    """Do what the command line asks; return the exit code.

    Raises:
        InputError: If something given cannot be done.
    """
    display = Display(is_quiet=args.quiet)
    prompts = read_prompts(
        args.prompt, args.prompts_file, is_chat=args.chat, system_prompt=args.system_prompt
    )
    files = read_model_files(args)
    if args.generation_config == "auto":
        with bad_input():
            args = with_defaults(args, default_sampling(files.folder))
    args, is_drawn = seeded(args, prompts)
    batch = make_prompt_batch(args, prompts, files.tokenizer, files.config)
    max_len = args.max_len or batch.work.max_len(files.config.max_position_embeddings)
    asked = engine_options(args, max_len=max_len)
    of_new_process = run_in_new_process(args, prompts) if args.check_process else None
    started_s = time.perf_counter()
    with display.progress("loading", in_bytes=True) as progress, collected_later():
        model = open_model(args, files, progress, max_len)
    batch = batch.naming(model.adapter_hashes)
    opened = _Opened(
        args=args, batch=batch, model=model, display=display,
        load_s=time.perf_counter() - started_s,
    )  # fmt: skip
    plans = plan_runs(args, batch, asked, lambda asked: model.size_engine(asked, batch.work))
    display.facts(report.card(args, files, model.config_of(plans[0].engine)))
    if args.warm:
        with display.compiling() as (progress, checked):
            compiled = warm(model.make_llm(plans[0].engine).engine, progress, checked)
        report.show_compiled(compiled, display)
        return OK
    if is_drawn:
        display.facts({"seed": f"{args.seed}, drawn: --seed {args.seed} gives these answers again"})
    if args.check:
        show_plan(plans, display)
    with frozen_heap(), output_of(args.output) as out:
        first, check = _compute(opened, plans, out)
    return _tell(opened, first, check, of_new_process)


def _compute(
    opened: _Opened, plans: Sequence[RunPlan], out: TextSink
) -> tuple[RunResult, CheckResult | None]:
    """Run the first plan and write its completions; compare the others with it if asked for."""
    args = opened.args
    timeline = Trace()
    first, identity = opened.first_run(plans[0], out, timeline if args.trace else NO_TRACE)
    check = check_runs(first, plans, opened.run_again, opened.display) if args.check else None
    _write_files(opened, first, check, identity, timeline, out)
    return first, check


def _write_files(
    opened: _Opened,
    first: RunResult,
    check: CheckResult | None,
    identity: "Identity | None",
    timeline: Trace,
    out: TextSink,
) -> None:
    """Write what is written once the first run has ended."""
    args = opened.args
    stats = report.run_stats(first, opened.load_s)
    if args.format == "json":
        assert identity is not None
        entry = report.document(args, identity, opened.batch, first, stats, check)
        print(to_json(entry), file=out, flush=True)
    if args.receipts is not None:
        assert identity is not None
        with bad_input("--receipts: "):
            write_receipts(args, identity, first.outputs, opened.model.files.config.eos_token_ids)
    if args.trace:
        with bad_input("--trace: "):
            timeline.write(Path(args.trace))


def _tell(
    opened: _Opened,
    first: RunResult,
    check: CheckResult | None,
    of_new_process: Sequence | None,
) -> int:
    """Write digests, times and verdicts; return the exit code."""
    args, display = opened.args, opened.display
    stats = report.run_stats(first, opened.load_s)
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
    if of_new_process is not None:
        lines += show_new_process(differences(first.outputs, of_new_process), display)
    return BITS_DIFFER if lines or not is_expected else OK
