# SPDX-License-Identifier: Apache-2.0
"""Kernels of lowered programs: one name for one kernel, compiled once in a process."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from detjax import mosaic_kernels
from detjax.mosaic_kernels import KernelCompiler, share_kernels
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear
from detjax.pallas_kernels.rms_norm.api import rms_norm

BF16 = jnp.dtype(jnp.bfloat16)


def lowered(num_rows: int = 8, num_out: int = 512) -> jax.stages.Lowered:
    """A norm and two calls of one product, compiled for no device."""

    def run(x, gain, w):
        x = rms_norm(x, gain, eps=1e-5, backend=Backend.SM90)
        product = [linear(x, w, out_dtype=BF16, backend=Backend.SM90) for _ in range(2)]
        return product[0] + product[1]

    shapes = (num_rows, 512), (512,), (num_out, 512)
    operands = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    return jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))


def hashes(program: jax.stages.Lowered) -> list[bytes]:
    """What jaxlib knows the kernels of a program by."""
    return [config_of(call)["kernel_hash"].value_bytes for call in calls_of(program)]


def calls_of(program: jax.stages.Lowered) -> list[Any]:
    module: Any = program.compiler_ir("stablehlo")
    return list(mosaic_kernels._kernel_calls(module.operation))


def config_of(call: Any) -> Any:
    return call.attributes["mhlo.backend_config"]


def test_programs_share_what_computes_the_same():
    first, again, wider = lowered(), lowered(), lowered(num_out=1024)
    assert not set(hashes(first)) & set(hashes(again))  # the control: as JAX leaves them
    one, two, three = share_kernels(first), share_kernels(again), share_kernels(wider)
    assert list(one) == list(two) and len(one) == 2
    assert set(hashes(first)) == set(one)
    assert len(set(one) & set(three)) == 1  # the norm
    assert first.as_text() == again.as_text()
    assert list(share_kernels(first)) == list(one)


def test_another_kernel_has_another_name():
    names = [set(share_kernels(lowered(num_rows))) for num_rows in (1, 8, 64)]
    assert not names[0] & names[1] and not names[1] & names[2] and not names[0] & names[2]


def test_a_program_without_kernels_stays_as_it_is():
    program = jax.jit(lambda x: x + 1).lower(1)
    before = program.as_text()
    assert share_kernels(program) == {} and program.as_text() == before


def test_each_kernel_is_compiled_once_and_waited_for():
    compiler, is_open, compiled = KernelCompiler(), threading.Event(), []

    def compile_one(program: bytes) -> None:
        is_open.wait(60)
        compiled.append(program)

    shared = [share_kernels(program) for program in (lowered(), lowered(), lowered(num_out=1024))]
    with ThreadPoolExecutor() as pool:
        done = [pool.submit(compiler.compile, kernels, "H", compile_one) for kernels in shared]
        assert not wait(done, timeout=0.2).done
        is_open.set()
        for each in done:
            each.result()
    assert len(compiled) == len({name for kernels in shared for name in kernels}) == 3
    compiler.compile(shared[0], "H", compile_one)
    assert len(compiled) == 3
    compiler.compile(shared[0], "another kind", compile_one)
    assert len(compiled) == 5


def test_what_is_compiled_is_the_call_alone():
    program, compiled = lowered(), []
    KernelCompiler().compile(share_kernels(program), "H", compiled.append)
    calls = calls_of(program)
    assert len(compiled) == 2
    for written in compiled:
        alone = ir.Module.parse(written, context=calls[0].context)
        (call,) = mosaic_kernels._kernel_calls(alone.operation)
        original = next(each for each in calls if config_of(each) == config_of(call))
        assert str(call.attributes["operand_layouts"]) == str(
            original.attributes["operand_layouts"]
        )
        assert [str(x.type) for x in call.operands] == [str(x.type) for x in original.operands]
        assert [str(x.type) for x in call.results] == [str(x.type) for x in original.results]


def test_what_cannot_be_compiled_is_left_to_its_program():
    tried = []

    def compile_one(program: bytes) -> None:
        tried.append(program)
        raise RuntimeError("no ptxas")

    KernelCompiler().compile(share_kernels(lowered()), "H", compile_one)
    assert len(tried) == 2
