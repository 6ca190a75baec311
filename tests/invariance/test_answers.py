# SPDX-License-Identifier: Apache-2.0
"""The whole system: a request's tokens and logprobs, whatever runs beside it and wherever."""

import dataclasses
import json
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax.models.decoder
import detjax.models.layers
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import empty_pages
from detjax.engine.running.programs import ProgramCache
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.rms_norm.api import add_rms_norm
from detjax.testing import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
)
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import (
    answers,
    batch_of,
    dummy_config,
    dummy_model,
    mixed_requests,
    scoring_step,
)

from .faults import order_by_company, order_by_ranks

# 3 heads divide over no mesh; copies of 1 and shares of 8 are told apart at tp 4 and 8, 2 at tp 4.
MESH_CASES = quick_and_slow(
    [((1, 2), 2)],
    [
        ((2, 4), 2),
        ((1, 8), 3),
        *((mesh, 3) for mesh in ((1, 2), (1, 4), (2, 4), (8, 1))),
        *((mesh, heads) for mesh in ((1, 4), (1, 8)) for heads in (1, 8)),
        ((1, 4), 2),
    ],
)
MAX_TOKENS = 6


def requests(count: int = 17) -> list[Request]:
    """Whoever has filters asks for top logprobs too, so that one choice program does for all."""
    return [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, logprobs=3))
        if one.sampling.is_filtered
        else one
        for one in mixed_requests(count, vocab_size=320, max_tokens=MAX_TOKENS)
    ]


def config_for(num_kv_heads: int):
    """24 query heads for 3 key/value heads, so that tp 8 cuts through the groups.

    Sums are so long that another order reaches the logprobs through bfloat16: the controls say so.
    """
    num_heads = 24 if num_kv_heads == 3 else 8
    return dummy_config(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        hidden_size=256,
        intermediate_size=768,
        qk_norm=num_kv_heads == 3,
    )


@cache
def model(num_kv_heads: int, dp: int, tp: int) -> LoadedModel:
    return dummy_model(config_for(num_kv_heads), dp=dp, tp=tp)


@cache
def lone_engine(num_kv_heads: int) -> Engine:
    config = EngineConfig(batch_size=1, prefill_chunk=64, max_len=256)
    return Engine(model(num_kv_heads, 1, 1), config)


@cache
def all_alone(num_kv_heads: int) -> list[Completion]:
    return lone_engine(num_kv_heads).generate(requests())


def expected(num_kv_heads: int, count: int = 17) -> list[Completion]:
    """Each of the first requests alone, on one device: the canonical answers."""
    return all_alone(num_kv_heads)[:count]


def assert_same(got: list[Completion], want: list[Completion], claim: str) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        where = f"{claim}: request {w.request_idx}"
        assert g.token_ids == w.token_ids, f"{where}: {g.token_ids} is not {w.token_ids}"
        assert_bitwise_equal(np.stack(g.logprobs), np.stack(w.logprobs), claim=where)
        assert [[i for i, _ in t] for t in g.top_logprobs] == [
            [i for i, _ in t] for t in w.top_logprobs
        ], where
        assert g.digest() == w.digest()
        for a, b in zip(g.top_logprobs, w.top_logprobs, strict=True):
            assert_bitwise_equal(
                np.array([p for _, p in a], np.float32),
                np.array([p for _, p in b], np.float32),
                claim=where,
            )


def test_probe_depends_on_order():
    """Some hidden state's sums change when added backwards, so equal bits are not luck."""
    m = model(2, 1, 1)
    w = np.asarray(m.params["layers"][0]["down"], np.float32)
    assert_order_sensitive(w * np.linspace(0.5, 2, w.shape[1], dtype=np.float32))
    assert len({c.token_ids for c in expected(2)}) > 10


