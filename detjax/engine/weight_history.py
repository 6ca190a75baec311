# SPDX-License-Identifier: Apache-2.0
"""Which weights an engine has had, so that an answer can be asked which of them made it."""


class WeightHistory:
    """The weights of an engine, one after the other, and whether any request ran with them.

    No request runs with two: an engine takes weights when it has none.
    """

    def __init__(self) -> None:
        """The weights that the model was loaded with, version 0."""
        self._versions = [0]
        self._have_run = [False]

    @property
    def current(self) -> int:
        """Which weights compute now: how many were replaced before."""
        return len(self._versions) - 1

    @property
    def version(self) -> int:
        """Of the weights that compute now, which outputs carry."""
        return self._versions[-1]

    def replace(self, version: int) -> None:
        """Other weights have come."""
        self._versions.append(version)
        self._have_run.append(False)

    def note_request(self) -> None:
        """A request runs with the weights of now."""
        self._have_run[-1] = True

    def index_of(self, version: int) -> int:
        """Which weights made an answer that carries this version, counted as `current` counts.

        Raises:
            ValueError: If none did, or it cannot be told which.
        """
        found = [i for i, v in enumerate(self._versions) if v == version and self._have_run[i]]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"{len(found)} different weights have answered as weight_version={version}, so it "
                "cannot be told which of them made this answer; give load_weights a version of its "
                "own each time"
            )
        raise ValueError(
            f"the answer carries weight_version={version}, and no weights of this engine have "
            f"answered under it; ask the LLM that made it"
        )
