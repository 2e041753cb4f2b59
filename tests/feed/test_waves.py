"""Batches drawn by the owners of their vertices: ranks that lack others' edges and features train to the bits of ranks that
have the whole store, and send what was counted before.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.assemble.stack import read_rows
from mggcn.blocks.drawn_rows import ReadyEdges
from mggcn.blocks.letters import lead, num_stages
from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config
from mggcn.errors import PlanError
from mggcn.feed.owner_draws import OwnerDraws
from mggcn.feed.waves import Waves
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.graph.links import split_links
from mggcn.graph.store_write import write_store
from mggcn.partition.rows.partition import row_owners
from mggcn.planning.batch_rows import row_bytes_of
from mggcn.planning.batches import answer_plan
from mggcn.planning.drawn_edges import steps_bytes
from tests.cli.runs import finish, history, run_main, same_tensors, start
from tests.feed.test_ahead import alike, contents
from tests.feed.test_blocks import MODELS, graph_of
from tests.feed.test_owner_rows import EPOCHS, same, trained, with_epochs
from tests.feed.test_parts import planned
from tests.feed.test_sampled import sampled
from tests.graphs import make_graph, pattern
from tests.model.test_rgcn import typed_graph

ALL = -1


def in_parts(config: Config, order: str = "random", **more: Any) -> Config:
    return dataclasses.replace(
        config,
        sample=dataclasses.replace(config.sample, rows="parts", **more),
        run=dataclasses.replace(config.run, order=order),
    )


def lacking(matrix: CSR, own: Any) -> CSR:
    """The matrix with own rows alone: what belongs to others, their row pointers too, is what nobody may read."""
    indptr = matrix.indptr.array()
    mine = np.repeat(own, np.diff(indptr))
    pointers = np.full(indptr.shape, -(2**62))
    pointers[:-1][own], pointers[1:][own] = indptr[:-1][own], indptr[1:][own]
    parts: dict[str, Any] = {"indices": -7, "values": np.nan, "types": 255, "type_degrees": np.nan}
    spoilt = {}
    for name, poison in parts.items():
        rows = getattr(matrix, name)
        if rows is not None:
            array = rows.array().copy()
            array[~mine] = poison
            spoilt[name] = ArrayRows(array)
    return dataclasses.replace(matrix, indptr=ArrayRows(pointers), **spoilt)


def part_of(graph: Graph, own: Any) -> Graph:
    """The graph as a rank has it that holds the vertices `own`, bool (N,), alone."""
    adj_t = lacking(graph.adj_t, own)
    features = graph.features
    if isinstance(features, ArrayRows):
        array = features.array().copy()
        array[~own] = np.nan
        features = ArrayRows(array)
    adj = adj_t if graph.symmetric else lacking(graph.adj, own)
    return dataclasses.replace(graph, adj=adj, adj_t=adj_t, features=features)


def on_parts(config: Config, graph: Graph, body: Any) -> list[Any]:
    """What a function gives on ranks of which each has its own part alone: consecutive vertices, as evaluation reads whole
    chunks of others.
    """
    config = resolve(config, graph)
    plan, partition = plan_graph(config, graph)

    def run(comm: Communicator) -> Any:
        own = row_owners(partition).owner_of(slice(None)) == comm.rank
        return body(make_rank(config, part_of(graph, own), plan, partition, comm))

    return run_threads(config.run.ranks, run, 60)


def on_whole(config: Config, graph: Graph, body: Any) -> list[Any]:
    """The same on ranks that have the whole store."""
    config = resolve(config, graph)
    plan, partition = plan_graph(config, graph)

    def run(comm: Communicator) -> Any:
        return body(make_rank(config, graph, plan, partition, comm))

    return run_threads(config.run.ranks, run, 60)


def mapped(config: Config) -> Config:
    return dataclasses.replace(config, sample=dataclasses.replace(config.sample, rows="mapped", macro=1, cache_rows=0))


def compare(config: Config, graph: Graph) -> list[Any]:
    """Compare ranks that have a part each with ranks that have all; return what the first have found."""
    config = with_epochs(config, EPOCHS)
    found = on_parts(config, graph, trained)
    assert all(np.isfinite(one["losses"]).all() for one in found)
    assert same(found, on_whole(mapped(config), graph, trained))
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("macro", [0, 1, 4])
@pytest.mark.parametrize("cache", [0, 9, 1000])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_bits_are_those_of_the_whole_store(
    name: str, precision: Any, ahead: int, cache: int, macro: int, ranks: int
) -> None:
    """Fails if a rank reads an edge, a pointer or a row that it lacks, or an owner draws or counts otherwise."""
    config = sampled(ranks, MODELS[name] | {"dropout": 0.3}, batch=7, ahead=ahead)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision))
    compare(in_parts(config, order="none", macro=macro, cache_rows=cache), graph_of())


@pytest.mark.parametrize("name", ["gat", "sage-max"])
def test_models_without_values_of_edges(name: str) -> None:
    """Fails if a model that reads where edges end alone gets other ones."""
    compare(in_parts(sampled(3, MODELS[name], batch=7), order="none"), graph_of())


DRAWS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "all neighbours": {"fanout": (ALL, ALL)},
    "all, then some": {"fanout": (ALL, 2)},
    "replace": {"draw": "replace"},
    "labor": {"draw": "labor"},
    "labor-one, mean": {"draw": "labor-one", "weights": "mean"},
    "block": {"weights": "block"},
    "ranges": {"deal": "ranges"},
}
WEIGHTED = {"weights as they are": {}, "by weight": {"draw": "weight"}, "labor": {"draw": "labor"}}
LOOPS = {"as stored": False, "own entries": True}


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("norm", ["mean", "symmetric"])
@pytest.mark.parametrize("name", DRAWS)
def test_every_draw(name: str, norm: str, loops: str, ranks: int) -> None:
    """Fails if what an edge counts, or the scale of a row, is found otherwise from a part of the graph."""
    model = {"kind": "gcn", "norm": norm, "self_loops": LOOPS[loops]}
    config = sampled(ranks, model, **({"batch": 9, "ahead": 2} | DRAWS[name]))
    if ranks == 1:
        (found,) = on_parts(with_epochs(in_parts(config), EPOCHS), graph_of(), trained)
        assert found["read"] == [{}, {}]
        return
    compare(in_parts(config, order="none"), graph_of())


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_edges(name: str, loops: str) -> None:
    """Fails if weights of edges, or degrees that are sums of them, are another rank's."""
    adj = pattern("weighted", 61, 5)
    adj[np.arange(0, 61, 3), np.arange(0, 61, 3)] = 0.5  # some self-loops
    graph = make_graph(adj, num_features=7, num_classes=4, weighted=True, seed=4)
    config = sampled(3, {"kind": "gcn", "self_loops": LOOPS[loops]}, batch=7, **WEIGHTED[name])
    compare(in_parts(config, order="none"), graph)


