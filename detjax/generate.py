# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.generate`: continue prompts, and prove that the answer is always the same.

What chooses bits and what does not stand apart in `--help`. JAX is imported only once the command
line and the prompts are known to be good.
"""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from detjax.cli.command import run
from detjax.cli.errors import (
    BAD_INPUT,
    BITS_DIFFER,
    INTERNAL_ERROR,
    INTERRUPTED,
    READER_GONE,
    InputError,
    one_line,
)
from detjax.cli.model import OpensModel, open_model
from detjax.cli.parser import parse_args
from detjax.engine.errors import SelfCheckError


def main(argv: Sequence[str] | None = None, *, open_model: OpensModel = open_model) -> int:
    """Run the command; return its exit code. See `--help` for what each means."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        if sys.stdout is None:
            raise InputError("standard output is closed; open it, or write to /dev/null")
        code = run(parse_args(argv), open_model=open_model)
        sys.stdout.flush()
        return code
    except (InputError, FloatingPointError) as error:  # the latter: NaN in the weights
        _say(f"error: {one_line(str(error))}")
        return BAD_INPUT
    except SelfCheckError as error:
        _say(f"error: {one_line(str(error))}")
        return BITS_DIFFER
    except KeyboardInterrupt:
        _say("\ninterrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_output()
        return READER_GONE
    except OSError as error:  # a full disk, as a rule
        _give_up_output()
        where = error.filename or "standard output or error"
        _say(f"error: {where} cannot be written: {one_line(error.strerror or str(error))}")
        return BAD_INPUT
    except Exception as error:
        if _is_out_of_memory(error):
            _say(
                f"error: {_reason(error)}; there is not enough memory for this model, or for "
                "--batch-size, --cache-pages, --prefill-chunk or --verify-window: lower them"
            )
            return BAD_INPUT
        traceback.print_exc()
        _say("error: this is a fault of detjax; please report the lines above")
        return INTERNAL_ERROR


def _say(text: str) -> None:
    """Write to standard error, if there is one that can be written to."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _give_up_output() -> None:
    """Lead what is left to nowhere: Python would try to flush at exit, and report that it fails."""
    with contextlib.suppress(OSError, ValueError):  # it has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_out_of_memory(error: Exception) -> bool:
    # By name, as JAX need not have been imported.
    is_jax = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
    return is_jax or isinstance(error, MemoryError)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return one_line(lines[0]) if lines else "out of memory"


if __name__ == "__main__":
    sys.exit(main())
