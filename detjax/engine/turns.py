# SPDX-License-Identifier: Apache-2.0
"""Calls of an engine from several threads: one at a time, and each output returned once."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate

from detjax.engine.outputs.request_output import RequestOutput
from detjax.interpreter_exit import working


def one_thread_at_a_time[E, **P, R](
    method: Callable[Concatenate[E, P], R],
) -> Callable[Concatenate[E, P], R]:
    """Let a call of an `Engine` wait for another thread's: half a step is no state to begin from.

    Args:
        method: Of `Engine`, which has the lock `_turn`.
    """

    @functools.wraps(method)
    def locked(self: E, *args: P.args, **kwargs: P.kwargs) -> R:
        engine: Any = self
        engine._refuse_if_forked()
        with working(), engine._turn:
            return method(self, *args, **kwargs)

    return locked


def outputs_once[E](
    method: Callable[[E], list[RequestOutput]],
) -> Callable[[E], list[RequestOutput]]:
    """As `one_thread_at_a_time`, for calls that return outputs, each of them once.

    An interrupt may hit between the end of the call and the end of its turn: the next call returns
    the outputs then.
    """

    @functools.wraps(method)
    def locked(self: E) -> list[RequestOutput]:
        engine: Any = self
        engine._refuse_if_forked()
        released: list[RequestOutput] = []
        try:
            with working(), engine._turn:
                released = method(self)
                return released
        except BaseException:
            engine._states.outputs[:0] = released
            raise

    return locked
