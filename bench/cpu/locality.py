"""What the order by locality costs and does to the graph: seconds, clusters, gaps, the stages and halos of four ranks.

Sparse products with and without it are `bench.peers.products`' rows, epochs `bench.cpu.epochs --what order`.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.cpu.epochs import RANDOM_IDS
from bench.graphs import available, find_data, store_of
from bench.report import SEED, parse, surroundings, table, write_report

RANKS = 4


def measure(name: str, store: Path, args: Any) -> dict[str, Any]:
    """Order one graph several times; compare the tiles of four ranks under it and under random ids."""
    from mggcn.graph.store import open_store
    from mggcn.partition.locality.order import LocalitySettings, locality
    from mggcn.partition.metis.edge_cut import _halo
    from mggcn.partition.order import assign
    from mggcn.partition.statistics import tile_statistics

    print(name, file=sys.stderr)
    graph = open_store(store)
    wall, cpu = [], []
    for _ in range(args.rounds):
        began, used = time.perf_counter(), time.process_time()
        found = locality(graph, LocalitySettings(parts=1, seed=SEED), args.threads).statistics
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    owners = {
        "random": assign(graph.num_vertices, RANKS, "random", SEED + 1),  # not the seed by which ids were drawn
        "locality": locality(graph, LocalitySettings(parts=RANKS, seed=SEED), args.threads).owners,
    }
    tiles = {order: tile_statistics(graph, of, self_loops=True) for order, of in owners.items()}
    return {
        **{"graph": name, "vertices": graph.num_vertices, "nonzeros": graph.num_edges, "wall": wall, "cpu": cpu},
        "statistics": dataclasses.asdict(found) | {"inside_share": found.inside_share},
        "path": {order: t.critical_path_over_ideal for order, t in tiles.items()},
        "halo": {order: float(_halo(t.rows_needed).sum()) / graph.num_vertices for order, t in tiles.items()},
    }


def row(r: dict[str, Any]) -> list[str]:
    cpu, s = median(r["cpu"]), r["statistics"]
    cells = [f"{median(r['wall']):.2f}", f"{cpu:.2f}", f"{r['nonzeros'] / cpu / 1e6:.1f}", f"{s['inside_share']:.0%}"]
    cells += [f"{s['gap_before']:,.0f}", f"{s['gap']:,.0f}"]
    ranks = [f"{r[what][order]:.2f}" for what in ("path", "halo") for order in ("random", "locality")]
    return [r["graph"], f"{r['vertices']:,}", f"{r['nonzeros']:,}", *cells, *ranks]


def main(arguments: list[str] | None = None) -> None:
    graphs = {"default": ";".join(RANDOM_IDS)}
    args = parse(__doc__, "scale", "threads", "rounds", "data", "cache", arguments=arguments, graphs=graphs)
    around, data = surroundings(), find_data(args.data)
    results = [measure(g, store_of(g, args), args) for g in args.graphs.split(";") if available(g, data)]
    head = [
        "graph",
        "vertices",
        "nonzeros",
        "order s",
        "CPU s",
        "M nnz / CPU s",
        "inside clusters",
        "gap before",
        "gap",
    ]
    head += ["path random", "path locality", "halo random", "halo locality"]
    note = f"\nPath: critical path of {RANKS} ranks' stages over that of equal tiles; halo: rows received, over vertices.\n"
    body = table(head, [row(result) for result in results]) + note
    write_report("locality", "An order by locality", body, {"surroundings": around, "results": results}, args.out)


if __name__ == "__main__":
    main()
