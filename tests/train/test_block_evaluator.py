"""Evaluation by blocks, layer by layer, beside that of the whole graph's program."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.batches import drawn_tiles, mapped_once
from mggcn.assemble.plan import plan_graph, plan_shape
from mggcn.assemble.rank import Rank
from mggcn.comm.base import Communicator
from mggcn.comm.shared_memory import shared_memory
from mggcn.comm.threads import run_threads
from mggcn.config import Config, SampleConfig
from mggcn.errors import ConfigError, GraphError, PlanError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.join import JoinedRows
from mggcn.graph.splits import evaluated_rows
from mggcn.host import mapped_bytes
from mggcn.memory.units import MIB
from mggcn.planning import block_evaluation
from mggcn.planning.advice import require_fit
from mggcn.planning.block_evaluation import BlockEvaluation
from mggcn.planning.run import RankPlan
from mggcn.planning.shape import graph_shape, in_blocks
from mggcn.planning.text import render
from mggcn.runs import score as scoring
from mggcn.runs.auto import resolve_auto
from mggcn.train.block_evaluator import BlockEvaluator
from tests.feed.test_blocks import MODELS, config_of, graph_of
from tests.graphs import make_graph, on_ranks, pattern
from tests.model.test_rgcn import typed_graph
from tests.train import test_links as links
from tests.train.tasks import labelled

KINDS: dict[str, dict[str, Any]] = {
    **MODELS,
    "sgc": {"kind": "sgc", "hops": 2, "hidden": ()},
    "appnp": {"kind": "appnp", "hops": 2},
    "rgcn": {"kind": "rgcn", "bases": 3},
    "loops, batch norm": {"kind": "gcn", "self_loops": True, "norm_layer": "batch", "residual": "linear"},
}


def batches(config: Config, **changes: Any) -> Config:
    """The run on batches, with settings of [train], [run] and [data] changed."""
    config = dataclasses.replace(config, sample=SampleConfig(batch=14, fanout=(3,) * config.model.num_aggregations))
    for part in ("train", "run", "data"):
        own = {key: value for key, value in changes.items() if hasattr(getattr(config, part), key)}
        config = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **own)})
    return config


@dataclasses.dataclass
class Found:
    """Scores of the splits, logits and ids of a rank's vertices, of which blocks have those in splits, after an epoch."""

    scores: Any
    logits: Any
    ids: Any
    weights: Any


def sampled(config: Config, how: str, sample: dict[str, Any]) -> Config:
    config = batches(config, evaluate=how)
    return dataclasses.replace(config, sample=dataclasses.replace(config.sample, **sample))


def evaluated(config: Config, graph: Graph, how: str, **sample: Any) -> list[Found]:
    def body(rank: Rank) -> Found:
        rank.trainer.step(0)
        found, runtime = rank.trainer.evaluate(), rank.trainer.runtime
        return Found(found, rank.trainer.scores(), runtime.inputs.owned.ids.numpy(), runtime.weights.state_dict())

    return on_ranks(sampled(config, how, sample), graph, body)


def predicted(config: Config, graph: Graph, weights: Any, **sample: Any) -> Any:
    """Logits of all vertices by blocks, in the graph's order."""
    plan, partition = plan_graph(sampled(config, "blocks", sample), graph)
    return scoring.scores_here(plan.config, graph, plan, partition, weights)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several chunks, of few rows or few edges."""
    monkeypatch.setattr(block_evaluation, "CHUNK_ROWS", 17)
    monkeypatch.setattr(block_evaluation, "CHUNK_EDGES", 60)


def compare(config: Config, graph: Graph, tolerance: float, **sample: Any) -> None:
    found = [evaluated(config, graph, how, **sample) for how in ("whole", "blocks")]
    everyone, splits = predicted(config, graph, found[0][0].weights, **sample), evaluated_rows(graph, "main", 0)
    for whole, blocks in zip(*found, strict=True):
        assert (
            blocks.scores == pytest.approx(whole.scores, rel=tolerance)
            if None not in whole.scores.values()
            else blocks.scores == whole.scores
        )
        some, atol = splits[whole.ids], tolerance * np.abs(whole.logits).max()
        np.testing.assert_array_equal(blocks.ids, whole.ids[some])
        np.testing.assert_allclose(blocks.logits, whole.logits[some], rtol=0, atol=atol)
        np.testing.assert_allclose(everyone[whole.ids], whole.logits, rtol=0, atol=atol)


def test_ranks_that_share_batches() -> None:
    """Fails if what steps exchange is in the way of an evaluation by blocks."""
    compare(batches(config_of(2, KINDS["gat"]), batches="cooperative"), graph_of(), 1e-12)


def test_a_first_layer_from_sums() -> None:
    """Fails if an evaluation by blocks reads A X, which batches gather, as X."""
    config = batches(config_of(1, KINDS["gcn"]))
    compare(config, graph_of(), 1e-12, first="full")


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_scores_are_the_whole_graphs(name: str, ranks: int) -> None:
    """Fails if a layer reads other rows than were kept, an edge or a rank's share is lost, or rows are mixed up."""
    graph = typed_graph("random") if name == "rgcn" else graph_of()
    compare(batches(config_of(ranks, KINDS[name])), graph, 1e-12)


