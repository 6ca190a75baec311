# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints of families whose tensors are read otherwise than they are stored."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import empty_pages
from detjax.models.hf_config import load_config, read_quantization
from detjax.models.loading import LoadedModel, _matrix_form, load_model
from detjax.models.quantization.expand import ExpandedRows, MovedRows, expand_tensors
from detjax.models.quantization.quantize import RECIPES, quantize_folder
from detjax.models.quantization.scheme import QuantizationScheme
from detjax.models.weights.files import open_tensors
from detjax.models.weights.load import ignore_progress
from detjax.models.weights.packed import MatrixForm
from detjax.models.weights.reading import readings
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.quantized import QuantizedMatrix, W8A8Matrix, is_quantized
from detjax.pallas_kernels.linear.quantized import expanded as matrix_of
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.bitwise import count_different_bits
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import batch_of, scoring_step

GOLDENS = Path(__file__).parents[1] / "golden" / "hf"
CASES = ("gemma3", "phi3", "glm4", "granite", "qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe")
QUICK = ("phi3", "qwen3_5")
"""Joined projections; heads with a gate, and norms of 1 + w."""

SCHEMES = {
    "blocks": dataclasses.replace(RECIPES["fp8-block"], block_rows=16, group_size=16),
    "fp8-dynamic": RECIPES["fp8-dynamic"],
    "int8-w8a8": RECIPES["int8-w8a8"],
}


def load(folder: Path, *, tp: int = 1, weights: str = "auto") -> LoadedModel:
    return load_model(
        str(folder), profile=NumericsProfile(), mesh=make_mesh(1, tp), backend=Backend.PORTABLE,
        quantized_weights=weights, max_len=64,
    )  # fmt: skip


