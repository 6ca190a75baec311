# SPDX-License-Identifier: Apache-2.0
"""Loads of what is read once say so, and no others: seen as kernels are lowered for Hopper."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from detjax.numerics import NumericsProfile
from detjax.pallas_kernels import sm90_cache_hints
from detjax.pallas_kernels.attention import sm90 as attention
from detjax.pallas_kernels.linear import sm90 as linear
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.rotation import Rotation

BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture
def count_hints(monkeypatch):
    """`count_hints(fn, *shapes)`: how many loads of its kernels get a hint."""
    found, put = [], sm90_cache_hints._hint_last_load

    def counted():
        put()
        found.append(1)

    monkeypatch.setattr(sm90_cache_hints, "_hint_last_load", counted)

    def count(fn, *shapes):
        found.clear()
        jax.clear_caches()
        jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",))
        return len(found)

    yield count
    jax.clear_caches()


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def product(num_rows):
    return functools.partial(linear.linear, bias=None, out_dtype=BF16), (
        struct(num_rows, 1024), struct(1536, 1024),
    )  # fmt: skip


def attend(batch, num_pages=9):
    def run(qkv, cos, sin, pages, table, positions):
        return attention.rope_attention(
            qkv, Rotation(cos, sin), CachePlace(pages, table, positions, layer=1),
            window=None, eps=1e-5, profile=NumericsProfile(),
        )  # fmt: skip

    return run, (
        struct(batch, 48, 128), struct(batch, 64, dtype=jnp.float32),
        struct(batch, 64, dtype=jnp.float32), struct(2, 100, 2, 8, 128, 128),
        struct(batch, num_pages, dtype=jnp.int32), struct(batch, 1, dtype=jnp.int32),
    )  # fmt: skip


@pytest.mark.parametrize("num_rows", [1, 8, 64, 128])
def test_weights_that_one_cta_reads_leave_the_l2_first(count_hints, num_rows):
    fn, shapes = product(num_rows)
    assert count_hints(fn, *shapes) == 1


def test_weights_that_several_ctas_read_stay(count_hints):
    fn, shapes = product(4096)
    assert count_hints(fn, *shapes) == 0


def test_gates_and_ups_are_both_hinted(count_hints):
    fn = functools.partial(linear.norm_linear_swiglu, eps=1e-5)
    assert count_hints(fn, struct(8, 4096), struct(4096), struct(4096, 4096)) == 2


# Of shared splits, clusters, splits in turn and whole sequences: keys and values, in the sizes that
# a last page is loaded in; five places where shared splits load.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "num_pages", "count"), [(1, 9, 5 * 4), (8, 9, 2 * 4), (64, 40, 2 * 4), (64, 9, 2 * 4)]
)
def test_keys_and_values_leave_the_l2_first(count_hints, batch, num_pages, count):
    fn, shapes = attend(batch, num_pages)
    assert count_hints(fn, *shapes) == count


@pytest.mark.slow
def test_without_hints_there_are_none(count_hints, monkeypatch):
    monkeypatch.setattr(sm90_cache_hints, "HINTS", False)
    for fn, shapes in (product(8), attend(8)):
        assert count_hints(fn, *shapes) == 0


@pytest.mark.parametrize(
    ("batch", "prefetched"),
    [(1, attention.PREFETCHED), (8, attention.PREFETCHED_BEHIND), (16, 0), (64, 0)],
)
def test_who_asks_for_the_next_weights(batch, prefetched):
    config = attention.decode_config(
        batch=batch, query_len=1, kv_heads=8, group=4, channels=128, table_len=9, per_split=4,
        is_new=True,
    )  # fmt: skip
    assert config.prefetched == prefetched
    rows = dataclasses.asdict(
        attention.decode_config(
            batch=batch, query_len=1, kv_heads=8, group=4, channels=128, table_len=9, per_split=4
        )
    )
    assert rows["prefetched"] == 0, "queries that are rows have no next product here"
