# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on two or more GPUs: bits first, then what the ranks' sum costs.

python -m benchmarks.mesh --parts exchange prefill --out mesh.jsonl
python -m benchmarks.mesh --parts step --decode 1 8 64 --prefill 8192
python -m benchmarks.mesh --parts large --decode 1 8

exchange: the sum of the ranks' partials, the residual stream and RMSNorm, at decode sizes, against
XLA's psum followed by the same work. prefill: the same at prefill sizes. step: whole steps of
Llama-3.1-8B on meshes, tokens, logprobs and the cache compared bit for bit. large: a
model that no single GPU holds. Wall time of programs of dependent calls, medians.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import Rows, environment, kernel_events, num_different
from benchmarks.step import CONTEXT, DECODE_STEPS, MODELS, _config
from detjax.compilation.donation import compile_checked
from detjax.compilation.xla_flags import EXACT_OPTIONS
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import pages_shape
from detjax.engine.running.launch_operands import unpack_choice
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.running.programs import in_place
from detjax.models.forward_paths import KernelMode
from detjax.models.loading import LoadedModel, random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.rms_norm.api import add_rms_norm
from detjax.parallel.collectives import butterfly_sum
from detjax.parallel.exchange import (
    EXCHANGE_SPECS,
    exchange_add_rms_norm,
    open_exchange,
    scatter_add_rms_norm,
)
from detjax.parallel.mesh import DP_AXIS, TP_AXIS, make_mesh
from detjax.testing.programs import launches, operands_for, plain_key, programs_for

SM90 = Backend.SM90
EPS = 1e-5
ROUNDS = 7
SUMS = 64  # one after another, so that the device is what takes time, not the launch from the host

LARGE = _config(
    vocab_size=128256, hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8,
    head_dim=128, intermediate_size=28672,
)  # fmt: skip
"""The shape of Llama-3.1-70B: 141 GB of bfloat16 weights."""


# --------------------------------------------------------------------- the ranks' sum and its norm


def _kernel(shared, partial, residual, gain):
    return exchange_add_rms_norm(shared, partial[None], residual, None, gain, eps=EPS, backend=SM90)


def _butterfly(shared, partial, residual, gain):
    total = butterfly_sum(partial, TP_AXIS, lax.axis_size(TP_AXIS), backend=SM90)
    return add_rms_norm(total, residual, None, gain, eps=EPS, backend=SM90)


def _scatter(shared, partial, residual, gain):
    size = lax.axis_size(TP_AXIS)
    return scatter_add_rms_norm(partial, residual, None, gain, TP_AXIS, size, eps=EPS, backend=SM90)


def _psum(shared, partial, residual, gain):
    """What a model without claims does: partials in the dtype they come in."""
    total = lax.psum(partial, TP_AXIS).astype(residual.dtype)  # noqa: TID251
    residual = residual + total
    wide = residual.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    return residual, (wide * scale * gain.astype(jnp.float32)).astype(residual.dtype)


IN_GRAPHS = {
    "xla_gpu_enable_command_buffer": "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,FUSION,COLLECTIVES"
}
"""XLA's own list of what goes into CUDA graphs, and collectives too."""

ONE_BY_ONE = {"xla_gpu_all_reduce_combine_threshold_bytes": "0"}
"""No sum of another layer in the same message, as in a model, where each depends on the last."""

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)

FORMS: dict[str, tuple[Callable, jnp.dtype, dict[str, str]]] = {
    "exchange kernel": (_kernel, F32, {}),
    "scatter": (_scatter, F32, {}),
    "butterfly": (_butterfly, F32, {}),
    "butterfly in graphs": (_butterfly, F32, IN_GRAPHS),
    "psum float32": (_psum, F32, ONE_BY_ONE),
    "psum bfloat16": (_psum, BF16, ONE_BY_ONE),
    "psum bfloat16 in graphs": (_psum, BF16, IN_GRAPHS | ONE_BY_ONE),
}
"""Each form, the dtype of the partials it is given, and options of the compiler."""