def quantised(case: str, out: Path, scheme: str) -> Path:
    """With the matrices of linear attention in blocks of float8 too, as Qwen publishes them."""
    quantize_folder(GOLDENS / case, out, SCHEMES[scheme], progress=ignore_progress)
    if scheme == "blocks":
        with contextlib.ExitStack() as stack:
            stored = {n: np.array(it.rows[:]) for n, it in open_tensors(out, stack).items()}
        for name in [n for n in stored if "linear_attn.in_proj_qkv" in n]:
            rows = stored[name].astype(np.float32)
            blocks = rows.reshape(len(rows) // 16, 16, -1, 16)
            scale = np.abs(blocks).max(axis=(1, 3)) / np.float32(448)
            codes = (blocks / scale[:, None, :, None]).reshape(rows.shape)
            stored[name] = codes.astype(ml_dtypes.float8_e4m3fn)
            stored[name.replace("weight", "weight_scale")] = scale
        save_file(stored, out / "model.safetensors")
    return out


def expanded(folder: Path, out: Path) -> Path:
    """What the quantised folder stands for, under the names that it has."""
    shutil.copytree(folder, out)
    with contextlib.ExitStack() as stack:
        tensors = expand_tensors(open_tensors(folder, stack), read_quantization(folder))
        save_file({n: np.array(it.rows[:]) for n, it in tensors.items()}, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("scheme", quick_and_slow(["blocks"], list(SCHEMES)))
@pytest.mark.parametrize("case", quick_and_slow(QUICK, CASES))
def test_weights_are_those_of_the_expanded_folder(case, scheme, tmp_path):
    folder = quantised(case, tmp_path / "q", scheme)
    assert readings(load_config(folder), "bfloat16")
    tp = 2 if case == "qwen3_5_moe" else 1  # the leaves of the others are one
    found = load(folder, tp=tp)
    want = load(expanded(folder, tmp_path / "bfloat16"), tp=tp)
    pairs = zip(
        jax.tree.leaves_with_path(found.own_weights()),
        jax.tree.leaves(want.own_weights()),
        strict=True,
    )
    for (path, a), b in pairs:
        assert_bitwise_equal(a, b, claim=jax.tree_util.keystr(path))
    assert found.quantization != want.quantization == "none"
    plain = load(GOLDENS / case, tp=tp)
    changed = jax.tree.map(count_different_bits, plain.own_weights(), found.own_weights())
    assert all(sum(jax.tree.leaves(layer)) > 500 for layer in changed["layers"])


def expansion(x) -> np.ndarray:
    """The bfloat16 matrix that a quantised one stands for."""
    if isinstance(x, QuantizedMatrix):
        return np.asarray(matrix_of(x))
    if not isinstance(x, W8A8Matrix):
        return np.asarray(x)
    values, scales = np.asarray(x.values, np.float32), np.asarray(x.scales)
    if x.group_len:
        scales = scales.repeat(x.group_len, axis=-1)
    else:
        scales = scales[..., None]
    return (values * scales.repeat(x.block_rows, axis=-2)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("case", "scheme", "form"),
    [
        ("glm4", "fp8-dynamic", "packed"),
        ("gemma3", "fp8-dynamic", "w8a8"),
        *(
            pytest.param(case, "fp8-dynamic", "packed", marks=pytest.mark.slow)
            for case in ("phi3", "qwen3_5")  # others have no whole blocks of 64 rows
        ),
        *(
            pytest.param(case, scheme, "w8a8", marks=pytest.mark.slow)
            for case in ("phi3", "glm4", "granite", "qwen3_5", "glm4_moe", "qwen3_next")
            for scheme in ("int8-w8a8", "fp8-dynamic")
        ),
    ],
)  # fmt: skip
def test_rows_that_are_read_otherwise_stay_quantised(case, scheme, form, tmp_path):
    """On the devices as codes, or as 8-bit values, with the rows where the decoder reads them."""
    folder = quantised(case, tmp_path / "q", scheme)
    found, want = load(folder, weights=form), load(folder, weights="expanded")
    pairs = list(
        zip(
            jax.tree.leaves_with_path(found.own_weights(), is_leaf=is_quantized),
            jax.tree.leaves(want.own_weights()),
            strict=True,
        )
    )
    for (path, a), b in pairs:
        assert_bitwise_equal(expansion(a), b, claim=jax.tree_util.keystr(path))
    kept = [jax.tree_util.keystr(path) for (path, a), _ in pairs if is_quantized(a)]
    assert any("'qkv'" in name for name in kept), kept
    if form == "packed":
        assert_bitwise_equal(logits(found), logits(want), claim="products of codes")
    else:
        assert np.isfinite(logits(found)).all()


@pytest.mark.control
def test_control_rows_in_the_order_of_the_file_are_other_weights(tmp_path, monkeypatch):
    folder = quantised("glm4", tmp_path / "q", "fp8-dynamic")
    want = load(folder, weights="packed").own_weights()["layers"][0]
    monkeypatch.setattr(
        MovedRows, "unsigned_codes", lambda rows, *part: rows.whole.unsigned_codes(*part)
    )
    found = load(folder, weights="packed").own_weights()["layers"][0]
    changed = [n for n in want if count_different_bits(expansion(found[n]), expansion(want[n]))]
    assert changed == ["qkv"]  # its gates and ups are no whole blocks, and are expanded


def logits(model: LoadedModel) -> np.ndarray:
    tokens = batch_of([(list(range(3, 20)), 0)], np.array([[0]], np.int32))
    _, found = scoring_step(model)(empty_pages(model, 1), tokens)
    return np.asarray(found)


def answers(model: LoadedModel, batch_size: int, prefill_chunk: int) -> list[str]:
    config = EngineConfig(
        batch_size=batch_size, prefill_chunk=prefill_chunk, max_len=64, self_check="off"
    )
    asked = [
        Request(
            prompt_token_ids=tuple(range(3, 3 + length)),
            sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        )
        for length in (5, 40, 17)
    ]
    return [one.digest() for one in Engine(model, config).generate(asked)]


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("case", ["phi3", "gemma3", "glm4_moe", "qwen3_5"])
def test_no_batch_or_chunk_changes_an_answer_of_8_bits(case, tmp_path):
    folder = quantised(case, tmp_path / "q", "int8-w8a8")
    model = load(folder, weights="w8a8")
    want = answers(model, 1, 16)
    assert answers(model, 3, 64) == want
    assert answers(load(folder, weights="expanded"), 3, 64) != want  # it can fail


@pytest.mark.parametrize(
    ("order", "block_rows"),
    [
        (np.arange(16, 48), 16),
        (np.arange(64).reshape(4, 16)[:, ::-1].reshape(-1), 16),  # in each block its own order
        (np.arange(8, 40), 8),
        (np.arange(64).reshape(2, 32).T.reshape(-1), 1),
    ],
)  # fmt: skip
def test_rows_in_another_order_share_scales_as_far_as_blocks_allow(order, block_rows):
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (64, 32), dtype=np.int8)
    scheme = QuantizationScheme(
        method="fp8", layout="plain", num_bits=8, is_float=False, block=(16, 16)
    )
    whole = ExpandedRows(
        name="w", codes=codes, scales=rng.uniform(0.5, 1, (4, 2)).astype(np.float32), zeros=None,
        shape=(64, 32), scheme=scheme,
    )  # fmt: skip
    moved = whole.moved(order)
    assert moved.block_rows == block_rows
    every = slice(0, len(order)), slice(0, 2)
    scales = moved.group_scales(*every)
    assert_bitwise_equal(scales, scales[::block_rows].repeat(block_rows, 0), claim="scales")
    assert_bitwise_equal(moved[8:24], whole[order[8:24]], claim="rows that are expanded")
    found = moved.unsigned_codes(slice(4, 20), slice(3, 9))
    assert_bitwise_equal(found.view(np.int8) ^ -128, codes[order[4:20], 3:9], claim="codes")
    assert whole.moved(np.arange(64)) is whole


@pytest.mark.slow
@pytest.mark.invariance
def test_no_mesh_changes_an_answer_of_8_bits(tmp_path):
    """Of linear attention, gates, experts and a shared expert, each by ranks."""
    folder = quantised("qwen3_5_moe", tmp_path / "q", "int8-w8a8")
    want = answers(load(folder, weights="w8a8"), 3, 64)
    assert answers(load(folder, tp=2, weights="w8a8"), 3, 64) == want
    assert answers(load(folder, tp=2, weights="expanded"), 3, 64) != want  # it can fail


@pytest.mark.parametrize("backend", Backend)
def test_such_codes_are_kept_where_somebody_asks(backend, tmp_path):
    folder = quantised("phi3", tmp_path / "q", "fp8-dynamic")
    config, profile = load_config(folder), NumericsProfile()
    scheme = read_quantization(folder)
    forms = [
        _matrix_form(mode, scheme, config, profile, backend) for mode in ("auto", "packed", "w8a8")
    ]
    assert forms == [MatrixForm.EXPANDED, MatrixForm.PACKED, MatrixForm.W8A8]


KEPT = {
    "qwen3_next": [
        "lm_head",
        *(
            f"model.layers.0.linear_attn.{name}"
            for name in ("in_proj_ba", "in_proj_qkvz", "out_proj")
        ),
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.shared_expert_gate",
    ],
    "glm4_moe": ["lm_head", "model.layers.1.mlp.gate", "model.layers.2.mlp.gate"],
    "phi3": ["lm_head"],
}


@pytest.mark.parametrize("case", KEPT)
def test_modules_that_keep_their_weights_are_named(case, tmp_path):
    """By the format a linear module that `ignore` does not name is a quantised one."""
    folder = quantised(case, tmp_path / "q", "int8-w8a8")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == KEPT[case]
    with contextlib.ExitStack() as stack:
        stored = set(open_tensors(folder, stack))
    for name in KEPT[case]:
        assert f"{name}.weight_scale" not in stored
    shared = {
        name for name in stored if "shared_expert" in name and "shared_expert_gate" not in name
    }
    assert {f"{name}_scale" for name in shared if name.endswith(".weight")} <= shared
    assert bool(shared) == (case != "phi3")


def test_experts_in_one_tensor_are_not_quantised(tmp_path):
    with pytest.raises(ValueError, match="holds all experts of a layer, and one tensor has one"):
        quantize_folder(
            GOLDENS / "gpt_oss_bfloat16", tmp_path / "q", RECIPES["fp8-dynamic"],
            progress=ignore_progress,
        )  # fmt: skip
