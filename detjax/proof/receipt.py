# SPDX-License-Identifier: Apache-2.0
"""A receipt: one answer and everything that made it, as a line of canonical JSON.

`docs/receipts.md` specifies every field.
"""

import base64
import binascii
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from detjax.proof.canonical_json import canonical_json
from detjax.proof.identity import Identity
from detjax.proof.signing import Signature, SignatureError, SigningKey
from detjax.serving.request import Completion, FinishReason, SamplingParams, TopLogprobs
from detjax.serving.text import CompletionOutput

FORMAT = "detjax-receipt/1"
SECTIONS = ("model", "numerics", "build", "request", "answer")
_KEYS = ("format", *SECTIONS, "sha256")
_FIELDS = {
    "request": (
        "end_token_ids", "is_deterministic", "prompt_token_ids", "sampling", "weight_version",
    ),
    "answer": ("digest", "finish_reason", "logprobs_f32", "text", "token_ids", "top_logprobs"),
}  # fmt: skip


class ReceiptError(ValueError):
    """A receipt that is not whole: the message names the field that was changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One answer and what made it.

    Attributes:
        model: As `Identity` has it.
        numerics: As `Identity` has it.
        build: As `Identity` has it.
        request: `prompt_token_ids`; `sampling`, every field of `SamplingParams` as it was used, of
            this sequence alone (`n` is 1, `noise_stream` says which) and without logprobs of the
            prompt (`prompt_logprobs` is null), the seed as a decimal string;
            `end_token_ids`, the model's own; `is_deterministic`; `weight_version`.
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

    @classmethod
    def of(
        cls, identity: Identity, output: CompletionOutput, *, end_token_ids: Sequence[int]
    ) -> "Receipt":
        """The receipt of an answer, not signed.

        Args:
            identity: Of the model, with the weights that made the answer.
            output: The answer.
            end_token_ids: The model's own end tokens.

        Raises:
            ValueError: If the answer is not canonical, and so cannot be checked by anybody, it did
                not end, or it has no tokens.
        """
        done, sampling = output.completion, output.sampling
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
        values = dataclasses.replace(
            sampling,
            n=1,
            noise_stream=sampling.noise_stream + done.sequence_idx,
            prompt_logprobs=None,
        ).as_dict()
        return cls(
            model=identity.model,
            numerics=identity.numerics,
            build=identity.build,
            request={
                "prompt_token_ids": list(done.prompt_token_ids),
                "sampling": values | {"seed": str(sampling.seed or 0)},
                "end_token_ids": sorted(end_token_ids),
                "is_deterministic": True,
                "weight_version": done.weight_version,
            },
            answer={
                "token_ids": list(done.token_ids),
                "logprobs_f32": _float32_text(done.logprobs),
                "top_logprobs": _top_values(done.top_logprobs),
                "finish_reason": done.finish_reason.value,
                "text": output.text,
                "digest": done.digest(),
            },
        )

    # ------------------------------------------------------------------------------------- in, out

    def signed(self, key: SigningKey) -> "Receipt":
        """The same with a signature."""
        return dataclasses.replace(self, signature=key.sign(canonical_json(self._unsigned())))

    def to_json(self) -> str:
        """The receipt as one line, RFC 8785: the same receipt has the same bytes."""
        values = self._unsigned()
        if self.signature is not None:
            values["signature"] = dataclasses.asdict(self.signature)
        return canonical_json(values).decode()

    @classmethod
    def from_json(cls, line: str | bytes) -> "Receipt":
        """Read a receipt and check that it is whole.

        Raises:
            ReceiptError: If a byte of it was changed: names the field.
            SignatureError: If it is signed, and the signature is not of these bytes.
        """
        raw = line.encode() if isinstance(line, str) else line
        values = _parse(raw.strip())
        _check_keys(values)
        signature = values.pop("signature", None)
        _check_hashes(values)
        receipt = cls(
            **{name: values[name] for name in SECTIONS}, signature=_signature_of(signature)
        )
        receipt._check_fields()
        if receipt.signature is not None:
            receipt.signature.check(canonical_json(values))
        if canonical_json(receipt._all()) != raw.strip():
            raise ReceiptError("the receipt is not canonical JSON (RFC 8785)")
        return receipt

    def _all(self) -> dict[str, Any]:
        signature = self.signature
        values = self._unsigned()
        return (
            values if signature is None else values | {"signature": dataclasses.asdict(signature)}
        )

    def _unsigned(self) -> dict[str, Any]:
        values: dict[str, Any] = {"format": FORMAT}
        values |= {name: getattr(self, name) for name in SECTIONS}
        return values | {"sha256": _hashes(values)}

    # --------------------------------------------------------------------------------- what it says

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
        return tuple(tuple((i, next(values)) for i in ids) for ids in found["ids"])

    def _check_fields(self) -> None:
        """Refuse fields that do not fit each other."""
        for section, names in _FIELDS.items():
            if tuple(sorted(getattr(self, section))) != names:
                raise ReceiptError(f"{section} has {sorted(getattr(self, section))}, not {names}")
        try:
            completion = Completion(
                request_idx=0,
                sequence_idx=0,
                prompt_token_ids=self.prompt_token_ids,
                token_ids=self.token_ids,
                logprobs=tuple(self.logprobs),
                top_logprobs=self.top_logprobs,
                finish_reason=FinishReason(self.answer["finish_reason"]),
            )
            sampling = self.sampling
        except (ValueError, TypeError, KeyError, StopIteration, RuntimeError) as error:
            raise ReceiptError(f"the receipt is damaged: {error}") from error
        if sampling.prompt_logprobs is not None:
            raise ReceiptError(
                f"request.sampling.prompt_logprobs is {sampling.prompt_logprobs}, and a "
                "receipt holds no logprobs of the prompt; it must be null"
            )
        if len(completion.logprobs) != len(completion.token_ids):
            raise ReceiptError(
                f"answer.logprobs_f32 has {len(completion.logprobs)} logprobs for "
                f"{len(completion.token_ids)} tokens"
            )
        if completion.digest() != self.answer["digest"]:
            raise ReceiptError(
                f"answer.digest is {self.answer['digest']}, and that of its tokens and logprobs "
                f"{completion.digest()}"
            )


def read_receipts(path: Path) -> list[Receipt]:
    """Read a file of receipts, one a line.

    Raises:
        ReceiptError: If one is not whole: names the line and the field.
        OSError: If the file cannot be read.
    """
    receipts = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            receipts.append(Receipt.from_json(line))
        except (ReceiptError, SignatureError) as error:
            raise ReceiptError(f"{path} line {number}: {error}") from error
    if not receipts:
        raise ReceiptError(f"{path} has no receipts")
    return receipts


# ------------------------------------------------------------------------------------------ hashes


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of each field, and of each field of a field."""
    for section in SECTIONS:
        for name, value in values[section].items():
            if isinstance(value, dict):
                for key, item in value.items():
                    yield f"{section}.{name}.{key}", item
            else:
                yield f"{section}.{name}", value


