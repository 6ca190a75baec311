# SPDX-License-Identifier: Apache-2.0
"""Latencies are of serving: what compiling took is counted apart."""

import time

from detjax.serving.config import EngineConfig
from detjax.serving.engine import Engine
from detjax.serving.metrics import Pauses
from detjax.serving.request import Request, SamplingParams
from detjax.testing.dummies import dummy_config, dummy_model


def test_pauses_count_as_far_as_they_lie_between():
    pauses = Pauses()
    for begin_s, end_s in ((1.0, 2.0), (4.0, 7.0), (9.0, 10.0)):
        pauses.add(begin_s, end_s)
    assert pauses.within(0.0, 20.0) == 5
    assert pauses.within(2.0, 4.0) == 0
    assert pauses.within(5.0, 6.0) == 1
    assert pauses.within(5.0, 9.5) == 2.5
    assert pauses.within(10.0, 20.0) == 0


def test_no_latency_has_what_compiling_took():
    engine = Engine(
        dummy_model(dummy_config(num_layers=1)),
        EngineConfig(batch_size=1, prefill_chunk=16, max_len=128),
    )
    request = Request(prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=3))
    begin_s = time.perf_counter()
    engine.generate([request])
    wall_s, stats = time.perf_counter() - begin_s, engine.stats()
    assert stats.num_compiled == 2 and stats.compile_s > 0
    paused_s = stats.compile_s + stats.self_check_s
    assert stats.end_to_end_s.total + paused_s <= wall_s
    served_s = stats.first_token_s.total + stats.between_tokens_s.total
    assert served_s + paused_s <= wall_s
    assert stats.first_token_s.total > 0 and stats.between_tokens_s.count == 2
