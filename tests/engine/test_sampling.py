# SPDX-License-Identifier: Apache-2.0
"""The noise specification and the filters, against definitions written another way."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32
from jax.sharding import PartitionSpec as P
from scipy import stats

from detjax.engine.requests.sampling_params import MAX_TEMPERATURE, SamplingParams
from detjax.engine.sampling.sampling import SamplingRows, choose, choose_among, choose_plain
from detjax.models.layers import ForwardContext
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.sampling import noise
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, assert_within_ulp, wide
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config

VECTORS = Path(__file__).parents[1] / "golden" / "noise_vectors.json"
VOCAB = 320


def _bits(seed: int, seq: int, position: int, tokens) -> np.ndarray:
    key = noise.row_key(
        jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32), jnp.uint32(seq),
        jnp.int32(position),
    )  # fmt: skip
    return np.asarray(noise.token_bits(key, jnp.asarray(tokens, jnp.int32)))


def test_threefry_is_that_of_random123_and_jax():
    rng = np.random.default_rng(0)
    for _ in range(5):
        key, counter = rng.integers(0, 2**32, 2, np.uint32), rng.integers(0, 2**32, 2, np.uint32)
        ours = noise.threefry2x32(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
        theirs = threefry_2x32(jnp.asarray(key), jnp.asarray(counter))
        assert_bitwise_equal(np.stack(ours), np.asarray(theirs), claim="threefry2x32")
    zero = noise.threefry2x32((jnp.uint32(0),) * 2, (jnp.uint32(0),) * 2)
    assert [hex(int(x)) for x in zero] == ["0x6b200159", "0x99ba4efe"]  # Random123's own vector


@pytest.mark.golden
def test_published_test_vectors():
    published = json.loads(VECTORS.read_text())
    for vector in (*published["common"], *published["per_prompt"]):
        seed = vector["seed"]
        if (prompt := vector.get("prompt_token_ids")) is not None:
            seed = SamplingParams(temperature=1.0, seed=seed).for_prompt(prompt).seed
            assert seed == vector["prompt_seed"]
        bits = _bits(seed, vector["sequence_idx"], vector["position"], [vector["token_id"]])
        assert int(bits[0]) == int(vector["bits"], 16)
        assert float(noise.uniform(jnp.asarray(bits))[0]) == vector["uniform"]
        # Two logarithms of at most 2 ulp each; -log1p(-u) passes its relative error on to the
        # outer logarithm as an absolute one of 2**-23 or less.
        got = np.asarray(noise.gumbel(jnp.asarray(bits)))
        want = -np.log(-np.log1p(-np.float64(vector["uniform"])))
        assert abs(float(got[0]) - want) <= 2 * np.spacing(np.float32(abs(want))) + 2**-22
    kinds = [v["prompt_seed"] for v in published["per_prompt"]]
    assert len(set(kinds)) == len(kinds) == 9


def test_noise_is_finite_at_every_edge():
    bits = jnp.asarray([0, 1, 2**24, 2**31 - 1, 2**31, 2**32 - 129, 2**32 - 1], jnp.uint32)
    u, g = np.asarray(noise.uniform(bits)), np.asarray(noise.gumbel(bits))
    assert (u > 0).all() and (u < 1).all() and np.isfinite(g).all()
    assert -2.82 < g.min() and g.max() < 22.89
    assert_within_ulp(
        g[:1], -np.log(-np.log1p(-u[:1].astype(np.float64))), max_ulp=4.0, claim="the largest noise"
    )


def test_noise_differs_in_every_input():
    tokens = np.arange(2000)
    base = _bits(5, 0, 7, tokens)
    for other in (
        _bits(6, 0, 7, tokens), _bits(5 + 2**32, 0, 7, tokens), _bits(5, 1, 7, tokens),
        _bits(5, 0, 8, tokens), _bits(5, 7, 0, tokens),
    ):  # fmt: skip
        assert (base != other).mean() > 0.999
    assert len(np.unique(base)) > 1998


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 2**20))
def test_noise_is_uniform(seed, seq, position):
    """Chi-square over 64 cells of 20,000 draws; fails one honest seed in 10**7."""
    counts = np.bincount(_bits(seed, seq, position, np.arange(20000)) >> 26, minlength=64)
    assert stats.chisquare(counts).pvalue > 1e-7


def test_samples_follow_the_distribution():
    """Chi-square of 4,000 sampled tokens against softmax; one fixed seed."""
    logits = jnp.asarray(np.linspace(-2, 2, 20), jnp.float32)
    count = 4000
    tokens = _choose(
        np.tile(_padded(np.asarray(logits)), (count, 1)),
        [(SamplingParams(temperature=1.5, seed=3), i) for i in range(count)],
    )[0]
    probs = np.exp(np.asarray(logits, np.float64) / 1.5)
    expected = count * probs / probs.sum()
    assert stats.chisquare(np.bincount(tokens, minlength=20), expected).pvalue > 1e-3


def _probabilities(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _of_prompts(noise: str, count: int, seed: int = 7) -> list[tuple[SamplingParams, int]]:
    """Rows of as many prompts of three tokens, of one seed at temperature 1."""
    params = SamplingParams(temperature=1.0, seed=seed, noise=noise)
    return [(params.for_prompt((1, i // 250, i % 250)), 0) for i in range(count)]


@pytest.mark.parametrize("noise", ["per_prompt", pytest.param("common", marks=pytest.mark.control)])
def test_prompts_of_one_seed_agree_as_often_as_chance_has_it(noise):
    """Tokens of 2,000 disjoint pairs of prompts, each with logits of its own.

    Were they independent the pairs that agree would have this mean and variance, each pair being a
    draw of its own; five deviations. With common noise, the control, ten times as many do.
    """
    logits = np.random.default_rng(8).normal(0, 1, (4000, VOCAB)).astype(np.float32)
    tokens = _choose(logits, _of_prompts(noise, len(logits)))[0]
    probs = _probabilities(logits)
    chance = (probs[0::2] * probs[1::2]).sum(axis=1)
    reach = 5 * np.sqrt((chance * (1 - chance)).sum())
    found = (tokens[0::2] == tokens[1::2]).sum()
    assert (abs(found - chance.sum()) < reach) == (noise == "per_prompt"), found
    assert noise == "per_prompt" or found > 5 * chance.sum()


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["per_prompt", pytest.param("common", marks=pytest.mark.control)])
def test_a_mean_over_prompts_varies_as_that_of_independent_ones(noise):
    """Of 64 prompts, those whose token is below half of the vocabulary, for each of 100 seeds.

    The sum of squares is within the chi-square distribution's 1e-6 quantiles where prompts are
    independent; the control is far beyond.
    """
    logits = np.random.default_rng(9).normal(0, 1, (64, VOCAB)).astype(np.float32)
    rows = [row for seed in range(100) for row in _of_prompts(noise, 64, seed=seed)]
    tokens = _choose(np.tile(logits, (100, 1)), rows)[0].reshape(100, 64)
    likely = _probabilities(logits)[:, : VOCAB // 2].sum(axis=1)
    counts = (tokens < VOCAB // 2).sum(axis=1)
    squares = ((counts - likely.sum()) ** 2).sum() / (likely * (1 - likely)).sum()
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 100)
    assert (low < squares < high) == (noise == "per_prompt"), squares


def test_noise_differs_in_every_token_of_the_prompt_and_every_bit_of_the_seed():
    """Also where seed and prompt are exchanged, or a token moves to the front."""
    base = SamplingParams(temperature=1.0, seed=5).for_prompt((7, 8, 9)).seed
    prompts = [(8, 7, 9), (7, 8), (7, 8, 9, 0), (0, 7, 8, 9), (7, 8, 9 + 2**16), (7, 8, 9 + 2**30)]
    others = [SamplingParams(temperature=1.0, seed=5).for_prompt(p).seed for p in prompts]
    others += [
        SamplingParams(temperature=1.0, seed=5 ^ 1 << bit).for_prompt((7, 8, 9)).seed
        for bit in range(64)
    ]
    swapped = SamplingParams(temperature=1.0, seed=7).for_prompt((5, 8, 9)).seed
    assert len({base, swapped, 5, *others}) == 3 + len(others)


def test_rows_whose_noise_is_of_a_prompt_are_not_packed_without_it():
    params = SamplingParams(temperature=1.0)
    with pytest.raises(ValueError, match=r"noise='per_prompt' needs the prompt"):
        SamplingRows.pack([(params, 0)])
    assert SamplingRows.pack([(params.for_prompt([3]), 0)]).seed_low.shape == (1,)
    assert SamplingParams(seed=3).for_prompt([3]).seed == 3  # greedy draws none


def _padded(logits: np.ndarray) -> np.ndarray:
    return np.concatenate([logits, np.full(VOCAB - len(logits), -np.inf)]).astype(np.float32)


def _choose(
    logits, rows, *, tp: int = 1, with_filters: bool | None = None, position: int = 9,
    vocab: int = VOCAB, block: int = 128, num_top: int = 2,
):  # fmt: skip
    """Token ids and logprobs for whole logits on a tp mesh; noise is by the seed alone."""
    rows = [(dataclasses.replace(p, noise="common"), i) for p, i in rows]
    ctx = ForwardContext(
        config=dummy_config(vocab_size=vocab), profile=NumericsProfile(vocab_block=block),
        backend=Backend.PORTABLE, tp=tp,
    )  # fmt: skip
    if with_filters is None:
        with_filters = any(p.is_filtered for p, _ in rows)
    width = -(-vocab // (block * tp)) * block * tp
    whole = np.full((len(rows), width), -np.inf, np.float32)
    whole[:, :vocab] = logits
    positions = np.full(len(rows), position, np.int32)

    def local(logits, rows, positions):
        return choose(ctx, logits, rows, positions, num_top=num_top, with_filters=with_filters)

    step = jax.shard_map(
        local, mesh=make_mesh(1, tp), in_specs=(P(None, "tp"), P(), P()), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    out = jax.jit(step)(whole, SamplingRows.pack(rows), positions)
    return np.asarray(out.token_ids), np.asarray(out.logprobs), np.asarray(out.top_ids)


def _kept_by_definition(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Top-k, then top-p among those, then min-p, in float64 and with a margin of its own."""
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order].astype(np.float64) - logits[order[0]]) / params.temperature)
    kept = np.ones(len(order), bool)
    if params.top_k:
        kept[params.top_k :] = False
    before = np.cumsum(weights * kept) - weights
    if params.top_p < 1:
        kept &= before < params.top_p * (weights * kept).sum()
    kept &= weights >= params.min_p
    kept[0] = True
    return {int(t) for t in order[kept]}


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 3, 40, 10_000]),
            st.sampled_from([0.01, 0.5, 0.9, 1.0]),
            st.sampled_from([0.0, 0.02, 0.5]),
            st.sampled_from([0.3, 1.0, 2.5]),
        ),
        min_size=4,
        max_size=4,
    ),
)
def test_filters_keep_what_their_definitions_say(seed, settings_of_rows):
    rng = np.random.default_rng(seed)
    logits = wide(rng, (4, VOCAB), 0.5)
    rows = [
        (SamplingParams(top_k=k, top_p=p, min_p=m, temperature=t, seed=seed), i)
        for i, (k, p, m, t) in enumerate(settings_of_rows)
    ]
    for seq in range(2):
        tokens, _, _ = _choose(logits, rows, with_filters=True, position=seq)
        for row, (params, _) in enumerate(rows):
            assert int(tokens[row]) in _kept_by_definition(logits[row], params)


