# SPDX-License-Identifier: Apache-2.0
"""Every claim for families that differ from Llama in more than sizes: golden shapes, own weights.

Sizes are those of the golden folders but for heads and the feed-forward layer: tp must divide them.
"""

import dataclasses
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.adapters.low_rank import Adapter
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.hf_config import load_config
from detjax.models.layers import ForwardContext
from detjax.models.loading import LoadedModel
from detjax.pallas_kernels.backend import Backend
from detjax.testing import assert_bitwise_equal, assert_order_sensitive
from detjax.testing.adapters import random_adapter
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_model
from detjax.testing.jaxpr_rules import float_arithmetic_outside_kernels
from detjax.testing.programs import plain_key, programs_for
from detjax.training.batch import Scored, by_sequence, pack
from detjax.training.forward import token_logprobs
from detjax.training.weights import master_params, serving_params

from .faults import order_by_company

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
QUICK = ("olmo3",)
"""Norms after, norms over all heads, windows in some layers, two rotary embeddings."""

OLDER = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
"""Families whose features test_answers.py and test_expert_answers.py have."""

OTHERS = sorted(path.name for path in GOLDEN.iterdir() if load_config(path).family not in OLDER)
CASES = (*QUICK, *(case for case in OTHERS if case not in QUICK))
EVERY = pytest.mark.parametrize("case", quick_and_slow(QUICK, CASES))


def engine_sizes(batch_size: int, prefill_chunk: int = 64) -> EngineConfig:
    return EngineConfig(batch_size=batch_size, prefill_chunk=prefill_chunk, max_len=256)


@cache
def model(case: str, dp: int = 1, tp: int = 1) -> LoadedModel:
    return made_anew(case, dp, tp)


def made_anew(case: str, dp: int = 1, tp: int = 1) -> LoadedModel:
    config = load_config(GOLDEN / case)
    sizes = {"intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2}
    linear = config.linear_attention
    if linear is not None:
        linear = dataclasses.replace(linear, num_key_heads=4, num_value_heads=8)
    config = dataclasses.replace(config, **sizes, eos_token_ids=(), linear_attention=linear)
    return dummy_model(config, dp=dp, tp=tp, backend=Backend.PORTABLE)


def requests() -> list[Request]:
    """Prompts of lengths around windows, a chunk and a page; every other one is sampled."""
    rng = np.random.default_rng(7)
    return [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 320, length)),
            sampling=SamplingParams(max_tokens=5, temperature=0.8 * (i % 2), seed=i),
        )
        for i, length in enumerate((5, 127, 1, 130, 64, 33, 140, 23))
    ]


@cache
def alone(case: str) -> list[Completion]:
    """Each request alone on one device: the canonical answers."""
    return Engine(model(case), engine_sizes(1)).generate(requests())


@cache
def together(case: str) -> Engine:
    """An engine of eight at once, in chunks of other lengths."""
    return Engine(model(case), engine_sizes(8, 48))


def assert_same(got: list[Completion], want: list[Completion], claim: str) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.token_ids == w.token_ids, f"{claim}: request {w.request_idx}"
        where = f"{claim}: request {w.request_idx}"
        assert_bitwise_equal(np.stack(g.logprobs), np.stack(w.logprobs), claim=where)


@pytest.mark.slow
@EVERY
def test_probe_depends_on_order(case):
    layer = model(case).params["layers"][0]
    w = layer["down"] if "down" in layer else layer["expert_down"][0]
    w = np.asarray(w, np.float32)
    assert_order_sensitive(w * np.linspace(0.5, 2, w.shape[1], dtype=np.float32))
    assert len({c.token_ids for c in alone(case)}) > 5


@pytest.mark.slow
@EVERY
def test_batch_and_schedule_change_nothing(case):
    """Eight requests at once hit the prefix cache the second time."""
    engine = together(case)
    assert_same(engine.generate(requests()), alone(case), f"{case} in a batch")
    assert_same(engine.generate(requests()[::-1])[::-1], alone(case), f"{case} from the cache")


@pytest.mark.slow
@EVERY
def test_prefill_and_decode_have_the_same_bits(case):
    """An answer's logprobs, greedy ones, are those of its text as a prompt."""
    done = alone(case)
    scores = together(case).score([c.prompt_token_ids + c.token_ids for c in done], top=0)
    for completion, scored in zip(done, scores, strict=True):
        decoded = np.array([one.logprob for one in scored[-len(completion.token_ids) :]])
        where = f"{case}: request {completion.request_idx}"
        assert_bitwise_equal(decoded.astype(np.float32), np.stack(completion.logprobs), claim=where)


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("mesh", quick_and_slow([(1, 4)], [((1, 2),), ((2, 2),)]), ids=str)
def test_a_mesh_changes_nothing(case, mesh):
    """On four ranks two key/value heads are there twice."""
    config = engine_sizes(4)
    got = Engine(model(case, *mesh), config).generate(requests())
    assert_same(got, alone(case), f"{case} on {mesh}")


