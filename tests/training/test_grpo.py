# SPDX-License-Identifier: Apache-2.0
"""The whole loop: zero KL with the canonical rollout, not zero with the fast one."""

import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detjax import grpo as command
from detjax.cli.errors import BAD_INPUT, OK
from detjax.grpo import main
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import load_model
from detjax.models.params import EMBED_NAME, HEAD_NAME
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, count_different_bits
from detjax.testing.dummies import dummy_config
from detjax.training import grpo
from detjax.training.checkpoint import FACTS, newest_state, restore_state, save_state
from detjax.training.grpo_runs import claimed_files
from detjax.training.policy_gradient import BatchSizes, advantages, divergence
from detjax.training.rewards import Rewarded
from detjax.training.tasks import ArithmeticTask, Gsm8k, Problem
from detjax.training.weights import serving_params

TINY = ("--prompts", "2", "--samples", "4", "--microbatch", "8", "--batch-size", "8",
        "--no-remat", "--backend", "portable")  # fmt: skip


def rows_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.invariance
def test_rollout_and_trainer_have_zero_kl_and_the_fast_rollout_has_not(tmp_path, capsys):
    """tp 4 against tp 1, on the bundled model; the fast rollout is the control."""
    assert main([*TINY, "--steps", "2", "--rollout-tp", "4", "--output", str(tmp_path)]) == OK
    rows = rows_of(tmp_path)
    exact = [row for row in rows if row["rollout"] == "invariant"]
    fast = [row for row in rows if row["rollout"] == "fast"]
    assert [row["weight_version"] for row in exact] == [0, 1]
    for row in exact:
        assert (row["kl"], row["max_difference"], row["num_different"]) == (0.0, 0.0, 0), row
        assert row["num_tokens"] >= 16
        assert row["gradient_norm"] > 0
    assert all(row["kl"] > 0 and row["num_different"] > 0 for row in fast)
    assert "0 of " in capsys.readouterr().out
    runs = json.loads((tmp_path / "runs.json").read_text())
    is_zero = [run["largest_kl"] == 0 for run in runs]
    assert is_zero == [run["rollout"] == "invariant" for run in runs]


