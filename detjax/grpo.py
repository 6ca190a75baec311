# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.grpo`: reinforcement learning without a rollout-trainer gap.

Rows of JSON and the plot go to `--output`, the table to standard output, progress to standard
error. JAX is imported only once the command line is known to be good.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from detjax.cli import options
from detjax.cli.command_line import CommandParser, check_counts, check_model_option
from detjax.cli.errors import BITS_DIFFER, EXIT_CODES, OK, InputError, bad_input, exit_code
from detjax.cli.options import Option, add_options

if TYPE_CHECKING:  # imports JAX
    from detjax.training.grpo import GrpoArgs

LORA_ALPHA = 16.0

_DESCRIPTION = """\
Train a model with GRPO on problems whose answers a program can check, exactly on-policy.

Each step samples answers with the serving engine, rewards them, and makes one update from the
trainer's log-probabilities of the same tokens. The column KL is the divergence of the sampler's
probabilities from the trainer's. With --rollout invariant it is exactly 0.0 at every step, because
the trainer's forward pass has the bits of the engine, although the engine runs on --rollout-tp
devices and the trainer on --devices. No importance weights are needed, and none are used. With
--rollout fast the kernels make no claim, and the trainer's probabilities are not the sampler's."""

_EPILOG = f"""\
examples:
  python -m detjax.grpo
  python -m detjax.grpo --seeds 0 1 2 --steps 40 --output runs/sums
  python -m detjax.grpo --rollout invariant --rollout-tp 1
  python -m detjax.grpo --model Qwen/Qwen3-0.6B --task gsm8k --problems train.jsonl \\
      --rollout-tp 1 --microbatch 4
  python -m detjax.grpo --reward my_rewards:shortest
  python -m detjax.grpo --rollout invariant --save runs/a --steps 10
  python -m detjax.grpo --rollout invariant --resume runs/a/step10-seed0 --steps 20
  python -m detjax.grpo --rollout invariant --save runs/b --save-every 5 --steps 200

The first example takes minutes on a laptop.

A row of rows.jsonl has: rollout, seed, step, weight_version (updates of the sampling weights so
far), reward (mean), entropy (nats per token), kl, max_difference (largest, of log-probabilities),
num_different and num_tokens, gradient_norm, rollout_s and train_s (seconds), and the fingerprint of
the numerics. runs.json has the final table, one object per run. A resumed run appends to the files
of its --output. A new run writes over nothing: an --output with rows of another run is refused, and
so is a --save with a state that the run would write.

{EXIT_CODES}"""

_ROLLOUTS: Mapping[str, tuple[str, ...]] = {
    "both": ("invariant", "fast"),
    "invariant": ("invariant",),
    "fast": ("fast",),
}