@pytest.mark.parametrize("name", ["gin", "gat", "sage-max", "appnp"])
def test_same_bits_where_the_order_of_products_is_the_same(name: str) -> None:
    """Fails if a row's sum has other entries than the whole graph's, or in another order, in single precision."""
    graph = make_graph(pattern("directed", 61, 5), num_features=7, num_classes=4, sparse=False, weighted=True, seed=4)
    config = batches(config_of(1, KINDS[name]), precision="fp32", row_normalize=name == "gin")
    (whole,), (blocks,) = (evaluated(config, graph, how) for how in ("whole", "blocks"))
    np.testing.assert_array_equal(blocks.logits, whole.logits[evaluated_rows(graph, "main", 0)])
    np.testing.assert_array_equal(predicted(config, graph, blocks.weights), whole.logits)


@pytest.mark.parametrize("case", ["bce", "mse", "order", "sparse, bf16", "hub", "joined"])
def test_tasks_orders_and_inputs(case: str) -> None:
    """Fails if labels meet other vertices' scores, an order of the rows is not undone, or features are read otherwise."""
    graph, changes, tolerance = graph_of(), dict[str, Any](), 1e-12
    match case:
        case "bce":
            graph, changes = labelled(graph, case), {"metric": "roc_auc"}
        case "mse":
            graph, changes = labelled(graph, case), {"metric": "r2", "loss": "mse"}
        case "order":
            changes = {"order": "permute"}
        case "joined":
            rows = graph.features
            assert isinstance(rows, ArrayRows)
            halves = tuple(ArrayRows(part) for part in np.array_split(rows.array(), 2))
            graph, changes, tolerance = (
                dataclasses.replace(graph, features=JoinedRows(halves)),
                {"precision": "fp32"},
                1e-6,
            )
            (plan, _) = plan_graph(batches(config_of(1, KINDS["sage"]), evaluate="blocks", **changes), graph)
            planned = plan.ranks[0].by_blocks
            assert planned is not None
            assert planned.features is not None
        case "hub":
            graph = make_graph(pattern("hub-row", 90, 5), num_features=7, num_classes=4, sparse=False, seed=4)
        case _:
            graph = make_graph(
                pattern("weighted", 61, 5), num_features=7, num_classes=4, sparse=True, weighted=True, seed=4
            )
            changes, tolerance = {"precision": "bf16"}, 0
    loss = {"loss": "bce"} if case == "bce" else {}
    config = config_of(2 if case == "mse" else 1, KINDS["gin" if "bf16" in case else "sage"])
    compare(batches(config, **changes, **loss), graph, tolerance)


