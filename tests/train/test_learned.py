"""Learned rows of vertices: gradients are autograd's, and steps those of torch's optimisers, for every number of ranks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, DataConfig, SampleConfig, from_tables
from mggcn.errors import ConfigError, DivergedError, PlanError
from mggcn.feed.batch import Batch
from mggcn.graph.csr import Graph
from mggcn.memory.arena import BufferSpec
from mggcn.model.kinds.combine import Scaled
from mggcn.model.kinds.ends import Input, LearnedGrad
from mggcn.model.network import make_values
from mggcn.model.values import Adjoint, Value
from mggcn.partition.order import assign
from mggcn.planning.learned import room_rows
from mggcn.train.learned import LearnedRows, start_rows
from mggcn.train.log import RunLog
from tests.feed.test_blocks import MODELS, Twin, config_of, graph_of
from tests.feed.test_sampled import sampled
from tests.graphs import assert_sent_as_planned, make_graph, on_ranks, pattern
from tests.model.dense_stack import EPOCH, DenseStack
from tests.reference import philox
from tests.train.tasks import dense_loss
from tests.train.test_exact import SEED

D = 7
"""Columns of the learned rows; rows in memory are padded to more."""
STEPS = 30
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TOLERANCES = {"fp32": 1e-6, "fp64": 1e-12}
NO_CHECKS = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
"""torch's own optimisers make sparse tensors without checks, and torch warns of that."""


def learning(config: Config, **train: Any) -> Config:
    """The configuration with learned rows instead of features."""
    train = {"optimizer": "adam"} | train
    return dataclasses.replace(
        config, data=DataConfig(inputs=f"learned:{D}"), train=dataclasses.replace(config.train, **train)
    )


def without_features(graph: Graph) -> Graph:
    return dataclasses.replace(graph, features=None)


def rows_of(found: list[tuple[np.ndarray, Any]], num_vertices: int) -> np.ndarray:
    """The rows of all vertices from (ids, rows) of each rank."""
    whole = np.full((num_vertices, D), np.nan)
    for ids, rows in found:
        whole[ids] = rows
    assert not np.isnan(whole).any()
    return whole


def own_rows(rank: Rank) -> tuple[np.ndarray, np.ndarray]:
    runtime = rank.trainer.runtime
    assert runtime.learned is not None
    return runtime.inputs.owned.ids.numpy(), runtime.learned.values.double().numpy().copy()


# ---------------------------------------------------------------- where rows start


def test_rows_start_as_their_names_say() -> None:
    """Fails if a row depends on anything but seed and vertex, leaves +-1 / sqrt(D), or its numbers are alike."""
    ids = np.array([5, 0, 2**31, 2**40 + 3])
    rows = start_rows(917, ids, 10)
    counter = np.zeros((4, 3, 4), np.uint64)
    counter[..., 0] = 0xF0000000 + np.arange(3)
    counter[..., 1], counter[..., 2] = (ids & 0xFFFFFFFF)[:, None], (ids >> 32)[:, None]
    words = philox(counter, (917, 0)).reshape(4, 12)[:, :10].astype(np.float64)
    np.testing.assert_allclose(rows, (2 * (words + 0.5) / 2**32 - 1) / math.sqrt(10), rtol=1e-12)
    many = start_rows(31, np.arange(4000), 16)
    assert np.abs(many).max() <= 0.25
    assert abs(many.mean()) < 3 * 0.25 / math.sqrt(3 * many.size)
    assert many.std() == pytest.approx(0.25 / math.sqrt(3), rel=0.01)
    assert np.unique(many).size > 0.99 * many.size
    assert not np.array_equal(start_rows(918, ids, 10), rows)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch", [0, 14])
def test_ranks_start_with_the_same_rows(ranks: int, batch: int) -> None:
    """Fails if the rank of a vertex, or whether runs have batches, changes what its row starts with."""
    config = learning(sampled(ranks, MODELS["gcn"]) if batch else config_of(ranks, MODELS["gcn"]))
    graph = without_features(graph_of())
    whole = rows_of(on_ranks(config, graph, own_rows), graph.num_vertices)
    np.testing.assert_array_equal(whole, start_rows(config.train.seed, np.arange(graph.num_vertices), D))


