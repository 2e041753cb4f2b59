"""Links beside PyG: GCN with dot products (recipes/links) on the same split and fixed negatives, over several seeds.

PyG's loop is that of its examples/link_pred.py: as many pairs without a link as links in every epoch, by its
negative_sampling, which draws both ends, or by mggcn's draws, which keep the sources of links, as the fixed negatives do. A
run's scores are the test scores at the best validation AUC.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from bench.graphs import find_data
from bench.report import ROOT, listed, parse, surroundings, table, write_report
from mggcn.config import Config
from mggcn.config.files import from_toml
from mggcn.feed.pairs import LinkDraws
from mggcn.graph.csr import CSR, Graph
from mggcn.graph.links import split_links
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.graph.vertex_data import normalized_rows
from mggcn.runs.train import prepare_run, run_training
from mggcn.train.link_metrics import LinkCounts
from mggcn.train.link_scores import PairDecoder

RECIPES = ROOT / "recipes" / "links"
GRAPHS = ("cora", "amazon_photo")
SHARES = (0.85, 0.05, 0.1)
OWN = "PyG, mggcn's negatives"
SCORES = ("roc_auc", "mrr", "hits@50")


def ours(config: Config, store: Path, folder: Path) -> dict[str, float]:
    """Test scores of a run."""
    graph = open_store(store)
    run = prepare_run(config, graph, store, folder)
    found: dict[str, float] = run_training(run, graph, quiet=True)["links"]["test"]
    return found


def pygs(config: Config, graph: Graph, own_draws: bool) -> dict[str, float]:
    """Test scores of PyG's layers, trained by a loop of their own. own_draws: with mggcn's pairs without a link."""
    from torch_geometric.nn import GCNConv
    from torch_geometric.utils import negative_sampling

    torch.manual_seed(config.train.seed)
    n, ids = graph.num_vertices, np.arange(graph.num_vertices)
    x = torch.from_numpy(dense(graph, config.data.row_normalize))
    indptr, indices = graph.adj.indptr.array(), graph.adj.indices.array()
    edges = torch.from_numpy(np.stack([np.repeat(ids, np.diff(indptr)), indices.astype(np.int64)]))
    links = torch.from_numpy(graph.links["train"].array().astype(np.int64).T)
    widths = [x.shape[1], *config.model.hidden, config.links.embedding]
    layers = torch.nn.ModuleList(GCNConv(a, b) for a, b in itertools.pairwise(widths))
    optimizer = torch.optim.Adam(layers.parameters(), lr=config.train.lr)

    def embeddings() -> torch.Tensor:
        h = x
        for number, layer in enumerate(layers):
            h = layer(torch.relu(h) if number else h, edges)
        return h

    best: tuple[float, dict[str, Any]] = (0.0, {})
    labels = torch.cat([torch.ones(links.shape[1]), torch.zeros(links.shape[1])])
    draws, everything = LinkDraws(graph.links["train"], n, 1, False), np.arange(links.shape[1])
    for epoch in range(config.train.epochs):
        optimizer.zero_grad()
        z = embeddings()
        if own_draws:
            pairs = torch.from_numpy(np.stack(draws.ends(config.train.seed, epoch, everything, everything)))
        else:
            pairs = torch.cat([links, negative_sampling(edges, n, links.shape[1], method="sparse")], 1)
        scores = (z[pairs[0]] * z[pairs[1]]).sum(1)
        torch.nn.functional.binary_cross_entropy_with_logits(scores, labels[: scores.shape[0]]).backward()
        optimizer.step()
        with torch.no_grad():
            z = embeddings()
            auc = scored(z, graph.links["val"].array())["roc_auc"]
            if auc > best[0]:
                best = auc, scored(z, graph.links["test"].array())
    return best[1]


def dense(graph: Graph, row_normalize: bool) -> Any:
    """Features (N, D)."""
    features = graph.features
    assert features is not None
    features = normalized_rows(features) if row_normalize else features
    if not isinstance(features, CSR):
        return features.array()
    indptr, indices = features.indptr.array(), features.indices.array()
    values = np.ones(indices.size, np.float32) if features.values is None else features.values.array()
    return sp.csr_array((values, indices, indptr), shape=(graph.num_vertices, features.num_cols)).toarray()


def scored(z: torch.Tensor, links: Any) -> dict[str, Any]:
    """Scores of links from embeddings."""
    rows = links.astype(np.int64)
    found = PairDecoder(()).scores(z, rows[:, 0].copy(), rows[:, 1:])
    counts = LinkCounts(np.sort(found[:, 0]))
    counts.add(found[:, 0], found[:, 1:])
    return counts.scores()


def main(arguments: list[str] | None = None) -> None:
    """Train, compare, and write the report."""
    own: dict[str, Any] = {
        "graphs": {"default": "", "help": f"of {', '.join(GRAPHS)}"},
        "seeds": {"type": int, "default": 5},
        "epochs": {"type": int, "default": 0, "help": "fewer than those of the recipes"},
    }
    args = parse(__doc__, "data", "threads", arguments=arguments, **own)
    data, rows, record = find_data(args.data), list[list[Any]](), dict[str, Any]()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        for name in listed(args.graphs, GRAPHS):
            store = Path(folder) / name
            write_store(split_links(open_store(Path(str(data)) / name), SHARES), store)
            found: dict[str, list[dict[str, float]]] = {"mggcn": [], OWN: [], "PyG": []}
            for seed in range(1, args.seeds + 1):
                config = from_toml(RECIPES / f"{name}-gcn.toml")
                epochs = args.epochs or config.train.epochs
                config = dataclasses.replace(
                    config,
                    train=dataclasses.replace(config.train, seed=seed, epochs=epochs),
                    run=dataclasses.replace(config.run, threads=args.threads),
                )
                found["mggcn"].append(ours(config, store, Path(folder) / f"{name}-{seed}"))
                found[OWN].append(pygs(config, open_store(store), own_draws=True))
                found["PyG"].append(pygs(config, open_store(store), own_draws=False))
            record[name] = found
            rows += [[name, what, *(_mean(runs, score) for score in SCORES)] for what, runs in found.items()]
    text = table(["graph", "", *SCORES], rows)
    body = f"Test scores in %, mean and deviation of {args.seeds} seeds; split {SHARES}, 20 negatives a link.\n\n{text}"
    write_report("links", "Links beside PyG", body, {"results": record, "surroundings": surroundings()}, args.out)


def _mean(runs: list[dict[str, float]], score: str) -> str:
    values = [100 * run[score] for run in runs]
    return f"{statistics.mean(values):.2f} +- {statistics.stdev(values) if len(values) > 1 else 0:.2f}"


if __name__ == "__main__":
    main()
