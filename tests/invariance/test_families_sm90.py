# SPDX-License-Identifier: Apache-2.0
"""Families that differ from Llama in more than sizes, on a Hopper GPU.

The golden folders have heads that its kernels do not take, so the models here have their features
and wider layers.
"""

import dataclasses
import json
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from detjax.defaults import AUTO, FP8_CACHE
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import empty_pages
from detjax.engine.running.memory import least_local
from detjax.models import abstract
from detjax.models.abstract import why_unsupported
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.config import ModelConfig
from detjax.models.hf_config import config_from_hf, load_config
from detjax.models.loading import LoadedModel
from detjax.models.params import param_specs
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.testing import assert_bitwise_equal
from detjax.testing.adapters import random_adapter
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import batch_of, dummy_config, dummy_model, scoring_step

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
CASES = (
    "glm4", "olmo3", "granite", "gemma3", "smollm3", "phi4_longrope", "exaone4", "olmo2",
    "seed_oss", "gpt_oss", "qwen3_5", "gemma2", "gemma2_wide", "gemma3_wide", "qwen3_5_wide",
    "ministral3", "qwen2_moe", "qwen3_5_moe", "qwen3_next", "glm4_moe",
)  # fmt: skip
WANTED = json.loads((GOLDEN.parent / "family_bits.json").read_text())
"""CRC-32 of whole answers by `reference`, of what a GPU is compared with."""
WIDE = "_wide"
"""Ends the name of a case with heads of 256 channels."""
FLOAT8 = " fp8"
"""Ends the name of a case whose keys and values have 8 bits."""
LORA = " lora"
"""Ends the name of a case in which two of three requests have an adapter."""
EVEN = " even"
"""Ends the name of a case whose shared expert is as wide as the others, so that one row meets it in
their launches."""
MAX_DISTANCE = 0.12
"""Of logits of spread 1 from those of the other backend: bfloat16 rounds each layer's rows."""
MAX_OTHER_ROUTES = 0.02
"""Share of the tokens that may go to other experts, as two of them are nearly as good for a token.

`reference`, which has the bits of `sm90`, sends 1 token of 200 elsewhere in two of five families.
"""


def config_of(case: str) -> ModelConfig:
    """Heads of 64 channels, two queries a key/value head, widths of whole tiles.

    A wide case has heads of 256, as its family publishes them.

    A router of float32 weights has 72 experts, so that its rows are two blocks of 64. With experts
    eight queries a key/value head, and widths that are no multiples of 128, as 2880 of
    gpt-oss. With linear attention 16 heads of keys and 32 of values.
    """
    is_even = case.endswith(EVEN)
    case = case.removesuffix(FLOAT8).removesuffix(LORA).removesuffix(EVEN)
    name = case.removesuffix(WIDE)
    head_dim = 64 if name == case else 256
    config = dataclasses.replace(load_config(GOLDEN / name), head_dim=head_dim, eos_token_ids=())
    if config.experts is not None:
        shared_width = (192 if is_even else 256) if config.experts.shared_width else 0
        experts = dataclasses.replace(config.experts, width=192, shared_width=shared_width)
        if config.has_sigmoid_router:
            experts = dataclasses.replace(experts, num_experts=72)
        config = dataclasses.replace(config, experts=experts)
    if config.has_clamped_experts:
        sizes = {"hidden_size": 576, "num_heads": 16, "num_kv_heads": 2}
        return dataclasses.replace(config, **sizes)
    if config.linear_attention is not None:
        heads = {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 64, "value_dim": 64}
        linear = dataclasses.replace(config.linear_attention, **heads)
        config = dataclasses.replace(config, linear_attention=linear)
    return dataclasses.replace(
        config, hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=4
    )


def profile_of(case: str) -> NumericsProfile:
    """The default, or that of 8-bit keys and values."""
    return NumericsProfile.of("bfloat16", FP8_CACHE if case.endswith(FLOAT8) else AUTO)


@cache
def model(case: str, backend: Backend = Backend.SM90, tp: int = 1) -> LoadedModel:
    return dummy_model(config_of(case), backend=backend, tp=tp, profile=profile_of(case))


