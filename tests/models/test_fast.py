# SPDX-License-Identifier: Apache-2.0
"""The decoder without claims: as accurate as the invariant one, on any mesh, with 8-bit weights."""

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine.running.device_arrays import empty_pages
from detjax.models.bundled import bundled_model_path
from detjax.models.fast import quantise_params, quantised_specs
from detjax.models.forward_paths import KernelMode
from detjax.models.layers import Tokens
from detjax.models.loading import LoadedModel, load_model
from detjax.models.params import MATRICES
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import batch_of, dummy_config, dummy_model, scoring_step

FLOAT32 = NumericsProfile(compute_dtype="float32")
EIGHT_BIT = ("int8", "float8_e4m3fn")

CONFIGS = {
    "every_switch": {"qkv_bias": True, "o_bias": True, "qk_norm": True, "window": 20},
    "repeated_heads": {"num_kv_heads": 1},
}


TABLE = np.asarray([[3, 1], [0, 4], [2, 5]], np.int32)


def prompts(vocab_size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab_size, length) for length in (150, 40, 129)]


def score(model: LoadedModel, path: KernelMode) -> np.ndarray:
    """Logits of three ragged prompts: a chunk of each, then the rest, padded, over the cache."""
    step, pages = scoring_step(model, path), empty_pages(model, 6)
    ids = prompts(model.config.vocab_size)
    pages, first = step(pages, batch_of([(p[:30], 0) for p in ids], TABLE))
    pages, rest = step(pages, batch_of([(p[30:], 30) for p in ids], TABLE))
    rest = [np.asarray(rest)[i, : len(p) - 30] for i, p in enumerate(ids)]
    return np.concatenate([np.asarray(first).reshape(90, -1), *rest])


@cache
def invariant_logits(name: str, profile: NumericsProfile) -> np.ndarray:
    return score(dummy_model(dummy_config(**CONFIGS[name]), profile=profile), "invariant")


