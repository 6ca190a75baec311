# SPDX-License-Identifier: Apache-2.0
"""Opens the model. Only what is called here imports JAX, so that mistakes are reported at once."""

import dataclasses
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from detjax.cli.arguments import GenerateArgs, as_flags
from detjax.cli.command_line import check_name
from detjax.cli.errors import InputError, bad_input
from detjax.cli.options import GPU_MEMORY_SHARE, NO_CACHE, NO_CAST
from detjax.engine.config import EngineConfig
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import TokenEvent
from detjax.engine.requests.request import Request
from detjax.engine.scheduling.workload import Workload
from detjax.engine.trace import TracesEvents
from detjax.models.config import ModelConfig
from detjax.models.tokenizer import Tokenizer
from detjax.parallel.job_spec import find_job
from detjax.parallel.watch import Watch
from detjax.progress import Progress

if TYPE_CHECKING:  # imports JAX
    from detjax.proof.identity import Identity

OWN_OPTIONS = frozenset(
    """
    cache_dir coordinator format logprobs model output process_id prompt prompts_file quiet receipts
    revision sign stats trace
    """.split()
)
"""Options of a process alone, or compared as what comes of them: files, requests."""


@runtime_checkable
class CompilesPrograms(Protocol):
    """What `--warm` needs of an engine."""

    def compile(self, progress: Progress, requests: Sequence[Request] | None = None) -> None:
        """Compile ahead, as `Engine.compile` does."""
        ...


