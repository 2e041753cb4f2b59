"""Make a synthetic graph as a store: community (a GCN beats an MLP on it), rmat (for speed), bter (like another graph)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mggcn.cli.answer import add_json
from mggcn.cli.settings import memory, whole

if TYPE_CHECKING:
    from mggcn.graph.bter import BterPlan
    from mggcn.graph.csr import Graph

TRAIN_BY = ("random", "community", "degree")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the kinds."""
    text = {
        "community": "degree-corrected planted partition with class-dependent features",
        "rmat": "recursive matrix (Chakrabarti et al. 2004); features and labels are noise",
        "bter": "degrees, or multiples of them, and clustering by degree of another graph (Kolda et al. 2014), undirected",
    }
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True, dest="kind")
    community, rmat, bter = (kinds.add_parser(kind, help=of, description=of) for kind, of in text.items())
    for kind in (community, rmat, bter):
        kind.add_argument("store", type=Path, help="folder to write")
    _add_community(community)
    rmat.add_argument("--scale", type=whole, default=16, help="2^SCALE vertices (default: 16)")
    rmat.add_argument("--edge-factor", type=whole, default=16, help="edges per vertex (default: 16)")
    rmat.add_argument("--directed", action="store_true", help="store each edge in one direction")
    _add_bter(bter)
    for kind in (community, bter):
        kind.add_argument(
            "--homophily", type=float, default=0.7, help="share of the edges inside a class (default: 0.7)"
        )
        kind.add_argument(
            "--train-by",
            choices=TRAIN_BY,
            default="random",
            help="vertices that train: any, those of the newest 5 %% of the classes, or those of highest degree, after "
            "which the next ones validate (default: random)",
        )
    for kind in (community, rmat, bter):
        kind.add_argument("--features", type=whole, default=64, help="width of the features (default: 64)")
        kind.add_argument("--classes", type=whole, default=10, help="number of classes (default: 10)")
        kind.add_argument("--train", type=float, default=0.1, help="share of the vertices to train on (default: 0.1)")
        kind.add_argument("--val", type=float, default=0.1, help="share of the vertices to validate on (default: 0.1)")
        kind.add_argument("--seed", type=whole, default=1, help="seed of the generator (default: 1)")
        kind.add_argument("--force", action="store_true", help="replace STORE if it exists")
        add_json(kind)


def _add_community(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vertices", type=whole, default=20_000, help="number of vertices (default: 20000)")
    parser.add_argument("--edges", type=whole, default=200_000, help="undirected edges (default: 200000)")
    parser.add_argument(
        "--task",
        choices=("classes", "labels", "numbers"),
        default="classes",
        help="what is predicted: the class, several labels, or a number (default: classes)",
    )
    parser.add_argument(
        "--relations",
        type=whole,
        default=0,
        metavar="R",
        help="give every edge one direction and one of R relations, whose sizes fall as 1, 1/2, 1/3, ... (default: none)",
    )


def _add_bter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--like", required=True, metavar="STORE", help="the other graph; directions of its edges do not count"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder in which the name of a store is looked up")
    parser.add_argument(
        "--factor", type=float, default=1.0, metavar="K", help="degrees are K times those of the other (default: 1)"
    )
    parser.add_argument(
        "--memory",
        type=memory,
        default=1 << 30,
        metavar="BYTES",
        help="memory for sorting edges, such as 512MiB, as of mggcn prepare (default: 1GiB)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Generate a graph, write it, and print its extents."""
    from mggcn.cli.store import extents
    from mggcn.errors import printable
    from mggcn.graph.csr import columns
    from mggcn.graph.generate import community, rmat
    from mggcn.graph.store_write import refuse_existing, write_store

    a = arguments
    shares = {"train": a.train, "val": a.val, "seed": a.seed, "name": a.store.name}
    refuse_existing(a.store, a.force)
    if a.kind == "bter":
        graph = _bter(a)
    else:
        if a.kind == "community":
            chosen = {"homophily": a.homophily, "train_by": a.train_by, "task": a.task, "num_relations": a.relations}
            graph = community(a.vertices, a.edges, a.features, a.classes, **chosen, **shares)
        else:
            sizes = {"num_features": a.features, "num_classes": a.classes}
            graph = rmat(a.scale, a.edge_factor, symmetric=not a.directed, **sizes, **shares)
        write_store(graph, a.store, overwrite=a.force)
    a.answer = {"store": a.store, **extents(graph)}
    print(
        f"{printable(a.store)}: {graph.num_vertices:,} vertices, {graph.num_edges:,} stored edges, "
        f"{a.features} features, {columns(graph.task, graph.num_classes)}"
    )
    return 0


def _bter(a: argparse.Namespace) -> Graph:
    """Generate a graph like another one in a folder beside the store, and write it."""
    from mggcn.cli.building import kept_if_interrupted, room_for
    from mggcn.cli.train import store_path
    from mggcn.graph.bter import bter
    from mggcn.graph.store import open_store
    from mggcn.graph.store_write import refuse_source, write_store

    like = store_path(a.like, a.root)
    refuse_source(a.store, like)
    drawn = (a.factor, a.seed, a.classes, a.homophily)
    with kept_if_interrupted(a.store) as folder:
        # Edges are drawn again after an interruption, the same ones, and sorted from where it stopped.
        room = room_for(folder, a.memory).based_on(like=like, drawn="bter " + " ".join(map(str, drawn)))
        graph = bter(
            open_store(like),
            seed=a.seed,
            factor=a.factor,
            num_features=a.features,
            num_classes=a.classes,
            homophily=a.homophily,
            train=a.train,
            val=a.val,
            train_by=a.train_by,
            name=a.store.name,
            room=room,
            announce=_announce,
        )
        write_store(graph, a.store, overwrite=a.force)
    return graph


def _announce(plan: BterPlan) -> None:
    """Print the extents and the memory of a graph before it is made."""
    from mggcn.host import process_bytes
    from mggcn.memory.units import human

    steps = ", ".join(f"{what} {human(nbytes)}" for what, nbytes in plan.nbytes.items())
    print(
        f"{plan.num_vertices:,} vertices, {plan.num_edges:,} edges: planned peak memory "
        f"{human(process_bytes('VmRSS') + plan.peak)} ({steps}, one after the other)",
        file=sys.stderr,
    )
