# SPDX-License-Identifier: Apache-2.0
"""A prefill whose last layer computes few tokens has the bits of one of all."""

from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from detjax.compilation.xla_flags import EXACT_OPTIONS, FAST_OPTIONS
from detjax.engine.running.device_arrays import PAGES_SPEC, empty_pages
from detjax.engine.running.programs import forward_context
from detjax.models.forward_paths import FORWARD_PATHS, KernelMode
from detjax.models.layers import Tokens
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.testing import assert_bitwise_equal, assert_order_sensitive
from detjax.testing.bitwise import count_different_bits
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model

PAGE = 16


@cache
def model(tp: int, *, is_wide: bool = False, **changes) -> LoadedModel:
    """Two layers; a wide one in float32, where XLA's products of few rows have other bits."""
    sizes = {"hidden_size": 768, "intermediate_size": 1024} if is_wide else {}
    config = dummy_config(num_layers=1 if is_wide else 2, **sizes, **changes)
    dtype = "float32" if is_wide else "bfloat16"
    profile = NumericsProfile(
        attention_block=PAGE, attention_split=64, weight_dtype=dtype, compute_dtype=dtype
    )
    return dummy_model(config, tp=tp, profile=profile)


def tokens(counts: tuple[int, ...], length: int) -> tuple[Tokens, np.ndarray]:
    """Rows of so many tokens at positions 3 and up, and which of each is the last."""
    rng, num_pages = np.random.default_rng(7), -(-(3 + length) // PAGE)
    ids = rng.integers(0, 320, (len(counts), length)).astype(np.int32)
    step_idx, count = np.arange(length, dtype=np.int32)[None], np.asarray(counts)[:, None]
    positions = np.where(step_idx < count, 3 + step_idx, -1).astype(np.int32)
    table = np.arange(len(counts) * num_pages, dtype=np.int32).reshape(len(counts), num_pages)
    wanted = np.maximum(np.asarray(counts, np.int32) - 1, 0)
    return Tokens(ids=ids, positions=positions, page_table=table), wanted


def hidden_states(made: LoadedModel, given: Tokens, wanted, mode: KernelMode = "invariant"):
    """The hidden states, as one rank has them, and the cache."""
    forward, _ = FORWARD_PATHS[mode]
    ctx = forward_context(made)

    def local(params, tables, pages, given, wanted):
        return forward(ctx, params, tables, pages, given, wanted=wanted)

    specs = (made.partition_specs, P(), PAGES_SPEC, P(), P())
    step = jax.shard_map(
        local, mesh=made.mesh, in_specs=specs, out_specs=(PAGES_SPEC, P()), check_vma=False
    )
    options = EXACT_OPTIONS if mode == "invariant" else FAST_OPTIONS
    pages = empty_pages(made, given.page_table.size)
    operands = made.params, made.rope_tables, pages, given, wanted
    pages, hidden = jax.jit(step, compiler_options=options)(*operands)
    return np.asarray(hidden), np.asarray(pages)


def test_probe_depends_on_order():
    """The sums of the last layer change when added backwards, so equal bits are not luck."""
    w = np.asarray(model(1).params["layers"][-1]["down"], np.float32)
    assert_order_sensitive(w * np.linspace(0.5, 2, w.shape[1], dtype=np.float32))


CASES = quick_and_slow(
    [(4, (40, 33, 0, 64), 64, {"qk_norm": True})],
    [
        (1, (130, 17, 0), 130, {"window": 20}),
        (2, (70, 71, 2, 5), 72, {"qkv_bias": True, "o_bias": True}),
        # So many sequences that the ranks share out the rows of the last layer as well.
        (2, (4, 1, 3) * 44, 4, {}),
    ],
)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("tp", "counts", "length", "changes"), CASES)
def test_the_wanted_tokens_are_bitwise_batch_invariant_and_path_consistent(
    tp, counts, length, changes
):
    made = model(tp, **changes)
    given, wanted = tokens(counts, length)
    every, pages = hidden_states(made, given, None)
    few, pages_of_few = hidden_states(made, given, wanted)
    assert few.shape == (len(counts), 1, made.config.hidden_size)
    assert_bitwise_equal(
        few[:, 0], every[np.arange(len(counts)), wanted], claim="the hidden state of a last token"
    )
    assert_bitwise_equal(pages_of_few, pages, claim="keys and values of every token")


@pytest.mark.slow
@pytest.mark.control
def test_control_without_claims_the_wanted_tokens_have_other_bits():
    made = model(1, is_wide=True)
    given, wanted = tokens((40, 17, 33), 40)
    every, _ = hidden_states(made, given, None, "fast")
    few, _ = hidden_states(made, given, wanted, "fast")
    assert count_different_bits(few[:, 0], every[np.arange(3), wanted])
