# SPDX-License-Identifier: Apache-2.0
"""A NaN in one expert fails the requests that it is chosen for, and nobody beside them."""

import functools
from collections import Counter

import jax.numpy as jnp
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.testing.dummies import dummy_config, dummy_model

BROKEN = 3
NUM_EXPERTS = 16
SAMPLING = SamplingParams(max_tokens=4)
PROMPTS = [tuple((7 * i + j * j) % 128 for j in range(3 + i % 3)) for i in range(12)]


def model(tp: int, *, is_broken: bool) -> LoadedModel:
    """A mixture of experts, one of which has a NaN in one row of its weights."""
    config = dummy_config(
        num_layers=1, hidden_size=64, vocab_size=128, experts=(NUM_EXPERTS, 2), expert_width=48
    )
    made = dummy_model(
        config, tp=tp, profile=NumericsProfile(attention_block=16, attention_split=64)
    )
    if is_broken:
        (layer,) = made.params["layers"]
        row = layer["expert_down"].at[BROKEN, 5].set(jnp.nan)
        layer["expert_down"] = row
    return made


def run(engine: Engine, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...] | str]:
    """The tokens of each prompt, or what went wrong; all at once."""
    ids = [engine.add_request(prompt, SAMPLING) for prompt in prompts]
    found: dict[int, tuple[int, ...] | str] = dict.fromkeys(ids, ())
    for output in engine.drain():
        had = found[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            found[output.request_id] = output.error
        elif isinstance(had, tuple):
            bits = tuple(int(value.view("int32")) for value in output.logprobs)
            found[output.request_id] = (*had, *output.token_ids, *bits)
    return [found[i] for i in ids]


@functools.cache
def engine(tp: int, *, is_broken: bool, mode: str = "invariant") -> Engine:
    config = EngineConfig(batch_size=8, prefill_chunk=16, max_len=32, mode=mode, self_check="off")
    return Engine(model(tp, is_broken=is_broken), config)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_nan_in_one_expert_fails_those_that_choose_it_alone(tp):
    good = run(engine(tp, is_broken=False), PROMPTS)
    assert all(isinstance(answer, tuple) for answer in good)
    broken = engine(tp, is_broken=True)
    alone = [run(broken, [prompt])[0] for prompt in PROMPTS]
    kinds = Counter(type(answer) for answer in alone)
    assert kinds[str] >= 2 and kinds[tuple] >= 2, "the case says nothing"
    assert all("NaN logit" in answer for answer in alone if isinstance(answer, str))
    for answer, wanted in zip(alone, good, strict=True):
        assert isinstance(answer, str) or answer == wanted
    together = run(broken, PROMPTS)
    assert together == alone
    assert run(broken, PROMPTS[::-1]) == alone[::-1]
    assert broken.stats().num_pages_held == 0
