"""Places of values in a page file, and the bytes that reading and writing them moves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mggcn.memory.arena import ITEM_BYTES
from mggcn.memory.pages import (
    PAGE_BYTES,
    PIECE_BYTES,
    THREADS,
    WINDOW_ROWS,
    DiskRates,
    PagePlan,
    PageRegion,
    PageSpec,
    panel_bytes,
    plan_pages,
    window_bytes,
)

SHAPES = [(0, 5), (1, 1), (63, 16), (64, 17), (65, 3), (1000, 100), (129, 0), (7, 3000)]


def shared_pages(plan: PagePlan) -> list[tuple[str, str]]:
    """Pairs of matrices that live at once and share bytes."""
    found = []
    for a, b in itertools.combinations(plan.regions, 2):
        both = {*range(a.first, a.last + 1)} & {*range(b.first, b.last + 1)}
        if both and a.offset < b.end and b.offset < a.end:
            found.append((a.spec.name, b.spec.name))
    return found


@pytest.mark.parametrize("seed", range(3170, 3190))
def test_what_lives_at_once_shares_no_disk(seed: int) -> None:
    """Fails if regions overlap, do not start at pages, reach beyond the file, or take more than their sum."""
    rng = np.random.default_rng(seed)
    lives = []
    for index in range(int(rng.integers(1, 20))):
        first = int(rng.integers(0, 10))
        panel = None if rng.random() < 0.5 else int(rng.integers(1, 80))
        spec = PageSpec(f"m{index}", int(rng.integers(0, 500)), int(rng.integers(1, 200)), "fp32", panel)
        lives.append((spec, first, first + int(rng.integers(0, 4))))
    plan = plan_pages(lives)
    assert [(r.spec, r.first, r.last) for r in plan.regions] == lives
    assert shared_pages(plan) == []
    assert all(r.offset % PAGE_BYTES == 0 and r.end <= plan.nbytes for r in plan.regions)
    assert plan.nbytes <= sum(spec.nbytes for spec, _, _ in lives)
    assert plan_pages(lives) == plan
    assert plan["m0"] is plan.regions[0]


def test_lives_that_follow_each_other_share_disk() -> None:
    """Fails if disk is not used again, or is given away in the stage that still reads it."""
    a, b = PageSpec("a", 640, 16, "fp64"), PageSpec("b", 640, 16, "fp64")
    apart = plan_pages([(a, 0, 2), (b, 3, 5)])
    assert (apart["a"].offset, apart["b"].offset, apart.nbytes) == (0, 0, a.nbytes)
    assert plan_pages([(a, 0, 2), (b, 2, 5)]).nbytes == a.nbytes + b.nbytes


def test_the_overlap_check_finds_a_planted_overlap() -> None:
    """The property test itself fails when a life is cut short."""
    a, b = PageSpec("a", 640, 16, "fp64"), PageSpec("b", 640, 16, "fp64")
    assert shared_pages(PagePlan((PageRegion(a, 0, 3, 0), PageRegion(b, 3, 5, 0)), a.nbytes)) == [("a", "b")]


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("panel_cols", [None, 1, 16, 48, 10**6])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_panels_cover_a_matrix(rows: int, cols: int, panel_cols: int | None, dtype: str) -> None:
    """Fails if panels miss or repeat a column, overlap on disk, or a window of one does not start at a page."""
    spec = PageSpec("m", rows, cols, dtype, panel_cols)
    assert [c for k in range(spec.panels) for c in spec.columns(k)] == [*range(cols)]
    end = 0
    for k in range(spec.panels):
        assert spec.start(k) == end
        assert len(spec.columns(k)) * ITEM_BYTES[dtype] <= spec.stride(k)
        assert WINDOW_ROWS * spec.stride(k) % PAGE_BYTES == 0
        assert spec.stride(k) - len(spec.columns(k)) * ITEM_BYTES[dtype] < 64
        step = spec.piece_rows(k)
        assert step % WINDOW_ROWS == 0
        assert step == WINDOW_ROWS or step * spec.stride(k) <= PIECE_BYTES
        end += panel_bytes(spec, k)
    assert spec.nbytes == end
    assert spec.stored_rows - rows in range(WINDOW_ROWS)


@pytest.mark.parametrize("panel_cols", [None, 7])
def test_windows_add_up_to_the_matrix(panel_cols: int | None) -> None:
    """Fails if the bytes of a window are not those of its rows, the last padded to a whole one."""
    spec = PageSpec("m", 1000, 30, "bf16", panel_cols)
    windows = [window_bytes(spec, first, min(192, 1000 - first)) for first in range(0, 1000, 192)]
    assert sum(windows) == spec.nbytes == 1024 * 64 * (1 if panel_cols is None else 5)
    assert windows[0] == 192 * 64 * spec.panels
    assert windows[-1] == 64 * 64 * spec.panels


def test_staging_holds_the_largest_piece_of_each_thread() -> None:
    """Fails if a thread's piece is smaller than what it moves at once: rows of 80,000 bytes move 64 at a time."""
    small, wide = PageSpec("small", 100, 3, "fp32"), PageSpec("wide", 10_000, 20_000, "fp32")
    assert plan_pages([]).staging_bytes == 0
    assert plan_pages([(small, 0, 0)]).staging_bytes == 2 * THREADS * 128 * 64
    assert plan_pages([(small, 0, 0), (wide, 0, 0)]).staging_bytes == 2 * THREADS * 64 * 80_000


@pytest.mark.parametrize(
    ("read", "written", "seconds"), [(0, 0, 0), (400, 0, 2), (0, 400, 4), (400, 400, 8), (600, 400, 9)]
)
def test_seconds_of_a_disk(read: int, written: int, seconds: float) -> None:
    """Fails if what is read beside writes is priced as if it were alone, or the other way round."""
    assert DiskRates(read=200, write=100, both=100).seconds(read, written) == seconds
