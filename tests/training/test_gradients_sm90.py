# SPDX-License-Identifier: Apache-2.0
"""Canonical gradients on a Hopper GPU: one hash whatever the cut, near those of the reference.

On any machine: what is computed side by side has the bits of one after the other.
"""

import dataclasses
import functools
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from detjax.models.config import ModelConfig
from detjax.models.hf_config import config_from_hf
from detjax.models.layers import ForwardContext
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.gradients import composed
from detjax.pallas_kernels.gradients.reference import REFERENCE_FORWARD
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.training import gradients
from detjax.training.batch import Scored, pack
from detjax.training.forward import token_logprobs
from detjax.training.gradients import Backward
from detjax.training.lora import LoraConfig, first_adapter, with_adapter
from detjax.training.trainer import Trainer, TrainState
from detjax.training.weights import master_params

SIZES: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
    "intermediate_size": 512,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
MIXTURE = SMALL | {
    "tie_word_embeddings": False, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}  # fmt: skip


def published(architecture: str, **values) -> ModelConfig:
    """The family's own form in a small size."""
    return config_from_hf({"architectures": [architecture], **values})


CONFIGS = {
    "dense": dummy_config(**SIZES, qk_norm=True, qkv_bias=True, window=70),
    "lora": dummy_config(**SIZES),
    "experts": dummy_config(**SIZES, experts=(8, 3), expert_width=128),
    # GeGLU, gains of 1 + w, a table times 19.625, windows in every other layer.
    "gemma3": published(
        "Gemma3ForCausalLM", **SMALL | {"hidden_size": 384}, sliding_window=70,
        query_pre_attn_scalar=64, layer_types=["sliding_attention", "full_attention"],
    ),
    "granite": published(
        "GraniteForCausalLM", **SMALL, embedding_multiplier=12.0, residual_multiplier=0.22,
        attention_multiplier=0.125, logits_scaling=8.0, rms_norm_eps=1e-5,
    ),
    # A shared expert with a gate.
    "qwen2_moe": published(
        "Qwen2MoeForCausalLM", **MIXTURE, num_experts=8, shared_expert_intermediate_size=256,
        decoder_sparse_step=1,
    ),
    # A router of sigmoids with a correction, a shared expert, part of a head rotated.
    "glm4_moe": published(
        "Glm4MoeForCausalLM", **MIXTURE, n_routed_experts=8, n_shared_experts=1,
        routed_scaling_factor=1.5, first_k_dense_replace=1, n_group=1, topk_group=1,
        partial_rotary_factor=0.5, use_qk_norm=True, attention_bias=True,
    ),
}  # fmt: skip
_EXPERTS = CONFIGS["experts"].experts
assert _EXPERTS is not None
CONFIGS |= {
    "sinks": dataclasses.replace(CONFIGS["dense"], has_sinks=True),
    "caps": dataclasses.replace(CONFIGS["lora"], attention_softcap=5.0, logits_softcap=6.0),
    # And clamps, of experts.
    "biases": dataclasses.replace(
        CONFIGS["experts"],
        experts=dataclasses.replace(_EXPERTS, clamp=SwigluClamp(alpha=1.702, limit=7.0)),
    ),
}
CONFIGS |= {
    "lora_beside_experts": CONFIGS["experts"],
    "lora_gemma3": CONFIGS["gemma3"],
    # Norms behind products alone, and over the whole of q and k.
    "lora_olmo2": published("Olmo2ForCausalLM", **SMALL, eos_token_id=2),
    # Norms behind products, and over each head of q and k. A layer without a window is not rotated.
    "lora_exaone4": published(
        "Exaone4ForCausalLM",
        **SMALL,
        eos_token_id=2,
        sliding_window=70,
        layer_types=["sliding_attention", "full_attention"],
    ),
    # Attention of gpt-oss: sinks, beside experts with biases and clamps.
    "lora_gpt_oss": dataclasses.replace(CONFIGS["biases"], has_sinks=True),
}
OF_ATTENTION = LoraConfig(
    rank=8, alpha=16.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")
)
ADAPTERS = {
    "lora": LoraConfig(rank=8, alpha=16.0),
    "lora_beside_experts": OF_ATTENTION,
    "lora_gemma3": LoraConfig(rank=8, alpha=16.0),
    "lora_olmo2": LoraConfig(rank=8, alpha=16.0),
    "lora_exaone4": LoraConfig(rank=8, alpha=16.0),
    "lora_gpt_oss": OF_ATTENTION,
}
"""The cases whose weights stay."""
LENGTH = 80
"""More than a leaf of tokens, and than the window."""


