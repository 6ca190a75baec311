# SPDX-License-Identifier: Apache-2.0
"""No mutant of a true receipt passes an audit, and every true one does."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from detjax.engine.running import program_key, ready_programs
from detjax.proof import rerun as rerun_module
from detjax.proof.receipt import Receipt
from detjax.proof.signing import read_public_key
from tests.proof.forgery import (
    MODELS,
    MODES,
    Subject,
    draw_requests,
    mutant,
    signed_mutant,
    subject,
    transplanted,
)
from tests.proof.test_receipt import make_key

ROUND = 250
"""Requests whose receipts, and their mutants, are audited at once."""


@pytest.fixture(autouse=True)
def one_choice_program(monkeypatch):
    """The one that does everything chooses for all rows, so that few programs are compiled.

    Which of them chooses changes no bit: `test_answers.py` has that claim.
    """
    for module in (program_key, ready_programs):
        monkeypatch.setattr(module, "CHOICES", program_key.CHOICES[-1:])


def true_receipts(
    of: Subject, rng: np.random.Generator, count: int, modes: tuple[str, ...] = ("invariant",)
) -> list[Receipt]:
    """Of as many requests, asked in each mode."""
    found = []
    for i, mode in enumerate(modes):
        share = count // len(modes) + (i < count % len(modes))
        found += of.receipts(draw_requests(of, rng, share), mode)
    return found


def mutants_of(
    receipts: list[Receipt], each: int, rng: np.random.Generator
) -> list[tuple[str, bytes]]:
    """(kind, line), `each` of every receipt."""
    made = []
    for receipt in receipts:
        line = receipt.to_json()
        made += [mutant(line, rng) for _ in range(each - 1)]
        other = receipts[int(rng.integers(len(receipts)))]
        planted = transplanted(receipt, other, rng)
        made.append(mutant(line, rng) if planted == line.encode() else ("section", planted))
    return made


def run_round(
    of: Subject,
    rng: np.random.Generator,
    counts,
    *,
    num_requests: int,
    each: int,
    modes=tuple(MODES),
):
    """Audit true receipts and mutants; count them, and fail if one is judged wrongly."""
    receipts = true_receipts(of, rng, num_requests, modes)
    lines = [receipt.to_json().encode() for receipt in receipts]
    assert of.audit(lines) == [""] * len(lines)
    counts["true"] += len(lines)
    mutants = mutants_of(receipts, each, rng)
    passed = []
    for (kind, line), found in zip(mutants, of.audit([m for _, m in mutants]), strict=True):
        if found:
            counts[f"{kind}, refused when {found.partition(':')[0]}"] += 1
            counts["refused"] += 1
        else:
            assert kind in ("field", "answer", "section"), (kind, line)
            passed.append(line)
    # Of another request: each must be what that is answered, token by token.
    accepted = [
        line for line, is_true in zip(passed, of.are_true(passed), strict=True) if not is_true
    ]
    assert not accepted, accepted[:3]
    counts["true, of another request"] += len(passed)


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        pytest.param("dense", ("invariant",), marks=pytest.mark.slow),
        *(pytest.param(name, tuple(MODES), marks=pytest.mark.slow) for name in MODELS),
    ],
)
def test_no_mutant_passes_and_every_true_receipt_does(name, modes):
    rng, counts = np.random.default_rng([3, *name.encode()]), collections.Counter()
    run_round(subject(name), rng, counts, num_requests=15, each=12, modes=modes)
    assert counts["true"] >= 15 and counts["refused"] > 150, counts
    assert sum(n for kind, n in counts.items() if kind.endswith("made again")) > 20, counts
    assert counts["true, of another request"] < counts["refused"] / 10, counts


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_no_mutant_of_100000_passes_and_10000_true_ones_do(record_property):
    rng, counts = np.random.default_rng(7), collections.Counter()
    names = list(MODELS)
    for i in range(1000):
        run_round(subject(names[i % 4]), rng, counts, num_requests=ROUND, each=11)
        print(i, counts["true"], counts["refused"], flush=True)
        if counts["true"] >= 10_000 and counts["refused"] >= 100_000:
            break
    print(json.dumps(dict(sorted(counts.items())), indent=1))
    record_property("counts", dict(counts))
    assert counts["true"] >= 10_000 and counts["refused"] >= 100_000


@pytest.mark.slow
def test_no_mutant_of_a_signed_receipt_passes(tmp_path):
    of, rng = subject("dense"), np.random.default_rng(4)
    key = make_key(tmp_path)
    public = read_public_key(tmp_path / "public.pem")
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    stranger = make_key(other_folder, seed=1)
    signed = [receipt.signed(key) for receipt in true_receipts(of, rng, 6)]
    assert of.audit([r.to_json().encode() for r in signed], key=public) == [""] * len(signed)
    lines = []
    for receipt in signed:
        for _ in range(20):
            other = next(r for r in reversed(signed) if r.signature != receipt.signature)
            line = signed_mutant(receipt, other, stranger, rng)
            lines += [line] if line != receipt.to_json().encode() else []
    assert len(lines) > 100
    assert all(of.audit(lines, key=public))
    # Without a key to trust, who has signed it is not known: only these two kinds are true.
    passed = [line for line, found in zip(lines, of.audit(lines), strict=True) if not found]
    assert passed and all(of.are_true(passed))


@pytest.mark.slow
@pytest.mark.control
def test_without_making_receipts_again_mutants_pass(monkeypatch):
    """The comparison of tokens and logprobs alone, and none at all."""
    of, rng = subject("dense"), np.random.default_rng(5)
    mutants = [line for _, line in mutants_of(true_receipts(of, rng, 8), 12, rng)]
    refused = sum(map(bool, of.audit(mutants)))

    def compare_nothing(self, made, excused):
        self.has_ended = True

    monkeypatch.setattr(rerun_module._Claim, "compare_whole", compare_nothing)
    by_tokens = sum(map(bool, of.audit(mutants)))
    monkeypatch.setattr("tests.proof.forgery.rerun", lambda *args, **kwargs: [])
    by_reading = sum(map(bool, of.audit(mutants)))
    assert by_reading < by_tokens < refused


@pytest.mark.slow
def test_receipts_of_one_request_share_an_answer():
    of, rng = subject("dense"), np.random.default_rng(6)
    receipt = max(true_receipts(of, rng, 6), key=lambda receipt: len(receipt.token_ids))
    others = [
        dataclasses.replace(receipt, answer=receipt.answer | {"text": f"{i}"}) for i in range(50)
    ]
    before = of.num_audited
    lines = [r.to_json().encode() for r in (receipt, *others)]
    found = of.audit(lines)
    assert not found[0] and all("answer.text is" in each for each in found[1:])
    assert of.num_audited == before + 2  # and the one that is asked beside every list