@pytest.mark.slow
def test_a_run_leaves_a_model_that_others_can_read(tmp_path):
    """Its weights are the masters of the saved state, rounded; the first ones are others."""
    argv = [*TINY, "--rollout", "invariant", "--rollout-tp", "1", "--steps", "1"]
    assert main([*argv, "--save", str(tmp_path)]) == OK
    saved = tmp_path / "step1-seed0"
    setup = grpo.prepare(command.grpo_args(command.make_parser().parse(argv)))
    state = restore_state(saved, setup.trainer, facts=setup.facts("invariant", 0))
    first, trained = (
        load_model(
            str(folder), profile=NumericsProfile(), mesh=make_mesh(1, 1), backend=Backend.PORTABLE
        )
        for folder in (bundled_model_path(), saved / "model")
    )
    expected = jax.tree.leaves(serving_params(state.params, first))
    for found, want in zip(jax.tree.leaves(trained.own_weights()), expected, strict=True):
        assert_bitwise_equal(found, want, claim="weights of the saved model")
    changed = jax.tree.map(count_different_bits, first.own_weights(), trained.own_weights())
    assert sum(jax.tree.leaves(changed)) > 10**5
    names = {path.name for path in (saved / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory) -> Path:
    """A golden mixture of experts with linear attention, with the bundled vocabulary."""
    source = Path(__file__).parents[1] / "golden" / "hf" / "qwen3_5_moe"
    folder = tmp_path_factory.mktemp("hybrid")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model_path() / name, folder / name)
    values = json.loads((source / "config.json").read_text())
    vocab_size = json.loads((bundled_model_path() / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": vocab_size}))
    tensors = load_file(source / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in (EMBED_NAME, HEAD_NAME):
        width = tensors[name].shape[1]
        rows = rng.standard_normal((vocab_size, width), np.float32) / np.sqrt(width)
        tensors[name] = rows.astype(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.invariance
def test_a_hybrid_trains_with_zero_kl_and_is_saved(hybrid_folder, tmp_path, monkeypatch):
    """Linear attention, an output gate and experts: tp 2 against tp 1; the control is `fast`."""
    (tmp_path / "count_rewards.py").write_text(
        "def count(problem, text):\n    return len(set(text)) / (1 + len(text))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    argv = [*TINY, "--model", str(hybrid_folder), "--rollout-tp", "2", "--steps", "3",
            "--reward", "count_rewards:count"]  # fmt: skip
    exact, fast = tmp_path / "exact", tmp_path / "fast"
    saved = ["--rollout", "invariant", "--output", str(exact), "--save", str(tmp_path)]
    assert main([*argv, *saved]) == OK
    assert main([*argv, "--rollout", "fast", "--output", str(fast)]) == OK
    for row in rows_of(exact):
        assert (row["kl"], row["num_different"]) == (0.0, 0), row
        assert row["gradient_norm"] > 0
    assert all(row["num_different"] > 0 for row in rows_of(fast))
    setup = grpo.prepare(command.grpo_args(command.make_parser().parse(argv)))
    folder = tmp_path / "step3-seed0"
    state = restore_state(folder, setup.trainer, facts=setup.facts("invariant", 0))
    first, trained = (
        load_model(
            str(it), profile=NumericsProfile(), mesh=make_mesh(1, 1), backend=Backend.PORTABLE
        )
        for it in (hybrid_folder, folder / "model")
    )
    expected = jax.tree.leaves(serving_params(state.params, first))
    pairs = zip(jax.tree.leaves_with_path(trained.own_weights()), expected, strict=True)
    for (path, found), want in pairs:
        assert_bitwise_equal(found, want, claim=jax.tree_util.keystr(path))
    for name, before in first.own_weights()["layers"][0].items():
        assert count_different_bits(before, trained.own_weights()["layers"][0][name]) > 0, name


@pytest.mark.nightly
@pytest.mark.invariance
def test_a_resumed_run_has_the_bits_of_one_without_a_stop(tmp_path):
    command = [*TINY, "--rollout", "invariant", "--rollout-tp", "1"]
    whole, first, rest = (tmp_path / name for name in ("whole", "first", "rest"))
    assert main([*command, "--steps", "2", "--output", str(whole)]) == OK
    assert main([*command, "--steps", "1", "--output", str(first), "--save", str(tmp_path)]) == OK
    saved = str(tmp_path / "step1-seed0")
    assert main([*command, "--steps", "2", "--output", str(rest), "--resume", saved]) == OK

    def facts(folder):
        rows = rows_of(folder)
        return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]

    assert facts(first) + facts(rest) == facts(whole)
    # Into the --out of the first part: both parts stand there, and once only.
    again = [*command, "--steps", "2", "--output", str(first), "--resume", saved]
    assert main(again) == OK
    assert facts(first) == facts(whole)
    assert [run["first_step"] for run in json.loads((first / "runs.json").read_text())] == [0, 1]
    assert main(again) == OK  # the row behind the state is made again
    assert facts(first) == facts(whole)
    assert main([*command, "--steps", "2", "--output", str(first)]) == BAD_INPUT
    assert facts(first) == facts(whole)


@pytest.mark.nightly
@pytest.mark.invariance
def test_a_killed_run_goes_on_with_its_bits_on_another_mesh(tmp_path):
    """A process of two devices, killed after a step at random; the rest on four, tp 2."""
    argv = [*TINY, "--rollout", "invariant", "--rollout-tp", "2", "--steps", "4"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*argv, "--save", str(whole)]) == OK
    on_two = [*argv, "--devices", "2", "--save", str(killed), "--save-every", "1"]
    last = int(np.random.default_rng().integers(1, 4))
    with subprocess.Popen([sys.executable, "-m", "detjax.grpo", *on_two]) as process:
        while process.poll() is None and newest_state(killed).name != f"step{last}-seed0":
            time.sleep(0.01)
        process.kill()
    assert process.returncode < 0, "it was killed before its end"
    on_four = [*argv, "--devices", "4", "--trainer-tp", "2", "--microbatch", "2"]
    assert main([*on_four, "--save", str(killed), "--resume", str(killed)]) == OK
    setup = grpo.prepare(command.grpo_args(command.make_parser().parse(argv)))
    facts = setup.facts("invariant", 0)
    states = [
        jax.tree.leaves_with_path(restore_state(newest_state(folder), setup.trainer, facts=facts))
        for folder in (whole, killed)
    ]
    for (path, expected), (_, found) in zip(*states, strict=True):
        claim = f"killed after step {last}: {jax.tree_util.keystr(path)}"
        assert_bitwise_equal(found, expected, claim=claim)


def test_a_run_that_was_killed_is_continued_from_its_newest_finished_state(tmp_path):
    for name, is_finished in (("step2-seed0", True), ("step10-seed0", True), ("step11", False)):
        (tmp_path / name / "state").mkdir(parents=True)
        if is_finished:
            (tmp_path / name / FACTS).write_text("{}")
    assert newest_state(tmp_path) == tmp_path / "step10-seed0"
    assert newest_state(tmp_path / "step2-seed0") == tmp_path / "step2-seed0"
    assert newest_state(tmp_path / "step11") == tmp_path / "step11"


@pytest.mark.parametrize(
    ("num_gpus", "backend", "heads", "tp"),
    [
        (0, "auto", 8, 4),
        (1, "auto", 8, 1),
        (3, "auto", 8, 2),
        (8, "sm90", 8, 4),
        (1, "reference", 8, 4),
        (0, "auto", 9, 1),
        (0, "auto", 2, 2),
    ],
)
def test_the_rollout_has_as_many_devices_as_there_are_up_to_4(
    monkeypatch, num_gpus, backend, heads, tp
):
    """One GPU has one, so that a command without options runs there."""
    found = [SimpleNamespace(platform="gpu")] * num_gpus or [SimpleNamespace(platform="cpu")]
    monkeypatch.setattr(grpo.jax, "devices", lambda: found)
    config = dummy_config(num_heads=heads, num_kv_heads=heads)
    assert grpo.default_rollout_tp(config, backend) == tp


def test_a_rollout_tp_that_cannot_be_is_named_as_the_option_that_was_given(capsys):
    assert main(["--rollout-tp", "3"]) == BAD_INPUT
    assert "error: --rollout-tp 3 must be a power of two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps 0 must be at least 1"),
        (("--samples", "1", "--microbatch", "1"), "samples=1 has nothing to be compared with"),
        (("--microbatch", "7"), "microbatch=7 must divide 128 sequences"),
        (("--task", "gsm8k"), "--task gsm8k and --problems FILE go together"),
        (("--save", "x"), "give one --rollout and one seed"),
        (("--save-every", "2"), "--save-every 2 must be at least 1, and goes with --save"),
        (("--steeps", "3"), "--steeps"),
        (("--max-prompt", "4", *TINY), "the problem '"),
        (("--model", "no/such/folder/here"), "no/such/folder/here"),
        (("--reward", "shortest"), "--reward 'shortest' must be module:function"),
        (("--reward", "no_such_module:f"), "importing 'no_such_module' raised ModuleNotFoundError"),
        (("--reward", "json:no_such_function"), "has no function 'no_such_function'; it must be"),
        pytest.param(
            ("--reward", "json:loads", *TINY),
            "--reward json:loads, asked about '",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_that_names_it(arguments, message, capsys):
    assert main([*arguments, "--rollout-tp", "1"]) == BAD_INPUT
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_divergence_is_zero_only_for_equal_bits():
    logprobs = np.asarray([-0.5, -2.0, -1e-3], np.float32)
    same = divergence(logprobs, logprobs.copy())
    assert (same.kl, same.max_difference, same.num_different) == (0.0, 0.0, 0)
    moved = logprobs.copy()
    moved[1] = np.nextafter(moved[1], np.float32(0))
    other = divergence(logprobs, moved)
    assert other.num_different == 1
    assert 0 < other.kl < 1e-14
    far = divergence(np.float32([-1.0]), np.float32([-0.5]))
    assert far.kl == pytest.approx(np.exp(0.5) - 1.5)


def test_advantages_have_zero_mean_and_unit_deviation():
    assert_bitwise_equal(advantages([1.0, 1.0, 1.0]), np.zeros(3), claim="a group without news")
    found = advantages([1.0, 0.0, 0.0, 1.0])
    assert found == pytest.approx([1, -1, -1, 1], rel=1e-5)


def test_arithmetic_holds_out_what_it_never_draws():
    task, rng = ArithmeticTask(), np.random.default_rng(0)
    drawn = {task.draw(rng).prompt for _ in range(5000)}
    held_out = {problem.prompt for problem in task.held_out}
    mirrored = {"{1}+{0}=".format(*p.rstrip("=").split("+")) for p in held_out}
    assert len(held_out) == 200
    assert not drawn & (held_out | mirrored)
    assert task.reward(Problem(prompt="17+26=", answer="43\n"), "43\n") == 1.0
    for wrong in ("43", "43\n\n", " 43\n", "44\n", ""):
        assert task.reward(Problem(prompt="17+26=", answer="43\n"), wrong) == 0.0


def test_gsm8k_rewards_the_final_number(tmp_path):
    path = tmp_path / "problems.jsonl"
    answers = ["3 + 4 = 7\n#### 7", "#### 1,200", "first #### 5, no: #### $-2.50"]
    lines = [{"question": f"Q{i}?", "answer": answers[i % 3]} for i in range(20)]
    path.write_text("\n".join(map(json.dumps, lines)))
    task = Gsm8k(path)
    assert len(task.held_out) == 2
    problem = task.draw(np.random.default_rng(0))
    assert problem.prompt.startswith("Question: Q")
    thousand = Problem(prompt="", answer="1200")
    assert task.reward(thousand, "so 12 * 100.\n#### 1,200.00\n") == 1.0
    assert task.reward(thousand, "#### 1200 no, #### 1201") == 0.0
    assert task.reward(thousand, "1200") == 0.0
    assert task.reward(Problem(prompt="", answer="-2.5"), "#### $-2.5") == 1.0
    path.write_text('{"question": "Q"}\n')
    with pytest.raises(ValueError, match=r"line 1: not a GSM8K problem.*answer"):
        Gsm8k(path)
    path.write_text('{"question": "Q", "answer": "no number"}\n')
    with pytest.raises(ValueError, match="line 1: the answer has no final"):
        Gsm8k(path)


def test_a_save_folder_that_is_taken_is_refused_before_anything_is_loaded(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(grpo, "load_on_devices", None)  # not callable
    (tmp_path / "step3-seed0").mkdir(parents=True)
    (tmp_path / "step3-seed0" / FACTS).write_text("{}")
    argv = [*TINY, "--rollout", "fast", "--steps", "3", "--save"]
    assert main([*argv, str(tmp_path)]) == BAD_INPUT
    assert "step3-seed0 holds a training state already" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([*argv, str(tmp_path / "file")]) == BAD_INPUT
    assert capsys.readouterr().err.startswith("error: ")
    # A state on the way, and a folder that another run has claimed.
    argv = [*TINY, "--rollout", "fast", "--steps", "5", "--save-every", "3", "--save"]
    assert main([*argv, str(tmp_path)]) == BAD_INPUT
    assert "step3-seed0 holds a training state already" in capsys.readouterr().err
    (tmp_path / "b" / "step5-seed0").mkdir(parents=True)
    assert main([*argv, str(tmp_path / "b")]) == BAD_INPUT
    assert "step5-seed0 exists: an earlier or a running run saves" in capsys.readouterr().err


def test_a_new_run_writes_over_no_rows_and_a_second_one_at_once_is_refused(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(grpo, "load_on_devices", None)  # not callable
    argv = [*TINY, "--rollout", "fast", "--steps", "3", "--output", str(tmp_path)]
    args = command.grpo_args(command.make_parser().parse(argv))
    with claimed_files(args) as file:
        assert file is not None
        assert main(argv) == BAD_INPUT  # with no row yet
        assert f"--output {tmp_path} holds rows.jsonl of an earlier or" in capsys.readouterr().err
        file.write("a row\n")
    assert main(argv) == BAD_INPUT
    assert "give another --output" in capsys.readouterr().err
    assert (tmp_path / "rows.jsonl").read_text() == "a row\n"
    # One that resumes adds to the rows.
    with claimed_files(dataclasses.replace(args, resume=tmp_path)) as file:
        assert file is not None
        file.write("another\n")
    assert (tmp_path / "rows.jsonl").read_text() == "a row\nanother\n"
    (tmp_path / "rows.jsonl").rename(tmp_path / "runs.json")
    assert main(argv) == BAD_INPUT
    assert "holds runs.json" in capsys.readouterr().err


def test_a_run_that_fails_at_its_start_claims_nothing(tmp_path):
    out, save = tmp_path / "out", tmp_path / "save"
    argv = [*TINY, "--rollout", "fast", "--steps", "3", "--output", str(out), "--save", str(save)]
    args = command.grpo_args(command.make_parser().parse(argv))
    for _ in range(2):
        with pytest.raises(KeyError), claimed_files(args):
            assert (out / "rows.jsonl").exists() and (save / "step3-seed0").exists()
            raise KeyError
    assert not (out / "rows.jsonl").exists() and not (save / "step3-seed0").exists()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """What a command shares between its runs, given --problems and perhaps --model."""
    problems = tmp_path_factory.mktemp("problems") / "p.jsonl"

    def prepare(answer: str, *argv: str):
        rows = [{"question": f"{i}", "answer": f"#### {answer}"} for i in range(10)]
        problems.write_text("\n".join(map(json.dumps, rows)))
        argv = (*TINY, "--rollout", "invariant", "--rollout-tp", "1", *argv)
        argv = (*argv, "--task", "gsm8k", "--problems", str(problems))
        return grpo.prepare(command.grpo_args(command.make_parser().parse(argv)))

    return prepare


def test_a_run_is_not_continued_with_other_problems_or_another_model(prepared, tmp_path):
    setup = prepared("1")
    state = setup.trainer.init()
    save_state(tmp_path / "a", state, facts=setup.facts("invariant", 0))
    restore_state(tmp_path / "a", setup.trainer, facts=setup.facts("invariant", 0))
    with pytest.raises(ValueError, match="has problems_sha256="):
        restore_state(tmp_path / "a", setup.trainer, facts=prepared("2").facts("invariant", 0))
    folder = tmp_path / "model"
    shutil.copytree(bundled_model_path(), folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    other = prepared("1", "--model", str(folder))
    with pytest.raises(ValueError, match="has model_sha256="):
        restore_state(tmp_path / "a", other.trainer, facts=other.facts("invariant", 0))


def test_rows_behind_a_state_are_made_again_and_the_others_stay(tmp_path):
    """A run that was killed between two saves has them. The file may be open to append to."""
    path = tmp_path / "rows.jsonl"
    rows = [
        {"rollout": "invariant", "seed": seed, "step": step, "kl": 0.0, "reward": 1.0}
        for seed, step in ((0, 3), (0, 4), (1, 4), (0, 5))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    grpo._drop_later_rows(None, "invariant", 0, first_step=0)
    grpo._drop_later_rows(tmp_path, "invariant", 0, first_step=6)
    assert grpo.read_rows(tmp_path) == rows
    with path.open("a") as file:
        grpo._drop_later_rows(tmp_path, "invariant", 0, first_step=4)
        file.write(json.dumps(rows[1]) + "\n")
    assert grpo.read_rows(tmp_path) == [rows[0], rows[2], rows[1]]
    later = (tmp_path / grpo.LATER_ROWS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in later] == [rows[1], rows[3]]
    for steps, first_step, kept in (((0, 2, 3), 1, [0]), ((3, 4), 1, []), ((3, 4), 5, [3, 4])):
        path.write_text("".join(json.dumps(rows[0] | {"step": step}) + "\n" for step in steps))
        grpo._drop_later_rows(tmp_path, "invariant", 0, first_step=first_step)
        assert [row["step"] for row in grpo.read_rows(tmp_path)] == kept  # the others come again
    for steps, first_step, missing in (((0, 2, 3), 3, 1), ((0, 2, 3), 4, 1), ((0, 1), 4, 2)):
        path.write_text("".join(json.dumps(rows[0] | {"step": step}) + "\n" for step in steps))
        with pytest.raises(ValueError, match=f"rows.jsonl has no row of step {missing} of the inv"):
            grpo._drop_later_rows(tmp_path, "invariant", 0, first_step=first_step)
        assert [row["step"] for row in grpo.read_rows(tmp_path)] == list(steps)
    path.write_text('{"rollout": 1}\n')
    with pytest.raises(ValueError, match="rows.jsonl, line 1: not a row"):
        grpo._drop_later_rows(tmp_path, "invariant", 0, first_step=4)


@pytest.mark.parametrize(
    ("answer", "text", "is_right"),
    [
        ("1234567", "#### 1234568", False),  # alike in six digits
        ("1234567", "#### 1,234,567", True),
        ("12345678901234567890", "#### 12345678901234567891", False),  # alike as float64
        ("0.1", "#### 0.1000", True),
        ("0.1", "#### .1", True),
        ("-3", "#### -$3", True),
        ("-3", "#### $-3", True),
        ("0", "#### -0.0", True),
        ("70", "#### 0070.", True),
        ("5", "#### 5/2", False),
        ("1", "#### 1e3", False),
        ("12", "#### 12:30", False),
        ("5", "#### 5\nno: #### unknown", False),  # the last one counts
        ("3", "#### \u0663", False),  # an Arabic-Indic three
    ],
)
def test_gsm8k_compares_every_digit_of_the_last_number(tmp_path, answer, text, is_right):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join([json.dumps({"question": "Q", "answer": f"#### {answer}"})] * 10))
    task = Gsm8k(path)
    problem = task.held_out[0]
    assert task.reward(problem, f"#### {answer}") == 1.0
    assert task.reward(problem, text) == float(is_right)


def test_gsm8k_reads_line_separators_inside_a_text(tmp_path):
    path = tmp_path / "problems.jsonl"
    row = {"question": "a\u2028b\u0085c\x0bd", "answer": "x\u2029y\n#### 7"}
    path.write_text((json.dumps(row, ensure_ascii=False) + "\n") * 10 + "\n", encoding="utf-8")
    assert Gsm8k(path).held_out == (
        Problem(prompt=f"Question: {row['question']}\nAnswer:", answer="7"),
    )
    path.write_text('{"question": 7, "answer": "#### 7"}\n')
    with pytest.raises(ValueError, match="line 1: .*question must be text, not 7"):
        Gsm8k(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="line 1: not a GSM8K problem"):
        Gsm8k(path)


def test_without_optax_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "detjax.training.extras")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'detjax\[train\]'"):
        importlib.import_module("detjax.training.extras")
    program = "import sys, runpy; sys.modules['optax'] = None; "
    program += "runpy.run_module('detjax.grpo', run_name='__main__')"
    command = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert command.returncode == 2
    assert re.fullmatch(r"error: .*pip install 'detjax\[train\]'\n", command.stderr)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        BatchSizes(prompts=1, samples=2, microbatch=1, max_prompt=1, max_tokens=0)


def gsm8k_file(folder: Path) -> Path:
    rows = [
        {"question": f"Anne has {i} apples and buys {i + 2} more. How many has she now?",
         "answer": f"She has {i} + {i + 2} = {2 * i + 2} apples.\n#### {2 * i + 2}"}
        for i in range(10)
    ]  # fmt: skip
    path = folder / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.slow
@pytest.mark.invariance
def test_gsm8k_and_a_reward_of_the_users_train_with_default_lengths(tmp_path, monkeypatch):
    """The KL is 0; that the reward was asked, the mean of what it gave shows."""
    (tmp_path / "my_rewards.py").write_text(
        "def vowels(problem, text):\n"
        "    assert problem.prompt.startswith('Question: Anne') and problem.answer.isdigit()\n"
        "    return 2 + sum(c in 'aeiou' for c in text) / (1 + len(text))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    command = ["--task", "gsm8k", "--problems", str(gsm8k_file(tmp_path)), "--rollout-tp", "2",
               "--rollout", "invariant", "--backend", "portable", "--prompts", "1",
               "--samples", "2", "--microbatch", "2", "--batch-size", "2", "--steps", "2",
               "--reward", "my_rewards:vowels", "--output", str(tmp_path)]  # fmt: skip
    assert main(command) == OK
    for row in rows_of(tmp_path):
        assert (row["kl"], row["num_different"]) == (0.0, 0), row
        assert 2 < row["reward"] < 3 and row["gradient_norm"] > 0


def test_lengths_are_the_tasks_if_not_given(tmp_path):
    """GSM8K's longest problem is in: 235 tokens of the bundled model."""
    for task, lengths in ((ArithmeticTask(), (10, 5)), (Gsm8k(gsm8k_file(tmp_path)), (256, 512))):
        assert (task.max_prompt, task.max_tokens) == lengths
        rewarded = Rewarded(task, "json:loads")
        assert (rewarded.max_prompt, rewarded.max_tokens) == lengths
        assert rewarded.draw(np.random.default_rng(0)) == task.draw(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "gave None; it must give a finite number"),
        ("return float('nan')", "gave nan; it must give a finite number"),
        ("return 'good'", "gave 'good'; it must"),
        ("return 10**400", "it must give a finite number, at most 1e\\+30"),
        ("return -1e31", r"gave -1e\+31; it must give a finite number"),
        ("raise KeyError('answer')", r"raised KeyError\('answer'\)"),
        ("raise SystemExit(0)", r"raised SystemExit\(0\)"),
    ],
)
def test_a_reward_that_is_no_number_is_named(tmp_path, monkeypatch, body, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    name = f"reward_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"def f(problem, text):\n    {body}\n")
    task = Rewarded(ArithmeticTask(), f"{name}:f")
    with pytest.raises(ValueError, match=f"--reward {name}:f, asked about '43.n' .*{message}"):
        task.reward(Problem(prompt="17+26=", answer="43\n"), "43\n")
    assert task.reward_sha256 is not None


def test_a_run_is_not_continued_with_another_reward(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "constant_reward.py").write_text("def f(problem, text):\n    return 1\n")
    setup, plain = prepared("1", "--reward", "constant_reward:f"), prepared("1")
    save_state(tmp_path / "a", setup.trainer.init(), facts=setup.facts("invariant", 0))
    with pytest.raises(ValueError, match="has reward='constant_reward:f', this run None"):
        restore_state(tmp_path / "a", plain.trainer, facts=plain.facts("invariant", 0))
