"""Turn any source (store, folder of OGB's, .npz, MatrixMarket, edge list) into a checked store with checksums."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "source",
        help="store, unpacked folder of OGB's, .npz, .mtx, or edge list (.txt .tsv .csv .edges .el), the last two also .gz",
    )
    parser.add_argument(
        "store", type=Path, nargs="?", help="folder to write; without it, and with --verify, SOURCE is only checked"
    )
    parser.add_argument(
        "--features",
        metavar="FILE",
        help=".npy (N, D), or a SciPy sparse .npz; or identity or degree, which need no file",
    )
    parser.add_argument("--labels", type=Path, metavar="FILE", help=".npy (N,), -1 for unlabelled")
    for split in ("train", "val", "test"):
        parser.add_argument(
            f"--{split}", type=Path, metavar="FILE", help=f".npy of {split} vertices: mask or list of ids"
        )
    parser.add_argument("--vertices", type=int, help="number of vertices, if some have no edges and no features")
    parser.add_argument("--symmetrize", action="store_true", help="add the reverse of every edge")
    parser.add_argument(
        "--duplicates",
        choices=("merge", "sum", "error"),
        default="merge",
        help="what to do with repeated edges (default: merge)",
    )
    parser.add_argument(
        "--self-loops",
        choices=("keep", "drop", "add"),
        default="keep",
        help="what to do with the self-loops of the source (default: keep)",
    )
    parser.add_argument(
        "--row-normalize", action="store_true", help="divide each vertex's features by their absolute sum"
    )
    parser.add_argument("--name", help="name of the graph; default: that of the source")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every row of SOURCE first, and of a store the SHA-256 of every file",
    )
    parser.add_argument("--force", action="store_true", help="replace STORE if it exists")


def run(arguments: argparse.Namespace) -> int:
    """Load, check, write, and say what came."""
    from mggcn.errors import ConfigError
    from mggcn.graph.facts import describe
    from mggcn.graph.sources import load_source
    from mggcn.graph.store import has_checksums, open_store
    from mggcn.graph.store_write import write_store
    from mggcn.graph.structure import GraphOptions

    a = arguments
    if a.store is None and not a.verify:
        raise ConfigError("mggcn prepare needs a STORE to write, or --verify to check SOURCE alone")
    splits = {name: path for name in ("train", "val", "test") if (path := getattr(a, name)) is not None}
    options = GraphOptions(
        symmetrize=a.symmetrize, duplicates=a.duplicates, self_loops=a.self_loops, row_normalize=a.row_normalize
    )
    given = {"features": a.features, "labels": a.labels, "splits": splits or None, "num_vertices": a.vertices}
    extra = {key: value for key, value in given.items() if value is not None}
    graph = load_source(a.source, options=options, verify=a.verify, name=a.name, **extra)
    if a.store is not None:
        write_store(graph, a.store, overwrite=a.force)
        # The files as they lie on the disk must carry the checksums that were computed while writing.
        graph = open_store(a.store, verify=True)
    place, facts = a.store or a.source, describe(graph)
    unchecked = "the content was checked, there are no checksums to compare"
    print(f"{place}: {facts.summary}; {'checksums hold' if has_checksums(place) else unchecked}")
    for remark in facts.remarks():
        print(f"note: {remark}")
    return 0