def distance(actual: np.ndarray, reference: np.ndarray) -> float:
    """Root mean square of the difference."""
    return float(np.sqrt(np.mean((actual.astype(np.float64) - reference) ** 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("every_switch", 4),
        pytest.param("repeated_heads", 4, marks=pytest.mark.nightly),
        *(pytest.param(name, 1, marks=pytest.mark.nightly) for name in CONFIGS),
    ],
)
def test_bfloat16_is_as_close_to_float32_as_the_invariant_path(name, tp):
    # Both round activations to bfloat16: the invariant path 10 times a layer, the fast one also
    # before each bias and residual is added, 14 times at most. Independent roundings add in
    # squares, sqrt(14 / 10) = 1.18; a quarter is left for what is not independent.
    reference = invariant_logits(name, FLOAT32)
    ours = distance(invariant_logits(name, NumericsProfile()), reference)
    fast = score(dummy_model(dummy_config(**CONFIGS[name]), tp=tp), "fast")
    assert np.isfinite(fast).all()
    assert 0 < distance(fast, reference) <= 1.18 * 1.25 * ours


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_float32_is_close_to_the_invariant_path(tp):
    # The two differ in the order of float32 sums alone. A sum of K terms has K roundings of 2**-24,
    # which add in squares: sqrt(K) * 2**-24 of its size. The longest K is 384; 8 products follow
    # one another, and their errors are added at worst.
    reference = invariant_logits("every_switch", FLOAT32)
    config = dummy_config(**CONFIGS["every_switch"])
    fast = score(dummy_model(config, tp=tp, profile=FLOAT32), "fast")
    size = float(np.sqrt(np.mean(reference**2)))
    assert distance(fast, reference) <= 8 * 384**0.5 * 2.0**-24 * size
    assert (fast.argmax(axis=1) == reference.argmax(axis=1)).mean() > 0.99


@cache
def bundled(tp: int) -> LoadedModel:
    return load_model(
        str(bundled_model_path()),
        profile=NumericsProfile(),
        mesh=make_mesh(1, tp),
        backend=Backend.PORTABLE,
    )


TEXT = (
    "The old house by the sea was quiet when she came to the door, and for a long time nobody "
    "answered. At last the old man opened it, and looked at her as if she had been a stranger."
)


def bundled_logits(model: LoadedModel, path: KernelMode) -> np.ndarray:
    ids = Tokenizer.from_folder(bundled_model_path()).encode(TEXT)
    tokens = batch_of([(ids, 0)], np.asarray([[0]], np.int32))
    return np.asarray(scoring_step(model, path)(empty_pages(model, 1), tokens)[1])[0]


def agreement(actual: np.ndarray, expected: np.ndarray) -> float:
    """Share of positions whose most likely token is the same."""
    return float((actual.argmax(axis=1) == expected.argmax(axis=1)).mean())


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_the_bundled_model_chooses_the_same_tokens(tp):
    assert (
        agreement(bundled_logits(bundled(tp), "fast"), bundled_logits(bundled(1), "invariant")) == 1
    )


def quantised(model: LoadedModel, dtype: str) -> LoadedModel:
    return dataclasses.replace(
        model,
        params=quantise_params(model.params, jnp.dtype(dtype)),
        partition_specs=quantised_specs(model.partition_specs),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_8_bit_drafts_agree_with_the_model_they_draft_for(dtype):
    fast = bundled_logits(quantised(bundled(1), dtype), "fast")
    assert agreement(fast, bundled_logits(bundled(1), "invariant")) >= 0.9


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_8_bit_weights_are_within_half_a_step(dtype):
    params = dummy_model(dummy_config()).params
    params["layers"][0]["o"] = params["layers"][0]["o"].at[3].set(0.0)
    narrow = quantise_params(params, jnp.dtype(dtype))
    for name in MATRICES:
        w, n = params["layers"][0][name], narrow["layers"][0][name]
        assert n["q"].dtype == dtype and n["q"].shape == w.shape
        assert n["scale"].dtype == np.float32 and n["scale"].shape == w.shape[:1]
        w, q = np.asarray(w, np.float64), np.asarray(n["q"]).astype(np.float64)
        scale = np.asarray(n["scale"], np.float64)[:, None]
        # int8 has steps of one; e4m3 of 2**-3 of a number's power of two, and 2**-9 at the least.
        # The division before is in float32 and may move a tie.
        power = np.floor(np.log2(np.maximum(np.abs(w / scale), 2.0**-6)))
        step = 1 if dtype == "int8" else np.exp2(power - 3)
        assert (np.abs(q * scale - w) <= scale * step * (0.5 + 1e-5)).all()
        assert (np.abs(q).max(axis=1)[np.abs(w).max(axis=1) > 0] == np.abs(q).max()).all()
    assert (np.asarray(narrow["layers"][0]["o"]["q"])[3].astype(np.float32) == 0).all()
    assert narrow["embed"] is params["embed"]
    assert isinstance(narrow["lm_head"], dict)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_8_bit_weights_split_over_ranks_as_the_matrices_did(dtype):
    config = dummy_config()
    whole, split = (dummy_model(config, tp=tp) for tp in (1, 4))
    narrow_whole, narrow_split = (
        quantise_params(m.params, jnp.dtype(dtype)) for m in (whole, split)
    )
    for name in ("o", "down"):  # the fused matrices hold their rows in another order at tp = 4
        for part in ("q", "scale"):
            assert_bitwise_equal(
                narrow_split["layers"][0][name][part],
                narrow_whole["layers"][0][name][part],
                claim="a scale is of a whole row, wherever its columns are",
            )
    q = narrow_split["layers"][0]["down"]
    assert q["q"].sharding.spec == split.params["layers"][0]["down"].sharding.spec
    assert q["scale"].sharding.is_fully_replicated
    a, b = (score(quantised(model, dtype), "fast") for model in (whole, split))
    assert agreement(a, b) > 0.9


def test_another_8_bit_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype=float8_e5m2 must be one of"):
        quantise_params(dummy_model(dummy_config()).params, jnp.dtype("float8_e5m2"))


def test_pages_of_others_are_left_alone_and_never_read():
    model = dummy_model(dummy_config())
    step, shape = scoring_step(model, "fast"), empty_pages(model, 6).shape
    tokens = batch_of([([5] * 20, 100), ([6] * 9, 0)], TABLE[:2])
    clean = jnp.zeros(shape, jnp.bfloat16)
    dirty = np.full(shape, np.nan, jnp.bfloat16)
    # What stands before the first row's new tokens must be real.
    dirty[:, 3, :, :, :100] = 0
    pages, logits = step(jnp.asarray(dirty), tokens)
    claim = "freed pages and positions not yet written do not matter"
    for row, length in ((0, 20), (1, 9)):
        assert_bitwise_equal(
            np.asarray(logits)[row, :length], np.asarray(step(clean, tokens)[1])[row, :length],
            claim=claim,
        )  # fmt: skip
    pages, written = np.array(pages), np.zeros(shape, bool)
    written[:, 3, :, :, 100:120] = True
    written[:, 0, :, :, :9] = True
    assert_bitwise_equal(
        pages[~written], dirty[~written], claim="padding and other pages are not written"
    )
    assert np.isfinite(pages[written].astype(np.float32)).all()


def test_a_row_of_padding_alone_is_finite():
    model = dummy_model(dummy_config())
    tokens = Tokens(
        ids=np.zeros((2, 1), np.int32),
        positions=np.asarray([[-1], [0]], np.int32),
        page_table=TABLE[:2],
    )
    pages, logits = scoring_step(model, "fast")(empty_pages(model, 6), tokens)
    assert np.isfinite(np.asarray(logits)).all()
    assert not np.asarray(pages[:, [3, 1]]).any()