_TASK = (
    options.MODEL,
    options.BACKEND,
    Option(
        name="task",
        default="arithmetic",
        choices=("arithmetic", "gsm8k"),
        help="arithmetic: generated two-digit sums; the bundled model gets 64 %% right. gsm8k: "
        "word problems, read from --problems",
    ),
    Option(
        name="problems", parse=Path, metavar="FILE", help="JSON lines with `question` and `answer`"
    ),
    Option(
        name="reward",
        metavar="MODULE:FUNCTION",
        default_text="the reward of the task",
        help="a function of yours that replaces the task's reward: function(problem, text) -> "
        "float, any finite number. `problem` has `prompt` and `answer`; `text` is the sampled "
        "answer",
    ),
)
_ROLLOUT_TP = Option(
    name="rollout_tp",
    parse=int,
    default=None,
    default_text="the most up to 4 that the GPUs and the model allow",
    help="tensor-parallel devices of the engine; virtual ones on a CPU",
)
_DEVICES = Option(
    name="devices",
    parse=int,
    default=1,
    help="devices of the trainer: a power of two that divides the number of microbatches",
)
_TRAINER_TP = Option(
    name="trainer_tp",
    parse=int,
    default=1,
    help="tensor-parallel devices of the trainer, among its --devices",
)
_BATCH_SIZE = replace(
    options.BATCH_SIZE,
    default=64,
    default_text="64",
    help="most answers that the engine samples at once",
)
_PLACE = (
    _ROLLOUT_TP,
    _DEVICES,
    _TRAINER_TP,
    _BATCH_SIZE,
    Option(
        name="remat",
        default=True,
        help="recompute activations in the backward pass. --no-remat keeps all of them, which is "
        "faster and takes more memory",
    ),
)
_STEPS = Option(name="steps", parse=int, default=30, help="number of updates")
_TRAINING = (
    Option(
        name="backward",
        default="canonical",
        choices=("canonical", "xla"),
        help="kernels that sum gradients. canonical: the bits do not depend on --microbatch or "
        "--devices. xla: XLA's, which are faster, and whose bits do",
    ),
    Option(
        name="rollout",
        default="both",
        choices=tuple(_ROLLOUTS),
        help="kernels that sample. invariant: batch-invariant. fast: XLA's. both: one run with "
        "each. With --lora-rank, fast is batch-invariant too, with the adapter merged into the "
        "weights",
    ),
    _STEPS,
    Option(
        name="seeds",
        parse=int,
        nargs="+",
        default_text="0",
        help="seeds of problems and sampling noise, one run per seed",
    ),
    Option(
        name="learning_rate", parse=float, default=3e-5, metavar="X", help="learning rate of Adam"
    ),
    Option(
        name="clip_norm",
        parse=float,
        default=1.0,
        metavar="X",
        help="gradients with a larger norm are scaled down to this norm",
    ),
    Option(
        name="lora_rank",
        parse=int,
        default=0,
        help="train a LoRA adapter of this rank; 0: train the weights",
    ),
    Option(
        name="lora_alpha",
        parse=float,
        metavar="X",
        default_text=f"{LORA_ALPHA:g}",
        help="alpha of the LoRA adapter, whose scale is alpha / rank",
    ),
    Option(
        name="lora_target_modules",
        nargs="+",
        metavar="NAME",
        default_text="all-linear: all modules that can have an adapter, experts included",
        help="modules of the LoRA adapter, by the end of their names, such as q_proj v_proj",
    ),
    Option(name="prompts", parse=int, default=16, help="problems per step"),
    Option(name="samples", parse=int, default=8, help="answers per problem"),
    Option(name="microbatch", parse=int, default=16, help="answers per gradient computation"),
    Option(
        name="max_prompt",
        parse=int,
        default_text="10 for arithmetic, 256 for gsm8k",
        help="most tokens of a prompt; a longer problem is an error",
    ),
    replace(
        options.MAX_TOKENS,
        default=None,
        parse=int,
        default_text="5 for arithmetic, 512 for gsm8k",
        help="most tokens of an answer",
    ),
)
_OUTPUT = replace(
    options.OUTPUT,
    parse=Path,
    metavar="FOLDER",
    default_text="no files",
    help="folder for rows.jsonl, runs.json and curves.png",
)
_SAVE_EVERY = Option(
    name="save_every",
    parse=int,
    metavar="N",
    default_text="after the last step only",
    help="also write the state after every N steps, so that --resume can continue a killed run",
)
_FILES = (
    _OUTPUT,
    Option(
        name="save",
        parse=Path,
        metavar="FOLDER",
        help="write the state after the last step to FOLDER/stepN-seedM, with the trained model as "
        "a Hugging Face folder",
    ),
    _SAVE_EVERY,
    Option(
        name="resume",
        parse=Path,
        metavar="FOLDER",
        help="continue from a saved state, or from the newest complete one in a --save folder. The "
        "bits are those of a run without interruption",
    ),
)


