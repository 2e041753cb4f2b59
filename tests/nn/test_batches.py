"""Batches for loops of one's own: what blocks compute is the dense formula, in mggcn's functions and in PyG's layers."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric import nn as pyg
from torch_geometric.data import Data

import mggcn
from mggcn.errors import BackendError, ConfigError, GraphError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.nn import SampledBatch, SampledBlock, aggregate, attend, attend_dynamic, batches, dropout, reduce
from tests.devices import CPU, EMULATED, Where
from tests.nn.graphs import options
from tests.nn.test_aggregate import graph_of
from tests.nn.test_neighbours import dense_attention, dense_maximum
from tests.reference import dense_csr, dropout_mask, weight_mask

ALL = -1
WHERE = [pytest.param(CPU, id="cpu"), pytest.param(EMULATED, id="emulated")]


def loader_of(graph: Graph, seeds: Any = "train", where: Where = CPU, **settings: Any) -> Any:
    """Batches of 7 in float64."""
    defaults: dict[str, Any] = {"fanout": (3, 2), "batch": 7, "precision": "fp64", "threads": 0, "seed": 8123}
    return batches(graph, seeds, **(defaults | options(where) | settings))


def first(loader: Any) -> SampledBatch:
    """The first batch of the next epoch."""
    return next(iter(loader))  # type: ignore[no-any-return]


def dense(block: SampledBlock, weighted: bool = True) -> Tensor:
    """What each edge counts, float64 (T, S); 1 for all if not weighted."""
    matrix = torch.zeros(block.num_targets, block.num_rows, dtype=torch.float64)
    sources, targets = block.edge_index().cpu()
    weight = block.edge_weight if weighted else None
    matrix[targets, sources] = torch.ones(block.num_edges).double() if weight is None else weight.cpu()
    return matrix


def random(*shape: int, seed: int = 5) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def compare(function: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Both have one result, and one gradient by every input."""
    found, expected = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    z, wanted = function(*found), formula(*expected)
    torch.testing.assert_close(z.detach(), wanted.detach(), rtol=1e-10, atol=1e-10)
    g = random(*z.shape, seed=77)
    (z * g).sum().backward()
    (wanted * g).sum().backward()
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("norm", ["none", "mean", "symmetric"])
def test_sums_over_a_block(where: Where, norm: str) -> None:
    """Fails if an edge, what it counts or a scale is lost, forwards or backwards, in any block."""
    for kind, draw, loops in itertools.product(("random", "weighted"), ("uniform", "replace", "labor"), (False, True)):
        graph = graph_of(kind)
        batch = first(loader_of(graph, np.arange(20), where, norm=norm, draw=draw, self_loops=loops))
        adj = dense_csr(graph.adj)
        np.fill_diagonal(adj, np.where(loops & (np.diagonal(adj) == 0), 1.0, np.diagonal(adj)))
        degree = torch.from_numpy(adj.sum(0))[batch.ids]
        scale = {"none": degree * 0 + 1, "mean": 1 / degree, "symmetric": degree**-0.5}[norm]
        scale[~scale.isfinite()] = 0.0
        for block in batch.blocks:
            weights = dense(block) * scale[: block.num_targets, None]
            weights = weights * scale[: block.num_rows] if norm == "symmetric" else weights
            x = random(block.num_rows, 11)
            compare(lambda x: aggregate(x, block), lambda x: weights @ x, x)  # noqa: B023


@pytest.mark.parametrize("weights", ["unbiased", "mean", "block"])
@pytest.mark.parametrize("draw", ["uniform", "replace", "labor", "labor-one"])
def test_weights_of_1_are_no_weights(draw: str, weights: str) -> None:
    """Fails if sums over blocks of a graph whose weights are all 1 are not those of the graph without weights."""
    graph = graph_of("random")
    adj, adj_t = (
        dataclasses.replace(m, values=ArrayRows(np.ones(m.nnz, np.float32))) for m in (graph.adj, graph.adj_t)
    )
    ones = dataclasses.replace(graph, adj=adj, adj_t=adj_t)
    for norm in ("none", "mean", "symmetric"):
        plain, weighted = (
            first(loader_of(of, np.arange(20), norm=norm, draw=draw, weights=weights)) for of in (graph, ones)
        )
        for one, two in zip(plain.blocks, weighted.blocks, strict=True):
            x = random(one.num_rows, 5)
            assert torch.equal(aggregate(x, one), aggregate(x, two))


