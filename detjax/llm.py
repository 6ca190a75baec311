# SPDX-License-Identifier: Apache-2.0
"""`detjax.LLM`: a model folder or id, texts in, texts out; sizes are chosen by the hardware."""

import contextlib
import dataclasses
import difflib
import numbers
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from detjax.compilation.kept_programs import keep_programs_of_build
from detjax.compilation.loaded_code import one_moment
from detjax.compilation.source import NO_CACHE, default_cache_dir
from detjax.defaults import AUTO, GPU_MEMORY_UTILIZATION, MAX_LORA_RANK, MAX_LORAS, NO_CAST
from detjax.engine.config import EngineConfig, check_adapter_mode, check_types
from detjax.engine.engine import Engine
from detjax.engine.lora_request import AdapterFolders, LoRARequest
from detjax.engine.outputs.completion import Completion, CompletionOutput
from detjax.engine.outputs.generate_run import OnCompletion
from detjax.engine.outputs.prompt_output import PromptOutput
from detjax.engine.outputs.text_batch import TextBatch
from detjax.engine.requests.checks import RequestLimits
from detjax.engine.requests.limits import flag, integer, number
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import MAX_TOP_LOGPROBS, SamplingParams, draw_seed
from detjax.engine.requests.text_request import text_request
from detjax.engine.running.memory import check_memory
from detjax.engine.sampling.grammars import Grammars
from detjax.engine.scheduling.drafters import HOST_DRAFTERS
from detjax.engine.speculative_config import SpeculativeConfig
from detjax.engine.trace import NO_TRACE, TracesEvents
from detjax.interpreter_exit import finishes_before_exit
from detjax.llm_config import LLMConfig
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.bundled import BUNDLED, BUNDLED_NAME, bundled_model_path
from detjax.models.chat_template import NO_VARIABLES
from detjax.models.generation_config import default_sampling
from detjax.models.heads.head import AnyDraftModel
from detjax.models.hub import find_model
from detjax.models.loading import LoadedModel
from detjax.models.tokenizer import Tokenizer
from detjax.models.weights.files import check_files
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.opening import load_drafts, load_on_devices
from detjax.parallel.gpu_memory import claim_gpu_memory
from detjax.progress import Progress
from detjax.proof.identity import Identifier, Identity
from detjax.proof.receipt import Receipt
from detjax.sizing import choose_sizes

