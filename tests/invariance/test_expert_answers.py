# SPDX-License-Identifier: Apache-2.0
"""Whole answers of a mixture of experts: whatever runs beside a request, and wherever experts are.

Pages of 16 tokens and small sizes; a dense layer, then one of 8 experts, 3 of a token. All of it
compiles, so it is slow.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import detjax.models.decoder
import detjax.models.fast
import detjax.models.layers
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import PAGES_SPEC, empty_pages
from detjax.models.decoder import forward
from detjax.models.layers import ForwardContext
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.parallel.exchange import MAX_EXCHANGED_ROWS
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.dummies import batch_of, dummy_config, dummy_model, scoring_step
from detjax.testing.jaxpr_rules import float_arithmetic_outside_kernels

from .faults import order_by_company

PAGE, VOCAB = 16, 128
PROFILE = NumericsProfile(attention_block=PAGE, attention_split=64)
CONFIG = dummy_config(intermediate_size=128, vocab_size=VOCAB, experts=(8, 3), qk_norm=True)
SIZES = {"batch_size": 4, "prefill_chunk": PAGE, "max_len": 96}


@cache
def model(dp: int = 1, tp: int = 1) -> LoadedModel:
    return dummy_model(CONFIG, dp=dp, tp=tp, profile=PROFILE)


def request(first: int, length: int, max_tokens: int = 20, **sampling) -> Request:
    prompt = tuple((first * first + 3 * i) % 97 for i in range(length))
    return Request(
        prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


REQUESTS = [
    *(request(i, 3 + 9 * i, temperature=0.4 * i, seed=i) for i in range(5)),
    request(4, 39, temperature=1.0, seed=9),  # shares pages with another
]


@cache
def alone() -> list[Completion]:
    """Each request by itself, on one device: the canonical answers."""
    engine = Engine(model(), EngineConfig(**SIZES | {"batch_size": 1}))
    return [engine.generate([request])[0] for request in REQUESTS]


def assert_alone(got: list[Completion], claim: str) -> None:
    for g, w in zip(got, alone(), strict=True):
        assert g.token_ids == w.token_ids, f"{claim}: request {w.request_idx}"
        assert_bitwise_equal(np.stack(g.logprobs), np.stack(w.logprobs), claim=claim)


@pytest.mark.slow
def test_probe_depends_on_order_and_on_the_choice_of_experts():
    """Sums change when added backwards, and every expert is somebody's."""
    w = np.asarray(model().params["layers"][1]["expert_down"][0], np.float32)
    assert_order_sensitive(w * np.linspace(0.5, 2, w.shape[1], dtype=np.float32))
    assert len({c.token_ids for c in alone()}) == len(REQUESTS)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((64, 64)), jnp.bfloat16)
    router = model().params["layers"][1]["router"][:8]  # padding follows
    chosen = lax.top_k(x @ router.T, 3)[1]
    assert set(np.asarray(chosen).reshape(-1)) == set(range(8))


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("mesh", [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2)], ids=str)
def test_answers_are_bitwise_mesh_and_batch_invariant(mesh):
    dp, tp = mesh
    engine = Engine(model(dp, tp), EngineConfig(**SIZES))
    assert_alone(engine.generate(REQUESTS), f"(dp, tp) = {mesh}")


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    "schedule",
    [
        {"prefill_chunk": 7, "num_pages": 7},
        {"mode": "dvr", "max_draft_fraction": 1.0, "verify_window": 6, "decode_steps": 3},
    ],
    ids=("chunks and preemption", "drafts, several a launch"),
)
def test_answers_are_bitwise_schedule_invariant(schedule):
    """Chunks off the page grid, a cache too small for all, drafts in no order of experts.

    The second time a prompt's pages are in the cache.
    """
    engine = Engine(model(), EngineConfig(**SIZES | schedule))
    for when in ("cold", "warm"):
        assert_alone(engine.generate(REQUESTS), f"{schedule}, {when}")
    stats = engine.stats()
    assert stats.num_preempted > 0 if "num_pages" in schedule else stats.accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("most_rows", (2, pytest.param(1024, marks=pytest.mark.nightly)))
