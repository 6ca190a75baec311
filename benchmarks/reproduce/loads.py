# SPDX-License-Identifier: Apache-2.0
"""Loads of requests on engines that share one model and its compiled programs.

The engines of one window differ in mode and group alone, so that each program is compiled once.
Their programs have one page table, no prefix cache and no self-check: what is claimed of answers is
compared here, request by request.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.reproduce.experiment import CHAINED, Lab, Part, Row, is_random, prompts
from benchmarks.serving import PlannedRequest, TimedAnswer, serve
from benchmarks.step import MODELS
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.running.programs import ProgramCache
from detjax.models.loading import LoadedModel, random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh

WINDOW, GROUP = 64, 8
"""Tokens of a window and windows of a verification: LLM-42's defaults, and those of its table 4."""

OF_TRAINED = ", trained"
"""How names of pieces that load the trained model end."""

LARGE_WEIGHTS = (
    "Llama-3.1-8B shapes, random weights whose next token is nearly always sure (`loads.chained`)"
)

COUNTS = (
    "num_launches", "verify_launches", "decode_transfers", "plan_s", "launch_s", "wait_s",
    "dispatch_s", "commit_s",
)  # fmt: skip
"""What an engine counts that explains a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of engines.

    Attributes:
        num_slots: Requests that run at once.
        few: Rows of the smaller decode step.
        prefill_chunk: Prompt tokens of a prefill step.
        max_len: Of prompt and answer.
        num_pages: Of the cache.
    """

    num_slots: int
    few: int
    prefill_chunk: int
    max_len: int
    num_pages: int

    @property
    def words(self) -> str:
        return f"{self.num_slots} slots, chunks of {self.prefill_chunk} tokens"


SMALL = Sizes(num_slots=8, few=4, prefill_chunk=32, max_len=128, num_pages=8)
TRAINED = Sizes(num_slots=64, few=16, prefill_chunk=32, max_len=512, num_pages=256)
TRAINED_LOAD = Sizes(num_slots=64, few=16, prefill_chunk=256, max_len=1024, num_pages=512)
LARGE = Sizes(num_slots=64, few=16, prefill_chunk=512, max_len=4096, num_pages=1160)
"""1160 pages of an 8B model are 19.5 GB."""


class Server:
    """A model, prompts for it, and engines.

    Attributes:
        name: Of the model, as rows have it.
        setting: What runs, in words.
        sizes: Of every engine.
    """

    def __init__(
        self, model: LoadedModel, *, name: str, weights: str, setting: str, sizes: Sizes, lab: Lab
    ):
        """Compile nothing yet. Prompts are random tokens where weights are random."""
        self.name, self.setting, self.sizes = name, f"{setting}; {sizes.words}", sizes
        self._weights = weights
        self._model = model
        self._lab = lab
        self._programs: dict[int, ProgramCache] = {}

    @property
    def model(self) -> LoadedModel:
        return self._model

    @property
    def facts(self) -> Row:
        """The model and its weights, as rows have them."""
        return {"model": self.name, "weights": self._weights}

    def prompt(self, rng: np.random.Generator, length: int) -> list[int]:
        """Random tokens; of the trained model an opening at least, or as many as are asked for."""
        if is_random(self._weights):
            return rng.integers(0, self._model.config.vocab_size, length).tolist()
        openings = prompts(625)
        tokens = self._lab.tokenizer.encode(str(rng.choice(openings)))
        most = max(length, len(tokens))
        while len(tokens) < most:
            tokens += self._lab.tokenizer.encode(f". {rng.choice(openings)}")[1:]
        return tokens[:most]

    def engine(
        self,
        mode: str,
        *,
        window: int = WINDOW,
        group: int = GROUP,
        other_groups: tuple[int, ...] = (),
        max_prefill_streak: int = 0,
    ) -> Engine:
        """An engine, all of whose programs are compiled. In `dvr` it always drafts."""
        gc.collect()  # the cache of the engine before
        sizes = self.sizes
        config = EngineConfig(
            mode=mode,
            batch_size=sizes.num_slots,
            decode_batches=(sizes.few,),
            decode_lens=(),
            prefill_chunk=sizes.prefill_chunk,
            max_len=sizes.max_len,
            num_pages=sizes.num_pages,
            max_prefill_streak=max_prefill_streak,
            verify_window=window,
            verify_rows=group,
            verify_batches=other_groups,
            verify_deadline=4 * window,
            max_draft_fraction=1.0 if mode == "dvr" else None,
            has_prefix_cache=False,
            self_check="off",
        )
        engine = Engine(self._model, config, programs=self._programs.get(window))
        self._programs[window] = engine.programs
        engine.compile()
        return engine

    def serve(
        self, engine: Engine, planned: Sequence[PlannedRequest], *, temperature: float = 0.0
    ) -> list[TimedAnswer]:
        """Answer each to its full length, after two short ones that count for nothing."""
        return self.counted(engine, planned, temperature=temperature)[0]

    def counted(
        self, engine: Engine, planned: Sequence[PlannedRequest], *, temperature: float = 0.0
    ) -> tuple[list[TimedAnswer], Row]:
        """As `serve`, and what the engine counted for them: launches, and where its time went."""
        short = [replace(plan, at_s=0.0, output_len=4) for plan in planned[:2]]
        serve(self, engine, short, temperature=temperature, ignore_eos=True)
        before = engine.stats().numbers()
        told = serve(self, engine, planned, temperature=temperature, ignore_eos=True)
        after = engine.stats().numbers()
        return told, {name: after[name] - before[name] for name in COUNTS}


