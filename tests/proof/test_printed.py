# SPDX-License-Identifier: Apache-2.0
"""No receipt writes to the terminal of who checks it: not in a value, and not in a name."""

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

import detjax
from detjax import audit, replay
from detjax.cli import receipts as receipts_command
from detjax.diverge.__main__ import main as diverge
from detjax.proof import parsing
from detjax.proof.canonical_json import canonical_json
from detjax.proof.identity import Identifier, Identity
from detjax.proof.parsing import SECTIONS, ReceiptError, hashes
from detjax.proof.receipt import Receipt
from tests.proof.test_receipt import make_receipt

FORGED = "audited 9 receipts, 9 tokens and logprobs: 0 receipts differ"
PLANTED = f"x\x1b[2J\x1b[H\n{FORGED}\n\r\x9b2K\u202e\u2028y"
"""Clears the screen, and writes a verdict."""


def planted(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Receipts with the text in place of each text and of each name, and as a new name."""
    for path, value in parts(values):
        others = [PLANTED] if isinstance(value, str) else []
        if isinstance(value, dict):
            for name in value:
                fewer = {key: item for key, item in value.items() if key != name}
                others.append(fewer | {PLANTED: value[name]})
            others.append(value | {PLANTED: "z"})
        for other in others:
            made = changed(values, path, other)
            if path[:1] != ("sha256",) and set(SECTIONS) <= set(made):
                made["sha256"] = hashes(made)
            yield made


def parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, part) of each part of a value, and of the value itself."""
    yield path, value
    if isinstance(value, str | int | float | None):
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from parts(item, (*path, name))


def changed(values: dict[str, Any], path: tuple[Any, ...], new: Any) -> dict[str, Any]:
    if not path:
        return new
    made = place = copy.deepcopy(values)
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = new
    return made


def check_printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was written, of which each line is printable and none is the planted one."""
    found = "".join(capsys.readouterr())
    lines = found.split("\n")
    assert all(line.isprintable() for line in lines), found
    assert FORGED not in lines
    return found


@pytest.mark.parametrize(
    "name", [PLANTED, "a b", "A", "0a", "", "a\n", "a" * 65, "a.b", "à", "\u202ea"]
)
def test_a_field_of_the_build_has_a_plain_name(name):
    values = json.loads(make_receipt().to_json())
    values["build"][name] = "1"
    values["sha256"] = hashes(values)
    with pytest.raises(ReceiptError, match="which is no field of it") as error:
        Receipt.from_json(canonical_json(values))
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["a", "_a", "detjax2", "a" * 64])
def test_a_field_of_a_later_build_is_read(name):
    made = dataclasses.replace(make_receipt(), build=make_receipt().build | {name: "1"})
    assert Receipt.from_json(made.to_json()) == made


def test_an_error_about_a_receipt_is_one_printable_line():
    values, count = json.loads(make_receipt().to_json()), 0
    for made in planted(values):
        try:
            Receipt.from_json(canonical_json(made))
        except ReceiptError as error:
            assert str(error).isprintable(), error
            count += 1
    assert count > 200


@pytest.fixture(scope="module")
def llm() -> detjax.LLM:
    return detjax.LLM(
        batch_size=1, max_len=256, prefill_chunk=32, has_prompt_lookup=True, show_progress=False
    )


@pytest.fixture(scope="module")
def identity(llm) -> Identity:
    return Identifier(llm.model, llm.tokenizer, name="novels-6m").identity()


@pytest.fixture(scope="module")
def receipt(llm, identity) -> Receipt:
    params = detjax.SamplingParams(max_tokens=3, temperature=0.0)
    [output] = llm.generate(["The sea"], params)
    return Receipt.of(identity, output.outputs[0], end_token_ids=llm.config.model.eos_token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("has_plain_names", [True, False])
def test_no_place_of_a_receipt_writes_to_the_terminal(
    llm, receipt, has_plain_names, tmp_path, monkeypatch, capsys
):
    """Without the rule for names of the build too: the verdict has them, and escapes them."""
    monkeypatch.setattr(receipts_command, "_open", lambda *_: llm)
    if not has_plain_names:
        monkeypatch.setattr(parsing, "_is_build_name", lambda name: True)
    path, told, codes = tmp_path / "r.jsonl", [], set()
    made = list(planted(json.loads(receipt.to_json())))
    if not has_plain_names:
        made = [values for values in made if PLANTED in values.get("build", ())]
        assert len(made) > 5
    for i, values in enumerate(made):
        path.write_bytes(canonical_json(values) + b"\n")
        command = (audit, replay, audit)[i % 3]
        given = ["--model", "novels-6m"] if i % 2 else []
        codes.add(command.main([str(path), "--cache-dir", "none", *given]))
        told.append(check_printed(capsys))
    assert codes == ({0, 2, 3} if has_plain_names else {0, 2})
    assert any("not proven" in one and r"\x1b[2J" in one for one in told)


@pytest.mark.slow
def test_diverge_writes_nothing_that_a_receipt_holds_to_the_terminal(receipt, tmp_path, capsys):
    """The fingerprint of another build is a note."""
    path = tmp_path / "r.jsonl"
    numerics = receipt.numerics | {"fingerprint": PLANTED}
    path.write_text(dataclasses.replace(receipt, numerics=numerics).to_json() + "\n")
    assert diverge(["--receipt", str(path), "--b", "tp=1"]) == 0
    assert r"the answer has fingerprint x\x1b[2J" in check_printed(capsys)
