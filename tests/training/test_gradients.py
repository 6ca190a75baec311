# SPDX-License-Identifier: Apache-2.0
"""Gradients: against float64 finite differences, against JAX's own, and what they depend on."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from detjax.models.layers import ForwardContext
from detjax.models.loading import load_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.api import rope_into_cache
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.parallel.mesh import TP_AXIS, make_mesh
from detjax.testing import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
)
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.training import gradients
from detjax.training.batch import Layout, Scored, pack
from detjax.training.formulas import plain_swiglu
from detjax.training.forward import token_logprobs
from detjax.training.gradients import Backward, CanonicalSums, TokenLeaves
from detjax.training.weights import master_params

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
NAME = "qk_norm_biases_window"
LENGTH = 24


def gradient(
    model, batch, *, remat: bool = False, program: str = "run",
    backward: Backward = Backward.CANONICAL,
):  # fmt: skip
    """Of the batch's objective, `sum(weights * logprobs)`, as NumPy arrays.

    A program of another name is compiled anew, where the suite keeps what it has compiled.
    """
    ctx = ForwardContext(config=model.config, profile=model.profile, backend=model.backend, tp=1)

    def run(params, batch):
        logprobs, _ = token_logprobs(
            ctx, params, model.rope_tables, batch, remat=remat, backward=backward
        )
        return jnp.sum(logprobs * batch.weights)

    run.__name__ = program
    return jax.device_get(jax.jit(jax.grad(run))(master_params(model), batch))


def family(case: str, dtype: str):
    """A golden model; weights of 4 bits are expanded."""
    profile = NumericsProfile(weight_dtype=dtype, compute_dtype=dtype)
    return load_model(
        str(GOLDEN / case), profile=profile, mesh=make_mesh(1, 1), backend=Backend.PORTABLE
    )


def objective(xp, plain_logprobs, config, params, sequences):
    total = 0.0
    for sequence in sequences:
        logprobs = plain_logprobs(xp, config, params, np.asarray(sequence.token_ids))
        weights = xp.asarray(np.asarray(sequence.weights[1:]), logprobs.dtype)
        total = total + xp.sum(weights * logprobs)
    return total


def by_name(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_tensors_close(found, expected, *, max_relative: float) -> None:
    """Each tensor's error norm against its norm."""
    for name, want in by_name(expected).items():
        got = by_name(found)[name].astype(np.float64)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error <= max_relative, f"{name}: {error:.2g} of its norm"


@pytest.fixture(scope="module")
def sequences(weighted):
    """The longest sees past the window."""
    return weighted(6, 24, 90)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, pytest.param("tied", marks=pytest.mark.slow)])
def test_gradients_are_those_of_float64_finite_differences(
    name, model_named, sequences, plain_logprobs
):
    """Along a random direction of each tensor.

    Tolerance: central differences with step 1e-6 in float64 are good to 1e-9; the gradient is a
    float32 sum of a few thousand rounded terms, good to some 1e-5 of its norm.
    """
    model = model_named(name, dtype="float32")
    found = gradient(model, pack(sequences, length=89))
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), master_params(model))
    rng = np.random.default_rng(1)
    leaves, structure = jax.tree.flatten(params)
    value = partial(objective, np, plain_logprobs, model.config)
    for i, (tensor, slope) in enumerate(by_name(found).items()):
        direction = rng.standard_normal(leaves[i].shape)
        direction /= np.linalg.norm(direction)
        ends = []
        for step in (1e-6, -1e-6):
            moved = [*leaves]
            moved[i] = leaves[i] + step * direction
            ends.append(value(jax.tree.unflatten(structure, moved), sequences))
        expected = (ends[0] - ends[1]) / 2e-6
        actual = float(np.sum(slope.astype(np.float64) * direction))
        bound = 1e-4 * np.linalg.norm(slope)
        assert abs(actual - expected) <= bound, f"{tensor}: {actual} is not {expected}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backward"), [(NAME, Backward.CANONICAL), ("experts", Backward.XLA)]
)
def test_gradients_are_those_of_plain_jax(name, backward, model_named, sequences, plain_logprobs):
    """In float32 to 1e-5 of each tensor's norm: only the order of sums differs."""
    model = model_named(name, dtype="float32")
    found = gradient(model, pack(sequences, length=89), backward=backward)
    plain = jax.grad(lambda p: objective(jnp, plain_logprobs, model.config, p, sequences))
    with jax.default_matmul_precision("highest"):
        expected = jax.device_get(jax.jit(plain)(master_params(model)))
    assert_tensors_close(found, expected, max_relative=1e-5)


