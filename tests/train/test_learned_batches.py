"""Learned rows on batches: which rows move by how much, what a step sends, and whole trainings beside those of torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.rank import Rank
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.comm.base import Communicator
from mggcn.comm.counting import CountingCommunicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, SampleConfig
from mggcn.feed.batch import Batch
from mggcn.graph.csr import Graph
from mggcn.memory.arena import BufferSpec
from mggcn.partition.order import assign
from mggcn.planning.learned import room_rows
from mggcn.train import learned
from mggcn.train.learned import ADAGRAD_EPS, LearnedRows, start_rows
from mggcn.train.log import RunLog
from tests.feed.test_blocks import MODELS, Twin, graph_of
from tests.feed.test_sampled import sampled
from tests.graphs import on_ranks
from tests.model.dense_stack import EPOCH
from tests.train.test_learned import (
    EPOCHS,
    STEPS,
    D,
    epochs_of,
    gradient_of,
    learning,
    own_rows,
    rows_of,
    without_features,
)

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TOLERANCES = {"fp32": 1e-6, "fp64": 1e-12}
NO_CHECKS = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
"""torch's own optimisers make sparse tensors without checks, and torch warns of that."""


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


def by_torch(
    config: Config,
    graph: Graph,
    found: list[dict[str, Any]],
    dtype: torch.dtype,
    eps: float = ADAGRAD_EPS,
    sizes: list[np.ndarray] | None = None,
) -> Any:
    """Losses, rows and weights of one process with an Embedding and torch's optimisers over the same batches.

    eps: of Adagrad; sizes: gets the absolute gradient of the rows in each step.
    """
    n, train = graph.num_vertices, config.train
    rows = torch.nn.Embedding(n, D, sparse=True, dtype=dtype)
    rows.weight.data.copy_(torch.from_numpy(rows_of([one["start"][0] for one in found], n)))
    p = {name: w.to(dtype).clone().requires_grad_() for name, w in found[0]["start"][1].items()}
    given: dict[str, Any] = {"lr": train.lr} | ({} if train.row_optimizer == "adam" else {"eps": eps})
    sparse: Any = torch.optim.SparseAdam if train.row_optimizer == "adam" else torch.optim.Adagrad
    steppers = [sparse(rows.parameters(), **given), torch.optim.Adam(p.values(), lr=train.lr)]
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
        if sizes is not None:
            sizes.append(rows.weight.grad.to_dense().abs().double().numpy())  # type: ignore[union-attr]  # after backward
        for stepper in steppers:
            stepper.step()
        losses.append(float(loss.detach()))
    return losses, rows.weight.detach(), {name: w.detach() for name, w in p.items()}


def on_batches(ranks: int, model: str, row_optimizer: str, precision: str = "fp64", **train: Any) -> Config:
    config = learning(sampled(ranks, MODELS[model]), row_optimizer=row_optimizer, epochs=EPOCHS, **train)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision))


@pytest.mark.covering(1, rest="slow")
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


@pytest.mark.covering(1, rest="slow")
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


@NO_CHECKS
def test_attention_with_adagrad_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if rows of attention differ from torch's by more than gradients that are zero but for rounding, over eps.

    A row that is read as a target alone adds the same to the scores of all its neighbours: their softmax does not see it
    where LeakyReLU has these on one side.
    """
    graph, sizes = without_features(graph_of()), dict[str, list[np.ndarray]](fp64=[], fp32=[])
    for precision, into in sizes.items():
        config = on_batches(1, "gat", "adagrad", precision, lr=0.002)
        found = on_ranks(config, graph, trained_on_batches)
        by_torch(config, graph, found, DTYPES[precision], sizes=into)
    exact, rounded = (np.array(of) for of in sizes.values())
    zero = (exact > 0) & (exact < 1e-15)
    assert zero.sum() > 100
    assert exact[exact >= 1e-15].min() > 1e-12
    assert ADAGRAD_EPS < rounded[zero].max() < 1e-8  # of which Adagrad makes steps as of any gradient
    monkeypatch.setattr(learned, "ADAGRAD_EPS", 1e-4)
    found = on_ranks(config, graph, trained_on_batches)
    _, rows, _ = by_torch(config, graph, found, torch.float32, 1e-4)
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


@pytest.mark.covering(1, rest="slow")
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


@pytest.mark.covering(1, rest="slow")
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
