# SPDX-License-Identifier: Apache-2.0
"""The argument at the head of `sm90_slots`, played out: ranks that run in any order lose no word.

Each rank runs the same launches, one after the other; the CTAs of a launch run side by side. A CTA
sends to the same region of every peer, then waits for each word there, takes it, empties its slot,
and counts. Who goes on next is drawn.
"""

from collections.abc import Iterator

import numpy as np
import pytest

EMPTY = None


class LostWordError(AssertionError):
    """A word was written where another still lay."""


class Rank:
    """One rank's memory."""

    def __init__(self, num_regions: int, num_words: int, num_ranks: int, num_slots: int):
        shape = (num_slots, num_regions, num_ranks, num_words)
        self.slots = np.full(shape, EMPTY, object)
        self.counts = [0] * num_regions


def cta(ranks: list[Rank], me: int, region: int, words: int, launch: int, log: list) -> Iterator:
    """A CTA's steps; after each another CTA may run."""
    own, num_slots = ranks[me], len(ranks[0].slots)
    slot = own.counts[region] % num_slots
    peers = [peer for peer in range(len(ranks)) if peer != me]
    for peer in peers:
        for word in range(words):
            place = slot, region, me, word
            if ranks[peer].slots[place] is not EMPTY:
                raise LostWordError(f"launch {launch}: rank {me} wrote over a word of {peer}'s")
            ranks[peer].slots[place] = launch
            yield
    for peer in peers:
        for word in range(words):
            place = slot, region, peer, word
            while own.slots[place] is EMPTY:
                yield
            log.append((launch, own.slots[place]))
            own.slots[place] = EMPTY
            yield
    own.counts[region] += 1


def rank_steps(ranks, me: int, launches: list[tuple[list[int], int]], log: list, rng) -> Iterator:
    """A rank's launches: (regions that it uses, words of each)."""
    for launch, (regions, words) in enumerate(launches):
        running = [cta(ranks, me, region, words, launch, log) for region in regions]
        while running:
            at = rng.integers(len(running))
            if next(running[at], "ended") == "ended":
                running.pop(at)
            yield


def play(seed: int, num_ranks: int, num_slots: int, launches) -> list[tuple[int, int]]:
    """Run all ranks to their end, in an order that is drawn; (launch, launch of the word) pairs."""
    rng = np.random.default_rng(seed)
    regions = 1 + max(region for some, _ in launches for region in some)
    words = max(count for _, count in launches)
    ranks = [Rank(regions, words, num_ranks, num_slots) for _ in range(num_ranks)]
    log: list[tuple[int, int]] = []
    running = [rank_steps(ranks, me, launches, log, rng) for me in range(num_ranks)]
    # Some ranks are much slower than others for a while.
    weights = rng.random(num_ranks) ** 4 + 1e-3
    turns = 0
    while running:
        turns += 1
        assert turns < 200_000, "somebody waits for ever"
        if turns % 200 == 0:
            weights = rng.random(num_ranks) ** 4 + 1e-3
        some = weights[: len(running)]
        at = rng.choice(len(running), p=some / some.sum())
        if next(running[at], "ended") == "ended":
            running.pop(at)
    return log


def drawn_launches(seed: int) -> list[tuple[list[int], int]]:
    """Launches of different sizes over the same regions, as batches of different sizes make."""
    rng = np.random.default_rng([seed, 1])
    return [(list(range(int(rng.integers(1, 4)))), int(rng.integers(1, 4))) for _ in range(12)]


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_word_is_that_of_its_own_launch(num_ranks):
    for seed in range(40):
        log = play(seed, num_ranks, 2, drawn_launches(seed))
        assert log and all(launch == word for launch, word in log)


@pytest.mark.control
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_control_single_slots_lose_words(num_ranks):
    lost = 0
    for seed in range(40):
        try:
            play(seed, num_ranks, 1, drawn_launches(seed))
        except LostWordError:
            lost += 1
    assert lost


@pytest.mark.control
def test_control_a_launch_that_waits_for_nobody_loses_words(monkeypatch):
    """Why every CTA waits for at least one word of each peer, however few rows there are."""
    plain = cta

    def careless(ranks, me, region, words, launch, log):
        if launch % 3 != 1:
            yield from plain(ranks, me, region, words, launch, log)
            return
        ranks[me].counts[region] += 1
        yield

    monkeypatch.setitem(globals(), "cta", careless)
    lost = 0
    for seed in range(40):
        try:
            log = play(seed, 2, 2, [([0, 1], 2)] * 24)
            lost += any(launch != word for launch, word in log)
        except LostWordError:
            lost += 1
    assert lost
