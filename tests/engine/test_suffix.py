# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding drafts what most often followed the longest suffix, and forgets what ended."""

import numpy as np
import pytest

from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import Sequence
from detjax.engine.scheduling.drafters import SuffixDecoding
from detjax.engine.scheduling.suffix import MOST_PLACES, SuffixOptions, TextIndex

OPTIONS = SuffixOptions()


def index_of(*texts) -> TextIndex:
    index = TextIndex()
    for text in texts:
        index.extend(text)
        index.end_text()
    return index


def sequence(tokens, *, request_id=0, salt="", answer=()) -> Sequence:
    request = Request(prompt_token_ids=tuple(tokens), sampling=SamplingParams(), cache_salt=salt)
    seq = Sequence(
        request_id=request_id, sequence_idx=0, request=request, sampling=request.sampling,
        is_drafted=False, is_canonical=True, max_len=1000,
    )  # fmt: skip
    seq.tokens += answer
    return seq


def brute_force(text, options, most) -> tuple[int, ...]:
    """The same from the definition: all places of all suffixes."""
    for length in range(min(options.max_depth, len(text) - 1), 1, -1):
        places = [i for i in range(length, len(text)) if text[i - length : i] == text[-length:]]
        if places:
            break
    else:
        return ()
    drafts, share = [], 1.0
    while len(drafts) < min(most, int(options.max_factor * length)):
        at = len(drafts)
        nexts = [text[p + at] for p in reversed(places) if p + at < len(text)]
        if not nexts:
            break
        token = max(dict.fromkeys(nexts), key=nexts.count)
        share *= nexts.count(token) / len(places)
        if share < options.min_share:
            break
        drafts.append(token)
        places = [p for p in places if p + at < len(text) and text[p + at] == token]
    return tuple(drafts)


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_is_that_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    options = SuffixOptions(
        max_depth=int(rng.integers(2, 9)), max_cached=0,
        max_factor=float(rng.choice([0.5, 1.0, 3.0])), min_share=float(rng.choice([0.0, 0.3])),
    )  # fmt: skip
    drafter, seq = SuffixDecoding(options), sequence(rng.integers(0, 3, 5).tolist())
    for _ in range(60):
        seq.tokens.append(int(rng.integers(0, 3)))
        if len(seq.tokens) < MOST_PLACES:  # the definition sees all places
            expected = brute_force(seq.tokens, options, 6)
            assert (drafter.draft(seq, 6) or ()) == expected, seq.tokens


def test_the_longest_suffix_counts_before_the_most_frequent_one():
    index = index_of([1, 2, 3, 9], [2, 3, 5], [2, 3, 5], [2, 3, 5])
    assert index.continuation([1, 2, 3], 1, OPTIONS).token_ids == (9,)
    assert index.continuation([8, 2, 3], 1, OPTIONS).token_ids == (5,)


def test_a_draft_ends_where_places_disagree_or_the_suffix_was_short():
    index = index_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6])
    options = SuffixOptions(min_share=0.5)
    assert index.continuation([1, 2], 9, options).token_ids == (3,)
    assert index.continuation([1, 2], 9, SuffixOptions(min_share=0.3)).token_ids == (3, 6)
    assert index.continuation([1, 2], 9, SuffixOptions(max_factor=0.5)).token_ids == (3,)


def test_no_draft_spans_two_texts_and_none_comes_of_nothing():
    index = index_of([1, 2], [3, 4])
    assert index.continuation([1, 2], 4, OPTIONS).token_ids == ()
    assert index.continuation([2, 3], 4, OPTIONS).token_ids == ()
    assert index.continuation([7], 4, OPTIONS).token_ids == ()
    assert TextIndex().continuation([], 4, OPTIONS).token_ids == ()


def test_answers_are_drafted_from_in_requests_of_the_same_salt_alone():
    drafter = SuffixDecoding()
    drafter.end(sequence([0], salt="a", answer=[1, 2, 3, 4]))
    assert drafter.draft(sequence([9, 1, 2], request_id=1, salt="a"), 2) == (3, 4)
    assert drafter.draft(sequence([9, 1, 2], request_id=2, salt="b"), 2) is None


def test_the_oldest_answers_are_forgotten_and_texts_with_their_sequence():
    drafter = SuffixDecoding(SuffixOptions(max_cached=4))
    for i in range(10):
        seq = sequence([50], request_id=i, answer=[2 * i, 2 * i + 1, 99])
        drafter.draft(seq, 1)
        drafter.end(seq)
    assert not drafter._texts

    def known(i):
        return drafter.draft(sequence([2 * i, 2 * i + 1], request_id=99), 1) == (99,)

    assert known(9) and not known(0)
    assert sum(known(i) for i in range(10)) <= 4


def test_the_index_of_a_long_text_stays_small():
    index = TextIndex()
    index.extend([1, 2] * 5000)
    assert max(map(len, index._places.values())) <= 2 * MOST_PLACES
    assert index.continuation([1, 2] * 20, 8, OPTIONS).token_ids == (1, 2) * 4
