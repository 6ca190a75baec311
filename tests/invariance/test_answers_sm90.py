# SPDX-License-Identifier: Apache-2.0
"""The whole system on a Hopper GPU: a request's tokens and logprobs, whatever runs beside it."""

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import empty_pages
from detjax.engine.running.program_key import ChoiceKey, choice_keys
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel, load_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.dummies import (
    adjusted_requests,
    answers,
    batch_of,
    dummy_config,
    dummy_model,
    mixed_requests,
    scoring_step,
)

pytestmark = pytest.mark.gpu

WIDTHS = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 1000}
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
FLOAT32 = {
    "bundled, float32": "bundled",
    "128 channels, float32": "128 channels, q/k norm",
    "biases, float32": "biases, 7 heads a group",
}
"""Models whose activations are float32, and whose weights are those of another."""


@cache
def model(name: str) -> LoadedModel:
    profile = NumericsProfile(compute_dtype="float32" if name in FLOAT32 else "bfloat16")
    name = FLOAT32.get(name, name)
    if name != "bundled":
        return dummy_model(MODELS[name], profile=profile, backend=Backend.SM90)
    return load_model(
        str(bundled_model_path()),
        profile=profile,
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
@pytest.mark.parametrize("name", (*NAMES, *FLOAT32))
@pytest.mark.parametrize("batch_size", [2, 5, 17])
def test_answers_are_bitwise_batch_invariant(name, batch_size):
    config = EngineConfig(batch_size=batch_size, prefill_chunk=64, max_len=384)
    engine = Engine(model(name), config)
    assert digests(engine.generate(requests())) == digests(expected(name))
    assert digests(engine.generate(requests()[::-1])[::-1]) == digests(expected(name))


@pytest.mark.gpus(2)
@pytest.mark.invariance
@pytest.mark.parametrize("name", ["128 channels, float32", "biases, float32"])
def test_float32_answers_are_bitwise_mesh_invariant(name):
    """Of dp; `tests/parallel/test_exchange_sm90.py` has tp."""
    profile = NumericsProfile(compute_dtype="float32")
    many = dummy_model(MODELS[FLOAT32[name]], dp=2, profile=profile, backend=Backend.SM90)
    assert digests(answers(many, requests(), batch_size=4)) == digests(expected(name))


@pytest.mark.invariance
@pytest.mark.parametrize("name", ["bundled", "bundled, float32"])
@pytest.mark.parametrize("chunk", [1, 37, 128, 200])
def test_answers_are_bitwise_schedule_invariant(name, chunk):
    got = answers(model(name), requests(), batch_size=3, prefill_chunk=chunk)
    assert digests(got) == digests(expected(name))


def test_float32_answers_are_others():
    """So that the claims of float32 models are claims of another profile."""
    pairs = [
        np.concatenate([np.stack(c.logprobs) for c in expected(name)])
        for name in ("bundled", "bundled, float32")
    ]
    assert pairs[0].shape != pairs[1].shape or count_different_bits(*pairs)


@pytest.mark.invariance
@pytest.mark.parametrize("name", ["bundled", "128 channels, q/k norm"])
@pytest.mark.parametrize("changes", [{}, {"mode": "dvr", "draft_weights": "int8"}])
def test_answers_do_not_depend_on_the_tokens_of_a_launch(name, changes):
    config = EngineConfig(
        batch_size=6, prefill_chunk=64, max_len=384, decode_steps=5, verify_window=8, **changes
    )
    engine = Engine(model(name), config)
    # A launch of several tokens has no program that filters or reports between two of them.
    plain = [
        i for i, r in enumerate(requests()) if not (r.sampling.is_filtered or r.sampling.logprobs)
    ]
    found = engine.generate([requests()[i] for i in plain])
    assert digests(found) == digests([expected(name)[i] for i in plain])
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
@pytest.mark.parametrize("name", (*NAMES, *FLOAT32))
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
@pytest.mark.parametrize("name", ["bundled", "bundled, float32"])
def test_answers_are_bitwise_run_invariant(name):
    """Another process, with its own compilation."""
    here = hashlib.sha256(json.dumps(digests(expected(name))).encode()).hexdigest()
    program = (
        f"import runpy, hashlib, json; m = runpy.run_path({__file__!r}); "
        f"d = m['digests'](m['expected']({name!r})); "
        "print(hashlib.sha256(json.dumps(d).encode()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == here


def adjusted() -> list[Request]:
    return adjusted_requests(vocab_size=1000, max_tokens=20)


@cache
def expected_adjusted(name: str) -> list[Completion]:
    """Each request with biases, penalties and masks alone."""
    return answers(model(name), adjusted())


@pytest.mark.invariance
@pytest.mark.parametrize("name", ["bundled", "128 channels, q/k norm"])
@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 5},
        {"batch_size": 17, "decode_steps": 5},
        {"batch_size": 5, "mode": "dvr", "max_draft_fraction": 1.0, "verify_window": 8},
    ],
    ids=str,
)
def test_adjusted_answers_are_bitwise_schedule_invariant(name, changes):
    engine = Engine(model(name), EngineConfig(prefill_chunk=64, max_len=384, **changes))
    assert digests(engine.generate(adjusted())) == digests(expected_adjusted(name))
    choices = [key for key in choice_keys(engine._runner._config) if isinstance(key, ChoiceKey)]
    assert any(key in engine.programs for key in choices)


