# SPDX-License-Identifier: Apache-2.0
"""Make receipts again from their requests, and compare them byte for byte."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detjax.engine.engine import Engine
from detjax.engine.errors import EngineStoppedError, SelfCheckError
from detjax.engine.outputs.completion import Completion, CompletionOutput
from detjax.engine.outputs.request_output import FinishReason, TokenEvent
from detjax.engine.outputs.text_batch import SequenceText, TextBatch
from detjax.engine.requests.checks import RequestLimits
from detjax.engine.requests.request import Request
from detjax.engine.requests.text_request import text_request, token_sampling
from detjax.models.config import ModelConfig
from detjax.models.tokenizer import Tokenizer
from detjax.proof.canonical_json import canonical_json
from detjax.proof.identity import Identity
from detjax.proof.parsing import SECTIONS, shown
from detjax.proof.receipt import Receipt

ALWAYS_EXCUSED = ("build.driver",)
"""A driver runs programs that ptxas has made before it sees them."""
OF_ANOTHER_NAME = ("model.name", "model.hub_commit")
"""May differ where the auditor says what the model is. The weights' hash stands for them."""

_FAILED = re.compile(r"request (\d+): ")
"""How `Engine.generate` begins when it says which request could not go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptDifference:
    """The first difference between a receipt and the one made here.

    Attributes:
        index: Of the receipt, from 0.
        field: Such as `answer.token_ids[3]`.
        receipt: The value in the receipt.
        here: The value that was computed here.
    """

    index: int
    field: str
    receipt: str
    here: str

    def __str__(self) -> str:
        """Return a line for people."""
        said, found = self.receipt, self.here
        return f"receipt {self.index + 1}: {self.field} is {said} in the receipt and {found} here"


@dataclass(frozen=True, kw_only=True, slots=True)
class RerunListener:
    """Who is told how far receipts are checked.

    Attributes:
        on_tokens: Told how many tokens of receipts are done.
        on_receipt: Told the index of each receipt that is done, and its first difference.
    """

    on_tokens: Callable[[int], object] = lambda num_tokens: None
    on_receipt: Callable[[int, ReceiptDifference | None], object] = lambda index, difference: None


def identity_differences(receipt: Receipt, here: Identity) -> Iterator[tuple[str, str, str]]:
    """Return (field, in the receipt, here) for each difference of model, numerics or build."""
    for section in SECTIONS[:3]:
        said, found = (
            _flat(section, getattr(receipt, section)),
            _flat(section, getattr(here, section)),
        )
        for path in sorted(said.keys() | found.keys()):
            if said.get(path) != found.get(path):
                yield path, shown(said.get(path)), shown(found.get(path))


def is_of_build(path: str) -> bool:
    """Whether a field says which build made an answer. The fingerprint covers the build, too."""
    return path.startswith("build.") or path == "numerics.fingerprint"


def identity_fields(of: Receipt | Identity) -> set[str]:
    """The path of each field of model, numerics and build."""
    return {path for section in SECTIONS[:3] for path in _flat(section, getattr(of, section))}


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
    checked_lens: Sequence[int] | None = None,
    listener: RerunListener = RerunListener(),
) -> list[ReceiptDifference]:
    """Make receipts again from their requests, and compare them byte for byte.

    Only the prompt and the sampling are taken from a receipt. The end of the answer, its text,
    hashes and every other field come from the local model. Receipts of one request share an answer.

    Args:
        engine: Of the receipts' model.
        tokenizer: Of the model.
        receipts: Parsed ones.
        identity: Of the model, its numerics and build as they are here.
        config: Of the model.
        has_predictions: Give the engine, which has `has_prompt_lookup`, each answer to verify in
            windows of many tokens through prefill's kernels, noise and filters included. False
            decodes token by token.
        excused: Fields of model, numerics and build that may differ, such as `build.arch`.
        order: Indices of the receipts in the order to ask; None keeps their order.
        checked_lens: How many tokens of each answer to check, from its first. Of an answer with
            more, or of 0, its own tokens show its text and its end, without the model. None checks
            all.
        listener: Told how far it is.

    Returns:
        The first difference of each receipt that has one, in order of the receipts. Every byte of a
        receipt without one was computed here, except its signature, excused fields, and what
        follows from tokens that were not checked.

    Raises:
        ValueError: If an answer does not fit the engine.
    """
    lens = [len(r.token_ids) for r in receipts] if checked_lens is None else checked_lens
    claims = [_Claim(receipts[i], i) for i in (range(len(receipts)) if order is None else order)]
    for claim in claims:
        if lens[claim.index] < len(claim.token_ids):
            claim.compare_end(engine, tokenizer, config)
        if lens[claim.index] and claim.has_ended:
            listener.on_receipt(claim.index, claim.difference)
        claim.has_ended |= not lens[claim.index]
    groups = _by_request([claim for claim in claims if not claim.has_ended])

    def prove(output: CompletionOutput, agreeing: Sequence[_Claim]) -> None:
        made = Receipt.of(identity, output, end_token_ids=config.eos_token_ids)
        for claim in agreeing:
            claim.compare_whole(made, excused)

    num_done = 0

    def advance(answer: _CheckedRequest) -> None:
        nonlocal num_done
        num_done += answer.newly_done()
        listener.on_tokens(num_done)
        if not answer.agreeing:
            for claim in answer.claims:
                listener.on_receipt(claim.index, claim.difference)

    answers: list[_CheckedRequest] = []
    for group in groups.values():
        try:
            request = _request_of(group[0].receipt, engine, tokenizer, config)
        except ValueError as error:
            _refuse(group, error)
            for claim in group:
                listener.on_receipt(claim.index, claim.difference)
            continue
        checked_len = max(lens[claim.index] for claim in group)
        known = group[0].token_ids[:checked_len]
        predicted = _predictable(known, config) if has_predictions else ()
        request = dataclasses.replace(request, predicted_token_ids=predicted)
        answers.append(_CheckedRequest(group, request, prove, checked_len=checked_len))
    while answers:
        _ask(engine, answers, tokenizer, config, advance)
        answers = [answer for answer in answers if answer.agreeing]
    assert all(claim.has_ended for claim in claims), "a receipt was neither proven nor refused"
    found = [claim.difference for claim in claims if claim.difference is not None]
    return sorted(found, key=lambda difference: difference.index)


def _by_request(claims: "Sequence[_Claim]") -> "dict[bytes, list[_Claim]]":
    groups: dict[bytes, list[_Claim]] = {}
    for claim in claims:
        groups.setdefault(canonical_json(claim.receipt.request), []).append(claim)
    return groups


def _ask(
    engine: Engine,
    answers: Sequence["_CheckedRequest"],
    tokenizer: Tokenizer,
    config: ModelConfig,
    advance: "Callable[[_CheckedRequest], None]",
) -> None:
    """Generate answers until all have ended; receipts of an impossible answer are refused.

    Raises:
        ValueError: If an answer does not fit the engine.
    """
    batch = TextBatch(
        [answer.request for answer in answers],
        tokenizer,
        end_ids=config.eos_token_ids,
        fingerprint="",
    )

    def on_token(event: TokenEvent) -> bool:
        answer, text = answers[event.request_idx], batch.sequences[event.request_idx, 0]
        answer.compare(event, at=text.num_tokens)
        is_stopped = batch.on_token(event)
        advance(answer)
        return is_stopped or not answer.agreeing

    def on_completion(done: Completion) -> None:
        answer, text = answers[done.request_idx], batch.sequences[done.request_idx, 0]
        is_cut = done.finish_reason is FinishReason.LENGTH
        is_cut &= len(done.token_ids) < text.sampling.max_tokens
        if answer.agreeing and not is_cut:  # an answer that the engine's own max_len cuts is none
            answer.end(text.end(done))
            advance(answer)

    try:
        engine.generate(batch.token_requests, on_token=on_token, on_completion=on_completion)
    except (EngineStoppedError, SelfCheckError):
        raise
    except (RuntimeError, FloatingPointError) as error:
        failed = _FAILED.match(str(error))
        if failed is None:
            raise
        answers[int(failed[1])].refuse(error)
        advance(answers[int(failed[1])])
        return
    if left := [answer for answer in answers if answer.agreeing]:
        num_tokens = len(left[0].request.prompt_token_ids) + len(left[0].claims[0].token_ids)
        raise ValueError(
            f"receipt {left[0].claims[0].index + 1} has {num_tokens} tokens, more than max_len of "
            "the engine; raise it"
        )


def _refuse(claims: Sequence["_Claim"], error: Exception) -> None:
    """Mark receipts whose request the model refuses."""
    for claim in claims:
        claim.differs("request", "answered", f"refused ({error})")


def _request_of(
    receipt: Receipt, engine: Engine, tokenizer: Tokenizer, config: ModelConfig
) -> Request:
    """Return the receipt's request for this model.

    Raises:
        ValueError: If the model refuses the request.
    """
    sampling = receipt.sampling
    request = text_request(
        receipt.prompt_token_ids,
        dataclasses.replace(sampling, n=1, best_of=0, prompt_logprobs=None),
        what="the prompt",
        limits=RequestLimits.of(config, config.max_position_embeddings),
        is_deterministic=True,
        tokenizer=tokenizer,
        adapter=receipt.adapter,
    )
    as_tokens = dataclasses.replace(request, sampling=token_sampling(request.sampling, tokenizer))
    engine.check_request(as_tokens)
    return request


def _predictable(token_ids: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    """Return the leading tokens that are in the model's vocabulary."""
    unknown = (i for i, token_id in enumerate(token_ids) if token_id >= config.vocab_size)
    return tuple(token_ids[: next(unknown, None)])


