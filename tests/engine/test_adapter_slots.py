# SPDX-License-Identifier: Apache-2.0
"""Slots for adapters: who holds one, and who loses it."""

import pytest

from detjax.engine.scheduling.adapter_slots import AdapterSlots


def test_an_adapter_keeps_its_slot_until_another_needs_it():
    slots = AdapterSlots(2)
    assert slots.hold("") == -1
    first, second = slots.hold("a"), slots.hold("b")
    assert {first, second} == {0, 1} and slots.hold("a") == first
    assert not slots.can_hold("c") and slots.can_hold("a") and slots.can_hold("")
    with pytest.raises(MemoryError, match="sequences hold all 2 slots"):
        slots.hold("c")
    slots.release("a")
    assert not slots.can_hold("c"), "one of two sequences still has it"
    slots.release("a")
    assert slots.hold("a") == first, "nobody needed its slot"
    slots.release("a")
    assert slots.hold("c") == first and slots.num_evicted == 1


def test_the_one_that_was_unused_longest_is_evicted():
    slots = AdapterSlots(3)
    place = {name: slots.hold(name) for name in "abc"}
    for name in "bac":
        slots.release(name)
    slots.hold("b")
    slots.release("b")
    assert slots.hold("d") == place["a"]
    assert slots.hold("e") == place["c"]
    slots.release("")
    slots.release_all()
    assert slots.can_hold("f") and slots.hold("b") == place["b"]


def test_a_model_without_slots_holds_no_adapter():
    slots = AdapterSlots(0)
    assert slots.can_hold("") and not slots.can_hold("a")
