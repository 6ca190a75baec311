# SPDX-License-Identifier: Apache-2.0
"""A receipt is whole or refused: every bit of it counts, and what was changed is named."""

import base64
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from detjax.engine.outputs.completion import Completion, CompletionOutput
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.numerics import NumericsProfile
from detjax.proof import receipt as receipt_module
from detjax.proof.canonical_json import canonical_json
from detjax.proof.identity import Identity
from detjax.proof.parsing import ReceiptError, hashes
from detjax.proof.receipt import Receipt, read_receipts
from detjax.proof.signing import Signature, SignatureError, SigningKey, read_public_key

IDENTITY = Identity(
    model={
        "name": "toy", "hub_commit": None, "weights": "ab" * 32, "config": "cd" * 32,
        "tokenizer": "ef" * 32, "chat_template": None, "weight_cast": "none",
        "quantization": "none",
    },
    numerics={
        "fingerprint": "0123456789abcdef",
        "profile": dataclasses.asdict(NumericsProfile()),
    },
    build={"detjax": "0.1.0", "jax": "0.11.2", "backend": "portable"},
)  # fmt: skip


def make_output(**changes) -> CompletionOutput:
    completion = Completion(
        request_idx=3,
        sequence_idx=2,
        prompt_token_ids=(5, 6, 7),
        token_ids=(1, 2, 300),
        logprobs=(np.float32(-0.1), np.float32(-0.0), np.float32(-7.25)),
        top_logprobs=(((1, np.float32(-0.1)),), (), ((300, np.float32(-7.25)),)),
        finish_reason=FinishReason.STOP,
    )
    return CompletionOutput(
        completion=dataclasses.replace(completion, **changes),
        text="wörd",
        fingerprint="0123456789abcdef",
        sampling=SamplingParams(
            max_tokens=9,
            temperature=0.7,
            top_p=0.9,
            seed=2**63 + 5,
            n=4,
            stop=("d",),
            prompt_logprobs=2,
        ),  # fmt: skip
        is_deterministic=True,
    )


def make_receipt() -> Receipt:
    return Receipt.of(IDENTITY, make_output(), end_token_ids=(2, 0))


def make_key(tmp_path, *, seed: int = 0) -> SigningKey:
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(seed, seed + 32)))
    path = tmp_path / "key.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (tmp_path / "public.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return SigningKey(path)


def test_an_answer_and_its_receipt_are_shown_as_one_short_line():
    output, receipt = make_output(), make_receipt()
    digest = output.digest()[:16]
    assert repr(output) == (
        f"CompletionOutput(index=2, text='wörd', num_tokens=3, finish_reason='stop', "
        f"digest='{digest}')"
    )
    assert repr(receipt) == (
        f"Receipt(model='toy', text='wörd', num_tokens=3, digest='{digest}', signed_by=None)"
    )
    long = dataclasses.replace(output, text="x" * 61)
    assert f"text='{'x' * 57}...'," in repr(long)


def test_a_receipt_says_what_was_asked_and_answered_to_the_bit():
    read = Receipt.from_json(make_receipt().to_json())
    output = make_output()
    assert read == make_receipt()
    assert read.token_ids == output.token_ids
    assert read.logprobs.tobytes() == np.asarray(output.logprobs, "<f4").tobytes()
    assert read.top_logprobs == output.top_logprobs
    assert read.prompt_token_ids == (5, 6, 7)
    # Of this sequence alone: the third of four. And of the answer: not what the prompt scored.
    assert read.sampling == dataclasses.replace(
        output.sampling, n=1, noise_stream=2, prompt_logprobs=None
    )
    assert read.request["end_token_ids"] == [0, 2]


def test_the_same_receipt_has_the_same_bytes():
    text = make_receipt().to_json()
    assert canonical_json(json.loads(text)).decode() == text
    assert Receipt.from_json(f"{text}\n").to_json() == text
    others = (json.dumps(json.loads(text)), f" {text}", f"{text}\n\n", f"{text}\r\n", text + " ")
    for other in others:
        with pytest.raises(ReceiptError, match=r"not canonical JSON .* from byte \d+ it is"):
            Receipt.from_json(other)
    with pytest.raises(
        ReceiptError, match=rf"byte {len(text.encode())} it is b'\\r', and would be b''"
    ):
        Receipt.from_json(f"{text}\r\n")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("seed", "9" * 5000, "request.sampling.seed is '999.*, which is no number"),
        ("seed", 3, "request.sampling.seed is 3, which is no number"),
        ("seed", None, "request.sampling.seed is None, which is no number"),
        ("logit_bias", ["x"], r"request.sampling is damaged: ValueError: logit_bias=\('x',\) must"),
        ("logit_bias", 5, r"request.sampling is damaged: ValueError: logit_bias=5 must"),
        ("top_p", 2, r"request.sampling is damaged: ValueError: top_p=2.0 must be in"),
    ],
)
def test_a_wrong_value_of_the_sampling_is_named_though_its_hash_is_right(path, value, says):
    values = json.loads(make_receipt().to_json())
    values["request"]["sampling"][path] = value
    values["sha256"] = hashes(values)
    with pytest.raises(ReceiptError, match=says):
        Receipt.from_json(canonical_json(values))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "9" * 400])
