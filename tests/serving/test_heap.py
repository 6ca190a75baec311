# SPDX-License-Identifier: Apache-2.0
"""What lives long is frozen while answers are made, and is as before afterwards."""

import gc

import pytest

from detjax.serving.config import EngineConfig
from detjax.serving.engine import Engine
from detjax.serving.heap import frozen_heap
from detjax.serving.request import Request, SamplingParams
from detjax.testing.dummies import dummy_config, dummy_model


@pytest.fixture(autouse=True)
def thawed():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_the_heap_is_frozen_within_and_thawed_after():
    with pytest.raises(KeyError), frozen_heap():
        assert gc.get_freeze_count()
        raise KeyError
    assert not gc.get_freeze_count()


def test_a_heap_that_is_frozen_already_stays_so():
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count()


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
    assert len(counts) == 3 and all(counts)
    assert not gc.get_freeze_count()
