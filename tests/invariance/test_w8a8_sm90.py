# SPDX-License-Identifier: Apache-2.0
"""Whole answers of models whose weights and activations have 8 bits, on a Hopper GPU."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import LoadedModel, load_model
from detjax.models.quantization.quantize import RECIPES, quantize_folder
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.quantized import LARGEST, QuantizedRows, RowCoding
from detjax.pallas_kernels.moe import sm90 as moe
from detjax.parallel.mesh import make_mesh
from detjax.testing.folders import make_static, with_settings, write_model_folder

pytestmark = [pytest.mark.gpu, pytest.mark.invariance]

DENSE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
"""A width that is no multiple of 512, as that of Qwen3-30B-A3B."""


def opened(folder: Path, form: str = "w8a8") -> LoadedModel:
    return load_model(
        str(folder), profile=NumericsProfile(), mesh=make_mesh(dp=1, tp=1, platform="gpu"),
        backend=Backend.SM90, quantized_weights=form,
    )  # fmt: skip


def quantized(tmp_path: Path, config: dict, scheme: str) -> Path:
    write_model_folder(tmp_path / "bf16", config, scale=512**-0.5)
    quantize_folder(tmp_path / "bf16", tmp_path / "q", RECIPES[scheme], progress=ignore_progress)
    return tmp_path / "q"


def requests() -> list[Request]:
    rng = np.random.default_rng(7)
    return [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 500, length)),
            sampling=SamplingParams(max_tokens=8, temperature=0.8 * (i % 2), seed=i),
        )
        for i, length in enumerate((5, 127, 1, 130, 64, 33, 200, 23, 8, 300))
    ]


def answers(model: LoadedModel, batch_size: int, prefill_chunk: int, **changes) -> list[str]:
    config = EngineConfig(
        batch_size=batch_size, prefill_chunk=prefill_chunk, max_len=384, **changes
    )
    return [one.digest() for one in Engine(model, config).generate(requests())]


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("scheme", ["int8-w8a8", "fp8-dynamic", "fp8-block"])
def test_no_batch_chunk_or_path_changes_an_answer(tmp_path, config, scheme):
    folder = quantized(tmp_path, config, scheme)
    model = opened(folder)
    want = answers(model, 1, 64)
    assert answers(model, 10, 256) == want
    assert answers(model, 4, 256, mode="dvr", draft_weights="full") == want
    assert answers(opened(folder, "expanded"), 10, 256) != want  # it can fail


@pytest.mark.parametrize("scheme", ["int8-w8a8", "fp8-dynamic"])
def test_static_scales_give_one_answer_and_have_a_part_in_it(tmp_path, scheme):
    folder = with_settings(
        quantized(tmp_path, DENSE, scheme), make_static, input_scale=lambda _: 0.01
    )
    model = opened(folder)
    want = answers(model, 1, 64)
    assert answers(model, 10, 256) == want
    with_settings(folder, lambda settings: None, input_scale=lambda _: 0.02)
    assert answers(opened(folder), 10, 256) != want


def by_tensor(x, coding: RowCoding, *, interpret: bool = False) -> QuantizedRows:
    """One scale for all rows."""
    rows = quantize_rows(x, coding, interpret=interpret)
    values, most = x.astype(jnp.float32), LARGEST[coding.dtype.name]
    scale = jnp.max(jnp.abs(values)) / most
    values = jnp.clip(jnp.round(values / scale), -most, most).astype(coding.dtype)
    return QuantizedRows(values=values, scales=jnp.full_like(rows.scales, scale))


quantize_rows = moe.quantize_rows


def test_one_scale_for_all_rows_of_experts_would_change_answers(tmp_path, monkeypatch):
    """The control: on the same requests, with the scales that servers use by default."""
    folder = quantized(tmp_path, EXPERTS, "int8-w8a8")
    monkeypatch.setattr(moe, "quantize_rows", by_tensor)
    kernels = (moe.expert_mlp, moe.expert_mlp_add_rms_norm, moe.route_mlp,
               moe.route_mlp_add_rms_norm)  # fmt: skip
    for kernel in kernels:
        kernel.clear_cache()
    alone, together = (answers(opened(folder), n, 256, self_check="off") for n in (1, 10))
    for kernel in kernels:
        kernel.clear_cache()
    assert alone != together
