"""Rows of other ranks from a cache: Algorithm 2 of DistGNN-MB, what is sent and when, and what survives an interruption."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.aggregate.history_block import HistoryBlock
from mggcn.assemble.plan import partition_graph, plan_graph, resolve
from mggcn.assemble.rank import Rank
from mggcn.blocks.block import Stack
from mggcn.config import Config, DataConfig, ModelConfig, SampleConfig
from mggcn.cost.machine import find_machine
from mggcn.errors import ConfigError, PlanError
from mggcn.feed.batch import Batch, Feed
from mggcn.feed.history import RemoteRows
from mggcn.feed.sampled import SampledFeed
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.generate import community
from mggcn.graph.store_write import write_store
from mggcn.partition.rows.partition import row_owners
from mggcn.planning.opening import opening_lines
from mggcn.planning.record import to_dict
from mggcn.planning.text import render
from mggcn.runs.regroup import with_ranks
from mggcn.train.engine import Stop
from mggcn.train.log import RunLog
from tests.aggregate.algorithm2 import Algorithm2
from tests.cli.runs import finish, run_main, same_tensors, start
from tests.cli.runs import history as lines
from tests.feed.test_blocks import config_of, graph_of
from tests.graphs import make_graph, on_ranks, pattern
from tests.train.test_trainer import fit

ALL = -1
EPOCHS = 3
MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"kind": "gcn", "self_loops": True},
    "sage": {"kind": "sage", "aggregator": "mean"},
    "gin": {"kind": "gin"},
}


def history(ranks: int, model: dict[str, Any], products: str = "auto", **sample: Any) -> Config:
    config = config_of(ranks, model, optimizer="sgd", lr=0.2)
    run = dataclasses.replace(config.run, products=products)  # type: ignore[arg-type]  # any text
    train = dataclasses.replace(config.train, epochs=EPOCHS)
    settings: dict[str, Any] = {"batch": 14, "fanout": (3, 2), "halo": "history", "ahead": 0} | sample
    return dataclasses.replace(config, run=run, train=train, sample=SampleConfig(**settings))


def blocks_of(rank: Rank) -> list[HistoryBlock]:
    blocks = rank.trainer.runtime.programs["train"].aggregations.values()
    return [block for block in blocks if isinstance(block, HistoryBlock)]


def trained(config: Config, graph: Graph, begin: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Of each rank: weights of the start and the end, losses, hits, what its caches hold, and the batches of all steps.

    begin: makes the weights to start with of the usual ones.
    """

    def body(rank: Rank) -> dict[str, Any]:
        trainer, epochs = rank.trainer, range(config.train.epochs)
        if begin is not None:
            weights = trainer.runtime.weights.state_dict()
            trainer.runtime.weights.load_state_dict({name: begin(w) for name, w in weights.items()})
        start = trainer.runtime.weights.state_dict()
        losses = [trainer.step(epoch) for epoch in epochs]
        hits = [[block.found(epoch) for block in blocks_of(rank)] for epoch in epochs]
        held = [
            (block.ring.number_of.copy(), block.lines.numpy().copy(), block.ring.arrived.copy())
            for block in blocks_of(rank)
        ]
        layers = {layer.layer: layer.products for layer in rank.plan.values.layers}
        batches = [batch.copy() for epoch in epochs for batch in rank.feed.epoch(config.train.seed, epoch)]
        end = trainer.runtime.weights.state_dict()
        found = {"start": start, "end": end, "losses": losses, "hits": hits, "held": held, "batches": batches}
        return found | {"layers": layers, "stack": rank.feed.stack, "steps": rank.feed.num_steps}

    return on_ranks(config, graph, body)


def simulated(config: Config, graph: Graph, found: list[dict[str, Any]]) -> Algorithm2:
    owner = row_owners(partition_graph(resolve(config, graph), graph)).owner_of(slice(None))
    first = found[0]
    batches = [rank["batches"] for rank in found]
    return Algorithm2(graph, config, owner, first["stack"], batches, first["start"], first["layers"], first["steps"])


SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"history_ends": "paper"},
    "paper, late": {"history_ends": "paper", "history_delay": 2, "history_life": 0},
    "few lines": {"history_lines": 5, "history_life": 4},
    "few rows": {"history_rows": 3, "history_missing": "zero"},
    "few of both, late": {"history_lines": 7, "history_rows": 2, "history_delay": 3, "history_life": 50},
    "at once": {"history_delay": 0, "history_rows": 4},
}


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("products", ["gemm-first", "aggregate-first"])
def test_steps_are_algorithm_2(products: str, name: str, settings: str, ranks: int) -> None:
    """Fails if a hit, a row of a cache, a loss or a weight differs from an independent run of Algorithm 2."""
    graph, config = graph_of(), history(ranks, MODELS[name], products, **SETTINGS[settings])
    found = trained(config, graph)
    expected = simulated(config, graph, found)
    losses = np.array(expected.run()).reshape(EPOCHS, -1)
    assert found[0]["losses"] == pytest.approx(losses.mean(1).tolist(), rel=1e-12)
    hits = np.sum([rank["hits"] for rank in found], 0)
    assert hits.tolist() == [expected.hits[epoch].tolist() for epoch in range(EPOCHS)]
    assert 0 < hits[:, :, 0].sum() < hits[:, :, 1].sum()
    for weight, end in found[0]["end"].items():
        np.testing.assert_allclose(end.numpy(), expected.p[weight].numpy(), rtol=1e-9, atol=1e-12, err_msg=weight)
    for q, rank in enumerate(found):
        halo = np.concatenate(expected.reads[q])
        for cache, (numbers, rows, arrived) in zip(expected.caches[q], rank["held"], strict=True):
            assert [None if line is None else line[0] for line in cache.lines] == [
                None if number < 0 else int(halo[number]) for number in numbers
            ]
            for place, line in enumerate(cache.lines):
                if line is not None:
                    assert arrived[place] == line[2]
                    np.testing.assert_allclose(rows[place], line[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("products", ["gemm-first", "aggregate-first"])
def test_rows_are_those_of_algorithm_2_bit_for_bit(products: str, settings: str, ranks: int) -> None:
    """Fails if a row of a cache differs in a bit: numbers are such that no sum or product rounds, in whatever order, and
    steps are so small that no weight moves.
    """
    graph = graph_of()
    features = np.round(graph.features.read(0, graph.num_vertices)).astype(graph.features.dtype)
    graph = dataclasses.replace(graph, features=ArrayRows(features))
    # Sums of the rows that are there, which are not divided by their share.
    config = history(ranks, MODELS["gin"], products, **SETTINGS[settings] | {"history_missing": "zero"})
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, lr=1e-300))
    found = trained(config, graph, lambda w: (2 * torch.round(4 * w) + 1) / 8)
    expected = simulated(config, graph, found)
    losses = np.array(expected.run()).reshape(EPOCHS, -1)
    assert found[0]["losses"] == pytest.approx(losses.mean(1).tolist(), rel=1e-15)
    assert all(torch.equal(end, found[0]["start"][name]) for name, end in found[0]["end"].items())
    compared = 0
    for q, rank in enumerate(found):
        for cache, (_, rows, _) in zip(expected.caches[q], rank["held"], strict=True):
            for place, line in enumerate(cache.lines):
                if line is not None:
                    assert rows[place].tobytes() == line[1].tobytes()
                    compared += np.count_nonzero(line[1])
    assert compared > 50


