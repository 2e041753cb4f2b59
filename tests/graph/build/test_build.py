"""Building out of core: any buffer, any interruption, one result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.errors import GraphError, StoreError
from mggcn.graph import edges
from mggcn.graph.build import build
from mggcn.graph.build.build import Adjacency
from mggcn.graph.build.staging import MANIFEST, InFolder, InMemory, Staging
from mggcn.graph.csr import CSR, Array
from mggcn.graph.options import GraphOptions
from mggcn.graph.structure import check_job, edges_of

CASES = list(
    itertools.product(
        (False, True), ("merge", "sum", "error"), ("keep", "drop", "add"), (False, True), (0, 3, 300), ("some", "both")
    )
)
"""symmetrize, duplicates, self_loops, weighted, relations, listed."""
N = 41


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a few edges, groups of several rows."""
    monkeypatch.setattr(build, "WINDOW", 23)
    monkeypatch.setattr(edges, "WINDOW", 23)
    monkeypatch.setattr("mggcn.graph.build.buckets.GROUPS", 16)
    monkeypatch.setattr(build, "SAVE_EVERY", 6)


def listed(case: tuple[Any, ...]) -> tuple[edges.Edges, GraphOptions]:
    """Edges with repeats, loops and a hub, whose weights agree where that is needed."""
    symmetrize, duplicates, self_loops, weighted, relations, which = case
    rng = np.random.default_rng(911)
    ends = rng.integers(0, N - 3, (2, 260))
    ends[1, :60] = 5
    if which == "both":
        ends = np.concatenate([ends, ends[::-1]], 1)
    types = ends.sum(0) % relations if relations else None
    if duplicates == "error":
        key = np.minimum(*ends) * N + np.maximum(*ends) if symmetrize else ends[0] * N + ends[1]
        keep = np.sort(np.unique(key, return_index=True)[1])
        ends, types = ends[:, keep], None if types is None else types[keep]
    weights = None
    if weighted:
        weights = rng.standard_normal(ends.shape[1]) * 10.0 ** rng.integers(-9, 9, ends.shape[1])
        if duplicates != "sum":
            weights = 1.0 + ends.sum(0) % 7
    options = GraphOptions(symmetrize=symmetrize, duplicates=duplicates, self_loops=self_loops)
    return edges_of(ends, weights, types), options


def arrays(csr: CSR) -> dict[str, Array]:
    named = {name: getattr(csr, name) for name in ("indptr", "indices", "values", "types", "type_degrees")}
    return {name: rows.array() for name, rows in named.items() if rows is not None}


def assert_equal(got: Adjacency, expected: Adjacency) -> None:
    assert (got.adj is got.adj_t) == (expected.adj is expected.adj_t)
    assert got.num_merged == expected.num_merged
    for one, other in ((got.adj, expected.adj), (got.adj_t, expected.adj_t)):
        assert arrays(one).keys() == arrays(other).keys()
        for name, array in arrays(one).items():
            assert array.dtype == arrays(other)[name].dtype
            np.testing.assert_array_equal(array, arrays(other)[name], name)


def built(case: tuple[Any, ...], staging: Staging | None = None, capacity: int | None = None) -> Adjacency:
    found, options = listed(case)
    job, _ = check_job(found, found.survey(), N, None, options)
    return build.build(job, staging or InMemory(), capacity)


@pytest.mark.covering(2, rest="slow")
@pytest.mark.parametrize("case", [case for case in CASES if not (case[4] and case[2] == "add")])
@pytest.mark.parametrize("capacity", [1, 70, 10_000])
def test_any_buffer_gives_the_same(small: None, tmp_path: Path, case: tuple[Any, ...], capacity: int) -> None:
    """Fails if a record is lost between buckets, sums depend on their borders, or an array has another type."""
    expected = built(case)
    assert_equal(built(case, InFolder(tmp_path / "s", {}), capacity), expected)


class _StoppedError(Exception):
    """Stands for the end of a process."""


