"""Seconds per epoch and bytes sent of every strategy on P ranks over gloo, beside what the plan predicts on this machine.

Five graphs of different kind. All strategies of a graph train in the same P processes, in turn, PERIOD timed epochs each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.graphs import available, find_data, store_of
from bench.process import mggcn
from bench.report import parse, spread, surroundings, table, write_report

GRAPHS = "cnr_2000,dblp_2010,community,hubs,dense"
HIDDEN = (64, 64)
PERIOD, WARM_UP = 5, 10
"""Timed epochs of a turn, and epochs before them, until delayed sums have come back."""
APART = 1.2
"""Epoch times whose ratio is above this must be predicted in the same order."""
TIMEOUT_S = 300.0
Found = dict[str, Any]


def configurations(strategies: list[str], orders: list[str]) -> dict[str, dict[str, Any]]:
    """Name and run settings of everything that is compared."""
    found: dict[str, dict[str, Any]] = {}
    for strategy in strategies:
        if strategy == "delayed":
            found |= {f"delayed {d}": {"strategy": strategy, "delay": d} for d in ("none", "0", str(PERIOD))}
        else:
            found |= {f"{strategy} {order}": {"strategy": strategy, "order": order} for order in orders}
    return found


def train_all(comm: Any, job: dict[str, Any]) -> Found:
    """On one rank: seconds of every epoch and the bytes that this rank sent in it, by name of the configuration."""
    from mggcn.assemble.plan import plan_graph, resolve
    from mggcn.assemble.rank import make_rank
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store

    graph = open_store(job["store"])
    ranks, found = {}, {}
    for name, settings in job["configurations"].items():
        config = resolve(from_tables(settings), graph)
        plan, partition = plan_graph(config, graph)
        ranks[name] = make_rank(config, graph, plan, partition, comm)
        planned = plan.ranks[comm.rank].bytes_sent(plan.ranks[comm.rank].train)
        found[name] = {"seconds": [], "bytes_sent": [], "planned": planned}
    first, last = 0, WARM_UP
    for _ in range(job["rounds"]):
        for name, rank in ranks.items():
            for epoch in range(first, last + PERIOD):
                before = rank.comm.bytes_sent
                comm.barrier()
                began = time.perf_counter()
                rank.trainer.step(epoch)
                if epoch >= last:
                    found[name]["seconds"].append(time.perf_counter() - began)
                    found[name]["bytes_sent"].append(rank.comm.bytes_sent - before)
        # The first epoch of the next turn finds the caches as the other strategies have left them: it is not timed.
        first = last + PERIOD
        last = first + 1
    for rank in ranks.values():
        rank.trainer.runtime.state()  # every message has come
    return found


def rank_process(arguments: list[str]) -> int:
    """One of the processes that `measure` starts."""
    from mggcn import native

    native.limit_spinning()
    from mggcn.comm.rank import rank_main

    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    for name, kind in (("rank", int), ("size", int), ("rendezvous", Path)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    a = parser.parse_args(arguments)

    def body(comm: Any) -> None:
        found = train_all(comm, json.loads(a.job.read_text()))
        (a.job.parent / f"rank-{comm.rank}.json").write_text(json.dumps(found))

    return rank_main(a.rank, a.size, a.rendezvous, TIMEOUT_S, a.job.parent, body)


def measure(name: str, ranks: int, args: Any, machine: str) -> Found:
    """Predict and measure every configuration on one graph."""
    from mggcn.assemble.plan import STRATEGIES, plan_graph, resolve
    from mggcn.comm.launch import run_ranks
    from mggcn.config import from_tables
    from mggcn.cost.machine import find_machine
    from mggcn.graph.store import open_store
    from mggcn.planning.op_cost import epoch_cost

    store = store_of(name, args)
    graph, described = open_store(store), find_machine(machine)
    settings = {}
    chosen = configurations(args.strategies.split(",") if args.strategies else list(STRATEGIES), args.orders.split(","))
    for label, run in chosen.items():
        shared = {"ranks": ranks, "threads": args.threads, "transport": "gloo"}
        train = {"eval_every": 0, "epochs": 1000}
        settings[label] = {"model": {"hidden": HIDDEN}, "train": train, "run": shared | run}
    with tempfile.TemporaryDirectory(prefix="mggcn-bench-") as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"store": str(store), "configurations": settings, "rounds": args.rounds}))
        command = [sys.executable, "-m", "bench.cpu.strategies", str(job)]
        run_ranks(command, ranks, job.parent, timeout_s=TIMEOUT_S)
        parts = [json.loads((job.parent / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    print(f"{name}, {ranks} ranks: measured", file=sys.stderr)
    found = {}
    for label, tables in settings.items():
        cost = epoch_cost(plan_graph(resolve(from_tables(tables), graph), graph)[0], described).train
        same = [part[label] for part in parts]
        found[label] = {
            # An epoch is as long as on the slowest rank, which all wait for.
            "seconds": [max(times) for times in zip(*(part["seconds"] for part in same), strict=True)],
            "bytes_sent": [statistics.fmean(part["bytes_sent"]) for part in same],
            "planned_bytes": [part["planned"] for part in same],
            "predicted": cost.seconds,
            "parts": dict(cost.parts),
        }
    return {"graph": name, "ranks": ranks, "runs": found}


def agreement(measured: dict[str, float], predicted: dict[str, float]) -> tuple[int, list[str]]:
    """Return how many pairs' measured times are more than APART apart, and those that are predicted in the other order."""
    apart, wrong = 0, []
    for a, b in itertools.combinations(measured, 2):
        slow, fast = (a, b) if measured[a] > measured[b] else (b, a)
        if measured[slow] > APART * measured[fast]:
            apart += 1
            if predicted[slow] <= predicted[fast]:
                wrong.append(f"{slow} is slower than {fast}: {measured[slow] / measured[fast]:.2f} times")
    return apart, wrong


