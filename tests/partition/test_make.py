"""From a graph to a partition of any kind: what is kept beside a store, what is made again, and what trains on it."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.assemble.plan import partition_graph
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store, write_store
from mggcn.partition.cache import cuts
from mggcn.partition.cache.cuts import is_kept, kept_in
from mggcn.partition.cut.libra import LibraSettings, libra
from mggcn.partition.cut.partition import CutPartition, cut_stats, exchange_lists
from mggcn.partition.make import make_partition, stats_from_dict, stats_of
from mggcn.partition.rows.partition import RowPartition
from tests.graphs import make_graph, one_epoch, pattern
from tests.partition.metis.test_run import needs_pymetis
from tests.reference import dense_csr, loss_and_gradients


def graph_of(kind: str, n: int = 60) -> Graph:
    return make_graph(pattern(kind, n, 4), num_features=9, num_classes=3, seed=1)


@pytest.mark.parametrize("kind", ["random", "directed", "star", "hub-row", "empty", "disconnected", "path"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_edge_and_vertex_has_its_place(kind: str, ranks: int) -> None:
    """Fails if an owner is missing or double, copies are listed wrongly, or the figures are not those of the lists."""
    graph = graph_of(kind)
    partition = make_partition("cut", graph, ranks=ranks, order="random", seed=3, bins=2)
    assert isinstance(partition, CutPartition)
    stats = cut_stats(graph, partition, self_loops=True)
    owned, held = np.zeros(60, int), np.zeros(60, int)
    lists = [exchange_lists(partition, rank, bins=2) for rank in range(ranks)]
    for rank in range(ranks):
        ids, mine = partition.ids(rank), partition.owned(rank)
        assert mine is not None
        owned[ids[mine]] += 1
        held[ids] += 1
        assert np.array_equal(partition.local_index(rank).owned(rank), ids)
        assert stats.counts[rank] == ids.size
        assert stats.split[rank] == partition.split[ids].sum() == partition.split[ids[: stats.split[rank]]].sum()
        for other in range(ranks):
            for number in range(2):
                sent, got = lists[rank][number], lists[other][number]
                assert sent.leaf_counts[other] == got.root_counts[rank] == stats.leaves[number, rank, other]
                leaves = np.split(sent.leaves, np.cumsum(sent.leaf_counts)[:-1])[other]
                roots = np.split(got.roots, np.cumsum(got.root_counts)[:-1])[rank]
                assert np.array_equal(ids[leaves], partition.ids(other)[roots])
                assert (partition.bin_of[ids[leaves]] == number).all()
    assert (owned == 1).all()
    assert ((held > 1) == partition.split).all()
    adj_t = dense_csr(graph.adj_t)
    np.fill_diagonal(adj_t, 1)
    assert stats.num_entries == (adj_t != 0).sum()
    assert stats_from_dict(json.loads(json.dumps(stats.to_dict()))).to_dict() == stats.to_dict()


def test_cuts_are_kept_in_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if every run cuts again, writes into the store, or needs a cache folder that can be written."""
    write_store(graph_of("random"), tmp_path / "store")
    graph = open_store(tmp_path / "store")
    first = make_partition("cut", graph, ranks=3, order="random", seed=1, bins=1)
    assert isinstance(first, CutPartition)
    assert not (tmp_path / "store" / "partitions").exists()
    folder = kept_in(graph, "libra-3-1-shuffled")
    assert folder is not None
    kept = folder / "libra-3-1-shuffled"
    assert kept.is_dir()
    with monkeypatch.context() as patch:
        patch.setattr("mggcn.partition.cache.cuts.libra", None)
        again = make_partition("cut", graph, ranks=3, order="random", seed=1, bins=1)
    assert isinstance(again, CutPartition)
    assert np.array_equal(again.cut.parts, first.cut.parts)
    monkeypatch.setattr(cuts.os, "access", lambda *_: False)
    other = make_partition("cut", graph, ranks=2, order="random", seed=1, bins=1)
    assert isinstance(other, CutPartition)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_ranks_that_lack_a_cut_at_once_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks of a machine each make the cut, each with its memory, or a lock is left beside it."""
    write_store(graph_of("random"), tmp_path / "store")
    graph, made = open_store(tmp_path / "store"), list[int]()

    def slow(*arguments: Any) -> Any:
        made.append(1)
        time.sleep(0.3)
        return libra(*arguments)

    monkeypatch.setattr(cuts, "libra", slow)
    with ThreadPoolExecutor(4) as ranks:
        wanted = [ranks.submit(make_partition, "cut", graph, ranks=4, order="random", seed=1, bins=1) for _ in range(4)]
        found = [one.result() for one in wanted]
    assert len(made) == 1
    parts = [one.cut.parts for one in found if isinstance(one, CutPartition)]
    assert len(parts) == 4
    assert all(np.array_equal(one, parts[0]) for one in parts)
    folder = kept_in(graph, "libra-4-1-shuffled")
    assert folder is not None
    assert [path.name for path in folder.iterdir()] == ["libra-4-1-shuffled"]


def test_a_cut_beside_the_store_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run leaves what `mggcn partition` made aside, or asks where the cut of another graph lies."""
    write_store(graph_of("random"), tmp_path / "store")
    graph = open_store(tmp_path / "store")
    made = cuts.VERTEX_CUTS.find_or_make(graph, LibraSettings(parts=3), cuts.cuts_folder(tmp_path / "store"))
    assert kept_in(graph, made.folder.name) == made.folder.parent
    monkeypatch.setattr("mggcn.partition.cache.cuts.libra", None)
    assert isinstance(make_partition("cut", graph, ranks=3, order="random", seed=1, bins=1), CutPartition)
    assert kept_in(graph_of("random"), made.folder.name) is None
    write_store(graph_of("star"), tmp_path / "other")
    assert kept_in(open_store(tmp_path / "other"), made.folder.name) != kept_in(graph, "libra-4-1-shuffled")


