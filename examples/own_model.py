"""Train a module, a loss and a loop of your own on a graph that ranks share: python examples/own_model.py [RANKS].

The losses are those of one process. Ranks are threads here; docs/own-models.md says how they become processes.
"""

import functools
import sys

import numpy as np
import scipy.sparse as sp
import torch

import mggcn
import mggcn.nn


class ResidualSage(torch.nn.Module):
    """Neighbours' mean and a vertex's own row through weights of their own (GraphSAGE), with a residual in the middle."""

    def __init__(self, width_in, hidden, classes, layers=3):
        super().__init__()
        self.encode = torch.nn.Linear(width_in, hidden)
        self.own = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden) for _ in range(layers))
        self.neighbours = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(hidden) for _ in range(layers))
        self.score = torch.nn.Linear(hidden, classes)

    def forward(self, x, part):
        h = self.encode(x)
        for own, neighbours, norm in zip(self.own, self.neighbours, self.norms, strict=True):
            mean = mggcn.nn.aggregate(norm(h), part)  # collective: every rank calls it, in the same order
            h = h + torch.nn.functional.gelu(own(h) + neighbours(mean))
        return self.score(h)


def loss_of(scores, labels, train, num_train):
    """Focal loss: easy vertices count less. Summed here, divided by the number of training vertices of all ranks."""
    nll = torch.nn.functional.cross_entropy(scores[train], labels[train], reduction="none")
    return ((1 - torch.exp(-nll)) ** 2 * nll).sum() / num_train


def train_rank(part, start, epochs=40):
    """Train on this rank's rows, from weights that are the same on all; return the losses and the test accuracy."""
    model = ResidualSage(**start["sizes"])
    model.load_state_dict(start["weights"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, labels = part.features, part.labels()
    train, test = part.split("train"), part.split("test")
    num_train, num_test = part.count(train), part.count(test)

    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = loss_of(model(x, part), labels, train, num_train)
        loss.backward()
        part.sum_gradients(model)  # before the step: the gradients of the loss of the whole graph
        optimizer.step()
        losses.append(part.total(loss).item())
    with torch.no_grad():
        right = (model(x, part).argmax(1) == labels)[test].sum()
    return losses, (part.total(right) / num_test).item()


def my_graph(num_vertices=2000, num_classes=5, degree=10, seed=11):
    """Make communities: two thirds of the edges stay inside a class; features alone show little of it."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, num_vertices)
    members = [np.flatnonzero(labels == c) for c in range(num_classes)]
    sources = np.repeat(np.arange(num_vertices), degree)
    inside = np.array([rng.choice(members[c]) for c in labels[sources]])
    targets = np.where(rng.random(sources.size) < 0.6, inside, rng.integers(0, num_vertices, sources.size))
    adj = sp.coo_array((np.ones(sources.size, np.float32), (sources, targets)), shape=(num_vertices, num_vertices))
    features = 0.3 * rng.normal(size=(num_classes, 24))[labels] + rng.normal(size=(num_vertices, 24))
    part = rng.permutation(np.repeat([0, 1, 2], [400, 200, num_vertices - 600]))
    splits = {"train": part == 0, "val": part == 1, "test": part == 2}
    return mggcn.load((adj > 0).astype(np.float32), features=features.astype(np.float32), labels=labels, splits=splits)


def main():
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    graph = my_graph()
    torch.manual_seed(7)
    sizes = {"width_in": 24, "hidden": 32, "classes": 5}
    start = {"sizes": sizes, "weights": ResidualSage(**sizes).state_dict()}

    found = {}
    for size, strategy in ((1, "broadcast"), (ranks, "broadcast"), (ranks, "halo")):
        work = functools.partial(train_rank, start=start)
        found[size, strategy], accuracy = mggcn.nn.run(work, graph, ranks=size, strategy=strategy, norm="mean")[0]
        losses = found[size, strategy]
        print(f"{size} ranks, {strategy}: loss {losses[0]:.4f} to {losses[-1]:.4f}, test accuracy {accuracy:.3f}")
    one = np.array(found[1, "broadcast"])
    for (size, strategy), losses in list(found.items())[1:]:
        print(f"{size} ranks, {strategy}: losses differ by {np.abs(losses / one - 1).max():.1e} from one process")


if __name__ == "__main__":
    main()