def bytes_agree(result: Found) -> bool:
    """Whether every rank sent what was planned, but for the rounding of an average over a period."""
    return all(
        abs(sent - planned) < 1
        for found in result["runs"].values()
        for sent, planned in zip(found["bytes_sent"], found["planned_bytes"], strict=True)
    )


def describe(results: list[Found]) -> str:
    text, total, failures = "", 0, 0
    head = ["configuration", "ms/epoch (median)", "min .. max", "predicted ms", "predicted / measured", "bytes sent"]
    head += ["planned", "predicted parts, ms"]
    for result in results:
        rows = []
        for name, found in result["runs"].items():
            line = spread(found["seconds"])
            parts = ", ".join(f"{kind} {1000 * s:.1f}" for kind, s in found["parts"].items() if s >= 5e-5)
            range_ = f"{1000 * line['min']:.1f} .. {1000 * line['max']:.1f}"
            times = [f"{1000 * line['median']:.1f}", range_, f"{1000 * found['predicted']:.1f}"]
            sent = [f"{max(found['bytes_sent']):,.0f}", f"{max(found['planned_bytes']):,}"]
            rows.append([name, *times, f"{found['predicted'] / line['median']:.2f}", *sent, parts])
        runs = result["runs"].items()
        apart, wrong = agreement(
            {n: statistics.median(f["seconds"]) for n, f in runs}, {n: f["predicted"] for n, f in runs}
        )
        total, failures = total + apart, failures + len(wrong)
        text += f"## {result['graph']}, {result['ranks']} ranks\n\n{table(head, rows)}\n"
        text += f"{apart} pairs differ by more than {APART - 1:.0%}; predicted in the other order: {len(wrong)}. "
        text += "".join(f"{line}. " for line in wrong)
        text += f"Bytes {'as planned' if bytes_agree(result) else 'NOT as planned'}.\n\n"
    return f"{total - failures} of {total} pairs are predicted in the measured order.\n\n{text}"


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if "--rendezvous" in given:
        return rank_process(given)
    own: dict[str, dict[str, Any]] = {
        "graphs": {"default": GRAPHS},
        "ranks": {"default": "2,4"},
        "strategies": {"default": "", "help": "default: all that mggcn has"},
        "orders": {"default": "random,none", "help": "orders of the strategies over partitions of the rows"},
        "machine": {"default": "", "help": "the machine's file; default: mggcn tune measures it first"},
    }
    args = parse(__doc__, "scale", "rounds", "data", "cache", arguments=arguments, **own)
    args.threads = 0  # an equal share of the cores for each rank
    record: dict[str, Any] = {"surroundings": surroundings(), "results": []}
    with tempfile.TemporaryDirectory() as folder:
        machine = args.machine or str(Path(folder) / "machine.toml")
        if not args.machine:
            mggcn("tune", "--out", machine, "--ranks", args.ranks)
        record["machine"] = Path(machine).read_text() if Path(machine).is_file() else machine
        for name in (name for name in args.graphs.split(",") if available(name, find_data(args.data))):
            record["results"] += [measure(name, int(ranks), args, machine) for ranks in args.ranks.split(",")]
    body = f"{describe(record['results'])}## The machine's file\n\n```\n{record['machine']}\n```\n"
    write_report("strategies", "Strategies: measured and predicted", body, record, args.out)
    if not all(bytes_agree(result) for result in record["results"]):
        print("bytes sent differ from the plan", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
