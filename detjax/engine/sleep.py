# SPDX-License-Identifier: Apache-2.0
"""An engine that gives its devices' memory back for a while: weights, cache, or both."""

import contextlib
from collections.abc import Iterator

from detjax.engine.running.model_runner import ModelRunner
from detjax.models.loading import LoadedModel
from detjax.models.params import Params


class AsleepError(ValueError):
    """A call needs weights or a cache that are not on the devices."""


class Sleep:
    """Which parts of an engine are on its devices."""

    def __init__(self, model: LoadedModel, runner: ModelRunner):
        """Everything is."""
        self._model, self._runner = model, runner
        self._host: Params | None = None
        self._has_weights = self._has_cache = True

    @property
    def is_asleep(self) -> bool:
        """Whether anything is away."""
        return not (self._has_weights and self._has_cache)

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the devices."""
        return self._has_weights

    def refuse_if_asleep(self) -> None:
        """Refuse what needs weights and cache.

        Raises:
            AsleepError: If one of them is away, naming it.
        """
        if self.is_asleep:
            away = "cache" if self._has_weights else "weights"
            raise AsleepError(f"the engine is asleep, without its {away}; wake_up() first")

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free the cache and the weights on the devices; the host keeps a copy, or nobody does."""
        if self._has_weights and not keeps_weights:
            self._model.give_up_weights()
            self._note_away(None)
        elif self._has_weights:
            self._take_away()
        elif not keeps_weights:
            self._host = None
        self._has_cache = False
        self._runner.release()

    def wake_up(self, *, weights: bool = True, cache: bool = True) -> None:
        """Bring weights or cache back.

        Raises:
            AsleepError: If the weights are asked for together with the cache, and nobody has them.
        """
        if weights and not self._has_weights and self._host is not None:
            self._put_back(self._host)
        if cache and not self._has_weights and self._host is None:
            raise AsleepError(
                "the weights were given up when the engine went to sleep; load weights first"
            )
        if cache and not self._has_cache:
            self._runner.reset()
            self._has_cache = True

    @contextlib.contextmanager
    def weights_aside(self) -> Iterator[None]:
        """Make room for other weights; if they do not come, the old ones are put back."""
        was_away = not self._has_weights
        if not was_away:
            self._take_away()
        try:
            yield
        except BaseException:
            if not was_away and not self._has_weights and self._host is not None:
                self._put_back(self._host)
            raise

    def note_weights(self) -> None:
        """Other weights have come, and are on the devices."""
        self._host, self._has_weights = None, True
        self._runner.take_weights()

    def _take_away(self) -> None:
        self._note_away(self._model.take_weights_to_host())

    def _note_away(self, host: Params | None) -> None:
        self._host, self._has_weights = host, False
        self._runner.drop_drafts()

    def _put_back(self, host: Params) -> None:
        self._model.put_weights_back(host)
        self.note_weights()
