"""Rows of other ranks, fetched from their owners: the bits of rows that are read in place, bytes as counted before."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.assemble.stack import read_rows
from mggcn.blocks.macrobatch import EXCHANGES, bytes_fetched
from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config
from mggcn.errors import ConfigError, PlanError
from mggcn.feed.fetched import OwnerRows
from mggcn.feed.relays import Relays
from mggcn.feed.sampled import SampledFeed
from mggcn.feed.seeds import Step
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.links import split_links
from mggcn.graph.store_write import write_store
from mggcn.partition.rows.partition import row_owners
from mggcn.planning.batch_rows import fetch_plan, row_bytes_of
from tests.cli.runs import finish, history, run_main, same_tensors, start
from tests.feed.test_ahead import alike, contents
from tests.feed.test_blocks import MODELS, graph_of
from tests.feed.test_parts import planned
from tests.feed.test_sampled import sampled
from tests.graphs import make_graph, pattern
from tests.model.test_rgcn import typed_graph

EPOCHS = 2


def owners_of(config: Config, **more: Any) -> Config:
    return dataclasses.replace(config, sample=dataclasses.replace(config.sample, rows="owners", **more))


def with_epochs(config: Config, epochs: int) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=epochs))


def on_apart(config: Config, graph: Graph, body: Any, *, clean: bool = False) -> list[Any]:
    """What a function gives on ranks of which each has the features of its own vertices alone, the others' being NaN."""
    config = resolve(config, graph)
    plan, partition = plan_graph(config, graph)

    def run(comm: Communicator) -> Any:
        far = row_owners(partition).owner_of(slice(None)) != comm.rank
        mine = graph
        if not clean:
            own = graph.features.array().copy()  # type: ignore[union-attr]  # it has dense ones
            own[far] = np.nan
            mine = dataclasses.replace(graph, features=ArrayRows(own))
        return body(make_rank(config, mine, plan, partition, comm))

    return run_threads(config.run.ranks, run, 60)


def trained(rank: Rank) -> dict[str, Any]:
    """Losses, weights, what was sent, and what was read of two epochs."""
    trainer, setup = rank.trainer, rank.comm.bytes_sent
    losses, read = [], []
    for epoch in range(EPOCHS):
        losses.append(trainer.step(epoch))
        read.append(trainer.batch_counts(epoch))
    weights = {name: w.clone() for name, w in trainer.runtime.weights.state_dict().items()}
    return {"losses": losses, "weights": weights, "read": read, "setup": setup, "sent": rank.comm.bytes_sent - setup}


def same(found: list[Any], expected: list[Any]) -> bool:
    pairs = list(zip(found, expected, strict=True))
    return all(a["losses"] == b["losses"] for a, b in pairs) and all(
        bool((a["weights"][name] == w).all()) for a, b in pairs for name, w in b["weights"].items()
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("macro", [0, 1, 4])
@pytest.mark.parametrize("cache", [0, 9, 1000])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_bits_are_those_of_rows_in_place(
    name: str, precision: Any, ahead: int, cache: int, macro: int, ranks: int
) -> None:
    """Fails if a row that another rank owns is read from this rank's store, is another one's, late, or rounded twice."""
    config = sampled(ranks, MODELS[name] | {"dropout": 0.3}, batch=7, ahead=ahead)
    config = with_epochs(dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision)), EPOCHS)
    graph = graph_of()
    found = on_apart(owners_of(config, macro=macro, cache_rows=cache), graph, trained)
    assert same(found, on_apart(config, graph, trained, clean=True))
    assert all(np.isfinite(one["losses"]).all() for one in found)


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("macro", "cache"), [(1, 0), (1, 8), (3, 0), (0, 8), (0, 0)])
def test_what_is_fetched_is_what_a_dry_run_counts(macro: int, cache: int, ranks: int) -> None:
    """Fails if a row or a byte is sent that eq. 2 or 3 on the drawn sets does not have, one is not, or classes differ."""
    graph = make_graph(pattern("directed", 90, 3), num_features=5, num_classes=3, seed=2)
    config = with_epochs(sampled(ranks, MODELS["sage"], (3, 2), batch=9, plan="bound", ahead=2), EPOCHS)
    alone = on_apart(config, graph, trained, clean=True)
    config = resolve(owners_of(config, macro=macro, cache_rows=cache), graph)
    found = on_apart(config, graph, trained)
    plan, partition = plan_graph(config, graph)
    owner, row = row_owners(partition).owner_of(slice(None)), row_bytes_of(config, 5)
    rows = read_rows(config, graph, plan.shape, owner, (macro,), 99)
    size = macro or rows.steps
    assert rows.drawn == rows.steps == plan.steps > 4
    read = found[0]["read"][0]
    assert all(one["read"] == found[0]["read"] for one in found)
    assert read["rows_own"] + read["rows_cached"] + read["rows_remote"] == rows.read.sum()
    assert (read["rows_remote"], read["rows_fetched"]) == (rows.num_fetched(1), rows.num_fetched(size))
    assert (read["rows_cached"] > 0) is (cache > 0)
    assert 0 < rows.num_fetched(rows.steps if macro == 0 else size)
    assert rows.num_fetched(size) <= rows.num_fetched(1)
    if macro == 0:
        assert rows.num_fetched(size) <= rows.bound
    counted = sum(one["sent"] for one in found) - sum(one["sent"] for one in alone)
    fetched = sum(read["rows_fetched"] for read in found[0]["read"])
    assert counted == bytes_fetched(EPOCHS * len(rows.fetched[size]), fetched, row, ranks)
    assert counted - rows.bytes_sent(size, row) == bytes_fetched(
        len(rows.fetched[size]), found[0]["read"][1]["rows_fetched"], row, ranks
    )
    kept = ranks * cache
    assert sum(one["setup"] for one in found) - sum(one["setup"] for one in alone) == bytes_fetched(1, kept, row, ranks)


