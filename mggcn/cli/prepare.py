"""Turn any source (store, folder of OGB's, .npz, .npy, MatrixMarket, edge list) into a checked store with checksums."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mggcn.cli.answer import add_json
from mggcn.cli.settings import memory, whole

if TYPE_CHECKING:
    from mggcn.graph.build.room import Room
    from mggcn.graph.csr import Graph
    from mggcn.graph.options import GraphOptions

PART_OF = ("train=", "val=", "valid=", "test=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "source",
        help="store, name of a data set (mggcn datasets lists them), unpacked folder of OGB's, .npz, .npy (2, E) or "
        "(E, 2), .i32 or .i64 (pairs), .parquet, .pt (PyG), .mtx, or edge list (.txt .tsv .csv .edges .el), the last two "
        "also .gz or .zst",
    )
    parser.add_argument(
        "store", type=Path, nargs="?", help="folder to write; without it, and with --verify, SOURCE is only checked"
    )
    parser.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="SOURCE",
        help="a further graph, without edges to the others; each keeps its own splits, or belongs whole to a part, as in "
        "prepare train=a STORE --join train=b --join test=c",
    )
    parser.add_argument(
        "--features",
        metavar="FILE",
        help=".npy (N, D), .parquet, or a SciPy sparse .npz; or identity or degree, which need no file",
    )
    parser.add_argument(
        "--labels",
        type=Path,
        metavar="FILE",
        help=".npy (N,) of classes or numbers, or (N, T) of several labels or numbers; unknown: -1, or NaN of numbers",
    )
    parser.add_argument(
        "--classes",
        type=Path,
        metavar="FILE",
        help="text with the name of each class, or of each column of labels, a line each in the order of numbers",
    )
    parser.add_argument(
        "--task",
        choices=("classes", "labels", "numbers"),
        help="what labels are: a class each, several of 0 and 1, or numbers to be predicted; default: what they look like",
    )
    parser.add_argument(
        "--edge-types", type=Path, metavar="FILE", help=".npy (E,): number of each edge's relation, from 0"
    )
    for split in ("train", "val", "test"):
        parser.add_argument(
            f"--{split}", type=Path, metavar="FILE", help=f".npy of {split} vertices: mask or list of ids"
        )
    parser.add_argument(
        "--ids",
        metavar="FILE",
        help="what edges and lists of vertices call the rows: .npy (N,) of whole numbers or strings, in the order of "
        "features and labels; or edges, for all that occur in them. Default: row numbers from 0",
    )
    parser.add_argument("--vertices", type=whole, help="number of vertices, if some have no edges and no features")
    parser.add_argument("--symmetrize", action="store_true", help="add the reverse of every edge")
    parser.add_argument(
        "--duplicates",
        choices=("auto", "merge", "sum", "error"),
        default="auto",
        help="what to do with repeated edges; auto, the default, merges those of lists, adds up entries of matrices with "
        "values, and counts the edges of PyG's graphs as PyG does",
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
    parser.add_argument(
        "--memory",
        type=memory,
        default=1 << 30,
        metavar="BYTES",
        help="memory for sorting edges, such as 512MiB; more edges than that go through files beside STORE (default: 1GiB)",
    )
    parser.add_argument(
        "--links",
        metavar="SHARES",
        help="predict links: split the edges into those that train, validate and test, such as 0.8,0.1,0.1, and take the "
        "latter two, and their reverses, out of the graph; labels and splits of vertices are left out",
    )
    parser.add_argument(
        "--negatives",
        type=whole,
        metavar="K",
        help="with --links: destinations without an edge that each validation and test link is compared with (default: 20)",
    )
    parser.add_argument(
        "--links-seed", type=whole, metavar="SEED", help="with --links: another seed splits otherwise (default: 1)"
    )
    parser.add_argument("--name", help="name of the graph; default: that of STORE, or of a store that is copied")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every row of SOURCE first, and of a store the SHA-256 of every file",
    )
    parser.add_argument("--force", action="store_true", help="replace STORE if it exists")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Load, check and write a graph, and print its extents."""
    from mggcn.cli.building import kept_if_interrupted, room_for
    from mggcn.cli.store import extents
    from mggcn.errors import ConfigError, printable
    from mggcn.graph.build.room import IN_MEMORY
    from mggcn.graph.facts import describe
    from mggcn.graph.options import GraphOptions
    from mggcn.graph.store import has_checksums, open_store
    from mggcn.graph.store_write import refuse_existing, write_store

    a = arguments
    if a.store is None and (a.join or not a.verify):
        raise ConfigError("mggcn prepare needs a STORE to write, or --verify to check SOURCE alone")
    if a.links is None and (a.negatives, a.links_seed) != (None, None):
        raise ConfigError(
            "--negatives and --links-seed belong to --links; give it the shares, such as --links 0.8,0.1,0.1"
        )
    splits = {name: path for name in ("train", "val", "test") if (path := getattr(a, name)) is not None}
    options = GraphOptions(
        symmetrize=a.symmetrize, duplicates=a.duplicates, self_loops=a.self_loops, row_normalize=a.row_normalize
    )
    given = {
        "features": a.features,
        "labels": a.labels,
        "edge_types": a.edge_types,
        "ids": a.ids,
        "splits": splits or None,
        "num_vertices": a.vertices,
        "task": a.task,
        "class_names": a.classes,
    }
    extra = {key: value for key, value in given.items() if value is not None}
    if a.join and extra:
        flags = {"class_names": "classes", "num_vertices": "vertices"}
        named = ", ".join(f"--{flags.get(name, name).replace('_', '-')}" for name in extra)
        raise ConfigError(f"{named} completes one graph; prepare each of several, then --join the stores")
    if a.store is None:
        graph = _loaded(a, IN_MEMORY, options, extra)
    else:
        refuse_existing(a.store, a.force)
        with kept_if_interrupted(a.store) as folder:
            room = room_for(folder, a.memory)
            write_store(_loaded(a, room, options, extra), a.store, overwrite=a.force)
            # The files as they lie on the disk must carry the checksums that were computed while writing.
            graph = open_store(a.store, verify=True)
    place, facts = a.store or a.source, describe(graph)
    checksums = has_checksums(place)
    a.answer = {"store": a.store, **extents(graph), "checksums": checksums, "remarks": facts.remarks()}
    unchecked = "the content was checked, there are no checksums to compare"
    print(f"{printable(place)}: {facts.summary}; {'checksums hold' if checksums else unchecked}")
    for remark in facts.remarks():
        print(f"note: {printable(remark)}")
    return 0


