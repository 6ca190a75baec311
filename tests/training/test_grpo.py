# SPDX-License-Identifier: Apache-2.0
"""The whole loop: zero KL with the canonical rollout, not zero with the fast one."""

import json

import numpy as np
import pytest

from detjax.testing import assert_bitwise_equal
from detjax.training.grpo import BAD_INPUT, OK, main
from detjax.training.policy_gradient import BatchSizes, advantages, divergence
from detjax.training.tasks import Arithmetic, Gsm8k, Problem

TINY = ("--prompts", "2", "--samples", "4", "--microbatch", "8", "--batch-size", "8",
        "--no-remat", "--backend", "portable")  # fmt: skip


def rows_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.invariance
def test_rollout_and_trainer_have_zero_kl_and_the_fast_rollout_has_not(tmp_path, capsys):
    """tp 4 against tp 1, on the bundled model; the fast rollout is the control."""
    assert main([*TINY, "--steps", "2", "--rollout-tp", "4", "--out", str(tmp_path)]) == OK
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
@pytest.mark.invariance
def test_a_resumed_run_has_the_bits_of_one_without_a_stop(tmp_path):
    command = [*TINY, "--rollout", "invariant", "--rollout-tp", "1"]
    whole, first, rest = (tmp_path / name for name in ("whole", "first", "rest"))
    assert main([*command, "--steps", "2", "--out", str(whole)]) == OK
    assert main([*command, "--steps", "1", "--out", str(first), "--save", str(tmp_path)]) == OK
    saved = str(tmp_path / "step1-seed0")
    assert main([*command, "--steps", "2", "--out", str(rest), "--resume", saved]) == OK

    def facts(folder):
        rows = rows_of(folder)
        return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]

    assert facts(first) + facts(rest) == facts(whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps 0 must be at least 1"),
        (("--samples", "1", "--microbatch", "1"), "samples=1 has nothing to be compared with"),
        (("--microbatch", "7"), "microbatch=7 must divide 128 sequences"),
        (("--task", "gsm8k"), "--task gsm8k and --problems FILE go together"),
        (("--save", "x"), "give one --rollout and one seed"),
        (("--steeps", "3"), "--steeps"),
        (("--max-prompt", "4", *TINY), "the problem '"),
        (("--model", "no/such/folder/here"), "no/such/folder/here"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
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
    task, rng = Arithmetic(), np.random.default_rng(0)
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


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        BatchSizes(prompts=1, samples=2, microbatch=1, max_prompt=1, max_tokens=0)