@pytest.mark.parametrize("kind", ["random", "weighted"])
@pytest.mark.parametrize("sample", [{}, {"by_type": True}, {"by_type": True, "draw": "labor"}, {"weights": "block"}])
def test_types_of_edges(kind: str, sample: dict[str, Any]) -> None:
    """Fails if types, or means over the neighbours of a relation, are not those of the whole graph."""
    config = sampled(2, {"kind": "rgcn", "bases": 2}, batch=7, **sample)
    found = compare(in_parts(config, order="none", macro=2), typed_graph(kind, 4))
    assert found[0]["read"][0]["edges_fetched"] > 0


@pytest.mark.parametrize("in_batch", [False, True])
def test_links(in_batch: bool) -> None:
    """Fails if an owner draws an edge of the step's links, or around other ends."""
    graph = split_links(graph_of(), (0.8, 0.1, 0.1))
    config = sampled(2, MODELS["sage"], batch=20)
    negatives = "in-batch" if in_batch else "uniform"
    config = dataclasses.replace(config, links=dataclasses.replace(config.links, negatives_from=negatives))
    compare(in_parts(config, order="none"), graph)


def test_sparse_features_and_symmetric_edges() -> None:
    """Fails if rows of sparse features come otherwise, or one matrix for both directions is read twice."""
    graph = make_graph(pattern("random", 61, 5), num_features=7, num_classes=4, sparse=True, seed=4)
    compare(in_parts(sampled(3, MODELS["gcn"], batch=7), order="none"), graph)


