# SPDX-License-Identifier: Apache-2.0
"""Exit codes of all commands, and the errors that a user can put right."""

import contextlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn, TextIO

from detjax.engine.errors import SelfCheckError
from detjax.escaping import escaped, escaped_lines

OK, INTERNAL_ERROR, BAD_INPUT, BITS_DIFFER = 0, 1, 2, 3
INTERRUPTED, READER_GONE = 130, 141

EXIT_CODES = f"""\
exit codes: {OK} success; {BAD_INPUT} bad input: one line names the value and the fix;
{BITS_DIFFER} a bit differs, or a check has failed; {INTERNAL_ERROR} an error of detjax;
{INTERRUPTED} interrupted; {READER_GONE} the reader of standard output has closed it"""
"""For the help of a command."""

_LINE_CHARS = 2000
_GRACE_S = 2.0  # for children and files, after an interrupt


class InputError(Exception):
    """Something the user gave cannot be done. The message names it and the fix."""


@contextlib.contextmanager
def bad_input(
    prefix: str = "",
    *,
    rephrase: Callable[[str], str] = str,
    kinds: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Report what is wrong with files and options as the user's to fix, in one line.

    Args:
        prefix: Goes before the message.
        rephrase: Makes the message one about options, as `in_flags` does.
        kinds: Further exceptions that are the user's to fix.

    Raises:
        InputError: In place of an error that names something given.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError, NotImplementedError, *kinds) as error:
        text = rephrase(_told(error, prefix) or type(error).__name__)
        raise InputError(prefix + text) from error


def _told(error: Exception, prefix: str) -> str:
    """The message of an error; one of the system begins with its number, which says nothing."""
    if not isinstance(error, OSError) or not (error.strerror and str(error).startswith("[Errno")):
        return str(error)
    if error.filename is None or str(error.filename) in prefix:
        return error.strerror
    return f"{error.filename}: {error.strerror}"


class _InterruptedBySignal(KeyboardInterrupt):
    """It has been said."""


def exit_code(run: Callable[[], int]) -> int:
    """Run a command; return its exit code, and write what stops it to standard error."""
    with _ends_soon_by_interrupt():
        return _exit_code(run)


def _exit_code(run: Callable[[], int]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        if sys.stdout is None:
            raise InputError("standard output is closed; open it, or write to /dev/null")
        code = run()
        sys.stdout.flush()
        return code
    except (InputError, FloatingPointError) as error:  # the latter: NaN in the weights
        _say(f"error: {one_line(str(error))}")
        return BAD_INPUT
    except SelfCheckError as error:
        _say(f"error: {one_line(str(error))}")
        return BITS_DIFFER
    except _InterruptedBySignal:
        return INTERRUPTED
    except KeyboardInterrupt:
        _say("\ninterrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _give_up(sys.stdout)
        return READER_GONE
    except OSError as error:  # a full disk, as a rule
        _give_up(sys.stdout)
        where = error.filename or "standard output or error"
        _say(one_line(f"error: {where} cannot be written: {error.strerror or error}"))
        return BAD_INPUT
    except Exception as error:
        if _is_out_of_memory(error):
            _say(
                f"error: {_reason(error)}; there is not enough memory for this model and these "
                "sizes: lower --batch-size, --max-len, --cache-pages, --prefill-chunk or "
                "--verify-window, or use more devices (--tp)"
            )
            return BAD_INPUT
        _say(traceback.format_exc().removesuffix("\n"))
        _say("error: this is a fault of detjax; please report the lines above")
        return INTERNAL_ERROR


@contextlib.contextmanager
def _ends_soon_by_interrupt() -> Iterator[None]:
    """Let SIGINT end the process within `_GRACE_S`, unless something else handles it already.

    # WHY: a thread that compiles cannot be interrupted, and Python would wait for it, up to half a
    # minute.
    """

    def end(number: int, frame: object) -> NoReturn:
        _say("\ninterrupted")
        timer = threading.Timer(_GRACE_S, os._exit, (INTERRUPTED,))
        timer.daemon = True
        timer.start()
        raise _InterruptedBySignal

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def one_line(text: str) -> str:
    """Text as one printable line of bounded length: a message may have what a file holds."""
    line = escaped(" ".join(text.split()))
    return line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]}..."


def check_unicode(text: str, where: str) -> None:
    """Refuse half characters: a command line that was not UTF-8, or a lone JSON surrogate.

    Raises:
        InputError: If there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte of a command line
            why = f"is not valid UTF-8 at character {error.start + 1} (0x{code - 0xDC00:02x})"
            raise InputError(f"{where} {why}; convert it to UTF-8") from error
        raise InputError(
            f"{where} has \\u{code:04x}, one half of a surrogate pair, which is no character; "
            "write both halves, or leave it out"
        ) from error


def _say(text: str) -> None:
    """Write to standard error, if there is one, without control characters but new lines."""
    if sys.stderr is None:
        return
    try:
        print(escaped_lines(text), file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def _give_up(stream: TextIO | None) -> None:
    """Lead what is left to nowhere: Python would try to flush at exit, and report that it fails."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):  # it has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_out_of_memory(error: Exception) -> bool:
    # By name, as JAX need not have been imported.
    is_jax = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
    return is_jax or isinstance(error, MemoryError)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return one_line(lines[0]) if lines else "out of memory"