def make_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser("grpo", description=_DESCRIPTION, epilog=_EPILOG)
    add_options(parser, "model and task", _TASK)
    add_options(parser, "where it runs (these options change no bit of an invariant run)", _PLACE)
    add_options(parser, "training", _TRAINING)
    add_options(parser, "output", _FILES)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return the exit code."""
    return exit_code(lambda: _main(make_parser().parse(argv)))


def check_args(args: argparse.Namespace) -> None:
    """Refuse what can be refused before JAX is imported.

    Raises:
        InputError: If a value is out of range or does not go with another.
    """
    check_counts(args, (_ROLLOUT_TP, _DEVICES, _TRAINER_TP, _BATCH_SIZE, _STEPS))
    if args.devices % args.trainer_tp:
        raise InputError(
            f"--trainer-tp {args.trainer_tp} must divide --devices {args.devices}; give --devices "
            f"{args.trainer_tp} to share layers over all of them"
        )
    if args.seeds is not None and min(args.seeds) < 0:
        raise InputError(f"--seeds {min(args.seeds)} must be at least 0")
    if (args.task == "gsm8k") != (args.problems is not None):
        raise InputError("--task gsm8k and --problems FILE go together")
    num_seeds = len(args.seeds or (0,))
    if (args.save or args.resume) and (args.rollout == "both" or num_seeds > 1):
        raise InputError("--save and --resume are of one run: give one --rollout and one seed")
    if args.save_every is not None and (args.save is None or args.save_every < 1):
        raise InputError(f"--save-every {args.save_every} must be at least 1, and goes with --save")
    if not 0 < args.learning_rate < float("inf"):
        raise InputError(
            f"--learning-rate {args.learning_rate} must be a positive number, as updates go down "
            "the loss"
        )
    if args.lora_alpha is not None and not args.lora_rank:
        raise InputError("--lora-alpha is of an adapter; give --lora-rank as well")
    if args.lora_target_modules is not None and not args.lora_rank:
        raise InputError("--lora-target-modules is of an adapter; give --lora-rank as well")
    if args.lora_rank and args.rollout == "fast":
        raise InputError(
            "--lora-rank and --rollout fast do not go together; give invariant or both"
        )
    check_model_option(args.model, None)


def grpo_args(args: argparse.Namespace) -> "GrpoArgs":
    """What the runs are asked for, of the options."""
    from detjax.training.grpo import GrpoArgs

    names = [field.name for field in dataclasses.fields(GrpoArgs)]
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    modes = _ROLLOUTS[args.rollout]
    if args.lora_rank:
        modes = tuple("merged" if mode == "fast" else mode for mode in modes)
    values |= {"modes": modes, "seeds": tuple(args.seeds or (0,))}
    values["lora_alpha"] = LORA_ALPHA if args.lora_alpha is None else args.lora_alpha
    values["lora_target_modules"] = tuple(sorted(set(args.lora_target_modules or ())))
    return GrpoArgs(**values)


def _main(args: argparse.Namespace) -> int:
    check_args(args)
    console = Console(stderr=True)
    with bad_input(kinds=(ModuleNotFoundError,)):  # of the extra that training needs
        from detjax.training.grpo import prepare
        from detjax.training.grpo_runs import claimed_files, run_all, summary, write_results
    rollout_tp = f"{_ROLLOUT_TP.flag} {args.rollout_tp} must"
    asked = grpo_args(args)
    with (
        bad_input(rephrase=lambda text: text.replace(f"tp={args.rollout_tp} must", rollout_tp)),
        claimed_files(asked) as file,
    ):
        setup = prepare(asked)
        console.print(
            f"{args.model} on {setup.backend.value}: trainer on {args.devices} device(s) with tp "
            f"{args.trainer_tp}, rollout with tp {setup.args.rollout_tp}, fingerprint "
            f"{setup.fingerprint}",
            highlight=False,
            soft_wrap=True,
        )
        runs = run_all(setup, console, file)
        Console(width=None if sys.stdout.isatty() else 140).print(summary(runs))
        if args.output is not None:
            write_results(setup, runs, args.output, console)
    gap = [row for run in runs if run.mode == "invariant" for row in run.rows if row["kl"] != 0]
    if gap:
        print(f"error: the invariant rollout's KL is not zero: {gap[0]}", file=sys.stderr)
        return BITS_DIFFER
    return OK


if __name__ == "__main__":
    sys.exit(main())
