# SPDX-License-Identifier: Apache-2.0
"""The whole decode and prefill step of a model: bits first, then time, beside what rivals it.

python -m benchmarks.step --mode both --transformers --decode 1 8 64 --prefill 4000 --out step.jsonl
python -m benchmarks.step --kernels --decode 8 --prefill
python -m benchmarks.step --model tiny --backend portable --mode both --decode 1 3 --prefill 64

The programs are the engine's own (`serving.programs.ProgramCache`). Wall time of dependent steps,
median of five runs, and of single calls, the least of three. A run has 100 steps of decode: the
first is launched while the GPU is idle, which takes the host 1 to 3 ms. `fast` is the same model
without claims (`detjax.models.fast`), compiled with the roundings that XLA leaves out by default.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import (
    COPY_BYTES_PER_S,
    MATRIX_FLOP_PER_S,
    Rows,
    by_kernel,
    environment,
    kernel_events,
    run_rivals,
)
from detjax.defaults import AUTO, KV_CACHE_DTYPES, kv_cache_dtype_of
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import pages_shape
from detjax.engine.running.launch_operands import unpack_choice
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.running.programs import ProgramCache
from detjax.models.config import ExpertConfig, LinearAttentionConfig, ModelConfig, RopeConfig
from detjax.models.fast import LARGEST, quantise_params
from detjax.models.hf_config import config_from_hf
from detjax.models.loading import LoadedModel, random_model
from detjax.models.quantization.quantize import RECIPES
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.float8_cache import holds_float8, narrowed
from detjax.parallel.mesh import make_mesh
from detjax.testing.programs import launches, operands_for, plain_key, programs_for
from detjax.testing.quantized import quantized_model

CONTEXT = 1024
"""Tokens of each sequence at a decode step, the new one included, unless a case says another."""


def _config(*, qk_norm: bool = False, qkv_bias: bool = False, **sizes) -> ModelConfig:
    return ModelConfig(
        family="llama",
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        qkv_bias=qkv_bias,
        o_bias=False,
        qk_norm=qk_norm,
        sliding_windows=(None,) * sizes["num_layers"],
        bos_token_id=None,
        eos_token_ids=(),
        **sizes,
    )


def _published(architecture: str, **values) -> ModelConfig:
    """The family's defaults but for these keys of `config.json`, and no end: a step is any step."""
    config = config_from_hf({"architectures": [architecture], **values})
    return dataclasses.replace(config, max_position_embeddings=8192, eos_token_ids=())


def _hybrid(*, num_layers: int, num_kv_heads: int = 8, **sizes) -> ModelConfig:
    """Three layers of gated DeltaNet, then attention, whose 256 channels a head are two of 128."""
    config = _config(
        vocab_size=248320, num_layers=num_layers, num_heads=32, num_kv_heads=num_kv_heads,
        head_dim=128, qk_norm=True, **sizes,
    )  # fmt: skip
    linear = LinearAttentionConfig(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4,
        layers=tuple(i % 4 != 3 for i in range(num_layers)),
    )  # fmt: skip
    return dataclasses.replace(config, linear_attention=linear, has_output_gate=True)


