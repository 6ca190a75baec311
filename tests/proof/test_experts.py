# SPDX-License-Identifier: Apache-2.0
"""Receipts and a certificate of a mixture of experts, from a folder as Hugging Face has it."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest

from detjax import audit, replay
from detjax.certify.certificate import CLAIMS
from detjax.generate import main
from detjax.proof.receipt import read_receipts
from detjax.testing.folders import write_model_folder

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 256,
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 48, "num_experts": 8,
    "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [0], "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense layer and one of 8 experts, random; a token a byte."""
    folder = tmp_path_factory.mktemp("models") / "experts"
    return write_model_folder(folder, CONFIG, scale=0.3)


@pytest.mark.slow
@pytest.mark.invariance
def test_receipts_replay_with_experts_on_two_ranks_and_are_audited(folder, tmp_path, capsys):
    file, common = tmp_path / "receipts.jsonl", ["--model", str(folder), "--cache-dir", "none"]
    prompts = [arg for text in ("abc", "hello", "The sea") for arg in ("--prompt", text)]
    options = ["--max-tokens", "24", "--temperature", "0.9", "--batch-size", "2"]
    assert main([*common, *prompts, *options, "--receipts", str(file)]) == 0
    answers = [json.loads(line)["answer"] for line in file.read_text().splitlines()]
    assert len({answer["digest"] for answer in answers}) == 3
    others = ["--tp", "2", "--batch-size", "4", "--shuffle", "1", "--prefill-chunk", "32"]
    assert replay.main([str(file), *common, *others]) == 0
    assert audit.main([str(file), *common]) == 0
    # The control: an answer whose hashes are right, of another seed.
    receipt = read_receipts(file)[0]
    request = receipt.request | {"sampling": receipt.request["sampling"] | {"seed": "1"}}
    file.write_text(dataclasses.replace(receipt, request=request).to_json() + "\n")
    capsys.readouterr()
    assert audit.main([str(file), *common]) == 3
    assert "1 receipts differ" in capsys.readouterr().out


@pytest.mark.nightly
def test_certify_proves_every_claim(folder, tmp_path):
    certificate = tmp_path / "certificate.json"
    done = subprocess.run(
        [sys.executable, "-m", "detjax.certify", "--model", str(folder), "--max-len", "256",
         "--json", str(certificate)],
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or ""},
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert json.loads(certificate.read_text())["claims"] == dict.fromkeys(CLAIMS, True)