def test_a_number_that_json_does_not_have_is_named(value):
    text = make_receipt().to_json()
    assert '"max_tokens":9,' in text
    changed = text.replace('"max_tokens":9,', f'"max_tokens":{value},')
    with pytest.raises(ReceiptError, match="damaged: request.sampling.max_tokens: .*representable"):
        Receipt.from_json(changed)


@pytest.mark.parametrize("is_signed", [False, True])
def test_every_single_bit_counts(tmp_path, is_signed):
    receipt = make_receipt()
    raw = (receipt.signed(make_key(tmp_path)) if is_signed else receipt).to_json().encode()
    for bit in np.random.default_rng(0).choice(8 * len(raw), 1000, replace=False):
        data = bytearray(raw)
        data[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises((ReceiptError, SignatureError)) as error:
            Receipt.from_json(bytes(data))
        assert re.search(r"\w", str(error.value))


def bit_edit(kind: str, bit: int, values: dict) -> str:
    """Change one bit of a field; its path."""
    request, answer, sampling = values["request"], values["answer"], values["request"]["sampling"]
    if kind == "token":
        answer["token_ids"][bit // 16 % 3] ^= 1 << bit % 16
        return "answer.token_ids"
    if kind == "prompt":
        request["prompt_token_ids"][bit // 16 % 3] ^= 1 << bit % 16
        return "request.prompt_token_ids"
    if kind == "logprob":
        raw = bytearray(base64.b64decode(answer["logprobs_f32"]))
        raw[bit // 8 % 12] ^= 1 << bit % 8
        answer["logprobs_f32"] = base64.b64encode(raw).decode()
        return "answer.logprobs_f32"
    if kind == "seed":
        sampling["seed"] = str(int(sampling["seed"]) ^ 1 << bit % 64)
        return "request.sampling.seed"
    if kind == "weight":
        raw = bytearray.fromhex(values["model"]["weights"])
        raw[bit // 8 % 32] ^= 1 << bit % 8
        values["model"]["weights"] = raw.hex()
        return "model.weights"
    names = ("max_tokens", "top_k", "min_tokens", "noise_stream")
    name = names[bit // 30 % 4]
    sampling[name] ^= 1 << bit % 30
    return f"request.sampling.{name}"


EDITED = ("token", "prompt", "logprob", "seed", "weight", "parameter")


def test_each_of_1000_single_bit_edits_is_refused_and_says_which_field():
    """A bit of a value, in a receipt that is well-formed and canonical all the same."""
    text, named = make_receipt().to_json(), set()
    for i, bit in enumerate(np.random.default_rng(1).integers(0, 2**16, 1000).tolist()):
        values = json.loads(text)
        path = bit_edit(EDITED[i % len(EDITED)], bit, values)
        line = canonical_json(values)
        assert line != text.encode()
        with pytest.raises(ReceiptError, match=rf"^{re.escape(path)} was changed"):
            Receipt.from_json(line)
        named.add(path)
    assert len(named) == 9
    assert Receipt.from_json(text) == make_receipt()  # the control: without an edit


LEAVES = [
    ("model", "weights"),
    ("model", "name"),
    ("numerics", "fingerprint"),
    ("build", "jax"),
    ("request", "prompt_token_ids"),
    ("request", "sampling", "seed"),
    ("request", "sampling", "temperature"),
    ("request", "sampling", "stop"),
    ("answer", "token_ids"),
    ("answer", "logprobs_f32"),
    ("answer", "text"),
    ("answer", "digest"),
]


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
def test_the_field_that_was_changed_is_named(path):
    values = json.loads(make_receipt().to_json())
    *parents, name = path
    place = values
    for parent in parents:
        place = place[parent]
    old = place[name]
    place[name] = {
        str: lambda: old[:-1] + chr(ord(old[-1]) ^ 1),
        list: lambda: old[::-1] + [1],
    }.get(type(old), lambda: 0.75)()
    with pytest.raises(ReceiptError, match=re.escape(f"{'.'.join(path)} was changed")):
        Receipt.from_json(canonical_json(values))


def test_a_changed_hash_is_named_and_so_is_their_sum():
    for name in ("answer.text", "all"):
        values = json.loads(make_receipt().to_json())
        values["sha256"][name] = "00" * 32
        with pytest.raises(ReceiptError, match=re.escape(f"sha256.{name} was changed")):
            Receipt.from_json(canonical_json(values))


def forged(change) -> bytes:
    """A receipt with a change and hashes that fit it, as somebody would who knows how."""
    receipt = make_receipt()
    change(receipt)
    return receipt.to_json().encode()


def test_a_forger_must_keep_digest_and_lengths_right():
    with pytest.raises(ReceiptError, match=r"answer\.digest is"):
        Receipt.from_json(forged(lambda r: r.answer.update(token_ids=[1, 2, 301])))
    with pytest.raises(ReceiptError, match="has 3 logprobs for 2 tokens"):
        Receipt.from_json(forged(lambda r: r.answer.update(token_ids=[1, 2], top_logprobs=None)))
    with pytest.raises(ReceiptError, match="prompt_logprobs is 2, and in .* it is None"):
        Receipt.from_json(forged(lambda r: r.request["sampling"].update(prompt_logprobs=2)))
    with pytest.raises(ReceiptError, match="speed"):
        Receipt.from_json(forged(lambda r: r.request["sampling"].update(speed=3)))


def test_a_signature_is_of_all_and_by_one_key(tmp_path):
    key = make_key(tmp_path)
    signed = make_receipt().signed(key)
    assert Receipt.from_json(signed.to_json()) == signed
    assert signed.signature is not None
    assert signed.signature.public_key == read_public_key(tmp_path / "public.pem")
    # Hashes that fit do not help without the key.
    other = make_receipt()
    other.request["sampling"]["seed"] = "7"
    stolen = dataclasses.replace(other, signature=signed.signature)
    with pytest.raises(SignatureError, match=r"signature\.value is not that"):
        Receipt.from_json(stolen.to_json())


PRIME = 2**255 - 19


def points_of_small_order() -> list[bytes]:
    """All eight, from random points times the order of the large subgroup."""
    curve = -121665 * pow(121666, -1, PRIME) % PRIME
    root = pow(2, (PRIME - 1) // 4, PRIME)

    def added(p, q):
        (a, b), (c, e) = p, q
        k = curve * a * b * c * e % PRIME
        x = (a * e + c * b) * pow(1 + k, -1, PRIME) % PRIME
        return x, (b * e + a * c) * pow(1 - k, -1, PRIME) % PRIME

    def times(count, p):
        total = (0, 1)
        for bit in bin(count)[2:]:
            total = added(total, total)
            total = added(total, p) if bit == "1" else total
        return total

    found, y = set(), 2
    while len(found) < 8:
        y += 1
        square = (y * y - 1) * pow(curve * y * y + 1, -1, PRIME) % PRIME
        x = pow(square, (PRIME + 3) // 8, PRIME)
        x = x if x * x % PRIME == square else x * root % PRIME
        if x * x % PRIME == square:
            found.add(times(2**252 + 27742317777372353535851937790883648493, (x, y)))
    return [(y | (x & 1) << 255).to_bytes(32, "little") for x, y in sorted(found)]


def test_a_key_that_fits_every_signature_is_refused(tmp_path):
    """A point of small order, also written with y above the prime; one that was made is not."""
    points = points_of_small_order()
    large = [
        (y + PRIME).to_bytes(32, "little")
        for y in (int.from_bytes(point, "little") for point in points)
        if y + PRIME < 2**255
    ]
    assert len(set(points)) == 8 and len(large) == 2
    identity = (1).to_bytes(32, "little")
    for public in (*points, *large):
        signature = Signature(
            algorithm="ed25519",
            public_key=base64.b64encode(public).decode(),
            value=base64.b64encode(identity + bytes(32)).decode(),
        )
        with pytest.raises(SignatureError, match="of small order: anybody can make"):
            Receipt.from_json(dataclasses.replace(make_receipt(), signature=signature).to_json())
    # The control: what verifies has no objection.
    ed25519.Ed25519PublicKey.from_public_bytes(identity).verify(identity + bytes(32), b"anything")
    path = tmp_path / "weak.pem"
    path.write_bytes(
        ed25519.Ed25519PublicKey.from_public_bytes(identity).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    with pytest.raises(ValueError, match="holds a key of small order"):
        read_public_key(path)
    make_key(tmp_path)
    assert read_public_key(tmp_path / "public.pem")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no private key"),
        ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "holds no private key"),
    ],
)
def test_a_key_that_is_none_is_refused(tmp_path, text, says):
    (tmp_path / "k.pem").write_text(text)
    with pytest.raises(ValueError, match=says):
        SigningKey(tmp_path / "k.pem")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1: the receipt is not JSON"),
        ("[]", "not a JSON object"),
        ('{"format":"detjax-receipt/2","form\\u0061t":"x"}', "the key 'format' stands there twice"),
        ("{}", "'format' is missing"),
        ('{"speed":1}', "'speed' is no field"),
    ],
)
def test_a_file_says_which_line_is_wrong(tmp_path, line, says):
    path = tmp_path / "r.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ReceiptError, match=says):
        read_receipts(path)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "r.jsonl").write_text("\n\n")
    with pytest.raises(ReceiptError, match="has no receipts"):
        read_receipts(tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    ("output", "identity", "says"),
    [
        (dataclasses.replace(make_output(), is_deterministic=False), IDENTITY, "not canonical"),
        (make_output(finish_reason=FinishReason.CANCELLED), IDENTITY, "did not end"),
        (make_output(token_ids=(), logprobs=(), top_logprobs=()), IDENTITY, "has no tokens"),
        (
            make_output(),
            dataclasses.replace(IDENTITY, model=IDENTITY.model | {"weights": None}),
            "several processes",
        ),
    ],
)
def test_no_receipt_of_what_nobody_could_check(output, identity, says):
    with pytest.raises(ValueError, match=says):
        Receipt.of(identity, output, end_token_ids=())


def nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


DAMAGE = {
    "no model name": (lambda v: v["model"].pop("name"), "model.name is missing"),
    "no profile": (lambda v: v["numerics"].pop("profile"), "numerics.profile is missing"),
    "no backend": (lambda v: v["build"].pop("backend"), "build.backend is missing"),
    "no sampling": (lambda v: v["request"].pop("sampling"), "request.sampling is missing"),
    "no seed": (lambda v: v["request"]["sampling"].pop("seed"), "seed is None, which is no number"),
    "a number for a name": (lambda v: v["model"].update(name=5), "model.name is 5"),
    "no weight cast": (lambda v: v["model"].update(weight_cast=None), "weight_cast is None"),
    "a profile of bools": (
        lambda v: v["numerics"]["profile"].update(version=True), "profile.version is True"
    ),
    "no prompt": (
        lambda v: v["request"].update(prompt_token_ids=[]), "prompt_token_ids is empty"
    ),
    "a text for ids": (lambda v: v["request"].update(end_token_ids="ab"), "end_token_ids is ab"),
    "large ids": (
        lambda v: v["answer"].update(token_ids=[1 + 2**32, 2, 300]), "not a list of token ids"
    ),
    "fewer positions": (
        lambda v: v["answer"].update(top_logprobs={"ids": [], "logprobs_f32": ""}), "0 positions"
    ),
    "deep": (lambda v: v["model"].update(x=nested(200)), "more than 8 deep"),
    "control characters": (lambda v: v["model"].update({"a\\nb\\x1b[2J": 1}), r"'a\\\\nb"),
    "an old format": (lambda v: v.update(format="detjax-receipt/1"), "reads 'detjax-receipt/2'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_error_that_names_the_field(name):
    damage, says = DAMAGE[name]
    values = json.loads(make_receipt().to_json())
    damage(values)
    values["sha256"] = hashes(values)
    with pytest.raises(ReceiptError, match=says) as error:
        Receipt.from_json(canonical_json(values))
    assert str(error.value).isprintable() and len(str(error.value)) < 500


@pytest.mark.parametrize("open_with", ["[", '{"model":', "[" * 3 + "9" * 5000])
def test_what_is_too_deep_or_too_long_is_refused(open_with):
    with pytest.raises(ReceiptError, match="is not JSON"):
        Receipt.from_json(open_with * 5_000)


def test_a_file_is_read_no_further_than_a_receipt_may_be_long(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    line = make_receipt().to_json() + "\n"
    path.write_text(line * 3)
    monkeypatch.setattr(receipt_module, "MAX_FILE_BYTES", 3 * len(line.encode()))
    assert len(read_receipts(path)) == 3
    monkeypatch.setattr(receipt_module, "MAX_FILE_BYTES", 3 * len(line.encode()) - 1)
    with pytest.raises(ReceiptError, match="is longer than 1 GiB"):
        read_receipts(path)
    monkeypatch.undo()
    with pytest.raises(ReceiptError, match="line 1: the receipt is longer than 32 MiB"):
        read_receipts(Path("/dev/zero"))


def test_a_large_temperature_is_a_number_as_the_format_has_it():
    output = dataclasses.replace(make_output(), sampling=SamplingParams(temperature=1e20))
    receipt = Receipt.of(IDENTITY, output, end_token_ids=())
    assert '"temperature":100000000000000000000' in receipt.to_json()
    assert Receipt.from_json(receipt.to_json()) == receipt