MODELS = {
    "llama3_8b": _config(
        vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=14336,
    ),
    "qwen3_8b": _config(
        vocab_size=151936, hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=12288, qk_norm=True,
    ),
    "mistral_7b": _config(
        vocab_size=32768, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=14336,
    ),
    "qwen25_7b": _config(
        vocab_size=152064, hidden_size=3584, num_layers=28, num_heads=28, num_kv_heads=4,
        head_dim=128, intermediate_size=18944, qkv_bias=True,
    ),
    "qwen3_30b_a3b": _config(
        vocab_size=151936, hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4,
        head_dim=128, intermediate_size=6144, qk_norm=True,
        experts=ExpertConfig(
            num_experts=128, top_k=8, width=768, renormalise=True, layers=(True,) * 48
        ),
    ),
    "qwen35_4b": _hybrid(hidden_size=2560, intermediate_size=9216, num_layers=32),
    "qwen35_4b_half": _hybrid(hidden_size=2560, intermediate_size=9216, num_layers=16),
    # Layers of Qwen3.5-35B-A3B: the feed-forward width is that of a token's experts together.
    "qwen35_35b_dense": _hybrid(
        hidden_size=2048, intermediate_size=4608, num_layers=40, num_kv_heads=4
    ),
    "qwen35_4b_published": _published(
        "Qwen3_5ForCausalLM", hidden_size=2560, intermediate_size=9216, num_hidden_layers=32,
        tie_word_embeddings=True,
    ),
    "qwen35_35b_a3b": _published("Qwen3_5MoeForCausalLM"),
    "gemma3_4b": _published(
        "Gemma3ForCausalLM", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=1024,
        query_pre_attn_scalar=256,
    ),
    "gemma2_2b": _published(
        "Gemma2ForCausalLM", hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256,
    ),
    "gpt_oss_20b": _published(
        "GptOssForCausalLM", num_local_experts=32, num_hidden_layers=24
    ),
    "smollm2_135m": _config(
        vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, intermediate_size=1536,
    ),
    # What `tools/train_tiny.py` trains.
    "novels_130m": _config(
        vocab_size=4096, hidden_size=1024, num_layers=8, num_heads=8, num_kv_heads=4,
        head_dim=128, intermediate_size=4096,
    ),
    "novels_500m": _config(
        vocab_size=4096, hidden_size=2048, num_layers=8, num_heads=16, num_kv_heads=8,
        head_dim=128, intermediate_size=8192,
    ),
    "tiny": _config(
        vocab_size=1024, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=64, intermediate_size=384,
    ),
    "tiny_experts": _config(
        vocab_size=1024, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=64, intermediate_size=384,
        experts=ExpertConfig(
            num_experts=8, top_k=2, width=192, renormalise=True, layers=(True, True)
        ),
    ),
}  # fmt: skip


DECODE_STEPS = 100
"""Of a run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One step: which rows of the cache get `length` tokens from position `start` on."""

    name: str
    rows: Sequence[int]
    length: int
    start: int
    repeats: int

    @property
    def kind(self) -> str:
        """Of the program that runs it."""
        return "decode" if self.length == 1 else "prefill"


def decode_case(batch: int, context: int = CONTEXT) -> Case:
    """One token for each of `batch` sequences."""
    name = f"decode batch {batch} context {context}"
    return Case(name, range(batch), length=1, start=context - 1, repeats=DECODE_STEPS)


def prefill_case(length: int) -> Case:
    """One whole prompt."""
    return Case(f"prefill {length} tokens", [0], length=length, start=0, repeats=3)


