# SPDX-License-Identifier: Apache-2.0
"""The trainer of EAGLE-3 heads computes what the engine drafts, and writes a head that it reads."""

import dataclasses
import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.models.heads.eagle import load_eagle_head
from detjax.models.rope import rope_tables
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.eagle import dummy_eagle, dummy_ids, dummy_tensors, reference_drafts

pytest.importorskip("optax")

TOOL = Path(__file__).parents[2] / "tools/train_eagle.py"
TARGET = dummy_config(vocab_size=48, num_layers=4)
STEPS = 3


@pytest.fixture(scope="module")
def tool() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(TOOL), run_name="train_eagle"))


@pytest.mark.slow
def test_the_steps_of_training_are_the_drafts_of_a_text(tool):
    """From the last place of a text each step must give the token that serving drafts."""
    eagle = dummy_eagle(TARGET, draft_vocab_size=40)
    tensors, ids = dummy_tensors(eagle, seed=2), dummy_ids(eagle)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, TARGET.vocab_size, 9).tolist()
    embed = rng.standard_normal((TARGET.vocab_size, TARGET.hidden_size)).astype(np.float32)
    features = rng.standard_normal((8, 3 * TARGET.hidden_size)).astype(np.float32)
    drafts = reference_drafts(eagle, tensors, embed, features, tokens, count=STEPS)
    text = np.array([[*tokens, *drafts]])
    layer = eagle.layer
    tables = rope_tables(layer.rope, head_dim=layer.head_dim, max_len=64)
    features = np.concatenate([features, np.zeros((4, features.shape[1]), np.float32)])
    row_of = {int(token): row for row, token in enumerate(ids)}
    given = (
        {name: jnp.asarray(value) for name, value in tensors.items()}, jnp.asarray(embed),
        tuple(map(jnp.asarray, tables)), jnp.asarray(features[None]), jnp.asarray(text),
    )  # fmt: skip
    # The tool broadcasts and promotes as jax.numpy does by default.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for step, draft in enumerate(drafts):
            labels = np.full(text.shape, -1)
            labels[0, len(tokens) + step] = row_of[draft]
            logits = tool.head_logits(eagle, STEPS, *given)
            _, rights = tool.head_losses(logits, jnp.asarray(labels), None)
            assert rights[step] == 1.0, f"draft {step}"


def test_a_distribution_with_one_token_is_that_token(tool):
    """What the head learns of a place is what the model says there, not a place beside it."""
    rng = np.random.default_rng(0)
    length, width = 12, 20
    rows = rng.integers(0, width, (2, length))
    logits = rng.standard_normal((STEPS, 2, length - STEPS - 1, width)).astype(np.float32)
    of_model = np.zeros((2, length, width), np.float32)
    np.put_along_axis(of_model[:, :-1], rows[:, 1:, None], 1e4, axis=-1)  # of the next token
    logits, labels = jnp.asarray(logits), jnp.asarray(rows)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        losses, rights = tool.head_losses(iter(logits), labels, jnp.asarray(of_model))
        expected = tool.head_losses(iter(logits), labels, None)
        beside = tool.head_losses(iter(logits), labels, jnp.roll(jnp.asarray(of_model), 1, axis=1))
    np.testing.assert_array_equal(np.asarray(losses), np.asarray(expected[0]))
    np.testing.assert_array_equal(np.asarray(rights), np.asarray(expected[1]))
    assert not np.array_equal(np.asarray(losses), np.asarray(beside[0]))


def test_the_draft_vocabulary_is_that_of_the_answers(tool):
    eagle = dummy_eagle(TARGET, draft_vocab_size=4)
    texts = [tool.Text(prompt=(1,), answer=(40, 40, 7, 7, 9, 9, 3))]
    assert tool.frequent_tokens(texts, eagle).tolist() == [3, 7, 9, 40]
    wider = dataclasses.replace(eagle, draft_vocab_size=6)
    assert tool.frequent_tokens(texts, wider).tolist() == [0, 1, 3, 7, 9, 40]


@pytest.mark.slow
def test_a_head_is_trained_written_and_drafts_without_a_changed_bit(tool, tmp_path, capsys):
    arguments = (
        "--model novels-6m --prompts 12 --prompt-length 8 --length 48 --steps 30 --batch-size 4 "
        "--drafts 2 --draft-vocab-size 1000 --seconds 300"
    )
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert tool.main([*arguments.split(), "--out", str(tmp_path / "head")]) == 0
    told = capsys.readouterr().out
    assert "learned:" in told and "held out:" in told and told.count(" 0 of 1 answers") == 2
    model = dummy_model(dummy_config(vocab_size=4096, hidden_size=256, num_layers=5))
    read = load_eagle_head(str(tmp_path / "head"), model=model).head_config
    assert read.draft_vocab_size == 1000 and read.feature_layers == (1, 2, 4)


class Launched:
    """The loss of a step that takes a second once somebody waits for it."""

    def __init__(self, clock: list[float]):
        self.clock, self.is_done = clock, False

    def block_until_ready(self) -> "Launched":
        self.clock[0] += not self.is_done
        self.is_done = True
        return self

    def __float__(self) -> float:
        self.block_until_ready()
        return 0.0


def test_training_ends_when_its_seconds_are_over(tool, monkeypatch):
    """Steps are launched and not waited for, so a clock read between them would stand still."""
    clock, steps = [0.0], []

    def update(tensors, state, given):
        steps.append(given["rate"])
        return tensors, state, Launched(clock), [0.0]

    names = tool.train.__globals__
    monkeypatch.setitem(names, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setitem(names, "_BEGIN_S", 0.0)
    monkeypatch.setitem(names, "text_states", lambda *_: lambda tokens: (tokens, tokens))
    optimiser = SimpleNamespace(init=lambda tensors: None)
    monkeypatch.setitem(names, "make_update", lambda *_: (optimiser, update, None))
    monkeypatch.setitem(names, "first_tensors", lambda *_: {})
    monkeypatch.setitem(names, "batches", lambda *_: itertools.repeat((None, None)))
    monkeypatch.setitem(names, "rate_of", lambda args, step, progress: progress)
    args = SimpleNamespace(
        batch_size=1, length=8, seed=0, steps=1000, seconds=5.0, end_by=float("inf")
    )
    tool.train(None, SimpleNamespace(feature_layers=()), None, (), (), args)
    assert steps == pytest.approx([0.001, 0.002, 0.2, 0.4, 0.6, 0.8, 1.0])
