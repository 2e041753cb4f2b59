"""Small graphs that break things, and runs of one epoch on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.assemble.plan import dense_products, plan_graph, resolve
from mggcn.assemble.rank import Rank, gpu_of_rank, make_rank
from mggcn.comm.base import Communicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config
from mggcn.feed.batch import Feed
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.model.builder import Network
from tests.devices import DeviceOf


def csr(matrix: Any, weighted: bool = False) -> CSR:
    m = sp.csr_matrix(matrix)
    m.sum_duplicates()
    m.sort_indices()
    values = ArrayRows(m.data.astype(np.float32)) if weighted else None
    return CSR(ArrayRows(m.indptr.astype(np.int64)), ArrayRows(m.indices.astype(np.int32)), values, m.shape[1])


def make_graph(
    adj: Any, *, num_features: int, num_classes: int, sparse: bool = False, weighted: bool = False, seed: int
) -> Graph:
    """A graph with random features, labels and splits on a given adjacency."""
    rng = np.random.default_rng(seed)
    adj = sp.csr_matrix(adj)
    n = adj.shape[0]
    x = rng.normal(size=(n, num_features)).astype(np.float32)
    if sparse:
        x *= rng.random(x.shape) < 0.3
    symmetric = (adj != adj.T).nnz == 0
    forward = csr(adj, weighted)
    backward = forward if symmetric else csr(adj.T, weighted)
    train = rng.random(n) < 0.6
    train[0] = True
    val = ~train & (rng.random(n) < 0.5)
    labels = rng.integers(0, num_classes, n)
    labels[~(train | val)] = -1
    splits = {"train": ArrayRows(train[None]), "val": ArrayRows(val[None])}
    features = csr(x, True) if sparse else ArrayRows(x)
    return Graph(
        name="small",
        adj=forward,
        adj_t=backward,
        features=features,
        labels=ArrayRows(labels),
        splits=splits,
        num_classes=num_classes,
    )


def pattern(kind: str, n: int, seed: int) -> Any:
    """Adjacency of a named shape; "directed" ones are not symmetric."""
    rng = np.random.default_rng(seed)
    dense = np.zeros((n, n), np.float32)
    if kind == "empty":
        return dense
    if kind == "path":
        dense[np.arange(n - 1), np.arange(1, n)] = 1
    elif kind == "star":
        dense[0, 1:] = 1
    elif kind == "hub-row":
        dense[rng.random((n, n)) < 0.05] = 1
        dense[n // 2] = 1
    elif kind == "disconnected":
        half = n // 2
        dense[:half, :half] = rng.random((half, half)) < 0.3
    else:
        dense = (rng.random((n, n)) < 0.15).astype(np.float32)
    np.fill_diagonal(dense, 0)
    if kind == "directed":
        dense[:, 3] = 0  # a vertex without in-edges
        dense[4, 4] = 1  # a stored self-loop
        return dense
    if kind == "weighted":
        dense *= rng.random((n, n)).astype(np.float32)
        return dense
    return np.maximum(dense, dense.T)


@dataclass
class Trained:
    """What a rank found in one epoch."""

    loss: float
    grads: dict[str, np.ndarray]
    weights: dict[str, Any]
    ids: np.ndarray
    logits: np.ndarray
    rank: Rank


def on_ranks(
    config: Config,
    graph: Graph,
    body: Callable[[Rank], Any],
    timeout_s: float = 60,
    device_of: DeviceOf = gpu_of_rank,
    network: Network | None = None,
    feed_of: Callable[[int], Feed] | None = None,
) -> list[Any]:
    """Plan a run, once for all ranks, build them in threads and return what `body` gives on each.

    network: another model than the configuration's. feed_of: makes the feed of a rank, which then plans for itself; by
    default the whole graph's.
    """
    config = resolve(config, graph)

    def run(comm: Communicator) -> Any:
        feed = None if feed_of is None else feed_of(comm.rank)
        plan, owners = once or plan_graph(config, graph, network=network, stack=None if feed is None else feed.stack)
        return body(make_rank(config, graph, plan, owners, comm, device_of=device_of, feed=feed))

    with dense_products(config):
        once = plan_graph(config, graph, network=network) if feed_of is None else None
        return run_threads(config.run.ranks, run, timeout_s) if config.run.ranks > 1 else [run(SingleCommunicator())]


def far_from_kinks(rank: Rank) -> None:
    """Make all activations positive: rounding moves none across ReLU's kink, where gradients jump."""
    weights = rank.trainer.runtime.weights
    weights.flat.abs_()
    for name, view in weights.views.items():
        if name.endswith("bias"):
            view.fill_(4.0)
    weights.refresh()


def one_epoch(
    config: Config,
    graph: Graph,
    epoch: int = 3,
    device_of: DeviceOf = gpu_of_rank,
    network: Network | None = None,
) -> list[Trained]:
    """Gradients of one epoch, and the logits of an evaluation, on every rank."""

    def body(rank: Rank) -> Trained:
        trainer = rank.trainer
        loss = trainer.gradients(epoch)
        grads = {n: g.cpu().numpy().copy() for n, g in trainer.runtime.weights.grads.items()}
        trainer.evaluate()
        return Trained(
            loss,
            grads,
            trainer.runtime.weights.state_dict(),
            trainer.runtime.inputs.owned.ids.cpu().numpy(),
            trainer.logits().cpu().double().numpy(),
            rank,
        )

    return on_ranks(config, graph, body, device_of=device_of, network=network)


def assert_sent_as_planned(rank: Rank) -> None:
    """Fails if a step or an evaluation of a rank sends a byte or a message that its plan does not know."""
    steps = ((rank.plan.train, lambda: rank.trainer.step(0)), (rank.plan.evaluate, rank.trainer.evaluate))
    for program, run in steps:
        rank.comm.bytes_sent = rank.comm.messages = 0
        run()
        assert rank.comm.bytes_sent == rank.plan.bytes_sent(program)
        assert rank.comm.messages == rank.plan.messages(program)


def largest_error(
    found: Sequence[Trained], loss: float, gradients: Mapping[str, np.ndarray], logits: np.ndarray
) -> float:
    """Largest error of loss, gradients and logits on any rank, relative to the largest value of each; NaN is an error."""
    assert found[0].grads.keys() == gradients.keys()
    errors = [abs(rank.loss - loss) / abs(loss) for rank in found]
    for rank in found:
        assert rank.loss == found[0].loss
        errors += [np.abs(rank.grads[n] - g).max() / (np.abs(g).max() or 1) for n, g in gradients.items()]
        if rank.ids.size:
            errors.append(np.abs(rank.logits - logits[rank.ids]).max() / (np.abs(logits).max() or 1))
    assert not np.isnan(errors).any()
    return max(map(float, errors))
