# SPDX-License-Identifier: Apache-2.0
"""OpenAI's legacy logprobs, whose alternatives are told by their text."""

import numpy as np

from detjax.engine.outputs.request_output import TokenEvent
from detjax.server.echo import EchoedToken, legacy_logprobs

TEXTS = {1: "a", 2: "a", 3: "b", 4: "c"}


def f32(value: float) -> np.float32:
    return np.float32(value)


def event(token_id: int, logprob: float, *top: tuple[int, float]) -> TokenEvent:
    return TokenEvent(
        request_idx=0, sequence_idx=0, token_id=token_id, logprob=f32(logprob),
        top_logprobs=tuple((i, f32(p)) for i, p in top),
    )  # fmt: skip


def test_of_two_tokens_with_one_text_the_likelier_is_told_and_the_token_itself_is_there():
    top = ((1, -0.5), (3, -1.0), (2, -2.0))
    tokens = [(event(4, -8.0, *top), "c"), (event(2, -2.0, *top), "a"), (event(3, -1.0, *top), "b")]
    echoed = [EchoedToken(4, "c", None, ()), EchoedToken(3, "b", f32(-1), ((1, f32(-0.5)),))]
    found = legacy_logprobs(echoed, tokens, 0, num_top=3, text_of=TEXTS.__getitem__)
    assert found["top_logprobs"] == [
        None, {"a": -0.5, "b": -1.0}, {"a": -0.5, "b": -1.0, "c": -8.0}, {"a": -0.5, "b": -1.0},
        {"a": -0.5, "b": -1.0},
    ]  # fmt: skip
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    one = legacy_logprobs([], tokens, 7, num_top=0, text_of=TEXTS.__getitem__)
    assert one["top_logprobs"] == [{"c": -8.0}, {"a": -2.0}, {"b": -1.0}]
    assert one["text_offset"] == [7, 8, 9]
