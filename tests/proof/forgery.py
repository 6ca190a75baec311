# SPDX-License-Identifier: Apache-2.0
"""Receipts of every kind on small models, and what a forger may make of them.

A forger knows the format: the hashes of a mutant are right, unless they are what is mutated.
"""

import base64
import dataclasses
import functools
import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.text_batch import TextBatch
from detjax.engine.requests.checks import RequestLimits
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.text_request import text_request
from detjax.engine.sampling.grammars import Grammars
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.proof.canonical_json import canonical_json
from detjax.proof.identity import Identifier, Identity
from detjax.proof.parsing import FORMAT, SECTIONS, ReceiptError, hashes
from detjax.proof.receipt import Receipt
from detjax.proof.rerun import rerun
from detjax.proof.signing import SignatureError, SigningKey
from detjax.testing.dummies import dummy_config, dummy_model

CONTEXT = 128
VOCAB = 4096
ENDS = tuple(range(1, 4000, 80))
SIZES = EngineConfig(
    batch_size=16, prefill_chunk=CONTEXT, prefill_shapes=((16, 8),), max_len=CONTEXT,
    self_check="off",
)  # fmt: skip
WIDEST = SamplingParams(max_tokens=2, temperature=1.0, top_k=9, logprobs=64, presence_penalty=0.1)
"""Is asked beside every list, so that all programs are of one variant, and few are compiled."""
MODES = {
    "invariant": {},
    "dvr": {"mode": "dvr", "verify_window": 8, "max_draft_fraction": 1.0},
    "prompt lookup": {"has_prompt_lookup": True, "verify_window": 8},
}
FORMS = (
    StructuredOutput.of_choices(["yes", "no", "perhaps"]),
    StructuredOutput(kind="regex", spec="[a-f]{1,5}"),
    StructuredOutput(kind="json_object"),
)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(bundled_model_path())


# ------------------------------------------------------------------------------------------- models


def _dense() -> LoadedModel:
    config = dummy_config(
        num_layers=1, vocab_size=VOCAB, intermediate_size=128, max_len=CONTEXT
    )  # fmt: skip
    return dummy_model(dataclasses.replace(config, eos_token_ids=ENDS))


def _experts() -> LoadedModel:
    config = dummy_config(num_layers=1, vocab_size=VOCAB, max_len=CONTEXT, experts=(4, 2))
    return dummy_model(dataclasses.replace(config, eos_token_ids=ENDS), seed=1)


def _float32() -> LoadedModel:
    config = dummy_config(
        num_layers=1, vocab_size=VOCAB, intermediate_size=128, max_len=CONTEXT
    )  # fmt: skip
    profile = NumericsProfile(weight_dtype="float32", compute_dtype="float32")
    return dummy_model(dataclasses.replace(config, eos_token_ids=ENDS), profile=profile, seed=2)


MODELS = {"dense": _dense, "experts": _experts, "float32": _float32, "updated": _dense}