def test_a_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself fails if rows of other ranks keep what this one computes of them, or have a gradient."""
    graph, config = graph_of(), history(2, MODELS["sage"])

    def no_fill(self: HistoryBlock, h: torch.Tensor) -> None:
        kept = h.clone()
        fill(self, h)
        h.copy_(kept)

    fill = HistoryBlock._fill
    for name, fault in (("_fill", no_fill), ("backward", lambda self, *args: self.edges.backward(*args))):
        with monkeypatch.context() as patch:
            patch.setattr(HistoryBlock, name, fault)
            found = trained(config, graph)
            losses = np.array(simulated(config, graph, found).run()).reshape(EPOCHS, -1).mean(1)
            assert found[0]["losses"] != pytest.approx(losses.tolist(), rel=1e-9)


def everyone_trains() -> Graph:
    graph = make_graph(pattern("directed", 61, 5), num_features=7, num_classes=4, seed=4)
    labels = ArrayRows(np.random.default_rng(3).integers(0, 4, graph.num_vertices))
    return dataclasses.replace(graph, labels=labels, splits={"train": ArrayRows(np.ones((1, 61), bool))})


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_the_same_step_are_exact(name: str, ranks: int) -> None:
    """Fails if rows that come at once, of all vertices, are not those that a rank would compute itself."""
    graph, losses = everyone_trains(), {}
    for halo in ("exact", "history"):
        sample: dict[str, Any] = {"batch": 61, "fanout": (ALL, ALL), "halo": halo}
        if halo == "history":
            sample |= {"history_delay": 0, "history_lines": 1000, "history_rows": 1000}
        config = history(ranks, MODELS[name], **sample)

        def body(rank: Rank) -> tuple[float, list[tuple[int, int]]]:
            loss = rank.trainer.gradients(0)
            return loss, [block.found(0) for block in blocks_of(rank)]

        found = on_ranks(config, graph, body)
        losses[halo] = found[0][0]
        assert all(hits == count > 0 for rank in found for hits, count in rank[1])
    assert losses["history"] == pytest.approx(losses["exact"], rel=1e-12)


def test_hit_rates_are_in_the_history_and_fall_with_depth(tmp_path: Path) -> None:
    """Fails if the history lacks a layer's hit rate, or layers of fewer rows find as many."""
    graph = community(3000, 30_000, 16, 8, seed=7, homophily=0.9, train=0.5)
    model = {"kind": "sage", "aggregator": "mean", "hidden": (16, 16)}
    config = history(4, model, "aggregate-first", batch=256, fanout=(15, 10, 5))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, precision="fp32"))
    (tmp_path / "run").mkdir()
    *_, rows, _ = fit(config, graph, tmp_path / "run")
    assert len(rows) == EPOCHS
    for row in rows:
        first, second, third = row["hit_rates"]
        assert 1 > first > second > third > 0


@pytest.mark.parametrize("settings", ["paper, late", "few of both, late"])
def test_resuming_with_messages_in_flight(settings: str, tmp_path: Path) -> None:
    """Fails if an interrupted run, continued, differs in one bit: a message or line is lost, taken twice or older."""
    graph = graph_of()
    config = history(3, MODELS["sage"] | {"dropout": 0.3}, **SETTINGS[settings])
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=5, repeat=2, optimizer="adam"))
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    whole = fit(config, graph, folders[0])
    for stop_after in (1, 2, 4):
        assert not fit(config, graph, folders[1], stop_after)[0]
    done, weights, rows, summary = fit(config, graph, folders[1])
    assert (done, rows, summary) == (True, whole[2], whole[3])
    assert all(torch.equal(weights[name], w) for name, w in whole[1].items())


@dataclass
class Stopping:
    """A feed that sets the flag of a signal as it gives the batch of a step."""

    inner: Feed
    at: tuple[int, int]
    stop: Stop

    @property
    def stack(self) -> Stack | None:
        return self.inner.stack

    @property
    def num_steps(self) -> int:
        return self.inner.num_steps

    def epoch(self, seed: int, number: int, first: int = 0) -> Iterator[Batch]:
        for step, batch in enumerate(self.inner.epoch(seed, number, first), start=first):
            if (number, step) == self.at:
                self.stop.signal = 15
            yield batch

    def counts(self, seed: int, number: int) -> Mapping[str, int]:
        return self.inner.counts(seed, number)

    def halt(self) -> None:
        self.inner.halt()


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_goes_on_within_an_epoch(step: int, tmp_path: Path) -> None:
    """Fails if a run that stops within an epoch loses what it has counted of it, or a message on its way."""
    graph = graph_of()
    config = history(3, MODELS["gin"], history_delay=2, history_lines=9)

    def run(folder: Path, at: tuple[int, int]) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        folder.mkdir(exist_ok=True)

        def body(rank: Rank) -> dict[str, torch.Tensor]:
            trainer = rank.trainer
            trainer._epoch._feed = Stopping(rank.feed, at, trainer._stop)
            assert trainer.fit(RunLog(folder if trainer.rank == 0 else None, True, EPOCHS), folder) == (at[0] < 0)
            return trainer.runtime.weights.state_dict()

        weights = on_ranks(config, graph, body)[0]
        rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows], weights

    whole = run(tmp_path / "whole", (-1, 0))
    run(tmp_path / "parts", (1, step))
    rest = run(tmp_path / "parts", (-1, 0))
    assert rest[0] == whole[0]
    assert all(torch.equal(weight, whole[1][name]) for name, weight in rest[1].items())


