# SPDX-License-Identifier: Apache-2.0
"""What an experiment is, and what it may use."""

import enum
import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.heap import frozen_heap
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.launch_times import quickest_decode_steps
from detjax.models.bundled import bundled_model_path
from detjax.models.hf_config import load_config
from detjax.models.loading import LoadedModel, load_model
from detjax.models.params import possible_tps
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import Build, NumericsProfile, fingerprint
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh

Row = dict[str, Any]

RANDOM = "random"
"""What rows of a model of random weights have for the digest of its weights."""

CHAINED = "random, chained"
"""And those of `loads.chained`."""


def is_random(weights: str) -> bool:
    """Whether the weights of a row are no trained model's."""
    return weights in (RANDOM, CHAINED)


class Size(enum.Enum):
    """How much an experiment does."""

    SMALL = "small"  # a laptop, a minute or two
    FULL = "full"  # the paper's counts where the model allows them, on a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What an experiment found.

    Attributes:
        title: Of the table.
        setting: What ran: model, counts, devices.
        columns: Of the table: keys of `rows`, in order.
        rows: One for each line of the table.
        findings: Sentences that the rows say.
        plot: Draws them on a matplotlib figure.
    """

    title: str
    setting: str
    columns: tuple[str, ...]
    rows: Sequence[Row]
    findings: Sequence[str]
    plot: Callable[[Any], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A piece of an experiment: what is run at once, and not again when its rows are there.

    Attributes:
        name: Of the piece; each of its rows says it.
        seconds: What it takes on a GPU in the full size with compiling, roughly.
        run: Returns its rows.
    """

    name: str
    seconds: float
    run: Callable[[], Sequence[Row]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A question, a paper's answer to it, and how to ask again.

    Attributes:
        question: One line.
        paper: Which paper, figure or table, and what it reports, in one or two lines.
        parts: The pieces that are run, most wanted first.
        result: What rows of some or all of the pieces say, given the setting as `setting` has it.
        setting: What runs in a piece: model, counts, devices.
    """

    question: str
    paper: str
    parts: Callable[["Lab"], Sequence[Part]]
    result: Callable[[Sequence[Row], str], Result]
    setting: Callable[["Lab", Part], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeExperiment:
    """An experiment that is one piece.

    Attributes:
        question: One line.
        paper: Which paper, figure or table, and what it reports, in one or two lines.
        run: Asks again.
        plot: Draws rows on a matplotlib figure.
        seconds: As `Part` has it.
    """

    question: str
    paper: str
    run: Callable[["Lab"], Result]
    plot: Callable[[Any, Sequence[Row]], None]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The size, the kernels and the model of a run; `prompts` are problems of a file, if given.

    `load_tp` is over how many devices the servers of loads run.
    """

    size: Size
    folder: Path
    backend: Backend
    num_devices: int
    prompts: tuple[str, ...] = ()
    load_tp: int = 1

    @property
    def is_full(self) -> bool:
        return self.size is Size.FULL

    def pick(self, small, full):
        """One of two values, by the size."""
        return full if self.is_full else small

    @property
    def is_given(self) -> bool:
        """Whether the model is another one than the bundled."""
        return self.folder.resolve() != bundled_model_path().resolve()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.folder)

    @cached_property
    def weights(self) -> str:
        """Begin of the sha256 of the weight files, in order of their names."""
        hasher = hashlib.sha256()
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                hasher.update(hashlib.file_digest(file, "sha256").digest())
        return hasher.hexdigest()[:12]

    @cached_property
    def tps(self) -> tuple[int, ...]:
        """Tensor-parallel sizes that the model and the devices allow."""
        possible = possible_tps(load_config(self.folder))
        return tuple(tp for tp in possible if tp <= min(self.num_devices, 8))

    @cached_property
    def setting(self) -> str:
        """Which model, where."""
        millions = num_params(self.model(1)) / 1e6
        return (
            f"{self.folder.name} ({millions:.1f}M parameters; the papers use 7B to 235B), "
            f"bfloat16, {self.machine}"
        )

    @cached_property
    def machine(self) -> str:
        """Which kernels, on what."""
        device = jax.devices(self.backend.platform)[0]
        mark = fingerprint(NumericsProfile(), Build.current(self.backend.value, device))
        of_loads = f", loads at tp {self.load_tp}" if self.load_tp > 1 else ""
        return f"{self.backend.value} on {self.device_kind}, fingerprint {mark}{of_loads}"

    @cached_property
    def device_kind(self) -> str:
        return jax.devices(self.backend.platform)[0].device_kind

    def model(self, tp: int, compute: str = "bfloat16") -> LoadedModel:
        """The model, split over `tp` devices, its activations of the dtype `compute`."""
        return self._model(tp, compute)

    @cache  # noqa: B019 - a lab lives as long as the command
    def _model(self, tp: int, compute: str) -> LoadedModel:
        return load_model(
            str(self.folder),
            profile=NumericsProfile(compute_dtype=compute),
            mesh=make_mesh(1, tp, platform=self.backend.platform),
            backend=self.backend,
        )

    def engine(
        self,
        mode: str,
        *,
        batch_size: int,
        max_len: int,
        tp: int = 1,
        decode_batches: tuple[int, ...] = (),
        prefill: tuple[int, int] = (1, 64),
        model: LoadedModel | None = None,
        max_draft_fraction: float | None = None,
        has_long_answers: bool = False,
        is_compiled: bool = True,
    ) -> Engine:
        """An engine whose prefix cache is off, so that no request is served by another's work.

        It runs the lab's model over `tp` devices, or the `model` given. In `dvr` a
        `max_draft_fraction` of 1 makes it draft always, where left alone it may
        find canonical steps quicker. With `has_long_answers` one launch on a GPU may decode
        several tokens, for which more programs are compiled. In the full size all are compiled
        ahead unless `is_compiled` is False.
        """
        model = model or self.model(tp)
        steps = 1
        if has_long_answers and mode != "dvr" and model.mesh.size == 1:
            steps = quickest_decode_steps(model, batch_size=batch_size, max_tokens=max_len)
        config = EngineConfig(
            batch_size=batch_size,
            prefill_chunk=prefill[1],
            max_len=max_len,
            mode=mode,
            decode_batches=decode_batches,
            prefill_shapes=(prefill,),
            has_prefix_cache=False,
            max_draft_fraction=max_draft_fraction,
            decode_steps=steps,
            # WHY: what is claimed of answers is compared by the experiments themselves.
            self_check="off" if self.is_full else "always",
        )
        engine = Engine(model, config)
        if self.is_full and is_compiled:
            engine.compile()  # several programs at a time
        return engine

    def compile_together(self, engines: Iterable[Engine]) -> None:
        """Compile engines side by side that were made with `is_compiled=False`."""
        if self.is_full:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(Engine.compile, engines))

    def request(
        self,
        prompt: str,
        *,
        max_tokens: int,
        is_deterministic: bool,
        stop: str = "",
        ignore_eos: bool = False,
    ) -> Request:
        """A greedy request."""
        stop_ids = tuple(self.tokenizer.encode(stop)[-1:]) if stop else ()
        return Request(
            prompt_token_ids=tuple(self.tokenizer.encode(prompt)),
            sampling=SamplingParams(
                max_tokens=max_tokens, stop_token_ids=stop_ids, ignore_eos=ignore_eos
            ),
            is_deterministic=is_deterministic,
        )


