# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.certify`: what counts as proven, what it finds, and the whole command."""

import json
import os
import subprocess
import sys
import weakref
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax.engine.sampling.sampling as sampling
from detjax.certify.__main__ import main
from detjax.certify.background import background_jobs
from detjax.certify.cases import _twice, answer_cases, program_cases
from detjax.certify.certificate import CLAIMS, Certificate, Outcome, compare
from detjax.certify.coverage import REFUSED, TESTED, THIS, coverage_map, refusals
from detjax.certify.machine import CLAIM, compare_arrays, machine_cases, why_not_applicable
from detjax.certify.page import render
from detjax.certify.requests import check_max_len, forced, make_requests
from detjax.certify.restart import new_process
from detjax.certify.subject import Subject, ask, order_probe
from detjax.engine.config import EngineConfig
from detjax.engine.heap import frozen_heap
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.self_check.evidence import FOLDER_VARIABLE
from detjax.models.config import ModelConfig
from detjax.models.family import Family
from detjax.models.hf_config import config_from_hf
from detjax.models.loading import LoadedModel
from detjax.models.registry import FAMILIES
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.backend_choice import why_not_runnable
from detjax.testing.dummies import dummy_config, dummy_model


@cache
def model() -> LoadedModel:
    return dummy_model(dummy_config(num_layers=1, vocab_size=300))


def outcome(claim: str = "batch-invariant", *, different: int = 0, **changes) -> Outcome:
    fields = {
        "case": "all <together>", "is_control": False, "num_compared": 9, "first": "",
        "seconds": 1.0, "round_idx": 0,
    }  # fmt: skip
    return Outcome(claim=claim, num_different=different, **(fields | changes))


CASE, WRONG = outcome(), outcome(different=1, first="request <0>")
CONTROL, BLIND = outcome(is_control=True, different=4), outcome(is_control=True)
EMPTY = outcome(num_compared=0)


@pytest.mark.parametrize(
    ("outcomes", "is_proven"),
    [
        ([CASE, CONTROL], True),
        ([CASE, CONTROL, BLIND], True),
        ([CASE], False),
        ([CASE, BLIND], False),
        ([CASE, WRONG, CONTROL], False),
        ([CONTROL], False),
        ([EMPTY, CONTROL], False),
        ([], False),
    ],
)
def test_a_claim_is_proven_by_cases_that_hold_and_a_control_that_differs(outcomes, is_proven):
    certificate = Certificate(facts={"model": "<b>"}, outcomes=outcomes)
    assert certificate.is_proven is is_proven
    assert certificate.json()["proven"] is is_proven
    page = render(certificate)
    assert ("All claims hold" in page) is is_proven
    assert "<b>" not in page and "<together>" not in page and "&lt;b&gt;" in page


def test_every_bit_and_every_missing_token_counts():
    want = [((5, 1), (6, 2)), ((7, 3),)]
    assert compare(want, want) == (3, 0, "", -1)
    for got in ([((5, 1), (6, 3)), want[1]], [((5, 1),), want[1]], [((5, 1), (7, 2)), want[1]]):
        num_compared, num_different, first, _ = compare(got, want)
        assert (num_compared, num_different) == (3, 1)
        assert first.startswith("request 0, token 1: ")


def test_requests_lie_around_boundaries_and_every_round_has_others():
    profile = NumericsProfile()
    rounds = [make_requests(i, vocab_size=50, max_len=768, profile=profile) for i in range(3)]
    assert {127, 129, 512, 760} <= {len(r.prompt_token_ids) for r in rounds[0]}
    assert all(len(r.prompt_token_ids) + r.sampling.max_tokens <= 768 for s in rounds for r in s)
    prompts = [r.prompt_token_ids for some in rounds for r in some]
    assert len(set(prompts)) == len(prompts) == 24
    answers = [tuple((t, 0) for t in range(8))] * 8
    pairs = forced(rounds[0], answers)
    assert len(pairs) == 16
    assert all(r.sampling.max_tokens == 1 and len(a) == 1 for r, a in pairs)
    for i, request in enumerate(rounds[0]):
        keyed = request.sampling.for_prompt(request.prompt_token_ids)
        for asked, _ in pairs[2 * i : 2 * i + 2]:
            assert (asked.sampling.seed, asked.sampling.noise) == (keyed.seed, keyed.noise)
    assert any(r.sampling.noise == "per_prompt" and r.sampling.temperature > 0 for r in rounds[0])


