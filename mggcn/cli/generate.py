"""Make a synthetic graph as a store: community (a GCN clearly beats an MLP on it) or rmat (for time and memory only)."""

from __future__ import annotations

import argparse
from pathlib import Path

from mggcn.cli.answer import add_json
from mggcn.cli.settings import whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the two kinds."""
    text = {
        "community": "degree-corrected planted partition with class-dependent features",
        "rmat": "recursive matrix (Chakrabarti et al. 2004); features and labels are noise",
    }
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True, dest="kind")
    community = kinds.add_parser("community", help=text["community"], description=text["community"])
    community.add_argument("store", type=Path, help="folder to write")
    community.add_argument("--vertices", type=whole, default=20_000, help="number of vertices (default: 20000)")
    community.add_argument("--edges", type=whole, default=200_000, help="undirected edges (default: 200000)")
    community.add_argument(
        "--homophily", type=float, default=0.7, help="share of the edges inside a class (default: 0.7)"
    )
    community.add_argument(
        "--task",
        choices=("classes", "labels", "numbers"),
        default="classes",
        help="what is predicted: the class, several labels, or a number (default: classes)",
    )
    rmat = kinds.add_parser("rmat", help=text["rmat"], description=text["rmat"])
    rmat.add_argument("store", type=Path, help="folder to write")
    rmat.add_argument("--scale", type=whole, default=16, help="2^SCALE vertices (default: 16)")
    rmat.add_argument("--edge-factor", type=whole, default=16, help="edges per vertex (default: 16)")
    rmat.add_argument("--directed", action="store_true", help="store each edge in one direction")
    for kind in (community, rmat):
        kind.add_argument("--features", type=whole, default=64, help="width of the features (default: 64)")
        kind.add_argument("--classes", type=whole, default=10, help="number of classes (default: 10)")
        kind.add_argument("--train", type=float, default=0.1, help="share of the vertices to train on (default: 0.1)")
        kind.add_argument("--val", type=float, default=0.1, help="share of the vertices to validate on (default: 0.1)")
        kind.add_argument("--seed", type=whole, default=1, help="seed of the generator (default: 1)")
        kind.add_argument("--force", action="store_true", help="replace STORE if it exists")
        add_json(kind)


def run(arguments: argparse.Namespace) -> int:
    """Generate a graph, write it, and print its extents."""
    from mggcn.cli.store import extents
    from mggcn.errors import printable
    from mggcn.graph.csr import columns
    from mggcn.graph.generate import community, rmat
    from mggcn.graph.store_write import write_store

    a = arguments
    shares = {"train": a.train, "val": a.val, "seed": a.seed, "name": a.store.name}
    if a.kind == "community":
        graph = community(a.vertices, a.edges, a.features, a.classes, homophily=a.homophily, task=a.task, **shares)
    else:
        graph = rmat(
            a.scale, a.edge_factor, symmetric=not a.directed, num_features=a.features, num_classes=a.classes, **shares
        )
    write_store(graph, a.store, overwrite=a.force)
    a.answer = {"store": a.store, **extents(graph)}
    print(
        f"{printable(a.store)}: {graph.num_vertices:,} vertices, {graph.num_edges:,} stored edges, "
        f"{a.features} features, {columns(graph.task, graph.num_classes)}"
    )
    return 0