@pytest.mark.covering(0)
@needs_pymetis
@pytest.mark.parametrize("strategy", ["broadcast", "halo", "slice"])
def test_training_on_the_parts_of_metis(strategy: str, tmp_path: Path) -> None:
    """Fails if parts of unequal size break a strategy: gradients must be those of the dense formula."""
    graph = graph_of("disconnected")
    for ranks in (1, 3):
        run = RunConfig(
            ranks=ranks,
            threads=1,
            transport="threads" if ranks > 1 else "single",
            precision="fp64",
            order="metis",
            strategy=strategy,  # type: ignore[arg-type]
        )
        config = Config(model=ModelConfig(hidden=(6, 5), dropout=0.3), train=TrainConfig(seed=11), run=run)
        partition = partition_graph(config, graph)
        assert isinstance(partition, RowPartition)
        stats = stats_of(graph, partition, self_loops=True)
        assert sum(stats.counts) == 60
        found = one_epoch(config, graph)
        loss, grads, _ = loss_and_gradients(graph, config.model, found[0].weights, 11, 3)
        assert found[0].loss == pytest.approx(loss, rel=1e-10)
        for name, expected in grads.items():
            np.testing.assert_allclose(found[0].grads[name], expected, atol=1e-10 * (np.abs(expected).max() or 1))


@pytest.mark.parametrize(
    ("order", "name"),
    [
        pytest.param("metis", "metis-2-1", marks=needs_pymetis),
        pytest.param("metis-balanced", "metis-balanced-2-1", marks=needs_pymetis),
        ("stream", "stream-2"),
    ],
)
def test_parts_are_kept(order: str, name: str, tmp_path: Path) -> None:
    """Fails if training makes them anew, or auto does not compare what is at hand."""
    from mggcn.runs.auto import resolve_auto

    write_store(graph_of("disconnected"), tmp_path / "store")
    graph = open_store(tmp_path / "store")
    make_partition("rows", graph, ranks=2, order=order, seed=1, bins=1)
    assert is_kept(graph, name)
    _, choice = resolve_auto(Config(run=RunConfig(ranks=2, strategy="halo", order="auto")), graph)
    assert choice is not None
    assert order in {row.candidate.order for row in choice.rows}