def _chain(form: Callable, mesh: Mesh, length: int, *, is_shared_out: bool) -> Callable:
    """`length` dependent calls, each on its own partials, on every rank."""

    def rank(shared, partials, residual, gain):
        out = residual
        for partial in partials:
            # A layer's partial comes of the residual stream before it.
            partial, residual = lax.optimization_barrier((partial, residual))
            residual, out = form(shared, partial[0], residual, gain)
        # One collective of XLA's own, without which no program may use the exchange kernel.
        return residual, out, lax.all_gather(out[0, :1], TP_AXIS)

    step = jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(EXCHANGE_SPECS, [P(TP_AXIS)] * length, P(), P()),
        out_specs=(P(TP_AXIS) if is_shared_out else P(), P(), P()),
        check_vma=False,
    )
    return jax.jit(step)


def _wall_us(run: Callable, repeats: int) -> float:
    """Mean wall time of a call among `repeats` that are launched at once."""
    jax.block_until_ready(run())
    begin = time.perf_counter()
    outs = [run() for _ in range(repeats)]
    jax.block_until_ready(outs)
    return (time.perf_counter() - begin) / repeats * 1e6


def _device_us(run: Callable, calls: int) -> dict[str, float]:
    """Microseconds of each kernel a call and GPU, of several launched at once."""
    events = kernel_events(lambda: jax.block_until_ready([run() for _ in range(3)]))
    total: dict[str, float] = {}
    for name, us in events:
        total[name] = total.get(name, 0.0) + us / (3 * calls)
    return dict(sorted(total.items(), key=lambda item: -item[1])[:6])


def time_forms(
    names: list[str], mesh: Mesh, num_rows: int, width: int, length: int, repeats: int, rows: Rows
) -> bool:
    """Compare bits with the butterfly, then time every form in turn; False if a bit differed."""
    tp = mesh.shape[TP_AXIS]
    shared = open_exchange(mesh, width=width, dtype=jnp.dtype(jnp.bfloat16), backend=SM90)
    sharding, whole = NamedSharding(mesh, P(TP_AXIS)), NamedSharding(mesh, P())

    @functools.partial(jax.jit, out_shardings=([sharding] * length, whole, whole))
    def draw():
        keys = jax.random.split(jax.random.key(num_rows), length)
        partials = [jax.random.normal(key, (tp, num_rows, width)) for key in keys]
        bf16 = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        return partials, bf16(keys[0], (num_rows, width)), bf16(keys[1], (width,))

    partials, residual, gain = draw()
    rounded = jax.jit(
        lambda p: [x.astype(jnp.bfloat16) for x in p], out_shardings=[sharding] * length
    )
    given = {F32: partials, BF16: rounded(partials)}
    subject = {"case": f"{num_rows} rows of {width}, tp {tp}", "num_rows": num_rows}
    runs, want, is_right = {}, None, True
    for name in names:
        form, dtype, options = FORMS[name]
        operands = shared, given[dtype], residual, gain
        try:
            program = _chain(form, mesh, length, is_shared_out=name == "scatter")
            compiled = program.lower(*operands).compile(compiler_options=options)
            runs[name] = functools.partial(compiled, *operands)
            got = jax.tree.map(np.asarray, runs[name]())
        except Exception as error:
            rows.keep(subject="mesh_sum", **subject, impl=name, failed=f"{error}"[:200])
            runs.pop(name, None)
            continue
        if name == "butterfly":
            want = got
        elif not name.startswith("psum"):
            assert want is not None, "the butterfly comes first"
            wrong = sum(
                int(num_different(*map(jnp.asarray, pair))) for pair in zip(got, want, strict=True)
            )
            is_right = is_right and wrong == 0
            rows.keep(subject="mesh_bits", **subject, impl=name, different=wrong)
            if wrong:
                del runs[name]
    times = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(_wall_us(run, repeats) / length)
    medians = {name: statistics.median(times[name]) for name in runs}
    rival = medians.get("psum bfloat16", float("nan"))
    for name, us in medians.items():
        row = {"impl": name, "us_p50": us, "over_psum_bfloat16": us / rival}
        try:
            row["kernels"] = {
                kernel[:32]: round(us, 2)
                for kernel, us in _device_us(runs[name], length * tp).items()
            }
        except RuntimeError as error:
            row["kernels"] = str(error)
        rows.keep(subject="mesh_sum", **subject, **row)
    return is_right


# ---------------------------------------------------------------------------------- whole steps


