# SPDX-License-Identifier: Apache-2.0
"""The exchange kernel on two and four GPUs: the bits of the butterfly, also for ranks adrift."""

import functools
import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P
from jaxlib.mlir.dialects import llvm

from detjax.numerics import NumericsProfile
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.rms_norm.api import add_rms_norm, combine_add_rms_norm
from detjax.parallel.collectives import butterfly_sum
from detjax.parallel.exchange import (
    EXCHANGE_SPECS,
    Exchange,
    exchange_add_rms_norm,
    open_exchange,
    scatter_add_rms_norm,
)
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.dummies import answers, dummy_config, dummy_model

pytestmark = pytest.mark.gpus(2)
FOUR = pytest.mark.gpus(4)
TPS = (2, pytest.param(4, marks=FOUR))

ON = {"backend": Backend.SM90}
EPS = 1e-5
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
CHAIN = 5
"""Exchanges of a program: each slot is used at least twice."""


def gpu_mesh(dp: int, tp: int):
    return make_mesh(dp, tp, platform="gpu")


@functools.cache
def exchange(width: int, dp: int = 1, tp: int = 2, dtype: jnp.dtype = BF16) -> Exchange:
    return open_exchange(gpu_mesh(dp, tp), width=width, dtype=dtype, **ON)


def operands(num_rows: int, width: int, num_leaves: int, tp: int = 2, dtype: jnp.dtype = BF16):
    """Leaf sums [CHAIN, ranks, L, M, D] with wide exponents, residual, bias and gain.

    Of a float32 residual stream they are in three parts, [CHAIN, ranks, L, 3, M, D].
    """
    rng = np.random.default_rng([num_rows, width])
    parts = [3] if dtype == F32 else []
    leaves = rng.standard_normal((CHAIN, tp, num_leaves, *parts, num_rows, width), np.float32)
    leaves *= np.exp2(rng.integers(-12, 4, leaves.shape)).astype(np.float32)
    rest = [
        jnp.asarray(rng.standard_normal(shape, np.float32), kind)
        for shape, kind in (((num_rows, width), dtype), ((width,), BF16), ((width,), BF16))
    ]
    return jnp.asarray(leaves), *rest


def gather_ranks(x):
    """Every rank's value, by one of XLA's collectives, without which no program may exchange."""
    return lax.all_gather(x, "tp")


def chained(finish, leaves, residual, bias, gain, tp: int = 2):
    """Run `finish(exchange, leaf_sums, residual, bias, gain)` on every rank, CHAIN times."""

    def rank(shared, leaves, residual, bias, gain):
        outs = []
        for i in range(CHAIN):
            residual, out = finish(shared, leaves[i, 0], residual, bias, gain)
            outs.append(out)
        return gather_ranks(residual), gather_ranks(jnp.stack(outs))

    step = jax.shard_map(
        rank,
        mesh=gpu_mesh(1, tp),
        in_specs=(EXCHANGE_SPECS, P(None, "tp"), P(), P(), P()),
        out_specs=(P(), P()),
        check_vma=False,
    )
    shared = exchange(residual.shape[1], tp=tp, dtype=residual.dtype)
    return jax.tree.map(np.asarray, jax.jit(step)(shared, leaves, residual, bias, gain))


def by_kernel(shared, leaves, residual, bias, gain):
    return exchange_add_rms_norm(shared, leaves, residual, bias, gain, eps=EPS, **ON)


def by_butterfly(shared, leaves, residual, bias, gain):
    terms = [leaves[i] for i in range(leaves.shape[0])]
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[0::2], terms[1::2], strict=True)]
    total = butterfly_sum(terms[0], "tp", lax.axis_size("tp"), **ON)
    return add_rms_norm(total, residual, bias, gain, eps=EPS, **ON)


def assert_same(got, want, claim: str) -> None:
    for name, a, b in zip(("residual stream", "outputs"), got, want, strict=True):
        for rank in range(len(a)):
            assert_bitwise_equal(a[rank], b[0], claim=f"{claim}: {name} of rank {rank}")


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(
    ("num_rows", "width", "num_leaves"),
    [
        *((m, 4096, 1) for m in (1, 3, 8, 17, 64, 127, 128)),
        (5, 5120, 2),
        (33, 896, 1),
        (16, 2048, 4),
    ],
)
def test_exchange_add_rms_norm_is_bitwise_mesh_invariant(num_rows, width, num_leaves, tp):
    args = operands(num_rows, width, num_leaves, tp)
    if tp * num_leaves > 2:  # two terms, one a rank, have one order only
        assert_order_sensitive(
            np.moveaxis(np.asarray(args[0][0]).reshape(-1, num_rows, width), 0, -1)
        )
    want, got = chained(by_butterfly, *args, tp=tp), chained(by_kernel, *args, tp=tp)
    assert_same(got, want, f"{num_rows} rows of {width} on {tp} ranks")


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(("num_rows", "width", "num_leaves"), [(1, 4096, 4), (128, 1024, 1)])
def test_exchange_of_parts_is_bitwise_mesh_invariant(num_rows, width, num_leaves, tp):
    """Of float32 activations: by the kernel, by the butterfly, and on one rank."""
    args = operands(num_rows, width, num_leaves, tp, F32)
    leaves, residual, bias, gain = args
    own = np.asarray(leaves[0], np.float32)
    terms = own.reshape(-1, *own.shape[-2:])  # parts, and leaves of ranks
    assert_order_sensitive(np.moveaxis(terms, 0, -1))
    want, got = chained(by_butterfly, *args, tp=tp), chained(by_kernel, *args, tp=tp)
    assert_same(got, want, f"{num_rows} rows of {width} in parts on {tp} ranks")
    for i in range(CHAIN):
        whole = leaves[i].reshape(-1, *leaves.shape[3:])
        residual, out = combine_add_rms_norm(whole, residual, bias, gain, eps=EPS, **ON)
        assert_bitwise_equal(got[1][0, i], out, claim=f"exchange {i}: one rank's bits")
    early = leaves[:, :, :, 2] + leaves[:, :, :, 1] + leaves[:, :, :, 0]
    early = jnp.zeros_like(leaves).at[:, :, :, 0].set(early)
    assert count_different_bits(chained(by_kernel, early, *args[1:], tp=tp)[1], got[1])


