# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while requests run: for the engine as a whole, or for one sequence alone."""


class EngineStoppedError(RuntimeError):
    """A step failed in a way that leaves the device or the host in doubt; `Engine.reset` helps."""


class SelfCheckError(RuntimeError):
    """The engine has found its own claim to be false here, and makes no deterministic answer.

    Raised for new requests, and the reason why those under way ended.
    """


class EngineFullError(RuntimeError):
    """More requests wait than `EngineConfig.max_waiting` allows; try again later.

    Attributes:
        max_waiting: Sequences that may wait. A request of more is refused at any time.
    """

    def __init__(self, message: str, *, max_waiting: int):
        super().__init__(message)
        self.max_waiting = max_waiting


class EngineInUseError(RuntimeError):
    """Two `AsyncEngine`s have requests open on one engine, whose outputs go to one of them."""


class PromptTooLongError(ValueError):
    """A prompt leaves no room for its answer; nothing of the request has run."""


# Why a sequence fails alone: `RequestOutput.exception`, which nobody raises.


class NaNLogitError(FloatingPointError):
    """A logit of the sequence is NaN."""


class NoTokenError(ValueError):
    """Masks of the request forbid every token that could follow."""


class StructuredOutputError(NoTokenError):
    """The form that the request asks for cannot go on, or a limit of its reader is passed."""


class OutOfPagesError(RuntimeError):
    """The whole cache is too small for the sequence."""


class ConsumerError(RuntimeError):
    """The sequence's `on_token` raised."""


class LayoutError(RuntimeError):
    """A value of the request does not fit the arrays of a launch."""


class RowError(RuntimeError):
    """Scheduling or laying out a row of the sequence raised."""


class EngineResetError(RuntimeError):
    """`Engine.reset` ended the sequence."""
