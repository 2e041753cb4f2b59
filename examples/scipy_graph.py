"""Train on a graph that you hold as a SciPy matrix and NumPy arrays: python examples/scipy_graph.py.

Replace `my_graph` by your own arrays; adj[u, v] stands for the edge u -> v.
"""

import numpy as np
import scipy.sparse as sp

import mggcn


def my_graph(num_vertices=3000, num_classes=5, degree=10, seed=7):
    """Make communities: two thirds of the edges stay inside a class; features alone show little of it."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, num_vertices)
    members = [np.flatnonzero(labels == c) for c in range(num_classes)]
    sources = np.repeat(np.arange(num_vertices), degree // 2)
    inside = np.array([rng.choice(members[c]) for c in labels[sources]])
    targets = np.where(rng.random(sources.size) < 0.6, inside, rng.integers(0, num_vertices, sources.size))
    adj = sp.coo_array((np.ones(sources.size, np.float32), (sources, targets)), shape=(num_vertices, num_vertices))
    adj = ((adj + adj.T) > 0).astype(np.float32)  # an undirected graph stores both directions
    centres = rng.normal(size=(num_classes, 32))
    features = 0.3 * centres[labels] + rng.normal(size=(num_vertices, 32))
    part = rng.permutation(np.repeat([0, 1, 2], [300, 300, num_vertices - 600]))
    return adj, features.astype(np.float32), labels, {"train": part == 0, "val": part == 1, "test": part == 2}


def main():
    adj, features, labels, splits = my_graph()
    graph = mggcn.load(adj, features=features, labels=labels, splits=splits)

    for model in (mggcn.MLP((32,), dropout=0.5), mggcn.GCN((32,), dropout=0.5)):
        trainer = mggcn.Trainer(graph, model, lr=0.01, weight_decay=5e-4)
        history = trainer.fit(epochs=60)
        print(f"{model.kind}: loss {history[-1]['loss']:.3f}, test accuracy {trainer.evaluate('test'):.3f}")

    # Class probabilities of every vertex, in the order of your arrays.
    scores = trainer.predict(probabilities=True)
    right = (scores.argmax(1) == labels)[splits["test"]].mean()
    print(f"predicted {scores.shape[0]} vertices, {right:.3f} of the test vertices right")


if __name__ == "__main__":
    main()