@pytest.mark.invariance
def test_exchange_add_rms_norm_is_bitwise_batch_invariant():
    """A row alone has the bits that it has among others, with what others left in the slots."""
    leaves, residual, bias, gain = operands(128, 4096, 1)
    want = chained(by_kernel, leaves, residual, bias, gain)
    for low, high in ((0, 1), (127, 128), (60, 69)):
        part = (leaves[..., low:high, :], residual[low:high], bias, gain)
        got = chained(by_kernel, *part)
        assert_bitwise_equal(got[0], want[0][:, low:high], claim=f"rows {low} to {high} alone")
        assert_bitwise_equal(got[1], want[1][:, :, low:high], claim=f"rows {low} to {high} alone")


@pytest.mark.invariance
def test_every_value_can_be_exchanged():
    """Zeros of both signs, subnormals, infinities, and the NaN that marks an empty slot."""
    leaves, residual, bias, gain = operands(8, 1024, 1)
    words = np.array([0, 1 << 31, 1, 0x7F800000, 0xFFFFFFFF, 0x7FC00001, 0x007FFFFF], np.uint32)
    special = np.resize(words, leaves.shape).view(np.float32)
    special = np.where(np.arange(8)[:, None] < 4, special, np.asarray(leaves))
    args = (jnp.asarray(special), residual, bias, gain)
    assert_same(chained(by_kernel, *args), chained(by_butterfly, *args), "special values")


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("num_rows", [132, 512])
def test_scatter_add_rms_norm_is_bitwise_mesh_invariant(num_rows, dtype, tp):
    leaves, residual, bias, gain = operands(num_rows, 1024, 1, tp, dtype)
    first = leaves[0, :, 0]
    want = combine_add_rms_norm(first, residual, bias, gain, eps=EPS, **ON)
    step = jax.shard_map(
        lambda p, r, b, g: scatter_add_rms_norm(p[0], r, b, g, "tp", tp, eps=EPS, **ON),
        mesh=gpu_mesh(1, tp),
        in_specs=(P("tp"), P(), P(), P()),
        out_specs=(P("tp"), P()),
        check_vma=False,
    )
    got = jax.jit(step)(first, residual, bias, gain)
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a, b, claim=f"{num_rows} rows shared out over {tp} GPUs")


@pytest.mark.control
def test_control_rounded_partials_are_not_mesh_invariant():
    """psum of two float32 partials is their sum in either order; of bfloat16 ones it is not."""
    args = operands(8, 4096, 1)

    def rounded(shared, leaves, residual, bias, gain):
        total = lax.psum(leaves[0].astype(jnp.bfloat16), "tp").astype(jnp.float32)
        return add_rms_norm(total, residual, bias, gain, eps=EPS, **ON)

    assert count_different_bits(chained(rounded, *args)[1], chained(by_kernel, *args)[1]) > 0


@FOUR
@pytest.mark.control
def test_control_psum_of_four_ranks_is_not_mesh_invariant():
    args = operands(8, 4096, 1, 4)

    def summed(shared, leaves, residual, bias, gain):
        total = lax.psum(leaves[0], "tp")
        return add_rms_norm(total, residual, bias, gain, eps=EPS, **ON)

    got, want = (chained(finish, *args, tp=4)[1] for finish in (summed, by_kernel))
    assert count_different_bits(got, want) > 0


