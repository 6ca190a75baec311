# SPDX-License-Identifier: Apache-2.0
"""The least versions that pyproject.toml allows, installed and tried.

    python tools/floors.py --list            # the requirements, each at its least version
    python tools/floors.py                   # in an environment of its own, with a handful of tests

Exit status 1 if they cannot be installed together or a test fails, 2 if no package index answers.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("serve", "receipts", "structured")
"""Besides what detjax itself needs: what runs where users are. Others are for work on detjax."""

TOOLS = ("pytest>=9", "pytest-timeout>=2.4", "beartype>=0.22", "httpx>=0.28", "hypothesis>=6.150",
         "openai>=2")  # fmt: skip
"""That run the tests, in any version."""

TESTS = (
    "tests/compilation/test_executable_form.py", "tests/compilation/test_toolchain.py",
    "tests/compilation/test_kept_trust.py",
    "tests/models/test_identity.py", "tests/proof/test_receipt.py", "tests/server/test_protocol.py",
)  # fmt: skip

_NO_INDEX = re.compile(
    "NewConnectionError|ConnectTimeout|Name or service not known|No route to host|Max retries"
)


def floors(extras: tuple[str, ...] = EXTRAS) -> list[str]:
    """Each requirement of detjax and of these extras, at the least version that it allows.

    Raises:
        ValueError: If one has no least version.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    found = {}
    for requirement in asked:
        match = re.fullmatch(r"([\w\-\[\],]+?)(==|>=)([\w.]+)(?:,.*)?", requirement)
        if match is None:
            raise ValueError(f"{requirement!r} in pyproject.toml has no least version")
        found[match[1]] = f"{match[1]}=={match[3]}"
    return sorted(found.values())


def run(*command: str, **more) -> subprocess.CompletedProcess[str]:
    """Run a command; its output comes back."""
    return subprocess.run(command, text=True, capture_output=True, check=False, **more)


def try_floors(tests: tuple[str, ...] = TESTS) -> int:
    """Install the least versions and run tests; the exit status."""
    with tempfile.TemporaryDirectory(prefix="detjax_floors_") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        installed = run(*pip, *floors(), *TOOLS)
        if installed.returncode:
            print(installed.stderr[-3000:])
            return 2 if _NO_INDEX.search(installed.stderr) else 1
        tried = run(
            python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests,
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        print(tried.stdout[-3000:], tried.stderr[-1000:])
        return 1 if tried.returncode else 0


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the requirements and end")
    if parser.parse_args(arguments).list:
        print("\n".join(floors()))
        return 0
    return try_floors()


if __name__ == "__main__":
    sys.exit(main())
