# SPDX-License-Identifier: Apache-2.0
"""Layers that read a bounded number of tokens back keep no more than that, and no bit changes."""

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import NOTHING_HELD, DecodeRow, HeldPages, Sequence
from detjax.engine.running.memory import (
    cache_bytes,
    check_local_pages,
    enough_local,
    least_local,
    pages_that_fit,
)
from detjax.engine.running.model_runner import _decode_inputs
from detjax.engine.scheduling.kv_cache import PagePool
from detjax.engine.scheduling.local_pages import UNBOUND, LocalPages
from detjax.models.config import ModelConfig
from detjax.models.hf_config import load_config
from detjax.models.loading import LoadedModel
from detjax.pallas_kernels.backend import Backend
from detjax.sizing import choose_sizes
from detjax.testing import assert_bitwise_equal, assert_order_sensitive
from detjax.testing.dummies import dummy_config, dummy_model

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
WINDOW = 70
"""Of two layers of three; a page has 128 tokens."""

# ------------------------------------------------------------------------------------ on the host


def local_pages(num_pages: int = 4, *, reach: int = 5, total: int = 12) -> tuple:
    """A pool of pages of 4 tokens, and the local pages beside it."""
    pool = PagePool(total)
    return pool, LocalPages(pool, num_pages=num_pages, page_len=4, reach=reach)


@pytest.mark.parametrize(
    ("reach", "position", "first"),
    [(1, 0, 0), (1, 3, 0), (1, 4, 1), (5, 7, 0), (5, 8, 1), (5, 11, 1), (5, 12, 2), (9, 8, 0)],
)
def test_the_first_page_that_a_token_reads(reach, position, first):
    """That of the token `reach` - 1 before it."""
    _, local = local_pages(reach=reach)
    assert local.first_read(position) == first == max(0, position - reach + 1) // 4


def test_a_sequence_holds_what_its_next_tokens_read_and_write():
    pool, local = local_pages()
    pages = pool.allocate(6)
    held = local.move(pages, NOTHING_HELD, (0, 9))
    assert held.first == 0 and len(set(held.local_pages)) == 3 == local.num_held
    later = local.move(pages, held, (12, 15))
    # Token 12 reads from 8 on; the page of 8 to 11 is where it was.
    assert later.first == 2 and later.local_pages[0] == held.local_pages[2]
    assert local.num_held == 2 and local.bound[pages[0]] == local.bound[pages[1]] == UNBOUND
    with pytest.raises(MemoryError, match="4 local pages wanted, of 4"):
        local.move(pages, NOTHING_HELD, (0, 23))
    assert local.move(pages, later, (12, 12)) == later  # fewer drafts than before
    assert local.num_held == 2
    with pytest.raises(ValueError, match="released twice"):
        local.release([pages[0]])


def test_what_others_can_find_stays_until_its_room_is_wanted():
    pool, local = local_pages(num_pages=3)
    pages = pool.allocate(5)
    local.hold(pages[:3])
    pool.register(pages[0], b"0")
    pool.register(pages[1], b"1")
    local.release(pages[:3])
    assert [local.has(page) for page in pages[:3]] == [True, True, False]
    local.hold(pages[3:])  # one is free, and the longest unused gives the other
    assert [local.has(page) for page in pages[:3]] == [False, True, False]
    assert local.idle_pages(1) and not local.has(pages[1])  # a check of programs wants one


