# SPDX-License-Identifier: Apache-2.0
"""One engine of `benchmarks.peers`, in a process of its own: how it is opened, asked and timed.

The process opens its engine, makes the file `ready`, waits for the file `go`, measures, and writes
`row.json`. Processes of other engines do not import detjax.
"""

import abc
import argparse
import importlib
import itertools
import json
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

READY, GO, ROW = "ready", "go", "row.json"
DECODE, PREFILL, OFFLINE, THROUGHPUT = MEASURES = ("decode", "prefill", "offline", "throughput")
type Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What every engine of a run is asked. Lengths are in tokens.

    Attributes:
        batches: Sequences that decode at once.
        prompt_len: Of the prompts that are decoded.
        few: New tokens of the call that is taken off.
        many: New tokens of the call that it is taken off from.
        long_len: Of the prompt whose prefill is timed.
        requests: Of the offline run.
        request_len: Of its prompts.
        new_len: Of its answers.
        even_len: Of prompts and of answers of the throughput run, which has as many requests.
        slots: Sequences that may run at once.
        max_len: Room for a prompt and its answer.
        vocab_size: Prompts are drawn below this.
    """

    batches: tuple[int, ...] = (1, 8, 64, 256)
    prompt_len: int = 1000
    few: int = 2
    many: int = 130
    long_len: int = 4000
    requests: int = 512
    request_len: int = 512
    new_len: int = 128
    even_len: int = 1000
    slots: int = 256
    max_len: int = 4096
    vocab_size: int = 128256


SIZES = {
    "llama3_8b": Sizes(),
    "tiny": Sizes(
        batches=(1, 2), prompt_len=9, many=6, long_len=40, requests=3, request_len=5, new_len=4,
        even_len=6, slots=2, max_len=64, vocab_size=1024,
    ),
}  # fmt: skip
"""By the name of the model's shapes in `benchmarks.step`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """An engine that can be measured.

    Attributes:
        title: As rows and tables call it.
        package: That it comes from: "detjax", "vllm" or "sglang".
        scheme: Of detjax's weights: "bfloat16", or a recipe of `detjax.quantize`.
        options: Of the `LLM` of detjax or vLLM, or of SGLang's `Engine`.
        environment: Of its process.
    """

    title: str
    package: str = "vllm"
    scheme: str = "bfloat16"
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


_INVARIANT = {"attention_config": {"backend": "FLASH_ATTN"}}
_INVARIANT_ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1"}
KINDS = {
    "detjax-bfloat16": Kind(title="detjax invariant bfloat16", package="detjax"),
    "vllm": Kind(title="vLLM default bfloat16"),
    "vllm-batch-invariant": Kind(
        title="vLLM batch-invariant bfloat16",
        options=_INVARIANT,
        environment=_INVARIANT_ENVIRONMENT,
    ),
    "detjax-fp8": Kind(title="detjax invariant fp8 (W8A8)", package="detjax", scheme="fp8-dynamic"),
    "vllm-fp8": Kind(title="vLLM fp8 (online, W8A8)", options={"quantization": "fp8"}),
    "detjax-int8": Kind(title="detjax invariant int8 (W8A8)", package="detjax", scheme="int8-w8a8"),
    "detjax-int8-fp8-cache": Kind(
        title="detjax invariant int8 (W8A8), fp8 cache",
        package="detjax",
        scheme="int8-w8a8",
        options={"kv_cache_dtype": "fp8"},
    ),
    "vllm-fp8-batch-invariant": Kind(
        title="vLLM fp8 batch-invariant",
        options=_INVARIANT | {"quantization": "fp8"},
        environment=_INVARIANT_ENVIRONMENT,
    ),
    "vllm-fp8-per-channel": Kind(
        title="vLLM fp8 per channel (online, W8A8)", options={"quantization": "fp8_per_channel"}
    ),
    "sglang": Kind(title="SGLang default bfloat16", package="sglang"),
    "sglang-batch-invariant": Kind(
        title="SGLang batch-invariant bfloat16",
        package="sglang",
        options={"enable_deterministic_inference": True},
    ),
}
"""By name, those that matter most first."""


class AbstractPeer(abc.ABC):
    """An engine that is open."""

    @abc.abstractmethod
    def generate(self, prompts: Prompts, num_tokens: int) -> list[int]:
        """Continue prompts greedily by so many tokens, past any end; tokens of each answer."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a row says of it when it has been measured: versions, and how it was opened."""