@pytest.mark.parametrize("macro", [1, 2, 0])
@pytest.mark.parametrize("ahead", [0, 2])
def test_steps_in_halves(macro: int, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rank that cuts its step asks the others once more, or draws other edges."""
    planned(monkeypatch, 14, 0.3)
    compare(in_parts(sampled(3, MODELS["sage"], ahead=ahead), order="none", macro=macro), graph_of())


def test_a_seed_that_is_too_large_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step is cut without end."""
    planned(monkeypatch, 14, 0.0)
    with pytest.raises(PlanError, match=r"the neighbourhood of vertex \d+ alone is larger"):
        on_parts(in_parts(sampled(2, MODELS["gcn"]), order="none"), graph_of(), trained)


def test_a_step_that_draws_more_than_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if edges of draws without a bound are taken that no plan counts."""
    monkeypatch.setattr("mggcn.assemble.parts.edge_rooms", lambda config, shape, stack: (1000, 12))
    with pytest.raises(
        PlanError, match=r"more than the 12 edges of a hop on a rank that were planned; set sample\.plan"
    ):
        on_parts(in_parts(sampled(2, MODELS["gcn"], draw="labor"), order="none"), graph_of(), trained)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("macro", [1, 2, 0])
def test_another_step_than_the_next_one(macro: int, ahead: int) -> None:
    """Fails if a run that continues within an epoch, goes back, has another seed or leaves a loop gets other edges."""

    def body(rank: Rank) -> Any:
        feed, found = rank.feed, []
        for seed, epoch, first in [(8123, 0, 2), (8123, 1, 0), (8123, 1, 3), (8124, 2, 0), (8123, 0, 0), (8123, 0, 1)]:
            left = feed.epoch(seed, epoch, first)
            next(left)
            if epoch == 1:
                left.close()  # type: ignore[attr-defined]  # a generator
            found.append(contents(feed.epoch(seed, epoch, first)))
        return found

    config = in_parts(sampled(2, MODELS["sage"], batch=7, ahead=ahead), order="none", macro=macro)
    found = on_parts(config, graph_of(), body)
    for mine, other in zip(found, on_whole(mapped(config), graph_of(), body), strict=True):
        assert all(alike(one, two) for one, two in zip(mine, other, strict=True))


@pytest.mark.parametrize("rows", ["parts", "owners"])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("macro", [1, 2, 0])
def test_what_is_read_again_counts_once(macro: int, ahead: int, rows: str) -> None:
    """Fails if an epoch that is left, and begun again, counts the macrobatches that it had read once more."""

    def body(leaves: bool, rank: Rank) -> dict[str, int]:
        if leaves:
            left = rank.feed.epoch(8123, 1)
            for _ in range(3):
                next(left)
        for _ in rank.feed.epoch(8123, 1):
            pass
        return dict(rank.feed.counts(8123, 1))

    config = in_parts(sampled(2, MODELS["sage"], batch=7, ahead=ahead), order="none", macro=macro)
    config = dataclasses.replace(config, sample=dataclasses.replace(config.sample, rows=rows))
    once, again = (on_whole(config, graph_of(), functools.partial(body, leaves)) for leaves in (False, True))
    assert once == again
    assert once[0]["rows_remote"] > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", ["none", "random"])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(("macro", "cache"), [(1, 0), (1, 8), (3, 0), (0, 8)])
@pytest.mark.parametrize("name", ["uniform", "labor", "all neighbours"])
def test_what_is_sent_is_what_a_dry_run_counts(name: str, macro: int, cache: int, ahead: int, order: str) -> None:
    """Fails if a byte of edges, rows or announcements is sent that the dry run does not count, or the classes differ."""
    graph, ranks = make_graph(pattern("directed", 90, 3), num_features=5, num_classes=3, seed=2), 3
    sample = {"fanout": (3, 2), "batch": 9, "plan": "bound", "ahead": ahead} | DRAWS[name]
    config = with_epochs(sampled(ranks, {"kind": "gcn"}, **sample), 1)
    config = resolve(in_parts(config, order=order, macro=macro, cache_rows=cache), graph)

    def epoch(rank: Rank) -> Any:
        setup = rank.comm.bytes_sent
        rank.trainer.step(0)
        return rank.comm.bytes_sent - setup, rank.trainer.batch_counts(0)

    alone = on_whole(mapped(config), graph, epoch)
    found = (on_parts if order == "none" else on_whole)(config, graph, epoch)
    plan, partition = plan_graph(config, graph)
    owner = row_owners(partition).owner_of(slice(None))
    rows = read_rows(config, graph, plan.shape, owner, (macro,), 99)
    size = macro or rows.steps
    assert rows.drawn == plan.steps > 4
    counted = sum(sent for sent, _ in found) - sum(sent for sent, _ in alone)
    assert counted == rows.letter_bytes(size, row_bytes_of(config, 5), answer_plan(config, plan.shape)) > 0
    read = found[0][1]
    assert all(counts == read for _, counts in found)
    own = np.eye(ranks, dtype=bool)
    asked, told = rows.asked.sum((0, 2)), rows.told.sum((0, 2))
    assert (read["drawn_own"], read["drawn_remote"]) == (asked[own].sum(), asked[~own].sum())
    assert read["edges_fetched"] == told[~own].sum() > 0
    assert read["rows_own"] + read["rows_cached"] + read["rows_remote"] == rows.read.sum()
    assert (read["rows_remote"], read["rows_fetched"]) == (rows.num_fetched(1), rows.num_fetched(size))
    assert told.sum() == rows.entries.sum()


@pytest.mark.parametrize("hops", [1, 3])
@pytest.mark.parametrize("ahead", [0, 2])
def test_messages_of_a_step(hops: int, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step waits for a message that it has sent itself, costs more than one, or, without threads beside it, than
    two for each letter.
    """
    fetch, send = Waves.fetch, CountingCommunicator.all_to_all
    calls, events = threading.local(), list[tuple[str, int, int]]()

    class Noted:
        def __init__(self, inner: Any) -> None:
            self.inner, self.posted = inner, calls.number

        def wait(self) -> None:
            events.append(("wait", self.posted, calls.number))
            self.inner.wait()

    def counted(self: Waves, *steps: int) -> None:
        calls.number = getattr(calls, "number", 0) + 1
        calls.inside = True
        fetch(self, *steps)
        calls.inside = False

    def noted(self: CountingCommunicator, *arguments: Any) -> Any:
        event = send(self, *arguments)
        if not getattr(calls, "inside", False):
            return event
        events.append(("post", calls.number, calls.number))
        return Noted(event)

    monkeypatch.setattr(Waves, "fetch", counted)
    monkeypatch.setattr(CountingCommunicator, "all_to_all", noted)
    config = sampled(2, {"kind": "gcn", "hidden": (6,) * (hops - 1)}, (2,) * hops, batch=3, ahead=ahead)
    config = with_epochs(in_parts(config, order="none"), 3)
    steps = plan_graph(resolve(config, graph_of()), graph_of())[0].steps

    def body(rank: Rank) -> None:
        for epoch in range(3):
            rank.trainer.step(epoch)

    on_parts(config, graph_of(), body)
    by_step = {
        number: [(kind, posted) for kind, posted, at in events if at == number] for number in range(1, 3 * steps + 1)
    }
    stages = num_stages(hops)
    if ahead == 0:
        assert all(sum(kind == "post" for kind, _ in found) == 2 * 2 * stages for found in by_step.values())
        return
    early = lead(stages, ahead)
    assert 3 * steps > early + 4
    for number, found in by_step.items():
        if number > 1:
            assert sum(kind == "post" for kind, _ in found) <= 2  # of two ranks
            assert all(posted < number for kind, posted in found if kind == "wait")
    assert sum(kind == "post" for kind, _ in by_step[2]) == 2


@pytest.mark.parametrize(("epochs", "ahead"), [(1, 0), (1, 2), (4, 2)])
def test_evaluation_and_the_exact_gradient_read_own_rows_alone(epochs: int, ahead: int) -> None:
    """Fails if the whole graph's program, of ranks with consecutive vertices, reads an edge of another rank, or the
    step behind a run's last one, whose gradient is compared, is not drawn.
    """
    graph = graph_of()
    config = in_parts(sampled(3, MODELS["gcn"], batch=9, compare_gradient=1, ahead=ahead), order="none")
    config = with_epochs(config, epochs)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, strategy="halo"))

    def body(rank: Rank) -> Any:
        rank.trainer.step(0)
        return rank.trainer.evaluate(), rank.trainer.compare(1)

    assert repr(on_parts(config, graph, body)) == repr(on_whole(mapped(config), graph, body))


