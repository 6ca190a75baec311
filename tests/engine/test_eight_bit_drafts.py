# SPDX-License-Identifier: Apache-2.0
"""Drafts for a model with 8-bit weights change no bit of its answers, whoever makes them."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running import programs as programs_module
from detjax.models.heads.head import DraftHead
from detjax.models.loading import LoadedModel, load_model
from detjax.models.quantization.quantize import RECIPES, quantize_folder
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.dummies import assert_same_completions
from detjax.testing.eagle import dummy_eagle, dummy_head
from detjax.testing.folders import write_model_folder

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": 0,
}  # fmt: skip
SIZES = {
    "batch_size": 1, "prefill_chunk": 16, "max_len": 64, "num_pages": 1, "verify_window": 4,
    "verify_rows": 1, "verify_patience": 0, "self_check": "off",
}  # fmt: skip
INT8 = "int8-w8a8", "w8a8"
ASKED = Request(
    prompt_token_ids=(9, 20, 31, 42),
    sampling=SamplingParams(max_tokens=40, temperature=0.7, seed=3),
)

pytestmark = pytest.mark.slow


def opened(folder: Path, scheme: str, form: str) -> LoadedModel:
    write_model_folder(folder / "bf16", CONFIG, scale=128**-0.5)
    quantize_folder(folder / "bf16", folder / "q", RECIPES[scheme], progress=ignore_progress)
    return load_model(
        str(folder / "q"),
        profile=NumericsProfile(),
        mesh=make_mesh(dp=1, tp=1, platform="cpu"),
        backend=Backend.PORTABLE,
        quantized_weights=form,
    )


def mostly_right(text: np.ndarray):
    """Two drafts of three are the tokens of a text."""
    drafts = np.where(np.arange(len(text)) % 3 == 1, (text + 1) % CONFIG["vocab_size"], text)

    def candidates(token_ids, positions):
        return jnp.asarray(drafts)[jnp.clip(positions, 0, len(text) - 1)]

    return candidates


def head_of(model: LoadedModel) -> DraftHead:
    """A head that reads the one layer behind another."""
    eagle = dummy_eagle(model.config, draft_vocab_size=100)
    return dummy_head(model, dataclasses.replace(eagle, feature_layers=(1, 1, 1)))


@pytest.mark.invariance
@pytest.mark.parametrize(
    ("scheme", "form"), [INT8, ("fp8-dynamic", "w8a8"), ("int8-w8a16", "packed")]
)
def test_drafts_of_a_head_for_an_8_bit_model_change_no_bit(tmp_path, scheme, form):
    model = opened(tmp_path, scheme, form)
    (plain,) = Engine(model, EngineConfig(**SIZES)).generate([ASKED])
    text = np.array([*ASKED.prompt_token_ids, *plain.token_ids, 1, 2, 3, 4], np.int32)
    made = Engine(
        model, EngineConfig(**SIZES, draft_weights="eagle3"),
        draft_model=head_of(model), candidates=mostly_right(text),
    )  # fmt: skip
    assert_same_completions(made.generate([ASKED]), [plain])
    assert 0.3 < made.stats().drafts["eagle3"].acceptance < 0.9


@pytest.mark.invariance
def test_an_8_bit_model_that_drafts_for_itself_changes_no_bit(tmp_path):
    """Its fast steps, which multiply the same 8-bit values as bfloat16."""
    model = opened(tmp_path, *INT8)
    (plain,) = Engine(model, EngineConfig(**SIZES)).generate([ASKED])
    made = Engine(model, EngineConfig(**SIZES, draft_weights="draft_model"), draft_model=model)
    assert_same_completions(made.generate([ASKED]), [plain])
    assert made.stats().drafts["draft_model"].acceptance > 0.3


@pytest.mark.control
def test_control_drafts_of_an_8_bit_model_that_are_not_compared_give_other_bits(
    tmp_path, monkeypatch
):
    model = opened(tmp_path, *INT8)
    (plain,) = Engine(model, EngineConfig(**SIZES)).generate([ASKED])
    checked = programs_module.commit_window

    def commit_drafts(slots, slot, start, drafts, num_drafts, chosen):
        believed = jnp.concatenate([drafts, chosen[:, -1:]], axis=1)
        return checked(slots, slot, start, drafts, num_drafts, believed)

    monkeypatch.setattr(programs_module, "commit_window", commit_drafts)
    unsafe = Engine(
        model, EngineConfig(**SIZES, draft_weights="eagle3"), draft_model=head_of(model)
    )
    (done,) = unsafe.generate([ASKED])
    assert done.digest() != plain.digest()
