# SPDX-License-Identifier: Apache-2.0
"""How many drafts a window has, by what they have gained at this load. No clock: times are told.

A choice moves tokens between steps, and no bit. For each load, and each number of drafts that an
engine can make, it keeps the tokens a second of a sequence. The number that was quickest is used.
Others are tried as long as trials together cost at most a hundredth of the time. Tried at once are
all numbers at the first small load, and at every other load no drafts, where drafts are made. A
large load begins without drafts. Steps that prefill make no trial.
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

MARGIN, LARGE_MARGIN = 1.01, 1.1
"""Drafts must be quicker than none by this factor, at small loads and at larger ones.

A load is up to two times another of its name. Where answers end one after another, what is tried
later is tried with fewer sequences, which are quicker.
"""

FRESH = 0.5
"""Weight of the newest block in a rate."""

SMALL = 5
"""Largest load, as `_size` numbers it, at which drafts are tried with no knowledge: below 32."""

LARGE_COST = 2.0
"""What a step with drafts is believed to cost at larger loads, in steps without."""


@dataclass(kw_only=True, slots=True)
class _Load:
    """What is known at one load; `DraftChoice` alone changes it.

    Attributes:
        is_small: Whether drafts are tried with no knowledge.
        drafts: That windows have now.
        rates: Tokens a second of a sequence, by number of drafts.
        steps_s: Seconds of a step, likewise.
        tried: Numbers of drafts, that tried last at the end.
        settling: Steps that do not count yet.
        seconds: Of the steps of this block.
        tokens: Of a sequence, in each of them.
        trial_steps: Steps of a trial so far, noted or not, if trials pay for this block.
        loss_s: Seconds that each of them is believed to lose.
    """

    is_small: bool
    drafts: int
    rates: dict[int, float] = field(default_factory=dict)
    steps_s: dict[int, float] = field(default_factory=dict)
    tried: list[int] = field(default_factory=list)
    settling: int = SETTLING
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    trial_steps: int = 0
    loss_s: float = 0.0


class DraftChoice:
    """Chooses the drafts of a window for each load, a power of two of sequences that decode."""

    def __init__(self, choices: Sequence[int]):
        """Know nothing yet.

        Args:
            choices: Numbers of drafts that can be made, ascending; 0 among them makes none.
        """
        self._choices = tuple(choices)
        self._loads: dict[int, _Load] = {}
        self._budget_s = 0.0  # what trials may cost still

    def choose(self, num_decoding: int, *, has_prefill: bool = False) -> int:
        """Return the drafts of windows that open now, once for each step.

        Args:
            num_decoding: Sequences that decode.
            has_prefill: Whether the step is believed to prefill, so that nobody notes it.
        """
        load = self._load(num_decoding)
        if has_prefill:
            # WHY: a trial that is never noted never ends. One that the end of 64 answers cut off
            # went on in all 32 steps that read prompts at this load (simulated, 2026-11-29).
            return self._best(load) if 0 in load.rates else self._guess(num_decoding, default=0)
        if load.loss_s:
            load.trial_steps += 1
            self._budget_s -= load.loss_s
        return load.drafts

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
            self._end_block(load, _size(num_decoding))

    def rates(self, num_decoding: int) -> dict[int, float]:
        """Return tokens a second of a sequence at a load, by the drafts that were tried."""
        return dict(self._load(num_decoding).rates)

    def _load(self, num_decoding: int) -> _Load:
        size = _size(num_decoding)
        new = _Load(is_small=size <= SMALL, drafts=self._choices[-1])
        load = self._loads.setdefault(size, new)
        if not load.rates and not load.seconds:
            drafts = self._guess(num_decoding, default=self._choices[-1])
            if drafts != load.drafts:
                load.drafts, load.settling = drafts, SETTLING
        return load

    def _guess(self, num_decoding: int, *, default: int) -> int:
        """Drafts at a load of which nothing is known; `default` if no other load tells."""
        # WHY: while prompts are read, and while answers end, loads are passed in a few steps each.
        # They do the fewer of what the next larger and the next smaller load do that have tried
        # drafts. A small load tells nothing of a large one, where each row of a window costs.
        size = _size(num_decoding)
        known = sorted(s for s, load in self._loads.items() if any(load.rates))
        larger = [s for s in known if s > size][:1]
        if size > SMALL and not larger:
            return 0
        beside = larger + [s for s in known if s < size][-1:]
        return min((self._best(self._loads[s]) for s in beside), default=default)

    def _end_block(self, load: _Load, size: int) -> None:
        """Learn from a block of steps, and say what the next one tries."""
        # WHY: the median of the times, as a step that compiles or waits tells nothing of the next.
        typical_s = statistics.median(load.seconds)
        rate = statistics.fmean(load.tokens) / typical_s
        old = load.rates.get(load.drafts, rate)
        load.rates[load.drafts] = rate = old + FRESH * (rate - old)
        load.steps_s[load.drafts] = typical_s
        load.tried = [one for one in load.tried if one != load.drafts] + [load.drafts]
        self._budget_s += TRIAL_SHARE * sum(load.seconds)
        best = self._best(load)
        if load.trial_steps:
            self._budget_s -= load.trial_steps * (_loss_s(load, load.drafts, best) - load.loss_s)
        load.seconds, load.tokens, load.trial_steps, load.loss_s = [], [], 0, 0.0
        drafts = self._next(load, best, size)
        if drafts != load.drafts:
            load.drafts, load.settling = drafts, SETTLING

    def _best(self, load: _Load) -> int:
        """The quickest, fewer drafts where they are about as quick."""
        margin = MARGIN if load.is_small else LARGE_MARGIN
        best = min(load.rates)
        for drafts in sorted(load.rates):
            if load.rates[drafts] > margin * load.rates[best]:
                best = drafts
        return best

    def _next(self, load: _Load, best: int, size: int) -> int:
        """What is not known yet or was tried longest ago, if trials may cost it; else the best."""
        untried = [drafts for drafts in reversed(self._choices) if drafts not in load.rates]
        if 0 in untried:
            return 0  # second: what drafts gain is known then
        is_first = not any(one.rates for one in self._loads.values() if one is not load)
        if untried and load.is_small and is_first:
            return untried[0]
        others = untried[:1] or [drafts for drafts in load.tried if drafts != best]
        if not others or load.drafts != best:
            return best
        loss_s = self._trial_loss_s(load, others[0], size)
        if self._budget_s < (BLOCK + SETTLING) * loss_s:
            return best
        load.loss_s = loss_s
        return others[0]

    def _trial_loss_s(self, load: _Load, drafts: int, size: int) -> float:
        """Seconds that each step of a trial is believed to lose, by the nearest load that tried."""
        tried = [s for s, one in self._loads.items() if {0, drafts} <= one.rates.keys()]
        tried.sort(key=lambda s: (abs(s - size), -s))
        telling = [s for s in tried if s >= size or load.is_small]
        if telling:
            known = self._loads[telling[0]]
            scale = load.steps_s[0] / known.steps_s[0]
            return scale * _loss_s(known, drafts, self._best(known))
        if load.is_small:  # as what was tried here
            here = (_loss_s(load, one, self._best(load)) for one in load.rates if one)
            return min(here, default=0.0)
        # A smaller load tells what a window commits, and not what it costs.
        known = self._loads[tried[0]] if tried else None
        tokens = 1.0 if known is None else known.rates[drafts] * known.steps_s[drafts]
        return load.steps_s[0] * max(0.0, LARGE_COST - tokens)


def _loss_s(load: _Load, drafts: int, best: int) -> float:
    """Seconds that a step with so many drafts loses at a load, if any."""
    return load.steps_s[drafts] * max(0.0, 1 - load.rates[drafts] / load.rates[best])


def _size(num_decoding: int) -> int:
    """Which load so many sequences are."""
    return max(num_decoding, 1).bit_length()