def test_a_length_is_refused_with_which_no_prompt_fills_a_page(capsys):
    """With the smallest that is allowed, a prompt is found in the cache."""
    assert main(["--max-len", "128", "--devices", "1"]) == 2
    assert "error: --max-len 128 must be at least 137 for the cases of" in capsys.readouterr().err
    profile = NumericsProfile()
    with pytest.raises(ValueError, match="max_len=136 must be at least 137"):
        check_max_len(136, profile)
    check_max_len(137, profile)
    config = EngineConfig(batch_size=2, prefill_chunk=64, max_len=137, self_check="off")
    requests = make_requests(0, vocab_size=300, max_len=137, profile=profile)
    longest = max(requests, key=lambda r: len(r.prompt_token_ids))
    subject = Subject(model(), config)
    want = subject.alone([longest])
    assert _twice(subject, [longest], want) == (len(want[0]), 0, "", -1)


def test_the_map_names_what_is_refused_and_what_was_not_run():
    rows = coverage_map(model(), modes={"invariant"}, is_proven=True)
    state = {row[:4]: row[4] for row in rows}
    assert state[THIS, "bfloat16", "reference", "invariant"] == "proven here"
    for kernels, mode in (("reference", "dvr"), ("portable", "invariant")):
        assert state[THIS, "bfloat16", kernels, mode] == "not covered by this run"
    assert state[THIS, "float32", "portable", "invariant"] == "not covered by this run"
    assert {s for (*_, mode), s in state.items() if mode == "fast"} == {"no claim is made"}
    for name in (THIS, *(family.name for family in FAMILIES)):
        assert state[name, "float32", "sm90", "invariant"].startswith("refused: ")
        assert state[name, "float32", "reference", "invariant"].startswith("refused: ")
    assert state["qwen3", "bfloat16", "sm90", "dvr"].startswith("tested: tests/invariance/")
    assert state["mistral", "bfloat16", "portable", "dvr"] == "not covered"
    assert len(state) == len(rows) == 6 * len(Backend) * (1 + len(FAMILIES))


def typical_config(family: Family) -> ModelConfig:
    """A family's defaults, as a model.

    Where it has no heads by default, as their width is no multiple of their number, those of most.
    """
    head_dim = family.defaults["head_dim"] or 128
    return config_from_hf({"architectures": [family.architectures[0]], "head_dim": head_dim})


@pytest.mark.slow
def test_kernels_refuse_in_every_family_what_the_map_says():
    for family in FAMILIES:
        found = refusals(typical_config(family), 1)
        assert {key: why for key, why in found.items() if why} == REFUSED, family.name


def test_every_test_that_the_map_cites_is_there():
    names = {family.name for family in FAMILIES}
    for (family, dtype, _, mode), test in TESTED.items():
        assert family in names and dtype in ("bfloat16", "float32") and mode != "fast"
        path, _, function = test.partition("::")
        assert f"def {function}" in (Path(__file__).parents[2] / path).read_text()


def test_the_probe_depends_on_order():
    assert "change when they are added backwards" in order_probe(model())


def test_a_claim_that_is_not_applicable_is_told_and_not_counted():
    reason = why_not_applicable(Backend.PORTABLE)
    assert "the portable backend runs on a CPU" in reason
    certificate = Certificate(
        facts={"model": "m"}, outcomes=[CASE, CONTROL], not_applicable={CLAIM: "<none>"}
    )
    assert certificate.is_proven and CLAIM not in certificate.json()["claims"]
    assert certificate.json()["not_applicable"] == {CLAIM: "<none>"}
    assert "Not applicable: &lt;none&gt;" in render(certificate)


def test_arrays_are_compared_by_their_bits():
    want = np.asarray([[0.0, np.nan], [1.0, 2.0]], np.float32)
    assert compare_arrays([want], [want.copy()]) == (4, 0, "", -1)
    found = compare_arrays([np.where(want == 0, np.float32(-0.0), want)], [want])
    assert found[:3] == (4, 1, "element (0, 0): 0x80000000 is not 0x0")


@pytest.fixture
def no_compiler_no_test():
    if why := why_not_runnable(Backend.REFERENCE):
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "is_proven"), [("reference", True), ("portable", False)])
@pytest.mark.usefixtures("no_compiler_no_test")
def test_only_the_bits_of_the_definition_prove_the_machine(backend, is_proven):
    """The control differs in either; portable kernels stand for a GPU that follows another rule."""
    certificate = Certificate(facts={}, outcomes=list(machine_cases(Backend(backend))))
    cases = {o.case: o for o in certificate.outcomes}
    assert certificate.is_claim_proven(CLAIM) is is_proven, cases
    assert cases["steps of 16 products in another order"].is_well
    wrong = {name.partition(":")[0] for name, o in cases.items() if not o.is_well}
    assert ("products, wide" in wrong and "exp2" in wrong) is not is_proven


