"""R-GCN: its gradients are the dense formula's on every rank, its logits PyG's, its memory does not grow with relations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.aggregate import broadcast, delayed_part, halo, relations
from mggcn.aggregate.relations import Relational, RelationSums
from mggcn.assemble import plan_shape
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.cli import main
from mggcn.config import Config, ModelConfig, TrainConfig
from mggcn.errors import ConfigError, PlanError
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from mggcn.graph.options import GraphOptions
from mggcn.model.kinds.relations import RelationWeights
from mggcn.partition.rows.tiles import Tile
from mggcn.planning.run import RunPlan
from mggcn.planning.shape import GraphShape
from mggcn.trainer import Trainer
from tests.devices import CPU, Where, everywhere
from tests.graphs import one_epoch
from tests.reference import dropout_mask
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


def dense_means(graph: Graph) -> torch.Tensor:
    """For each relation the matrix of means over in-neighbours, float64 (R, N, N)."""
    adj, n = graph.adj, graph.num_vertices
    assert adj.types is not None
    rows = np.repeat(np.arange(n), np.diff(adj.indptr.array()))
    weights = np.ones(adj.nnz) if adj.values is None else adj.values.array().astype(np.float64)
    a = np.zeros((graph.num_relations, n, n))
    a[adj.types.array(), adj.indices.array(), rows] = weights
    total = a.sum(2, keepdims=True)
    return torch.from_numpy(np.divide(a, total, out=np.zeros_like(a), where=total != 0))


def reference(
    graph: Graph, model: ModelConfig, weights: dict[str, torch.Tensor], epoch: int
) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
    """Loss, gradients and logits by torch.autograd on dense matrices."""
    p = {name: w.double().clone().requires_grad_() for name, w in weights.items()}
    means, ids = dense_means(graph), np.arange(graph.num_vertices)
    assert graph.features is not None
    with torch.enable_grad():
        x = torch.from_numpy(graph.features.array().astype(np.float64))  # type: ignore[union-attr]
        x = x * torch.from_numpy(dropout_mask(ids, FEATURES, model.input_dropout, SEED, epoch, 0))
        for layer in range(1, len(model.hidden) + 2):
            w = torch.einsum("rb,bde->rde", p[f"layers.{layer}.coefficients"], p[f"layers.{layer}.bases"])
            z = x @ p[f"layers.{layer}.weight"] + torch.einsum("rnm,md,rde->ne", means, x, w)
            z = z + p.get(f"layers.{layer}.bias", torch.zeros(1))
            if layer <= len(model.hidden):
                mask = dropout_mask(ids, z.shape[1], model.dropout, SEED, epoch, layer)
                x = torch.relu(z) * torch.from_numpy(mask)
        train = torch.from_numpy(graph.splits["train"].array()[0])
        loss = torch.nn.functional.cross_entropy(z[train], torch.from_numpy(graph.labels.array())[train])  # type: ignore[union-attr]
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: (torch.zeros_like(v) if v.grad is None else v.grad).numpy() for name, v in p.items()}
    return float(loss.detach()), gradients, z.detach().numpy()


def error_of(graph: Graph, config: Config, where: Where = CPU) -> float:
    """Largest error of loss, gradients and logits, relative to the largest value of each."""
    found = one_epoch(where.config(config), graph, device_of=where.device_of)
    loss, gradients, _ = reference(graph, config.model, found[0].weights, 3)
    still = dataclasses.replace(config.model, dropout=0.0, input_dropout=0.0)
    _, _, logits = reference(graph, still, found[0].weights, 3)
    assert found[0].grads.keys() == gradients.keys()
    errors = [abs(found[0].loss - loss) / loss]
    for rank in found:
        errors += [np.abs(rank.grads[n] - g).max() / (np.abs(g).max() or 1.0) for n, g in gradients.items()]
        if rank.ids.size:
            errors.append(np.abs(rank.logits - logits[rank.ids]).max() / np.abs(logits).max())
    return max(map(float, errors))


MOVES = [
    ("broadcast", "random"),
    ("broadcast", "permute"),
    ("halo", "locality"),
    ("halo", "random"),
    ("delayed", "random"),
]
CASES = list(
    itertools.product(
        (1, 2, 3, 5), MOVES, ("random", "weighted", "path", "star", "empty"), ((), (6,), (9, 5)), (0.0, 0.4)
    )
)[::7]
"""Ranks; strategy and order; graph; hidden widths; dropout. 7 divides none of their numbers, so all pairs come in turn."""


@pytest.mark.covering(1, rest=2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_the_dense_formula(
    case: tuple[int, tuple[str, str], str, tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if an edge counts for another relation, a mean has another divisor, or a copy's gradient counts twice."""
    ranks, (strategy, order), kind, hidden, dropout = case
    # Blocks of a few rows, so that relations have several.
    monkeypatch.setattr(relations, "BLOCK_ROWS", 7)
    model = {"kind": "rgcn", "hidden": hidden, "dropout": dropout, "input_dropout": dropout / 2, "bases": 3}
    config = config_of(ranks, order, strategy, **model, bias=bool(hidden))
    config = with_run(config, prune="off" if dropout else "auto")
    assert error_of(typed_graph(kind), config) < TOLERANCE