def test_a_prefix_ends_where_all_that_its_last_token_reads_is_there():
    """By every subset of the pages that are there, against the definition."""
    for reach in (1, 4, 5, 9, 13):
        pool, local = local_pages(num_pages=6, reach=reach)
        pages = pool.allocate(6)
        for there in range(2**6):
            local.clear()
            local.hold([page for i, page in enumerate(pages) if there >> i & 1])
            fits = [
                count
                for count in range(7)
                if all(there >> i & 1 for i in range(max(0, 4 * count - reach + 1) // 4, count))
            ]
            assert local.longest_prefix(pages) == max(fits), (reach, there)


# --------------------------------------------------------------------------------- with a model


def of_windows() -> ModelConfig:
    config = dummy_config(max_len=1024, num_layers=3)
    return dataclasses.replace(config, sliding_windows=(WINDOW, None, WINDOW))


def hybrid() -> ModelConfig:
    config = load_config(GOLDEN / "qwen3_5")
    assert config.linear_attention is not None
    linear = dataclasses.replace(config.linear_attention, num_key_heads=4, num_value_heads=8)
    sizes = {"intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2}
    sizes["max_position_embeddings"] = 1024
    return dataclasses.replace(config, **sizes, eos_token_ids=(), linear_attention=linear)


KINDS = {"windows": (of_windows, Backend.REFERENCE), "hybrid": (hybrid, Backend.PORTABLE)}


@cache
def model(kind: str = "windows", dp: int = 1, tp: int = 1) -> LoadedModel:
    config, backend = KINDS[kind]
    return dummy_model(config(), dp=dp, tp=tp, backend=backend)


def requests() -> list[Request]:
    """Texts of up to six pages; those of even numbers begin alike."""
    rng = np.random.default_rng(3)
    base = tuple(int(token) for token in rng.integers(0, 320, 600))
    return [
        Request(
            prompt_token_ids=base[:length]
            if i % 2 == 0
            else tuple(int(token) for token in rng.integers(0, 320, length)),
            sampling=SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i),
        )
        for i, length in enumerate((505, 300, 5, 440, 375, 120))
    ]


@cache
def alone(kind: str = "windows") -> list[Completion]:
    """The canonical answers: each request alone, with all pages for all layers."""
    config = EngineConfig(batch_size=1, max_len=768, self_check="off")
    return Engine(model(kind), config).generate(requests())


def engine(kind: str = "windows", dp: int = 1, tp: int = 1, **options) -> Engine:
    """Of three at once, with the fewest local pages."""
    made = model(kind, dp, tp)
    config = EngineConfig(**{"batch_size": 3 * dp, "max_len": 768, **options})
    return Engine(made, dataclasses.replace(config, num_local_pages=least_local(made, config)))


def num_different(got: list[Completion], want: list[Completion]) -> int:
    """Answers of which a token or a bit differs."""
    found = [(c.token_ids, np.stack(c.logprobs).tobytes()) for c in got]
    return sum(
        one != (c.token_ids, np.stack(c.logprobs).tobytes())
        for one, c in zip(found, want, strict=True)
    )


def assert_same(got: list[Completion], want: list[Completion], claim: str) -> None:
    for g, w in zip(got, want, strict=True):
        where = f"{claim}: request {w.request_idx}"
        assert g.token_ids == w.token_ids, where
        assert_bitwise_equal(np.stack(g.logprobs), np.stack(w.logprobs), claim=where)


def test_probe_depends_on_order():
    w = np.asarray(model().params["layers"][0]["down"], np.float32)
    assert_order_sensitive(w * np.linspace(0.5, 2, w.shape[1], dtype=np.float32))
    assert len({c.token_ids for c in alone()}) == 6


def test_the_fewest_local_pages_change_nothing():
    """Twice: the second time prefixes are found, where their last pages are still there."""
    made = engine()
    stats = made.stats()
    assert 0 < stats.num_local_pages < stats.num_pages
    assert_same(made.generate(requests()), alone(), "the fewest local pages")
    before = made.stats().prefix_tokens
    assert_same(made.generate(requests()), alone(), "from the prefix cache")
    stats = made.stats()
    assert stats.prefix_tokens > before
    assert stats.num_self_checked > 0 == stats.num_self_check_differences
    assert stats.num_pages_held == stats.num_local_pages_held == 0


@pytest.mark.control
def test_control_a_page_given_away_while_it_is_read_is_seen(monkeypatch):
    """As many pages, and layers that are said to read a page of tokens less than they do."""
    monkeypatch.setattr(LocalPages, "first_read", lambda self, position: position // 128)
    made = engine(self_check="off", has_prefix_cache=False)
    assert num_different(made.generate(requests()), alone()) > 2


SCHEDULES = (
    {"mode": "dvr", "max_draft_fraction": 1.0},
    {"prefill_shapes": ((3, 96),), "prefill_chunk": 200},
    {"decode_steps": 4, "steps_ahead": 3},
    {"num_pages": 6},  # what one of the long texts needs and a short one
    {"has_prompt_lookup": True, "verify_window": 5},
    {"has_prefix_cache": False},
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [*(("windows", options) for options in SCHEDULES),
     *(("hybrid", options) for options in SCHEDULES[:2])],
    ids=str,
)  # fmt: skip
def test_no_schedule_changes_a_bit(kind, options):
    made = engine(kind, **options)
    assert_same(made.generate(requests()), alone(kind), f"{kind} with {options}")
    assert_same(made.generate(requests()[::-1])[::-1], alone(kind), f"{kind} again, {options}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("windows", (2, 1)), ("windows", (1, 2)), ("windows", (2, 2)), ("hybrid", (2, 2))],
    ids=str,
)
def test_no_mesh_changes_a_bit(kind, mesh):
    assert_same(engine(kind, *mesh).generate(requests()), alone(kind), f"{kind} on {mesh}")


def test_a_decode_step_is_laid_out_anew_when_local_pages_come_or_go():
    """A page that a sequence has already may become one of local layers, and the row changes."""
    seq = Sequence(
        request_id=0, sequence_idx=0, request=requests()[0], sampling=SamplingParams(),
        is_drafted=False, is_canonical=True, max_len=600,
    )  # fmt: skip
    row = DecodeRow(seq=seq, num_preemptions=0, num_tokens=1, is_draft=False, window_idx=0)
    seq.pages, found = [4, 5, 6], set()
    for held in (HeldPages(1, (7,)), HeldPages(1, (7, 8)), HeldPages(2, (8,)), HeldPages(2, (7,))):
        seq.held = held
        found.add(_decode_inputs(row))
    assert len(found) == 4


@pytest.mark.slow
def test_a_prefix_whose_local_pages_are_gone_is_found_again_once_it_is_computed():
    """Whoever computes it again has the pages that others find from then on."""
    made = engine(batch_size=1)
    first, *_, other = requests()
    (want, *_, of_other) = alone()
    for answer, request in ((want, first), (of_other, other), (want, first)):
        assert_same(made.generate([request]), [answer], "one after the other")
    local = made._scheduler.local_pages[0]
    assert local is not None
    local.clear_idle()
    before = made.stats().prefix_tokens
    assert_same(made.generate([first]), [want], "without local pages")
    assert made.stats().prefix_tokens == before
    assert_same(made.generate([first]), [want], "with them")
    assert made.stats().prefix_tokens > before


# ---------------------------------------------------------------------------------------- sizes


def test_sizes_are_chosen_so_that_more_tokens_fit():
    """Two layers of three have a window: in the same bytes there is room for more pages."""
    made = model()
    config = choose_sizes(
        made, {"batch_size": 4, "max_len": 1024, "num_pages": 800}, gpu_memory_utilization=0.9
    )
    assert config.num_local_pages == enough_local(made, config, 800)
    assert least_local(made, config) < config.num_local_pages == 100 + least_local(made, config)
    less = cache_bytes(made, 800, num_local_pages=config.num_local_pages)
    assert less / cache_bytes(made, 800) == (800 + 2 * config.num_local_pages) / 2400
    sizes = {"gpu_memory_utilization": 0.9, "draft_weights": "full"}
    alike = pages_that_fit(made, **sizes)
    fitting = pages_that_fit(
        made, **sizes, local_of=lambda count: enough_local(made, config, count)
    )
    assert 2 * alike < fitting
    sized = [
        cache_bytes(made, count, num_local_pages=enough_local(made, config, count))
        for count in (alike, fitting, fitting + 1)
    ]
    whole = cache_bytes(made, alike)
    # The room is at most a page of all layers larger than what fitted into it before.
    assert sized[0] < sized[1] <= whole + cache_bytes(made, 1) < sized[2] + cache_bytes(made, 1)


def test_every_layer_has_as_many_pages_where_fewer_would_not_do():
    """Few pages, all layers alike, or drafts of another model, which read every page."""
    made, plain = model(), dummy_model(dummy_config(window=WINDOW))
    config = EngineConfig(batch_size=4, max_len=1024)
    assert enough_local(made, config, 20) == 0 < enough_local(made, config, 320)
    assert enough_local(plain, config, 320) == least_local(plain, config) == 0
    drafted = dataclasses.replace(config, draft_weights="eagle3")
    assert enough_local(made, drafted, 320) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_local_pages": 5}, "num_local_pages=5 must be at least 1[0-9] for batch_size=3"),
        ({"num_local_pages": 60, "draft_weights": "eagle3"}, "does not go with draft_weights"),
        ({"num_local_pages": -1}, "num_local_pages=-1 must be at least 0"),
    ],
)
def test_a_number_that_does_not_fit_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Engine(model(), EngineConfig(batch_size=3, max_len=768, **options))


def test_a_model_without_local_layers_refuses_a_number():
    with pytest.raises(ValueError, match="for models of which some layers have a sliding window"):
        check_local_pages(dummy_model(dummy_config()), EngineConfig(num_local_pages=40))