def test_rows_that_no_score_depends_on_are_left_out() -> None:
    """Fails if chunks far from the splits' vertices are computed, or a score misses a row that it depends on."""
    graph = make_graph(pattern("path", 200, 1), num_features=7, num_classes=4, sparse=False, seed=4)
    train, val = np.zeros((2, 200), bool)
    train[[0, 5]], val[[9, 40]] = True, True
    splits = {"train": ArrayRows(train[None]), "val": ArrayRows(val[None])}
    graph = dataclasses.replace(graph, splits=splits, labels=ArrayRows(np.arange(200) % 4))
    config, computed = batches(config_of(1, KINDS["sage"])), list[range]()
    compute = BlockEvaluator._compute

    def watched(self: BlockEvaluator, stage: Any, program: Any, span: range, required: Any, seed: int) -> None:
        computed.append(span)
        compute(self, stage, program, span, required, seed)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BlockEvaluator, "_compute", watched)
        (whole,), (blocks,) = (
            on_ranks(batches(config, evaluate=how), graph, lambda rank: rank.trainer.evaluate())
            for how in ("whole", "blocks")
        )
    assert blocks == whole
    assert max(span.stop for span in computed) <= 40 + 2 + 17
    compare(config, graph, 1e-12)


def planned(config: Config, graph: Graph) -> tuple[RankPlan, BlockEvaluation]:
    """The first rank of a run that evaluates by blocks."""
    rank = plan_graph(batches(config, evaluate="blocks", precision="fp32"), graph)[0].ranks[0]
    assert rank.by_blocks is not None
    return rank, rank.by_blocks


@pytest.mark.parametrize("name", ["gcn", "rgcn"])
def test_chunks_are_planned_by_the_longest_row(name: str) -> None:
    """Fails if a chunk is planned for a row that has an edge from every vertex, of every relation, though none has."""
    graph = typed_graph("random") if name == "rgcn" else make_graph(
        pattern("path", 900, 1), num_features=7, num_classes=4, sparse=False, seed=4
    )  # fmt: skip
    config, longest = config_of(1, KINDS[name]), int(np.diff(graph.adj_t.indptr.array()).max())
    _, blocks = planned(config, graph)
    assert blocks.chunk.edges == min(graph.num_edges, max(60, longest) + blocks.chunk.targets)
    assert blocks.chunk.edges < graph.num_vertices * max(graph.num_relations, 1)
    # A damaged store is refused here, before anything follows its row pointers.
    broken = dataclasses.replace(graph.adj_t, indptr=ArrayRows(graph.adj_t.indptr.array()[::-1].copy()))
    with pytest.raises(GraphError, match="must ascend"):
        in_blocks(graph_shape(graph, config), dataclasses.replace(graph, adj_t=broken), config)
    # Of a bare shape nothing is known but the bound.
    shape = dataclasses.replace(graph_shape(graph, batches(config)), num_edges=4000, num_training=5)
    bare = plan_shape(batches(config, evaluate="blocks", precision="fp32"), shape).ranks[0].by_blocks
    assert bare is not None
    assert bare.chunk.edges == graph.num_vertices * max(graph.num_relations, 1) + bare.chunk.targets


def few_in_splits(count: int = 1300) -> Graph:
    """A graph of many vertices, of which 8 are in splits, and with scores of 40 columns."""
    graph = make_graph(np.eye(count, k=1), num_features=16, num_classes=40, sparse=False, seed=1)
    masks = {name: np.zeros((1, count), bool) for name in ("train", "val")}
    masks["train"][0, [1, 7, count - 2]] = masks["val"][0, [0, 9, 30, 1200, count - 1]] = True
    labels = ArrayRows(np.arange(count) % 40)
    return dataclasses.replace(graph, splits={n: ArrayRows(mask) for n, mask in masks.items()}, labels=labels)


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_are_kept_of_vertices_in_splits(ranks: int) -> None:
    """Fails if an evaluation keeps scores that nobody reads, in memory or in the plan."""
    config, graph = config_of(ranks, KINDS["sage"] | {"hidden": (4,)}), few_in_splits()
    everyone = dataclasses.replace(graph, splits={"train": ArrayRows(np.ones((1, graph.num_vertices), bool))})
    fewer, more = (planned(config, one)[0].regions["evaluation by blocks"] for one in (graph, everyone))
    # The scores of the 40 columns, which are more than what stages write for each other.
    assert more - fewer > 4 * 20 * graph.num_vertices / ranks

    def body(rank: Rank) -> tuple[int, int]:
        scores = rank.trainer._by_blocks
        assert scores is not None
        return scores._scores.shape[0], scores.result.shape[0]

    kept = on_ranks(batches(config, evaluate="blocks"), graph, body)
    assert [rows for rows, _ in kept] == [8] * ranks
    assert sum(rows for _, rows in kept) == 8
    compare(config, graph, 1e-12)


