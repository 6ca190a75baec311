# SPDX-License-Identifier: Apache-2.0
"""What lives long is frozen while answers are made, and is as before afterwards."""

import gc
import weakref

import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.heap import frozen_heap
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.testing.dummies import dummy_config, dummy_model


class Cycle:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self):
        self.itself = self


def is_freed(make) -> bool:
    """Whether a full collection frees what `make` made and dropped."""
    made = weakref.ref(make())
    gc.collect()
    return made() is None


def test_the_heap_is_frozen_within_and_thawed_after():
    held = [Cycle()]
    before = gc.get_freeze_count()
    with pytest.raises(KeyError), frozen_heap():
        assert gc.get_freeze_count() > before + 10_000
        assert not is_freed(held.pop) and is_freed(Cycle)
        raise KeyError
    held.append(Cycle())
    assert is_freed(held.pop)
    assert gc.get_freeze_count() < 10_000


def test_the_last_to_leave_thaws_it():
    with frozen_heap():
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() < 10_000


def test_what_is_dropped_within_is_freed_though_another_came_and_left():
    """As one engine after another in a server's process, each with a cache that fills the GPU."""
    with frozen_heap():
        held = [Cycle()]
        with frozen_heap():
            pass
        assert is_freed(held.pop)


@pytest.mark.slow
def test_an_engine_generates_with_a_frozen_heap():
    engine = Engine(
        dummy_model(dummy_config(num_layers=1)),
        EngineConfig(batch_size=1, prefill_chunk=16, max_len=128, self_check="off"),
    )
    request = Request(prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=3))
    counts = []

    def on_token(_):
        counts.append(gc.get_freeze_count())
        return False

    engine.generate([request], on_token=on_token)
    assert len(counts) == 3 and min(counts) > 10_000
    assert gc.get_freeze_count() < 10_000
