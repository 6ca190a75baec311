# SPDX-License-Identifier: Apache-2.0
"""Some answers again, by prefill, while the engine has nothing else to do.

A token that was made in company, on shared pages, after drafts, is made again by prefill of all
that comes before it, alone, on pages of its own that the prefix cache has no part in.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from detjax.engine.config import ReplicaConfig
from detjax.engine.metrics import EngineStats
from detjax.engine.requests.request_states import CommittedToken
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import NOTHING_HELD, HeldPages, Sequence
from detjax.engine.running.launch_operands import PrefillOperands, unpack_choice
from detjax.engine.running.model_runner import ModelRunner
from detjax.engine.running.program_key import ProgramKey, choice_of
from detjax.engine.sampling.sampling import SamplingRows
from detjax.engine.scheduling.kv_cache import PagePool
from detjax.engine.scheduling.local_pages import LocalPages
from detjax.engine.self_check.claim import Claim
from detjax.engine.self_check.evidence import CheckDifference
from detjax.engine.self_check.program_check import checkable_keys
from detjax.engine.self_check.rows import scratch_slots

SHARE = 0.01
"""Of the time of all steps, that checking again may take."""
MAX_KEPT = 8
"""Tokens that wait to be checked again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReleasedToken:
    """A token that was released, and all before it."""

    before: tuple[int, ...]
    token_id: int
    logprob: np.float32
    sampling: tuple[SamplingParams, int]
    is_filtered: bool


@dataclass(kw_only=True, slots=True)
class _UnderWay:
    """A check that has begun: on which pages of which replica, and how far it is.

    Attributes:
        held: Which of its pages local layers have.
    """

    answer: _ReleasedToken
    key: ProgramKey
    replica: int
    pages: list[int]
    held: HeldPages = NOTHING_HELD
    num_done: int = 0


