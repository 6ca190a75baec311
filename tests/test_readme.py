# SPDX-License-Identifier: Apache-2.0
"""The README's Python runs as it stands, and its commands name options that exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

import detjax
from detjax.cli.parser import parse_args

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    # Two prompts; of each the first of three sequences is shown.
    assert sum(bool(re.search(r"[0-9a-f]{64}$", line)) for line in lines) == 2


def test_editors_see_the_public_names():
    assert set(detjax.__all__) <= set(dir(detjax))
    source = (ROOT / "detjax" / "__init__.py").read_text()
    for name, home in detjax._HOME.items():
        lines = re.findall(rf"^    from {home} import (.*)$", source, re.MULTILINE)
        assert name in ", ".join(lines).split(", ")


def test_every_public_name_resolves():
    for name in detjax.__all__:
        assert getattr(detjax, name).__name__ == name


def test_commands_parse():
    commands = re.findall(r"python -m detjax\.generate (--.*)", README)
    assert len(commands) >= 4
    for command in commands:
        if "--help" not in command:
            parse_args(shlex.split(command))


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert (ROOT / target).exists(), target


def test_noise_table_of_the_specification_is_that_of_the_vectors():
    text = (ROOT / "docs" / "numerics.md").read_text()
    rows = re.findall(r"\| (0x[0-9a-f]{8}) \| (0\.\d+) \| (-?\d+\.\d+) \|", text)
    assert len(rows) == 3
    prompts = re.findall(r"^\| ([^|]+) \| ([\d, ]+) \| (\d{15,}) \|$", text, re.MULTILINE)
    assert len(prompts) == 4
    for seed, prompt, derived in prompts:
        params = detjax.SamplingParams(
            temperature=1.0, seed=2**64 - 1 if "*" in seed else int(seed)
        )
        assert params.for_prompt(map(int, prompt.split(","))).seed == int(derived)
    for bits, u, noise in rows:
        value = np.float32(np.float32(int(bits, 16)) + np.float32(0.5)) * np.float32(2.0**-32)
        assert float(value) == float(u)
        assert abs(-np.log(-np.log1p(-float(u))) - float(noise)) < 1e-5


def test_performance_section_is_made_from_the_committed_rows():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
