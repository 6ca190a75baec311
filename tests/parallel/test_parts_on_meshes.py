# SPDX-License-Identifier: Apache-2.0
"""Row-parallel sums in three parts, as sm90 has them of float32: the same answers on every mesh.

The kernels are portable ones in sm90's places, so that virtual devices run the exchange, the
scatter and the choice between them with the shapes that they have there.
"""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from detjax.diverge.recorder import RecordedTaps
from detjax.engine.outputs.completion import Completion
from detjax.models.layers import ForwardContext, parts_in_columns, row_parallel_norm
from detjax.models.transformer import Stream
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels import portable
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.parallel.exchange import is_scattered
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import answers, dummy_config, dummy_model, mixed_requests

PROFILE = NumericsProfile(compute_dtype="float32")
CONFIG = dummy_config(num_heads=8, num_kv_heads=4, num_layers=2)


def parts_of(x):
    """Three bfloat16 values whose sum is a float32."""
    parts = []
    for _ in range(3):
        kept = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(kept.astype(jnp.bfloat16))
        x = x - kept
    return parts


def linear_partial(x, w, *, reduction):
    return jnp.stack([portable.linear_partial(p, w, reduction=reduction) for p in parts_of(x)])


def add_partials(a, b):
    rows = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return portable.add_partials(*rows).reshape(a.shape)


def joined(partial):
    first, second, third = partial
    return portable.add_partials(portable.add_partials(third, second), first)


def add_rms_norm(partial, residual, bias, gain, *, eps):
    return portable.add_rms_norm(joined(partial), residual, bias, gain, eps=eps)


def combine_add_rms_norm(leaf_sums, residual, bias, gain, *, eps):
    trees = list(leaf_sums)
    while len(trees) > 1:
        trees = [add_partials(a, b) for a, b in zip(trees[0::2], trees[1::2], strict=True)]
    return add_rms_norm(trees[0], residual, bias, gain, eps=eps)


def linear_add_rms_norm(x, w, residual, bias, gain, *, reduction, eps):
    partial = linear_partial(x, w, reduction=reduction)
    return add_rms_norm(partial, residual, bias, gain, eps=eps)


IN_PARTS = {
    f.__name__: f
    for f in (linear_partial, add_partials, add_rms_norm, combine_add_rms_norm, linear_add_rms_norm)
}


def joined_by_each_rank(x, w, *, reduction):
    return joined(linear_partial(x, w, reduction=reduction))


JOINED_TOO_EARLY = {
    "linear_partial": joined_by_each_rank,
    "linear_add_rms_norm": linear_add_rms_norm,
}
"""What no rank may do: add its parts before the ranks' sum."""


def backend_of(monkeypatch, operations: dict) -> Backend:
    backend = object.__new__(Backend)
    backend._name_, backend._value_ = "PARTS", "parts"
    backend.platform, backend.mma = "cpu", ""
    kernels = ModuleType("parts")
    vars(kernels).update(vars(portable), **operations)
    monkeypatch.setitem(KERNELS, backend, kernels)
    return backend


def answered(backend: Backend, dp: int, tp: int) -> list[Completion]:
    """Prompts of more and of fewer rows than are shared out over ranks, and sampled tokens."""
    model = dummy_model(CONFIG, dp=dp, tp=tp, profile=PROFILE, backend=backend)
    asked = mixed_requests(5, vocab_size=CONFIG.vocab_size, max_tokens=3)
    batch_size = 4 if dp * tp > 1 else 1
    return answers(model, asked, batch_size=batch_size, prefill_chunk=256, max_len=256)


