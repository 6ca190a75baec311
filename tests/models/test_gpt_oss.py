# SPDX-License-Identifier: Apache-2.0
"""gpt-oss as it is published: experts in MXFP4, one tensor a layer, and mistakes in reading it."""

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from detjax.engine.running.device_arrays import empty_pages
from detjax.models.config import RopeConfig
from detjax.models.hf_config import config_from_hf, load_config
from detjax.models.loading import LoadedModel, load_model
from detjax.models.quantization.mxfp4 import MAGNITUDES, PAIRS, Mxfp4Rows
from detjax.models.rope import model_rope_tables
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.dummies import batch_of, scoring_step

GOLDEN = Path(__file__).parents[1] / "golden" / "hf" / "gpt_oss"
EXPERTS = "model.layers.0.mlp.experts"
PROMPT = 2
"""The longest, of more tokens than the window."""


def load(folder: Path, dtype: str = "float32", tp: int = 1, **options) -> LoadedModel:
    profile = NumericsProfile(weight_dtype=dtype, compute_dtype=dtype)
    mesh = make_mesh(1, tp)
    return load_model(str(folder), profile=profile, mesh=mesh, backend=Backend.PORTABLE, **options)


@cache
def golden() -> LoadedModel:
    return load(GOLDEN)


def test_every_code_has_the_value_of_the_format():
    """Of float32 arithmetic, by code and exponent; both signs of zero stay apart."""
    words = PAIRS.reshape(256, 256)
    for exponent in (0, 1, 100, 127, 130, 252):
        for code in range(16):
            sign = -1.0 if code >= 8 else 1.0
            value = np.float32(sign * MAGNITUDES[code % 8]) * np.float32(2.0) ** (exponent - 127)
            halves = np.array([words[exponent, code | (15 - code) << 4]]).view(ml_dtypes.bfloat16)
            want = np.array([value]).astype(ml_dtypes.bfloat16)
            assert_bitwise_equal(halves[:1], want, claim=f"code {code}, exponent {exponent}")


def test_any_part_of_an_expert_is_that_part_of_the_whole():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 10, 4, 16), dtype=np.uint8)
    exponents = rng.integers(100, 140, (3, 10, 4), dtype=np.uint8)
    rows = Mxfp4Rows(name="these", blocks=blocks, exponents=exponents)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(3, 10, 128)
    table = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)
    scales = np.exp2(exponents.astype(np.float32) - 127).repeat(32, axis=2)
    whole = (table[codes] * scales).astype(ml_dtypes.bfloat16)
    for inputs in (slice(None), slice(5, 77), slice(32, 64)):
        for outputs in (slice(None), slice(1, None, 2), slice(3, 7)):
            found, want = rows[1, inputs, outputs], whole[1, outputs, inputs].T
            assert_bitwise_equal(np.array(found), np.array(want), claim=f"{inputs} of {outputs}")


def test_an_exponent_whose_weights_are_not_finite_is_refused():
    blocks, exponents = np.zeros((1, 2, 1, 16), np.uint8), np.full((1, 2, 1), 253, np.uint8)
    with pytest.raises(ValueError, match="an exponent of 253"):
        Mxfp4Rows(name="these", blocks=blocks, exponents=exponents)[0, slice(None), slice(None)]


