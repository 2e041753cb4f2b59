"""Every way of mggcn's sparse product on CPUs beside the chosen one: blocks of rows, panels of columns, rows fetched ahead.

The block sweep of DistGNN's table 3 and figure 3; what the model of mggcn/backend/cpu/variants.py is held to. All ways of a
graph and width run in turn, in another order in each round, and must give the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.graphs import available, find_data, store_of
from bench.process import MALLOC
from bench.report import SEED, lines, milliseconds, parse, spread, surroundings, table, verdict, write_report

GRAPHS = "arxiv-like,reddit-like,products-like"
COUNTS = (1, 2, 4, 8, 16, 32, 64)
PANEL_BYTES = (64, 128, 256, 512)
LINE = 64
"""Bytes of a cache line, to which mggcn pads its rows."""
CHOSEN, ONE = "chosen", "1 blocks"
MEAN_GOAL, WORST_GOAL = 1.1, 1.25
SWEEP = "import numpy as np\na = np.zeros(2**25)\nwhile True:\n    a += 1.0"


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

    from mggcn.assemble.plan import plan_shape
    from mggcn.assemble.rank import make_backend
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
    place = torch.from_numpy(owners.local_of(slice(None)).astype(np.int64))
    return OwnGraph(backend, backend.sparse(tile.indptr, tile.indices, tile.values), scale, place, seconds)


def ways(width: int, rows: int, figures: Any, item: int = 4) -> dict[str, Any]:
    """Every way by name: blocks of whole rows, which fetch nothing ahead; one block and panels that do, as mggcn has them.

    Panels if `rows` of them packed are near by the figures of the machine. item: bytes of a number; blocks, whose result
    has the type of sums, need four.
    """
    from mggcn.backend.cpu.variants import ahead_of
    from mggcn.backend.spmm_choice import SpmmChoice

    counts = COUNTS if item == 4 else COUNTS[:1]
    found = {f"{n} blocks": SpmmChoice("blocks" if n > 1 else "rows", 0, n, 0) for n in counts}
    found["1 block, fetched ahead"] = SpmmChoice("rows", 0, 1, ahead_of(item * width))
    for size in PANEL_BYTES:
        if size < item * width and rows * size <= figures.near_bytes:
            found[f"panels of {size} B"] = SpmmChoice("panels", size // item, 1, ahead_of(size))
    return found


def measure(store: Path, order: str, width: int, precision: str, args: Any) -> dict[str, Any]:
    """Time every way in shuffled rounds. Raises: RuntimeError if one gives other bits."""
    import torch

    from bench.arrays import operand

    graph = own_graph(str(store), args.threads, precision, order == "locality")
    dense, out = graph.buffers(width)
    dense[graph.place] = torch.from_numpy(operand(dense.shape[0], width)).to(dense.dtype)
    products = graph.backend.sparse_products
    chosen = products.choice(graph.adj, dense, out)
    named = {CHOSEN: chosen} | ways(width, graph.adj.schedule.traits.columns, products.figures, dense.itemsize)

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
    return {
        "order": order,
        "width": width,
        "type": precision,
        "seconds": seconds,
        "way": f"{chosen.text}: {chosen.reason}",
    }


def rows_of(found: dict[str, Any]) -> list[list[Any]]:
    """The table's lines of one graph, order and width."""
    times = {name: spread(values) for name, values in found["seconds"].items()}
    best = min(line["median"] for line in times.values())
    where = [found["graph"], found["order"], found["width"], found["type"]]
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
            if r["width"] == width and r["type"] == "fp32"
        }
        found += lines(f"Blocks of the operand's rows, width {width}", "ms", "number of blocks", points)
    return found


def goals(results: list[dict[str, Any]]) -> str:
    """How the chosen way fares beside the best of all: in the geometric mean, and where it fares worst."""
    ratios = []
    for found in results:
        medians = {name: spread(values)["median"] for name, values in found["seconds"].items()}
        ratios.append(medians[CHOSEN] / min(medians.values()))
    text = verdict("chosen over best, geometric mean", statistics.geometric_mean(ratios), MEAN_GOAL, at_most=True)
    return text + verdict("chosen over best, the worst", max(ratios), WORST_GOAL, at_most=True)


@contextlib.contextmanager
def swept(wanted: bool) -> Iterator[None]:
    """Have another process write to 256 MB over and over on a core of its own, as a tenant does who shares the last cache.

    This process keeps to the other cores. The machine is measured anew beside it, into a folder of its own: what was
    measured without counts no more.
    """
    if not wanted:
        yield
        return
    *own, last = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", SWEEP]
        with subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, [last])) as other:
            os.sched_setaffinity(0, own)
            os.environ["XDG_CACHE_HOME"] = folder
            try:
                yield
            finally:
                other.kill()


def options(arguments: list[str] | None = None) -> Any:
    own = {"graphs": {"default": GRAPHS}, "widths": {"default": "128,256,512"}, "orders": {"default": "none,locality"}}
    own |= {
        "types": {"default": "fp32"},
        "swept": {"action": "store_true", "help": "beside a process that sweeps 256 MB"},
    }
    return parse(__doc__, "scale", "threads", "rounds", "data", "cache", arguments=arguments, **own)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    if args.swept and args.threads >= len(os.sched_getaffinity(0)):
        raise SystemExit(
            f"--swept needs a core for the other process: {args.threads} threads have them all; --threads 1"
        )
    if arguments is None and any(os.environ.get(name) != value for name, value in MALLOC["tuned"].items()):
        # glibc reads its settings when a process starts.
        os.execve(sys.executable, [sys.executable, "-m", "bench.cpu.ways", *sys.argv[1:]], os.environ | MALLOC["tuned"])
    with swept(args.swept):
        record: dict[str, Any] = {"surroundings": surroundings(), "measured": []}
        if not record["surroundings"]["gathers"]:
            raise SystemExit("other programs have the cores: nothing was measured by which a way could be chosen")
        for graph in (name for name in args.graphs.split(",") if available(name, find_data(args.data))):
            store = store_of(graph, args)
            for order, precision in itertools.product(args.orders.split(","), args.types.split(",")):
                for width in (int(text) for text in args.widths.split(",")):
                    print(f"{graph}, order {order}, width {width}, {precision}", file=sys.stderr)
                    found = measure(store, order, width, precision, args)
                    record["measured"].append({"graph": graph, **found})
    head = ["graph", "order", "width", "type", "way", "ms (median)", "min .. max", "1 block / it", "it / best"]
    rows = [row for found in record["measured"] for row in rows_of(found)]
    chosen = [[f["graph"], f["order"], f["width"], f["type"], f["way"]] for f in record["measured"]]
    beside = ", beside a process that sweeps 256 MB" * args.swept
    body = (
        f"Scale {args.scale:g}, {args.threads} threads, {args.rounds} rounds, malloc tuned{beside}.\n\n"
        f"{goals(record['measured'])}\n{table(head, rows)}"
        f"\n{table(['graph', 'order', 'width', 'type', 'chosen, and why'], chosen)}"
    )
    record["plots"] = plots_of(record["measured"])
    write_report("blocks-swept" if args.swept else "blocks", "Blocks and panels of the operand", body, record, args.out)


if __name__ == "__main__":
    main()
