# SPDX-License-Identifier: Apache-2.0
"""Ten faults, planted: certify finds each, self-checks those of decode, diverge the operation."""

import dataclasses
from functools import cache

import jax.numpy as jnp
import pytest

from detjax.certify.cases import answer_cases, mesh_cases, program_cases
from detjax.certify.requests import make_requests
from detjax.certify.subject import Subject
from detjax.diverge.find import find_divergence
from detjax.diverge.setting import Setting
from detjax.engine.config import EngineConfig
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.self_check.evidence import FOLDER_VARIABLE
from detjax.models.fast import forward_fast, local_logits_fast
from detjax.models.forward_paths import FORWARD_PATHS
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.faults import FAULTS, with_ties

PAGE = 16
PROMPT = tuple((7 * i + 3) % 320 for i in range(20))
SAMPLING = SamplingParams(max_tokens=14, temperature=0.8, seed=5)
SIZES = {"batch_size": 4, "prefill_chunk": 32, "max_len": 160, "decode_lens": (), "num_pages": 40}
DVR = {"mode": "dvr", "max_draft_fraction": 1.0, "verify_window": 4, "verify_rows": 4}
TIES, PSUM, DRAFT = "a tie of top-p", "psum for the butterfly", "a draft accepted too many"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """How a fault is looked for, and what must come out.

    Attributes:
        a: A setting of `detjax.diverge`.
        b: The other.
        operation: That `diverge` names.
        is_of_decode: Whether decode and prefill differ, so that a self-check can see it.
        config: Of the engine, beside `SIZES`.
    """

    a: str
    b: str
    operation: str
    is_of_decode: bool = True
    config: dict = dataclasses.field(default_factory=dict)


EXPECTED = {
    "splits chosen from the batch": Expected(a="", b="batch=3,row=1", operation="attention"),
    "a new key dropped at a page's end": Expected(a="path=prefill", b="", operation="cached_k"),
    "a stale page": Expected(a="path=prefill", b="", operation="attention"),
    PSUM: Expected(a="", b="tp=4", operation="o_residual", is_of_decode=False),
    DRAFT: Expected(a="", b="mode=dvr", operation="ids", config=DVR),
    "noise keyed by row": Expected(a="", b="batch=3,row=1", operation="noise_key_0"),
    "a wrong row of the rope table": Expected(a="path=prefill", b="", operation="cos"),
    "a residual rounded early": Expected(a="path=prefill", b="", operation="o_residual"),
    TIES: Expected(a="", b="batch=3,row=1", operation="kept_tokens"),
    "offsets that wrap in a large cache": Expected(
        a="", b="batch=4,row=3", operation="cached_k"
    ),
}  # fmt: skip


@cache
def model_of(compute: str, tp: int) -> LoadedModel:
    profile = NumericsProfile(attention_block=PAGE, attention_split=2 * PAGE, compute_dtype=compute)
    # WHY, two: the last layer of a prompt computes one row, as a decode step does.
    config = dummy_config(num_layers=2)  # the faults of attention are those of portable
    return dummy_model(config, tp=tp, profile=profile, backend=Backend.PORTABLE)


def model(name: str, tp: int = 1) -> LoadedModel:
    """In float32 for sums over ranks: bfloat16 rounds what they differ in away, in one layer."""
    made = model_of("float32" if name == PSUM else "bfloat16", tp)
    return with_ties(made) if name == TIES else made


def cases_that_find(name: str, self_check: str) -> list[str]:
    """The first case of certify that differs, with self-checks or by the answers alone."""
    its = EXPECTED[name]
    config = EngineConfig(**(SIZES | its.config), decode_batches=(1,), self_check=self_check)
    subject = Subject(model(name), config)
    if self_check == "start":
        whole = Subject(model(name, 4), config) if name == PSUM else subject
        return [outcome.case for outcome in program_cases(whole) if not outcome.is_well]
    round_idx = int(name == TIES)  # from the second round on there are filters
    profile = subject.model.profile
    requests = make_requests(round_idx, vocab_size=320, max_len=160, profile=profile)
    want = subject.alone(requests)
    if name == PSUM:
        outcomes = mesh_cases(Subject(model(name, 4), config), requests, want, 0)
    else:
        outcomes = answer_cases(subject, requests, want, round_idx)
    return next(([o.case] for o in outcomes if not o.is_well), [])


def test_the_ten_are_those_that_there_are():
    assert list(FAULTS) == list(EXPECTED)
    assert len(FAULTS) == 10


@pytest.mark.nightly
@pytest.mark.slow
def test_without_a_fault_nothing_is_found(monkeypatch, tmp_path):
    """The control: each way of looking finds nothing where nothing is planted."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    for name in (DRAFT, TIES, PSUM):
        assert cases_that_find(name, "start") == []
        assert cases_that_find(name, "off") == []
    assert not any(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.control
@pytest.mark.parametrize("name", FAULTS)
def test_certify_finds_it_and_a_self_check_if_it_is_of_decode(monkeypatch, tmp_path, name):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    FAULTS[name](monkeypatch.setattr)
    by_programs, by_answers = cases_that_find(name, "start"), cases_that_find(name, "off")
    print(f"\n{name} | programs: {by_programs} | answers: {by_answers}")
    assert by_answers != []
    assert bool(by_programs) is EXPECTED[name].is_of_decode
    assert any(tmp_path.iterdir()) is EXPECTED[name].is_of_decode  # evidence


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.control
@pytest.mark.parametrize("name", FAULTS)
def test_diverge_names_the_operation(monkeypatch, name):
    FAULTS[name](monkeypatch.setattr)
    its, sampling = EXPECTED[name], SAMPLING
    if name == TIES:
        sampling = dataclasses.replace(SAMPLING, top_p=0.01)
    if name == DRAFT:
        # Drafts that are wrong often.
        def wrong_drafts(ctx, params, hidden):
            return jnp.roll(local_logits_fast(ctx, params, hidden), 1, axis=1)

        monkeypatch.setitem(FORWARD_PATHS, "fast", (forward_fast, wrong_drafts))

    def load(setting: Setting) -> LoadedModel:
        return model(name, setting.tp)

    a, b = Setting.parse(its.a), Setting.parse(its.b)
    found = find_divergence(load, PROMPT, a, b, sampling=sampling)
    print(f"\n{name} | diverge: {found.site and (found.site.position, found.site.name)}")
    assert found.token is not None and found.site is not None, str(found)
    assert found.site.name == its.operation, str(found)
    assert found.site.a.bits != found.site.b.bits
