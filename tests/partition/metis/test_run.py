"""METIS: what it is given, what comes back on hostile and real graphs, its memory, and how it ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.errors import BackendError, ConfigError, PlanError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.generate import community, rmat
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.partition.metis import process
from mggcn.partition.metis import run as metis_module
from mggcn.partition.metis.edge_cut import EdgeCut, edge_cut
from mggcn.partition.metis.process import Problem, new_problem, solve
from mggcn.partition.metis.run import SLACK, MetisKind, MetisSettings, constraints, fill, halved, metis, metis_memory
from mggcn.partition.statistics import balance
from tests.partition.cut.test_libra import KINDS, dense_of, graph_of

SEED = 60919
KINDS_OF_CUTS: tuple[MetisKind, ...] = ("metis", "metis-balanced")
needs_pymetis = pytest.mark.skipif(
    importlib.util.find_spec("pymetis") is None, reason='pymetis is not installed: pip install "mggcn[metis]"'
)


def cut(dense: Any, parts: int, seed: int = SEED) -> EdgeCut:
    return metis(graph_of(dense), MetisSettings(parts=parts, seed=seed))


def filled(graph: Graph) -> Problem:
    entries = graph.adj.nnz if graph.symmetric else graph.adj.nnz + graph.adj_t.nnz
    problem = new_problem(graph.num_vertices, entries, (SLACK,), weighted=not graph.symmetric)
    fill(problem, graph)
    return problem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_what_metis_is_given(kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an edge of A + A^T is lost, comes twice or weighs wrong, a self-loop stays, or a vertex weighs wrong."""
    monkeypatch.setattr(metis_module, "BLOCK", block)
    stored = (dense_of(kind) != 0).astype(int)
    graph, n = graph_of(dense_of(kind)), stored.shape[0]
    problem = filled(graph)
    os.close(problem.descriptor)
    edges = stored * (1 - np.eye(n, dtype=int))
    expected = edges if graph.symmetric else edges + edges.T
    entries = int(problem.indptr[-1])
    assert problem.indptr[0] == 0
    weights = np.ones(entries) if problem.edge_weights is None else problem.edge_weights[:entries]
    given = sp.csr_matrix((weights, problem.indices[:entries], problem.indptr), (n, n))
    assert given.has_canonical_format
    assert np.array_equal(given.toarray(), expected)
    assert np.array_equal(problem.vertex_weights[:, 0], expected.sum(1) + (1 if graph.symmetric else 2))


@pytest.mark.covering(1, rest="slow")
@needs_pymetis
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 41, 70])
def test_every_vertex_has_a_part(kind: str, parts: int) -> None:
    """Fails if a hostile graph ends in an error, a part that does not exist, or all vertices in one part."""
    got = cut(dense_of(kind), parts)
    n = dense_of(kind).shape[0]
    assert got.owner.dtype == np.uint16
    assert got.owner.shape == (n,)
    assert got.num_parts == parts
    assert got.owner.max() < parts
    assert len(set(got.owner.tolist())) >= min(parts, n, 2)
    owners = got.assignment()
    assert owners.counts == got.statistics.rows_per_part
    assert len(owners.counts) == parts
    if parts >= n:
        assert sorted(got.owner.tolist()) == list(range(n))


def cliques(count: int, size: int, *, directed: bool) -> Any:
    """Cliques on a ring, one edge from each to the next, their vertices shuffled; and the clique of each vertex."""
    clique = np.repeat(np.arange(count), size)
    dense = (clique[:, None] == clique[None]).astype(np.float32)
    for k in range(count):
        dense[k * size, (k + 1) % count * size] = 1
    np.fill_diagonal(dense, 0)
    dense = np.triu(dense) if directed else np.maximum(dense, dense.T)
    order = np.random.default_rng(SEED).permutation(count * size)
    return dense[np.ix_(order, order)], clique[order]


@needs_pymetis
@pytest.mark.parametrize("directed", [False, True])
def test_cliques_stay_whole(directed: bool) -> None:
    """Fails if the graph is garbled on its way to METIS or the parts on their way back."""
    dense, clique = cliques(6, 12, directed=directed)
    got = cut(dense, 6)
    assert len(set(zip(got.owner.tolist(), clique.tolist(), strict=True))) == 6
    assert got.statistics.num_cut <= 6
    assert got.statistics.row_balance == 1.0


