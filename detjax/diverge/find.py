# SPDX-License-Identifier: Apache-2.0
"""Find the first token, position, layer and operation whose bits differ."""

import dataclasses
import itertools
from collections import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from detjax.diverge.cause import (
    OPERATIONS,
    why_attention_differs,
    why_cache_differs,
    why_ids_differ,
    why_sum_differs,
)
from detjax.diverge.divergence import Divergence, Side, Site, TokenDifference
from detjax.diverge.recorder import Tap
from detjax.diverge.recording import CACHED, Recording, Step
from detjax.diverge.runs import Models, ModelSource, Runs
from detjax.diverge.schedule import kernels_of, order_of
from detjax.diverge.setting import RecordedAnswer, Setting
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.proof.parsing import shown

_STAND_INS = ("", "batch=8,row=3", "path=prefill")
"""Settings tried for an answer of which nobody knows how it was computed."""


def find_divergence(
    model: ModelSource,
    prompt_token_ids: abc.Sequence[int],
    a: Setting | RecordedAnswer,
    b: Setting,
    *,
    sampling: SamplingParams | None = None,
    is_deep: bool = False,
) -> Divergence:
    """Find the first token, then position, layer and operation, with a different bit.

    Answers come from plain programs. If they differ, both settings run once more up to that token
    with every operation tapped, and the values of each position are compared by their hashes. Then
    the first position that differs runs again for its values. An answer in place of a setting has
    no values: it is compared with `b`, and settings that may give it are tried.

    Args:
        model: A folder or id, whose weights and compute are bfloat16; a loaded model, which runs
            settings of its own mesh and backend; or a function from a setting to a loaded model.
        prompt_token_ids: At least one.
        a: One setting, or an answer.
        b: Another setting.
        sampling: How tokens are chosen; of one sequence, without stop strings. None is greedy. An
            answer decides how many tokens there are.
        is_deep: Compare every operation even if the answers are equal.

    Raises:
        ValueError: If a setting cannot run, naming it.

    Numerics:
        Taps add results to a program, and no operation. What tapped programs answer is compared
        with plain ones at every call; a note says if a bit differs, as it may in `fast`, where the
        compiler fuses other operations when it must give their results.
    """
    sampling = sampling or SamplingParams()
    if isinstance(a, RecordedAnswer):
        if a.prompt_token_ids != tuple(prompt_token_ids):
            raise ValueError("the answer is to another prompt than prompt_token_ids")
        sampling = dataclasses.replace(sampling, max_tokens=len(a.token_ids))
    runs = Runs(Models(model), prompt_token_ids, sampling)
    answers = _answers(runs, a, b)
    token = first_token(*answers, prompt_len=len(runs.prompt))
    notes: list[str] = []
    fingerprint = runs.model(b).fingerprint
    if isinstance(a, RecordedAnswer) and a.fingerprint not in ("", fingerprint):
        notes.append(
            f"the answer has fingerprint {shown(a.fingerprint)} and this build {fingerprint}: "
            "across builds no claim is made"
        )
    settings = _settings(runs, a, b, answers[0], token, notes)
    site = None
    if settings and (token or is_deep):
        answers = [answers[0], answers[1]]
        site = _find_site(runs, settings, answers, token, notes)
    return Divergence(
        a=f"an answer of {len(answers[0].token_ids)} tokens"
        if isinstance(a, RecordedAnswer)
        else str(a),
        b=str(b),
        num_tokens=min(len(answer.token_ids) for answer in answers),
        is_deep=is_deep,
        token=token,
        site=site,
        notes=tuple(notes),
    )


def first_token(a: RecordedAnswer, b: RecordedAnswer, *, prompt_len: int) -> TokenDifference | None:
    """Return the first token whose id or logprob bits differ, or that only one answer has."""
    pairs = [
        [(answer.token_ids[i], answer.bits(i)) for i in range(len(answer.token_ids))]
        for answer in (a, b)
    ]
    for i in range(max(map(len, pairs))):
        one, other = (pair[i] if i < len(pair) else None for pair in pairs)
        if one != other:
            return TokenDifference(index=i, position=prompt_len + i, a=one, b=other)
    return None


def _answers(runs: Runs, a: Setting | RecordedAnswer, b: Setting) -> list[RecordedAnswer]:
    """Return both answers; a setting by prefill follows the decoded one."""
    if isinstance(a, RecordedAnswer):
        return [a, runs.answer(b, like=a)]
    decoded = a if a.path == "decode" else dataclasses.replace(b, path="decode")
    like = runs.answer(decoded)
    first = like if decoded == a else runs.answer(a, like=like)
    if b.path == "decode":
        return [first, like if decoded == b else runs.answer(b)]
    return [first, runs.answer(b, like=like)]


