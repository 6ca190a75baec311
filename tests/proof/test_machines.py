# SPDX-License-Identifier: Apache-2.0
"""Receipts of a GPU, checked without one by the backend that gives its bits."""

import dataclasses
from pathlib import Path

import pytest

from detjax import audit, replay
from detjax.pallas_kernels.reference_library import find_compiler
from detjax.proof.receipt import read_receipts

OF_AN_H200 = Path(__file__).parents[1] / "golden" / "hopper_receipts.jsonl"
OPTIONS = [
    "--backend", "reference", "--cache-dir", "none", "--quiet",
    # They were made by another commit.
    "--accept", "build.source", "--accept", "build.detjax",
    "--accept", "build.jax", "--accept", "build.jaxlib",
]  # fmt: skip


@pytest.fixture(autouse=True)
def compiler():
    """The reference kernels are compiled here."""
    try:
        find_compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.golden
@pytest.mark.parametrize("command", [replay, pytest.param(audit, marks=pytest.mark.slow)])
def test_receipts_of_a_gpu_pass_on_a_cpu(command, capsys):
    assert command.main([str(OF_AN_H200), *OPTIONS]) == 0
    told = capsys.readouterr().out
    assert "144 tokens and logprobs: 0 receipts differ" in told
    assert "build.arch (NVIDIA H200 sm_9.0 in the receipts" in told  # it is said, as not proven


@pytest.mark.slow
@pytest.mark.control
def test_control_another_seed_of_a_gpus_receipt_differs(tmp_path, capsys):
    receipt = read_receipts(OF_AN_H200)[0]
    request = receipt.request | {"sampling": receipt.request["sampling"] | {"seed": "1"}}
    file = tmp_path / "receipts.jsonl"
    file.write_text(dataclasses.replace(receipt, request=request).to_json() + "\n")
    assert replay.main([str(file), *OPTIONS]) == 3
    assert "1 receipts differ" in capsys.readouterr().out


def test_a_backend_of_other_bits_is_refused(capsys):
    assert replay.main([str(OF_AN_H200), "--backend", "portable"]) == 2
    assert "--backend portable does not give the bits of sm90" in capsys.readouterr().err
