# SPDX-License-Identifier: Apache-2.0
"""Run every case, round after round while there is time."""

import argparse
import dataclasses
import functools
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence

from detjax.certify.background import BackgroundJobs, background_jobs
from detjax.certify.cases import (
    answer_cases,
    answer_controls,
    drafted,
    fast,
    mesh_cases,
    mesh_control,
    other_chunk,
    program_cases,
    timed,
)
from detjax.certify.certificate import Certificate, Outcome, compare
from detjax.certify.coverage import coverage_map
from detjax.certify.diagnosis import diagnose
from detjax.certify.machine import CLAIM as MACHINE_CLAIM
from detjax.certify.machine import machine_cases, why_not_applicable
from detjax.certify.opening import facts_of, open_subject, other_meshes
from detjax.certify.requests import AnswerBits, make_requests, plain
from detjax.certify.subject import CompileTask, Subject, order_probe
from detjax.engine.requests.request import Request


def requests_of(subject: Subject, round_idx: int, draw: int = 0) -> list[Request]:
    """Return the requests of a round; another `draw` has other requests of the same kind."""
    config = subject.model.config
    return make_requests(
        round_idx,
        vocab_size=config.vocab_size,
        max_len=subject.config.max_len,
        profile=subject.model.profile,
        draw=draw,
    )


def print_answers(args: argparse.Namespace) -> None:
    """Print the answers of the first round's requests, each alone, as a line of JSON."""
    subject = open_subject(args, args.dp, args.tp)
    # The checks of programs are those of the first process.
    subject.config = dataclasses.replace(subject.config, self_check="off")
    requests = requests_of(subject, 0)
    with background_jobs() as jobs:
        jobs.begin(*subject.likely_programs(requests, counts=[1]))
        jobs.wait()
    print(json.dumps(subject.alone(requests)))


def certify(
    args: argparse.Namespace,
    subject: Subject,
    certificate: Certificate,
    restarted: Callable[[], list[AnswerBits]],
) -> Iterator[Outcome]:
    """Run all cases and add each to the certificate as it ends.

    Args:
        args: Of the command.
        subject: On the requested mesh.
        certificate: Filled in here.
        restarted: Gives the answers of a new process, and waits for it.
    """
    certificate.facts = facts_of(subject, args)
    certificate.probe = order_probe(subject.model)
    if reason := why_not_applicable(subject.model.backend):
        certificate.not_applicable[MACHINE_CLAIM] = reason
    begin_s = time.perf_counter()
    with background_jobs() as jobs:
        for outcome in _first_round(args, subject, restarted, certificate, jobs):
            certificate.outcomes.append(outcome)
            yield outcome
        jobs.wait()
    round_idx, round_s = 1, time.perf_counter() - begin_s
    while time.perf_counter() - begin_s + round_s < 60 * args.minutes:
        round_begin_s = time.perf_counter()
        requests = requests_of(subject, round_idx)
        for outcome in answer_cases(subject, requests, subject.alone(requests), round_idx):
            explained = _explained(outcome, certificate, subject, requests)
            certificate.outcomes.append(explained)
            yield explained
        round_idx, round_s = round_idx + 1, time.perf_counter() - round_begin_s
    certificate.coverage = coverage_map(
        subject.model,
        modes={subject.config.mode, "dvr"},
        is_proven=certificate.is_proven and bool(certificate.probe),
    )


def _explained(
    outcome: Outcome,
    certificate: Certificate,
    subject: Subject,
    requests: Sequence[Request],
    others: Sequence[Subject] = (),
) -> Outcome:
    """Add the operation that differs, if this is the first difference of its claim."""
    is_known = any(its.cause for its in certificate.of(outcome.claim))
    if outcome.is_well or outcome.is_control or outcome.cause or is_known:
        return outcome
    gc.collect()  # the cache of the engine before
    return dataclasses.replace(outcome, cause=diagnose(outcome, subject, requests, others))


def _first_round(
    args: argparse.Namespace,
    subject: Subject,
    restarted: Callable[[], list[AnswerBits]],
    certificate: Certificate,
    jobs: BackgroundJobs,
) -> Iterator[Outcome]:
    requests = requests_of(subject, 0)
    of_all = [1, len(requests)]
    # WHY: a GPU's memory holds one mesh and one cache, and the compiler tunes beside neither.
    is_cpu = subject.model.backend.platform == "cpu"
    opened: dict[tuple[int, int], Subject] = {}

    def of_cases() -> Iterator[CompileTask]:
        yield from subject.likely_programs(requests, counts=of_all, **drafted(subject))
        yield from subject.likely_programs(requests, counts=of_all, **fast(subject))

    if is_cpu:
        jobs.begin(*of_cases())
    yield from program_cases(subject)
    # WHY: not before, as programs are compared with the shortest prefill that is compiled.
    jobs.begin(*subject.likely_programs(requests, counts=of_all, **other_chunk()))
    if is_cpu:
        for dp, tp in other_meshes(subject, args):
            other = opened[dp, tp] = open_subject(args, dp, tp)
            if not args.minutes:  # a program less to compile; the case says how many rows it has
                other.config = dataclasses.replace(other.config, decode_batches=())
            jobs.begin(*other.likely_programs(requests, counts=of_all))
            if tp != args.tp:
                jobs.begin(*other.likely_programs(requests, counts=[], **fast(other)))
    else:
        jobs.begin(*of_cases())
        jobs.wait()
    want = subject.alone(requests)
    yield timed("run-invariant", "a new process", lambda: compare(restarted(), want), round_idx=0)
    for outcome in answer_cases(subject, requests, want, 0):
        yield _explained(outcome, certificate, subject, requests)

    def draws(draw: int) -> list[Request]:
        return requests_of(subject, 0, draw)

    # What draw 0 gets is there before another mesh takes the memory.
    alone = functools.cache(lambda draw: subject.alone(plain(draws(draw)), **fast(subject)))
    yield from answer_controls(subject, draws, want, alone)
    for dp, tp in other_meshes(subject, args):
        gc.collect()
        other = opened.pop((dp, tp)) if is_cpu else open_subject(args, dp, tp)
        for outcome in mesh_cases(other, requests, want, 0):
            yield _explained(outcome, certificate, subject, requests, [other])
        # Replicas compute what one device does: only the ranks of a layer show anything.
        if tp != args.tp:
            yield mesh_control(other, requests, alone(0))
    if MACHINE_CLAIM not in certificate.not_applicable:
        yield from machine_cases(subject.model.backend)
