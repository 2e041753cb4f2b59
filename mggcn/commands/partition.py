"""Cut a graph's edges into parts, each for one rank (Libra), print what the cut costs and keep it beside the store."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mggcn.commands.settings import whole

if TYPE_CHECKING:
    from mggcn.partition.vertex_cut import CutStatistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", help="store folder, or its name under --root")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder in which names of stores are looked up")
    parser.add_argument("--kind", choices=("libra",), default="libra", help="how to cut (default: libra)")
    parser.add_argument("--parts", type=whole, required=True, metavar="P", help="number of parts, 1 to 1024")
    parser.add_argument("--seed", type=whole, default=1, help="seed of the cut (default: 1)")
    parser.add_argument(
        "--edges",
        choices=("shuffled", "stored"),
        default="shuffled",
        help="order in which edges are dealt (default: shuffled)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of partitions (default: STORE/partitions)")
    parser.add_argument("--force", action="store_true", help="make the cut again if there is one")


def run(arguments: argparse.Namespace) -> int:
    """Find or make the cut; exit code 2 if there is too little memory."""
    from mggcn.commands.train import store_path
    from mggcn.errors import PlanError
    from mggcn.graph.store import open_store
    from mggcn.partition.cut_files import cuts_folder, find_or_make_cut
    from mggcn.partition.libra import LibraSettings, libra_nbytes
    from mggcn.plan.machine import free_bytes, human

    a = arguments
    settings = LibraSettings(parts=a.parts, seed=a.seed, edges=a.edges)
    store = store_path(a.store, a.root)
    graph = open_store(store)
    folder = a.out or cuts_folder(store)
    print(f"{graph.name}: Libra, {settings.parts} parts, seed {settings.seed}, edges {settings.edges}")
    if a.force or not (folder / settings.name).exists():
        regions = libra_nbytes(graph.num_vertices, graph.num_edges, graph.symmetric, settings.parts)
        need, free = sum(regions.values()), free_bytes()
        parts = ", ".join(f"{name} {human(nbytes)}" for name, nbytes in regions.items())
        print(f"planned memory: {human(need)} ({parts}), {human(free)} are free", flush=True)
        if need > free:
            raise PlanError(f"the cut needs {human(need)}, {human(free)} are free; free memory or use a larger machine")
    stored = find_or_make_cut(graph, settings, folder, a.force)
    print(summary(stored.cut.statistics))
    made = "made before" if stored.seconds is None else f"made in {stored.seconds:.2f} s"
    print(f"{made}, lies in {stored.folder}")
    return 0


def summary(statistics: CutStatistics) -> str:
    """Return the figures of a cut as text."""
    s = statistics
    edges, rows = s.edges_per_part, s.rows_per_part
    return (
        f"replication {s.replication:.3f} (parts of a vertex with edges, average)\n"
        f"edge balance {s.edge_balance:.4f} (largest part over average; {min(edges):,} to {max(edges):,} edges)\n"
        f"row balance {s.row_balance:.4f} ({min(rows):,} to {max(rows):,} vertices and clones)\n"
        f"split vertices {s.split_share:.1%} of {s.num_connected:,} with edges"
    )
