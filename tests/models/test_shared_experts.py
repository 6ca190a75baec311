# SPDX-License-Identifier: Apache-2.0
"""An expert that every token has: what a configuration may say, how it is stored, who takes it."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detjax.engine.running.device_arrays import empty_pages
from detjax.models import layers
from detjax.models.config import ModelConfig
from detjax.models.hf_config import config_from_hf, load_config
from detjax.models.params import check_tp, param_specs, possible_tps
from detjax.models.weights.load import load_params
from detjax.models.weights.named import load_named_params
from detjax.pallas_kernels import portable
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.bitwise import count_different_bits
from detjax.testing.dummies import batch_of, dummy_model, scoring_step
from detjax.training.weights import why_not_trained

HF = Path(__file__).parents[1] / "golden" / "hf"
HYBRID = HF / "qwen3_5_moe"


def config(case: str, **changes) -> ModelConfig:
    values = json.loads((HF / case / "config.json").read_text())
    return config_from_hf({**values, **changes})


@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3_5_moe"])
def test_layers_with_experts_have_a_shared_one(case):
    made = config(case)
    assert made.has_shared_expert and made.experts.shared_width == 64
    layers = param_specs(made, tp=2, vocab_block=64)["layers"]
    for i, layer in enumerate(layers):
        assert ("shared_gate_up" in layer) == made.has_experts(i)
    assert layers[0]["shared_gate_up"].shape == (128, 64)
    assert layers[0]["shared_down"].shape == (64, 64)
    assert layers[0]["shared_gate"].shape == (64, 64), "a row, and zeros up to a whole block"
    assert 4 not in possible_tps(config(case, shared_expert_intermediate_size=66))
    with pytest.raises(ValueError, match="tp=2 must divide shared_width=65"):
        check_tp(config(case, shared_expert_intermediate_size=65), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 must be an"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size=None must be"),
        ({"shared_expert_intermediate_size": 2**25}, "must be at most 16777216"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be at most num_experts=4"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ({"n_shared_experts": 1}, "n_shared_experts=1 is not a key that detjax knows"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config("qwen3_5_moe", **changes)


def test_routers_of_other_families_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"architectures=\['DeepseekV3ForCausalLM'\] is not supported"
    ):
        config("qwen2_moe", architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")


def test_a_hybrid_says_where_it_is_not_trained():
    assert why_not_trained(config("qwen2_moe"), Backend.SM90) is None
    assert why_not_trained(load_config(HYBRID), Backend.PORTABLE) is None
    assert why_not_trained(load_config(HYBRID), Backend.SM90) == "linear attention on sm90"


def stacked(held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of a layer as one tensor, gates before ups, inside a model that sees images."""
    found, experts = {}, {}
    for name, value in held.items():
        longer = name.replace("model.", "model.language_model.", 1)
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", longer)
        if match is None:
            found[longer] = value
            continue
        layer, expert, what = match.groups()
        experts.setdefault(layer, {})[int(expert), what] = value
    for layer, parts in experts.items():
        order = range(1 + max(expert for expert, _ in parts))
        gate_up = [np.concatenate([parts[i, f"{p}_proj"] for p in ("gate", "up")]) for i in order]
        found[f"{layer}.gate_up_proj"] = np.stack(gate_up)
        found[f"{layer}.down_proj"] = np.stack([parts[i, "down_proj"] for i in order])
    return found


def test_a_published_folder_has_the_weights_of_experts_one_by_one(tmp_path):
    """Experts in one tensor, and the names that a part for images adds."""
    text = json.loads((HYBRID / "config.json").read_text())
    del text["architectures"], text["transformers_version"]
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "image_token_id": 7, "video_token_id": 6, "vision_start_token_id": 5,
        "vision_end_token_id": 4, "vision_config": {"depth": 1}, "text_config": text,
    }  # fmt: skip
    tensors = stacked(load_file(HYBRID / "model.safetensors"))
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
    spare = {"mtp.fc.weight": np.zeros((2, 2), np.float32)}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    save_file(tensors | spare, tmp_path / "model.safetensors")
    made, mesh, options = (
        load_config(HYBRID),
        make_mesh(1, 2),
        {"dtype": "bfloat16", "vocab_block": 64},
    )
    assert load_config(tmp_path) == made
    want = load_params(HYBRID, made, mesh, **options)
    got = load_params(tmp_path, made, mesh, **options)
    named = load_named_params([*tensors.items(), *spare.items()], made, mesh, **options)
    for have in (got, named):
        for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
            assert_bitwise_equal(np.asarray(a), np.asarray(b), claim="experts in one tensor")
    swapped = {
        name: np.roll(x, x.shape[1] // 2, axis=1) if name.endswith("gate_up_proj") else x
        for name, x in tensors.items()
    }
    save_file(swapped, tmp_path / "model.safetensors")
    other = load_params(tmp_path, made, mesh, **options)
    a, b = (np.asarray(p["layers"][0]["expert_gate_up"]) for p in (other, want))
    assert (a != b).any(), "ups before gates are other experts"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3_5_moe"])
def test_rows_left_to_the_next_product_change_no_bit(case, monkeypatch):
    """As `sm90` leaves few rows of a mixture, also before gates and linear attention."""
    made = dummy_model(load_config(HF / case), backend=Backend.PORTABLE)
    ids = np.random.default_rng(3).integers(0, 320, 9)
    table, asked = np.arange(1, dtype=np.int32).reshape(1, 1), []

    def logits() -> np.ndarray:
        step = scoring_step(made)
        return np.asarray(step(empty_pages(made, 1), batch_of([(ids, 0)], table))[1])

    want = logits()
    monkeypatch.setattr(portable, "defers_experts", lambda *sizes: asked.append(sizes) or True)
    assert_bitwise_equal(logits(), want, claim=f"{case}: experts added by whoever reads the stream")
    assert asked, "the other way was taken"
    monkeypatch.setattr(layers, "_shared_rows", lambda *operands: None)
    assert count_different_bits(logits(), want) > 0
