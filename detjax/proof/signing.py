# SPDX-License-Identifier: Apache-2.0
"""Signatures of receipts: ed25519 (RFC 8032)."""

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ALGORITHM = "ed25519"
_PRIME = 2**255 - 19
_CURVE = -121665 * pow(121666, -1, _PRIME) % _PRIME
"""p and d of the curve of ed25519 (RFC 8032, section 5.1)."""


def _cryptography() -> Any:
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ImportError(f'{error}; pip install "detjax[receipts]"') from error
    return ed25519, serialization, exceptions.InvalidSignature


class SignatureError(ValueError):
    """A signature that is missing, of another key, or not of these bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A signature and its public key.

    Attributes:
        algorithm: "ed25519".
        public_key: The 32 bytes of the key, as base64.
        value: The 64 bytes of the signature, as base64.
    """

    algorithm: str
    public_key: str
    value: str

    def check(self, data: bytes) -> None:
        """Check that the key has signed these bytes.

        Raises:
            SignatureError: If it has not.
        """
        ed25519, _, invalid = _cryptography()
        if self.algorithm != _ALGORITHM:
            raise SignatureError(f"signature.algorithm is {self.algorithm!r}, not {_ALGORITHM!r}")
        public = _bytes(self.public_key, "public_key", 32)
        if is_weak(public):
            raise SignatureError(
                "signature.public_key is of small order: anybody can make signatures that fit it"
            )
        key = ed25519.Ed25519PublicKey.from_public_bytes(public)
        try:
            key.verify(_bytes(self.value, "value", 64), data)
        except invalid as error:
            raise SignatureError(
                "signature.value is not that of signature.public_key for this receipt"
            ) from error


class SigningKey:
    """A private key."""

    def __init__(self, path: Path):
        """Read a PEM file, as `openssl genpkey -algorithm ed25519` writes it, without a password.

        Raises:
            ValueError: If it holds no such key.
            OSError: If it cannot be read.
        """
        ed25519, serialization, _ = _cryptography()
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} holds no private key in PEM without a password") from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ValueError(
                f"{path} is no ed25519 key; make one with openssl genpkey -algorithm ed25519"
            )
        self._key = key

    def sign(self, data: bytes) -> Signature:
        """Sign bytes."""
        public = self._key.public_key().public_bytes_raw()
        return Signature(
            algorithm=_ALGORITHM,
            public_key=base64.b64encode(public).decode(),
            value=base64.b64encode(self._key.sign(data)).decode(),
        )


def read_public_key(path: Path) -> str:
    """Read a PEM file of a public key, as `openssl pkey -pubout` writes it: base64 of its bytes.

    Raises:
        ValueError: If it holds no such key.
        OSError: If it cannot be read.
    """
    ed25519, serialization, _ = _cryptography()
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} holds no public key in PEM") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ValueError(f"{path} is no ed25519 key")
    if is_weak(key.public_bytes_raw()):
        raise ValueError(
            f"{path} holds a key of small order: anybody can make signatures that fit it"
        )
    return base64.b64encode(key.public_bytes_raw()).decode()


def is_weak(public: bytes) -> bool:
    """Whether a public key is one of the points of order 1, 2, 4 or 8, however it is written.

    A key that `SigningKey` has made is of another order. OpenSSL verifies with such points too:
    the identity with R the identity and S = 0 fits every message (RFC 8032, section 8.9).
    """
    y = (int.from_bytes(public, "little") & (2**255 - 1)) % _PRIME  # without the sign of x
    # Order 1, 2: y = 1, -1. Order 4: y = 0. Order 8: its double has y = 0.
    return y in (0, 1, _PRIME - 1) or (_CURVE * y**4 + 2 * y * y - 1) % _PRIME == 0


def _bytes(text: str, name: str, count: int) -> bytes:
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise SignatureError(f"signature.{name} is not base64") from error
    if len(found) != count or base64.b64encode(found).decode() != text:
        raise SignatureError(f"signature.{name} is not {count} bytes as base64")
    return found