class _Stopping:
    """A folder whose work ends at the n-th save, before or after it."""

    def __init__(self, staging: InFolder, saves: int, after: bool) -> None:
        self.staging, self.left, self.after = staging, saves, after
        self.column = staging.column
        self.load = staging.load

    def save(self, state: Any) -> None:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise _StoppedError
        self.staging.save(state)
        if self.left == 0:
            raise _StoppedError


@pytest.mark.parametrize(
    "case",
    [
        (False, "merge", "keep", True, 3, "some"),
        pytest.param((False, "sum", "keep", True, 0, "some"), marks=pytest.mark.full),
        pytest.param((True, "merge", "add", True, 0, "some"), marks=pytest.mark.full),
    ],
)
def test_interrupted_anywhere_gives_the_same(small: None, tmp_path: Path, case: tuple[Any, ...]) -> None:
    """Fails if work that goes on deals edges twice, or takes up another place: stopped at every save in turn."""
    expected, stops = built(case), 0
    for number, after in ((n, after) for n in itertools.count(1) for after in (False, True)):
        folder = tmp_path / f"{number}{after}"
        staging = InFolder(folder, {"n": N})
        try:
            built(case, _Stopping(staging, number, after), 150)
            break
        except _StoppedError:
            stops += 1
        finally:
            staging.close()
        again = InFolder(folder, {"n": N})
        assert_equal(built(case, again, 150), expected)
        again.close()
    assert stops > 8


def test_another_job_begins_anew(small: None, tmp_path: Path) -> None:
    """Fails if what another job, or a damaged manifest, left is taken up."""
    case = (False, "merge", "keep", False, 0, "some")
    first = InFolder(tmp_path, {"job": 1})
    built(case, first, 50)
    with pytest.raises(StoreError, match="another process prepares this store"):
        InFolder(tmp_path, {"job": 1})
    first.close()
    for job, manifest, stage in ((1, None, "turn"), (1, "{", None), (2, None, None)):
        if manifest:
            (tmp_path / MANIFEST).write_text(manifest)
        staging = InFolder(tmp_path, {"job": job})
        assert staging.load().get("stage") == stage
        built(case, staging, 50)
        staging.close()


REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], GraphOptions, str]] = {
    "repeats": (lambda: (ENDS, None, None), GraphOptions(duplicates="error"), "2 repeat, the first is 3 -> 30;"),
    "repeats, reverses apart": (
        lambda: (ENDS, None, None),
        GraphOptions(duplicates="error", symmetrize=True),
        "2 repeat, the first is 3 -> 30;",
    ),
    "weights": (
        lambda: (ENDS, np.arange(6.0), None),
        GraphOptions(),
        r"edge 3 -> 30 is listed with different weights \(1.0, 5.0\)",
    ),
    "weights of a reverse": (
        lambda: (ENDS[:, :3], np.arange(3.0), None),
        GraphOptions(symmetrize=True),
        r"edge 3 -> 30 is listed with different weights \(0.0, 1.0\)",
    ),
    "types": (
        lambda: (ENDS, None, np.array([0, 1, 0, 0, 0, 1])),
        GraphOptions(duplicates="error"),
        "edge 3 -> 30 of type 1 repeats",
    ),
    "weights of types": (
        lambda: (ENDS, np.arange(6.0), np.array([0, 1, 0, 0, 0, 1])),
        GraphOptions(),
        "edge 3 -> 30 of type 1 is listed with different weights",
    ),
    "overflow": (lambda: (ENDS[:, :2], [1.0, 1e39], None), GraphOptions(), r"weights up to 1e\+39 overflow"),
}
ENDS = np.array([[30, 3, 7, 40, 40, 3], [3, 30, 7, 1, 1, 30]])


@pytest.mark.parametrize("capacity", [None, 1])
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_same_edge(small: None, tmp_path: Path, case: str, capacity: int | None) -> None:
    """Fails if the bucket that is sorted first, not the edge that is first, is named."""
    make, options, message = REFUSED[case]
    ends, weights, types = make()
    columns = edges_of(ends, None if weights is None else np.asarray(weights), types)
    job, _ = check_job(columns, columns.survey(), N, None, options)
    with pytest.raises(GraphError, match=message):
        build.build(job, InFolder(tmp_path / "s", {}), capacity)
