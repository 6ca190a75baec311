# SPDX-License-Identifier: Apache-2.0
"""The engine finds faults of its own decode path where it runs, and none where there is none.

Each fault is planted in what a decode or verify program is traced from; prefill stays as it is.
"""

import asyncio
import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import jax.numpy as jnp
import numpy as np
import pytest

import detjax.engine.running.programs as programs
import detjax.engine.sampling.sampling as sampling
import detjax.models.decoder as decoder
import detjax.models.layers as layers
import detjax.pallas_kernels.attention.portable as attention
from detjax.engine.async_engine import AsyncEngine
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.errors import SelfCheckError
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running import ready_programs
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.self_check import program_check, recheck
from detjax.engine.self_check.evidence import FOLDER_VARIABLE
from detjax.engine.self_check.filled_places import FilledPlaces
from detjax.engine.self_check.probes import IdlePages, make_probes, place_probes
from detjax.engine.self_check.session import Session
from detjax.models.config import ModelConfig
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.fixed_blocks import round_to
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.faults import (
    choose_splits_by_batch,
    drop_key_at_page_end,
    is_decode,
    read_a_stale_page,
)

MAX_LEN = 768
VOCAB = 300


def config_for(**changes) -> ModelConfig:
    return dummy_config(num_layers=1, vocab_size=VOCAB, **changes)


@cache
def model(dp: int = 1, tp: int = 1) -> LoadedModel:
    return dummy_model(config_for(), dp=dp, tp=tp)


@cache
def portable_model() -> LoadedModel:
    """Whose attention has the faults."""
    return dummy_model(config_for(), backend=Backend.PORTABLE)


def make_engine(of: LoadedModel | None = None, **changes) -> Engine:
    sizes = {"batch_size": 3, "prefill_chunk": 32, "max_len": MAX_LEN, "decode_lens": ()}
    return Engine(of or model(), EngineConfig(**(sizes | changes)))


@cache
def warm_programs():
    """Compiled once, of engines of the usual sizes."""
    made = make_engine()
    made.generate(requests())
    return made.programs


def warm_engine(**changes) -> Engine:
    config = dataclasses.replace(make_engine()._config, **changes)
    return Engine(model(), config, programs=warm_programs())


def requests(count: int = 3, *, is_deterministic: bool = True) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(
            prompt_token_ids=tuple(rng.integers(0, VOCAB, 5 + 40 * i).tolist()),
            sampling=SamplingParams(max_tokens=6, temperature=0.7 * (i % 2), seed=2**40 + i),
            is_deterministic=is_deterministic,
        )
        for i in range(count)
    ]


