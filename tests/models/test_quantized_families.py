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

from detjax.models.hf_config import load_config, read_quantization
from detjax.models.loading import LoadedModel, load_model
from detjax.models.quantization.expand import expand_tensors
from detjax.models.quantization.quantize import RECIPES, quantize_folder
from detjax.models.weights.files import open_tensors
from detjax.models.weights.load import ignore_progress
from detjax.models.weights.reading import readings
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.bitwise import count_different_bits
from detjax.testing.cases import quick_and_slow

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


def test_codes_of_such_a_model_are_not_multiplied_as_they_are(tmp_path):
    folder = quantised("phi3", tmp_path / "q", "fp8-dynamic")
    for form in ("packed", "w8a8"):
        with pytest.raises(ValueError, match="a model of 'phi3', whose checkpoint stores tensors"):
            load(folder, weights=form)


def test_experts_in_one_tensor_are_not_quantised(tmp_path):
    with pytest.raises(ValueError, match="holds all experts of a layer, and one tensor has one"):
        quantize_folder(
            GOLDENS / "gpt_oss_bfloat16", tmp_path / "q", RECIPES["fp8-dynamic"],
            progress=ignore_progress,
        )  # fmt: skip
