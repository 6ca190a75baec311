# SPDX-License-Identifier: Apache-2.0
"""`--check`: how the runs differ, and what is said when a bit does."""

import dataclasses
import json
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

from detjax.cli import check, errors
from detjax.engine.config import EngineConfig
from detjax.engine.outputs.completion import Completion, CompletionOutput
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams


def test_runs_that_agree_are_reported_with_their_digest(command, capsys):
    shapes: list[EngineConfig] = []
    argv = ("--prompt", "abcdefgh", "--prompt", "cd", "--repeat", "4", "--check")
    assert command(*argv, "--format", "json", shapes=shapes) == errors.OK
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["check"] == {"num_runs": 4, "differences": []}
    assert f"all 4 runs equal, digest {document['digest']}" in err
    assert [shape.batch_size for shape in shapes] == [8, 1, 3, 2]
    assert len({shape.prefill_chunk for shape in shapes}) == 4
    assert "runs to compare" in err and "reversed" in err


def test_one_bit_that_differs_fails_the_check_and_is_shown(command, capsys):
    argv = ("--prompt", "ab", "--prompt", "cd", "--n", "2", "--repeat", "4", "--check")
    assert command(*argv, flip=(3, 2)) == errors.BITS_DIFFER
    out, err = capsys.readouterr()
    assert out.count("===") == 8  # the first run is written all the same
    assert "run 2 of 4: equal to run 1" in err
    assert "run 3 of 4: 4 completions differ from run 1" in err
    assert "run 3 differs from run 1 at prompt 0, sequence 0, token 2: logprob -" in err
    assert err.count("(0x") == 8 and "the 4 runs are not equal" in err


def test_a_single_prompt_gets_neighbours_whose_answers_nobody_sees(command, capsys, toy):
    asked: list[int] = []

    def answer(request: Request, seq: int) -> list[int]:
        asked.append(len(request.prompt_token_ids))
        return toy.echo(request, seq)

    argv = ("--prompt", "abcdefgh", "--repeat", "3", "--check")
    assert command(*argv, answer=answer) == errors.OK
    out, err = capsys.readouterr()
    assert out == "abcdefgh0\n" and len(set(asked)) > 1
    assert "all 3 runs equal" in err


def test_a_check_sees_a_row_that_depends_on_its_neighbours(command, capsys, toy):
    lengths: set[int] = set()

    def answer(request: Request, seq: int) -> list[int]:
        lengths.add(len(request.prompt_token_ids))
        return [*toy.echo(request, seq)[:-1], *toy.ids_of(str(len(lengths))), toy.end]

    argv = ("--prompt", "abcdefgh", "--repeat", "3", "--check")
    assert command(*argv, answer=answer) == errors.BITS_DIFFER
    assert "against" in capsys.readouterr().err


def test_the_first_run_of_a_check_is_the_one_that_was_asked_for(command, capsys):
    shapes: list[EngineConfig] = []
    argv = ("--prompt", "ab", "--batch-size", "6", "--prefill-chunk", "5", "--dp", "2")
    assert command(*argv, "--repeat", "2", "--check", shapes=shapes) == errors.OK
    assert (shapes[0].batch_size, shapes[0].prefill_chunk) == (6, 5)
    assert shapes[1].batch_size % 2 == 0


def test_a_check_of_dvr_compares_it_with_invariant(command, capsys):
    shapes: list[EngineConfig] = []
    argv = ("--prompt", "ab", "--mode", "dvr", "--draft-weights", "int8", "--verify-window", "9")
    argv += ("--decode-steps", "4")
    assert command(*argv, "--repeat", "4", "--check", shapes=shapes) == errors.OK
    assert [shape.mode for shape in shapes] == ["dvr", "invariant", "dvr", "invariant"]
    assert [shape.draft_weights for shape in shapes] == ["int8", "full", "int8", "full"]
    assert [shape.decode_steps for shape in shapes] == [4, 1, 4, 1]
    assert {shape.verify_window for shape in shapes} == {9}
    assert "verified by canonical ones" in capsys.readouterr().err


def test_a_check_of_a_draft_model_compares_it_with_no_drafts(command, tmp_path, toy):
    shapes: list[EngineConfig] = []
    draft = toy.write_model(tmp_path / "draft")
    save_file({"x": np.zeros(1, np.float32)}, draft / "model.safetensors")
    argv = ("--prompt", "ab", "--speculative-config", json.dumps({"model": str(draft)}))
    assert command(*argv, "--repeat", "3", "--check", shapes=shapes) == errors.OK
    assert [shape.draft_weights for shape in shapes] == ["draft_model", "full", "draft_model"]
    assert {shape.verify_window for shape in shapes} == {4}


