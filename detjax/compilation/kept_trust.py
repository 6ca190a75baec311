# SPDX-License-Identifier: Apache-2.0
"""Whose compiled programs may run: those that this user has kept, where nobody else can write.

What is kept is machine code. So each entry carries a code (HMAC-SHA256) under a key that only its
user can read, and a folder or a file that another user owns or may write to is not used.
"""

import contextlib
import errno
import functools
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

KEY_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def state_dir() -> Path:
    """The user's folder for what programs remember: `$XDG_STATE_HOME/detjax`.

    Raises:
        OSError: If there is neither that variable nor a home.
    """
    root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(root).expanduser() / "detjax"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, f"{error}; set XDG_STATE_HOME") from error


def make_private(folder: Path) -> None:
    """Make a folder that its user alone can write to, if it is not there, and check that it is so.

    Raises:
        PermissionError: If another user owns it or may write to it.
        OSError: If it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Check that nobody else can write to a folder.

    Raises:
        PermissionError: If another user owns it or may write to it.
        OSError: If it cannot be looked at.
    """
    if why := _why_not_private(os.stat(folder)):
        raise PermissionError(
            errno.EPERM,
            f"what lies in {folder} would be run, and {why}; use a folder of your own, or "
            f"chown it and chmod go-w {folder}",
            str(folder),
        )


def read_private(file: Path) -> bytes | None:
    """The bytes of a file that nobody else can write to; None if there is no such file.

    Raises:
        PermissionError: If another user owns it or may write to it.
        OSError: If it cannot be read, or is a link or no file.
    """
    try:
        number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(number, "rb") as opened:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(file))
        if why := _why_not_private(found):
            raise PermissionError(errno.EPERM, why, str(file))
        return opened.read()


def _why_not_private(found: os.stat_result) -> str:
    if found.st_uid not in (os.geteuid(), 0):
        return f"user {found.st_uid} owns it"
    if found.st_mode & _WRITABLE_BY_OTHERS:
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


class Seal:
    """Codes that only this user can make.

    Attributes:
        key_id: Names the key without telling it: entries of another key have other names.
    """

    def __init__(self, key: bytes):
        """Take the key."""
        self._key = key
        self.key_id = self._code(b"id")[:4].hex()

    def code(self, name: str, value: bytes) -> bytes:
        """Of a value that is kept under a name."""
        return self._code(b"entry %d " % len(name.encode()) + name.encode() + value)

    def opened(self, name: str, held: bytes) -> bytes | None:
        """The value behind its code; None if the code is another."""
        code, value = held[:MAC_BYTES], held[MAC_BYTES:]
        return value if hmac.compare_digest(code, self.code(name, value)) else None

    def _code(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")


@functools.cache
def user_seal() -> Seal:
    """The seal of the user's key, which is made when it is first wanted.

    Raises:
        PermissionError: If others can read or write the key, or write to its folder.
        OSError: If it can be neither read nor made.
    """
    folder = state_dir()
    make_private(folder)
    file = folder / "cache.key"
    key = read_private(file)
    if key is None:
        _make_key(file)
        key = read_private(file)
    is_secret = not os.stat(file).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if key is None or len(key) != KEY_BYTES or not is_secret:
        raise PermissionError(
            errno.EPERM,
            f"{file} must have {KEY_BYTES} bytes that you alone can read; remove it",
            str(file),
        )
    return Seal(key)


def _make_key(file: Path) -> None:
    """Make a key that appears whole; where several processes do, one of theirs stays."""
    with tempfile.NamedTemporaryFile(dir=file.parent) as made:  # mode 0600
        made.write(secrets.token_bytes(KEY_BYTES))
        made.flush()
        os.fsync(made.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(made.name, file)