@frozen_heap()  # as `Engine.generate` does
def answer_few_at_a_time(
    engine: Engine, requests: Sequence[Request], *, most: int
) -> list[Completion]:
    """Answer requests, at most so many at once, so that steps of at most so many rows run.

    Raises:
        RuntimeError: If the engine could not answer one.
    """
    told: dict[int, tuple[int, list[int], list[np.float32]]] = {}
    reasons: dict[int, FinishReason] = {}
    left = 0
    while len(reasons) < len(requests):
        while left < len(requests) and left - len(reasons) < most:
            asked = requests[left]
            request_id = engine.add_request(
                asked.prompt_token_ids, asked.sampling, is_deterministic=asked.is_deterministic
            )
            told[request_id] = left, [], []
            left += 1
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            idx, token_ids, logprobs = told[output.request_id]
            token_ids += output.token_ids
            logprobs += output.logprobs
            if output.finish_reason is not None:
                reasons[idx] = output.finish_reason
    return [
        Completion(
            request_idx=idx, sequence_idx=0, prompt_token_ids=requests[idx].prompt_token_ids,
            token_ids=tuple(token_ids), logprobs=tuple(logprobs), top_logprobs=(),
            finish_reason=reasons[idx],
        )
        for idx, token_ids, logprobs in told.values()
    ]  # fmt: skip


def num_params(model: LoadedModel) -> int:
    """Weights of a model on one device; tied embeddings count once."""
    leaves = {id(leaf): leaf.size for leaf in jax.tree.leaves(model.params)}
    return sum(leaves.values())


def prompts(count: int) -> list[str]:
    """Different openings in the manner of the bundled model's novels, the same ones every time."""
    subjects = ("The old house", "My dear sister", "A stranger", "The young doctor", "Her uncle")
    verbs = ("stood", "came back", "was waiting", "spoke softly", "had been seen")
    places = ("by the sea", "in the garden", "at the window", "near the church", "in London")
    times = ("that evening", "in the morning", "after the war", "without a word", "last winter")
    found = [f"{s} {v} {p} {t}" for s in subjects for v in verbs for p in places for t in times]
    order = np.random.default_rng(0).permutation(len(found))
    return [found[i] for i in order[:count]]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ; None if they are the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def largest_divergence(answers: Sequence[Completion]) -> float:
    """Largest difference of a token's probability from the first answer's, while they agree."""
    first, largest = answers[0], 0.0
    for other in answers[1:]:
        end = first_difference(first.token_ids, other.token_ids)
        a, b = (np.exp(np.asarray(c.logprobs[:end], np.float64)) for c in (first, other))
        largest = max(largest, float(np.abs(a - b).max(initial=0.0)))
    return largest


def digest_of(completions: Sequence[Completion]) -> str:
    """One hash of many completions' digests."""
    return hashlib.sha256("".join(c.digest() for c in completions).encode()).hexdigest()[:12]


def windows_since(engine: Engine, before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Windows verified and rolled back since then."""
    stats = engine.stats()
    return stats.num_windows - before[0], stats.num_rollbacks - before[1]


def name_of(row: Row) -> str:
    """The case or mode of a row, and in `dvr` whether there were drafts, as far as it says."""
    name = row.get("case", row["mode"])
    if row["mode"] != "dvr":
        return name
    if "windows" not in row:
        return f"{name} (drafts not recorded)"
    return f"{name} (no drafts)" if row["windows"] == 0 else name


def short(value: Any) -> str:
    """A cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if value else "0"
    return f"{value:,}" if isinstance(value, int) else str(value)
