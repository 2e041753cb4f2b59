"""Modules of one's own through `Trainer`: the losses of a loop by hand, resumed with equal bits, and what is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  as everybody calls it

import mggcn
import mggcn.nn
from mggcn.cli.entry import main
from mggcn.errors import ConfigError, DivergedError, RunError
from mggcn.graph.csr import Graph
from mggcn.report import write_report
from mggcn.runs.status import status_of
from tests.graphs import make_graph, pattern

N, D, C = 61, 5, 3
SETTINGS: dict[str, Any] = {"threads": 1, "norm": "mean", "seed": 5903, "lr": 0.03}


def graph_of(seed: int = 5) -> Graph:
    return make_graph(
        pattern("random", N, seed), num_features=D, num_classes=C, sparse=False, weighted=False, seed=seed
    )


class Net(torch.nn.Module):
    """Two layers with batch norm, and dropout that does not depend on the ranks."""

    def __init__(self, outputs: int = C, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(D, 8), torch.nn.Linear(8, outputs)
        self.norm, self.p = mggcn.nn.BatchNorm(8), dropout

    def forward(self, x: Tensor, part: mggcn.nn.PartitionedGraph) -> Tensor:
        h = torch.relu(self.norm(self.first(mggcn.nn.aggregate(x, part)), part))
        h = mggcn.nn.dropout(h, part, self.p, self.training)
        scores: Tensor = self.second(mggcn.nn.aggregate(h, part))
        return scores


def net(outputs: int = C, dropout: float = 0.0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(811)
        return Net(outputs, dropout)


def focal(scores: Tensor, labels: Tensor) -> Tensor:
    nll = F.cross_entropy(scores, labels, reduction="none")
    return (1 - torch.exp(-nll)) ** 2 * nll


def mean_focal(scores: Tensor, labels: Tensor) -> Tensor:
    return focal(scores, labels).mean()


def by_hand(part: mggcn.nn.PartitionedGraph, module: Net, epochs: int) -> list[float]:
    """The loop of docs/own-models.md."""
    model, (x, labels, train) = copy.deepcopy(module), (part.features, part.labels(), part.split("train"))
    optimizer, count, losses = torch.optim.AdamW(model.parameters(), lr=0.03), part.count(train), []
    for epoch in range(epochs):
        part.start_epoch(epoch)
        optimizer.zero_grad()
        loss = focal(model(x, part)[train], labels[train]).sum() / count
        loss.backward()
        part.sum_gradients(model)
        optimizer.step()
        losses.append(part.total(loss).item())
    return losses


def rows(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in history]


@pytest.mark.covering(1)
@pytest.mark.parametrize("loss", [focal, mean_focal])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_losses_are_those_of_a_loop_by_hand(ranks: int, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Fails if gradients are not summed, a mean is over one rank's rows, weights are shared, or predictions permuted."""
    graph, module = graph_of(), net()
    hand = mggcn.nn.run(
        functools.partial(by_hand, module=module, epochs=6), graph, ranks=ranks, norm="mean", threads=1, seed=5903
    )[0]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = mggcn.Trainer(graph, module, loss=loss, optimizer=torch.optim.AdamW, ranks=ranks, **SETTINGS)
    history = trainer.fit(epochs=6)
    np.testing.assert_allclose([row["loss"] for row in history], hand, rtol=2e-5)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module.load_state_dict(trainer.state_dict("last"))
    one = mggcn.Trainer(graph, module.eval(), **SETTINGS)
    np.testing.assert_allclose(trainer.predict(weights="last"), one.scores_of(module), atol=2e-5)
    labels, val = graph.labels.array(), graph.splits["val"].array()[0]  # type: ignore[union-attr]
    right = (trainer.predict(classes=True)[val] == labels[val]).mean()
    assert trainer.evaluate("val") == pytest.approx(right)


