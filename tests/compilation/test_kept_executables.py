# SPDX-License-Identifier: Apache-2.0
"""Executables that are read under a name of what they are traced from."""

import contextlib
import json
import logging
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import detjax
from detjax.compilation import kept_executables
from detjax.compilation.kept_executables import Executable, compile_or_read, find_or_ask
from detjax.compilation.kept_programs import keep_programs, keep_programs_of_build, opened_folder
from detjax.compilation.xla_flags import EXACT_OPTIONS, FAST_OPTIONS
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running import device_arrays
from detjax.engine.scheduling import ngram
from detjax.models import abstract
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import dummy_config, dummy_model

ROOT = "detjax.engine.scheduling.ngram"
X = np.linspace(0, 1, 64, dtype=np.float32)


class Step:
    """A program that is traced from a constant of `ROOT`, as steps are from the package's."""

    def __init__(self):
        self.num_lowered = 0

    def compiled(
        self, *, shape=(64,), dtype=jnp.float32, device=0, options=EXACT_OPTIONS, traced_from=(),
        donate=(),
    ) -> Any:  # fmt: skip
        place = jax.devices()[device]
        sharding = SingleDeviceSharding(place)
        operand = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        def lower():
            self.num_lowered += 1
            scale = float(ngram.LONGEST)
            step = jax.jit(lambda x: jnp.sin(x) * scale + x, donate_argnums=donate)
            return step.lower(operand)

        program = Executable(
            options=options, operands=(operand,), devices=(place,), root=ROOT,
            traced_from=tuple(traced_from),
        )  # fmt: skip
        return compile_or_read(lower, program)

    def run(self, **options) -> np.ndarray:
        return np.asarray(self.compiled(**options)(X))


@pytest.fixture
def of_build(cache_folder):
    return keep_programs_of_build(cache_folder)


def kept(folder) -> list[Any]:
    return sorted(folder.glob("executable-*-cache"))


def test_what_was_kept_is_read_without_tracing(of_build):
    step = Step()
    want = step.run()
    assert (step.num_lowered, len(kept(of_build))) == (1, 1)
    assert_bitwise_equal(step.run(), want, claim="read")
    assert_bitwise_equal(Step().run(), want, claim="read by another")
    assert (step.num_lowered, len(kept(of_build))) == (1, 1)


def test_jax_does_not_keep_it_a_second_time(of_build):
    Step().run()
    assert not list(of_build.glob("jit__lambda*"))
    jax.block_until_ready(jax.jit(lambda x: x * 5 + 3)(X))
    assert list(of_build.glob("jit__lambda*")), "the probe: others are kept by JAX as before"


def test_what_jax_has_kept_of_the_same_program_is_not_kept_again(of_build):
    """XLA:CPU leaves functions out of what it writes of an executable that it has read."""
    want = Step().run()
    (first,) = kept(of_build)
    step = jax.jit(lambda x: jnp.sin(x) * float(ngram.LONGEST) + x)
    operand = jax.ShapeDtypeStruct(
        X.shape, X.dtype, sharding=SingleDeviceSharding(jax.devices()[0])
    )
    step.lower(operand).compile(EXACT_OPTIONS)
    assert list(of_build.glob("jit__lambda*")), "the probe: JAX has kept the program"
    first.unlink()
    for claim in ("compiled", "read"):
        assert_bitwise_equal(Step().run(), want, claim=claim)
    assert len(kept(of_build)) == 1


@pytest.mark.control
def test_control_an_executable_that_was_read_cannot_be_written(of_build, monkeypatch):
    monkeypatch.setattr(kept_executables, "compiled_anew", contextlib.nullcontext)
    step = jax.jit(lambda x: jnp.sin(x) * float(ngram.LONGEST) + x)
    operand = jax.ShapeDtypeStruct(
        X.shape, X.dtype, sharding=SingleDeviceSharding(jax.devices()[0])
    )
    step.lower(operand).compile(EXACT_OPTIONS)
    Step().run()
    with pytest.raises(jax.errors.JaxRuntimeError, match="not found"):
        Step().run()


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (8, 8)}, {"dtype": jnp.bfloat16}, {"options": FAST_OPTIONS}, {"device": 1},
        {"traced_from": (1,)}, {"traced_from": (True,)}, {"traced_from": ("1",)},
    ],
)  # fmt: skip
def test_another_program_is_not_read(of_build, other):
    step = Step()
    for _ in range(2):
        step.compiled()
        step.compiled(**other)
        assert step.num_lowered == 2
    assert len(kept(of_build)) == 2


