# SPDX-License-Identifier: Apache-2.0
"""The page pool as a state machine: no page is lost, doubled or freed while in use."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from detjax.serving.kv_cache import PagePool

NUM_PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    """Sequences take, share and give back; a list of lists is the model."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def take(self, count):
        free = self.pool.num_free
        if count > free:
            with pytest.raises(MemoryError, match=f"{count} pages wanted, {free} of 12 free"):
                self.pool.take(count)
            assert self.pool.num_free == free
        else:
            pages = self.pool.take(count)
            assert not set(pages) & {p for pages in self.held for p in pages}
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share_prefix(self, data):
        pages = data.draw(st.sampled_from(self.held))
        prefix = pages[: data.draw(st.integers(0, len(pages)))]
        self.pool.share(prefix)
        self.held.append(list(prefix))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data):
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.give_back(self.held.pop(index))

    @invariant()
    def every_page_is_free_or_held(self):
        in_use = {p for pages in self.held for p in pages}
        assert self.pool.num_free == NUM_PAGES - len(in_use)


TestPagePool = PoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_free_pages_cannot_be_shared_or_given_back():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.give_back([page])
    with pytest.raises(ValueError, match=f"page {page} was given back twice"):
        pool.give_back([page])
    with pytest.raises(ValueError, match=f"page {page} is free"):
        pool.share([page])
