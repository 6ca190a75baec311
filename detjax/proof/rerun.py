# SPDX-License-Identifier: Apache-2.0
"""Receipts run again, and every bit compared: as they were made, or by prefill alone."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detjax.models.tokenizer import Tokenizer
from detjax.proof.identity import Identity
from detjax.proof.receipt import SECTIONS, Receipt
from detjax.serving.engine import Engine
from detjax.serving.request import Request, TokenEvent
from detjax.serving.text import CompletionText

NOT_COMPARED = ("model.name", "model.hub_commit", "build.driver")
"""The weights' hash stands for the first two. A driver runs programs that ptxas has made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place where a receipt and what came out here differ.

    Attributes:
        index: Of the receipt, from 0.
        field: Such as `answer.token_ids[3]`.
        receipt: What the receipt says.
        here: What came out.
    """

    index: int
    field: str
    receipt: str
    here: str

    def __str__(self) -> str:
        """Return a line for people."""
        said, found = self.receipt, self.here
        return f"receipt {self.index + 1}: {self.field} is {said} in the receipt and {found} here"


def identity_differences(receipt: Receipt, here: Identity) -> Iterator[tuple[str, str, str]]:
    """(field, in the receipt, here) where another model, other numerics or another build made it.

    The fields of `NOT_COMPARED` are left out.
    """
    for section in SECTIONS[:3]:
        said, found = (
            _flat(section, getattr(receipt, section)),
            _flat(section, getattr(here, section)),
        )
        for path in sorted(said.keys() | found.keys()):
            if path not in NOT_COMPARED and said.get(path) != found.get(path):
                yield path, str(said.get(path)), str(found.get(path))


def _flat(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        path = f"{prefix}.{name}"
        flat |= _flat(path, value) if isinstance(value, dict) else {path: value}
    return flat


def rerun(
    engine: Engine,
    tokenizer: Tokenizer,
    receipts: Sequence[Receipt],
    *,
    has_predictions: bool,
    order: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda num_ended: None,
) -> list[Difference]:
    """Ask an engine what the receipts were asked, and compare every token and logprob.

    Args:
        engine: Of the receipts' model; `identity_differences` says whether it is.
        tokenizer: Of the model.
        receipts: Whole ones.
        has_predictions: The engine, one with `has_prompt_lookup`, is told each answer, and verifies
            it in windows of many tokens through prefill's kernels, noise and filters included.
            False decodes token by token.
        order: In which to ask, as indices; None is theirs.
        progress: Told how many receipts are done.

    Returns:
        The first difference of each receipt that has one, in order of the receipts.

    Raises:
        ValueError: If a receipt does not fit the engine.
    """
    order = range(len(receipts)) if order is None else order
    watches = [_Watch(receipts[i], i, tokenizer, has_predictions=has_predictions) for i in order]
    num_ended = 0

    def on_token(event: TokenEvent) -> bool:
        nonlocal num_ended
        watch = watches[event.request_idx]
        is_over = watch.on_token(event)
        if watch.has_ended:
            num_ended += 1
            progress(num_ended)
        return is_over

    engine.generate([watch.request for watch in watches], on_token=on_token)
    found = [watch.difference for watch in watches if watch.difference is not None]
    return sorted(found, key=lambda difference: difference.index)


class _Watch:
    """One receipt while its answer is made again."""

    def __init__(
        self, receipt: Receipt, index: int, tokenizer: Tokenizer, *, has_predictions: bool
    ):
        self.difference: Difference | None = None
        self._receipt, self._index = receipt, index
        self._token_ids, self._logprobs = receipt.token_ids, receipt.logprobs
        self._top = receipt.top_logprobs
        sampling = receipt.sampling
        self._text = CompletionText(
            Request(prompt_token_ids=receipt.prompt_token_ids, sampling=sampling),
            request_idx=0,
            sequence_idx=0,
            tokenizer=tokenizer,
            end_ids=receipt.request["end_token_ids"],
            fingerprint="",
        )
        self.request = Request(
            prompt_token_ids=receipt.prompt_token_ids,
            sampling=dataclasses.replace(sampling, stop=()),
            predicted_token_ids=self._token_ids if has_predictions else (),
        )

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is wanted."""
        return self.difference is not None or self._text.finish_reason is not None

    def on_token(self, event: TokenEvent) -> bool:
        """Compare a token; True ends the sequence."""
        i = self._text.num_tokens
        if i >= len(self._token_ids):
            return self._differs("answer.token_ids", f"{i} tokens", "longer")
        if event.token_id != self._token_ids[i]:
            return self._differs(
                f"answer.token_ids[{i}]", str(self._token_ids[i]), str(event.token_id)
            )
        if _bits(event.logprob) != _bits(self._logprobs[i]):
            return self._differs(
                f"answer.logprobs_f32[{i}]", _shown(self._logprobs[i]), _shown(event.logprob)
            )
        top = event.top_logprobs
        if [(t, _bits(v)) for t, v in top] != [(t, _bits(v)) for t, v in self._top[i]]:
            return self._differs(f"answer.top_logprobs[{i}]", str(self._top[i]), str(top))
        is_stopped = self._text.push(event)
        return (self._text.finish_reason is not None and self._compare_end()) or is_stopped

    def _compare_end(self) -> bool:
        reason, text = self._text.finish_reason, "".join(self._text.pieces)
        assert reason is not None
        said = self._receipt.answer
        if self._text.num_tokens < len(self._token_ids):
            return self._differs(
                "answer.token_ids", f"{len(self._token_ids)} tokens", f"{self._text.num_tokens}"
            )
        if reason.value != said["finish_reason"]:
            return self._differs("answer.finish_reason", said["finish_reason"], reason.value)
        if text != said["text"]:
            return self._differs("answer.text", repr(said["text"]), repr(text))
        return False

    def _differs(self, field: str, receipt: str, here: str) -> bool:
        self.difference = Difference(index=self._index, field=field, receipt=receipt, here=here)
        return True


def _bits(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def _shown(value: np.float32) -> str:
    return f"{float(value)!r} (0x{_bits(value):08x})"