def requests() -> list[Request]:
    rng = np.random.default_rng(7)
    return [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 320, length)),
            sampling=SamplingParams(max_tokens=8, temperature=0.8 * (i % 2), seed=i),
        )
        for i, length in enumerate((5, 127, 1, 130, 64, 33, 200, 23))
    ]


def answers(
    case: str, batch_size: int, prefill_chunk: int, backend: Backend = Backend.SM90, *, tp: int = 1
) -> list[Completion]:
    config = EngineConfig(batch_size=batch_size, prefill_chunk=prefill_chunk, max_len=256)
    if case.endswith(LORA):
        return adapted_answers(case, model(case, backend, tp), config)
    return Engine(model(case, backend, tp), config).generate(requests())


def adapted_answers(case: str, made: LoadedModel, config: EngineConfig) -> list[Completion]:
    """Those of requests of which two of three have an adapter."""
    adapters = [random_adapter(config_of(case), seed=i, rank=rank) for i, rank in ((0, 3), (1, 16))]
    engine = Engine(open_adapters(made, AdapterSizes(max_loras=2)), config)
    names = [*map(engine.add_adapter, adapters), ""]
    return engine.generate(
        [dataclasses.replace(one, adapter=names[i % 3]) for i, one in enumerate(requests())]
    )


def crc_of(found: list[Completion]) -> int:
    """Of the logprobs of all answers."""
    return zlib.crc32(b"".join(np.asarray(c.logprobs, np.float32).tobytes() for c in found))


