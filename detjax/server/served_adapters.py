# SPDX-License-Identifier: Apache-2.0
"""The adapters that clients may ask for by name, as they ask for a model."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from detjax.engine.async_engine import StepsRequests


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedAdapter:
    """An adapter under the name that clients ask for.

    Attributes:
        name: Of it.
        sha256: Its hash.
    """

    name: str
    sha256: str


class NameTakenError(ValueError):
    """A name of an adapter is that of another, or of the model."""


class ServedAdapters:
    """Names of adapters, on one engine. From any thread."""

    def __init__(self, engine: StepsRequests, model_name: str):
        """Know none.

        Args:
            engine: That reads them.
            model_name: Of the base model, which no adapter may have.
        """
        self._engine, self._model_name = engine, model_name
        self._known: dict[str, ServedAdapter] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[ServedAdapter]:
        """Those that are served now, in the order in which they came."""
        return iter(tuple(self._known.values()))

    def get(self, name: str) -> ServedAdapter | None:
        """Return an adapter by its name."""
        return self._known.get(name)

    def load(self, name: str, folder: Path, *, replaces: bool = False) -> ServedAdapter:
        """Read a folder, and serve its adapter under a name.

        Args:
            name: For clients.
            folder: That PEFT has saved.
            replaces: Whether it may be served in place of another of this name. Requests that have
                the other one go on with it.

        Raises:
            FileNotFoundError: If a file is missing.
            NameTakenError: If the name is that of another.
            ValueError: If the adapter does not go with the model. The other one is served then as
                before.
        """
        with self._lock:
            old = self._known.get(name)
            if name == self._model_name:
                raise NameTakenError(f"{name!r} is the base model's name; give another one")
            if old is not None and not replaces:
                raise NameTakenError(f"{name!r} is served already; unload it, or give another name")
            sha256 = self._engine.load_adapter(folder)
            adapter = self._known[name] = ServedAdapter(name=name, sha256=sha256)
            if old is not None:
                self._forget(old)
            return adapter

    def unload(self, name: str) -> None:
        """Serve an adapter no more. Requests that have it go on.

        Raises:
            KeyError: If there is none of this name.
        """
        with self._lock:
            self._forget(self._known.pop(name))

    def _forget(self, gone: ServedAdapter) -> None:
        """Remove what no name has any more from the engine."""
        if all(other.sha256 != gone.sha256 for other in self._known.values()):
            self._engine.remove_adapter(gone.sha256)
