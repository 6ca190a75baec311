# SPDX-License-Identifier: Apache-2.0
"""Biases, penalties and masks of a step, against the specified order in NumPy, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.sampling.adjustments import Adjustments, count_uses, pack_record, recent_tokens
from detjax.engine.sampling.logits_processors import TextSoFar, process_logits
from detjax.engine.sampling.sampling import SamplingRows, choose
from detjax.models.layers import ForwardContext
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, wide
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config

VOCAB, LENGTH, END = 300, 24, 11

SAMPLINGS = [
    SamplingParams(temperature=0.7, seed=1, noise="common"),  # a neighbour that asks for nothing
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.7),
    SamplingParams(logit_bias=((0, -1.5), (130, 3.3), (299, 1e-3)), repetition_penalty=0.8),
    SamplingParams(
        allowed_token_ids=tuple(range(0, VOCAB, 3)), min_tokens=40, temperature=0.6, seed=2,
        noise="common", logprobs_mode="processed",
    ),
    SamplingParams(
        bad_words_token_ids=((9,), (5, 6), (4, 5, 7), (8, 5, 7)), logprobs_mode="processed",
        frequency_penalty=-1.1, temperature=1.7, top_p=0.9, seed=3, noise="common",
    ),
]  # fmt: skip


def texts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, lengths of prompts, and the last positions of three places of each text."""
    rng = np.random.default_rng(5)
    token_ids = rng.integers(0, 12, (len(SAMPLINGS), LENGTH)).astype(np.int32)
    token_ids[4, 13:16] = 4, 5, 0  # behind 4 5 there is no 7, and behind 5 no 6
    prompt_len = np.array([3, 6, 0, 9, 12], np.int32)
    last = np.array([8, 10, 5, 20, 13], np.int32)[:, None] + np.arange(3, dtype=np.int32)
    return token_ids, prompt_len, last


def by_specification(x, sampling: SamplingParams, text, prompt_len: int) -> np.ndarray:
    """One row, as docs/numerics.md has it."""
    f32, output = np.float32, text[prompt_len:]
    x = x.copy()
    for token, bias in sampling.logit_bias:
        x[token] = f32(x[token] + f32(bias))
    rate = f32(sampling.repetition_penalty)
    for token in set(text):
        x[token] = f32(x[token] * (f32(1) / rate if x[token] > 0 else rate))
    for token in set(output):
        taken = f32(f32(sampling.frequency_penalty) * f32(output.count(token)))
        x[token] = f32(f32(x[token] - taken) - f32(sampling.presence_penalty))
    allowed = sampling.allowed_token_ids
    banned = set(range(VOCAB)) - set(allowed) if allowed else set()
    for *before, last in sampling.bad_words_token_ids:
        if not before or output[-len(before) :] == before:
            banned.add(last)
    if len(output) < sampling.min_tokens:
        banned.add(END)
    x[list(banned)] = -np.inf
    return x


def run(tp: int, samplings=SAMPLINGS):
    """(logits, adjusted logits, choice) of every place, on a tp mesh; whole rows."""
    token_ids, prompt_len, last = texts()
    rng = np.random.default_rng(1)
    ctx = ForwardContext(
        config=dummy_config(vocab_size=VOCAB), profile=NumericsProfile(), backend=Backend.PORTABLE,
        tp=tp,
    )  # fmt: skip
    logits = np.full((last.size, 512), -np.inf, np.float32)
    logits[:, :VOCAB] = wide(rng, (last.size, VOCAB), 0.5)
    logits[:, 3] = -0.0
    record = np.stack(
        [
            pack_record(s, prompt_len=int(n), end_token_ids={END}, vocab_size=VOCAB)
            for s, n in zip(samplings, prompt_len, strict=True)
        ]
    )
    record[0] = 0  # as a row without adjustments reads it
    rows = SamplingRows.pack([(s, i) for i, s in enumerate(samplings) for _ in range(3)])

    committed = [
        (ids[: n[0] + 1], at) for ids, n, at in zip(token_ids, last, prompt_len, strict=True)
    ]
    uses = np.stack([count_uses(ids[:at], ids[at:], 512) for ids, at in committed])
    recent = np.stack([recent_tokens(ids[at:]) for ids, at in committed])
    drafts = np.stack([ids[n[0] + 1 :][:2] for ids, n in zip(token_ids, last, strict=True)])
    num_drafts = np.broadcast_to(np.arange(3, dtype=np.int32), last.shape)

    def local(logits, record, rows, uses, recent, drafts, last):
        text = TextSoFar(
            uses=uses, recent=recent, drafts=drafts, num_drafts=num_drafts, position=last + 1
        )
        processed = process_logits(ctx, logits, text, Adjustments.unpack(record))
        chosen = choose(
            ctx, logits, rows, last.reshape(-1) + 1, num_top=4, with_filters=True,
            processed=processed,
        )  # fmt: skip
        alone = choose(ctx, logits, rows, last.reshape(-1) + 1, num_top=4, with_filters=False)
        return processed.logits, chosen, alone

    step = jax.shard_map(
        local, mesh=make_mesh(1, tp),
        in_specs=(P(None, "tp"), P(), P(), P(None, "tp"), P(), P(), P()),
        out_specs=(P(None, "tp"), P(), P()), check_vma=False,
    )  # fmt: skip
    adjusted, chosen, alone = jax.jit(step)(logits, record, rows, uses, recent, drafts, last)
    return logits, np.asarray(adjusted), chosen, alone


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("tp", quick_and_slow([2], [1, 4]))
def test_adjusted_logits_are_those_of_the_specification(tp):
    logits, adjusted, chosen, alone = run(tp)
    token_ids, prompt_len, last = texts()
    row = 0
    for i, sampling in enumerate(SAMPLINGS):
        for place in last[i]:
            text = token_ids[i, : place + 1].tolist()
            want = by_specification(logits[row, :VOCAB], sampling, text, int(prompt_len[i]))
            claim = f"text {i} behind {place}"
            assert_bitwise_equal(adjusted[row, :VOCAB], want, claim=claim)
            assert np.isneginf(adjusted[row, VOCAB:]).all()
            if sampling.temperature == 0:
                assert int(chosen.token_ids[row]) == int(want.argmax())
            assert np.isfinite(want[int(chosen.token_ids[row])])
            row += 1
    assert_bitwise_equal(adjusted[:3], logits[:3], claim="a row of zeros changes no bit")
    for name in ("token_ids", "logprobs", "top_logprobs"):
        assert_bitwise_equal(
            np.asarray(getattr(chosen, name))[:3], np.asarray(getattr(alone, name))[:3],
            claim=f"a row that asks for nothing has the {name} of a program without adjustments",
        )  # fmt: skip


