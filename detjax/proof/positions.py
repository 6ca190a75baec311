# SPDX-License-Identifier: Apache-2.0
"""Draw positions of answers to check, in a way that anyone can repeat."""

import dataclasses
import hashlib
import heapq
from collections.abc import Sequence

from detjax.proof.receipt import Receipt


def receipt_hash(receipt: Receipt) -> str:
    """SHA-256 of a receipt's line without its signature, in hexadecimal digits.

    Receipts that differ in their signature alone say the same, so they have one hash.
    """
    unsigned = dataclasses.replace(receipt, signature=None)
    return hashlib.sha256(unsigned.to_json().encode()).hexdigest()


def first_of_copies(receipts: Sequence[Receipt]) -> list[bool]:
    """Return whether each receipt is the first of its `receipt_hash`; the others are copies."""
    firsts: dict[str, int] = {}
    return [firsts.setdefault(receipt_hash(one), i) == i for i, one in enumerate(receipts)]


def draw_positions(receipts: Sequence[Receipt], count: int, seed: str) -> list[tuple[int, int]]:
    """Draw tokens of answers, every one of all different receipts alike.

    Drawn are the tokens with the smallest SHA-256 of `SEED RECEIPT POSITION`: the seed, the
    `receipt_hash`, and the token's number in the answer, from 0. The order of the receipts has no
    effect, and of copies only the first is drawn from. Whoever made the receipts before the seed
    was known could not choose what is drawn.

    Args:
        receipts: Any, copies among them.
        count: How many to draw; all tokens if there are not more.
        seed: Any text, such as the value of a public beacon.

    Returns:
        (index of the receipt, position) of each, in ascending order.
    """

    def rank(place: tuple[int, int]) -> bytes:
        index, position = place
        return hashlib.sha256(f"{seed} {names[index]} {position}".encode()).digest()

    # WHY: copies have equal ranks. With 20 copies of each of 10 true receipts all of 20 draws fell
    # on one token, and 100 forged receipts in the same file passed with 23 of 300 seeds.
    names = [receipt_hash(receipt) for receipt in receipts]
    firsts = {name: i for i, name in reversed(list(enumerate(names)))}
    places = ((i, at) for i in firsts.values() for at in range(len(receipts[i].token_ids)))
    return sorted(heapq.nsmallest(count, places, key=rank))


def checked_lens(num_receipts: int, drawn: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many tokens of each answer are checked: those up to its last drawn position.

    The keys and values of all of them are computed for that one in any case.
    """
    lens = [0] * num_receipts
    for index, position in drawn:
        lens[index] = max(lens[index], position + 1)
    return lens