class _CheckedRequest:
    """A request, and the receipts that claim its answer.

    Attributes:
        claims: All of them.
        agreeing: Those without a difference so far; none after the last token that is checked.
    """

    def __init__(
        self,
        claims: "list[_Claim]",
        request: Request,
        prove: "Callable[[CompletionOutput, Sequence[_Claim]], None]",
        *,
        checked_len: int,
    ):
        self.claims, self.agreeing, self.request, self._prove = claims, claims, request, prove
        self._checked_len, self._num_compared, self._num_told = checked_len, 0, 0

    def compare(self, event: TokenEvent, *, at: int) -> None:
        """Compare token `at` of the answer; the last of a part ends the comparison."""
        self.agreeing = [claim for claim in self.agreeing if claim.agrees(event, at)]
        self._num_compared = at + 1
        if self._num_compared == self._checked_len:
            for claim in self.agreeing:
                claim.has_ended = len(claim.token_ids) > self._checked_len
            self.agreeing = [claim for claim in self.agreeing if not claim.has_ended]

    def newly_done(self) -> int:
        """Tokens of all claims that were done since the last call; all when none agrees."""
        done = self._num_compared if self.agreeing else self._checked_len
        new, self._num_told = done - self._num_told, done
        return new * len(self.claims)

    def end(self, output: CompletionOutput) -> None:
        """Compare the whole."""
        self._prove(output, self.agreeing)
        self.agreeing = []

    def refuse(self, error: Exception) -> None:
        """Record that the model could not continue."""
        _refuse(self.agreeing, error)
        self.agreeing = []


