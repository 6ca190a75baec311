# SPDX-License-Identifier: Apache-2.0
"""The number of drafts that was quickest at a load is chosen, and trials cost little."""

import dataclasses
import itertools

import numpy as np
import pytest

from detjax.engine.scheduling.draft_choice import DraftChoice


@dataclasses.dataclass
class Machine:
    """Steps whose time follows from the load and the drafts, and drafts that may be right."""

    step_s: float = 0.01
    verify_s: float = 0.012
    draft_s: float = 0.001
    acceptance: float = 0.7
    noise: float = 0.1
    total_s: float = 0.0
    tokens: float = 0.0

    def __post_init__(self):
        self.rng = np.random.default_rng(0)

    def run(
        self, choice: DraftChoice, steps: int, num_decoding: int = 4, *, is_noted: bool = True
    ) -> list[int]:
        made = []
        for _ in range(steps):
            drafts = choice.choose(num_decoding, has_prefill=not is_noted)
            right = self.rng.random((num_decoding, max(drafts, 1))) < self.acceptance
            accepted = np.cumprod(right, axis=1).sum() if drafts else 0
            seconds = self.verify_s + drafts * self.draft_s if drafts else self.step_s
            seconds *= 1 + self.noise * self.rng.random()
            tokens = int(num_decoding + accepted)
            if is_noted:
                choice.note(num_decoding, drafts, seconds=seconds, tokens=tokens)
            self.total_s += seconds
            self.tokens += tokens
            made.append(drafts)
        return made

    def rate_without(self, num_decoding: int = 4) -> float:
        return num_decoding / (self.step_s * (1 + self.noise / 2))


def batch_s(choice: DraftChoice, batch: int, acceptance: float, rng) -> float:
    """Seconds of answers of 256 tokens. Each step reads one prompt, until `batch` decode; an H200's
    steps took about this long, with `5 * batch` rows too."""
    left, waiting, seconds, has_prefill = np.zeros(0, int), batch, 0.0, False
    while waiting or left.size:
        drafts = choice.choose(left.size, has_prefill=has_prefill) if left.size else 0
        has_prefill = waiting > 0
        right = rng.random((left.size, drafts)) < acceptance
        made = np.minimum(1 + np.cumprod(right, axis=1).sum(axis=1), left)
        step_ms = np.interp(left.size, [1, 8, 64, 256], [2.6, 2.6, 6.2, 13.0])
        step_ms += 0.0117 * left.size * drafts + 5.0 * has_prefill
        if left.size and not has_prefill:
            tokens = int(made.sum())
            choice.note(left.size, drafts, seconds=float(step_ms) / 1e3, tokens=tokens)
        left = left - made
        left = left[left > 0]
        if waiting:
            left, waiting = np.append(left, 256), waiting - 1
        seconds += step_ms / 1e3
    return seconds


def ratio_to_none(batch: int, acceptance: float, *, batches: int = 6) -> float:
    """How much quicker some batches are with drafts that are chosen, the first among them."""
    rng, choice = np.random.default_rng(0), DraftChoice((0, 2, 4))
    base_s = batches * batch_s(DraftChoice((0,)), batch, 0.0, rng)
    return base_s / sum(batch_s(choice, batch, acceptance, rng) for _ in range(batches))


