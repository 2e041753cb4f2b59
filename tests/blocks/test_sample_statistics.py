"""Whether the sampler draws with the chances that it promises: chi-square tests over 1e5 draws."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chi2

from mggcn.blocks.block import Capacity
from mggcn.blocks.draws import Draws
from mggcn.blocks.sampler import Drawn, Sampler
from mggcn.blocks.slot import Slot, SlotPlan
from mggcn.config import SampleConfig
from mggcn.graph.csr import CSR, ArrayRows
from mggcn.planning.batches import draws_of

ROWS, DEGREE, FANOUT = 100_000, 40, 5
SEEDS = (29, 4021, 3999999979)
LEAST_P = 0.001


def draw(
    draws: Draws, seed: int, weights: npt.NDArray[np.float32] | None = None, *, shared: bool = True, types: int = 0
) -> Drawn:
    """One hop of ROWS targets, whose DEGREE sources are shared by all or of each its own; edges of the types in turn."""
    n = ROWS + (DEGREE if shared else ROWS * DEGREE)
    indptr = np.minimum(np.arange(n + 1), ROWS) * DEGREE
    indices = ROWS + (np.arange(ROWS * DEGREE) % DEGREE if shared else np.arange(ROWS * DEGREE))
    values = None if weights is None else ArrayRows(np.tile(weights, ROWS))
    of = ArrayRows(np.tile((np.arange(DEGREE) % types).astype(np.uint8), ROWS)) if types else None
    adj_t = CSR(ArrayRows(indptr), ArrayRows(indices.astype(np.int32)), values, n, types=of)
    capacities = (Capacity(ROWS, n, (DEGREE if types else 2 * FANOUT) * ROWS),)
    plan = SlotPlan(draws=draws, capacities=capacities, num_vertices=n, places=True, transposed=0)
    return Sampler(adj_t, draws).draw(Slot(plan), np.arange(ROWS), seed, 17)


def positions(drawn: Drawn) -> npt.NDArray[np.int64]:
    places = drawn.hops[0].places
    assert places is not None
    return places % DEGREE


@pytest.mark.parametrize("seed", SEEDS)
def test_neighbours_and_pairs_are_drawn_alike(seed: int) -> None:
    """Fails if a neighbour, or two together, are drawn more often than others, or one twice."""
    drawn = positions(draw(Draws(fanouts=(FANOUT,)), seed)).reshape(ROWS, FANOUT)
    assert (np.diff(drawn, axis=1) > 0).all()
    counts, share = np.bincount(drawn.ravel(), minlength=DEGREE), FANOUT / DEGREE
    statistic = ((counts - ROWS * share) ** 2).sum() / (ROWS * share * (1 - share)) * (DEGREE - 1) / DEGREE
    assert LEAST_P < chi2.sf(statistic, DEGREE - 1) < 1 - LEAST_P

    pairs = list(combinations(range(DEGREE), 2))
    number = np.zeros((DEGREE, DEGREE), np.int64)
    number[tuple(np.transpose(pairs))] = np.arange(len(pairs))
    together = np.zeros(len(pairs))
    for i, j in combinations(range(FANOUT), 2):
        together += np.bincount(number[drawn[:, i], drawn[:, j]], minlength=len(pairs))
    # What single neighbours do not explain has one variance in all directions: an eigenvalue of the covariance of pairs.
    ends = np.zeros((len(pairs), DEGREE))
    ends[np.arange(len(pairs))[:, None], pairs] = 1
    rest = together - ends @ np.linalg.lstsq(ends, together)[0]
    two, three, four = np.cumprod([(FANOUT - k) / (DEGREE - k) for k in range(4)])[1:]
    variance = ROWS * ((two - two**2) - 2 * (three - two**2) + (four - two**2))
    p = chi2.sf((rest**2).sum() / variance, len(pairs) - DEGREE)
    assert LEAST_P < p < 1 - LEAST_P


@pytest.mark.parametrize("seed", SEEDS)
def test_neighbours_of_each_relation_are_drawn_alike(seed: int) -> None:
    """Fails if a relation is not drawn by its own number, or one of its neighbours more often than others."""
    sample = SampleConfig(batch=ROWS, fanout=("0:3/2:0/3:all/else:2",))
    drawn, of_each = positions(draw(draws_of(sample, 8), seed, types=8)), DEGREE // 8
    counts = np.bincount(drawn, minlength=DEGREE).reshape(of_each, 8)  # a column for each relation
    for relation, number in enumerate((3, 2, 0, of_each, 2, 2, 2, 2)):
        rows = np.repeat(np.arange(ROWS), 3 + 2 + of_each + 4 * 2)[drawn % 8 == relation]
        assert (np.bincount(rows, minlength=ROWS) == number).all()
        found, share = counts[:, relation], number / of_each
        if 0 < share < 1:
            statistic = ((found - ROWS * share) ** 2).sum() / (ROWS * share * (1 - share)) * (of_each - 1) / of_each
            assert LEAST_P < chi2.sf(statistic, of_each - 1) < 1 - LEAST_P


@pytest.mark.parametrize("seed", SEEDS)
def test_draws_with_replacement_are_independent(seed: int) -> None:
    """Fails if a draw knows of another: f draws then repeat too rarely or too often; or if counts do not sum to f."""
    hop = draw(Draws(fanouts=(FANOUT,), replace=True), seed).hops[0]
    assert hop.values is not None
    assert (np.add.reduceat(hop.values, hop.indptr[:-1]) == FANOUT).all()
    distinct = np.bincount(np.diff(hop.indptr), minlength=FANOUT + 1)[1:]
    ways = {1: 1, 2: 15, 3: 25, 4: 10, 5: 1}  # of parting 5 draws
    chance = np.array([ways[k] * np.prod(DEGREE - np.arange(k)) / DEGREE**FANOUT for k in range(1, FANOUT + 1)])
    rare, want = distinct[:2].sum(), ROWS * np.append(chance[:2].sum(), chance[2:])
    statistic = ((np.append(rare, distinct[2:]) - want) ** 2 / want).sum()
    assert LEAST_P < chi2.sf(statistic, len(want) - 1) < 1 - LEAST_P


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_are_chances(seed: int) -> None:
    """Fails if the first draw is not in proportion to the weights, the second to those left, or a weight of 0 is drawn."""
    weights = (np.arange(DEGREE) % 9).astype(np.float32) / 3
    share = weights / weights.sum(dtype=np.float64)
    first = np.bincount(positions(draw(Draws(fanouts=(1,), by="weight"), seed, weights)), minlength=DEGREE)
    heavy = weights > 0
    assert not first[~heavy].any()
    statistic = ((first - ROWS * share)[heavy] ** 2 / (ROWS * share[heavy])).sum()
    assert LEAST_P < chi2.sf(statistic, heavy.sum() - 1) < 1 - LEAST_P

    both = positions(draw(Draws(fanouts=(2,), by="weight"), seed, weights)).reshape(ROWS, 2)
    i, j = np.array([pair for pair in combinations(range(DEGREE), 2) if heavy[list(pair)].all()]).T
    chance = share[i] * share[j] * (1 / (1 - share[i]) + 1 / (1 - share[j]))
    seen = np.bincount(both[:, 0] * DEGREE + both[:, 1], minlength=DEGREE**2)[i * DEGREE + j]
    assert seen.sum() == ROWS
    statistic = ((seen - ROWS * chance) ** 2 / (ROWS * chance)).sum()
    assert LEAST_P < chi2.sf(statistic, i.size - 1) < 1 - LEAST_P


@pytest.mark.parametrize("seed", SEEDS)
def test_labor_takes_each_neighbour_with_its_chance(seed: int) -> None:
    """Fails if an edge is taken with another chance than f / degree, or a row's edges know of each other."""
    drawn = draw(Draws(fanouts=(FANOUT,), by="labor"), seed, shared=False)
    hop, share = drawn.hops[0], FANOUT / DEGREE
    counts = np.bincount(positions(drawn), minlength=DEGREE)
    statistic = ((counts - ROWS * share) ** 2).sum() / (ROWS * share * (1 - share))
    assert LEAST_P < chi2.sf(statistic, DEGREE) < 1 - LEAST_P
    lengths = np.diff(hop.indptr)
    spread = ((lengths - FANOUT) ** 2).sum() / (ROWS * DEGREE * share * (1 - share))
    assert abs(spread - 1) < 4 * np.sqrt(2 / ROWS)
    assert hop.values is not None
    assert (hop.values == DEGREE / FANOUT).all()


def test_labor_takes_fewer_sources() -> None:
    """Fails if rows do not share the numbers of their sources: then all of these are taken by some row."""
    assert draw(Draws(fanouts=(FANOUT,), by="labor"), SEEDS[0]).sizes[1] - ROWS < DEGREE / 2
    assert draw(Draws(fanouts=(FANOUT,)), SEEDS[0]).sizes[1] - ROWS == DEGREE
