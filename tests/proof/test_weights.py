# SPDX-License-Identifier: Apache-2.0
"""A receipt names the weights that made the answer, also after others have replaced them."""

import jax
import jax.numpy as jnp
import pytest

import detjax
from detjax.engine.weight_history import WeightHistory

SAMPLING = detjax.SamplingParams(max_tokens=4)


@pytest.fixture
def llm() -> detjax.LLM:
    return detjax.LLM(max_len=256, batch_size=4)  # whose programs are those of the server


def load(llm: detjax.LLM, scale: float, version: int) -> None:
    """Other weights, that answer otherwise."""
    weights = {k: v for k, v in llm.model.params.items() if k != "exchange"}
    weights = jax.tree.map(jnp.copy, weights)
    weights["final_norm"] = weights["final_norm"] * scale
    llm.engine.load_weights(weights, version=version)


def answer(llm: detjax.LLM):
    return llm.generate("The old house", SAMPLING)[0].outputs[0]


@pytest.mark.slow
def test_a_receipt_names_the_weights_that_made_the_answer(llm):
    old = answer(llm)
    before = llm.receipt(old)
    load(llm, 2.0, version=1)
    new = answer(llm)
    assert new.completion.weight_version == 1 and new.digest() != old.digest()
    after = llm.receipt(new)
    assert after.model["weights"] == llm.identity().model["weights"] != before.model["weights"]
    assert llm.receipt(old) == before, "the weights of then, not of now"
    load(llm, 2.0, version=2)
    assert llm.receipt(old) == before and llm.receipt(new) == after


@pytest.mark.slow
def test_weights_that_nobody_hashed_in_time_have_no_receipt(llm):
    old = answer(llm)
    load(llm, 2.0, version=1)
    with pytest.raises(ValueError, match="replaced before their hash was taken.* before load_weig"):
        llm.receipt(old)
    assert llm.receipt(answer(llm)).model["weights"] == llm.identity().model["weights"]


def test_two_weights_of_one_version_have_no_receipt(llm):
    old = answer(llm)
    llm.receipt(old)
    load(llm, 2.0, version=0)
    new = answer(llm)
    for output in (old, new):
        with pytest.raises(ValueError, match="2 different weights have answered as weight_version"):
            llm.receipt(output)


@pytest.mark.slow
def test_weights_that_answered_nothing_may_share_their_version(llm):
    """As a trainer does that counts from 0."""
    load(llm, 2.0, version=0)
    assert llm.receipt(answer(llm)).model["weights"] == llm.identity().model["weights"]


def test_a_version_that_never_answered_is_refused():
    history = WeightHistory()
    with pytest.raises(ValueError, match="carries weight_version=0, and no weights of this engine"):
        history.index_of(0)
    history.note_request()
    history.replace(5)
    assert (history.index_of(0), history.current, history.version) == (0, 1, 5)
    with pytest.raises(ValueError, match="weight_version=5"):
        history.index_of(5)


@pytest.mark.slow
def test_weights_that_were_half_taken_have_a_version_of_their_own(llm, monkeypatch):
    """The new weights compute from where they are in place, whatever fails behind that."""
    old = answer(llm)
    before = llm.receipt(old)

    def fail():
        raise MemoryError("no room for drafts")

    monkeypatch.setattr(llm.engine._runner, "take_weights", fail)
    with pytest.raises(MemoryError):
        load(llm, 2.0, version=1)
    new = answer(llm)
    assert new.completion.weight_version == 1
    assert llm.receipt(old) == before
    assert llm.receipt(new).model["weights"] != before.model["weights"]


@pytest.mark.slow
def test_weights_that_were_replaced_behind_the_engine_are_named_by_no_receipt(llm):
    old = answer(llm)
    llm.receipt(old)
    weights = jax.tree.map(jnp.copy, {k: v for k, v in llm.model.params.items() if k != "exchange"})
    weights["final_norm"] = weights["final_norm"] * 2
    llm.model.replace_weights(weights)
    with pytest.raises(ValueError, match="replaced behind the engine"):
        llm.receipt(old)
