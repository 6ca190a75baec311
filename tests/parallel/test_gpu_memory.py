# SPDX-License-Identifier: Apache-2.0
"""JAX takes the asked share of a GPU, unless the environment or an earlier start says otherwise."""

import os
from argparse import Namespace

import pytest
from jax._src import xla_bridge

import detjax
from detjax.certify.opening import start_devices
from detjax.parallel.gpu_memory import FRACTION, claim_gpu_memory, claimed_share


@pytest.fixture(name="fresh")
def _fresh(monkeypatch):
    """JAX as if it had not started, and nothing said of memory."""
    for name in (FRACTION, "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    return monkeypatch


def test_jax_is_told_the_share_before_it_starts(fresh):
    assert claimed_share() == 0.75
    claim_gpu_memory(0.5)
    assert (os.environ[FRACTION], claimed_share()) == ("0.5", 0.5)
    claim_gpu_memory()  # the first is kept
    assert claimed_share() == 0.5


@pytest.mark.parametrize("name", [FRACTION, "XLA_CLIENT_MEM_FRACTION"])
def test_the_environment_takes_precedence(fresh, name):
    fresh.setenv(name, "0.3")
    claim_gpu_memory(0.5)
    assert claimed_share() == 0.3
    assert sum(it in os.environ for it in (FRACTION, "XLA_CLIENT_MEM_FRACTION")) == 1


def test_a_jax_that_has_started_keeps_what_it_has(fresh):
    fresh.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    claim_gpu_memory(0.5)
    assert FRACTION not in os.environ and claimed_share() == 0.75


def test_an_llm_claims_its_share(fresh):
    detjax.LLM(batch_size=1, max_len=128, gpu_memory_utilization=0.4)
    assert claimed_share() == 0.4


def test_commands_claim_their_share(fresh, capsys):
    from detjax.generate import main as generate

    ask = ["--prompt", "It", "--max-tokens", "1"]
    assert generate([*ask, "--gpu-memory-utilization", "0.4"]) == 2  # there is no GPU here
    assert "sizes the cache on GPUs" in capsys.readouterr().err and claimed_share() == 0.4
    del os.environ[FRACTION]
    assert generate(ask) == 0 and claimed_share() == 0.9


def test_a_certificate_claims_its_share(fresh):
    start_devices(Namespace(devices=1, dp=1, tp=1, gpu_memory_utilization=0.4))
    assert claimed_share() == 0.4