def _settings(
    runs: Runs, a: Setting | RecordedAnswer, b: Setting, answer: RecordedAnswer,
    token: TokenDifference | None, notes: list[str],
) -> list[Setting]:  # fmt: skip
    """The settings to tap: of an answer one that gives it, up to the token that differs."""
    if isinstance(a, Setting):
        return [a, b]
    if token is None:
        return [b, b]
    count = token.index + 1
    modes = dict.fromkeys((b.mode, "invariant"))  # a canonical answer against another mode
    for mode, text in itertools.product(modes, _STAND_INS):
        parsed = Setting.parse(text)
        stand_in = dataclasses.replace(
            b, mode=mode, batch=parsed.batch * b.dp, row=parsed.row, path=parsed.path
        )
        if stand_in == b:
            continue
        got = runs.answer(stand_in, like=answer)
        if first_token(_head(got, count), _head(answer, count), prompt_len=0) is None:
            notes.append(f"the answer is that of setting {stand_in}, which is tapped as a")
            return [stand_in, b]
    tried = ", ".join(text or "batch=1" for text in _STAND_INS)
    tried += "".join(f", and in mode {mode}" for mode in modes if mode != b.mode)
    notes.append(
        "an answer has no operations, and no setting that was tried gives it here "
        f"({tried}); compare two settings to find the operation"
    )
    return []


def _head(answer: RecordedAnswer, count: int) -> RecordedAnswer:
    return dataclasses.replace(
        answer, token_ids=answer.token_ids[:count], logprobs=answer.logprobs[:count]
    )


def _find_site(
    runs: Runs, settings: Sequence[Setting], answers: Sequence[RecordedAnswer],
    token: TokenDifference | None, notes: list[str],
) -> Site | None:  # fmt: skip
    """Record both, compare hashes, then record the first position that differs for its values."""
    shortest = min(len(answer.token_ids) for answer in answers)
    count = shortest if token is None else min(token.index + 1, shortest)
    recordings = [
        _record(runs, setting, answer, count, None, notes, name)
        for name, setting, answer in zip("ab", settings, answers, strict=True)
    ]
    committed = [
        None if setting.path == "prefill" else _first_not_chosen(runs, recording, answer, count)
        for setting, recording, answer in zip(settings, recordings, answers, strict=True)
    ]
    last = len(runs.prompt) + count - 2  # where the last of these tokens was chosen
    found = _first_difference(settings, recordings, last)
    not_chosen = min((at for at in committed if at is not None), default=None)
    if not_chosen is not None and (found is None or found[0] > not_chosen):
        position, tap, last_equal = not_chosen, None, None
    elif found is None:
        if token is not None:
            notes.append("no tap differs before that token")
        return None
    else:
        position, tap, last_equal = found
    again = [
        _record(runs, setting, answer, count, position, notes, name)
        for name, setting, answer in zip("ab", settings, answers, strict=True)
    ]
    for name, one, other in zip("ab", recordings, again, strict=True):
        if one.digests.get(position) != other.digests.get(position):
            notes.append(f"{name} gave other bits when it ran again: it is not run-invariant")
    steps = [_captured(recording) for recording in again]
    if tap is None:
        return _site_of_commit(position, committed, again, answers, steps, len(runs.prompt))
    models = [runs.model(setting) for setting in settings]
    sides = list(zip(again, steps, models, strict=True))
    return _site(runs, settings, answers, position, tap, last_equal, sides)


def _record(
    runs: Runs, setting: Setting, answer: RecordedAnswer, count: int, captured: int | None,
    notes: list[str], name: str,
) -> Recording:  # fmt: skip
    """Record the first tokens of an answer, and compare what tapped programs answered with it."""
    recording, got = runs.record(setting, answer, num_tokens=count, captured=captured)
    want = _head(answer, count)
    if setting.path == "prefill":
        want = dataclasses.replace(want, token_ids=want.token_ids[-1:], logprobs=want.logprobs[-1:])
    note = f"{name}'s tapped programs answer other bits than its plain ones"
    if setting.mode == "fast":
        note += ": the compiler fuses other operations, and what is named is of the tapped ones"
    else:
        note += ": it is not run-invariant, or the compiler treats results as it should not"
    if first_token(want, got, prompt_len=0) is not None and note not in notes:
        notes.append(note)
    return recording


def _answered(runs: Runs, answer: RecordedAnswer, position: int) -> int | None:
    index = position - len(runs.prompt)
    return answer.token_ids[index] if 0 <= index < len(answer.token_ids) else None


def _captured(recording: Recording) -> Step:
    assert recording.step is not None
    return recording.step


