# SPDX-License-Identifier: Apache-2.0
"""After `compile`, no request makes JAX compile anything, whatever it asks for."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import jax
import numpy as np
import pytest

from detjax.compilation import kept_executables
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.programs import ProgramCache
from detjax.engine.sampling.grammars import Grammars
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel
from detjax.testing.adapters import random_adapter
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model

VOCAB, MAX_LEN = 4096, 128
COMPILED = "/jax/core/compile/backend_compile_duration"
FORM = StructuredOutput(kind="regex", spec="[a-z ]{3,9}")

KINDS = (
    {}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.1}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5},
    {"frequency_penalty": 0.3, "temperature": 0.9}, {"logit_bias": ((5, 2.0), (9, -3.0))},
    {"bad_words_token_ids": ((4,), (5, 6))}, {"allowed_token_ids": tuple(range(0, VOCAB, 3))},
    {"min_tokens": 2, "stop_token_ids": (7, 8)}, {"logprobs_mode": "processed", "temperature": 0.7},
    {"logprobs": 1}, {"logprobs": 20}, {"logprobs": 64, "top_p": 0.5},
    {"prompt_logprobs": 0}, {"prompt_logprobs": 3}, {"prompt_logprobs": 64},
    {"max_tokens": 0, "prompt_logprobs": 1}, {"n": 3, "temperature": 1.0},
    {"structured_output": FORM}, {"seed": 2**63 + 1, "temperature": 1.3, "top_p": 0.7, "top_k": 5},
)  # fmt: skip


TWO_SIZES = {"batch_size": 4, "decode_batches": (1,)}
"""Programs for one row and for four."""

DRAFTED = TWO_SIZES | {
    "draft_weights": "draft_model", "max_draft_batch": 2, "verify_window": 4, "verify_patience": 0,
}  # fmt: skip
"""Drafts of a draft model, for some of the time."""


@dataclass
class Compilations:
    """How many programs XLA has compiled since it was made."""

    count: int = 0
    is_over: bool = False
    names: list[str] = field(default_factory=list)

    def __call__(self, event: str, duration: float, **named) -> None:
        if event == COMPILED and not self.is_over:
            self.count += 1
            self.names.append(str(named.get("fun_name", "?")))


@contextlib.contextmanager
def counted() -> Iterator[Compilations]:
    found = Compilations()
    jax.monitoring.register_event_duration_secs_listener(found)
    try:
        yield found
    finally:
        found.is_over = True


_PREPARED: list[ProgramCache] = []
"""Of an engine of the default sizes on which all programs were compiled."""


@cache
def model() -> LoadedModel:
    config = dummy_config(num_layers=1, vocab_size=VOCAB)
    return dummy_model(dataclasses.replace(config, eos_token_ids=(0,)))


def engine(programs: ProgramCache | None = None, **changes) -> Engine:
    folder = bundled_model_path()
    grammars = Grammars((folder / "tokenizer.json").read_text, vocab_size=VOCAB, eos_token_ids=(0,))
    config = EngineConfig(**{"batch_size": 2, "prefill_chunk": 32, "max_len": MAX_LEN} | changes)
    return Engine(model(), config, grammars=grammars, programs=programs, draft_model=model())


def ask(made: Engine, rng: np.random.Generator, count: int) -> int:
    """Put so many requests of every kind to an engine, in bursts of every size; sequences asked."""
    num_asked = 0
    while count > 0:
        burst = min(count, int(rng.integers(1, 9)))
        count -= burst
        for _ in range(burst):
            kind = KINDS[num_asked % len(KINDS)]
            prompt = rng.integers(1, VOCAB, int(rng.integers(1, 70))).tolist()
            sampling = SamplingParams(**{"max_tokens": int(rng.integers(2, 6))} | kind)
            made.add_request(prompt, sampling)
            num_asked += 1
        for output in made.drain():
            assert output.finish_reason is not FinishReason.ERROR, output.error
    return num_asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "count"),
    quick_and_slow(
        [({}, 70)],
        [
            (TWO_SIZES, 2000),
            (TWO_SIZES | {"prefill_shapes": ((2, 32),), "decode_lens": (64,)}, 2000),
            ({"mode": "dvr", "max_draft_fraction": 0.6, "verify_window": 4}, 400),
            ({"has_prompt_lookup": True, "verify_window": 4}, 400),
            ({"mode": "dvr", "decode_steps": 3, "verify_window": 4}, 400),
            (DRAFTED, 400),
            (DRAFTED | {"mode": "dvr", "decode_steps": 2}, 400),
        ],
    ),
    ids=str,
)
def test_no_kind_of_request_compiles_a_program(changes, count):
    made = engine(**changes)
    made.compile()
    num_compiled = made.programs.num_compiled
    with counted() as found:
        assert ask(made, np.random.default_rng(3), count) == count
    assert found.names == []
    assert made.programs.num_compiled == num_compiled == made.stats().num_compiled
    assert made.self_check_error == ""
    if not changes:
        _PREPARED.append(made.programs)


@pytest.mark.slow
@pytest.mark.control
def test_control_an_engine_that_was_not_prepared_compiles_while_requests_wait(monkeypatch):
    # A command that another test ran in this process keeps programs from then on.
    monkeypatch.setattr(kept_executables, "_folder_for", lambda devices: None)
    made = engine()
    with counted() as found:
        ask(made, np.random.default_rng(3), len(KINDS))
    assert found.count >= made.programs.num_compiled > 4


@pytest.mark.slow
@pytest.mark.parametrize(("is_compiled", "max_loras"), [(True, 3), (False, 5)])
def test_the_first_request_of_an_adapter_compiles_nothing(is_compiled, max_loras):
    """The control is an engine on stacks of another shape that was not told to compile."""
    sizes = AdapterSizes(max_loras=max_loras, max_lora_rank=128)
    room = open_adapters(model(), sizes)
    made = Engine(room, EngineConfig(batch_size=2, prefill_chunk=32, max_len=MAX_LEN))
    if is_compiled:
        made.compile()
    adapter = random_adapter(room.config, seed=1, rank=4)
    with counted() as found:
        made.add_request((3, 5), SamplingParams(max_tokens=4), adapter=made.add_adapter(adapter))
        *_, output = made.drain()
    assert output.finish_reason is FinishReason.LENGTH
    assert (found.names == []) is is_compiled
    assert any("install" in name for name in found.names) is not is_compiled, found.names


@pytest.mark.slow
def test_the_number_of_programs_follows_from_sizes_and_modes_alone():
    """Nothing that a request says is in the name of one."""
    made = engine(*_PREPARED)
    made.compile()
    decodes, tables, prefills, choices, scores = 1, 1, 1, 1, 2
    assert made.programs.num_compiled == (
        decodes * tables + 2 * prefills + 3 * choices + scores * prefills + 1
    ), json.dumps([key.name for key in made.programs])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "kinds", "num_spare"),
    quick_and_slow(
        [({}, ({}, {"temperature": 1.0, "top_k": 7, "n": 3}), 0)],
        [
            (TWO_SIZES | changes, kinds, num_spare)
            for changes, kinds, num_spare in (
                ({}, ({}, {"temperature": 1.0, "top_k": 7, "n": 3}), 0),
                ({}, ({},), 0),
                ({"prefill_shapes": ((2, 32),)}, ({"logprobs": 3},), 1),
                ({}, ({"presence_penalty": 0.5}, {"logprobs": 3}), 0),
                ({}, ({"prompt_logprobs": 3},), 0),
                ({"mode": "dvr", "verify_window": 4}, ({},), 0),
                ({"mode": "dvr", "verify_window": 4}, ({"structured_output": FORM}, {}), 1),
                ({"has_prompt_lookup": True, "verify_window": 4}, ({},), 2),
                (DRAFTED, ({},), 0),
                (DRAFTED, ({}, {"structured_output": FORM}), 1),
            )
        ],
    ),
    ids=str,
)  # fmt: skip
def test_what_known_requests_need_is_compiled_ahead(changes, kinds, num_spare):
    """All of it, and few programs more: which of two sizes runs depends on when a sequence ends."""
    made, other, told = engine(**changes), engine(**changes), []
    requests = [
        Request(
            prompt_token_ids=(3, 5, 7, 11, *range(20, 20 + i)),
            sampling=dataclasses.replace(SamplingParams(max_tokens=12), **kinds[i % len(kinds)]),
        )
        for i in range(2 * len(kinds))
    ]
    made.compile(lambda name, done, total: told.append((done, total)), requests)
    count = made.programs.num_compiled
    assert told == [(i + 1, count) for i in range(count)]
    made.generate(requests)
    assert made.programs.num_compiled == count
    other.generate(requests)
    used = {key.name for key in other.programs}
    spare = sorted({key.name for key in made.programs} - used)
    assert len(spare) == num_spare, spare