@pytest.mark.slow
def test_bfloat16_gradients_are_near_those_of_float32(model_named, sequences):
    """To 5 % of each tensor's norm.

    Tolerance: activations and their cotangents are rounded to 8 bits, 2**-9 each, some twenty times
    on the way through two layers, at random: about 1 %, more where terms cancel.
    """
    batch = pack(sequences, length=89)
    expected = gradient(model_named(NAME, dtype="float32"), batch)
    assert_tensors_close(gradient(model_named(NAME), batch), expected, max_relative=0.05)


@pytest.mark.slow
@pytest.mark.invariance
def test_gradients_are_bitwise_run_invariant(model_named, sequences):
    """Compiled anew, and with other programs in between."""
    model, batch = model_named(NAME), pack(sequences, length=89)
    first = gradient(model, batch)
    again = gradient(model, batch, program="run_again")
    for name, leaf in by_name(again).items():
        assert_bitwise_equal(leaf, by_name(first)[name], claim=f"gradient of {name}, run again")


@pytest.mark.slow
@pytest.mark.invariance
def test_gradients_are_bitwise_batch_invariant(model_named, sequences):
    """Padded and packed, with room for more sequences, rematerialised."""
    model = model_named(NAME)
    expected = gradient(model, pack(sequences, length=89))
    batch = pack(sequences, length=120, layout=Layout.PACKED, num_sequences=5)
    found = gradient(model, batch, remat=True)
    for name, leaf in by_name(found).items():
        assert_bitwise_equal(leaf, by_name(expected)[name], claim=f"gradient of {name}")


