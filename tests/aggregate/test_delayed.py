"""DistGNN's delayed aggregates: Algorithm 4 bit for bit, what is sent and when, and what survives an interruption."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.aggregate.delayed_part import DeviceLists
from mggcn.assemble.plan import partition_graph, plan_graph, resolve
from mggcn.assemble.rank import Rank
from mggcn.blocks.block import WHOLE
from mggcn.cli.entry import main
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import RunError
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store, write_store
from mggcn.partition.cache.cuts import kept_in
from mggcn.partition.cut.partition import CutPartition
from mggcn.planning.record import to_dict
from mggcn.planning.text import render
from mggcn.runs.folder import known_plan, read_run
from tests.aggregate.algorithm4 import Algorithm4, Simulated
from tests.graphs import make_graph, on_ranks, pattern
from tests.train.test_trainer import fit

EPOCHS = 13


def config_of(ranks: int, delay: str, stale_aggregates: str = "reuse", **train: Any) -> Config:
    run = RunConfig(
        ranks=ranks,
        threads=1,
        transport="threads",
        precision="fp64",
        strategy="delayed",
        delay=delay,
        stale_aggregates=stale_aggregates,  # type: ignore[arg-type]
    )
    model = ModelConfig(hidden=(6, 5), dropout=0.3, input_dropout=0.2)
    return Config(model=model, train=TrainConfig(**{"seed": 5, "epochs": EPOCHS, "lr": 0.05} | train), run=run)


def graph_of(kind: str, n: int = 41) -> Graph:
    return make_graph(pattern(kind, n, 6), num_features=7, num_classes=3, seed=2)


def trained(config: Config, graph: Graph, simulate: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after all epochs, by the strategy or by the simulator in its place."""
    config = resolve(config, graph)
    partition = partition_graph(config, graph)
    assert isinstance(partition, CutPartition)
    delay = config.run.delay_epochs
    assert delay
    simulator = Algorithm4(graph, partition.cut, delay, config.run.stale_aggregates == "reuse")
    barrier, shared = threading.Barrier(config.run.ranks), {}  # type: ignore[var-annotated]

    def body(rank: Rank) -> tuple[list[float], dict[str, torch.Tensor]]:
        runtime = rank.trainer.runtime
        if simulate:
            ids = runtime.inputs.owned.ids.numpy()
            stand_in = Simulated(simulator, rank.plan.rank, ids, runtime.backend, barrier)
            stand_in.shared = shared
            train = runtime.programs["train"]
            programs = {"train": dataclasses.replace(train, aggregations={WHOLE: stand_in})}
            runtime.programs = {**runtime.programs, **programs}
        return [rank.trainer.step(epoch) for epoch in range(config.train.epochs)], runtime.weights.state_dict()

    return on_ranks(config, graph, body)[0]  # type: ignore[no-any-return]


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stale_aggregates", ["reuse", "discard"])
@pytest.mark.parametrize("delay", ["1", "2", "5"])
def test_delayed_epochs_are_algorithm_4(delay: str, stale_aggregates: str, ranks: int, sample: Any) -> None:
    """Fails if one bit of a loss or weight differs from an independent run of Algorithm 4 in one process."""
    for kind in sample(("random", "directed", "hub-row"), 1):
        graph, config = graph_of(kind), config_of(ranks, delay, stale_aggregates)
        losses, weights = trained(config, graph)
        expected, expected_weights = trained(config, graph, simulate=True)
        assert losses == expected
        assert all(torch.equal(weights[name], w) for name, w in expected_weights.items())