def test_fast_asks_for_no_deterministic_answer(command, capsys):
    asked: list[bool] = []

    def answer(request: Request, seq: int) -> list[int]:
        asked.append(request.is_deterministic)
        return [97, 258]

    argv = ("--prompt", "ab", "--mode", "fast", "--repeat", "2", "--check", "--batch-size", "3")
    assert command(*argv, answer=answer) == errors.OK
    assert asked and not any(asked)
    assert "no claim" in capsys.readouterr().err


def other_process(command, capsys, monkeypatch, *, flip: tuple[int, int]) -> list[str]:
    """Let the command itself stand for the new process; returns how that was called."""
    called: list[str] = []

    def run(argv, *, env, **options):
        assert argv[1:3] == ["-m", "detjax.generate"] and "JAX_COMPILATION_CACHE_DIR" not in env
        called.extend(argv[3:])
        model = next(i for i in called if i.startswith("--model="))
        called.remove(model)
        code = command(*called, flip=flip)
        return subprocess.CompletedProcess(argv, code, capsys.readouterr().out.encode(), b"oh")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "anywhere")
    return called


@pytest.mark.parametrize(
    ("flip", "code", "says"),
    [
        ((0, 0), errors.OK, "a new process, which compiled anew, gave the same bits"),
        ((8, 1), errors.BITS_DIFFER, "the new process differs at prompt 0, sequence 0, token 1"),
    ],
)
def test_a_new_process_is_asked_the_same_and_compared(
    command, capsys, monkeypatch, flip, code, says
):
    called = other_process(command, capsys, monkeypatch, flip=flip)
    argv = ("--prompt", "ab\nc", "--prompt=-x", "--stop", "q", "--stop=-r", "--temperature", "0.5")
    assert command(*argv, "--seed", "3", "--check-process", "--stats") == code
    assert says in capsys.readouterr().err
    for option in ("--stop=q", "--stop=-r", "--temperature=0.5", "--seed=3", "none"):
        assert option in called
    assert not {"--check-process", "--stats", "--prompt"} & set(called)


def test_a_new_process_that_fails_says_why(command, capsys, monkeypatch):
    failed = subprocess.CompletedProcess([], 2, b"", b"more\nerror: no such thing\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert command("--prompt", "a", "--check-process") == errors.BAD_INPUT
    said = "--check-process: the other process ended with 2: error: no such thing"
    assert said in capsys.readouterr().err


def test_an_expected_digest_is_compared(command, capsys):
    argv = ("--prompt", "ab", "--prompt", "cd")
    assert command(*argv, "--format", "json") == errors.OK
    digest = json.loads(capsys.readouterr().out)["digest"]
    assert command(*argv, "--expect-digest", digest) == errors.OK
    assert f"digest {digest} is the expected one" in capsys.readouterr().err
    assert command(*argv, "--expect-digest", digest, flip=(8, 1)) == errors.BITS_DIFFER
    assert f"is not the expected {digest}" in capsys.readouterr().err


def test_what_is_no_digest_is_refused(command, capsys):
    assert command("--prompt", "ab", "--expect-digest", "AB12") == errors.BAD_INPUT
    assert "--expect-digest 'AB12' is no digest" in capsys.readouterr().err


def completion(**changes) -> CompletionOutput:
    """A record of two tokens."""
    base = Completion(
        request_idx=1,
        sequence_idx=0,
        prompt_token_ids=(1,),
        token_ids=(5, 6),
        logprobs=(np.float32(-0.5), np.float32(0.0)),
        top_logprobs=(((5, np.float32(-0.5)),), ((6, np.float32(0.0)),)),
        finish_reason=FinishReason.LENGTH,
    )
    return CompletionOutput(
        completion=dataclasses.replace(base, **changes),
        text="",
        fingerprint="",
        sampling=SamplingParams(),
        is_deterministic=True,
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_ids": (5, 7)}, "token 1: id 6 (0x00000006) against 7 (0x00000007)"),
        (
            {"logprobs": (np.float32(-0.5), np.float32(-0.0))},
            "token 1: logprob 0.0 (0x00000000) against -0.0 (0x80000000)",
        ),
        (
            {"top_logprobs": (((4, np.float32(-0.5)),), ((6, np.float32(0.0)),))},
            "token 0: top logprob 0: id 5 -0.5 (0xbf000000) against 4 -0.5 (0xbf000000)",
        ),
        (
            {"token_ids": (5,), "logprobs": (np.float32(-0.5),)},
            "length: 2 tokens against 1",
        ),
        ({"finish_reason": FinishReason.STOP}, "end: length against stop"),
    ],
)
def test_the_first_difference_is_described_in_bits(changes, says):
    assert check.differences([completion()], [completion()]) == []
    (line,) = check.differences([completion()], [completion(**changes)])
    assert line == f"prompt 1, sequence 0, {says}"