ANSWERS = "[[[5, 7]], [[6, 8], [9, 10]]]"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_new_process_is_waited_for_where_it_takes_memory(monkeypatch, tmp_path, platform):
    """On a GPU it has ended before this one begins; on a CPU it may go on until it is told to."""
    script, told = tmp_path / "process", tmp_path / "told"
    until_told = f"while [ ! -e {told} ]; do sleep 0.01; done"
    wait = until_told if platform == "cpu" else "sleep 0.2"
    script.write_text(f"#!/bin/sh\necho {platform}\n{wait}\necho '{ANSWERS}'\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with new_process([]) as started:
        started.wait_for_memory()
        assert (started.process.poll() is None) is (platform == "cpu")
        told.touch()
        want = [((5, 7),), ((6, 8), (9, 10))]
        assert started.answers() == started.answers() == want


def test_a_new_process_that_fails_says_why_and_one_that_is_not_wanted_ends(monkeypatch, tmp_path):
    script = tmp_path / "process"
    script.write_text("#!/bin/sh\necho 'no such model' >&2\nexit 2\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with new_process([]) as started, pytest.raises(ValueError, match=r"\(2\): no such model"):
        started.wait_for_memory()
    script.write_text("#!/bin/sh\necho cpu\nexec sleep 600\n")
    with new_process([]) as started:
        started.wait_for_memory()
    assert started.process.poll() is not None


def test_jobs_run_ahead_in_their_order_and_an_error_is_told():
    done = []
    with background_jobs() as jobs:
        first = jobs.begin(*(partial(done.append, i) for i in range(8)))
        jobs.wait()
        assert sorted(done) == list(range(8)) and all(f.done() for f in first)
        jobs.begin(partial(done.index, 9))
        with pytest.raises(ValueError, match="9 is not in list"):
            jobs.wait()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tp", "0"], "--tp 0 must be at least 1"),
        (
            ["--json", "/nowhere/at/all.json"],
            "--report /nowhere/at/all.json is in a folder that",
        ),
        (["--mode", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_bad_input_is_named(capsys, argv, says):
    assert main(argv) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.control
def test_a_planted_fault_is_found(monkeypatch, tmp_path):
    """Noise keyed by the row: by the programs' check, and by the answers without one."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    right = sampling.noise.row_key

    def wrong(low, high, sequence_idx, position):
        return right(low, high, sequence_idx, jnp.arange(len(position), dtype=jnp.int32))

    monkeypatch.setattr(sampling.noise, "row_key", wrong)
    config = EngineConfig(batch_size=3, prefill_chunk=64, max_len=256, self_check="start")
    (found,) = program_cases(Subject(model(), config))
    assert found.num_different > 0 and "self-check" in found.first and not found.is_well

    blind = EngineConfig(batch_size=3, prefill_chunk=64, max_len=256, self_check="off")
    subject = Subject(model(), blind)
    requests = make_requests(0, vocab_size=300, max_len=256, profile=NumericsProfile(), count=4)
    want = subject.alone(requests)
    cases = {}
    for found in answer_cases(subject, requests, want, 0):
        cases[found.case] = found
        if found.case.startswith("in reverse"):
            break
    assert cases["again, alone"].is_well
    assert not cases["all together"].is_well and cases["all together"].first


@pytest.mark.slow
def test_an_engine_that_is_done_frees_its_cache_before_the_next_allocates():
    """One cache fills a GPU."""
    config = EngineConfig(batch_size=2, prefill_chunk=16, max_len=128, self_check="start")
    subject, freed = Subject(model(), config), []
    request = Request(prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=3))
    with frozen_heap():
        for changes in ({}, {"has_prefix_cache": False}, {}):
            engine = subject.engine(**changes)
            assert all(done() is None for done in freed)
            ask(engine, [request])
            freed.append(weakref.ref(engine))
            del engine


@pytest.mark.slow
def test_the_command_proves_the_bundled_model(tmp_path):
    files = {kind: tmp_path / f"certificate.{kind}" for kind in ("json", "html")}
    argv = [arg for kind, file in files.items() for arg in (f"--{kind}", str(file))]
    done = subprocess.run(
        [sys.executable, "-m", "detjax.certify", "--max-len", "576", *argv],
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or ""},
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads(files["json"].read_text())
    expected = dict.fromkeys(CLAIMS, True)
    del expected[CLAIM]
    assert found["proven"] and found["claims"] == expected
    assert "runs on a CPU" in found["not_applicable"][CLAIM]
    assert all(o["num_different"] == 0 for o in found["outcomes"] if not o["is_control"])
    assert "All claims hold" in files["html"].read_text() and "all claims hold" in done.stdout
