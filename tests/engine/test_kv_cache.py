# SPDX-License-Identifier: Apache-2.0
"""The page pool as a state machine: no page is lost, doubled, or given out while others read it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from detjax.engine.scheduling.kv_cache import PagePool
from detjax.engine.scheduling.prefix_cache import page_key

NUM_PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    """Sequences take, share, register, find and give back. What a page holds is its key here."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.num_keys = 0

    def users(self, page: int) -> int:
        return sum(page in pages for pages in self.held)

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        available = self.pool.num_available
        if count > available:
            says = f"{count} pages wanted, {available} of 12 available"
            with pytest.raises(MemoryError, match=says):
                self.pool.allocate(count)
            assert self.pool.num_available == available
            return
        evicted = self.pool.num_evicted
        free = available - self.pool.num_cached
        pages = self.pool.allocate(count)
        assert not any(self.users(page) for page in pages)
        # What is kept for others goes last.
        assert self.pool.num_evicted - evicted == max(0, count - free)
        for page in pages:
            self.content.pop(page, None)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share_prefix(self, data):
        pages = data.draw(st.sampled_from(self.held))
        prefix = pages[: data.draw(st.integers(0, len(pages)))]
        self.pool.share(prefix)
        self.held.append(list(prefix))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), is_new=st.booleans())
    def register(self, data, is_new):
        page = data.draw(st.sampled_from(sorted({p for pages in self.held for p in pages})))
        if page in self.content:
            with pytest.raises(ValueError, match=f"page {page} has another key"):
                self.pool.register(page, b"another")
            return
        self.num_keys += is_new
        key = page_key(b"", [self.num_keys])
        is_first = self.pool.find(key) is None
        assert self.pool.register(page, key) is is_first
        if is_first:
            self.content[page] = key

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def find_and_share(self, data):
        page, key = data.draw(st.sampled_from(sorted(self.content.items())))
        assert self.pool.find(key) == page
        self.pool.share([page])
        self.held.append([page])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.free(self.held.pop(index))

    @rule()
    def forget(self):
        self.pool.forget()
        self.content.clear()

    @invariant()
    def every_page_is_held_cached_or_free(self):
        in_use = {p for pages in self.held for p in pages}
        cached = set(self.content) - in_use
        assert self.pool.num_available == NUM_PAGES - len(in_use)
        assert self.pool.num_cached == len(cached)

    @invariant()
    def keys_lead_to_their_pages(self):
        for page, key in self.content.items():
            assert self.pool.find(key) == page


TestPagePool = PoolMachine.TestCase
TestPagePool.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_the_page_unused_longest_is_evicted_first_and_a_prefix_after_what_follows_it():
    pool = PagePool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for i, page in enumerate(first + second):
        pool.register(page, bytes([i]))
    pool.free(second)
    pool.free(first)
    order = [pool.allocate(1)[0] for _ in range(4)]
    assert order == [second[1], second[0], first[1], first[0]]
    assert pool.find(bytes([0])) is None


@pytest.mark.parametrize("call", ["share", "free"])
def test_a_free_page_is_nobodys(call):
    pool = PagePool(2)
    with pytest.raises(ValueError, match="page 1 (is free|was freed twice)"):
        getattr(pool, call)([1])
    with pytest.raises(ValueError, match="page 1 is held by nobody"):
        pool.register(1, b"key")


def test_a_key_names_all_tokens_up_to_the_end_of_the_page():
    root = page_key(b"weights", [1, 2])
    assert page_key(root, [3, 4]) == page_key(page_key(b"weights", [1, 2]), [3, 4])
    others = [
        page_key(b"other weights", [1, 2]),
        page_key(b"weights", [1, 3]),
        page_key(b"weights", [2, 1]),
        page_key(b"weights", [1, 2, 0]),
    ]
    assert root not in others and len(set(others)) == 4
    assert page_key(others[0], [3, 4]) != page_key(root, [3, 4])


@pytest.mark.parametrize("broken", ["", "key", "page", "cached"])
def test_reclaimed_pages_are_cached_if_page_and_key_name_each_other(broken):
    """Whatever a call that was interrupted has left: no page is lost, given twice or believed."""
    pool = PagePool(6)
    pages = pool.allocate(4)
    keys = [bytes([i]) for i in range(3)]
    for page, key in zip(pages, keys, strict=False):
        pool.register(page, key)
    pool.free(pages[:1])
    if broken == "key":
        del pool._key_of[pages[0]]
    elif broken == "page":
        del pool._page_of[keys[0]]
    elif broken == "cached":
        pool._cached.popitem()
    for _ in range(2):
        pool.reclaim()
        assert pool.num_available == pool.num_pages
        found = [pool.find(key) for key in keys]
        assert found[1:] == pages[1:3]
        assert found[0] == (None if broken in ("key", "page") else pages[0])
        assert pool.num_cached == sum(page is not None for page in found)
    assert sorted(pool.allocate(6)) == list(range(6)) and pool.find(keys[1]) is None
