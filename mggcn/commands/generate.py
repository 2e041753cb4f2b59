"""Make a synthetic graph as a store: community (a GCN clearly beats an MLP on it) or rmat (time and memory only)."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the two kinds."""
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True, dest="kind")
    community = kinds.add_parser("community", help="degree-corrected planted partition with class-dependent features")
    community.add_argument("store", type=Path)
    community.add_argument("--vertices", type=int, default=20_000)
    community.add_argument("--edges", type=int, default=200_000, help="undirected edges")
    community.add_argument("--homophily", type=float, default=0.7, help="share of the edges inside a class")
    rmat = kinds.add_parser("rmat", help="recursive matrix (Chakrabarti et al. 2004); features and labels are noise")
    rmat.add_argument("store", type=Path)
    rmat.add_argument("--scale", type=int, default=16, help="2^SCALE vertices")
    rmat.add_argument("--edge-factor", type=int, default=16, help="edges per vertex")
    rmat.add_argument("--directed", action="store_true")
    for kind, features, classes in ((community, 64, 10), (rmat, 64, 10)):
        kind.add_argument("--features", type=int, default=features)
        kind.add_argument("--classes", type=int, default=classes)
        kind.add_argument("--train", type=float, default=0.1, help="share of the vertices to train on")
        kind.add_argument("--val", type=float, default=0.1, help="share of the vertices to validate on")
        kind.add_argument("--seed", type=int, default=1)
        kind.add_argument("--force", action="store_true", help="replace STORE if it exists")


def run(arguments: argparse.Namespace) -> int:
    """Generate, write and say what was written."""
    from mggcn.graph.generate import community, rmat
    from mggcn.graph.store_write import write_store

    a = arguments
    shares = {"train": a.train, "val": a.val, "seed": a.seed, "name": a.store.name}
    if a.kind == "community":
        graph = community(a.vertices, a.edges, a.features, a.classes, homophily=a.homophily, **shares)
    else:
        graph = rmat(
            a.scale, a.edge_factor, symmetric=not a.directed, num_features=a.features, num_classes=a.classes, **shares
        )
    write_store(graph, a.store, overwrite=a.force)
    print(
        f"{a.store}: {graph.num_vertices:,} vertices, {graph.num_edges:,} stored edges, "
        f"{a.features} features, {a.classes} classes"
    )
    return 0
