# SPDX-License-Identifier: Apache-2.0
"""What is written: text while it is made, and JSON from which no bit is lost."""

import io
import json
import sys

import numpy as np

from detjax.cli import errors
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason


def lines_of(text: str) -> list[dict]:
    """Read JSON lines."""
    return [json.loads(line) for line in text.splitlines()]


def test_text_goes_to_stdout_and_everything_else_to_stderr(command, capsys):
    assert command("--prompt", "héllo") == errors.OK
    out, err = capsys.readouterr()
    assert out == "héllo0\n"
    for part in ("fingerprint 0123456789abcdef", "portable (a test)", "dp 1 x tp 1", "bfloat16"):
        assert part in err
    for part in (
        "load",
        "compile",
        "prompts",
        "completions",
        "first token",
        "digest",
        "8 tokens, stop",
    ):
        assert part in err


def test_several_completions_are_written_one_after_the_other_under_headers(command, capsys):
    assert command("--prompt", "ab", "--prompt", "longer", "--n", "2") == errors.OK
    out, err = capsys.readouterr()
    assert out.split("=== ")[1:] == [
        "prompt 0, sequence 0 ===\nab0\n",
        "prompt 0, sequence 1 ===\nab1\n",
        "prompt 1, sequence 0 ===\nlonger0\n",
        "prompt 1, sequence 1 ===\nlonger1\n",
    ]
    assert err.count("digest ") == 5 and "of all 4" in err


class Pieces(io.StringIO):
    """A stream that remembers each write."""

    def __init__(self):
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_text_streams_token_by_token_in_whole_characters(command, monkeypatch):
    out = Pieces()
    monkeypatch.setattr(sys, "stdout", out)
    assert command("--prompt", "aö你", "--stop", "你0") == errors.OK
    assert out.pieces == ["a", "ö", "\n"]


def test_a_stop_string_is_not_shown_and_its_tokens_stay_in_the_digest(command, capsys, toy):
    assert command("--prompt", "one two", "--stop", " t", "--format", "jsonl") == errors.OK
    (entry,) = lines_of(capsys.readouterr().out)
    assert entry["text"] == "one"
    assert entry["finish_reason"] == "stop"
    assert entry["token_ids"] == toy.ids_of("one t")


def test_text_held_back_for_a_stop_string_is_released_at_the_end(command, capsys):
    assert command("--prompt", "abab", "--stop", "abX", "--max-tokens", "4") == errors.OK
    assert capsys.readouterr().out == "abab\n"


def test_json_lines_hold_what_the_help_says(command, capsys, toy):
    assert command("--prompt", "ab", "--format", "jsonl", "--logprobs", "1") == errors.OK
    out, err = capsys.readouterr()
    (entry,) = lines_of(out)
    assert list(entry) == [
        "index",
        "sequence",
        "prompt_token_ids",
        "token_ids",
        "text",
        "finish_reason",
        "sampling",
        "is_deterministic",
        "logprobs",
        "top_logprobs",
        "digest",
        "fingerprint",
        "model",
    ]
    assert entry["model"] == {"name": "toy", "weight_cast": "none"}
    assert entry["sampling"]["logprobs"] == 1
    assert entry["is_deterministic"] is True
    assert entry["prompt_token_ids"] == [256, *toy.ids_of("ab")]
    assert entry["token_ids"] == [*toy.ids_of("ab0"), toy.end]
    assert (entry["index"], entry["sequence"], entry["text"]) == (0, 0, "ab0")
    assert entry["fingerprint"] == "0123456789abcdef"
    assert [top[0] for top in entry["top_logprobs"]] == [
        [token_id, logprob]
        for token_id, logprob in zip(entry["token_ids"], entry["logprobs"], strict=True)
    ]
    assert "digest" not in err


def test_logprobs_and_digest_survive_json_bit_for_bit(command, capsys):
    assert command("--prompt", "ab", "--format", "jsonl") == errors.OK
    (entry,) = lines_of(capsys.readouterr().out)
    assert "top_logprobs" not in entry
    logprobs = np.array(entry["logprobs"], np.float32)
    assert (logprobs.astype(np.float64) == np.array(entry["logprobs"])).all()
    completion = Completion(
        request_idx=0,
        sequence_idx=0,
        prompt_token_ids=(),
        token_ids=tuple(entry["token_ids"]),
        logprobs=tuple(logprobs),
        top_logprobs=(),
        finish_reason=FinishReason.STOP,
    )
    assert completion.digest() == entry["digest"]


def test_json_is_one_document(command, capsys):
    argv = ("--prompt", "ab", "--prompt", "c", "--format", "json", "--top-k", "5", "--stop", "x")
    assert command(*argv) == errors.OK
    document = json.loads(capsys.readouterr().out)
    assert [entry["text"] for entry in document["completions"]] == ["ab0", "c0"]
    assert document["sampling"]["top_k"] == 5 and document["sampling"]["stop"] == ["x"]
    assert document["stats"]["prefill_tokens"] == 10
    assert len(document["digest"]) == 64 and "check" not in document


