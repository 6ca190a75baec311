# SPDX-License-Identifier: Apache-2.0
"""Receipts of a GPU, checked without one by the backend that gives its bits."""

import dataclasses
from pathlib import Path

import pytest

from detjax import audit, replay
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.reference_library import find_compiler
from detjax.proof.receipt import read_receipts

OF_AN_H200 = Path(__file__).parents[1] / "golden" / "hopper_receipts.jsonl"
OPTIONS = ["--backend", "reference", "--cache-dir", "none", "--quiet"]


@pytest.fixture(autouse=True)
def compiler():
    """The reference kernels are compiled here."""
    try:
        find_compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.parametrize("command", [replay, audit])
def test_receipts_of_a_gpu_pass_on_a_cpu(command, capsys):
    assert command.main([str(OF_AN_H200), *OPTIONS[:-1]]) == 0  # not --quiet
    told, lines = capsys.readouterr()
    assert "144 tokens and logprobs: 0 receipts differ" in told
    assert f"bits: {read_receipts(OF_AN_H200)[0].bits}\n" in told
    (unproven,) = (line for line in told.splitlines() if line.startswith("not proven: "))
    assert "build.arch" in unproven and "build.source" in unproven
    differs = " ".join(lines.split())
    assert "another build: build.source is b298c179" in differs  # another commit made them
    assert "another build: build.arch is NVIDIA H200 sm_9.0 in the receipts" in differs


@pytest.mark.slow
@pytest.mark.control
def test_control_another_seed_of_a_gpus_receipt_differs(tmp_path, capsys):
    receipt = read_receipts(OF_AN_H200)[0]
    request = receipt.request | {"sampling": receipt.request["sampling"] | {"seed": "1"}}
    file = tmp_path / "receipts.jsonl"
    file.write_text(dataclasses.replace(receipt, request=request).to_json() + "\n")
    assert replay.main([str(file), *OPTIONS]) == 3
    assert "1 receipts differ" in capsys.readouterr().out


def test_what_decides_bits_has_a_fingerprint_and_a_build_has_none():
    """One of a GPU's receipt and of its build on a CPU; another of all that changes a bit."""
    receipt = read_receipts(OF_AN_H200)[0]
    elsewhere = receipt.build | {"backend": "reference", "arch": "x86_64", "source": "0" * 64}
    elsewhere = {name: value for name, value in elsewhere.items() if name != "toolchain"}
    assert dataclasses.replace(receipt, build=elsewhere).bits == receipt.bits
    profile = receipt.numerics["profile"] | {"num_leaves": 4}
    others = [
        {"model": receipt.model | {"weights": "0" * 64}},
        {"model": receipt.model | {"quantization": "int4"}},
        {"numerics": receipt.numerics | {"profile": profile}},
        {"build": receipt.build | {"backend": "portable"}},
        {"build": receipt.build | {"backend": "unknown"}},
        {"build": elsewhere | {"backend": "portable"}},
    ]
    found = {dataclasses.replace(receipt, **changes).bits for changes in others} | {receipt.bits}
    assert len(found) == 7


def test_only_backends_of_one_function_give_the_same_bits():
    pairs = {(a.value, b.value) for a in Backend for b in Backend if a.gives_bits_of(b)}
    own = {(backend.value, backend.value) for backend in Backend}
    assert pairs == own | {("sm90", "reference"), ("reference", "sm90")}


def test_a_backend_of_other_bits_is_refused(capsys):
    assert replay.main([str(OF_AN_H200), "--backend", "portable"]) == 2
    assert "--backend portable does not give the bits of sm90" in capsys.readouterr().err