@pytest.mark.invariance
@pytest.mark.parametrize(("mesh", "num_kv_heads"), MESH_CASES, ids=str)
def test_answers_are_bitwise_mesh_invariant(mesh, num_kv_heads):
    dp, tp = mesh
    count = 6 if dp < 8 else 9
    got = answers(
        model(num_kv_heads, dp, tp), requests(count), batch_size=dp * (2 if dp < 8 else 1)
    )
    assert_same(got, expected(num_kv_heads, count), f"(dp, tp) = {mesh}, {num_kv_heads} kv heads")


_PROGRAMS: dict[int, ProgramCache] = {}


def engine_of(batch_size: int, chunk: int) -> Engine:
    """A new engine; those of one batch size share their programs."""
    config = EngineConfig(batch_size=batch_size, prefill_chunk=chunk, max_len=256)
    made = Engine(model(2, 1, 1), config, programs=_PROGRAMS.get(batch_size))
    _PROGRAMS[batch_size] = made.programs
    return made


@pytest.mark.invariance
@pytest.mark.parametrize("batch_size", quick_and_slow([17], [2, 8]))
def test_answers_are_bitwise_batch_invariant(batch_size):
    """Rows, row positions and batchmates with other sampling parameters."""
    everyone, engine = requests(), engine_of(batch_size, 64)
    assert_same(engine.generate(everyone), expected(2), f"batch size {batch_size}")
    got = engine.generate(everyone[::-1])[::-1]
    assert [g.digest() for g in got] == [w.digest() for w in expected(2)]


@pytest.mark.invariance
@pytest.mark.parametrize("chunk", quick_and_slow([37], [1, 128, 200]))
def test_answers_are_bitwise_schedule_invariant(chunk):
    """A prompt cut into single tokens, off the block grid, by pages, or not at all."""
    got = engine_of(17, chunk).generate(requests(7))
    assert_same(got, expected(2, 7), f"prefill chunk {chunk}")


def by_prefill(engine: Engine, given: list[Completion]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and logprobs of each decoded token but the first, prefilled with those before."""
    asked = [
        Request(
            prompt_token_ids=request.prompt_token_ids + one.token_ids[:i],
            sampling=dataclasses.replace(
                request.sampling.for_prompt(request.prompt_token_ids), max_tokens=1
            ),
        )
        for request, one in zip(requests(len(given)), given, strict=True)
        for i in range(1, MAX_TOKENS)
    ]
    got = engine.generate(asked)
    return np.array([c.token_ids[0] for c in got]), np.array([c.logprobs[0] for c in got])


def decoded(given: list[Completion]) -> tuple[np.ndarray, np.ndarray]:
    """What `by_prefill` must give."""
    ids = np.concatenate([c.token_ids[1:] for c in given])
    return ids, np.concatenate([c.logprobs[1:] for c in given])


@pytest.mark.invariance
def test_decode_is_bitwise_path_consistent_with_prefill():
    """Prefilling a prompt with its own completion gives the logprobs that decoding gave."""
    given = expected(2, 7)
    ids, logprobs = by_prefill(lone_engine(2), given)
    want_ids, want = decoded(given)
    assert ids.tolist() == want_ids.tolist()
    assert_bitwise_equal(
        logprobs, want, claim="decode step t has the bits of prefill at position t"
    )


@pytest.mark.invariance
def test_samples_share_prefix_pages_and_are_bitwise_schedule_invariant():
    """n > 1 reuses the prompt's full pages; no sample equals a sibling."""
    prompt = requests(7)[6].prompt_token_ids
    together = Request(
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=9, n=4),
    )
    got = engine_of(17, 37).generate([together, *requests(7)])[:4]
    assert len({c.token_ids for c in got}) == 4
    again = lone_engine(2).generate([together, *requests(7)])[:4]
    assert_same(again, got, "n=4 one after the other")


@pytest.mark.slow
@pytest.mark.invariance
def test_warm_prefix_is_bitwise_schedule_invariant():
    """Pages filled by another request, at another batch position, serve this one unchanged."""
    m = model(2, 1, 1)
    tokens = np.asarray(requests(7)[6].prompt_token_ids, np.int32)
    cold = _logits_of(m, [(tokens, 0)])
    warm = _logits_of(m, [(tokens[:128], 0), (tokens[128:], 128)])
    assert_bitwise_equal(
        warm[-1], cold[0][128:], claim="a warm prefix gives the bits of a cold one"
    )


