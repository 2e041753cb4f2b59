"""Libra: replication and balance on real graphs beside an independent implementation's, speed, planned and measured memory.

Every cut runs on one core in a process of its own. Seconds are those of the whole cut (reading the store, dealing the
edges, writing out the parts), without its way to the disk; CPU seconds are what other load on the machine does not change.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.graphs import find_data
from bench.process import memory, mggcn, said
from bench.report import MIB, SEED, parse, spread, surroundings, table, write_report

INDEPENDENT = {"cnr_2000": (1.19, 1.41, 1.64), "dblp_2010": (1.19, 1.36, 1.50), "coauthor_cs": (1.40, 1.82, 2.22)}
"""Average parts of a vertex for P = 2, 4, 8, edges shuffled, by an implementation of other authors."""
PARTS, RMAT_PARTS = (2, 4, 8), (8, 64)


def cut(job: dict[str, Any]) -> dict[str, Any]:
    """Cut one graph in this process; the peak counts from the moment before."""
    from mggcn.graph.store import open_store
    from mggcn.partition.cut.libra import LibraSettings, libra, libra_nbytes

    graph = open_store(job["store"])
    planned = libra_nbytes(graph.num_vertices, graph.num_edges, graph.symmetric, job["parts"])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held now
    before, began, cpu = memory()["VmRSS"], time.perf_counter(), time.process_time()
    s = libra(graph, LibraSettings(parts=job["parts"], seed=SEED, edges=job["edges"])).statistics
    seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    facts = ("num_edges", "replication", "edge_balance", "row_balance", "split_share")
    measured = {"measured_bytes": memory()["VmHWM"] - before, "planned_bytes": sum(planned.values())}
    return seconds | measured | {fact: getattr(s, fact) for fact in facts} | {"load_average": os.getloadavg()[0]}


def measure(store: Path, parts: int, edges: str, rounds: int) -> dict[str, Any]:
    """Medians of several cuts."""
    job = json.dumps({"store": str(store), "parts": parts, "edges": edges})
    command = [sys.executable, "-m", "bench.cpu.libra", "--worker", job]
    runs = [json.loads(said(command).splitlines()[-1]) for _ in range(rounds)]
    print(f"{store.name} P={parts} {edges}: {runs[-1]['cpu_seconds']:.2f} s CPU", file=sys.stderr)
    clocks = {clock: spread([run[clock] for run in runs])["median"] for clock in ("seconds", "cpu_seconds")}
    most = max(run["measured_bytes"] for run in runs)
    return (
        runs[0] | clocks | {"measured_bytes": most, "graph": store.name, "parts": parts, "edges": edges, "runs": runs}
    )


def rmat(cache: Path, scale: int, edge_factor: int) -> Path:
    """Return the store of the R-MAT graph, made unless the cache has it."""
    store = cache / f"rmat-{scale}-{edge_factor}"
    if not store.exists():
        cache.mkdir(parents=True, exist_ok=True)
        sizes = {"--scale": scale, "--edge-factor": edge_factor, "--seed": SEED, "--features": 0, "--classes": 0}
        mggcn("generate", "rmat", str(store), *(str(word) for pair in sizes.items() for word in pair))
    return store


HEAD = ["graph", "P", "edges", "replication", "independent", "difference", "edge balance", "row balance", "split"]
HEAD += ["seconds", "CPU seconds", "M edges / CPU s", "planned MiB", "measured MiB", "planned / measured"]


def row(run: dict[str, Any]) -> list[str]:
    known = dict(zip(PARTS, INDEPENDENT.get(run["graph"], ()), strict=False)) if run["edges"] == "shuffled" else {}
    expected = known.get(run["parts"])
    return [
        *(run["graph"], run["parts"], run["edges"]),
        f"{run['replication']:.3f}",
        *([f"{expected:.2f}", f"{run['replication'] / expected - 1:+.1%}"] if expected else ["", ""]),
        f"{run['edge_balance']:.4f}",
        f"{run['row_balance']:.3f}",
        f"{run['split_share']:.1%}",
        f"{run['seconds']:.2f}",
        f"{run['cpu_seconds']:.2f}",
        f"{run['num_edges'] / run['cpu_seconds'] / 1e6:.1f}",
        f"{run['planned_bytes'] / MIB:.0f}",
        f"{run['measured_bytes'] / MIB:.0f}",
        f"{run['planned_bytes'] / max(run['measured_bytes'], 1):.2f}",
    ]


def main(arguments: list[str] | None = None) -> None:
    own: dict[str, dict[str, Any]] = {
        "rmat_scale": {"type": int, "default": 22, "help": "R-MAT graph of so many vertices, as a power of two"},
        "edge_factor": {"type": int, "default": 24, "help": "undirected edges per vertex of the R-MAT graph"},
        "worker": {"default": "", "help": "one cut, as JSON"},
    }
    args = parse(__doc__, "rounds", "data", "cache", arguments=arguments, **own)
    if args.worker:
        print(json.dumps(cut(json.loads(args.worker))))
        return
    around, data = surroundings(), find_data(args.data)
    wanted = [(data / name, parts) for name in INDEPENDENT for parts in PARTS] if data else []
    wanted += [(rmat(args.cache, args.rmat_scale, args.edge_factor), parts) for parts in RMAT_PARTS]
    results = [measure(store, p, edges, args.rounds) for store, p in wanted for edges in ("shuffled", "stored")]
    loads = [run["load_average"] for result in results for run in result["runs"]]
    body = f"One core of {os.cpu_count()}; load average meanwhile {min(loads):.1f} to {max(loads):.1f}.\n\n"
    body += table(HEAD, [row(run) for run in results])
    write_report("libra", "Libra", body, {"surroundings": around, "measured": results}, args.out)


if __name__ == "__main__":
    main()
