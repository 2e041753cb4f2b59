"""BTER's affinity blocks: which vertices are in one, and how dense it must be for its vertices' clustering.

The paper takes the cube root of the clustering for the density. In skewed graphs pairs of neighbours are joined by chance,
too, most of them over hubs: how many is worked out here from the degrees, and the density found that gives what is left.
Shapes: N vertices, ascending by degree; B blocks, K kinds of blocks, C classes; S cells, vertices of a kind of block and of
a degree; G groups of cells of about one degree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
ROUNDS = 8
"""Rounds in which densities and what is joined by chance are worked out from each other."""
WEIGHT_ROUNDS = 60
"""Steps towards the weights that give the degrees: each makes up for the square root of what is missing."""
MOST_WEIGHT = 1e6
"""Of a group: one that would need more neighbours than there are vertices has no weight that gives them."""
GRID: Floats = np.linspace(0.0, 1.0, 257)
"""Densities that a block may have: a step of them changes clustering by 0.012 at most."""
LOOSE = 4
"""A block whose vertices have more than one part in so many of the ends of a class has vertices of any class: hubs of one
class would have more ends than can be paired within it."""
FINE, RATIO = 16, 1.1
"""Degrees up to FINE are groups of their own, further groups are RATIO times as wide."""


class Blocks(NamedTuple):
    """Block b holds vertices starts[b] .. starts[b] + sizes[b] - 1. All (B,), int64 but whole, bool.

    kind: number of the block's kind; those of equal degrees throughout are of one kind, each other block is of its own.
    whole: whether its vertices are of one class.
    """

    starts: Ints
    sizes: Ints
    kind: Ints
    whole: Bools


class Cells(NamedTuple):
    """Vertices of a degree in a kind of block, all (S,): how many, their degree, the others in a block, and the clustering
    that is asked for. kind int64: -1 of vertices in no block; whole bool: whether the block is of one class.
    """

    vertices: Floats
    degree: Floats
    others: Floats
    clustering: Floats
    kind: Ints
    whole: Bools


class Mixing(NamedTuple):
    """How classes are spread: of ends outside of blocks, the share that is paired within a class; of vertices of a whole
    block, the share that has its class. All others have any.
    """

    within: float
    kept: float


class Chance(NamedTuple):
    """How likely an edge by chance joins two neighbours of a vertex, (S,): both in its block, one, or none."""

    both: Floats
    one: Floats
    none: Floats


def affinity_blocks(degrees: Ints, num_classes: int = 0) -> Blocks:
    """Put vertices of degree 2 and more, in their order, into blocks: of d + 1 where d is the least degree in it.

    degrees int64 (N,), ascending. So no vertex has more others in its block than its degree; the last takes what is left.
    Cost: a step for each distinct degree. Source: Kolda et al. 2014, section 3.
    """
    parts, at = list[Ints](), int(np.searchsorted(degrees, 2))
    while at < degrees.size:
        size, end = int(degrees[at]) + 1, int(np.searchsorted(degrees, degrees[at], side="right"))
        parts.append(np.arange(at, end, size, dtype=np.int64))
        at = int(parts[-1][-1]) + size
    starts = np.concatenate([np.empty(0, np.int64), *parts])
    sizes = np.diff(starts, append=degrees.size)
    least = degrees[starts]
    uniform = (degrees[starts + sizes - 1] == least) & (sizes == least + 1)
    kind = np.unique(np.where(uniform, least, -1 - np.arange(starts.size)), return_inverse=True)[1]
    ends = np.add.reduceat(degrees, starts) if starts.size else starts
    whole = LOOSE * max(num_classes, 1) * ends <= degrees.sum() if num_classes > 1 else np.ones(starts.size, np.bool_)
    return Blocks(starts, sizes, kind.astype(np.int64), whole)


def cells_of(degrees: Ints, clustering: Floats, blocks: Blocks) -> Cells:
    """Return the cells of vertices in their order. degrees, clustering (N,). Cost: a few passes over the vertices."""
    changed = blocks.kind[1:] != blocks.kind[:-1]
    borders = (np.flatnonzero(np.diff(degrees)) + 1, blocks.starts[:1], blocks.starts[1:][changed])
    first = np.unique(np.concatenate([np.zeros(min(degrees.size, 1), np.int64), *borders]))
    block = np.searchsorted(blocks.starts, first, side="right") - 1
    # Of vertices in no block, the last entry.
    of_block = (blocks.sizes, 1), (blocks.kind, -1), (blocks.whole, False)
    sizes, kind, whole = (np.append(array, missing)[block] for array, missing in of_block)
    return Cells(
        np.diff(first, append=degrees.size).astype(np.float64),
        degrees[first].astype(np.float64),
        (sizes - 1).astype(np.float64),
        clustering[first],
        kind,
        whole,
    )


def densities(cells: Cells, num_classes: int, homophily: float) -> tuple[Floats, Mixing]:
    """Return the density of each kind of block (K,), and how classes are spread.

    Of the densities of GRID, each kind gets that whose expected clustering, on average over its vertices, is nearest.
    Source: Kolda et al. 2014, section 3.2, for graphs in which nothing is joined by chance.
    """
    inside = cells.kind >= 0
    kind, count = cells.kind[inside], cells.vertices[inside]
    total = np.bincount(kind, count)

    def mean(values: Floats) -> Floats:
        return np.bincount(kind, count * values[inside]) / total

    asked, ends = mean(cells.clustering), max(float((cells.vertices * cells.degree).sum()), 1.0)
    density: Floats = np.cbrt(asked)
    spread = Mixing(0.0, 1.0)
    for _ in range(ROUNDS):
        of_cell = np.append(density, 0.0)[cells.kind]
        joined = cells.others * of_cell
        whole, loose = (float((cells.vertices * joined)[which].sum()) / ends for which in (cells.whole, ~cells.whole))
        spread = mixing(whole, loose, num_classes, homophily)
        chance = _by_chance(cells, cells.degree - joined, joined * (1 - of_cell), spread.within, num_classes)
        expected = np.zeros((density.size, GRID.size))
        for power, coefficient in enumerate(_cubic(cells, chance)):
            expected += mean(coefficient)[:, np.newaxis] * GRID**power
        density = GRID[np.abs(expected - asked[:, np.newaxis]).argmin(axis=1)]
    return density, spread


def mixing(whole: float, loose: float, num_classes: int, homophily: float) -> Mixing:
    """Return how classes must be spread for a share `homophily` of edges within one.

    whole, loose: share of edges in blocks of one class, and of any.
    """
    if num_classes < 2:
        return Mixing(0.0, 1.0)
    chance, outside = 1 / num_classes, 1 - whole - loose
    asked = (homophily - whole - loose * chance) / outside if outside > 0 else chance
    within = (asked - chance) / (1 - chance)
    # If blocks alone have more: two of a block are of its class with the square of what keeps it, or equal by chance.
    square = (homophily - chance) / (whole * (1 - chance)) if whole > 0 else 1.0
    return Mixing(min(max(within, 0.0), 1.0), min(max(square, 0.0), 1.0) ** 0.5)


def _cubic(cells: Cells, chance: Chance) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the coefficients of clustering as a polynomial of the density, constant first.

    Of a vertex of degree d with m others in its block of density r, k ~ Binomial(m, r) are neighbours: on average
    r^2 m (m - 1) / 2 pairs of neighbours lie in the block, r m (d - 1) - r^2 m (m - 1) half in it. The former are joined
    with r + (1 - r) both, those half in it with `one`, all others with `none`.
    """
    d, m = np.maximum(cells.degree, 2), cells.others
    a, b = m * (m - 1) / (d * (d - 1)), 2 * m / d
    both, one, none = chance
    return none, b * (one - none), a * (both - 2 * one + none), a * (1 - both)


