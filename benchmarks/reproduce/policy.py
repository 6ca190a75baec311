# SPDX-License-Identifier: Apache-2.0
"""On-policy reinforcement learning in three arms: uncorrected, importance-weighted, exact."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.reproduce.experiment import Experiment, Lab, Part, Result, Row
from detjax.models.loading import load_model
from detjax.numerics import NumericsProfile
from detjax.parallel.mesh import make_mesh
from detjax.plots import COLOURS, OTHERS, finish
from detjax.training.extras import optax
from detjax.training.importance import ImportanceWeights
from detjax.training.policy_gradient import BatchSizes, StepRow, train
from detjax.training.rollout import Rollout, keep_weights
from detjax.training.tasks import ArithmeticTask
from detjax.training.trainer import Trainer

EXACT, PLAIN, WEIGHTED = "exact", "uncorrected", "importance-weighted"
LAST = 5
"""Steps at the end whose mean reward counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A run.

    Attributes:
        name: `EXACT`, `PLAIN` or `WEIGHTED`.
        bits: Of the matrices that sample; 16 leaves them as they are.
    """

    name: str
    bits: int

    @property
    def label(self) -> str:
        if self.name == EXACT:
            return "exact"
        return f"{self.name}, fast" + (f" with {self.bits}-bit weights" if self.bits < 16 else "")


ARMS = (
    Arm(name=EXACT, bits=16),
    Arm(name=PLAIN, bits=3),
    Arm(name=WEIGHTED, bits=3),
    Arm(name=PLAIN, bits=4),
    Arm(name=WEIGHTED, bits=4),
    Arm(name=PLAIN, bits=16),
)
"""XLA's kernels alone, and with matrices of few bits as quantised rollouts have them: more and more
apart from the trainer."""

NUM_FIRST = 3
FIRST_RATE = 3e-5
SEEDS = (0, 1, 2, 3)
"""Of the first `NUM_FIRST` arms at `FIRST_RATE`; the others have the first seed."""
OTHER_RATES = (1e-4,)


def narrow(params: dict[str, Any], *, bits: int) -> dict[str, Any]:
    """Round each row of each layer's matrices to `bits` bits of its largest element."""
    most = 2 ** (bits - 1) - 1

    def narrow_one(w: jax.Array) -> jax.Array:
        if w.ndim != 2:
            return w
        scale = jnp.max(jnp.abs(w), axis=1, keepdims=True) / most
        return jnp.round(w / jnp.where(scale == 0, 1.0, scale)) * scale

    return params | {"layers": jax.tree.map(narrow_one, params["layers"])}


def _run(lab: Lab, arm: Arm, *, learning_rate: float, seed: int) -> Row:
    """Train once; the reward and the KL of each step, and greedy answers of the exact policy."""

    def load():
        mesh = make_mesh(1, 1, platform=lab.backend.platform)
        return load_model(
            str(lab.folder), profile=NumericsProfile(), mesh=mesh, backend=lab.backend
        )

    task = ArithmeticTask()
    prompts, samples, num_steps = lab.pick((8, 8, 30), (32, 16, 40))
    sizes = BatchSizes(
        prompts=prompts, samples=samples, microbatch=2 * samples, max_prompt=task.max_prompt,
        max_tokens=task.max_tokens,
    )  # fmt: skip
    lengths = {"max_prompt": sizes.max_prompt, "max_tokens": sizes.max_tokens}
    given = load(), lab.tokenizer, task
    rollout = Rollout(
        *given, mode="invariant" if arm.name == EXACT else "fast", batch_size=prompts * samples,
        change_weights=partial(narrow, bits=arm.bits) if arm.bits < 16 else keep_weights, **lengths,
    )  # fmt: skip
    trainer = Trainer(
        load(), optax.adam(learning_rate, b2=0.95), clip_norm=1.0, remat=False,
        mesh=make_mesh(1, 1, platform=lab.backend.platform),
    )  # fmt: skip
    weights = ImportanceWeights(load()) if arm.name == WEIGHTED else None
    steps: list[StepRow] = []
    state = train(
        trainer, trainer.init(), rollout, task, sizes, seed=seed, num_steps=num_steps,
        on_step=steps.append, importance=weights,
    )  # fmt: skip
    judge = Rollout(load(), lab.tokenizer, task, mode="invariant", batch_size=64, **lengths)
    judge.load(state.params, version=num_steps)
    rows = [asdict(step) for step in steps]
    return {
        "arm": arm.label, "kind": arm.name, "bits": arm.bits, "learning_rate": learning_rate,
        "seed": seed, "steps": num_steps, "answers_a_step": prompts * samples,
        "reward_first": float(np.mean([row["reward"] for row in rows[:LAST]])),
        "reward_last": float(np.mean([row["reward"] for row in rows[-LAST:]])),
        "held_out": judge.accuracy(task.held_out),
        "kl_median": float(np.median([row["kl"] for row in rows])),
        "kl_largest": max(row["kl"] for row in rows),
        "gradient_norm_largest": max(row["gradient_norm"] for row in rows),
        "rewards": [round(row["reward"], 4) for row in rows],
        "kls": [row["kl"] for row in rows],
        "wrong": sum(row["num_different"] for row in rows) if arm.name == EXACT else 0,
    }  # fmt: skip


