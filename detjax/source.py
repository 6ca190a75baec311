# SPDX-License-Identifier: Apache-2.0
"""Which detjax this is, as one hash of its code. Starts no JAX."""

import functools
import hashlib
import importlib.metadata
import os
from pathlib import Path


@functools.cache
def source_hash() -> str:
    """Hash the name and the bytes of every Python file of the package, as it lies on the disk."""
    root, total = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {digest}\n".encode())
    return total.hexdigest()


def compile_key() -> str:
    """Name what a compiled program was made by, for a folder of a compilation cache.

    16 hexadecimal digits over detjax's source, the versions of jax and jaxlib, and `XLA_FLAGS`. JAX
    has a key of its own for each program. This one keeps apart what another detjax has compiled, so
    that a cache can never give another build's digest.
    """
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    parts = [source_hash(), *versions, os.environ.get("XLA_FLAGS", "")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