def _by_chance(cells: Cells, excess: Floats, variance: Floats, within: float, num_classes: int) -> Chance:
    """Return what edges outside of blocks join. excess, variance (S,): mean and variance of a vertex's ends of them.

    Two vertices are joined with 1 - exp(-rate w_u w_v), where weights w give every group its mean excess, also where pairs
    would repeat; rate is that of two vertices of one class or of two. Cost: some passes over G^2 and 3 G^3 products.
    """
    edges = np.unique(np.append(np.arange(FINE), np.floor(FINE * RATIO ** np.arange(220))))
    group = np.unique(np.searchsorted(edges, cells.degree, side="right"), return_inverse=True)[1]
    size = np.asarray(np.bincount(group, cells.vertices), np.float64)
    ends = np.bincount(group, cells.vertices * excess) / size
    squares = np.bincount(group, cells.vertices * (excess**2 + variance)) / size
    # A neighbour has used one of its ends: of a vertex with one, none is left.
    left = np.divide(squares - ends, ends**2, out=np.zeros_like(ends), where=ends > 0).clip(0.0)
    rates = Rates(within, max(num_classes, 1))
    weight = _weights(size, ends, rates)
    product = np.multiply.outer(weight, weight)
    alike, unlike = rates.joined(product)
    met = rates.chance * alike * size, (1 - rates.chance) * unlike * size
    all_met = (met[0] + met[1]).sum(1, keepdims=True)
    # Shares of a vertex's neighbours by group, (G, G): those of its own class, and all others.
    own, rest = (np.divide(part, all_met, out=np.zeros_like(part), where=all_met > 0) for part in met)
    both = np.diagonal(alike), rates.mean(np.diagonal(alike), np.diagonal(unlike))
    alike, unlike = rates.joined(product * left)
    third = rates.third(alike, unlike)
    same, any_class = (own * alike + rest * unlike).sum(1), (own * unlike + rest * third).sum(1)
    one = same, rates.mean(same, any_class)
    # Two neighbours are two vertices: of a group of one vertex there are no two.
    two = (1 - np.diag(1 / size)).clip(0.0)
    alike, unlike = (joined * two for joined in rates.joined(product * np.multiply.outer(left, left)))
    # Not as products of matrices: their sums depend on the number of threads.
    none = np.einsum("ia,ab,ib->i", own, alike, own) + 2 * np.einsum("ia,ab,ib->i", own, unlike, rest)
    none += np.einsum("ia,ab,ib->i", rest, rates.third(alike, unlike), rest)
    return Chance(*(np.where(cells.whole, of[0][group], of[1][group]) for of in (both, one, (none, none))))


