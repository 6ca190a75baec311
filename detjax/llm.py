# SPDX-License-Identifier: Apache-2.0
"""`detjax.LLM`: a model folder or id, texts in, texts out; sizes are chosen by the hardware."""

import contextlib
import dataclasses
import difflib
import math
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from detjax.kept_programs import keep_programs_of_build
from detjax.models.abstract import why_unsupported
from detjax.models.bundled import BUNDLED_NAME, bundled_model_path
from detjax.models.config import ModelConfig
from detjax.models.decoder import check_mesh
from detjax.models.generation_config import default_sampling
from detjax.models.hf_config import load_config
from detjax.models.hub import resolve_model
from detjax.models.loading import LoadedModel, load_model
from detjax.models.params import check_tp
from detjax.models.tokenizer import Tokenizer
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NO_CAST, NumericsProfile
from detjax.pallas_kernels.backend import Backend, choose_backend
from detjax.parallel.distributed import least_of_processes
from detjax.parallel.mesh import (
    DP_AXIS,
    configure_virtual_devices,
    devices_of_process,
    make_mesh,
)
from detjax.proof.identity import Identifier, Identity
from detjax.proof.receipt import Receipt
from detjax.serving.config import EngineConfig
from detjax.serving.engine import Engine
from detjax.serving.grammars import Grammars
from detjax.serving.memory import cache_bytes, check_memory, pages_that_fit
from detjax.serving.request import PromptLogprobs, SamplingParams, TokenEvent
from detjax.serving.text import CompletionOutput, TextBatch, text_request
from detjax.source import default_cache_dir

BUNDLED = "bundled"
AUTO = "auto"
GPU_MEMORY_UTILIZATION = 0.9

Prompt = str | Sequence[int] | np.ndarray
"""A text, or token ids."""
Message = Mapping[str, Any]
Progress = Callable[[str, int, int], None]
"""Told (what, done, total) while weights are loaded."""

_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})

_CPU_SIZES: dict[str, Any] = {"batch_size": 8, "prefill_chunk": 64}
# WHY: offline work of Llama-3.1-8B shapes: 6,783 generated tokens a second with a streak of 64,
# 6,412 without one (H200, 2026-11).
_GPU_SIZES: dict[str, Any] = {
    "batch_size": 256,
    "prefill_chunk": 512,
    "prefill_shapes": ((4, 512),),
    "max_prefill_streak": 64,
}
_GPU_DECODE_BATCHES = (1, 8, 16, 64, 128, 256)
# WHY: two decode steps of 256 sequences read the weights twice. A model of the schedule with the
# kernels' times says 0.97 of the time of 256 slots for 512 x (512 + 128) tokens, and 0.94 for a
# trace's lengths.
_OFFLINE_BATCH = 512
_OFFLINE_PAGES = 8  # of each of so many sequences: fewer would wait for pages, not for slots

_MODES = {
    "invariant": "invariant: every step uses canonical kernels",
    "dvr": "dvr: drafts by fast kernels, verified by canonical ones",
    "fast": "fast: no claim; digests may differ from run to run",
}


class MeshError(ValueError):
    """dp and tp do not go with the model, its numerics or the devices."""


# ------------------------------------------------------------------------------- opening of a model


def find_model(name: str | Path, *, revision: str | None = None) -> Path:
    """Return the folder of a model.

    Args:
        name: A folder, a Hugging Face id, or `bundled` or `novels-6m`: the small model that comes
            with the package. A folder of the second name comes first.
        revision: Branch, tag or commit of a Hugging Face id; None takes its main branch.

    Raises:
        FileNotFoundError, PermissionError, ValueError: As `resolve_model` says.
    """
    if name == BUNDLED or (str(name) == BUNDLED_NAME and not Path(name).exists()):
        if revision is not None:
            raise ValueError(f"{revision=} has no meaning for the bundled model; leave it out")
        return bundled_model_path()
    return resolve_model(str(name), revision=revision)