def _hashes(values: Mapping[str, Any]) -> dict[str, str]:
    """Sha256 of each field's canonical JSON, and of all of them, so that a change can be named."""
    found = {path: _hash(value) for path, value in _leaves(values)}
    return found | {"all": _hash({name: values[name] for name in SECTIONS})}


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _check_hashes(values: Mapping[str, Any]) -> None:
    try:
        found, said = _hashes(values), values["sha256"]
    except ValueError as error:  # such as an integer beyond 2**53
        raise ReceiptError(f"the receipt is damaged: {error}") from error
    if not isinstance(said, dict):
        raise ReceiptError("sha256 is not an object")
    wrong = [path for path in found.keys() | said.keys() if found.get(path) != said.get(path)]
    if not wrong:
        return
    if "all" in wrong and len(wrong) > 1:
        wrong.remove("all")  # a field was changed; else it is a hash that was
        raise ReceiptError(f"{min(wrong)} was changed: its sha256 is not the one beside it")
    raise ReceiptError(f"sha256.{min(wrong)} was changed: the field's is {found.get(min(wrong))}")


# ------------------------------------------------------------------------------------------ parsing


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw.decode(), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise ReceiptError(f"the receipt is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ReceiptError("the receipt is not a JSON object")
    return values


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key of {sorted(found)} stands there twice")
    return found


def _check_keys(values: dict[str, Any]) -> None:
    known = {*_KEYS, "signature"}
    for name in sorted(set(values) - known):
        raise ReceiptError(f"{name!r} is no field of a receipt")
    for name in _KEYS:
        if name not in values:
            raise ReceiptError(f"the field {name!r} is missing")
    if values["format"] != FORMAT:
        raise ReceiptError(f"format is {values['format']!r}, and this detjax reads {FORMAT!r}")
    for name in SECTIONS:
        if not isinstance(values[name], dict):
            raise ReceiptError(f"{name} is not an object")


def _signature_of(value: Any) -> Signature | None:
    if value is None:
        return None
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
