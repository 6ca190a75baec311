# SPDX-License-Identifier: Apache-2.0
"""The compiled steps: one donated cache, updated in place, and no arithmetic but the kernels'."""

import dataclasses
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
import pytest

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import empty_pages, pages_shape
from detjax.engine.running.launch_operands import DecodeOperands, PrefillOperands, VerifyOperands
from detjax.engine.running.program_key import CHOICES, ChoiceKey, ProgramKey, ScoreKey
from detjax.engine.running.programs import ProgramCache
from detjax.pallas_kernels.backend import Backend
from detjax.testing import float_arithmetic_outside_kernels
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.programs import operands_for, plain_key, programs_for


def _copies_of(hlo: str, shape: tuple[int, ...]) -> list[str]:
    text = ",".join(map(str, shape))
    return [line for line in hlo.splitlines() if re.search(rf"= \w+\[{text}\]\S* copy\(", line)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "length"), [("decode", 1), ("prefill", 32)])
def test_step_does_not_copy_the_cache(kind, length):
    model = dummy_model(dummy_config())
    key = plain_key(kind, rows=2, length=length, table_len=2)
    compiled = programs_for(model, num_pages=5, num_slots=2).get(key, model.params)
    assert _copies_of(compiled.as_text(), pages_shape(model, 5).shape) == []
    assert "input_output_alias" in compiled.as_text()
    cache = empty_pages(model, 5)
    operands = operands_for(
        model, key,
        ids=np.asarray([[5] * length, [6] * length], np.int32),
        start=np.zeros(2, np.int32),
        table=np.asarray([[0, 1], [2, 3]], np.int32),
        sampling=[(SamplingParams(), 0)] * 2,
    )  # fmt: skip
    new, slots, *_ = compiled(model.params, model.rope_tables, cache, *operands)
    assert cache.is_deleted()
    assert not np.asarray(new[:, 4]).any()  # page 4 is nobody's
    assert np.asarray(new[:, 0, :, :, :length]).any()
    # Slots are written in place too, so that their addresses stay.
    assert operands[0].place.is_deleted() and operands[0].window.is_deleted()
    assert np.asarray(slots.place).tolist() == [length, length]  # windows of one


@pytest.mark.parametrize(("table_len", "length"), [(1, 1), (64, 1), (65, 512), (1024, 33)])
@pytest.mark.parametrize("num_tables", [1, 2])
@pytest.mark.parametrize("kind", [PrefillOperands, DecodeOperands, VerifyOperands])
def test_every_part_of_a_row_begins_where_a_kernel_may_read_it(kind, table_len, length, num_tables):
    sizes = {"table_len": table_len} | ({} if kind is DecodeOperands else {"length": length})
    packed = kind.padding(1, no_slot=7, num_tables=num_tables, **sizes).pack()
    columns = kind.num_columns(table_len=table_len, length=length, num_tables=num_tables)
    assert packed.shape == (1, columns)
    num_padding = length if kind is PrefillOperands else 0  # ids of -1
    assert packed.dtype == np.int32 and packed.sum() == 7 - num_padding
    operands = kind.unpack(packed, **sizes)
    at = packed.__array_interface__["data"][0]
    numbers, *parts = operands.slot, *operands.tables
    assert len(operands.tables) == num_tables
    parts += [] if kind is DecodeOperands else [operands.token_ids]
    for part in (numbers, *parts):
        assert (part.__array_interface__["data"][0] - at) % 256 == 0


@pytest.mark.parametrize("num_tables", [1, 2])
@pytest.mark.parametrize("kind", [PrefillOperands, DecodeOperands, VerifyOperands])
def test_operands_are_unpacked_as_they_were_packed(kind, num_tables):
    sizes = {"table_len": 70} | ({} if kind is DecodeOperands else {"length": 5})
    rng = np.random.default_rng(0)
    padding = kind.padding(3, no_slot=7, num_tables=num_tables, **sizes)
    fields = [field.name for field in dataclasses.fields(kind)]
    names = [name for name in fields if getattr(padding, name) is not None]
    assert len(names) == len(fields) - 2 + num_tables
    shapes = {name: getattr(padding, name).shape for name in names}
    drawn = kind(**{n: rng.integers(0, 1000, shapes[n]).astype(np.int32) for n in names})
    again = kind.unpack(drawn.pack(), **sizes)
    for name in names:
        assert (getattr(again, name) == getattr(drawn, name)).all(), name


