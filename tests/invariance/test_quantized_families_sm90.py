# SPDX-License-Identifier: Apache-2.0
"""Families whose tensors are read otherwise than they are stored, quantised, on a Hopper GPU.

The golden folders have heads that its kernels do not take, so the folders here have their keys and
wider layers.
"""

import contextlib
import json
import logging
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.hf_config import config_from_hf
from detjax.models.loading import LoadedModel, load_model
from detjax.models.quantization.quantize import RECIPES, quantize_folder, quantize_matrix
from detjax.models.weights import packed
from detjax.models.weights.files import open_tensors
from detjax.models.weights.load import ignore_progress
from detjax.models.weights.write import write_weights
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.quantized import is_quantized
from detjax.parallel.mesh import make_mesh
from detjax.testing.bitwise import assert_bitwise_equal
from detjax.testing.dummies import dummy_model

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("phi3", "glm4", "gemma3", "granite", "qwen3_5", "qwen3_next", "qwen3_5_moe", "glm4_moe")
W8A8 = [(case, scheme) for scheme in ("int8-w8a8", "fp8-dynamic") for case in CASES]
HYBRIDS = [case for case in CASES if case.startswith("qwen3_")]
W8A8 += [(case, "fp8-block") for case in HYBRIDS]
PACKED = [(case, scheme) for scheme in ("int4-w4a16", "fp8-dynamic") for case in CASES]
WANTED = json.loads((GOLDEN / "quantized_family_bits.json").read_text())
"""CRC-32 of the logprobs of answers by `reference`, by case and scheme."""

SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
OTHER_SIZES = {
    "num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 768, "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "query_pre_attn_scalar": 64,
}  # fmt: skip
"""Of the families that have such keys."""


def quantized(case: str, scheme: str, out: Path) -> Path:
    stored = json.loads((GOLDEN / "hf" / case / "config.json").read_text())
    stored |= SIZES | {key: size for key, size in OTHER_SIZES.items() if key in stored}
    stored |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    stored |= {"max_position_embeddings": 1024, "tie_word_embeddings": False}
    made = dummy_model(config_from_hf(stored), backend=Backend.REFERENCE)
    plain = out / "bfloat16"
    plain.mkdir(parents=True)
    write_weights(
        plain, made.own_weights(), made.config, made.mesh,
        vocab_block=made.profile.vocab_block, source=GOLDEN / "hf" / case,
    )  # fmt: skip
    (plain / "config.json").write_text(json.dumps(stored))
    quantize_folder(plain, out / scheme, RECIPES[scheme], progress=ignore_progress)
    if scheme == "fp8-block":
        quantize_linear_attention(out / scheme)
    return out / scheme


def quantize_linear_attention(folder: Path) -> None:
    """As Qwen publishes it: all but b and a."""
    with contextlib.ExitStack() as stack:
        stored = {n: np.array(it.rows[:]) for n, it in open_tensors(folder, stack).items()}
    ends = ("in_proj_qkv.weight", "in_proj_qkvz.weight", "in_proj_z.weight", "out_proj.weight")
    for name in [n for n in stored if n.endswith(ends)]:
        stored |= quantize_matrix(name, stored[name], RECIPES["fp8-block"])
    save_file(stored, folder / "model.safetensors")


def opened(folder: Path, form: str, backend: Backend = Backend.SM90, tp: int = 1) -> LoadedModel:
    platform = "gpu" if backend is Backend.SM90 else "cpu"
    return load_model(
        str(folder), profile=NumericsProfile(), mesh=make_mesh(1, tp, platform=platform),
        backend=backend, quantized_weights=form, max_len=384,
    )  # fmt: skip


def requests() -> list[Request]:
    rng = np.random.default_rng(7)
    return [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 250, length)),
            sampling=SamplingParams(max_tokens=8, temperature=0.8 * (i % 2), seed=i),
        )
        for i, length in enumerate((5, 127, 1, 130, 64, 33, 200, 23, 8, 300))
    ]


def answers(model: LoadedModel, batch_size: int, prefill_chunk: int) -> list[Completion]:
    config = EngineConfig(batch_size=batch_size, prefill_chunk=prefill_chunk, max_len=384)
    return Engine(model, config).generate(requests())


def crc_of(found: list[Completion]) -> int:
    return zlib.crc32(b"".join(np.asarray(c.logprobs, np.float32).tobytes() for c in found))


def kept(model: LoadedModel) -> set[str]:
    """Names of the matrices that lie quantised on the devices."""
    layers = model.own_weights()["layers"]
    return {name for layer in layers for name, leaf in layer.items() if is_quantized(leaf)}


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize(("case", "scheme"), PACKED)
def test_products_of_codes_give_the_answers_of_the_expanded_folder(case, scheme, tmp_path):
    folder = quantized(case, scheme, tmp_path)
    model = opened(folder, "packed")
    assert kept(model) >= {"gate_up", "down"} - ({"gate_up", "down"} if "mo" in case else set())
    want = crc_of(answers(opened(folder, "expanded"), 10, 256))
    assert crc_of(answers(model, 1, 64)) == want
    assert crc_of(answers(model, 10, 256)) == want


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize(("case", "scheme"), W8A8)
def test_answers_of_8_bits_have_the_bits_of_the_reference(case, scheme, tmp_path):
    """Alone in chunks of 64 tokens and together in chunks of 256."""
    model = opened(quantized(case, scheme, tmp_path), "w8a8")
    assert kept(model) >= {"qkv", "o"}
    wanted = WANTED[f"{case} {scheme}"]
    assert crc_of(answers(model, 1, 64)) == wanted
    assert crc_of(answers(model, 10, 256)) == wanted


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize(("case", "scheme"), W8A8)
def test_answers_of_8_bits_by_the_reference_keep_their_bits(case, scheme, tmp_path):
    """And weights that are expanded give others, so the digests tell the two apart."""
    folder = quantized(case, scheme, tmp_path)
    found = crc_of(answers(opened(folder, "w8a8", Backend.REFERENCE), 10, 256))
    assert found == WANTED[f"{case} {scheme}"]
    assert crc_of(answers(opened(folder, "expanded", Backend.REFERENCE), 10, 256)) != found


@pytest.mark.parametrize("case", HYBRIDS)
def test_linear_attention_that_is_quantised_in_part_is_expanded(case, tmp_path, caplog):
    """And somebody is told once; what lies beside it is multiplied in 8 bits."""
    folder = quantized(case, "fp8-block", tmp_path)
    packed._warn_expanded.cache_clear()
    with caplog.at_level(logging.WARNING):
        model = opened(folder, "w8a8", Backend.REFERENCE)
    told = [it.getMessage() for it in caplog.records if "linear_attn" in it.getMessage()]
    assert len(told) == 1 and "multiplied by bfloat16 activations" in told[0], told
    names = kept(model)
    assert names >= {"qkv", "o", "linear_o"} and not names & {"linear_in"}
    layers = opened(folder, "expanded", Backend.REFERENCE).own_weights()["layers"]
    for own, want in zip(model.own_weights()["layers"], layers, strict=True):
        if "linear_in" in own:
            assert_bitwise_equal(own["linear_in"], want["linear_in"], claim="the expansion")
