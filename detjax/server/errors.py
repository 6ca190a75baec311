# SPDX-License-Identifier: Apache-2.0
"""Why a request cannot be answered, as OpenAI's errors say it."""

MAX_MESSAGE = 2_000
"""Characters of an error: values that it names may be as long as the body."""


class RefusedError(ValueError):
    """A request that cannot be answered as it was asked: status, OpenAI's code, and the field."""

    def __init__(self, message: str, *, status: int = 400, code: str = "", field: str = ""):
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}...")
        self.status, self.code, self.field = status, code, field[:MAX_MESSAGE]
