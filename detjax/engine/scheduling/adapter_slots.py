# SPDX-License-Identifier: Apache-2.0
"""Which adapter is in which slot of the devices. Pure Python: no array, no adapter's values."""

from collections import Counter, OrderedDict


class AdapterSlots:
    """A fixed number of slots. An adapter without running sequences stays until another needs it.

    Adapters are named by their hashes. The one that was unused longest is evicted first.
    """

    def __init__(self, num_slots: int):
        """Own empty slots."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # longest unused first
        self._num_users: Counter[str] = Counter()
        self.num_evicted = 0

    def can_hold(self, adapter: str) -> bool:
        """Whether `hold` has a slot for an adapter now; "" is no adapter, and needs none."""
        return (
            not adapter
            or adapter in self._slot_of
            or bool(self._free)
            or len(self._num_users) < len(self._slot_of)
        )

    def hold(self, adapter: str) -> int:
        """Return the slot of an adapter for one more sequence; -1 for no adapter.

        Raises:
            MemoryError: If sequences hold all slots.
        """
        if not adapter:
            return -1
        if adapter not in self._slot_of:
            self._slot_of[adapter] = self._allocate()
        self._slot_of.move_to_end(adapter)
        self._num_users[adapter] += 1
        return self._slot_of[adapter]

    def _allocate(self) -> int:
        if self._free:
            return self._free.pop()
        unused = next((name for name in self._slot_of if not self._num_users[name]), None)
        if unused is None:
            raise MemoryError(f"sequences hold all {len(self._slot_of)} slots for adapters")
        self.num_evicted += 1
        return self._slot_of.pop(unused)

    def release(self, adapter: str) -> None:
        """Note that a sequence does not need its adapter any more."""
        if not adapter:
            return
        self._num_users[adapter] -= 1
        if not self._num_users[adapter]:
            del self._num_users[adapter]

    def release_all(self) -> None:
        """Note that no sequence runs any more. Adapters stay where they are."""
        self._num_users.clear()