@pytest.mark.control
def test_control_a_read_of_the_old_cache_is_seen_as_a_copy():
    shape = (3, 5, 7)

    def step(cache):
        new = cache.at[0].set(1.0)
        return new, cache.sum()

    compiled = jax.jit(step, donate_argnums=0).lower(jax.ShapeDtypeStruct(shape, "float32"))
    assert _copies_of(compiled.compile().as_text(), shape)


def engine_key(kind, *, mode="invariant") -> ProgramKey:
    length = {"prefill": 8, "decode": 1, "verify": 4}[kind]
    return ProgramKey(
        kind=kind, rows=2, length=length, table_len=2, mode=mode, weights="full",
        logit_rows=2 * length if kind == "verify" else 2,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["prefill", "decode", "verify"])
@pytest.mark.parametrize("backend", [Backend.PORTABLE, Backend.REFERENCE])
def test_engine_steps_do_no_arithmetic_outside_kernels(kind, backend):
    model = dummy_model(dummy_config(), tp=2, backend=backend)
    programs = ProgramCache(model, num_pages=6, num_slots=3, window_len=4)
    key = engine_key(kind)
    operands = programs.operands(key, model.params)
    function = programs.function(key)
    assert float_arithmetic_outside_kernels(function, *operands) == []

    def control(*args):
        function(*args)
        return args[4].temperature * 2.0

    assert float_arithmetic_outside_kernels(control, *operands) != []


def test_scores_of_a_prompt_take_no_arithmetic_outside_kernels():
    """In one block of rows, and in a loop over several."""
    model = dummy_model(dummy_config(), tp=2)
    programs = ProgramCache(model, num_pages=6, num_slots=3, window_len=4)
    for length in (8, 200):
        key = ScoreKey(rows=2, length=length, mode="invariant", num_top=4)
        program = programs._choices.program(key, model.params)
        assert float_arithmetic_outside_kernels(program.function, *program.operands) == []


@pytest.mark.parametrize("length", [1, 4])
def test_choice_programs_do_no_arithmetic_outside_kernels(length):
    model = dummy_model(dummy_config(), tp=2)
    programs = ProgramCache(model, num_pages=6, num_slots=3, window_len=4)
    for with_filters, num_top in CHOICES:
        key = ChoiceKey(rows=2, length=length, with_filters=with_filters, num_top=num_top)
        program = programs._choices.program(key, model.params)
        assert float_arithmetic_outside_kernels(program.function, *program.operands) == []


@pytest.mark.slow
def test_what_leaves_logits_writes_them_into_the_array_it_is_given():
    """A step of fewer rows than the choice program's too; nothing of the vocabulary is copied."""
    model = dummy_model(dummy_config())
    programs = ProgramCache(model, num_pages=6, num_slots=3, window_len=4)
    for rows in (2, 3):
        key = dataclasses.replace(engine_key("decode"), logit_rows=rows)
        text = programs.get(key, model.params).as_text()
        shape = programs.logits_shape(rows).shape
        assert not _copies_of(text, shape), rows


def test_a_program_is_compiled_once_whoever_asks_and_prefills_may_be_others(monkeypatch):
    """By threads at the same time; and programs of other candidates share what makes no draft."""
    compiled, model = [], dummy_model(dummy_config())

    def compile_slowly(self, key, params, asked):
        compiled.append((self, key))
        time.sleep(0.05)
        return partial(str)

    monkeypatch.setattr(ProgramCache, "_compile", compile_slowly)
    sizes = {"num_pages": 7, "num_slots": 3, "window_len": 4}
    own = ProgramCache(model, **sizes)
    drafted = ProgramCache(model, **sizes, others=own)
    keys = [engine_key(kind) for kind in ("prefill", "decode", "verify")]
    with ThreadPoolExecutor(max_workers=12) as pool:
        asked = [(its, key) for its in (drafted, own) * 2 for key in keys]
        got = list(pool.map(lambda ask: ask[0].get(ask[1], model.params), asked))
    assert got[:6] == got[6:]
    assert got[0] is got[3] and got[1] is not got[4] and got[2] is not got[5]
    assert len(compiled) == len(set(compiled)) == 5 and (drafted, keys[0]) not in compiled
    assert keys[0] in drafted and set(own) == set(drafted) == set(keys)


@pytest.mark.slow
def test_the_verify_step_does_not_copy_the_cache():
    model = dummy_model(dummy_config())
    programs = ProgramCache(model, num_pages=7, num_slots=3, window_len=4)
    compiled = programs.get(engine_key("verify"), model.params)
    assert _copies_of(compiled.as_text(), pages_shape(model, 7).shape) == []
    assert "input_output_alias" in compiled.as_text()