@pytest.fixture(scope="module")
def sequences(weighted) -> list[Scored]:
    """One is longer than a leaf."""
    return weighted(5, 81, 9, 40)


@cache
def trainer(case: str, backend: Backend, backward: Backward = Backward.CANONICAL) -> Trainer:
    """Its momentum after one step is the gradient, exactly: `g + 0.9 * 0`."""
    return Trainer(
        dummy_model(CONFIGS[case], backend=backend), optax.sgd(1e-3, momentum=0.9),
        mesh=make_mesh(1, 1, platform=backend.platform), clip_norm=float("inf"),
        lora=ADAPTERS.get(case), backward=backward, remat=False,
    )  # fmt: skip


def some_steps_later(state: TrainState) -> TrainState:
    """Random values where an adapter begins with zeros, behind which no gradient is seen."""
    rng = np.random.default_rng(1)

    def moved(leaf: jax.Array) -> jax.Array:
        if np.asarray(leaf).any():
            return leaf
        drawn = rng.standard_normal(leaf.shape, np.float32) * 0.4
        return jax.device_put(drawn, leaf.sharding)

    return dataclasses.replace(state, params=jax.tree.map(moved, state.params))


def gradient(of: Trainer, sequences: list[Scored], size: int) -> dict[str, np.ndarray]:
    """Of the step's list of sequences, in microbatches of `size`, by name.

    A correction of a router has none: it has a part in the choice alone.
    """
    batches = [pack(sequences[i : i + size], length=LENGTH) for i in range(0, len(sequences), size)]
    state, _ = of.step(some_steps_later(of.init()), batches)
    found = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
    }
    corrections = {name for name in found if "router_correction" in name}
    assert not any(found[name].any() for name in corrections)
    return {name: leaf for name, leaf in found.items() if name not in corrections}


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("case", CONFIGS)
def test_gradients_on_a_gpu_are_bitwise_batch_invariant(case, sequences):
    assert_batch_invariant(trainer(case, Backend.SM90), sequences)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("case", ["gemma3", "granite", "qwen2_moe", "glm4_moe"])
def test_gradients_of_families_are_bitwise_batch_invariant(case, sequences):
    assert_batch_invariant(trainer(case, Backend.PORTABLE), sequences)


def assert_batch_invariant(of: Trainer, sequences: list[Scored]) -> None:
    """Microbatches of four, two and one. The probe: another order of the list has other bits."""
    expected = gradient(of, sequences, 4)
    assert all(np.isfinite(leaf).all() and leaf.any() for leaf in expected.values())
    parts = [gradient(of, [one], 1) for one in sequences]
    name = max(expected, key=lambda name: expected[name].size)
    assert_order_sensitive(np.stack([part[name].reshape(-1) for part in parts], axis=1))
    for size in (2, 1):
        found = gradient(of, sequences, size)
        for name, leaf in found.items():
            assert_bitwise_equal(leaf, expected[name], claim=f"{name}, microbatches of {size}")
    turned = gradient(of, [sequences[i] for i in (0, 2, 1, 3)], 1)
    assert sum(count_different_bits(turned[name], expected[name]) for name in expected) > 0


@pytest.mark.gpu
@pytest.mark.invariance
def test_gradients_of_several_groups_are_bitwise_batch_invariant(sequences, monkeypatch):
    """Four leaves, or fewer, in groups of two, and blocks of 128 rows."""
    monkeypatch.setattr(gradients, "WIDE_LEAVES", 2)
    monkeypatch.setattr(gradients, "WIDE_ROWS", 128)
    of = trainer("dense", Backend.SM90)
    expected, found = (gradient(of, sequences, size) for size in (4, 1))
    for name, leaf in found.items():
        assert_bitwise_equal(leaf, expected[name], claim=f"{name}, microbatches of 1")


@pytest.mark.gpu
@pytest.mark.control
def test_control_gradients_of_xlas_sums_on_a_gpu_depend_on_the_cut(sequences):
    of = trainer("dense", Backend.SM90, Backward.XLA)
    four, one = (gradient(of, sequences, size) for size in (4, 1))
    assert sum(count_different_bits(one[name], four[name]) for name in four) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", CONFIGS)
