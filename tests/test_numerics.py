# SPDX-License-Identifier: Apache-2.0
"""The profile, its fingerprint, and the reductions that follow from it."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import detjax
from detjax.defaults import NO_CAST
from detjax.numerics import Build, NumericsProfile, fingerprint, tree_reduction


@pytest.mark.parametrize(
    ("k_len", "num_leaves"),
    [(14336, 8), (25600, 8), (11008, 8), (6144, 8), (4096, 8), (172, 1), (64, 4), (48, 1), (96, 2)],
)
def test_leaves_are_a_rule_of_k_alone(k_len, num_leaves):
    reduction = tree_reduction(k_len, NumericsProfile())
    assert (reduction.num_leaves, reduction.leaf_len) == (num_leaves, k_len // num_leaves)


def test_no_field_of_a_reduction_is_batch_shaped():
    """What picks a reduction takes dimensions of the model and the profile, nothing else."""
    names = {f.name for f in dataclasses.fields(NumericsProfile)}
    assert not {n for n in names for word in ("batch", "token", "row", "seq") if word in n}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 1}, "numerics version 1 is not in this build"),
        ({"num_leaves": 6}, "num_leaves=6 must be a power of two"),
        ({"attention_split": 64}, "attention_split=64 must be a multiple"),
        ({"compute_dtype": "float16"}, "compute_dtype='float16' must be one of"),
        ({"weight_dtype": "float32"}, "would round the weights"),
    ],
)
def test_profile_refuses_what_is_not_specified(fields, message):
    with pytest.raises(ValueError, match=message):
        NumericsProfile(**fields)


def test_fingerprint_covers_profile_and_build_and_nothing_else():
    build = Build.current("portable", jax.devices("cpu")[0])
    base = fingerprint(NumericsProfile(), build)
    others = [fingerprint(NumericsProfile(num_leaves=4), build)]
    for field in dataclasses.fields(Build):
        changed = dataclasses.replace(build, **{field.name: "other"})
        others.append(fingerprint(NumericsProfile(), changed))
    assert len({base, *others}) == 1 + len(others)
    casts = [fingerprint(NumericsProfile(), build, weight_cast=f"float{n} to bfloat16")
             for n in (16, 32)]  # fmt: skip
    assert len({base, *others, *casts}) == 3 + len(others)
    assert fingerprint(NumericsProfile(), build, weight_cast=NO_CAST) == base
    code = (
        "import jax; jax.config.update('jax_num_cpu_devices', 3)\n"
        "from detjax.numerics import *\n"
        "print(fingerprint(NumericsProfile(), Build.current('portable', jax.devices('cpu')[2])))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == base, "another process with another number of devices"


def test_another_line_of_code_is_another_build(tmp_path):
    """A copy of the package with one number changed has another fingerprint, wherever it lies."""
    code = (
        "import jax\n"
        "from detjax.numerics import *\n"
        "print(fingerprint(NumericsProfile(), Build.current('portable', jax.devices('cpu')[0])))"
    )

    def of(name: str, old: str, new: str) -> str:
        package = tmp_path / name / "detjax"
        shutil.copytree(Path(detjax.__file__).parent, package)
        path = package / "pallas_kernels" / "rms_norm" / "portable.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONPATH": str(tmp_path / name)}, cwd=tmp_path,
        )  # fmt: skip
        return run.stdout.strip()

    here = fingerprint(NumericsProfile(), Build.current("portable", jax.devices("cpu")[0]))
    assert of("same", "eps", "eps") == here
    assert of("other", "eps", "1.5 * eps") != here


def test_fingerprint_tells_flags_apart_by_what_they_set(monkeypatch):
    def of(flags: str) -> str:
        monkeypatch.setenv("XLA_FLAGS", flags)
        return fingerprint(NumericsProfile(), Build.current("portable", jax.devices("cpu")[0]))

    on, off = "--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math=false"
    assert of(f"{on} {off}") == of(off) != of(f"{off} {on}") == of(on)  # the last one holds
    assert of(f"{on} --xla_a=1") == of(f"--xla_a=1 {on}")
    inert = "--xla_dump_to=x --xla_force_host_platform_device_count=3 --xla_dump_hlo_as_text"
    assert of(f"{on} {inert}") == of(on)
