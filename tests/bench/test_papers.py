"""The papers' items: their files, verdicts, exact rows, and what computes the others, at toy sizes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import graphs
from bench.cpu import accuracy
from bench.papers import __main__ as papers
from bench.papers import batchgnn, distdgl, distgnn, distgnn_mb, mg_gcn, trained
from bench.papers.items import PAPERS, Bar, Item, Ours, _item, judge, read_paper
from mggcn.aggregate.steps import Await, Send
from mggcn.config import from_tables
from mggcn.cost.machine import find_machine
from mggcn.cost.work import Sum, Work
from mggcn.graph.generate import community
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.runs.train import prepare_run, run_training

Record = dict[str, Any]
TOY = {
    "arxiv-like": graphs.Made(150, 500, 8, 4, train=0.5),
    "products-like, 8 % train": graphs.Made(200, 900, 6, 5, train=0.4),
    "products-like": graphs.Made(200, 900, 6, 5),
    "reddit-like": graphs.Made(90, 700, 6, 5),
    "community": graphs.Made(160, 700, 6, 3, train=0.5),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Record]]]:
    """Run the command on toy graphs; return its status and each item's record."""
    monkeypatch.setattr(graphs, "GENERATED", TOY)
    monkeypatch.setattr(batchgnn, "RMAT", graphs.Made(2**9, 2**11, 4, 3, train=0.3, kind="rmat"))
    monkeypatch.setattr(batchgnn, "LDBC_RANKS", 6)
    monkeypatch.setattr(distdgl, "RANKS", (1, 2))
    monkeypatch.setattr(distdgl, "DEALS", ("global",))
    monkeypatch.setattr(papers, "surroundings", lambda: {"command": "", "hardware": "toy", "date": "today", "kernel": "",
                        "python": "", "versions": {}, "commit": "", "load_average_before": 0.0})  # fmt: skip
    threads = torch.get_num_threads()

    def main(*arguments: str) -> tuple[int, dict[str, Record]]:
        places = ["--cache", str(tmp_path / "graphs"), "--data", str(tmp_path), "--peers", str(tmp_path)]
        status = papers.main([*arguments, *places, "--scale", "1", "--threads", "1", "--out", str(tmp_path)])
        torch.set_num_threads(threads)
        (record,) = tmp_path.glob("*.json")
        found = json.loads(record.read_text())
        assert record.with_suffix(".md").read_text().startswith("# ")
        return status, {item["item"]: item for item in found["items"]}

    return main


@pytest.mark.parametrize("name", PAPERS)
def test_files_are_complete(name: str) -> None:
    """Fails if an item lacks what --dry says of it, nothing computes it, or something that no file lists is run."""
    paper = read_paper(name)
    assert paper.title
    assert paper.source
    assert set(papers.runs_of(name)) == {item.name for item in paper.items if item.is_run}
    for item in paper.items:
        assert all((item.title, item.where, item.unit, item.does))
        assert re.fullmatch(r"[a-z0-9.-]+", item.name)
        assert item.is_run or item.published
        assert item.is_run or any(need.startswith("hardware ") for need in item.needs)
        assert all(need.split()[0] in ("graph", "machine", "peer", "package", "hardware") for need in item.needs)


