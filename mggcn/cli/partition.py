"""Cut a graph into parts, one for each rank, print what the cut costs, and keep it with the store.

Libra assigns edges to parts, METIS vertices; locality orders the vertices so that neighbours are near each other, which
helps with one part, too. --list prints the cuts that a store has; --relabel writes the graph to another store, in which
the vertices of a part have consecutive numbers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mggcn.cli.answer import add_json
from mggcn.cli.settings import whole
from mggcn.errors import ConfigError, PlanError, printable, shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mggcn.graph.csr import Graph
    from mggcn.partition.cache.cuts import Stored
    from mggcn.partition.cache.folder import CachedPartition
    from mggcn.partition.cut.vertex_cut import CutStatistics
    from mggcn.partition.locality.order import LocalityStatistics
    from mggcn.partition.metis.edge_cut import EdgeCutStatistics

MAX_LEAVES: Final = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", help="store folder, or its name under --root")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder in which names of stores are looked up")
    parser.add_argument(
        "--kind", choices=tuple(_KINDS), help="how to cut (default: libra, and metis-balanced to relabel)"
    )
    parser.add_argument("--parts", type=whole, metavar="P", help="number of parts, 1 to 1024")
    parser.add_argument("--seed", type=whole, default=1, help="seed of the cut (default: 1)")
    parser.add_argument(
        "--edges", choices=("shuffled", "stored"), help="libra: order in which edges are assigned (default: shuffled)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of partitions (default: STORE/partitions)")
    parser.add_argument(
        "--relabel", type=Path, metavar="OUT", help="write a store in which the vertices of a part are together"
    )
    parser.add_argument(
        "--leaves",
        type=whole,
        metavar="L",
        help="relabel: METIS cuts parts into halves until there are L or more, for other numbers of ranks",
    )
    parser.add_argument("--force", action="store_true", help="make the cut even if there is one, and replace OUT")
    parser.add_argument("--list", action="store_true", help="print the cuts of the store, and make none")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Find or make the cut, or list existing ones; exit code 2 if there is too little memory."""
    from mggcn.cli.train import store_path
    from mggcn.graph.store import open_store
    from mggcn.graph.store_write import refuse_source
    from mggcn.partition.cache.cuts import cuts_folder
    from mggcn.partition.cache.folder import list_cached

    a = arguments
    a.kind = a.kind or ("libra" if a.relabel is None else "metis-balanced")
    _check_relabel(a)
    if not a.list and a.parts is None:
        raise ConfigError("partition needs --parts P, the number of parts, or --list")
    if a.kind != "libra" and a.edges is not None:
        which = {"locality": "an order by locality", "stream": "a stream"}.get(a.kind, "METIS")
        raise ConfigError(f"--edges applies to Libra only, and {which} does not assign edges; remove it")
    store = store_path(a.store, a.root)
    if a.relabel is not None:
        refuse_source(a.relabel, store)
    graph = open_store(store)
    folder = a.out or cuts_folder(store)
    if a.list:
        a.answer = {"store": store, "folder": folder, "partitions": list_cached(folder, graph)}
        print(shown(listed(graph, folder)))
    elif a.relabel is None:
        _KINDS[a.kind](graph, folder, a)
    else:
        _relabel(graph, folder, a)
    return 0


def _check_relabel(a: argparse.Namespace) -> None:
    if a.relabel is None and a.leaves is not None:
        raise ConfigError("--leaves says how far a store is cut that is relabelled; add --relabel OUT, or remove it")
    if a.relabel is not None and a.list:
        raise ConfigError("--list makes no cut, so --relabel has nothing to write; remove one of them")
    if a.relabel is not None and a.kind == "libra":
        raise ConfigError(
            "--relabel puts the vertices of a part together, and Libra assigns edges; choose another --kind"
        )
    if a.leaves is not None and not a.kind.startswith("metis"):
        raise ConfigError(f"--leaves are METIS's, and --kind is {a.kind}; choose metis or metis-balanced, or remove it")
    if a.leaves is not None and not max(a.parts or 1, 1) <= a.leaves <= MAX_LEAVES:
        raise ConfigError(f"--leaves must lie between the number of parts and {MAX_LEAVES:,}, got {a.leaves:,}")


