"""Write a graph attention network of your own over ranks, and train it: python examples/own_gat.py [RANKS].

Attention, dropout and batch norm are those of the whole graph: the losses do not depend on the number of ranks. Ranks are
threads here; docs/own-models.md says how they become processes.
"""

import functools
import sys

import numpy as np
import torch

import mggcn
import mggcn.nn


class GatLayer(torch.nn.Module):
    """Heads side by side: a projection, two scores for each head, attention over the in-neighbours (GAT, eq. 1 to 5)."""

    def __init__(self, width_in, heads, columns):
        super().__init__()
        self.project = torch.nn.Linear(width_in, heads * columns, bias=False)
        self.source = torch.nn.Parameter(torch.randn(heads, columns) / columns**0.5)
        self.destination = torch.nn.Parameter(torch.randn(heads, columns) / columns**0.5)
        self.bias = torch.nn.Parameter(torch.zeros(heads * columns))

    def forward(self, x, part, dropout):
        h = self.project(x)
        by_head = h.view(-1, *self.source.shape)
        s, t = (by_head * self.source).sum(2), (by_head * self.destination).sum(2)
        return mggcn.nn.attend(h, s, t, part, dropout=dropout) + self.bias  # collective


class Gat(torch.nn.Module):
    """Two layers, with batch norm over the vertices of all ranks and dropout by vertex between them."""

    def __init__(self, width_in, heads, columns, classes):
        super().__init__()
        self.first = GatLayer(width_in, heads, columns)
        self.norm = mggcn.nn.BatchNorm(heads * columns)
        self.last = GatLayer(heads * columns, 1, classes)

    def forward(self, x, part):
        h = torch.nn.functional.elu(self.norm(self.first(x, part, self.dropout(0.2)), part))
        h = mggcn.nn.dropout(h, part, 0.5, training=self.training)
        return self.last(h, part, self.dropout(0.2))

    def dropout(self, p):
        return p if self.training else 0.0


def train_rank(part, start, epochs=30):
    """Train on this rank's rows, from weights that are the same on all; return the losses and the test accuracy."""
    model = Gat(**start["sizes"])
    model.load_state_dict(start["weights"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, labels = part.features, part.labels()
    train, test = part.split("train"), part.split("test")
    num_train, num_test = part.count(train), part.count(test)

    losses = []
    for epoch in range(epochs):
        part.start_epoch(epoch, seed=5)  # new masks, the same on all ranks
        optimizer.zero_grad()
        scores = model(x, part)
        loss = torch.nn.functional.cross_entropy(scores[train], labels[train], reduction="sum") / num_train
        loss.backward()
        part.sum_gradients(model)
        optimizer.step()
        losses.append(part.total(loss).item())
    model.eval()  # running statistics, no masks
    with torch.no_grad():
        right = (model(x, part).argmax(1) == labels)[test].sum()
    return losses, (part.total(right) / num_test).item()


def my_graph(num_vertices=1000, num_classes=4, degree=8, seed=23):
    """Make communities: three in five edges stay inside a class; features alone show little of it."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, num_vertices)
    members = [np.flatnonzero(labels == c) for c in range(num_classes)]
    sources = np.repeat(np.arange(num_vertices), degree)
    inside = np.array([rng.choice(members[c]) for c in labels[sources]])
    targets = np.where(rng.random(sources.size) < 0.6, inside, rng.integers(0, num_vertices, sources.size))
    features = 0.3 * rng.normal(size=(num_classes, 24))[labels] + rng.normal(size=(num_vertices, 24))
    part = rng.permutation(np.repeat([0, 1, 2], [250, 100, num_vertices - 350]))
    splits = {"train": part == 0, "val": part == 1, "test": part == 2}
    edges = np.stack([sources, targets])
    return mggcn.load(edges, features=features.astype(np.float32), labels=labels, splits=splits)


def main():
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    graph = my_graph()
    torch.manual_seed(7)
    sizes = {"width_in": 24, "heads": 4, "columns": 8, "classes": 4}
    start = {"sizes": sizes, "weights": Gat(**sizes).state_dict()}

    found = {}
    for size, strategy in ((1, "broadcast"), (ranks, "broadcast"), (ranks, "halo")):
        work = functools.partial(train_rank, start=start)
        found[size, strategy], accuracy = mggcn.nn.run(work, graph, ranks=size, strategy=strategy, self_loops=True)[0]
        losses = found[size, strategy]
        print(f"{size} ranks, {strategy}: loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {accuracy:.3f}")
    one = np.array(found[1, "broadcast"])
    for (size, strategy), losses in list(found.items())[1:]:
        print(f"{size} ranks, {strategy}: losses differ by {np.abs(losses / one - 1).max():.1e} from one process")


if __name__ == "__main__":
    main()