class Rechecks:
    """Keeps a few tokens of answers, and checks them when asked to."""

    def __init__(
        self,
        config: ReplicaConfig,
        *,
        runner: ModelRunner,
        pools: Callable[[], list[PagePool]],
        local_pages: Callable[[], list[LocalPages | None]],
        claim: Claim,
        stats: EngineStats,
    ):
        """Begin with nothing to check.

        Args:
            config: Of each replica.
            runner: Launches prefills.
            pools: The pages of each replica.
            local_pages: What local layers have of them; None where that is all.
            claim: Is told what differs.
            stats: Where checks are counted.
        """
        self._config, self._runner, self._pools = config, runner, pools
        # An engine that shares the programs may have others, with other page tables.
        self._checkable = frozenset(checkable_keys(config))
        self._local_pages = local_pages
        self._claim, self._stats = claim, stats
        self._waiting: deque[_ReleasedToken] = deque()
        self._under_way: _UnderWay | None = None
        self._num_launches = 0
        self._rng = np.random.default_rng(0)

    # ------------------------------------------------------------------------------------- offering

    @property
    def is_hungry(self) -> bool:
        """Whether `offer` has any effect."""
        return (
            self._config.self_check == "always"
            and len(self._waiting) < MAX_KEPT
            and self._credit_s > 0
        )

    @property
    def _credit_s(self) -> float:
        return SHARE * self._stats.step_s.total - self._stats.recheck_s

    def offer(self, seq: Sequence, tokens: list[CommittedToken]) -> None:
        """Take one of the tokens that a canonical sequence releases now, drawn at random."""
        if not (self.is_hungry and seq.is_canonical and seq.request.is_deterministic):
            return
        if seq.adapter is not None:  # scratch slots have none
            return
        if seq.request.sampling.is_adjusted:  # what was generated counts, and a prompt does not
            return
        token = tokens[self._rng.integers(len(tokens))]
        self._waiting.append(
            _ReleasedToken(
                before=tuple(seq.tokens[: token.position]),
                token_id=token.token_id,
                logprob=token.logprob,
                sampling=(seq.sampling, seq.sequence_idx),
                is_filtered=seq.is_filtered,
            )
        )

    # ------------------------------------------------------------------------------------- checking

    def advance(self) -> bool:
        """Check a chunk of what waits, and wait for the result.

        Returns:
            Whether there is more to do now.
        """
        if self._under_way is None and not self._begin():
            return False
        begin_s = time.perf_counter()
        assert self._under_way is not None
        self._run_chunk(self._under_way)
        self._num_launches += 1
        self._stats.recheck_s += time.perf_counter() - begin_s
        return self._under_way is not None or bool(self._waiting)

    def give_up(self) -> None:
        """Give the pages of a check under way back, as a request has come."""
        if self._under_way is not None:
            self._stats.num_rechecks_given_up += 1
            self._end()

    def forget(self) -> None:
        """Drop everything, as pages were taken from everybody or the weights are others."""
        self._waiting.clear()
        self._under_way = None

    def _begin(self) -> bool:
        """Take pages for the first that waits and is not too long for now; whether there is one."""
        chunk_s = self._stats.step_s.quantile(0.5)
        if self._num_launches:
            chunk_s = self._stats.recheck_s / self._num_launches
        for answer in tuple(self._waiting):
            key = self._key(answer)
            if key is None or -(-len(answer.before) // key.length) * chunk_s > self._credit_s:
                continue
            pool = max(self._pools(), key=lambda pool: pool.num_available)
            count = -(-len(answer.before) // self._config.page_len)
            if count > pool.num_available:
                continue
            self._waiting.remove(answer)
            self._under_way = _UnderWay(
                answer=answer,
                key=key,
                replica=self._pools().index(pool),
                pages=pool.allocate(count),
            )
            return True
        return False

    def _key(self, answer: _ReleasedToken) -> ProgramKey | None:
        """The compiled prefill that wastes least on it."""
        found = [
            key
            for key in self._runner.programs
            if key.kind == "prefill" and key in self._checkable and not key.leaves_hidden
        ]
        count = len(answer.before)
        return min(found, key=lambda k: -(-count // k.length) * k.length * k.rows, default=None)

    def _run_chunk(self, check: _UnderWay) -> None:
        key, config = check.key, self._config
        operands = PrefillOperands.padding(
            config.num_replicas * key.rows,
            no_slot=config.num_slots,
            table_len=key.table_len,
            length=key.length,
            num_tables=config.num_tables,
        )
        at, start = check.replica * key.rows, check.num_done
        ids = check.answer.before[start : start + key.length]
        operands.start[at], operands.count[at] = start, len(ids)
        operands.token_ids[at, : len(ids)] = ids
        operands.page_table[at, : len(check.pages)] = check.pages
        if (local := self._local_pages()[check.replica]) is not None:
            last = start + len(ids) - 1
            check.held = local.move(check.pages, check.held, (start, last))
            held = check.held
            operands.local_table[at, held.first :][: len(held.local_pages)] = held.local_pages
        rows = [(SamplingParams(), 0)] * len(operands.slot)
        rows[at] = check.answer.sampling
        slots, sampling = scratch_slots(config)
        choice = choice_of(is_filtered=True, num_top=0) if check.answer.is_filtered else None
        if choice is not None:
            operands.slot[at] = 0  # of the scratch slots: a choice program finds the row by it
        _, result = self._runner.run_check(
            key, slots, sampling, operands.pack(), SamplingRows.pack(rows), choice=choice
        )
        packed = np.asarray(result).reshape(config.num_replicas, -1, result.shape[-1])
        check.num_done += len(ids)
        if check.num_done == len(check.answer.before):
            self._compare(check, packed[check.replica, :1])
            self._end()

    def _compare(self, check: _UnderWay, packed: np.ndarray) -> None:
        answer, choice = check.answer, unpack_choice(packed, 0)
        want = int(choice.token_ids[0]), choice.logprobs[0]
        is_same = answer.token_id == want[0] and answer.logprob.tobytes() == want[1].tobytes()
        self._stats.num_rechecked += 1
        if is_same or np.isnan(want[1]):
            return
        self._claim.note(
            [
                CheckDifference(
                    program="answer",
                    row=-1,
                    position=len(answer.before),
                    token_ids=(*answer.before, answer.token_id),
                    sampling=answer.sampling,
                    what="token and logprob",
                    found=_hex(answer.token_id, answer.logprob),
                    expected=_hex(*want),
                )
            ]
        )

    def _end(self) -> None:
        check, self._under_way = self._under_way, None
        assert check is not None
        if (local := self._local_pages()[check.replica]) is not None:
            local.release(check.pages[check.held.first :][: len(check.held.local_pages)])
        self._pools()[check.replica].free(check.pages)


def _hex(token_id: int, logprob: np.float32) -> str:
    """As a packed choice begins."""
    return f"{token_id:08x},{np.float32(logprob).view(np.uint32):08x}"