@needs_pymetis
def test_nonzeros_are_balanced_rather_than_rows() -> None:
    """Fails if vertices weigh alike: half of them hold nine tenths of the nonzeros here."""
    rng = np.random.default_rng(SEED)
    dense = np.zeros((600, 600), np.float32)
    dense[:300, :300] = rng.random((300, 300)) < 0.2
    dense[300:, 300:] = rng.random((300, 300)) < 0.015
    dense = np.triu(dense, 1) + np.triu(dense, 1).T
    s = cut(dense, 4).statistics
    assert s.nonzero_balance <= 1.02
    assert s.row_balance > 1.3


def planted(num_vertices: int, seed: int) -> Graph:
    """A random graph of 16 communities whose training vertices are six tenths of one of them."""
    rng = np.random.default_rng(seed)
    graph = community(num_vertices, 10 * num_vertices, 2, 16, homophily=0.8, seed=seed)
    assert graph.labels is not None
    train = (graph.labels.read(0, num_vertices) == 3) & (rng.random(num_vertices) < 0.6)
    drawn = np.where(train, 1, rng.random(num_vertices))
    masks = {"train": train, "val": drawn < 0.05, "test": (0.05 <= drawn) & (drawn < 0.25)}
    return replace(graph, splits={name: ArrayRows(mask[np.newaxis]) for name, mask in masks.items()})


@needs_pymetis
@pytest.mark.parametrize(
    "parts", [2, 4, pytest.param(3, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.slow)]
)
def test_splits_in_one_community_are_shared_out(parts: int) -> None:
    """Fails if a constraint is lost, has another's weights or slack, or costs more than 15 % of edges cut over three seeds.

    Of ten seeds and 2, 3, 4 and 8 parts one alone cut from 7 % fewer to 25 % more edges, all together a tenth more.
    """
    graph, cuts = planted(20_000, 3), []
    for seed in (6, 1, 2):
        plain, even = (
            metis(graph, MetisSettings(parts=parts, seed=seed, kind=kind)).statistics for kind in KINDS_OF_CUTS
        )
        assert balance(plain.train_per_part) > 1.5
        assert max(even.nonzero_balance, even.row_balance) <= 1.011
        for name, per_part in (
            ("train", even.train_per_part),
            ("val", even.val_per_part),
            ("test", even.test_per_part),
        ):
            assert sum(per_part) == graph.splits[name].array().sum()
            assert balance(per_part) <= 1.051
        cuts.append((plain.num_cut, even.num_cut))
    assert all(even <= 1.25 * plain for plain, even in cuts)
    plain_cut, even_cut = np.sum(cuts, 0)
    assert even_cut <= 1.15 * plain_cut