@pytest.mark.parametrize("name", PAPERS)
def test_a_list_computes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if --dry leaves an item out, or runs one."""
    monkeypatch.setattr(papers, "runs_of", None)
    assert papers.main([name, "--dry", "--data", str(tmp_path), "--peers", str(tmp_path)]) == 0
    lines = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert lines[2:] == [f"| {item.name}" for item in read_paper(name).items]
    with pytest.raises(SystemExit, match="has no item nothing; there are "):
        papers.main([name, "nothing", "--dry"])


def item_with(published: dict[str, float], *bars: Bar, **more: Any) -> Item:
    return Item(name="i", title="t", where="w", how="A", unit="u", does="d", published=published, bars=bars, **more)


@pytest.mark.parametrize(
    ("bar", "good", "bad"),
    [
        (Bar(within=0.1), 2.2, 2.21),
        (Bar(factor=2), 1.0, 0.99),
        (Bar(points=0.5), 1.5, 1.49),
        (Bar(least=1.5), 1.5, 1.4),
        (Bar(most=1.5), 1.5, 1.6),
        (Bar(digits=2), 2.0049, 2.0051),
    ],
)
def test_bars(bar: Bar, good: float, bad: float) -> None:
    """Fails if a bar is met on its wrong side, or a number that misses it passes."""
    item = item_with({"a": 2.0}, bar)
    assert judge(item, Ours(values={"a": good}), 1.0).verdict == "met"
    missed = judge(item, Ours(values={"a": bad}), 1.0)
    assert missed.failed
    assert missed.verdict == f"MISSED: 0 of 1 are {bar.text}"


def test_verdicts() -> None:
    """Fails if what is absent passes or fails, cells that may miss are required, or a bar counts on too small a graph."""
    some = item_with({"a": 1.0, "b": 1.0, "c": 1.0}, Bar(within=0.1, of=2))
    assert judge(some, Ours(values={"a": 1.0, "b": 1.0, "c": 9.0}), 1.0).verdict == "met"
    assert judge(some, Ours(values={"a": 1.0, "b": 9.0, "c": 9.0}), 1.0).failed
    assert judge(some, Ours(values={}, absent=["graph x"]), 1.0).verdict == "not run: absent: graph x"
    beside = judge(some, Ours(values={"a": 1.0, "b": 1.0}, absent=["graph x"]), 1.0)
    assert beside.verdict == "met (absent: graph x)"
    assert [row[2] for row in beside.rows] == ["1", "1", ""]
    large = item_with({"a": 1.0}, Bar(within=0.1), scale=1.0)
    small = judge(large, Ours(values={"a": 9.0}), 0.1)
    assert (small.failed, small.verdict) == (False, "not judged at scale 0.1: the bar is for 1")
    assert judge(large, Ours(values={"a": 9.0}), 1.0).failed
    both = item_with({"a": 1.0}, Bar(within=0.1, scale=1.0), Bar(cells=("b",), least=1.0))
    assert judge(both, Ours(values={"a": 9.0, "b": 1.0}), 0.1).verdict == "met"
    assert judge(both, Ours(values={"a": 9.0, "b": 1.0}), 1.0).failed
    assert judge(item_with({"a": 1.0}), Ours(values={"a": 9.0}), 1.0).verdict == "reported, there is no bar"
    own = item_with({}, Bar(cells=("x",), least=1.0))
    assert judge(own, Ours(values={"x": 0.0}), 1.0).failed


def test_a_bar_needs_what_it_compares_with() -> None:
    """Fails if a bar without a rule, or for a number that is not published, is read."""
    with pytest.raises(ValueError, match="needs one of"):
        Bar()
    table = {"name": "i", "title": "t", "where": "w", "how": "A", "unit": "u", "does": "d", "published": {}}
    with pytest.raises(ValueError, match="no published number for a, which has a bar"):
        _item(table | {"bar": [{"cells": ["a"], "within": 0.1}]})


def test_exact_rows(run: Callable[..., tuple[int, dict[str, Record]]]) -> None:
    """Fails if 1.50 and 0.75, 77.19 and 18.80, DistDGL's extents, or the bound of BatchGNN's table 5 are not met."""
    status, found = run("mg-gcn", "section-5.1")
    assert (status, found["section-5.1"]["verdict"]) == (0, "met")
    assert found["section-5.1"]["ours"] == pytest.approx({"DGX-1": 1.5, "DGX A100": 0.75}, rel=1e-12)


def test_exact_work_of_distgnn(run: Callable[..., tuple[int, dict[str, Record]]]) -> None:
    _, found = run("distgnn", "table-8")
    ours = found["table-8"]["ours"]
    assert found["table-8"]["verdict"] == "met"
    assert (round(ours["1 socket"], 2), round(ours["16 sockets"], 2)) == (77.19, 18.80)


def test_exact_extents_of_distdgl(run: Callable[..., tuple[int, dict[str, Record]]]) -> None:
    assert run("distdgl", "table-1")[1]["table-1"]["verdict"] == "met"


def test_exact_equations_of_batchgnn(run: Callable[..., tuple[int, dict[str, Record]]]) -> None:
    """Fails if eq. 2 to 5 on sets that are counted one by one are not what a plan counts."""
    status, found = run("batchgnn", "equations-2-5")
    assert (status, found["equations-2-5"]["verdict"]) == (0, "met")
    assert set(found["equations-2-5"]["ours"]) == {"eq. 2", "eq. 3, 8 batches", "eq. 3, all batches", "eq. 4", "eq. 5"}


def test_bound_of_batchgnns_table_5(run: Callable[..., tuple[int, dict[str, Record]]]) -> None:
    """Fails if graphs that are not here count, or the bound is not (P - 1) N."""
    status, found = run("batchgnn", "table-5")
    assert status == 0
    assert found["table-5"]["ours"] == {"arxiv, bound": 508_029.0}
    assert found["table-5"]["verdict"] == "met (absent: graph ogbn-arxiv; graph ogbn-products)"


def test_a_missed_bar_fails_the_command(
    run: Callable[..., tuple[int, dict[str, Record]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if a wrong number passes, or the status does not say so."""
    paper = read_paper("mg-gcn")
    wrong = dataclasses.replace(paper.item("section-5.1"), published={"DGX-1": 1.4, "DGX A100": 0.75})
    monkeypatch.setattr(papers, "read_paper", lambda _: dataclasses.replace(paper, items=(wrong,)))
    status, found = run("mg-gcn")
    assert (status, found["section-5.1"]["failed"]) == (1, True)
    assert "bars missed: section-5.1" in capsys.readouterr().err