def test_rows_that_ranks_share_are_counted_once() -> None:
    """Fails if a plan for several ranks has the memory that they share once for each of them."""
    config, graph = config_of(1, {"kind": "gcn", "hidden": (200,)}), few_in_splits()
    _, alone = planned(config, graph)
    several = dataclasses.replace(config, run=dataclasses.replace(config.run, ranks=4, transport="threads"))
    rank, shared = planned(several, graph)
    assert shared.outputs.nbytes == alone.outputs.nbytes > 4 * 40 * graph.num_vertices
    saved = alone.nbytes - rank.regions["evaluation by blocks"]
    assert saved == pytest.approx(0.75 * alone.outputs.nbytes, rel=0.01)
    assert any("once for all ranks, of which each counts 1/4" in line for line in shared.lines(4))


def test_memory_that_ranks_share_is_measured_once() -> None:
    """Fails if each rank's peak has all of the memory that it shares, which the plan counts once."""
    size = 64 << 20

    def body(comm: Communicator) -> int:
        before = mapped_bytes()
        comm.barrier()
        memory = shared_memory(size, comm)
        memory.fill_(1)
        comm.barrier()
        others = mapped_bytes() - before
        comm.barrier()
        return others

    # Threads of one process: each has a map of its own, so that the process seems to hold the memory twice.
    for others in run_threads(2, body, 60):
        assert abs(others - size) < 8 << 20, "beside pages of libraries that are read meanwhile"


def test_the_plan_says_what_is_in_memory() -> None:
    """Fails if the plan's text names nodes of the program, or other rows than are in memory between layers."""
    rank, blocks = planned(config_of(1, KINDS["gat"]), graph_of())
    (first, second) = blocks.lines(1)
    assert rank.regions["features"] == 0
    assert "at most 17 rows and" in first
    assert "12 columns for sum 1, 12 columns for sum 2 of all vertices, and scores of" in second


def test_auto_takes_blocks_where_the_whole_graph_does_not_fit() -> None:
    """Fails if memory that would do is refused, a limit below both is not, or the plan does not say what it takes."""
    graph = make_graph(np.eye(4000, k=1), num_features=600, num_classes=8, sparse=False, seed=1)
    config = batches(dataclasses.replace(config_of(1, {"kind": "gcn", "hidden": (16,)})), precision="fp32")
    plans = {
        how: plan_graph(batches(config, evaluate=how, precision="fp32"), graph)[0]
        for how in ("whole", "blocks", "auto")
    }
    needs = {how: plan.largest.total_bytes for how, plan in plans.items()}
    assert plans["auto"].by_blocks is False
    assert needs["auto"] == needs["whole"] > needs["blocks"] + 8 * MIB
    limit = (needs["whole"] + needs["blocks"]) // 2
    chosen = plan_graph(config, graph, limit=limit)[0]
    assert (chosen.by_blocks, chosen.largest.total_bytes) == (True, needs["blocks"])
    assert "evaluation by blocks of all in-neighbours" in render(chosen, limit)
    require_fit(chosen, limit)
    with pytest.raises(PlanError, match=r"--set train.evaluate=blocks, which evaluates layer by layer, would fit into"):
        require_fit(plans["whole"], limit)
    # As the choice of a strategy does, which plans each of them.
    either = dataclasses.replace(config, run=dataclasses.replace(config.run, strategy="auto", ranks=2))
    assert resolve_auto(either, graph, limit=limit)[1] is not None
    # Where neither fits, the advice starts from the smaller one.
    few = needs["blocks"] - 1
    with pytest.raises(PlanError, match=r"needs .* but only .* may be used"):
        require_fit(plan_graph(config, graph, limit=few)[0], few)


