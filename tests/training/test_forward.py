# SPDX-License-Identifier: Apache-2.0
"""The trainer's log-probabilities have the bits of the engine's, token for token."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine.outputs.completion import Completion
from detjax.models.layers import ForwardContext
from detjax.models.loading import LoadedModel
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.training.batch import Layout, Scored, by_sequence, pack
from detjax.training.forward import token_logprobs
from detjax.training.score import Scorer
from detjax.training.weights import master_params

NAME = "qk_norm_biases_window"


def scored(completion: Completion) -> Scored:
    token_ids = completion.prompt_token_ids + completion.token_ids
    return Scored(token_ids=token_ids, weights=(0.0,) + (1.0,) * (len(token_ids) - 1))


def trainer_logprobs(
    model: LoadedModel, sequences: Sequence[Scored], *, layout: Layout, remat: bool, grad: bool
) -> list[np.ndarray]:
    """From a forward pass alone, or from one that is differentiated."""
    ctx = ForwardContext(config=model.config, profile=model.profile, backend=model.backend, tp=1)
    longest = max(len(s.token_ids) for s in sequences) - 1
    batch = pack(sequences, length=longest, layout=layout)

    def run(params, batch):
        logprobs, _ = token_logprobs(ctx, params, model.rope_tables, batch, remat=remat)
        return jnp.sum(logprobs * batch.weights), logprobs

    params = master_params(model)
    if grad:
        (_, logprobs), _ = jax.jit(jax.value_and_grad(run, has_aux=True))(params, batch)
    else:
        _, logprobs = jax.jit(run)(params, batch)
    return by_sequence(batch, np.asarray(logprobs))


def assert_same(rows: Sequence[np.ndarray], want: Sequence[Completion], claim: str) -> None:
    for i, (row, completion) in enumerate(zip(rows, want, strict=True)):
        answer = row[len(completion.prompt_token_ids) - 1 :]
        expected = np.stack(completion.logprobs)
        assert_bitwise_equal(answer, expected, claim=f"{claim}: sequence {i}")


@pytest.mark.invariance
@pytest.mark.parametrize(
    ("name", "layout", "remat", "grad"),
    [
        pytest.param("tied", Layout.PACKED, True, True, marks=pytest.mark.slow),
        pytest.param(NAME, Layout.PACKED, True, True, marks=pytest.mark.slow),
        pytest.param(NAME, Layout.PADDED, False, False, marks=pytest.mark.slow),
        ("tied", Layout.PADDED, False, False),
        pytest.param("experts", Layout.PACKED, True, True, marks=pytest.mark.slow),
        pytest.param("hybrid", Layout.PACKED, True, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_forward_is_bitwise_path_consistent_with_the_engine(
    name, layout, remat, grad, model_named, completions
):
    want = completions(name)
    rows = trainer_logprobs(
        model_named(name), [scored(c) for c in want], layout=layout, remat=remat, grad=grad
    )
    assert_same(rows, want, f"{name}, {layout.value}, remat {remat}, grad {grad}")


@pytest.mark.slow
@pytest.mark.invariance
def test_training_forward_is_bitwise_path_consistent_in_float32(model_named, completions):
    want = completions("tied", dtype="float32")
    model = model_named("tied", dtype="float32")
    sequences = [scored(c) for c in want]
    rows = trainer_logprobs(model, sequences, layout=Layout.PACKED, remat=True, grad=True)
    assert_same(rows, want, "float32")


@pytest.mark.slow
@pytest.mark.invariance
def test_training_forward_is_bitwise_batch_invariant(model_named, completions):
    """Alone, in another order, and beside empty rows."""
    model, want = model_named(NAME), completions(NAME)
    alone = trainer_logprobs(
        model, [scored(want[1])], layout=Layout.PADDED, remat=False, grad=False
    )
    assert_same(alone, [want[1]], "alone")
    rows = trainer_logprobs(
        model, [scored(c) for c in want[::-1]], layout=Layout.PACKED, remat=False, grad=False
    )
    assert_same(rows, want[::-1], "in reverse order")


@pytest.mark.slow
@pytest.mark.invariance
def test_training_forward_is_bitwise_mesh_invariant_to_the_rollout(model_named, completions):
    """Sampled on four devices, trained on one."""
    want = completions(NAME, tp=4)
    sequences = [scored(c) for c in want]
    model = model_named(NAME)
    rows = trainer_logprobs(model, sequences, layout=Layout.PACKED, remat=False, grad=False)
    assert_same(rows, want, "rollout on tp 4")


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (2, 2)])
def test_scores_are_bitwise_mesh_invariant(dp, tp, model_named, completions):
    """Sampled on one device, scored on several."""
    want = completions(NAME)
    rows = Scorer(model_named(NAME, dp=dp, tp=tp)).logprobs(
        [c.prompt_token_ids + c.token_ids for c in want]
    )
    assert_same(rows, want, f"scored on ({dp}, {tp})")


@pytest.mark.slow
@pytest.mark.control
def test_control_fast_scores_depend_on_the_mesh(model_named, completions):
    """XLA's kernels and psum, on the same tokens: close, and not the same bits."""
    sequences = [c.prompt_token_ids + c.token_ids for c in completions(NAME)]
    one, four = (
        np.concatenate(Scorer(model_named(NAME, tp=tp), mode="fast").logprobs(sequences))
        for tp in (1, 4)
    )
    assert np.abs(one - four).max() < 0.5
    assert count_different_bits(one, four) > 0  # how many depends on the processor


