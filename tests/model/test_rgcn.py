"""R-GCN: its logits and gradients are PyG's, its memory does not grow with relations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch_geometric.nn import RGCNConv

from mggcn.aggregate import broadcast, delayed_part, halo, relations
from mggcn.api.graphs import RGCN
from mggcn.api.trainer import Trainer
from mggcn.assemble.plan import plan_shape
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.cli.entry import main
from mggcn.config import Config, ModelConfig, TrainConfig
from mggcn.errors import ConfigError, PlanError
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import Graph
from mggcn.graph.options import GraphOptions
from mggcn.partition.rows.tiles import Tile
from mggcn.planning.run import RunPlan
from mggcn.planning.shape import GraphShape
from tests.graphs import one_epoch
from tests.model.dense_stack import expected
from tests.shapes import shape_of
from tests.train.test_exact import SEED, TOLERANCE, config_of
from tests.train.test_mixed import with_run

VERTICES, FEATURES, CLASSES = 37, 11, 4


def typed_edges(kind: str, num_relations: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges (2, E) of a hostile graph and their types; some vertices have no edge, some pairs several relations."""
    rng = np.random.default_rng(5)
    n = VERTICES
    if kind == "empty":
        edges = np.empty((2, 0), np.int64)
    elif kind == "path":
        edges = np.stack([np.arange(n - 1), np.arange(1, n)])
    elif kind == "star":
        edges = np.stack([np.zeros(n - 1, np.int64), np.arange(1, n)])
        edges = np.concatenate([edges, edges[::-1]], axis=1)
    else:
        edges = rng.integers(0, n - 2, (2, 260))
    return edges, rng.integers(0, num_relations, edges.shape[1])


def typed_graph(kind: str, num_relations: int = 5) -> Graph:
    edges, types = typed_edges(kind, num_relations)
    rng = np.random.default_rng(8)
    weights = rng.integers(1, 4, edges.shape[1]).astype(np.float64) if kind == "weighted" else None
    train = rng.random(VERTICES) < 0.6
    train[0] = True
    return from_arrays(
        edges=edges,
        edge_types=types,
        num_relations=num_relations,
        weights=weights,
        num_vertices=VERTICES,
        features=rng.normal(size=(VERTICES, FEATURES)).astype(np.float32),
        labels=rng.integers(0, CLASSES, VERTICES),
        splits={"train": train, "val": ~train},
        options=GraphOptions(duplicates="sum"),
    )


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (3, "halo"), (3, "delayed")])
def test_logits_and_gradients_equal_pyg(ranks: int, strategy: str) -> None:
    """Fails if 20 relations and 40 bases give other logits or gradients than PyG's RGCNConv, or than the dense formula.

    Source: issue 19.9.
    """
    num_relations = 20
    graph = typed_graph("random", num_relations)
    edges, types = typed_edges("random", num_relations)
    config = config_of(ranks, strategy=strategy, kind="rgcn", hidden=(6,), bases=40)
    exact = one_epoch(config, graph)
    _, gradients, _, _ = expected(graph, config, exact[0].weights)
    for rank in exact:
        for name, gradient in gradients.items():
            assert np.abs(rank.grads[name] - gradient).max() < TOLERANCE * np.abs(gradient).max()
    config = with_run(config, precision="fp32")
    found = one_epoch(config, graph)
    convs = [RGCNConv(d, e, num_relations, num_bases=40) for d, e in ((FEATURES, 6), (6, CLASSES))]
    for layer, conv in enumerate(convs, start=1):
        names = {"weight": "bases", "comp": "coefficients", "root": "weight", "bias": "bias"}
        for theirs, ours in names.items():
            getattr(conv, theirs).data.copy_(found[0].weights[f"layers.{layer}.{ours}"])
    edge_index, edge_type = torch.from_numpy(edges), torch.from_numpy(types)
    x = torch.from_numpy(graph.features.array().copy())  # type: ignore[union-attr]
    with torch.enable_grad():
        z = convs[1](torch.relu(convs[0](x, edge_index, edge_type)), edge_index, edge_type)
        train = torch.from_numpy(graph.splits["train"].array()[0])
        labels = torch.from_numpy(graph.labels.array())  # type: ignore[union-attr]
        torch.nn.functional.cross_entropy(z[train], labels[train]).backward()
    logits = z.detach().double().numpy()
    for rank in found:
        np.testing.assert_allclose(rank.logits, logits[rank.ids], rtol=0, atol=1e-5 * np.abs(logits).max())
        for layer, conv in enumerate(convs, start=1):
            for theirs, ours in names.items():
                grad = getattr(conv, theirs).grad.numpy()
                ours_grad, limit = rank.grads[f"layers.{layer}.{ours}"], 1e-5 * np.abs(grad).max()
                np.testing.assert_allclose(ours_grad, grad, rtol=0, atol=limit)