def test_gradients_on_a_gpu_are_near_those_of_the_reference(case, sequences):
    """To 0.5 % of each tensor's norm, times the root of the number of layers.

    Tolerance: products and the forward pass have the same bits. Formulas (exponentials, roots, sums
    of 256 channels) differ by some 2**-20, so one element in 2**11 is rounded to another bfloat16,
    2**-8 away: an error of 2**-8 * 2**-5.5 = 9e-5 of the norm. Some thirty roundings of a layer and
    of the log-softmax, at random: 5e-4. Ten times that is allowed, for tensors whose terms cancel.
    Two layers have twice as many roundings, which add up as the root of two. An H200 had 0.11 % of
    one layer and 0.60 % of two (OLMo), where 0.71 % is allowed.
    """
    bound = 5e-3 * CONFIGS[case].num_layers ** 0.5
    expected = gradient(trainer(case, Backend.REFERENCE), sequences, 4)
    found = gradient(trainer(case, Backend.SM90), sequences, 4)
    for name, want in expected.items():
        size = np.linalg.norm(expected[name.replace("k_bias", "q_bias")])
        error = np.linalg.norm(found[name] - want) / size
        assert error <= bound, f"{name}: {error:.2g} of its norm"


def _rows(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


@pytest.mark.invariance
@pytest.mark.parametrize("at_once", (2, 4))
def test_sums_over_tokens_are_one_tree_however_many_are_made_at_once(at_once):
    """Four shares of eight leaves: two and two, or all side by side, as a GPU has them.

    The control adds the shares left to right.
    """
    a, b = _rows(4, 512, 64, seed=1), _rows(4, 512, 128, seed=2)
    expected = np.asarray(composed.token_sum(REFERENCE_FORWARD, a, b, None))
    shares = [
        np.asarray(composed.token_sum(REFERENCE_FORWARD, a[i : i + 1], b[i : i + 1], None))
        for i in range(4)
    ]
    assert_order_sensitive(np.stack(shares, axis=-1))
    wide = dataclasses.replace(REFERENCE_FORWARD, at_once=at_once * 64 * 128)
    found = np.asarray(composed.token_sum(wide, a, b, None))
    assert_bitwise_equal(found, expected, claim=f"{at_once} shares at once")
    in_order = ((shares[0] + shares[1]) + shares[2]) + shares[3]
    assert count_different_bits(in_order, expected) > 0


@pytest.mark.invariance
def test_heads_have_their_gradients_however_many_are_made_at_once():
    """Two sequences of two query heads: one after the other, two at once, and all four.

    With a cap and sinks.

    The control adds keys, queries and channels backwards.
    """
    q, out, of_out = (_rows(2, 2, 128, 16, seed=i) for i in range(3))
    k, v = (_rows(2, 1, 128, 16, seed=i) for i in (3, 4))

    def backwards(x, w, bias, **options):
        return REFERENCE_FORWARD.linear(x[:, ::-1], w[:, ::-1], bias, **options)

    def gradients(at_once: int, linear=REFERENCE_FORWARD.linear) -> list[np.ndarray]:
        kernels = dataclasses.replace(REFERENCE_FORWARD, at_once=at_once * 128**2, linear=linear)
        options = {"window": None, "softcap": 2.0, "sinks": jnp.asarray([0.5, -1.0])}
        run = jax.jit(functools.partial(composed.attention_gradient, kernels, **options))
        return [np.asarray(x) for x in run(q, k, v, out, of_out, None)]

    expected = gradients(0)
    assert_order_sensitive(np.asarray(out, np.float32) * np.asarray(of_out, np.float32))
    for at_once in (2, 4):
        for x, y in zip(gradients(at_once), expected, strict=True):
            assert_bitwise_equal(x, y, claim=f"{at_once} heads at once")
    turned = gradients(4, backwards)[:3]  # scores have 16 channels: one step, whatever its order
    assert all(count_different_bits(x, y) > 0 for x, y in zip(turned, expected[:3], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("count", (1, 4))
def test_gradients_are_traced_for_a_gpu(case, count, sequences):
    """On any machine: shapes and dtypes that a kernel does not take are refused."""
    model = dummy_model(CONFIGS[case])
    ctx = ForwardContext(config=model.config, profile=model.profile, backend=Backend.SM90, tp=1)
    masters, lora = master_params(model), ADAPTERS.get(case)
    trained = masters if lora is None else first_adapter(model.config, lora, seed=0)

    def run(params, batch):
        whole = params if lora is None else with_adapter(masters, params, lora)
        return jnp.sum(token_logprobs(ctx, whole, model.rope_tables, batch, remat=False)[0])

    found = jax.eval_shape(jax.grad(run), trained, pack(sequences[:count], length=LENGTH))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, trained)
