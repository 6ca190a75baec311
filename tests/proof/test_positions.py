# SPDX-License-Identifier: Apache-2.0
"""Audits of drawn positions: what is drawn, what is checked, what is kept and what it will cost."""

import dataclasses
import hashlib
import heapq
import json
import math
from pathlib import Path

import pytest

from detjax import audit
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.backend_choice import why_not_runnable
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.proof import positions
from detjax.proof.cost import Estimate, estimate_audit, products_of_token
from detjax.proof.kept_results import KeptResults
from detjax.proof.parsing import ReceiptError
from detjax.proof.positions import checked_lens, draw_positions, first_of_copies, receipt_hash
from detjax.proof.receipt import Receipt, read_receipts
from detjax.proof.rerun import ReceiptDifference
from detjax.testing.dummies import dummy_config
from tests.proof.test_receipt import make_key

OF_AN_H200 = Path(__file__).parents[1] / "golden" / "hopper_receipts.jsonl"
OPTIONS = ["--backend", "reference", "--cache-dir", "none", "--quiet"]
FACTS = {"bits": "ab", "source": "cd"}


@pytest.fixture(scope="module")
def receipts() -> list[Receipt]:
    return read_receipts(OF_AN_H200)


def test_the_seed_and_the_receipts_alone_decide_what_is_drawn(receipts):
    drawn = draw_positions(receipts, 20, "beacon")
    assert len(set(drawn)) == 20 and drawn == sorted(drawn)
    assert all(0 <= at < len(receipts[i].token_ids) for i, at in drawn)
    assert draw_positions(receipts, 20, "beacon") == drawn
    assert draw_positions(receipts, 20, "beacon 2") != drawn
    backwards = draw_positions(receipts[::-1], 20, "beacon")
    assert sorted((2 - i, at) for i, at in backwards) == drawn
    assert set(draw_positions(receipts, 7, "beacon")) < set(drawn)
    assert len(draw_positions(receipts, 1000, "x")) == 3 * 48


def ranked_by_hash_alone(receipts: list[Receipt], count: int, seed: str) -> list[tuple[int, int]]:
    """The draw before copies counted as one receipt."""
    names = [positions.receipt_hash(receipt) for receipt in receipts]

    def rank(place: tuple[int, int]) -> bytes:
        return hashlib.sha256(f"{seed} {names[place[0]]} {place[1]}".encode()).digest()

    places = ((i, at) for i, one in enumerate(receipts) for at in range(len(one.token_ids)))
    return heapq.nsmallest(count, places, key=rank)


def with_text(receipt: Receipt, text: str) -> Receipt:
    """Another receipt with few tokens, so that a test takes little time."""
    answer = receipt.answer | {"text": text, "token_ids": receipt.answer["token_ids"][:4]}
    return dataclasses.replace(receipt, answer=answer)


@pytest.mark.parametrize(("num_forged", "count"), [(100, 20), (100, 1), (10, 2), (1, 20), (1, 100)])
def test_copies_of_true_receipts_hide_no_forged_one(receipts, monkeypatch, num_forged, count):
    """The share of seeds that pass is the promised (1 - f)^N at most; copies had raised it."""
    true = [with_text(receipts[i % 3], f"true {i}") for i in range(10)]
    forged = [with_text(receipts[i % 3], f"forged {i}") for i in range(num_forged)]
    lines = [*true * 20, *forged]
    names = {id(one): positions.receipt_hash(one) for one in lines}
    monkeypatch.setattr(positions, "receipt_hash", lambda one: names[id(one)])
    num_seeds = 200

    def passing(draw) -> int:
        drawn = (draw(lines, count, f"beacon {seed}") for seed in range(num_seeds))
        return sum(all(i < 200 for i, _ in places) for places in drawn)

    promised = (1 - num_forged / (10 + num_forged)) ** count
    deviation = math.sqrt(num_seeds * promised * (1 - promised))
    limit = num_seeds * promised + 4 * deviation
    assert passing(draw_positions) <= limit
    if count > 1:  # of one token the copies say nothing
        assert passing(ranked_by_hash_alone) > limit, "the control is drawn as promised"


def test_a_receipt_is_one_however_often_and_by_whom_it_is_signed(receipts, tmp_path):
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    keys = make_key(tmp_path), make_key(other_folder, seed=1)
    signed = [receipts[0].signed(key) for key in keys]
    lines = [receipts[0], *signed, receipts[1], signed[1], receipts[2]]
    assert len({one.to_json() for one in lines}) == 5
    assert first_of_copies(lines) == [True, False, False, True, False, True]
    assert len({receipt_hash(one) for one in lines}) == 3
    drawn = draw_positions(lines, 1000, "x")
    assert len(drawn) == 3 * 48 and {i for i, _ in drawn} == {0, 3, 5}
    alone = draw_positions([lines[i] for i in (0, 3, 5)], 20, "beacon")
    assert [((0, 3, 5)[i], at) for i, at in alone] == draw_positions(lines, 20, "beacon")


@pytest.mark.parametrize("end", [b"\r\n", b" \n", b"\n\x0c\n"])
def test_a_receipt_has_one_spelling_in_a_file(receipts, tmp_path, end):
    """So equal receipts have equal lines. Only empty lines may stand between them."""
    path = tmp_path / "r.jsonl"
    line = receipts[0].to_json().encode()
    path.write_bytes(line + b"\n\n  \n" + line)
    assert first_of_copies(read_receipts(path)) == [True, False]
    path.write_bytes(line + end)
    if end.strip(b"\n\x0c"):
        with pytest.raises(ReceiptError, match="not canonical JSON"):
            read_receipts(path)
    else:
        assert len(read_receipts(path)) == 1


