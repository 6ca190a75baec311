# SPDX-License-Identifier: Apache-2.0
"""Processes that compile a start's programs: they keep what the process that asked then reads."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from detjax.engine.running.compile_workers import divide
from detjax.engine.running.program_key import ChoiceKey, ProgramKey

START = """
import json, sys, jax
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, s, **named: compiled.append(event) if "backend_compile" in event else None)
import detjax
from detjax.engine.running import compile_workers
from detjax.engine.running import ready_programs
if sys.argv[2] != "0":
    ready_programs.num_workers = lambda *rest: int(sys.argv[2])
llm = detjax.LLM("novels-6m", cache_dir=sys.argv[1])
before = len(compiled)
if sys.argv[3] == "killed":
    start = compile_workers.CompileWorkers._start
    def started(self, job):
        start(self, job)
        self._processes[-1].kill()
    compile_workers.CompileWorkers._start = started
llm.engine.compile()
during = len(compiled) - before
out = llm.generate("The old house", detjax.SamplingParams(max_tokens=4, top_p=0.9, seed=1, temperature=1.0))
print(json.dumps({
    "during": during, "compiled": llm.engine.stats().num_compiled,
    "digest": out[0].outputs[0].digest(), "error": llm.engine.self_check_error,
}))
"""  # noqa: E501


def start(folder, *, workers: int, fate: str = "lives") -> dict:
    command = [sys.executable, "-c", START, str(folder), str(workers), fate]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_what_workers_compile_is_read_and_not_compiled_again(tmp_path):
    """With a control: without workers the same process compiles each program."""
    shared = start(tmp_path / "shared", workers=2)
    alone = start(tmp_path / "alone", workers=0)
    assert shared["compiled"] == alone["compiled"] > 8
    assert alone["during"] >= alone["compiled"]
    # Zeros and checksums are no programs of the engine, and small.
    assert shared["during"] <= alone["during"] - alone["compiled"]
    assert shared["digest"] == alone["digest"] and not shared["error"]


@pytest.mark.slow
def test_what_killed_workers_do_not_deliver_is_compiled_by_the_process_that_asked(tmp_path):
    found = start(tmp_path, workers=2, fate="killed")
    assert found["during"] >= found["compiled"] > 8 and not found["error"]


def decode(rows: int, table_len: int) -> ProgramKey:
    return ProgramKey(
        kind="decode", rows=rows, length=1, table_len=table_len, mode="invariant", weights="full"
    )


def test_programs_of_as_many_rows_go_to_one_worker():
    keys = [decode(rows, table) for table in (16, 32, 64) for rows in (1, 8, 64, 256)]
    keys += [
        ChoiceKey(rows=n, length=1, with_filters=f, num_top=0)
        for n in (1, 64)
        for f in (False, True)
    ]
    shares = list(divide(keys, 3))
    assert Counter(key for share in shares for key in share) == Counter(keys)
    where = {(type(k), k.rows): {i for i, s in enumerate(shares) if k in s} for k in keys}
    assert all(len(places) == 1 for places in where.values())
    assert [sorted(share, key=keys.index) for share in shares] == shares
    assert max(map(len, shares)) <= 7
    assert list(divide(keys[:1], 3)) == [keys[:1]]