def _logits_of(m: LoadedModel, pieces) -> list[np.ndarray]:
    """Logits of every token of each piece, all pieces of one sequence in turn."""
    step, pages, out = scoring_step(m), empty_pages(m, 4), []
    for piece in pieces:
        pages, logits = step(pages, batch_of([piece], np.asarray([[2, 0, 3]], np.int32)))
        out.append(np.asarray(logits)[0])
    return out


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("weight_dtype", "compute_dtype"),
    [
        ("bfloat16", "float32"),
        ("float32", "float32"),
    ],
)
def test_float32_profiles_are_bitwise_mesh_and_batch_invariant(weight_dtype, compute_dtype):
    profile = NumericsProfile(weight_dtype=weight_dtype, compute_dtype=compute_dtype)
    config = dummy_config(qkv_bias=True, o_bias=True, window=48)
    one = answers(dummy_model(config, profile=profile), requests(5))
    many = answers(dummy_model(config, profile=profile, tp=4), requests(5), batch_size=5)
    assert_same(many, one, f"{weight_dtype} weights, {compute_dtype} compute, biases, a window")


_SECOND_PROCESS = """
import json, sys
from detjax.parallel.mesh import configure_virtual_devices
configure_virtual_devices(int(sys.argv[1]))
from detjax.engine.requests.request import Request, SamplingParams
from detjax.testing.dummies import answers, dummy_config, dummy_model
prompts = json.load(sys.stdin)
reqs = [Request(prompt_token_ids=tuple(p), sampling=SamplingParams(max_tokens=6, **s))
        for p, s in prompts]
config = dummy_config(hidden_size=256, intermediate_size=768)
got = answers(dummy_model(config, tp=int(sys.argv[1])), reqs, batch_size=2)
print(json.dumps([c.digest() for c in got]))
"""


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("num_devices", quick_and_slow([1], [2]))
def test_answers_are_bitwise_run_invariant_in_a_second_process(num_devices):
    """It compiles anew, and gives each the programs that these three need together."""
    chosen = [0, 1, 3]
    everyone = requests()
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "logprobs")
    given = [
        (everyone[i].prompt_token_ids, {f: getattr(everyone[i].sampling, f) for f in fields})
        for i in chosen
    ]
    run = subprocess.run(
        [sys.executable, "-c", _SECOND_PROCESS, str(num_devices)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [expected(2)[i].digest() for i in chosen]


@pytest.mark.slow
@pytest.mark.invariance
def test_answers_are_bitwise_invariant_to_what_the_program_can_do_besides():
    """Each request with the program that it alone asks for: with filters, top logprobs or none."""
    got = [lone_engine(2).generate([request])[0] for request in requests(5)]
    assert_same(got, expected(2, 5), "a program of one's own")


def _differing(first: list[Completion], second: list[Completion]) -> int:
    return sum(
        count_different_bits(np.stack(a.logprobs), np.stack(b.logprobs))
        for a, b in zip(first, second, strict=True)
    )


def _plain_partial(x, w, *, reduction, backend):
    return jnp.dot(x, w.T, preferred_element_type=jnp.float32)


def _plain_add_norm(x, w, residual, bias, gain, *, reduction, eps, backend):
    partial = _plain_partial(x, w, reduction=reduction, backend=backend)
    return add_rms_norm(partial, residual, bias, gain, eps=eps, backend=backend)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("most_rows", (2, 1024))
def test_answers_do_not_depend_on_who_normalises(monkeypatch, most_rows):
    """Norms left to the next product, in decode only or everywhere, change no answer."""
    want, deferred = expected(2, 6), []

    def defers(x, w, *, reduction, backend):
        deferred.append(x.shape[0] <= most_rows)
        return deferred[-1]

    monkeypatch.setattr(detjax.models.layers, "defers_norm", defers)
    got = answers(dummy_model(config_for(2)), requests(6), batch_size=2)
    assert_same(got, want, f"norms of at most {most_rows} rows in the product after them")
    assert any(deferred) and all(deferred) == (most_rows == 1024)


def unchecked(model: LoadedModel, programs: ProgramCache | None = None, **sizes) -> Engine:
    """An engine that does not look for the faults that are planted here."""
    sizes = {"batch_size": 1, "prefill_chunk": 64, "max_len": 256} | sizes
    return Engine(model, EngineConfig(**sizes, self_check="off"), programs=programs)


@pytest.mark.control
def test_control_an_order_by_company_is_seen_by_batch_batchmates_chunk_and_path(monkeypatch):
    """The comparisons of the tests above, on their model and their requests, find other bits."""
    expected(2)  # so that no program of the lone engine is traced with the fault
    order_by_company(monkeypatch, canonical_rows=64)
    m, everyone = model(2, 1, 1), requests()
    sizes = {"batch_size": 17, "decode_batches": (1,)}
    made = unchecked(m, **sizes)
    alone = [made.generate([one])[0] for one in everyone[:7]]
    together = made.generate(everyone)
    assert _differing(together[:7], alone) > 0, "batch"
    assert _differing(together, made.generate(everyone[::-1])[::-1]) > 0, "batchmates"
    pieces = unchecked(m, made.programs, **sizes, prefill_chunk=37)
    assert _differing([pieces.generate([one])[0] for one in everyone[:7]], alone) > 0, "chunk"
    assert count_different_bits(by_prefill(lone_engine(2), alone)[1], decoded(alone)[1]) > 0, "path"


@pytest.mark.control
def test_control_an_order_by_ranks_is_not_mesh_invariant(monkeypatch):
    """The first tokens of the quick mesh case, where ranks add in an order of their own."""
    want = np.stack([one.logprobs[0] for one in expected(2, 6)])
    order_by_ranks(monkeypatch)
    first = [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, max_tokens=1))
        for one in requests(6)
    ]
    got = unchecked(model(2, 1, 2), batch_size=2).generate(first)
    assert count_different_bits(np.stack([one.logprobs[0] for one in got]), want) > 0