# ---------------------------------------------------------------- the whole graph

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "gcn": {"kind": "gcn", "dropout": 0.3, "input_dropout": 0.2},
    "gcn, narrow first": {"kind": "gcn", "hidden": (20,), "norm": "mean"},
    "gcn, one layer": {"kind": "gcn", "hidden": ()},
    "sage": {"kind": "sage", "aggregator": "mean", "input_dropout": 0.3},
    "sage-max": {"kind": "sage", "aggregator": "max"},
    "gin": {"kind": "gin"},
    "gat": {"kind": "gat", "heads": 2, "hidden": (8,), "attention_dropout": 0.3},
    "gatv2": {"kind": "gatv2", "heads": 2, "hidden": (8,)},
    "sgc": {"kind": "sgc", "hops": 2, "hidden": ()},
    "appnp": {"kind": "appnp", "hops": 3},
    "residual": {"kind": "gcn", "residual": "linear", "norm_layer": "batch"},
    "mlp": {"kind": "mlp"},
}
STRATEGIES = ["broadcast", "halo", "slice"]


def whole(name: str, ranks: int, **run: Any) -> Config:
    config = config_of(ranks, CONVOLUTIONS[name])
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=SEED))
    return learning(dataclasses.replace(config, run=dataclasses.replace(config.run, **run)))


