# SPDX-License-Identifier: Apache-2.0
"""Models as published, as shapes: what Hopper's kernels refuse is known, and nothing else is."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.sampling.logits_processors import ProcessedLogits
from detjax.engine.sampling.sampling import SamplingRows, choose
from detjax.models.abstract import why_unsupported
from detjax.models.hf_config import config_from_hf
from detjax.models.layers import ForwardContext
from detjax.models.params import padded_vocab_size
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import DP_AXIS, TP_AXIS
from detjax.testing.dummies import dummy_config
from tests.models.published_configs import LOADED

PROFILE = NumericsProfile()
REFUSED = {"Llama-3.1-405B": "not 16384", "open_llama_3b": "not 100"}
"""A norm of 16,384 channels, and heads of 100."""
SIZES = sorted({config_from_hf(values).vocab_size for values, _ in LOADED.values()})
VOCABULARIES = [128256, *(size for size in SIZES if size % PROFILE.vocab_block)]
"""One of whole blocks, and those that are not."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADED)
def test_a_published_model_runs_on_hopper_or_says_what_is_in_the_way(name):
    config = config_from_hf(LOADED[name][0])
    why = why_unsupported(config, PROFILE, Backend.SM90, tp=1)
    assert (why is None) == (name not in REFUSED), why
    assert why is None or REFUSED[name] in why


@functools.cache
def _rows() -> SamplingRows:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, noise="common")
    return SamplingRows.pack([(params, 0)] * 3)


@pytest.mark.parametrize("is_adjusted", [False, True], ids=["filtered", "adjusted"])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_token_of_every_published_vocabulary_is_chosen_on_hopper(vocab_size, is_adjusted):
    """Traced: kernels check their shapes there. The vocabulary of Gemma 3 was once refused."""
    num_top = 5
    config = dummy_config(vocab_size=vocab_size)
    ctx = ForwardContext(config=config, profile=PROFILE, backend=Backend.SM90, tp=1)
    width = padded_vocab_size(vocab_size, tp=1, vocab_block=PROFILE.vocab_block)

    def run(logits, rows, positions, factor):
        processed = ProcessedLogits(
            logits=logits, inverse_temperature=factor, is_processed=positions > 0
        )
        return choose(
            ctx, logits, rows, positions, num_top=num_top, with_filters=True,
            processed=processed if is_adjusted else None,
        )  # fmt: skip

    mesh = AbstractMesh((1, 1), (DP_AXIS, TP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))
    traced = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    logits = jax.ShapeDtypeStruct((3, width), jnp.float32)
    made = jax.eval_shape(
        traced, logits, _rows(), jax.ShapeDtypeStruct((3,), jnp.int32),
        jax.ShapeDtypeStruct((3,), jnp.float32),
    )  # fmt: skip
    assert made.token_ids.shape == (3,) and made.top_ids.shape == (3, num_top)
