# SPDX-License-Identifier: Apache-2.0
"""Full canonical pages, found by what they hold, so that a prefix is computed once.

A page's key is a hash of its tokens and of the key of the page before it. The first parent names
weights, numerics, adapter and tenant.
"""

import hashlib
from collections import abc
from collections.abc import Iterator

import numpy as np

from detjax.engine.requests.sequence import Sequence
from detjax.engine.scheduling.kv_cache import PagePool
from detjax.engine.scheduling.local_pages import LocalPages


def page_key(parent: bytes, token_ids: abc.Sequence[int]) -> bytes:
    """Name the content of a full page: its tokens and, through `parent`, all tokens before it.

    The parent of a sequence's first page names the weights and the numerics. Keys and values of
    canonical pages depend on nothing else.
    """
    hasher = hashlib.sha256(parent)
    hasher.update(np.asarray(token_ids, "<i4").tobytes())
    return hasher.digest()


def salted_root(root_key: bytes, salt: str) -> bytes:
    """Parent of the first pages of requests with this salt; `root_key` itself where it is empty."""
    if not salt:
        return root_key
    return hashlib.sha256(root_key + salt.encode(errors="surrogatepass")).digest()


def adapted_root(root_key: bytes, adapter: str) -> bytes:
    """Parent of the first pages of requests with this adapter; `root_key` itself without one."""
    if not adapter:
        return root_key
    # WHY: begins unlike what a salt is hashed with, which a client may choose.
    return hashlib.sha256(b"adapter " + adapter.encode() + root_key).digest()


class PrefixCache:
    """The shared pages of one replica."""

    def __init__(
        self,
        pool: PagePool,
        *,
        local: LocalPages | None,
        page_len: int,
        root_key: bytes,
        is_enabled: bool,
    ):
        """Know no page yet.

        Args:
            pool: Of the replica; it keeps which page has which key.
            local: What local layers have of its pages; None where that is all of them.
            page_len: Tokens of a page.
            root_key: Names the weights and numerics that pages are computed with.
            is_enabled: Whether anything is shared at all.
        """
        self._pool, self._local, self._page_len = pool, local, page_len
        self._root_key, self._is_enabled = root_key, is_enabled
        # Pages that the prefills of the batch being scheduled will write. WHY: found at once.
        # Whoever reads them in this batch is in the same launch, which writes all keys and values
        # of a layer before any row attends to them.
        self._coming: dict[bytes, int] = {}

    @property
    def has_coming(self) -> bool:
        """Whether pages are announced whose launch is not known to have happened."""
        return bool(self._coming)

    # ------------------------------------------------------------------------------------- finding

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Return the pages of the longest prefix of a sequence that is there."""
        pages = []
        for index in range(self._max_matched(seq)):
            page = self._pool.find(self._key(seq, index))
            if page is None:
                break
            pages.append(page)
        return pages if self._local is None else pages[: self._local.longest_prefix(pages)]

    def extend_prefix(self, seq: Sequence) -> int:
        """Give a sequence the pages that another has filled since it was admitted.

        Returns:
            How many of its tokens need not be computed now.
        """
        before, page_len = seq.num_prefilled, self._page_len
        while seq.num_prefilled % page_len == 0:
            index = seq.num_prefilled // page_len
            if index >= self._max_matched(seq):
                break
            key = self._key(seq, index)
            page = self._pool.find(key)
            page = self._coming.get(key) if page is None else page
            if page is None or not (self._local is None or self._local.has(page)):
                break
            self._pool.share([page])
            self._pool.free([seq.pages[index]])
            seq.pages[index] = page
            if self._local is not None:
                at = seq.num_prefilled
                seq.held = self._local.move(seq.pages, seq.held, (at, at))
            seq.num_registered = index + 1
            seq.num_prefilled += page_len
        return seq.num_prefilled - before

    def _max_matched(self, seq: Sequence) -> int:
        """Pages that may come from others: not those of tokens whose logits are needed.

        That is the last token, and those whose successors' logprobs are wanted and not known.
        """
        known = len(seq.tokens) - 1 if seq.is_scored else len(seq.prompt_logprobs)
        return known // self._page_len if self._is_enabled else 0

    def _key(self, seq: Sequence, index: int) -> bytes:
        """Name page `index` of a sequence, whose tokens must be there."""
        while len(seq.page_keys) <= index:
            start = len(seq.page_keys) * self._page_len
            if seq.page_keys:
                parent = seq.page_keys[-1]
            else:
                root = adapted_root(self._root_key, seq.request.adapter)
                parent = salted_root(root, seq.request.cache_salt)
            seq.page_keys.append(page_key(parent, seq.tokens[start : start + self._page_len]))
        return seq.page_keys[index]

    # --------------------------------------------------------------------------------- registering

    def announce(self, seq: Sequence, num_tokens: int) -> None:
        """Let others of this batch find the pages that a prefill of it fills up to `num_tokens`."""
        for key, page in self._take_unregistered(seq, num_tokens):
            self._coming.setdefault(key, page)

    def register_announced(self) -> None:
        """Let everybody find what was announced: it has been launched."""
        for key, page in self._coming.items():
            self._register(key, page)
        self._coming = {}

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Let everybody find the pages that `num_tokens` canonical tokens fill."""
        for key, page in self._take_unregistered(seq, num_tokens):
            self._register(key, page)

    def _register(self, key: bytes, page: int) -> None:
        known = self._pool.find(key)
        if known not in (None, page) and self._local is not None and not self._local.has(known):
            self._pool.unregister(known)  # whose content is that of `page`, less the local layers'
        self._pool.register(page, key)

    def _take_unregistered(self, seq: Sequence, num_tokens: int) -> Iterator[tuple[bytes, int]]:
        """Keys and pages that `num_tokens` tokens fill and nobody was told of, who is told now."""
        if not self._is_enabled:
            return
        for index in range(seq.num_registered, num_tokens // self._page_len):
            yield self._key(seq, index), seq.pages[index]
            seq.num_registered = index + 1

    # ---------------------------------------------------------------------------------- forgetting

    def drop_announced(self) -> None:
        """Forget what was announced: it was not launched."""
        self._coming = {}

    def clear(self) -> None:
        """Forget every page, as they are of other weights than those to come."""
        self._pool.forget()
        if self._local is not None:
            self._local.clear_idle()
