# SPDX-License-Identifier: Apache-2.0
"""Draw positions of answers to check, in a way that anyone can repeat."""

import hashlib
import heapq
from collections.abc import Sequence

from detjax.proof.receipt import Receipt


def receipt_hash(receipt: Receipt) -> str:
    """SHA-256 of a receipt's line, in hexadecimal digits."""
    return hashlib.sha256(receipt.to_json().encode()).hexdigest()


def draw_positions(receipts: Sequence[Receipt], count: int, seed: str) -> list[tuple[int, int]]:
    """Draw tokens of answers, every one of all receipts alike.

    Drawn are the tokens with the smallest SHA-256 of `SEED RECEIPT POSITION`: the seed, the hash of
    the receipt's line, and the token's number in the answer, from 0. The order of the receipts
    has no effect. Whoever made the receipts before the seed was known could not choose what is
    drawn.

    Args:
        receipts: Different ones.
        count: How many to draw; all tokens if there are not more.
        seed: Any text, such as the value of a public beacon.

    Returns:
        (index of the receipt, position) of each, in ascending order.
    """

    def rank(place: tuple[int, int]) -> bytes:
        index, position = place
        return hashlib.sha256(f"{seed} {names[index]} {position}".encode()).digest()

    names = [receipt_hash(receipt) for receipt in receipts]
    places = ((i, at) for i, receipt in enumerate(receipts) for at in range(len(receipt.token_ids)))
    return sorted(heapq.nsmallest(count, places, key=rank))


def checked_lens(num_receipts: int, drawn: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many tokens of each answer are checked: those up to its last drawn position.

    The keys and values of all of them are computed for that one in any case.
    """
    lens = [0] * num_receipts
    for index, position in drawn:
        lens[index] = max(lens[index], position + 1)
    return lens