class Subject:
    """A model, who answers with it, and who audits the answers.

    Attributes:
        name: Of `MODELS`. The weights of "updated" were replaced after it was loaded.
        identity: As it is now.
    """

    def __init__(self, name: str):
        self.name, self._model = name, MODELS[name]()
        self.config = self._model.config
        self._engines: dict[str, Engine] = {}
        if name == "updated":
            other = dummy_model(self.config, seed=9)
            self._engine("audit").load_weights(other.params, version=3)
        self.identity: Identity = Identifier(self._model, tokenizer(), name=name).identity()
        self._widest = self.request((1, 2, 3), WIDEST)
        self._widest_line = self.receipts([], "invariant", widest=1)[0].to_json().encode()

    def _engine(self, mode: str) -> Engine:
        if mode in self._engines:
            return self._engines[mode]
        options = {"has_prompt_lookup": True, "verify_window": 16, "verify_rows": 16}
        grammars = Grammars(
            tokenizer().backend.to_str, vocab_size=VOCAB, eos_token_ids=self.config.eos_token_ids
        )
        config = dataclasses.replace(SIZES, **MODES.get(mode, options))
        self._engines[mode] = Engine(self._model, config, grammars=grammars)
        return self._engines[mode]

    @property
    def num_audited(self) -> int:
        """Requests that the auditor has asked."""
        return self._engine("audit").stats().num_requests

    def request(self, prompt: Sequence[int], sampling: SamplingParams) -> Request:
        """As `LLM` and the server make one."""
        return text_request(
            prompt, sampling, what="it", limits=RequestLimits.of(self.config, CONTEXT),
            is_deterministic=True, tokenizer=tokenizer(),
        )  # fmt: skip

    def receipts(
        self, requests: Sequence[Request], mode: str = "invariant", *, widest: int = 0
    ) -> list[Receipt]:
        """Of the answers, in order of the requests; `widest`: and of that request, at the end."""
        ends = self.config.eos_token_ids
        asked = [*requests, self._widest]
        batch = TextBatch(asked, tokenizer(), end_ids=ends, fingerprint="")
        done = self._engine(mode).generate(
            batch.token_requests, on_token=batch.on_token, on_completion=batch.on_completion
        )
        outputs = batch.outputs(done)
        outputs = outputs if widest else outputs[:-1]
        return [Receipt.of(self.identity, output, end_token_ids=ends) for output in outputs]

    def audit(self, lines: Sequence[bytes], *, key: str | None = None) -> list[str]:
        """What is wrong with each line, "" where nothing is; `key` must have signed those."""
        found, receipts, places = [""] * len(lines), [], []
        for i, line in enumerate(lines):
            try:
                receipt = Receipt.from_json(line)
            except (ReceiptError, SignatureError) as error:
                found[i] = f"read: {error}"
                continue
            signer = receipt.signature and receipt.signature.public_key
            if key is not None and signer != key:
                found[i] = "signer"
                continue
            receipts.append(receipt)
            places.append(i)
        receipts.append(Receipt.from_json(self._widest_line))
        for difference in rerun(
            self._engine("audit"), tokenizer(), receipts, identity=self.identity,
            config=self.config, has_predictions=True,
        ):  # fmt: skip
            found[places[difference.index]] = f"made again: {difference}"
        return found

    def are_true(self, lines: Sequence[bytes]) -> list[bool]:
        """Whether the request of a receipt, generated token by token, has just this receipt."""
        receipts = [Receipt.from_json(line) for line in lines]
        requests = [self.request(r.prompt_token_ids, r.sampling) for r in receipts]
        made = self.receipts(requests)
        made = [
            dataclasses.replace(m, signature=r.signature)
            for m, r in zip(made, receipts, strict=True)
        ]
        return [m.to_json().encode() == line for m, line in zip(made, lines, strict=True)]


@functools.cache
def subject(name: str) -> Subject:
    return Subject(name)


# --------------------------------------------------------------------------------------- true ones