@pytest.mark.parametrize(
    ("where", "ranks"),
    [p for p in everywhere((1, 2, 3), lambda number: number == 1) if "emulated" in str(p.id) or p.marks],
)
def test_gradients_on_a_gpu(where: Where, ranks: int) -> None:
    """Fails if a kernel of a GPU takes types or blocks of rows otherwise than the CPU's."""
    config = config_of(ranks, strategy="halo", kind="rgcn", hidden=(6,), bases=2)
    assert error_of(typed_graph("random", 2), config, where) < TOLERANCE


@pytest.mark.parametrize("fault", ["coefficients", "rows", "relation"])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself fails when a gradient is left out or a relation's matrix is mixed up."""
    if fault == "coefficients":
        write = RelationWeights.write_gradients

        def scaled(self: RelationWeights, rt: Any, op: Any) -> None:
            write(self, rt, op)
            rt.gradient(self.coefficients).mul_(1.01)

        monkeypatch.setattr(RelationWeights, "write_gradients", scaled)
    elif fault == "rows":
        begin = Relational.begin
        monkeypatch.setattr(Relational, "begin", lambda self, *on: begin(dataclasses.replace(self, of_rows=False), *on))
    else:
        forward = RelationSums._forward
        monkeypatch.setattr(
            RelationSums, "_forward", lambda self, part, h: forward(self, dataclasses.replace(part, relation=0), h)
        )
    config = config_of(2, kind="rgcn", hidden=(6,), bases=3)
    assert error_of(typed_graph("random"), config) > 1e-4