@pytest.mark.parametrize("name", ["XLA_FLAGS", "MOSAIC_GPU_DUMP_PTX", "CUDA_VISIBLE_DEVICES"])
def test_the_environment_of_compilers_counts(of_build, monkeypatch, name):
    step = Step()
    step.compiled()
    monkeypatch.setenv(name, os.environ.get(name, "") + " ")
    step.compiled()
    assert step.num_lowered == 2
    monkeypatch.undo()
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/another")
    step.compiled()
    assert step.num_lowered == 2


def test_settings_of_jax_count(of_build):
    step = Step()
    step.compiled()
    with jax.default_matmul_precision("highest"):
        step.compiled()
        assert step.num_lowered == 2
    with jax.debug_nans(True):
        step.compiled()
        assert step.num_lowered == 3
    step.compiled()
    assert step.num_lowered == 3


def test_a_constant_that_was_set_counts(of_build, monkeypatch):
    step = Step()
    before = step.run()
    monkeypatch.setattr(ngram, "LONGEST", 20)
    got = step.run()
    assert step.num_lowered == 2
    np.testing.assert_array_equal(got, np.asarray(jax.jit(lambda x: jnp.sin(x) * 20.0 + x)(X)))
    monkeypatch.undo()
    assert_bitwise_equal(step.run(), before, claim="that of the constant as it was")
    assert step.num_lowered == 2


@pytest.mark.control
def test_control_without_the_hash_of_the_code_a_stale_program_runs(of_build, monkeypatch):
    monkeypatch.setattr(kept_executables, "loaded_code_hash", lambda *args, **options: "")
    step = Step()
    before = step.run()
    monkeypatch.setattr(ngram, "LONGEST", 20)
    assert_bitwise_equal(step.run(), before, claim="stale")
    assert step.num_lowered == 1


def test_what_changes_while_it_is_compiled_is_not_kept(of_build, monkeypatch):
    step = Step()
    plain = kept_executables.compile_checked

    def compile_and_change(lowered, options, devices):
        monkeypatch.setattr(ngram, "LONGEST", 20)
        return plain(lowered, options, devices)

    monkeypatch.setattr(kept_executables, "compile_checked", compile_and_change)
    step.compiled()
    assert not kept(of_build)


def test_another_build_has_a_folder_of_its_own(cache_folder, monkeypatch):
    from detjax.compilation import kept_programs

    step = Step()
    mine = keep_programs_of_build(cache_folder)
    step.compiled()
    monkeypatch.setattr(kept_programs, "compile_key", lambda: "another")
    other = keep_programs_of_build(cache_folder)
    assert other != mine
    step.compiled()
    assert step.num_lowered == 2


def test_nothing_is_kept_in_a_folder_that_is_not_of_a_build(cache_folder):
    keep_programs(cache_folder)
    assert opened_folder() is None
    step = Step()
    step.compiled()
    step.compiled()
    assert step.num_lowered == 2
    assert not kept(cache_folder)