@pytest.mark.parametrize("case", quick_and_slow(["gemma2"], dict.fromkeys([*CASES, *WANTED])))
def test_the_kernels_take_every_layer(case):
    """They are traced on any machine."""
    assert abstract._why_not_traced(config_of(case), profile_of(case), Backend.SM90, 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", (1, 2, 8, 9, 16, 17, 33, 65, 129, 255, 257, 512, 4096))
def test_the_kernels_take_any_number_of_rows_of_smollm2(num_rows, monkeypatch):
    """Its rows of 576 channels are no multiple of 128; what is probed must stand for all steps."""
    config = dummy_config(
        num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576, intermediate_size=1536,
        vocab_size=49152, num_layers=1,
    )  # fmt: skip
    monkeypatch.setattr(abstract, "PROBED_LENGTHS", (num_rows,))
    assert abstract._why_not_traced(config, NumericsProfile(), Backend.SM90, 1) is None


@pytest.mark.parametrize(
    ("case", "keys", "says"),
    [
        ("gemma2", {"head_dim": 192}, "64, 96, 128, 256. channels, not 192"),
    ],
)
def test_what_the_kernels_lack_is_named(case, keys, says):
    config = dataclasses.replace(config_of(case), **keys)
    reason = why_unsupported(config, NumericsProfile(), Backend.SM90, 1)
    assert reason is not None and says in reason.replace("(", "").replace(")", "."), reason


def published_hybrid(num_value_heads: int) -> ModelConfig:
    return config_from_hf(
        {
            "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4,
            "linear_num_value_heads": num_value_heads,
        }
    )  # fmt: skip


@pytest.mark.parametrize(("num_value_heads", "rows"), [(48, 16512), (16, 8256), (32, 12352)])
def test_projections_of_any_published_number_of_heads_are_whole_blocks(num_value_heads, rows):
    """Zeros stand behind b and a of 16 and 48 heads of values, as of Qwen3.5 0.8B and 27B."""
    config = published_hybrid(num_value_heads)
    spec = param_specs(config, tp=1, vocab_block=128)["layers"][0]["linear_in"]
    assert spec.shape[0] == rows
    assert sum(spec.tensors[-1].hf_shape[:1]) == num_value_heads


@pytest.mark.slow
@pytest.mark.parametrize("num_value_heads", [16, 32, 48])
def test_the_kernels_take_projections_of_any_published_number_of_heads(num_value_heads):
    config = published_hybrid(num_value_heads)
    assert abstract._why_not_traced(config, NumericsProfile(), Backend.SM90, 1) is None


@pytest.mark.slow
def test_the_kernels_take_ranks_of_linear_attention():
    """Their products are whole blocks."""
    config = config_of("qwen3_5_wide")
    assert abstract._why_not_traced(config, NumericsProfile(), Backend.SM90, 2) is None


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("case", CASES)
def test_batch_chunk_and_path_change_nothing(case):
    """Alone in chunks of 64 tokens, together in chunks of 48, and the answers as prompts."""
    alone, together = answers(case, 1, 64), answers(case, 8, 48)
    for got, want in zip(together, alone, strict=True):
        assert got.token_ids == want.token_ids
        assert_bitwise_equal(np.stack(got.logprobs), np.stack(want.logprobs), claim=case)
    engine = Engine(model(case), EngineConfig(batch_size=4, prefill_chunk=64, max_len=256))
    scores = engine.score([c.prompt_token_ids + c.token_ids for c in alone], top=0)
    for completion, scored in zip(alone, scores, strict=True):
        prefilled = [one.logprob for one in scored[-len(completion.token_ids) :]]
        decoded = np.stack(completion.logprobs)
        assert_bitwise_equal(np.array(prefilled, np.float32), decoded, claim=f"{case}: path")


def num_unlike_with_local_pages(case: str, backend: Backend, tp: int = 1) -> int:
    """Answers that differ between the fewest local pages and as many as other layers have."""
    config = dataclasses.replace(config_of(case), max_position_embeddings=1024)
    rng, found = np.random.default_rng(7), []
    asked = [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 320, length)),
            sampling=SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i),
        )
        for i, length in enumerate((5, 300, 120, 640, 505, 33))
    ]
    sizes = EngineConfig(batch_size=3, prefill_chunk=64, max_len=1024)
    made = dummy_model(config, backend=backend, tp=tp)
    for num_local in (0, least_local(made, sizes)):
        engine = Engine(made, dataclasses.replace(sizes, num_local_pages=num_local))
        found += [engine.generate(asked), engine.generate(asked)]
        assert engine.stats().num_self_check_differences == 0
    want, *others = [[(c.token_ids, crc_of([c])) for c in one] for one in found]
    assert 0 < num_local < engine.stats().num_pages
    return sum(a != b for one in others for a, b in zip(one, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["gemma3", "gpt_oss", "olmo3", "qwen3_5"])
def test_fewer_pages_for_local_layers_change_nothing(case):
    """Windows, sinks and states: each with the fewest pages, twice, and with all pages."""
    assert num_unlike_with_local_pages(case, Backend.SM90) == 0


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("case", ["gemma3", "qwen3_5"])
def test_fewer_pages_for_local_layers_change_nothing_on_two_ranks(case):
    assert num_unlike_with_local_pages(case, Backend.SM90, tp=2) == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma3", "olmo3", "qwen3_5"])
def test_fewer_pages_for_local_layers_change_nothing_on_the_reference(case):
    """The same on a CPU, so that the test itself has run."""
    assert num_unlike_with_local_pages(case, Backend.REFERENCE) == 0


@pytest.mark.gpu
@pytest.mark.golden
def test_whole_answers_of_a_hybrid_have_the_bits_of_the_reference():
    """The CRC-32 that `test_reference.py` has of the same model and requests, on a CPU."""
    wanted = json.loads((GOLDEN.parent / "hybrid_bits.json").read_text())["answers"]
    assert crc_of(answers("qwen3_5", batch_size=4, prefill_chunk=64)) == wanted


@pytest.mark.gpu
@pytest.mark.golden
@pytest.mark.parametrize("case", ["gemma2", "gemma2_wide", "gemma3_wide", "qwen3_5_wide"])
def test_whole_answers_of_wide_heads_have_the_bits_of_the_reference(case):
    """The CRC-32 that `test_reference.py` has of the same model and requests, on a CPU."""
    wanted = json.loads((GOLDEN.parent / "wide_heads_bits.json").read_text())["answers"]
    assert crc_of(answers(case, batch_size=4, prefill_chunk=64)) == wanted[case]


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("case", WANTED)
def test_whole_answers_of_the_reference_keep_their_bits(case):
    assert crc_of(answers(case, 8, 48, Backend.REFERENCE)) == WANTED[case]


@pytest.mark.slow
@pytest.mark.control
@pytest.mark.parametrize("case", [case for case in WANTED if case.endswith(FLOAT8)])
def test_control_keys_and_values_that_are_not_rounded_give_other_answers(case):
    """So the digests of 8-bit caches tell them from bfloat16 ones of the same model."""
    assert crc_of(answers(case.removesuffix(FLOAT8), 8, 48, Backend.REFERENCE)) != WANTED[case]


@pytest.mark.slow
@pytest.mark.control
def test_control_the_model_without_adapters_gives_other_answers():
    case = next(case for case in WANTED if case.endswith(LORA))
    assert crc_of(answers(case.removesuffix(LORA), 8, 48, Backend.REFERENCE)) != WANTED[case]


@pytest.mark.gpu
@pytest.mark.golden
@pytest.mark.parametrize("case", WANTED)
def test_whole_answers_have_the_bits_of_the_reference(case):
    assert crc_of(answers(case, batch_size=4, prefill_chunk=64)) == WANTED[case]


ON_TWO_RANKS = (
    "qwen3_5_moe", "glm4_moe", "gpt_oss", "qwen3_5_wide", "gemma3", "qwen2_moe", "qwen3_5",
    "ministral3", "qwen3_next", "olmo3", "gemma2", "phi4_longrope", "gpt_oss fp8", "gemma3 fp8",
    "qwen3_5 lora", "gpt_oss lora", "gemma3 lora", "glm4_moe lora",
)  # fmt: skip
"""Cases whose layers have parts that others do not: each kind of attention, norm and mixture."""


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.invariance
@pytest.mark.parametrize("case", ON_TWO_RANKS)
def test_ranks_that_share_layers_change_nothing(case):
    """Two ranks, in a batch of 8 and chunks of 48, and one, in a batch of 4 and chunks of 64."""
    wanted = WANTED.get(case)
    if wanted is None:
        wanted = crc_of(answers(case, 4, 64))
    assert crc_of(answers(case, 8, 48, tp=2)) == wanted


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.control
def test_control_the_ranks_of_xla_give_other_answers():
    """`fast` adds ranks by psum, whose order is not that of one rank."""
    asked = [dataclasses.replace(request, is_deterministic=False) for request in requests()]
    config = EngineConfig(batch_size=4, prefill_chunk=64, max_len=256, mode="fast")
    fast = [Engine(model("gemma3", tp=tp), config).generate(asked) for tp in (1, 2)]
    assert crc_of(fast[0]) != crc_of(fast[1])


def share_of_distant_rows(case: str, backend: Backend) -> float:
    """Tokens whose logits are further than `MAX_DISTANCE` from those of `portable`."""
    ids = np.random.default_rng(3).integers(0, 320, 200)
    table = np.arange(2, dtype=np.int32).reshape(1, 2)
    logits = []
    for one in (backend, Backend.PORTABLE):
        made = model(case, one)
        _, found = scoring_step(made)(empty_pages(made, 2), batch_of([(ids, 0)], table))
        logits.append(np.asarray(found, np.float64).reshape(len(ids), -1))
    distances = np.abs(logits[0] - logits[1]).max(axis=1) / logits[1].std()
    worst = ", ".join(f"{x:.3f}" for x in np.sort(distances)[:-4:-1])
    print(f"{case}: logits of tokens differ by {worst} of their spread at most")
    return float((distances >= MAX_DISTANCE).mean())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_logits_are_near_those_of_the_portable_backend(case):
    """Whose goldens transformers computed: the operations are the same, their order is not."""
    allowed = MAX_OTHER_ROUTES if config_of(case).experts is not None else 0.0
    assert share_of_distant_rows(case, Backend.SM90) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma2", "qwen2_moe", "qwen3_5_moe"])
def test_logits_of_the_reference_are_near_those_of_the_portable_backend(case):
    """The same on a CPU, so that the test itself has run."""
    allowed = MAX_OTHER_ROUTES if config_of(case).experts is not None else 0.0
    assert share_of_distant_rows(case, Backend.REFERENCE) <= allowed
