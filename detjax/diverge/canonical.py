# SPDX-License-Identifier: Apache-2.0
"""Convert tapped values of a mesh to those that one device would have, to compare bits."""

import jax.numpy as jnp
import numpy as np

from detjax.diverge.recorder import Seen, Tap
from detjax.models.linear_attention import projected_rows
from detjax.models.loading import LoadedModel
from detjax.models.params import TENSORS_OF, KVLayout, kv_layout
from detjax.models.taps import Share
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

TOKEN_TAPS = ("ids", "positions")
VOCABULARY_TAPS = ("logits", "kept_tokens")


class Canonical:
    """Converts values of one model on its mesh to those of one device."""

    def __init__(self, model: LoadedModel):
        """Read the model's dimensions."""
        self._config = model.config
        self.dp, self.tp = model.mesh.shape[DP_AXIS], model.mesh.shape[TP_AXIS]
        self._layout: KVLayout = kv_layout(
            model.config.num_heads, model.config.num_kv_heads, self.tp
        )
        heads = self._layout.heads
        self._first_slots = [heads.index(head) for head in range(model.config.num_kv_heads)]

    def values(self, seen: dict[Tap, Seen]) -> dict[Tap, np.ndarray]:
        """Whole values, [ranks, rows, ...], in order.

        There is one rank, except if each rank has a copy that should be equal, or a term of a sum.
        """
        found: dict[Tap, np.ndarray] = {}
        for tap, (value, share) in seen.items():
            whole = self._whole(value, share)
            if tap.name == "qkv":
                found |= zip(
                    (Tap(tap.layer, name) for name in "qkv"), self._heads(whole), strict=True
                )
            elif tap.name == "linear_in":
                names = (Tap(tap.layer, name) for name in TENSORS_OF["linear_in"])
                found |= zip(names, self._linear_parts(whole), strict=True)
            elif tap.name in VOCABULARY_TAPS:
                found[tap] = whole[..., : self._config.vocab_size]
            elif tap.name in TOKEN_TAPS:
                found[tap] = whole.reshape(whole.shape[0], -1)
            else:
                found[tap] = whole
        return found

    def keys_and_values(self, entries: np.ndarray) -> np.ndarray:
        """Cache entries [n, L, 2, slots, C] with each key/value head once."""
        return entries[:, :, :, self._first_slots]

    def _whole(self, value: np.ndarray, share: Share) -> np.ndarray:
        if share is Share.COLUMNS or share is Share.ROWS:
            return value[None]
        by_rank = value.reshape(self.dp, self.tp, -1, *value.shape[1:])
        return by_rank.swapaxes(0, 1).reshape(self.tp, -1, *value.shape[1:])

    def _linear_parts(self, projected: np.ndarray) -> list[np.ndarray]:
        """What linear attention reads, without padding, from each rank's, [1, M, tp * columns]."""
        sizes = self._config.linear_attention
        assert sizes is not None
        num_rows = projected.shape[1]
        columns = jnp.asarray(projected.reshape(num_rows * self.tp, -1))
        parts = projected_rows(sizes, columns, self.tp).parts()
        return [np.asarray(part).reshape(1, num_rows, -1) for part in parts]

    def _heads(self, qkv: np.ndarray) -> list[np.ndarray]:
        """Queries, keys and values of every head from each rank's, [1, M, tp * heads * C]."""
        channels, num_slots = self._config.head_dim, self._layout.num_slots // self.tp
        by_rank = qkv.reshape(1, qkv.shape[1], self.tp, -1, channels)
        num_heads = by_rank.shape[3] - 2 * num_slots
        parts = np.split(by_rank, [num_heads, num_heads + num_slots], axis=3)
        q, k, v = (part.reshape(1, qkv.shape[1], -1, channels) for part in parts)
        return [q, k[:, :, self._first_slots], v[:, :, self._first_slots]]
