# SPDX-License-Identifier: Apache-2.0
"""Sources of drafts on the host, which make them of what a sequence has so far.

Drafts on the device come from decode steps with other weights: see `EngineConfig.draft_weights`.
Every draft is verified in the same way, so a source decides how fast an answer comes and no bit.
"""

from typing import Protocol, runtime_checkable

from detjax.engine.requests.sequence import Sequence
from detjax.engine.scheduling.ngram import propose_from_prompt
from detjax.engine.scheduling.suffix import SuffixOptions, TextIndex


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts.

    Attributes:
        name: Under which its drafts are counted.
    """

    name: str

    def draft(self, seq: Sequence, most: int) -> tuple[int, ...] | None:
        """Draft what follows the tokens of a sequence, all of which are committed.

        Args:
            seq: Must not be changed.
            most: Tokens that are used at most; a longer draft is cut.

        Returns:
            Token ids of the vocabulary; others end the sequence with an error. Empty verifies a
            window without drafts. None leaves the sequence to the next source, or to decoding.
        """
        ...


class PromptLookup:
    """What followed the newest earlier copy of the last tokens."""

    name = "ngram"

    def draft(self, seq: Sequence, most: int) -> tuple[int, ...] | None:
        """Draft by `propose_from_prompt`."""
        return propose_from_prompt(seq.tokens, most)[:most] or None


@runtime_checkable
class FollowsSequences(Protocol):
    """A source that keeps something of each sequence, and is told when one has ended."""

    def end(self, seq: Sequence) -> None:
        """Note that a sequence will not be drafted again. It may never have been drafted."""
        ...


class SuffixDecoding:
    """What most often followed the longest suffix of the text, there or in earlier answers.

    Answers are shared between requests of one cache salt alone.
    """

    name = "suffix"

    def __init__(self, options: SuffixOptions | None = None):
        """Know no text yet."""
        self._options = options or SuffixOptions()
        self._texts: dict[tuple[int, int], TextIndex] = {}
        # The newer half of the answers and the older one, which is forgotten first.
        self._answers: list[dict[str, TextIndex]] = [{}, {}]
        self._num_answers = 0

    def draft(self, seq: Sequence, most: int) -> tuple[int, ...] | None:
        """Draft by the better of what the own text and earlier answers have."""
        index = self._texts.setdefault((seq.request_id, seq.sequence_idx), TextIndex())
        index.extend(seq.tokens[len(index) :])
        salt = seq.request.cache_salt
        indices = [index, *(half[salt] for half in self._answers if salt in half)]
        found = [one.continuation(seq.tokens, most, self._options) for one in indices]
        return max(found, key=lambda one: one.score).token_ids or None

    def end(self, seq: Sequence) -> None:
        """Keep the answer, and forget the text."""
        self._texts.pop((seq.request_id, seq.sequence_idx), None)
        if not self._options.max_cached or not seq.num_outputs:
            return
        answers = self._answers[0].setdefault(seq.request.cache_salt, TextIndex())
        answers.extend(seq.output_ids)
        answers.end_text()
        self._num_answers += 1
        if 2 * self._num_answers >= self._options.max_cached:
            self._answers, self._num_answers = [{}, self._answers[0]], 0


class Predictions:
    """What the request predicts to follow, as long as it has been right.

    A prediction is verified to its end: the last token by a window without drafts.
    """

    name = "prediction"

    def draft(self, seq: Sequence, most: int) -> tuple[int, ...] | None:
        """Draft the rest of `predicted_token_ids`."""
        predicted = seq.request.predicted_token_ids
        made = seq.tokens[len(seq.request.prompt_token_ids) :]
        is_right = len(made) < len(predicted) and tuple(made) == predicted[: len(made)]
        return predicted[len(made) :][:most] if is_right else None


HOST_DRAFTERS: tuple[Drafter, ...] = (Predictions(), PromptLookup())
"""Sources of an engine with `has_prompt_lookup`, the first to answer first."""
