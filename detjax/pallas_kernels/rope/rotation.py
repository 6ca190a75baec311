# SPDX-License-Identifier: Apache-2.0
"""What turns the heads of queries and keys."""

from typing import NamedTuple

from detjax.array_types import Activation, Array, Cached, Float32, Int32


class Rotation(NamedTuple):
    """Angles of some tokens, and the gains of the norms before they are applied.

    Attributes:
        cos: Rows of the host's table, one a token. Where queries have other angles than keys,
            theirs stand behind those of keys: [M, 2 half].
        sin: Likewise.
        gains: Of the norms of queries and of keys, in the dtype of the heads; None for models
            without these norms.
    """

    cos: Float32[Array, "M half"]
    sin: Float32[Array, "M half"]
    gains: tuple[Activation[Array, " C"], Activation[Array, " C"]] | None = None


def angles_of_keys(rows: Float32[Array, "M X"], channels: int) -> Float32[Array, "M half"]:
    """Cosines or sines of a rotation that turn keys of so many channels."""
    return rows[:, : channels // 2]


def angles_of_queries(rows: Float32[Array, "M X"], channels: int) -> Float32[Array, "M half"]:
    """Those that turn queries: the same, unless the rotation has two."""
    return rows[:, rows.shape[1] - channels // 2 :]


def num_query_heads(
    qkv: Activation[Array, "M J C"], pages: Cached[Array, "L N 2 K P C"], num_heads: int | None
) -> int:
    """How many heads are queries: `num_heads`, or all that are neither keys nor values.

    Raises:
        ValueError: If there are not so many.
    """
    found = qkv.shape[1] - 2 * pages.shape[3]
    if num_heads is not None and num_heads > found:
        raise ValueError(f"{num_heads=} must be at most {found}: {qkv.shape=}, {pages.shape=}")
    return found if num_heads is None else num_heads


def num_gated_heads(
    qkv: Activation[Array, "M J C"], pages: Cached[Array, "L N 2 K P C"], is_gated: bool
) -> int:
    """How many heads are queries where as many gates stand behind the values, if there are gates.

    Raises:
        ValueError: If gates are not as many as queries.
    """
    found = num_query_heads(qkv, pages, None)
    if not is_gated:
        return found
    if found % 2:
        raise ValueError(f"{qkv.shape=} must have a gate for each query head: {pages.shape=}")
    return found // 2


def check_tokens(
    qkv: Activation[Array, "M J C"],
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    gains: tuple[Activation[Array, " C"], Activation[Array, " C"]] | None,
    pages: Cached[Array, "L N 2 K P C"],
    page_table: Int32[Array, "B n"],
    positions: Int32[Array, "B T"],
) -> None:
    """Refuse heads of other tokens than those of the rotation and of the place in the cache."""
    if not qkv.shape[0] == cos.shape[0] == sin.shape[0] == positions.size:
        raise ValueError(
            f"{qkv.shape=}, {cos.shape=} and {sin.shape=} must have a row for each of "
            f"{positions.shape=}"
        )
    half = qkv.shape[2] // 2
    if cos.shape != sin.shape or cos.shape[1] not in (half, 2 * half):
        raise ValueError(f"{cos.shape=} and {sin.shape=} must have {half} angles, or {2 * half}")
    if page_table.shape[0] != positions.shape[0]:
        raise ValueError(f"{page_table.shape=} must have a row for each of {positions.shape=}")
