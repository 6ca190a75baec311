# SPDX-License-Identifier: Apache-2.0
"""Runs of GRPO: a rollout engine and a trainer, whose gap is measured at every step."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from detjax.defaults import AUTO
from detjax.models.adapters.peft_config import ALL_LINEAR
from detjax.models.config import ModelConfig
from detjax.models.decoder import check_mesh
from detjax.models.hf_config import load_config
from detjax.models.hub import find_model
from detjax.models.identity import model_hash
from detjax.models.loading import LoadedModel
from detjax.models.params import possible_tps
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.opening import choose_placement, load_on_devices
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.gpu_memory import claim_gpu_memory
from detjax.parallel.mesh import configure_virtual_devices, make_mesh
from detjax.training.checkpoint import check_no_state, newest_state, restore_state, save_state
from detjax.training.extras import optax
from detjax.training.gradients import Backward
from detjax.training.lora import LoraConfig, merged, write_adapter
from detjax.training.policy_gradient import BatchSizes, StepRow, train
from detjax.training.rewards import Rewarded
from detjax.training.rollout import Rollout, keep_weights
from detjax.training.tasks import AbstractTask, ArithmeticTask, Gsm8k
from detjax.training.trainer import Trainer
from detjax.training.weights import master_params

ROWS_FILE = "rows.jsonl"
LATER_ROWS_FILE = "rows_behind_a_state.jsonl"
_ROW_NAMES = {"rollout", "seed", "step", "kl", "reward"}
MERGED = "merged"
"""The rollout of a trained adapter that is added to the weights: the control."""
FIRST, LAST = slice(3), slice(-3, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoArgs:
    """What runs of one command are asked for; `python -m detjax.grpo --help` explains each."""

    model: str
    task: str
    problems: Path | None
    reward: str | None
    backend: str
    modes: tuple[str, ...]
    rollout_tp: int | None
    devices: int
    trainer_tp: int
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
    backward: str
    remat: bool
    lora_rank: int
    lora_alpha: float
    lora_target_modules: tuple[str, ...]
    output: Path | None
    save: Path | None
    save_every: int | None
    resume: Path | None

    @property
    def lora(self) -> LoraConfig | None:
        """The adapter that is trained; None trains the weights."""
        if not self.lora_rank:
            return None
        names = self.lora_target_modules
        return LoraConfig(
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            seed=self.seeds[0],
            target_modules=ALL_LINEAR if names in ((), (ALL_LINEAR,)) else names,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoSetup:
    """What the runs of one command share."""

    args: GrpoArgs
    task: AbstractTask
    sizes: BatchSizes
    tokenizer: Tokenizer
    trainer: Trainer
    config: ModelConfig
    fingerprint: str
    identity: dict[str, str | None]
    backend: Backend
    load: Callable[[int], LoadedModel]

    def rollout(self, mode: str) -> Rollout:
        """An engine on its own copy of the weights."""
        lora, is_merged, tp = self.args.lora, mode == MERGED, self.args.rollout_tp
        assert tp is not None  # `prepare` has chosen it
        change = keep_weights
        if is_merged:
            assert lora is not None  # checked: without an adapter there is nothing to merge
            change = partial(merged, master_params(self.load(1)), lora=lora)
        return Rollout(
            self.load(tp),
            self.tokenizer,
            self.task,
            mode="invariant" if is_merged else mode,
            batch_size=self.args.batch_size,
            max_prompt=self.sizes.max_prompt,
            max_tokens=self.sizes.max_tokens,
            change_weights=change,
            lora=None if is_merged else lora,
        )

    def facts(self, mode: str, seed: int) -> dict[str, Any]:
        """Return the facts that a continued run must share with the saved one."""
        names = ("task", "learning_rate", "clip_norm", "backward")
        shared = {name: getattr(self.args, name) for name in names}
        run = {"rollout": mode, "seed": seed, "fingerprint": self.fingerprint}
        if self.args.lora is not None:
            run |= {"lora_rank": self.args.lora_rank, "lora_alpha": self.args.lora_alpha}
            if self.args.lora.target_modules != ALL_LINEAR:  # which older states do not say
                run |= {"lora_target_modules": list(self.args.lora_target_modules)}
        if isinstance(self.task, Rewarded):
            run |= {"reward": self.args.reward, "reward_sha256": self.task.reward_sha256}
        sizes = asdict(self.sizes)
        if self.args.backward == Backward.CANONICAL.value:
            del sizes["microbatch"]  # which changes no bit, as rematerialisation
        else:
            run |= {"remat": self.args.remat}
        return shared | run | sizes | self.identity


MOST_ROLLOUT_TP = 4
"""Where no `rollout_tp` is given: more than the trainer's one device, so that meshes differ."""


def default_rollout_tp(config: ModelConfig, backend: str) -> int:
    """The most devices of a rollout, up to `MOST_ROLLOUT_TP`, that the GPUs and the model allow.

    Without GPUs, or with kernels of a CPU, devices are virtual, and there are enough.
    """
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    is_of_cpu = backend != AUTO and Backend(backend).platform == "cpu"
    most = MOST_ROLLOUT_TP if is_of_cpu or not gpus else len(gpus)

    def is_allowed(tp: int) -> bool:
        try:
            check_mesh(config, NumericsProfile(), tp)
        except ValueError:
            return False
        return tp <= min(most, MOST_ROLLOUT_TP)

    return max(filter(is_allowed, possible_tps(config)))