class Runner:
    """A model, its compiled steps by implementation, and one cache for all."""

    def __init__(
        self,
        config: ModelConfig,
        cases: Sequence[Case],
        backend: Backend,
        max_len: int,
        *,
        profile: NumericsProfile = NumericsProfile(),  # noqa: B008  (frozen)
        scheme: str = "bfloat16",
    ):
        """Draw random weights and a random cache for the largest of the cases.

        Args:
            config: The model's shape.
            cases: What will run.
            backend: Which kernels.
            max_len: Tokens that the page table has room for; 0 for as many as the case needs and
                one more.
            profile: The numerics.
            scheme: Of quantised weights, by `detjax.quantize`, or bfloat16.
        """
        self.model = random_model(
            config,
            seed=0,
            profile=profile,
            mesh=make_mesh(1, 1, platform=backend.platform),
            backend=backend,
        )
        if scheme != "bfloat16":
            self.model = quantized_model(self.model, scheme)
        self._max_len = max_len
        self._params = {"full": self.model.params}
        self.num_pages = max(len(c.rows) * self._pages_of(c) for c in cases)
        shapes = pages_shape(self.model, self.num_pages)

        def draw(shape):
            bits = jax.random.bits(jax.random.key(1), shape.shape, jnp.uint16)
            values = bits.astype(jnp.float32) / 2.0**15 - 1.0
            return narrowed(values) if holds_float8(shape) else values.astype(shape.dtype)

        def draw_one(shape):
            return jax.jit(functools.partial(draw, shape), out_shardings=shape.sharding)()

        self.pages = jax.tree.map(draw_one, shapes)
        self._programs: dict[int, ProgramCache] = {}
        self._compile_s: dict[ProgramKey, float] = {}
        self._operands: dict[tuple[str, str], tuple] = {}

    def add_draft(self, dtype: str) -> str:
        """Quantise the model; gives the name of the implementation."""
        self._params[dtype] = quantise_params(self.model.params, jnp.dtype(dtype))
        return f"fast {dtype}"

    def _tokens_of(self, case: Case) -> int:
        """Tokens of a sequence behind its last step: those of linear attention go on."""
        goes_on = case.length == 1 and self.model.config.linear_attention is not None
        return case.start + (case.repeats if goes_on else case.length)

    def _pages_of(self, case: Case) -> int:
        return -(-self._tokens_of(case) // 128)

    def key_of(self, impl: str, case: Case) -> ProgramKey:
        """The engine's name for the program that runs a case."""
        mode, _, weights = impl.partition(" ")
        after = 1 + self._tokens_of(case)  # a sequence that goes on
        return plain_key(
            case.kind, rows=len(case.rows), length=case.length,
            table_len=-(-max(after, self._max_len) // 128),
            mode="fast" if mode == "fast" else "invariant", weights=weights or "full",
        )  # fmt: skip

    def params(self, impl: str) -> dict:
        """The weights of an implementation."""
        return self._params[impl.partition(" ")[2] or "full"]

    def operands(self, impl: str, case: Case) -> tuple:
        """Slots, sampling and the host's arrays: the same tokens for the same row and position."""
        name = impl, case.name
        if name not in self._operands:
            key = self.key_of(impl, case)
            positions = case.start + np.arange(case.length)[None]
            rows = np.asarray(case.rows)[:, None]
            held = self._pages_of(case)
            pages = np.zeros((len(case.rows), key.table_len), np.int32)
            pages[:, :held] = rows * held + np.arange(held)[None]
            self._operands[name] = operands_for(
                self.model, key,
                ids=((rows * 977 + positions * 31) % self.model.config.vocab_size).astype(np.int32),
                start=np.full(len(case.rows), case.start, np.int32), table=pages,
                sampling=[
                    (SamplingParams(temperature=0.7, seed=int(r), noise="common"), 0)
                    for r in case.rows
                ],
            )  # fmt: skip
        return self._operands[name]

    def compiled(self, impl: str, case: Case) -> tuple[Callable, float]:
        """The step of (pages, *operands) with its weights, and the seconds compiling took."""
        count = len(case.rows)
        programs = self._programs.setdefault(
            count, programs_for(self.model, num_pages=self.num_pages, num_slots=count)
        )
        key, params = self.key_of(impl, case), self.params(impl)
        is_new, start = key not in programs, time.perf_counter()
        step = programs.get(key, params)
        if is_new:
            self._compile_s[key] = time.perf_counter() - start

        def run(pages, *operands):
            pages, *_, result = step(params, self.model.rope_tables, pages, *operands)
            return pages, result

        return run, self._compile_s[key]

    def compile_ahead(self, cases: list[Case]) -> None:
        """Compile the invariant steps side by side; not XLA's, which it tunes by measuring."""
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda case: self.compiled("invariant", case), cases))

    def choices(self, impl: str, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and logprobs of one step."""
        step, _ = self.compiled(impl, case)
        (operands,) = launches(self.operands(impl, case), 1)
        self.pages, packed = step(self.pages, *operands)
        choice = unpack_choice(np.asarray(packed), 0)
        return np.asarray(choice.token_ids), np.asarray(choice.logprobs)

    def run(self, impl: str, case: Case, repeats: int) -> float:
        """Run dependent steps; milliseconds of wall time a step."""
        step, _ = self.compiled(impl, case)
        of_launches = launches(self.operands(impl, case), repeats)
        if case.length == 1 and self.model.config.linear_attention is not None:
            return self._run_on(impl, case, of_launches)
        jax.block_until_ready((self.pages, of_launches))
        begin = time.perf_counter()
        for operands in of_launches:
            self.pages, result = step(self.pages, *operands)
        jax.block_until_ready((self.pages, result))
        return (time.perf_counter() - begin) / repeats * 1e3

    def _run_on(self, impl: str, case: Case, of_launches: list[tuple]) -> float:
        """The same of steps that each decode the next token, from the slots that one leaves.

        A step of linear attention begins at the state that the step before has left.
        """
        programs, key = self._programs[len(case.rows)], self.key_of(impl, case)
        step = programs.get(key, self.params(impl))
        params, tables = self.params(impl), self.model.rope_tables
        slots, sampling, *host = of_launches[0]
        jax.block_until_ready((self.pages, of_launches))
        begin = time.perf_counter()
        for _ in of_launches:
            self.pages, slots, *_, result = step(params, tables, self.pages, slots, sampling, *host)
        jax.block_until_ready((self.pages, result))
        return (time.perf_counter() - begin) / len(of_launches) * 1e3

    def wall_ms(self, impl: str, case: Case) -> float:
        """Median of five runs, after one that warms up."""
        return statistics.median([self.run(impl, case, case.repeats) for _ in range(6)][1:])

    def least_ms(self, impl: str, case: Case) -> float:
        """The least of three single calls, a second apart: what one prompt takes when it is alone.

        Calls one after the other run at the power limit, which a single one does not reach.
        """
        times = []
        for _ in range(3):
            time.sleep(1.0)
            times.append(self.run(impl, case, 1))
        return min(times)


COPIED_BYTES = 2 << 30
"""Of an array whose copy measures the GPU's memory."""


def copy_bytes_per_s() -> float:
    """Bytes read and written a second while a large array is copied: the most of seven runs."""
    x = jnp.zeros(COPIED_BYTES // 4, jnp.uint32)
    copy = jax.jit(lambda x: x + jnp.uint32(1), donate_argnums=0)
    x, times = jax.block_until_ready(copy(x)), []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(10):
            x = copy(x)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - begin) / 10)
    return 2 * COPIED_BYTES / min(times)


