# SPDX-License-Identifier: Apache-2.0
"""The auxiliary loss of mixtures of experts: its value, its gradient, and what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from detjax.models.layers import ForwardContext
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, count_different_bits
from detjax.training.batch import Layout, pack
from detjax.training.forward import token_logprobs, token_logprobs_and_balance
from detjax.training.gradients import Backward
from detjax.training.trainer import Trainer
from detjax.training.weights import master_params


def context(model) -> ForwardContext:
    return ForwardContext(config=model.config, profile=model.profile, backend=model.backend, tp=1)


def hf_balance(logits: np.ndarray, top_k: int) -> float:
    """Hugging Face's `load_balancing_loss_func` for one layer, in float64."""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    counts = np.bincount(chosen.reshape(-1), minlength=p.shape[1]) / len(p)
    return float(p.shape[1] * np.sum(counts * p.mean(axis=0)))


@pytest.mark.slow
def test_the_balance_is_that_of_hugging_face(model_named, weighted, monkeypatch):
    """Of real rows alone, in either layout; log-probabilities keep their bits."""
    model, seen = model_named("experts"), []
    plain = jax.nn.softmax
    monkeypatch.setattr(
        jax.nn, "softmax", lambda x, **options: seen.append(x) or plain(x, **options)
    )
    params, sequences = master_params(model), weighted(6, 24, 40)
    found = {}
    for layout in Layout:
        batch = pack(sequences, length=39, layout=layout)

        def run(params, batch):
            values, balance = token_logprobs_and_balance(
                context(model), params, model.rope_tables, batch, remat=False
            )
            return values[0], balance, seen[-1]

        seen.clear()
        logprobs, balance, logits = jax.jit(run)(params, batch)
        without = jax.jit(
            lambda p, b: token_logprobs(context(model), p, model.rope_tables, b, remat=False)[0]
        )(params, batch)
        assert_bitwise_equal(logprobs, without, claim=f"{layout.value}: asked for the balance too")
        is_real = np.asarray(batch.places) < len(batch.lengths) * batch.length
        want = hf_balance(np.asarray(logits, np.float64)[is_real], model.config.experts.top_k)
        found[layout] = float(balance)
        assert float(balance) == pytest.approx(want, rel=1e-5)
    assert found[Layout.PACKED] == pytest.approx(found[Layout.PADDED], rel=1e-5)
    assert 3 < found[Layout.PACKED] < 8  # top_k where all are used alike, U where one has all


@pytest.mark.slow
def test_training_on_the_balance_alone_lowers_it(model_named, weighted):
    """Rows have no weight, so nothing but the balance has a gradient; without it nothing moves."""
    model = model_named("experts")
    zero = [type(s)(token_ids=s.token_ids, weights=(0.0,) * len(s.weights)) for s in weighted(24)]
    batch = pack(zero, length=23)

    @jax.jit
    def balance(params, batch):
        return token_logprobs_and_balance(
            context(model), params, model.rope_tables, batch, remat=False
        )[1]

    after = {}
    for weight in (1.0, 0.0):
        trainer = Trainer(
            model, optax.sgd(1e-3), mesh=make_mesh(1, 1), clip_norm=float("inf"),
            balance_weight=weight, backward=Backward.XLA,
        )  # fmt: skip
        state = trainer.init()
        for _ in range(3):
            state, _ = trainer.step(state, [batch])
        after[weight] = state.params
    first = master_params(model)
    assert balance(after[1.0], batch) < balance(first, batch)
    moved = jax.tree.map(lambda a, b: count_different_bits(jnp.asarray(a), b), after[0.0], first)
    assert not sum(jax.tree.leaves(moved))


def test_a_model_without_experts_has_no_balance(model_named, weighted):
    model = model_named("tied")
    with pytest.raises(ValueError, match="has no mixtures of experts"):
        token_logprobs_and_balance(
            context(model), {}, model.rope_tables, pack(weighted(6), length=5), remat=False
        )
    for weight in (0.1, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"balance_weight={weight} must be 0, or positive"):
            Trainer(
                model, optax.sgd(1.0), mesh=make_mesh(1, 1), clip_norm=1.0, balance_weight=weight
            )
