# SPDX-License-Identifier: Apache-2.0
"""The adapters that requests may name."""

from pathlib import Path

from detjax.models.adapters.adapter import read_adapter
from detjax.models.adapters.low_rank import Adapter
from detjax.models.adapters.stack import expert_slot_rank, num_adapter_slots, slot_rank
from detjax.models.loading import LoadedModel


class KnownAdapters:
    """The adapters in the host's memory that requests may name, by their hashes."""

    def __init__(self, model: LoadedModel):
        """Know none."""
        self._model = model
        self._known: dict[str, Adapter] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._known)

    def read(self, folder: Path) -> Adapter:
        """Read a folder that PEFT has saved: `read_adapter`.

        Raises:
            FileNotFoundError, ValueError: As `read_adapter` does, or if the model has no room for
                adapters.
        """
        self._check_possible()
        model = self._model
        return read_adapter(
            folder, model.config, dtype=model.profile.param_dtype,
            max_rank=slot_rank(model), max_expert_rank=expert_slot_rank(model),
        )  # fmt: skip

    def add(self, adapter: Adapter) -> None:
        """Let requests name an adapter.

        Raises:
            ValueError: If it has a higher rank than a slot, or the model no room for adapters.
        """
        self._check_possible()
        for rank, most, option in (
            (adapter.rank, slot_rank(self._model), "max_lora_rank"),
            (adapter.expert_rank, expert_slot_rank(self._model), "max_expert_lora_rank"),
        ):
            if rank > most:
                raise ValueError(
                    f"the adapter has rank {rank}, more than the {most} of a slot; raise {option} "
                    f"(--{option.replace('_', '-')})"
                )
        self._known[adapter.sha256] = adapter

    def remove(self, sha256: str) -> None:
        """Let no further request name an adapter. Sequences that have it go on.

        Raises:
            ValueError: If there is none of this hash.
        """
        if self._known.pop(sha256, None) is None:
            raise ValueError(f"there is no adapter {sha256!r:.80}")

    def get(self, sha256: str) -> Adapter | None:
        """Return an adapter; None for "".

        Raises:
            ValueError: If a request cannot name it.
        """
        if not sha256:
            return None
        self._check_possible()
        if sha256 not in self._known:
            raise ValueError(
                f"adapter={sha256!r:.80} is not loaded; load its folder first, as "
                "LLM.generate(lora_request=...) does"
            )
        return self._known[sha256]

    def _check_possible(self) -> None:
        if not num_adapter_slots(self._model):
            raise ValueError(
                "this model was opened without room for adapters; give enable_lora=True "
                "(--enable-lora)"
            )