def _loaded(a: argparse.Namespace, room: Room, options: GraphOptions, extra: dict[str, Any]) -> Graph:
    """Return the graph of one source, or of several joined."""
    from mggcn.api.load import load_joined, load_source
    from mggcn.graph.layout import is_own
    from mggcn.graph.links import NEGATIVES, split_links

    if a.join:
        sources = _parts([a.source, *a.join])
        graph = load_joined(sources, options=options, verify=a.verify, name=a.name or a.store.name, room=room)
    else:
        graph = load_source(a.source, options=options, verify=a.verify, name=a.name, room=room, **extra)
        if not (a.name or a.store is None or is_own(graph.meta)):
            graph = replace(graph, name=a.store.resolve().name)
    if a.links is None:
        return graph
    negatives, seed = NEGATIVES if a.negatives is None else a.negatives, 1 if a.links_seed is None else a.links_seed
    return split_links(graph, _shares(a.links), negatives=negatives, seed=seed)


def _shares(text: str) -> list[float]:
    """Return the numbers of --links. Raises: ConfigError."""
    from mggcn.errors import ConfigError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--links expects three shares, such as 0.8,0.1,0.1, got {text!r}") from error


def _parts(sources: list[str]) -> list[str] | dict[str, list[str]]:
    """Return the sources as they are, or by part if one is of the form train=SOURCE: then all must be."""
    from mggcn.errors import ConfigError

    named = [source.split("=", 1) for source in sources if source.startswith(PART_OF)]
    if not named:
        return sources
    if bare := [source for source in sources if not source.startswith(PART_OF)]:
        raise ConfigError(
            f"{'='.join(named[0])} says which part its graph belongs to, but {', '.join(bare)} does not; write "
            f"train={bare[0]}, val={bare[0]} or test={bare[0]}, or leave out all parts"
        )
    return {part: [source for name, source in named if name == part] for part, _ in named}
