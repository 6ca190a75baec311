# SPDX-License-Identifier: Apache-2.0
"""The windows of an audit: little padding, few sizes, long answers first."""

import pytest

from detjax.engine.config import EngineConfig
from detjax.proof.windows import (
    LEAST_WINDOW,
    MOST_WINDOW,
    STEP_TOKENS,
    audit_options,
    choose_window,
    cpu_audit_options,
    longest_first,
)


@pytest.mark.parametrize(
    ("answer_lens", "window"),
    [
        ([1], LEAST_WINDOW),
        ([17], LEAST_WINDOW),
        ([40, 20], 64),
        ([129] * 8, MOST_WINDOW),  # no padding either way: the longest
        ([193], 64),
        ([190, 300, 440], 64),
        ([4000] * 3 + [3970], MOST_WINDOW),
    ],
)
def test_a_window_holds_little_padding(answer_lens, window):
    assert choose_window(answer_lens) == window


def test_an_audit_has_options_that_an_engine_takes_and_steps_of_one_size():
    sizes = {"batch_size": 256, "prefill_chunk": 512, "max_len": 1024}
    for count, prompt_len in ((1, 10), (64, 10), (64, 1000)):
        options = audit_options([300] * count, [prompt_len] * count)
        config = EngineConfig(**(sizes | options))
        assert config.verify_rows * config.verify_window == STEP_TOKENS
        assert config.has_prompt_lookup
        is_packed = count == 64 and prompt_len == 10
        assert config.prefill_shapes == (((32, 64),) if is_packed else ())
    assert audit_options([300], [10], window=3)["verify_window"] == 3


def test_a_cpu_computes_one_window_a_step_that_pads_little():
    """A GPU's step of 2048 tokens would compute 2048 for these 40."""
    options = cpu_audit_options([40], [7], num_replicas=2)
    config = EngineConfig(**options)
    assert (config.verify_rows, config.verify_window, config.prefill_chunk) == (1, 16, 16)
    assert config.batch_size == 2 and config.has_prompt_lookup and config.self_check == "off"
    long = cpu_audit_options([500] * 3, [900])
    assert (long["verify_window"], long["prefill_chunk"]) == (MOST_WINDOW, MOST_WINDOW)
    for length in range(2, 400):
        window = choose_window([length], on_cpu=True)
        computed, fewest = (-(-(length - 1) // size) * size for size in (window, LEAST_WINDOW))
        assert computed <= 1.15 * fewest
    assert cpu_audit_options([300], [10], window=3)["verify_window"] == 3


def test_long_answers_come_first_and_equal_ones_in_order():
    assert longest_first([3, 9, 3, 12]) == [3, 1, 0, 2]
