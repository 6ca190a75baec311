# SPDX-License-Identifier: Apache-2.0
"""Answers with adapters of experts: whose adapters share the batch, the slots, path and mesh."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax.models.layers as layers
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.lora_request import LoRARequest
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.llm import LLM
from detjax.models.adapters.low_rank import Adapter
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.hf_config import load_config
from detjax.pallas_kernels.backend import Backend
from detjax.testing import assert_order_sensitive
from detjax.testing.adapters import random_adapter, write_adapter_folder
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config, dummy_model, mixed_requests
from detjax.testing.folders import SMALL_MIXTURE, write_model_folder

from .test_answers import assert_same

CONFIG = dummy_config(intermediate_size=128, experts=(8, 3), qk_norm=True)
MAX_TOKENS, COUNT = 4, 8


@cache
def adapters() -> tuple[Adapter, ...]:
    """Of ranks below and above one block of 16; the last one leaves the experts alone."""
    ranks = ((3, 3), (8, 20), (16, 0))
    return tuple(
        random_adapter(CONFIG, seed=i, rank=rank, expert_rank=of_experts)
        for i, (rank, of_experts) in enumerate(ranks)
    )


def engine_of(
    *, max_loras: int = 4, max_expert_lora_rank: int = 32, dp: int = 1, tp: int = 1,
    backend: Backend = Backend.REFERENCE, **options,
) -> Engine:  # fmt: skip
    """A new engine that knows all adapters."""
    sizes = AdapterSizes(max_loras=max_loras, max_expert_lora_rank=max_expert_lora_rank)
    model = open_adapters(dummy_model(CONFIG, dp=dp, tp=tp, backend=backend), sizes)
    engine = Engine(model, EngineConfig(**{"batch_size": COUNT, "max_len": 256, **options}))
    for adapter in adapters():
        engine.add_adapter(adapter)
    return engine


def requests() -> list[Request]:
    """Every fourth has no adapter."""
    plain = mixed_requests(COUNT, vocab_size=CONFIG.vocab_size, max_tokens=MAX_TOKENS)
    names = [*(adapter.sha256 for adapter in adapters()), ""]
    return [dataclasses.replace(one, adapter=names[i % 4]) for i, one in enumerate(plain)]


@cache
def expected() -> list[Completion]:
    """Each request alone."""
    lone = engine_of(batch_size=1)
    return [
        dataclasses.replace(lone.generate([one])[0], request_idx=i)
        for i, one in enumerate(requests())
    ]


@pytest.mark.slow
def test_probe_depends_on_order_and_experts_of_an_adapter_change_answers():
    """The sum is sensitive to its order; an adapter without its experts' part answers otherwise."""
    one = adapters()[1].tensors[1, "expert_down"]
    a = np.asarray(one.a[0], np.float32)
    assert_order_sensitive(a * np.linspace(0.5, 2, a.shape[1], dtype=np.float32))
    engine, request = engine_of(batch_size=1), requests()[1]
    others = Adapter.of({k: v for k, v in adapters()[1].tensors.items() if v.a.ndim == 2})
    assert others.sha256 != adapters()[1].sha256
    sha = engine.add_adapter(others)
    got = engine.generate([dataclasses.replace(request, adapter=sha)])[0]
    assert got.digest() != expected()[1].digest()


@pytest.mark.slow
@pytest.mark.invariance
def test_answers_do_not_depend_on_the_adapters_in_the_batch():
    engine = engine_of()
    assert_same(engine.generate(requests()), expected(), "adapters and none in one batch")
    reverse = engine.generate(requests()[::-1])[::-1]
    want = [dataclasses.replace(it, request_idx=COUNT - 1 - it.request_idx) for it in expected()]
    assert_same(reverse, want, "in another order")


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.PORTABLE])
def test_rows_without_adapters_have_the_bits_of_a_model_without_room_for_them(backend):
    plain = [one for one in requests() if not one.adapter]
    model = dummy_model(CONFIG, backend=backend)
    want = Engine(model, EngineConfig(batch_size=2, max_len=256)).generate(plain)
    done = engine_of(backend=backend).generate(requests())
    got = [one for one, asked in zip(done, requests(), strict=True) if not asked.adapter]
    assert [one.digest() for one in got] == [one.digest() for one in want]


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.PORTABLE])
def test_answers_do_not_depend_on_evictions_chunks_and_sizes_of_slots(backend):
    """Fewer slots than adapters; slots of 64 ranks; drafts that are verified."""
    want = (
        expected()
        if backend is Backend.REFERENCE
        else engine_of(backend=backend).generate(requests())
    )
    other = engine_of(
        backend=backend, max_loras=1, max_expert_lora_rank=64, batch_size=3, prefill_chunk=37
    )
    assert_same(other.generate(requests()), want, "one slot of 64 ranks for three adapters")
    drafting = engine_of(backend=backend, has_prompt_lookup=True, verify_window=4)
    predicted = [
        dataclasses.replace(one, predicted_token_ids=(*done.token_ids[:2], 7))
        for one, done in zip(requests(), want, strict=True)
    ]
    assert_same(drafting.generate(predicted), want, "windows of predicted tokens")
    assert drafting.stats().accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("dp", "tp"), quick_and_slow([(2, 2)], [(1, 4), (1, 8)]))
