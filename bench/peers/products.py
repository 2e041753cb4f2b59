"""The normalised adjacency times a dense matrix: mggcn and other libraries, each in a process of its own, in turn.

The product is S A S X with self-loops, S the -1/2-th powers of the degrees. Every kind is what its library offers for it.
glibc keeps its memory for all. Results are compared at 256 places.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.contest import extents
from bench.cpu import ceilings
from bench.graphs import available, find_data, store_of
from bench.peers.libraries import Peers, find_peers
from bench.process import Lost, Worker, alternate, for_each, memory_free, started
from bench.report import bars, marked, milliseconds, parse, spread, surroundings, table, verdict, write_report

OWN, ORDERED, PLAIN = "mggcn", "mggcn, order by locality", "mggcn, plain rows"
KINDS: dict[str, tuple[str, str]] = {
    OWN: (OWN, "the way that mggcn chooses; S X lies ready, as a training epoch keeps it, S is in the epilogue"),
    ORDERED: (OWN, "the same, vertices in the order by locality, which is not timed here"),
    PLAIN: (OWN, "the row kernel with every switch off"),
    "mggcn bf16": (OWN, "as mggcn, on bfloat16"),
    "mggcn bf16, order by locality": (OWN, "the same, in the order by locality"),
    "DGL copy_u + scaling": ("dgl", "two row scalings around dgl.ops.copy_u_sum, as GraphConv does"),
    "DGL copy_u alone": ("dgl", "dgl.ops.copy_u_sum of S X, unscaled: DGL's kernel and nothing else"),
    "DGL u_mul_e": ("dgl", "dgl.ops.u_mul_e_sum with the weights of the edges"),
    "torch CSR": ("torch", "a torch.sparse CSR matrix with int32 indices times X"),
    "torch reduce": ("torch", "torch.sparse.mm(A, X, 'sum') with int64 indices, the kernel of PyG's CSR path"),
    "PyG EdgeIndex": ("pyg", "EdgeIndex.matmul with the weights of the edges"),
    "PyG SparseTensor": ("torch-sparse", "torch_sparse.matmul"),
    "SciPy": ("scipy", "csr_matrix @ X, one thread"),
    "MKL": ("mkl", "sparse_dot_mkl.dot_product_mkl into a matrix that is there"),
}
"""Library and meaning of every kind of product."""
GRAPHS = ("arxiv-like", "reddit-like", "products-like", "cnr_2000", "dblp_2010", "amazon_computers")
DGL, PYG = "DGL copy_u + scaling", ("PyG EdgeIndex", "PyG SparseTensor", "torch CSR", "torch reduce")
"""What goals are against: of PyG's ways and torch's the fastest."""
GOALS = {
    ("reddit-like", 512): 2.5,
    ("reddit-like", 128): 1.6,
    ("products-like", 128): 1.8,
    ("arxiv-like", 128): 1.2,
}
"""How many times faster than DGL, on products-like in either order."""
PEERS = (DGL, *PYG, "MKL")
OVER_PEERS = {
    ("reddit-like", 512): (1.8, None),
    ("reddit-like", 128): (1.4, None),
    ("products-like", 128): (None, 1.8),
    ("arxiv-like", 128): (1.2, 1.8),
    ("arxiv-like", 512): (1.2, 1.8),
}
"""How many times faster than the fastest of all of them, in the order of the store and by locality."""
NOWHERE_BELOW_PEERS = 0.95
NOWHERE_BELOW, OVER_TORCH, BF16_OVER_FP32 = 0.85, 3.0, 1.5
DRAWN = (DGL, "torch CSR", "PyG EdgeIndex", "MKL", ORDERED, PLAIN, "mggcn bf16")
SHARE_OF_FREE = 0.7
"""Of the free memory, what all processes may need together."""
TOLERANCE, TOLERANCE_BF16 = 1e-4, 2e-2
Found = dict[str, Any]


def needed_bytes(vertices: int, nonzeros: int, width: int) -> int:
    """About what one process holds: operand, result and a copy, the graph once or twice."""
    return 3 * 4 * vertices * width + 32 * nonzeros


def measure_graph(graph: str, store: Path, kinds: list[str], widths: list[int], peers: Peers, args: Any) -> list[Found]:
    """Time every kind at every width: all processes side by side, or mggcn's and one other at a time if they do not fit."""
    n, nnz = extents(store)
    fit = len(kinds) * needed_bytes(n, nnz, max(widths)) <= SHARE_OF_FREE * memory_free()
    groups = [kinds] if fit else [[*kinds[:1], kind] for kind in kinds[1:]]
    sizes = {"graph": graph, "vertices": n, "nonzeros": nnz + n}
    found = {width: {**sizes, "width": width, "kinds": {}, "left_out": {}} for width in widths}
    for group in groups:
        print(f"{graph}: {', '.join(group)}", file=sys.stderr)
        lost: Lost = {}
        starts = {kind: partial(start, kind, store, widths[0], peers, args.threads) for kind in group}
        with started(starts, lost) as workers:
            for width in widths:
                told = measure(workers, lost, store, width, args)
                found[width]["kinds"] = told | found[width]["kinds"]
                found[width]["left_out"] |= lost
    return list(found.values())


