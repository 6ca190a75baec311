# SPDX-License-Identifier: Apache-2.0
"""Which places of the cache still hold the random bits that it was filled with.

A write that does not happen shows there without other tokens being written first, which takes as
many steps as the test itself.
"""

from collections.abc import Iterator, Sequence

from detjax.engine.self_check.probes import Placement

Place = tuple[int, int, int, int]
"""0 or 1 for local layers, replica, page as it counts them, token of the page."""


class FilledPlaces:
    """Of a cache, from its allocation until a sequence runs on it.

    Only checks take places meanwhile, and they say which.
    """

    def __init__(self, *, is_known: bool):
        """All places, or none if nothing is known of what they hold."""
        self._is_known = is_known
        self._taken: set[Place] = set()

    def forget(self) -> None:
        """A sequence may have written anywhere."""
        self._is_known = False

    def has(self, placement: Placement, probe: int, page_len: int) -> bool:
        """Whether all places of a probe's new tokens are as they were filled."""
        return self._is_known and self._taken.isdisjoint(_of_probe(placement, probe, page_len))

    def take(self, placement: Placement, probes: Sequence[int], page_len: int) -> None:
        """Note that programs run these probes, and their company on spare pages."""
        for probe in probes:
            self._taken.update(_of_probe(placement, probe, page_len))
        for kind, its in enumerate(placement.places):
            for replica, pages in enumerate(its.spare.tolist()):
                self._taken.update(
                    (kind, replica, page, at) for page in pages for at in range(page_len)
                )


def _of_probe(placement: Placement, probe: int, page_len: int) -> Iterator[Place]:
    its = placement.probes[probe]
    for position in range(its.position, its.position + len(its.token_ids)):
        page, at = divmod(position, page_len)
        for kind, places in enumerate(placement.places):
            for replica, tables in enumerate(places.tables):
                yield kind, replica, int(tables[probe, page]), at
