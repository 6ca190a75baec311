# SPDX-License-Identifier: Apache-2.0
"""The cases of each claim, and for each a control that must differ."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from detjax.certify.certificate import BitComparison, Outcome, compare
from detjax.certify.requests import AnswerBits, forced, plain
from detjax.certify.subject import Subject, ask
from detjax.diverge.evidence import explain
from detjax.diverge.setting import Setting
from detjax.engine.errors import SelfCheckError
from detjax.engine.requests.request import Request
from detjax.engine.self_check.program_check import checkable_keys
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

CONTROL_DRAWS = 8
"""XLA's kernels often agree on a small model: they are asked so often, until a bit differs."""
OTHER_CHUNK = 37
"""Tokens of a prefill that end nowhere near a page."""


def other_chunk() -> dict[str, Any]:
    """Return the configuration with prefills of `OTHER_CHUNK` tokens."""
    return {"prefill_chunk": OTHER_CHUNK, "prefill_shapes": ()}


def drafted(subject: Subject) -> dict[str, Any]:
    """Return the configuration with drafts by XLA's kernels, wrong at every third position."""
    return {
        "candidates": subject.disagree,
        "mode": "dvr",
        "max_draft_fraction": 1.0,
        "has_prompt_lookup": False,
        "decode_steps": 1,
        "decode_batches": (),  # how many rows a draft has is not what is proven here
    }


def fast(subject: Subject) -> dict[str, Any]:
    """Return the configuration with XLA's kernels; they share a step with the drafts' engine."""
    return {"mode": "fast", "candidates": subject.disagree}


def timed(
    claim: str,
    case: str,
    run: Callable[[], BitComparison],
    *,
    round_idx: int,
    is_control: bool = False,
    setting: Callable[[int], Setting] | None = None,
) -> Outcome:
    """Run a case and time it; `setting` repeats it for the request that differs."""
    begin_s = time.perf_counter()
    try:
        found = run()
    except SelfCheckError as error:  # the engine itself has found a difference
        found = BitComparison(1, 1, str(error))
    i = found.request_idx
    return Outcome(
        claim=claim,
        case=case,
        is_control=is_control,
        num_compared=found.num_compared,
        num_different=found.num_different,
        first=found.first,
        request_idx=i,
        setting="" if i < 0 or setting is None else str(setting(i)),
        seconds=time.perf_counter() - begin_s,
        round_idx=round_idx,
    )