@pytest.mark.slow
@pytest.mark.control
def test_control_gradients_of_xlas_sums_depend_on_the_shape_of_the_batch(model_named, sequences):
    model = model_named(NAME)
    padded, packed = (
        gradient(model, pack(sequences, length=89, layout=layout), backward=Backward.XLA)
        for layout in Layout
    )
    assert_tensors_close(packed, padded, max_relative=1e-5)
    different = jax.tree.map(count_different_bits, padded, packed)
    assert sum(jax.tree.leaves(different)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backward"),
    [
        ("experts", Backward.CANONICAL), ("experts_of_all", Backward.CANONICAL),
        ("hybrid", Backward.XLA),
    ],
)  # fmt: skip
def test_gradients_are_those_of_jax_in_float64(
    name, backward, model_named, sequences, plain_logprobs
):
    """Weights that add up to 1, and by the softmax of all experts; linear attention by XLA.

    Tolerance: a float32 sum of n terms of random signs is off by some sqrt(n) 2**-24 of its norm;
    n is 320 at most (the vocabulary), so 1.1e-6. A gradient passes some 30 sums on its way through
    the layers and back, whose errors add at random: 6e-6. Twice that is allowed.
    """
    model = model_named(name, dtype="float32")
    found = gradient(model, pack(sequences, length=89), backward=backward)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), master_params(model))
        plain = jax.grad(lambda p: objective(jnp, plain_logprobs, model.config, p, sequences))
        expected = jax.device_get(jax.jit(plain)(params))
    assert next(iter(by_name(expected).values())).dtype == np.float64
    assert_tensors_close(found, expected, max_relative=1.2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("gemma3", "embed"), ("qwen2_moe", "shared_gate"), ("glm4_moe", "router"),
        ("gpt_oss", "sinks"), ("gpt_oss_bfloat16", "expert_gate_up_bias"),
        ("gemma2", "attention_softcap"), ("gemma2", "logits_softcap"),
        ("qwen3_5", "linear_decay"), ("qwen3_next", "conv_k"), ("qwen3_5_moe", "attn_gate"),
    ],
)  # fmt: skip
def test_gradients_of_families_are_those_of_jax_in_float64(case, part, sequences, plain_logprobs):
    """Gemma 3: gains of 1 + w, a table that is the head times a factor, norms after, GELU, two
    rotations. Qwen2-MoE: a shared expert with a gate. GLM-4.5: a router of sigmoids. gpt-oss:
    sinks, biases of all products, a clamped SwiGLU. Gemma 2: soft caps.

    Tolerance: as that of experts; Gemma's layers are twice as many, with twice as many norms. A
    gradient that leaves out the part is further away.
    """
    model = family(case, "float32")
    found = gradient(model, pack(sequences, length=89))

    def value(params, config=model.config):
        return objective(jnp, plain_logprobs, config, params, sequences)

    def without_cap(params):
        """Of a model without the part."""
        return value(params, dataclasses.replace(model.config, **{part: None}))

    def without(params):
        """The part seen as a constant: of a table its use as one."""
        if part == "embed":
            return {
                **params,
                "lm_head": params["embed"],
                "embed": lax.stop_gradient(params["embed"]),
            }
        layers = [
            {name: lax.stop_gradient(x) if name == part else x for name, x in layer.items()}
            for layer in params["layers"]
        ]
        return {**params, "layers": layers}

    is_cap = part.endswith("softcap")
    others = (value, without_cap if is_cap else lambda params: value(without(params)))
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), master_params(model))
        expected, wrong = (jax.device_get(jax.jit(jax.grad(other))(params)) for other in others)
    for tree in (found, expected, wrong):
        for layer in tree["layers"]:
            correction = layer.pop("router_correction", np.zeros(1))
            assert not correction.any()  # it has a part in the choice alone
    assert_tensors_close(found, expected, max_relative=3e-5)
    with pytest.raises(AssertionError, match="embed" if is_cap else part):
        assert_tensors_close(wrong, expected, max_relative=3e-5)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("case", ["gpt_oss", "gemma2", "qwen3_5_moe"])
def test_gradients_of_families_are_bitwise_batch_invariant(case, sequences):
    """Padded, and packed with room for more sequences, rematerialised; the control: XLA's sums."""
    model = family(case, "bfloat16")
    padded = pack(sequences, length=89)
    packed = pack(sequences, length=120, layout=Layout.PACKED, num_sequences=5)
    expected, found = gradient(model, padded), gradient(model, packed, remat=True)
    for name, leaf in by_name(found).items():
        assert_bitwise_equal(leaf, by_name(expected)[name], claim=f"gradient of {name}")
    by_xla = (gradient(model, batch, backward=Backward.XLA) for batch in (padded, packed))
    assert sum(jax.tree.leaves(jax.tree.map(count_different_bits, *by_xla))) > 0


