# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.training.grpo`: reinforcement learning without a rollout-trainer gap.

Rows of JSON and the plot go to `--out`, the table to standard output, progress to standard error.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

try:  # first, as what follows imports it too
    from detjax.training.extras import optax
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2) from error

from detjax.models.hf_config import load_config
from detjax.models.hub import find_model
from detjax.models.identity import model_hash
from detjax.models.loading import LoadedModel
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.opening import choose_placement, load_on_devices
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import configure_virtual_devices, make_mesh
from detjax.training.checkpoint import check_can_save, restore_state, save_state
from detjax.training.plot import save_plot
from detjax.training.policy_gradient import BatchSizes, StepRow, train
from detjax.training.rewards import Rewarded
from detjax.training.rollout import Rollout
from detjax.training.tasks import AbstractTask, ArithmeticTask, Gsm8k
from detjax.training.trainer import Trainer

DESCRIPTION = """\
Train a model with GRPO on problems that a program can check, on exactly what it sampled.

Each step samples answers with the serving engine, rewards them, and makes one update from the
trainer's own log-probabilities of the same tokens. The column KL says how far the two are apart.
With the invariant rollout it is exactly 0.0 at every step, because the trainer's forward pass has
the bits of the engine. Here the engine runs on --rollout-tp devices and the trainer on --devices.
No importance weights are needed, and none are used. The kernels of the fast rollout make no claim.
The same run then trains on probabilities that no sample came from."""

EPILOG = """\
examples:
  python -m detjax.training.grpo                          # both rollouts, bundled model, a laptop
  python -m detjax.training.grpo --seeds 0 1 2 --steps 40 --out runs/sums
  python -m detjax.training.grpo --rollout invariant --rollout-tp 1     # one GPU
  python -m detjax.training.grpo --model Qwen/Qwen3-0.6B --task gsm8k --problems train.jsonl \\
      --rollout-tp 1 --microbatch 4
  python -m detjax.training.grpo --reward my_rewards:shortest     # shortest(problem, text) -> float
  python -m detjax.training.grpo --rollout invariant --save runs/a --steps 10
  python -m detjax.training.grpo --rollout invariant --resume runs/a/step10-seed0 --steps 20

A row of rows.jsonl: rollout, seed, step, weight_version (updates the sampling weights had seen),
reward (mean), entropy (nats a token), kl, max_difference (of a log-probability), num_different and
num_tokens, gradient_norm, rollout_s, train_s, and the fingerprint of the numerics. runs.json has
the final table, one object a run. A resumed run adds its rows and its object to those of its --out.

exit codes: 0 success; 2 bad input; 3 the invariant rollout's KL was not exactly zero."""