def expanded_folder(folder: Path) -> Path:
    """The golden model with experts in bfloat16, [experts, inputs, outputs], as others store it."""
    shutil.copytree(GOLDEN, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(GOLDEN / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        name = name.removesuffix("_blocks")
        blocks, exponents = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        rows = Mxfp4Rows(name=name, blocks=blocks, exponents=exponents)
        experts = [rows[e, slice(None), slice(None)] for e in range(rows.shape[0])]
        tensors[name] = np.ascontiguousarray(np.stack(experts))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_both_forms_of_a_checkpoint_are_the_same_weights(tmp_path):
    """On two ranks too, where each reads its own experts."""
    folder = expanded_folder(tmp_path / "expanded")
    for tp in (1, 2):
        mxfp4, bfloat16 = load(GOLDEN, "bfloat16", tp), load(folder, "bfloat16", tp)
        assert mxfp4.quantization.startswith("mxfp4: float4_e2m1fn")
        assert bfloat16.quantization == "none"
        assert mxfp4.fingerprint != bfloat16.fingerprint
        for (path, a), b in zip(
            jax.tree.leaves_with_path(mxfp4.own_weights()),
            jax.tree.leaves(bfloat16.own_weights()),
            strict=True,
        ):
            assert_bitwise_equal(a, b, claim=f"tp={tp}{jax.tree_util.keystr(path)}")


def test_named_tensors_make_the_same_weights(tmp_path):
    """As a trainer sends them, by the names of a checkpoint in bfloat16."""
    folder = expanded_folder(tmp_path / "expanded")
    model = load(folder, "bfloat16")
    made = model.named_weights(load_file(folder / "model.safetensors").items())
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(model.own_weights()), strict=True):
        assert_bitwise_equal(a, b, claim="named tensors")


def test_saved_weights_are_restored(tmp_path):
    """Biases of experts and sinks among them, on another mesh."""
    load(GOLDEN, "bfloat16").save(tmp_path / "saved")
    restored, read = load(tmp_path / "saved", "bfloat16", tp=2), load(GOLDEN, "bfloat16", tp=2)
    for a, b in zip(
        jax.tree.leaves(restored.own_weights()), jax.tree.leaves(read.own_weights()), strict=True
    ):
        assert_bitwise_equal(a, b, claim="restored")


def logits_of(model: LoadedModel) -> np.ndarray:
    ids = json.loads((GOLDEN / "expected.json").read_text())["prompts"][PROMPT]["ids"]
    table = np.arange(2, dtype=np.int32)[None]
    _, logits = scoring_step(model)(empty_pages(model, 2), batch_of([(ids, 0)], table))
    return np.asarray(logits)[0]


def distance(model: LoadedModel) -> float:
    facts = json.loads((GOLDEN / "expected.json").read_text())
    with safe_open(GOLDEN / "expected.safetensors", framework="np") as file:
        want = file.get_tensor(f"prompt{PROMPT}.logits_float64")
    positions = facts["prompts"][PROMPT]["positions"]
    return float(np.abs(logits_of(model)[positions] - want).max())


def with_config(**fields) -> LoadedModel:
    model = golden()
    config = dataclasses.replace(model.config, **fields)
    return dataclasses.replace(model, config=config)


def with_layers(change) -> LoadedModel:
    model = golden()
    layers = [change(dict(layer)) for layer in model.params["layers"]]
    return dataclasses.replace(model, params={**model.params, "layers": layers})


def zeros(name: str):
    return lambda layer: layer | {name: layer[name] * 0}


def halves_as_gates_and_ups(layer: dict) -> dict:
    """Take the first half of a tensor's outputs for gates, though gates and ups take turns."""
    w = layer["expert_gate_up"]
    stored = np.stack(np.split(np.asarray(w), 2, axis=1), axis=2).reshape(w.shape)
    return layer | {"expert_gate_up": jax.device_put(stored, w.sharding)}


def other_rope(**fields) -> LoadedModel:
    model = with_config(rope=dataclasses.replace(golden().config.rope, **fields))
    tables = tuple(jax.numpy.asarray(t) for t in model_rope_tables(model.config))
    return dataclasses.replace(model, rope_tables=tables)


def other_clamp(**fields) -> LoadedModel:
    experts = golden().config.experts
    assert experts is not None and experts.clamp is not None
    clamp = dataclasses.replace(experts.clamp, **fields)
    return with_config(experts=dataclasses.replace(experts, clamp=clamp))


MISTAKES = {
    "no sinks": lambda: with_layers(lambda layer: layer | {"sinks": layer["sinks"] * 0 - 100}),
    "sinks of 0": lambda: with_layers(zeros("sinks")),
    "no router bias": lambda: with_layers(zeros("router_bias")),
    "no bias of gates and ups": lambda: with_layers(zeros("expert_gate_up_bias")),
    "no bias of down": lambda: with_layers(zeros("expert_down_bias")),
    "halves for gates and ups": lambda: with_layers(halves_as_gates_and_ups),
    "alpha 1": lambda: other_clamp(alpha=1.0),
    "limit 7": lambda: other_clamp(limit=7.0),
    "windows in the other layers": lambda: with_config(sliding_windows=(None, 24)),
    "a window of 25": lambda: with_config(sliding_windows=(25, None)),
    "yarn truncated": lambda: other_rope(truncate=True),
    "no attention factor": lambda: other_rope(attention_factor=1.0),
}


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.control
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_reading_moves_the_logits_further_than_rounding(mistake):
    """Each is found by the golden, whose own error is a thousandth of it."""
    right = distance(golden())
    assert distance(MISTAKES[mistake]()) > 1000 * right, mistake
    jax.clear_caches()


def test_the_published_rope_is_the_default():
    """A file without rotary scaling has yarn of factor 32 over 4096 tokens, as transformers has."""
    values = json.loads((GOLDEN / "config.json").read_text())
    del values["rope_parameters"]
    rope = config_from_hf(values).rope
    assert rope == RopeConfig(
        theta=150000.0, kind=rope.kind, factor=32.0, original_max_position=4096, beta_fast=32.0,
        beta_slow=1.0, attention_factor=rope.attention_factor, truncate=False,
    )  # fmt: skip
    assert abs(rope.attention_factor - 1.3465735902799727) < 1e-12


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"experts_per_token": 2},
            "experts_per_token=2 differs from num_experts_per_tok=4",
        ),
        ({"swiglu_limit": 0}, "swiglu_limit=0 must be a finite number above 0"),
        ({"quantization_config": {"quant_method": "mxfp4", "block": 16}}, "block=16"),
    ],
)
def test_what_contradicts_is_refused(tmp_path, change, says):
    values = json.loads((GOLDEN / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=says):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("drop", "add", "says"),
    [
        ("down_proj_scales", {}, "has 'model.layers.0.mlp.experts.down_proj_blocks', but no"),
        ("down_proj_bias", {}, "lacks 8 of"),
        (
            "down_proj_scales",
            {"down_proj_scales": np.zeros((8, 64, 2), np.uint8)},
            "down_proj_blocks' in .* is U8",
        ),
        (
            "down_proj_bias",
            {"down_proj_bias": np.zeros((8, 32), ml_dtypes.bfloat16)},
            r"has shape \(8, 32\), but config.json makes it \(8, 64\)",
        ),
    ],
    ids=("no scales", "no bias", "scales of other blocks", "bias of another width"),
)
def test_a_damaged_folder_is_refused_by_name(tmp_path, drop, add, says):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    tensors = load_file(GOLDEN / "model.safetensors")
    del tensors[f"{EXPERTS}.{drop}"]
    save_file(tensors | {f"{EXPERTS}.{k}": v for k, v in add.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        load(folder)


@pytest.mark.parametrize("mode", ["packed", "w8a8"])
def test_experts_in_mxfp4_are_not_kept_as_codes(mode):
    with pytest.raises(ValueError, match=f"quantized_weights={mode!r}"):
        load(GOLDEN, "bfloat16", quantized_weights=mode)