def digests(found: list[Completion]) -> list[str]:
    return [completion.digest() for completion in found]


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", quick_and_slow((256,), (3,)))
def test_a_row_parallel_layer_in_parts_is_bitwise_mesh_invariant(num_rows, monkeypatch):
    """The butterfly, and the scatter whose residual stream is shared out."""
    backend = backend_of(monkeypatch, IN_PARTS)
    x, w, residual, gain = (
        jnp.asarray(np.random.default_rng(i).standard_normal(shape, np.float32))
        for i, shape in enumerate(((num_rows, 8 * 48), (64, 8 * 48), (num_rows, 64), (64,)))
    )
    w, gain = w.astype(jnp.bfloat16), gain.astype(jnp.bfloat16)
    assert_order_sensitive(np.asarray(x)[:2, None] * np.asarray(w, np.float32))

    def layer(backend: Backend, tp: int):
        config = dummy_config(hidden_size=64, intermediate_size=x.shape[1])
        ctx = ForwardContext(config=config, profile=PROFILE, backend=backend, tp=tp)
        is_shared = tp > 1 and is_scattered(num_rows, tp)
        step = jax.shard_map(
            lambda x, w, residual, gain: row_parallel_norm(ctx, x, w, residual, None, gain),
            mesh=make_mesh(1, tp),
            in_specs=(P(None, "tp"), P(None, "tp"), P(), P()),
            out_specs=Stream(residual=P("tp") if is_shared else P(), x=P()),
            check_vma=False,
        )
        return jax.tree.map(np.asarray, jax.jit(step)(x, w, residual, gain))

    want = layer(backend, 1)
    for tp in (2, 8):
        for name, a, b in zip(("residual", "x"), layer(backend, tp), want, strict=True):
            assert_bitwise_equal(a, b, claim=f"{name} of {num_rows} rows on {tp} ranks")
    early = layer(backend_of(monkeypatch, JOINED_TOO_EARLY), 2)
    assert count_different_bits(early.residual, want.residual), "parts that each rank joins differ"


def test_taps_see_a_row_a_token(monkeypatch):
    backend = backend_of(monkeypatch, IN_PARTS)
    taps = RecordedTaps()
    config = dummy_config(hidden_size=64, intermediate_size=256)
    ctx = ForwardContext(config=config, profile=PROFILE, backend=backend, tp=2, taps=taps)
    partial = np.arange(3 * 5 * 64, dtype=np.float32).reshape(3, 5, 64)
    rows = parts_in_columns(jnp.asarray(partial))
    assert_bitwise_equal(rows, np.concatenate(partial, axis=1), claim="parts side by side")
    step = jax.shard_map(
        lambda x, w, r, g: row_parallel_norm(ctx, x, w, r, None, g),
        mesh=make_mesh(1, 2),
        in_specs=(P(None, "tp"), P(None, "tp"), P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    shapes = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in (
            ((5, 256), jnp.float32),
            ((64, 256), jnp.bfloat16),
            ((5, 64), jnp.float32),
            ((64,), jnp.bfloat16),
        )
    ]
    jax.eval_shape(step, *shapes)
    seen = dict(zip((tap.name for tap, _ in taps.seen), shapes_of(taps), strict=True))
    assert seen == {"partial": (5, 192), "sum": (5, 192)}


def shapes_of(taps: RecordedTaps) -> list[tuple[int, ...]]:
    by_number = {number: v for group in taps.values().values() for number, v in group.items()}
    return [by_number[number].shape for number in sorted(by_number)]


@pytest.mark.invariance
@pytest.mark.parametrize(
    ("dp", "tp"),
    [
        pytest.param(1, 2, marks=pytest.mark.nightly),
        pytest.param(2, 1, marks=pytest.mark.nightly),
        pytest.param(1, 4, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.nightly),
    ],
)
def test_answers_in_parts_are_bitwise_mesh_invariant(dp, tp, monkeypatch):
    backend = backend_of(monkeypatch, IN_PARTS)
    assert digests(answered(backend, dp, tp)) == digests(answered(backend, 1, 1))


@pytest.mark.control
@pytest.mark.nightly
def test_control_parts_that_each_rank_joins_are_not_mesh_invariant(monkeypatch):
    backend = backend_of(monkeypatch, JOINED_TOO_EARLY)
    assert digests(answered(backend, 1, 2)) != digests(answered(backend, 1, 1))
