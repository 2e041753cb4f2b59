"""Every way of mggcn's sparse product on CPUs beside the chosen one: blocks of rows, panels of columns, rows fetched ahead.

The block sweep of DistGNN's table 3 and figure 3; what the model of mggcn/backend/cpu/variants.py is held to. All ways of a
graph and width run in turn, in another order in each round, and must give the same bits.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.graphs import available, find_data, store_of
from bench.process import MALLOC
from bench.report import SEED, lines, milliseconds, parse, spread, surroundings, table, write_report

GRAPHS = "arxiv-like,reddit-like,products-like"
COUNTS = (1, 2, 4, 8, 16, 32, 64)
PANEL_BYTES = (64, 128, 256, 512)
LINE = 64
"""Bytes of a cache line, to which mggcn pads its rows."""
CHOSEN, ONE = "chosen", "1 blocks"


@dataclass(frozen=True)
class OwnGraph:
    """The normalised graph as mggcn multiplies it: scales by row, the row of each vertex, the seconds of the order."""

    backend: Any
    adj: Any
    scale: Any
    place: Any
    order_s: float

    def buffers(self, width: int) -> list[Any]:
        """An operand and a result in padded rows, as planned buffers are."""
        item, n = self.backend.dtype.itemsize, self.place.numel()
        ld = -(-width * item // LINE) * LINE // item
        whole = (self.backend.allocate(n * ld * item).view(self.backend.dtype).view(n, ld) for _ in range(2))
        return [buffer[:, :width] for buffer in whole]


@functools.cache
def own_graph(store: str, threads: int, precision: str, ordered: bool) -> OwnGraph:
    """Read a graph in the order of the store, or order it by locality."""
    from mggcn import native

    native.limit_spinning()
    import numpy as np
    import torch

    from mggcn.assemble import plan_shape
    from mggcn.assemble_rank import make_backend
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store
    from mggcn.partition.locality.order import LocalitySettings, locality
    from mggcn.partition.order import assign
    from mggcn.partition.rows.tiles import build_tiles
    from mggcn.planning.shape import GraphShape

    config = from_tables({"run": {"threads": threads, "precision": precision}})
    tiny = GraphShape(name="tiny", num_vertices=2, num_edges=2, num_features=1, num_classes=1, symmetric=True)
    plan = plan_shape(config, tiny)
    backend = make_backend(config, plan.ranks[0], lambda: None, figures=plan.figures)  # type: ignore[arg-type,return-value]
    torch.set_num_threads(threads)
    graph, began = open_store(store), time.perf_counter()
    owners = assign(graph.num_vertices, 1, "none", 0)
    if ordered:
        owners = locality(graph, LocalitySettings(parts=1, seed=1), threads).owners
    seconds = time.perf_counter() - began
    (tile,) = build_tiles(graph.adj_t, owners, 0, self_loops=True, dtype="float32", threads=threads)
    scale = torch.from_numpy((np.diff(tile.indptr) ** -0.5).astype(np.float32))
    place = torch.from_numpy(owners.local.astype(np.int64))
    return OwnGraph(backend, backend.sparse(tile.indptr, tile.indices, tile.values), scale, place, seconds)


def ways(width: int, rows: int, figures: Any) -> dict[str, Any]:
    """Every way by name: blocks of whole rows, which fetch nothing ahead; one block and panels that do, as mggcn has them.

    Panels if `rows` of them packed are near by the figures of the machine.
    """
    from mggcn.backend.cpu.variants import ahead_of
    from mggcn.backend.spmm_choice import SpmmChoice

    found = {f"{n} blocks": SpmmChoice("blocks" if n > 1 else "rows", 0, n, 0) for n in COUNTS}
    found["1 block, fetched ahead"] = SpmmChoice("rows", 0, 1, ahead_of(4 * width))
    for size in PANEL_BYTES:
        if size < 4 * width and rows * size <= figures.near_bytes:
            found[f"panels of {size} B"] = SpmmChoice("panels", size // 4, 1, ahead_of(size))
    return found


def measure(store: Path, order: str, width: int, args: Any) -> dict[str, Any]:
    """Time every way in shuffled rounds. Raises: RuntimeError if one gives other bits."""
    import torch

    from bench.arrays import operand

    graph = own_graph(str(store), args.threads, "fp32", order == "locality")
    dense, out = graph.buffers(width)
    dense[graph.place] = torch.from_numpy(operand(dense.shape[0], width))
    products = graph.backend.sparse_products
    chosen = products.choice(graph.adj, dense, out)
    named = {CHOSEN: chosen} | ways(width, graph.adj.schedule.traits.columns, products.figures)

    def run(name: str) -> float:
        began = time.perf_counter()
        products.multiply(graph.adj, dense, out, accumulate=False, epilogue=None, choice=named[name])
        return time.perf_counter() - began

    run(ONE)
    expected = out.clone()
    for name in named:
        run(name)
        if not torch.equal(out, expected):
            raise RuntimeError(f"{name} gives other bits than one block")
    seconds: dict[str, list[float]] = {name: [] for name in named}
    shuffled = random.Random(SEED)
    for _ in range(args.rounds):
        for name in shuffled.sample(list(named), len(named)):
            seconds[name].append(run(name))
    return {"order": order, "width": width, "seconds": seconds, "way": f"{chosen.text}: {chosen.reason}"}


def rows_of(found: dict[str, Any]) -> list[list[Any]]:
    """The table's lines of one graph, order and width."""
    times = {name: spread(values) for name, values in found["seconds"].items()}
    best = min(line["median"] for line in times.values())
    where = [found["graph"], found["order"], found["width"]]
    base = times[ONE]["median"]
    return [
        [*where, name, *milliseconds(t), f"{base / t['median']:.2f}", f"{t['median'] / best:.2f}"]
        for name, t in times.items()
    ]


