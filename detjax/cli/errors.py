# SPDX-License-Identifier: Apache-2.0
"""Exit codes, and the errors that a user can put right."""

import contextlib
from collections.abc import Iterator

OK, INTERNAL_ERROR, BAD_INPUT, BITS_DIFFER = 0, 1, 2, 3
INTERRUPTED, READER_GONE = 130, 141

_LINE_CHARS = 2000


class InputError(Exception):
    """Something the user gave cannot be done. The message names it and the fix."""


@contextlib.contextmanager
def bad_input(prefix: str = "") -> Iterator[None]:
    """Report what is wrong with files and options as the user's to fix, in one line.

    Raises:
        InputError: In place of an error that names something given.
    """
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        raise InputError(prefix + str(error)) from error


def one_line(text: str) -> str:
    """Text as one line of bounded length: what a file holds may end up in a message."""
    line = " ".join(text.split())
    return line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]}..."


def check_unicode(text: str, where: str) -> None:
    """Refuse half characters: a command line that was not UTF-8, or a lone JSON surrogate.

    Raises:
        InputError: If there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} is not valid UTF-8 at character {error.start + 1}") from error