def _relabel(graph: Graph, folder: Path, a: argparse.Namespace) -> None:
    """Write the graph with its vertices in the order of the parts, or of their leaves, and the bounds of the parts."""
    import dataclasses

    import numpy as np

    from mggcn.graph.relabel import relabel_nbytes, relabelled
    from mggcn.graph.store_write import refuse_existing, write_store
    from mggcn.partition.ranges import RELABELLED

    refuse_existing(a.relabel, a.force)
    _check_memory(relabel_nbytes(graph), 0, 0, "relabelling")
    if a.leaves is None:
        cut = _KINDS[a.kind](graph, folder, a).cut
        owners = cut.owners if a.kind == "locality" else cut.assignment()
        order, counts = np.concatenate([owners.owned(part) for part in range(a.parts)]), owners.counts
    else:
        leaf, halvings = _leaves(graph, a)
        order, counts = np.argsort(leaf, kind="stable"), np.bincount(leaf >> halvings, minlength=a.parts)
        a.leaves = a.parts << halvings
    how = {"kind": a.kind, "parts": a.parts, "seed": a.seed, "leaves": a.leaves}
    bounds = [0, *np.cumsum(counts).tolist()]
    found = relabelled(graph, order)
    found = dataclasses.replace(found, meta={**found.meta, RELABELLED: how | {"bounds": bounds}})
    write_store(found, a.relabel, overwrite=a.force)
    a.answer = (a.answer if isinstance(a.answer, dict) else how) | {"store": a.relabel, "bounds": bounds}
    print(f"relabelled, saved in {printable(a.relabel)}; train it with --ranks {a.parts} --order ranges")


def _leaves(graph: Graph, a: argparse.Namespace) -> tuple[npt.NDArray[np.int64], int]:
    """Return the leaf of every vertex (N,), and how often every part was cut into halves."""
    from mggcn.partition.metis.edge_cut import edge_cut
    from mggcn.partition.metis.run import MetisSettings, constraints, halved, metis_memory, require_pymetis

    settings = MetisSettings(parts=a.parts, seed=a.seed, kind=a.kind)
    halvings = math.ceil(math.log2(a.leaves / a.parts))
    even = constraints(graph, settings)
    parts = f"{settings.parts} parts, {settings.parts << halvings:,} leaves"
    print(f"{graph.name}: METIS, {parts} of even {', '.join(even)}, seed {settings.seed}")
    require_pymetis()
    memory = metis_memory(graph.num_vertices, graph.num_edges, graph.symmetric, len(even))
    _check_memory(memory.own, memory.metis_least, memory.metis_most)
    leaf = halved(graph, settings, halvings)
    cut = edge_cut(graph, (leaf >> halvings).astype("uint16"), a.parts)
    print(shown(edge_cut_summary(cut.statistics)))
    return leaf, halvings


def _libra(graph: Graph, folder: Path, a: argparse.Namespace) -> Stored[Any]:
    from mggcn.partition.cache.cuts import VERTEX_CUTS
    from mggcn.partition.cut.libra import LibraSettings, libra_nbytes

    settings = LibraSettings(parts=a.parts, seed=a.seed, edges=a.edges or "shuffled")
    print(f"{graph.name}: Libra, {settings.parts} parts, seed {settings.seed}, edges {settings.edges}")
    if a.force or not (folder / settings.name).exists():
        regions = libra_nbytes(graph.num_vertices, graph.num_edges, graph.symmetric, settings.parts)
        _check_memory(regions, 0, 0)
    stored = VERTEX_CUTS.find_or_make(graph, settings, folder, a.force)
    return _report(a, stored, summary(stored.cut.statistics))


def _metis(graph: Graph, folder: Path, a: argparse.Namespace) -> Stored[Any]:
    from mggcn.partition.cache.cuts import EDGE_CUTS
    from mggcn.partition.metis.run import MetisSettings, constraints, metis_memory, require_pymetis

    settings = MetisSettings(parts=a.parts, seed=a.seed, kind=a.kind)
    even = constraints(graph, settings)
    print(f"{graph.name}: METIS, {settings.parts} parts of even {', '.join(even)}, seed {settings.seed}")
    if a.force or not (folder / settings.name).exists():
        require_pymetis()
        memory = metis_memory(graph.num_vertices, graph.num_edges, graph.symmetric, len(even))
        _check_memory(memory.own, memory.metis_least, memory.metis_most)
    stored = EDGE_CUTS.find_or_make(graph, settings, folder, a.force)
    return _report(a, stored, edge_cut_summary(stored.cut.statistics))