@pytest.fixture
def evidence(monkeypatch, tmp_path):
    """The folder of evidence, of this test alone."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


# ------------------------------------------------------------------------------------------- faults


def write_beside_the_last_page(patch):
    """As an offset of too few bits would: what belongs on the highest page lands elsewhere."""
    right = attention.rope_into_cache

    def wrong(qkv, rotation, place, **options):
        table = place.page_table
        if is_decode(place.positions):
            table = jnp.where(table == place.pages.shape[1] - 1, 1, table)
        return right(qkv, rotation, place._replace(page_table=table), **options)

    patch(attention, "rope_into_cache", wrong)


def take_the_next_rope_row(patch):
    right = decoder.rope_rows

    def wrong(tables, positions):
        if is_decode(positions):
            positions = jnp.where(positions == MAX_LEN - 2, positions + 1, positions)
        return right(tables, positions)

    patch(decoder, "rope_rows", wrong)


def key_noise_by_row(patch):
    right = sampling.noise.row_key

    def wrong(low, high, sequence_idx, position):
        return right(low, high, sequence_idx, jnp.arange(len(position), dtype=jnp.int32))

    patch(sampling.noise, "row_key", wrong)


def round_the_residual_early(patch):
    right = layers.linear_add_rms_norm

    def wrong(x, w, residual, bias, gain, *, reduction, eps, backend):
        if len(x) != 3:  # one row is that of a prompt's last layer
            return right(x, w, residual, bias, gain, reduction=reduction, eps=eps, backend=backend)
        product = layers.linear_partial(x, w, reduction=reduction, backend=backend)
        product = round_to(product, residual.dtype)
        return layers.add_rms_norm(product, residual, bias, gain, eps=eps, backend=backend)

    patch(layers, "linear_add_rms_norm", wrong)


def accept_a_draft_too_many(patch):
    right = programs.pack_verified

    def wrong(choice, num_accepted, *, length):
        return right(choice, jnp.minimum(num_accepted + 1, length - 1), length=length)

    patch(programs, "pack_verified", wrong)


VERIFY = {"has_prompt_lookup": True, "verify_window": 4, "verify_rows": 2}
FAULTS = {
    "a new key dropped at a page's end": (drop_key_at_page_end, {}, "keys and values"),
    "splits chosen from the batch": (choose_splits_by_batch, {}, "token and logprob"),
    "a stale page": (read_a_stale_page, {}, "token and logprob"),
    "a wrong row of the rope table": (take_the_next_rope_row, {}, "keys and values"),
    "noise keyed by row": (key_noise_by_row, {}, "token and logprob"),
    "a residual rounded early": (round_the_residual_early, {}, "token and logprob"),
    "a draft accepted too many": (accept_a_draft_too_many, VERIFY, "tokens committed"),
    "the highest page out of reach": (write_beside_the_last_page, {}, "keys and values"),
}

SLOW = ("a new key dropped at a page's end", "noise keyed by row", "a draft accepted too many")
FAULT_CASES = [
    *SLOW,
    *(pytest.param(name, marks=pytest.mark.nightly) for name in FAULTS if name not in SLOW),
]


@pytest.mark.slow
@pytest.mark.control
@pytest.mark.parametrize("fault", FAULT_CASES)
def test_a_fault_of_decode_is_found_when_the_program_is_compiled(monkeypatch, evidence, fault):
    plant, changes, what = FAULTS[fault]
    plant(monkeypatch.setattr)
    made = make_engine(portable_model(), **changes)
    found = []
    note = made._claim.note
    monkeypatch.setattr(made._claim, "note", lambda some: (found.extend(some), note(some)))
    with pytest.raises(SelfCheckError, match="self-check has found different bits"):
        made.generate(requests()) if not changes else (made.compile(), made.generate(requests()))
    assert what in {f.what for f in found}, found
    assert made.stats().num_self_check_differences == len(found) > 0
    (kept,) = evidence.iterdir()
    document = json.loads(kept.read_text())
    assert document["difference"]["program"] == found[0].program
    assert document["fingerprint"] == portable_model().fingerprint
    assert str(kept) in made.self_check_error


@pytest.mark.slow
def test_no_fault_no_difference_and_the_same_bits(evidence):
    """The control of the controls, and what it costs: nothing of an answer."""
    checked = make_engine()
    got = checked.generate(requests())
    without = warm_engine(self_check="off")
    want = without.generate(requests())
    assert [c.digest() for c in got] == [c.digest() for c in want]
    stats = checked.stats()
    assert stats.num_self_checked == stats.num_compiled and stats.num_self_unchecked == 0
    assert stats.self_check_s > 0 and stats.num_self_check_differences == 0
    assert without.stats().num_self_checked == without.stats().self_check_s == 0
    assert stats.prefill_tokens == without.stats().prefill_tokens
    assert not evidence.exists() and checked.self_check_error == ""


@pytest.mark.slow
def test_a_start_checks_what_is_there_while_others_compile(evidence, monkeypatch):
    made, has_checked = make_engine(decode_lens=(128,)), threading.Event()
    run_check, compile_plain = made._runner._ready.run_check, made.programs._compile
    waited: list[bool] = []

    def runs(key, *operands, **named):
        result = run_check(key, *operands, **named)
        has_checked.set()
        return result

    def compiles(key, *rest):
        if key.kind == "decode" and key.table_len > 1:
            waited.append(has_checked.wait(120))
        return compile_plain(key, *rest)

    monkeypatch.setattr(made._runner._ready, "run_check", runs)
    monkeypatch.setattr(made.programs, "_compile", compiles)
    longer = Request(prompt_token_ids=(7,) * 130, sampling=SamplingParams(max_tokens=2))
    made.compile(requests=[longer])
    assert waited and all(waited)
    assert {key for key in made.programs if key.mode == "invariant"} <= made.programs.checked
    assert made.self_check_error == ""


@pytest.mark.slow
def test_a_start_compiles_in_the_order_of_the_check(evidence, monkeypatch):
    """So no check waits for a program that is behind others in the queue."""
    made = make_engine(decode_lens=(128,), decode_batches=(1,), batch_size=2)
    asked, checked = [], []

    class Pool(ThreadPoolExecutor):
        def submit(self, fn, *args, **kwargs):
            if args and isinstance(args[0], ProgramKey):
                asked.append(args[0])
            return super().submit(fn, *args, **kwargs)

    check = Session.check
    monkeypatch.setattr(ready_programs, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(
        Session, "check", lambda self, key, *rest: (checked.append(key), check(self, key, *rest))[1]
    )
    made.compile(
        requests=[
            Request(prompt_token_ids=(7,) * n, sampling=SamplingParams(max_tokens=2))
            for n in (5, 130)
        ]
    )
    assert len({key.table_len for key in asked}) > 1
    assert {key.kind for key in asked} == {"prefill", "decode"}
    reference, *others = asked
    assert reference.kind == "prefill" and not reference.leaves_hidden
    assert others == [key for key in dict.fromkeys(checked) if key != reference]
    assert set(asked) <= made.programs.checked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "tp", "changes"),
    [
        (1, 1, {"has_prompt_lookup": True, "verify_window": 6, "num_pages": 6, "batch_size": 2}),
        (1, 1, {"prefill_chunk": 1, "num_pages": 6, "batch_size": 1, "prefill_shapes": ((2, 16),)}),
        (1, 1, {"mode": "dvr", "decode_steps": 4, "verify_window": 8, "max_draft_fraction": 0.5}),
        (2, 2, {"batch_size": 4, "decode_batches": (2,), "decode_lens": (128,)}),
    ],
    ids=["lookup", "chunks of 1", "dvr", "dp 2 tp 2"],
)
def test_every_canonical_program_is_checked_and_none_differs(evidence, dp, tp, changes):
    made = make_engine(model(dp, tp), **changes)
    made.compile()
    canonical = program_check.checkable_keys(made._runner._config)
    assert {key for key in made.programs if key.mode == "invariant"} <= set(canonical)
    assert made.programs.checked == set(canonical)
    assert made.stats().num_self_checked == len(canonical) > 0
    assert made.self_check_error == ""


@pytest.mark.slow
def test_a_program_compiled_while_others_run_is_checked_on_pages_of_nobody(evidence):
    """Answers under way keep their bits, and shared programs are checked once."""
    want = [c.digest() for c in warm_engine(self_check="off").generate(requests())]
    made = make_engine(decode_batches=(1,))
    ids = [made.add_request(r.prompt_token_ids, r.sampling) for r in requests()]
    told: dict[int, list] = {i: [] for i in ids}
    while made.has_work:
        for output in made.step():
            told[output.request_id].append(output)
    digests = []
    for outputs in told.values():
        tokens = tuple(t for o in outputs for t in o.token_ids)
        logprobs = tuple(p for o in outputs for p in o.logprobs)
        done = Completion(
            request_idx=0, sequence_idx=0, prompt_token_ids=(), token_ids=tokens,
            logprobs=logprobs, top_logprobs=(), finish_reason=FinishReason.LENGTH,
        )  # fmt: skip
        digests.append(done.digest())
    assert digests == want
    count = made.stats().num_self_checked
    assert count == made.stats().num_compiled > 1
    again = Engine(model(), made._config, programs=made.programs)
    again.generate(requests())
    assert again.stats().num_self_checked == again.stats().num_compiled == 0


@pytest.mark.control
def test_a_check_runs_no_program_of_an_engine_with_shorter_tables(monkeypatch, evidence, idle_time):
    """Behind their end is no page: a GPU stopped at an address that was none.

    The control is a check that may run them, as it once did.
    """
    sizes = {"num_pages": 24, "batch_size": 2}
    short = make_engine(**sizes, max_len=256)
    short.generate(requests(1))

    def compiled() -> tuple[Engine, set[int]]:
        config = dataclasses.replace(short._config, max_len=MAX_LEN, prefill_chunk=64)
        made, ran = Engine(model(), config, programs=short.programs), set()
        run_check = made._runner._device.run_check

        def noting(key, *operands, **options):
            ran.add(key.table_len)
            return run_check(key, *operands, **options)

        monkeypatch.setattr(made._runner._device, "run_check", noting)
        made.compile()
        made.generate(requests())
        while made.check_idle():
            pass
        return made, ran

    made, ran = compiled()
    assert ran == {MAX_LEN // 128} and not made.stats().num_self_check_differences
    assert made.stats().num_self_checked > 1 and not made.stats().num_self_unchecked
    monkeypatch.setattr(
        ready_programs.ReadyPrograms, "_own", lambda self, keys: [*self.cache, *keys]
    )
    made.programs.checked.clear()
    with pytest.raises(ValueError, match="behind the 2 pages of prefill invariant 1x32"):
        compiled()


# ------------------------------------------------------------------------------ after a difference


@pytest.mark.slow
def test_after_a_difference_only_plain_requests_are_answered(monkeypatch, evidence):
    """Those under way end with the reason, new ones are refused."""
    key_noise_by_row(monkeypatch.setattr)
    made, told = make_engine(), []

    def explain(difference):
        told.append(difference)
        return "a  here\nfirst operation that differs: position 7"

    made.explain_differences(explain)
    asked = requests(2)
    kept = made.add_request(asked[0].prompt_token_ids, asked[0].sampling, is_deterministic=False)
    lost = made.add_request(asked[1].prompt_token_ids, asked[1].sampling)
    outputs = made.drain()
    (end,) = (o for o in outputs if o.request_id == lost and o.finish_reason is not None)
    assert isinstance(end.exception, SelfCheckError) and end.finish_reason is FinishReason.ERROR
    assert made.self_check_error == end.error
    assert not any(o.token_ids for o in outputs if o.request_id == lost)
    assert sum(len(o.token_ids) for o in outputs if o.request_id == kept) == 6
    with pytest.raises(SelfCheckError):
        made.add_request((1, 2), SamplingParams())
    assert len(made.generate(requests(1, is_deterministic=False))) == 1
    # The first difference was explained, once, and that is kept and said.
    assert made.self_check_cause and len(told) == 1
    assert "first operation that differs: position 7; evidence: " in made.self_check_error
    (kept,) = evidence.iterdir()
    assert json.loads(kept.read_text())["cause"] == made.self_check_cause.splitlines()


@pytest.mark.slow
def test_evidence_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    key_noise_by_row(monkeypatch.setattr)
    made = make_engine()
    with pytest.warns(RuntimeWarning, match=FOLDER_VARIABLE), pytest.raises(SelfCheckError):
        made.generate(requests())


# ---------------------------------------------------------------------------------- answers again


@pytest.fixture
def idle_time(monkeypatch):
    """As after an hour of service: there is time to check whatever waits."""
    monkeypatch.setattr(recheck, "SHARE", 1e6)


async def ask(engine: AsyncEngine, request: Request) -> list:
    stream = engine.stream(request.prompt_token_ids, request.sampling)
    return [output async for output in stream]


def serve(made: Engine, count: int = 3) -> None:
    async def run():
        engine = AsyncEngine(made)
        await asyncio.gather(*(ask(engine, r) for r in requests(count)))
        pump = engine._pump
        assert pump is not None
        assert await pump is None

    asyncio.run(run())


@pytest.mark.slow
def test_a_server_checks_answers_again_while_idle(evidence, idle_time):
    made = warm_engine()
    serve(made)
    stats = made.stats()
    assert stats.num_rechecked > 0 and stats.recheck_s > 0 and stats.num_rechecks_given_up == 0
    assert stats.num_finished == 3 and stats.num_pages_held == 0
    assert made.self_check_error == "" and not made.has_work
    # Nobody but a server does it.
    count = stats.num_rechecked
    made.generate(requests())
    assert made.stats().num_rechecked == count


@pytest.mark.slow
@pytest.mark.control
def test_a_wrong_answer_is_found_when_it_is_checked_again(monkeypatch, evidence, idle_time):
    """The host's fault, which no program shows: a token is put down with another's logprob."""
    made = warm_engine()
    right = made._rechecks.offer

    def wrong(seq, tokens):
        below = np.float32(-1e9)
        right(seq, [t._replace(logprob=np.nextafter(t.logprob, below)) for t in tokens])

    monkeypatch.setattr(made._rechecks, "offer", wrong)
    serve(made)
    assert "answer" in made.self_check_error and made.stats().num_rechecked == 1
    with pytest.raises(SelfCheckError):
        made.generate(requests())
    assert json.loads(next(evidence.iterdir()).read_text())["difference"]["token_ids"]


@pytest.mark.slow
def test_a_request_comes_before_a_check(evidence, idle_time):
    made = warm_engine()
    asked = requests()[2]  # three chunks
    made.add_request(asked.prompt_token_ids, asked.sampling)
    made.drain()
    assert made.check_idle()
    held = made.stats().num_pages_held
    made.add_request((1, 2, 3), SamplingParams(max_tokens=2))
    assert not made.check_idle()
    made.drain()
    assert held > 0 and made.stats().num_pages_held == 0
    assert made.stats().num_rechecks_given_up == 1


@pytest.mark.slow
def test_checking_again_takes_a_small_share_of_the_time(evidence):
    made = warm_engine()
    made.generate(requests())
    stats = made.stats()
    assert not made.check_idle() or stats.recheck_s <= recheck.SHARE * stats.step_s.total
    stats.recheck_s = 1e6
    made.generate(requests())
    assert not made.check_idle()


@pytest.mark.parametrize("value", ["start", "off"])
def test_answers_are_checked_again_only_where_asked_for(value, evidence, idle_time):
    made = warm_engine(self_check=value)
    serve(made)
    assert made.stats().num_rechecked == 0


def test_a_value_that_is_none_is_named():
    with pytest.raises(ValueError, match="self_check='sometimes' must be one of"):
        EngineConfig(batch_size=1, prefill_chunk=1, max_len=8, self_check="sometimes")


# ------------------------------------------------------------------------------------------- probes

place = partial(place_probes, num_company=4, table_len=8, page_len=128)


def probes(num_new: int = 8):
    return make_probes(
        num_positions=1024, num_new=num_new, vocab_size=50, profile=model().profile,
        is_filtered=False,
    )  # fmt: skip


def test_probes_lie_around_boundaries_and_at_the_end():
    assert [p.position for p in probes()] == [1016, 127, 512, 383, 511, 1]
    for probe in probes():
        assert all(a != b for a, b in zip(probe.token_ids, probe.other_ids, strict=True))
    assert len({p.sampling for p in probes()}) == 3


def test_other_tokens_are_written_by_the_program_that_does_it_fastest():
    """One launch, of no more rows than there are probes, if one is so long; else the fewest."""

    def key(kind, rows, length, table_len=16) -> ProgramKey:
        return ProgramKey(
            kind=kind, rows=rows, length=length, table_len=table_len, mode="invariant",
            weights="full",
        )  # fmt: skip

    decodes = [key("decode", rows, 1) for rows in (1, 8, 256)]
    verify, long, chunk = key("verify", 4, 8), key("decode", 2, 8), key("prefill", 4, 64)
    keys = [*decodes, verify, chunk, key("decode", 8, 1, table_len=4)]
    for one in (*decodes, chunk):
        assert program_check._writer(one, keys, 6) == decodes[1]
        assert program_check._writer(one, keys, 1) == decodes[0]
        assert program_check._writer(one, keys, 9) == decodes[2]
    assert program_check._writer(verify, keys, 6) == verify
    assert program_check._writer(verify, [*keys, long], 6) == long


def test_every_probe_writes_pages_of_its_own_and_reads_what_nobody_writes():
    idle = np.asarray([[20, 19, 18, 17, 16, 15, 14, 3, 2, 1, 0]], np.int32)
    placement, left = place(probes(), IdlePages(pages=idle, num_pages=21))
    assert placement is not None and not left
    own = [set(pages) for pages in placement.written[0].tolist()]
    assert sum(map(len, own)) == len(set().union(*own)) <= 11
    written = set().union(*own, placement.spare[0].tolist())
    assert written <= set(idle[0].tolist()) and 20 in written
    read = set()
    for probe, pages, table in zip(placement.probes, own, placement.tables[0], strict=True):
        before = set(table[: probe.position // 128].tolist())
        assert not before & written
        assert pages == set(table[probe.position // 128 : (probe.position + 7) // 128 + 1].tolist())
        read |= before
    assert max(read) == max(set(range(21)) - written)


@pytest.mark.parametrize("num_pages", [1, 2, 3, 4])
def test_probes_are_placed_a_few_at_a_time_where_pages_are_few(num_pages):
    left, placed = probes(), []
    idle = np.arange(num_pages, dtype=np.int32)[None]
    while left:
        placement, left = place(left, IdlePages(pages=idle, num_pages=num_pages))
        if placement is None:
            left = left[1:]
            continue
        placed += placement.probes
        written = {*placement.written.flat, *placement.spare.flat}
        for probe, table in zip(placement.probes, placement.tables[0], strict=True):
            assert not set(table[: probe.position // 128].tolist()) & written
    assert len(placed) == {1: 1, 2: 4, 3: 6, 4: 6}[num_pages]


# ---------------------------------------------------------------------------- what the cache holds


def test_other_tokens_are_written_only_where_the_cache_is_not_as_it_was_filled():
    """Each place once: what a check or a sequence has run on holds what a test would write."""
    probes = make_probes(
        num_positions=256, num_new=2, vocab_size=320, profile=NumericsProfile(), is_filtered=False
    )
    idle = IdlePages(pages=np.arange(8, dtype=np.int32)[None], num_pages=9)
    placement, _ = place_probes(probes, idle, num_company=2, table_len=2, page_len=128)
    assert placement is not None and len(placement.probes) > 1
    filled = FilledPlaces(is_known=True)
    assert all(filled.has(placement, i, 128) for i in range(len(placement.probes)))
    filled.take(placement, [0], 128)
    assert not filled.has(placement, 0, 128) and filled.has(placement, 1, 128)
    # Another place of the same page is as it was; one of a spare page is not.
    place = dataclasses.replace(placement.probes[0], position=placement.probes[0].position - 2)
    moved = dataclasses.replace(placement, probes=(place, *placement.probes[1:]))
    assert filled.has(moved, 0, 128)
    spare = dataclasses.replace(moved, tables=np.full_like(moved.tables, moved.spare[0, 0]))
    assert not filled.has(spare, 0, 128)
    filled.forget()
    assert not filled.has(placement, 1, 128)
    assert not FilledPlaces(is_known=False).has(placement, 1, 128)


@pytest.mark.slow
def test_a_sequence_makes_what_the_cache_holds_unknown(evidence):
    made = warm_engine()
    made.generate(requests()[:1])
    filled = made._runner._device.filled
    assert not filled._is_known
    made.reset()
    assert made._runner._device.filled._is_known
