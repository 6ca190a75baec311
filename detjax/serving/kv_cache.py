# SPDX-License-Identifier: Apache-2.0
"""Which pages of the cache belong to which sequence. Host side; never touches a page's content."""

from collections.abc import Sequence


class PagePool:
    """Reference-counted pages of one replica's cache.

    A page may be shared by sequences that start with the same tokens; it is free again when the
    last of them gives it back.
    """

    def __init__(self, num_pages: int):
        """Own pages 0 to `num_pages` - 1, all free."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_users = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out `count` free pages.

        Raises:
            MemoryError: If fewer are free; nothing is taken then.
        """
        if count > len(self._free):
            raise MemoryError(
                f"{count} pages wanted, {len(self._free)} of {len(self._num_users)} free"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._num_users[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Count one more user of each page.

        Raises:
            ValueError: If a page is free, since its content is nobody's.
        """
        for page in pages:
            if self._num_users[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._num_users[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Count one user less of each page; free those without one.

        Raises:
            ValueError: If a page is already free.
        """
        for page in pages:
            if self._num_users[page] == 0:
                raise ValueError(f"page {page} was given back twice")
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                self._free.append(page)