WAYS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": torch.optim.AdamW, "loss": focal},
    "function": {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
    "one cycle": {"schedule": functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=30)},
    "factor": {"schedule": lambda epoch: 0.9**epoch, "optimizer": torch.optim.RMSprop},
    "plateau": {"schedule": "plateau", "schedule_patience": 0, "clip_norm": 0.5, "optimizer": "sgd", "momentum": 0.5},
}


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_run_goes_on_with_equal_bits(way: str, ranks: int, tmp_path: Path) -> None:
    """Fails if weights, running statistics, an optimiser's state, a schedule or masks begin anew."""
    graph = graph_of()
    settings = {"ranks": ranks, "epochs": 7, "metric": "macro_f1"} | SETTINGS | WAYS[way]
    if way == "function":
        settings.pop("lr")

    def crash(row: dict[str, Any]) -> None:
        if row["epoch"] == 4:
            raise ZeroDivisionError

    whole = mggcn.Trainer(graph, net(dropout=0.4), **settings)
    expected = whole.fit()
    with pytest.raises(ZeroDivisionError):
        mggcn.Trainer(graph, net(dropout=0.4), out=tmp_path / "run", checkpoint_every=3, **settings).fit(on_epoch=crash)
    parts = {
        name: WAYS[way][name]
        for name in ("loss", "optimizer", "schedule")
        if not isinstance(WAYS[way].get(name, ""), str)
    }
    with pytest.raises(RunError, match="trains a module of its own, Net, whose code is not in the folder"):
        mggcn.Trainer.from_run(tmp_path / "run", graph)
    again = mggcn.Trainer.from_run(tmp_path / "run", graph, net(dropout=0.4), **parts)
    assert "3 epochs are saved" in repr(again)
    assert rows(again.resume()) == rows(expected)
    for weights in ("best", "last"):
        one, other = again.state_dict(weights), whole.state_dict(weights)
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert rows(again.resume(epochs=9))[:7] == rows(expected)
    opened = mggcn.Trainer.from_run(tmp_path / "run", graph, net(), **parts)
    np.testing.assert_array_equal(again.predict(), opened.predict())


def test_torchs_own_dropout_is_drawn_again_after_a_resume(tmp_path: Path) -> None:
    """Fails if torch's generator is not that of seed and epoch, or the caller's is moved."""
    graph = graph_of()

    class Drop(Net):
        def forward(self, x: Tensor, part: mggcn.nn.PartitionedGraph) -> Tensor:
            return super().forward(F.dropout(x, 0.5, self.training), part)

    module, before = Drop(), torch.get_rng_state()
    whole = mggcn.Trainer(graph, module, **SETTINGS).fit(epochs=6)
    parts = mggcn.Trainer(graph, module, **SETTINGS)
    parts.fit(epochs=2)
    torch.rand(3)
    assert rows(parts.resume(epochs=6)) == rows(whole)
    assert whole[0]["loss"] != mggcn.Trainer(graph, module, **(SETTINGS | {"seed": 3})).fit(epochs=1)[0]["loss"]
    torch.set_rng_state(before)


def test_a_run_stops_early_by_a_score_of_ones_own() -> None:
    """Fails if patience counts something else than the function's score, or a higher one is not better."""
    graph, seen = graph_of(), list[tuple[int, ...]]()

    def metric(scores: Tensor, labels: Tensor) -> float:
        seen.append((*scores.shape, len(labels)))
        return float(-F.cross_entropy(scores, labels))

    trainer = mggcn.Trainer(graph, net(), metric=metric, patience=2, ranks=2, epochs=500, **(SETTINGS | {"lr": 0.2}))
    history = trainer.fit()
    scores = [row["val"] for row in history]
    best = int(np.argmax(scores))
    assert len(history) == best + 3 < 500
    assert trainer.result()["best"]["epoch"] == best + 1
    assert trainer.result()["metric"].endswith("metric")
    sizes = [int(graph.splits[name].array()[0].sum()) for name in ("train", "val")]
    assert seen[:2] == [(size, C, size) for size in sizes]
    assert trainer.evaluate("val") == pytest.approx(max(scores))


def test_rates_are_those_of_torchs_schedules() -> None:
    """Fails if a schedule's rate comes an epoch late or early, or a group keeps its own."""
    graph, module = graph_of(), net()
    step = functools.partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 4], gamma=0.5)
    history = mggcn.Trainer(graph, module, schedule=step, **SETTINGS).fit(epochs=6)
    assert [row["lr"] for row in history] == [0.03, 0.03, 0.015, 0.015, 0.0075, 0.0075]
    history = mggcn.Trainer(graph, module, schedule=lambda epoch: 1 / (1 + epoch), **SETTINGS).fit(epochs=3)
    assert [row["lr"] for row in history] == pytest.approx([0.03, 0.015, 0.01])

    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.25)

    trainer = mggcn.Trainer(graph, module, optimizer=groups, schedule="cosine", threads=1)
    assert trainer.config.train.lr == 0.5
    assert [row["lr"] for row in trainer.fit(epochs=2)] == [0.5, 0.25]


