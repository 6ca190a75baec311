# SPDX-License-Identifier: Apache-2.0
"""Shape and dtype annotations, and the one glossary of axis letters.

Capitals are global sizes; a small letter is this device's or this tile's share of the same axis
(`"B f"` inside `shard_map`, `"bm bk"` inside a kernel). One letter has one meaning everywhere.

| letter | axis |
|---|---|
| `B` | requests (sequences) |
| `T` | query tokens of one request in this call |
| `M` | rows: `B * T` flattened |
| `S` | key tokens |
| `D` | model width |
| `H` | query heads |
| `K` | key/value heads as stored (replicas included); in a linear layer, the contracted axis |
| `G` | query heads that share one key/value head, `H / K` |
| `C` | channels in a head |
| `F` | feed-forward width |
| `V` | vocabulary |
| `L` | layers; in a linear layer, the leaves of its sum |
| `N` | pages of the cache; in a linear layer, the outputs |
| `P` | tokens in a page |
"""

from typing import TYPE_CHECKING

from jax import Array
from jaxtyping import AbstractDtype, BFloat16, Bool, Float32, Int32, UInt32

if TYPE_CHECKING:
    # What jaxtyping does for its own dtypes: a type checker sees the array type alone.
    from typing import Annotated as Activation
else:

    class Activation(AbstractDtype):
        """Weights and activations: bfloat16, or float32 under a float32 profile."""

        dtypes = ["bfloat16", "float32"]


__all__ = ["Activation", "Array", "BFloat16", "Bool", "Float32", "Int32", "UInt32"]