def start(kind: str, store: Path, width: int, peers: Peers, threads: int) -> Worker:
    python = sys.executable if KINDS[kind][0] == OWN else peers.python
    job = {"store": str(store), "width": width, "kind": kind}
    return Worker("bench.peers.worker_product", "tuned", threads, job, python)


def measure(workers: dict[str, Worker], lost: Lost, store: Path, width: int, args: Any) -> Found:
    """What every kind of a group took at one width, and how far its result is from the first one's."""
    job = {"store": str(store), "width": width, "threads": args.threads}
    ready = for_each(workers, lost, lambda kind, worker: worker.ask("prepare", job | {"kind": kind}))
    runs = alternate(workers, 1 + args.rounds, lost)
    results = for_each(workers, lost, lambda _, worker: worker.ask("result")["result"])
    off = apart(results)
    found = {}
    for kind in results:
        clocks = {
            clock: [run[clock] / ready[kind]["repeats"] for run in runs[kind][1:]]
            for clock in ("seconds", "cpu_seconds")
        }
        clocks["beside"] = [run.get("beside", 0.0) for run in runs[kind][1:]]
        found[kind] = {**clocks, "apart": off[kind], "facts": {k: ready[kind].get(k) for k in ("way", "order_seconds")}}
    first = next(iter(found.values()), None)
    return {kind: {**row, "first_s": spread(first["seconds"])["median"]} for kind, row in found.items() if first}


def apart(results: dict[str, list[float]]) -> dict[str, float]:
    """Largest difference of each result from the first, over the largest number; NaN if a number is none."""
    base = next(iter(results.values()), [])
    largest = max(map(abs, base), default=1.0)
    differences = {
        kind: [abs(a - b) / largest for a, b in zip(base, other, strict=True)] for kind, other in results.items()
    }
    return {kind: next((d for d in of if d != d), max(of, default=0.0)) for kind, of in differences.items()}


def wrong(results: list[Found]) -> list[str]:
    """Kinds whose numbers are not those of the first."""
    return [
        f"{found['graph']}, width {found['width']}, {kind}: {row['apart']:.1e} of the largest number off"
        for found in results
        for kind, row in found["kinds"].items()
        if not row["apart"] <= (TOLERANCE_BF16 if "bf16" in kind else TOLERANCE)
    ]


def medians(found: Found) -> dict[str, float]:
    return {kind: spread(row["seconds"])["median"] for kind, row in found["kinds"].items()}


HEAD = ("graph", "width", "product", "ms (median)", "min .. max", "CPU ms / threads", "gathered GB/s", "of the bound")
HEAD += ("in cache", "time / mggcn", "apart")


def rows_of(found: Found, figures: Found, threads: int) -> list[list[Any]]:
    """The table's lines of one graph at one width."""
    lines = []
    for kind, row in found["kinds"].items():
        times, nbytes = spread(row["seconds"]), found["width"] * (2 if "bf16" in kind else 4)
        gathers = [(found["nonzeros"] * nbytes, found["vertices"] * nbytes)]
        bounds = [ceilings.gathering_s(figures, gathers, in_cache) for in_cache in (False, True)]
        lines.append(
            [
                *(found["graph"], found["width"], marked(kind, row.get("beside", ()))),
                *milliseconds(times),
                f"{1000 * spread(row['cpu_seconds'])['median'] / threads:.1f}",
                f"{gathers[0][0] / times['median'] / 1e9:.1f}",
                *(f"{bound / times['median']:.2f}" for bound in bounds),
                f"{times['median'] / row['first_s']:.2f}",
                f"{row['apart']:.0e}",
            ]
        )
    return lines


