# SPDX-License-Identifier: Apache-2.0
"""Opens the model. Only what is called here imports JAX, so that mistakes are reported at once."""

import dataclasses
import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detjax.cli.arguments import GenerateArgs, as_flags
from detjax.cli.command_line import check_name
from detjax.cli.errors import InputError, bad_input
from detjax.cli.options import (
    NO_CACHE,
    check_drafts,
    flag_like,
    read_lora_modules,
    read_speculative_config,
)
from detjax.cli.processes import Processes, join_processes
from detjax.defaults import GPU_MEMORY_UTILIZATION, kv_cache_dtype_of
from detjax.engine.config import EngineConfig
from detjax.engine.scheduling.workload import Workload
from detjax.engine.trace import NO_TRACE, TracesEvents
from detjax.models.config import ModelConfig
from detjax.models.tokenizer import Tokenizer
from detjax.models.tokenizer_files import start_template_of
from detjax.progress import Progress

if TYPE_CHECKING:  # imports JAX
    from detjax.llm import LLM
    from detjax.llm_config import LLMConfig
    from detjax.models.adapters.low_rank import Adapter
    from detjax.models.heads.head import AnyDraftModel
    from detjax.models.loading import LoadedModel

OWN_OPTIONS = frozenset(
    """
    cache_dir coordinator format logprobs model output process_id prompt prompts_file quiet receipts
    revision sign stats trace
    """.split()
)
"""Options of a process alone, or compared as what comes of them: files, requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """What is read of a model's folder before its weights.

    Attributes:
        folder: Where its files lie.
        config: Its dimensions.
        tokenizer: With the chat template that was asked for.
    """

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """A model on its devices; each run of the command makes an `LLM` of it.

    Attributes:
        args: The options.
        files: Of the model.
        model: The weights.
        backend_reason: Why its kernels run it.
        processes: That make the same calls.
        draft_model: Makes the drafts, if one does.
        adapters: Those of --lora-modules, by name.
    """

    args: GenerateArgs
    files: ModelFiles
    model: "LoadedModel"
    backend_reason: str
    processes: Processes
    draft_model: "AnyDraftModel | None" = None
    adapters: Mapping[str, "Adapter"] = field(default_factory=dict)

    @property
    def adapter_hashes(self) -> dict[str, str]:
        """The hash of each adapter, by name."""
        return {name: adapter.sha256 for name, adapter in self.adapters.items()}

    def size_engine(self, asked: Mapping[str, Any], work: Workload) -> EngineConfig:
        """Choose what is not asked for of an engine's options, for some work.

        Raises:
            InputError: If an option is out of range, or the cache does not hold the work.
        """
        from detjax.sizing import choose_sizes

        self.processes.check_same("requests", repr(work))
        with self.processes.working(), bad_input(rephrase=as_flags):
            return choose_sizes(
                self.model,
                asked,
                gpu_memory_utilization=_share(self.args),
                work=work,
                draft_model=self.draft_model,
            )

    def config_of(self, engine: EngineConfig) -> "LLMConfig":
        """Return what an engine on this model runs with."""
        from detjax.llm_config import LLMConfig

        return LLMConfig.of(
            self.model,
            engine,
            name=self.args.model,
            folder=self.files.folder,
            backend_reason=self.backend_reason,
            speculative=read_speculative_config(self.args.speculative_config),
            draft_model=self.draft_model,
        )

    def make_llm(self, engine: EngineConfig, *, tracer: TracesEvents = NO_TRACE) -> "LLM":
        """Allocate a cache of this size. Drop the `LLM` before, which has a cache of its own.

        Raises:
            InputError: If there is not enough memory.
        """
        from detjax.llm import LLM
        from detjax.models.adapters.stack import share_adapters

        self.processes.check_same("settings", repr(engine))
        if self.model.backend.platform == "gpu":
            gc.collect()  # the cache of the engine before
        with bad_input(rephrase=as_flags):
            llm = LLM.of(
                share_adapters(self.model),
                self.files.tokenizer,
                self.config_of(engine),
                tracer=tracer,
                draft_model=self.draft_model,
            )
        for adapter in self.adapters.values():
            llm.engine.add_adapter(adapter)
        return llm


OpensModel = Callable[[GenerateArgs, ModelFiles, Progress, int], OpenModel]
"""The type of `open_model`."""


def read_model_files(args: GenerateArgs) -> ModelFiles:
    """Find the model's folder and read what is small.

    Raises:
        InputError: If the folder or a file in it is missing, broken or not known.
    """
    from detjax.models.hf_config import load_config
    from detjax.models.hub import find_model

    check_name(args.model)
    with bad_input("--model: "):
        folder = find_model(args.model, revision=args.revision)
        if args.chat and args.chat_template is None:
            start_template_of(folder)
        config, tokenizer = load_config(folder), Tokenizer.from_folder(folder)
    check_drafts(args.speculative_config, args.model, args.revision)
    if args.chat_template is not None:
        with bad_input("--chat-template: "):
            tokenizer = tokenizer.with_template(args.chat_template)
    return ModelFiles(folder=folder, config=config, tokenizer=tokenizer)


def open_model(
    args: GenerateArgs, files: ModelFiles, progress: Progress, max_len: int
) -> OpenModel:
    """Join the other processes, if any, choose numerics, kernels and mesh, and load the weights.

    Args:
        args: The options.
        files: Of the model.
        progress: Told how far loading is.
        max_len: Tokens of the longest prompt and completion: the context that is made ready.

    Raises:
        InputError: If they do not go together, cannot run here, or the weights are broken.
    """
    from detjax.models.weights.files import check_files

    with bad_input("--model: "):
        check_files(files.folder)
    keep_compiled_programs(args.cache_dir)
    processes = join_processes(args)
    with processes.working():
        with bad_input("--model: "):
            processes.check_same_model(files.folder)
        for what, value in _shared_settings(args).items():
            processes.check_same(what, repr(value))
        model, reason = _load(args, files.folder, processes, progress, max_len)
        draft_model = _load_drafts(args, files, model, processes.telling(progress))
        model, adapters = _open_adapters(args, model)
    processes.check_same("settings", model.fingerprint)
    share = args.gpu_memory_utilization
    if share is not None and model.backend.platform == "cpu":
        raise InputError(
            f"--gpu-memory-utilization {share} sizes the cache on GPUs, and this runs on the CPU; "
            "leave it out, or give --cache-pages"
        )
    return OpenModel(
        args=args, files=files, model=model, backend_reason=reason, processes=processes,
        draft_model=draft_model, adapters=adapters,
    )  # fmt: skip


def _open_adapters(
    args: GenerateArgs, model: "LoadedModel"
) -> tuple["LoadedModel", dict[str, "Adapter"]]:
    """Make room for adapters, if they are wanted, and read those that are given."""
    from detjax.models.adapters.adapter import read_adapter
    from detjax.models.adapters.stack import AdapterSizes, open_adapters

    modules = read_lora_modules(args.lora_modules)
    with bad_input(rephrase=as_flags):
        sizes = AdapterSizes.of(
            args.enable_lora or bool(modules),
            max_loras=args.max_loras,
            max_lora_rank=args.max_lora_rank,
            max_expert_lora_rank=args.max_expert_lora_rank,
        )
        if sizes is None:
            return model, {}
        model = open_adapters(model, sizes)
    adapters = {}
    for name, folder in modules.items():
        with bad_input(f"--lora-modules {name}: "):
            adapters[name] = read_adapter(
                folder, model.config, dtype=model.profile.param_dtype,
                max_rank=args.max_lora_rank, max_expert_rank=args.max_expert_lora_rank,
            )  # fmt: skip
    return model, adapters


def _load_drafts(
    args: GenerateArgs, files: ModelFiles, model: "LoadedModel", progress: Progress
) -> "AnyDraftModel | None":
    """Load the draft model or head, if there is one."""
    from detjax.opening import load_drafts

    speculative = read_speculative_config(args.speculative_config)
    with bad_input("--speculative-config: "):
        return load_drafts(speculative, model=model, tokenizer=files.tokenizer, progress=progress)


def _shared_settings(args: GenerateArgs) -> dict[str, Any]:
    """The options that all processes of a job are given alike, by their flags."""
    options = dataclasses.asdict(args)
    del options["given"]
    shared = {flag_like(name): value for name, value in options.items() if name not in OWN_OPTIONS}
    # A set is written in another order by each process.
    return shared | {"options": sorted(args.given - OWN_OPTIONS)}


def _load(
    args: GenerateArgs, folder: Path, processes: Processes, progress: Progress, max_len: int
) -> tuple["LoadedModel", str]:
    """Load the weights on the mesh; also return why these kernels run them."""
    from detjax.numerics import NumericsProfile
    from detjax.opening import MeshError, load_on_devices
    from detjax.parallel.gpu_memory import claim_gpu_memory

    claim_gpu_memory(_share(args))
    with bad_input():
        profile = NumericsProfile(
            weight_dtype=args.dtype, compute_dtype=args.compute,
            kv_cache_dtype=kv_cache_dtype_of(args.kv_cache_dtype),
        )  # fmt: skip
        try:
            return load_on_devices(
                folder,
                profile=profile,
                backend=args.backend,
                dp=args.dp,
                tp=args.tp,
                cast_weights=args.cast_weights,
                quantized_weights=args.quantized_weights,
                max_len=max_len,
                progress=processes.telling(progress),
                num_processes=processes.count,
            )
        except MeshError as error:
            text = as_flags(str(error))
            prefix = "" if "--tp " in text else f"--dp {args.dp} --tp {args.tp}: "
            raise InputError(f"{prefix}{text}") from error


def _share(args: GenerateArgs) -> float:
    share = args.gpu_memory_utilization
    return GPU_MEMORY_UTILIZATION if share is None else share


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
