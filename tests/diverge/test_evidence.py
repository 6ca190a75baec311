# SPDX-License-Identifier: Apache-2.0
"""Receipts and evidence become sides of a comparison."""

import dataclasses
import json

import pytest

import detjax
from detjax.diverge.__main__ import main
from detjax.diverge.evidence import Evidence, answer_of_receipt, explain, reproduction_of
from detjax.engine.errors import SelfCheckError
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.self_check.evidence import FOLDER_VARIABLE, CheckDifference, add_cause
from detjax.numerics import Build, NumericsProfile
from detjax.testing.faults import FAULTS
from tests.proof.test_receipt import make_receipt

PROFILE = NumericsProfile()
BUILD = Build(
    detjax="0.1", source="ab", jax="0.11", jaxlib="0.11", backend="portable", arch="x", compiler="y"
)
SAMPLING = SamplingParams(temperature=0.8, seed=7, noise_stream=2, stop=("x",), n=4)


def difference(**changes) -> CheckDifference:
    fields = {
        "program": "decode invariant 8x1 to 16 pages", "row": 5, "position": 131071,
        "token_ids": (7, 9), "sampling": (SAMPLING, 3), "what": "token and logprob",
        "found": "00000001", "expected": "00000002",
    }  # fmt: skip
    return CheckDifference(**(fields | changes))


def ask(found: CheckDifference, **mesh):
    sizes = {"profile": PROFILE, "vocab_size": 50, "dp": 1, "tp": 1}
    return reproduction_of(found, **(sizes | mesh))


@pytest.mark.parametrize(
    ("program", "row", "a", "b"),
    [
        ("decode invariant 8x1 to 16 pages", 5, "path=prefill", "batch=8,row=5"),
        ("decode invariant 8x4 to 16 pages", 0, "path=prefill", "batch=8,decode_steps=4"),
        ("verify invariant 4x32 to 5 pages", 3, "path=prefill", "batch=4,row=3,mode=dvr"),
        ("prefill invariant 4x512", 2, "tp=1,batch=1", "batch=4,row=2,chunk=512"),
        ("answer", -1, "path=prefill", "batch=8,row=3"),
    ],
)
def test_a_difference_becomes_two_settings(program, row, a, b):
    found = ask(difference(program=program, row=row))
    assert (str(found.a), str(found.b)) == (a, b)
    assert found.sampling.noise_stream == 5 and found.sampling.stop == ()
    assert found.sampling.n == 1


def test_a_probe_keeps_its_place_in_its_split_and_an_answer_its_tokens():
    assert len(ask(difference()).prompt) == 1023  # 131071 is the last of a split of 512
    assert len(ask(difference(position=127)).prompt) == 127
    assert len(ask(difference(position=0)).prompt) == 1
    whole = tuple(range(30))
    made = ask(difference(program="answer", row=-1, token_ids=whole))
    assert made.prompt == whole[:22] and made.sampling.max_tokens == 8
    wide = ask(difference(row=11), dp=2, tp=4)
    assert str(wide.b) == "tp=4,dp=2,batch=16,row=11"


def test_what_is_no_program_is_said():
    with pytest.raises(ValueError, match="'?' is no program"):
        ask(difference(program="?"))


def evidence(path, **changes) -> None:
    found = {
        "difference": dataclasses.asdict(difference()), "mesh": {"dp": 1, "tp": 2},
        "profile": dataclasses.asdict(PROFILE), "folder": "None", "time": "2026-11-23T05:35:31Z",
        "build": dataclasses.asdict(BUILD),
    }  # fmt: skip
    path.write_text(json.dumps(found | changes))


def test_evidence_is_read_as_it_was_kept(tmp_path, capsys):
    path = tmp_path / "kept.json"
    evidence(path)
    add_cause(str(path), "first\nsecond")
    assert json.loads(path.read_text())["cause"] == ["first", "second"]
    found = Evidence.read(path)
    assert found.difference == difference()
    assert (found.mesh, found.profile, found.folder) == ((1, 2), PROFILE, "")
    assert (found.backend, found.cause) == ("portable", ("first", "second"))
    assert main(["--evidence", str(path)]) == 2
    assert "its weights were random" in capsys.readouterr().err
    for text, said in (("{}", "self-check: KeyError"), ("{", "as it is not JSON: Expecting")):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            Evidence.read(path)


