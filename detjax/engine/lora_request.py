# SPDX-License-Identifier: Apache-2.0
"""Which adapter answers, as vLLM's programs say it, and folders that are read once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from detjax.models.adapters.adapter import WEIGHTS_NAME
from detjax.models.adapters.peft_config import CONFIG_NAME


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter (LoRA) by name and folder, with vLLM's fields in vLLM's order.

    Attributes:
        lora_name: Names it in messages.
        lora_int_id: vLLM's number of it; detjax names adapters by their hashes and does not read
            it.
        lora_path: A folder that PEFT has saved.

    Raises:
        ValueError: If the name or the folder is empty, or the number is not above 0.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self):
        """Check all three."""
        if not self.lora_name or not str(self.lora_path):
            raise ValueError(
                f"LoRARequest({self.lora_name!r}, lora_path={str(self.lora_path)!r}) needs a name "
                "and the folder of an adapter"
            )
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(
                f"lora_int_id={self.lora_int_id!r} must be an integer above 0; a folder is "
                "lora_path, the third argument"
            )


@runtime_checkable
class LoadsAdapters(Protocol):
    """What `AdapterFolders` needs of an engine."""

    def load_adapter(self, folder: Path) -> str:
        """Read an adapter, and return its hash."""
        ...

    def remove_adapter(self, sha256: str) -> None:
        """Let no further request name an adapter."""
        ...


class AdapterFolders:
    """Reads the folder of an adapter when it is first asked for, and when its files change."""

    def __init__(self, engine: LoadsAdapters):
        """Read nothing yet."""
        self._engine = engine
        self._read: dict[Path, tuple[tuple, str]] = {}

    def load(self, folder: Path) -> str:
        """Return the hash of a folder's adapter, which requests may name from now on.

        Raises:
            FileNotFoundError, ValueError: As `Engine.load_adapter` does.
        """
        folder = folder.expanduser().resolve()
        states = _states(folder)
        known = self._read.get(folder)
        if known is not None and known[0] == states:
            return known[1]
        sha256 = self._engine.load_adapter(folder)
        self._read[folder] = states, sha256
        others = {sha for _, sha in self._read.values()}
        if known is not None and known[1] not in others:
            self._engine.remove_adapter(known[1])
        return sha256


def _states(folder: Path) -> tuple:
    """Length, time of the last write and inode of an adapter's files."""
    files = (folder / name for name in (CONFIG_NAME, WEIGHTS_NAME))
    stats = (path.stat() for path in files if path.is_file())
    return tuple((it.st_size, it.st_mtime_ns, it.st_ino) for it in stats)
