"""Train a PyG Data with mggcn, and carry weights to and from a stack of GCNConv: python examples/pyg_data.py.

Needs PyTorch Geometric: pip install torch_geometric.
"""

import itertools

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import mggcn


class Net(torch.nn.Module):
    """The network that mggcn trains, as PyG writes it."""

    def __init__(self, widths):
        super().__init__()
        self.convs = torch.nn.ModuleList(GCNConv(d, e) for d, e in itertools.pairwise(widths))

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = torch.relu(conv(x, edge_index))
        return self.convs[-1](x, edge_index)


def my_data(num_vertices=2000, num_classes=4, seed=3):
    """Make a Data whose classes are communities."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (num_vertices,), generator=generator)
    edges = torch.randint(num_vertices, (2, 60_000), generator=generator)
    same = y[edges[0]] == y[edges[1]]
    edges = edges[:, same | (torch.rand(same.shape, generator=generator) < 0.1)]
    edge_index = torch.cat([edges, edges.flip(0)], 1).unique(dim=1)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    x = torch.randn(num_vertices, 16, generator=generator)
    x[:, :num_classes] += 0.5 * torch.nn.functional.one_hot(y, num_classes)
    part = torch.rand(num_vertices, generator=generator)
    masks = {"train_mask": part < 0.2, "val_mask": (part >= 0.2) & (part < 0.4), "test_mask": part >= 0.4}
    return Data(x=x, edge_index=edge_index, y=y, **masks)


def main():
    data = my_data()
    trainer = mggcn.Trainer(mggcn.load(data), mggcn.GCN((16,), dropout=0.5), lr=0.02)
    trainer.fit(epochs=60)
    print(f"test accuracy {trainer.evaluate('test'):.3f}")

    # mggcn -> PyG: the same logits from GCNConv layers.
    net = Net((data.num_features, 16, int(data.y.max()) + 1))
    mggcn.to_pyg(trainer.state_dict(), net)
    with torch.no_grad():
        logits = net.eval()(data.x, data.edge_index).numpy()
    difference = np.abs(logits - trainer.predict()).max() / np.abs(logits).max()
    print(f"mggcn -> PyG: logits differ by {difference:.1e} of the largest")

    # PyG -> mggcn: score the graph with weights that PyG made.
    net = Net((data.num_features, 16, int(data.y.max()) + 1))
    with torch.no_grad():
        logits = net.eval()(data.x, data.edge_index).numpy()
    difference = np.abs(logits - trainer.scores_of(mggcn.from_pyg(net))).max() / np.abs(logits).max()
    print(f"PyG -> mggcn: logits differ by {difference:.1e} of the largest")


if __name__ == "__main__":
    main()