def test_ranks_of_several_machines_evaluate_over_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks that share no memory are planned to keep rows in it."""
    start = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a"}
    for name, value in (start | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    config = config_of(2, KINDS["gcn"])
    assert plan_graph(batches(config), graph_of(), limit=1)[0].by_blocks is False
    with pytest.raises(ConfigError, match=r"these are on several machines; set train.evaluate=whole"):
        plan_graph(batches(config, evaluate="blocks"), graph_of())


def test_runs_that_cannot_evaluate_by_blocks() -> None:
    """Fails if a setting that would be ignored is taken, or the message does not say what to change."""
    config = config_of(1, {"kind": "gcn"})
    with pytest.raises(ConfigError, match=r"set sample.batch, such as 1024, or leave train.evaluate out"):
        plan_graph(dataclasses.replace(config, train=dataclasses.replace(config.train, evaluate="blocks")), graph_of())
    with pytest.raises(ConfigError, match="leave one of them out"):
        dataclasses.replace(
            batches(config, evaluate="blocks"), sample=SampleConfig(batch=8, fanout=(2, 2), compare_gradient=1)
        )
    with pytest.raises(ConfigError, match="computes on CPUs"):
        batches(config, evaluate="blocks", device="cuda")


def test_ranks_share_what_stages_write() -> None:
    """Fails if a rank writes rows of its own, which no message would bring to the others."""

    def body(rank: Rank) -> float:
        scores = rank.trainer._by_blocks
        assert scores is not None
        memory = scores._evaluator.memory
        rows = memory.rows["result"]
        memory.barrier()
        if rank.plan.rank == 1:
            rows[3, 1] = 7.5
        memory.barrier()
        return float(rows[3, 1])

    found = on_ranks(batches(config_of(3, KINDS["gcn"]), evaluate="blocks"), graph_of(), body)
    assert found == [7.5] * 3
    assert torch.tensor(found).unique().numel() == 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_links_are_scored_by_the_same_embeddings(ranks: int) -> None:
    """Fails if a vertex that is in no split, and the end of a link, is not computed."""
    graph = links.graph_of()
    config = links.config_of(ranks, {"kind": "sage", "aggregator": "mean"}, sample={"batch": 20, "fanout": (3, 2)})
    found = []
    for how in ("whole", "blocks"):
        train = dataclasses.replace(config.train, evaluate=how)
        found.append(on_ranks(dataclasses.replace(config, train=train), graph, lambda rank: rank.trainer.links())[0])
    assert found[0]
    for split, scores in found[0].items():
        assert found[1][split] == pytest.approx(scores, rel=1e-9)


SAMPLED: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "gcn": ({"kind": "gcn", "self_loops": True}, graph_of, {}),
    "sage": ({"kind": "sage", "aggregator": "mean"}, graph_of, {"draw": "replace"}),
    "gat": ({"kind": "gat", "heads": 2}, graph_of, {}),
    "rgcn": ({"kind": "rgcn", "bases": 3}, lambda: typed_graph("weighted"), {"by_type": True}),
    "rgcn, labor": ({"kind": "rgcn", "bases": 3}, lambda: typed_graph("random"), {"draw": "labor"}),
}


@pytest.mark.parametrize("name", ["gcn", "gat", "rgcn"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sampled_over_all_neighbours_the_scores_are_exact(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a drawn edge is of another row or layer, or counts otherwise than where all are read."""
    monkeypatch.setattr(block_evaluation, "EVALUATED_FANOUT", 60)
    model, make, sample = SAMPLED[name]
    config, graph = config_of(ranks, model), make()
    for drawn, exact in zip(*(evaluated(config, graph, how, **sample) for how in ("sampled", "blocks")), strict=True):
        np.testing.assert_array_equal(drawn.ids, exact.ids)
        np.testing.assert_allclose(drawn.logits, exact.logits, atol=1e-10 * np.abs(exact.logits).max())
        assert drawn.scores == exact.scores


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_scores_depend_on_the_seed_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if scores are exact though few neighbours are drawn, or differ by ranks or from one evaluation to the next."""
    monkeypatch.setattr(block_evaluation, "EVALUATED_FANOUT", 2)
    model, make, sample = SAMPLED[name]
    graph = make()

    def twice(rank: Rank) -> Any:
        first = rank.trainer.scores()
        np.testing.assert_array_equal(rank.trainer.scores(), first)
        return rank.trainer.runtime.inputs.owned.ids.numpy(), first

    def logits(ranks: int, how: str) -> Any:
        config = sampled(config_of(ranks, model), how, sample)
        ids, rows = (np.concatenate(of) for of in zip(*on_ranks(config, graph, twice), strict=True))
        return rows[np.argsort(ids)]

    found, exact = logits(1, "sampled"), logits(1, "blocks")
    assert np.abs(found - exact).max() > 1e-3 * np.abs(exact).max()
    np.testing.assert_allclose(logits(3, "sampled"), found, atol=1e-10 * np.abs(found).max())


def test_sampled_draws_are_named_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if two seeds draw the same neighbours for evaluations, or a row has more of them than it should."""
    monkeypatch.setattr(block_evaluation, "EVALUATED_FANOUT", 3)
    graph, config = graph_of(), sampled(config_of(1, {"kind": "sage", "aggregator": "mean"}), "sampled", {})
    plan, _ = plan_graph(config, graph)
    n = graph.num_vertices

    drawn = drawn_tiles(config, mapped_once(graph.untyped()), plan, 0)
    assert drawn is not None
    one, two = ([drawn.tile(seed, layer, range(n), None) for layer in (1, 2)] for seed in (5, 6))
    degrees = np.diff(graph.adj_t.indptr.array())
    for tile in (*one, *two):
        np.testing.assert_array_equal(np.diff(tile.indptr), np.minimum(degrees, 3))
        # Each of three edges of more counts as many as it stands for.
        counts = np.repeat(degrees / np.maximum(np.minimum(degrees, 3), 1), np.diff(tile.indptr))
        np.testing.assert_allclose(tile.values, counts, rtol=1e-12)
    assert degrees.max() > 3
    assert not np.array_equal(one[0].indices, two[0].indices)
    assert not np.array_equal(one[0].indices, one[1].indices)
    required = np.arange(n) % 3 == 0
    some, every = drawn.tile(5, 1, range(4, n), required), drawn.tile(5, 1, range(n), None)
    rows = np.repeat(np.arange(n), np.diff(every.indptr))
    np.testing.assert_array_equal(some.indices, every.indices[required[rows] & (rows >= 4)])