def test_what_evidence_says_is_said_beside_what_was_found(tmp_path):
    """The difference and its cause; another build; and what it means that nothing was found."""
    path = tmp_path / "kept.json"
    evidence(path)
    said, again = Evidence.read(path).notes(BUILD, is_found=False)
    assert "at 2026-11-23T05:35:31Z: decode invariant 8x1" in said and "00000002 by prefill" in said
    assert "did not come again" in again and "other tokens came before the probe" in again
    assert Evidence.read(path).notes(BUILD, is_found=True) == (said,)
    answer = dataclasses.asdict(difference(program="answer", row=-1))
    evidence(path, difference=answer, cause=["first operation that differs: x", "  what y"])
    *_, cause, again = Evidence.read(path).notes(BUILD, is_found=False)
    assert cause.endswith("found:\n  first operation that differs: x\n    what y")
    assert "other tokens" not in again
    bad = "x\x1b[2J\nall 9 tokens and logprobs are equal"
    evidence(
        path, time=bad, cause=[bad], difference=dataclasses.asdict(difference(what=bad)),
        build=dataclasses.asdict(BUILD) | {"jax": bad},
    )  # fmt: skip
    told = "\n".join(Evidence.read(path).notes(BUILD, is_found=True)).split("\n")
    assert all(line.isprintable() and "x\\x1b[2J\\nall" in line for line in told if "all" in line)
    assert len(told) == 4
    evidence(path)
    other = dataclasses.replace(BUILD, jax="0.0")
    (build,) = [note for note in Evidence.read(path).notes(other, is_found=True) if "jax" in note]
    assert "jax was 0.11 and is 0.0" in build and "arch" not in build


def test_a_receipt_is_an_answer_whichever_of_its_sequences_it_is():
    receipt = make_receipt()
    answer = answer_of_receipt(receipt)
    assert answer.token_ids == receipt.token_ids and answer.bits(1) == 0x80000000
    assert receipt.sampling.noise_stream == 2
    grammar = receipt.request["sampling"] | {"structured_output": {"regex": "a+"}}
    formed = dataclasses.replace(receipt, request=receipt.request | {"sampling": grammar})
    with pytest.raises(ValueError, match="structured_output"):
        answer_of_receipt(formed)
    adapted = dataclasses.replace(receipt, request=receipt.request | {"adapter": "ab"})
    with pytest.raises(ValueError, match="settings have no adapters"):
        answer_of_receipt(adapted)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.control
def test_what_an_engine_has_kept_leads_to_the_operation_and_without_the_fault_to_none(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with monkeypatch.context() as planted:
        FAULTS["a wrong row of the rope table"](planted.setattr)
        llm = detjax.LLM(batch_size=2, max_len=128, show_progress=False)
        with pytest.raises(SelfCheckError) as ended:
            llm.generate(["The old house"], detjax.SamplingParams(max_tokens=2))
        (file,) = tmp_path.iterdir()
        assert f"python -m detjax.diverge --evidence {file} names" in str(ended.value)
        argv = ["--evidence", str(file), "--cache-dir", "none"]
        assert main(argv) == 3
    said = capsys.readouterr().out
    assert "first operation that differs: position 126, cos" in said
    assert "note: the self-check said at " in said and "note: so the" not in said
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "are equal, bit for bit" in said and "note: so the difference did not come again" in said


@pytest.mark.slow
def test_a_receipt_and_a_setting_agree_and_a_forged_one_is_named(tmp_path, capsys):
    """The answer of the third of three sequences, by its own stream of noise."""
    llm = detjax.LLM(batch_size=4, max_len=128, show_progress=False)
    sampling = detjax.SamplingParams(max_tokens=5, temperature=1.0, seed=2**40, n=3)
    third = llm.generate(["The old house"], sampling)[0].outputs[2]
    path = tmp_path / "receipts.jsonl"
    path.write_text(llm.receipt(third).to_json() + "\n")
    argv = ["--receipt", str(path), "--cache-dir", "none"]
    assert main([*argv, "--b", "batch=2,row=1"]) == 0
    assert "all 5 tokens and logprobs are equal" in capsys.readouterr().out
    receipt = llm.receipt(third)
    forged = dataclasses.replace(
        receipt,
        request=receipt.request | {"sampling": receipt.request["sampling"] | {"seed": "5"}},
    )
    path.write_text(forged.to_json() + "\n")
    assert main([*argv, "--b", ""]) == 3
    assert "first token that differs: " in capsys.readouterr().out


def test_what_cannot_be_explained_says_why():
    said = explain(difference(program="?"), _model())
    assert said == "the operation could not be looked for: '?' is no program"


def _model():
    from detjax.testing.dummies import dummy_config, dummy_model

    return dummy_model(dummy_config(num_layers=1))
