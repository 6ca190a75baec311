# SPDX-License-Identifier: Apache-2.0
"""Drafts that cost no model: what followed the same tokens earlier in the text."""

from collections.abc import Sequence

import numpy as np

LONGEST, SHORTEST = 4, 2
"""How many last tokens are looked up; fewer match more often and mean less."""


def propose_from_prompt(tokens: Sequence[int], most: int) -> tuple[int, ...]:
    """Return up to `most` tokens that followed the newest earlier copy of the last tokens.

    The longest suffix of 4 to 2 tokens that occurs before counts; nothing if none does.

    Reference:
        Prompt lookup decoding, Saxena 2023; greedy n-gram copy as in Yang et al. 2023,
        arXiv:2304.04487.
    """
    text = np.asarray(tokens, "<i4").tobytes()
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        start = _last_copy(text, text[-4 * length :])
        if start >= 0:
            return tuple(tokens[start + length : start + length + most])
    return ()


def _last_copy(text: bytes, suffix: bytes) -> int:
    """Index of the token at which the newest copy of `suffix`, but the last one, begins; or -1."""
    at = text.rfind(suffix, 0, len(text) - 1)
    while at > 0 and at % 4:  # a match that begins inside a token
        at = text.rfind(suffix, 0, at + len(suffix) - 1)
    return -1 if at < 0 else at // 4