@functools.cache
def generated(num_relations: int) -> Graph:
    """A generated graph of communities whose edges have types in each direction, drawn at random."""
    plain = community(150, 700, FEATURES, CLASSES, seed=5, train=0.5)
    rng = np.random.default_rng(6)
    assert plain.features is not None
    assert plain.labels is not None
    return from_arrays(
        edges=np.stack([np.repeat(np.arange(150), np.diff(plain.adj.indptr.array())), plain.adj.indices.array()]),
        edge_types=rng.integers(0, num_relations, plain.adj.nnz),
        num_relations=num_relations,
        features=plain.features.array(),  # type: ignore[union-attr]
        labels=plain.labels.array(),
        splits={name: rows.array()[0] for name, rows in plain.splits.items()},
    )


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (3, "halo"), (3, "delayed")])
def test_20_relations_and_40_bases_equal_pyg_and_the_dense_formula(ranks: int, strategy: str) -> None:
    """Fails if many relations or more bases than relations give other logits or gradients. Source: issue 19, line 9."""
    pyg = pytest.importorskip("torch_geometric.nn")
    graph = generated(20)
    config = config_of(ranks, strategy=strategy, kind="rgcn", hidden=(6,), bases=40)
    assert error_of(graph, config) < TOLERANCE
    found = one_epoch(with_run(config, precision="fp32"), graph)
    convs = [pyg.RGCNConv(d, e, 20, num_bases=40) for d, e in ((FEATURES, 6), (6, CLASSES))]
    for layer, conv in enumerate(convs, start=1):
        for theirs, ours in {"weight": "bases", "comp": "coefficients", "root": "weight", "bias": "bias"}.items():
            getattr(conv, theirs).data.copy_(found[0].weights[f"layers.{layer}.{ours}"])
    sources = np.repeat(np.arange(graph.num_vertices), np.diff(graph.adj.indptr.array()))
    edges = torch.from_numpy(np.stack([sources, graph.adj.indices.array()]).astype(np.int64))
    assert graph.adj.types is not None
    types = torch.from_numpy(graph.adj.types.array().astype(np.int64))
    with torch.no_grad():
        x = torch.from_numpy(graph.features.array().copy())  # type: ignore[union-attr]
        logits = convs[1](torch.relu(convs[0](x, edges, types)), edges, types).numpy()
    for rank in found:
        np.testing.assert_allclose(rank.logits, logits[rank.ids], rtol=0, atol=1e-5 * np.abs(logits).max())


def test_mixed_rounds_messages_alone() -> None:
    """Fails if rounded operands give another network, or float32 sums are rounded, too."""
    graph = typed_graph("random")
    exact = one_epoch(config_of(2, kind="rgcn", hidden=(6,)), graph)
    mixed = one_epoch(with_run(config_of(2, kind="rgcn", hidden=(6,)), precision="mixed"), graph)
    scale = np.abs(exact[0].logits).max()
    assert 0 < np.abs(exact[0].logits - mixed[0].logits).max() < 0.02 * scale


def shape_of(num_vertices: int, num_relations: int) -> GraphShape:
    return GraphShape(
        name="shape",
        num_vertices=num_vertices,
        num_edges=10 * num_vertices,
        num_features=32,
        num_classes=8,
        symmetric=False,
        num_relations=num_relations,
        num_training=num_vertices,
    )


def planned(num_vertices: int, num_relations: int, ranks: int) -> RunPlan:
    config = config_of(ranks, strategy="halo", kind="rgcn", hidden=(16,), bases=4)
    return plan_shape(config, shape_of(num_vertices, num_relations))


@pytest.mark.parametrize("ranks", [1, 3])
def test_memory_does_not_grow_with_relations_times_vertices(ranks: int) -> None:
    """Fails if anything is kept for each relation and vertex, or each basis and vertex: only weights grow with both."""
    few, many = (planned(100_000, count, ranks).ranks[0] for count in (2, 200))
    matrices = 2 * 198 * 32 * 16 * 8
    assert 0 <= many.arena_bytes - few.arena_bytes <= 1.05 * matrices
    more = planned(200_000, 200, ranks).ranks[0].arena_bytes - planned(200_000, 2, ranks).ranks[0].arena_bytes
    assert more == many.arena_bytes - few.arena_bytes
    config = config_of(ranks, strategy="halo", kind="rgcn", hidden=(16,), bases=64)
    assert plan_shape(config, shape_of(100_000, 2)).ranks[0].arena_bytes == few.arena_bytes


@pytest.mark.parametrize("num_relations", [5, 20, 200])
@pytest.mark.parametrize("strategy", ["broadcast", "halo", "delayed"])
def test_matrices_take_no_more_than_planned(strategy: str, num_relations: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = one_epoch(with_run(config, prune="off"), generated(num_relations))
    planned = sum(rank.rank.plan.regions["graph"] for rank in found)
    assert sum(held) <= planned <= 1.5 * sum(held)


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