def test_a_seed_that_is_drawn_is_written_and_gives_the_same_sampling_again(command, capsys):
    def seed_of(*argv: str) -> tuple[dict, str]:
        assert command("--prompt", "ab", "--format", "json", *argv) == 0
        out, err = capsys.readouterr()
        entry = json.loads(out)
        (completion,) = entry["completions"]
        assert completion["sampling"]["seed"] == entry["sampling"]["seed"]
        return entry["sampling"], err

    first, said = seed_of("--temperature", "1")
    assert f"{first['seed']}, drawn: --seed {first['seed']} " in said
    second, _ = seed_of("--temperature", "1")
    assert first["seed"] != second["seed"]
    again, said = seed_of("--temperature", "1", "--seed", str(first["seed"]))
    assert again == first and "drawn:" not in said
    greedy, said = seed_of()
    assert greedy["seed"] == 0 and "drawn:" not in said


def test_a_prompt_of_a_file_that_samples_has_the_drawn_seed(command, capsys, tmp_path):
    lines = [{"temperature": 1}, {"temperature": 1, "seed": 5}, {"temperature": 1, "seed": None}]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a", "sampling": s}) + "\n" for s in lines))
    assert command("--prompts-file", str(file), "--format", "jsonl") == 0
    out, err = capsys.readouterr()
    seeds = [entry["sampling"]["seed"] for entry in lines_of(out)]
    assert seeds == [seeds[0], 5, seeds[0]] and f"--seed {seeds[0]} gives" in err


def test_json_lines_come_in_order_even_if_a_later_one_ends_first(command, capsys):
    argv = ("--prompt", "a long one", "--prompt", "b", "--format", "jsonl")
    assert command(*argv) == errors.OK
    assert [e["index"] for e in lines_of(capsys.readouterr().out)] == [0, 1]


def test_a_prompt_that_is_scored_alone_has_its_line(command, capsys, tmp_path):
    """It has no token, so nothing tells of it but its completion."""
    file, wanted = tmp_path / "prompts.jsonl", {"max_tokens": 0, "prompt_logprobs": 1}
    lines = [{"prompt": "one", "sampling": wanted}, {"prompt": "two"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert command("--prompts-file", str(file), "--format", "jsonl") == errors.OK
    scored, answered = lines_of(capsys.readouterr().out)
    assert (scored["token_ids"], scored["finish_reason"]) == ([], "length")
    assert answered["text"] == "two0"
    file.write_text(json.dumps(lines[0]))
    assert command("--prompts-file", str(file)) == errors.OK
    out, err = capsys.readouterr()
    assert out == "\n" and "first token" not in err


def test_a_completion_ends_with_the_context(command, capsys, toy):
    prompt = "x" * (toy.context - 4)
    argv = ("--prompt", prompt, "--format", "jsonl", "--max-tokens", "99")
    assert command(*argv) == errors.OK
    (entry,) = lines_of(capsys.readouterr().out)
    assert len(entry["prompt_token_ids"]) + len(entry["token_ids"]) == toy.context
    assert entry["finish_reason"] == "length"


def test_stats_and_a_trace_are_written_when_asked_for(command, capsys, tmp_path):
    path = tmp_path / "trace.json"
    assert command("--prompt", "a", "--stats", "--trace", str(path)) == errors.OK
    err = capsys.readouterr().err
    assert "prefill_tokens" in err and "step_p99_s" in err
    events = json.loads(path.read_text())["traceEvents"]
    assert any(e["ph"] == "M" for e in events)


def test_completions_go_to_the_file_of_output(command, capsys, tmp_path):
    path = tmp_path / "answers"
    for form, text in (("text", "ab0\n"), ("jsonl", '"text": "ab0"'), ("json", '"digest": ')):
        assert command("-p", "ab", "-o", str(path), "--format", form) == errors.OK
        assert capsys.readouterr().out == "" and text in path.read_text()


def test_a_quiet_run_says_only_what_is_wrong(command, capsys):
    argv = ("-p", "ab", "-p", "cd", "--repeat", "3", "--check", "-q", "--stats")
    assert command(*argv) == errors.OK
    assert capsys.readouterr().err == ""
    assert command(*argv, flip=(3, 1)) == errors.BITS_DIFFER
    err = capsys.readouterr().err
    assert "run 3 differs from run 1" in err and "check failed" in err and "model" not in err
    assert command(*argv, "--top-p", "7") == errors.BAD_INPUT
    assert "--top-p 7.0 must be" in capsys.readouterr().err
