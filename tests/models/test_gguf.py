# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes the folder that it was made from, or is refused by name."""

import contextlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from detjax import convert_gguf
from detjax.models.gguf import GLOBAL_NAMES, LAYER_NAMES
from detjax.models.hf_config import load_config
from detjax.models.tokenizer import Tokenizer
from detjax.models.weights.files import open_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
TOKENS = ["<|end|>", "a", "b", "Ġ", "ab", "Ġab"]
KIND_OF = {"llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def golden_weights(case: str) -> dict[str, np.ndarray]:
    import contextlib

    with contextlib.ExitStack() as stack:
        stored = open_tensors(GOLDEN / case, stack)
        return {name: np.array(t.rows).astype(np.float32) for name, t in stored.items()}


def as_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to rows of q and k, written element by element."""
    size = values.shape[0] // heads
    out = np.empty_like(values)
    for head in range(heads):
        for i in range(size // 2):
            for half in range(2):
                out[head * size + 2 * i + half] = values[head * size + half * (size // 2) + i]
    return out


def write_gguf(path: Path, case: str, *, changed: dict[str, Any] | None = None,
               kind: GGMLQuantizationType = GGMLQuantizationType.F32,
               extra_tensor: str = "") -> dict[str, np.ndarray]:  # fmt: skip
    """A golden as a GGUF file; returns its weights, by names of the checkpoint."""
    config = json.loads((GOLDEN / case / "config.json").read_text())
    name, changed = KIND_OF[case], changed or {}
    writer = GGUFWriter(path, changed.pop("general.architecture", name))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    theta = config["rope_parameters"]["rope_theta"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    facts: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(theta),
    } | changed
    for key, value in facts.items():
        add: Any = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"{name}.{key}", value)
    tokens = TOKENS + [f"x{i}" for i in range(config["vocab_size"] - len(TOKENS))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_eos_token_id(0)
    weights = golden_weights(case)
    names = {hf: gguf for gguf, hf in GLOBAL_NAMES.items()}
    layers = {hf: gguf for gguf, hf in LAYER_NAMES.items()}
    for hf_name, values in list(weights.items()):
        parts = hf_name.split(".")
        gguf_name = names.get(hf_name)
        if gguf_name is None:
            gguf_name = f"blk.{parts[2]}.{layers['.'.join(parts[3:-1])]}.{parts[-1]}"
        stored = values
        for matrix, count in (("attn_q.", heads), ("attn_k.", kv_heads)):
            if name == "llama" and matrix in gguf_name:
                stored = as_pairs(values, count)
        is_whole_blocks = values.ndim == 2 and values.shape[1] % 32 == 0
        if kind is not GGMLQuantizationType.F32 and is_whole_blocks:
            blocks = quantize(stored, kind)
            writer.add_tensor(gguf_name, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, stored)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def converted(folder: Path) -> dict[str, np.ndarray]:
    with contextlib.ExitStack() as stack:
        return {name: np.array(t.rows) for name, t in open_tensors(folder, stack).items()}


@pytest.mark.parametrize("case", KIND_OF)
def test_weights_and_configuration_are_those_of_the_folder(tmp_path, case):
    weights = write_gguf(tmp_path / "m.gguf", case)
    assert convert_gguf.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    found = converted(tmp_path / "out")
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        expected = values.astype(ml_dtypes.bfloat16)
        assert found[name].tobytes() == expected.tobytes(), name
    ours, theirs = load_config(tmp_path / "out"), load_config(GOLDEN / case)
    for field in ("num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope", "num_layers",
                  "hidden_size", "intermediate_size", "qkv_bias", "qk_norm", "vocab_size",
                  "tie_word_embeddings"):  # fmt: skip
        assert getattr(ours, field) == getattr(theirs, field), field


def test_blocks_are_rounded_once(tmp_path):
    kind = GGMLQuantizationType.Q8_0
    weights = write_gguf(tmp_path / "m.gguf", "qwen2", kind=kind)
    assert convert_gguf.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    name = "model.layers.0.mlp.up_proj.weight"
    found = converted(tmp_path / "out")[name]
    blocks = dequantize(quantize(weights[name], kind), kind)
    assert found.tobytes() == blocks.astype(ml_dtypes.bfloat16).tobytes()
    assert found.tobytes() != weights[name].astype(ml_dtypes.bfloat16).tobytes()


def test_the_tokenizer_merges_as_the_file_says(tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3")
    assert convert_gguf.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    tokenizer = Tokenizer.from_folder(tmp_path / "out")
    assert list(tokenizer.encode("ab ab<|end|>", has_control=True)) == [4, 5, 0]
    assert tokenizer.decode([4, 5]) == "ab ab"


@pytest.mark.parametrize(
    ("changed", "extra", "message"),
    [
        ({"general.architecture": "gemma3"}, "", "general.architecture='gemma3' is not supported"),
        ({"rope.scaling.type": "yarn"}, "", "rope.scaling.type='yarn' is not supported"),
        ({"rope.dimension_count": 4}, "", "rope.dimension_count=4 is not supported"),
        ({"attention.sliding_window": 64}, "", "attention.sliding_window=64 is not a key"),
        ({}, "rope_freqs.weight", "'rope_freqs.weight' is not one that detjax knows"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(tmp_path, capsys, changed, extra, message):
    write_gguf(tmp_path / "m.gguf", "qwen3", changed=changed, extra_tensor=extra)
    assert convert_gguf.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_file_that_is_none_is_refused(tmp_path, capsys):
    (tmp_path / "m.gguf").write_bytes(b"GGUF\0\0")
    for file in ("m.gguf", "none.gguf"):
        assert convert_gguf.main([str(tmp_path / file), str(tmp_path / "out")]) == 2
    assert "is damaged" in (err := capsys.readouterr().err) and "does not exist" in err
    for begin in (b"", b"text"):
        (tmp_path / "m.gguf").write_bytes(begin)
        assert convert_gguf.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 2
        assert f"it begins with {begin!r}, not b'GGUF'" in capsys.readouterr().err
