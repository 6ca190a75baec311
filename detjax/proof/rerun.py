# SPDX-License-Identifier: Apache-2.0
"""Receipts made again from their requests, and compared byte for byte."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detjax.models.config import ModelConfig
from detjax.models.tokenizer import Tokenizer
from detjax.proof.canonical_json import canonical_json
from detjax.proof.identity import Identity
from detjax.proof.parsing import SECTIONS, shown
from detjax.proof.receipt import Receipt
from detjax.serving.engine import Engine
from detjax.serving.request import Completion, Request, TokenEvent
from detjax.serving.text import (
    CompletionOutput,
    CompletionText,
    TextBatch,
    text_request,
    token_sampling,
)

ALWAYS_EXCUSED = ("build.driver",)
"""A driver runs programs that ptxas has made before it sees them."""
OF_ANOTHER_NAME = ("model.name", "model.hub_commit")
"""May differ where the auditor says what the model is. The weights' hash stands for them."""


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
    """(field, in the receipt, here) where another model, numerics or build made it."""
    for section in SECTIONS[:3]:
        said, found = (
            _flat(section, getattr(receipt, section)),
            _flat(section, getattr(here, section)),
        )
        for path in sorted(said.keys() | found.keys()):
            if said.get(path) != found.get(path):
                yield path, shown(said.get(path)), shown(found.get(path))


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
    identity: Identity,
    config: ModelConfig,
    has_predictions: bool,
    excused: Collection[str] = (),
    order: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda num_ended: None,
) -> list[Difference]:
    """Make receipts again from their requests, and compare them byte for byte.

    Of a receipt only the prompt and the sampling are asked; what ends an answer, its text, hashes
    and every other field come from the model here. Receipts of one request share an answer.

    Args:
        engine: Of the receipts' model.
        tokenizer: Of the model.
        receipts: Whole ones.
        identity: Of the model, its numerics and build as they are here.
        config: Of the model.
        has_predictions: The engine, one with `has_prompt_lookup`, is told each answer, and verifies
            it in windows of many tokens through prefill's kernels, noise and filters included.
            False decodes token by token.
        excused: Fields of model, numerics and build that may differ, such as `build.arch`.
        order: In which to ask, as indices; None is theirs.
        progress: Told how many receipts are done.

    Returns:
        The first difference of each receipt that has one, in order of the receipts. No receipt
        without one has a byte that was not computed here, but for its signature and what is
        excused.

    Raises:
        ValueError: If an answer does not fit the engine.
    """
    groups: dict[bytes, list[_Claim]] = {}
    for i in range(len(receipts)) if order is None else order:
        claim = _Claim(receipts[i], i)
        groups.setdefault(canonical_json(receipts[i].request), []).append(claim)
    answers: list[_Answer] = []
    for claims in groups.values():
        try:
            request = _request_of(claims[0].receipt, engine, tokenizer, config)
        except ValueError as error:
            for claim in claims:
                claim.differs("request", "answered", f"refused ({error})")
            continue
        predicted = _predictable(claims[0].token_ids, config) if has_predictions else ()
        answers.append(_Answer(claims, dataclasses.replace(request, predicted_token_ids=predicted)))
    _make_again(engine, tokenizer, answers, identity, config, excused, progress)
    found = [c.difference for claims in groups.values() for c in claims if c.difference is not None]
    return sorted(found, key=lambda difference: difference.index)


def _make_again(
    engine: Engine,
    tokenizer: Tokenizer,
    answers: Sequence["_Answer"],
    identity: Identity,
    config: ModelConfig,
    excused: Collection[str],
    progress: Callable[[int], None],
) -> None:
    """Ask the engine for each answer, and compare what claims to be its receipt."""
    batch = TextBatch(
        [answer.request for answer in answers],
        tokenizer,
        end_ids=config.eos_token_ids,
        fingerprint=identity.numerics["fingerprint"],
    )
    num_ended = 0

    def on_token(event: TokenEvent) -> bool:
        nonlocal num_ended
        answer, text = answers[event.request_idx], batch.sequences[event.request_idx, 0]
        answer.compare(event, at=text.num_tokens)
        is_stopped = batch.on_token(event)
        if not answer.agreeing or text.finish_reason is not None:
            num_ended += len(answer.claims)
            progress(num_ended)
        return is_stopped or not answer.agreeing

    for done in engine.generate(batch.token_requests, on_token=on_token):
        answer, text = answers[done.request_idx], batch.sequences[done.request_idx, 0]
        if answer.agreeing:
            answer.compare_whole(_output(done, text), identity, config, excused)