def test_mixed_rounds_messages_alone() -> None:
    """Fails if rounded operands give another network, or float32 sums are rounded, too."""
    graph = typed_graph("random")
    exact = one_epoch(config_of(2, kind="rgcn", hidden=(6,)), graph)
    mixed = one_epoch(with_run(config_of(2, kind="rgcn", hidden=(6,)), precision="mixed"), graph)
    scale = np.abs(exact[0].logits).max()
    assert 0 < np.abs(exact[0].logits - mixed[0].logits).max() < 0.02 * scale


def typed_shape(num_vertices: int, num_relations: int) -> GraphShape:
    return shape_of(
        num_vertices, 10 * num_vertices, 32, 8, symmetric=False, num_relations=num_relations, num_training=num_vertices
    )


def planned(num_vertices: int, num_relations: int, ranks: int) -> RunPlan:
    config = config_of(ranks, strategy="halo", kind="rgcn", hidden=(16,), bases=4)
    return plan_shape(config, typed_shape(num_vertices, num_relations))


@pytest.mark.parametrize("ranks", [1, 3])
def test_memory_does_not_grow_with_relations_times_vertices(ranks: int) -> None:
    """Fails if anything is kept for each relation and vertex, or each basis and vertex: only weights grow with both."""
    few, many = (planned(100_000, count, ranks).ranks[0] for count in (2, 200))
    matrices = 2 * 198 * 32 * 16 * 8
    assert 0 <= many.arena_bytes - few.arena_bytes <= 1.05 * matrices
    more = planned(200_000, 200, ranks).ranks[0].arena_bytes - planned(200_000, 2, ranks).ranks[0].arena_bytes
    assert more == many.arena_bytes - few.arena_bytes
    config = config_of(ranks, strategy="halo", kind="rgcn", hidden=(16,), bases=64)
    assert plan_shape(config, typed_shape(100_000, 2)).ranks[0].arena_bytes == few.arena_bytes