@pytest.mark.slow
@pytest.mark.invariance
def test_choice_is_bitwise_batch_and_mesh_invariant():
    """A row, whatever the others ask for and however the vocabulary is split."""
    rng = np.random.default_rng(1)
    logits = wide(rng, (9, VOCAB), 0.5)
    rows = [
        (SamplingParams(temperature=0.7 * (i % 3), top_k=(0, 4)[i % 2], seed=i), i)
        for i in range(9)
    ]
    tokens, logprobs, top = _choose(logits, rows)
    for tp in (2, 4, 8):
        got = _choose(logits, rows, tp=tp)
        for a, b in zip(got, (tokens, logprobs, top), strict=True):
            assert_bitwise_equal(a, b, claim=f"tp={tp}")
    for row in range(9):
        got = _choose(logits[row : row + 1], rows[row : row + 1])
        assert_bitwise_equal(got[0], tokens[row : row + 1], claim=f"row {row} alone")
        assert_bitwise_equal(got[1], logprobs[row : row + 1], claim=f"row {row} alone")


def test_greedy_takes_the_first_maximum():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [7, 200, 300]] = 5.0
    logits[1, [130, 129]] = 5.0
    for tp in (1, 4):
        tokens, _, top = _choose(logits, [(SamplingParams(), 0)] * 2, tp=tp)
        assert tokens.tolist() == [7, 129]
        assert top.tolist() == [[7, 200], [129, 130]]