@needs_pymetis
@pytest.mark.parametrize(("parts", "halvings"), [(1, 3), (3, 2), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_halves_of_halves_are_parts_too(parts: int, halvings: int) -> None:
    """Fails if leaves leave their part, are uneven, or ranges of them cut much more than METIS's parts of as many."""
    graph = planted(20_000, 3)
    settings = MetisSettings(parts=parts, seed=6, kind="metis-balanced")
    leaf = halved(graph, settings, halvings)
    assert np.array_equal(leaf >> halvings, metis(graph, settings).owner)
    for depth in (1, halvings):
        found = edge_cut(graph, (leaf >> halvings - depth).astype(np.uint16), parts << depth).statistics
        direct = metis(graph, replace(settings, parts=parts << depth)).statistics
        assert found.num_cut <= 1.15 * direct.num_cut
        for per_part in (found.rows_per_part, found.nonzeros_per_part, found.train_per_part):
            assert balance(per_part) <= 1.12


@needs_pymetis
@pytest.mark.parametrize("kind", KINDS)
def test_leaves_of_small_graphs(kind: str) -> None:
    """Fails if a leaf does not exist, or METIS is given what it cannot cut: no edge, less than a vertex for each leaf."""
    graph = graph_of(dense_of(kind))
    for parts, halvings in ((1, 1), (2, 2), (3, 9), (graph.num_vertices, 1), (graph.num_vertices + 1, 1)):
        leaf = halved(graph, MetisSettings(parts=parts, seed=SEED), halvings)
        assert leaf.shape == (graph.num_vertices,)
        assert 0 <= leaf.min() <= leaf.max() < parts << halvings


@needs_pymetis
def test_constraints_that_are_empty_are_dropped() -> None:
    """Fails if METIS is given a weight that no vertex has, or a graph without splits is refused."""
    graph = graph_of(dense_of("random", 300))
    settings = MetisSettings(parts=3, seed=SEED, kind="metis-balanced")
    mask = np.arange(300)[np.newaxis] < 150
    some = replace(graph, splits={"train": ArrayRows(mask), "val": ArrayRows(~mask & mask)})
    assert list(constraints(some, settings)) == ["nonzeros", "vertices", "train"]
    assert list(constraints(graph, settings)) == ["nonzeros", "vertices"]
    for one in (graph, some):
        s = metis(one, settings).statistics
        assert s.row_balance <= 1.02
        assert (sum(s.train_per_part), s.val_per_part) == (150 if one is some else 0, (0, 0, 0))


@needs_pymetis
@pytest.mark.parametrize("count", [2, 20])
def test_a_small_split_costs_no_balance(count: int) -> None:
    """Fails if METIS is asked for what few vertices cannot be, an equal number on each part, and gives the rest up."""
    mask = np.zeros((1, 3000), bool)
    mask[0, np.random.default_rng(3).permutation(3000)[:count]] = True
    graph = replace(community(3000, 30_000, 2, 8, seed=4), splits={"train": ArrayRows(mask)})
    found = metis(graph, MetisSettings(parts=8, kind="metis-balanced")).statistics
    assert max(found.nonzero_balance, found.row_balance) <= 1.03
    assert max(found.train_per_part) <= -(-count // 8) + 1


WRAPPED = """
import sys
import numpy as np, pymetis
from mggcn.partition.statistics import balance
from tests.partition.cut.test_libra import dense_of, graph_of
from tests.partition.metis.test_run import SEED, filled

for kind in sys.argv[1:]:
    given = filled(graph_of(dense_of(kind)))
    entries = int(given.indptr[-1])
    weights = None if given.edge_weights is None else given.edge_weights[:entries]
    adjacency = pymetis.CSRAdjacency(given.indptr, given.indices[:entries])
    options = pymetis.Options(seed=SEED, ufactor=10)
    found = pymetis.part_graph(
        3, adjacency, vweights=given.vertex_weights[:, 0].copy(), eweights=weights, recursive=False, options=options
    )
    print(*found.vertex_part)
"""


@needs_pymetis
def test_the_library_is_called_as_pymetis_calls_it() -> None:
    """Fails if an option has another option's number, or an argument another's place: with one constraint, bits agree."""
    kinds = ["random", "directed"]
    done = subprocess.run([sys.executable, "-c", WRAPPED, *kinds], capture_output=True, text=True, check=True)
    for kind, parts in zip(kinds, done.stdout.splitlines(), strict=True):
        assert parts.split() == [str(part) for part in cut(dense_of(kind), 3).owner]


def test_a_library_that_cannot_be_called_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a build of pymetis that shows nothing of METIS ends in a traceback, or is taken for a lack of memory."""
    told = SimpleNamespace(__file__=str(tmp_path / "none.so"))
    monkeypatch.setitem(sys.modules, "pymetis", SimpleNamespace(version="1.0", _internal=told))
    monkeypatch.setitem(sys.modules, "pymetis._internal", told)
    for names in ({}, {"options_indices": SimpleNamespace(SEED=8)}):  # and one that knows no number of cuts
        for name, value in names.items():
            monkeypatch.setattr(told, name, value, raising=False)
        with pytest.raises(SystemExit) as ended:
            process._functions()
        assert ended.value.code == process.UNUSABLE
    said = "METIS in pymetis 1.0 cannot be called"
    monkeypatch.setattr(sys, "executable", str(script(tmp_path, f"echo '{said}'; exit {process.UNUSABLE}")))
    problem = filled(graph_of(dense_of("path")))
    with pytest.raises(BackendError, match=said):
        solve(problem, 2, SEED)
    os.close(problem.descriptor)


@pytest.mark.covering(0)
@needs_pymetis
@pytest.mark.parametrize(("name", "most"), [("cnr_2000", 0.01), ("dblp_2010", 0.1), ("coauthor_cs", 0.15)])
def test_cuts_of_real_graphs(name: str, most: float, data_root: Path) -> None:
    """Fails if METIS cuts much more than it does, 0.1, 6 and 10 % of the edges in four parts, or forgets the balance."""
    s = metis(open_store(data_root / name), MetisSettings(parts=4, seed=SEED)).statistics
    assert s.cut_share < most
    assert s.nonzero_balance <= 1.011


@needs_pymetis
def test_seeds_decide() -> None:
    """Fails if two seeds cut alike, or one seed twice does not."""
    dense = dense_of("random", 300)
    one, again, other = (cut(dense, 4, seed) for seed in (2**31 - 1, 2**31 - 1, 0))
    assert np.array_equal(one.owner, again.owner)
    assert one.statistics == again.statistics
    assert not np.array_equal(one.owner, other.owner)


def test_wrong_settings_are_refused() -> None:
    """Fails if settings that no cut can have get through."""
    for parts in (0, 1025):
        with pytest.raises(ConfigError, match=f"1 to 1024 parts here, got {parts}"):
            MetisSettings(parts=parts)
    for seed in (-1, 2**31):
        with pytest.raises(ConfigError, match=f"seed of METIS must lie in .* got {seed}"):
            MetisSettings(parts=2, seed=seed)


def test_without_pymetis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run whose order is METIS's ends in a traceback where the package is missing."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r'needs pymetis.* pip install "mggcn\[metis\]"'):
        cut(dense_of("path"), 2)


@needs_pymetis
def test_a_failure_of_metis_is_an_error() -> None:
    """Fails if what METIS left undone is taken for a partition: it refuses 0 parts here."""
    problem = filled(graph_of(dense_of("path")))
    with pytest.raises(PlanError, match=r"METIS exited with code 1 .* out of memory"):
        solve(problem, 0, SEED)
    os.close(problem.descriptor)


def test_a_kill_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a process that the kernel killed for its memory leaves a partition of zeros."""
    monkeypatch.setattr(sys, "executable", str(script(tmp_path, "kill -9 $$")))
    problem = filled(graph_of(dense_of("path")))
    with pytest.raises(PlanError, match="METIS exited with signal 9"):
        solve(problem, 2, SEED)
    os.close(problem.descriptor)


def script(folder: Path, body: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store on which METIS works for ten seconds."""
    folder = tmp_path_factory.mktemp("large") / "store"
    write_store(rmat(scale=17, edge_factor=12, seed=5), folder)
    return folder


@pytest.mark.covering(0, rest="slow")
@needs_pymetis
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_metis_ends_with_the_command(how: signal.Signals, large: Path) -> None:
    """Fails if Ctrl-C waits for METIS, or METIS outlives the command."""
    what = ["partition", str(large), "--kind", "metis", "--parts", "1024"]
    command = [sys.executable, "-m", "mggcn", *what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        metis_process = child(process.pid)
        time.sleep(1.5)  # until METIS is at work
        assert Path(f"/proc/{metis_process}").exists()
        process.send_signal(how)
        _, said = process.communicate(timeout=5)
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + how)
    assert ("interrupted" in said) == (how != signal.SIGKILL)
    until = time.monotonic() + 3
    while Path(f"/proc/{metis_process}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{metis_process}").exists()
    assert not (large / "partitions").exists()


def child(pid: int) -> int:
    """Return the first process that `pid` starts."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.05)
    raise TimeoutError(f"process {pid} started none")


MEASURE = """
import resource, sys
from mggcn.graph.store import open_store
from mggcn.partition.metis.run import MetisSettings, constraints, metis, metis_memory

graph = open_store(sys.argv[1])
settings = MetisSettings(parts=8, kind=sys.argv[2])
metis(graph, settings)
even = len(constraints(graph, settings))
memory = metis_memory(graph.num_vertices, graph.num_edges, graph.symmetric, even)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, memory.least, memory.most)
"""


@pytest.mark.full
@needs_pymetis
@pytest.mark.parametrize("kind", [pytest.param("metis", marks=pytest.mark.slow), "metis-balanced"])
@pytest.mark.parametrize("name", ["cnr_2000", pytest.param("blogcatalog", marks=pytest.mark.slow)])
def test_memory_is_as_planned(name: str, kind: MetisKind, data_root: Path, tmp_path: Path) -> None:
    """Fails if METIS takes more memory than the plan says, or the plan refuses what would fit."""
    write_store(open_store(data_root / name), tmp_path / name)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / name), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    measured, least, most = (int(number) for number in done.stdout.split())
    assert least - (64 << 20) <= measured <= most


def test_memory_of_a_directed_graph_is_that_of_both_directions() -> None:
    """Fails if A^T is forgotten in the plan."""
    one, two = (metis_memory(1000, 5000, symmetric) for symmetric in (True, False))
    assert two.own["adjacency"] == 4 * one.own["adjacency"]
    assert two.metis_most - 400_000 == 2 * (one.metis_most - 400_000)
    assert one.least < one.most
