"""Planned against measured memory of whole runs, and what a process holds before any data: calibrates process_bytes.

The number is in mggcn/memory/device.py. Measured with glibc's default settings, as users run it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import (
    MIB,
    WORKLOADS,
    Worker,
    Workload,
    cache_folder,
    make_store,
    surroundings,
    table,
    whole_run,
    write_report,
)

TINY = Workload("tiny", 300, 1_000, 16, 4, (16, 16))
TOLERANCE = 0.10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scales", default="0.1,0.5,1", help="of the arxiv-like graph")
    parser.add_argument("--hidden", default="64,256", help="width of both hidden layers")
    parser.add_argument("--ranks", default="1,4", help="numbers of ranks P")
    parser.add_argument("--reddit", action="store_true", help="the reddit-like graph too")
    parser.add_argument("--threads", type=int, default=2, help="threads of all ranks together")
    parser.add_argument("--cache", type=Path, help="folder that keeps the graphs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def stages(store: Path, hidden: tuple[int, ...], threads: int) -> dict[str, dict[str, int]]:
    """What one process holds after imports and planning, after set-up, and after epochs 1 and 3."""
    worker = Worker("worker_mggcn.py", "default", threads, {"store": str(store), "hidden": hidden})
    try:
        found = {"planned": worker.ready["planned"], "set up": worker.ready["memory"]}
        found["epoch 1"] = worker.ask("epoch")["memory"]
        worker.ask("epoch")
        found["epoch 3"] = worker.ask("epoch")["memory"]
        worker.close()
    finally:
        worker.kill()
    return found


def data_bytes(run: dict[str, Any]) -> int:
    """The plan without its runtime share: what the data need."""
    return int(run["planned_peak_bytes"] - run["regions"]["runtime"])


def best_runtime(runs: list[dict[str, Any]]) -> tuple[int, float]:
    """The runtime share, in whole MiB, with the smallest largest relative error over the runs, and that error."""

    def worst(share: int) -> float:
        return max(abs((data_bytes(run) + share * MIB) / run["measured_peak_bytes"] - 1) for run in runs)

    return min(((share, worst(share)) for share in range(100, 1500)), key=lambda pair: pair[1])


def run_row(run: dict[str, Any], share: int) -> list[str]:
    measured = run["measured_peak_bytes"]
    return [
        run["graph"],
        run["ranks"],
        f"{data_bytes(run) / MIB:.0f}",
        f"{run['setup_bytes'] / MIB:.0f}",
        f"{run['planned_peak_bytes'] / MIB:.0f}",
        f"{measured / MIB:.0f}",
        f"{run['planned_peak_bytes'] / measured - 1:+.1%}",
        f"{(measured - data_bytes(run)) / MIB:.0f}",
        f"{(data_bytes(run) + share * MIB) / measured - 1:+.1%}",
    ]


def stage_rows(name: str, found: dict[str, dict[str, int]]) -> list[list[str]]:
    keys = ("VmRSS", "RssAnon", "RssFile", "VmHWM")
    return [[name, stage, *(f"{held[key] / MIB:.0f}" for key in keys)] for stage, held in found.items()]


def main() -> None:
    args = parse()
    record: dict[str, Any] = {"surroundings": surroundings(), "runs": [], "stages": {}}
    widths = [int(w) for w in args.hidden.split(",")]
    works = [(TINY, TINY.hidden, "tiny")]
    for scale in (float(s) for s in args.scales.split(",")):
        work = WORKLOADS["arxiv-like"].scaled(scale)
        works += [(work, (width, width), f"arxiv-like x {scale:g}, hidden {width},{width}") for width in widths]
    if args.reddit:
        work = WORKLOADS["reddit-like"]
        works.append((work, work.hidden, "reddit-like, hidden 512"))
    with cache_folder(args.cache) as cache:
        for work, hidden, name in works:
            store = make_store(work, cache)
            record["stages"][name] = stages(store, hidden, args.threads)
            for ranks in (int(r) for r in args.ranks.split(",")):
                record["runs"].append({"graph": name, **whole_run(store, hidden, ranks, args.threads)})
    share, error = best_runtime(record["runs"])
    record |= {"best_runtime_mib": share, "largest_error": error}
    head = ["graph", "P", "data MiB", "set-up MiB", "planned MiB", "measured MiB", "error", "implied runtime MiB"]
    rows = [run_row(run, share) for run in record["runs"]]
    body = f"## Whole runs, the largest rank\n\n{table([*head, f'error with {share} MiB'], rows)}\n"
    verdict = "within" if error <= TOLERANCE else "NOT within"
    body += f"Best runtime share: {share} MiB, largest error {error:.1%}, {verdict} {TOLERANCE:.0%}.\n\n"
    rows = [row for name, found in record["stages"].items() for row in stage_rows(name, found)]
    body += f"## One process by stage, P = 1\n\n{table(['graph', 'after', 'RSS', 'anonymous', 'files', 'peak'], rows)}"
    write_report("memory", "Planned and measured memory", body, record, args.out)


if __name__ == "__main__":
    main()