@pytest.mark.parametrize("draw", ["uniform", "replace", "labor", "labor-one", "weight"])
def test_edges_of_weights_block_count_their_weights(draw: str) -> None:
    """Fails if the chance of a draw changes what an edge counts under weights block, or degrees have weights in them."""
    graph = graph_of("weighted")
    dense_t = torch.from_numpy(dense_csr(graph.adj_t))
    batch = first(loader_of(graph, np.arange(20), norm="mean", draw=draw, weights="block"))
    for block in batch.blocks:
        there = dense(block, weighted=False)
        mean = dense_t[batch.ids[: block.num_targets]][:, batch.ids[: block.num_rows]] * there
        mean /= there.sum(1, keepdim=True).clamp(min=1)
        x = random(block.num_rows, 5)
        torch.testing.assert_close(aggregate(x, block), mean @ x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("where", WHERE)
def test_maxima_and_attention_over_a_block(where: Where) -> None:
    """Fails if a maximum, a score, a mask of weights or one of their gradients is not that of the drawn edges."""
    heads, p = 3, 0.4
    for loops in (False, True):
        batch = first(loader_of(graph_of("random"), np.arange(20), where, self_loops=loops))
        ids = batch.ids.cpu()
        for site, block in enumerate(batch.blocks):
            edges, (t, s) = dense(block, weighted=False) != 0, (block.num_targets, block.num_rows)
            x, source, target = random(s, 6).round(), random(s, heads), random(t, heads)
            both, a = random(t, 6), random(heads, 2)
            order = ids[:s].argsort()  # of equal values the vertex of the lowest number takes the gradient
            compare(lambda x: reduce(x, block), lambda x: dense_maximum(edges[:, order], x[order]), x)  # noqa: B023
            mask = weight_mask(37, heads, p, (8123, 0), 1 + 2 * site)[ids[:t]][:, ids[:s]]
            leaky = torch.nn.functional.leaky_relu

            def gat(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
                return dense_attention(edges, leaky(source[None] + target[:, None], 0.2), x, mask)  # noqa: B023

            compare(lambda x, s, t: attend(x, s, t, block, dropout=p), gat, x, source, target)  # noqa: B023
            mask = weight_mask(37, heads, p, (8123, 0), 2 + 2 * site)[ids[:t]][:, ids[:s]]

            def gatv2(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
                scores = (leaky(x[None] + y[:, None], 0.2).view(*edges.shape, heads, -1) * a).sum(3)  # noqa: B023
                return dense_attention(edges, scores, x, mask)  # noqa: B023

            compare(lambda x, y, a: attend_dynamic(x, y, a, block, dropout=p), gatv2, x, both, a)  # noqa: B023


def test_dropout_of_a_block() -> None:
    """Fails if a mask is not that of the vertex, the step and the call, or the blocks of a batch repeat one."""
    batch = list(loader_of(graph_of("random"), np.arange(20)))[2]
    for site, block in enumerate(batch.blocks, start=1):
        mask = torch.from_numpy(dropout_mask(block.ids.numpy(), 11, 0.3, 8123, 2, site))
        compare(lambda x: dropout(x, block, 0.3), lambda x: x * mask, random(block.num_rows, 11))  # noqa: B023


class Sage(torch.nn.Module):
    """Two layers of GraphSAGE's mean; `mean` gives that of a block's targets."""

    def __init__(self, mean: Callable[[Tensor, SampledBlock], Tensor]) -> None:
        super().__init__()
        self.mean = mean
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2 * a, b).double() for a, b in ((6, 8), (8, 3)))

    def forward(self, batch: SampledBatch) -> Tensor:
        h = batch.x
        for number, (layer, block) in enumerate(zip(self.layers, batch.blocks, strict=True)):
            h = layer(torch.cat([h[: block.num_targets], self.mean(h, block)], 1))
            h = h if number else torch.relu(h)
        return h


def test_gradients_of_a_model_over_blocks() -> None:
    """Fails if two layers over the blocks of a batch have other losses or gradients than the dense formula."""
    batch = first(loader_of(graph_of("weighted"), norm="mean"))
    assert batch.y is not None
    degree = torch.from_numpy(dense_csr(graph_of("weighted").adj).sum(0))

    def mean(h: Tensor, block: SampledBlock) -> Tensor:
        inverse = 1 / degree[block.ids[: block.num_targets]]
        return torch.where(inverse.isfinite(), inverse, 0.0)[:, None] * (dense(block) @ h)

    found, expected = Sage(aggregate), Sage(mean)
    losses = [torch.nn.functional.cross_entropy(model(batch), batch.y) for model in (found, expected)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for loss in losses:
        loss.backward()
    for one, two in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-12)


def test_layers_of_pyg_over_a_block() -> None:
    """Fails if edges that PyG's layers read are not those of the block, or targets are not its first rows."""
    block = first(loader_of(graph_of("random"), np.arange(20))).blocks[0]
    x, t, edges = random(block.num_rows, 6), block.num_targets, dense(block, weighted=False)
    torch.manual_seed(9)
    sage, gcn, gat = (layer.double() for layer in (pyg.SAGEConv(6, 4), pyg.GCNConv(6, 4), pyg.GATConv(6, 4)))
    mean = edges / edges.sum(1, keepdim=True).clamp(min=1)
    wanted = sage.lin_l(mean @ x) + sage.lin_r(x[:t])
    torch.testing.assert_close(sage(*block.to_pyg(x)), wanted, rtol=1e-10, atol=1e-10)
    square = torch.eye(block.num_rows, dtype=torch.float64)
    square[:t] += edges
    scale = square.sum(1) ** -0.5
    wanted = (scale[:, None] * square * scale) @ gcn.lin(x) + gcn.bias
    torch.testing.assert_close(gcn(x, block.edge_index())[:t], wanted[:t], rtol=1e-10, atol=1e-10)
    h = gat.lin(x)
    scores = (h @ gat.att_src[0, 0])[None] + (h @ gat.att_dst[0, 0])[:t, None]
    scores = torch.nn.functional.leaky_relu(scores, 0.2)[:, :, None]
    wanted = dense_attention(square[:t] != 0, scores, h, torch.ones_like(scores)) + gat.bias
    torch.testing.assert_close(gat(*block.to_pyg(x)), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("conv", [pyg.SAGEConv, pyg.GATConv, pyg.GINConv, pyg.GCNConv])
def test_all_neighbours_in_the_form_of_neighbor_loader(conv: Any) -> None:
    """Fails if `edge_index` has an edge twice or lacks one: a model over it then gives seeds other scores than the whole
    graph's. GCN reads the degrees of neighbours, too, which one hop more draws.
    """
    graph = graph_of("directed")
    torch.manual_seed(4)
    make = (lambda a, b: conv(torch.nn.Linear(a, b))) if conv is pyg.GINConv else conv
    one, two = (make(*sizes).double() for sizes in ((6, 8), (8, 3)))

    def model(x: Tensor, edge_index: Tensor) -> Tensor:
        return two(torch.relu(one(x, edge_index)), edge_index)  # type: ignore[no-any-return]

    features = torch.from_numpy(graph.features.array()).double()  # type: ignore[union-attr]
    edges = torch.from_numpy(np.argwhere(dense_csr(graph.adj)).T.copy())
    whole = model(features, edges)
    for batch in loader_of(graph, np.arange(37), fanout=(ALL,) * (2 + (conv is pyg.GCNConv))):
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        torch.testing.assert_close(out, whole[batch.ids[: batch.batch_size]], rtol=1e-10, atol=1e-10)
        assert batch.edge_weight.shape == batch.edge_index[0].shape
        torch.testing.assert_close(batch.x, features[batch.ids])


def test_edges_in_the_form_of_neighbor_loader_are_within_the_fan_outs() -> None:
    """Fails if a row takes more edges than the hop that reached it first allows, or an edge is not the graph's."""
    graph = graph_of("random")
    adj = torch.from_numpy(dense_csr(graph.adj))
    batch = first(loader_of(graph, np.arange(37), fanout=(4, 2), batch=3))
    sources, targets = batch.edge_index
    assert (adj[batch.ids[sources], batch.ids[targets]] != 0).all()
    degree, counts = (adj != 0).sum(0)[batch.ids], torch.bincount(targets, minlength=len(batch.ids))
    near = batch.blocks[0].num_targets
    assert torch.equal(counts[:3], degree[:3].clamp(max=4))
    assert torch.equal(counts[3:near], degree[3:near].clamp(max=2))
    assert not counts[near:].any()


def contents(loader: Any) -> list[Any]:
    """What an epoch gives."""
    return [[b.ids, b.x, b.y, b.edge_index, b.edge_weight] for b in loader]


def same(one: list[Any], two: list[Any]) -> bool:
    pairs = zip(itertools.chain(*one), itertools.chain(*two), strict=True)
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("draw", ["uniform", "replace", "labor-one"])
def test_epochs_differ_and_loops_repeat(draw: str) -> None:
    """Fails if batches depend on threads, on when they are read or on other loops, or two epochs are one."""
    graph = graph_of("random")
    one = loader_of(graph, draw=draw)
    assert len(one) == len(contents(one))
    assert one.epoch == 1
    second = contents(one)
    for ahead, threads in ((0, 0), (1, 1), (5, 0)):
        other = loader_of(graph, draw=draw, ahead=ahead, threads=threads)
        assert not same(contents(other), second)
        assert same(contents(other), second)
    one.epoch = 1
    beside = loader_of(graph, draw=draw, seed=8123)
    beside.epoch = 1
    pairs = list(zip(one, beside, strict=True))  # kept until both have ended
    assert same(contents([a for a, _ in pairs]), second)
    assert same(contents([b for _, b in pairs]), second)
    assert not same(contents(loader_of(graph, draw=draw, seed=7)), contents(loader_of(graph, draw=draw)))


def test_a_loop_that_ends_early_leaves_no_thread() -> None:
    """Fails if `break` leaves threads behind, or the next iterations are not those of a loop that went on."""
    one, other = (loader_of(graph_of("random"), np.arange(37), batch=2) for _ in range(2))
    epochs, before = [contents(other) for _ in range(3)], set(threading.enumerate())
    for _ in one:
        break
    assert [same(contents(one), epoch) for epoch in epochs[1:]] == [True, True]
    started = set(threading.enumerate()) - before
    assert started
    del one
    gc.collect()
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)


def test_a_loop_that_is_left_keeps_its_feed() -> None:
    """Fails if each `break` leaves a feed behind, with the memory of its batches and its threads."""
    loader, made = loader_of(graph_of("random"), np.arange(37), batch=2), list[Any]()
    feed = loader.feed

    def noted() -> Any:
        made.append(feed())
        return made[-1]

    loader.feed = noted
    for _ in range(3):
        for _ in loader:
            break
    assert len(made) == 1
    with contextlib.closing(iter(loader)) as one, contextlib.closing(iter(loader)) as beside:
        next(one), next(beside)
        assert len(made) == 2
    for _ in zip(loader, loader, strict=True):
        break
    assert len(made) == 2


def test_several_own_edges_cut_no_batch() -> None:
    """Fails if a batch of a graph with several self-loops a vertex, of other types, comes in halves, or loses one."""
    n, loops = 6, np.tile(np.arange(6), 3)
    edges = np.hstack([np.stack([loops, loops]), np.argwhere(~np.eye(n, dtype=bool)).T])
    types = np.append(np.repeat(np.arange(3), n), np.zeros(n * (n - 1), int))
    graph = mggcn.load(edges, edge_types=types, features=np.eye(n, dtype=np.float32))
    for batch, sizes in ((1, [1] * n), (4, [4, 2]), (n, [n])):
        found = list(loader_of(graph, np.arange(n), fanout=[1, 1], batch=batch, self_loops=True))
        assert [one.seeds for one in found] == sizes
        assert all(block.num_edges == 4 * block.num_targets for one in found for block in one.blocks)


def test_seeds_in_every_form() -> None:
    """Fails if a split, a mask and ids differ, an order is lost, or the last batch stays against the word."""
    graph = graph_of("random")
    mask = graph.splits["train"].array()[0].astype(bool)
    by_name = contents(loader_of(graph, "train"))
    assert same(by_name, contents(loader_of(graph, torch.from_numpy(mask))))
    assert same(by_name, contents(loader_of(graph, np.flatnonzero(mask))))
    given = [30, 2, 17, 9, 5]
    found = list(loader_of(graph, given, batch=2, shuffle=False))
    assert [b.ids[: b.seeds].tolist() for b in found] == [[30, 2], [17, 9], [5]]
    assert torch.equal(torch.cat([b.y for b in found]), torch.from_numpy(graph.labels.array()[given]).long())  # type: ignore[union-attr]
    dropped = loader_of(graph, given, batch=2, drop_last=True)
    assert len(dropped) == len(list(dropped)) == 2
    read = {int(v) for b in loader_of(graph, given, batch=2) for v in b.ids[: b.seeds]}
    assert read == set(given)


@pytest.mark.parametrize("ids", [[2, 0, 1], [30, 10, 20], ["c", "a", "b"]])
def test_seeds_of_a_graph_with_ids(ids: list[Any]) -> None:
    """Fails if seeds are other vertices than a split of these ids has, a mask is not of rows, or a refusal names a row."""
    edges = np.array([[ids[0], ids[1], ids[2]], [ids[1], ids[2], ids[0]]])
    graph = mggcn.load(edges, features=np.diag([1.0, 2.0, 3.0]), ids=ids, splits={"train": [ids[1]]})
    for given, rows in (([ids[2], ids[0]], [2, 0]), ("train", [1]), (np.array([True, False, True]), [0, 2])):
        (batch,) = loader_of(graph, given, fanout=[1], shuffle=False)
        assert batch.ids[: batch.seeds].tolist() == rows
        assert batch.x[:, :3].max(1).values.tolist() == [1.0 + row for row in batch.ids.tolist()]
        if not isinstance(given, str) and len(given) == 2:
            assert graph.ids is not None
            assert graph.ids.take(batch.ids.numpy())[:2].tolist() == given
    with pytest.raises(GraphError, match=f"vertex {ids[2]} is twice"):
        loader_of(graph, [ids[2], ids[2]], fanout=[1])
    unknown = "z" if isinstance(ids[0], str) else 77
    for wrong in ([unknown], [2.5], []):
        with pytest.raises(GraphError, match="seeds"):
            loader_of(graph, wrong, fanout=[1])


@pytest.mark.parametrize("fanout", [("all", "all"), (), (3, 2)])
@pytest.mark.parametrize("batch", ["all", 0])
def test_a_loader_has_batches(batch: Any, fanout: Any) -> None:
    """Fails if the word for the whole graph gives a loader without seeds, or is refused by what it does not have."""
    with pytest.raises(ConfigError, match="batch expects the seeds of a batch, 1 or more"):
        loader_of(graph_of("random"), batch=batch, fanout=fanout)


def test_what_needs_more_than_a_block_says_so() -> None:
    """Fails if a block is refused in Python's words or untrue ones, or a batch norm that is trained does not take it."""
    batch = first(loader_of(graph_of("random"), np.arange(20)))
    norm = mggcn.nn.BatchNorm(6).double()
    with pytest.raises(GraphError, match=r"take torch.nn.BatchNorm1d\(6\)"):
        norm(batch.x, batch.blocks[0])
    torch.testing.assert_close(norm.eval()(batch.x, batch.blocks[0]), torch.nn.BatchNorm1d(6).double().eval()(batch.x))
    with pytest.raises(GraphError, match="blocks of batches have no types of edges"):
        mggcn.nn.aggregate_relations(batch.x, torch.eye(2).double(), batch.blocks[0])


def test_labels_of_every_task() -> None:
    """Fails if unknown entries of several labels are no NaN, numbers lose their type, or a graph without labels breaks."""
    edges, x = np.array([[0, 1, 2], [1, 2, 0]]), np.eye(3, dtype=np.float32)
    several, numbers = np.array([[1, 0], [-1, 1], [0, 0]], np.int8), np.array([[0.5], [np.nan], [2.0]], np.float32)
    wanted = torch.tensor([[1.0, 0.0], [torch.nan, 1.0], [0.0, 0.0]], dtype=torch.float64)
    for labels, expected in ((several, wanted), (numbers, torch.from_numpy(numbers).double()), (None, None)):
        graph = mggcn.load(edges, features=x, labels=labels)
        y = first(loader_of(graph, [0, 1, 2], shuffle=False)).y
        assert (y is None) == (expected is None)
        if y is not None:
            torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_types(precision: str) -> None:
    """Fails if features, sums or labels of numbers have another type than was asked for."""
    batch = first(loader_of(graph_of("random"), precision=precision, norm="mean"))
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    assert batch.x.dtype == dtype
    assert batch.x.is_contiguous()
    block = batch.blocks[0]
    z = aggregate(batch.x, block)
    assert (z.dtype, z.shape) == (dtype, (block.num_targets, 6))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"fanout": ()}, ConfigError, "fanout is not set"),
        ({"ahead": -1}, ConfigError, "ahead expects 0 or more"),
        ({"fanout": (3, 0)}, ConfigError, "must be 1 or more for each layer"),
        ({"fanout": (3, 70_000)}, ConfigError, "a fan-out must lie in"),
        ({"fanout": (3, "few")}, ConfigError, "fanout expects"),
        ({"batch": -1}, ConfigError, "batch must be 0 or more"),
        ({"draw": "any"}, ConfigError, "draw expects"),
        ({"norm": "max"}, ConfigError, "norm must be one of"),
        ({"precision": "tf32"}, ConfigError, "use fp32"),
        ({"ahead": 99}, ConfigError, "ahead must lie in"),
        (
            {"fanout": [{0: 2, "else": 1}]},
            ConfigError,
            "blocks of batches have no types of edges; give a number for each",
        ),
        ({"draw": "weight"}, ConfigError, "this one has none; draw uniformly"),
        ({"seeds": "trian"}, GraphError, "it has train, val: name one"),
        ({"seeds": [3, 37]}, GraphError, "seeds must be vertices 0 .. 36, got 37"),
        ({"seeds": [-1, 3]}, GraphError, "seeds must be vertices 0 .. 36, got -1"),
        ({"seeds": [4, 9, 4]}, GraphError, "vertex 4 is twice among the seeds; give each vertex once"),
        ({"seeds": []}, GraphError, "there are no seeds"),
        ({"seeds": np.zeros(37, bool)}, GraphError, "there are no seeds"),
        ({"seeds": np.ones(36, bool)}, GraphError, "a mask of 37 vertices, got bool of shape"),
        ({"seeds": [0.5]}, GraphError, "got float64 of shape"),
        ({"seeds": [[1, 2]]}, GraphError, r"of shape \(1, 2\)"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    """Fails if a wrong setting or seed passes, or a message does not say what came and what to do in one line."""
    with pytest.raises(error, match=words) as caught:
        loader_of(graph_of("random"), **settings)
    assert "\n" not in str(caught.value)


def test_graphs_and_rows_that_are_refused() -> None:
    """Fails if a graph without features, one whose edges repeat, or rows of another size or type pass."""
    graph = graph_of("random")
    with pytest.raises(GraphError, match=r"expected a graph from mggcn.load"):
        batches(np.zeros((2, 3)), [0], fanout=(2,))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="has no features; give it some"):
        loader_of(dataclasses.replace(graph, features=None))
    block = first(loader_of(graph)).blocks[1]
    rows = random(block.num_rows, 6)
    for x, words in ((rows[1:], "a block aggregates"), (rows.float(), "set its precision")):
        with pytest.raises(GraphError, match=words):
            aggregate(x, block)
    scores = random(block.num_rows, 2)
    with pytest.raises(GraphError, match=rf"destination must be \({block.num_targets}, H\)"):
        attend(rows, scores, scores, block)
    with pytest.raises(GraphError, match=rf"a block aggregates \({block.num_targets}, D\)"):
        attend_dynamic(rows, rows, random(2, 3), block)
    edges = torch.tensor([[0, 0, 1, 2], [1, 1, 2, 0]])
    repeated = mggcn.load(Data(x=torch.eye(3), edge_index=edges, num_nodes=3))
    block = first(loader_of(repeated, [1], fanout=(ALL,))).blocks[0]
    assert aggregate(torch.eye(3).double()[: block.num_rows], block)[0, 1] == 2  # both count in a sum
    with pytest.raises(GraphError, match="which batches do not keep apart"):
        attend(random(2, 2), random(2, 1), random(1, 1), block)


def test_a_block_of_dgl() -> None:
    """Fails if DGL's block has other edges, sizes or weights; without DGL if the message does not say so."""
    block = first(loader_of(graph_of("weighted"))).blocks[0]
    try:
        import dgl  # noqa: F401
    except ImportError:
        with pytest.raises(BackendError, match="to_dgl needs DGL"):
            block.to_dgl()
        pytest.skip("DGL is not installed")
    made = block.to_dgl()
    assert (made.num_src_nodes(), made.num_dst_nodes()) == (block.num_rows, block.num_targets)
    assert torch.equal(torch.stack(made.edges()), block.edge_index())
    assert block.edge_weight is not None
    assert torch.equal(made.edata["w"], block.edge_weight)
