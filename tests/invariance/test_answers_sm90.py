# SPDX-License-Identifier: Apache-2.0
"""The whole system on a Hopper GPU: a request's tokens and logprobs, whatever runs beside it."""

import hashlib
import json
import subprocess
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel, load_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.serving.config import EngineConfig
from detjax.serving.engine import Engine
from detjax.serving.programs import empty_pages
from detjax.serving.request import Completion, Request
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.dummies import (
    answers,
    batch_of,
    dummy_config,
    dummy_model,
    mixed_requests,
    scoring_step,
)

pytestmark = pytest.mark.gpu

WIDTHS = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 1024}
MODELS = {
    "64 channels": dummy_config(num_heads=8, num_kv_heads=2, head_dim=64, **WIDTHS),
    "128 channels, q/k norm": dummy_config(
        num_heads=8, num_kv_heads=2, head_dim=128, qk_norm=True, **WIDTHS
    ),
    "biases, 7 heads a group": dummy_config(
        num_heads=14, num_kv_heads=2, head_dim=64, qkv_bias=True, o_bias=True, **WIDTHS
    ),
}
NAMES = ("bundled", *MODELS)


@cache
def model(name: str) -> LoadedModel:
    if name != "bundled":
        return dummy_model(MODELS[name], backend=Backend.SM90)
    return load_model(
        str(bundled_model_path()),
        profile=NumericsProfile(),
        mesh=make_mesh(1, 1, platform="gpu"),
        backend=Backend.SM90,
    )


def requests(max_tokens: int = 20) -> list[Request]:
    return mixed_requests(vocab_size=1000, max_tokens=max_tokens)


@cache
def expected(name: str) -> list[Completion]:
    """Each request alone, in one slot after the other: the canonical answer."""
    return answers(model(name), requests())


def digests(completions: list[Completion]) -> list[str]:
    return [completion.digest() for completion in completions]


def test_probe_depends_on_order():
    w = np.asarray(model("64 channels").params["layers"][0]["down"], np.float32)
    assert_order_sensitive(w * np.linspace(0.5, 2, w.shape[1], dtype=np.float32))
    assert len({c.token_ids for c in expected("64 channels")}) > 10


@pytest.mark.invariance
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch_size", [2, 5, 17])
def test_answers_are_bitwise_batch_invariant(name, batch_size):
    config = EngineConfig(batch_size=batch_size, prefill_chunk=64, max_len=384)
    engine = Engine(model(name), config)
    assert digests(engine.generate(requests())) == digests(expected(name))
    assert digests(engine.generate(requests()[::-1])[::-1]) == digests(expected(name))


@pytest.mark.invariance
@pytest.mark.parametrize("chunk", [1, 37, 128, 200])
def test_answers_are_bitwise_schedule_invariant(chunk):
    got = answers(model("bundled"), requests(), batch_size=3, prefill_chunk=chunk)
    assert digests(got) == digests(expected("bundled"))


@pytest.mark.invariance
@pytest.mark.parametrize("name", ["bundled", "128 channels, q/k norm"])
@pytest.mark.parametrize("changes", [{}, {"mode": "dvr", "draft_weights": "int8"}])
def test_answers_do_not_depend_on_the_tokens_of_a_launch(name, changes):
    config = EngineConfig(
        batch_size=6, prefill_chunk=64, max_len=384, decode_steps=5, verify_window=8, **changes
    )
    engine = Engine(model(name), config)
    assert digests(engine.generate(requests())) == digests(expected(name))
    assert 5 in {step.length for step in engine.programs if step.kind == "decode"}


def logits_of(name: str, tokens: np.ndarray, pieces: list[int]) -> np.ndarray:
    """Logits of every token of a sequence whose tokens arrive in pieces of these lengths."""
    m = model(name)
    step, pages, out, start = scoring_step(m), empty_pages(m, 5), [], 0
    table = np.asarray([[2, 0, 3, 1]], np.int32)
    for length in pieces:
        pages, logits = step(pages, batch_of([(tokens[start : start + length], start)], table))
        out.append(np.asarray(logits)[0])
        start += length
    return np.concatenate(out)


@pytest.mark.invariance
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_bitwise_path_consistent(name):
    """One prefill, a warm prefix, verify windows and single tokens: the same float32 logits."""
    tokens = np.random.default_rng(3).integers(0, 1000, 400).astype(np.int32)
    whole = logits_of(name, tokens, [400])
    for pieces in ([128, 272], [37, 300, 63], [320, *[8] * 10], [380, *[1] * 20]):
        assert_bitwise_equal(logits_of(name, tokens, pieces), whole, claim=f"pieces {pieces}")


@pytest.mark.control
def test_plain_products_are_not_batch_invariant():
    """cuBLAS on the same weights: one row's bits depend on how many rows share the product."""
    w = model("64 channels").params["layers"][0]["gate_up"]
    x = jax.random.normal(jax.random.key(0), (512, w.shape[1]), jnp.bfloat16)
    product = jax.jit(partial(jnp.dot, preferred_element_type=jnp.float32))
    many = np.asarray(product(x, w.T))
    changed = [n for n in (1, 2, 8, 33, 100) if count_different_bits(product(x[:n], w.T), many[:n])]
    assert changed


@pytest.mark.invariance
def test_answers_are_bitwise_run_invariant():
    """Another process, with its own compilation."""
    here = hashlib.sha256(json.dumps(digests(expected("bundled"))).encode()).hexdigest()
    program = (
        f"import runpy, hashlib, json; m = runpy.run_path({__file__!r}); "
        "d = m['digests'](m['expected']('bundled')); "
        "print(hashlib.sha256(json.dumps(d).encode()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == here