OK, BAD_INPUT, BITS_DIFFER = 0, 2, 3
BUNDLED = "bundled"
ROWS_FILE, RUNS_FILE = "rows.jsonl", "runs.json"
_ROW_NAMES = {"rollout", "seed", "step", "kl", "reward"}
FIRST, LAST = slice(3), slice(-3, None)
ROLLOUTS: dict[str, tuple[str, ...]] = {
    "both": ("invariant", "fast"),
    "invariant": ("invariant",),
    "fast": ("fast",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Args:
    """The command line."""

    model: str
    task: str
    problems: Path | None
    reward: str | None
    backend: str
    rollout: str
    rollout_tp: int
    devices: int
    steps: int
    seeds: tuple[int, ...]
    learning_rate: float
    clip_norm: float
    prompts: int
    samples: int
    microbatch: int
    max_prompt: int | None
    max_tokens: int | None
    batch_size: int
    remat: bool
    out: Path | None
    save: Path | None
    resume: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help")


# fmt: off
def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m detjax.training.grpo", usage="%(prog)s [options]", description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    add = parser.add_argument_group("what is trained").add_argument
    add("--model", default=BUNDLED, metavar="NAME",
        help="a Hugging Face folder or id, or the bundled 6M model (default)")
    add("--task", choices=("arithmetic", "gsm8k"), default="arithmetic",
        help="arithmetic: generated two-digit sums, of which the bundled model gets 64 %% right "
        "(default); gsm8k: word problems from --problems")
    add("--problems", type=Path, metavar="FILE", help="JSON lines with question and answer")
    add("--reward", metavar="MODULE:FUNCTION",
        help="your function in place of the task's reward: function(problem, text) -> float; "
        "problem has prompt and answer, text is what was sampled; any finite number")
    group = parser.add_argument_group("where it runs; changes no bit of the invariant run")
    add = group.add_argument
    add("--backend", choices=("auto", *(b.value for b in Backend)), default="auto",
        help="kernels: portable runs on CPUs, sm90 on Hopper GPUs; auto chooses (default)")
    add("--rollout-tp", type=int, default=4, metavar="N",
        help="devices the engine splits the model over; virtual ones on a CPU (default 4)")
    add("--devices", type=int, default=1, metavar="N",
        help="devices of the trainer, a power of two that divides the microbatches (default 1)")
    add("--batch-size", type=int, default=64, metavar="N",
        help="answers the engine works on at once (default 64)")
    add("--no-remat", dest="remat", action="store_false",
        help="keep all activations for the backward pass: faster, more memory")
    add = parser.add_argument_group("how it is trained").add_argument
    add("--rollout", choices=tuple(ROLLOUTS), default="both",
        help="kernels that sample: canonical, XLA's fastest, or both in a run each (default)")
    add("--steps", type=int, default=30, metavar="N", help="updates (default 30)")
    add("--seeds", type=int, nargs="+", default=(0,), metavar="N",
        help="seeds of problems and noise, a run each (default 0)")
    add("--learning-rate", type=float, default=3e-5, metavar="X", help="of Adam (default 3e-5)")
    add("--clip-norm", type=float, default=1.0, metavar="X",
        help="longest gradient that is applied unscaled (default 1)")
    add("--prompts", type=int, default=16, metavar="N", help="problems a step (default 16)")
    add("--samples", type=int, default=8, metavar="N", help="answers to each (default 8)")
    add("--microbatch", type=int, default=16, metavar="N",
        help="answers whose gradient is computed at once (default 16)")
    add("--max-prompt", type=int, metavar="N",
        help="longest prompt in tokens; longer problems are an error (default: 10 for arithmetic, "
        "256 for gsm8k)")
    add("--max-tokens", type=int, metavar="N",
        help="longest answer (default: 5 for arithmetic, 512 for gsm8k)")
    add = parser.add_argument_group("what is kept").add_argument
    add("--out", type=Path, metavar="FOLDER", help="write rows.jsonl, runs.json and curves.png")
    add("--save", type=Path, metavar="FOLDER",
        help="write the state after the last step to FOLDER/stepN-seedM")
    add("--resume", type=Path, metavar="FOLDER",
        help="continue a saved state, with the bits of a run without the stop")
    return parser
# fmt: on


def parse_args(argv: Sequence[str] | None) -> Args:
    """Read the command line.

    Raises:
        ValueError: If a value cannot be read or does not go with another.
    """
    values: dict[str, Any] = vars(_make_parser().parse_args(argv))
    values["seeds"] = tuple(values["seeds"])
    args = Args(**values)
    for name in ("rollout_tp", "devices", "batch_size", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if min(args.seeds) < 0:
        raise ValueError(f"--seeds {min(args.seeds)} must be at least 0")
    if (args.task == "gsm8k") != (args.problems is not None):
        raise ValueError("--task gsm8k and --problems FILE go together")
    if (args.save or args.resume) and (args.rollout == "both" or len(args.seeds) > 1):
        raise ValueError("--save and --resume are of one run: give one --rollout and one seed")
    return args


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoSetup:
    """What the runs of one command share."""

    args: Args
    task: AbstractTask
    sizes: BatchSizes
    tokenizer: Tokenizer
    trainer: Trainer
    fingerprint: str
    identity: dict[str, str | None]
    backend: Backend
    load: Callable[[int], LoadedModel]

    def rollout(self, mode: str) -> Rollout:
        """An engine on its own copy of the weights."""
        return Rollout(
            self.load(self.args.rollout_tp),
            self.tokenizer,
            self.task,
            mode=mode,
            batch_size=self.args.batch_size,
            max_prompt=self.sizes.max_prompt,
            max_tokens=self.sizes.max_tokens,
        )

    def facts(self, mode: str, seed: int) -> dict[str, Any]:
        """Return the facts that a continued run must share with the saved one."""
        names = ("task", "learning_rate", "clip_norm", "remat")
        shared = {name: getattr(self.args, name) for name in names}
        run = {"rollout": mode, "seed": seed, "fingerprint": self.fingerprint}
        if isinstance(self.task, Rewarded):
            run |= {"reward": self.args.reward, "reward_sha256": self.task.reward_sha256}
        return shared | run | asdict(self.sizes) | self.identity


def prepare(args: Args) -> GrpoSetup:
    """Choose kernels, load the model and make the trainer.

    Raises:
        ValueError: If something does not fit, with the fix.
    """
    task = ArithmeticTask() if args.problems is None else Gsm8k(args.problems)
    if args.reward is not None:
        task = Rewarded(task, args.reward)
    given = {f.name: getattr(args, f.name) for f in fields(BatchSizes)}
    lengths = {"max_prompt": task.max_prompt, "max_tokens": task.max_tokens}
    sizes = BatchSizes(**lengths | {k: v for k, v in given.items() if v is not None})
    if args.save is not None:
        check_can_save(_save_folder(args, args.steps, args.seeds[0]))
    # JAX makes its virtual devices once, when it starts: as many as the larger mesh needs.
    configure_virtual_devices(max(args.rollout_tp, args.devices))
    jax.devices()
    folder, profile = find_model(args.model), NumericsProfile()
    place = choose_placement(
        load_config(folder), profile, backend=args.backend, dp=1, tp=args.rollout_tp
    )

    def load(tp: int) -> LoadedModel:
        model, _ = load_on_devices(
            folder, profile=profile, backend=place.backend.value, dp=1, tp=tp
        )
        return model

    model = load(1)
    trainer = Trainer(
        model,
        optax.adam(args.learning_rate, b2=0.95),
        mesh=make_mesh(1, args.devices, platform=place.backend.platform),
        clip_norm=args.clip_norm,
        remat=args.remat,
    )
    return GrpoSetup(
        args=args,
        task=task,
        sizes=sizes,
        tokenizer=Tokenizer.from_folder(folder),
        trainer=trainer,
        fingerprint=model.fingerprint,
        identity={"model_sha256": model_hash(folder), "problems_sha256": task.file_sha256},
        backend=place.backend,
        load=load,
    )


def _save_folder(args: Args, step: int, seed: int) -> Path:
    """Return the folder in which `--save` puts the state after `step` updates."""
    assert args.save is not None
    return args.save / f"step{step}-seed{seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoRun:
    """One run: its rows, and the share of held-out problems it got right, greedy."""

    mode: str
    seed: int
    rows: tuple[dict[str, Any], ...]
    accuracy_before: float
    accuracy_after: float

    def facts(self) -> dict[str, Any]:
        """Return the facts that a reader of `runs.json` compares."""
        return {
            "rollout": self.mode,
            "seed": self.seed,
            "first_step": self.rows[0]["step"],
            "steps": len(self.rows),
            "reward_first": self.reward(FIRST),
            "reward_last": self.reward(LAST),
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
            "largest_kl": max(row["kl"] for row in self.rows),
            "num_different": sum(row["num_different"] for row in self.rows),
            "num_tokens": sum(row["num_tokens"] for row in self.rows),
        }

    def reward(self, part: slice) -> float:
        """Return the mean reward of a part of the steps."""
        return float(np.mean([row["reward"] for row in self.rows[part]]))


def run_one(
    setup: GrpoSetup, rollout: Rollout, mode: str, seed: int, on_row: Callable[[dict], None]
) -> GrpoRun:
    """Train once, from the model's weights or from a saved state."""
    args, trainer = setup.args, setup.trainer
    facts = setup.facts(mode, seed)
    if args.resume is None:
        state = trainer.init()
    else:
        state = restore_state(args.resume, trainer, facts=facts)
        if int(state.step) >= args.steps:
            raise ValueError(
                f"{args.resume} has made {int(state.step)} updates; give more --steps than that"
            )
        _check_rows(args.out, mode, seed, first_step=int(state.step))
    rollout.load(state.params, version=int(state.step))
    before, rows = rollout.accuracy(setup.task.held_out), []

    def keep(step: StepRow) -> None:
        row = {"rollout": mode, "seed": seed, **asdict(step), "fingerprint": setup.fingerprint}
        rows.append(row)
        on_row(row)

    state = train(
        trainer, state, rollout, setup.task, setup.sizes,
        seed=seed, num_steps=args.steps, on_step=keep,
    )  # fmt: skip
    rollout.load(state.params, version=int(state.step))
    after = rollout.accuracy(setup.task.held_out)
    if args.save is not None:
        save_state(_save_folder(args, int(state.step), seed), state, facts=facts)
    return GrpoRun(
        mode=mode, seed=seed, rows=tuple(rows), accuracy_before=before, accuracy_after=after
    )


def _check_rows(out: Path | None, mode: str, seed: int, *, first_step: int) -> None:
    """Refuse to add steps to a `rows.jsonl` that has them already."""
    rows = [] if out is None else _read_rows(out)
    known = {row["step"] for row in rows if (row["rollout"], row["seed"]) == (mode, seed)}
    if known and max(known) >= first_step:
        raise ValueError(
            f"{out} has rows up to step {max(known)} of this run, which would go on with step "
            f"{first_step}; give another --out"
        )


def _read_rows(out: Path) -> list[dict[str, Any]]:
    """The rows of an earlier command; none if there is no file."""
    path = out / ROWS_FILE
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not _ROW_NAMES <= row.keys():
            raise ValueError(f"{path}, line {number}: not a row of a run; give another --out")
        rows.append(row)
    return rows


def run_all(setup: GrpoSetup, console: Console) -> list[GrpoRun]:
    """Train with every requested rollout and seed, and write rows as they come."""
    args, runs = setup.args, []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        )
        file = None
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            mode = "w" if args.resume is None else "a"
            file = stack.enter_context((args.out / ROWS_FILE).open(mode, encoding="utf-8"))
        rollouts = {mode: setup.rollout(mode) for mode in ROLLOUTS[args.rollout]}
        for seed in args.seeds:
            for mode, rollout in rollouts.items():
                task = bar.add_task(f"{mode} rollout, seed {seed}", total=args.steps)

                def show(row: dict, task=task) -> None:
                    bar.update(task, completed=row["step"] + 1)
                    console.print(_row_text(row), style="dim", highlight=False, soft_wrap=True)
                    if file is not None:
                        file.write(json.dumps(row) + "\n")
                        file.flush()

                runs.append(run_one(setup, rollout, mode, seed, show))
    return runs


def _row_text(row: dict[str, Any]) -> str:
    return (
        f"{row['rollout']:<9} seed {row['seed']}  step {row['step']:>3}  reward "
        f"{row['reward']:.3f}  entropy {row['entropy']:.3f}  KL {row['kl']:.3g}  "
        f"{row['num_different']} of {row['num_tokens']} logprobs differ  "
        f"{row['rollout_s']:.1f} + {row['train_s']:.1f} s"
    )


def summary(runs: Sequence[GrpoRun]) -> Table:
    """A line for each run, and one for the seeds of each rollout together."""
    table = Table(
        "rollout", "seed", "reward, first 3", "last 3", "held out, before", "after",
        "largest KL", "logprobs that differ",
        title="Reward of sampled answers, accuracy of greedy ones, and the gap to the trainer",
        title_justify="left",
    )  # fmt: skip
    for run in sorted(runs, key=lambda run: (run.mode, run.seed)):
        facts = run.facts()
        table.add_row(
            run.mode, str(run.seed), f"{facts['reward_first']:.3f}", f"{facts['reward_last']:.3f}",
            f"{run.accuracy_before:.3f}", f"{run.accuracy_after:.3f}", f"{facts['largest_kl']:.3g}",
            f"{facts['num_different']:,} of {facts['num_tokens']:,}",
        )  # fmt: skip
    for mode in dict.fromkeys(run.mode for run in runs):
        own = [run for run in runs if run.mode == mode]
        if len(own) > 1:
            cells = (
                _spread([run.reward(FIRST) for run in own]),
                _spread([run.reward(LAST) for run in own]),
                _spread([run.accuracy_before for run in own]),
                _spread([run.accuracy_after for run in own]),
            )
            table.add_row(mode, f"{len(own)} seeds", *cells, "", "", style="bold")
    return table


def _spread(values: Sequence[float]) -> str:
    """Return the mean and the range over seeds."""
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _write_results(setup: GrpoSetup, runs: list[GrpoRun], out: Path, console: Console) -> None:
    """Write the final table and the curves, those of a continued `--out` included."""
    args, path = setup.args, out / RUNS_FILE
    kind = {"model": args.model, "backend": setup.backend.value, "rollout_tp": args.rollout_tp}
    facts = [run.facts() | kind for run in runs]
    if args.resume is not None and path.is_file():
        facts = json.loads(path.read_text(encoding="utf-8")) + facts
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if not save_plot(_read_rows(out), out / "curves.png"):
        console.print("no curves.png: matplotlib comes with pip install 'detjax[plots]'")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    console = Console(stderr=True)
    try:
        args = parse_args(argv)
        setup = prepare(args)
        console.print(
            f"{args.model} on {setup.backend.value}: trainer on {args.devices} device(s), rollout "
            f"with tp {args.rollout_tp}, fingerprint {setup.fingerprint}",
            highlight=False,
            soft_wrap=True,
        )
        runs = run_all(setup, console)
        Console(width=None if sys.stdout.isatty() else 140).print(summary(runs))
        if args.out is not None:
            _write_results(setup, runs, args.out, console)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    gap = [row for run in runs if run.mode == "invariant" for row in run.rows if row["kl"] != 0]
    if gap:
        print(f"error: the invariant rollout's KL is not zero: {gap[0]}", file=sys.stderr)
        return BITS_DIFFER
    return OK


if __name__ == "__main__":
    sys.exit(main())
