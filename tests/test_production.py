# SPDX-License-Identifier: Apache-2.0
"""The production suite runs every way through the kernels that a configuration can reach."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator

import jax
import numpy as np
import pytest

from benchmarks import production, production_requests
from benchmarks.step import MODELS
from detjax.engine.running.program_key import ProgramKey
from detjax.models import hf_rope
from detjax.models.config import LinearAttentionConfig, ModelConfig
from detjax.models.registry import family_named
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.attention import sm90 as attention
from detjax.pallas_kernels.attention.sm90_decode_cluster import merges_in_memory
from detjax.pallas_kernels.linear.sm90 import normalises_input
from detjax.pallas_kernels.linear.tiles import MatmulTiles, Product, Rows, TallTiles, choose_tiles
from detjax.pallas_kernels.rms_norm.sm90 import choose_schedule, row_sum
from detjax.testing.shapes import LAYOUTS

PROFILE = NumericsProfile()
PER_SPLIT = PROFILE.attention_split // PROFILE.attention_block
CACHE_TOKENS = 5000 * 128
"""Of a cache that fills an H200 beside Llama-3.1-8B; an H100's is 2,900 pages."""
PARTS = list(production.parts(CACHE_TOKENS))
AHEAD = [part for part in PARTS if part.is_compiled_ahead]
PROGRAMS = {key for part in AHEAD for key in production.programs_of(part)}
EIGHT_B = MODELS["llama3_8b"]


# --------------------------------------------------------------------------------------- attention


