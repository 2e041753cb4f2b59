"""Networks of other libraries' layers with the initial weights of mggcn's, and the step of an epoch.

A network is hidden layers of one kind, each with batch norm if the case has it and ReLU, and an output layer. On batches:
dropout behind ReLU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process import Contender

WARM_UP = 3
"""Batches before those that are timed: a worker process is then at work."""
DROPOUT, LR = 0.5, 0.003
"""Of networks on batches."""

MakeLayer = Callable[[int, int, bool], Any]
"""Takes the widths of a layer's input and output, and whether it is the last; returns a module called with (graph, x)."""


def linear(weights: Mapping[str, Any], number: int, into: Any, *, bias: bool = False) -> None:
    """Set a torch.nn.Linear to mggcn's layers.<number>.weight; its bias, if it has one, to zero."""
    import torch

    into.weight.copy_(torch.from_numpy(weights[f"layers.{number}.weight"]).t())
    if bias:
        into.bias.zero_()


def heads(weights: Mapping[str, Any], name: str, into: Any) -> None:
    """Set a layer's parameter (1, H, C) to mggcn's (H, C)."""
    import torch

    into[0].copy_(torch.from_numpy(weights[name]))


def two_dense(d: int, width: int) -> Any:
    """GIN's function of a sum: two dense layers."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(d, width), torch.nn.ReLU(), torch.nn.Linear(width, width))


def make_net(widths: Sequence[int], make_layer: MakeLayer, batch_norm: bool) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = list(itertools.pairwise(widths))
            self.layers = torch.nn.ModuleList(make_layer(d, e, i == len(pairs)) for i, (d, e) in enumerate(pairs, 1))
            norms = map(torch.nn.BatchNorm1d, widths[1:-1] if batch_norm else ())
            self.norms = torch.nn.ModuleList(norms)

        def forward(self, graph: Any, x: Any) -> Any:
            for number, layer in enumerate(self.layers, start=1):
                x = layer(graph, x)
                if number <= len(self.norms):
                    x = self.norms[number - 1](x)
                if number < len(self.layers):
                    x = x.relu_()
            return x

    return Net()


def epoch_of(net: Any, graph: Any, x: Any, train: Any, target: Any) -> Callable[[], float]:
    """Return the step of an epoch, which returns the loss."""
    import torch

    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(graph, x)[train], target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def paced(batches: Iterable[Any], do: Callable[[Any], Any], count: int) -> float:
    """Return the seconds of a batch over `count` ones after the first; a source that ends is begun again."""
    endless = itertools.chain.from_iterable(itertools.repeat(batches))
    for batch in itertools.islice(endless, WARM_UP):
        do(batch)
    began = time.perf_counter()
    for batch in itertools.islice(endless, count):
        do(batch)
    return (time.perf_counter() - began) / count


@dataclass(frozen=True)
class Sampled:
    """What a library trains with on batches: its loader, seeds of an epoch, the features of all vertices, and its layers.

    step: takes the network and a batch of the loader, returns scores and labels. set_weights: to mggcn's initial ones.
    whole: the graph as layers take it, by which the trained network is scored.
    """

    loader: Any
    seeds: int
    x: Any
    make_layer: MakeLayer
    step: Callable[[Any, Any], tuple[Any, Any]]
    set_weights: Callable[[Any, Mapping[str, Any]], None]
    whole: Any


def trained(job: dict[str, Any], sampled: Sampled, facts: dict[str, Any]) -> Contender:
    """Return a network on batches, whose figure is the seconds of an epoch, from its first batches, or its last loss.

    The result of whole epochs: their mean losses, and the accuracy of the test vertices by all of their neighbours.
    """
    import numpy as np
    import torch

    from bench.arrays import targets

    widths = [sampled.x.shape[1], *job["hidden"], job["classes"]]
    last = len(widths) - 1

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = enumerate(itertools.pairwise(widths), start=1)
            self.layers = torch.nn.ModuleList(sampled.make_layer(d, e, number == last) for number, (d, e) in pairs)

        def forward(self, blocks: Any, h: Any) -> Any:
            for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True), start=1):
                h = layer(block, h)
                if number < last:
                    h = torch.nn.functional.dropout(h.relu_(), DROPOUT, self.training)
            return h

    torch.set_num_threads(job["threads"])
    torch.manual_seed(job.get("seed", 1))
    net, losses = Net(), list[float]()
    with np.load(job["weights"]) as weights, torch.no_grad():
        sampled.set_weights(net, weights)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR, fused=True)

    def train(batch: Any) -> float:
        optimizer.zero_grad()
        scores, labels = sampled.step(net, batch)
        loss = torch.nn.functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def epoch() -> float:
        if job["part"] == "train":
            return paced(sampled.loader, train, job["batches"]) * sampled.seeds / job["batch"]
        for _ in range(job["epochs"]):
            losses.append(statistics.mean(train(batch) for batch in sampled.loader))
        return losses[-1]

    def result() -> list[float]:
        if not losses:
            return []
        test, labels = (torch.from_numpy(array) for array in targets(Path(job["store"]), "test"))
        net.eval()
        with torch.no_grad():
            right = net([sampled.whole] * last, sampled.x)[test].argmax(1) == labels
        net.train()
        return [*losses, right.double().mean().item()]

    return Contender(epoch, facts, result)
