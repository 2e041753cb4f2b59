"""Rows that batches read of other ranks: BatchGNN's equations on the sets that are drawn."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.stack import cached_rows, read_rows, seeds_of
from mggcn.blocks.macrobatch import COUNT_BYTES, ID_BYTES, cache_bytes
from mggcn.config import Config
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from mggcn.graph.store_write import write_store
from mggcn.partition.rows.partition import row_owners
from mggcn.planning.batch_rows import ReadRows, balance, read_lines
from tests.cli.runs import run_main
from tests.feed.test_blocks import MODELS
from tests.feed.test_sampled import sampled
from tests.graphs import make_graph, pattern
from tests.reference import dense_csr


def counted(config: Config, graph: Graph, macros: tuple[int, ...] = (0,), most: int = 99) -> tuple[ReadRows, Any]:
    plan, partition = plan_graph(config, graph)
    owner = row_owners(partition).owner_of(slice(None))
    return read_rows(config, graph, plan.shape, owner, macros, most), owner


def reached(graph: Graph, seeds: Any, hops: int) -> Any:
    """The vertices from which so many hops lead to the seeds, these too."""
    adj_t, found = dense_csr(graph.adj_t) != 0, np.isin(np.arange(graph.num_vertices), seeds)
    for _ in range(hops):
        found |= adj_t[found].any(0)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_equations_on_whole_neighbourhoods(ranks: int) -> None:
    """Fails if a row is counted twice in a macrobatch, in none, on another rank or as another one's, or eq. 2 to 5 have
    other sets than the paper: all in-neighbours are drawn, so that these follow from the graph alone.
    """
    graph = make_graph(pattern("directed", 70, 3) * (np.random.default_rng(2).random((70, 70)) < 0.25), num_features=5,
                       num_classes=3, seed=2)  # fmt: skip
    config = resolve(sampled(ranks, {"kind": "gcn", "self_loops": False}, (-1, -1), batch=9, plan="bound"), graph)
    rows, owner = counted(config, graph, (0, 2))
    seeds = seeds_of(config, graph, owner)
    order = seeds.order(config.train.seed, 0)
    parts = [[seeds.of_rank(seeds.of_step(order, step), rank) for rank in range(ranks)] for step in range(rows.steps)]
    read = np.array([[reached(graph, own, 2) for own in step] for step in parts])
    inner = np.array([[reached(graph, own, 1) for own in step] for step in parts])
    remote = read & (owner[None, None] != np.arange(ranks)[:, None])
    assert rows.drawn == rows.steps == len(parts) > 3
    np.testing.assert_array_equal(rows.read, read.sum(2))
    np.testing.assert_array_equal(rows.inner, inner.sum(2))
    np.testing.assert_array_equal(rows.remote, remote.sum(2))
    np.testing.assert_array_equal(rows.served, [np.bincount(owner, step.sum(0), ranks) for step in remote])
    assert rows.num_fetched(1) == remote.sum()
    pairs = [remote[first : first + 2].any(0).sum(1) for first in range(0, rows.steps, 2)]
    np.testing.assert_array_equal(rows.fetched[2], pairs)
    assert rows.num_fetched(rows.steps) == remote.any(0).sum() <= rows.bound == (ranks - 1) * 70
    edges = sum(int((dense_csr(graph.adj_t)[of] != 0).sum()) for step in inner for of in step)
    s, new = 20, int((read & ~inner).sum())
    topology = ID_BYTES * (int(read.sum()) + edges)
    assert cache_bytes(*rows.cached, s) == (
        s * (int(inner.sum()) + new) + topology,
        int(inner.sum()) * (2 * s + ID_BYTES),
    )
    relays = rows.steps * ranks * (ranks - 1) * COUNT_BYTES
    assert rows.bytes_sent(1, s) == relays + int(remote.sum()) * (s + ID_BYTES)


def test_a_cache_takes_the_rows_that_most_read() -> None:
    """Fails if own rows are kept, others than the most read ones, or one that is kept is fetched."""
    graph = make_graph(pattern("directed", 60, 4), num_features=5, num_classes=3, seed=2)
    config = resolve(sampled(2, {"kind": "gcn"}, (4, 4), batch=9, rows="owners", cache_rows=7), graph)
    rows, owner = counted(config, graph)
    without, _ = counted(dataclasses.replace(config, sample=dataclasses.replace(config.sample, cache_rows=0)), graph)
    out_degrees = (dense_csr(graph.adj_t) != 0).sum(0)
    for rank in range(2):
        kept = cached_rows(graph, owner, rank, 7)
        assert kept.size == 7
        assert (owner[kept] != rank).all()
        left = np.setdiff1d(np.flatnonzero(owner != rank), kept)
        assert out_degrees[kept].min() >= out_degrees[left].max()
    assert rows.num_fetched(1) < without.num_fetched(1)
    np.testing.assert_array_equal(rows.read, without.read)


def test_balance_is_what_a_step_waits_for() -> None:
    """Fails if ranks that are even over an epoch, and not in a step, count as even."""
    assert balance(np.array([[3, 1], [1, 3]])) == 1.5
    assert balance(np.array([[2, 2], [5, 5]])) == 1.0
    assert balance(np.zeros((2, 2), np.int64)) == 0.0


def test_words_follow_the_numbers() -> None:
    """Fails if the verdicts are the same whatever was counted."""
    ones = np.ones((2, 2), np.int64)
    counts: dict[str, Any] = dict.fromkeys(("remote", "served", "entries", "last"), ones)
    few = ReadRows(num_vertices=9, steps=2, inner=ones, read=9 * ones, fetched={1: 4 * ones, 2: 4 * ones[:1]}, **counts)
    none = ReadRows(num_vertices=9, steps=4, inner=ones, read=ones, fetched={1: ones, 2: 2 * ones[:1]}, **counts)
    text, other = ("\n".join(read_lines(rows, 40)) for rows in (few, none))
    assert "macrobatches pay: all 2 together send 2.00 times fewer rows" in text
    assert "it pays: |V| is 4 and |N(V)| 32" in text
    assert "macrobatches do not pay: no row is read twice" in other
    assert "it does not pay" in other
    assert "2 of an epoch's 4 steps" in other
    assert "eq. 4" not in "\n".join(read_lines(few, 40, sums=False))


def test_a_macrobatch_fetches_a_fifth_on_a_community_graph() -> None:
    """Fails if all batches together fetch more than a fifth of what each alone does: four ranks, fan-outs 15,10,5, and as
    many steps an epoch as products has.
    """
    graph = community(12_000, 150_000, 4, 12, seed=31, homophily=0.8, power=2.5, train=0.08)
    train = int(graph.splits["train"].array().sum())
    config = sampled(4, MODELS["sage"] | {"hidden": (8, 8)}, (15, 10, 5), batch=train // 48, plan="bound")
    rows, _ = counted(resolve(config, graph), graph)
    assert rows.drawn >= 48
    assert 5 * rows.num_fetched(rows.drawn) <= rows.num_fetched(1)
    assert rows.num_fetched(rows.drawn) <= rows.bound


def test_a_plan_explains_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a plan of a store does not draw, draws without being asked, or on one rank."""
    write_store(make_graph(pattern("random", 60, 3), num_features=5, num_classes=3, seed=2), tmp_path / "store")
    command = ["plan", tmp_path / "store", "--batch", "9", "--fanout", "3,2", "--set", "model.hidden=8"]
    for more, there in ((["--ranks", "2", "--explain"], True), (["--ranks", "2"], False), (["--explain"], False)):
        assert run_main(*command, *more) == 0
        text = capsys.readouterr().out
        assert ("BatchGNN eq. 2" in text) is there
        assert ("the bound is (P - 1) N, 60 rows" in text) is there
    more = ["--ranks", "2", "--set", "sample.rows=owners", "--set", "sample.macro=2", "--set", "sample.cache_rows=3"]
    assert run_main(*command, *more, "--explain") == 0
    text = capsys.readouterr().out
    assert "for 2 steps together: at most 27 rows of 20 B" in text
    assert "3 rows are kept throughout" in text
    assert "macrobatches of 2:" in text