def prepare(args: GrpoArgs) -> GrpoSetup:
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
    # JAX makes its virtual devices once, when it starts: as many as the larger mesh needs.
    configure_virtual_devices(max(args.rollout_tp or MOST_ROLLOUT_TP, args.devices))
    claim_gpu_memory()
    jax.devices()
    folder, profile = find_model(args.model), NumericsProfile()
    config = load_config(folder)
    rollout_tp = args.rollout_tp or default_rollout_tp(config, args.backend)
    args = replace(args, rollout_tp=rollout_tp)
    place = choose_placement(config, profile, backend=args.backend, dp=1, tp=rollout_tp)

    def load(tp: int) -> LoadedModel:
        model, _ = load_on_devices(
            folder, profile=profile, backend=place.backend.value, dp=1, tp=tp,
            quantized_weights="expanded",
        )  # fmt: skip
        return model

    model = load(1)
    trainer = Trainer(
        model,
        optax.adam(args.learning_rate, b2=0.95),
        mesh=make_mesh(
            args.devices // args.trainer_tp, args.trainer_tp, platform=place.backend.platform
        ),
        clip_norm=args.clip_norm,
        remat=args.remat,
        lora=args.lora,
        backward=Backward(args.backward),
        shares_layers=args.trainer_tp > 1,
    )
    return GrpoSetup(
        args=args,
        task=task,
        sizes=sizes,
        tokenizer=Tokenizer.from_folder(folder),
        trainer=trainer,
        config=model.config,
        fingerprint=model.fingerprint,
        identity={"model_sha256": model_hash(folder), "problems_sha256": task.file_sha256},
        backend=place.backend,
        load=load,
    )


def save_folder(args: GrpoArgs, step: int, seed: int) -> Path:
    """Return the folder in which `--save` puts the state after `step` updates."""
    assert args.save is not None
    return args.save / f"step{step}-seed{seed}"


def save_stops(args: GrpoArgs, first: int) -> list[int]:
    """After how many updates a run that has made `first` is saved; its last is the last one."""
    every = args.save_every or args.steps
    return [*range(first - first % every + every, args.steps, every), args.steps]


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
        state = restore_state(newest_state(args.resume), trainer, facts=facts)
        if int(state.step) >= args.steps:
            raise ValueError(
                f"{args.resume} has made {int(state.step)} updates; give more --steps than that"
            )
        _drop_later_rows(args.output, mode, seed, first_step=int(state.step))
    stops = save_stops(args, int(state.step))
    for stop in stops if args.save is not None else ():
        check_no_state(save_folder(args, stop, seed))
    rollout.load(state.params, version=int(state.step))
    before, rows = rollout.accuracy(setup.task.held_out), []

    def keep(step: StepRow) -> None:
        row = {"rollout": mode, "seed": seed, **asdict(step), "fingerprint": setup.fingerprint}
        rows.append(row)
        on_row(row)

    for stop in stops:
        state = train(
            trainer, state, rollout, setup.task, setup.sizes,
            seed=seed, num_steps=stop, on_step=keep,
        )  # fmt: skip
        if args.save is not None:
            folder = save_folder(args, stop, seed)
            if args.lora is not None:
                write_adapter(folder / "adapter", state.params, args.lora, setup.config)
            else:
                rollout.load(state.params, version=int(state.step))
                shutil.rmtree(folder / "model", ignore_errors=True)  # of a run that was killed
                rollout.save(folder / "model")
            save_state(folder, state, facts=facts)
    rollout.load(state.params, version=int(state.step))
    after = rollout.accuracy(setup.task.held_out)
    return GrpoRun(
        mode=mode, seed=seed, rows=tuple(rows), accuracy_before=before, accuracy_after=after
    )


def _drop_later_rows(out: Path | None, mode: str, seed: int, *, first_step: int) -> None:
    """Take rows of steps behind a state out of `rows.jsonl`: a run that was killed left them.

    They are made again. What is taken out goes to `LATER_ROWS_FILE`.

    Raises:
        ValueError: If a step between the first row that is kept and the state has no row.
    """
    rows = [] if out is None else read_rows(out)
    own = [row for row in rows if (row["rollout"], row["seed"]) == (mode, seed)]
    later = [row for row in own if row["step"] >= first_step]
    if out is None or not own:
        return
    steps = {row["step"] for row in own}
    for step in range(min(steps), first_step):
        if step not in steps:
            raise ValueError(
                f"{out / ROWS_FILE} has no row of step {step} of the {mode} rollout with seed "
                f"{seed}, between its step {min(steps)} and step {first_step}, with which this run "
                "goes on; give another --output"
            )
    if not later:
        return
    with (out / LATER_ROWS_FILE).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in later)
    # WHY: the same file, as it is open to append to.
    kept = (json.dumps(row) + "\n" for row in rows if row not in later)
    (out / ROWS_FILE).write_text("".join(kept), encoding="utf-8")


def read_rows(out: Path) -> list[dict[str, Any]]:
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
            raise ValueError(f"{path}, line {number}: not a row of a run; give another --output")
        rows.append(row)
    return rows
