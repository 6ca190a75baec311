# SPDX-License-Identifier: Apache-2.0
"""Families whose checkpoints do not store what the decoder reads are read as it needs them."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detjax.models.config import RopeConfig
from detjax.models.hf_config import load_config
from detjax.models.weights.load import load_params
from detjax.models.weights.named import load_named_params
from detjax.models.weights.reading import head_order, readings
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
CASES = sorted(
    path.name for path in GOLDEN.iterdir() if readings(load_config(path), jnp.dtype("float32"))
)
ATTENTION = "model.layers.0.self_attn."


def load(case: str, dtype: str, *, tp: int = 1) -> dict:
    folder = GOLDEN / case
    mesh = make_mesh(1, tp)
    return load_params(folder, load_config(folder), mesh, dtype=dtype, vocab_block=64)


def tensors_of(case: str) -> dict[str, np.ndarray]:
    return {name: x.astype(np.float32) for name, x in load_file(_file(case)).items()}


def _file(case: str) -> Path:
    return GOLDEN / case / "model.safetensors"


def test_the_cases_are_those_that_this_is_about():
    assert {"glm4", "gemma2", "gemma3", "granite", "olmo2", "phi3", "phi4_longrope"} <= set(CASES)
    assert not {"llama3", "qwen3_moe", "mixtral", "smollm3", "seed_oss"} & set(CASES)


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        ({}, ()),
        ({"rotary_dim": 4}, (0, 1, 4, 5, 2, 3, 6, 7)),
        ({"is_interleaved": True}, (0, 2, 4, 6, 1, 3, 5, 7)),
        ({"rotary_dim": 4, "is_interleaved": True}, (0, 2, 4, 5, 1, 3, 6, 7)),
        ({"rotary_dim": 6}, (0, 1, 2, 6, 3, 4, 5, 7)),
    ],
)
def test_rotated_pairs_come_first_in_each_half_of_a_head(keys, order):
    assert head_order(RopeConfig(theta=1e4, **keys), 8) == order


def test_channels_of_queries_and_keys_change_places_and_those_of_values_do_not():
    tensors, params = tensors_of("glm4"), load("glm4", "float32")
    order = [*range(0, 16, 2), *range(16, 24), *range(1, 16, 2), *range(24, 32)]
    q, k = (tensors[f"{ATTENTION}{n}_proj.weight"].reshape(-1, 32, 64)[:, order] for n in "qk")
    bias = [tensors[f"{ATTENTION}{n}_proj.bias"].reshape(-1, 32)[:, order] for n in "qk"]
    v = tensors[f"{ATTENTION}v_proj.weight"]
    layer = params["layers"][0]
    expected = np.concatenate([q.reshape(-1, 64), k.reshape(-1, 64), v])
    assert_bitwise_equal(np.asarray(layer["qkv"]), expected, claim="qkv")
    biases = [b.reshape(-1) for b in bias] + [tensors[f"{ATTENTION}v_proj.bias"]]
    assert_bitwise_equal(np.asarray(layer["qkv_bias"]), np.concatenate(biases), claim="bias")


def test_a_rank_has_its_heads_of_a_joined_projection():
    (joined,) = [tensors_of("phi3")[f"{ATTENTION}qkv_proj.weight"]]
    qkv = np.asarray(load("phi3", "float32", tp=2)["layers"][0]["qkv"])
    q, k, v = (joined[start : start + 64] for start in (0, 64, 128))
    expected = [x[rank * 32 : rank * 32 + 32] for rank in (0, 1) for x in (q, k, v)]
    assert_bitwise_equal(qkv, np.concatenate(expected), claim="qkv by rank")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gains_are_one_more_than_the_file_says_in_float32(dtype):
    tensors, params = tensors_of("gemma2"), load("gemma2", dtype)
    for name, source in (
        ("attn_norm", "input_layernorm"),
        ("attn_norm_after", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("mlp_norm_after", "post_feedforward_layernorm"),
    ):
        expected = 1 + tensors[f"model.layers.0.{source}.weight"]
        assert_bitwise_equal(np.asarray(params["layers"][0][name]), expected, claim=name)
    final = np.asarray(params["final_norm"])
    assert_bitwise_equal(final, 1 + tensors["model.norm.weight"], claim="final_norm")


@pytest.mark.parametrize(
    ("case", "dtype", "scale"),
    [
        ("gemma2", "float32", np.float32(96**0.5)),
        ("gemma2", "bfloat16", np.float32(9.8125)),  # as Gemma rounds it
        ("granite", "float32", np.float32(12 / 0.22)),
        ("granite", "bfloat16", np.float32(12 / 0.22)),
    ],
)
def test_the_embedding_table_is_scaled_and_the_tied_head_is_not(case, dtype, scale):
    table, params = tensors_of(case)["model.embed_tokens.weight"], load(case, dtype)
    expected = (table * scale).astype(jnp.dtype(dtype))
    assert_bitwise_equal(np.asarray(params["embed"]), expected, claim="embed")
    head = np.asarray(params["lm_head"])
    assert_bitwise_equal(head, table.astype(jnp.dtype(dtype)), claim="lm_head")


def test_what_divides_the_logits_is_in_the_gain_of_the_last_norm():
    expected = tensors_of("granite")["model.norm.weight"] / 2
    params = load("granite", "bfloat16")
    assert params["final_norm"].dtype == jnp.bfloat16, "a power of two is exact"
    assert_bitwise_equal(
        np.asarray(params["final_norm"]), expected.astype(jnp.bfloat16), claim="final_norm"
    )


@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt_oss"])  # MXFP4
def test_tensors_by_name_become_the_weights_of_the_folder(case):
    folder = GOLDEN / case
    pairs = [*load_file(folder / "model.safetensors").items()][::-1]
    config, mesh = load_config(folder), make_mesh(1, 2)
    named = load_named_params(pairs, config, mesh, dtype="bfloat16", vocab_block=64)
    loaded = load(case, "bfloat16", tp=2)
    for (path, a), b in zip(jax.tree.leaves_with_path(named), jax.tree.leaves(loaded), strict=True):
        where = f"{case} {jax.tree_util.keystr(path)}"
        assert_bitwise_equal(np.asarray(a), np.asarray(b), claim=where)


def changed_folder(tmp_path: Path, case: str, **tensors: np.ndarray | None) -> Path:
    """A golden folder with some tensors replaced, or left out where they are None."""
    out = tmp_path / case
    shutil.copytree(GOLDEN / case, out)
    held = {**load_file(_file(case)), **tensors}
    save_file({n: x for n, x in held.items() if x is not None}, out / "model.safetensors")
    return out


def test_a_joined_projection_of_another_size_is_refused(tmp_path):
    name = f"{ATTENTION}qkv_proj.weight"
    folder = changed_folder(tmp_path, "phi3", **{name: np.zeros((160, 64), np.float32)})
    with pytest.raises(ValueError, match="qkv_proj.weight.* has shape .160, 64., but config.json"):
        load_params(folder, load_config(folder), make_mesh(1, 1), dtype="float32", vocab_block=64)


def test_a_missing_tensor_is_refused(tmp_path):
    folder = changed_folder(tmp_path, "phi3", **{f"{ATTENTION}qkv_proj.weight": None})
    options = {"dtype": "float32", "vocab_block": 64}
    with pytest.raises(ValueError, match="lacks 3 of .* tensors"):
        load_params(folder, load_config(folder), make_mesh(1, 1), **options)
