# SPDX-License-Identifier: Apache-2.0
"""The least versions that are allowed work, and packages with known holes are found."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tool(name: str):
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_requirement_of_a_user_has_a_least_version():
    listed = tool("floors").floors()
    assert {"jax==0.11.2", "starlette==1.0", "rfc8785==0.1.4"} <= set(listed)
    assert all(re.fullmatch(r"[\w\-]+==[\d.]+", one) for one in listed), listed


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_least_versions_install_together_and_pass():
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / "floors.py"], capture_output=True, text=True, check=False
    )
    if run.returncode == 2:
        pytest.skip(f"no package index answers: {run.stdout[-300:]}")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


def fake_audit(folder: Path, packages: list[dict] | None, *, says: str = "") -> str:
    """A program that writes what pip-audit would."""
    held = json.dumps({"dependencies": packages})
    writes = f"open(sys.argv[-1], 'w').write({held!r})" if packages is not None else ""
    program = folder / "pip-audit"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n{writes}\nsys.stderr.write({says!r})\nsys.exit(1)\n"
    )
    program.chmod(0o755)
    return str(program)


HOLE = {"id": "PYSEC-2026-1", "fix_versions": ["1.1"]}
UNKNOWN = {"name": "b", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "says", "status", "line"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], "", 0, "1 of 1 packages audited"),
        ([{"name": "a", "version": "1", "vulns": [HOLE]}], "", 1,
         "a 1: PYSEC-2026-1, mended in 1.1"),
        ([UNKNOWN], "", 0, "not audited: b: Dependency not found on PyPI"),
        ([UNKNOWN], "", 0, "0 of 1 packages audited"),
        (None, "trace\nConnectionError: no route", 0, "not audited: ConnectionError: no route"),
    ],
)  # fmt: skip
def test_holes_fail_and_what_cannot_be_asked_is_said(
    tmp_path, capsys, packages, says, status, line
):
    program = fake_audit(tmp_path, packages, says=says)
    assert tool("audit_packages").main([str(tmp_path), "--pip-audit", program]) == status
    assert line in capsys.readouterr().out.splitlines()


def test_without_the_program_nothing_is_audited(tmp_path, capsys):
    program = str(tmp_path / "none")
    assert tool("audit_packages").main([str(tmp_path), "--pip-audit", program]) == 0
    assert capsys.readouterr().out.startswith("not audited: ")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_server_survives_each_fault_of_the_soak():
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / "soak.py", "--seconds", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