def _stream(graph: Graph, folder: Path, a: argparse.Namespace) -> Stored[Any]:
    from mggcn.partition.cache.cuts import STREAM_CUTS
    from mggcn.partition.stream import StreamSettings, stream_nbytes

    if a.seed != 1:
        raise ConfigError(f"--kind stream draws nothing, so --seed {a.seed} would change nothing; remove it")
    settings = StreamSettings(parts=a.parts)
    print(f"{graph.name}: stream, {settings.parts} parts")
    if a.force or not (folder / settings.name).exists():
        _check_memory(stream_nbytes(graph.num_vertices, graph.num_edges, graph.symmetric), 0, 0)
    stored = STREAM_CUTS.find_or_make(graph, settings, folder, a.force)
    return _report(a, stored, edge_cut_summary(stored.cut.statistics))


def _locality(graph: Graph, folder: Path, a: argparse.Namespace) -> Stored[Any]:
    from mggcn.partition.cache.cuts import LOCALITY_ORDERS
    from mggcn.partition.locality.clusters import locality_nbytes
    from mggcn.partition.locality.order import LocalitySettings

    settings = LocalitySettings(parts=a.parts, seed=a.seed)
    print(f"{graph.name}: order by locality, {settings.parts} parts, seed {settings.seed}")
    if a.force or not (folder / settings.name).exists():
        _check_memory(locality_nbytes(graph.num_vertices, graph.num_edges, graph.symmetric), 0, 0)
    stored = LOCALITY_ORDERS.find_or_make(graph, settings, folder, a.force)
    return _report(a, stored, locality_summary(stored.cut.statistics))


_KINDS: Final = {"libra": _libra, "metis": _metis, "metis-balanced": _metis, "stream": _stream, "locality": _locality}


def _check_memory(regions: Mapping[str, int], least: int, most: int, what: str = "the cut") -> None:
    """Print the memory that a cut takes, METIS's between two estimates. Raises: PlanError if it cannot fit."""
    from mggcn.memory.units import free_bytes, human

    own, free = sum(regions.values()), free_bytes()
    parts = [f"{name} {human(nbytes)}" for name, nbytes in regions.items()]
    need = human(own + most)
    if most:
        need = f"{human(own + least)} to {need}"
        parts.append(f"METIS {human(least)} to {human(most)}, depending on how much the graph shrinks when it coarsens")
    print(
        f"planned memory{'' if what == 'the cut' else f' of {what}'}: {need} ({', '.join(parts)}), {human(free)} are free",
        flush=True,
    )
    if own + least > free:
        raise PlanError(f"{what} needs {need}, but {human(free)} are free; free memory or use a larger machine")
    if own + most > free:
        print("METIS may run out of memory", flush=True)


def _report(a: argparse.Namespace, stored: Stored[Any], text: str) -> Stored[Any]:
    how = {"kind": a.kind, "parts": a.parts, "seed": a.seed, "seconds": stored.seconds}
    a.answer = {"folder": stored.folder, **how, "statistics": stored.cut.statistics}
    print(shown(text))
    made = "made earlier" if stored.seconds is None else f"made in {stored.seconds:.2f} s"
    print(f"{made}, saved in {printable(stored.folder)}")
    return stored


def summary(statistics: CutStatistics) -> str:
    """Return the statistics of a vertex cut as text."""
    s = statistics
    edges, rows = s.edges_per_part, s.rows_per_part
    return (
        f"replication {s.replication:.3f} (parts of a vertex with edges, average)\n"
        f"edge balance {s.edge_balance:.4f} (largest part over average; {min(edges):,} to {max(edges):,} edges)\n"
        f"row balance {s.row_balance:.4f} ({min(rows):,} to {max(rows):,} vertices and clones)\n"
        f"split vertices {s.split_share:.1%} of {s.num_connected:,} with edges"
    )


