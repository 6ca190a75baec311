# SPDX-License-Identifier: Apache-2.0
"""XLA may not leave out a rounding of a program that makes a claim."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.compilation.xla_flags import (
    EXACT_OPTIONS,
    FAST_OPTIONS,
    IN_PLACE_OPTIONS,
    configure_xla,
)

FLAG = "--xla_allow_excess_precision=false"


def excess(x, y):
    """Zero where `x + y` is rounded to bfloat16, y where XLA leaves the rounding out."""
    return (x + y).astype(jnp.float32) - x.astype(jnp.float32)


@pytest.mark.parametrize(
    ("options", "want"), [(EXACT_OPTIONS, 0.0), (FAST_OPTIONS, 2.0**-10)], ids=["exact", "fast"]
)
def test_options_decide_whether_a_rounding_may_be_left_out(options, want):
    step = jax.jit(excess, compiler_options=options)
    x, y = (jnp.full(64, value, jnp.bfloat16) for value in (1.0, 2.0**-10))
    assert np.asarray(step(x, y)).tolist() == [want] * 64


def test_importing_detjax_sets_the_flag_without_starting_jax():
    script = (
        "import os, sys\n"
        "import detjax\n"
        "assert 'jax' not in sys.modules\n"
        "print(os.environ['XLA_FLAGS'])\n"
    )
    for given in ("", "--xla_cpu_use_thunk_runtime=true", FLAG):
        environ = os.environ | {"XLA_FLAGS": given}
        run = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=True
        )
        assert run.stdout.strip() == f"{given} {FLAG}".strip() if given != FLAG else FLAG


def test_the_flag_is_set_once(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--other=1")
    configure_xla()
    configure_xla()
    assert os.environ["XLA_FLAGS"] == f"--other=1 {FLAG}"


def test_a_file_of_flags_counts_as_its_flags(monkeypatch, tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_cpu_enable_fast_math=false\n  --xla_a=1\n")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    configure_xla()
    assert os.environ["XLA_FLAGS"] == f"--xla_cpu_enable_fast_math=false --xla_a=1 {FLAG}"


def test_a_file_of_flags_that_is_missing_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="names a file of flags, which cannot be read"):
        configure_xla()


def test_a_longer_flag_that_begins_alike_does_not_pass_for_ours(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{FLAG}_not")
    configure_xla()
    assert os.environ["XLA_FLAGS"].split()[-1] == FLAG


@pytest.mark.parametrize("options", [EXACT_OPTIONS, FAST_OPTIONS], ids=["exact", "fast"])
def test_no_program_is_compiled_with_a_pass_that_moves_reads_behind_writers(options):
    assert IN_PLACE_OPTIONS.items() <= options.items()
    assert "rematerialization" in IN_PLACE_OPTIONS["xla_disable_hlo_passes"].split(",")