CHAINED_RMS = 0.57
"""Of the embedding in `chained`. By this the winning logit of Llama-3.1-8B shapes, whose random
layers add to it, is 7.5 standard deviations, where the largest of 128,256 others is 4.4."""


def chained(model: LoadedModel) -> LoadedModel:
    """A model of random weights that is sure of its next token, as trained ones mostly are.

    `lm_head` is the embedding moved on by a token, so that token x + 1 follows x, nearly always by
    more than two orders of addition differ. Drafts of plain random weights are wrong in nearly
    every window, since their largest logits are nearly equal.
    """
    vocab_size = model.config.vocab_size

    def chain(embed, lm_head):
        unit = embed.astype(jnp.float32)
        unit /= jnp.sqrt(jnp.mean(jnp.square(unit)))
        following = jnp.roll(unit, 1, axis=0) / jnp.sqrt(float(embed.shape[1]))
        following = jnp.zeros(lm_head.shape, jnp.float32).at[:vocab_size].set(following)
        return (CHAINED_RMS * unit).astype(embed.dtype), following.astype(lm_head.dtype)

    shardings = model.params["embed"].sharding, model.params["lm_head"].sharding
    made = jax.jit(chain, out_shardings=shardings)(model.params["embed"], model.params["lm_head"])
    params = model.params | dict(zip(("embed", "lm_head"), made, strict=True))
    return replace(model, params=params)


@cache
def large_server(lab: Lab) -> Server:
    """Llama-3.1-8B shapes with weights of `chained`, or on a CPU the lab's own model."""
    if not lab.is_full or lab.backend is not Backend.SM90:
        note = "a model this small measures the host and launches, not bandwidth"
        return Server(
            lab.model(lab.load_tp), name=lab.folder.name, weights=lab.weights,
            setting=f"{lab.setting}; {note}", sizes=SMALL, lab=lab,
        )  # fmt: skip
    model = random_model(
        MODELS["llama3_8b"],
        seed=0,
        profile=NumericsProfile(),
        mesh=make_mesh(1, lab.load_tp, platform=lab.backend.platform),
        backend=lab.backend,
    )
    setting = f"{LARGE_WEIGHTS}, bfloat16, {lab.machine}"
    return Server(
        chained(model), name="llama3_8b", weights=CHAINED, setting=setting, sizes=LARGE, lab=lab
    )


@cache
def trained_server(lab: Lab) -> Server:
    """The lab's trained model, whose probabilities are those of text."""
    sizes = TRAINED if lab.is_full else SMALL
    return Server(
        lab.model(lab.load_tp), name=lab.folder.name, weights=lab.weights, setting=lab.setting,
        sizes=sizes, lab=lab,
    )  # fmt: skip


@cache
def trained_load_server(lab: Lab) -> Server:
    """The lab's trained model with room for loads of up to 1024 tokens."""
    sizes = TRAINED_LOAD if lab.is_full else SMALL
    return Server(
        lab.model(lab.load_tp), name=lab.folder.name, weights=lab.weights, setting=lab.setting,
        sizes=sizes, lab=lab,
    )  # fmt: skip


def load_servers(lab: Lab) -> list[Callable[[Lab], Server]]:
    """What makes the servers of a load: of a trained model that was given, and of the large one."""
    return [trained_load_server, large_server] if lab.is_full and lab.is_given else [large_server]


def piece_name(name: str, make: Callable[[Lab], Server]) -> str:
    """The name of a piece that loads the server that `make` makes."""
    return name if make is large_server else name + OF_TRAINED


def load_setting(lab: Lab, part: Part) -> str:
    """What runs a load, in words, where it can be said without making the large model."""
    if part.name.endswith(OF_TRAINED):
        return f"rows that name it: {trained_load_server(lab).setting}"
    if not lab.is_full or lab.backend is not Backend.SM90:
        return large_server(lab).setting
    return f"{LARGE_WEIGHTS}, bfloat16, {lab.machine}; {LARGE.words}"


def some_deterministic(count: int, percent: float) -> list[bool]:
    """Which of `count` requests are deterministic: at least one, if any are wanted; spread."""
    wanted = max(round(count * percent / 100), int(percent > 0))
    chosen = set(np.random.default_rng(2).permutation(count)[:wanted].tolist())
    return [i in chosen for i in range(count)]


def num_different(
    told: Sequence[TimedAnswer], canonical: Sequence[TimedAnswer], *, claimed: bool
) -> int:
    """Answers with another bit than the canonical ones, of those that claim to have none.

    With `claimed` False those that claim nothing: the control.
    """
    return sum(
        one.digest != other.digest
        for one, other in zip(told, canonical, strict=True)
        if one.plan.is_deterministic is claimed
    )


def window_facts(told: Sequence[TimedAnswer]) -> Row:
    """What verification threw away of deterministic requests; little, where nothing was drafted."""
    exact = [one for one in told if one.plan.is_deterministic]
    if not any(one.windows.num_windows for one in exact):
        return {"windows": 0, "rollbacks": 0}
    counts = [one.windows for one in exact]
    tokens = sum(one.num_tokens for one in exact)
    thrown = sum(one.num_rolled_back for one in counts)
    return {
        "windows": sum(one.num_windows for one in counts),
        "rollbacks": sum(one.num_rollbacks for one in counts),
        "recomputed_tokens": thrown,
        "recomputed_percent": 100 * thrown / tokens,
        "none_percent": 100 * sum(not one.num_rollbacks for one in counts) / max(1, len(counts)),
    }


def quantiles_ms(values: Sequence[float], name: str) -> Row:
    """Median and P99 of seconds, as milliseconds."""
    return {
        f"{name}_p{share}_ms": 1e3 * float(np.percentile(values, share)) for share in (50, 90, 99)
    }