def test_a_checkpoint_takes_no_copy_of_a_cache() -> None:
    """Fails if what a block keeps is copied before it is written: a cache may be as large as the features of its halo."""

    def body(rank: Rank) -> None:
        rank.trainer.step(0)
        for number, block in enumerate(blocks_of(rank)):
            found = {name.rpartition(".")[2]: tensor for name, tensor in block.state().items()}
            assert found["lines"].data_ptr() == block.lines.data_ptr()
            assert found["number_of"].data_ptr() == block.ring.number_of.ctypes.data
            assert all(tensor.is_contiguous() for tensor in found.values())
            assert block.lines.shape[1] < block.lines.stride(0) or number  # columns of the first layer are padded

    on_ranks(history(2, MODELS["sage"]), graph_of(), body)


def test_ranges_have_one_array_of_owners() -> None:
    """Fails if what finds rows of other ranks has an array of all vertices beside that by which seeds are dealt."""
    config = history(2, MODELS["sage"])
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, order="none"))

    def body(rank: Rank) -> None:
        feed = rank.feed
        assert isinstance(feed, SampledFeed)
        assert feed._remote is not None
        assert feed._remote._owner is feed._seeds.all.owner
        assert rank.plan.regions["who holds which rows"] == 2 * graph_of().num_vertices

    on_ranks(config, graph_of(), body)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("kind", ["directed", "random"])
def test_a_step_sends_what_is_planned(kind: str, delay: int) -> None:
    """Fails if a step sends a byte or a message that its plan does not know."""
    graph = make_graph(pattern(kind, 61, 5), num_features=7, num_classes=4, seed=4)
    config = history(3, MODELS["gcn"], history_delay=delay, history_rows=5)

    def body(rank: Rank) -> None:
        program, steps = rank.plan.train, rank.feed.num_steps
        for epoch in range(2):
            rank.comm.bytes_sent = rank.comm.messages = 0
            rank.trainer.step(epoch)
            assert rank.comm.bytes_sent == steps * rank.plan.bytes_sent(program)
            assert rank.comm.messages == steps * rank.plan.messages(program)

    on_ranks(config, graph, body)


def test_evaluation_is_exact_and_one_rank_has_no_cache() -> None:
    """Fails if an evaluation reads the cache, or one rank, of which all vertices are, leaves rows out."""
    graph, scores = graph_of(), {}
    for halo, ranks in (("exact", 3), ("history", 3), ("exact", 1), ("history", 1)):
        config = history(ranks, MODELS["gcn"], halo=halo)

        def body(rank: Rank) -> Any:
            loss = rank.trainer.step(0)
            rank.trainer.runtime.weights.initialize(3)
            rank.trainer.evaluate()
            return loss, rank.trainer.runtime.inputs.owned.ids.numpy().copy(), rank.trainer.logits().numpy().copy()

        whole = np.zeros((graph.num_vertices, 4))
        found = on_ranks(config, graph, body)
        for _, ids, logits in found:
            whole[ids] = logits
        scores[halo, ranks] = found[0][0], whole
    assert np.array_equal(scores["exact", 3][1], scores["history", 3][1])
    assert scores["exact", 3][0] != scores["history", 3][0]
    assert scores["exact", 1][0] == scores["history", 1][0]


