# SPDX-License-Identifier: Apache-2.0
"""A receipt: one answer and everything that made it, as a line of canonical JSON.

`docs/receipts.md` specifies every field.
"""

import base64
import binascii
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from detjax.engine.outputs.completion import (
    DIGEST_SHOWN,
    CollectedTokens,
    Completion,
    CompletionOutput,
    shortened,
)
from detjax.engine.outputs.request_output import FinishReason, TopLogprobs
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.proof.canonical_json import canonical_json
from detjax.proof.identity import Identity, bits_fingerprint
from detjax.proof.parsing import (
    FORMAT,
    MAX_LINE_BYTES,
    SECTIONS,
    ReceiptError,
    hashes,
    leaves,
    parse,
    shown,
)
from detjax.proof.signing import Signature, SignatureError, SigningKey

MAX_FILE_BYTES = 1 << 30
"""Of a file of receipts, which are all held at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One answer and what made it.

    Attributes:
        model: As `Identity` has it.
        numerics: As `Identity` has it.
        build: As `Identity` has it.
        request: `prompt_token_ids`; `sampling`, every field of `SamplingParams` as it was used, of
            this sequence alone (`n` is 1, `best_of` 0, `noise_stream` says which) and without
            logprobs of the prompt (`prompt_logprobs` is null), the seed as a decimal string;
            `end_token_ids`, the model's own; `is_deterministic`, true; `adapter`, the hash of the
            adapter that answered, if there was one.
        answer: `token_ids`; `logprobs_f32`, base64 of little-endian float32; `top_logprobs`, null
            or `{"ids": [[...]], "logprobs_f32": ...}`; `finish_reason`; `text`; `digest`.
        signature: Of the bytes of all others, or None.
    """

    model: dict[str, Any]
    numerics: dict[str, Any]
    build: dict[str, Any]
    request: dict[str, Any]
    answer: dict[str, Any]
    signature: Signature | None = None

    def __repr__(self) -> str:
        """One short line, for notebooks; `to_json` has every field."""
        signer = None if self.signature is None else self.signature.public_key
        return (
            f"Receipt(model={self.model['name']!r}, text={shortened(self.answer['text'])!r}, "
            f"num_tokens={len(self.answer['token_ids'])}, "
            f"digest={self.answer['digest'][:DIGEST_SHOWN]!r}, signed_by={signer!r})"
        )

    @classmethod
    def of(
        cls, identity: Identity, output: CompletionOutput, *, end_token_ids: Iterable[int]
    ) -> "Receipt":
        """Make the receipt of an answer, without a signature.

        Args:
            identity: Of the model, with the weights that made the answer.
            output: The answer.
            end_token_ids: The model's own end tokens.

        Raises:
            ValueError: If the answer is not canonical, which nobody could check, if it did not end,
                or if it has no tokens.
        """
        done = output.completion
        if not output.is_deterministic:
            raise ValueError(
                "a receipt was asked for an answer that is not canonical: nobody could check it; "
                "ask with is_deterministic=True, and not in mode 'fast'"
            )
        if identity.model["weights"] is None:
            raise ValueError(
                "receipts name the hash of the weights, and in a job of several processes none has "
                "them all; ask in a single process"
            )
        if done.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise ValueError(f"the answer did not end: {done.finish_reason.value}")
        if not done.token_ids:
            raise ValueError(
                "the answer has no tokens, and a receipt holds no logprobs of the prompt; ask with "
                "max_tokens of 1 or more"
            )
        return cls(
            model=identity.model,
            numerics=identity.numerics,
            build=identity.build,
            request=_request_values(
                done.prompt_token_ids,
                output.sampling,
                done.sequence_idx,
                end_token_ids,
                output.adapter,
            ),
            answer=_answer_values(done, output.text),
        )

    # ------------------------------------------------------------------------------------- in, out

    def signed(self, key: SigningKey) -> "Receipt":
        """Return this receipt with a signature."""
        return dataclasses.replace(self, signature=key.sign(canonical_json(self._unsigned())))

    def to_json(self) -> str:
        """Write the receipt as one line of RFC 8785: the same receipt has the same bytes."""
        values = self._unsigned()
        if self.signature is not None:
            values["signature"] = dataclasses.asdict(self.signature)
        return canonical_json(values).decode()

    @classmethod
    def from_json(cls, line: str | bytes) -> "Receipt":
        """Read a receipt and check that it is complete and spelled as `to_json` spells it.

        Args:
            line: With or without the newline that ends a line.

        Raises:
            ReceiptError: If a byte of it was changed: names the field.
            SignatureError: If it is signed, and the signature is not of these bytes.
        """
        try:
            raw = (line.encode() if isinstance(line, str) else line).removesuffix(b"\n")
        except UnicodeEncodeError as error:
            raise ReceiptError(f"the receipt is not Unicode ({error.reason})") from error
        values = parse(raw)
        receipt = cls(
            **{name: values[name] for name in SECTIONS},
            signature=_signature_of(values.pop("signature")) if "signature" in values else None,
        )
        receipt._check_spelling()
        if receipt.signature is not None:
            receipt.signature.check(canonical_json(values))
        if (spelled := receipt.to_json().encode()) != raw:
            at = next((i for i, (a, b) in enumerate(zip(raw, spelled, strict=False)) if a != b), -1)
            at = min(len(raw), len(spelled)) if at < 0 else at
            raise ReceiptError(
                f"the receipt is not canonical JSON (RFC 8785): from byte {at} it is "
                f"{raw[at : at + 20]!r}, and would be {spelled[at : at + 20]!r}"
            )
        return receipt

    def _unsigned(self) -> dict[str, Any]:
        values: dict[str, Any] = {"format": FORMAT}
        values |= {name: getattr(self, name) for name in SECTIONS}
        return values | {"sha256": hashes(values)}

    # --------------------------------------------------------------------------------- what it says

    @property
    def bits(self) -> str:
        """See `identity.bits_fingerprint`: no field, as it follows from those that are there."""
        return bits_fingerprint(self.model, self.numerics, self.build)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Of the request."""
        return tuple(self.request["prompt_token_ids"])

    @property
    def sampling(self) -> SamplingParams:
        """As it was used."""
        values = self.request["sampling"]
        return SamplingParams.from_dict(values | {"seed": int(values["seed"])})

    @property
    def adapter(self) -> str:
        """Hash of the adapter that answered; "" is the model alone."""
        return self.request.get("adapter", "")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the answer."""
        return tuple(self.answer["token_ids"])

    @property
    def logprobs(self) -> np.ndarray:
        """Float32, one for each token of the answer."""
        return _float32(self.answer["logprobs_f32"])

    @property
    def top_logprobs(self) -> tuple[TopLogprobs, ...]:
        """Of each token's position; empty where none were asked for."""
        found = self.answer["top_logprobs"]
        if found is None:
            return tuple(() for _ in self.token_ids)
        values = iter(_float32(found["logprobs_f32"]))
        return tuple(tuple(zip(ids, values, strict=False)) for ids in found["ids"])

    def first_difference(self, other: "Receipt") -> tuple[str, str, str] | None:
        """Return (field, here, in the other) of the first field that differs, or None."""
        pairs = ({s: getattr(r, s) for s in SECTIONS} for r in (self, other))
        mine, others = (dict(leaves(values)) for values in pairs)
        # The digest is last: where it differs, so does what it is of.
        for path in sorted(mine.keys() | others.keys(), key=lambda p: (p == "answer.digest", p)):
            one, two = ([at[path]] if path in at else [] for at in (mine, others))
            if canonical_json(one) != canonical_json(two):
                here, there = (shown(repr(at[0])) if at else "missing" for at in (one, two))
                return path, here, there
        return None

    def _check_spelling(self) -> None:
        """Refuse values that do not fit each other, and spellings that `of` does not write."""
        answer, seed = self.answer, self.request["sampling"].get("seed")
        if not isinstance(seed, str) or not re.fullmatch("[0-9]{1,20}", seed):
            raise ReceiptError(f"request.sampling.seed is {shown(repr(seed))}, which is no number")
        try:
            sampling = self.sampling
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ReceiptError(
                f"request.sampling is damaged: {shown(f'{type(error).__name__}: {error}')}"
            ) from error
        try:
            tokens = CollectedTokens(
                token_ids=list(self.token_ids),
                logprobs=list(self.logprobs),
                top_logprobs=list(self.top_logprobs),
            )
            completion = tokens.completion(
                self.prompt_token_ids,
                request_idx=0,
                sequence_idx=0,
                finish_reason=FinishReason(answer["finish_reason"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ReceiptError(f"the receipt is damaged: {shown(str(error))}") from error
        count = len(completion.token_ids)
        for name, ids in (
            ("request.prompt_", completion.prompt_token_ids),
            ("answer.", completion.token_ids),
        ):
            if not ids:
                raise ReceiptError(f"{name}token_ids is empty")
        if len(completion.logprobs) != count:
            raise ReceiptError(
                f"answer.logprobs_f32 has {len(completion.logprobs)} logprobs for {count} tokens"
            )
        if len(completion.top_logprobs) != count:
            raise ReceiptError(
                f"answer.top_logprobs has {len(completion.top_logprobs)} positions for {count} "
                "tokens"
            )
        spelled = dataclasses.replace(
            self,
            request=_request_values(
                completion.prompt_token_ids,
                sampling,
                0,
                self.request["end_token_ids"],
                self.adapter,
            ),
            answer=_answer_values(completion, answer["text"]),
        )
        if (found := self.first_difference(spelled)) is not None:
            path, said, right = found
            raise ReceiptError(f"{path} is {said}, and in a receipt of the rest it is {right}")


def read_receipts(path: Path) -> list[Receipt]:
    """Read a file of receipts, one a line.

    Raises:
        ReceiptError: If one is damaged, naming the line and the field, or the file is longer than
            1 GiB.
        OSError: If the file cannot be read.
    """
    receipts = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            receipts.append(Receipt.from_json(line))
        except (ReceiptError, SignatureError) as error:
            raise ReceiptError(f"{path} line {number}: {error}") from error
    if not receipts:
        raise ReceiptError(f"{path} has no receipts")
    return receipts


def _lines(path: Path) -> Iterator[bytes]:
    """Yield lines; a line that is too long is not read to its end."""
    num_bytes = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 2):
            num_bytes += len(line)
            if num_bytes > MAX_FILE_BYTES:
                raise ReceiptError(f"{path} is longer than 1 GiB; divide it")
            yield line


# ------------------------------------------------------------------------------------------- values


def _request_values(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    sequence_idx: int,
    end_token_ids: Iterable[int],
    adapter: str,
) -> dict[str, Any]:
    """Return the request for one sequence alone."""
    alone = dataclasses.replace(
        sampling,
        n=1,
        best_of=0,
        noise_stream=sampling.noise_stream + sequence_idx,
        prompt_logprobs=None,
    )
    return {
        "prompt_token_ids": list(prompt_token_ids),
        "sampling": alone.as_dict() | {"seed": str(alone.seed or 0)},
        "end_token_ids": sorted(set(end_token_ids)),
        "is_deterministic": True,
        **({"adapter": adapter} if adapter else {}),
    }


def _answer_values(done: Completion, text: str) -> dict[str, Any]:
    return {
        "token_ids": list(done.token_ids),
        "logprobs_f32": _float32_text(done.logprobs),
        "top_logprobs": _top_values(done.top_logprobs),
        "finish_reason": done.finish_reason.value,
        "text": text,
        "digest": done.digest(),
    }


def _signature_of(value: Any) -> Signature:
    names = {field.name for field in dataclasses.fields(Signature)}
    if not isinstance(value, dict) or set(value) != names:
        raise ReceiptError(f"signature must have {sorted(names)} and nothing else")
    return Signature(**value)


def _float32_text(values: Sequence[np.float32]) -> str:
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()


def _float32(text: str) -> np.ndarray:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    except (binascii.Error, ValueError, TypeError) as error:
        raise ReceiptError(f"logprobs_f32 is not base64 of float32 ({error})") from error


def _top_values(top: Sequence[TopLogprobs]) -> dict[str, Any] | None:
    if not any(top):
        return None
    values = [value for position in top for _, value in position]
    return {
        "ids": [[token_id for token_id, _ in position] for position in top],
        "logprobs_f32": _float32_text(values),
    }