def verdicts(results: list[Found]) -> str:
    """How the goals fared, as far as their rows were measured; in the order of the store unless a goal allows the other."""
    text, least, over_peers = "", [], []
    for found in results:
        times, where = medians(found), f"{found['graph']}, width {found['width']}"
        if OWN not in times:
            continue
        goal = GOALS.get((found["graph"], found["width"]))
        own = min(times[OWN], times.get(ORDERED, times[OWN])) if found["graph"] == "products-like" else times[OWN]
        if goal and DGL in times:
            text += verdict(f"{where}: over {DGL}", times[DGL] / own, goal)
        if goal and (pyg := [times[kind] for kind in PYG if kind in times]):
            text += verdict(f"{where}: over torch CSR and PyG's fastest", min(pyg) / own, OVER_TORCH)
        if peers := [times[kind] for kind in PEERS if kind in times]:
            goals = OVER_PEERS.get((found["graph"], found["width"]), (None, None))
            for own_kind, wanted in zip((OWN, ORDERED), goals, strict=True):
                if wanted is not None and own_kind in times:
                    text += verdict(f"{where}: {own_kind} over the fastest peer", min(peers) / times[own_kind], wanted)
            over_peers.append((min(peers) / times[OWN], where))
        if DGL in times:
            least.append((times[DGL] / times[OWN], where))
        if f"{OWN} bf16" in times and found["width"] >= 64:
            text += verdict(f"{where}: bf16 over float32", times[OWN] / times[f"{OWN} bf16"], BF16_OVER_FP32)
    if over_peers:
        text += verdict(
            f"the least over the fastest peer, {min(over_peers)[1]}", min(over_peers)[0], NOWHERE_BELOW_PEERS
        )
    if least:
        text += verdict(f"the least over {DGL}, {min(least)[1]}", min(least)[0], NOWHERE_BELOW)
    return text


def plots_of(results: list[Found]) -> list[dict[str, Any]]:
    """Times of the kinds that matter over mggcn's, by graph and width."""
    cells = {}
    for found in results:
        times = medians(found)
        if OWN in times:
            drawn = {kind: times[kind] / times[OWN] for kind in DRAWN if kind in times}
            cells[f"{found['graph']}, {found['width']}"] = drawn
    return bars("Products of a graph", "time over mggcn's (float32, order of the store), logarithmic", cells)


def describe(results: list[Found], left_out: list[str], args: Any, figures: Found) -> str:
    text = (
        f"Scale {args.scale:g}, {args.threads} threads, {args.rounds} rounds in shuffled order, float32 unless it says "
        "bf16, malloc tuned. The bound: every nonzero's row gathered at this machine's rate for an operand of that size; "
        "in cache: at the rate of a shared cache, which blocks and panels aim at.\n\n"
    )
    text += table(HEAD, [line for found in results for line in rows_of(found, figures, args.threads)])
    left_out = [*left_out, *(f"{f['graph']}, {kind}: {why}" for f in results for kind, why in f["left_out"].items())]
    text += "".join(f"\nLeft out: {line}.\n" for line in dict.fromkeys(left_out))
    text += (
        f"\n## Goals, of graphs at scale 1\n\n{verdicts(results) if args.scale == 1.0 else ''}\n## What a call does\n\n"
    )
    text += table(["product", "one call"], [[kind, KINDS[kind][1]] for kind in KINDS])
    ways = [
        [f["graph"], f["width"], kind, row["facts"]["way"], f"{row['facts']['order_seconds']:.2f}"]
        for f in results
        for kind, row in f["kinds"].items()
        if row["facts"]["order_seconds"] is not None
    ]
    text += "\n## How mggcn multiplied, and what its order cost\n\n"
    text += table(["graph", "width", "product", "way", "order s"], ways)
    return f"{text}\n## Ceilings\n\n{ceilings.describe(figures)}"


def options(arguments: list[str] | None = None) -> Any:
    own = {
        "graphs": {"default": ",".join(GRAPHS)},
        "widths": {"default": "16,41,64,128,256,512"},
        "kinds": {"default": "", "help": "of products, separated by semicolons (default: all)"},
    }
    shared = ("scale", "threads", "rounds", "peers", "ceilings", "data", "cache")
    return parse(__doc__, *shared, arguments=arguments, **own)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    peers, data = find_peers(args.peers), find_data(args.data)
    around, figures = surroundings(), ceilings.figures_of(args)
    around["versions"] |= {f"peer {library}": version for library, version in peers.versions.items()}
    kinds = [
        kind for kind in (args.kinds.split(";") if args.kinds else KINDS) if KINDS[kind][0] in (OWN, *peers.versions)
    ]
    left_out = [f"{library}: {why}" for library, why in peers.faults.items()]
    results: list[Found] = []
    widths = [int(width) for width in args.widths.split(",")]
    for graph in args.graphs.split(","):
        if available(graph, data):
            results += measure_graph(graph, store_of(graph, args), kinds, widths, peers, args)
        else:
            left_out.append(f"{graph}: not in the data folder")
    record = {"surroundings": around, "ceilings": figures, "measured": results, "left_out": left_out}
    record |= {"plots": plots_of(results)}
    body = describe(results, left_out, args, figures)
    write_report("peers-spmm", "Products of a graph: mggcn and other libraries", body, record, args.out)
    if faults := wrong(results):
        sys.exit("the contenders do not compute the same: " + "; ".join(faults))


if __name__ == "__main__":
    main()