@pytest.mark.parametrize("macro", [1, 2, 0])
def test_steps_in_halves(macro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what a rank's half reads was not fetched, or ranks with other numbers of halves wait for each other."""
    config = with_epochs(sampled(3, MODELS["sage"]), EPOCHS)
    planned(monkeypatch, 14, 0.3)
    found = on_apart(owners_of(config, macro=macro), graph_of(), trained)
    assert same(found, on_apart(config, graph_of(), trained, clean=True))


def test_a_seed_that_is_too_large_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if finding what is to be fetched cuts a step without end, or says something else than the feed."""
    planned(monkeypatch, 14, 0.0)
    with pytest.raises(PlanError, match=r"the neighbourhood of vertex \d+ alone is larger"):
        on_apart(owners_of(sampled(2, MODELS["gcn"])), graph_of(), trained)


@pytest.mark.parametrize("macro", [1, 2, 0])
def test_another_step_than_the_next_one(macro: int) -> None:
    """Fails if a run that continues within an epoch, goes back, has another seed or leaves a loop gets rows of what was
    fetched for other steps.
    """

    def body(rank: Rank) -> Any:
        feed, found = rank.feed, []
        for seed, epoch, first in [(8123, 0, 2), (8123, 1, 0), (8123, 1, 3), (8124, 2, 0), (8123, 0, 0), (8123, 0, 1)]:
            left = feed.epoch(seed, epoch, first)
            next(left)
            if epoch == 1:
                left.close()  # type: ignore[attr-defined]  # a generator
            found.append(contents(feed.epoch(seed, epoch, first)))
        return found

    config = sampled(2, MODELS["sage"], batch=7, ahead=2)
    found = on_apart(owners_of(config, macro=macro), graph_of(), body)
    for mine, other in zip(found, on_apart(config, graph_of(), body, clean=True), strict=True):
        assert all(alike(one, two) for one, two in zip(mine, other, strict=True))


@pytest.mark.parametrize("macro", [1, 2])
def test_messages_are_under_way_during_steps(macro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step waits for a message that it has sent itself, but for the first ones."""
    fetch, send = Relays.fetch, CountingCommunicator.all_to_all
    calls, waits = threading.local(), list[tuple[int, int]]()

    class Noted:
        def __init__(self, inner: Any) -> None:
            self.inner, self.posted = inner, calls.number

        def wait(self) -> None:
            waits.append((self.posted, calls.number))
            self.inner.wait()

    def counted(self: Relays, *steps: int) -> None:
        calls.number = getattr(calls, "number", 0) + 1
        fetch(self, *steps)

    def noted(self: CountingCommunicator, *arguments: Any) -> Any:
        event = send(self, *arguments)
        return Noted(event) if getattr(calls, "number", 0) else event

    monkeypatch.setattr(Relays, "fetch", counted)
    monkeypatch.setattr(CountingCommunicator, "all_to_all", noted)
    config = with_epochs(sampled(2, MODELS["sage"], batch=7, ahead=2), EPOCHS)
    on_apart(owners_of(config, macro=macro), graph_of(), trained)
    later = [(posted, waited) for posted, waited in waits if waited > EXCHANGES]
    assert 3 * len(later) >= len(waits) > 0
    assert all(posted < waited for posted, waited in later)


KINDS: dict[str, Any] = {
    "sparse": (
        lambda: make_graph(pattern("directed", 61, 5), num_features=7, num_classes=4, sparse=True, seed=4),
        {},
        {},
    ),
    "relations": (lambda: typed_graph("random", 4), {"kind": "rgcn", "bases": 2}, {"by_type": True}),
    "weights": (
        lambda: make_graph(pattern("weighted", 61, 5), num_features=7, num_classes=4, weighted=True, seed=4),
        {},
        {"draw": "weight", "deal": "ranges"},
    ),
    "labor": (graph_of, {}, {"draw": "labor"}),
    "links": (lambda: split_links(graph_of(), (0.8, 0.1, 0.1)), {}, {"batch": 20}),
}


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_graphs(name: str) -> None:
    """Fails if a kind of graph, features or draws finds other rows to fetch than its batches read."""
    make, model, sample = KINDS[name]
    graph = make()
    config = with_epochs(sampled(2, {"kind": "gcn"} | model, **({"batch": 7} | sample)), EPOCHS)
    found = on_apart(owners_of(config, macro=2, cache_rows=5), graph, trained, clean=True)
    assert same(found, on_apart(config, graph, trained, clean=True))


def test_memory_is_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if more rows are held than the plan counts, or a plan of more counts less."""
    graph, sizes, init = graph_of(), list[tuple[int, int]](), OwnerRows.__init__

    def noted(self: OwnerRows, *arguments: Any) -> None:
        init(self, *arguments)
        sizes.append((self._rows.nbytes + self._place.nbytes + self.whose.nbytes, self.plan.nbytes))

    monkeypatch.setattr(OwnerRows, "__init__", noted)
    config = resolve(sampled(2, MODELS["gcn"], batch=7, ahead=2), graph)
    on_apart(owners_of(config, cache_rows=6, macro=2), graph, lambda rank: None)
    assert len(sizes) == 2
    assert all(0 < held <= counted for held, counted in sizes)
    shape = plan_graph(config, graph)[0].shape
    one, more, every = (
        fetch_plan(owners_of(config, macro=m, cache_rows=c), shape, 20) for m, c in [(1, 0), (4, 0), (1, 99)]
    )
    assert one.rows <= more.rows <= 61 - 20
    assert (every.cached, every.rows) == (41, 0)


def test_ranks_as_processes(tmp_path: Path) -> None:
    """Fails if rows come otherwise over gloo than they lie in the store, a history lacks the counts, or a run that is
    predicted or resumed goes another way.
    """
    graph = make_graph(pattern("random", 80, 3), num_features=6, num_classes=3, seed=5)
    write_store(graph, tmp_path / "store")
    command = ["train", tmp_path / "store", "--ranks", 2, "--batch", 7, "--fanout", "3,2", "--threads", 1]
    command += ["--set", "model.hidden=8", "--set", "model.dropout=0.3", "--quiet"]
    owners = ["--set", "sample.rows=owners", "--set", "sample.macro=2", "--set", "sample.cache_rows=5"]
    code, _, err = finish(start(*command, *owners, "--transport", "gloo", "--epochs", 2, "--out", tmp_path / "owners"))
    assert code == 0, err
    assert run_main("train", "--resume", tmp_path / "owners", "--epochs", 4, "--transport", "threads", "--quiet") == 0
    assert run_main(*command, "--transport", "threads", "--epochs", 4, "--out", tmp_path / "mapped") == 0
    found, expected = (history(tmp_path / name) for name in ("owners", "mapped"))
    counts = [[row.pop(f"rows_{name}") for name in ("own", "cached", "remote", "fetched")] for row in found]
    assert found == expected
    assert all(0 < fetched <= remote and own > 0 < cached for own, cached, remote, fetched in counts)
    assert same_tensors(tmp_path / "owners", tmp_path / "mapped")
    for name in ("owners", "mapped"):
        assert run_main("predict", tmp_path / name) == 0
    scores = [np.load(tmp_path / name / "scores.npy") for name in ("owners", "mapped")]
    np.testing.assert_array_equal(*scores)
    assert run_main("report", tmp_path / "owners") == 0


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "leave sample.macro out": ({"rows": "mapped", "macro": 2}, {}, {}),
    "leave sample.cache_rows out": ({"rows": "mapped", "cache_rows": 2}, {}, {}),
    "run.batches is cooperative": ({}, {"batches": "cooperative"}, {}),
    "run.batches is auto": ({}, {"batches": "auto"}, {}),
    "choose mapped": ({"first": "full"}, {}, {}),
    "choose whole": ({}, {}, {"evaluate": "blocks"}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_together_is_refused(words: str) -> None:
    """Fails if a setting that would be ignored, or cannot be, is taken."""
    sample, run, train = REFUSED[words]
    config = sampled(2, MODELS["gcn"])
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(
            config,
            sample=dataclasses.replace(config.sample, **({"rows": "owners"} | sample)),
            run=dataclasses.replace(config.run, **run),
            train=dataclasses.replace(config.train, **train),
        )


def test_one_rank_owns_all() -> None:
    """Fails if a single rank asks anybody."""
    config = with_epochs(sampled(1, MODELS["gcn"]), EPOCHS)
    (found,), (expected,) = (
        on_apart(of, graph_of(), trained, clean=True) for of in (owners_of(config, macro=0, cache_rows=4), config)
    )
    assert same([found], [expected])
    assert found["read"] == list(itertools.repeat({}, EPOCHS))


def test_without_batches_there_is_nothing_to_fetch() -> None:
    """Fails if the setting is taken where no row is read for a batch."""
    config = sampled(2, MODELS["gcn"], batch=0, fanout=())
    with pytest.raises(ConfigError, match=r"set sample\.batch"):
        resolve(owners_of(config), graph_of())


def test_ranges_have_one_array_of_owners() -> None:
    """Fails if what deals seeds, asks owners and finds what to ask for each have an array of all vertices of their own."""
    config = owners_of(sampled(2, MODELS["gcn"]))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, order="none"))

    def body(rank: Rank) -> None:
        feed = rank.feed
        assert isinstance(feed, SampledFeed)
        assert feed._relays is not None
        arrays = feed._seeds.all.owner, feed._relays._seeds.all.owner, feed._relays.rows._owner
        assert len({id(array) for array in arrays}) == 1
        assert rank.plan.regions["who holds which rows"] == 2 * graph_of().num_vertices

    on_apart(config, graph_of(), body, clean=True)
    (alone,) = on_apart(sampled(1, MODELS["gcn"]), graph_of(), lambda rank: rank.feed, clean=True)
    assert alone._seeds.all.owner is None


def test_a_thread_that_draws_an_epoch_ahead_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a feed that is stopped waits for all batches of the next macrobatch, or then gives other ones."""
    inputs, began, drawn = Relays._inputs, dict[Relays, threading.Event](), dict[Relays, int]()

    def noted(self: Relays, step: Step, seeds: Any) -> Any:
        if threading.current_thread().name.startswith("mggcn-relays"):
            drawn[self] = drawn.get(self, 0) + 1
            if not began[self].is_set():
                began[self].set()
                assert self._halted.wait(60)
        return inputs(self, step, seeds)

    def body(rank: Rank) -> Any:
        feed = rank.feed
        assert isinstance(feed, SampledFeed)
        assert feed._relays is not None
        began[feed._relays] = threading.Event()
        first = feed.epoch(8123, 0)
        next(first)
        assert began[feed._relays].wait(60)
        feed.halt()
        assert drawn[feed._relays] == 1 < feed.num_steps
        first.close()
        return [contents(feed.epoch(8123, epoch)) for epoch in range(EPOCHS)]

    def mapped(rank: Rank) -> Any:
        return [contents(rank.feed.epoch(8123, epoch)) for epoch in range(EPOCHS)]

    config = with_epochs(sampled(2, MODELS["sage"], batch=5, ahead=1), EPOCHS)
    with monkeypatch.context() as patch:
        patch.setattr(Relays, "_inputs", noted)
        found = on_apart(owners_of(config, macro=0), graph_of(), body)
    for mine, other in zip(found, on_apart(config, graph_of(), mapped, clean=True), strict=True):
        assert all(alike(one, two) for one, two in zip(mine, other, strict=True))
