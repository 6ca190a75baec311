# SPDX-License-Identifier: Apache-2.0
"""Known holes in installed packages, as pip-audit finds them in PyPI's database.

    python tools/audit_packages.py SITE_PACKAGES [--pip-audit FILE]

Exit status 1 if a package has a known hole. What could not be asked, for want of a network or of an
entry, is said, and is no failure.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PATIENCE_S = 120.0


def audit(folder: str, pip_audit: str) -> tuple[int, list[str]]:
    """Ask for the packages of a folder: the exit status, and lines to print."""
    with tempfile.TemporaryDirectory() as temporary:
        found = Path(temporary) / "found.json"
        command = [pip_audit, "--path", folder, "--progress-spinner", "off", "-f", "json",
                   "-o", str(found)]  # fmt: skip
        try:
            run = subprocess.run(
                command, text=True, capture_output=True, check=False, timeout=PATIENCE_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return 0, [f"not audited: {error}"]
        if not found.exists():
            said = run.stderr.strip().splitlines() or ["pip-audit says nothing"]
            return 0, [f"not audited: {said[-1]}"]
        packages = json.loads(found.read_text())["dependencies"]
    skipped = [package for package in packages if "skip_reason" in package]
    lines = [f"{len(packages) - len(skipped)} of {len(packages)} packages audited"]
    if skipped:
        names = ", ".join(package["name"] for package in skipped[:5])
        lines.append(f"not audited: {names}: {skipped[0]['skip_reason']}")
    holes = [
        f"{package['name']} {package['version']}: {hole['id']}, mended in "
        f"{', '.join(hole['fix_versions']) or 'no version'}"
        for package in packages
        for hole in package.get("vulns", ())
    ]
    return (1 if holes else 0), [*lines, *holes]


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="site-packages of an environment")
    parser.add_argument("--pip-audit", default="pip-audit", help="the program")
    args = parser.parse_args(arguments)
    status, lines = audit(args.folder, args.pip_audit)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
