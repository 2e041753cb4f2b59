"""What a user's script looks like to a type checker: `make lint` checks it, nobody runs it; see test_typing.py."""

from __future__ import annotations

from typing import assert_type

import numpy as np
import torch
from torch import Tensor

import mggcn
import mggcn.nn
from mggcn.nn import PartitionedGraph

edges = np.array([[0, 1, 2], [1, 2, 0]])
graph: mggcn.Graph = mggcn.load(
    edges,
    features="degree",
    labels=[0, 1, 1],
    splits={"train": [0]},
    name="ring",
    options=mggcn.GraphOptions(symmetrize=True),
)
mggcn.save(graph, "store", overwrite=True)
print(mggcn.describe(graph), mggcn.__version__)
links: mggcn.Graph = mggcn.split_links(graph, (0.8, 0.1, 0.1), negatives=5, seed=2)
predictor = mggcn.Trainer(
    links, mggcn.GCN(8), embedding=16, decoder=(8,), negatives=2, negatives_from="in-batch", metric="mrr"
)
models = [
    mggcn.GCN(hidden=(64, 64), dropout=0.5, norm_layer="batch"),
    mggcn.SAGE(16, aggregator="mean", self_loops=False),
    mggcn.GIN(8),
    mggcn.GAT(64, heads=8, attention_dropout=0.1),
    mggcn.GATv2(8),
    mggcn.SGC(3),
    mggcn.APPNP(8, hops=5),
    mggcn.RGCN(8, bases=2),
    mggcn.MLP([8, 8]),
]
trainer = mggcn.Trainer(graph, models[0], ranks=2, lr=0.01, transport="threads", patience=10, class_weights=[1.0, 2.0])
history = trainer.fit(epochs=3, on_epoch=lambda row: print(row["loss"]))
trainer.resume(epochs=5, lr=0.1, schedule="cosine")
assert_type(trainer.evaluate("test"), float)
state: dict[str, Tensor] = trainer.state_dict()
scores = trainer.predict(classes=True) + 1
mggcn.to_pyg(mggcn.from_pyg(torch.nn.ModuleList()), torch.nn.ModuleList())
print(mggcn.from_dgl(torch.nn.ModuleList()))
found = mggcn.sweep(graph, {"lr": [0.1, 0.01]}, mggcn.GCN(8), ranks=1, seed=3)
config: mggcn.Config = trainer.config
try:
    mggcn.Trainer.from_run("run", graph)
except mggcn.MggcnError as error:
    print(error.exit_code)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(1, 2), mggcn.nn.BatchNorm(1)

    def forward(self, x: Tensor, part: PartitionedGraph) -> Tensor:
        h = mggcn.nn.dropout(mggcn.nn.aggregate(self.norm(x, part), part), part, 0.5, self.training)
        h = h + mggcn.nn.reduce(h, part, "max") + mggcn.nn.attend(h, h, h, part)
        h = h + mggcn.nn.attend_dynamic(h, h, torch.ones(1, 1), part)
        h = h + mggcn.nn.aggregate_relations(h, torch.ones(1, 1), part)[:, 0]
        scores: Tensor = self.linear(h)
        return scores


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(scores, labels, reduction="none")


def metric(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).float().mean())


own = mggcn.Trainer(
    graph, Net(), loss=loss, metric=metric, optimizer=torch.optim.AdamW, schedule=lambda epoch: 0.9**epoch, norm="mean"
)
mggcn.Trainer.from_run("run", graph, Net(), loss=loss)
assert_type(mggcn.nn.run(lambda part: part.num_rows, graph, ranks=2, norm="symmetric"), list[int])
one = mggcn.nn.DeviceGraph(graph)
z = mggcn.nn.reduce_edges(one, "copylhs", "sum", torch.ones(3, 1))
loader: mggcn.nn.SampledLoader = mggcn.nn.batches(graph, "train", fanout=(5, 5), batch=1)
for drawn in loader:
    assert_type(drawn, mggcn.nn.SampledBatch)
    block: mggcn.nn.SampledBlock = drawn.blocks[0]
    rows: Tensor = mggcn.nn.aggregate(drawn.x, block)
mggcn.Trainer(graph, mggcn.GCN(8), batch=1, fanout=(5, "all"), draw="labor", weights="mean", ahead=1)

# A keyword or a value that is wrong must be noticed: mypy calls an `ignore` without an error unused.
mggcn.Trainer(graph, lrr=0.1)  # type: ignore[call-arg]  # misspelt: a checker says so
mggcn.Trainer(graph, strategy="broadcst")  # type: ignore[arg-type]  # so is this value
mggcn.load(edges, lables=[0])  # type: ignore[call-arg]  # and this name