def _first_not_chosen(
    runs: Runs, recording: Recording, answer: RecordedAnswer, count: int
) -> int | None:
    """Return the first position whose chosen token is not the answer's."""
    for i in range(count):
        position = len(runs.prompt) + i - 1
        want = answer.token_ids[i], answer.bits(i)
        if recording.choices.get(position, want)[0] != want[0]:
            return position
    return None


def _first_difference(
    settings: Sequence[Setting], recordings: Sequence[Recording], last: int
) -> tuple[int, Tap, Tap | None] | None:
    """Return (position, tap, the equal result before it) of the first hash that differs."""
    one, other = (recording.digests for recording in recordings)
    has_same_ranks = settings[0].tp == settings[1].tp
    for position in sorted(p for p in one.keys() & other.keys() if p <= last):
        last_equal = None
        for tap, digest in one[position].items():
            if tap not in other[position]:
                continue
            if tap.name.endswith("_partial") and not has_same_ranks:
                continue
            theirs = other[position][tap]
            if digest != theirs:
                return position, tap, last_equal
            last_equal = tap
    return None


def _site(
    runs: Runs,
    settings: Sequence[Setting],
    answers: Sequence[RecordedAnswer],
    position: int,
    tap: Tap,
    last_equal: Tap | None,
    sides: Sequence[tuple[Recording, Step, Any]],
) -> Site:
    a, b = (step.values[tap] for _, step, _ in sides)
    if not tap.name.endswith("_partial"):
        a, b, rank = _ranks_that_differ(a, b)
    else:
        rank = ""
    is_different = _bits(a) != _bits(b)
    index = tuple(int(i[0]) for i in np.nonzero(is_different))
    cause = rank
    if tap == Tap(None, "ids"):
        cause = why_ids_differ(sides, [_answered(runs, answer, position) for answer in answers])
    elif tap.name == "attention":
        cause = why_attention_differs(tap, sides)
    elif tap.name in CACHED:
        cause = why_cache_differs((a, b))
    elif tap.name.startswith(("o_", "down_")):
        cause = why_sum_differs(tap, sides) or rank
    described = [
        Side(
            program=step.key.name,
            row=step.row,
            value=str(value[index]),
            bits=f"0x{int(_bits(value)[index]):0{2 * value.dtype.itemsize}x}",
            kernels=kernels_of(
                runs.tapped(setting),
                step.key,
                tap,
                runs.model(setting).params,
                after=last_equal,
            ),
            beside=step.beside,
        )
        for setting, (_, step, _), value in zip(settings, sides, (a, b), strict=True)
    ]
    return Site(
        position=position,
        layer=tap.layer,
        name=tap.name,
        operation=OPERATIONS[tap.name],
        cause=cause,
        last_equal="" if last_equal is None else str(last_equal),
        order=order_of(tap, runs.model(settings[0])),
        num_different=int(is_different.sum()),
        num_elements=int(is_different.size),
        index=index,
        a=described[0],
        b=described[1],
    )


def _ranks_that_differ(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the copies of a value, [ranks, ...], that differ: the first rank's, if they do."""
    one, other = np.atleast_1d(a[0]), np.atleast_1d(b[0])
    if one.tobytes() != other.tobytes():
        return one, other, ""
    for name, copies in (("a", a), ("b", b)):
        for rank, copy in enumerate(copies):
            if copy.tobytes() != one.tobytes():
                pair = (np.atleast_1d(copy), other) if name == "a" else (one, np.atleast_1d(copy))
                return *pair, f"rank {rank} of {name} differs from its rank 0"
    raise AssertionError("no copy of a rank differs")


def _site_of_commit(
    position: int, committed: Sequence[int | None], recordings: Sequence[Recording],
    answers: Sequence[RecordedAnswer], steps: Sequence[Step], prompt_len: int,
) -> Site:  # fmt: skip
    """Describe an answer whose token is not the one that the device chose."""
    index = position + 1 - prompt_len
    sides, causes = [], []
    for name, at, recording, answer, step in zip(
        "ab", committed, recordings, answers, steps, strict=True
    ):
        answered, chosen = answer.token_ids[index], recording.choices[position][0]
        if at == position:
            causes.append(f"{name} chose {chosen} and answered {answered}")
        sides.append(
            Side(
                program=step.key.name,
                row=step.row,
                value=str(answered),
                bits=f"0x{answered:08x}",
                kernels=(),
                beside=step.beside,
            )
        )
    return Site(
        position=position,
        layer=None,
        name="commit",
        operation="what becomes of a choice: drafts that are accepted, tokens that are committed",
        cause="; ".join(causes),
        last_equal="token_id",
        order="",
        num_different=1,
        num_elements=1,
        index=(),
        a=sides[0],
        b=sides[1],
    )


def _bits(value: np.ndarray) -> np.ndarray:
    if value.dtype == bool:
        return value.astype(np.uint8)
    return np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
