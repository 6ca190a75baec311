# SPDX-License-Identifier: Apache-2.0
"""Draft models as users give them: checked against the model, and without a trace in answers."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import detjax
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.models.bundled import bundled_model_path
from detjax.testing.folders import write_model_folder

SIZES = {"max_len": 128, "batch_size": 2, "show_progress": False, "self_check": "off"}
OTHER_VOCABULARY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256,
    "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip


def first_layers(folder: Path, count: int) -> Path:
    """The bundled model without its last layers, as a folder."""
    folder.mkdir()
    source = bundled_model_path()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    dropped = tuple(f"model.layers.{i}." for i in range(count, config["num_hidden_layers"]))
    tensors = load_file(source / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not name.startswith(dropped)}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory) -> Path:
    return first_layers(tmp_path_factory.mktemp("draft") / "two-layers", 2)


def sampling() -> list[detjax.SamplingParams]:
    form = StructuredOutput(kind="regex", spec="[a-z ]{3,30}")
    kinds = (
        {}, {"temperature": 0.8, "seed": 1}, {"stop": ("the",)}, {"logprobs": 2, "top_k": 20},
        {"presence_penalty": 1.0, "temperature": 1.0, "seed": 2},
        {"structured_output": form},
    )  # fmt: skip
    return [detjax.SamplingParams(max_tokens=24, **kind) for kind in kinds]


PROMPTS = [
    "The old house by the sea", "It was a cold morning in November when the captain",
    "She opened the letter and", "My dear sir, I have", "In the garden", "He said:",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("mode", ["invariant", "dvr"])
def test_answers_and_receipts_are_those_without_drafts(draft_folder, mode):
    plain = detjax.LLM(mode=mode, **SIZES)
    drafted = detjax.LLM(
        mode=mode,
        speculative_config={
            "model": str(draft_folder),
            "num_speculative_tokens": 3,
            "is_adaptive": False,
        },
        **SIZES,
    )
    expected, actual = plain.generate(PROMPTS, sampling()), drafted.generate(PROMPTS, sampling())
    for one, other in zip(expected, actual, strict=True):
        (a,), (b,) = one.outputs, other.outputs
        assert (a.text, a.completion.digest()) == (b.text, b.completion.digest())
        assert plain.receipt(a) == drafted.receipt(b)
    counts = drafted.engine.stats().drafts["draft_model"]
    assert counts.num_windows > 20 and 0.1 < counts.acceptance < 1
    assert "two-layers, 3 tokens a window, to 32 sequences" in str(drafted.config)


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    folder = write_model_folder(tmp_path / "bytes", OTHER_VOCABULARY)
    with pytest.raises(ValueError, match=r"bytes has a vocabulary of 256 and novels-6m one of"):
        detjax.LLM(speculative_config={"model": str(folder)}, **SIZES)


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path):
    folder = first_layers(tmp_path / "renamed", 1)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    (first, i), (second, k) = list(vocab.items())[-2:]
    vocab[first], vocab[second] = k, i
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"renamed differs from that of novels-6m in 4 entries"):
        detjax.LLM(speculative_config={"model": str(folder)}, **SIZES)


def test_a_draft_model_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="'./no-such-folder' is neither an existing folder"):
        detjax.LLM(speculative_config={"model": "./no-such-folder"}, **SIZES)
