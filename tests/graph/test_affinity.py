from __future__ import annotations

import numpy as np
import pytest

from mggcn.graph.affinity import affinity_blocks, cells_of, densities, mixing


def test_blocks_hold_vertices_of_about_one_degree() -> None:
    """Fails if a vertex of degree 1 is in a block, or one has more others in its block than its degree."""
    degrees = np.array([0, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 7, 9])
    blocks = affinity_blocks(degrees)
    assert blocks.starts.tolist() == [3, 6, 9]
    assert blocks.sizes.tolist() == [3, 3, 4]
    assert blocks.kind[0] == blocks.kind[1] != blocks.kind[2]
    cells = cells_of(degrees, np.zeros(13), blocks)
    assert cells.vertices.tolist() == [1, 2, 6, 2, 1, 1]
    assert cells.others.tolist() == [0, 0, 2, 3, 3, 3]
    assert cells.kind.tolist()[:2] == [-1, -1]
    assert not affinity_blocks(np.zeros(4, np.int64)).starts.size


@pytest.mark.parametrize("seed", [3, 71])
def test_every_block_fits_its_degrees(seed: int) -> None:
    degrees = np.sort((np.random.default_rng(seed).pareto(1.2, 5000) * 2).astype(np.int64))
    blocks = affinity_blocks(degrees, 7)
    others = np.repeat(blocks.sizes - 1, blocks.sizes)
    assert (others <= degrees[blocks.starts[0] :]).all()
    assert blocks.sizes.sum() == degrees.size - blocks.starts[0]
    assert not blocks.whole[-1]
    assert blocks.whole[0]


def test_densities_are_cube_roots_where_nothing_is_joined_by_chance() -> None:
    """Kolda et al., section 3.2: many vertices of one degree, whose neighbours are joined in their block or not at all."""
    degrees, asked = np.full(1_100_000, 10), 0.3
    blocks = affinity_blocks(degrees)
    density, spread = densities(cells_of(degrees, np.full(degrees.size, asked), blocks), 0, 0.7)
    assert density[blocks.kind[0]] == pytest.approx(np.cbrt(asked), abs=1 / 256)
    assert (spread.within, spread.kept) == (0.0, 1.0)


def test_blocks_give_what_chance_does_not() -> None:
    """Of few vertices of high degree, neighbours are often joined: blocks need less density. Fails if that is left out."""
    degrees = np.full(200, 40)
    blocks = affinity_blocks(degrees)
    (density, *_), _ = densities(cells_of(degrees, np.full(200, 0.2), blocks), 0, 0.7)
    assert density < np.cbrt(0.2) - 0.05


@pytest.mark.parametrize(("whole", "loose", "homophily"), [(0.3, 0.1, 0.7), (0.0, 0.0, 0.5), (0.8, 0.1, 0.4)])
def test_classes_give_the_homophily_asked_for(whole: float, loose: float, homophily: float) -> None:
    """Fails if edges of blocks of any class count as within one, or edges by chance are forgotten."""
    spread, chance = mixing(whole, loose, 5, homophily), 0.2
    inside = spread.kept**2 + (1 - spread.kept**2) * chance
    outside = spread.within + (1 - spread.within) * chance
    assert whole * inside + loose * chance + (1 - whole - loose) * outside == pytest.approx(homophily)
