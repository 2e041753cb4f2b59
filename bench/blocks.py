"""The block sweep of DistGNN's table 3 and figure 3: blocks of the operand's rows against the time of a sparse product.

Beside them stand panels of the operand's columns, by the bytes of a packed row, and what mggcn chooses. All ways of a graph
and width run in turn, in another order in each round; all must give the same bits.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from common import SEED, TUNED, spread, surroundings, table, write_report
from peers_cases import COMMUNITIES, available, find_data, store_of
from peers_options import add_options
from plots import lines

COUNTS = (1, 2, 4, 8, 16, 32, 64)
PANEL_BYTES = (64, 128, 256, 512)
CHOSEN = "chosen"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", default=",".join(COMMUNITIES))
    parser.add_argument("--widths", default="128,256,512")
    parser.add_argument("--orders", default="none,locality")
    parser.add_argument("--rounds", type=int, default=7)
    add_options(parser, "scale", "threads", "data", "cache", "out")
    return parser.parse_args()


def block_name(count: int) -> str:
    return f"{count} block" + ("s" if count > 1 else "")


def ways(width: int, rows: int, caches: Any) -> dict[str, Any]:
    """Every way by name: blocks of whole rows, which fetch nothing ahead; one block and panels that do, as mggcn has them.

    Panels if the shared cache holds `rows` of them packed.
    """
    from mggcn.backend.cpu.variants import SpmmChoice, ahead_of

    def ahead(line_bytes: int) -> int:
        return ahead_of(line_bytes, rows * line_bytes, caches)

    found = {block_name(n): SpmmChoice("blocks" if n > 1 else "rows", 0, n, 0) for n in COUNTS}
    found["1 block, fetched ahead"] = SpmmChoice("rows", 0, 1, ahead(4 * width))
    for size in PANEL_BYTES:
        if size < 4 * width and rows * size <= caches.shared_bytes:
            found[f"panels of {size} B"] = SpmmChoice("panels", size // 4, 1, ahead(size))
    return found


def measure(store: Path, order: str, width: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time every way in shuffled rounds. Raises: RuntimeError if one gives other bits."""
    import torch
    from peers_data import operand
    from worker_product import own_graph

    from mggcn.backend.cpu.machine import caches_of

    backend, adj, _, place, _ = own_graph(str(store), args.threads, "fp32", order == "locality")
    n = place.numel()
    ld = -(-width // 16) * 16
    dense, out = (backend.allocate(4 * n * ld).view(torch.float32).view(n, ld)[:, :width] for _ in range(2))
    dense[place] = torch.from_numpy(operand(n, width))
    products = backend.sparse_products
    chosen = products.choice(adj, dense, out)
    named = {CHOSEN: chosen} | ways(width, adj.schedule.traits.columns, caches_of(args.threads))

    def run(name: str) -> None:
        products.multiply(adj, dense, out, accumulate=False, epilogue=None, choice=named[name])

    run("1 block")
    expected = out.clone()
    for name in named:
        run(name)
        if not torch.equal(out, expected):
            raise RuntimeError(f"{name} gives other bits than one block")
    seconds: dict[str, list[float]] = {name: [] for name in named}
    shuffled = random.Random(SEED)
    for _ in range(args.rounds):
        for name in shuffled.sample(list(named), len(named)):
            began = time.perf_counter()
            run(name)
            seconds[name].append(time.perf_counter() - began)
    way = f"{chosen.text}: {chosen.reason}"
    return {"order": order, "width": width, "vertices": n, "nonzeros": adj.nnz, "seconds": seconds, "way": way}


def rows_of(found: dict[str, Any]) -> list[list[Any]]:
    """The table's lines of one graph, order and width."""
    medians = {name: spread(values)["median"] for name, values in found["seconds"].items()}
    best = min(medians, key=medians.__getitem__)
    return [
        [
            found["graph"],
            found["order"],
            found["width"],
            name,
            f"{1000 * medians[name]:.1f}",
            f"{1000 * min(values):.1f} .. {1000 * max(values):.1f}",
            f"{medians['1 block'] / medians[name]:.2f}",
            f"{medians[name] / medians[best]:.2f}",
        ]
        for name, values in found["seconds"].items()
    ]


def plots_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds by the number of blocks: a line for every graph and order, a plot for every width."""
    found = []
    for width in dict.fromkeys(r["width"] for r in results):
        points = {
            f"{r['graph']}, order {r['order']}": [
                (count, 1000 * spread(r["seconds"][block_name(count)])["median"]) for count in COUNTS
            ]
            for r in results
            if r["width"] == width
        }
        found += lines(f"Blocks of the operand's rows, width {width}", "ms", "number of blocks", points)
    return found


def main() -> None:
    args = parse()
    if not importlib.util.find_spec("mggcn.backend.cpu.variants"):
        sys.exit("this version of mggcn multiplies in one way only: there are no blocks to sweep")
    if any(os.environ.get(name) != value for name, value in TUNED.items()):
        # glibc reads its settings when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **TUNED})
    data = find_data(args.data)
    record: dict[str, Any] = {"surroundings": surroundings(), "measured": []}
    for graph in (name for name in args.graphs.split(",") if available(name, data)):
        store = store_of(graph, args.cache, args.scale, data)
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