def load_on_devices(
    folder: Path,
    *,
    profile: NumericsProfile,
    backend: str,
    dp: int,
    tp: int,
    cast_weights: str = NO_CAST,
    max_len: int | None = None,
    progress: Progress = ignore_progress,
    num_processes: int = 1,
) -> tuple[LoadedModel, str]:
    """Choose the kernels and the mesh by the hardware, and load the weights.

    Without GPUs the mesh is of virtual CPU devices, which JAX makes when it starts.

    Args:
        folder: Of the model.
        profile: The numerics to run with.
        backend: A value of `Backend`, or "auto": `sm90` on a Hopper GPU where its kernels take the
            model, else `portable`.
        dp: Replicas.
        tp: Devices that share each layer.
        cast_weights: As `load_model` has it.
        max_len: As `load_model` has it.
        progress: Told how far loading is.
        num_processes: That share the mesh.

    Returns:
        The model, and why its backend was chosen.

    Raises:
        MeshError: If dp and tp do not go with the model, the profile or the devices.
        ValueError: If something else does not fit, naming it.
        FileNotFoundError: If a file is missing.
    """
    config = load_config(folder)
    with _mesh_errors():
        check_tp(config, tp)
        check_mesh(config, profile, tp)
        configure_virtual_devices(devices_of_process(dp * tp, num_processes))
    choice = choose_backend(
        None if backend == AUTO else _backend(backend),
        why_not_model=lambda backend: why_unsupported(config, profile, backend, tp),
    )
    with _mesh_errors():
        mesh = make_mesh(dp, tp, platform=choice.backend.platform)
    model = load_model(
        str(folder),
        profile=profile,
        mesh=mesh,
        backend=choice.backend,
        progress=progress,
        cast_weights=cast_weights,
        max_len=max_len,
    )
    return model, choice.reason


@contextlib.contextmanager
def _mesh_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise MeshError(str(error)) from error


def _backend(name: str) -> Backend:
    names = [backend.value for backend in Backend]
    if name not in names:
        raise ValueError(f"backend={name!r} must be {AUTO!r} or one of {names}")
    return Backend(name)


def size_cache(
    model: LoadedModel,
    config: EngineConfig,
    *,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
) -> EngineConfig:
    """Return `config` with a cache that fits, where it does not say how large.

    The cache that holds `batch_size` sequences of `max_len` where there is room for it, else as
    many pages as there is room for. No bit depends on it.

    Raises:
        ValueError: If not even one sequence of `max_len` fits on a replica.
    """
    if config.num_pages:
        return config
    fitting = pages_that_fit(
        model,
        gpu_memory_utilization=gpu_memory_utilization,
        draft_weights=config.draft_weights,
    )
    enough = config.batch_size * _pages_of(model, config.max_len)
    sized = dataclasses.replace(config, num_pages=min(fitting, enough))
    check_longest(model, sized)
    return sized


def check_longest(model: LoadedModel, config: EngineConfig) -> None:
    """Refuse a cache in which a replica cannot hold one sequence of `max_len`.

    Raises:
        ValueError: If it cannot.
    """
    dp = model.mesh.shape[DP_AXIS]
    needed, have = _pages_of(model, config.max_len), config.num_pages // dp
    if config.num_pages and needed > have:
        page_len = model.profile.attention_block
        raise ValueError(
            f"max_len={config.max_len} takes {needed} pages of {page_len} tokens, and a replica "
            f"has {have} (num_pages={config.num_pages}, dp={dp}); lower max_len (--max-tokens) to "
            f"{have * page_len}, or give the cache {needed * dp} pages (--cache-pages), more "
            "memory or more devices"
        )


def _pages_of(model: LoadedModel, num_tokens: int) -> int:
    return math.ceil(num_tokens / model.profile.attention_block)


def describe(
    name: str,
    model_config: ModelConfig,
    engine: EngineConfig,
    *,
    weight_dtype: str,
    compute_dtype: str,
    weight_cast: str,
    fingerprint: str,
    backend: str,
    backend_reason: str,
    dp: int,
    tp: int,
) -> dict[str, str]:
    """Return what runs, and what decides its bits, as lines for people."""
    cast = "" if weight_cast == NO_CAST else f" (cast from {weight_cast})"
    return {
        "model": f"{name}: {model_config.family}, {model_config.num_layers} layers of "
        f"{model_config.hidden_size}, vocabulary {model_config.vocab_size}, context "
        f"{model_config.max_position_embeddings}",
        "numerics": f"{weight_dtype} weights{cast}, {compute_dtype} compute, "
        f"fingerprint {fingerprint}",
        "mode": _MODES[engine.mode],
        "backend": f"{backend} ({backend_reason})",
        "mesh": f"dp {dp} x tp {tp}",
        "batch": f"{engine.batch_size} at once, prompts in chunks of {engine.prefill_chunk} "
        f"tokens, room for {engine.max_len}",
    }


# ----------------------------------------------------------------------------------------- the LLM