def draw_sampling(rng: np.random.Generator) -> SamplingParams:
    """Any sampling that a receipt may have."""

    def one_of(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    n = one_of(1, 1, 2, 3)
    values: dict[str, Any] = {
        "max_tokens": int(rng.integers(1, 10)),
        "temperature": one_of(0.0, 0.0, 0.7, 1.0, 1.3, 1e-30, 1e20, 1e30, 0.1 + 0.2),
        "seed": one_of(0, 1, 2**53 + 1, 2**64 - 1, int(rng.integers(2**62))),
        "n": n,
    }
    optional: dict[str, Any] = {
        "best_of": n + 2,
        "top_k": one_of(1, 5, 2**40),
        "top_p": one_of(0.5, 0.95, 1 / 3),
        "min_p": one_of(0.01, 0.3),
        "noise_stream": one_of(1, 77, 2**32 - 9),
        "stop_token_ids": (5, 300, 4000),
        "stop": one_of(("e",), ("th", "a "), ("ü", "\u2028")),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": one_of(1, 3),
        "prompt_logprobs": 2,
        "logit_bias": ((7, 4.0), (300, -2.5), (9, 1e8)),
        "allowed_token_ids": tuple(range(0, VOCAB, 99)),
        "bad_words": ("the", " of"),
        "bad_words_token_ids": ((7,), (5, 6)),
        "min_tokens": 1,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.7,
        "logprobs_mode": "processed",
    }
    for name in rng.choice(list(optional), int(rng.integers(0, 4)), replace=False):
        values[str(name)] = optional[str(name)]
    ending = int(rng.integers(6))
    if ending == 0 and "allowed_token_ids" not in values and "min_tokens" not in values:
        values["structured_output"] = one_of(*FORMS)
    elif ending == 1:
        values["ignore_eos"] = True
    return SamplingParams(**values)


def draw_requests(of: Subject, rng: np.random.Generator, count: int) -> list[Request]:
    """Short prompts, and some that leave the context no room for `max_tokens`."""
    requests = []
    for _ in range(count):
        length = int(rng.choice([1, 3, 7, 20, CONTEXT - 3, CONTEXT - 1], p=[0.2] * 4 + [0.1] * 2))
        prompt = rng.integers(0, VOCAB, length).tolist()
        requests.append(of.request(prompt, draw_sampling(rng)))
    return requests


# ---------------------------------------------------------------------------------------- mutants


def parsed(line: str) -> dict[str, Any]:
    """The values of a receipt: large floats are written like integers."""
    return json.loads(line, parse_int=lambda text: int(text) if len(text) < 17 else float(text))


def remade(values: dict[str, Any]) -> bytes:
    """The line of values, with the digest and the hashes that fit them."""
    values = {"format": FORMAT} | {name: values[name] for name in SECTIONS}
    answer = values["answer"]
    try:
        ids = np.asarray(answer["token_ids"], np.int64).astype("<i4").tobytes()
        raw = base64.b64decode(answer["logprobs_f32"])
        answer["digest"] = hashlib.sha256(ids + raw).hexdigest()
    except (KeyError, TypeError, ValueError, OverflowError):
        pass  # of what is damaged there is none
    return canonical_json(values | {"sha256": hashes(values)})


def _places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of everything within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from _places(item, (*path, key))


def _other_float(value: float, bit: int) -> float:
    """The float with one bit of its 64 changed, if that is a number."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    (other,) = struct.unpack("<d", struct.pack("<Q", bits ^ 1 << bit % 64))
    return other if np.isfinite(other) else -value


def _other_int(value: int, rng: np.random.Generator) -> Any:
    bit = int(rng.integers(53))
    options = (value ^ 1 << bit, value + 1, value - 1, -value - 1, float(value) + 0.5, bool(value))
    other = options[int(rng.integers(len(options)))]
    return other if abs(other) < 2**53 else value + 1


def _other_text(text: str, rng: np.random.Generator) -> Any:
    at = int(rng.integers(len(text) + 1))
    kind = int(rng.integers(6))
    if kind == 0 or not text:
        return text[:at] + chr(int(rng.choice([32, 48, 97, 0x661, 0x301, 0, 0x1F600]))) + text[at:]
    if kind == 1:
        return text[: len(text) - 1]
    if kind == 2:
        return "".join(sorted(text)) if len(set(text)) > 1 else text + text
    if kind == 3:
        return text.upper() if text.upper() != text else text.lower()
    at = min(at, len(text) - 1)
    return text[:at] + chr(ord(text[at]) ^ 1 << int(rng.integers(6))) + text[at + 1 :]


def _other_list(values: list, rng: np.random.Generator) -> list:
    values = list(values)
    kind, at = int(rng.integers(4)), int(rng.integers(max(1, len(values))))
    if kind == 0 or not values:
        return [*values[:at], values[at] if values else 7, *values[at:]]
    if kind == 1:
        return values[:at] + values[at + 1 :]
    if kind == 2:
        return values[::-1]
    return [values[at]]


def _other(value: Any, rng: np.random.Generator) -> Any:
    """Something else than a value, mostly of its type."""
    if rng.random() < 0.1:
        return [None, [], {}, "", 0, True, [[]], {"x": [{}]}, "null", 1e300][int(rng.integers(10))]
    if isinstance(value, bool) or value is None:
        return [not value, 0, 1, "x", None, 2.5][int(rng.integers(6))]
    if isinstance(value, int):
        return _other_int(value, rng)
    if isinstance(value, float):
        return _other_float(value, int(rng.integers(64)))
    if isinstance(value, str):
        return _other_text(value, rng)
    if isinstance(value, list):
        return _other_list(value, rng)
    changed = dict(value)
    if rng.random() < 0.5 and changed:
        del changed[sorted(changed)[int(rng.integers(len(changed)))]]
    else:
        changed[f"x{int(rng.integers(9))}"] = [1, {"deep": []}]
    return changed


def mutate_field(values: dict[str, Any], rng: np.random.Generator) -> bytes:
    """Another value of any field, at any depth."""
    places = list(_places({name: values[name] for name in SECTIONS}))
    *parents, last = places[int(rng.integers(len(places)))]
    if not parents:  # a section is an object, or nobody reads it
        return canonical_json(values | {last: _other(values[last], rng)})
    place: Any = values
    for parent in parents:
        place = place[parent]
    place[last] = _other(place[last], rng)
    return remade(values)


def _floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4").copy()


def _text_of(floats: np.ndarray) -> str:
    return base64.b64encode(np.asarray(floats, "<f4").tobytes()).decode()


def mutate_number(values: dict[str, Any], rng: np.random.Generator) -> bytes:
    """One bit of one token, logprob, or top logprob."""
    answer, kind = values["answer"], int(rng.integers(3))
    if kind == 0:
        at = int(rng.integers(len(answer["token_ids"])))
        answer["token_ids"][at] ^= 1 << int(rng.integers(31))
        return remade(values)
    holder = answer["top_logprobs"] if kind == 1 and answer["top_logprobs"] else answer
    floats = _floats(holder["logprobs_f32"])
    floats.view(np.uint32)[int(rng.integers(len(floats)))] ^= np.uint32(1 << int(rng.integers(32)))
    holder["logprobs_f32"] = _text_of(floats)
    return remade(values)


def mutate_answer(values: dict[str, Any], rng: np.random.Generator) -> bytes:
    """A story that hangs together: another end, another text, more or fewer tokens."""
    request, answer = values["request"], values["answer"]
    ids, floats = list(answer["token_ids"]), _floats(answer["logprobs_f32"])
    count = len(ids)
    match int(rng.integers(8)):
        case 0:  # no end tokens, and so more behind them
            more = int(rng.integers(1, 4))
            request["end_token_ids"] = []
            ids += rng.integers(0, VOCAB, more).tolist()
            floats = np.append(floats, -rng.random(more).astype(np.float32))
            answer["text"] += " and I owe Mallory a million"
        case 1:  # cut short, by a token that is said to be an end
            count = int(rng.integers(1, count + 1))
            ids, floats = ids[:count], floats[:count]
            request["end_token_ids"] = sorted({*request["end_token_ids"], ids[-1]})
            answer["finish_reason"], answer["text"] = "stop", tokenizer().decode(ids)
        case 2:  # cut short, as if no more were asked for
            count = max(1, count - 1)
            ids, floats = ids[:count], floats[:count]
            request["sampling"]["max_tokens"] = count + (count == len(answer["token_ids"]))
            answer["finish_reason"], answer["text"] = "length", tokenizer().decode(ids)
        case 3:
            request["end_token_ids"] = []
            answer["finish_reason"] = "length" if answer["finish_reason"] == "stop" else "stop"
        case 4:
            answer["text"] = ["", answer["text"] + " ", answer["text"] + "!"][int(rng.integers(3))]
            request["end_token_ids"] = request["end_token_ids"][:-1]
        case 5:
            tops = [[int(i), int(i) + 1] for i in ids]
            answer["top_logprobs"] = {
                "ids": tops, "logprobs_f32": _text_of(-np.ones(2 * len(ids), np.float32)),
            }  # fmt: skip
        case 6:
            floats[int(rng.integers(count))] = [np.nan, 0.0, -0.0, -np.inf][int(rng.integers(4))]
            answer["text"] += "" if rng.random() < 0.5 else "\u0000"
            request["end_token_ids"] = [*request["end_token_ids"], VOCAB]
        case _:
            tops = answer["top_logprobs"] or {"ids": [[] for _ in ids], "logprobs_f32": ""}
            spare = np.append(_floats(tops["logprobs_f32"]), np.float32(-1))
            answer["top_logprobs"] = {"ids": tops["ids"], "logprobs_f32": _text_of(spare)}
    answer["token_ids"], answer["logprobs_f32"] = ids, _text_of(floats)
    return remade(values)


def mutate_spelling(values: dict[str, Any], rng: np.random.Generator) -> bytes:
    """The same values in other bytes."""
    right = canonical_json(values)
    text = right.decode()
    match int(rng.integers(9)):
        case 0:
            return json.dumps(dict(reversed(values.items())), separators=(",", ":")).encode()
        case 1:
            at = text.index(":", int(rng.integers(len(text) // 2)))
            return f"{text[: at + 1]} {text[at + 1 :]}".encode()
        case 2:
            return json.dumps(values, indent=int(rng.integers(0, 3))).encode()
        case 3:  # an escape that is not needed
            at = int(rng.integers(len(text)))
            while not text[at].isalpha() or text[at - 1] == "\\":
                at = (at + 1) % len(text)
            return f"{text[:at]}\\u{ord(text[at]):04x}{text[at + 1 :]}".encode()
        case 4:
            return [b"\xef\xbb\xbf", b" ", b"\n", b"\t"][int(rng.integers(4))] + right
        case 5:
            return right + [b" ", b"\r\n", b"\n\n", b"\x00", b"{}"][int(rng.integers(5))]
        case 6:  # a key twice
            return (text[:-1] + ',"format":"' + FORMAT + '"}').encode()
        case 7:  # a number in another form
            field = ['"n":1', '"min_p":0', '"top_p":1', '"presence_penalty":0', '"best_of":0']
            for name in rng.permutation(field):
                if f"{name}," in text:
                    other = [".0", "e0", ".00e+00"][int(rng.integers(3))]
                    return text.replace(f"{name},", f"{name}{other},").encode()
            return right + b" "
        case _:
            pad = answer_text = values["answer"]["logprobs_f32"]
            if not pad.endswith("="):
                return right.replace(b'"temperature":', b'"temperature" :')
            letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
            at = len(pad.rstrip("=")) - 1
            pad = pad[:at] + letters[letters.index(pad[at]) ^ 1] + pad[at + 1 :]
            assert base64.b64decode(pad) == base64.b64decode(answer_text)
            values["answer"]["logprobs_f32"] = pad
            return remade(values)


def mutate_byte(values: dict[str, Any], rng: np.random.Generator) -> bytes:
    """One bit of the line, or a part of it missing."""
    right = bytearray(canonical_json(values))
    at = int(rng.integers(len(right)))
    if rng.random() < 0.2:
        return bytes(right[:at])
    right[at] ^= 1 << int(rng.integers(8))
    return bytes(right)


def mutate_hash(values: dict[str, Any], rng: np.random.Generator) -> bytes:
    """A hash that is not right, one too many, or one that is missing."""
    held = values["sha256"]
    name = sorted(held)[int(rng.integers(len(held)))]
    match int(rng.integers(3)):
        case 0:
            held[name] = _other_text(held[name], rng)
        case 1:
            del held[name]
        case _:
            held[f"{name}.x"] = held[name]
    return canonical_json(values)


MUTATIONS = (
    mutate_field, mutate_field, mutate_field, mutate_number, mutate_number, mutate_answer,
    mutate_answer, mutate_spelling, mutate_byte, mutate_hash,
)  # fmt: skip


def mutant(line: str, rng: np.random.Generator) -> tuple[str, bytes]:
    """(kind, line) of something that is not the receipt."""
    while True:
        mutate = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
        try:
            made = mutate(parsed(line), rng)
        except ValueError:  # no JSON: such as a number that is too large, or half a character
            continue
        if made != line.encode():
            return mutate.__name__.removeprefix("mutate_"), made


def transplanted(one: Receipt, other: Receipt, rng: np.random.Generator) -> bytes:
    """A receipt with a section of another, and hashes that fit."""
    section = str(rng.choice(["request", "answer", "model", "numerics"]))
    return dataclasses.replace(one, **{section: getattr(other, section)}).to_json().encode()


def signed_mutant(
    signed: Receipt, other: Receipt, stranger: SigningKey, rng: np.random.Generator
) -> bytes:
    """A signed receipt of which something is other: the receipt, the signature, or who signed."""
    match int(rng.integers(5)):
        case 0:
            return dataclasses.replace(signed, signature=None).to_json().encode()
        case 1:
            return signed.signed(stranger).to_json().encode()
        case 2:
            return dataclasses.replace(signed, signature=other.signature).to_json().encode()
        case 3:
            values = parsed(signed.to_json())
            name = str(rng.choice(sorted(values["signature"])))
            values["signature"][name] = _other_text(values["signature"][name], rng)
            return canonical_json(values)
        case _:
            unsigned = dataclasses.replace(signed, signature=None)
            _, made = mutant(unsigned.to_json(), rng)
            return made[:-1] + b',"signature":' + canonical_json(
                dataclasses.asdict(signed.signature)
            ) + b"}"  # fmt: skip