def test_adjustments_change_answers_and_no_draw_of_a_neighbour():
    plain = [dataclasses.replace(r, sampling=SamplingParams(max_tokens=20)) for r in adjusted()]
    without = answers(model("bundled"), [*plain[:-1], adjusted()[-1]])
    changed = [
        a != b for a, b in zip(digests(without), digests(expected_adjusted("bundled")), strict=True)
    ]
    assert all(changed[:-1]) and not changed[-1]


@pytest.mark.invariance
def test_prompt_logprobs_are_bitwise_those_of_decoding():
    """Of every answer: scored in company by prefill, in chunks, as decode had them."""
    asked = [r for r in requests() if not r.sampling.is_filtered]
    done = answers(model("bundled"), asked, batch_size=5)
    texts = [(*r.prompt_token_ids, *c.token_ids) for r, c in zip(asked, done, strict=True)]
    engine = Engine(model("bundled"), EngineConfig(batch_size=4, prefill_chunk=37, max_len=384))
    for scores, completion in zip(engine.score(texts), done, strict=True):
        got = np.asarray([s.logprob for s in scores[-len(completion.token_ids) :]], np.float32)
        assert_bitwise_equal(got, np.stack(completion.logprobs), claim="scored as decoded")


@pytest.mark.invariance
def test_structured_answers_are_bitwise_batch_invariant():
    forms = (
        StructuredOutput.of_choices(["yes", "no"]),
        StructuredOutput(kind="regex", spec="[a-c]{3,5}[0-9]"),
        None,
    )
    asked = [
        SamplingParams(max_tokens=16, temperature=1.0, seed=i, structured_output=form)
        for i, form in enumerate(forms)
    ]
    prompts = ["Is it late?", "17+26=", "She said"]
    # WHY, pages: other tests that run beside this one hold memory of the same device.
    sizes = {"max_len": 256, "num_pages": 16, "show_progress": False, "backend": "sm90"}
    alone = detjax.LLM("novels-6m", batch_size=1, **sizes)
    want = [alone.generate(p, s)[0].outputs[0] for p, s in zip(prompts, asked, strict=True)]
    got = detjax.LLM("novels-6m", batch_size=3, **sizes).generate(prompts, asked)
    assert [g.outputs[0].digest() for g in got] == [w.digest() for w in want]
    assert want[0].text in ("yes", "no") and re.fullmatch("[a-c]{3,5}[0-9]", want[1].text)