class DetjaxPeer(AbstractPeer):
    """detjax, on a folder that `benchmarks.start` has written."""

    def __init__(self, kind: Kind, folder: Path, backend: str, sizes: Sizes):
        """Quantise the weights unless that is done, load them, compile what `sizes` need."""
        from detjax import LLM
        from detjax.models.quantization.quantize import RECIPES, quantize_folder
        from detjax.models.weights.load import ignore_progress

        began_s, scheme = time.perf_counter(), kind.scheme
        path = folder / scheme
        if not path.exists():
            part = path.with_name(f"{scheme}.part-{os.getpid()}")
            quantize_folder(folder / "bfloat16", part, RECIPES[scheme], progress=ignore_progress)
            try:
                part.rename(path)
            except OSError:  # an engine beside this one was sooner
                if not path.exists():
                    raise
                shutil.rmtree(part)
        self._quantize_s = time.perf_counter() - began_s
        self._llm = LLM(
            path, backend=backend, max_len=sizes.max_len, batch_size=sizes.slots,
            has_prefix_cache=False, show_progress=False, cache_dir=folder / "programs",
            quantized_weights="auto" if scheme == "bfloat16" else "w8a8", **kind.options,
        )  # fmt: skip
        # WHY: decode steps of the long prompt would be compiled for every batch.
        *short, long = calls(sizes)
        for some in (short, [long]):
            asked = [self._requests(prompts, num_tokens) for prompts, num_tokens in some]
            self._llm.engine.compile(requests=list(itertools.chain(*asked)))
        self._compile_s = self._llm.engine.stats().compile_s

    @staticmethod
    def _requests(prompts: Prompts, num_tokens: int) -> list:
        from detjax import Request, SamplingParams

        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return [Request(prompt_token_ids=tuple(one), sampling=sampling) for one in prompts]

    def generate(self, prompts: Prompts, num_tokens: int) -> list[int]:
        """Through `Engine.generate`, which knows no text."""
        answers = self._llm.engine.generate(self._requests(prompts, num_tokens))
        return [len(answer.token_ids) for answer in answers]

    def facts(self) -> dict[str, Any]:
        """Return versions, sizes, and seconds of quantising and of compiling while measured."""
        import jax

        versions = {"python": platform.python_version(), "jax": jax.__version__}
        return {
            "versions": versions,
            "fingerprint": self._llm.config.fingerprint,
            "compiled_late_s": self._llm.engine.stats().compile_s - self._compile_s,
            "cache_gib": self._llm.config.cache_bytes / 2**30,
            "quantize_s": self._quantize_s,
        }