def edge_cut_summary(statistics: EdgeCutStatistics) -> str:
    """Return the statistics of an edge cut as text."""
    s = statistics
    halo = s.halo_per_part
    lines = [
        f"edge cut {s.cut_share:.1%} ({s.num_cut:,} of {s.num_edges:,} edges)",
        *_balance_lines(s),
        *_split_lines(s),
        f"halo rows {s.halo_share:.1%} of the vertices ({min(halo):,} to {max(halo):,} rows that a part receives)",
    ]
    if s.halo_t_per_part != halo:
        back = s.halo_t_per_part
        lines.append(f"halo rows of the backward pass {min(back):,} to {max(back):,}")
    return "\n".join(lines)


def locality_summary(statistics: LocalityStatistics) -> str:
    """Return the statistics of an order by locality as text."""
    s = statistics
    lines = [
        f"edges inside clusters {s.inside_share:.1%} ({s.num_clusters:,} clusters, the largest of {s.largest_cluster:,} "
        f"vertices, in {s.num_levels} levels)",
        f"average gap {s.gap:,.0f} places between the ends of an edge ({s.gap_before:,.0f} before)",
        f"the busiest ranks of the stages of a broadcast take {s.critical_path:.3f} times an even share",
        *_balance_lines(s),
    ]
    return "\n".join(lines)


def _balance_lines(statistics: EdgeCutStatistics | LocalityStatistics) -> list[str]:
    s = statistics
    nonzeros, rows = s.nonzeros_per_part, s.rows_per_part
    return [
        f"nonzero balance {s.nonzero_balance:.4f} "
        f"(largest part over average; {min(nonzeros):,} to {max(nonzeros):,} nonzeros)",
        f"row balance {s.row_balance:.4f} ({min(rows):,} to {max(rows):,} vertices)",
    ]


def _split_lines(s: EdgeCutStatistics) -> list[str]:
    from mggcn.partition.statistics import balance

    splits = {"training": s.train_per_part, "validation": s.val_per_part, "test": s.test_per_part}
    return [
        f"{name} balance {balance(counts):.4f} ({min(counts):,} to {max(counts):,} {name} vertices)"
        for name, counts in splits.items()
        if any(counts)
    ]


def listed(graph: Graph, folder: Path) -> str:
    """Return a table of the cuts in a folder, with the reason why any of them cannot be used with the graph."""
    from mggcn.partition.cache.folder import list_cached
    from mggcn.planning.text import table

    found = list_cached(folder, graph)
    if not found:
        return f"no cuts in {folder}; mggcn partition makes them"
    header = ("name", "kind", "parts", "seed", "cost", "balance", "bytes", "")
    return "\n".join([f"cuts of {graph.name} in {folder}", *table(header, (_line(kept) for kept in found))])


def _line(kept: CachedPartition) -> tuple[str, ...]:
    from mggcn.memory.units import human

    def figure(name: str, form: str) -> str:
        value = kept.meta.get(name)
        return format(value, form) if isinstance(value, int | float) else "?"

    settings = kept.meta.get("settings")
    known = settings if isinstance(settings, dict) else {}
    kind = str(known.get("kind", "?"))
    nonzeros = ("nonzeros", "nonzero_balance")
    edge_cuts = ("metis", "metis-balanced", "stream")
    cost = {
        "libra": f"replication {figure('replication', '.3f')}",
        **dict.fromkeys(edge_cuts, f"edge cut {figure('cut_share', '.1%')}"),
        "locality": f"inside clusters {figure('inside_share', '.1%')}",
    }
    work = {"libra": ("edges", "edge_balance"), **dict.fromkeys((*edge_cuts, "locality"), nonzeros)}.get(kind)
    balance = f"{work[0]} {figure(work[1], '.3f')}, rows {figure('row_balance', '.3f')}" if work else "?"
    numbers = (str(known.get("parts", "?")), str(known.get("seed", "-" if known else "?")))
    return (kept.folder.name, kind, *numbers, cost.get(kind, "?"), balance, human(kept.nbytes), kept.state)
