"""The model that chooses a way for a sparse product: what it must get right whatever its constants are."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from mggcn.backend.cpu.machine import Caches
from mggcn.backend.cpu.variants import PANELS, MatrixTraits, ahead_of, candidates, choose_spmm

SERVER = Caches(2**19, 2**25)


def scattered(rows: int, columns: int, nnz: int, **changes: object) -> MatrixTraits:
    """Columns at random: the distinct ones among n entries, in expectation."""
    reuse = [(n, round(columns * (1 - (1 - 1 / columns) ** n))) for n in (1024 << k for k in range(11)) if n < nnz / 4]
    return dataclasses.replace(MatrixTraits(rows, columns, nnz, reuse=tuple(reuse)), **changes)  # type: ignore[arg-type]


DENSE = scattered(58_000, 58_000, 14_300_000)
"""As the reddit-like graph: a panel of its operand fits the cache, and pays soon."""
SPARSE = scattered(600_000, 600_000, 15_000_000)
"""As the products-like one: no panel fits."""
FEW_ROWS = scattered(1_000, 2_000_000, 100_000_000)
"""A block is worth more than reading the few rows of the result again."""


def test_what_is_chosen_for_known_shapes() -> None:
    """Fails if a sign or a unit of the model is wrong: these choices are far from their limits."""
    small = scattered(2_000, 2_000, 10_000)
    assert (choose_spmm(small, 16, 4, SERVER).way, choose_spmm(small, 16, 4, SERVER).ahead) == ("rows", 0)
    assert choose_spmm(DENSE, 16, 4, SERVER).way == "rows"
    assert choose_spmm(DENSE, 512, 4, SERVER).way == "panels"
    assert choose_spmm(SPARSE, 128, 4, SERVER).way == "rows"
    assert choose_spmm(SPARSE, 128, 4, SERVER).ahead > 0
    assert choose_spmm(FEW_ROWS, 128, 4, SERVER).way == "blocks"
    assert choose_spmm(FEW_ROWS, 128, 4, SERVER).blocks > 50


@pytest.mark.parametrize("matrix", [DENSE, SPARSE, FEW_ROWS], ids=["dense", "sparse", "few rows"])
def test_choices_are_ways_that_the_product_allows(matrix: MatrixTraits) -> None:
    """Fails if a panel outgrows the cache that plans reckon with, or blocks meet rounded sums or rows out of order."""
    for width, item, caches in itertools.product(
        (1, 16, 41, 64, 128, 512), (2, 4, 8), (SERVER, Caches(2**17, 2**20), Caches(2**20, 2**29))
    ):
        for summed, ascending in itertools.product((False, True), repeat=2):
            traits = dataclasses.replace(matrix, ascending=ascending)
            ways = [
                choose_spmm(traits, width, item, caches, summed=summed),
                *candidates(traits, width, item, caches, summed=summed).values(),
            ]
            for way in ways:
                assert way.panel * item in (0, *PANELS)
                assert way.panel < width or not way.panel
                assert way.panel * item * traits.columns <= caches.shared_bytes
                assert way.blocks == 1 or (summed and ascending and not way.panel)


def test_a_local_order_makes_panels_dispensable() -> None:
    """Fails if the working sets of consecutive rows do not count."""
    local = dataclasses.replace(DENSE, reuse=tuple((n, n // 40) for n in (1024 << k for k in range(11))))
    assert local.misses(1000) < 0.1 * DENSE.misses(1000)
    assert choose_spmm(local, 128, 4, SERVER).way == "rows"
    assert choose_spmm(DENSE, 128, 4, SERVER).way == "panels"


def test_misses_fall_as_the_cache_grows() -> None:
    """Fails if a larger cache misses more, a cache that holds all misses more than once, or a tiny one hits."""
    found = [SPARSE.misses(capacity) for capacity in (1, 1000, 10_000, 100_000, 300_000, 600_000, 10**7)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(SPARSE.nnz, rel=0.01)
    assert found[-1] == found[-2] == SPARSE.columns


def test_rows_without_entries_cost_no_visit() -> None:
    """Fails if a matrix that is mostly empty rows is taken to spend its time on them."""
    nearly_empty = scattered(5_800_000, 58_000, 14_300_000)
    known = dataclasses.replace(nearly_empty, empty=5_742_000)
    assert choose_spmm(nearly_empty, 512, 4, SERVER).reason != choose_spmm(known, 512, 4, SERVER).reason
    assert choose_spmm(known, 512, 4, SERVER) == choose_spmm(DENSE, 512, 4, SERVER)


def test_nothing_is_fetched_ahead_of_a_core_s_own_cache() -> None:
    """Fails if small operands pay for fetching, or narrow rows are fetched as late as wide ones."""
    assert ahead_of(64, 2**19, SERVER) == 0
    distances = [ahead_of(nbytes, 2**24, SERVER) for nbytes in (32, 64, 128, 256, 1024)]
    assert distances[0] == distances[1] > distances[2] > distances[3] == distances[4] > 0


def test_panels_are_fetched_ahead_as_rows_of_their_size() -> None:
    """Fails if a panel's rows are fetched as those of the whole operand."""
    ways = candidates(DENSE, 512, 4, SERVER)
    for size in PANELS:
        assert ways[f"panels {size} B ahead"].ahead == ahead_of(size, 2**24, SERVER)
    chosen = choose_spmm(DENSE, 512, 4, SERVER)
    assert chosen.ahead == ahead_of(chosen.panel * 4, 2**24, SERVER)