Prompt = str | Sequence[int] | np.ndarray | jax.Array
"""A text, or token ids."""
Message = Mapping[str, Any]
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A model, its tokenizer and an engine: `LLM(model).generate(texts, SamplingParams(...))`.

    The engine, its cache and its compiled programs stay between calls; `cache_dir` keeps programs
    for other processes. Calls from several threads run one after another; for streaming and
    cancellation give `engine` to `detjax.AsyncEngine`.

    Attributes:
        config: What was chosen; print it.
        model: The weights on their devices.
        tokenizer: Of the model.
        engine: Knows tokens only.
        default_sampling: Of prompts for which none is given.
    """

    @finishes_before_exit
    @one_moment()
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
        quantized_weights: str = "auto",
        kv_cache_dtype: str | None = None,
        revision: str | None = None,
        max_len: int | None = None,
        batch_size: int | None = None,
        prefill_chunk: int | None = None,
        num_pages: int | None = None,
        gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
        generation_config: str = "auto",
        chat_template: str | Path | None = None,
        cache_dir: str | Path | None = AUTO,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        enable_lora: bool = False,
        max_loras: int = MAX_LORAS,
        max_lora_rank: int = MAX_LORA_RANK,
        max_expert_lora_rank: int = 0,
        num_processes: int = 1,
        show_progress: bool = True,
        progress: Progress = ignore_progress,
        **engine_options: Any,
    ):
        """Load the model and allocate the cache.

        Args:
            model: A folder in Hugging Face format, a Hugging Face id, which is downloaded once, or
                `novels-6m`, the small model that comes with the package.
            backend: "sm90", "reference", which has its bits on a CPU, "portable", or "auto", which
                goes by the hardware and the model. It chooses bits.
            dp: Replicas, which share the prompts.
            tp: Devices that share each layer; without GPUs, virtual ones.
            mode: As `EngineConfig` has it: "invariant", "dvr" or "fast".
            dtype: "bfloat16" or "float32": of weights and compute; None is bfloat16, or what
                `profile` says. It chooses bits.
            profile: Every choice of numerics, in place of `dtype`.
            cast_weights: "bfloat16" rounds a checkpoint of float16 or float32 to it.
            quantized_weights: How the matrices of a quantised model lie on the devices: "packed",
                as codes of 4 or 8 bits, "expanded", as bfloat16, or "auto", which packs them on
                Hopper GPUs. These change no bit. "w8a8" multiplies 8-bit weights with
                activations of 8 bits, quantised as the checkpoint asks.
            kv_cache_dtype: "fp8_e4m3", or "fp8", rounds keys and values to 8 bits when they are
                written, so that the cache takes half of the bytes; None is "auto", the dtype of
                compute, or what `profile` says. It chooses bits.
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
            gpu_memory_utilization: Share of each GPU's memory that JAX takes, unless it has already
                started or XLA_PYTHON_CLIENT_MEM_FRACTION is set; the smaller share counts then.
                Nine tenths of it are for weights, cache and other arrays of this process, the rest
                for activations and compiled programs.
            generation_config: "auto": `default_sampling` is what the model's generation_config.json
                recommends, if it has one. "none": it is `SamplingParams()`.
            chat_template: A file, whose chat template takes the place of the model's.
            cache_dir: Where compiled programs are kept from now on, this model's and JAX's others,
                so that the next process starts quickly; what is read is verified. "auto": in the
                user's cache folder, unless JAX has one already. None or "none", as the commands
                say it: JAX's own settings stay as they are.
            speculative_config: Where drafts come from, as `SpeculativeConfig.of` reads it:
                `{"method": "draft_model", "model": "FOLDER", "num_speculative_tokens": 3}`. It
                changes no bit. None: as `mode` and `engine_options` say.
            enable_lora: Make room for adapters (LoRA), which `lora_request` of `generate` names.
                Without it the programs are those of the model alone.
            max_loras: Adapters that may run at once. More may be loaded; the devices keep those
                that were used last.
            max_lora_rank: Highest rank of an adapter, up to 128.
            max_expert_lora_rank: Highest rank of an adapter of the experts of a mixture, up to 128;
                0 makes no room for them.
            num_processes: Of the job that this process has joined (`start_job`); all of them make
                the same `LLM` and make the same calls.
            show_progress: Show bars on standard error, where it is a terminal.
            progress: Told (what, bytes done, bytes in all) while the weights are loaded.
            engine_options: Other fields of `EngineConfig`, such as `decode_steps`.

        Raises:
            TypeError: If there is no such option.
            ValueError: If a value is out of range, or model, mesh and memory do not go together.
            FileNotFoundError: If the model or a file of it is missing.
        """
        asked = dict(
            batch_size=batch_size, prefill_chunk=prefill_chunk, max_len=max_len, mode=mode,
            num_pages=num_pages, **engine_options)  # fmt: skip
        _check_engine_options(asked, dp=dp, tp=tp)
        _check_choices(gpu_memory_utilization, generation_config, mode, enable_lora)
        claim_gpu_memory(gpu_memory_utilization)
        profile = _profile_of(profile, dtype, kv_cache_dtype)
        speculative = _speculative_of(speculative_config)
        _keep_programs(cache_dir)
        folder = _folder_of(model, revision)
        sampling = _sampling_of(folder, generation_config)
        tokenizer = _tokenizer_of(folder, chat_template)
        self._show_progress, self._num_processes = show_progress, num_processes
        with self._loading(progress) as told:
            loaded, reason = load_on_devices(
                folder, profile=profile, backend=backend, dp=dp, tp=tp, cast_weights=cast_weights,
                quantized_weights=quantized_weights, progress=told, num_processes=num_processes,
            )  # fmt: skip
            draft_model = load_drafts(speculative, model=loaded, tokenizer=tokenizer, progress=told)
        loaded = open_adapters(loaded, AdapterSizes.of(
            enable_lora, max_loras=max_loras, max_lora_rank=max_lora_rank,
            max_expert_lora_rank=max_expert_lora_rank))  # fmt: skip
        engine = choose_sizes(loaded, _asked(speculative, asked), draft_model=draft_model,
                              gpu_memory_utilization=gpu_memory_utilization)  # fmt: skip
        config = LLMConfig.of(loaded, engine, name=str(model), folder=folder, backend_reason=reason,
                              speculative=speculative, draft_model=draft_model)  # fmt: skip
        self._begin(loaded, tokenizer, config, sampling, draft_model=draft_model)

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        tokenizer: Tokenizer,
        config: LLMConfig,
        *,
        tracer: TracesEvents = NO_TRACE,
        draft_model: AnyDraftModel | None = None,
    ) -> "LLM":
        """Allocate the cache of a model that is loaded.

        Several may share the weights; each has an engine and a cache of its own.

        Args:
            model: On its mesh.
            tokenizer: Of the model.
            config: As `LLMConfig.of` returns it for `model`, with sizes such as `choose_sizes`
                chooses.
            tracer: Of the engine: keeps a timeline.
            draft_model: As `load_drafts` returns it, if one makes the drafts.

        Raises:
            ValueError: If there is not enough memory.
        """
        llm = cls.__new__(cls)
        llm._show_progress, llm._num_processes = False, jax.process_count()
        llm._begin(model, tokenizer, config, SamplingParams(), tracer, draft_model)
        return llm

    def _begin(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer,
        config: LLMConfig,
        sampling: SamplingParams,
        tracer: TracesEvents = NO_TRACE,
        draft_model: AnyDraftModel | None = None,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.default_sampling = sampling
        check_memory(model, config.engine, draft_model)
        grammars = Grammars(
            lambda: tokenizer.backend.to_str(),
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
        )
        drafters = HOST_DRAFTERS if config.speculative is None else config.speculative.drafters()
        self.engine = Engine(
            model, config.engine, tracer=tracer, grammars=grammars, drafters=drafters,
            draft_model=draft_model,
        )  # fmt: skip
        self._adapters = AdapterFolders(self.engine)
        is_bundled = config.folder == bundled_model_path()
        name = BUNDLED_NAME if is_bundled else config.name
        self._identifier = Identifier(model, tokenizer, name=name)

    def __repr__(self) -> str:
        """Return the name and the mesh."""
        return f"LLM({self.config.name!r}, dp={self.config.dp}, tp={self.config.tp})"

    @finishes_before_exit
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
        has_control: bool = False,
        add_special_tokens: bool = True,
    ) -> list[PromptOutput]:
        """Continue prompts.

        Args:
            prompts: A text or a sequence of token ids, or a list of them. Texts get the special
                tokens that the model expects around them; token ids are taken as they are.
            sampling: How; one for all prompts, or one for each. None is
                `default_sampling`. A completion ends at the latest with `max_len`. Where a seed is
                None one is drawn for the call, and is in each output's `sampling`.
            lora_request: The adapter that answers: one for all prompts, or one or None for each.
                None is the model alone. A folder is read when it is first named, and when its
                files change.
            has_control: Special tokens written out in a text become that token; else they are
                text, with a warning.
            add_special_tokens: Without them a text is taken as it is written, nothing is put
                around it, and special tokens in it are these tokens: for a prompt that a chat
                template has made elsewhere.

        Returns:
            What became of each prompt, in order.

        Raises:
            ValueError: If a prompt does not fit, naming it, before anything runs.
            FloatingPointError: If a logit is NaN.
        """
        asked = [
            self._encoded(prompt, f"prompt {i}", has_control, add_special_tokens)
            for i, prompt in enumerate(_as_list(prompts))
        ]
        return self._run(asked, sampling, lora_request)

    @finishes_before_exit
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] = NO_VARIABLES,
        has_control: bool = False,
    ) -> list[PromptOutput]:
        """Answer conversations, with the model's chat template.

        Args:
            messages: A conversation, [{"role": ..., "content": ...}, ...], or a list of them.
            sampling: As `generate` has it.
            lora_request: As `generate` has it.
            tools: Functions that the answer may call, as OpenAI's API has them.
            add_generation_prompt: End where the assistant begins its answer; true unless
                `continue_final_message` is.
            continue_final_message: Let the answer go on in the last message.
            chat_template_kwargs: What else the template knows: `{"enable_thinking": False}`.
            has_control: As `generate` has it, of the messages.

        Returns:
            What became of each conversation, in order.

        Raises:
            ValueError: If the model has no template, it refuses the messages, or they do not fit.
            FloatingPointError: If a logit is NaN.
        """
        if isinstance(messages, str | Mapping):
            raise ValueError(
                f'messages is {messages!r:.80}; give a list: [{{"role": "user", "content": "..."}}]'
            )
        if not isinstance(chat_template_kwargs, Mapping):
            raise ValueError(f"{chat_template_kwargs=!r:.80} must be a dict of names and values")
        if isinstance(tools, str) or not all(isinstance(one, Mapping) for one in tools or ()):
            raise ValueError(f"{tools=!r:.80} must be a list of dicts, as OpenAI's API has them")
        asked = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message or None,
            "tools": tools and list(tools),
        }
        variables = {k: v for k, v in asked.items() if v is not None} | dict(chat_template_kwargs)
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts: list[tuple[str | None, Sequence[int]]] = [
            (
                self.tokenizer.render_chat(conversation, variables=variables),
                self.tokenizer.apply_chat_template(
                    conversation, variables=variables, has_control=has_control
                ),
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling, lora_request)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        top: int = 1,
        lora_request: LoRARequests = None,
        has_control: bool = False,
        add_special_tokens: bool = True,
    ) -> list[PromptOutput]:
        """Say how likely each token of given texts is, after those before it; generate nothing.

        Args:
            prompts: As `generate` has them.
            top: How many of the most likely tokens to report at each position, at most 64.
            lora_request: As `generate` has it.
            has_control: As `generate` has it.
            add_special_tokens: As `generate` has it.

        Returns:
            What became of each prompt, in order: its `prompt_logprobs`, and one output without a
            token.

        Raises:
            ValueError: If a prompt does not fit, naming it, before anything runs.
            FloatingPointError: If a logit is NaN.

        Numerics:
            As `Engine.score` has them.
        """
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise ValueError(f"{top=} must be in [0, {MAX_TOP_LOGPROBS}]")
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=top)
        return self.generate(
            prompts, sampling, lora_request=lora_request, has_control=has_control,
            add_special_tokens=add_special_tokens,
        )  # fmt: skip

    def text_batch(self, requests: Sequence[Request]) -> TextBatch:
        """Return what makes texts of what `engine.generate` makes of requests.

        `generate` and `chat` run one to its end; whoever streams gives its callbacks to the engine.
        """
        return TextBatch(
            requests,
            self.tokenizer,
            end_ids=self.config.model.eos_token_ids,
            fingerprint=self.config.fingerprint,
        )

    @finishes_before_exit
    def identity(self) -> Identity:
        """Return what model, numerics and build these are. Hashes the weights the first time."""
        return self._identifier.identity(self.engine.weight_history.current)

    @finishes_before_exit
    def receipt(self, output: CompletionOutput) -> Receipt:
        """Return the receipt of an answer of this object, as `docs/receipts.md` has it.

        It names the weights that made the answer. Once others have replaced them, it can do so only
        if their hash was taken before, by `identity()` or a receipt.

        Raises:
            ValueError: If the answer is not canonical, or it cannot be told which weights made it.
            TypeError: If it is no answer.
        """
        if not isinstance(output, CompletionOutput):
            raise TypeError(
                f"a receipt is of one answer, a CompletionOutput, not {type(output).__name__}; of "
                "what generate gives for a prompt, give one of its outputs, as outputs[0]"
            )
        history = self.engine.weight_history
        made_by = history.index_of(output.completion.weight_version)
        identity = self._identifier.identity(history.current)
        if made_by != history.current:
            identity = self._identifier.with_weights(identity, made_by)
        return Receipt.of(identity, output, end_token_ids=self.config.model.eos_token_ids)

    def _encoded(
        self, prompt: Prompt, what: str, has_control: bool, add_special_tokens: bool
    ) -> tuple[str | None, Sequence[int]]:
        """The text of a prompt, if it is one, and its token ids."""
        if not isinstance(prompt, str):
            is_array = isinstance(prompt, np.ndarray | jax.Array)
            return None, np.asarray(prompt).tolist() if is_array else prompt
        if not add_special_tokens:
            return prompt, self.tokenizer.encode_raw(prompt)
        if not has_control and (found := self.tokenizer.control_in(prompt)):
            warnings.warn(
                f"{what}: the control token {found!r} in it is text to the model; give "
                "add_special_tokens=False if a chat template has made the prompt, or "
                "has_control=True",
                stacklevel=5,
            )
        return prompt, self.tokenizer.encode(prompt, has_control=has_control)

    def load_adapter(self, folder: Path | str) -> str:
        """Read an adapter's folder, unless it is known; return the hash that requests name it by.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the adapter does not go with the model, or `enable_lora` is off.
        """
        return self._adapters.load(Path(folder))

    def _adapters_of(self, lora_request: LoRARequests, count: int) -> list[str]:
        """The hash of each prompt's adapter; "" is the model alone."""
        if lora_request is None or isinstance(lora_request, LoRARequest):
            wanted: list[Any] = [lora_request] * count
        else:
            wanted = [lora_request] if isinstance(lora_request, str) else list(lora_request)
        for one in wanted:
            if one is not None and not isinstance(one, LoRARequest):
                raise ValueError(
                    f"lora_request has {one!r:.80}; give LoRARequest(name, number, folder), or None"
                )
        if len(wanted) != count:
            raise ValueError(
                f"there are {count} prompts and {len(wanted)} lora_request; give one, or one or "
                "None for each prompt"
            )
        return ["" if one is None else self.load_adapter(one.lora_path) for one in wanted]

    def _draw_seed(self, samplings: Sequence[SamplingParams]) -> int:
        """A seed for those that sample and have none; 0 where there are none."""
        if all(params.seed is not None or params.temperature == 0 for params in samplings):
            return 0
        if self._num_processes > 1:
            raise ValueError(
                f"seed=None would be drawn in each of {self._num_processes} processes, which must "
                "draw the same noise; give SamplingParams(seed=...)"
            )
        return draw_seed()

    def _run(
        self,
        asked: Sequence[tuple[str | None, Sequence[int]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequests,
    ) -> list[PromptOutput]:
        """Continue token ids. The text of each is carried along."""
        one = self.default_sampling if sampling is None else sampling
        samplings = list(one) if isinstance(one, Sequence) else [one] * len(asked)
        for params in samplings:
            if not isinstance(params, SamplingParams):
                raise ValueError(
                    f"sampling has {params!r:.80}; give SamplingParams(...), or one for each prompt"
                )
        if len(samplings) != len(asked):
            raise ValueError(
                f"there are {len(asked)} prompts and {len(samplings)} SamplingParams; give one, or "
                "one for each prompt"
            )
        adapters = self._adapters_of(lora_request, len(asked))
        seed = self._draw_seed(samplings)
        requests = [
            text_request(
                ids,
                params,
                what=f"prompt {i}",
                limits=RequestLimits.of(self.config.model, self.config.engine.max_len),
                is_deterministic=self.config.engine.mode != "fast",
                tokenizer=self.tokenizer,
                seed=seed,
                adapter=adapter,
            )
            for i, ((_, ids), params, adapter) in enumerate(
                zip(asked, samplings, adapters, strict=True)
            )
        ]
        batch = self.text_batch(requests)
        with self._generating(batch) as on_completion:
            completions = self.engine.generate(
                batch.token_requests, on_token=batch.on_token, on_completion=on_completion
            )
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
    def _loading(self, on_progress: Progress) -> Iterator[Progress]:
        with self._bar() as bar:
            task = bar.add_task("load", total=None)

            def progress(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total)
                on_progress(what, done, total)

            yield progress

    @contextlib.contextmanager
    def _generating(self, batch: TextBatch) -> Iterator[OnCompletion]:
        with self._bar(rich.progress.MofNCompleteColumn()) as bar:
            task = bar.add_task("completions", total=len(batch.sequences))

            def on_completion(done: Completion) -> None:
                batch.on_completion(done)
                bar.update(task, completed=batch.num_ended)

            yield on_completion


def _profile_of(
    profile: NumericsProfile | None, dtype: str | None, kv_cache_dtype: str | None
) -> NumericsProfile:
    """The given profile, or one of the given dtypes."""
    for name, value in (("dtype", dtype), ("kv_cache_dtype", kv_cache_dtype)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name}={value!r} must be a text, such as 'bfloat16'")
    if profile is None:
        return NumericsProfile.of(dtype or "bfloat16", kv_cache_dtype or AUTO)
    if dtype is not None:
        raise ValueError(f"{dtype=} does not go with a profile, which has the dtypes")
    if kv_cache_dtype is not None:
        raise ValueError(f"{kv_cache_dtype=} does not go with a profile, which has its own")
    return profile


def _check_choices(
    gpu_memory_utilization: float, generation_config: str, mode: str, enable_lora: bool
) -> None:
    """Refuse values that are out of range, or do not go together, before a model is read."""
    check_adapter_mode(mode, has_adapters=enable_lora)
    flag("enable_lora", enable_lora)
    if not 0 < number("gpu_memory_utilization", gpu_memory_utilization) <= 1:
        raise ValueError(f"{gpu_memory_utilization=} must be above 0 and at most 1")
    if generation_config not in ("auto", "none"):
        raise ValueError(f"{generation_config=} must be 'auto' or 'none'")


def _folder_of(model: str | Path, revision: str | None) -> Path:
    """The folder of a model; one without weights is called that before its tokenizer is read."""
    folder = find_model(model, revision=revision)
    check_files(folder)
    return folder


def _tokenizer_of(folder: Path, chat_template: str | Path | None) -> Tokenizer:
    """The tokenizer of a folder, with a template of its own if one is given."""
    tokenizer = Tokenizer.from_folder(folder)
    return tokenizer if chat_template is None else tokenizer.with_template(chat_template)


def _sampling_of(folder: Path, generation_config: str) -> SamplingParams:
    """What a model recommends, if it is asked for that."""
    return SamplingParams(**(default_sampling(folder) if generation_config == "auto" else {}))


def _speculative_of(
    given: SpeculativeConfig | Mapping[str, Any] | str | None,
) -> SpeculativeConfig | None:
    """Where drafts come from, if it is said.

    Raises:
        ValueError: Naming the option.
    """
    if given is None:
        return None
    try:
        return SpeculativeConfig.of(given)
    except ValueError as error:
        raise ValueError(f"speculative_config: {error}") from error


def _asked(speculative: SpeculativeConfig | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `EngineConfig` that are given, and those that follow from the drafts."""
    of_drafts = {} if speculative is None else speculative.engine_options()
    return of_drafts | {name: value for name, value in given.items() if value is not None}


def _keep_programs(cache_dir: str | Path | None) -> None:
    if cache_dir in (None, NO_CACHE) or cache_dir == AUTO and jax.config.jax_compilation_cache_dir:
        return
    chosen = default_cache_dir() if cache_dir == AUTO else cache_dir
    try:
        keep_programs_of_build(chosen)
    except OSError as error:
        warnings.warn(
            f"cache_dir={str(chosen)!r} cannot be written ({error.strerror}), so compiled programs "
            "are not kept; give another, or None",
            stacklevel=4,
        )


def _check_engine_options(options: Mapping[str, Any], **mesh: int) -> None:
    """Refuse an option that nothing has, and sizes of a mesh that are none."""
    for name, size in mesh.items():
        if integer(name, size) < 1:
            raise ValueError(f"{name}={size} must be at least 1")
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
            near = [_NAMES_OF_VLLM[name]] if name in _NAMES_OF_VLLM else near
            hint = f"did you mean {near[0]}? " if near else ""
            raise TypeError(
                f"LLM has no option {name!r}; {hint}it has {', '.join(_OPTIONS)}, and the fields "
                f"of EngineConfig: {', '.join(known)}"
            )
    check_types({name: value for name, value in options.items() if value is not None})


_NAMES_OF_VLLM = {
    "data_parallel_size": "dp",
    "max_model_len": "max_len",
    "max_num_seqs": "batch_size",
    "tensor_parallel_size": "tp",
}
"""Options of `LLM` by the names that vLLM has for them."""


def _as_list(prompts: Any) -> list[Prompt]:
    """A list of prompts from one or many."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {prompts!r:.80}; give a text, token ids, or a list of these")
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)
    found: list[Any] = list(prompts)
    is_ids = bool(found) and isinstance(found[0], numbers.Integral)
    return [prompts if isinstance(prompts, np.ndarray) else found] if is_ids else found


_OPTIONS = tuple(
    name
    for name in LLM.__init__.__annotations__
    if name not in ("return", "model", "engine_options")
)
