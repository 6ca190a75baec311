# SPDX-License-Identifier: Apache-2.0
"""What the host sends for a decode step, and how many launches a drafted sequence costs."""

from functools import cache

import jax
import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.metrics import EngineStats
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.launch_operands import DecodeOperands
from detjax.engine.running.placed_rows import PlacedRows
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.running.programs import ProgramCache
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model

KEY = ProgramKey(
    kind="decode", rows=2, length=1, table_len=3, mode="fast", weights="full",
)  # fmt: skip
NUM, WINDOW, LENGTH = 4, 16, 97
"""Requests that run at once, tokens of a window, and of an answer: one, and six windows."""


def rows(*, page: int) -> np.ndarray:
    """A row that drafts, one whose tokens are committed, padding, and one that drafts."""
    return DecodeOperands(
        slot=np.array([5, 2, 9, 0], np.int32),
        is_draft=np.array([1, 0, 0, 1], np.int32),
        count=np.array([1, 1, 0, 1], np.int32),
        page_table=np.full((4, 3), page, np.int32),
    ).pack()


def test_rows_are_placed_when_they_are_told_twice():
    stats = EngineStats()
    placed = PlacedRows(make_mesh(1, 1, platform="cpu"), stats)
    pages, given = (7, 8, 8, 8, 7), []
    for page in pages:
        step = placed.step("full", page, lambda page=page: (KEY, rows(page=page)))
        given.append(placed.place(step))
    assert [isinstance(one, jax.Array) for one in given] == [False, False, True, True, False]
    assert given[2] is given[3] and stats.decode_transfers == 4
    for i, (one, page) in enumerate(zip(given, pages, strict=True)):
        assert_bitwise_equal(
            np.asarray(one), rows(page=page), claim=f"rows of step {i} are the host's"
        )


@cache
def model() -> LoadedModel:
    config = dummy_config(num_layers=1, hidden_size=64, intermediate_size=128, vocab_size=128)
    # Whose choices are those of canonical steps, so that no window rolls back.
    profile = NumericsProfile(
        weight_dtype="float32", compute_dtype="float32", attention_block=256, attention_split=256
    )
    return dummy_model(config, profile=profile)


_PROGRAMS: list[ProgramCache] = []


def served(mode: str, num_deterministic: int) -> tuple[Engine, dict[int, list[tuple]]]:
    """Requests that begin together; an engine that has answered them, and their answers."""
    config = EngineConfig(
        mode=mode, batch_size=NUM, prefill_chunk=16, max_len=256, verify_window=WINDOW,
        verify_rows=NUM, max_draft_fraction=1.0, max_prefill_streak=99, has_prefix_cache=False,
        self_check="off",
    )  # fmt: skip
    made = Engine(model(), config, programs=_PROGRAMS[0] if _PROGRAMS else None)
    _PROGRAMS[:] = [made.programs]
    sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    for i in range(NUM):
        is_deterministic = i < num_deterministic
        made.add_request([i + 1] * 16, sampling, is_deterministic=is_deterministic)
    answers: dict[int, list[tuple]] = {i: [] for i in range(NUM)}
    for output in made.drain():
        answers[output.request_id] += zip(output.token_ids, output.logprobs, strict=True)
    return made, answers


@pytest.mark.slow
@pytest.mark.parametrize("num_deterministic", quick_and_slow([NUM], [1]))
def test_a_drafted_sequence_costs_its_verifications_and_no_more(num_deterministic):
    """Of launches, and of what the host sends for them."""
    undrafted, canonical = served("invariant", NUM)
    drafted, told = served("dvr", num_deterministic)
    stats = drafted.stats()
    assert stats.num_rollbacks == 0 and stats.num_windows == 6 * num_deterministic
    # Windows that fill up together are verified together: six launches more, be it one or four.
    assert stats.verify_launches == 6
    # The engine without drafts is the control: a launch a prompt, and one a token behind it.
    assert undrafted.stats().num_launches == NUM + LENGTH - 1
    assert stats.num_launches <= NUM + LENGTH - 1 + 6
    # Twice, then they stay where they are; again for the last token, which no draft precedes.
    assert undrafted.stats().decode_transfers == 2
    assert stats.decode_transfers <= 2 + 2
    for i in range(num_deterministic):
        ids, logprobs = zip(*told[i], strict=True)
        want_ids, want_logprobs = zip(*canonical[i], strict=True)
        assert ids == want_ids
        assert_bitwise_equal(
            np.array(logprobs), np.array(want_logprobs), claim="drafted answers are canonical"
        )
