# SPDX-License-Identifier: Apache-2.0
"""Engines are asked the same, timed by one protocol, and an engine that fails stops no other."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import peer_engine, peers
from benchmarks.peer_engine import KINDS, MEASURES, SIZES, AbstractPeer

PREFILL_S, STEP_S, SLOWER_S = 0.001, 0.25, 5.0
TINY = SIZES["tiny"]


class FakePeer(AbstractPeer):
    """Takes a time for each token of a prompt and for each step; the first call is slower."""

    def __init__(self, num_lost: int = 0):
        self.now_s, self.asked, self._num_lost = 0.0, [], num_lost

    def generate(self, prompts, num_tokens):
        self.now_s += PREFILL_S * sum(map(len, prompts)) + STEP_S * num_tokens
        self.now_s += 0.0 if self.asked else SLOWER_S
        self.asked.append((len(prompts), len(prompts[0]), num_tokens))
        return [num_tokens - self._num_lost] * len(prompts)

    def facts(self):
        return {}

    def measure(self, *measures):
        return peer_engine.measure(self, TINY, measures, clock=lambda: self.now_s)


def test_a_step_is_the_time_of_many_tokens_less_that_of_few():
    peer = FakePeer()
    row = peer.measure(*MEASURES)
    # Neither the prompts nor the first call, which fills the slots, count.
    assert row["decode_ms"] == {"1": 1e3 * STEP_S, "2": 1e3 * STEP_S}
    assert row["prefill_40_ms"] == pytest.approx(1e3 * (40 * PREFILL_S + STEP_S))
    assert row["offline_3x5_4_s"] == pytest.approx(15 * PREFILL_S + 4 * STEP_S)
    seconds = row["throughput_3x6_6_s"]
    assert seconds == pytest.approx(18 * PREFILL_S + 6 * STEP_S)
    assert row["throughput_3x6_6_tokens_per_s"] == pytest.approx(18 / seconds, abs=0.06)
    assert peer.asked == [
        (2, 5, 2), *[(1, 9, 2)] * 2, (1, 9, 6), *[(2, 9, 2)] * 2, (2, 9, 6), *[(1, 40, 1)] * 3,
        (3, 5, 4), (3, 6, 6),
    ]  # fmt: skip
    asked = {(len(prompts), len(prompts[0]), num) for prompts, num in peer_engine.calls(TINY)}
    assert asked == set(peer.asked[1:]), "what is compiled ahead is what is asked"


def test_parts_are_measured_alone():
    assert list(FakePeer().measure("prefill")) == ["prefill_40_ms", "prefill_s"]
    assert list(FakePeer().measure("offline")) == ["offline_3x5_4_s"]


@pytest.mark.control
def test_control_answers_of_another_length_are_not_timed():
    with pytest.raises(RuntimeError, match=r"2 answers of 2 tokens were asked for.* \[1\]"):
        FakePeer(num_lost=1).measure("decode")


def test_engines_have_the_same_prompts_and_no_two_are_alike():
    first, again = (peer_engine.draw_prompts(4, 50, TINY) for _ in range(2))
    assert first == again and len({tuple(one) for one in first}) == 4
    assert all(0 <= token < TINY.vocab_size for one in first for token in one)


# ------------------------------------------------------------------------------------ processes


SCRIPT = """
import json, os, pathlib, sys, time
files, what = pathlib.Path(sys.argv[1]), sys.argv[2]
print("(Core) INFO [cuda.py:1] Using FLASH_ATTN attention backend", flush=True)
if what == "hangs":
    time.sleep(60)
if what == "fails":
    sys.exit("no kernel image is available")
(files / "ready").touch()
while not (files / "go").exists():
    time.sleep(0.01)