def test_processed_logprobs_are_of_what_is_sampled_from():
    _, adjusted, chosen, alone = run(2)
    inverse = {i: np.float32(1) / np.float32(SAMPLINGS[i].temperature) for i in (3, 4)}
    for row in range(9, 15):
        z = (adjusted[row, :VOCAB] * inverse[row // 3]).astype(np.float64)
        if row // 3 == 4:  # top-p, by definition
            order = np.argsort(-z, kind="stable")
            mass = np.exp(z[order] - z.max())
            before = np.cumsum(mass) - mass
            z[order[before >= 0.9 * mass.sum()]] = -np.inf
        want = z - (z.max() + np.log(np.exp(z - z.max()).sum()))
        got = np.asarray(chosen.top_logprobs)[row]
        ids = np.asarray(chosen.top_ids)[row]
        # The logit, the log of the sum and their difference round once each, and the sum of the
        # exponentials is within a few ulp: eight halves of an ulp of the largest.
        bound = 8 * 2.0**-24 * np.abs(z[np.isfinite(z)]).max()
        seen = np.isfinite(got)
        assert np.abs(got[seen] - want[ids][seen]).max() <= bound
        assert got[0] != np.asarray(alone.top_logprobs)[row][0]
    # Raw ones are those of the model's logits, whatever is masked.
    for row in range(3, 9):
        assert_bitwise_equal(
            np.asarray(chosen.top_logprobs)[row], np.asarray(alone.top_logprobs)[row],
            claim="raw logprobs do not know of adjustments",
        )  # fmt: skip


@pytest.mark.slow
def test_control_another_order_has_other_bits():
    """Were the penalty subtracted before the bias is added, the reference would differ."""
    biased = dataclasses.replace(SAMPLINGS[1], logit_bias=tuple((i, 1 / 3) for i in range(12)))
    logits, adjusted, _, _ = run(1, [*SAMPLINGS[:1], biased, *SAMPLINGS[2:]])
    token_ids, prompt_len, last = texts()
    text = token_ids[1, : last[1, 0] + 1].tolist()
    want = by_specification(logits[3, :VOCAB], biased, text, int(prompt_len[1]))
    assert_bitwise_equal(adjusted[3, :VOCAB], want, claim="the specified order")
    late = by_specification(
        logits[3, :VOCAB], dataclasses.replace(biased, logit_bias=()), text, int(prompt_len[1])
    )
    late[:12] += np.float32(1 / 3)
    assert (late[:12] != want[:12]).any()


@pytest.mark.slow
def test_no_possible_token_is_told_by_the_logprob():
    nothing = SamplingParams(bad_words_token_ids=tuple((i,) for i in range(VOCAB)))
    _, _, chosen, _ = run(1, [*SAMPLINGS[:1], nothing, *SAMPLINGS[2:]])
    assert np.isposinf(np.asarray(chosen.logprobs)[3:6]).all()
    assert np.isfinite(np.asarray(chosen.logprobs)[6:]).all()
    assert jnp.isfinite(chosen.logprobs[:3]).all()
