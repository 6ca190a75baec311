# SPDX-License-Identifier: Apache-2.0
"""Noise is left out where no token can be the best: the same choice, interpreted on a CPU."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.sampling import noise, sm90_choice, sm90_reach
from detjax.pallas_kernels.sampling import sm90 as sampling
from detjax.testing.bitwise import assert_bitwise_equal, count_different_bits
from detjax.testing.cases import quick_and_slow

F32 = np.float32
FIRST = 256
VOCAB = 128 * 21
"""Six tiles of four blocks, the last of which begins early."""


def plain(size: int) -> rows.Arithmetic:
    return rows.strided(size, 1, True)


# --- the bounds --------------------------------------------------------------------------------


def some_bits(count: int) -> np.ndarray:
    """The least and the greatest, those beside powers of two, and random ones of every size."""
    rng = np.random.default_rng(3)
    beside = [2**k + d for k in range(33) for d in (-2, -1, 0, 1, 2)]
    sizes = rng.integers(0, 2**32, count, np.uint64) >> rng.integers(0, 32, count, np.uint64)
    bits = np.concatenate([np.arange(count), 2**32 - 1 - np.arange(count), beside, sizes])
    return np.unique(bits[(bits >= 0) & (bits < 2**32)].astype(np.uint32))


def test_noise_is_within_its_bounds():
    bits = some_bits(20_000)
    u = np.asarray(noise.uniform(jnp.asarray(bits)), np.float64)
    assert u.min() == 2.0**-33, "the least bits are among them"
    exact = -np.log(-np.log1p(-u))
    reach = np.asarray(sm90_reach.noise_reach(jnp.asarray(bits), plain(len(bits))), np.float64)
    assert (reach[1:] >= exact[1:] - 2.0**-14).all()
    assert reach[0] == np.inf
    assert (reach <= exact + 2.0**-13)[(u < 2.0**-14) & (bits >= 2**14)].all(), "and near them"
    assert (exact < sm90_reach.MAX_NOISE - 2.0**-10).all()
    assert exact.max() > sm90_reach.MAX_NOISE - 2.0**-9, "the greatest noise is near its bound"


def scored(count: int, seed: int):
    """Logits of all magnitudes, temperatures, bits, and scores as the kernel rounds them."""
    rng = np.random.default_rng(seed)
    magnitude = rng.choice([1e-30, 1e-3, 1.0, 30.0, 1e4, 1e9, 1e36, 3e38], count)
    x = (rng.uniform(-1, 1, count) * magnitude).astype(F32)
    t = rng.choice([1e-30, 1e-3, 0.1, 0.7, 1.0, 1.3, 50.0, 1e8, 1e30], count).astype(F32)
    x[: count // 2] = (rng.normal(0, 6, count // 2) * t[: count // 2]).astype(F32)
    sizes = rng.integers(0, 2**32, count, np.uint64) >> rng.integers(0, 32, count, np.uint64)
    bits = sizes.astype(np.uint32)
    drawn = np.asarray(noise.gumbel(jnp.asarray(bits)))
    with np.errstate(over="ignore"):
        return x, t, bits, (x / t).astype(F32) + drawn


@pytest.mark.parametrize("seed", quick_and_slow((0,), tuple(range(1, 9))))
def test_a_token_reaches_its_own_score(seed):
    """So one that does not reach the score of another is behind it."""
    x, t, bits, score = scored(200_000, seed)
    math = plain(len(x))
    with np.errstate(over="ignore"):
        reciprocal = (F32(1) / t).astype(F32)
    of_bits = sm90_reach.noise_reach(jnp.asarray(bits), math)
    least = np.asarray(sm90_reach.limit(jnp.asarray(score)))
    for of_noise in (of_bits, sm90_reach.MAX_NOISE):
        reach = np.asarray(sm90_reach.score_reach(x, reciprocal, of_noise, math))
        assert not (reach < least).any()
    exact = np.asarray(sm90_reach.score_reach(x, reciprocal, of_bits, math))
    finite = np.isfinite(score)
    assert (exact < score)[finite].any(), "without the allowance for rounding, some are not reached"


# --- the choice --------------------------------------------------------------------------------


def choices(rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and temperatures, a row a case; powers of two, as a CPU may multiply to divide."""
    normal = rng.standard_normal((16, vocab)).astype(F32)
    temperature = np.full(16, 0.5, F32)
    normal[1] *= 3
    normal[2], temperature[2] = 0.25, 1.0  # all equal: noise alone decides
    temperature[3] = 2.0**99  # and here
    temperature[4] = 2.0**-99  # logits alone, and scores overflow
    normal[5], temperature[5] = 2.0**30, 1.0  # noise is rounded away: the first of all
    normal[5, : vocab // 2] = 1.0
    normal[6, rng.integers(0, vocab, 3)] = 60.0  # the others cannot win
    normal[7, rng.random(vocab) < 0.99] = -np.inf
    normal[8] = -np.inf
    normal[9, rng.integers(0, vocab, 5)] = np.nan
    normal[10] = np.nan
    normal[11, rng.integers(0, vocab, 2)] = np.inf
    normal[12] *= 1e30
    normal[13] = np.finfo(F32).min
    normal[13, -1] = -3e38
    # The same scores but for a few of their last bits, all along the row.
    normal[14] = 1e6 + rng.integers(0, 3, vocab) / 16
    temperature[15] = 0.0
    return normal, temperature


def draw(seed: int, vocab: int = VOCAB):
    rng = np.random.default_rng(seed)
    logits, temperature = choices(rng, vocab)
    key = tuple(rng.integers(0, 2**32, len(logits), np.uint32) for _ in range(2))
    return logits, temperature, *key


def cut_scores(x, bits, temperature, tile=None):
    """Scores whose noise is cut after 12 binary places.

    Two programs of XLA's CPU may round a logarithm differently; cut, they do not, and many tie.
    """
    return x / temperature + jnp.floor(noise.gumbel(bits) * 2.0**12) * 2.0**-12


@jax.jit
def first_of_all(x, temperature, *key):
    """Token of the first of the greatest scores."""
    ids = FIRST + jnp.arange(VOCAB, dtype=jnp.int32)[None]
    bits = noise.token_bits(tuple(k[:, None] for k in key), ids)
    scores = jnp.where(temperature[:, None] == 0, x, cut_scores(x, bits, temperature[:, None]))
    return FIRST + jnp.argmax(scores, axis=1).astype(jnp.int32)


def chosen(monkeypatch, *, skip: bool, parts: int):
    """The compiled choice with so many parts of a row: maxima, sums, best score, token."""
    monkeypatch.setattr(sm90_choice, "scores_of", cut_scores)
    monkeypatch.setattr(sm90_choice, "SKIP_NOISE", skip)
    monkeypatch.setattr(sm90_choice, "_num_parts", lambda num_rows, tiles: min(parts, tiles))
    monkeypatch.setattr(sm90_choice, "MIN_TURNS", 1)
    traced = inspect.unwrap(sm90_choice.stats_and_choice)

    @jax.jit
    def run(x, t, a, b):
        return traced(x, t, (a, b), first_token_id=FIRST, vocab_block=128, interpret=True)

    return run.lower(*draw(0)).compile()


RESULTS = "maxima", "sums", "best score", "token"


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("parts", quick_and_slow((1,), (2, 5, 128)))
def test_the_choice_is_that_of_all_noise(parts, monkeypatch):
    full = chosen(monkeypatch, skip=False, parts=parts)
    ours = chosen(monkeypatch, skip=True, parts=parts)
    moved = 0
    for seed in range(6):
        logits, *rest = draw(seed)
        want, found = full(logits, *rest), ours(logits, *rest)
        for name, a, b in zip(RESULTS, found, want, strict=True):
            assert_bitwise_equal(a, b, claim=f"the {name} of the full computation, draw {seed}")
        moved += int((np.asarray(want[3]) - FIRST != logits.argmax(axis=1)).sum())
        usual = ~np.isnan(logits).any(axis=1)
        assert_bitwise_equal(
            np.asarray(found[3])[usual],
            np.asarray(first_of_all(logits, *rest))[usual],
            claim="the first of the greatest scores",
        )
    assert moved > 20, "the probe: noise decides"


@pytest.mark.slow
@pytest.mark.control
@pytest.mark.parametrize("bound", ("MAX_NOISE", "LOG_2_32"))
def test_control_a_bound_that_is_too_small_chooses_other_tokens(bound, monkeypatch):
    full = chosen(monkeypatch, skip=False, parts=1)
    noise_range = sm90_reach.MAX_NOISE + math.log(24 * math.log(2))
    monkeypatch.setattr(sm90_reach, bound, getattr(sm90_reach, bound) - noise_range - 0.5)
    ours = chosen(monkeypatch, skip=True, parts=1)
    different = sum(
        count_different_bits(ours(*draw(seed))[3], full(*draw(seed))[3]) for seed in range(3)
    )
    assert different > 3


# --- with a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("vocab", (512, 32000, 128256))
@pytest.mark.parametrize("parts", (1, 7, 128))
def test_the_choice_is_that_of_all_noise_on_a_gpu(vocab, parts, monkeypatch):
    monkeypatch.setattr(sm90_choice, "_num_parts", lambda num_rows, tiles: min(parts, tiles))
    monkeypatch.setattr(sm90_choice, "MIN_TURNS", 1)
    traced = inspect.unwrap(sm90_choice.stats_and_choice)

    def compiled(skip: bool):
        monkeypatch.setattr(sm90_choice, "SKIP_NOISE", skip)

        @jax.jit
        def run(x, t, a, b):
            return traced(x, t, (a, b), first_token_id=FIRST, vocab_block=128)

        return run.lower(*draw(0, vocab)).compile()

    full, ours = compiled(False), compiled(True)
    for seed in range(4):
        logits, temperature, *key = draw(seed, vocab)
        temperature[:4] = F32(0.7), F32(1.3), F32(1.0), F32(1e30)
        want, found = full(logits, temperature, *key), ours(logits, temperature, *key)
        for name, a, b in zip(RESULTS, found, want, strict=True):
            assert_bitwise_equal(a, b, claim=f"the {name} of the full computation, draw {seed}")
        scores = sampling.gumbel_scores(logits, temperature, key, first_token_id=FIRST)
        usual = ~np.isnan(logits).any(axis=1)
        first = FIRST + np.argmax(np.asarray(scores), axis=1).astype(np.int32)
        assert_bitwise_equal(
            np.asarray(found[3])[usual], first[usual], claim="the first of the greatest scores"
        )