def setting_like(subject: Subject, *, batch: int = 1, row: int = 0, **others: Any) -> Setting:
    """A setting of `detjax.diverge` on the subject's mesh."""
    dp, tp = (subject.model.mesh.shape[axis] for axis in (DP_AXIS, TP_AXIS))
    made = Setting(
        dp=dp, tp=tp, batch=-(-batch // dp) * dp, row=row, chunk=subject.config.prefill_chunk
    )
    return dataclasses.replace(made, **others)


def program_cases(subject: Subject) -> Iterator[Outcome]:
    """Compare every canonical program of the configuration with prefill, on a full cache.

    At the end of each page table, around pages and splits, on the first and the last pages of the
    cache: see `detjax.engine.self_check`.
    """
    cause, checked_s = "", 0.0

    def run() -> BitComparison:
        nonlocal cause, checked_s
        engine = subject.engine()
        engine.explain_differences(functools.partial(explain, model=subject.model))
        engine.compile()
        cause = engine.self_check_cause
        stats = engine.stats()
        checked_s = stats.self_check_s
        keys = checkable_keys(subject.replica(subject.config))
        num_missing = sum(key not in engine.programs.checked for key in keys)
        first = engine.self_check_error
        if num_missing and not first:
            first = f"{num_missing} programs found no page to be checked on"
        count = stats.num_self_check_differences + num_missing
        return BitComparison(stats.num_self_checked + num_missing, count, first)

    name = "every compiled program, on a full cache"
    found = timed("path-consistent", name, run, round_idx=0)
    name += f"; checks ended {checked_s:.1f} s after compiling"
    yield dataclasses.replace(found, case=name, cause=cause)


def answer_cases(
    subject: Subject, requests: Sequence[Request], want: Sequence[AnswerBits], round_idx: int
) -> Iterator[Outcome]:
    """Run the cases that change an engine on one mesh.

    Args:
        subject: On its mesh.
        requests: To ask.
        want: The answer of each request alone.
        round_idx: The round of these requests.
    """
    count = len(requests)
    like = functools.partial(setting_like, subject)

    def together(i: int, **others: Any) -> Setting:
        return setting_like(subject, batch=count, row=i, **others)

    def same(answers: Callable[[], Sequence[AnswerBits]]) -> Callable[[], BitComparison]:
        return lambda: compare(answers(), want)

    cases = (
        ("run-invariant", "again, alone",
         same(lambda: subject.alone(requests)), lambda i: like()),
        ("batch-invariant", "all together",
         same(lambda: subject.answers(requests)), together),
        ("batch-invariant", "in reverse order, so other rows",
         same(lambda: subject.answers(requests[::-1])[::-1]), lambda i: together(count - 1 - i)),
        ("batch-invariant", "among others",
         same(lambda: _among_others(subject, requests)),
         lambda i: like(batch=2 * count, row=2 * i + 1)),
        ("schedule-invariant", f"prompts in chunks of {OTHER_CHUNK} tokens",
         same(lambda: subject.answers(requests, **other_chunk())),
         lambda i: like(chunk=OTHER_CHUNK)),
        ("schedule-invariant", "prefixes from the cache",
         lambda: _twice(subject, requests, want), together),
        ("schedule-invariant", "few pages",
         lambda: _few_pages(subject, requests, want), together),
        ("schedule-invariant", "drafts, every third of them wrong",
         same(lambda: subject.answers(requests, **drafted(subject))),
         lambda i: together(i, mode="dvr")),
        ("path-consistent", "decoded tokens again by prefill",
         lambda: _by_prefill(subject, requests, want), lambda i: like(path="prefill")),
    )  # fmt: skip
    for claim, name, run, setting in cases:
        yield timed(claim, name, run, round_idx=round_idx, setting=setting)


def _until_it_differs(run: Callable[[int], BitComparison]) -> Callable[[], BitComparison]:
    """Compare draw after draw until a bit differs."""

    def runs() -> BitComparison:
        found = BitComparison(num_compared=0, num_different=0, first="")
        for draw in range(CONTROL_DRAWS):
            its = run(draw)
            found = its._replace(num_compared=found.num_compared + its.num_compared)
            if found.num_different:
                break
        return found

    return runs


def _with_other_leaves(subject: Subject) -> Subject:
    """The same weights, whose sums over K have as few leaves as ranks, or twice as many."""
    model = subject.model
    ranks, leaves = model.mesh.shape[TP_AXIS], model.profile.num_leaves
    profile = dataclasses.replace(model.profile, num_leaves=ranks if leaves > ranks else 2 * ranks)
    return Subject(dataclasses.replace(model, profile=profile), subject.config)


def answer_controls(
    subject: Subject,
    draws: Callable[[int], Sequence[Request]],
    want: Sequence[AnswerBits],
    alone: Callable[[int], Sequence[AnswerBits]],
) -> Iterator[Outcome]:
    """Run the same comparisons without a guarantee: each must differ.

    Args:
        subject: On its mesh.
        draws: The requests of each draw; draw 0 is that of the cases.
        want: The answers of draw 0, each alone.
        alone: The answers of XLA's kernels to each draw, each request alone.
    """
    requests = draws(0)
    asked = plain(requests)

    def control(claim: str, name: str, run: Callable[[], BitComparison]) -> Outcome:
        return timed(claim, name, run, round_idx=0, is_control=True)

    another = [
        dataclasses.replace(
            r, sampling=dataclasses.replace(r.sampling, seed=(r.sampling.seed or 0) + 1)
        )
        for r in requests
    ]
    yield control(
        "run-invariant",
        "another seed",
        lambda: compare(subject.alone(another), want),
    )
    by_xla = control(
        "batch-invariant",
        "XLA's kernels, all together",
        _until_it_differs(
            lambda draw: compare(subject.answers(plain(draws(draw)), **fast(subject)), alone(draw))
        ),
    )
    yield by_xla
    if not by_xla.is_well:
        # XLA's products on some CPUs add a row in one order for every number of rows.
        yield control(
            "batch-invariant",
            "sums of rows that share a step in a tree of other leaves, all together",
            lambda: compare(_with_other_leaves(subject).answers(asked), want),
        )
    yield control(
        "schedule-invariant",
        "drafts that nobody verifies",
        lambda: compare(subject.answers(asked, **drafted(subject)), want),
    )
    yield control(
        "path-consistent",
        "XLA's kernels, decoded tokens again by prefill",
        _until_it_differs(
            lambda draw: _by_prefill(subject, plain(draws(draw)), alone(draw), **fast(subject))
        ),
    )


def mesh_cases(
    subject: Subject, requests: Sequence[Request], want: Sequence[AnswerBits], round_idx: int
) -> Iterator[Outcome]:
    """Compare the answers of another mesh."""
    name = "dp {dp} x tp {tp}".format(**subject.model.mesh.shape)
    if not subject.config.decode_batches:
        name += f", decode steps of {subject.config.batch_size} rows"
    yield timed(
        "mesh-invariant",
        name,
        lambda: compare(subject.answers(requests), want),
        round_idx=round_idx,
        setting=lambda i: setting_like(subject),
    )


def mesh_control(
    subject: Subject, requests: Sequence[Request], want: Sequence[AnswerBits]
) -> Outcome:
    """Compare XLA's kernels on another mesh; `want` is their answer alone on the first mesh.

    First tokens need only one program. Whole answers are compared if no first token differs.
    """
    name = "XLA's kernels, dp {dp} x tp {tp}".format(**subject.model.mesh.shape)
    asked = plain(requests)
    first = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=1))
        for r in asked
    ]

    def run() -> BitComparison:
        found = compare(subject.alone(first, **fast(subject)), [answer[:1] for answer in want])
        if found.num_different:
            return found
        return compare(subject.alone(asked, **fast(subject)), want)

    return timed(
        "mesh-invariant",
        name,
        run,
        round_idx=0,
        is_control=True,
    )