@runtime_checkable
class GeneratesCompletions(CompilesPrograms, Protocol):
    """What the command needs of an engine; `detjax.engine.engine.Engine` is one."""

    def stats(self) -> EngineStats:
        """Return what it has counted."""
        ...

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_token: Callable[[TokenEvent], bool],
        on_completion: Callable[[Completion], None],
    ) -> list[Completion]:
        """Run requests to their end."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """A model on its devices, as far as the command sees it.

    Attributes:
        fingerprint: Hash of everything that decides a bit.
        backend: Which kernels run it.
        backend_reason: Why these.
        size_engine: Chooses what is not asked for of an engine's options, for some work.
        cache_bytes: Of an engine's cache, over all devices.
        make_engine: Allocates a cache and what else it takes to generate; a tracer keeps a
            timeline.
        identify: Says what model, numerics and build these are; hashes the weights.
        weight_cast: What the weights were rounded from and to when they were read.
    """

    fingerprint: str
    backend: str
    backend_reason: str
    size_engine: Callable[[Mapping[str, Any], Workload], EngineConfig]
    cache_bytes: Callable[[EngineConfig], int]
    make_engine: Callable[[EngineConfig, TracesEvents], GeneratesCompletions]
    identify: Callable[[Tokenizer], "Identity"]
    weight_cast: str = NO_CAST


OpensModel = Callable[[GenerateArgs, Path, Progress, int], OpenModel]
"""The type of `open_model`."""


def read_model_files(args: GenerateArgs) -> tuple[Path, ModelConfig, Tokenizer]:
    """Find the model's folder and read what is small.

    Raises:
        InputError: If the folder or a file in it is missing, broken or not known.
    """
    from detjax.models.hf_config import load_config
    from detjax.models.hub import find_model

    check_name(args.model)
    with bad_input("--model: "):
        folder = find_model(args.model, revision=args.revision)
        config, tokenizer = load_config(folder), Tokenizer.from_folder(folder)
    if args.chat_template is not None:
        with bad_input("--chat-template: "):
            tokenizer = tokenizer.with_template(args.chat_template)
    return folder, config, tokenizer


def open_model(args: GenerateArgs, folder: Path, progress: Progress, max_len: int) -> OpenModel:
    """Join the other processes, if any, choose numerics, kernels and mesh, and load the weights.

    Args:
        args: The options.
        folder: Of the model.
        progress: Told how far loading is.
        max_len: Tokens of the longest prompt and completion: the context that is made ready.

    Raises:
        InputError: If they do not go together, cannot run here, or the weights are broken.
    """
    from detjax.models.weights.files import check_files

    with bad_input("--model: "):
        check_files(folder)
    with bad_input():
        job = find_job(args.coordinator, args.num_processes, args.process_id)
    keep_compiled_programs(args.cache_dir)
    if job is None:
        return _open_model(args, folder, progress, max_len, num_processes=1)

    from detjax.models.identity import model_hash
    from detjax.parallel.distributed import start_job

    with bad_input():
        watch = start_job(job)

    def progress_of_job(what: str, done: int, total: int) -> None:
        watch.progress()
        progress(what, done, total)

    with watch.working():
        with bad_input("--model: "):
            watch.check_same("files of the model", model_hash(folder))
        model = _open_model(args, folder, progress_of_job, max_len, num_processes=job.num_processes)
    watch.check_same("settings", f"{model.fingerprint} {_shared_settings(args)}")

    def size_engine(asked: Mapping[str, Any], work: Workload) -> EngineConfig:
        watch.check_same("requests", repr(work))
        with watch.working():
            return model.size_engine(asked, work)

    def make_engine(config: EngineConfig, tracer: TracesEvents) -> GeneratesCompletions:
        watch.check_same("settings", repr(config))
        return _JobEngine(model.make_engine(config, tracer), watch)

    return dataclasses.replace(model, size_engine=size_engine, make_engine=make_engine)


def _shared_settings(args: GenerateArgs) -> str:
    """The options that all processes of a job are given alike."""
    options = dataclasses.asdict(args)
    return repr({name: value for name, value in options.items() if name not in OWN_OPTIONS})


class _JobEngine:
    """An engine of several processes: all are given the same requests, and end together."""

    def __init__(self, engine: GeneratesCompletions, watch: Watch):
        self._engine, self._watch = engine, watch

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def compile(self, progress: Progress, requests: Sequence[Request] | None = None) -> None:
        def progress_of_job(what: str, done: int, total: int) -> None:
            self._watch.progress()
            progress(what, done, total)

        with self._watch.working():
            self._engine.compile(progress_of_job, requests)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_token: Callable[[TokenEvent], bool],
        on_completion: Callable[[Completion], None],
    ) -> list[Completion]:
        def on_token_of_job(event: TokenEvent) -> bool:
            self._watch.progress()
            return on_token(event)

        self._watch.check_same("requests", repr(requests))
        with self._watch.working():
            self._watch.progress()
            return self._engine.generate(
                requests, on_token=on_token_of_job, on_completion=on_completion
            )


def _open_model(
    args: GenerateArgs, folder: Path, progress: Progress, max_len: int, *, num_processes: int
) -> OpenModel:
    """Choose numerics, kernels and mesh, and load the weights."""
    from detjax.engine.engine import Engine
    from detjax.engine.running.memory import cache_bytes, check_memory
    from detjax.engine.sampling.grammars import Grammars
    from detjax.models.bundled import BUNDLED_NAME, bundled_model_path
    from detjax.numerics import NumericsProfile
    from detjax.opening import MeshError, load_on_devices
    from detjax.proof.identity import Identifier
    from detjax.sizing import choose_sizes

    with bad_input():
        profile = NumericsProfile(weight_dtype=args.dtype, compute_dtype=args.compute)
        try:
            model, reason = load_on_devices(
                folder,
                profile=profile,
                backend=args.backend,
                dp=args.dp,
                tp=args.tp,
                cast_weights=args.cast_weights,
                quantized_weights=args.quantized_weights,
                max_len=max_len,
                progress=progress,
                num_processes=num_processes,
            )
        except MeshError as error:
            text = as_flags(str(error))
            prefix = "" if "--tp " in text else f"--dp {args.dp} --tp {args.tp}: "
            raise InputError(f"{prefix}{text}") from error
    is_gpu = model.backend.platform == "gpu"
    share = args.gpu_memory_utilization
    if share is not None and not is_gpu:
        raise InputError(
            f"--gpu-memory-utilization {share} sizes the cache on GPUs, and this runs on the CPU; "
            "leave it out, or give --cache-pages"
        )

    grammars = Grammars(
        lambda: Tokenizer.from_folder(folder).backend.to_str(),
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
    )

    def size_engine(asked: Mapping[str, Any], work: Workload) -> EngineConfig:
        with bad_input(rephrase=as_flags):
            return choose_sizes(
                model,
                asked,
                gpu_memory_utilization=GPU_MEMORY_SHARE if share is None else share,
                work=work,
            )

    def make_engine(config: EngineConfig, tracer: TracesEvents) -> Engine:
        with bad_input(rephrase=as_flags):
            if is_gpu:
                gc.collect()  # the cache of the engine before
            check_memory(model, config)
            return Engine(model, config, tracer=tracer, grammars=grammars)

    is_bundled = folder == bundled_model_path()

    def identify(tokenizer: Tokenizer) -> "Identity":
        name = BUNDLED_NAME if is_bundled else args.model
        return Identifier(model, tokenizer, name=name).identity()

    return OpenModel(
        identify=identify,
        fingerprint=model.fingerprint,
        backend=model.backend.value,
        backend_reason=reason,
        size_engine=size_engine,
        cache_bytes=lambda config: cache_bytes(model, config.num_pages),
        make_engine=make_engine,
        weight_cast=model.weight_cast,
    )


def keep_compiled_programs(cache_dir: str) -> None:
    """As `keep_programs_of_build`; a folder that cannot be written is a warning."""
    if cache_dir == NO_CACHE:
        return
    from detjax.compilation.kept_programs import keep_programs_of_build

    try:
        keep_programs_of_build(cache_dir)
    except OSError as error:
        print(
            f"warning: --cache-dir {cache_dir} cannot be written ({error.strerror}), so compiled "
            f"programs are not kept; give another, or {NO_CACHE}",
            file=sys.stderr,
        )