def gradient_of(rank: Rank) -> dict[str, Any]:
    loss, runtime = rank.trainer.gradients(EPOCH), rank.trainer.runtime
    assert runtime.learned is not None
    return {
        "loss": loss,
        "ids": runtime.inputs.owned.ids.numpy(),
        "gradient": runtime.learned.gradient.numpy().copy(),
        "rows": runtime.learned.values.numpy().copy(),
        "grads": {name: grad.numpy().copy() for name, grad in runtime.weights.grads.items()},
        "weights": runtime.weights.state_dict(),
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_rows_equal_autograd(name: str, ranks: int) -> None:
    """Fails if the input has no gradient, or that of another rank's row, of a sum that was computed once, or of no mask."""
    compare_gradients(name, ranks)


def test_a_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a wrong adjoint of the input passes for the right one."""

    def wrong(self: Input, value: Value, gradient: Value) -> Adjoint:
        return Adjoint((), (Value(LearnedGrad(), (Value(Scaled(1.001), (gradient,), value.cols),)),))

    make_values.cache_clear()
    monkeypatch.setattr(Input, "adjoint", wrong)
    try:
        with pytest.raises(AssertionError):
            compare_gradients("gcn", 2)
    finally:
        make_values.cache_clear()


def compare_gradients(name: str, ranks: int) -> None:
    """Compare loss and gradients of a step over the whole graph, rows' and weights', with autograd of the dense formula."""
    graph = without_features(graph_of())
    strategy = STRATEGIES[(ranks + len(name)) % 3] if name not in ("gat", "gatv2", "sage-max", "residual") else "halo"
    config = whole(name, ranks, strategy=strategy)
    found = on_ranks(config, graph, gradient_of)
    rows = torch.from_numpy(rows_of([(r["ids"], r["rows"]) for r in found], graph.num_vertices)).requires_grad_()
    weights = found[0]["weights"]
    p = {n: w.clone().requires_grad_() for n, w in weights.items() if "running" not in n}
    with torch.enable_grad():
        stack = DenseStack(graph_of(), config.model, p, {}, training=True)
        stack.x = rows
        loss = dense_loss(graph, config.train, stack.logits())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
    assert found[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-12)
    expected = rows.grad.numpy()  # type: ignore[union-attr]  # after backward
    got = rows_of([(r["ids"], r["gradient"]) for r in found], graph.num_vertices)
    assert np.abs(expected).max() > 1e-4
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    for key, parameter in p.items():
        wanted = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        np.testing.assert_allclose(
            found[0]["grads"][key], wanted, rtol=0, atol=max(1e-10 * np.abs(wanted).max(), 1e-14)
        )


def epochs_of(count: int) -> Any:
    """What trains so many epochs on a rank, and returns its losses, its rows and the weights."""

    def body(rank: Rank) -> tuple[list[float], np.ndarray, np.ndarray, dict[str, torch.Tensor]]:
        losses = [rank.trainer.step(epoch) for epoch in range(count)]
        return losses, *own_rows(rank), rank.trainer.runtime.weights.state_dict()

    return body


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.01},
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "momentum": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_graph_runs_move_all_rows_as_torch_does(name: str, ranks: int) -> None:
    """Fails if rows have another learning rate, decay or moments than the weights, or a rank moves those of another."""
    graph, settings = without_features(graph_of()), {"lr": 0.02} | OPTIMIZERS[name]
    config = whole("sage", ranks)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, input_dropout=0.0))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=STEPS, **settings))
    found = on_ranks(config, graph, epochs_of(STEPS))
    start = on_ranks(config, graph, lambda rank: (*own_rows(rank), rank.trainer.runtime.weights.state_dict()))
    rows = torch.from_numpy(rows_of([one[:2] for one in start], graph.num_vertices)).requires_grad_()
    p = {n: w.clone().requires_grad_() for n, w in start[0][2].items()}
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    given = {key: value for key, value in settings.items() if key != "optimizer"}
    optimizer = kinds[settings["optimizer"]]([rows, *p.values()], **{"weight_decay": 0.0} | given)
    losses = list[float]()
    for _ in range(STEPS):
        with torch.enable_grad():
            optimizer.zero_grad()
            stack = DenseStack(graph_of(), config.model, p, {}, training=True)
            stack.x = rows
            loss = dense_loss(graph, config.train, stack.logits())
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        losses.append(float(loss.detach()))
    np.testing.assert_allclose(found[0][0], losses, rtol=1e-9)
    assert losses[-1] < 0.95 * losses[0]
    got = rows_of([one[1:3] for one in found], graph.num_vertices)
    np.testing.assert_allclose(got, rows.detach().numpy(), rtol=0, atol=1e-9)


# ---------------------------------------------------------------- rows of batches, given their gradients


class Given:
    """Rows that ranks read in each step and their gradients, the same for every way to move them. N vertices."""

    def __init__(self, ranks: int, dtype: torch.dtype, num_vertices: int = 40) -> None:
        self.ranks, self.dtype, self.num_vertices = ranks, dtype, num_vertices

    def of(self, step: int, rank: int) -> tuple[np.ndarray, torch.Tensor]:
        rng = np.random.default_rng([step, rank, 77])
        count = int(rng.integers(0, 20)) if rank else int(rng.integers(1, 20))
        ids = rng.permutation(self.num_vertices - 5)[:count]
        return ids, torch.from_numpy(rng.normal(size=(count, D))).to(self.dtype)


def moved(given: Given, optimizer: str, lr: float) -> tuple[np.ndarray, list[list[dict[str, int]]]]:
    """All rows after STEPS steps, and what each rank read and sent in each."""
    owners = assign(given.num_vertices, given.ranks, "random", 5)
    moments = {"adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",)}[optimizer]

    def body(inner: Communicator) -> tuple[np.ndarray, np.ndarray, list[dict[str, int]]]:
        comm, backend = CountingCommunicator(inner), CpuBackend(given.dtype, 1)
        dtype = next(name for name, kind in DTYPES.items() if kind == given.dtype)
        spec = BufferSpec("rows", owners.counts[comm.rank], D, dtype)
        rows, sent = LearnedRows(backend, comm, owners, spec, moments, 20), list[dict[str, int]]()
        rows.initialize(31)
        for step in range(STEPS):
            ids, gradient = given.of(step, comm.rank)
            before = comm.bytes_sent
            got = rows.fetch(ids)
            fetched = comm.bytes_sent - before
            assert got.shape == (ids.size, D)
            rows.gradient[: ids.size] = gradient
            rows.move(lr)
            remote = int(np.count_nonzero(owners.owner_of(ids) != comm.rank))
            pushed = comm.bytes_sent - before - fetched
            sent.append({"remote": remote, "fetched": fetched, "pushed": pushed})
        return owners.owned(comm.rank), rows.values.double().numpy().copy(), sent

    found = run_threads(given.ranks, body, 60) if given.ranks > 1 else [body(SingleCommunicator())]
    return rows_of([one[:2] for one in found], given.num_vertices), [one[2] for one in found]


@pytest.mark.covering(1)
@NO_CHECKS
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_move_as_sparse_optimisers_of_torch(ranks: int, optimizer: str, precision: str) -> None:
    """Fails if a row that ranks share is moved once for each, by moments of other steps, or an unread row is touched."""
    given = Given(ranks, DTYPES[precision])
    got, _ = moved(given, optimizer, 0.05)
    start = start_rows(31, np.arange(given.num_vertices), D)
    rows = torch.nn.Embedding(given.num_vertices, D, sparse=True, dtype=given.dtype)
    rows.weight.data.copy_(torch.from_numpy(start))
    kinds = {"adam": torch.optim.SparseAdam, "adagrad": torch.optim.Adagrad}
    stepper = kinds[optimizer](rows.parameters(), lr=0.05)  # type: ignore[operator]
    read = set[int]()
    for step in range(STEPS):
        stepper.zero_grad()
        with torch.enable_grad():
            of_ranks = [given.of(step, rank) for rank in range(ranks)]
            sum((rows(torch.from_numpy(ids)) * g).sum() for ids, g in of_ranks).backward()  # type: ignore[union-attr]  # a sum of some
        stepper.step()
        read |= {int(v) for ids, _ in of_ranks for v in ids}
    np.testing.assert_allclose(got, rows.weight.detach().double().numpy(), rtol=0, atol=TOLERANCES[precision])
    unread = sorted(set(range(given.num_vertices)) - read)
    assert len(unread) == 5
    np.testing.assert_array_equal(got[unread], torch.from_numpy(start[unread]).to(given.dtype).double().numpy())


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_sends_what_others_own(ranks: int) -> None:
    """Fails if a step sends more than 4 bytes and a gradient for each distinct row of another rank, and rows asked for."""
    given = Given(ranks, torch.float32)
    _, sent = moved(given, "adam", 0.05)
    row = 4 * D
    for step in range(STEPS):
        of_ranks = [sent[rank][step] for rank in range(ranks)]
        # A number to each rank, then a row's number where it is owned; the rows themselves are sent by their owners.
        requests = sum(one["fetched"] for one in of_ranks)
        remote = sum(one["remote"] for one in of_ranks)
        assert requests == ranks * (ranks - 1) * 8 + remote * (4 + row)
        assert [one["pushed"] for one in of_ranks] == [one["remote"] * row for one in of_ranks]
    assert sum(one["remote"] for rank in sent for one in rank) > 0


def test_rooms_are_no_larger_than_planned() -> None:
    """Fails if a plan takes a batch's own rows and others' for one batch together: rooms have the most of any step."""
    owners, sources = assign(40, 2, "random", 5), 12
    most = room_rows(20, sources, 2)

    def body(comm: Communicator) -> dict[str, int]:
        spec = BufferSpec("rows", owners.counts[comm.rank], D, "fp32")
        rows = LearnedRows(CpuBackend(torch.float32, 1), comm, owners, spec, ("exp_avg", "exp_avg_sq"), sources)
        rows.initialize(31)
        for step in range(4):
            ids = owners.owned((comm.rank + step) % 2)[:sources]
            rows.fetch(ids)
            rows.gradient[: ids.size] = 1
            rows.move(0.1)
        return {name: rows._rooms[name].shape[0] for name in most}

    for found in run_threads(2, body, 60):
        assert all(count <= most[name] for name, count in found.items())
        assert found["own"] + found["there"] == 2 * sources


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_run_gives_the_same_bits(ranks: int) -> None:
    """Fails if gradients of a row are added in the order in which they come."""
    given = Given(ranks, torch.float32)
    one, other = (moved(given, "adam", 0.05)[0] for _ in range(2))
    np.testing.assert_array_equal(one, other)


# ---------------------------------------------------------------- training on batches

EPOCHS = 10
"""Of three steps each."""


def trained_on_batches(rank: Rank) -> dict[str, Any]:
    """Batches, losses and what is left after all epochs, on a rank."""
    batches = list[Batch]()
    for epoch in range(EPOCHS):
        batches += [batch.copy() for batch in rank.feed.epoch(rank.trainer._seed, epoch)]
    start = own_rows(rank), rank.trainer.runtime.weights.state_dict()
    losses = [rank.trainer.step(epoch) for epoch in range(EPOCHS)]
    end = own_rows(rank), rank.trainer.runtime.weights.state_dict()
    return {"batches": batches, "stack": rank.feed.stack, "losses": losses, "start": start, "end": end}


class TwinOfRows(Twin):
    """The twin of a batch in the type of its rows."""

    def __init__(self, graph: Graph, config: Config, batch: Batch, p: Any, blocks: Any, x: torch.Tensor) -> None:
        super().__init__(graph, config.model, batch, p, blocks)
        self.x = x
        self.blocks = [tuple(one.to(x.dtype) for one in block) for block in self.blocks]


def by_torch(config: Config, graph: Graph, found: list[dict[str, Any]], dtype: torch.dtype) -> Any:
    """Losses, rows and weights of one process with an Embedding and torch's optimisers over the same batches."""
    n, train = graph.num_vertices, config.train
    rows = torch.nn.Embedding(n, D, sparse=True, dtype=dtype)
    rows.weight.data.copy_(torch.from_numpy(rows_of([one["start"][0] for one in found], n)))
    p = {name: w.to(dtype).clone().requires_grad_() for name, w in found[0]["start"][1].items()}
    sparse = torch.optim.SparseAdam if train.row_optimizer == "adam" else torch.optim.Adagrad
    steppers = [sparse(rows.parameters(), lr=train.lr), torch.optim.Adam(p.values(), lr=train.lr)]  # type: ignore[operator]
    labels, losses = graph.labels.array().astype(np.int64), list[float]()  # type: ignore[union-attr]  # it has some
    for step in range(len(found[0]["batches"])):
        for stepper in steppers:
            stepper.zero_grad()
        with torch.enable_grad():
            loss = torch.zeros((), dtype=dtype)
            for rank in found:
                batch, stack = rank["batches"][step], rank["stack"]
                x = rows(torch.from_numpy(batch.rows[stack.blocks[0].sources].astype(np.int64)))
                z = TwinOfRows(graph_of(), config, batch, p, stack.blocks, x).logits()
                wanted = torch.from_numpy(labels[batch.rows[stack.seeds]])
                loss = loss + torch.nn.functional.cross_entropy(z, wanted, reduction="sum") / batch.seeds.size
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
        for stepper in steppers:
            stepper.step()
        losses.append(float(loss.detach()))
    return losses, rows.weight.detach(), {name: w.detach() for name, w in p.items()}


def on_batches(ranks: int, model: str, row_optimizer: str, precision: str = "fp64", **train: Any) -> Config:
    config = learning(sampled(ranks, MODELS[model]), row_optimizer=row_optimizer, epochs=EPOCHS, **train)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision))