def over_devices(order=(0, 1)) -> tuple[Any, list[int]]:
    """A program with a collective over two devices, and how often it was lowered."""
    devices = [jax.devices()[i] for i in order]
    mesh = jax.sharding.Mesh(np.array(devices), "x")
    spec = jax.sharding.PartitionSpec("x")
    operand = jax.ShapeDtypeStruct(
        (64,), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec)
    )
    lowered = []

    def rank(x):
        other = jax.lax.all_gather(x, "x", tiled=True)[::-1]
        return x + jax.lax.axis_index("x").astype(jnp.float32) + jnp.sum(other)

    def lower():
        lowered.append(1)
        step = jax.shard_map(rank, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(step).lower(operand)

    program = Executable(
        options=EXACT_OPTIONS, operands=(operand,), devices=tuple(devices), root=ROOT,
        traced_from=(),
    )  # fmt: skip
    compiled = compile_or_read(lower, program)
    return np.asarray(compiled(jax.device_put(X, operand.sharding))), lowered


def test_devices_of_one_process_read_what_they_share(of_build):
    want, lowered = over_devices()
    got, again = over_devices()
    assert (len(lowered), len(again)) == (1, 0)
    assert_bitwise_equal(got, want, claim="read by two devices")
    other, lowered = over_devices(order=(1, 0))
    assert len(lowered) == 1, "the order of devices is another program"
    assert_bitwise_equal(other, want, claim="the other order")


def test_nothing_is_kept_by_several_processes(of_build, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    Step().compiled()
    assert not kept(of_build)


def test_of_gpus_at_most_two_have_a_folder():
    assert kept_executables._is_proven(2, "gpu")
    assert not kept_executables._is_proven(4, "gpu")
    assert kept_executables._is_proven(4, "cpu")


def test_what_is_not_proven_is_not_kept(of_build, monkeypatch):
    monkeypatch.setattr(kept_executables, "_is_proven", lambda num_devices, platform: False)
    Step().compiled()
    assert not kept(of_build)


class Question:
    """Whether kernels take something, which takes long to find."""

    def __init__(self, answer: str | None = "too wide"):
        self.answer, self.num_asked = answer, 0

    def ask(self, *asked_of: Any) -> str | None:
        def ask():
            self.num_asked += 1
            return self.answer

        return find_or_ask(ask, root=ROOT, asked_of=asked_of)


@pytest.mark.parametrize("answer", [None, "too wide"])
def test_an_answer_is_kept_and_found(of_build, answer):
    question = Question(answer)
    for _ in range(2):
        assert question.ask(8192) == answer
    assert question.num_asked == 1
    assert question.ask(4096) == answer
    assert question.num_asked == 2, "another question"


def test_an_answer_of_other_code_is_not_found(of_build, monkeypatch):
    question = Question()
    question.ask(1)
    monkeypatch.setattr(ngram, "LONGEST", 20)
    question.answer = None
    assert question.ask(1) is None
    monkeypatch.setattr(ngram, "propose_from_prompt", lambda: 1)
    question.answer = "asked"
    for _ in range(2):
        assert question.ask(1) == "asked"
    assert question.num_asked == 4, "of a function that a test has put there nothing is kept"


def test_a_damaged_answer_is_asked_for_again(of_build):
    question = Question()
    question.ask()
    (file,) = of_build.glob("answer-*-cache")
    held = bytearray(file.read_bytes())
    held[-2] ^= 1
    file.write_bytes(held)
    with pytest.warns(UserWarning, match="not as it was written"):
        assert question.ask() == "too wide"
    assert question.num_asked == 2


def test_without_a_folder_of_a_build_all_is_asked_again(cache_folder):
    keep_programs(cache_folder)
    question = Question()
    assert [question.ask(), question.ask()] == ["too wide"] * 2
    assert question.num_asked == 2


@pytest.mark.slow
def test_whether_kernels_take_a_model_is_asked_once(of_build, monkeypatch):
    """By two processes, as far as the cache of this one is what would tell them apart."""
    config = dummy_config(hidden_size=256, num_heads=2, num_kv_heads=1, head_dim=128)
    profile, asked = NumericsProfile(), []
    plain = abstract._why_not_traced
    first = plain(config, profile, Backend.SM90, 1)
    for refuses in (False, True):
        abstract._why_not_here.cache_clear()
        with monkeypatch.context() as patch:
            if refuses:
                patch.setattr(jax, "eval_shape", lambda *args: asked.append(1))
            assert abstract.why_unsupported(config, profile, Backend.SM90, 1) == first
    abstract._why_not_here.cache_clear()
    assert not asked


def test_what_a_test_has_put_in_place_is_neither_read_nor_kept(of_build, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, kept_executables.__name__)
    step = Step()
    step.compiled(traced_from=(lambda drafts, positions: drafts,))
    assert not kept(of_build)
    assert "not kept: an argument" in caplog.text
    step.compiled()
    monkeypatch.setattr(ngram, "propose_from_prompt", lambda: 1)
    step.compiled()
    assert step.num_lowered == 3
    assert len(kept(of_build)) == 1


@pytest.mark.parametrize("damage", ["a bit", "short"])
def test_a_damaged_file_is_compiled_again(of_build, damage):
    step = Step()
    want = step.run()
    (file,) = kept(of_build)
    held = bytearray(file.read_bytes())
    held[len(held) // 2] ^= 4
    file.write_bytes(held if damage == "a bit" else held[:100])
    with pytest.warns(UserWarning, match="not as it was written"):
        assert_bitwise_equal(step.run(), want, claim="compiled again")
    assert_bitwise_equal(step.run(), want, claim="read again")
    assert step.num_lowered == 2


@pytest.mark.parametrize("content", [b"", b"no program", bytes(8), b"\2" + bytes(7) + b"{}x"])
def test_what_a_driver_does_not_load_is_compiled_again(of_build, content):
    step = Step()
    want = step.run()
    (file,) = kept(of_build)
    key = file.name.partition("-detjax-")[0]
    opened = opened_folder()
    assert opened is not None
    opened.put(key, content)
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert_bitwise_equal(step.run(), want, claim="compiled again")
    assert_bitwise_equal(step.run(), want, claim="read again")
    assert step.num_lowered == 2


def test_what_cannot_be_written_is_a_warning(of_build, monkeypatch):
    def put(self, key, value):
        raise OSError("no space left")

    monkeypatch.setattr(kept_executables.VerifiedCache, "put", put)
    with pytest.warns(UserWarning, match="is not kept: no space left"):
        Step().run()


def test_donation_comes_back_with_the_executable(of_build):
    for _ in range(2):
        x = jax.device_put(X, jax.devices()[0])
        Step().compiled(donate=0)(x)
        assert x.is_deleted()


@pytest.mark.slow
def test_an_llm_reads_every_program_of_the_one_before(cache_folder, caplog):
    """All that there are; the quick test below reads those of one request, in another process."""
    caplog.set_level(logging.DEBUG, kept_executables.__name__)

    def answer():
        llm = detjax.LLM("bundled", cache_dir=cache_folder, num_pages=4, batch_size=1, max_len=128,
                         show_progress=False)  # fmt: skip
        params = detjax.SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True)
        found = llm.generate(["The old house", "A"], params)
        llm.engine.compile()
        return [output.outputs[0].digest() for output in found], llm.engine.programs.num_compiled

    def said() -> list[str]:
        found = [
            record.getMessage().split()[0]
            for record in caplog.records
            if record.name == kept_executables.__name__
        ]
        caplog.clear()
        return found

    want, num_programs = answer()
    first = said()  # also programs that make the engine's arrays, which a process makes once
    assert set(first) == {"kept"} and len(first) >= num_programs > 2
    folder = opened_folder()
    assert folder is not None
    assert len(kept(folder.file("x").parent)) == len(first)
    assert answer() == (want, num_programs)
    second = said()
    assert set(second) == {"read"} and len(second) >= num_programs


STARTED = """
import collections, json, logging, sys
log = []
class Kept(logging.Handler):
    def emit(self, record): log.append(record.getMessage().split()[0])
logger = logging.getLogger("detjax.compilation.kept_executables")
logger.setLevel(logging.DEBUG); logger.addHandler(Kept())
import detjax
llm = detjax.LLM("bundled", cache_dir=sys.argv[1], num_pages=4, batch_size=1, max_len=128,
                 show_progress=False)
answer = llm.generate("The old house", detjax.SamplingParams(max_tokens=4))[0].outputs[0]
print(json.dumps([collections.Counter(log), answer.digest()]))
"""


@pytest.mark.slow
def test_a_process_reads_what_another_kept(tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = []
    for seed in "1", "2":
        ran = subprocess.run(
            [sys.executable, "-c", STARTED, str(tmp_path)],
            env=env | {"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True,
        )  # fmt: skip
        found.append(json.loads(ran.stdout))
    (first, want), (second, got) = found
    # Whether the backend takes the model is kept as well, and then answered from there.
    assert second.pop("answered") > 0
    assert first.keys() == {"kept"} and second == {"read": first["kept"]}
    assert got == want


@pytest.mark.slow
def test_programs_of_one_request_share_a_hash_of_the_code(of_build, monkeypatch):
    """What is kept is named again, by the code as it is by then."""
    asked: list[int | None] = []
    of_arrays: list[int | None] = []

    def hashed(root, *args, asked_by=asked, asked=None):
        if root == device_arrays.__name__:  # makes an array of the engine, and is kept too
            of_arrays.append(asked)
            return repr(args)
        asked_by.append(asked)
        return repr([arg for arg in args if hasattr(arg, "rows")])  # which program

    model = dummy_model(dummy_config())
    asked_for = [Request(prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=2, top_k=5))]
    config = EngineConfig(batch_size=1, max_len=64, prefill_chunk=32, self_check="off")
    monkeypatch.setattr(kept_executables, "loaded_code_hash", hashed)
    for has_kept in (False, True):
        engine = Engine(model, config)
        asked.clear()
        engine.compile(requests=asked_for)
        compiled = engine.programs.num_compiled
        assert compiled > 1 and len(kept(of_build)) == compiled + of_arrays.count(None)
        assert None not in asked
        moments = [moment for moment in asked if moment is not None]
        shared = [moment for moment in moments if moment == moments[0]]
        later = [moment for moment in moments if moment != moments[0]]
        assert len(shared) == compiled
        # What is compiled is named again behind it, each time by a moment of its own.
        assert len(later) == len(set(later)) == (0 if has_kept else compiled)
        assert all(moment > moments[0] for moment in later)