def _request_of(
    receipt: Receipt, engine: Engine, tokenizer: Tokenizer, config: ModelConfig
) -> Request:
    """What the receipt was asked, as this model is asked.

    Raises:
        ValueError: If the model cannot be asked that.
    """
    sampling = receipt.sampling
    request = text_request(
        receipt.prompt_token_ids,
        dataclasses.replace(sampling, n=1, best_of=0, num_prompt_logprobs=None),
        what="the prompt",
        vocab_size=config.vocab_size,
        max_len=config.max_position_embeddings,
        limit="the model's context",
        is_deterministic=True,
        tokenizer=tokenizer,
        eos_token_ids=config.eos_token_ids,
    )
    as_tokens = dataclasses.replace(request, sampling=token_sampling(request.sampling, tokenizer))
    engine.check_request(as_tokens)
    return request


def _predictable(token_ids: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    """The first tokens that there are in the model."""
    unknown = (i for i, token_id in enumerate(token_ids) if token_id >= config.vocab_size)
    return tuple(token_ids[: next(unknown, None)])


def _output(done: Completion, text: CompletionText) -> CompletionOutput:
    """The completion with its text.

    Raises:
        ValueError: If it goes on beyond what the engine has room for.
    """
    if text.finish_reason is None:
        num_tokens = len(done.prompt_token_ids) + len(done.token_ids)
        raise ValueError(f"an answer is longer than the engine's {num_tokens} tokens")
    told = text.output()
    assert (told.digest(), told.finish_reason) == (done.digest(), done.finish_reason)
    return dataclasses.replace(told, completion=done)


class _Answer:
    """A request, and the receipts that say what its answer is.

    Attributes:
        claims: All of them.
        agreeing: Those that were right so far.
    """

    def __init__(self, claims: "list[_Claim]", request: Request):
        self.claims, self.agreeing, self.request = claims, claims, request

    def compare(self, event: TokenEvent, *, at: int) -> None:
        """Compare a token, the answer's `at`-th."""
        self.agreeing = [claim for claim in self.agreeing if claim.agrees(event, at)]

    def compare_whole(
        self,
        output: CompletionOutput,
        identity: Identity,
        config: ModelConfig,
        excused: Collection[str],
    ) -> None:
        """Compare every byte of the receipts with those of the answer's."""
        made = Receipt.of(identity, output, end_token_ids=config.eos_token_ids)
        for claim in self.agreeing:
            said = claim.receipt
            here = dataclasses.replace(_excused(made, said, excused), signature=said.signature)
            if here.to_json() == said.to_json():
                continue
            difference = said.first_difference(here)
            assert difference is not None, "receipts of equal fields have equal bytes"
            field, one, two = difference
            claim.differs(field, one, two)


class _Claim:
    """One receipt, and where it was found to be wrong."""

    def __init__(self, receipt: Receipt, index: int):
        self.receipt, self._index = receipt, index
        self.difference: Difference | None = None
        self.token_ids = receipt.token_ids
        self._logprobs, self._top = receipt.logprobs, receipt.top_logprobs

    def agrees(self, event: TokenEvent, at: int) -> bool:
        """Whether the answer's `at`-th token and its logprobs are the receipt's, to the bit."""
        if at >= len(self.token_ids):
            return self.differs("answer.token_ids", f"{at} tokens", "longer")
        if event.token_id != self.token_ids[at]:
            return self.differs(
                f"answer.token_ids[{at}]", str(self.token_ids[at]), str(event.token_id)
            )
        if at >= len(self._logprobs) or _bits(event.logprob) != _bits(self._logprobs[at]):
            said = _shown(self._logprobs[at]) if at < len(self._logprobs) else "missing"
            return self.differs(f"answer.logprobs_f32[{at}]", said, _shown(event.logprob))
        top, said_top = event.top_logprobs, self._top[at] if at < len(self._top) else ()
        if [(t, _bits(v)) for t, v in top] != [(t, _bits(v)) for t, v in said_top]:
            return self.differs(f"answer.top_logprobs[{at}]", shown(said_top), shown(top))
        return True

    def differs(self, field: str, receipt: str, here: str) -> bool:
        """Note the first difference; False."""
        self.difference = Difference(index=self._index, field=field, receipt=receipt, here=here)
        return False


def _excused(made: Receipt, said: Receipt, excused: Collection[str]) -> Receipt:
    """The receipt that was made, with what the other says in fields that may differ."""
    for path in excused:
        section, *names = path.split(".")
        values = _taken_over(getattr(made, section), getattr(said, section), names)
        made = dataclasses.replace(made, **{section: values})
    return made


def _taken_over(values: dict[str, Any], others: dict[str, Any], names: Sequence[str]) -> Any:
    name, *rest = names
    if name not in values or name not in others:
        return values
    new = _taken_over(values[name], others[name], rest) if rest else others[name]
    return values | {name: new}


def _bits(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def _shown(value: np.float32) -> str:
    return f"{float(value)!r} (0x{_bits(value):08x})"