@pytest.mark.full
def test_planted_errors_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself fails when other bins have the turn, sums are kept or not, or a root adds in another order."""
    graph, config = graph_of("hub-row"), config_of(4, "2")
    right, _ = trained(config, graph, simulate=True)
    assert trained(config, graph)[0] == right
    assert trained(config_of(4, "2", "discard"), graph)[0] != right
    with monkeypatch.context() as patch:
        patch.setattr(
            CutPartition, "bin_of", property(lambda cut: (np.arange(cut.split.size) + 1).astype(np.int32) % 2)
        )
        assert trained(config, graph)[0] != right
    with monkeypatch.context() as patch:
        original = DeviceLists.add_to_roots

        def backwards(self: DeviceLists, message: torch.Tensor, partial: Any) -> None:
            parts = [piece.clone() for piece in message.split([rows.shape[0] for rows in self.roots])]
            turned = dataclasses.replace(self, roots=self.roots[::-1])
            original(turned, torch.cat(parts[::-1]), partial)

        patch.setattr(DeviceLists, "add_to_roots", backwards)
        assert trained(config, graph)[0] != right


@pytest.mark.covering(0, rest=1)
@pytest.mark.parametrize("stale_aggregates", ["reuse", "discard"])
@pytest.mark.parametrize("delay", ["1", "2", "5"])
def test_resuming_with_messages_in_flight(delay: str, stale_aggregates: str, tmp_path: Path) -> None:
    """Fails if an interrupted run, continued, differs in one bit: a message lost, taken twice or in another epoch."""
    graph, config = graph_of("random"), config_of(3, delay, stale_aggregates, repeat=2)
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    whole = fit(config, graph, folders[0])
    for stop_after in (2, 4, 11):
        done, *_ = fit(config, graph, folders[1], stop_after)
        assert not done
    done, weights, history, summary = fit(config, graph, folders[1])
    assert (done, history, summary) == (True, whole[2], whole[3])
    assert all(torch.equal(weights[name], w) for name, w in whole[1].items())


def bytes_per_epoch(config: Config, graph: Graph, epochs: int) -> list[list[int]]:
    """What each rank sends in each epoch, the sums of gradients left out, and the plan's figure last."""

    def body(rank: Rank) -> list[int]:
        sums = [2 * n * (rank.comm.size - 1) // rank.comm.size for n in (rank.trainer.runtime.weights.grad.nbytes, 24)]
        sent = []
        for epoch in range(epochs):
            before = rank.comm.bytes_sent
            rank.trainer.step(epoch)
            sent.append(rank.comm.bytes_sent - before - sum(sums))
        return [*sent, rank.plan.bytes_sent(rank.plan.train) - sum(sums)]

    return on_ranks(config, graph, body)


@pytest.mark.covering(0, rest="slow")
@pytest.mark.parametrize("kind", ["random", "directed", "hub-row"])
def test_bytes_of_the_delays(kind: str) -> None:
    """Fails if 0c sends more than gradients, or the epochs of a period of cd-r not exactly what cd-0 sends in one."""
    graph = graph_of(kind, 60)
    for ranks in (2, 4):
        assert all(set(sent) == {0} for sent in bytes_per_epoch(config_of(ranks, "none"), graph, 3))
        complete = bytes_per_epoch(config_of(ranks, "0"), graph, 2)
        assert all(first == second == planned > 0 for first, second, planned in complete)
        for r in (1, 2, 5):
            for rank, (*sent, planned) in enumerate(
                bytes_per_epoch(config_of(ranks, str(r), epochs=3 * r), graph, 3 * r)
            ):
                # From epoch r on both ways are in use.
                assert sum(sent[r : 2 * r]) == sum(sent[2 * r :]) == complete[rank][0]
                assert planned == -(-complete[rank][0] // r)


@pytest.mark.parametrize("delay", ["none", "0", "1", "2", "5"])
def test_an_evaluation_sends_what_is_planned(delay: str) -> None:
    """Fails if the plan of an evaluation, which exchanges every bin at once, counts a byte or message too few or many."""

    def body(rank: Rank) -> int:
        rank.trainer.step(0)
        before = rank.comm.bytes_sent, rank.comm.messages
        rank.trainer.evaluate()
        sent, messages = rank.comm.bytes_sent - before[0], rank.comm.messages - before[1]
        assert sent == rank.plan.bytes_sent(rank.plan.evaluate)
        assert messages == rank.plan.messages(rank.plan.evaluate)
        return sent

    assert all(sent > 0 for sent in on_ranks(config_of(3, delay), graph_of("random", 60), body))


def test_copies_are_counted_once(tmp_path: Path) -> None:
    """Fails if the scores of a run on copies differ from one rank's: a copy in the loss, the confusion or a ranking."""
    graph = make_graph(pattern("random", 53, 6), num_features=7, num_classes=2, seed=2)
    for metric in ("accuracy", "macro_f1", "roc_auc"):
        config = config_of(3, "0", metric=metric, epochs=4)
        tables = []
        for ranks in (1, 3):
            run = RunConfig(
                ranks=ranks,
                threads=1,
                transport="single" if ranks == 1 else "threads",
                precision="fp64",
                strategy="delayed",
            )
            folder = tmp_path / f"{metric}-{ranks}"
            folder.mkdir()
            tables.append(fit(Config(model=config.model, train=config.train, run=run), graph, folder)[2])
        for one, three in zip(*tables, strict=True):
            assert {k: one[k] for k in ("train", "val", "test")} == {k: three[k] for k in ("train", "val", "test")}
            assert one["loss"] == pytest.approx(three["loss"], rel=1e-10)


def test_evaluation_is_exact_whatever_the_delay() -> None:
    """Fails if an evaluation sees partial or late sums: logits must be those of the exact strategy for the same weights."""
    graph = graph_of("random")

    def body(rank: Rank) -> tuple[np.ndarray, np.ndarray]:
        rank.trainer.step(0)
        rank.trainer.runtime.weights.initialize(3)
        rank.trainer.evaluate()
        return rank.trainer.runtime.inputs.owned.ids.numpy().copy(), rank.trainer.logits().numpy().copy()

    logits = {}
    for delay in ("none", "0", "3"):
        whole = np.zeros((graph.num_vertices, 3))
        for ids, found in on_ranks(config_of(4, delay), graph, body):
            whole[ids] = found
        logits[delay] = whole
    assert np.array_equal(logits["none"], logits["0"])
    assert np.array_equal(logits["3"], logits["0"])


@pytest.mark.full
def test_a_graph_of_which_every_vertex_is_split() -> None:
    """Fails if a rank without rows of its own part, or ranges of rows that are empty, are special."""
    dense = np.ones((24, 24), np.float32) - np.eye(24, dtype=np.float32)
    graph = make_graph(dense, num_features=7, num_classes=3, seed=2)
    for ranks in (3, 5):
        partition = partition_graph(config_of(ranks, "0"), graph)
        assert isinstance(partition, CutPartition)
        assert partition.split.all()
        found = on_ranks(config_of(ranks, "0"), graph, lambda rank: [rank.trainer.step(e) for e in range(5)])[0]
        run = RunConfig(ranks=1, threads=1, transport="single", precision="fp64")
        whole = dataclasses.replace(config_of(ranks, "0"), run=run)
        expected = on_ranks(whole, graph, lambda rank: [rank.trainer.step(e) for e in range(5)])[0]
        assert found == pytest.approx(expected, rel=1e-12)
        local, _ = trained(config_of(ranks, "2"), graph)
        assert local == trained(config_of(ranks, "2"), graph, simulate=True)[0]


def aggregation_of(rank: Rank) -> Any:
    return rank.trainer.runtime.programs["train"].aggregations[WHOLE]


def test_weights_of_both_signs_are_not_blown_up() -> None:
    """Fails if a partial sum is scaled by a quotient of weights, which may be next to nothing."""
    rng = np.random.default_rng(3)
    dense = np.triu((rng.random((60, 60)) < 0.2) * rng.choice([0.6, -0.5], (60, 60)), 1).astype(np.float32)
    dense += dense.T + 6 * np.eye(60, dtype=np.float32)
    graph = make_graph(dense, num_features=7, num_classes=3, weighted=True, seed=2)
    for delay in ("none", "2"):
        shares = on_ranks(config_of(3, delay), graph, lambda rank: aggregation_of(rank)._part.missing.copy())
        most = max(graph.adj.indptr.read(0, 61)[1:] - graph.adj.indptr.read(0, 60)) + 1
        assert all((s >= 1).all() and (s <= most).all() for s in shares)


def test_the_plan_says_what_is_approximate() -> None:
    """Fails if a plan that gives up exactness does not say so, or an exact one says it does."""
    graph = graph_of("random")
    for delay, exact in (("0", True), ("2", False), ("none", False)):
        plan, _ = plan_graph(config_of(3, delay), graph)
        assert ("APPROXIMATE" in render(plan)) == (not exact)
        assert to_dict(plan)["exact"] is exact


def test_a_run_refuses_a_partition_that_was_made_again(tmp_path: Path) -> None:
    """Fails if a run continues on other parts than it was planned for."""
    write_store(graph_of("random"), tmp_path / "store")
    run = ["--ranks", "2", "--transport", "threads", "--strategy", "delayed", "--epochs", "2", "--quiet"]
    assert main(["train", str(tmp_path / "store"), *run, "--out", str(tmp_path / "run")]) == 0
    kept = kept_in(open_store(tmp_path / "store"), "libra-2-1-shuffled")
    assert kept is not None
    assert main(["partition", str(tmp_path / "store"), "--parts", "2", "--seed", "9", "--out", str(kept)]) == 0
    old, new = kept / "libra-2-1-shuffled", kept / "libra-2-9-shuffled"
    meta = json.loads((new / "meta.json").read_text())
    meta["settings"]["seed"] = 1
    del meta["meta_sha256"]
    (new / "meta.json").write_text(json.dumps(meta))
    shutil.rmtree(old)
    new.rename(old)
    assert main(["predict", str(tmp_path / "run")]) != 0
    with pytest.raises(RunError, match="different partition"):
        known_plan(tmp_path / "run", *read_for(tmp_path / "run", tmp_path / "store"))


def read_for(folder: Path, store: Path) -> tuple[Config, Graph]:
    return read_run(folder)[0], open_store(store)