@pytest.mark.control
def test_control_plain_jax_has_other_bits(model_named, completions, plain_logprobs):
    """The same formulas in plain JAX agree to 1e-2 and not in bits, so the comparison can fail."""
    model, completion = model_named("tied"), completions("tied")[1]
    down = np.asarray(model.params["layers"][0]["down"], np.float32)
    assert_order_sensitive(down * np.linspace(0.5, 2, down.shape[1], dtype=np.float32))
    ids = np.asarray(completion.prompt_token_ids + completion.token_ids)
    found = jax.jit(lambda p: plain_logprobs(jnp, model.config, p, ids))(master_params(model))
    answer = np.asarray(found)[len(completion.prompt_token_ids) - 1 :].astype(np.float32)
    expected = np.stack(completion.logprobs)
    assert np.abs(answer - expected).max() < 0.1
    assert count_different_bits(answer, expected) == len(expected)


def test_bad_input_is_refused_by_name(model_named):
    with pytest.raises(ValueError, match="sequence 1 has 1 tokens"):
        Scorer(model_named("tied")).logprobs([(1, 2), (3,)])
    for unknown in (320, -1, 2**40):
        with pytest.raises(ValueError, match=f"sequence 1 has token id {unknown}; .* 0 to 319"):
            Scorer(model_named("tied")).logprobs([(1, 2), (3, unknown, 4)])
    assert Scorer(model_named("tied")).logprobs([]) == []
    with pytest.raises(ValueError, match="first token's weight 0.5 must be 0"):
        Scored(token_ids=(1, 2), weights=(0.5, 1.0))
    with pytest.raises(ValueError, match="3 tokens with 2 weights"):
        Scored(token_ids=(1, 2, 3), weights=(0.0, 1.0))
    for weight in (float("nan"), float("inf"), -float("inf"), 1e39):
        with pytest.raises(ValueError, match=r"weights\[1\]=.* must be a finite float32 number"):
            Scored(token_ids=(1, 2, 3), weights=(0.0, weight, 1.0))
    two = Scored(token_ids=(1, 2, 3), weights=(0.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="sequence 0 has 2 rows, more than length=1"):
        pack([two], length=1)
    with pytest.raises(ValueError, match="2 sequences do not fit"):
        pack([two, two], length=2, num_sequences=1)
    with pytest.raises(ValueError, match="4 tokens do not fit into num_rows=3"):
        pack([two, two], length=2, num_rows=3, layout=Layout.PACKED)
    model = model_named("tied")
    ctx = ForwardContext(config=model.config, profile=model.profile, backend=model.backend, tp=4)
    with pytest.raises(ValueError, match="tp=4: ranks cannot share num_kv_heads=2"):
        token_logprobs(
            ctx, master_params(model), model.rope_tables, pack([two], length=2), remat=False
        )