def test_sampled_scores_of_a_repeat_are_those_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if repeats are scored over what the first one draws."""
    monkeypatch.setattr(block_evaluation, "EVALUATED_FANOUT", 2)

    def second(rank: Rank) -> Any:
        rank.trainer.progress.run = 1
        rank.trainer.restart(8124)
        return rank.trainer.scores()

    config = sampled(config_of(1, {"kind": "gcn"}), "sampled", {})
    alone = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=8124))
    assert config.train.seed == 8123
    found, expected = on_ranks(config, graph_of(), second), on_ranks(alone, graph_of(), lambda r: r.trainer.scores())
    np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.parametrize("column", [-5, "vertices", 2**30])
def test_sampled_scores_read_no_column_that_is_no_vertex(column: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an evaluation reads memory beside the rows of vertices, where a store is damaged after it was opened."""
    monkeypatch.setattr(block_evaluation, "EVALUATED_FANOUT", 60)
    graph = graph_of()
    wrong = graph.num_vertices if column == "vertices" else column

    def body(rank: Rank) -> None:
        rank.trainer.scores()
        indices[7] = wrong
        with pytest.raises(
            GraphError, match=rf"column ids must lie in \[0, {graph.num_vertices}\), one is {wrong}; the matrix"
        ):
            rank.trainer.scores()

    indices = graph.adj_t.indices.array()
    indices.setflags(write=True)
    on_ranks(sampled(config_of(1, {"kind": "gcn"}), "sampled", {}), graph, body)


@pytest.mark.parametrize(
    ("sample", "train", "words"),
    [
        ({"weights": "block"}, {}, "train.evaluate sampled normalises by the whole graph's degrees"),
        ({"compare_gradient": 1}, {}, "for which train.evaluate sampled leaves no memory"),
    ],
)
def test_sampled_does_not_go_with(sample: dict[str, Any], train: dict[str, Any], words: str) -> None:
    """Fails if an evaluation that is sampled is planned with what it cannot have."""
    with pytest.raises(ConfigError, match=words):
        sampled(batches(config_of(1, {"kind": "gcn"}), **train), "sampled", sample)
