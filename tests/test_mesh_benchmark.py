# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.mesh` gives a row of the batch the same part of the cache on every mesh."""

import json

import numpy as np
import pytest

from benchmarks.common import Rows
from benchmarks.mesh import Runner, compare_meshes, place_rows
from benchmarks.step import MODELS
from detjax.models.loading import random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh

ROW_LEN = 9
SIZES = [(batch, 32, dp) for dp in (1, 2, 4, 8) for batch in (8, 16, 32)] + [(12, 48, 4)]


def pages_of_two_halves(batch, most_rows, *, row_len, table_len, dp):
    """The control: rows from the first and the second half of the cache, right for dp up to 2."""
    first = np.arange(-(-batch // 2))
    rows = np.concatenate([first, most_rows // 2 + np.arange(batch // 2)])
    pages = rows[:, None] * row_len + np.arange(table_len)[None]
    return rows, pages % (most_rows * row_len // dp)


def is_placed(place, batch, most_rows, dp) -> bool:
    """Whether each row has its own pages of the whole cache, all of them on its replica."""
    rows, pages = place(batch, most_rows, row_len=ROW_LEN, table_len=ROW_LEN, dp=dp)
    replica = np.arange(batch) // (batch // dp)
    share = most_rows * ROW_LEN // dp
    on_replica = ((pages >= 0) & (pages < share)).all()
    whole = pages + replica[:, None] * share
    is_own = (whole == rows[:, None] * ROW_LEN + np.arange(ROW_LEN)).all()
    return on_replica and is_own and len(np.unique(whole)) == whole.size


@pytest.mark.parametrize(("batch", "most_rows", "dp"), SIZES)
def test_each_row_has_its_own_pages_on_its_replica(batch, most_rows, dp):
    assert is_placed(place_rows, batch, most_rows, dp)


@pytest.mark.control
@pytest.mark.parametrize(("dp", "is_right"), [(1, True), (2, True), (4, False), (8, False)])
def test_control_two_halves_of_the_cache_are_right_for_two_replicas_only(dp, is_right):
    assert is_placed(pages_of_two_halves, 16, 32, dp) == is_right


def test_small_batches_are_rows_of_larger_ones():
    """So that a row is compared across batch sizes."""
    taken = [
        set(place_rows(batch, 32, row_len=1, table_len=1, dp=1)[0]) for batch in (1, 8, 16, 32)
    ]
    assert all(small < large for small, large in zip(taken, taken[1:], strict=False))


@pytest.mark.parametrize(
    ("batch", "most_rows", "table_len", "dp"),
    [(2, 32, 16 * ROW_LEN + 1, 1), (4, 32, 8 * ROW_LEN + 1, 4), (64, 32, 1, 1), (6, 32, 1, 4),
     (8, 30, 1, 4)],
)  # fmt: skip
def test_rows_that_would_share_a_page_or_leave_their_replica_are_refused(
    batch, most_rows, table_len, dp
):
    with pytest.raises(ValueError, match=r"is too long for|must be multiples of"):
        place_rows(batch, most_rows, row_len=ROW_LEN, table_len=table_len, dp=dp)


@pytest.mark.nightly
@pytest.mark.invariance
@pytest.mark.parametrize("place", [place_rows, pages_of_two_halves])
def test_four_replicas_have_the_bits_of_one(tmp_path, monkeypatch, place):
    """Whole steps of the benchmark; with the pages of the control it says that they differ."""
    monkeypatch.setattr("benchmarks.mesh.place_rows", place)
    out = tmp_path / "rows.jsonl"
    runners = {}
    for dp in (1, 4):
        model = random_model(
            MODELS["tiny"], seed=0, profile=NumericsProfile(),
            mesh=make_mesh(dp, 1, platform="cpu"), backend=Backend.PORTABLE,
        )  # fmt: skip
        runners[f"invariant ({dp},1)"] = Runner(model, most_rows=16)
    is_right = compare_meshes(runners, [8], Rows({}, str(out)))
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in found if row.get("impl") == "invariant (4,1)"] == [
        "batch 8, 1 tokens at 1023",
        "batch 4, 300 tokens at 0",
    ]
    assert is_right == (place is place_rows)
    assert found[-1]["same"], "a row's bits do not depend on the mesh that it is compared with"