def plots_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds by the number of blocks: a line for every graph and order, a plot for every width."""
    found = []
    for width in dict.fromkeys(r["width"] for r in results):
        points = {
            f"{r['graph']}, order {r['order']}": [
                (count, 1000 * spread(r["seconds"][f"{count} blocks"])["median"]) for count in COUNTS
            ]
            for r in results
            if r["width"] == width
        }
        found += lines(f"Blocks of the operand's rows, width {width}", "ms", "number of blocks", points)
    return found


def options(arguments: list[str] | None = None) -> Any:
    own = {"graphs": {"default": GRAPHS}, "widths": {"default": "128,256,512"}, "orders": {"default": "none,locality"}}
    return parse(__doc__, "scale", "threads", "rounds", "data", "cache", arguments=arguments, **own)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    if arguments is None and any(os.environ.get(name) != value for name, value in MALLOC["tuned"].items()):
        # glibc reads its settings when a process starts.
        os.execve(sys.executable, [sys.executable, "-m", "bench.cpu.ways", *sys.argv[1:]], os.environ | MALLOC["tuned"])
    record: dict[str, Any] = {"surroundings": surroundings(), "measured": []}
    for graph in (name for name in args.graphs.split(",") if available(name, find_data(args.data))):
        store = store_of(graph, args)
        for order in args.orders.split(","):
            for width in (int(text) for text in args.widths.split(",")):
                print(f"{graph}, order {order}, width {width}", file=sys.stderr)
                record["measured"].append({"graph": graph, **measure(store, order, width, args)})
    head = ["graph", "order", "width", "way", "ms (median)", "min .. max", "1 block / it", "it / best"]
    rows = [row for found in record["measured"] for row in rows_of(found)]
    chosen = [[f["graph"], f["order"], f["width"], f["way"]] for f in record["measured"]]
    body = (
        f"Scale {args.scale:g}, {args.threads} threads, {args.rounds} rounds, float32, malloc tuned.\n\n{table(head, rows)}"
        f"\n{table(['graph', 'order', 'width', 'chosen, and why'], chosen)}"
    )
    record["plots"] = plots_of(record["measured"])
    write_report("blocks", "Blocks and panels of the operand", body, record, args.out)


if __name__ == "__main__":
    main()
