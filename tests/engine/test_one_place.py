# SPDX-License-Identifier: Apache-2.0
"""Prompts are checked in one place; test_source_rules.py has who makes completions."""

import pytest

from detjax.engine.errors import PromptTooLongError
from detjax.engine.requests.checks import RequestLimits

LIMITS = RequestLimits(
    vocab_size=100, eos_token_ids=(2,), max_len=8, max_len_name="the model's context"
)


@pytest.mark.parametrize(
    ("prompt", "num_wanted", "message"),
    [
        ((), 1, "prompt 3 has no tokens; give at least one"),
        (
            (1,) * 9,
            0,
            "prompt 3 has 9 tokens, more than the model's context of 8; shorten the prompt",
        ),
        (
            (1,) * 8,
            1,
            "prompt 3 has 8 tokens and its answer 1, more than the model's context of 8; shorten "
            "the prompt",
        ),
        (
            (1,) * 5,
            4,
            "prompt 3 has 5 tokens and its answer 4, more than the model's context of 8; shorten "
            "the prompt, or lower max_tokens",
        ),
        ((1, 100), 1, "prompt 3 has token id 100, outside the vocabulary of 100"),
        ((1, -1), 1, "prompt 3 has token id -1, outside the vocabulary of 100"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(prompt, num_wanted, message):
    with pytest.raises(ValueError) as refused:
        LIMITS.check_prompt(prompt, "prompt 3", num_wanted=num_wanted)
    assert str(refused.value) == message
    assert isinstance(refused.value, PromptTooLongError) == ("more than" in message)


def test_a_prompt_that_fills_the_context_with_its_answer_is_taken():
    assert LIMITS.check_prompt((1,) * 5, "prompt 3", num_wanted=3) is None
    assert LIMITS.check_prompt((99,) * 8, "prompt 3", num_wanted=0) is None