class _Claim:
    """One receipt, and its first difference.

    Attributes:
        difference: None where there is none so far.
        has_ended: Whether the comparison is complete.
    """

    def __init__(self, receipt: Receipt, index: int):
        self.receipt, self.index = receipt, index
        self.difference: ReceiptDifference | None = None
        self.has_ended = False
        self.token_ids = receipt.token_ids
        self._logprobs, self._top = receipt.logprobs, receipt.top_logprobs

    def compare_end(self, engine: Engine, tokenizer: Tokenizer, config: ModelConfig) -> None:
        """Compare the text and the end with those that the receipt's own tokens make."""
        try:
            request = _request_of(self.receipt, engine, tokenizer, config)
        except ValueError as error:
            _refuse([self], error)
            return
        sampling, count = request.sampling, len(self.token_ids)
        if count > len(_predictable(self.token_ids, config)):
            self.differs("answer.token_ids", "not of the vocabulary", "below its size")
            return
        ends = token_sampling(sampling, tokenizer).end_token_ids(config.eos_token_ids)
        text = SequenceText(
            request, (0, 0), tokenizer=tokenizer, end_ids=config.eos_token_ids, fingerprint=""
        )
        stops = [text.push(token_id) or token_id in ends for token_id in self.token_ids]
        if True in stops[:-1]:
            self.differs("answer.token_ids", f"{count} tokens", f"{stops.index(True) + 1}, the end")
            return
        if not stops[-1] and count != sampling.max_tokens:
            self.differs("answer.token_ids", f"{count} tokens", "not the end of an answer")
            return
        reason = (FinishReason.STOP if stops[-1] else FinishReason.LENGTH).value
        made = {"finish_reason": reason, "text": text.whole()}
        for name, value in made.items():
            if (said := self.receipt.answer[name]) != value:
                self.differs(f"answer.{name}", shown(said), shown(value))
                return

    def compare_whole(self, made: Receipt, excused: Collection[str]) -> None:
        """Compare every byte with the receipt that was made here."""
        said = self.receipt
        here = dataclasses.replace(_excused(made, said, excused), signature=said.signature)
        if here.to_json() != said.to_json():
            difference = said.first_difference(here)
            assert difference is not None, "receipts of equal fields have equal bytes"
            self.differs(*difference)
        self.has_ended = True

    def agrees(self, event: TokenEvent, at: int) -> bool:
        """Whether token `at` and its logprobs equal the receipt's, bit for bit."""
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
        """Record the first difference and return False."""
        self.difference = ReceiptDifference(
            index=self.index, field=field, receipt=receipt, here=here
        )
        self.has_ended = True
        return False


def _excused(made: Receipt, said: Receipt, excused: Collection[str]) -> Receipt:
    """Return the new receipt with the other's values in fields that may differ."""
    for path in excused:
        section, *names = path.split(".")
        values = _taken_over(getattr(made, section), getattr(said, section), names)
        made = dataclasses.replace(made, **{section: values})
    return made


def _taken_over(values: dict[str, Any], others: dict[str, Any], names: Sequence[str]) -> Any:
    """Return values with the others' value of a field, or without it if they have none."""
    name, *rest = names
    if rest:
        if name not in values or name not in others:
            return values
        return values | {name: _taken_over(values[name], others[name], rest)}
    kept = {key: value for key, value in values.items() if key != name}
    return kept | ({name: others[name]} if name in others else {})


def _bits(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def _shown(value: np.float32) -> str:
    return f"{float(value)!r} (0x{_bits(value):08x})"
