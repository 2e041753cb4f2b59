"""Sparse against dense features: coauthor_cs (6,805 features, 1 % nonzeros) with run.features auto and dense, in turn.

Reads a store of the data folder: $MGGCN_DATA, or ../shared/data beside the repository. No dropout.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from common import HERE, MIB, Worker, alternate, spread, surroundings, table, write_report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    data = Path(os.environ.get("MGGCN_DATA", HERE.parents[1] / "shared" / "data"))
    parser.add_argument("--store", type=Path, default=data / "coauthor_cs")
    parser.add_argument("--hidden", default="64,512", help="widths of the one hidden layer, a comparison for each")
    parser.add_argument("--rounds", type=int, default=10, help="timed epochs of each contender")
    parser.add_argument("--warm-up", type=int, default=2, help="epochs before them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def compare(hidden: int, args: argparse.Namespace) -> dict[str, Any]:
    workers: dict[str, Worker] = {}
    try:
        for features in ("auto", "dense"):
            job = {"store": str(args.store), "hidden": [hidden], "settings": {"run": {"features": features}}}
            workers[features] = Worker("worker_mggcn.py", "default", args.threads, job)
        epochs = alternate(workers, args.warm_up, args.rounds, lost := {})
        if lost:
            raise RuntimeError(str(lost))
        peaks = {name: worker.close()["memory"]["VmHWM"] for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.kill()
    seconds = {name: spread([run["seconds"] for run in runs[args.warm_up :]]) for name, runs in epochs.items()}
    ready = {name: worker.ready for name, worker in workers.items()}
    return {"hidden": hidden, "seconds": seconds, "epochs": epochs, "peak_bytes": peaks, "prepared": ready}


def rows_of(found: dict[str, Any]) -> list[list[Any]]:
    rows = []
    for name, line in found["seconds"].items():
        ready = found["prepared"][name]
        rows.append(
            [
                found["hidden"],
                name,
                ready["input"].partition(":")[0],
                f"{1000 * line['median']:.1f}",
                f"{1000 * line['min']:.1f} .. {1000 * line['max']:.1f}",
                f"{found['peak_bytes'][name] / MIB:.0f}",
                f"{ready['planned_bytes'] / MIB:.0f}",
                f"{ready['regions']['features'] / MIB:.0f}",
                f"{ready['make_rank_seconds']:.2f}",
                f"{found['epochs'][name][-1]['loss']:.6f}",
            ]
        )
    medians, peaks = [found["seconds"][n]["median"] for n in ("auto", "dense")], found["peak_bytes"]
    rows.append([found["hidden"], "auto / dense", "", f"{medians[0] / medians[1]:.2f}", "", "", "", "", "", ""])
    rows[-1][5] = f"{peaks['auto'] / peaks['dense']:.2f}"
    return rows


def main() -> None:
    args = parse()
    record: dict[str, Any] = {"surroundings": surroundings()}
    record["comparisons"] = [compare(int(hidden), args) for hidden in args.hidden.split(",")]
    head = ["hidden", "run.features", "input", "ms/epoch (median)", "min .. max", "peak MiB", "planned MiB"]
    head += ["features MiB", "set-up s", "last loss"]
    rows = [row for found in record["comparisons"] for row in rows_of(found)]
    body = f"{args.store.name}, {args.threads} threads, {args.rounds} timed epochs after {args.warm_up}.\n\n"
    write_report("sparse-input", "Sparse and dense features", body + table(head, rows), record, args.out)


if __name__ == "__main__":
    main()