def test_every_token_is_drawn_alike(receipts):
    """Of 144 tokens 12 are drawn 300 times: 25 times each, within five standard deviations."""
    counts = dict.fromkeys(((i, at) for i in range(3) for at in range(48)), 0)
    for seed in range(300):
        for place in draw_positions(receipts, 12, str(seed)):
            counts[place] += 1
    assert sum(counts.values()) == 3600 and all(2 <= n <= 50 for n in counts.values())


def test_an_answer_is_checked_up_to_its_last_drawn_position():
    assert checked_lens(3, [(0, 4), (0, 9), (2, 0)]) == [10, 0, 1]


def test_results_are_kept_and_found_again(receipts, tmp_path):
    path = tmp_path / "results.jsonl"
    kept = KeptResults(path, FACTS)
    assert kept.done(receipts, [48, 48, 48]) == {}
    wrong = ReceiptDifference(index=2, field="answer.token_ids[3]", receipt="5", here="6")
    kept.keep(receipts[0], 48, None)
    kept.keep(receipts[2], 12, wrong)
    with path.open("a") as file:
        file.write('{"receipt": "in')  # the audit was killed here
    again = KeptResults(path, FACTS)
    assert again.done(receipts, [48, 48, 48]) == {0: None}
    moved = [receipts[2], receipts[1], receipts[0]]
    found = {0: dataclasses.replace(wrong, index=0), 2: None}
    assert again.done(moved, [12, 48, 48]) == found
    again.keep(receipts[1], 48, None)
    assert set(KeptResults(path, FACTS).done(receipts, [48, 48, 48])) == {0, 1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps(FACTS | {"bits": "other"}) + "\n", "another bits; give another file"),
        ("not json\n", "holds no results of an audit"),
        ("\n", "holds no results of an audit"),
        (json.dumps(FACTS) + "\n{}\n", "holds no results of an audit"),
    ],
)
def test_results_of_something_else_are_refused(tmp_path, text, says):
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        KeptResults(path, FACTS)


def test_an_estimate_counts_padding_and_the_experts_of_a_token():
    config = dummy_config(num_layers=2, vocab_size=320)  # D 64, F 384, H 8, K 2, C 16
    layer = 64 * (8 + 2 * 2) * 16 + 8 * 16 * 64 + 3 * 64 * 384
    norms = 2 * 2 * 64 + 64
    assert products_of_token(config) == 2 * layer + 320 * 64 + norms
    experts = dummy_config(num_layers=1, vocab_size=320, experts=(8, 2), expert_width=48)
    fewer = dummy_config(num_layers=1, vocab_size=320, experts=(2, 2), expert_width=48)
    router = 6 * 64
    assert products_of_token(experts) - products_of_token(fewer) in (router, 0)
    found = estimate_audit(
        config, [(5, 40), (17, 1)], chunk=16, window=32, backend=Backend.PORTABLE
    )
    assert found.num_tokens == (16 + 64) + (32 + 0)
    assert found.num_products > found.num_tokens * products_of_token(config)
    assert found.products_per_s > 0


def test_an_estimate_is_told_in_seconds_or_minutes():
    short, long = (
        str(Estimate(num_tokens=1200, num_products=n * 10**9, products_per_s=1e9)) for n in (9, 600)
    )
    assert short.startswith("takes about 9 s after compiling: 1,200 tokens")
    assert long.startswith("takes about 10 min") and "600.0 billion products" in long


@pytest.mark.slow
def test_a_part_is_audited_and_what_was_checked_is_not_checked_again(tmp_path, capsys):
    """67 of 144 tokens with this seed. A second run finds all results in the file."""
    if why := why_not_runnable(Backend.REFERENCE):
        pytest.skip(why)
    kept, report = tmp_path / "results.jsonl", tmp_path / "report.json"
    part = ["--positions", "2", "--seed", "abc", "--results", str(kept), "--json", str(report)]
    for num_windows in (5, 0):
        assert audit.main([str(OF_AN_H200), *OPTIONS, *part]) == 0
        out = capsys.readouterr().out
        assert "audited 2 of 3 receipts, 67 of 144 tokens and logprobs: 0 receipts differ" in out
        assert "drawn: 2 positions of 144, with --seed abc\n" in out
        assert "not proven: 77 tokens behind the last drawn one" in out
        assert json.loads(report.read_text())["num_windows"] == num_windows


def test_a_seed_without_positions_is_refused(capsys):
    assert audit.main([str(OF_AN_H200), "--seed", "abc"]) == 2
    assert "--seed abc draws nothing without --positions" in capsys.readouterr().err
    assert audit.main([str(OF_AN_H200), "--positions", "0"]) == 2
    assert "--positions 0 must be at least 1" in capsys.readouterr().err


def test_receipts_of_a_gpu_name_the_backend_that_can_check_them_here(capsys):
    if KERNELS[Backend.SM90].why_not_here() is None:
        pytest.skip("a Hopper GPU is here")
    assert audit.main([str(OF_AN_H200)]) == 2
    said = capsys.readouterr().err
    assert "cannot run here" in said and "--backend reference gives the same bits" in said