@pytest.mark.parametrize(
    ("model", "pays"),
    [("gcn", True), ("sage", True), ("gat", False), ("appnp", False), ("gcn, X dropped", False), ("owners", False)],
)
def test_a_cache_of_sums_is_named_where_it_can_be(
    model: str, pays: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a plan names sample.first = full to a run that refuses it, none to one that takes it, or JSON differs."""
    write_store(make_graph(pattern("random", 60, 3), num_features=5, num_classes=3, seed=2), tmp_path / "store")
    settings = {
        "gcn, X dropped": ["model.input_dropout=0.5"],
        "owners": ["sample.rows=owners"],
        "appnp": ["model.kind=appnp", "model.hops=2"],
    }.get(model, [f"model.kind={model}"])
    command = ["plan", tmp_path / "store", "--batch", "9", "--fanout", "3,2", "--set", "model.hidden=8", "--ranks", "2"]
    command += [word for one in settings for word in ("--set", one)]
    for more, taken in (([], True), (["--set", "sample.first=full"], pays)):
        assert (run_main(*command, *more) == 0) is taken
    capsys.readouterr()
    assert run_main(*command, "--explain") == 0
    text = capsys.readouterr().out
    assert ("sample.first = full" in text) is pays
    assert run_main(*command, "--explain", "--json") == 0
    found = json.loads(capsys.readouterr().out)["batch_rows"]
    assert all(f"{one['rows']:,} rows in {one['relays']:,} relay" in text for one in found["fetched"])
    assert len(found["fetched"]) == 2
    assert found["remote"] == found["fetched"][0]["rows"] > 0
    assert (found["bytes_with_sums"] is not None) is pays
    assert run_main(*command, "--json") == 0
    assert "batch_rows" not in json.loads(capsys.readouterr().out)
