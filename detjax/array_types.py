# SPDX-License-Identifier: Apache-2.0
"""Shape and dtype annotations, and the one glossary of axis letters.

Capitals are global sizes; a small letter is this device's, this sequence's or this tile's share of
the same axis (`"B f"` inside `shard_map`, `"B n"` of a page table). In annotations, and in the
docstrings that explain them, one letter has one meaning everywhere. Prose about matrix products
says M, N and K as BLAS does: rows, outputs (`O`) and inputs (`I`).

| letter | axis |
|---|---|
| `A` | parts of a row-parallel sum: leaves, or subtrees of them |
| `B` | requests (sequences) |
| `C` | channels in a head; `half` is C / 2 |
| `D` | model width |
| `E` | gates, then ups: 2 F |
| `F` | feed-forward width |
| `G` | query heads that share one key/value head, H / K |
| `H` | query heads |
| `I` | inputs of a linear layer, over which it sums |
| `J` | heads of queries, keys and values: H + 2 K |
| `K` | key/value heads as stored (replicas included) |
| `L` | layers |
| `M` | rows: B T flattened |
| `N` | pages of the cache |
| `O` | outputs of a linear layer |
| `P` | tokens in a page |
| `Q` | experts of a row, in order of rank |
| `R` | rows that may be all of M or a rank's share |
| `S` | positions, and key tokens |
| `T` | query tokens of one request in this call |
| `U` | experts |
| `V` | vocabulary |
| `X`, `Y` | any axis, of that function alone |
| `Z` | blocks of the vocabulary, or of the tokens of a page |
"""

from typing import TYPE_CHECKING

from jax import Array
from jaxtyping import AbstractDtype, BFloat16, Bool, Float32, Int32, UInt32

if TYPE_CHECKING:
    # What jaxtyping does for its own dtypes: a type checker sees the array type alone.
    from typing import Annotated as Activation
    from typing import Annotated as Cached
else:

    class Activation(AbstractDtype):
        """Weights and activations: bfloat16, or float32 under a float32 profile."""

        dtypes = ["bfloat16", "float32"]

    class Cached(AbstractDtype):
        """Keys and values in the cache: activations, or the bits of float8_e4m3fn."""

        dtypes = ["bfloat16", "float32", "uint8"]


__all__ = [
    "Activation",
    "Array",
    "BFloat16",
    "Bool",
    "Cached",
    "Float32",
    "Int32",
    "UInt32",
]
