"""Seconds per training epoch and peak memory of mggcn and of PyTorch Geometric's GCN, in one run, in turn.

Both train the same network on the same graph from the same weights; their losses must agree. No dropout, no evaluation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common import (
    MIB,
    WORKLOADS,
    Worker,
    Workload,
    alternate,
    cache_folder,
    make_store,
    memory_free,
    spread,
    surroundings,
    table,
    whole_run,
    write_report,
)

GOALS = {"arxiv-like": (0.65, 0.75), "reddit-like": (0.5, 0.5)}
"""Largest accepted ratios of seconds and of peak memory, mggcn over PyG."""
AGREEMENT = 1e-4
COMPARED_EPOCHS = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--scale", type=float, default=1.0, help="of vertices and edges; goals are for 1")
    parser.add_argument("--rounds", type=int, default=10, help="timed epochs of each contender")
    parser.add_argument("--warm-up", type=int, default=2, help="epochs before them")
    parser.add_argument("--peers", default="fused,scaled", help="PyG kinds in one comparison, see worker_pyg.py")
    parser.add_argument("--info", default="", help="PyG kinds in comparisons of their own, such as csr,scatter")
    parser.add_argument("--malloc", default="tuned,default", help="settings of glibc, a comparison for each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--ranks", default="1,4", help="ranks P of whole runs: planned against measured memory; 0: none"
    )
    parser.add_argument("--cache", type=Path, help="folder that keeps the graphs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def compare(work: Workload, store: Path, peers: list[str], malloc: str, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate mggcn and the peers, each in a long-lived process."""
    weights = str(store) + f"-{'-'.join(map(str, work.hidden))}.npz"
    job = {"store": str(store), "hidden": work.hidden, "classes": work.classes, "weights": weights}
    workers: dict[str, Worker] = {}
    try:
        workers["mggcn"] = Worker("worker_mggcn.py", malloc, args.threads, job)
        for kind in peers:
            workers[f"pyg {kind}"] = Worker("worker_pyg.py", malloc, args.threads, job | {"kind": kind})
        epochs = alternate(workers, args.warm_up, args.rounds)
        peaks = {name: worker.close()["memory"]["VmHWM"] for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.kill()
    timed = {name: runs[args.warm_up :] for name, runs in epochs.items()}
    return {
        "malloc": malloc,
        "peers": peers,
        "prepared": {name: worker.ready for name, worker in workers.items()},
        "losses": {name: [run["loss"] for run in runs] for name, runs in epochs.items()},
        "epochs": timed,
        "seconds": {name: spread([run["seconds"] for run in runs]) for name, runs in timed.items()},
        "cores_used": {name: total(runs, "cpu_seconds") / total(runs, "seconds") for name, runs in timed.items()},
        "peak_bytes": peaks,
        "loss_error": loss_error(epochs),
    }


def total(runs: list[dict[str, Any]], key: str) -> float:
    return float(sum(run[key] for run in runs))


def loss_error(epochs: dict[str, list[dict[str, Any]]]) -> float:
    """Largest relative difference between mggcn's and a peer's loss over the first epochs; NaN if a loss is none."""
    from peers_data import largest_apart

    own, *others = ([run["loss"] for run in runs[:COMPARED_EPOCHS]] for runs in epochs.values())
    ratios = [a / b for other in others for a, b in zip(own, other, strict=True)]
    return largest_apart(ratios, [1.0] * len(ratios))


def scatter_fits(work: Workload) -> bool:
    """Whether what autograd keeps, about eight times the widest messages, is below half of the free memory."""
    return 8 * 4 * 2 * work.edges * max(work.hidden) < memory_free() / 2


def measure(work: Workload, cache: Path, args: argparse.Namespace) -> dict[str, Any]:
    store = make_store(work, cache)
    main, info = ([kind for kind in kinds.split(",") if kind] for kinds in (args.peers, args.info))
    record: dict[str, Any] = {"workload": work.__dict__, "comparisons": [], "runs": [], "left_out": []}
    for malloc in args.malloc.split(","):
        for peers in [main, *([kind] for kind in info)]:
            if "scatter" in peers and not scatter_fits(work):
                record["left_out"].append("pyg scatter: its messages would need more than half of the free memory")
                continue
            record["comparisons"].append(compare(work, store, peers, malloc, args))
    for ranks in (int(r) for r in args.ranks.split(",")):
        if ranks:
            record["runs"].append(whole_run(store, work.hidden, ranks, args.threads))
    return record


def goal_cell(ratio: float, goal: float | None) -> str:
    """A ratio, with the verdict where there is a goal."""
    verdict = "" if goal is None else f" ({'met' if ratio <= goal else 'MISSED'}, goal {goal})"
    return f"{ratio:.2f}{verdict}"


def describe(record: dict[str, Any], args: argparse.Namespace) -> str:
    """The Markdown of one workload."""
    work, rows = record["workload"], []
    for found in record["comparisons"]:
        seconds, peaks = found["seconds"], found["peak_bytes"]
        # Seconds are judged against the fastest way that PyG has, memory against each.
        fastest = min((name for name in seconds if name != "mggcn"), key=lambda name: seconds[name]["median"])
        judged = found["peers"] == args.peers.split(",") and args.scale == 1.0
        for name in seconds:
            line = seconds[name]
            cells = ["", ""]
            if name != "mggcn":
                ratios = (seconds["mggcn"]["median"] / line["median"], peaks["mggcn"] / peaks[name])
                goals: tuple[float | None, ...] = GOALS[work["name"]] if judged else (None, None)
                goals = (goals[0] if name == fastest else None, goals[1])
                cells = [goal_cell(*pair) for pair in zip(ratios, goals, strict=True)]
            rows.append(
                [
                    found["malloc"],
                    name,
                    f"{1000 * line['median']:.0f}",
                    f"{1000 * line['min']:.0f} .. {1000 * line['max']:.0f}",
                    f"{found['cores_used'][name]:.2f}",
                    f"{peaks[name] / MIB:.0f}",
                    f"{found['prepared'][name]['seconds']:.1f}",
                    *cells,
                    "" if name == "mggcn" else f"{found['loss_error']:.1e}",
                ]
            )
    head = ["malloc", "contender", "ms/epoch (median)", "min .. max", "cores used", "peak MiB", "set-up s"]
    head += ["seconds: mggcn / this", "memory: mggcn / this", "loss difference"]
    text = (
        f"## {work['name']}, scale {args.scale:g}\n\n{work['vertices']:,} vertices, {2 * work['edges']:,} nonzeros, "
        f"{work['features']} features, {work['classes']} classes, hidden {work['hidden']}, {args.threads} threads, "
        f"{args.rounds} timed epochs after {args.warm_up}.\n\n{table(head, rows)}"
    )
    text += "".join(f"\nLeft out: {reason}.\n" for reason in sorted(set(record["left_out"])))
    if record["runs"]:
        text += "\nWhole runs (3 epochs, one evaluation), the largest rank:\n\n" + describe_runs(record["runs"])
    return text


def describe_runs(runs: list[dict[str, Any]]) -> str:
    rows = [
        [
            run["ranks"],
            f"{run['planned_peak_bytes'] / MIB:.0f}",
            f"{run['measured_peak_bytes'] / MIB:.0f}",
            f"{run['planned_peak_bytes'] / run['measured_peak_bytes'] - 1:+.1%}",
            f"{run['arena_bytes'] / MIB:.1f}",
            f"{run['paper_bytes'] / MIB:.1f}",
            f"{run['arena_bytes'] / run['paper_bytes']:.3f}",
        ]
        for run in runs
    ]
    head = ["P", "planned MiB", "measured MiB", "error", "arena MiB", "paper's L + 3 buffers MiB", "arena / paper"]
    return table(head, rows)


def main() -> None:
    args = parse()
    record: dict[str, Any] = {"surroundings": surroundings(), "workloads": []}
    names = list(WORKLOADS) if args.workload == "all" else [args.workload]
    with cache_folder(args.cache) as cache:
        for name in names:
            record["workloads"].append(measure(WORKLOADS[name].scaled(args.scale), cache, args))
    body = "\n".join(describe(found, args) for found in record["workloads"])
    write_report("epoch", "Training epochs: mggcn and PyTorch Geometric", body, record, args.out)
    errors = [c["loss_error"] for found in record["workloads"] for c in found["comparisons"]]
    if not all(error <= AGREEMENT for error in errors):
        sys.exit(f"the losses differ by {max(errors):.1e}: the contenders do not compute the same")


if __name__ == "__main__":
    main()
