"""Libra: replication and balance on real graphs beside an independent implementation's, speed, planned and measured memory.

Every cut runs on one core in a process of its own. Seconds are those of the whole cut (reading the store, dealing the
edges, writing out the parts), without its way to the disk; CPU seconds are what other load on the machine does not change.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import MIB, SEED, cache_folder, memory, spread, surroundings, table, write_report

INDEPENDENT = {"cnr_2000": (1.19, 1.41, 1.64), "dblp_2010": (1.19, 1.36, 1.50), "coauthor_cs": (1.40, 1.82, 2.22)}
"""Average parts of a vertex for P = 2, 4, 8, edges shuffled, by an implementation of other authors."""
PARTS = (2, 4, 8)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=os.environ.get("MGGCN_DATA"), help="folder of the real graphs")
    parser.add_argument("--scale", type=int, default=22, help="R-MAT graph of 2^SCALE vertices")
    parser.add_argument("--edge-factor", type=int, default=24, help="undirected edges per vertex of the R-MAT graph")
    parser.add_argument("--rmat-parts", default="8,64", help="numbers of parts of the R-MAT graph")
    parser.add_argument("--rounds", type=int, default=3, help="cuts of each kind; figures are medians")
    parser.add_argument("--cache", type=Path, help="folder that keeps the R-MAT graph (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(job: dict[str, Any]) -> dict[str, Any]:
    """Cut one graph in this process; the peak counts from the moment before."""
    from mggcn.graph.store import open_store
    from mggcn.partition.cut.libra import LibraSettings, libra, libra_nbytes

    graph = open_store(job["store"])
    planned = libra_nbytes(graph.num_vertices, graph.num_edges, graph.symmetric, job["parts"])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held now
    before, began, cpu = memory()["VmRSS"], time.perf_counter(), time.process_time()
    s = libra(graph, LibraSettings(parts=job["parts"], seed=SEED, edges=job["edges"])).statistics
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return {
        **job,
        "num_vertices": graph.num_vertices,
        "num_edges": s.num_edges,
        "replication": s.replication,
        "edge_balance": s.edge_balance,
        "row_balance": s.row_balance,
        "split_share": s.split_share,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "planned_bytes": sum(planned.values()),
        "measured_bytes": memory()["VmHWM"] - before,
        "load_average": os.getloadavg()[0],
    }


def measure(store: Path, parts: int, edges: str, rounds: int) -> list[dict[str, Any]]:
    job = json.dumps({"store": str(store), "parts": parts, "edges": edges})
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", job]
    runs = []
    for _ in range(rounds):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        runs.append({**json.loads(done.stdout.splitlines()[-1]), "store": store.name})
        print(f"{store.name} P={parts} {edges}: {runs[-1]['cpu_seconds']:.2f} s CPU", file=sys.stderr)
    return runs


def rmat(cache: Path, scale: int, edge_factor: int) -> Path:
    """Return the store of the R-MAT graph, generated in a process of its own unless the cache has it."""
    store = cache / f"rmat-{scale}-{edge_factor}"
    if not store.exists():
        kind = ["rmat", str(store), "--scale", str(scale), "--edge-factor", str(edge_factor), "--seed", str(SEED)]
        command = [sys.executable, "-m", "mggcn", "generate", *kind, "--features", "0", "--classes", "0"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return store


HEAD = ["graph", "P", "edges", "replication", "independent", "difference", "edge balance", "row balance", "split"]
SPEED = ["seconds", "CPU seconds", "M edges / s", "M edges / CPU s"]


def row(runs: list[dict[str, Any]]) -> list[str]:
    run = runs[0]
    expected = dict(zip(PARTS, INDEPENDENT.get(run["store"], ()), strict=False)).get(run["parts"])
    told = expected is not None and run["edges"] == "shuffled"
    seconds, cpu = (spread([r[key] for r in runs])["median"] for key in ("seconds", "cpu_seconds"))
    return [
        run["store"],
        run["parts"],
        run["edges"],
        f"{run['replication']:.3f}",
        f"{expected:.2f}" if told else "",
        f"{run['replication'] / expected - 1:+.1%}" if told else "",
        f"{run['edge_balance']:.4f}",
        f"{run['row_balance']:.3f}",
        f"{run['split_share']:.1%}",
        f"{seconds:.2f}",
        f"{cpu:.2f}",
        f"{run['num_edges'] / seconds / 1e6:.1f}",
        f"{run['num_edges'] / cpu / 1e6:.1f}",
    ]


def memory_row(runs: list[dict[str, Any]]) -> list[str]:
    run = runs[0]
    measured = max(r["measured_bytes"] for r in runs)
    return [
        run["store"],
        run["parts"],
        run["edges"],
        f"{run['planned_bytes'] / MIB:.0f}",
        f"{measured / MIB:.0f}",
        f"{run['planned_bytes'] / measured - 1:+.1%}",
        f"{measured / run['num_edges']:.1f}",
    ]


def main() -> None:
    args = parse()
    if args.worker:
        print(json.dumps(worker(json.loads(args.worker))))
        return
    record: dict[str, Any] = {"surroundings": surroundings(), "runs": []}
    for name in INDEPENDENT if args.root else ():
        for edges in ("shuffled", "stored"):
            record["runs"] += [measure(Path(args.root) / name, parts, edges, args.rounds) for parts in PARTS]
    with cache_folder(args.cache) as cache:
        store = rmat(cache, args.scale, args.edge_factor)
        for edges in ("shuffled", "stored"):
            for parts in args.rmat_parts.split(","):
                record["runs"].append(measure(store, int(parts), edges, args.rounds))
    size = record["runs"][-1][0]
    body = f"{store.name}: {size['num_vertices']:,} vertices, {size['num_edges']:,} undirected edges.\n\n"
    loads = [run["load_average"] for runs in record["runs"] for run in runs]
    body += f"One core of {os.cpu_count()}; load average meanwhile {min(loads):.1f} to {max(loads):.1f}.\n\n"
    body += f"## Cuts\n\n{table([*HEAD, *SPEED], [row(runs) for runs in record['runs']])}\n"
    head = ["graph", "P", "edges", "planned MiB", "measured MiB", "planned over measured", "bytes per edge"]
    body += f"## Memory of a cut beyond the process\n\n{table(head, [memory_row(runs) for runs in record['runs']])}"
    write_report("libra", "Libra", body, record, args.out)


if __name__ == "__main__":
    main()