def split_weights(tree) -> tuple[list[jax.Array], list[jax.Array]]:
    """Weights that every row reads, and those of experts."""
    shared, experts = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_expert = "expert_" in jax.tree_util.keystr(path)
        (experts if is_expert else shared).append(leaf)
    return shared, experts


def share_of_experts(config: ModelConfig, num_rows: int) -> float:
    """Of all experts, those that some row chooses, where each row's choice is uniform."""
    if config.experts is None:
        return 1.0
    return 1 - (1 - config.experts.top_k / config.experts.num_experts) ** num_rows


def decode_floor_ms(model: LoadedModel, params: dict, case: Case) -> float:
    """The least time of a step: of each product the larger of two, and the bytes of the cache.

    The two are the bytes of its weights at the copy bandwidth, and its multiply-adds at 790
    TFLOP/s. Of experts, weights count that are hit, and the rows of each. Of weights that are not
    bfloat16, bytes alone count.
    """
    config, num_rows = model.config, len(case.rows)
    shared, experts = split_weights({k: v for k, v in params.items() if k != "embed"})

    def seconds(weights, share: float, rows: float) -> float:
        num_bytes = share * weights.size * weights.dtype.itemsize
        is_product = weights.dtype == jnp.bfloat16 and weights.ndim > 1
        flop = 2 * rows * weights.size * is_product
        return max(num_bytes / COPY_BYTES_PER_S, flop / MATRIX_FLOP_PER_S)

    products = sum(seconds(x, 1.0, num_rows) for x in shared)
    if config.experts is not None:
        of_expert = num_rows * config.experts.top_k / config.experts.num_experts
        hit = share_of_experts(config, num_rows)
        products += sum(seconds(x, hit, of_expert) for x in experts)
    context = case.start + case.length
    num_keys = sum(min(context, window or context) for window in windows_of_attention(config))
    entry_bytes = 2 * model.profile.cache_dtype.itemsize
    kv = entry_bytes * len(case.rows) * config.num_kv_heads * num_keys * config.head_dim
    kv += len(case.rows) * linear_bytes(config)
    return (products + kv / COPY_BYTES_PER_S) * 1e3


def windows_of_attention(config: ModelConfig) -> list[int | None]:
    """Windows of the layers that have attention."""
    windows = enumerate(config.sliding_windows)
    return [window for i, window in windows if not config.is_linear(i)]


def linear_bytes(config: ModelConfig) -> int:
    """What a decode step has to read of a sequence's linear attention: states, and four rows."""
    if (linear := config.linear_attention) is None:
        return 0
    states = 4 * linear.num_value_heads * linear.key_dim * linear.value_dim
    rows = 2 * linear.num_key_heads * linear.row_width * linear.conv_width
    return sum(linear.layers) * (states + rows)