def test_a_rank_that_fails_in_a_wave_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the others wait for what is never sent, or the cause is lost."""
    answer = OwnerDraws._answer

    def fails(self: OwnerDraws, hop: int, steps: Any, *rest: Any) -> Any:
        if self.rank == 1 and steps[0].number == 9:
            raise PlanError("planted")
        return answer(self, hop, steps, *rest)

    monkeypatch.setattr(OwnerDraws, "_answer", fails)
    with pytest.raises(PlanError, match="planted"):
        on_parts(with_epochs(in_parts(sampled(3, MODELS["gcn"], batch=4), order="none"), EPOCHS), graph_of(), trained)


def arrays_of(waves: Waves) -> list[Any]:
    """The edges of steps that are ready or on their way."""
    waves.halt()  # so that no thread makes some meanwhile
    frames = [macro.letters.gi_frame for macro in waves._on_way]
    coming = [step for frame in frames if frame is not None for step in frame.f_locals.get("edges", ())]
    steps = [*waves.ready._steps.values(), *coming]
    parts = ("indptr", "indices", "degrees", "values", "types")
    return [step.ids for step in steps] + [getattr(hop, name) for step in steps for hop in step.hops for name in parts]


@pytest.mark.parametrize("late", [0, 20])
def test_memory_is_what_is_planned(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if edges that are ready or on their way take more than the plan counts, as they do if steps are forgotten too
    late, or if the plan counts much more than they take: nearly every row has its fan-out, and nearly every vertex is read.
    """
    held = list[int]()
    received, forget = Waves._received, ReadyEdges.forget

    def noted(self: Waves) -> Any:
        held.append(sum(array.nbytes for array in arrays_of(self) if array is not None))
        return received(self)

    monkeypatch.setattr(Waves, "_received", noted)
    monkeypatch.setattr(ReadyEdges, "forget", lambda self, seed, first: forget(self, seed, first - late))
    graph = make_graph(pattern("random", 200, 5), num_features=2, num_classes=3, seed=4)
    config = in_parts(sampled(2, {"kind": "gcn", "hidden": ()}, (8,), batch=1000, ahead=32, plan="bound"), order="none")
    config = resolve(with_epochs(config, 60), graph)

    def body(rank: Rank) -> None:
        for epoch in range(60):
            for _ in rank.feed.epoch(8123, epoch):
                pass

    plan, _ = plan_graph(config, graph)
    assert plan.stack is not None
    on_parts(config, graph, body)
    planned, region = steps_bytes(config, plan.shape, plan.stack), plan.ranks[0].regions["rows of other ranks"]
    assert 0.75 * planned < max(held)
    assert (max(held) <= planned) == (late == 0)
    assert planned < region
    more, _ = plan_graph(dataclasses.replace(config, sample=dataclasses.replace(config.sample, fanout=(16,))), graph)
    assert more.ranks[0].regions["rows of other ranks"] > region