def test_answers_do_not_depend_on_who_adds(monkeypatch, most_rows):
    """Sums left to the next product, in decode only or everywhere, change no answer."""
    experts = dataclasses.replace(CONFIG.experts, layers=(True,) * CONFIG.num_layers)
    config, late = dataclasses.replace(CONFIG, experts=experts), {"sum": [], "experts": []}

    def generated():
        engine = Engine(dummy_model(config, profile=PROFILE), EngineConfig(**SIZES))
        return engine.generate(REQUESTS)

    def says(kind, num_rows):
        late[kind].append(num_rows <= most_rows)
        return late[kind][-1]

    want = generated()
    layers = detjax.models.layers
    monkeypatch.setattr(layers, "defers_sum", lambda x, w, **_: says("sum", len(x)))
    monkeypatch.setattr(layers, "defers_experts", lambda m, width, **_: says("experts", m))
    for g, w in zip(generated(), want, strict=True):
        claim = f"sums of at most {most_rows} rows in the product after them"
        assert g.token_ids == w.token_ids, claim
        assert_bitwise_equal(np.stack(g.logprobs), np.stack(w.logprobs), claim=claim)
    for asked in late.values():
        assert any(asked) and all(asked) == (most_rows == 1024)


@pytest.mark.slow
@pytest.mark.invariance
def test_scattered_rows_have_the_bits_of_one_rank():
    """More rows than are exchanged whole: each rank adds its own, and has its share of the stream.

    The program that does so has no float arithmetic outside kernels.
    """
    ids = np.random.default_rng(3).integers(0, VOCAB, 2 * MAX_EXCHANGED_ROWS)
    blocks = len(ids) // PAGE
    tokens = batch_of([(ids, 0)], np.arange(blocks, dtype=np.int32)[None])
    found = {}
    for tp in (1, 4):
        m = model(tp=tp)
        found[tp] = np.asarray(scoring_step(m)(empty_pages(m, blocks), tokens)[1])
        ctx = ForwardContext(config=m.config, profile=m.profile, backend=m.backend, tp=tp)
        layers = jax.shard_map(
            partial(forward, ctx),
            mesh=m.mesh,
            in_specs=(m.partition_specs, P(), PAGES_SPEC, P()),
            out_specs=(PAGES_SPEC, P()),
            check_vma=False,
        )
        assert not float_arithmetic_outside_kernels(
            layers, m.params, m.rope_tables, empty_pages(m, blocks), tokens
        )
    assert_bitwise_equal(found[4], found[1], claim="tp=4, 256 rows")


@pytest.mark.slow
@pytest.mark.control
def test_control_an_order_by_company_is_seen_by_batch_and_schedule(monkeypatch):
    """The comparisons of the tests above, on their model and their requests, find other bits."""
    want = [one.logprobs for one in alone()]
    order_by_company(monkeypatch, canonical_rows=PAGE)
    engine = Engine(model(), EngineConfig(**SIZES, self_check="off"))
    one = EngineConfig(**SIZES | {"prefill_chunk": 7, "batch_size": 1}, self_check="off")
    for made in (engine, Engine(model(), one)):
        found = made.generate(REQUESTS)
        assert [one.logprobs for one in found] != want


@pytest.mark.slow
@pytest.mark.control
def test_control_a_sum_of_floats_over_ranks_is_not_mesh_invariant(monkeypatch):
    """Experts weighted and added where they are, then ranks by psum: bits depend on tp."""

    def plain(ctx, weights, gain, stream):
        x = detjax.models.layers.final_rows(ctx, stream.residual, stream.x, weights["mlp_norm"])
        added = detjax.models.fast._experts(ctx, weights, x)
        residual = stream.residual + added
        eps, backend = ctx.config.rms_norm_eps, ctx.backend
        normed = detjax.models.layers.rms_norm(residual, gain, eps=eps, backend=backend)
        return detjax.models.layers.Stream(residual, normed)

    profile = dataclasses.replace(PROFILE, compute_dtype="float32")
    monkeypatch.setattr(detjax.models.decoder, "mix_experts", plain)
    ids = np.random.default_rng(4).integers(0, VOCAB, 60)
    tokens = batch_of([(ids, 0)], np.arange(4, dtype=np.int32)[None])
    found = {}
    for tp in (1, 4):
        m = dummy_model(CONFIG, tp=tp, profile=profile)
        found[tp] = np.asarray(scoring_step(m)(empty_pages(m, 4), tokens)[1])
    assert count_different_bits(found[1], found[4]) > 0
    assert np.abs(found[1] - found[4]).max() < 1e-3
    jax.clear_caches()