def prefill_flop(model: LoadedModel, length: int) -> float:
    """Multiply-adds of the layers' products and of causal attention, two operations each.

    Of experts, those of a row count. Of the last layer the heads of all tokens, and the rest of the
    last one.
    """
    config = model.config

    def weights(tree) -> float:
        shared, experts = split_weights(tree)
        experts_len = sum(x.size for x in experts)
        return sum(x.size for x in shared) + share_of_experts(config, 1) * experts_len

    *layers, last = model.params["layers"]
    of_qkv = weights(last["qkv"])
    of_all = weights(layers) + of_qkv
    of_last = weights(last) - of_qkv
    seen = (min(length, window or length) for window in windows_of_attention(config)[:-1])
    num_pairs = sum(2 * window * length - window**2 for window in seen)
    scores = config.num_heads * config.head_dim * num_pairs
    scores += 2 * config.num_heads * config.head_dim * length
    return 2 * of_all * length + 2 * of_last + 2 * scores


def show_kernels(runner: Runner, impl: str, case: Case) -> None:
    """Print what takes a step's time on the device."""
    times = by_kernel(kernel_events(lambda: runner.run(impl, case, 3)), repeats=3)
    total = sum(us for _, _, us in times)
    print(f"  {impl}: {total:10.1f} us in {sum(n for _, n, _ in times):.0f} launches")
    for name, count, us in times[:24]:
        print(f"  {us:10.1f} us {count:6.0f} x {us / count:8.2f}  {name[:70]}")


class BitsOfRows:
    """Whether each row of the cache always gets the bits that it first got."""

    def __init__(self):
        """Nothing is known yet."""
        self._first: dict[int, tuple] = {}

    def agree(self, case: Case, ids: np.ndarray, logprobs: np.ndarray) -> bool:
        """Compare a step's rows with earlier ones; rows not seen before are kept."""
        same = True
        for row, token, bits in zip(case.rows, ids, logprobs.view(np.uint32), strict=True):
            same = self._first.setdefault(row, (token, bits)) == (token, bits) and same
        return same


def check_bits(runner: Runner, seen: BitsOfRows, case: Case, rows: Rows) -> bool:
    """Run the invariant step twice and compare every row with every batch before."""
    _, compile_s = runner.compiled("invariant", case)
    runs = [runner.choices("invariant", case) for _ in range(2)]
    same = all([seen.agree(case, *run) for run in runs])
    rows.keep(subject="step_bits", case=case.name, same=same, compile_s=compile_s)
    return same


def time_case(runner: Runner, impls: list[str], case: Case, rows: Rows, *, kernels: bool) -> None:
    """Time every implementation of one step, one after the other, and what they are to another."""
    times, chosen = {}, {}
    for impl in impls:
        try:
            _, compile_s = runner.compiled(impl, case)
            chosen[impl] = runner.choices(impl, case)
            ms = times[impl] = runner.wall_ms(impl, case)
        except Exception as error:
            rows.keep(
                subject="step", impl=impl, case=case.name,
                failed=f"{type(error).__name__}: {error}"[:300],
            )  # fmt: skip
            continue
        row = {"subject": "step", "impl": impl, "case": case.name, "ms_p50": ms}
        row |= {"steps": case.repeats, "max_len": 128 * runner.key_of(impl, case).table_len}
        if case.length == 1:
            floor = decode_floor_ms(runner.model, runner.params(impl), case)
            row |= {"batch": len(case.rows), "context": case.start + 1}
            row |= {"floor_ms": floor, "floor_over_measured": floor / ms}
        else:
            share = prefill_flop(runner.model, case.length) / (ms * 1e-3) / MATRIX_FLOP_PER_S
            row |= {"tokens": case.length, "share_of_790_tflop_per_s": share}
            row |= {"least_ms": runner.least_ms(impl, case)}
        rows.keep(**row, compile_s=compile_s)
        if kernels:
            show_kernels(runner, impl, case)
    for impl in [i for i in times if i != "invariant" and "invariant" in times]:
        (ids, logprobs), (fast_ids, fast_logprobs) = chosen["invariant"], chosen[impl]
        rows.keep(
            subject="step_ratio", case=case.name, over=impl,
            speed_of_invariant=times[impl] / times["invariant"],
            same_tokens=float((ids == fast_ids).mean()),
            logprob_difference=float(np.abs(logprobs - fast_logprobs).max()),
        )  # fmt: skip


