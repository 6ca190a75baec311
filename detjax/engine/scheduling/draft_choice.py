# SPDX-License-Identifier: Apache-2.0
"""How many drafts a window has, by what they have gained at this load. No clock: times are told.

A choice moves tokens between steps, and no bit. For each load, and each number of drafts that an
engine can make, it keeps the tokens a second of a sequence. The number that was quickest is used.
Others are tried again as long as trials together cost at most a hundredth of the time.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK = 8
"""Steps of a trial."""

SETTLING = 3
"""Steps of a trial that do not count: those before it are still read, or programs are new."""

TRIAL_SHARE = 0.01
"""Most of the time that trials may cost."""

MARGIN = 1.01
"""Drafts must be quicker than none by this factor."""

FRESH = 0.5
"""Weight of the newest block in a rate."""


@dataclass(kw_only=True, slots=True)
class _Load:
    """What is known at one load; `DraftChoice` alone changes it.

    Attributes:
        drafts: That windows have now.
        rates: Tokens a second of a sequence, by number of drafts.
        tried: Numbers of drafts, that tried last at the end.
        settling: Steps that do not count yet.
        seconds: Of the steps of this block.
        tokens: Of a sequence, in each of them.
        budget_s: What trials may cost still.
    """

    drafts: int
    rates: dict[int, float] = field(default_factory=dict)
    tried: list[int] = field(default_factory=list)
    settling: int = SETTLING
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    budget_s: float = 0.0


class DraftChoice:
    """Chooses the drafts of a window for each load, a power of two of sequences that decode."""

    def __init__(self, choices: Sequence[int]):
        """Know nothing yet.

        Args:
            choices: Numbers of drafts that can be made, ascending; 0 among them makes none.
        """
        self._choices = tuple(choices)
        self._loads: dict[int, _Load] = {}

    def choose(self, num_decoding: int) -> int:
        """Return the drafts of windows that open now."""
        return self._load(num_decoding).drafts

    def note(self, num_decoding: int, drafts: int, *, seconds: float, tokens: int) -> None:
        """Note a step that did nothing but decode, draft and verify.

        Args:
            num_decoding: Sequences that decoded when it was scheduled, at least one.
            drafts: As `choose` said then.
            seconds: From the results before to its results.
            tokens: That these committed.
        """
        load = self._load(num_decoding)
        if drafts != load.drafts or seconds <= 0:
            return
        if load.settling:
            load.settling -= 1
            return
        load.seconds.append(seconds)
        load.tokens.append(tokens / num_decoding)
        if len(load.seconds) == BLOCK:
            self._end_block(load)

    def rates(self, num_decoding: int) -> dict[int, float]:
        """Return tokens a second of a sequence at a load, by the drafts that were tried."""
        return dict(self._load(num_decoding).rates)

    def _load(self, num_decoding: int) -> _Load:
        size = max(num_decoding, 1).bit_length()
        load = self._loads.setdefault(size, _Load(drafts=self._choices[-1]))
        if not load.rates and not load.seconds:
            drafts = self._untried(size)
            if drafts != load.drafts:
                load.drafts, load.settling = drafts, SETTLING
        return load

    def _untried(self, size: int) -> int:
        """What to do at a load of which nothing is known: the fewer of what its neighbours do.

        WHY: while prompts are read loads rise by a few steps each, none of which is noted. With the
        most drafts there, 64 answers of 256 tokens took 2 to 8 % longer than without any (H200).
        """
        known = sorted(s for s, load in self._loads.items() if load.rates)
        beside = [s for s in known if s < size][-1:] + [s for s in known if s > size][:1]
        return min((self._best(self._loads[s]) for s in beside), default=self._choices[-1])

    def _end_block(self, load: _Load) -> None:
        """Learn from a block of steps, and say what the next one tries."""
        # WHY: the median of the times, as a step that compiles or waits tells nothing of the next.
        typical_s = statistics.median(load.seconds)
        rate = statistics.fmean(load.tokens) / typical_s
        old = load.rates.get(load.drafts, rate)
        load.rates[load.drafts] = rate = old + FRESH * (rate - old)
        load.tried = [one for one in load.tried if one != load.drafts] + [load.drafts]
        spent_s = sum(load.seconds)
        load.budget_s += TRIAL_SHARE * spent_s
        best = self._best(load)
        if load.drafts != best:
            load.budget_s -= spent_s * (1 - rate / max(load.rates[best], rate))
        load.seconds, load.tokens = [], []
        drafts = self._next(load, best, (BLOCK + SETTLING) * typical_s)
        if drafts != load.drafts:
            load.drafts, load.settling = drafts, SETTLING

    def _best(self, load: _Load) -> int:
        """The quickest, fewer drafts where they are about as quick."""
        best = min(load.rates)
        for drafts in sorted(load.rates):
            if load.rates[drafts] > MARGIN * load.rates[best]:
                best = drafts
        return best

    def _next(self, load: _Load, best: int, trial_s: float) -> int:
        """What is not known yet, then what trials may still cost, else the best."""
        untried = [drafts for drafts in reversed(self._choices) if drafts not in load.rates]
        if untried:
            # No drafts second: what they gain is known then.
            return untried[-1] if 0 in untried else untried[0]
        oldest = next((drafts for drafts in load.tried if drafts != best), best)
        cost_s = trial_s * (1 - load.rates[oldest] / load.rates[best])
        return oldest if load.drafts == best and load.budget_s >= max(cost_s, 0.0) else best