def test_the_epoch_of_mg_gcn() -> None:
    """Fails if a product is forgotten or made twice, has another width than the paper's order gives it, or a message is
    awaited that is not the next block.
    """
    shape = read_paper("mg-gcn").shape("products", num_vertices=100, num_edges=900)
    alone = mg_gcn.even(shape, (256, 256), 1).items(0)
    widths = [item.row_bytes // 4 for item in alone if isinstance(item, Work) and item.kind == "sparse"]
    assert widths == [104, 256, 47, 47, 256]
    assert sum(item.rows for item in alone if isinstance(item, Work)) == 5 * 900
    sparse, flop = (
        sum(item.flop for item in alone if isinstance(item, Work) and item.kind == kind) for kind in ("sparse", "dense")
    )
    assert sparse == 900 * (4 + 8 + 2 + 2 + 8), "warps of 32 columns"
    assert flop == 2 * 100 * (2 * 104 * 256 + 3 * 256 * 256 + 3 * 256 * 47)
    together = mg_gcn.even(shape, (256, 256), 4)
    for rank in range(4):
        items = together.items(rank)
        messages = [item for item in items if isinstance(item, Send | Sum)]
        assert [item.root for item in messages if isinstance(item, Send)] == 5 * [0, 1, 2, 3]
        started = 0
        for item in items:
            started += isinstance(item, Send | Sum)
            if isinstance(item, Await):
                waited = messages[item.message]
                assert isinstance(waited, Send)
                assert item.message < started
        waits = [item.message for item in items if isinstance(item, Await)]
        assert waits == [number for number, item in enumerate(messages) if isinstance(item, Send)]
    machine = find_machine("dgx-a100")
    assert together.cost(machine).link_s > 0
    one, two = (dataclasses.replace(together, slots=n).product_cost(machine, 256).seconds for n in (1, 2))
    assert one > two


def test_memory_as_distgnn_lists_it() -> None:
    """Fails if table 6's buffers are counted once too often or too rarely: 2 layers, 8 sockets, worked out by hand."""
    shape = read_paper("distgnn").shape("reddit", num_vertices=80, num_edges=800, num_features=5, num_classes=3)
    epoch = distgnn.Epoch(shape=shape, hidden=(4,), sockets=8, replication=2.0, delay=None)
    rows, leaves = 20, 10
    assert (epoch.rows, epoch.leaves) == (rows, leaves)
    # Inputs 5; sums 5 and 4, layers 4 and 3, and gradients of all but the first sum.
    base = 4 * rows * (5 + 16 + 11) + 8 * 100
    assert epoch.memory() == base
    assert dataclasses.replace(epoch, delay=0).memory() == base + 4 * leaves * 2 * 5
    assert dataclasses.replace(epoch, delay=5).memory() == base + 4 * leaves * 4 * 9


def test_the_replay_is_what_a_run_finds(tmp_path: Path) -> None:
    """Fails if a cache that is replayed on ids finds other rows than one that trains."""
    write_store(community(240, 1400, 6, 3, seed=3, train=0.5), tmp_path / "store")
    graph = open_store(tmp_path / "store")
    tables = distgnn_mb.history_tables(3, 30, 40_000_000, "random")
    tables["sample"] |= {"history_rows": 4, "history_lines": 20}
    config = from_tables(tables | {"train": {"epochs": 1}, "model": tables["model"] | {"hidden": [8, 8]}})
    run_training(prepare_run(config, graph, None, tmp_path / "run"), graph, quiet=True)
    told = json.loads((tmp_path / "run" / "history.jsonl").read_text().splitlines()[-1])["hit_rates"]
    found = distgnn_mb.replay(graph, config, -(-int(graph.splits["train"].array().sum()) // 30))
    np.testing.assert_allclose(found.rates, 100 * np.array(told), rtol=1e-12)
    assert 0 < min(told) < max(told) <= 1


@pytest.mark.parametrize("what", ["delayed", "history"])
def test_scores_of_real_graphs_are_asked_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an item gives the experiment that it trains with less than this reads, points are not from the first, or it
    does not say how soon each comes near the best.
    """
    found = iter(range(100))

    def run_trained(*_: Any) -> dict[str, Any]:
        best = next(found) / 100
        return {"best": best, "final": 0.5, "seconds": 1.0, "curve": [(1.5, 0.0), (2.5, best)]}

    monkeypatch.setattr(accuracy, "trained", run_trained)
    monkeypatch.setattr(accuracy, "store_of", lambda *_: None)
    monkeypatch.setattr(accuracy, "open_store", lambda _: None)
    monkeypatch.setattr(accuracy, "divided", lambda graph, _: graph)
    monkeypatch.setattr(trained, "available", lambda name, _: name == "dblp")
    runs = tuple(accuracy.EXPERIMENTS[what].runs)[:3]
    given, text = trained.points(what, runs, 30, papers.options(["distgnn", "table-5"]))
    assert given == {label: [pytest.approx(number)] for number, label in enumerate(runs)}
    assert f"| dblp | {runs[0]} | 0.00 | 1.00 | never | 1 |" in text
    assert f"| dblp | {runs[2]} | 2.00 | 1.00 | 2.50 | 0 |" in text


@pytest.mark.parametrize(
    ("paper", "item"),
    [("batchgnn", "figure-3"), ("distdgl", "figure-9"), ("mg-gcn", "figure-6-8"), ("mg-gcn", "table-3")],
)
def test_items_end(paper: str, item: str, run: Callable[..., tuple[int, dict[str, Record]]]) -> None:
    """Fails if a dry run, a training or a plan ends without numbers or a verdict."""
    _, found = run(paper, item, "--epochs", "2")
    assert found[item]["ours"]
    assert not found[item]["verdict"].startswith("FAILED")
    if found[item]["failed"]:
        assert found[item]["reason"]


@pytest.mark.slow
def test_rows_of_others_by_order(run: Callable[..., tuple[int, dict[str, Record]]]) -> None:
    """Fails if an order or a seed is left out, seeds are all the same, or more is fetched together than one by one."""
    _, found = run("distdgl", "figure-10")
    drawn = found["figure-10"]["facts"]["drawn"]
    orders = ["random", "stream", "metis", "metis-balanced"]
    assert [(row["graph"], row["order"], row["seed"]) for row in drawn] == [
        (name, order, seed) for name in ("products-like", "papers-like") for order in orders for seed in distdgl.SEEDS
    ]
    assert len({row["rows"] for row in drawn if (row["graph"], row["order"]) == ("products-like", "random")}) > 1
    for row in drawn:
        counts = [*row["fetched"].values()]
        assert 0 < counts[-1] <= counts[0]


def test_a_number_that_has_a_bar_may_not_be_lacking() -> None:
    """Fails if an item is met although a cell of its bars has no number and nothing is absent."""
    item = item_with({}, Bar(cells=("a", "b"), least=1.0))
    assert judge(item, Ours(values={"a": 2.0, "b": 1.0}), 1.0).verdict == "met"
    assert judge(item, Ours(values={"a": 2.0}), 1.0).verdict == "MISSED: no number for b"
    assert not judge(item, Ours(values={"a": 2.0}, absent=["a file"]), 1.0).failed