def test_a_choice_among_few_tokens_is_that_of_all_where_the_others_are_impossible():
    """A head's own vocabulary: a draft has the noise of its token, not of its column."""
    config, vocab, count = dummy_config(vocab_size=256), 256, 32
    ctx = ForwardContext(
        config=config, profile=NumericsProfile(vocab_block=128), backend=Backend.PORTABLE, tp=1
    )
    rng = np.random.default_rng(0)
    token_ids = jnp.asarray(rng.permutation(vocab)[:90], jnp.int32)
    logits = jnp.asarray(rng.standard_normal((count, 90)), jnp.float32)
    rows = SamplingRows.pack([
        (SamplingParams(temperature=0.9 * (i % 2), seed=i, noise="common"), 0) for i in range(count)
    ])  # fmt: skip
    positions = jnp.arange(count, dtype=jnp.int32)
    everywhere = jnp.full((count, vocab), -jnp.inf).at[:, token_ids].set(logits)
    of_all = jax.jit(jax.shard_map(
        lambda *given: choose_plain(ctx, *given).token_ids, mesh=make_mesh(1, 1),
        in_specs=(P(), P(), P()), out_specs=P(), check_vma=False,
    ))(everywhere, rows, positions)  # fmt: skip
    among = jax.jit(choose_among)
    found = np.asarray(among(token_ids, logits, rows, positions).token_ids)
    np.testing.assert_array_equal(found, np.asarray(of_all))
    greedy = np.asarray(token_ids)[np.argmax(np.asarray(logits), axis=1)]
    assert (found == greedy)[::2].all() and (found != greedy)[1::2].mean() > 0.5
    by_column = among(jnp.arange(90, dtype=jnp.int32), logits, rows, positions).token_ids
    by_column = np.asarray(token_ids)[np.asarray(by_column)]
    assert (by_column != found)[1::2].mean() > 0.5, "control: noise of columns"