@pytest.mark.covering(1)
@NO_CHECKS
@pytest.mark.parametrize("row_optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("model", ["gcn", "gcn-wide", "sage", "gat"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_thirty_steps_equal_one_torch_process(ranks: int, model: str, row_optimizer: str) -> None:
    """Fails if a batch reads rows of before the last step, its gradients go to other rows, or a rank's are left out."""
    graph = without_features(graph_of())
    config = on_batches(ranks, model, row_optimizer)
    found = on_ranks(config, graph, trained_on_batches)
    assert len(found[0]["batches"]) == STEPS
    losses, rows, weights = by_torch(config, graph, found, torch.float64)
    means = np.array(losses).reshape(EPOCHS, 3).mean(1)
    np.testing.assert_allclose(found[0]["losses"], means, rtol=1e-11)
    got = rows_of([one["end"][0] for one in found], graph.num_vertices)
    # Attention has gradients that are zero but for rounding, which Adagrad divides by their root.
    np.testing.assert_allclose(
        got, rows.numpy(), rtol=0, atol=1e-10 if (model, row_optimizer) == ("gat", "adagrad") else 1e-12
    )
    for name, weight in weights.items():
        np.testing.assert_allclose(found[0]["end"][1][name].numpy(), weight.numpy(), rtol=0, atol=1e-11, err_msg=name)


@pytest.mark.covering(1)
@NO_CHECKS
@pytest.mark.parametrize("row_optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_thirty_steps_in_float32(ranks: int, row_optimizer: str) -> None:
    """Fails if rows of float32 drift from those of torch in float32."""
    graph = without_features(graph_of())
    config = on_batches(ranks, "sage", row_optimizer, "fp32", lr=0.002)
    found = on_ranks(config, graph, trained_on_batches)
    _, rows, _ = by_torch(config, graph, found, torch.float32)
    got = rows_of([one["end"][0] for one in found], graph.num_vertices)
    np.testing.assert_allclose(got, rows.double().numpy(), rtol=0, atol=1e-6)


def test_rows_that_no_step_reads_keep_their_bits() -> None:
    """Fails if moments or decay move a row that no batch has read, or all rows are read."""
    graph = without_features(graph_of())
    config = learning(sampled(2, MODELS["gcn"], fanout=(1, 1), batch=6), epochs=1, weight_decay=0.1)
    found = on_ranks(config, graph, lambda rank: first_step(rank))
    read = np.unique(np.concatenate([one["read"] for one in found]))
    unread = np.setdiff1d(np.arange(graph.num_vertices), read)
    before, after = (rows_of([one[when] for one in found], graph.num_vertices) for when in ("before", "after"))
    assert unread.size > 10
    np.testing.assert_array_equal(after[unread], before[unread])
    assert (after[read] != before[read]).any()


def first_step(rank: Rank) -> dict[str, Any]:
    batch = next(rank.feed.epoch(rank.trainer._seed, 0))
    read = batch.rows[rank.feed.stack.blocks[0].sources].copy()  # type: ignore[union-attr]  # of batches
    before = own_rows(rank)
    rank.trainer._epoch.start(rank.trainer._seed, 0)
    rank.trainer.advance(0, 1)
    return {"read": read, "before": before, "after": own_rows(rank)}


@pytest.mark.parametrize("model", ["gcn", "gat", "gin"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_batches_that_ranks_share_train_the_same_rows(ranks: int, model: str) -> None:
    """Fails if a row that a shared batch has on its owner, or on each reader, gets other gradients."""
    graph = without_features(graph_of())
    apart = learning(sampled(ranks, MODELS[model]), epochs=EPOCHS)
    shared = dataclasses.replace(apart, run=dataclasses.replace(apart.run, batches="cooperative"))
    one, other = (on_ranks(config, graph, epochs_of(EPOCHS)) for config in (apart, shared))
    np.testing.assert_allclose(one[0][0], other[0][0], rtol=1e-9)
    both = [rows_of([rank[1:3] for rank in found], graph.num_vertices) for found in (one, other)]
    np.testing.assert_allclose(*both, rtol=0, atol=1e-9)


def test_any_number_of_ranks_trains_the_same_rows() -> None:
    """Fails if losses of runs on batches depend on the number of ranks by more than rounding."""
    graph = without_features(graph_of())
    losses = [on_ranks(on_batches(p, "sage", "adam"), graph, epochs_of(EPOCHS))[0][0] for p in (1, 2, 3, 4)]
    for found in losses[1:]:
        np.testing.assert_allclose(found, losses[0], rtol=1e-9)


class CrashError(Exception):
    """What a test raises in the middle of an epoch."""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("row_optimizer", ["adam", "adagrad"])
def test_a_run_goes_on_within_an_epoch(
    row_optimizer: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a checkpoint within an epoch has rows, moments or a number of steps of another step."""
    graph, config = without_features(graph_of()), on_batches(ranks, "sage", row_optimizer, checkpoint_minutes=1e-9)

    def fit(folder: Path) -> list[Any]:
        folder.mkdir(exist_ok=True)

        def body(rank: Rank) -> Any:
            assert rank.trainer.fit(RunLog(folder if rank.trainer.rank == 0 else None, True, EPOCHS), folder)
            return own_rows(rank), rank.trainer.runtime.weights.state_dict(), rank.trainer.state()

        return on_ranks(config, graph, body)

    move = LearnedRows.move

    def broken(self: LearnedRows, rate: float) -> None:
        if int(self.steps) == 5:
            raise CrashError
        move(self, rate)

    expected = fit(tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(LearnedRows, "move", broken)
        with pytest.raises(CrashError):
            fit(tmp_path / "parts")
    assert (tmp_path / "parts" / "checkpoints" / "latest").read_text().startswith("run-000-epoch-000001-step-000002")
    for found, wanted in zip(fit(tmp_path / "parts"), expected, strict=True):
        np.testing.assert_array_equal(found[0][1], wanted[0][1])
        for one, other in ((found[1], wanted[1]), (found[2], wanted[2])):
            assert one.keys() == other.keys()
            assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_neighbours_give_the_whole_graphs_gradient(ranks: int) -> None:
    """Fails if the rows of a batch of all vertices have another gradient than the whole graph's."""
    graph = without_features(graph_of())
    batches = learning(sampled(ranks, MODELS["gcn"], batch=1000, fanout=(60, -1)))
    whole_graph = dataclasses.replace(batches, sample=SampleConfig())
    exact = on_ranks(whole_graph, graph, gradient_of)
    expected = rows_of([(one["ids"], one["gradient"]) for one in exact], graph.num_vertices)

    def body(rank: Rank) -> tuple[np.ndarray, np.ndarray]:
        rank.trainer.gradients(EPOCH)
        runtime = rank.trainer.runtime
        assert runtime.learned is not None
        ids = runtime.inputs.rows[rank.feed.stack.blocks[0].sources].ids.numpy()  # type: ignore[union-attr]  # of batches
        return ids, runtime.learned.gradient[: ids.size].numpy().copy()

    total = np.zeros_like(expected)
    for ids, gradient in on_ranks(batches, graph, body):
        total[ids] += gradient
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


# ---------------------------------------------------------------- faults, plans and refusals


@pytest.mark.parametrize("batch", [0, 14])
def test_a_gradient_that_is_not_finite_moves_nothing(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if one rank's rows take a gradient of infinity, or the other ranks go on."""
    graph, run = without_features(graph_of()), LearnedGrad.run

    def broken(self: LearnedGrad, rt: Any, op: Any) -> None:
        if rt.comm.rank == 1 and int(rt.clock[1]) == 2:
            op.tensor(rt, 0)[0, 0] = math.inf
        run(self, rt, op)

    monkeypatch.setattr(LearnedGrad, "run", broken)
    config = learning(sampled(2, MODELS["gcn"]) if batch else config_of(2, MODELS["gcn"]), epochs=4)

    def body(rank: Rank) -> tuple[np.ndarray, np.ndarray]:
        rank.trainer._epoch.start(rank.trainer._seed, 0)
        rank.trainer.advance(0, 2)
        before = own_rows(rank)[1]
        signals = rank.trainer.advance(2, 3)
        assert np.isnan(signals).any()
        return before, own_rows(rank)[1]

    for before, after in on_ranks(config, graph, body):
        np.testing.assert_array_equal(before, after)
    with pytest.raises(DivergedError):
        on_ranks(config, graph, lambda rank: [rank.trainer.step(epoch) for epoch in range(3)])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["broadcast", "halo"])
def test_whole_graph_runs_send_as_planned(ranks: int, strategy: str) -> None:
    """Fails if rows of the whole graph are sent, or a message that the plan does not know."""
    on_ranks(whole("sage", ranks, strategy=strategy), without_features(graph_of()), assert_sent_as_planned)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_on_batches_send_at_most_what_is_planned(ranks: int) -> None:
    """Fails if ranks send more together than their plans say, other messages, or rows nobody has asked for."""

    def body(rank: Rank) -> tuple[int, int, int, int]:
        rank.comm.bytes_sent = rank.comm.messages = 0
        rank.trainer._epoch.start(rank.trainer._seed, 0)
        rank.trainer.advance(0, 1)
        return (
            rank.comm.bytes_sent,
            rank.plan.bytes_sent(rank.plan.train),
            rank.comm.messages,
            rank.plan.messages(rank.plan.train),
        )

    found = on_ranks(learning(sampled(ranks, MODELS["gcn"])), without_features(graph_of()), body)
    assert sum(one[0] for one in found) <= sum(one[1] for one in found)
    assert all(one[2] == one[3] for one in found)
    assert (found[0][0] > 0) == (ranks > 1)


def test_plans_count_rows_moments_and_gradients() -> None:
    """Fails if a plan counts learned rows as features are counted, or a run on batches as one over the whole graph."""
    features = graph_of()
    graph = without_features(features)

    def planned(config: Config, of: Graph = graph) -> Any:
        return plan_graph(resolve(config, of), of)[0].ranks[0]

    name, row = "learned rows, beside themselves", 64  # 7 columns of float64, padded
    everything = planned(whole("gcn", 1))
    assert everything.regions["features"] == graph.num_vertices * row
    saved = 4 * graph.num_vertices * D * 8
    assert everything.regions[name] == graph.num_vertices * row * 4 + saved  # best, two moments, gradient
    assert everything.input.aggregated == 0
    config = sampled(2, MODELS["gcn"])
    batches, gathering = planned(learning(config)), planned(config, features)
    assert batches.learned.messages == 4
    assert batches.regions[name] > 3 * row * batches.sizes.owned
    assert batches.regions["batches on their way"] < gathering.regions["batches on their way"]
    assert batches.regions["features"] == batches.sizes.owned * row
    exact = planned(dataclasses.replace(whole("gcn", 1), train=dataclasses.replace(config.train, optimizer="sgd")))
    assert everything.regions[name] - exact.regions[name] == 2 * graph.num_vertices * (row + D * 8)


REFUSED: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"data": {"inputs": "learned:0"}}, "with D of 1 or more"),
    ({"data": {"inputs": "learned:-3"}}, "with D of 1 or more"),
    ({"data": {"inputs": "learned"}}, "with D of 1 or more"),
    ({"data": {"inputs": "learned:8", "row_normalize": True}}, "row_normalize divides features"),
    ({"run": {"device": "cuda"}}, "CPUs alone"),
    ({"run": {"precision": "bf16"}}, "choose mixed"),
    ({"run": {"features": "sparse"}}, "leave debug.features sparse out"),
    ({"run": {"strategy": "delayed", "ranks": 2}}, "choose halo"),
    ({"train": {"clip_norm": 1.0}}, "clip_norm"),
    ({"train": {"repeat": 2}}, "run each train.seed"),
    ({"sample": {"batch": 8, "fanout": (2, 2, 2), "first": "full"}}, "moves X; choose drawn"),
    ({"sample": {"batch": 8, "fanout": (2, 2, 2), "plan": "run"}}, "exchanges rows once; choose auto"),
    ({"train": {"evaluate": "blocks"}, "sample": {"batch": 8, "fanout": (2, 2, 2)}}, "choose whole"),
    ({"sample": {"batch": 8, "fanout": (2, 2, 2), "rows": "owners"}}, "fetches features"),
]


@pytest.mark.parametrize(("tables", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_makes_no_sense_is_refused(tables: dict[str, dict[str, Any]], message: str) -> None:
    """Fails if a setting that learned rows leave without effect, or that breaks them, is taken."""
    with pytest.raises(ConfigError, match=message) as refusal:
        from_tables({"data": {"inputs": "learned:8"}} | tables)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "config", [learning(config_of(1, MODELS["gcn"])), sampled(1, MODELS["gcn"])], ids=["whole", "read"]
)
def test_how_batches_move_rows_needs_both(config: Config) -> None:
    """Fails if a run that has no batches, or reads features, takes an optimiser of rows."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, row_optimizer="adagrad"))
    with pytest.raises(ConfigError, match="row_optimizer adagrad moves learned rows"):
        resolve(config, graph_of())


def test_a_step_in_parts_is_refused() -> None:
    """Fails if a feed of one's own gives a step in parts, of which other ranks would not know."""
    graph = without_features(graph_of())
    config = learning(sampled(1, MODELS["gcn"]))

    def body(rank: Rank) -> None:
        inner = rank.feed

        class Halved:
            stack, num_steps = inner.stack, inner.num_steps

            def epoch(self, seed: int, number: int, first: int = 0) -> Any:
                for batch in inner.epoch(seed, number, first):
                    yield dataclasses.replace(batch, last=False)
                    yield batch

        rank.trainer._epoch._feed = Halved()
        rank.trainer.step(0)

    with pytest.raises(PlanError, match="needs the whole step at once"):
        on_ranks(config, graph, body)


def test_a_graph_of_patterns_trains_without_features() -> None:
    """Fails if a vertex without edges, or a rank without training vertices, stops a run."""
    graph = without_features(make_graph(pattern("star", 23, 3), num_features=3, num_classes=2, seed=8))
    for config in (config_of(3, MODELS["gcn"]), sampled(3, MODELS["gcn"])):
        losses = on_ranks(learning(config, epochs=EPOCHS, lr=0.05), graph, epochs_of(EPOCHS))[0][0]
        assert losses[-1] < losses[0]
