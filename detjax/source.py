# SPDX-License-Identifier: Apache-2.0
"""Which detjax this is, as one hash of its code. Starts no JAX."""

import functools
import hashlib
from pathlib import Path


@functools.cache
def source_hash() -> str:
    """Hash the name and the bytes of every Python file of the package, as it lies on the disk."""
    root, total = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {digest}\n".encode())
    return total.hexdigest()
