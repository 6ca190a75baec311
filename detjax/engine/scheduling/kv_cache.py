# SPDX-License-Identifier: Apache-2.0
"""Which sequences hold which pages of the cache. Host side; never touches a page's content."""

from collections import OrderedDict
from collections.abc import Sequence


class PagePool:
    """Reference-counted pages of one replica's cache, and the prefix cache over them.

    A page is *held* by one or more sequences, *cached* (held by none, its content registered under
    a key), or *free*. Cached pages are given out again when free ones run out, the one that was
    unused longest first.
    """

    def __init__(self, num_pages: int):
        """Own pages 0 to `num_pages` - 1, all free."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_users = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self.num_evicted = 0

    @property
    def num_pages(self) -> int:
        """All pages of the pool."""
        return len(self._num_users)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds but whose content is kept."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages whose content nobody needs, evicting cached ones if need be.

        Raises:
            MemoryError: If fewer are available; nothing is allocated then.
        """
        if count > self.num_available:
            raise MemoryError(
                f"{count} pages wanted, {self.num_available} of {self.num_pages} available"
            )
        pages = [self._allocate_one() for _ in range(count)]
        for page in pages:
            self._num_users[page] = 1
        return pages

    def _allocate_one(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._cached.popitem(last=False)
        self._drop_key(page)
        self.num_evicted += 1
        return page

    def idle_pages(self, least: int) -> list[int]:
        """Return the free pages, the last to be handed out first.

        Where they are fewer than `least`, cached pages are evicted to be free.
        """
        if len(self._free) < least:
            self.free(self.allocate(min(least, self.num_available)))
        return list(self._free)

    def share(self, pages: Sequence[int]) -> None:
        """Count one more user of each page.

        Raises:
            ValueError: If a page is free, since its content is nobody's.
        """
        for page in pages:
            if self._num_users[page] == 0 and page not in self._cached:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._cached.pop(page, None)
            self._num_users[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Count one user less of each page; those without one are cached if registered, else free.

        Free the pages of a sequence first to last: the last is then evicted first, and a prefix
        outlives what follows it.

        Raises:
            ValueError: If a page is held by nobody.
        """
        for page in reversed(pages):
            if self._num_users[page] == 0:
                raise ValueError(f"page {page} was freed twice")
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def find(self, key: bytes) -> int | None:
        """Return the page registered under `key`, held or cached."""
        return self._page_of.get(key)

    def _drop_key(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]

    def is_registered(self, page: int) -> bool:
        """Whether others find a page."""
        return page in self._key_of

    def unregister(self, page: int) -> None:
        """Let nobody find a page any more. One that is cached becomes free."""
        self._drop_key(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def register(self, page: int, key: bytes) -> bool:
        """Let others find a held page whose content is canonical, complete and final.

        Returns:
            Whether the page is now the one of `key`; False if another page already is.

        Raises:
            ValueError: If the page is held by nobody, or has another key.
        """
        if self._num_users[page] == 0:
            raise ValueError(f"page {page} is held by nobody and cannot be registered")
        if self._key_of.get(page, key) != key:
            raise ValueError(f"page {page} has another key; its content must not change")
        if self._page_of.setdefault(key, page) != page:
            return False
        self._key_of[page] = key
        return True

    def reclaim(self) -> None:
        """Take every page from its holders; those that are registered stay cached.

        Right after a call that was interrupted anywhere, this one included: a page keeps its key if
        each names the other, and every other page is free.
        """
        key_of = {p: key for key, p in self._page_of.items() if self._key_of.get(p) == key}
        cached = OrderedDict.fromkeys(p for p in (*self._cached, *key_of) if p in key_of)
        free = [p for p in range(self.num_pages - 1, -1, -1) if p not in key_of]
        page_of, num_users = {key: p for p, key in key_of.items()}, [0] * self.num_pages
        self._cached, self._free, self._num_users = cached, free, num_users
        self._key_of, self._page_of = key_of, page_of

    def forget(self) -> None:
        """Drop every key, as when the weights change. Cached pages become free."""
        self._page_of.clear()
        self._key_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()