class Rates(NamedTuple):
    """How many times as likely as without classes two vertices are paired: of a class, and of two; C equal classes."""

    within: float
    classes: int

    @property
    def chance(self) -> float:
        """The share of vertices that are of a vertex's class."""
        return 1 / self.classes

    def joined(self, product: Floats) -> tuple[Floats, Floats]:
        """Return the chance of an edge where there are so many on average: within a class, and between two."""
        apart = 1 - self.within
        return -np.expm1(-(self.within * self.classes + apart) * product), -np.expm1(-apart * product)

    def mean(self, alike: Floats, unlike: Floats) -> Floats:
        """Return what two vertices of any class have."""
        return self.chance * alike + (1 - self.chance) * unlike

    def third(self, alike: Floats, unlike: Floats) -> Floats:
        """Return what two vertices have that are both not of the class of a third."""
        return (alike + max(self.classes - 2, 0) * unlike) / max(self.classes - 1, 1)


def _weights(size: Floats, ends: Floats, rates: Rates) -> Floats:
    """Return the weight of each group (G,) with which a vertex of it is joined to as many others as it has ends."""
    weight: Floats = ends / max(float((size * ends).sum()), 1.0) ** 0.5
    for _ in range(WEIGHT_ROUNDS):
        met = (rates.mean(*rates.joined(np.multiply.outer(weight, weight))) * size).sum(1)
        step = np.sqrt(np.divide(ends, met, out=np.ones_like(ends), where=met > 0))
        weight = np.minimum(weight * step, MOST_WEIGHT)
    return weight
