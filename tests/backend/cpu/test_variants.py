"""The model that chooses a way for a sparse product: what it must get right whatever its constants are."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from mggcn.backend.cpu import sizes as cpu_sizes
from mggcn.backend.cpu.spmm import worth_timing
from mggcn.backend.cpu.variants import PANELS, MatrixTraits, ahead_of, candidates, choose_spmm, expected_s
from mggcn.backend.spmm_choice import SpmmChoice
from tests.machines import XEON, ZEN3, tight

SERVER = ZEN3


def scattered(rows: int, columns: int, nnz: int, **changes: object) -> MatrixTraits:
    """Columns at random: the distinct ones among n entries, in expectation."""
    reuse = [(n, round(columns * (1 - (1 - 1 / columns) ** n))) for n in (1024 << k for k in range(11)) if n < nnz / 4]
    return dataclasses.replace(MatrixTraits(rows, columns, nnz, reuse=tuple(reuse)), **changes)  # type: ignore[arg-type]


DENSE = scattered(58_000, 58_000, 14_360_000)
"""As the reddit-like graph: a panel of its operand fits the cache, and pays soon."""
ARXIV = scattered(169_343, 169_343, 2_510_000)
"""As the arxiv-like one: few entries a row."""
SPARSE = scattered(600_000, 600_000, 15_000_000)
"""As the products-like one: no panel fits."""
FEW_ROWS = scattered(1_000, 2_000_000, 100_000_000)
"""A block is worth more than reading the few rows of the result again."""


def test_what_is_chosen_for_known_shapes() -> None:
    """Fails if a sign or a unit of the model is wrong: these choices are far from their limits."""
    assert choose_spmm(scattered(2_000, 2_000, 10_000), 16, 4, SERVER).way == "rows"
    assert choose_spmm(DENSE, 16, 4, SERVER).way == "rows"
    assert choose_spmm(DENSE, 512, 4, SERVER).way == "panels"
    assert choose_spmm(SPARSE, 128, 4, SERVER).way == "rows"
    assert choose_spmm(SPARSE, 128, 4, SERVER).ahead > 0
    assert choose_spmm(FEW_ROWS, 128, 4, SERVER).way == "blocks"
    assert choose_spmm(FEW_ROWS, 128, 4, SERVER).blocks > 50


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 5), (5, 0)])
def test_a_matrix_of_nothing_has_a_variant(rows: int, columns: int) -> None:
    """Fails if a rank that owns no row of a batch divides by the seconds of its product, which are none."""
    assert choose_spmm(MatrixTraits(rows, columns, 0), 8, 4, SERVER).way == "rows"


def test_the_same_graph_on_two_machines() -> None:
    """Fails if a size that /sys names, or another machine's figures, decide: both Xeon rows were measured (issue 21)."""
    reddit, arxiv = choose_spmm(DENSE, 128, 4, XEON), choose_spmm(ARXIV, 512, 4, XEON)
    assert reddit.way == "blocks"
    assert reddit.blocks in (8, 16)
    assert arxiv.way != "panels"
    assert choose_spmm(DENSE, 128, 4, ZEN3).way == choose_spmm(ARXIV, 512, 4, ZEN3).way == "panels"


MEASURED_MS = {
    "rows": (260.7, 66.7),
    "rows ahead": (231.1, 62.3),
    "panels 64 B ahead": (98.5, 52.7),
    "panels 128 B ahead": (97.0, 53.8),
    "4 blocks": (136.1, 86.5),
    "8 blocks": (132.1, 95.2),
    "16 blocks": (159.0, 116.0),
    "64 blocks": (410.2, 247.5),
}
"""Variants on the reddit-like and the arxiv-like graph at 128 columns (bench/results/blocks_amd-epyc-2cpu_2026-11-22)."""


def test_the_model_predicts_what_the_machine_took() -> None:
    """Fails if the seconds that figures promise are not those of a product: no variant is off by half, most by a fifth."""
    off = []
    for matrix, place in ((DENSE, 0), (ARXIV, 1)):
        known = candidates(matrix, 128, 4, ZEN3)
        off += [1e3 * expected_s(matrix, 128, 4, ZEN3, known[name]) / ms[place] for name, ms in MEASURED_MS.items()]
    assert all(1 / 1.9 < ratio < 1.5 for ratio in off)
    assert sum(1 / 1.25 < ratio < 1.25 for ratio in off) >= 0.8 * len(off)


@pytest.mark.parametrize("matrix", [DENSE, SPARSE, FEW_ROWS], ids=["dense", "sparse", "few rows"])
def test_choices_are_ways_that_the_product_allows(matrix: MatrixTraits) -> None:
    """Fails if a panel outgrows the cache that plans reckon with, or blocks meet rounded sums or rows out of order."""
    for width, item, figures in itertools.product((1, 16, 41, 64, 128, 512), (2, 4, 8), (SERVER, XEON, tight(2**20))):
        for summed, ascending in itertools.product((False, True), repeat=2):
            traits = dataclasses.replace(matrix, ascending=ascending)
            ways = [
                choose_spmm(traits, width, item, figures, summed=summed),
                *candidates(traits, width, item, figures, summed=summed).values(),
            ]
            for way in ways:
                assert way.panel * item in (0, *PANELS)
                assert way.panel < width or not way.panel
                assert way.panel * item * traits.columns <= figures.near_bytes
                assert way.blocks == 1 or (summed and ascending and not way.panel)