def _among_others(subject: Subject, requests: Sequence[Request]) -> list[AnswerBits]:
    """Return every request twice, the second time backwards with another seed, in turn."""
    others = [
        dataclasses.replace(
            request,
            prompt_token_ids=request.prompt_token_ids[::-1],
            sampling=dataclasses.replace(request.sampling, seed=i),
        )
        for i, request in enumerate(requests)
    ]
    mixed = [r for pair in zip(others, requests, strict=True) for r in pair]
    return subject.answers(mixed)[1::2]


def _twice(subject: Subject, requests, want) -> BitComparison:
    engine = subject.engine(has_prefix_cache=True)
    ask(engine, requests)
    found = compare(ask(engine, requests), want)
    if not engine.stats().prefix_tokens:
        return BitComparison(0, 0, "no prompt was found in the cache, so nothing was compared")
    return found


def _few_pages(subject: Subject, requests, want) -> BitComparison:
    """All pages but those of the longest and one more are held, so that sequences are preempted."""
    engine = subject.engine(has_prefix_cache=False)
    page_len = subject.model.profile.attention_block
    longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)
    pools = engine._scheduler.pools
    held = [pool.allocate(max(0, pool.num_pages + ~(-(-longest // page_len)))) for pool in pools]
    try:
        return compare(ask(engine, requests), want)
    finally:
        for pool, pages in zip(pools, held, strict=True):
            pool.free(pages)


def _by_prefill(subject: Subject, requests, want, **changes) -> BitComparison:
    pairs = forced(requests, want)
    engine = subject.engine(has_prefix_cache=False, **changes)
    got = [answer for request, _ in pairs for answer in ask(engine, [request])]
    found = compare(got, [answer for _, answer in pairs])
    return found._replace(request_idx=found.request_idx // 2)  # two tokens of each answer
