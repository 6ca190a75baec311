# SPDX-License-Identifier: Apache-2.0
"""Ties and seeds, to the last token and the last bit, through `choose`."""

from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.sampling.sampling import SamplingRows, choose
from detjax.models.layers import ForwardContext
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.dummies import dummy_config

VOCAB, ROWS = 256, 64


@cache
def chooser(tp: int):
    ctx = ForwardContext(
        config=dummy_config(vocab_size=VOCAB), profile=NumericsProfile(vocab_block=64),
        backend=Backend.PORTABLE, tp=tp,
    )  # fmt: skip

    def local(logits, rows, positions):
        return choose(ctx, logits, rows, positions, num_top=0, with_filters=True)

    step = jax.shard_map(
        local, mesh=make_mesh(1, tp), in_specs=(P(None, "tp"), P(), P()), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    return jax.jit(step)


def chosen(logits: np.ndarray, params: list[SamplingParams], *, tp: int) -> list[int]:
    """The token of each row at its own position."""
    rows = SamplingRows.pack([(p, 0) for p in params])
    out = chooser(tp)(logits, rows, np.arange(ROWS, dtype=np.int32))
    return np.asarray(out.token_ids).tolist()


def tied() -> np.ndarray:
    """Six equal largest logits, on both halves of the vocabulary; everything else is far below."""
    logits = np.full((ROWS, VOCAB), -30.0, np.float32)
    logits[:, TIED] = 2.0
    return logits


TIED = [3, 70, 71, 130, 200, 255]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 3}, {"top_p": 0.45}, {"top_k": 5, "top_p": 0.55}],
    ids=["top-k", "top-p", "both"],
)
def test_of_equal_logits_the_lowest_token_ids_are_kept(sampling, tp):
    """Three of the six: top-p keeps while the sum before is below 0.45, 2.7 of 6 (or 2.75 of 5)."""
    params = [SamplingParams(temperature=1.0, noise="common", seed=9, **sampling)] * ROWS
    assert set(chosen(tied(), params, tp=tp)) == set(TIED[:3])


@pytest.mark.control
def test_control_without_a_filter_all_equal_logits_are_chosen():
    params = [SamplingParams(temperature=1.0, noise="common", seed=9)] * ROWS
    assert set(chosen(tied(), params, tp=1)) == set(TIED)


def test_every_bit_of_the_seed_counts():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    seeds = (5, 5 + 2**32, 5 + 2**63)
    answers = [
        chosen(logits, [SamplingParams(temperature=1.0, seed=seed, noise="common")] * ROWS, tp=1)
        for seed in seeds
    ]
    for i, a in enumerate(answers):
        for b in answers[:i]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) < ROWS / 8


def test_noise_belongs_to_the_position_and_not_to_the_row():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    rows = SamplingRows.pack([(SamplingParams(temperature=1.0, seed=5, noise="common"), 0)] * ROWS)
    positions = np.arange(ROWS, dtype=np.int32)
    forwards = np.asarray(chooser(1)(logits, rows, positions).token_ids)
    backwards = np.asarray(chooser(1)(logits, rows, positions[::-1].copy()).token_ids)
    assert backwards[::-1].tolist() == forwards.tolist()
    assert len(set(forwards.tolist())) > 32
