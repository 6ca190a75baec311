# SPDX-License-Identifier: Apache-2.0
"""Engines drawn at random, under a random load, against each request alone.

Each case is a model, a mesh, a cache, a source of drafts, adapters or none, and requests of every
kind. Other tests choose what meets what; here it is chance, so that what nobody thought of meets.
"""

import dataclasses
import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from detjax.defaults import FP8_CACHE
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.memory import least_local
from detjax.models.adapters.low_rank import Adapter
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.config import LinearAttentionConfig, ModelConfig
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.testing import faults
from detjax.testing.adapters import random_adapter
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.load import LoadReport, LoadRequest, run_load

VOCAB, MAX_LEN, PAGE = 128, 128, 16
SIZES: dict[str, Any] = {"intermediate_size": 128, "vocab_size": VOCAB}
LINEAR = LinearAttentionConfig(
    num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=16, conv_width=4, layers=(True, False)
)
MODELS: dict[str, ModelConfig] = {
    "dense": dummy_config(num_layers=1, **SIZES),
    "biased": dummy_config(num_layers=1, qkv_bias=True, qk_norm=True, num_kv_heads=4, **SIZES),
    "experts": dummy_config(num_layers=1, experts=(8, 2), **SIZES),
    "windows": dataclasses.replace(dummy_config(num_layers=2, **SIZES), sliding_windows=(23, None)),
    "hybrid": dataclasses.replace(
        dummy_config(num_layers=2, qk_norm=True, **SIZES),
        linear_attention=LINEAR,
        has_output_gate=True,
    ),
}
MODELS = {name: dataclasses.replace(of, eos_token_ids=(3, 60)) for name, of in MODELS.items()}
MESHES = ((1, 1), (1, 1), (2, 1), (1, 2), (1, 4), (2, 2))
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE, 70)


@cache
def model(name: str, mesh: tuple[int, int], cache_dtype: str, seed: int = 0) -> LoadedModel:
    profile = NumericsProfile(
        attention_block=PAGE, attention_split=4 * PAGE, kv_cache_dtype=cache_dtype
    )
    return dummy_model(MODELS[name], dp=mesh[0], tp=mesh[1], profile=profile, seed=seed)


@cache
def adapters(name: str) -> tuple[Adapter, ...]:
    return tuple(random_adapter(MODELS[name], seed=seed, rank=4) for seed in range(3))