def findings(rows: Sequence[Row]) -> list[str]:
    """For each learning rate what each arm ends with, and whether the uncorrected one suffers."""
    told = []
    for rate in sorted({row["learning_rate"] for row in rows}):
        own = [row for row in rows if row["learning_rate"] == rate]
        by_arm = {arm: [r for r in own if r["arm"] == arm] for arm in dict.fromkeys(
            row["arm"] for row in own)}  # fmt: skip
        parts = []
        for arm, runs in by_arm.items():
            kl = max(run["kl_largest"] for run in runs)
            parts.append(f"{arm} {_mean_and_range(runs)} (KL up to {kl:.2g})")
        told.append(f"learning rate {rate:g}, held-out problems right: {', '.join(parts)}")
        exact, plain = ([run for run in own if run["kind"] == kind] for kind in (EXACT, PLAIN))
        if len(exact) == 1 and plain:
            below = exact[0]["held_out"] - min(run["held_out"] for run in plain)
            late = exact[0]["rewards"][len(exact[0]["rewards"]) // 2 :]
            told[-1] += (
                f"; the worst uncorrected run ends {below:.3f} below the exact one (one seed; the "
                f"exact run's reward spans {min(late):.2f} to {max(late):.2f} in its last half)"
            )
    return told


def _mean_and_range(runs: Sequence[Row]) -> str:
    values = [run["held_out"] for run in runs]
    mean = f"{float(np.mean(values)):.3f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.3f} to {max(values):.3f} over {len(values)} seeds)"


def plot(figure, rows: Sequence[Row]) -> None:
    """Rewards and KL by step, a panel pair for each learning rate."""
    rates = sorted({row["learning_rate"] for row in rows})
    panels = figure.subplots(1, 2 * len(rates), squeeze=False)[0]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    others = [arm for arm in arms if not arm.startswith("exact")]
    colours = {arm: COLOURS["invariant"] for arm in arms if arm.startswith("exact")}
    colours |= dict(zip(others, (COLOURS["fast"], *OTHERS), strict=False))
    for i, rate in enumerate(rates):
        drawn: set[str] = set()
        rewards, kls = panels[2 * i], panels[2 * i + 1]
        for row in rows:
            if row["learning_rate"] != rate:
                continue
            label = row["arm"] if row["arm"] not in drawn else None
            drawn.add(row["arm"])
            style = {"color": colours[row["arm"]], "linewidth": 1, "label": label}
            rewards.plot(row["rewards"], **style)
            kls.plot(row["kls"], **style)
        rewards.set_ylim(0, 1)
        # Linear from 0 to 1e-6, so that an exact zero has a place.
        kls.set_yscale("symlog", linthresh=1e-6)
        finish(rewards, title=f"Reward, learning rate {rate:g}", x="update", y="mean reward",
               legend=False)  # fmt: skip
        finish(kls, title=f"KL(rollout || trainer), learning rate {rate:g}", x="update",
               y="nats a token", legend=False)  # fmt: skip
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  fontsize=7)  # fmt: skip


def result(rows: Sequence[Row], setting: str) -> Result:
    """Tables and sentences of the rows."""
    return Result(
        title=f"GRPO on two-digit sums, {rows[0]['steps']} updates of "
        f"{rows[0]['answers_a_step']} answers",
        setting=setting,
        columns=(
            "arm", "learning_rate", "seed", "reward_first", "reward_last", "held_out", "kl_median",
            "kl_largest", "gradient_norm_largest", "wrong",
        ),
        rows=rows,
        findings=findings(rows),
        plot=lambda figure: plot(figure, rows),
    )  # fmt: skip


def parts(lab: Lab) -> list[Part]:
    """A piece for each arm, learning rate and seed; the first has no seed in its name."""
    seeds = lab.pick(SEEDS[:1], SEEDS)
    runs = [(FIRST_RATE, seed, arm) for seed in seeds for arm in ARMS[:NUM_FIRST]]
    runs += [(FIRST_RATE, SEEDS[0], arm) for arm in ARMS[NUM_FIRST:]]
    runs += [(rate, SEEDS[0], arm) for rate in OTHER_RATES for arm in ARMS]
    return [
        Part(
            name=f"{arm.label}, learning rate {rate:g}" + (f", seed {seed}" if seed else ""),
            seconds=25,
            run=lambda rate=rate, arm=arm, seed=seed: [
                _run(lab, arm, learning_rate=rate, seed=seed)
            ],
        )
        for rate, seed, arm in runs
    ]


EXPERIMENT = Experiment(
    question="What does a rollout with other bits than the trainer do to on-policy learning?",
    paper="He 2025 (Thinking Machines), figure 16, an 8B model on BigMath: without correction the "
    "reward collapses; with importance weights it does not, at a KL of about 0.001; with equal "
    "bits the KL is 0. TBIK (arXiv:2511.17826), figure 8.",
    parts=parts,
    result=result,
    setting=lambda lab, _: lab.setting,
)