def test_ranks_as_processes(tmp_path: Path) -> None:
    """Fails if edges come otherwise over gloo than they lie in the store, a history lacks the counts, or a run that is
    predicted or resumed goes another way.
    """
    graph = make_graph(pattern("random", 80, 3), num_features=6, num_classes=3, seed=5)
    write_store(graph, tmp_path / "store")
    command = ["train", tmp_path / "store", "--ranks", 2, "--batch", 7, "--fanout", "3,2", "--threads", 1]
    command += ["--set", "model.hidden=8", "--set", "model.dropout=0.3", "--quiet"]
    parts = ["--set", "sample.rows=parts"]
    code, _, err = finish(start(*command, *parts, "--transport", "gloo", "--epochs", 2, "--out", tmp_path / "parts"))
    assert code == 0, err
    assert run_main("train", "--resume", tmp_path / "parts", "--epochs", 4, "--transport", "threads", "--quiet") == 0
    assert run_main(*command, "--transport", "threads", "--epochs", 4, "--out", tmp_path / "mapped") == 0
    found, expected = (history(tmp_path / name) for name in ("parts", "mapped"))
    names = ("rows_own", "rows_cached", "rows_remote", "rows_fetched", "drawn_own", "drawn_remote", "edges_fetched")
    counts = [[row.pop(name) for name in names] for row in found]
    assert found == expected
    assert all(own > 0 < remote >= fetched > 0 < edges for own, _, remote, fetched, _, _, edges in counts)
    assert same_tensors(tmp_path / "parts", tmp_path / "mapped")
    for name in ("parts", "mapped"):
        assert run_main("predict", tmp_path / name) == 0
    scores = [np.load(tmp_path / name / "scores.npy") for name in ("parts", "mapped")]
    np.testing.assert_array_equal(*scores)
    assert run_main("report", tmp_path / "parts") == 0


def test_a_plan_says_what_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a plan does not say who holds which edges, how early waves begin, or what the dry run has counted."""
    write_store(make_graph(pattern("random", 60, 3), num_features=5, num_classes=3, seed=2), tmp_path / "store")
    command = ["plan", tmp_path / "store", "--batch", "9", "--fanout", "3,2", "--set", "model.hidden=8", "--ranks", "2"]
    for ahead, words in ((2, "edges of steps up to 19 messages ahead, one message a step"), (0, "12 messages")):
        assert run_main(*command, "--explain", "--set", "sample.rows=parts", "--set", f"sample.ahead={ahead}") == 0
        text = capsys.readouterr().out
        assert "reads the edges and features of its own vertices alone" in text
        assert words in text
        assert "edges drawn by owners:" in text
        assert "step by step:" in text
    assert run_main(*command, "--explain", "--set", "sample.rows=owners") == 0
    assert "edges drawn by owners" not in capsys.readouterr().out