def _without_exchange(model: LoadedModel) -> LoadedModel:
    """The same model, whose ranks exchange through XLA's collectives."""
    params = {name: leaf for name, leaf in model.params.items() if name != "exchange"}
    specs = {name: leaf for name, leaf in model.partition_specs.items() if name != "exchange"}
    return dataclasses.replace(model, params=params, partition_specs=specs)


def _apart(model: LoadedModel) -> LoadedModel:
    """The same model, whose ranks add few rows in launches of their own and gather by XLA's."""
    exchange = dataclasses.replace(model.params["exchange"], tiles=None, choices=None)
    return dataclasses.replace(model, params=model.params | {"exchange": exchange})


@functools.partial(jax.jit, static_argnames="position")
def _position_of_pages(cache, pages, position: int) -> jax.Array:
    """One position of some pages, of all layers and heads, as integers: moving keeps every bit."""
    words = lax.bitcast_convert_type(cache[..., position, :], jnp.uint16)
    return jnp.take(words, pages, axis=1)


def rows_of(batch: int, most_rows: int) -> np.ndarray:
    """Which rows of the cache a batch takes: spread evenly, so that each replica owns its own."""
    return np.arange(batch) * most_rows // batch


def place_rows(
    batch: int, most_rows: int, *, row_len: int, table_len: int, dp: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the cache that a batch takes, and the pages of each as its replica counts them.

    A cache row is `row_len` pages, the same ones of the whole cache on every mesh. Replica r of dp
    runs rows [r batch/dp, (r + 1) batch/dp) of the batch and holds that share of the pages.

    Args:
        batch: Rows of the step.
        most_rows: Rows of the cache.
        row_len: Pages of a row of the cache.
        table_len: Pages of a row of the batch, more than `row_len` for a long prompt.
        dp: Replicas.

    Raises:
        ValueError: If a row's pages would not all lie on its replica, or be another row's too.
    """
    if batch % dp or most_rows % dp:
        raise ValueError(f"{batch=} and {most_rows=} must be multiples of {dp=}")
    rows = rows_of(batch, most_rows)
    share = most_rows * row_len // dp
    pages = rows[:, None] * row_len + np.arange(table_len)[None]
    own = np.arange(batch) * dp // batch
    ends = np.append(rows[1:], most_rows) * row_len
    if (pages[:, -1] >= np.minimum(ends, (own + 1) * share)).any():
        raise ValueError(
            f"{table_len=} is too long for {batch=} rows in a cache of {most_rows} x {row_len} "
            f"pages on {dp=} replicas"
        )
    return rows, pages - own[:, None] * share


class Runner:
    """A model on a mesh, a random cache, and the engine's own programs over it."""

    def __init__(
        self,
        model: LoadedModel,
        most_rows: int,
        *,
        mode: KernelMode = "invariant",
        options: dict[str, str] | None = None,
        pages=None,
    ):
        """Draw a cache of CONTEXT tokens a row, the same on every mesh, or share one.

        Args:
            model: On its mesh.
            most_rows: Rows of the cache.
            mode: Which kernels.
            options: Of the compiler, besides those of the engine.
            pages: The cache of another runner of the same mesh.
        """
        self.model, self.mode, self.most_rows = model, mode, most_rows
        self.options = options or {}
        self.row_len = CONTEXT // 128 + 1
        self.num_pages = most_rows * self.row_len
        shape = pages_shape(model, self.num_pages)

        def draw():
            bits = jax.random.bits(jax.random.key(1), shape.shape, jnp.uint16)
            return (bits.astype(jnp.float32) / 2.0**15 - 1.0).astype(shape.dtype)

        self.cache = pages or [jax.jit(draw, out_shardings=shape.sharding)()]
        self._steps: dict[tuple[int, int], tuple[Callable, float]] = {}

    @property
    def dp(self) -> int:
        """Replicas of the mesh."""
        return self.model.mesh.shape[DP_AXIS]

    def _key(self, batch: int, length: int) -> ProgramKey:
        return plain_key(
            "decode" if length == 1 else "prefill", rows=batch // self.dp, length=length,
            table_len=max(self.row_len, -(-length // 128)), mode=self.mode,
        )  # fmt: skip

    def _place(self, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        return place_rows(
            batch, self.most_rows, row_len=self.row_len,
            table_len=self._key(batch, length).table_len, dp=self.dp,
        )  # fmt: skip

    def arguments(self, batch: int, length: int, start: int) -> tuple:
        """Operands behind the cache: tokens at `start` of each row, the same on every mesh."""
        cache_rows, pages = self._place(batch, length)
        rows, positions = cache_rows[:, None], start + np.arange(length)[None]
        ids = (rows * 977 + positions * 31) % self.model.config.vocab_size
        return operands_for(
            self.model, self._key(batch, length),
            ids=ids.astype(np.int32), start=np.full(batch, start, np.int32), table=pages,
            sampling=[
                (SamplingParams(temperature=0.7, seed=int(r), noise="common"), 0)
                for r in cache_rows
            ],
        )  # fmt: skip

    def compiled(self, batch: int, length: int) -> tuple[Callable, float]:
        """The step, and the seconds compiling took."""
        if (batch, length) not in self._steps:
            begin = time.perf_counter()
            key, params = self._key(batch, length), self.model.params
            programs = programs_for(self.model, num_pages=self.num_pages, num_slots=batch)
            if self.options:
                jitted = jax.jit(programs.function(key), donate_argnums=in_place(key))
                lowered = jitted.lower(*programs.operands(key, params))
                devices = list(self.model.mesh.devices.flat)
                program = compile_checked(lowered, EXACT_OPTIONS | self.options, devices)
            else:
                program = programs.get(key, params)
            self._steps[batch, length] = program, time.perf_counter() - begin
        return self._steps[batch, length]

    def run(self, batch: int, length: int, start: int, repeats: int = 1):
        """Dependent steps; the last one's result, and milliseconds a step."""
        step, _ = self.compiled(batch, length)
        of_launches = launches(self.arguments(batch, length, start), repeats)
        model = self.model
        jax.block_until_ready((self.cache, of_launches))
        begin = time.perf_counter()
        for arguments in of_launches:
            self.cache[0], *_, result = step(
                model.params, model.rope_tables, self.cache[0], *arguments
            )
        jax.block_until_ready((self.cache, result))
        return result, (time.perf_counter() - begin) / repeats * 1e3

    def bits(self, batch: int, length: int, start: int) -> dict[str, np.ndarray]:
        """Everything a step gives: tokens, logprobs, and what it left in the cache.

        The keys and values of a layer are a function of the hidden state that reaches it, so equal
        caches mean equal hidden states of every layer, and logprobs are of the last.
        """
        result, _ = self.run(batch, length, start)
        choice = unpack_choice(np.asarray(result), 0)
        _, pages = self._place(batch, length)
        owner = np.arange(batch) * self.dp // batch
        where = pages[:, start // 128] + owner * (self.num_pages // self.dp)
        written = _position_of_pages(self.cache[0], where.astype(np.int32), start % 128)
        return {
            "tokens": np.ascontiguousarray(choice.token_ids),
            "logprobs": np.ascontiguousarray(choice.logprobs),
            "keys and values of every layer": np.asarray(written),
        }


def prompts_case(runners: dict[str, Runner]) -> tuple[int, int, int]:
    """Prompts that begin together, as many as the replicas of the widest mesh and at least two."""
    return max(2, *(runner.model.mesh.shape[DP_AXIS] for runner in runners.values())), 300, 0


def compare_meshes(
    runners: dict[str, Runner], batches: list[int], rows: Rows, *, subject: str = "mesh_step_bits"
) -> bool:
    """Every batch on every mesh against the first mesh, and rows against smaller batches."""
    is_right, rows_agree, alone = True, True, {}
    first = next(iter(runners))
    for batch, length, start in [*((b, 1, CONTEXT - 1) for b in batches), prompts_case(runners)]:
        want = runners[first].bits(batch, length, start)
        if length == 1:
            for row, token, bits in zip(
                rows_of(batch, runners[first].most_rows), want["tokens"],
                want["logprobs"].view(np.uint32), strict=True,
            ):  # fmt: skip
                rows_agree &= alone.setdefault(row, (token, bits)) == (token, bits)
        for name, runner in runners.items():
            if batch % runner.model.mesh.shape[DP_AXIS]:
                continue
            got = runner.bits(batch, length, start)
            different = {
                what: int((got[what].view(np.uint8) != want[what].view(np.uint8)).sum())
                for what in want
            }
            is_right &= not any(different.values())
            case = f"batch {batch}, {length} tokens at {start}"
            rows.keep(subject=subject, case=case, impl=name, **different)
    rows.keep(subject=subject, case="rows in other batches", same=rows_agree)
    return is_right and rows_agree


def _mesh_model(config, dp: int, tp: int) -> LoadedModel:
    mesh = make_mesh(dp, tp, platform=SM90.platform)
    return random_model(config, seed=0, profile=NumericsProfile(), mesh=mesh, backend=SM90)


def _communication_us(runner: Runner, case: tuple[int, int, int]) -> tuple[float, float, int]:
    """Device time of a step and GPU: of the exchange and of collectives, of all, and launches."""
    events = kernel_events(lambda: runner.run(*case, repeats=3))
    devices = runner.model.mesh.size * 3
    names = ("exchange", "nccl", "AllReduce", "all_reduce", "all-reduce", "MultiGpuBarrier")
    shared = sum(us for name, us in events if any(n in name for n in names))
    return shared / devices, sum(us for _, us in events) / devices, len(events) // devices


def time_steps(
    runners: dict[str, Runner],
    cases: list[tuple[int, int, int]],
    rows: Rows,
    *,
    subject: str = "mesh_step",
) -> None:
    """Time whole steps on every mesh, in turn."""
    for case in cases:
        batch, length, start = case
        repeats = DECODE_STEPS if length == 1 else 3
        name = f"decode batch {batch}" if length == 1 else f"prefill {length} tokens"
        times: dict[str, list[float]] = {}
        for which, runner in runners.items():
            try:
                runner.run(*case, repeats=2)
            except Exception as error:
                rows.keep(subject=subject, case=name, impl=which, failed=f"{error}"[:200])
                continue
            times[which] = []
        for _ in range(5):
            for which in times:
                times[which].append(runners[which].run(*case, repeats=repeats)[1])
        for which, found in times.items():
            row = {
                "ms_p50": statistics.median(found),
                "steps": repeats,
                "compile_s": runners[which].compiled(batch, length)[1],
            }
            try:
                shared, total, launches = _communication_us(runners[which], case)
                row |= {"device_ms": total / 1e3, "communication_ms": shared / 1e3,
                        "launches": launches}  # fmt: skip
            except RuntimeError as error:
                row["device_ms"] = str(error)
            rows.keep(subject=subject, case=name, impl=which, **row)


def compile_ahead(runners: dict[str, Runner], cases: list[tuple[int, int, int]]) -> None:
    """Compile invariant steps side by side; not XLA's own, which it tunes by measuring."""
    wanted = [
        (runner, batch, length)
        for batch, length, _ in cases
        for runner in runners.values()
        if runner.mode == "invariant" and batch % runner.model.mesh.shape[DP_AXIS] == 0
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda job: job[0].compiled(*job[1:]), wanted))


def run_steps(args: argparse.Namespace, rows: Rows) -> bool:
    """Bits on (1, 1), (1, tp) and (tp, 1); times of the first two and of the fast path."""
    config = MODELS[args.model]
    most_rows = max(32, *args.decode)
    meshes = (1, 1), (1, args.tp), (args.tp, 1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        one, many, several = pool.map(lambda mesh: _mesh_model(config, *mesh), meshes)
    sharded = Runner(many, most_rows)
    timed = {"invariant (1,1)": Runner(one, most_rows), f"invariant (1,{args.tp})": sharded}
    compared = {**timed, f"invariant ({args.tp},1)": Runner(several, most_rows)}
    compile_ahead(compared, [(batch, 1, 0) for batch in args.compare] + [prompts_case(compared)])
    # A row without a model's name is of Llama-3.1-8B's shape.
    of_model = "" if args.model == "llama3_8b" else f"_{args.model}"
    is_right = compare_meshes(compared, args.compare, rows, subject=f"mesh_step_bits{of_model}")
    del compared, several
    if args.graphs:
        graphs = Runner(many, most_rows, options=IN_GRAPHS, pages=sharded.cache)
        timed[f"invariant (1,{args.tp}), collectives in graphs"] = graphs
    if args.apart:
        apart = Runner(_apart(many), most_rows, pages=sharded.cache)
        timed[f"invariant (1,{args.tp}), sums and choice apart"] = apart
    if args.collectives:
        plain = Runner(_without_exchange(many), most_rows, pages=sharded.cache)
        timed[f"invariant (1,{args.tp}), no exchange kernel"] = plain
    cases = [(batch, 1, CONTEXT - 1) for batch in args.decode]
    cases += [(1, length, 0) for length in args.prefill]
    compile_ahead(timed, cases)
    if not args.no_fast:
        fast = Runner(many, most_rows, mode="fast", pages=sharded.cache)
        timed[f"fast (1,{args.tp})"] = fast
    time_steps(timed, cases, rows, subject=f"mesh_step{of_model}")
    return is_right


def run_large(args: argparse.Namespace, rows: Rows) -> bool:
    """Make a model that no single GPU holds, each shard on its own; bits, then times of steps.

    No GPU has its bits alone: they are compared between sums in the products and sums in launches
    of their own, and between rows in batches of several sizes.
    """
    begin = time.perf_counter()
    model = _mesh_model(LARGE, 1, args.tp)
    jax.block_until_ready(model.params)
    load_s = time.perf_counter() - begin
    share = sum(x.nbytes for x in jax.tree.leaves(model.params)) / args.tp
    peak = max(d.memory_stats()["peak_bytes_in_use"] for d in model.mesh.devices.flat)
    rows.keep(
        subject="mesh_load", case=f"70B shape, tp {args.tp}", load_s=load_s,
        share_gb=share / 1e9, peak_gb=peak / 1e9,
    )  # fmt: skip
    most_rows = max(args.decode + args.compare)
    apart = Runner(_apart(model), most_rows)
    sharded = Runner(model, most_rows, pages=apart.cache)
    compared = {
        f"invariant (1,{args.tp}), sums and choice apart": apart,
        f"invariant (1,{args.tp})": sharded,
    }
    compile_ahead(compared, [(batch, 1, 0) for batch in args.compare] + [prompts_case(compared)])
    is_right = compare_meshes(compared, args.compare, rows, subject="mesh_large_bits")
    runners = {f"invariant (1,{args.tp})": sharded}
    cases = [(batch, 1, CONTEXT - 1) for batch in args.decode]
    compile_ahead(runners, cases)
    if not args.no_fast:
        runners[f"fast (1,{args.tp})"] = Runner(model, most_rows, mode="fast", pages=sharded.cache)
    time_steps(runners, cases, rows, subject="mesh_large")
    return is_right


# -------------------------------------------------------------------------------------- command


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parts = ("exchange", "prefill", "step", "large")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts[:3]))
    parser.add_argument("--model", choices=MODELS, default="llama3_8b", help="of the part `step`")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--prefill-rows", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192])
    parser.add_argument("--compare", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--no-fast", action="store_true", help="leave the path without claims out")
    parser.add_argument(
        "--collectives", action="store_true", help="also time steps without the exchange kernel"
    )
    parser.add_argument(
        "--apart", action="store_true", help="also time steps with the exchange kernel alone"
    )
    parser.add_argument(
        "--graphs", action="store_true", help="also time XLA's collectives inside CUDA graphs"
    )
    parser.add_argument("--out", help="write JSON rows here")
    return parser.parse_args()


def main() -> None:
    """Check, time, and write rows; exit 3 if a bit differed."""
    args = parse_args()
    rows = Rows(environment(SM90), args.out)
    mesh = make_mesh(1, args.tp, platform=SM90.platform)
    is_right = True
    if "exchange" in args.parts:
        names = [name for name in FORMS if name != "scatter"]
        names = [name for name in names if args.graphs or FORMS[name][2] is not IN_GRAPHS]
        names.sort(key="butterfly".__ne__)  # the reference comes first
        for num_rows in args.rows:
            is_right &= time_forms(names, mesh, num_rows, args.width, SUMS, 10, rows)
    if "prefill" in args.parts:
        names = ["butterfly", "scatter", "psum bfloat16"]
        for num_rows in args.prefill_rows:
            is_right &= time_forms(names, mesh, num_rows, args.width, 6, 3, rows)
    if "step" in args.parts:
        is_right &= run_steps(args, rows)
    if "large" in args.parts:
        is_right &= run_large(args, rows)
    sys.exit(0 if is_right else 3)


if __name__ == "__main__":
    main()
