# SPDX-License-Identifier: Apache-2.0
"""Sources of drafts on the host, which make them of what a sequence has so far.

Drafts on the device come from decode steps with other weights: see `EngineConfig.draft_weights`.
Every draft is verified in the same way, so a source decides how fast an answer comes and no bit.
"""

from typing import Protocol, runtime_checkable

from detjax.engine.requests.sequence import Sequence
from detjax.engine.scheduling.ngram import propose_from_prompt


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