@dataclass(frozen=True, kw_only=True, slots=True)
class LLMConfig:
    """What an `LLM` runs with, chosen or asked for; `print` shows it.

    Attributes:
        name: As it was asked for.
        folder: Where its files lie.
        model: Its dimensions.
        profile: Every choice of numerics.
        weight_cast: What the weights were rounded from and to when they were read.
        fingerprint: Of everything that decides a bit.
        backend: Which kernels run.
        backend_reason: Why these.
        dp: Replicas.
        tp: Devices that share each layer.
        engine: Sizes and policies, none of which changes a bit.
        cache_bytes: Of the cache, over all devices.
    """

    name: str
    folder: Path
    model: ModelConfig
    profile: NumericsProfile
    weight_cast: str
    fingerprint: str
    backend: Backend
    backend_reason: str
    dp: int
    tp: int
    engine: EngineConfig
    cache_bytes: int

    def __str__(self) -> str:
        """Return a line for each fact."""
        facts = describe(
            self.name,
            self.model,
            self.engine,
            weight_dtype=self.profile.weight_dtype,
            compute_dtype=self.profile.compute_dtype,
            weight_cast=self.weight_cast,
            fingerprint=self.fingerprint,
            backend=self.backend.value,
            backend_reason=self.backend_reason,
            dp=self.dp,
            tp=self.tp,
        )
        facts["cache"] = f"{self.engine.num_pages} pages, {self.cache_bytes / 2**30:.2f} GiB"
        return "\n".join(f"{name:<11} {value}" for name, value in facts.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOutput:
    """What became of one prompt.

    Attributes:
        prompt: Its text; of a conversation, as the template has it; None where token ids were
            given.
        prompt_token_ids: As the model saw it.
        outputs: The prompt's `n` sequences.
        prompt_logprobs: Of the prompt's second token and so on; None where they were not asked for.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: PromptLogprobs | None = None


class LLM:
    """A model, its tokenizer and an engine: `LLM(model).generate(texts, SamplingParams(...))`.

    The engine, its cache and its compiled programs stay between calls. To keep compiled programs
    between processes, set JAX_COMPILATION_CACHE_DIR. Calls from several threads run one after
    another; for streaming and cancellation give `engine` to `detjax.AsyncEngine`.

    Attributes:
        config: What was chosen; print it.
        model: The weights on their devices.
        tokenizer: Of the model.
        engine: Knows tokens only.
        default_sampling: Of prompts for which none is given.
    """

    def __init__(
        self,
        model: str | Path = BUNDLED,
        *,
        backend: str = AUTO,
        dp: int = 1,
        tp: int = 1,
        mode: str = "invariant",
        dtype: str | None = None,
        profile: NumericsProfile | None = None,
        cast_weights: str = NO_CAST,
        revision: str | None = None,
        max_len: int | None = None,
        batch_size: int | None = None,
        prefill_chunk: int | None = None,
        num_pages: int | None = None,
        gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
        generation_config: str = "auto",
        cache_dir: str | Path | None = AUTO,
        num_processes: int = 1,
        show_progress: bool = True,
        **engine_options: Any,
    ):
        """Load the model and allocate the cache.

        Args:
            model: A folder in Hugging Face format, a Hugging Face id, which is downloaded once, or
                `novels-6m`, the small model that comes with the package.
            backend: "portable", "sm90" or "auto", which goes by the hardware and the model. It
                chooses bits.
            dp: Replicas, which share the prompts.
            tp: Devices that share each layer; without GPUs, virtual ones.
            mode: As `EngineConfig` has it: "invariant", "dvr" or "fast".
            dtype: "bfloat16" or "float32": of weights and compute; None is bfloat16, or what
                `profile` says. It chooses bits.
            profile: Every choice of numerics, in place of `dtype`.
            cast_weights: "bfloat16" rounds a checkpoint of float16 or float32 to it.
            revision: Branch, tag or commit of a Hugging Face id; None is its main branch.
            max_len: Longest prompt plus completion, in tokens. None is the model's context, or what
                the cache holds where that is less.
            batch_size: Sequences that run at once. None is 8 on the CPU, and on a GPU 256 a
                replica, or 512 where the cache has 8 pages for each and prompts go first
                (`max_prefill_streak` is not given).
            prefill_chunk: Prompt tokens of a sequence in one step. None is 512 on a GPU, 64 on the
                CPU.
            num_pages: Cache pages over all replicas. None: on a GPU as many as
                `gpu_memory_utilization` leaves room for; on the CPU as many as `batch_size`
                sequences of `max_len` need, in 1 GiB at most and a quarter of the free memory.
            gpu_memory_utilization: Share of a GPU's memory for weights and cache together: of the
                memory that JAX takes, 75 % of the GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says
                otherwise. The rest is for activations.
            generation_config: "auto": `default_sampling` is what the model's generation_config.json
                recommends, if it has one. "none": it is `SamplingParams()`.
            cache_dir: Where compiled programs are kept from now on, this model's and JAX's others,
                so that the next process starts quickly; what is read is verified. "auto": in the
                user's cache folder, unless JAX has one already. None: JAX's own settings stay as
                they are.
            num_processes: Of the job that this process has joined (`start_job`); all of them make
                the same `LLM` and make the same calls.
            show_progress: Show bars on standard error, where it is a terminal.
            engine_options: Other fields of `EngineConfig`, such as `decode_steps`.

        Raises:
            TypeError: If there is no such option.
            ValueError: If a value is out of range, or model, mesh and memory do not go together.
            FileNotFoundError: If the model or a file of it is missing.
        """
        _check_options(engine_options)
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"{gpu_memory_utilization=} must be above 0 and at most 1")
        if profile is not None and dtype is not None:
            raise ValueError(f"{dtype=} does not go with a profile, which has the dtypes")
        dtype = dtype or "bfloat16"
        profile = profile or NumericsProfile(weight_dtype=dtype, compute_dtype=dtype)
        if generation_config not in ("auto", "none"):
            raise ValueError(f"{generation_config=} must be 'auto' or 'none'")
        _keep_programs(cache_dir)
        folder = find_model(model, revision=revision)
        recommended = default_sampling(folder) if generation_config == "auto" else {}
        self.default_sampling = SamplingParams(**recommended)
        self._show_progress = show_progress
        self.tokenizer = tokenizer = Tokenizer.from_folder(folder)
        with self._loading() as progress:
            self.model, reason = load_on_devices(
                folder,
                profile=profile,
                backend=backend,
                dp=dp,
                tp=tp,
                cast_weights=cast_weights,
                progress=progress,
                num_processes=num_processes,
            )
        sizes = {
            "batch_size": batch_size,
            "prefill_chunk": prefill_chunk,
            "max_len": max_len,
            "num_pages": num_pages,
            "mode": mode,
            **engine_options,
        }
        asked = {name: value for name, value in sizes.items() if value is not None}
        engine_config = choose_sizes(
            self.model, asked, gpu_memory_utilization=gpu_memory_utilization
        )
        check_memory(self.model, engine_config)
        grammars = Grammars(
            lambda: tokenizer.backend.to_str(),
            vocab_size=self.model.config.vocab_size,
            eos_token_ids=self.model.config.eos_token_ids,
        )
        self.engine = Engine(self.model, engine_config, grammars=grammars)
        self.config = LLMConfig(
            name=str(model),
            folder=folder,
            model=self.model.config,
            profile=profile,
            weight_cast=self.model.weight_cast,
            fingerprint=self.model.fingerprint,
            backend=self.model.backend,
            backend_reason=reason,
            dp=dp,
            tp=tp,
            engine=engine_config,
            cache_bytes=cache_bytes(self.model, engine_config.num_pages),
        )
        is_bundled = folder == bundled_model_path()
        self._identifier = Identifier(
            self.model, self.tokenizer, name=BUNDLED_NAME if is_bundled else str(model)
        )

    def __repr__(self) -> str:
        """Return the name and the mesh."""
        return f"LLM({self.config.name!r}, dp={self.config.dp}, tp={self.config.tp})"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        has_control: bool = False,
    ) -> list[PromptOutput]:
        """Continue prompts.

        Args:
            prompts: A text or a sequence of token ids, or a list of them. Texts get the special
                tokens that the model expects around them; token ids are taken as they are.
            sampling: How; one for all prompts, or one for each. None is
                `default_sampling`. A completion ends at the latest with `max_len`.
            has_control: Special tokens written out in a text become that token; else they are text.

        Returns:
            What became of each prompt, in order.

        Raises:
            ValueError: If a prompt does not fit, naming it, before anything runs.
            FloatingPointError: If a logit is NaN.
        """
        asked = [self._encoded(prompt, has_control=has_control) for prompt in _as_list(prompts)]
        return self._run(asked, sampling)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_variables: Mapping[str, Any] = _NO_VARIABLES,
        has_control: bool = False,
    ) -> list[PromptOutput]:
        """Answer conversations, with the model's chat template.

        Args:
            messages: A conversation, [{"role": ..., "content": ...}, ...], or a list of them.
            sampling: As `generate` has it.
            template_variables: What else the template knows: `{"enable_thinking": False}`, tools.
            has_control: As `generate` has it, of the messages.

        Returns:
            What became of each conversation, in order.

        Raises:
            ValueError: If the model has no template, it refuses the messages, or they do not fit.
            FloatingPointError: If a logit is NaN.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        asked: list[tuple[str | None, Sequence[int]]] = [
            (
                self.tokenizer.render_chat(conversation, variables=template_variables),
                self.tokenizer.apply_chat_template(
                    conversation, variables=template_variables, has_control=has_control
                ),
            )
            for conversation in conversations
        ]
        return self._run(asked, sampling)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        top: int = 1,
        has_control: bool = False,
    ) -> list[PromptOutput]:
        """Say how likely each token of given texts is, after those before it; generate nothing.

        Args:
            prompts: As `generate` has them.
            top: How many of the most likely tokens to report at each position, at most 64.
            has_control: As `generate` has it.

        Returns:
            What became of each prompt, in order: its `prompt_logprobs`, and one output without a
            token.

        Raises:
            ValueError: If a prompt does not fit, naming it, before anything runs.
            FloatingPointError: If a logit is NaN.

        Numerics:
            As `Engine.score` has them.
        """
        sampling = SamplingParams(max_tokens=0, num_prompt_logprobs=top)
        return self.generate(prompts, sampling, has_control=has_control)

    def identity(self) -> Identity:
        """Return what model, numerics and build these are. Hashes the weights the first time."""
        return self._identifier.identity()

    def receipt(self, output: CompletionOutput) -> Receipt:
        """Return the receipt of an answer of these weights, as `docs/receipts.md` has it.

        Raises:
            ValueError: If the answer is not canonical.
        """
        ends = self.config.model.eos_token_ids
        return Receipt.of(self.identity(), output, end_token_ids=ends)

    def _encoded(self, prompt: Prompt, *, has_control: bool) -> tuple[str | None, Sequence[int]]:
        """The text of a prompt, if it is one, and its token ids."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, has_control=has_control)
        return None, prompt.tolist() if isinstance(prompt, np.ndarray) else prompt

    def _run(
        self,
        asked: Sequence[tuple[str | None, Sequence[int]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[PromptOutput]:
        """Continue token ids. The text of each is carried along."""
        one = self.default_sampling if sampling is None else sampling
        samplings = [one] * len(asked) if isinstance(one, SamplingParams) else list(one)
        if len(samplings) != len(asked):
            raise ValueError(
                f"there are {len(asked)} prompts and {len(samplings)} SamplingParams; give one, or "
                "one for each prompt"
            )
        max_len = self.config.engine.max_len
        is_all = max_len == self.config.model.max_position_embeddings
        requests = [
            text_request(
                ids,
                params,
                what=f"prompt {i}",
                vocab_size=self.config.model.vocab_size,
                max_len=max_len,
                limit="the model's context" if is_all else "max_len",
                is_deterministic=self.config.engine.mode != "fast",
                tokenizer=self.tokenizer,
                eos_token_ids=self.config.model.eos_token_ids,
            )
            for i, ((_, ids), params) in enumerate(zip(asked, samplings, strict=True))
        ]
        batch = TextBatch(
            requests,
            self.tokenizer,
            end_ids=self.config.model.eos_token_ids,
            fingerprint=self.config.fingerprint,
        )
        with self._generating(batch) as on_token:
            completions = self.engine.generate(batch.token_requests, on_token=on_token)
        outputs = iter(batch.outputs(completions))
        results = []
        for (text, _), request in zip(asked, requests, strict=True):
            of_prompt = tuple(next(outputs) for _ in range(request.sampling.n))
            result = PromptOutput(
                prompt=text,
                prompt_token_ids=request.prompt_token_ids,
                outputs=of_prompt,
                prompt_logprobs=of_prompt[0].completion.prompt_logprobs,
            )
            results.append(result)
        return results

    @contextlib.contextmanager
    def _bar(self, *columns: rich.progress.ProgressColumn) -> Iterator[rich.progress.Progress]:
        console = rich.console.Console(stderr=True)
        is_hidden = not (self._show_progress and console.is_terminal)
        defaults = rich.progress.Progress.get_default_columns()
        with rich.progress.Progress(
            *defaults, *columns, console=console, transient=True, disable=is_hidden
        ) as bar:
            yield bar

    @contextlib.contextmanager
    def _loading(self) -> Iterator[Progress]:
        with self._bar() as bar:
            task = bar.add_task("load", total=None)

            def progress(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total)

            yield progress

    @contextlib.contextmanager
    def _generating(self, batch: TextBatch) -> Iterator[Callable[[TokenEvent], bool]]:
        with self._bar(rich.progress.MofNCompleteColumn()) as bar:
            task = bar.add_task("completions", total=len(batch.sequences))

            def on_token(event: TokenEvent) -> bool:
                num_ended = batch.num_ended
                is_stopped = batch.on_token(event)
                if batch.num_ended > num_ended:
                    bar.update(task, completed=batch.num_ended)
                return is_stopped

            yield on_token


def _keep_programs(cache_dir: str | Path | None) -> None:
    if cache_dir is None or cache_dir == AUTO and jax.config.jax_compilation_cache_dir:
        return
    chosen = default_cache_dir() if cache_dir == AUTO else cache_dir
    try:
        keep_programs_of_build(chosen)
    except OSError as error:
        warnings.warn(
            f"cache_dir={str(chosen)!r} cannot be written ({error.strerror}), so compiled programs "
            "are not kept; give another, or None",
            stacklevel=3,
        )


def choose_sizes(
    model: LoadedModel, asked: Mapping[str, Any], *, gpu_memory_utilization: float
) -> EngineConfig:
    """Return what an engine of this model is told at its start.

    Args:
        model: Loaded, on its mesh.
        asked: Fields of `EngineConfig`; the others are chosen by the hardware.
        gpu_memory_utilization: As `LLM` has it.

    Raises:
        ValueError: If a value is out of range, or the cache does not hold `max_len` tokens.
    """
    dp, page_len = model.mesh.shape[DP_AXIS], model.profile.attention_block
    context = model.config.max_position_embeddings
    is_gpu = model.backend.platform == "gpu"
    sizes = dict(_GPU_SIZES if is_gpu else _CPU_SIZES)
    sizes["batch_size"] *= dp
    if "prefill_chunk" in asked:
        sizes.pop("prefill_shapes", None)
    # Checked with a cache of any size, before anything is divided by what was asked for.
    config = EngineConfig(**{"max_len": context, **sizes, **asked})
    # Processes of a job may have unlike memory free, and need one number of pages.
    fitting = config.num_pages or least_of_processes(
        pages_that_fit(
            model,
            gpu_memory_utilization=gpu_memory_utilization,
            draft_weights=config.draft_weights,
        )
    )
    # Whoever says how long prompts go first, as a server does, has latencies in mind.
    is_offline = is_gpu and not {"batch_size", "max_prefill_streak"} & asked.keys()
    if is_offline and fitting // dp >= _OFFLINE_BATCH * _OFFLINE_PAGES:
        config = dataclasses.replace(config, batch_size=_OFFLINE_BATCH * dp)
    max_len = asked.get("max_len", min(context, fitting // dp * page_len))
    num_pages = fitting
    if not is_gpu and not config.num_pages:
        num_pages = min(fitting, config.batch_size * math.ceil(max_len / page_len))
    decode_batches = config.decode_batches
    if is_gpu and "decode_batches" not in asked:
        batches = (batch * dp for batch in _GPU_DECODE_BATCHES)
        decode_batches = tuple(batch for batch in batches if batch < config.batch_size)
    config = dataclasses.replace(
        config, max_len=max_len, num_pages=num_pages, decode_batches=decode_batches
    )
    check_longest(model, config)
    return config


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse an option that nothing has."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    of_sampling = {field.name for field in dataclasses.fields(SamplingParams)}
    for name in options:
        if name in of_sampling:
            raise TypeError(
                f"{name} is no option of LLM: it is a field of SamplingParams, which generate and "
                "chat take"
            )
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *_OPTIONS], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise TypeError(
                f"LLM has no option {name!r}; {hint}it has {', '.join(_OPTIONS)}, and the fields "
                f"of EngineConfig: {', '.join(known)}"
            )


def _as_list(prompts: Any) -> list[Prompt]:
    """A list of prompts from one or many."""
    is_ids = len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)
    return [prompts] if is_ids or isinstance(prompts, str) else list(prompts)


_OPTIONS = tuple(
    name
    for name in LLM.__init__.__annotations__
    if name not in ("return", "model", "engine_options")
)
