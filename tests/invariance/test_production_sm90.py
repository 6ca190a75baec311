# SPDX-License-Identifier: Apache-2.0
"""The production suite in short: two layers, and a compiler that believes the GPU to be full."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

FULL = "--xla_gpu_memory_limit_slop_factor=0"
"""What is left of the device's memory for temporaries is none: passes that save it all run."""


def run(tmp_path, *parts: str, model=("llama3_8b", 2)) -> tuple[int, list[dict]]:
    out = tmp_path / "rows.jsonl"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FULL}"
    environ = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [
        sys.executable, "-m", "benchmarks.production", "--model", model[0],
        "--layers", str(model[1]), "--pages", "1600", "--out", str(out), "--parts", *parts,
    ]  # fmt: skip
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr[-3000:]
    return done.returncode, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.invariance
@pytest.mark.parametrize("part", ["512", "4352", "8192", "loop", "dvr", "adjusted"])
def test_answers_are_the_canonical_choices_at_every_position(tmp_path, part):
    status, (row,) = run(tmp_path, part)
    assert row["different"] == 0 and row["error"] == "" and row["compared_tokens"] > 500
    assert status == 0
    if part == "dvr":
        assert row["windows"] > 0


LOCAL_LAYERS = [("qwen35_35b_a3b", 4), ("gemma3_4b", 6), ("gpt_oss_20b", 2)]
"""Models whose layers are not all alike, and layers that have one of each kind."""


@pytest.mark.invariance
@pytest.mark.parametrize("part", ["512", "dvr"])
@pytest.mark.parametrize("model", LOCAL_LAYERS, ids=lambda model: model[0])
def test_layers_with_pages_of_their_own_have_the_bits_of_one_table(tmp_path, model, part):
    status, (row,) = run(tmp_path, part, model=model)
    assert row["different"] == 0 and row["error"] == "" and row["compared_tokens"] > 500
    assert row["num_local_pages"] > 0 and status == 0


@pytest.mark.control
@pytest.mark.parametrize("model", LOCAL_LAYERS, ids=lambda model: model[0])
def test_control_of_models_with_local_layers_gives_other_bits(tmp_path, model):
    status, (row,) = run(tmp_path, "control", model=model)
    assert row["different"] > 0 and status == 0


@pytest.mark.control
def test_control_kernels_without_a_claim_give_other_bits(tmp_path):
    status, (row,) = run(tmp_path, "control")
    assert row["different"] > 0 and status == 0