@pytest.mark.parametrize("batch", [1, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("acceptance", [0.07, 0.2, 0.4])
def test_drafts_cost_less_than_two_in_a_hundred_from_the_first_batch_on(batch, acceptance):
    assert ratio_to_none(batch, acceptance) > 0.98


@pytest.mark.parametrize(("batch", "least"), [(1, 2.0), (8, 1.8), (64, 1.2), (256, 1.05)])
def test_good_drafts_are_quicker_at_every_load(batch, least):
    assert ratio_to_none(batch, 0.74) > least


def test_a_large_load_begins_without_drafts_and_a_small_one_with_the_most():
    assert [DraftChoice((0, 2, 4)).choose(n) for n in (1, 31, 32, 256)] == [4, 4, 0, 0]
    choice = DraftChoice((0, 2, 4))
    assert set(Machine().run(choice, 100, num_decoding=4)[-20:]) == {4}
    assert choice.choose(64) == 0, "a small load tells nothing of a large one"
    large = DraftChoice((0, 2, 4))
    Machine().run(large, 20, num_decoding=64)
    assert large.choose(4) == 4, "nor does one that has tried nothing"


def test_a_step_that_prefills_makes_no_trial():
    choice = DraftChoice((0, 3))
    assert choice.choose(4, has_prefill=True) == 0 and choice.choose(4) == 3
    machine = Machine(acceptance=0.0)
    machine.run(choice, 100)
    while choice.choose(4) == 0:
        machine.run(choice, 1)
    assert choice.choose(4, has_prefill=True) == 0 and choice.choose(4) == 3


def test_good_drafts_are_made_and_as_many_as_pay():
    assert Machine().run(DraftChoice((0, 1, 3)), 400)[-50:].count(3) > 40
    dear = Machine(verify_s=0.01, draft_s=0.003, acceptance=0.5)
    assert dear.run(DraftChoice((0, 1, 3)), 400)[-50:].count(1) > 40


@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("verify_s", [0.012, 0.02, 0.1])
def test_bad_drafts_cost_less_than_two_in_a_hundred(acceptance, verify_s):
    machine, choice = Machine(acceptance=acceptance, verify_s=verify_s), DraftChoice((0, 1, 3))
    machine.run(choice, 100)  # what is not known yet is tried once
    machine.total_s = machine.tokens = 0.0
    made = machine.run(choice, 6000)
    assert machine.tokens / machine.total_s > 0.98 * machine.rate_without()
    assert made.count(0) > 0.9 * len(made)


def test_drafts_that_become_good_are_made_again_and_bad_ones_left():
    machine, choice = Machine(acceptance=0.0), DraftChoice((0, 3))
    assert machine.run(choice, 300)[-1] == 0
    machine.acceptance = 0.9
    assert 3 in machine.run(choice, 4000)[-100:]
    machine.acceptance = 0.0
    assert machine.run(choice, 200)[-50:].count(0) > 40


def test_each_load_has_its_own_choice_and_begins_with_that_of_a_smaller_one():
    choice, cheap, dear = DraftChoice((0, 3)), Machine(), Machine(verify_s=0.1)
    cheap.run(choice, 200, num_decoding=1)
    assert choice.choose(8) == 3
    dear.run(choice, 200, num_decoding=8)
    assert choice.choose(1) == 3 and choice.choose(15) == 0
    assert set(choice.rates(8)) == {0, 3}


def test_loads_that_are_passed_in_a_few_steps_do_what_their_neighbours_do():
    """Prompts that are read raise the load, and no such step is noted."""
    choice, dear = DraftChoice((0, 2, 4)), Machine(verify_s=0.04)
    assert [choice.choose(2**i) for i in range(7)] == [4] * 5 + [0] * 2, "nothing is known yet"
    dear.run(choice, 1400, num_decoding=64)
    assert [choice.choose(2**i) for i in range(9)] == [0] * 9
    made = Machine().run(choice, 4000, num_decoding=1)
    assert made[-500:].count(0) < 50, "a load that lasts is tried"
    assert choice.choose(2) == 0 and choice.choose(128) == 0, "the fewer of both"


@pytest.mark.parametrize("verify_s", [0.02, 0.05])
def test_bad_drafts_cost_little_where_answers_begin_and_end_one_after_the_other(verify_s):
    """64 answers of 256 tokens, eight times. Four steps of prompts raise the load by eight, and
    answers end likewise. The first four times are not counted: there loads are tried."""
    choice, plain = DraftChoice((0, 2, 4)), Machine(noise=0.0)
    machine = Machine(acceptance=0.1, verify_s=verify_s, noise=0.0)
    for turn in range(12):
        if turn == 4:
            machine.total_s = machine.tokens = 0.0
        for load in [*range(8, 64, 8)]:
            machine.run(choice, 4, load, is_noted=False)
        machine.run(choice, 228, 64)
        for load in range(56, 0, -8):
            machine.run(choice, 4, load)
    plain_s = 8 * (228 + 14 * 4) * plain.step_s
    tokens = 8 * (228 * 64 + 2 * 4 * sum(range(8, 64, 8)))
    assert machine.tokens / machine.total_s > 0.98 * tokens / plain_s


def test_a_step_that_compiles_does_not_count():
    choice = DraftChoice((0, 3))
    for i in itertools.count():
        if choice.rates(1).keys() == {0, 3}:
            break
        slow = i % 5 == 0
        drafts = choice.choose(1)
        choice.note(1, drafts, seconds=10.0 if slow else 0.01, tokens=1 + drafts)
    assert choice.choose(1) == 3
    assert choice.rates(1)[3] == pytest.approx(400)


def test_steps_of_a_choice_before_do_not_count():
    choice = DraftChoice((0, 3))
    for _ in range(100):
        choice.note(1, 0, seconds=1.0, tokens=1)
    assert choice.rates(1) == {} and choice.choose(1) == 3
