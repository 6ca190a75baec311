# SPDX-License-Identifier: Apache-2.0
"""Settings and answers as text, and what is refused by name."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from detjax.diverge.__main__ import main
from detjax.diverge.divergence import Divergence, TokenDifference
from detjax.diverge.find import first_token
from detjax.diverge.setting import RecordedAnswer, Setting
from detjax.engine.outputs.completion import Completion, CompletionOutput
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.sampling_params import SamplingParams


@pytest.mark.parametrize("text", ["", "tp=2,batch=8,chunk=16", "mode=fast,backend=portable"])
def test_a_setting_reads_what_it_writes(text):
    setting = Setting.parse(text)
    assert Setting.parse(str(setting)) == setting
    assert Setting.parse(" tp = 2 , batch=8,") == Setting(tp=2, batch=8)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bach=8", "no setting 'bach'; did you mean batch?"),
        ("dtype=float32", "no setting 'dtype'; known are tp, dp, batch"),
        ("tp", "'tp' must be tp=VALUE, as tp=1"),
        ("tp=two", "tp=two must be an integer"),
        ("tp=0", "tp=0 must be at least 1"),
        ("tp=2,tp=4", "tp is given twice"),
        ("batch=4,row=4", "row=4 must be from 0 to batch - 1 = 3"),
        ("batch=3,dp=2", "batch=3 must be a multiple of dp=2"),
        ("mode=quick", "mode=quick must be one of"),
        ("path=verify", "path=verify must be one of"),
        ("pages=-1", "pages=-1 must be at least 0"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(text, says):
    with pytest.raises(ValueError) as raised:
        Setting.parse(text)
    assert says in str(raised.value)


def entry(**changes) -> dict:
    completion = Completion(
        request_idx=0,
        sequence_idx=0,
        prompt_token_ids=(1, 2),
        token_ids=(3, 4),
        logprobs=(np.float32(-0.1), np.float32(-2.5)),
        top_logprobs=((), ()),
        finish_reason=FinishReason.LENGTH,
    )
    completion = dataclasses.replace(completion, **changes)
    return CompletionOutput(
        completion=completion, text="x", fingerprint="f" * 16, sampling=SamplingParams(),
        is_deterministic=True,
    ).as_dict()  # fmt: skip


def test_an_answer_is_read_from_a_line_bit_for_bit():
    answer = RecordedAnswer.from_line(json.dumps(entry()))
    assert answer.prompt_token_ids == (1, 2) and answer.token_ids == (3, 4)
    assert [answer.bits(i) for i in range(2)] == [0xBDCCCCCD, 0xC0200000]
    assert answer.fingerprint == "f" * 16


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[]", "must be a JSON object"),
        ("{}", "no answer: KeyError('token_ids')"),
        (json.dumps(entry() | {"token_ids": [3, 5]}), "the record was changed"),
        (json.dumps(entry(sequence_idx=1)), "sequence=1 must be 0"),
        (json.dumps(entry() | {"adapter": "ab"}), "the adapter ab, and settings have no adapters"),
        (json.dumps(entry(token_ids=(), logprobs=(), top_logprobs=())), "at least one token"),
        ("{", "Expecting"),
    ],
)
def test_what_is_no_answer_is_refused(line, says):
    with pytest.raises(ValueError) as raised:
        RecordedAnswer.from_line(line)
    assert says in str(raised.value)


def test_the_first_token_differs_by_its_id_one_bit_of_its_logprob_or_its_absence():
    base = RecordedAnswer.from_dict(entry())
    one_bit = np.uint32(0xC0200001).view(np.float32)
    changed = dataclasses.replace(base, logprobs=(base.logprobs[0], one_bit))
    shorter = dataclasses.replace(base, token_ids=(3,), logprobs=base.logprobs[:1])
    assert first_token(base, base, prompt_len=2) is None
    assert first_token(base, changed, prompt_len=2) == TokenDifference(
        index=1, position=3, a=(4, 0xC0200000), b=(4, 0xC0200001)
    )
    found = first_token(base, shorter, prompt_len=2)
    assert found is not None and found.b is None and "has ended" in str(found)
    whole = Divergence(
        a="x", b="y", num_tokens=1, is_deep=False, token=found, site=None, notes=("n",)
    )
    assert whole.is_found and json.loads(json.dumps(whole.to_dict()))["token"]["index"] == 1
    assert str(whole).endswith("note: n")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--b", "bach=2", "--prompt", "x"], "--b: no setting 'bach'"),
        (["--a", "tp=x", "--prompt", "x"], "--a: tp=x must be an integer"),
        (["--b", "batch=2"], "there is no prompt"),
        (["--prompt", "x", "--line", "2"], "--line is of --answer"),
        (["--answer", "nowhere.jsonl"], "--answer nowhere.jsonl: "),
        (["--answer", "nowhere.jsonl", "--a", "tp=1"], "in place of --a and --prompt"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature -1.0 must be 0"),
        (["--receipt", "nowhere.jsonl"], "--receipt nowhere.jsonl: "),
        (["--evidence", "nowhere.json"], "--evidence nowhere.json: "),
        (["--receipt", "x", "--answer", "y"], "--answer and --receipt stand for one side"),
        (["--evidence", "x", "--prompt", "y"], "in place of --a and --prompt"),
        (["--evidence", "x", "--line", "2"], "--line is of --answer or --receipt"),
        (["tp=2", "--prompt", "x"], "settings given: 1; give two, such as tp=1 tp=2"),
        (["tp=x", "tp=2", "--prompt", "x"], "--a: tp=x must be an integer"),
        (["tp=2", "bach=2", "--prompt", "x"], "--b: no setting 'bach'"),
        (["tp=2", "tp=1", "--b", "tp=2", "--prompt", "x"], "'tp=2' stands for --a or --b"),
        (["tp=2", "tp=1", "--receipt", "x"], "settings given: 2; give one beside --receipt"),
        (["tp=y", "--answer", "x"], "--b: tp=y must be an integer"),
        (["tp=2", "--evidence", "x"], "--evidence has its own settings; leave 'tp=2' out"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(argv, says, capsys):
    assert main(argv) == 2
    assert says in capsys.readouterr().err


def test_one_of_several_answers_must_be_chosen(tmp_path, capsys):
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join([json.dumps(entry())] * 2))
    assert main(["--answer", str(path)]) == 2
    assert "it has 2 answers; choose one with --line N" in capsys.readouterr().err
    assert main(["--answer", str(path), "--line", "3"]) == 2
    assert "--line 3 must be from 1 to 2" in capsys.readouterr().err


DOCS = Path(__file__).parents[2] / "docs" / "diverge.md"


@pytest.mark.nightly
def test_the_example_of_the_docs_is_what_the_command_writes(capsys):
    """But for numbers, which are of the processor: `fast` promises nothing."""
    text = DOCS.read_text().partition("## An example")[2]
    command, output = re.findall(r"^```(?:bash)?\n(.*?)\n```$", text, re.M | re.S)[:2]
    program, _, module, *argv = shlex.split(command.replace("\\\n", ""))
    assert (program, module) == ("python", "detjax.diverge")
    assert main([*argv, "--cache-dir", "none"]) == 3
    assert _without_numbers(capsys.readouterr().out.strip()) == _without_numbers(output)


def _without_numbers(text: str) -> str:
    return re.sub(r"-?\b(0x[0-9a-f]+|\d[\d.e-]*)", "#", text)