@pytest.mark.parametrize("ranks", [1, 3])
def test_labels_that_are_numbers(ranks: int) -> None:
    """Fails if a loss of one's own sees other labels than the graph's, or scores of numbers are not of their entries."""
    rng = np.random.default_rng(6011)
    edges = rng.integers(0, N, (2, 300))
    x = rng.normal(size=(N, D)).astype(np.float32)
    y = (x @ rng.normal(size=(D, 2))).astype(np.float32)
    splits = {"train": np.arange(N) < 40, "val": np.arange(N) >= 40}
    graph = mggcn.load(edges, features=x, labels=y, splits=splits, options=mggcn.GraphOptions(symmetrize=True))
    huber = functools.partial(F.huber_loss, reduction="none")
    trainer = mggcn.Trainer(graph, net(2), loss=huber, ranks=ranks, **SETTINGS)
    losses = [row["loss"] for row in trainer.fit(epochs=5)]
    assert losses[-1] < losses[0]
    error = trainer.predict()[40:] - y[40:]
    assert trainer.evaluate("val") == pytest.approx(np.sqrt((error**2).mean(0)).mean(), rel=1e-5)
    named = mggcn.Trainer(graph, net(2), ranks=ranks, **SETTINGS).fit(epochs=1)[0]["loss"]
    same = mggcn.Trainer(graph, net(2), ranks=ranks, loss=functools.partial(F.mse_loss, reduction="none"), **SETTINGS)
    assert same.fit(epochs=1)[0]["loss"] == pytest.approx(named, rel=1e-5)


class Flat(Net):
    def forward(self, x: Tensor, part: mggcn.nn.PartitionedGraph) -> Tensor:
        return super().forward(x, part).sum(1)


class Short(Net):
    def forward(self, x: Tensor, part: mggcn.nn.PartitionedGraph) -> Tensor:
        return super().forward(x, part)[1:]


class Three(Net):
    def forward(self, x: Tensor, edge_index: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return x


class Raises(Net):
    def forward(self, x: Tensor, part: mggcn.nn.PartitionedGraph) -> Tensor:
        raise LookupError("the module's own mistake")


class TorchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.BatchNorm1d(8)


class TorchDropout(Net):
    def forward(self, x: Tensor, part: mggcn.nn.PartitionedGraph) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training), part)


def weighted(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, weight=torch.tensor([1.0, 1.2, 1.0]))


def without_the_first(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, weight=torch.tensor([0.0, 1.0, 1.0]))


def five_times_the_second(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, weight=torch.tensor([1.0, 5.0, 1.0]))


def of_equal_scores() -> Net:
    """A module that begins with equal scores, of which every mean is the same."""
    module = net()
    for parameter in module.second.parameters():
        torch.nn.init.zeros_(parameter)
    return module


def in_bf16(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.bfloat16(), labels)


BROKEN: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
    (ConfigError, r"Flat must return scores \(V, C\), a row for each .* got shape \(\d+,\)", Flat, {}),
    (ConfigError, r"Short must return scores", Short, {}),
    (ConfigError, r"Three.forward\(x: .* cannot be called: expected forward\(self, x, part\)", Three, {}),
    (LookupError, "the module's own mistake", Raises, {}),
    (ConfigError, "more is a BatchNorm1d, .* take mggcn.nn.BatchNorm", TorchNorm, {}),
    (ConfigError, "returns 2 columns, but the labels have 3 classes", functools.partial(net, 2), {}),
    (ConfigError, "weight of the module is torch.float64", lambda: net().double(), {}),
    (ConfigError, "has no parameters to train", torch.nn.Identity, {}),
    (ConfigError, "without weights before its first call", lambda: torch.nn.LazyLinear(3), {}),
    (ConfigError, "one number that is not a mean over rows", net, {"loss": lambda s, y: focal(s, y).sum()}),
    (ConfigError, r"a mean with weights of classes are not, .*reduction=\"none\"", net, {"loss": weighted}),
    (ConfigError, "one number that is not a mean over rows", net, {"loss": without_the_first}),
    (ConfigError, "one number that is not a mean over rows", of_equal_scores, {"loss": five_times_the_second}),
    (ConfigError, "TorchDropout or its loss draws torch's random numbers", TorchDropout, {}),
    (ConfigError, "must return a tensor that depends on the scores", net, {"loss": lambda s, y: 0.5}),
    (
        ConfigError,
        r"returns? .*a value for each row; got shape \(7,\)",
        net,
        {"loss": lambda s, y: s.sum() * torch.ones(7)},
    ),
    (ConfigError, "must return a number, got str", net, {"metric": lambda s, y: "good"}),
    (ConfigError, "loss must be a function", net, {"loss": 3}),
    (ConfigError, "optimizer=SGD|must make a torch.optim.Optimizer, got list", net, {"optimizer": list}),
    (ConfigError, "needs a closure", net, {"optimizer": torch.optim.LBFGS}),
    (ConfigError, "schedule must be a name, a function from the epoch", net, {"schedule": lambda epoch: "fast"}),
    (ConfigError, "ReduceLROnPlateau follows scores", net, {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}),
    (ConfigError, "give its settings, functools.partial", net, {"schedule": torch.optim.lr_scheduler.StepLR}),
    (ConfigError, "model.dropout belongs to the models of mggcn", net, {"dropout": 0.5}),
    (ConfigError, "train.class_weights belongs to the models", net, {"class_weights": "balanced"}),
    (ConfigError, "train.repeat, debug.prune belong to the models", net, {"repeat": 3, "prune": "off"}),
    (ConfigError, "unknown setting 'lrr'", net, {"lrr": 3}),
    (ConfigError, "optimizer= takes the place of lr", net, {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "lr": 0.1}),
    (DivergedError, "the loss of epoch 1 is nan", net, {"loss": lambda s, y: focal(s, y) * torch.nan}),
]


