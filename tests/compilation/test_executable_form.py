# SPDX-License-Identifier: Apache-2.0
"""A program that is written and read again is the same program, and nothing in it is a pickle."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.compilation import executable_form, kept_executables
from detjax.compilation.executable_form import FormError, read_executable, write_executable
from detjax.compilation.kept_programs import keep_programs_of_build
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.linear.quantized import (
    CodeType,
    QuantizedMatrix,
    W8A8Matrix,
    pack_codes,
)
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import adjusted_requests, dummy_config, dummy_model

X = np.linspace(0, 1, 64, dtype=np.float32)


@pytest.fixture(autouse=True)
def compiled_here(cache_folder):
    """No program is read from the folder of the run: what was read cannot be written.

    On a busy machine a program of these tests may take long enough to be kept there.
    """
    jax.config.update("jax_compilation_cache_dir", None)


def compiled(step, *operands, **options):
    return jax.jit(step, **options).lower(*operands).compile()


def again(program, devices=None):
    return read_executable(write_executable(program), devices or jax.devices()[:1])


def test_trees_and_operands_that_are_not_used_come_back():
    def step(tree, unused, *, scale):
        return {"a": (tree["x"] * scale, None), "b": [tree["y"][0] + 1]}

    tree = {"x": X, "y": (jnp.int32(3), jnp.float32(1))}
    program = jax.jit(step).lower(tree, X, scale=2.0).compile()
    read = again(program)
    assert read.out_tree == program.out_tree and read.in_tree == program.in_tree
    for got, want in zip(
        jax.tree.leaves(read(tree, X, scale=2.0)),
        jax.tree.leaves(program(tree, X, scale=2.0)),
        strict=True,
    ):
        assert_bitwise_equal(got, want, claim="read")
    with pytest.raises(TypeError):
        read(tree, X[:3], scale=2.0)


def test_a_quantised_matrix_is_an_operand_that_comes_back():
    codes = np.random.default_rng(0).integers(0, 16, (64, 128), dtype=np.uint8)
    matrix = QuantizedMatrix(
        codes=pack_codes(codes, CodeType.INT4),
        scales=np.linspace(0.001, 0.02, 64, dtype=np.float32)[None],
        zeros=None, code_type=CodeType.INT4, group_len=0, has_small_scales=True,
    )  # fmt: skip
    program = compiled(lambda w: w.expand() * 2, matrix)
    read = again(program)
    assert read.in_tree == program.in_tree
    assert_bitwise_equal(read(matrix), program(matrix), claim="read")
    other = dataclasses.replace(matrix, has_small_scales=False)
    with pytest.raises(TypeError):
        read(other)


@pytest.mark.parametrize("bound", [0.0, 0.1, 1200.0])
def test_a_matrix_for_8_bit_rows_is_an_operand_that_comes_back(bound):
    """Its static fields are a float and an enumeration; one bit of the float is another program."""
    matrix = W8A8Matrix(
        values=jnp.ones((32, 64), jnp.int8), scales=jnp.ones(32, jnp.float32), row_bound=bound
    )
    program = compiled(lambda w: w.values.sum(), matrix)
    read = again(program)
    assert read.in_tree == program.in_tree
    assert_bitwise_equal(read(matrix), program(matrix), claim="read")
    with pytest.raises(TypeError):
        read(dataclasses.replace(matrix, row_bound=np.nextafter(bound, 2000.0).item()))


def test_other_bytes_are_refused():
    held = write_executable(compiled(jnp.sin, X))
    for wrong in (b"", held[:7], held[:200], b"\xff" * 8 + held[8:]):
        with pytest.raises((FormError, json.JSONDecodeError)):
            read_executable(wrong, jax.devices()[:1])
    with pytest.raises(FormError, match="of other devices"):
        read_executable(held, jax.devices()[1:2])


def test_no_other_class_is_made_than_a_dataclass_of_the_package():
    for module, name in (
        ("os", "system"),
        ("detjax.compilation.source", "os"),
        ("detjax.compilation.source", "TOOLCHAIN"),
    ):
        with pytest.raises(FormError):
            executable_form._tree({"class": [], "static": [], "module": module, "name": name})
        static = {"module": module, "enum": name, "member": "INT4"}
        with pytest.raises((FormError, TypeError)):
            executable_form._static_example(static)


def test_what_json_cannot_describe_is_refused(monkeypatch):
    program = compiled(jnp.sin, X)
    monkeypatch.setattr(
        executable_form, "_aval_values", lambda aval, mesh: [[1], "int8", False, False]
    )
    with pytest.raises(FormError, match="cannot be described"):
        write_executable(program)


def test_a_constant_of_the_trace_is_refused():
    big = jnp.arange(4096.0)
    program = compiled(lambda x: x + big[:64], X)
    if program._params.const_args:
        with pytest.raises(FormError):
            write_executable(program)
    else:
        assert_bitwise_equal(again(program)(X), program(X), claim="a constant in the executable")


SETTINGS = {
    "two ranks, two replicas": ({}, {"batch_size": 4}, {"dp": 2, "tp": 2}),
    "experts": ({"experts": (4, 2)}, {}, {}),
    "dvr with int8": ({}, {"mode": "dvr", "draft_weights": "int8", "max_draft_fraction": 1.0}, {}),
    "fast": ({}, {"mode": "fast"}, {}),
    "float32": ({}, {}, {"profile": NumericsProfile(compute_dtype="float32")}),
    "prompt lookup": ({"window": 64}, {"has_prompt_lookup": True}, {"tp": 2}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_every_program_of_an_engine_is_kept_and_read(name, cache_folder, caplog):
    caplog.set_level("DEBUG", kept_executables.__name__)
    keep_programs_of_build(cache_folder / "kept")
    dims, sizes, mesh = SETTINGS[name]
    config = EngineConfig(
        **{"batch_size": 2, "max_len": 256, "prefill_chunk": 64, "self_check": "off"} | sizes
    )
    requests = adjusted_requests(vocab_size=320, max_tokens=10)
    requests += [
        Request(
            prompt_token_ids=(5, 6, 7, 5, 6, 7),
            sampling=SamplingParams(max_tokens=8, prompt_logprobs=2, top_k=3, temperature=1.0),
        )
    ]
    if config.mode == "fast":
        requests = [dataclasses.replace(r, is_deterministic=False) for r in requests]
    made = []
    for _ in range(2):
        model = dummy_model(dummy_config(num_layers=1, **dims), **mesh)
        made.append(Engine(model, config).generate(requests))
        said = [record.getMessage().split()[0] for record in caplog.records]
        caplog.clear()
        assert set(said) == {"kept" if len(made) == 1 else "read"}
    assert made[0] == made[1]
    for file in (cache_folder / "kept").rglob("executable-*-cache"):
        # A digest, then a length and JSON: nothing of it is a pickle, which runs what it says.
        held = file.read_bytes()[hashlib.sha256().digest_size :]
        length = int.from_bytes(held[:8], "little")
        assert json.loads(held[8 : 8 + length]).keys() >= {"devices", "args", "out_tree"}