@pytest.mark.slow
@pytest.mark.control
@pytest.mark.parametrize("tp", [2, 8])
def test_control_psum_is_not_mesh_invariant(monkeypatch, tp):
    """The same suite with one leaf a rank and `psum`: some request's bits depend on tp."""
    monkeypatch.setattr(detjax.models.layers, "linear_partial", _plain_partial)
    monkeypatch.setattr(detjax.models.layers, "linear_add_rms_norm", _plain_add_norm)
    monkeypatch.setattr(
        detjax.models.layers,
        "butterfly_sum",
        lambda x, axis, size, *, backend: jax.lax.psum(x, axis),
    )
    runs = [unchecked(dummy_model(config_for(2), tp=n)).generate(requests(6)) for n in (1, tp)]
    assert _differing(*runs) > 0


@pytest.mark.slow
def test_long_completion_ends_at_the_context_and_crosses_splits():
    """Decode past a page and a split; the end of the context ends the completion."""
    config = dummy_config(num_layers=1, max_len=600)
    prompt = tuple(int(t) for t in np.random.default_rng(0).integers(0, 320, 505))
    request = Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=500))
    m = dummy_model(config)
    (whole,) = answers(m, [request], prefill_chunk=256, max_len=600)
    assert len(prompt) + len(whole.token_ids) == 600
    assert whole.finish_reason is FinishReason.LENGTH
    again = Request(
        prompt_token_ids=prompt + whole.token_ids[:60], sampling=SamplingParams(max_tokens=1)
    )
    (last,) = answers(m, [again], prefill_chunk=100, max_len=600)
    assert_bitwise_equal(
        last.logprobs[0], whole.logprobs[60], claim="a token past a split, decoded or prefilled"
    )