@pytest.mark.parametrize(("error", "message", "make", "settings"), BROKEN, ids=range(len(BROKEN)))
def test_what_cannot_work_is_named(
    error: type[Exception], message: str, make: Callable[[], Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Fails if a broken module, part or setting trains in silence, or ends in an error that does not name it."""
    with pytest.raises(error, match=message):
        mggcn.Trainer(graph_of(), make(), ranks=2, threads=1, **settings).fit(epochs=2)


def test_a_mean_in_lower_precision_is_a_mean() -> None:
    """Fails if what rounding does to a loss is taken for weights, or a callback's random numbers for the module's."""
    trainer = mggcn.Trainer(graph_of(), net(), loss=in_bf16, ranks=2, threads=1)
    assert len(trainer.fit(epochs=4, on_epoch=lambda row: torch.rand(1000))) == 4


def test_functions_beside_a_planned_model_are_refused() -> None:
    """Fails if a function beside a model of mggcn is taken for a name, or the refusal does not say where it belongs."""
    for given in ({"loss": focal}, {"metric": focal}, {"optimizer": torch.optim.Adam}, {"schedule": lambda epoch: 1.0}):
        with pytest.raises(ConfigError, match=r"need a torch module.*docs/own-models.md.*GATv2, SGC, APPNP, RGCN, MLP"):
            mggcn.Trainer(graph_of(), mggcn.GCN(8), **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"SAGE, GIN, GAT, GATv2.*torch module \(docs/own-models.md\), got str"):
        mggcn.Trainer(graph_of(), "gcn")  # type: ignore[arg-type]


def test_the_folder_of_a_run_is_that_of_any_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if status or report do not know the run, another module or loss goes on with it, or commands crash."""
    run, graph = tmp_path / "run", graph_of()
    trainer = mggcn.Trainer(graph, net(), loss=focal, out=run, ranks=2, **SETTINGS)
    trainer.fit(epochs=3)
    assert (status_of(run).state, status_of(run).epoch) == ("complete", 3)
    assert "Trainer of Net of" in repr(trainer)
    page = write_report(run)[-1].read_text()
    assert "<h2>Memory</h2>" not in page
    assert "mggcn.Trainer.from_run(" in page
    assert ": Net</h1>" in page
    assert "[model]" not in (run / "config.toml").read_text()
    with pytest.raises(RunError, match="began with the loss focal, got mean_focal"):
        mggcn.Trainer.from_run(run, graph, net(), loss=mean_focal)
    with pytest.raises(RunError, match="began with the weights"):
        mggcn.Trainer.from_run(run, graph, net(4), loss=focal)
    for command in (["train", "--resume", str(run), "--epochs", "5"], ["predict", str(run)]):
        assert main(command) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert trainer.evaluate("val") == mggcn.Trainer.from_run(run, graph, net(), loss=focal).evaluate("val")
    other = trainer.predict(graph=graph_of(9))
    assert other.shape == (N, C)
    with pytest.raises(ConfigError, match="has no plan"):
        print(trainer.plan)


@pytest.mark.full
def test_ranks_that_are_processes(tmp_path: Path) -> None:
    """Fails if processes train otherwise than threads, rows do not reach the caller, or what it raises ends nothing."""
    graph, seen = graph_of(), list[dict[str, Any]]()
    how: dict[str, Any] = {"ranks": 2, "loss": focal, "optimizer": torch.optim.AdamW} | SETTINGS
    expected = mggcn.Trainer(graph, net(dropout=0.3), **how).fit(epochs=5)
    trainer = mggcn.Trainer(graph, net(dropout=0.3), transport="gloo", timeout_s=60, out=tmp_path / "run", **how)
    assert rows(trainer.fit(epochs=5, on_epoch=seen.append)) == rows(expected)
    assert rows(seen) == rows(expected)
    np.testing.assert_allclose(
        trainer.predict(),
        mggcn.Trainer(graph, net(), threads=1, norm="mean").scores_of(trainer.state_dict()),
        atol=1e-5,
    )

    def stop(row: dict[str, Any]) -> None:
        raise ZeroDivisionError(row["epoch"])

    with pytest.raises(ZeroDivisionError, match="6"):
        trainer.resume(epochs=100_000, on_epoch=stop)
    saved = status_of(tmp_path / "run").checkpoint_epoch
    assert saved is not None
    assert 6 <= saved < 100_000