def way(
    batch: int, query_len: int, table_len: int, *, kv_heads: int, group: int, channels: int
) -> str:
    """How attention spreads its work over CTAs: the kernels, and which of their branches."""
    if not attention.is_decode(query_len, group, channels, None):
        return "prefill"
    config_of = functools.partial(
        attention.decode_config,
        batch=batch, query_len=query_len, kv_heads=kv_heads, group=group, channels=channels,
        table_len=table_len, per_split=PER_SPLIT,
    )  # fmt: skip
    config = config_of(is_new=query_len <= attention.MOST_NEW_TOKENS)
    is_new = query_len == 1 or config.cluster > 0
    config = config if is_new else config_of()
    in_memory = merges_in_memory(
        query_len=query_len, group=group, channels=channels, splits=-(-table_len // PER_SPLIT),
        cluster=config.cluster,
    ) if config.cluster else False  # fmt: skip
    parts = [
        ("new token" if query_len == 1 else "new window") if is_new else "window",
        f"cluster of {config.cluster}" if config.cluster
        else "sequences" if config.whole_sequences
        else f"splits, {config.merge_unroll[0]} at a time",
        "split shared" if config.spread else "",
        "merge in device memory" if in_memory else "",
        "scores ahead" if config.scores_ahead else "",
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def ways_of(programs: Iterable[ProgramKey]) -> set[str]:
    """The ways of these programs, of each model with which the suite has been run."""
    taken = set()
    for config in (EIGHT_B, MODELS["smollm2_135m"]):
        heads = {
            "kv_heads": config.num_kv_heads,
            "group": config.num_heads // config.num_kv_heads,
            "channels": config.head_dim,
        }
        for key in programs:
            # The length of a decode program is its number of steps.
            length = 1 if key.kind == "decode" else key.length
            taken.add(way(key.rows, length, key.table_len, **heads))
    return taken


def reachable() -> Iterator[tuple[str, str]]:
    """Every way, and a shape that takes it."""
    tables = [*range(1, 10), 16, 17, *range(31, 37), 64, 128, 1024]
    for name, layout in LAYOUTS.items():
        if layout.channels not in attention.CHANNELS:
            continue
        for tp in (1, 2, 4, 8):
            if layout.num_kv_heads % tp:
                continue
            heads = {
                "kv_heads": layout.num_kv_heads // tp,
                "group": layout.num_heads // layout.num_kv_heads,
                "channels": layout.channels,
            }
            batches = [*range(1, 35), *range(63, 67), *range(127, 135), 192, 255, 256, 257]
            for batch, table_len in itertools.product(batches, tables):
                for query_len in (1, 2, 4, 8, 16, 512):
                    shape = f"{name}, tp {tp}, {batch} x {query_len}, {table_len} pages"
                    yield way(batch, query_len, table_len, **heads), shape


def test_the_suite_takes_every_way_through_attention():
    taken = ways_of(PROGRAMS)
    missing = {}
    for name, shape in reachable():
        if name not in taken:
            missing.setdefault(name, shape)
    assert missing == {}
    assert len(taken) > 15


@pytest.mark.control
def test_control_a_suite_of_one_batch_size_misses_ways():
    taken = ways_of([key for key in PROGRAMS if key.rows == 8])
    assert {name for name, _ in reachable()} - taken


@pytest.mark.control
def test_control_a_new_way_would_be_missed(monkeypatch):
    taken = ways_of(PROGRAMS)
    monkeypatch.setattr(attention, "MAX_IN_CLUSTER", 16)
    monkeypatch.setattr(attention, "PARTIAL_BYTES", 64 << 10)
    missed = {name for name, _ in reachable()} - taken
    assert {"new token, cluster of 16, scores ahead", "new window, cluster of 16"} <= missed


# ---------------------------------------------------------------------------------------- products


def kinds_of_tiles(config: ModelConfig, num_rows: int, logits_rows: int) -> set[tuple]:
    """What decides the code of each product of a layer and of lm_head."""
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    rows = Rows.NORMALISED if normalises_input(num_rows, width) else Rows.GIVEN
    of_row = functools.partial(
        Product, num_rows=num_rows, num_leaves=1, leaf_len=width, out_bytes=2
    )
    products = {
        "qkv": of_row(num_out=qkv, rows=rows),
        "gate_up": of_row(
            num_out=2 * config.intermediate_size, is_gated=True, rows=rows
        ),
        "lm_head": Product(
            num_rows=logits_rows, num_out=config.vocab_size, num_leaves=1, leaf_len=width,
            out_bytes=4,
        ),
    }  # fmt: skip
    for name, k_len in (("o", heads), ("down", config.intermediate_size)):
        reduction = tree_reduction(k_len, PROFILE)
        products[name] = Product(
            num_rows=num_rows, num_out=width, num_leaves=reduction.num_leaves,
            leaf_len=reduction.leaf_len, out_bytes=2, has_residual=True,
        )  # fmt: skip
    return {(name, *_kind(choose_tiles(product))) for name, product in products.items()}


def _kind(tiles: MatmulTiles) -> tuple:
    kind = type(tiles).__name__, tiles.num_wgs, tiles.groups, tiles.is_gated, tiles.ctas_per_sm
    if isinstance(tiles, TallTiles):
        return *kind, tiles.cluster, tiles.shares_slot, tiles.is_paired, tiles.smem_levels
    return *kind, tiles.held is not None, tiles.held is not None and tiles.held.copies_rows


def rows_of(key: ProgramKey) -> tuple[int, int]:
    """Rows of the layers' products, and of lm_head's."""
    length = 1 if key.kind == "decode" else key.length
    return key.rows * length, key.rows * (length if key.kind == "verify" else 1)


NOT_IN_THE_SUITE = {
    "lm_head": "more rows than any program has: only scoring takes logits of whole prompts",
}
"""Products of which some kinds are for others to check, and who: tests/pallas_kernels compares
every number of rows to 257 and chosen ones to 8192 with one row alone."""


def test_the_suite_takes_every_kind_of_product():
    """Their operands are weights and activations, whose size no cache changes."""
    canonical = [key for key in PROGRAMS if key.mode == "invariant"]
    taken = set().union(*(kinds_of_tiles(EIGHT_B, *rows_of(key)) for key in canonical))
    missing: dict[tuple, int] = {}
    for num_rows in (*range(1, 530), *range(530, 8193, 37)):
        for kind in kinds_of_tiles(EIGHT_B, num_rows, min(num_rows, 1024)) - taken:
            missing.setdefault(kind, num_rows)
    unknown = {kind: rows for kind, rows in missing.items() if kind[0] not in NOT_IN_THE_SUITE}
    assert unknown == {}


def test_the_suite_takes_every_schedule_of_a_norm():
    chunks = row_sum(EIGHT_B.hidden_size).num_parts
    canonical = {rows_of(key)[0] for key in PROGRAMS if key.mode == "invariant"}

    def schedule(rows):
        return choose_schedule(num_rows=rows, num_chunks=chunks, num_leaves=1)

    taken = {schedule(rows).warpgroups for rows in canonical}
    assert {schedule(rows).warpgroups for rows in range(1, 8193)} <= taken


# ------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("num_pages", [2900, 5000], ids=["H100", "H200"])
def test_offsets_into_the_cache_pass_32_bits(num_pages):
    """The last page of the last layer lies beyond 2^32 elements, hence bytes, on both GPUs."""
    page = 2 * EIGHT_B.num_kv_heads * 128 * EIGHT_B.head_dim
    assert (EIGHT_B.num_layers * num_pages - 1) * page > 2**32
    # So does what a part uses, all in the first pages as it may be: from the third layer on.
    assert 3 * num_pages * page > 2**31


def test_what_is_asked_fits_in_the_cache():
    for part in PARTS:
        used = max(sum(-(-(a.length + a.count) // 128) for a in batch) for batch in part.batches)
        assert used + int(part.skipped_pages * CACHE_TOKENS // 128) <= CACHE_TOKENS // 128


def test_what_fills_wide_tables_passes_31_bits_too():
    """Partial results of 256 rows of 1024 pages: 2^31 bytes of float32."""
    (wide,) = [key for key in PROGRAMS if key.table_len == 1024 and key.rows == 256]
    entries = wide.rows * -(-wide.table_len // PER_SPLIT) * EIGHT_B.num_kv_heads
    assert entries * 8 * EIGHT_B.head_dim * 4 >= 2**31


# ------------------------------------------------------------------------------------------- cases


def test_every_set_of_options_is_used_and_leaves_neighbours_without():
    (part,) = [part for part in PARTS if part.name == "adjusted"]
    (drawn_requests,) = part.batches
    found = [drawn.sampling(EIGHT_B.vocab_size) for drawn in drawn_requests]
    assert {drawn.option_set for drawn in drawn_requests} == set(production_requests.OPTION_SETS)
    assert {s.is_adjusted for s in found} == {s.is_filtered for s in found} == {True, False}
    assert {s.temperature > 0 for s in found if s.is_adjusted} == {True, False}


def test_the_longest_context_is_stretched_as_qwen3_recommends():
    """Its model cards: `"rope_type": "yarn", "factor": 4.0`, of 32768 positions."""
    raw = {
        "rope_theta": 1000000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768
        },
    }  # fmt: skip
    family = family_named("qwen3")
    assert family is not None
    of_cards = hf_rope.rope_config(
        raw, default_theta=10000.0, max_len=131072, head_dim=128, family=family
    )
    assert of_cards == production.QWEN3_YARN
    (part,) = [part for part in PARTS if part.name == "yarn"]
    lengths = [drawn.length + drawn.count for batch in part.batches for drawn in batch]
    assert min(lengths) > 32768 > min(lengths) - 16 and max(lengths) > 131000


def test_prompts_end_around_every_boundary_and_fit():
    for limit in (512, 1280, 4352):
        drawn_requests = production.pool(limit, 256, tokens=40, first=0)
        lengths = {drawn.length for drawn in drawn_requests}
        inside = [n for n in range(512, limit - 41, 512)]
        for boundary in (128, *inside):
            assert {boundary - 1, boundary} <= lengths, boundary
        assert max(lengths) + 40 <= limit and min(lengths) == 1
        assert len({drawn.idx for drawn in drawn_requests}) == len(drawn_requests) == 256
    for part in PARTS:
        for drawn_requests in part.batches:
            assert all(a.length + a.count <= part.config["max_len"] for a in drawn_requests)
            assert len(drawn_requests) > 0


def test_asks_of_different_parts_are_the_same_or_other_texts():
    known = {}
    for drawn in itertools.chain.from_iterable(itertools.chain(*(p.batches for p in PARTS))):
        assert known.setdefault(drawn.idx, drawn) == drawn


def test_a_wrong_token_is_mended_and_those_behind_it_asked_again():
    right = [(5, 1), (6, 1), (7, 1)]
    assert production._right_tokens(right, (5, 6)) is None
    assert production._right_tokens(right, (5, 9)) == (5, 6)
    assert production._right_tokens(right, (4, 6)) == (5,)


def test_a_prompt_that_repeats_does_so():
    drawn = dataclasses.replace(production.pool(512, 9, tokens=40, first=0)[8], period=40)
    prompt = np.asarray(production.Texts(100).prompt(drawn))
    assert (prompt[40:] == prompt[:-40]).all()


LINEAR = LinearAttentionConfig(
    num_key_heads=2, num_value_heads=4, key_dim=64, value_dim=64, conv_width=4,
    layers=(True, False),
)  # fmt: skip
LOCAL = {
    "windows": {"sliding_windows": (64, None)},
    "linear attention": {"linear_attention": LINEAR, "has_output_gate": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCAL)
def test_local_layers_have_pages_of_their_own_and_the_bits_of_one_table(monkeypatch, name):
    """On the CPU; and others from a reference that has no such layer, or other filters."""
    config = dataclasses.replace(MODELS["tiny"], **LOCAL[name])
    monkeypatch.setitem(production.MODELS, "tiny", config)
    options = ["--model", "tiny", "--backend", "portable", "--pages", "60", "--parts", "512"]
    suite = production.Suite(production.parser().parse_args(options))
    assert suite.model.config.sliding_windows == config.sliding_windows
    (part,) = [part for part in PARTS if part.name == "512"]
    sizes = {"batch_size": 3, "prefill_chunk": 128, "has_prompt_lookup": False}
    drawn = production.pool(512, 5, tokens=24, first=0)
    part = dataclasses.replace(
        part, config=part.config | sizes, batches=[drawn], is_compiled_ahead=False
    )
    outcome = suite.run(part)
    assert 0 < outcome.num_local_pages < outcome.num_pages and len(outcome.answers) == 5
    want = production.references(suite, [outcome])
    for drawn_request, answer in outcome.answers:
        assert answer == want[drawn_request.idx][: len(answer)], drawn_request
    if name == "windows":
        plain = dataclasses.replace(config, sliding_windows=(None, None))
        suite.model = dataclasses.replace(suite.model, config=plain)
    else:
        layer = suite.model.params["layers"][0]
        layer["conv_v"] = jax.tree.map(lambda x: -x, layer["conv_v"])
    other = production.references(suite, [outcome])
    assert any(answer != other[a.idx][: len(answer)] for a, answer in outcome.answers)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["adjusted", "yarn"])
def test_a_part_is_compared_with_a_reference_with_the_same_options(monkeypatch, name):
    """On the CPU: equal bits, and others from a reference that knows neither options nor YaRN."""
    options = ["--model", "tiny", "--backend", "portable", "--pages", "60", "--parts", name]
    suite = production.Suite(production.parser().parse_args(options))
    (part,) = [part for part in PARTS if part.name == name]
    drawn_requests = production_requests.with_option_sets(
        production.pool(512, 9, tokens=24, first=1000)[4:]
    )
    if name == "yarn":
        drawn_requests = [
            dataclasses.replace(drawn, option_set="nothing") for drawn in drawn_requests[:2]
        ]
    config = part.config | {"batch_size": 5, "max_len": 512, "prefill_chunk": 128}
    part = dataclasses.replace(part, config=config, batches=[drawn_requests])
    outcome = suite.run(part)
    assert (
        len(outcome.answers) > len(drawn_requests) if part.is_scored else len(outcome.answers) == 2
    )
    want = production.references(suite, [outcome])
    for drawn, answer in outcome.answers:
        assert answer == want[drawn.idx][: len(answer)], drawn
    if name == "yarn":
        plain = dataclasses.replace(part, rope=None)
    else:
        monkeypatch.setattr(
            production_requests,
            "option_sets",
            lambda size: {a.option_set: {} for a in drawn_requests},
        )
        plain = part
    other = production.references(suite, [dataclasses.replace(outcome, part=plain)])
    differ = {
        drawn.idx for drawn, answer in outcome.answers if answer != other[drawn.idx][: len(answer)]
    }
    assert differ == {
        drawn.idx for drawn in drawn_requests if drawn.option_set != "nothing" or name == "yarn"
    }
