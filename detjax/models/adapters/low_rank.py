# SPDX-License-Identifier: Apache-2.0
"""The values of an adapter, and the hash that names it. Needs no JAX, as requests carry it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRank:
    """The adapter of one tensor, or of that of every expert of a layer: `s B A x`.

    Attributes:
        a: [r, I], of the weights' dtype; [U, r, I] of experts.
        b: [O, r], likewise; [U, O, r] of experts.
        scale: s, of all experts.
    """

    a: np.ndarray
    b: np.ndarray
    scale: np.float32

    @property
    def is_of_experts(self) -> bool:
        """Whether it has a matrix for each expert."""
        return self.a.ndim > 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """The adapters of a model's tensors, and a hash that names them.

    Attributes:
        sha256: Of every value as it is computed with, in hexadecimal digits.
        tensors: By layer and name of the tensor in `params.tensor_specs`.
    """

    sha256: str
    tensors: Mapping[tuple[int, str], LowRank]

    @classmethod
    def of(cls, tensors: Mapping[tuple[int, str], LowRank]) -> "Adapter":
        """Name adapters of tensors by their hash."""
        return cls(sha256=_hash(tensors), tensors=dict(tensors))

    @property
    def rank(self) -> int:
        """The highest rank of a tensor that is not of experts; 0 if there is none."""
        return self._rank(is_of_experts=False)

    @property
    def expert_rank(self) -> int:
        """The highest rank of a tensor of experts; 0 if there is none."""
        return self._rank(is_of_experts=True)

    def _rank(self, *, is_of_experts: bool) -> int:
        every = self.tensors.values()
        ranks = (one.a.shape[-2] for one in every if one.is_of_experts == is_of_experts)
        return max(ranks, default=0)


def _hash(tensors: Mapping[tuple[int, str], LowRank]) -> str:
    total = hashlib.sha256()
    for (layer, name), one in sorted(tensors.items()):
        head = f"{layer} {name} {one.a.dtype.name} {one.a.shape} {one.b.shape} "
        total.update(head.encode() + np.float32(one.scale).astype("<f4").tobytes())
        for array in (one.a, one.b):
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()