@pytest.mark.parametrize(("tp", "block"), quick_and_slow([(4, 32)], [(1, 128)]))
def test_more_top_logprobs_than_tokens_are_the_vocabulary_and_padding(tp, block):
    """A rank has fewer columns than are reported, and the vocabulary fewer tokens."""
    logits = wide(np.random.default_rng(3), (3, 40), 0.5)
    logits[0, 5:9] = logits[0].max()
    rows = [(SamplingParams(temperature=t, seed=1), 0) for t in (0.0, 1.0, MAX_TEMPERATURE)]
    tokens, _, top = _choose(logits, rows, tp=tp, vocab=40, block=block, num_top=64)
    want = np.argsort(-logits, axis=1, kind="stable").astype(np.int32)
    assert_bitwise_equal(top[:, :40], want, claim="most likely first, ties by id")
    assert top.shape == (3, 64) and (tokens < 40).all()
    alone = _choose(logits, rows, vocab=40, num_top=4)[0]
    assert_bitwise_equal(tokens, alone, claim=f"tp={tp}, vocab_block={block}")


def test_logprobs_are_those_of_float64():
    """Bound: the sum of V terms as a tree of depth 12 over 128-term rows, and a logarithm."""
    logits = wide(np.random.default_rng(2), (5, VOCAB), 0.5)
    tokens, logprobs, _ = _choose(logits, [(SamplingParams(), 0)] * 5)
    x = logits.astype(np.float64)
    lse = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1)
    want = x[np.arange(5), tokens] - lse
    # |error| <= ulp(lse) * (12 + 2) + ulp(logit); every magnitude here is at most |x|max.
    bound = 16 * np.spacing(np.float32(np.abs(x).max()))
    assert np.abs(logprobs - want).max() <= bound