@pytest.mark.parametrize("backend", [Backend.PORTABLE, Backend.REFERENCE], ids=lambda it: it.value)
def test_a_clamp_has_slope_1_up_to_its_limit_and_0_past_it(backend):
    """The formula has the values of the kernel, and at the limits the slopes of torch's clamp."""
    clamp = SwigluClamp(alpha=1.702, limit=7.0)
    gate = jnp.asarray([-9.0, -7.0, 0.5, 7.0, 7.25], jnp.bfloat16)
    gate_up = jnp.stack([jnp.repeat(gate, 5), jnp.tile(gate, 5)]).reshape(1, -1)
    out, pull = jax.vjp(lambda x: plain_swiglu(x, clamp), gate_up.astype(jnp.float32))
    (slopes,) = pull(jnp.ones_like(out))
    of_gate, of_up = np.split(np.asarray(slopes).reshape(2, 5, 5), 2)
    assert (of_gate[0, 4] == 0).all() and (of_gate[0, 3, 1:] != 0).all()
    is_clamped = np.asarray([True, False, False, False, True])
    assert ((of_up[0] == 0) == is_clamped[None]).all()
    kernel = np.asarray(swiglu(gate_up, clamp=clamp, backend=backend), np.float32)
    want = np.asarray(out)
    assert np.abs(kernel - want).max() <= 2.0**-8 * np.abs(want).max()  # one rounding


@pytest.mark.parametrize(
    ("backend", "expected"), [(Backend.PORTABLE, [2, 2, 8]), (Backend.SM90, [1, 1, 1])],
    ids=["portable", "sm90"],
)  # fmt: skip
def test_rows_of_short_sequences_share_blocks(backend, expected, weighted, monkeypatch):
    """Eight sequences of 15 rows: two blocks of 64, where leaves are eight.

    On a GPU one block holds all rows, and one group all leaves.
    """
    batch, blocks = pack(weighted(*[16] * 8), length=15), []

    def run(function, operands, *, is_hidden):
        assert is_hidden == (backend is Backend.PORTABLE)
        blocks.append(len(jax.tree.leaves(operands)[0]))
        return jax.vmap(function)(*operands)

    monkeypatch.setattr(gradients, "_one_by_one", run)
    sums = CanonicalSums(leaves=TokenLeaves.of(batch), profile=NumericsProfile(), backend=backend)
    x = jnp.arange(120 * 4, dtype=jnp.float32).reshape(120, 4)
    assert_bitwise_equal(sums.map_rows(jnp.negative, (x,)), -x, claim="rows keep their places")
    (of_x,), _ = sums.of_formula(jnp.square, (x,), (), jnp.ones_like(x))
    assert_bitwise_equal(of_x, 2 * x, claim="and their cotangents")
    gain = jnp.ones((1, 4))
    of_rows, of_shared = sums.of_formula(jnp.multiply, (x,), (gain,), x)
    assert_bitwise_equal(of_rows[0], x, claim="rows of leaves keep theirs")
    assert_bitwise_equal(of_shared[0], jnp.sum(x * x, axis=0)[None], claim="sums of integers")
    assert blocks == expected