def test_pushed_rows_are_drawn_by_degree() -> None:
    """Fails if a vertex of many in-edges is not pushed more often, or one is pushed twice."""
    ids, most = np.arange(40), 10
    degrees = np.where(ids < 20, 1, 9)
    remote = object.__new__(RemoteRows)
    remote._indptr = np.concatenate([[0], np.cumsum(degrees)])
    step = dataclasses.make_dataclass("Step", ["seed", "number"])
    times = np.zeros(40)
    for number in range(2000):
        chosen = remote._chosen(ids, step(8123, number), 1, most)
        assert np.unique(chosen).size == most
        times[chosen] += 1
    assert times[:20].max() < times[20:].min()
    # Of all, those of 9 in-edges come first with the chance 9 / 10.
    assert 0.4 < times[20:].sum() / times.sum() < 1


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "run.batches": ({}, {}, {"batches": "cooperative"}),
    "data.inputs learned": ({}, {}, {}),
    "sample.rows owners": ({}, {"rows": "owners"}, {}),
    "sample.first full": ({}, {"first": "full", "fanout": (3, 2)}, {}),
    "sample.weights block": ({}, {"weights": "block"}, {}),
    "sample.compare_gradient": ({}, {"compare_gradient": 2}, {}),
    "model.norm_layer batch": ({"norm_layer": "batch"}, {}, {}),
    "model.aggregator max": ({"kind": "sage", "aggregator": "max"}, {}, {}),
    "model.kind gat": ({"kind": "gat"}, {}, {}),
    "model.kind rgcn": ({"kind": "rgcn"}, {}, {}),
    "run.device": ({}, {}, {"device": "cuda"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_with_a_cache_is_refused(what: str) -> None:
    """Fails if a setting that would give other results, or none, is taken."""
    model, sample, run = REFUSED[what]
    changed: dict[str, Any] = {"hidden": (8,), "self_loops": False} | model
    plain = history(2, {"kind": "gcn", "hidden": (8,)})
    with pytest.raises(ConfigError, match=f"sample.halo history does not go with {what}"):
        dataclasses.replace(
            plain,
            model=ModelConfig(**changed),
            sample=dataclasses.replace(plain.sample, **sample),
            run=dataclasses.replace(plain.run, **run, transport="auto"),
            data=DataConfig(inputs="learned:4" if what == "data.inputs learned" else "stored"),
        )


def test_settings_of_a_cache_need_one() -> None:
    """Fails if settings that nothing reads are taken, or a run continues with rows that no rank has."""
    with pytest.raises(ConfigError, match=r"sample.history_life belongs to sample.halo history, got exact"):
        SampleConfig(batch=4, fanout=(2,), history_life=3)
    whole = Config(sample=SampleConfig(halo="history"))
    with pytest.raises(ConfigError, match=r"sample.halo is history, and without sample.batch"):
        resolve(whole, graph_of())
    with pytest.raises(ConfigError, match=r"sample.plan run may cut a step"):
        history(2, MODELS["gcn"], plan="run")
    alone = history(1, MODELS["gcn"], plan="run")  # without others' rows a half is a batch as any other
    assert not alone.plans_bounds
    assert history(2, MODELS["gcn"]).plans_bounds
    with pytest.raises(ConfigError, match="cannot continue on 3"):
        with_ranks(history(2, MODELS["gcn"]), 3)
    with pytest.raises(ConfigError, match="the run of 1 cannot continue on 2"):
        with_ranks(history(1, MODELS["gcn"]), 2)


def test_the_plan_says_what_is_approximate() -> None:
    """Fails if a plan with a cache does not say so, or one without says it has one."""
    graph = graph_of()
    for halo in ("exact", "history"):
        plan, _ = plan_graph(resolve(history(2, MODELS["gcn"], halo=halo), graph), graph)
        assert ("APPROXIMATE" in render(plan)) == (halo == "history")
        assert to_dict(plan)["exact"] is (halo == "exact")


@pytest.mark.parametrize("ends", ["keep", "paper"])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_cache_that_no_step_reads_is_said(more: int, ends: str) -> None:
    """Fails if a run whose epochs are too short for a cache does not say so, or one that finds rows in it does."""
    graph = graph_of()
    steps = plan_graph(resolve(history(2, MODELS["gcn"]), graph), graph)[0].steps
    assert steps > 1
    config = history(2, MODELS["gcn"], history_ends=ends, history_delay=steps + more, history_life=9)
    plan, _ = plan_graph(resolve(config, graph), graph)
    found = np.sum([rank["hits"] for rank in trained(config, graph)], 0)[..., 0].sum()
    opening = "\n".join(opening_lines(plan, find_machine("assumed-cpu"), 1 << 40))
    for text in (render(plan), opening):
        assert ("LEFT OUT" in text) == (found == 0) == (ends == "paper" and more >= 0)
        assert "APPROXIMATE" in text
    why = (
        f"of an epoch's steps the first {steps + more} read no cache, and an epoch has {steps}; set sample.history_ends"
    )
    assert (why in opening) == (found == 0)
    unknown = dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, num_training=None))
    assert "LEFT OUT" not in render(unknown)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"last": False}, "a step came in parts, of which other ranks know nothing"),
        ({"halo": {}}, "needs the rows of other ranks, and the feed gave none"),
    ],
)
def test_batches_that_do_not_fit_a_cache_are_refused(change: dict[str, Any], words: str) -> None:
    """Fails if a part of a step sends a message that no other rank expects, or the last batch's rows are read again."""

    def body(rank: Rank) -> None:
        trainer = rank.trainer
        trainer.step(0)
        batch = next(iter(rank.feed.epoch(trainer._seed, 1)))
        trainer._epoch._load(dataclasses.replace(batch, **change))

    with pytest.raises(PlanError, match=words):
        on_ranks(history(2, MODELS["gcn"]), graph_of(), body)