@pytest.mark.slow
@EVERY
def test_training_has_the_bits_of_serving(case):
    made = model(case)
    done = alone(case)[:4]
    if made.config.tie_word_embeddings != made.config.ties_table:
        # Random weights have a table of their own, and a model that is read the head's.
        made = made_anew(case)
        made.replace_weights(serving_params(master_params(made), made))
        done = Engine(made, engine_sizes(4)).generate(requests()[:4])
    ctx = ForwardContext(config=made.config, profile=made.profile, backend=made.backend, tp=1)
    sequences = [
        Scored(
            token_ids=c.prompt_token_ids + c.token_ids,
            weights=(0.0,) + (1.0,) * (len(c.prompt_token_ids + c.token_ids) - 1),
        )
        for c in done
    ]
    batch = pack(sequences, length=max(len(s.token_ids) for s in sequences) - 1)

    def run(params, batch):
        logprobs, _ = token_logprobs(ctx, params, made.rope_tables, batch, remat=True)
        return jnp.sum(logprobs * batch.weights), logprobs

    (_, logprobs), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(
        master_params(made), batch
    )
    for row, completion in zip(by_sequence(batch, np.asarray(logprobs)), done, strict=True):
        answer = row[len(completion.prompt_token_ids) - 1 :]
        assert_bitwise_equal(answer, np.stack(completion.logprobs), claim=case)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        moves = "router_correction" not in name  # which has a part in the choice alone
        assert bool(jnp.isfinite(leaf).all()) and bool(jnp.any(leaf != 0)) == moves, name


@EVERY
def test_the_step_computes_in_kernels_alone(case):
    """On two ranks, which split the heads that one norm covers."""
    made = model(case, tp=2)
    programs = programs_for(made, num_pages=6, num_slots=3)
    key = plain_key("prefill", rows=2, length=8, table_len=2)
    function, operands = programs.function(key), programs.operands(key, made.params)
    assert float_arithmetic_outside_kernels(function, *operands) == []


@pytest.mark.slow
@pytest.mark.control
def test_control_an_order_by_company_is_seen(monkeypatch):
    """The comparison of the batch, on its model and its requests, finds other bits."""
    want = alone("olmo3")
    order_by_company(monkeypatch, canonical_rows=64)
    config = dataclasses.replace(engine_sizes(8, 48), self_check="off")
    with pytest.raises(AssertionError, match="olmo3 with the fault"):
        got = Engine(model("olmo3"), config).generate(requests())
        assert_same(got, want, "olmo3 with the fault")


ADAPTED = quick_and_slow(
    ["qwen3_5"], ["olmo3", "gemma3", "glm", "glm4_moe", "gpt_oss", "qwen3_next"]
)
"""Linear attention; norms after; norms before and after, GELU; joined rows and pairs; a share of
channels rotated, a router of sigmoids; sinks and clamps; joined rows and experts."""


@cache
def adapters(case: str) -> tuple[Adapter, ...]:
    config = model(case).config
    return tuple(random_adapter(config, seed=i, rank=rank) for i, rank in enumerate((3, 16)))


def with_room(case: str, config: EngineConfig, dp: int = 1, tp: int = 1) -> Engine:
    """An engine that knows both adapters."""
    made = Engine(open_adapters(model(case, dp, tp), AdapterSizes(max_loras=2)), config)
    for adapter in adapters(case):
        made.add_adapter(adapter)
    return made


def adapted_requests(case: str) -> list[Request]:
    """Two of three have an adapter."""
    names = [*(adapter.sha256 for adapter in adapters(case)), ""]
    return [dataclasses.replace(one, adapter=names[i % 3]) for i, one in enumerate(requests())]


@cache
def adapted_alone(case: str) -> list[Completion]:
    return with_room(case, engine_sizes(1)).generate(adapted_requests(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_in_a_batch_and_on_a_mesh_change_nothing(case):
    """Rows without one have the bits of a model without room for any."""
    asked, want = adapted_requests(case), adapted_alone(case)
    for with_one, without, request in zip(want, alone(case), asked, strict=True):
        is_same = with_one.digest() == without.digest()
        assert is_same is not bool(request.adapter), f"{case}: request {with_one.request_idx}"
    engine = with_room(case, engine_sizes(8, 48))
    assert_same(engine.generate(asked), want, f"{case} in a batch")
    assert_same(engine.generate(asked[::-1])[::-1], want, f"{case} from the cache")
    on_ranks = with_room(case, engine_sizes(4), tp=4)
    assert_same(on_ranks.generate(asked), want, f"{case} on four ranks")


@pytest.mark.slow
@pytest.mark.control
def test_control_an_order_by_company_is_seen_with_adapters(monkeypatch):
    want = adapted_alone("qwen3_5")
    order_by_company(monkeypatch, canonical_rows=64)
    config = dataclasses.replace(engine_sizes(8, 48), self_check="off")
    with pytest.raises(AssertionError, match="with the fault"):
        got = with_room("qwen3_5", config).generate(adapted_requests("qwen3_5"))
        assert_same(got, want, "with the fault")