def wait(cycles, after):
    """Keep the GPU busy for so many clock cycles after `after` is there; returns `after`."""

    def body(cycles_gmem, after_gmem, out_gmem):
        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))
        def emit(ctx, cycles):
            text = (
                "{ .reg .u32 start, now; .reg .pred early; mov.u32 start, %clock;\n"
                "WAIT: mov.u32 now, %clock; sub.u32 now, now, start;\n"
                "setp.lt.u32 early, now, $0; @early bra WAIT; }"
            )
            void = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, [cycles.registers.item()], text, "r", has_side_effects=True)

        emit(cycles_gmem[0])
        out_gmem[0] = cycles_gmem[0]

    token = rows.run_kernel(
        body,
        (cycles, after),
        out=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid={"cta": 1},
        name="wait",
        is_interpreted=False,
    )
    # XLA cannot know that no delay is negative, so what follows depends on the kernel.
    return jnp.where(token[0] < 0, jnp.zeros_like(after), after)


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(
    ("num_rows", "num_iterations", "dtype"),
    [(3, 10000, BF16), (128, 2000, BF16), (3, 5000, F32), (128, 1000, F32)],
)
def test_exchange_holds_when_ranks_drift_apart(num_rows, num_iterations, dtype, tp):
    """Random delays on each rank, up to several exchanges long; every result is checked."""
    width = 1024
    leaves, residual, bias, gain = operands(num_rows, width, 1, dtype=dtype)
    shape, word = leaves.shape[3:], jnp.dtype(f"uint{8 * dtype.itemsize}")

    def value(i, rank):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), i), rank)
        bits = jax.random.bits(key, shape, jnp.uint32)
        return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24) - jnp.float32(0.5)

    def rank(shared, residual, bias, gain):
        me = lax.axis_index("tp")

        def one(i, carry):
            wrong, previous = carry
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(8), i), me)
            cycles = jax.random.randint(key, (1,), -20000, 20000, jnp.int32)
            delayed = wait(jnp.maximum(cycles, 0), previous)
            every = jnp.stack([value(i, rank) for rank in range(tp)])
            own = lax.dynamic_index_in_dim(every, me)
            got = exchange_add_rms_norm(shared, own, delayed, bias, gain, eps=EPS, **ON)
            want = combine_add_rms_norm(every, delayed, bias, gain, eps=EPS, **ON)
            for a, b in zip(got, want, strict=True):
                a, b = (lax.bitcast_convert_type(x, word) for x in (a, b))
                wrong += jnp.sum(a != b, dtype=jnp.int32)
            return wrong, got[1]

        wrong, _ = lax.fori_loop(0, num_iterations, one, (jnp.int32(0), residual))
        return gather_ranks(wrong)

    step = jax.shard_map(
        rank,
        mesh=gpu_mesh(1, tp),
        in_specs=(EXCHANGE_SPECS, P(), P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    shared = exchange(width, tp=tp, dtype=dtype)
    wrong = np.asarray(jax.jit(step)(shared, residual, bias, gain))
    assert wrong.tolist() == [0] * tp, f"{wrong} elements in {num_iterations} exchanges"


@pytest.mark.invariance
def test_a_process_for_each_gpu_has_the_bits_of_one_gpu():
    """Two processes, which exchange through NCCL, and one GPU of this process."""
    path = Path(__file__).with_name("worker.py")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    job = {"coordinator": f"localhost:{port}", "num_processes": 2, "devices": 1, "mesh": [1, 2]}
    processes = [
        subprocess.Popen(
            [sys.executable, str(path), json.dumps({**job, "process_id": i, "backend": "sm90"})],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # also of a plain checkout
                "CUDA_VISIBLE_DEVICES": str(i),
                "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    worker = runpy.run_path(str(path))
    want = worker["make_engine"]((1, 1), "sm90").generate(worker["requests"](changed=False))
    try:
        (out, errors), _ = (process.communicate(timeout=120) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors[-2000:]
    assert json.loads(out) == [completion.digest() for completion in want]


@pytest.mark.invariance
@pytest.mark.parametrize(
    "mesh",
    [(1, 2), (2, 1), *(pytest.param(mesh, marks=FOUR) for mesh in ((1, 4), (2, 2), (4, 1)))],
    ids=str,
)
@pytest.mark.parametrize(
    ("experts", "compute_dtype"),
    [(None, "bfloat16"), ((16, 4), "bfloat16"), (None, "float32")],
    ids=["dense", "experts", "float32"],
)
def test_answers_are_bitwise_mesh_invariant(mesh, experts, compute_dtype):
    """Whole answers, prompts longer and shorter than what is shared out over ranks."""
    from detjax.serving.request import Request, SamplingParams

    dp, tp = mesh
    config = dummy_config(
        num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512, intermediate_size=1536,
        vocab_size=1024, experts=experts, expert_width=256,
    )  # fmt: skip
    rng = np.random.default_rng(5)
    asked = [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 1000, length)),
            sampling=SamplingParams(max_tokens=8, temperature=temperature, seed=length),
        )
        for length, temperature in ((5, 0.0), (130, 0.8), (300, 1.0), (1, 0.0), (64, 0.5))
    ]
    shape = {"prefill_chunk": 256, "max_len": 512}
    of = {"profile": NumericsProfile(compute_dtype=compute_dtype), **ON}
    want = answers(dummy_model(config, **of), asked, batch_size=1, **shape)
    got = answers(dummy_model(config, dp=dp, tp=tp, **of), asked, batch_size=4, **shape)
    assert [c.digest() for c in got] == [c.digest() for c in want]