def test_answers_with_adapters_of_experts_are_bitwise_mesh_invariant(dp, tp):
    got = engine_of(dp=dp, tp=tp).generate(requests())
    assert_same(got, expected(), f"(dp, tp) = {dp, tp}")


@pytest.mark.slow
@pytest.mark.control
def test_control_products_that_are_rounded_on_the_way_give_other_bits(monkeypatch):
    """Rounding the base's product and A x to bfloat16: the same model and requests."""
    exact = layers.expert_linear

    def rounded(x, experts, w, **options):
        out = exact(x, experts, w, **options)
        return jax.lax.reduce_precision(out, 8, 7).astype(jnp.float32)

    monkeypatch.setattr(layers, "expert_linear", rounded)
    got = engine_of(batch_size=1).generate(requests()[:2])
    assert all(a.digest() != b.digest() for a, b in zip(got, expected(), strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_folder_of_peft_answers_by_name_with_its_hash(tmp_path, is_fused):
    """A model and an adapter of files. The control: without it the answer is another."""
    base = write_model_folder(tmp_path / "base", SMALL_MIXTURE, scale=0.2)
    folder = write_adapter_folder(
        tmp_path / "adapter", load_config(base), seed=1, rank=4, has_experts=True, is_fused=is_fused
    )
    options = {"backend": "reference", "max_len": 64, "batch_size": 2, "show_progress": False}
    llm = LLM(base, enable_lora=True, max_loras=1, max_expert_lora_rank=8, **options)
    asked = LoRARequest("experts", 1, str(folder))
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    answers = llm.generate(["ab", "ab"], sampling, lora_request=[asked, None])
    answers += LLM(base, **options).generate(["ab"], sampling)
    adapted, plain, alone = (answer.outputs[0] for answer in answers)
    assert adapted.adapter == llm.load_adapter(folder) and not plain.adapter
    assert adapted.digest() != plain.digest() == alone.digest()


@pytest.mark.gpu
@pytest.mark.invariance
def test_adapters_of_attention_beside_experts_have_the_bits_of_the_reference_on_a_gpu():
    """Alone and in a batch on `sm90`, and on a CPU; without its adapter a request differs."""
    config = dummy_config(
        hidden_size=512, head_dim=64, intermediate_size=512, vocab_size=1024, experts=(8, 3),
        expert_width=128,
    )  # fmt: skip
    some = [random_adapter(config, seed=i, rank=8 + i, expert_rank=0) for i in range(2)]
    names = [*(adapter.sha256 for adapter in some), ""]
    plain = mixed_requests(6, vocab_size=config.vocab_size, max_tokens=MAX_TOKENS)
    asked = [dataclasses.replace(one, adapter=names[i % 3]) for i, one in enumerate(plain)]

    def engine(backend: Backend, batch_size: int) -> Engine:
        model = open_adapters(dummy_model(config, backend=backend), AdapterSizes(max_loras=2))
        made = Engine(model, EngineConfig(batch_size=batch_size, max_len=256))
        for adapter in some:
            made.add_adapter(adapter)
        return made

    together, lone = engine(Backend.SM90, 6), engine(Backend.SM90, 1)
    found = together.generate(asked)
    alone = [
        dataclasses.replace(lone.generate([one])[0], request_idx=i) for i, one in enumerate(asked)
    ]
    assert_same(alone, found, "alone")
    assert_same(engine(Backend.REFERENCE, 6).generate(asked), found, "by the reference")
    bare = together.generate(plain)
    differs = [
        not np.array_equal(np.stack(a.logprobs), np.stack(b.logprobs))
        for a, b in zip(found, bare, strict=True)
    ]
    assert differs == [one.adapter != "" for one in asked]