def test_a_local_order_makes_panels_dispensable() -> None:
    """Fails if the working sets of consecutive rows do not count."""
    local = dataclasses.replace(DENSE, reuse=tuple((n, n // 40) for n in (1024 << k for k in range(11))))
    assert choose_spmm(local, 128, 4, SERVER).way == "rows"
    assert choose_spmm(DENSE, 128, 4, SERVER).way == "panels"


@pytest.mark.parametrize("matrix", [DENSE, SPARSE, ARXIV, scattered(300, 500, 0), scattered(5, 5, 9)], ids=str)
def test_distances_of_uses(matrix: MatrixTraits) -> None:
    """Fails if shares do not add up to all entries, distances fall, or columns at random are not at any distance."""
    bounds, shares = zip(*matrix.distances, strict=True)
    assert sum(shares) == pytest.approx(1.0)
    assert list(bounds) == sorted(bounds)
    assert min(shares) >= 0.0
    assert bounds[-1] == matrix.columns
    if matrix.reuse:
        assert shares[-1] >= min(matrix.columns, matrix.nnz) / matrix.nnz
        near = sum(share for bound, share in matrix.distances if bound <= 0.5 * matrix.columns)
        assert near == pytest.approx(max(b for b in bounds if b <= 0.5 * matrix.columns) / matrix.columns, abs=0.1)


def test_rows_without_entries_cost_no_visit() -> None:
    """Fails if a matrix that is mostly empty rows is taken to spend its time on them."""
    nearly_empty = scattered(5_800_000, 58_000, 14_300_000)
    known = dataclasses.replace(nearly_empty, empty=5_742_000)
    assert choose_spmm(nearly_empty, 512, 4, SERVER).reason != choose_spmm(known, 512, 4, SERVER).reason
    assert choose_spmm(known, 512, 4, SERVER).text == choose_spmm(DENSE, 512, 4, SERVER).text


def test_rows_are_fetched_ahead_where_that_was_measured_faster() -> None:
    """Fails if fetching does not go by the figures, narrow rows are fetched late, or panels as the operand."""
    late = dataclasses.replace(ZEN3, ahead_s=tuple(tuple(2 * x for x in row) for row in ZEN3.plain_s))
    assert choose_spmm(SPARSE, 128, 4, ZEN3).ahead == ahead_of(512)
    assert choose_spmm(SPARSE, 128, 4, late).ahead == 0
    distances = [ahead_of(nbytes) for nbytes in (32, 64, 128, 256, 1024)]
    assert distances[0] == distances[1] > distances[2] > distances[3] == distances[4] > 0
    ways = candidates(DENSE, 512, 4, SERVER)
    assert all(ways[f"panels {size} B ahead"].ahead == ahead_of(size) for size in PANELS)
    chosen = choose_spmm(DENSE, 512, 4, SERVER)
    assert chosen.ahead == ahead_of(chosen.panel * 4)


def test_a_gain_within_the_noise_changes_nothing() -> None:
    """Fails if a variant is taken that promises less than a tenth."""
    close = dataclasses.replace(ZEN3, block_s=3e-9, pack_s=(2e-7, 2e-7))
    assert choose_spmm(DENSE, 128, 4, close).way == "rows"
    whole, blocks = (expected_s(DENSE, 128, 4, close, c) for c in (SpmmChoice(ahead=16), SpmmChoice("blocks", 0, 4)))
    assert whole < blocks


def test_variants_to_be_timed() -> None:
    """Fails if the model's choice is not first and once, a variant is left out, or a promising one comes late."""
    for width, item in itertools.product((16, 41, 128, 512), (2, 4, 8)):
        model = choose_spmm(DENSE, width, item, ZEN3)
        first, *others = worth_timing(DENSE, width, item, ZEN3, model, summed=True)
        assert first == model
        costs = [expected_s(DENSE, width, item, ZEN3, variant) for variant in others]
        assert costs == sorted(costs)
        every = {dataclasses.replace(first, reason=""), *others}
        assert every == set(candidates(DENSE, width, item, ZEN3).values())
        assert len(every) == len(others) + 1
    assert {variant.way for variant in worth_timing(DENSE, 16, 4, ZEN3, SpmmChoice(), summed=False)} == {"rows"}


def test_no_variant_to_be_timed_works_in_more_than_is_planned() -> None:
    """Fails if a panel of more rows than the matrix has entries, which no plan reckons with, is timed."""
    figures = tight(2**16)
    timed = left_out = 0
    for (rows, columns, nnz), width, item in itertools.product(
        ((300, 500, 2700), (40, 900, 90), (5000, 700, 3)), (16, 41, 300), (2, 4, 8)
    ):
        matrix = MatrixTraits(rows, columns, nnz)
        planned = cpu_sizes.spmm_bytes(rows, min(columns, nnz), nnz, width, item, max(item, 4), figures)
        variants = worth_timing(matrix, width, item, figures, SpmmChoice(), summed=True)
        assert all(cpu_sizes.variant_bytes(matrix, width, item, variant) <= planned for variant in variants)
        timed += len(variants)
        left_out += len(candidates(matrix, width, item, figures)) - len(variants)
    assert timed > 27
    assert left_out > 0