row = {"start_s": 1.0, "decode_ms": {"1": 2.0}, "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}
(files / "part").write_text(json.dumps(row))
(files / "part").rename(files / "row.json")
time.sleep(60)
"""
WHAT = {"vllm": "fails", "vllm-fp8": "hangs"}


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Processes that stand for engines: some fail, and none ends by itself when it is done."""
    started = []

    def start(name, gpu_idx, args):
        files = tmp_path / name
        files.mkdir()
        command = [sys.executable, "-c", SCRIPT, str(files), WHAT.get(name, "")]
        with open(files / "log", "wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu_idx)},
            )  # fmt: skip
        started.append(process)
        return peers.Worker(
            name=name, gpu_idx=gpu_idx, process=process, files=files, began_s=time.monotonic()
        )

    monkeypatch.setattr(peers.Worker, "start", start)
    return started


def test_engines_run_side_by_side_and_one_that_fails_stops_no_other(processes):
    names = ["detjax-bfloat16", "vllm", "vllm-fp8", "detjax-int8"]
    args = argparse.Namespace(limit_s=2.0)
    found = {worker.name: (worker, row) for worker, row in peers.run_side_by_side(names, args)}
    assert list(found)[0] == "vllm"
    for name, other in (("detjax-bfloat16", "detjax-int8"), ("detjax-int8", "detjax-bfloat16")):
        worker, row = found[name]
        assert row["decode_ms"] == {"1": 2.0} and row["gpu"] == str(names.index(name))
        assert row["chosen"] == ["Using FLASH_ATTN attention backend"]
        assert worker.beside == [other], "what failed ran beside nobody"
    assert "exit status 1" in found["vllm"][1]["error"]
    assert "no kernel image is available" in found["vllm"][1]["log"]
    assert "while it was opened" in found["vllm-fp8"][1]["error"]
    assert all(process.poll() is not None for process in processes)


def test_an_engine_gets_a_gpu_that_this_process_may_use(monkeypatch):
    """GPU 1 of a host is the first of a process that sees it alone; another may hold GPU 0."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert peers.visible_gpu(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert peers.visible_gpu(0) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5a")
    assert peers.visible_gpu(1) == "GPU-5a"


def test_an_engine_ends_with_the_process_that_has_started_it(tmp_path):
    """A run that is killed leaves no engine on a GPU."""
    engine = (
        "import os, pathlib, sys, time; from benchmarks.peer_engine import end_with_parent;"
        "end_with_parent(); pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    )
    run = (
        "import pathlib, subprocess, sys, time;"
        "subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True);"
        "[time.sleep(0.01) for _ in range(2000) if not pathlib.Path(sys.argv[2]).exists()]"
    )
    file = tmp_path / "pid"
    subprocess.run([sys.executable, "-c", run, engine, str(file)], check=True, timeout=30)
    for _ in range(200):
        # What has ended and was not waited for still has a folder, without a command line.
        if not (Path("/proc") / file.read_text() / "cmdline").exists():
            break
        if not (Path("/proc") / file.read_text() / "cmdline").read_bytes():
            break
        time.sleep(0.02)
    else:
        pytest.fail("the engine has outlived the run")


def test_rows_are_appended_and_name_engine_gpu_and_error(processes, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "check", lambda parser, args: None)
    monkeypatch.setattr(peers, "write_random", lambda name, folder: Path(folder).mkdir())
    out = tmp_path / "rows.jsonl"
    argv = ["--model", "tiny", "--backend", "portable", "--folder", str(tmp_path / "models"),
            "--out", str(out), "--limit-s", "20", "--engines"]  # fmt: skip
    assert peers.main([*argv, "detjax-bfloat16"]) == 0
    assert peers.main([*argv, "vllm"]) == 3
    ours, theirs = map(json.loads, out.read_text().splitlines())
    assert ours["engine"] == KINDS["detjax-bfloat16"].title and ours["version"] == ours["commit"]
    assert (ours["gpu_idx"], ours["beside"], ours["slots"]) == (0, [], TINY.slots)
    assert "exit status 1" in theirs["error"] and "decode_ms" not in theirs
    assert "exit status 1" in capsys.readouterr().err


def test_what_cannot_run_is_refused_by_name(capsys, tmp_path):
    for argv, message in (
        (["--vllm-path", str(tmp_path), "--engines", "detjax-int8", "vllm", "vllm-fp8"],
         f"--engines vllm vllm-fp8 need vllm, which is not in {tmp_path}: install vllm==0.26.0"),
        (["--sglang-path", f"{tmp_path}{os.pathsep}{tmp_path}", "--engines", "sglang"],
         "--engines sglang need sglang, which is not in"),
        (["--gpus", "0", "--engines", "detjax-int8"], "--gpus 0 must be at least 1"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            peers.main(argv)
        assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_detjax_is_measured_in_each_form_of_its_weights(tmp_path):
    out = tmp_path / "rows.jsonl"
    names = ["detjax-bfloat16", "detjax-int8", "detjax-fp8"]
    code = peers.main(
        ["--model", "tiny", "--backend", "portable", "--folder", str(tmp_path), "--out", str(out),
         "--engines", *names]
    )  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert code == 0 and [row["name"] for row in rows] == names
    for row in rows:
        assert set(row["decode_ms"]) == {"1", "2"} and row["offline_3x5_4_s"] > 0
        assert row["compiled_late_s"] == 0, "all that is needed is compiled ahead"
    assert len({row["fingerprint"] for row in rows}) == 3