WIDTHS = (256, 128, 128)
"""Of q, k and v: at least four leaves each."""


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.PORTABLE], ids=lambda it: it.value)
@pytest.mark.parametrize("tp", [2, 4])
def test_rows_times_a_joined_matrix_is_bitwise_mesh_invariant(backend, tp, weighted):
    """Unrounded. The control adds q, k and v as one tree: each rank has other neighbours there."""
    rng = np.random.default_rng(tp)
    x, w = (
        [jnp.asarray(rng.standard_normal((rows, n)) * 2.0 ** rng.integers(-8, 8, n), jnp.bfloat16)
         for n in WIDTHS]
        for rows in (5, 24)
    )  # fmt: skip
    assert_order_sensitive(np.asarray(x[0], np.float32) * np.asarray(w[0], np.float32)[:1])
    leaves = TokenLeaves.of(pack(weighted(5), length=4))

    def total(ranks: int, *, is_apart: bool) -> np.ndarray:
        sums = CanonicalSums(leaves=leaves, profile=NumericsProfile(), backend=backend, tp=ranks)
        widths = tuple(n // ranks for n in WIDTHS) if is_apart else ()

        def run(x, w):
            joined = (jnp.concatenate(parts, axis=1) for parts in (x, w))
            return sums.rows_times(*joined, widths=widths, is_split=True)

        split = jax.shard_map(
            run, mesh=make_mesh(1, ranks), in_specs=P(None, TP_AXIS), out_specs=P(),
            check_vma=False,
        )  # fmt: skip
        return np.asarray(jax.jit(split)(x, w))

    one = total(1, is_apart=True)
    assert_bitwise_equal(total(tp, is_apart=True), one, claim=f"tp={tp} has the bits of tp=1")
    assert count_different_bits(total(tp, is_apart=False), total(1, is_apart=False)) > 0


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("tp", [2, 4])
def test_the_sum_over_heads_is_bitwise_mesh_invariant(tp, weighted):
    """Of 24 heads: eight leaves of three. The control adds the heads of each rank in order."""
    parts = np.random.default_rng(1).standard_normal((2, 64, 24, 16)).astype(np.float32)
    leaves = TokenLeaves.of(pack(weighted(5), length=4))
    assert_order_sensitive(parts[0, 0].T)

    def total(ranks: int) -> np.ndarray:
        sums = CanonicalSums(
            leaves=leaves, profile=NumericsProfile(), backend=Backend.PORTABLE, tp=ranks
        )
        split = jax.shard_map(
            sums.of_heads, mesh=make_mesh(1, ranks), in_specs=P(None, None, TP_AXIS),
            out_specs=P(), check_vma=False,
        )  # fmt: skip
        return np.asarray(jax.jit(split)(parts))

    assert_bitwise_equal(total(tp), total(1), claim=f"tp={tp} has the bits of tp=1")
    by_rank = parts.reshape(2, 64, tp, 24 // tp, 16)
    in_order = [sum(by_rank[:, :, r, i] for i in range(24 // tp)) for r in range(tp)]
    other = sum(np.asarray(part).sum(axis=(0, 1)) for part in in_order)
    assert count_different_bits(np.asarray(other, np.float32), total(1)) > 0


def _references(function, *shapes) -> int:
    return str(jax.make_jaxpr(function)(*shapes)).count("new_ref")


@pytest.mark.slow
def test_a_training_pass_on_sm90_writes_no_reference():
    """Where a layer is computed again, JAX drops such a write; the cache of serving has one."""
    model = dummy_model(dummy_config(head_dim=64, num_layers=1))
    ctx = ForwardContext(config=model.config, profile=model.profile, backend=Backend.SM90, tp=1)

    def run(params, batch):
        return jnp.sum(token_logprobs(ctx, params, model.rope_tables, batch, remat=True)[0])

    def serve(qkv, pages):
        angles, table = jnp.zeros((2, 32)), jnp.zeros((1, 1), jnp.int32)
        return rope_into_cache(
            qkv,
            Rotation(angles, angles),
            CachePlace(pages, table, jnp.zeros((1, 2), jnp.int32), layer=0),
            eps=1e-5,
            backend=Backend.SM90,
        )

    batch = pack([Scored(token_ids=(1, 2, 3), weights=(0.0, 1.0, 1.0))], length=2)
    assert _references(jax.grad(run), master_params(model), batch) == 0
    shapes = ((2, 12, 64), (1, 1, 2, 2, 128, 64))
    assert _references(serve, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)) > 0


@pytest.mark.slow
def test_a_training_pass_of_experts_is_traced_for_sm90():
    """Every kernel checks its operands: shapes and dtypes that it does not take are refused."""
    config = dummy_config(
        hidden_size=128, head_dim=64, num_layers=1, experts=(8, 3), expert_width=128
    )
    model = dummy_model(config)
    ctx = ForwardContext(config=model.config, profile=model.profile, backend=Backend.SM90, tp=1)

    def run(params, batch):
        return jnp.sum(token_logprobs(ctx, params, model.rope_tables, batch, remat=True)[0])

    batch = pack([Scored(token_ids=(1, 2, 3), weights=(0.0, 1.0, 1.0))], length=2)
    masters = master_params(model)
    found = jax.eval_shape(jax.grad(run), masters, batch)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, masters)
