# SPDX-License-Identifier: Apache-2.0
"""Pages of layers that read a bounded number of tokens back. Host side, like `kv_cache`.

A sequence's page is one page of the cache for the layers that read all tokens. For local layers it
has a page of a second, smaller pool only while it is *bound*: from its first token until what reads
it has moved on, and longer while nobody needs the room, so that a prefix that ends there is found.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from detjax.engine.requests.sequence import HeldPages
from detjax.engine.scheduling.kv_cache import PagePool

UNBOUND = -1


class LocalPages:
    """Which page of the cache is bound to which local page, in one replica.

    There are enough for every slot (`ReplicaConfig.least_local_pages`), so nobody waits for one.
    Those that no sequence holds are given out again, the one that was unused longest first.

    Attributes:
        bound: int32 [pages], the local page of each page; `UNBOUND` where it has none.
        num_pages: All local pages.
    """

    def __init__(self, pool: PagePool, *, num_pages: int, page_len: int, reach: int):
        """Bind nothing yet.

        Args:
            pool: Of the replica's pages; it knows which are found by others.
            num_pages: Local pages.
            page_len: Tokens of a page.
            reach: Tokens back that a layer reads, the token itself included.
        """
        self._pool, self._page_len, self._reach = pool, page_len, reach
        self.num_pages = num_pages
        self.clear()

    def clear(self) -> None:
        """Unbind every page, whoever holds it."""
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._num_users = np.zeros(self._pool.num_pages, np.int32)
        self._idle: OrderedDict[int, None] = OrderedDict()  # bound pages; longest unused first
        self.bound = np.full(self._pool.num_pages, UNBOUND, np.int32)

    def clear_idle(self) -> None:
        """Unbind the pages that nobody holds."""
        while self._idle:
            self._evict()

    @property
    def num_held(self) -> int:
        """Local pages that sequences hold."""
        return self.num_pages - len(self._free) - len(self._idle)

    def first_read(self, position: int) -> int:
        """The first page of a sequence that a token at a position reads."""
        return max(0, position - self._reach + 1) // self._page_len

    def has(self, page: int) -> bool:
        """Whether a page is bound: what it held when it was full is there."""
        return bool(self.bound[page] != UNBOUND)

    def longest_prefix(self, pages: Sequence[int]) -> int:
        """How many of these pages of a sequence a token may follow: all that it reads is there."""
        count = len(pages)
        while True:
            first = self.first_read(count * self._page_len)
            missing = (i for i in range(first, count) if not self.has(pages[i]))
            # All that end behind a missing page read it, up to this one.
            found = next(missing, count)
            if found == count:
                return count
            count = found

    def hold(self, pages: Sequence[int]) -> None:
        """Count a user of each page, and bind those that are not.

        Raises:
            MemoryError: If local pages are missing; nothing is bound then.
        """
        missing = [page for page in pages if not self.has(page)]
        idle = sum(page in self._idle for page in pages)
        if len(missing) > len(self._free) + len(self._idle) - idle:
            raise MemoryError(f"{len(missing)} local pages wanted, of {self.num_pages}")
        for page in pages:
            self._idle.pop(page, None)
            self._num_users[page] += 1
        for page in missing:
            if not self._free:
                self._evict()
            self.bound[page] = self._free.pop()

    def release(self, pages: Sequence[int]) -> None:
        """Count a user less of each page. Without one it stays bound if others can find it.

        Raises:
            ValueError: If nobody holds a page.
        """
        for page in pages:
            if self._num_users[page] == 0:
                raise ValueError(f"local page of {page} was released twice")
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                self._idle[page] = None
                if not self._pool.is_registered(page):
                    self._idle.move_to_end(page, last=False)
                    self._evict()

    def move(self, pages: Sequence[int], held: HeldPages, positions: tuple[int, int]) -> HeldPages:
        """Hold what tokens of a sequence at some positions read and write.

        What lies before is released. Pages behind, which drafts may have needed, stay.

        Args:
            pages: Of the sequence.
            held: Of which it holds these.
            positions: The first that may be computed from now on, and the last.

        Raises:
            MemoryError: As `hold`; nothing is held then that was not before.
        """
        before = range(held.first, held.first + len(held.local_pages))
        first, last = positions
        after = range(self.first_read(first), max(last // self._page_len + 1, before.stop))
        self.release([pages[i] for i in before if i not in after])
        self.hold([pages[i] for i in after if i not in before])
        local = tuple(self.bound[[pages[i] for i in after]].tolist())
        return HeldPages(first=after.start, local_pages=local)

    def idle_pages(self, least: int) -> list[int]:
        """Return the local pages that are free, the last to be handed out first.

        Where they are fewer than `least`, pages that nobody holds are unbound.
        """
        while len(self._free) < least and self._idle:
            self._evict()
        return list(self._free)

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        self._free.append(int(self.bound[page]))
        self.bound[page] = UNBOUND