class VllmPeer(AbstractPeer):
    """vLLM, with weights that it draws itself; it reads the configuration of a folder."""

    def __init__(self, options: Mapping[str, Any], folder: Path, sizes: Sizes):
        """Start it with its defaults, but for sizes, the prefix cache, and `options`."""
        self._vllm = importlib.import_module("vllm")
        self._options = {
            "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
            "max_model_len": sizes.max_len, "max_num_seqs": sizes.slots,
            "enable_prefix_caching": False, **options,
        }  # fmt: skip
        self._llm = self._vllm.LLM(str(folder / "bfloat16"), **self._options)

    def generate(self, prompts: Prompts, num_tokens: int) -> list[int]:
        """Through `LLM.generate`, without text."""
        sampling = self._vllm.SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": list(one)} for one in prompts]
        answers = self._llm.generate(asked, sampling, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    def facts(self) -> dict[str, Any]:
        """Return versions and options."""
        version = self._vllm.__version__
        return {
            "version": version, "versions": torch_versions() | {"vllm": version},
            "options": self._options,
        }  # fmt: skip


class SglangPeer(AbstractPeer):
    """SGLang, with weights that it draws itself; it reads the configuration of a folder."""

    def __init__(self, options: Mapping[str, Any], folder: Path, sizes: Sizes):
        """Start it with its defaults, but for sizes, the prefix cache, FlashAttention 3, options.

        Sampling by PyTorch is said because the default is compiled when it starts; greedy answers
        use neither.
        """
        self._sglang = importlib.import_module("sglang")
        self._options = {
            "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
            "context_length": sizes.max_len, "max_running_requests": sizes.slots,
            "cuda_graph_max_bs": sizes.slots, "disable_radix_cache": True,
            "attention_backend": "fa3", "sampling_backend": "pytorch", **options,
        }  # fmt: skip
        self._engine = self._sglang.Engine(model_path=str(folder / "bfloat16"), **self._options)

    def generate(self, prompts: Prompts, num_tokens: int) -> list[int]:
        """Through `Engine.generate`, which returns ids where it has no tokenizer."""
        sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        asked = [list(one) for one in prompts]
        answers = self._engine.generate(input_ids=asked, sampling_params=sampling)
        return [len(answer["output_ids"]) for answer in answers]

    def facts(self) -> dict[str, Any]:
        """Return versions and options."""
        version = self._sglang.__version__
        return {
            "version": version, "versions": torch_versions() | {"sglang": version},
            "options": self._options,
        }  # fmt: skip


def torch_versions() -> dict[str, str]:
    """Versions of what both others build on."""
    names = ("torch", "triton", "transformers")
    versions = {name: importlib.import_module(name).__version__ for name in names}
    return versions | {"python": platform.python_version()}


def draw_prompts(count: int, length: int, sizes: Sizes) -> list[list[int]]:
    """Random tokens, the same for every engine."""
    rng = np.random.default_rng((count, length))
    return rng.integers(3, sizes.vocab_size, (count, length)).tolist()


def calls(sizes: Sizes) -> list[tuple[Prompts, int]]:
    """Every call that `measure` may make, prompts and new tokens, that of one long prompt last."""
    decode = [draw_prompts(batch, sizes.prompt_len, sizes) for batch in sizes.batches]
    return [
        *((prompts, num) for prompts in decode for num in (sizes.few, sizes.many)),
        (draw_prompts(sizes.requests, sizes.request_len, sizes), sizes.new_len),
        (draw_prompts(sizes.requests, sizes.even_len, sizes), sizes.even_len),
        (draw_prompts(1, sizes.long_len, sizes), 1),
    ]


def measure(
    peer: AbstractPeer,
    sizes: Sizes,
    measures: Sequence[str],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Time an engine.

    decode: (seconds of `many` tokens less the least of two calls of `few`) over their difference.
    prefill: the least of three calls of one token. offline and throughput: one call each. Before
    these, one call that is not timed fills the slots.

    Raises:
        RuntimeError: If an answer has another number of tokens than was asked for.
    """

    def seconds(prompts: Prompts, num_tokens: int) -> float:
        began_s = clock()
        found = peer.generate(prompts, num_tokens)
        took_s = clock() - began_s
        if found != [num_tokens] * len(prompts):
            raise RuntimeError(
                f"{len(prompts)} answers of {num_tokens} tokens were asked for; their lengths are "
                f"{sorted(set(found))}, of {len(found)} answers"
            )
        return took_s

    row: dict[str, Any] = {}
    offline = draw_prompts(sizes.requests, sizes.request_len, sizes)
    seconds(offline[: sizes.slots], sizes.few)
    if DECODE in measures:
        row |= {"decode_ms": {}, "decode_s": {}, "decode_prompt_tokens": sizes.prompt_len}
        for batch in sizes.batches:
            prompts = draw_prompts(batch, sizes.prompt_len, sizes)
            few = [seconds(prompts, sizes.few) for _ in range(2)]
            many = seconds(prompts, sizes.many)
            step_ms = (many - min(few)) / (sizes.many - sizes.few) * 1e3
            row["decode_ms"][str(batch)] = round(step_ms, 3)
            row["decode_s"][str(batch)] = [*few, many]
    if PREFILL in measures:
        prompts = draw_prompts(1, sizes.long_len, sizes)
        times = [seconds(prompts, 1) for _ in range(3)]
        row |= {f"prefill_{sizes.long_len}_ms": round(min(times) * 1e3, 2), "prefill_s": times}
    if OFFLINE in measures:
        name = f"offline_{sizes.requests}x{sizes.request_len}_{sizes.new_len}_s"
        row[name] = seconds(offline, sizes.new_len)
    if THROUGHPUT in measures:
        took_s = seconds(draw_prompts(sizes.requests, sizes.even_len, sizes), sizes.even_len)
        name = f"throughput_{sizes.requests}x{sizes.even_len}_{sizes.even_len}"
        rate = sizes.requests * sizes.even_len / took_s
        row |= {f"{name}_s": took_s, f"{name}_tokens_per_s": round(rate, 1)}
    return row


def open_peer(name: str, folder: Path, backend: str, sizes: Sizes) -> AbstractPeer:
    """Open an engine of `KINDS`."""
    kind = KINDS[name]
    if kind.package == "vllm":
        return VllmPeer(kind.options, folder, sizes)
    if kind.package == "sglang":
        return SglangPeer(kind.options, folder, sizes)
    return DetjaxPeer(kind, folder, backend, sizes)


def end_with_parent() -> None:
    """End this process group when the process that has started it is gone, however it ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Open, wait, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", required=True, choices=list(KINDS))
    parser.add_argument("--model", required=True, choices=list(SIZES))
    parser.add_argument("--backend", required=True)
    parser.add_argument("--folder", required=True, type=Path, help="holds weights by scheme")
    parser.add_argument("--files", required=True, type=Path, help="where ready, go and the row lie")
    parser.add_argument("--measure", required=True, nargs="+", choices=MEASURES)
    args = parser.parse_args()
    end_with_parent()
    sizes = SIZES[args.model]
    began_s = time.perf_counter()
    peer = open_peer(args.engine, args.folder, args.backend, sizes)
    start_s = round(time.perf_counter() - began_s, 2)
    (args.files / READY).touch()
    while not (args.files / GO).exists():
        time.sleep(0.02)
    measured = measure(peer, sizes, args.measure)
    row = {"start_s": start_s} | peer.facts() | measured
    part = args.files / f"{ROW}.part"
    part.write_text(json.dumps(row))
    part.rename(args.files / ROW)


if __name__ == "__main__":
    main()
