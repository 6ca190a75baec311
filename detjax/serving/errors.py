# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while requests run: for the engine as a whole, or for one sequence alone."""


class EngineStoppedError(RuntimeError):
    """A step failed in a way that leaves the device or the host in doubt; `Engine.reset` helps."""

    def __init__(self, cause: Exception):
        super().__init__(
            f"{stop_message(cause)}; engine.reset() ends what is under way and allocates the cache "
            "anew"
        )


class EngineFullError(RuntimeError):
    """More requests wait than `EngineConfig.max_waiting` allows; try again later."""


def stop_message(cause: Exception) -> str:
    """Say what has stopped an engine."""
    return f"the engine has stopped: {type(cause).__name__}: {cause}"


# ---------------------------------------------------------------------- why a sequence fails alone


class NaNLogitError(FloatingPointError):
    """A logit of the sequence is NaN."""

    def __init__(self, position: int):
        super().__init__(
            f"a NaN logit at position {position}; check the weights for NaN or infinity"
        )


class OutOfPagesError(RuntimeError):
    """The whole cache is too small for the sequence."""

    def __init__(self, *, num_tokens: int, num_pages: int, page_len: int):
        super().__init__(
            f"its {num_tokens} tokens do not fit in the cache of {num_pages} pages of {page_len}"
        )


class ConsumerError(RuntimeError):
    """The sequence's `on_token` raised."""

    def __init__(self, raised: Exception):
        super().__init__(f"its consumer raised {raised!r}")


class LayoutError(RuntimeError):
    """A value of the request does not fit the arrays of a launch."""

    def __init__(self, raised: Exception):
        super().__init__(f"it cannot be laid out: {raised!r}")


class RowError(RuntimeError):
    """Scheduling or laying out a row of the sequence raised."""

    def __init__(self, raised: BaseException | None):
        super().__init__(f"it raised {raised!r}")


class EngineResetError(RuntimeError):
    """`Engine.reset` ended the sequence."""

    def __init__(self, cause: Exception | None):
        super().__init__("the engine was reset" if cause is None else stop_message(cause))