@pytest.mark.parametrize("strategy", ["broadcast", "halo", "delayed"])
def test_matrices_take_no_more_than_planned(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what a rank holds of the graph, by relations, is more than its plan says, or the plan says far more."""
    held: list[int] = []
    upload = relations.upload_tile

    def counted(backend: KernelBackend, tile: Tile) -> Sparse:
        matrix = upload(backend, tile)
        parts = [t for p in matrix.relations for t in (p.rows, p.matrix.indptr, p.matrix.indices, p.matrix.values)]
        held.append(sum(t.nbytes for t in (matrix.indptr, *parts) if t is not None))
        return matrix

    for module in (broadcast, halo, delayed_part):
        monkeypatch.setattr(module, "upload_tile", counted)
    config = config_of(2, strategy=strategy, kind="rgcn", hidden=(6,), bases=3)
    found = one_epoch(with_run(config, prune="off"), typed_graph("random"))
    planned = sum(rank.rank.plan.regions["graph"] for rank in found)
    assert sum(held) <= planned <= 1.5 * sum(held)


def test_same_bits_twice_and_the_same_losses_on_every_number_of_ranks() -> None:
    """Fails if a sum depends on threads or runs, or ranks train something else than one."""
    graph = typed_graph("random")
    losses = []
    for ranks in (1, 1, 3):
        transport = "threads" if ranks > 1 else "single"
        trainer = Trainer(
            graph,
            RGCN((6,), bases=3, dropout=0.3),
            ranks=ranks,
            transport=transport,
            threads=2 if ranks == 1 else 1,
            lr=0.05,
            seed=SEED,
        )
        losses.append([row["loss"] for row in trainer.fit(epochs=5)])
    assert losses[0] == losses[1]
    for other in losses[2:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-5)


def test_a_bare_shape_with_relations(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a plan without a store knows nothing of relations."""
    shape = "--vertices 9000 --edges 90000 --features 32 --classes 8 --set model.kind=rgcn --ranks 2".split()
    assert main(["plan", *shape, "--relations", "12"]) == 0
    assert "directed, 12 relations" in capsys.readouterr().out
    assert main(["plan", *shape]) == 2
    assert "edges have no types" in capsys.readouterr().err


def test_what_is_refused() -> None:
    """Fails if a graph without types, a type's rounding or a strategy that cannot run it is found out in the run."""
    graph = typed_graph("random")
    bare = dataclasses.replace(graph.untyped())
    for config, on, message in (
        (config_of(1, kind="rgcn"), bare, "the graph's edges have no types; give edge_types"),
        (with_run(config_of(1, kind="rgcn"), precision="bf16"), graph, "choose mixed"),
        (config_of(2, strategy="slice", kind="rgcn"), graph, "edge operation relations needs whole rows"),
        (
            with_run(config_of(2, strategy="delayed", kind="rgcn"), delay="1"),
            graph,
            "results of the edge operation relations do not add up",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            one_epoch(config, on)
    with pytest.raises(ConfigError, match=r"model\.bases must lie in 1 .. 512"):
        ModelConfig(kind="rgcn", bases=0)


def test_other_models_take_parallel_edges_as_they_are() -> None:
    """Fails if a model without relations drops or merges edges of several types, or holds their types."""
    graph = typed_graph("random")
    merged = from_arrays(
        edges=typed_edges("random", 5)[0],
        num_vertices=VERTICES,
        features=graph.features.array(),  # type: ignore[union-attr]
        labels=graph.labels.array(),  # type: ignore[union-attr]
        splits={name: rows.array() for name, rows in graph.splits.items()},
        options=GraphOptions(duplicates="sum"),
    )
    for strategy, order in (("broadcast", "random"), ("halo", "locality"), ("slice", "random"), ("delayed", "random")):
        config = config_of(2, order, strategy, hidden=(6,))
        one, other = (one_epoch(config, g) for g in (graph, merged))
        for name, gradient in other[0].grads.items():
            np.testing.assert_allclose(one[0].grads[name], gradient, rtol=1e-9, atol=1e-12)


def test_training_learns_what_a_relation_says() -> None:
    """Fails if a trained model cannot tell two relations apart: the label is that of the neighbour of one of them."""
    rng = np.random.default_rng(3)
    n = 300
    labels = rng.integers(0, 3, n)
    near = np.concatenate([rng.choice(np.flatnonzero(labels == labels[v]), 3) for v in range(n)])
    far = rng.integers(0, n, 3 * n)
    dst = np.repeat(np.arange(n), 3)
    features = np.eye(3, dtype=np.float32)[labels] * (rng.random((n, 1)) < 0.5)
    features = features.astype(np.float32)
    train = rng.random(n) < 0.5
    graph = from_arrays(
        edges=np.concatenate([[near, dst], [far, dst]], axis=1),
        edge_types=np.repeat([0, 1], 3 * n),
        features=features,
        labels=labels,
        splits={"train": train, "test": ~train},
    )
    settings = Config(train=TrainConfig(seed=SEED, lr=0.05, epochs=40))
    trainer = Trainer(graph, ModelConfig(kind="rgcn", hidden=(8,), bases=2), config=settings, threads=1)
    trainer.fit()
    assert trainer.evaluate("test") > 0.85