@pytest.mark.parametrize(("precision", "rounding"), [("mixed", 1e-2), ("bf16", 3e-2)])
def test_narrow_rows(precision: Any, rounding: float, tmp_path: Path) -> None:
    """Fails if rows of 16 bits lie elsewhere in a message or a line than their numbers say, or a checkpoint loses some."""
    graph, losses = everyone_trains(), {}
    for halo in ("exact", "history"):
        sample: dict[str, Any] = {"batch": 61, "fanout": (ALL, ALL), "halo": halo}
        if halo == "history":
            sample |= {"history_delay": 0, "history_lines": 1000, "history_rows": 1000}
        config = history(3, MODELS["sage"], **sample)
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision))
        losses[halo] = on_ranks(config, graph, lambda rank: [rank.trainer.step(epoch) for epoch in range(3)])[0]
    assert losses["history"][0] == pytest.approx(losses["exact"][0], rel=rounding)
    assert losses["history"][-1] < losses["history"][0]
    config = history(3, MODELS["gcn"] | {"dropout": 0.3}, **SETTINGS["few of both, late"])
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision))
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = fit(config, graph, tmp_path / "whole")
    assert not fit(config, graph, tmp_path / "parts", 1)[0]
    done, weights, rows, summary = fit(config, graph, tmp_path / "parts")
    assert (done, rows, summary) == (True, whole[2], whole[3])
    assert all(torch.equal(weights[name], w) for name, w in whole[1].items())


def test_ranks_as_processes(tmp_path: Path) -> None:
    """Fails if messages over gloo hold others' rows than those between threads, or processes leave a message out of what a
    run continues with.
    """
    write_store(graph_of(), tmp_path / "store")
    settings = {"halo": "history", "history_delay": 2, "history_lines": 9, "history_rows": 4}
    command = ["train", tmp_path / "store", "--ranks", 2, "--batch", 14, "--fanout", "3,2", "--threads", 1, "--quiet"]
    command += ["--set", "model.kind=sage", "--set", "model.hidden=6", "--set", "model.dropout=0.3"]
    command += [word for name, value in settings.items() for word in ("--set", f"sample.{name}={value}")]
    code, _, err = finish(start(*command, "--transport", "gloo", "--epochs", 2, "--out", tmp_path / "gloo"))
    assert code == 0, err
    assert run_main("train", "--resume", tmp_path / "gloo", "--epochs", 4, "--transport", "threads", "--quiet") == 0
    assert run_main(*command, "--transport", "threads", "--epochs", 4, "--out", tmp_path / "threads") == 0
    found, expected = (lines(tmp_path / name) for name in ("gloo", "threads"))
    assert found == expected
    assert all(0 < row["hit_rates"][0] < 1 for row in found)
    assert same_tensors(tmp_path / "gloo", tmp_path / "threads")
