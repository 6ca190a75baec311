# SPDX-License-Identifier: Apache-2.0
"""What a program is checked with: tokens at positions around boundaries, on pages of the cache.

No prompt is needed: a step attends to whatever the pages before its position hold, and prefill of
the same token on the same pages has the same bits to give.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.numerics import NumericsProfile

SAMPLING = (
    (SamplingParams(temperature=1.0, seed=2**63 + 5, noise="common"), 3),
    (SamplingParams(), 0),
    (SamplingParams(temperature=0.8, seed=2**33 + 1, noise="common"), 0),
)
FILTERED = (
    (SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=2**63 + 5, noise="common"), 3),
    (SamplingParams(), 0),
    # WHY: so small a nucleus that a token too many in it is chosen half of the time.
    (SamplingParams(temperature=0.8, min_p=0.02, top_p=0.02, seed=2**33 + 1, noise="common"), 0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A sequence that is nobody's.

    Attributes:
        position: Of its first new token.
        token_ids: New tokens, as many as the longest program takes.
        other_ids: Others, each unlike the one in its place: what lies in the cache before a test.
        sampling: Parameters, and the index of the noise stream.
    """

    position: int
    token_ids: tuple[int, ...]
    other_ids: tuple[int, ...]
    sampling: tuple[SamplingParams, int]


def make_probes(
    *,
    num_positions: int,
    num_new: int,
    vocab_size: int,
    profile: NumericsProfile,
    is_filtered: bool,
) -> list[Probe]:
    """Probes for tables of `num_positions` tokens, the most telling first.

    Args:
        num_positions: Most that a sequence may have.
        num_new: Tokens that a program may compute of a probe, at most `num_positions`.
        vocab_size: Of the model.
        profile: Says where blocks and splits begin.
        is_filtered: Whether top-k, top-p and min-p are used.
    """
    page, split = profile.attention_block, profile.attention_split
    last = num_positions - num_new
    rng = np.random.default_rng([17, num_positions, num_new])
    # The end of the table, keys at the end of a page and of a split, the first of the next, the
    # middle. What begins at the end of a page goes on in the next one.
    wanted = (last, page - 1, split, last // 2 // page * page - 1, split - 1, 1)
    positions = list(dict.fromkeys(p for p in wanted if 0 <= p <= last))
    kinds = FILTERED if is_filtered else SAMPLING
    probes = []
    for i, position in enumerate(positions):
        ids = rng.integers(0, vocab_size, num_new)
        others = (ids + rng.integers(1, max(vocab_size, 2), num_new)) % vocab_size
        probes.append(
            Probe(
                position=position,
                token_ids=tuple(ids.tolist()),
                other_ids=tuple(others.tolist()),
                sampling=kinds[i % len(kinds)],
            )
        )
    return probes


@dataclass(frozen=True, kw_only=True, slots=True)
class IdlePages:
    """Pages that nobody holds, of the cache or of its local layers.

    Attributes:
        pages: int32 [dp, m], as their replica counts them; alike in number on each.
        num_pages: All pages of a replica.
    """

    pages: np.ndarray
    num_pages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPages:
    """Pages that probes may write, alike on every replica.

    Attributes:
        tables: int32 [dp, K, n], pages as their replica counts them.
        written: int32 [dp, K, w], the pages that each may write; the last again where it has fewer.
        spare: int32 [dp, m], further pages that may be written.
    """

    tables: np.ndarray
    written: np.ndarray
    spare: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement(PlacedPages):
    """Probes on pages of the cache.

    Attributes:
        probes: K of them.
        local: Their pages of local layers; None where they have those of the others.
    """

    probes: tuple[Probe, ...]
    local: PlacedPages | None = None

    @property
    def places(self) -> list[PlacedPages]:
        """The pages of the cache, and those of local layers where they have their own."""
        return [self] if self.local is None else [self, self.local]


def pages_written(probe: Probe, page_len: int) -> range:
    """Which pages of its table a probe's new tokens are put in."""
    last = probe.position + len(probe.token_ids) - 1
    return range(probe.position // page_len, last // page_len + 1)


def place_probes(
    probes: Sequence[Probe],
    idle: IdlePages,
    *,
    num_company: int,
    table_len: int,
    page_len: int,
    local: IdlePages | None = None,
) -> tuple[Placement | None, list[Probe]]:
    """Give as many probes as there is room for pages of their own.

    What lies before a probe's new tokens is on pages that are anybody's, which are only read:
    drawn from the whole cache, its first and its last page included.

    Args:
        probes: In this order.
        idle: Pages that nobody holds.
        num_company: Further pages that may be written, at most.
        table_len: Pages of a table.
        page_len: Tokens of a page.
        local: The same of local layers; None where they have the pages of the others.

    Returns:
        The placement, None if there is no room for the first; and the probes that are left over.
    """
    pools = [idle] if local is None else [idle, local]
    num_used, placed = 0, []
    for probe in probes:
        count = len(pages_written(probe, page_len))
        # A page is left that is only read, where anything lies before the written pages.
        does_read = any(its.position >= page_len for its in (*placed, probe))
        room = min(min(p.pages.shape[1], p.num_pages - does_read) for p in pools)
        if num_used + count > room:
            break
        num_used += count
        placed.append(probe)
    if not placed:
        return None, list(probes)
    # At most half of what is left, so that there is something to read that nobody writes.
    num_spare = min(min(p.pages.shape[1] - num_used, (p.num_pages - num_used) // 2) for p in pools)
    num_spare = min(num_company, num_spare)
    first, *others = (
        _lay_out(placed, p, num_used, num_spare, table_len=table_len, page_len=page_len)
        for p in pools
    )
    placement = Placement(
        probes=tuple(placed), tables=first.tables, written=first.written, spare=first.spare,
        local=others[0] if others else None,
    )  # fmt: skip
    return placement, list(probes[len(placed) :])


def _lay_out(
    placed: Sequence[Probe],
    idle: IdlePages,
    num_used: int,
    num_spare: int,
    *,
    table_len: int,
    page_len: int,
) -> PlacedPages:
    """Give probes the first `num_used` idle pages, and any others to read."""
    num_replicas = len(idle.pages)
    width = max(len(pages_written(probe, page_len)) for probe in placed)
    tables = np.zeros((num_replicas, len(placed), table_len), np.int32)
    written = np.zeros((num_replicas, len(placed), width), np.int32)
    for replica in range(num_replicas):
        own, taken = idle.pages[replica, :num_used], 0
        ours = idle.pages[replica, : num_used + num_spare]
        others = np.setdiff1d(np.arange(idle.num_pages, dtype=np.int32), ours)
        for k, probe in enumerate(placed):
            rng = np.random.default_rng([replica, k, idle.num_pages])
            at = pages_written(probe, page_len)
            if len(others):
                drawn = rng.choice(others, at.start)
                drawn[:2] = (others[-1], others[0])[: len(drawn)]
                tables[replica, k, : at.start] = drawn
            pages = own[taken : taken + len(at)]
            tables[replica, k, at.start : at.stop] = pages
            written[replica, k] = np.pad(pages, (0, width - len(pages)), mode="edge")
            taken += len(at)
    spare = idle.pages[:, num_used : num_used + num_spare]
    return PlacedPages(tables=tables, written=written, spare=spare)