def sampling_of(rng: np.random.Generator, longest: int) -> SamplingParams:
    """Each field now and then."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(map(int, rng.choice(VOCAB, count, replace=False)))

    kinds: tuple[tuple[float, dict[str, Any]], ...] = (
        (0.3, {"stop_token_ids": tokens(3)}),
        (0.2, {"logprobs": int(rng.integers(1, 6))}),
        (0.15, {"prompt_logprobs": int(rng.integers(0, 4))}),
        (0.15, {"repetition_penalty": float(rng.uniform(0.7, 1.5))}),
        (0.15, {"presence_penalty": float(rng.uniform(-1, 1.5))}),
        (0.15, {"frequency_penalty": float(rng.uniform(-1, 1.5))}),
        (0.1, {"logit_bias": tuple((t, float(rng.uniform(-5, 5))) for t in tokens(3))}),
        (0.1, {"bad_words_token_ids": (tokens(1), tokens(2))}),
        (0.1, {"allowed_token_ids": tokens(40)}),
        (0.15, {"ignore_eos": True}),
        (0.1, {"logprobs_mode": "processed"}),
    )
    sampled: tuple[tuple[float, dict[str, Any]], ...] = (
        (0.3, {"top_k": int(rng.integers(1, 20))}),
        (0.3, {"top_p": float(rng.uniform(0.3, 1))}),
        (0.2, {"min_p": float(rng.uniform(0, 0.2))}),
        (0.25, {"n": int(rng.integers(2, 4))}),
        (0.15, {"noise": "common"}),
    )
    fields: dict[str, Any] = {"max_tokens": int(rng.integers(1, longest))}
    if rng.random() < 0.6:
        temperature, seed = float(rng.choice([0.5, 0.8, 1.0, 1.4])), int(rng.integers(0, 2**62))
        fields |= {"temperature": temperature, "seed": seed}
        kinds += sampled
    for share, kind in kinds:
        fields |= kind if rng.random() < share else {}
    return SamplingParams(**fields)


def requests_of(rng: np.random.Generator, names: list[str]) -> list[LoadRequest]:
    """Prompts around pages, many of which begin alike or repeat themselves."""
    heads, found = [rng.integers(0, VOCAB, max(LENGTHS)) for _ in range(3)], []
    for _ in range(int(rng.integers(6, 14))):
        length = int(rng.choice(LENGTHS))
        prompt = (
            rng.integers(5, 8, length) if rng.random() < 0.3 else rng.integers(0, VOCAB, length)
        )
        if rng.random() < 0.5:
            shared = int(rng.integers(0, length + 1))
            prompt[:shared] = heads[rng.integers(3)][:shared]
        request = Request(
            prompt_token_ids=tuple(map(int, prompt)),
            sampling=sampling_of(rng, min(40, MAX_LEN - length + 1)),
            cache_salt=str(rng.choice(["", "", "a"])),
            adapter=str(rng.choice(["", *names])),
        )
        found.append(LoadRequest(request=request, stop=()))
    return found


def config_of(rng: np.random.Generator, dp: int, has_adapters: bool) -> dict[str, Any]:
    """Sizes and policies, and a source of drafts."""
    window = int(rng.choice([2, 3, 5, 8]))
    windows = {
        "verify_window": window, "verify_rows": int(rng.integers(1, 4)),
        "verify_patience": int(rng.integers(0, 4)), "verify_deadline": int(rng.integers(1, 10)),
    }  # fmt: skip
    by_model = windows | {"draft_weights": "draft_model", "adapts_drafts": bool(rng.integers(2))}
    fraction = {"max_draft_fraction": float(rng.choice([0.5, 1.0]))}
    dvr = windows | fraction | {"mode": "dvr", "decode_steps": int(rng.integers(1, window))}
    sources: list[dict[str, Any]] = [
        {}, {"decode_steps": int(rng.integers(2, 6))}, windows | {"has_prompt_lookup": True},
        by_model,
    ]  # fmt: skip
    if not has_adapters:
        sources += [dvr, dvr | {"draft_weights": "int8"}, by_model | fraction | {"mode": "dvr"}]
    options: dict[str, Any] = {
        "batch_size": dp * int(rng.choice([1, 2, 3, 5, 8])), "max_len": MAX_LEN,
        "prefill_chunk": int(rng.choice([7, 16, 24, 32, 64])),
        "steps_ahead": int(rng.integers(1, 4)), "has_prefix_cache": bool(rng.random() < 0.8),
        "self_check": str(rng.choice(["off", "off", "start", "always"])),
    }  # fmt: skip
    kinds: tuple[tuple[float, dict[str, Any]], ...] = (
        (0.6, {"num_pages": dp * int(rng.integers(9, 15))}),
        (0.4, {"prefill_shapes": ((int(rng.integers(2, 4)), int(rng.choice([8, 16, 20]))),)}),
        (0.3, {"decode_lens": (int(rng.choice([32, 64])),)}),
        (0.3, {"max_prefill_streak": int(rng.integers(1, 5))}),
    )
    for share, kind in kinds:
        options |= kind if rng.random() < share else {}
    return options | sources[rng.integers(len(sources))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An engine, and what it is asked."""

    name: str
    mesh: tuple[int, int]
    cache_dtype: str
    has_adapters: bool
    options: dict[str, Any]
    requests: list[LoadRequest]

    def roomy(self, mesh: tuple[int, int]) -> LoadedModel:
        """The model, with room for adapters if they are asked for."""
        made = model(self.name, mesh, self.cache_dtype)
        sizes = AdapterSizes(max_loras=2, max_lora_rank=8)
        return open_adapters(made, sizes) if self.has_adapters else made

    def engine(self, mesh: tuple[int, int], options: dict[str, Any]) -> Engine:
        """An engine that knows the adapters."""
        made, config, extra = self.roomy(mesh), EngineConfig(**options), {}
        if config.draft_weights == "draft_model":
            extra["draft_model"] = model("dense", mesh, "auto")
        elif self.name in ("windows", "hybrid"):
            config = dataclasses.replace(config, num_local_pages=least_local(made, config))
        engine = Engine(made, config, **extra)
        for adapter in adapters(self.name) if self.has_adapters else ():
            engine.add_adapter(adapter)
        return engine

    def alone(self) -> list[list[Completion]]:
        """The canonical answers: one request at a time, on one device, no drafts and no cache."""
        plain = {"batch_size": 1, "max_len": MAX_LEN, "has_prefix_cache": False}
        engine = self.engine((1, 1), plain | {"self_check": "off"})
        return [engine.generate([drawn.request]) for drawn in self.requests]

    def load(self, expected: list[list[Completion]], seed: int) -> LoadReport:
        """Ask each some three times, in any order, and cancel a few."""
        engine = self.engine(self.mesh, self.options)
        report = run_load(
            engine, self.requests, expected, num_requests=3 * len(self.requests), seed=seed,
            plain_share=0.0,
        )  # fmt: skip
        stats = engine.stats()
        held = stats.num_pages_held, stats.num_local_pages_held, stats.num_running
        assert held == (0, 0, 0) and engine.self_check_error == ""
        return report


def drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    name, mesh = str(rng.choice(list(MODELS))), MESHES[rng.integers(len(MESHES))]
    has_adapters = bool(rng.random() < 0.3)
    names = [one.sha256 for one in adapters(name)] if has_adapters else []
    return Case(
        name=name, mesh=mesh, cache_dtype=FP8_CACHE if rng.random() < 0.15 else "auto",
        has_adapters=has_adapters, options=config_of(rng, mesh[0], has_adapters),
        requests=requests_of(rng, names),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 60))]
)
def test_a_random_engine_under_load_gives_the_bits_of_each_request_alone(seed):
    case = drawn(seed)
    told = json.dumps(case.options | {"model": case.name, "mesh": case.mesh})
    report = case.load(case.alone(), seed)
    assert (report.lost, report.wrong) == ([], []), told
    assert report.num_sequences > report.num_cancelled


@pytest.mark.slow
@pytest.mark.control
def test_control_noise_that_follows_the_row_is_seen(monkeypatch):
    case = drawn(1)
    expected = case.alone()
    faults.key_noise_by_row(monkeypatch.setattr)
    case = dataclasses.replace(case, options=case.options | {"self_check": "off"})
    assert case.load(expected, 1).wrong