def transformers_rows(config: ModelConfig, batches: list[int], seconds: float) -> list[dict]:
    """Decode steps of Hugging Face transformers on a model of this shape, in its own process."""
    sizes = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip
    found, why_not = run_rivals(
        "transformers", "--model", json.dumps(sizes), "--context", str(CONTEXT),
        "--seconds", str(seconds), "--batch", *map(str, batches), timeout_s=seconds + 40,
    )  # fmt: skip
    rows = [{"subject": "step", "case": decode_case(row["batch"]).name} | row for row in found]
    if why_not:
        rows.append(
            {"subject": "step", "impl": "transformers", "case": "decode", "failed": why_not}
        )
    return rows


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument(
        "--compute", choices=["bfloat16", "float32"], default="bfloat16",
        help="dtype of activations; weights are bfloat16",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-dtype",
        choices=[*KV_CACHE_DTYPES, "fp8"],
        default=AUTO,
        help="of keys and values",
    )
    parser.add_argument(
        "--weights", choices=["bfloat16", *RECIPES], default="bfloat16",
        help="of the layers' matrices; 8-bit activations with those schemes that ask for them",
    )  # fmt: skip
    parser.add_argument(
        "--mode", choices=["invariant", "fast", "both"], nargs="*", default=["invariant"],
        help="with none, only transformers runs",
    )  # fmt: skip
    parser.add_argument(
        "--drafts", choices=LARGEST, nargs="*", default=[], help="time 8-bit weights too, fast"
    )
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument(
        "--context", type=int, default=CONTEXT, help="tokens of a sequence at a decode step"
    )
    parser.add_argument(
        "--max-len", type=int, default=0,
        help="tokens that the page tables have room for; as few as are needed if 0",
    )  # fmt: skip
    parser.add_argument("--prefill", type=int, nargs="*", default=[4096])
    parser.add_argument("--transformers", action="store_true", help="time transformers too")
    parser.add_argument("--transformers-seconds", type=float, default=300.0, help="stop it then")
    parser.add_argument("--kernels", action="store_true", help="list the time of each kernel")
    parser.add_argument("--out", help="write JSON rows here")
    return parser.parse_args()


def main() -> None:
    """Check, time, and write rows; exit 3 if a bit differed."""
    args = parse_args()
    backend, config = Backend(args.backend), MODELS[args.model]
    # First, while the GPU's memory is free.
    rivals = []
    if args.transformers:
        rivals = transformers_rows(config, args.decode, args.transformers_seconds)
    card = environment(backend) | {
        "model": args.model, "backend": args.backend, "data": "random weights and cache, uniform",
        "compute": args.compute, "weights": args.weights,
        "kv_cache_dtype": args.kv_cache_dtype,
    }  # fmt: skip
    rows = Rows(card, args.out)
    for row in rivals:
        rows.keep(**row)
    impls = [m for m in ("invariant", "fast") if m in args.mode or "both" in args.mode]
    if not impls and not args.drafts:
        return
    cases = [decode_case(b, args.context) for b in args.decode]
    cases += [prefill_case(n) for n in args.prefill]
    if args.max_len:
        config = dataclasses.replace(config, max_position_embeddings=max(8192, args.max_len))
    if backend is Backend.SM90:
        rows.keep(subject="copy", bytes=2 * COPIED_BYTES, bytes_per_s=copy_bytes_per_s())
    profile = NumericsProfile(
        compute_dtype=args.compute, kv_cache_dtype=kv_cache_dtype_of(args.kv_cache_dtype)
    )
    runner = Runner(config, cases, backend, args.max_len, profile=profile, scheme=args.weights)
    if "invariant" in impls:
        runner.compile_ahead(cases)
    impls += [runner.add_draft(dtype) for dtype in args.drafts]
    seen, failed = BitsOfRows(), False
    for case in cases:
        if "invariant" in impls and case.length == 1 and not check_bits(runner, seen, case, rows):
            failed = True
            continue
        time_case(runner, impls, case, rows, kernels=args.kernels)
    failed |= any(row.get("impl") == "invariant" and "failed" in row for row in rows.rows)
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main()
