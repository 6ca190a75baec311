# SPDX-License-Identifier: Apache-2.0
"""Kernels of lowered programs: one name for one kernel, compiled once in a process."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir

from detjax.compilation import donation, mosaic_kernels
from detjax.compilation.donation import compile_checked
from detjax.compilation.mosaic_kernels import KernelCompiler, drop_bytecode, share_kernels
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear
from detjax.pallas_kernels.rms_norm.api import rms_norm
from detjax.testing import assert_bitwise_equal

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
    return list(mosaic_kernels.kernel_calls(module.operation))


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
        (call,) = mosaic_kernels.kernel_calls(alone.operation)
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

    assert KernelCompiler().compile(share_kernels(lowered()), "H", compile_one) == set()
    assert len(tried) == 2


def bytecode(program: jax.stages.Lowered) -> list[int]:
    """Bytes of each call's kernel."""
    return [len(config_of(call)["module"].value_bytes) for call in calls_of(program)]


def test_the_bytecode_of_what_is_compiled_leaves_the_program():
    program = lowered()
    kernels = share_kernels(program)
    names, configs = hashes(program), [config_of(call) for call in calls_of(program)]
    before, text = bytecode(program), len(program.as_text())
    drop_bytecode(program, ())
    assert bytecode(program) == before and min(before) > 1000
    norm, product = names
    assert set(kernels) == {norm, product}
    drop_bytecode(program, {product})
    assert bytecode(program) == [before[0], 0] and hashes(program) == names
    drop_bytecode(program, {norm, product})
    assert bytecode(program) == [0, 0] and hashes(program) == names
    for call, held in zip(calls_of(program), configs, strict=True):
        left = {entry.name: entry.attr for entry in config_of(call)}
        assert left == {entry.name: entry.attr for entry in held} | {"module": left["module"]}
    assert len(program.as_text()) < 0.2 * text
    # JAX keeps what it has lowered, and may give it again.
    assert share_kernels(program) == {} and hashes(program) == names
    assert bytecode(program) == [0, 0]


@pytest.mark.parametrize("fails", [0, 1])
def test_a_kernel_that_was_not_compiled_keeps_its_bytecode(monkeypatch, fails):
    """Its program compiles it, and says what is wrong with it."""
    program, compiler, left = lowered(), KernelCompiler(), []

    def compile_kernels(kernels, devices):
        assert len(kernels) == 2
        failed = list(kernels.values())[fails]

        def compile_one(program: bytes) -> None:
            if program == failed:
                raise RuntimeError("no ptxas")

        return compiler.compile(kernels, "H", compile_one)

    class Stopped(Exception):
        pass

    def stop(self, options):
        left.extend(zip(hashes(program), bytecode(program), strict=True))
        raise Stopped

    monkeypatch.setattr(donation, "compile_kernels", compile_kernels)
    monkeypatch.setattr(jax.stages.Lowered, "compile", stop)
    with pytest.raises(Stopped):
        compile_checked(program, {}, jax.devices()[:1])
    failed = list(dict.fromkeys(name for name, _ in left))[fails]
    assert {name for name, size in left if size} == {failed}


@pytest.mark.gpu
def test_a_program_without_bytecode_computes_the_same_on_hopper():
    """It runs with what jaxlib has compiled; where jaxlib has not, it is refused."""
    rng = np.random.default_rng(0)
    shapes = (8, 512), (512,), (512, 512)
    operands = [jnp.asarray(rng.standard_normal(shape), BF16) for shape in shapes]
    whole, without, unknown = lowered(), lowered(), lowered()
    names = share_kernels(without)
    share_kernels(unknown)
    drop_bytecode(unknown, names)
    # The control: a hash that jaxlib has not seen, and nothing to compile.
    for call in calls_of(unknown):
        held = {entry.name: entry.attr for entry in config_of(call)}
        with call.context, ir.Location.unknown():
            held["kernel_hash"] = ir.StringAttr.get(bytes(32))
            call.attributes["mhlo.backend_config"] = ir.DictAttr.get(held)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Mosaic GPU module"):
        unknown.compile()
    expected = whole.compile()(*operands)
    compiled = compile_checked(without, {}, jax.devices()[:1])
    assert bytecode(without) == [0, 0]
    assert_bitwise_equal(compiled(*operands), expected, claim="a program without bytecode")
