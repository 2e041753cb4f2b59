"""Seconds per epoch and bytes sent of every strategy on P ranks over gloo, beside what the plan predicts on this machine.

Five graphs of different kind. All strategies of a graph train in the same P processes, in turn, PERIOD timed epochs each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import SEED, cache_folder, surroundings, table, write_report
from worker_strategies import TIMEOUT_S, read_ranks

REAL = ("cnr_2000", "dblp_2010")
GENERATED = {
    # Communities with random ids; hubs; many edges for each vertex.
    "community": ("community", "--vertices", "60000", "--edges", "600000"),
    "rmat": ("rmat", "--scale", "15", "--edge-factor", "16"),
    "dense": ("community", "--vertices", "8000", "--edges", "1600000", "--homophily", "0.5"),
}
TOY = {"community": ("community", "--vertices", "2000", "--edges", "10000")}
FEATURES, CLASSES, HIDDEN = 64, 10, (64, 64)
PERIOD = 5
APART = 1.2
"""Epoch times whose ratio is above this must be predicted in the same order."""


def configurations(strategies: list[str], orders: list[str]) -> dict[str, dict[str, Any]]:
    """Name and run settings of everything that is compared."""
    found: dict[str, dict[str, Any]] = {}
    for strategy in strategies:
        if strategy == "delayed":
            found |= {f"delayed {d}": {"strategy": strategy, "delay": d} for d in ("none", "0", str(PERIOD))}
        else:
            found |= {f"{strategy} {order}": {"strategy": strategy, "order": order} for order in orders}
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=os.environ.get("MGGCN_DATA"), help="folder of the real graphs")
    parser.add_argument("--graphs", default="", help="names of some of the graphs; default: all")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--strategies", default="", help="default: all that mggcn has")
    parser.add_argument("--orders", default="random,none", help="orders of the strategies over partitions of the rows")
    parser.add_argument("--rounds", type=int, default=4, help=f"turns of {PERIOD} timed epochs of each")
    parser.add_argument(
        "--warm-up", type=int, default=2 * PERIOD, help="epochs before them, until delayed sums have come back"
    )
    parser.add_argument("--threads", type=int, default=0, help="threads per rank; 0: an equal share of the cores")
    parser.add_argument("--machine", help="the machine's file; default: mggcn tune measures it first")
    parser.add_argument("--quick", action="store_true", help="one toy graph: does it run?")
    parser.add_argument("--cache", type=Path, help="folder that keeps the graphs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def make_graph(name: str, root: Path | None, cache: Path, kinds: dict[str, tuple[str, ...]]) -> Path:
    """Return the store of a graph with features and labels, made unless the cache has it."""
    store = cache / f"strategies-{name}-{'-'.join(kinds[name][2::2]) if name in kinds else 'real'}"
    if store.exists():
        return store
    print(f"making {store.name}", file=sys.stderr)
    if name in kinds:
        kind, *sizes = kinds[name]
        drawn = ["--features", str(FEATURES), "--classes", str(CLASSES), "--seed", str(SEED)]
        command = [sys.executable, "-m", "mggcn", "generate", kind, str(store), *sizes, *drawn]
        subprocess.run(command, check=True, stdout=sys.stderr)
    else:
        assert root is not None
        _with_features(Path(root) / name, store)
    return store


def _with_features(source: Path, store: Path) -> None:
    """Give a real graph that has none random features, labels and a split: they cost what others would."""
    import dataclasses

    import numpy as np

    from mggcn.graph.csr import ArrayRows
    from mggcn.graph.store import open_store, write_store

    graph = open_store(source)
    rng = np.random.default_rng(SEED)
    n = graph.num_vertices
    features = rng.standard_normal((n, FEATURES), np.float32)
    parts = {
        "features": ArrayRows(features),
        "labels": ArrayRows(rng.integers(CLASSES, size=n)),
        "splits": {"train": ArrayRows(rng.random((1, n)) < 0.1)},
    }
    write_store(dataclasses.replace(graph, **parts, num_classes=CLASSES, meta={}), store)


def tuned(args: argparse.Namespace, folder: Path) -> str:
    """The machine's file: as given, or measured now."""
    if args.machine:
        return str(args.machine)
    path = folder / "machine.toml"
    command = [sys.executable, "-m", "mggcn", "tune", "--out", str(path), "--ranks", args.ranks]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return str(path)


def settings_of(run: dict[str, Any], ranks: int, threads: int) -> dict[str, Any]:
    return {
        "model": {"hidden": HIDDEN},
        "train": {"eval_every": 0, "epochs": 1000},
        "run": {"ranks": ranks, "threads": threads, "transport": "gloo"} | run,
    }


def measure(store: Path, ranks: int, args: argparse.Namespace, machine: str) -> dict[str, Any]:
    """Predict and measure every configuration on one graph."""
    from mggcn.assemble import STRATEGIES, plan_graph, resolve
    from mggcn.comm.launch import run_ranks
    from mggcn.config import from_tables
    from mggcn.cost.machine import find_machine
    from mggcn.graph.store import open_store
    from mggcn.planning.op_cost import epoch_cost

    graph, described = open_store(store), find_machine(machine)
    names = args.strategies.split(",") if args.strategies else list(STRATEGIES)
    chosen = configurations(names, args.orders.split(","))
    settings = {name: settings_of(run, ranks, args.threads) for name, run in chosen.items()}
    predicted = {}
    for name, tables in settings.items():
        plan, _ = plan_graph(resolve(from_tables(tables), graph), graph)
        cost = epoch_cost(plan, described).train
        predicted[name] = {"seconds": cost.seconds, "parts": dict(cost.parts), "link_s": cost.link_s}
    with tempfile.TemporaryDirectory(prefix="mggcn-bench-") as temporary:
        job = Path(temporary) / "job.json"
        content = {"store": str(store), "configurations": settings, "warm_up": args.warm_up}
        content |= {"rounds": args.rounds, "turn": PERIOD}
        job.write_text(json.dumps(content))
        command = [sys.executable, str(Path(__file__).with_name("worker_strategies.py")), str(job)]
        run_ranks(command, ranks, job.parent, timeout_s=TIMEOUT_S)
        found = read_ranks(job.parent, ranks)
    print(f"{store.name}, {ranks} ranks: measured", file=sys.stderr)
    return {"graph": store.name, "ranks": ranks, "measured": found, "predicted": predicted}


def agreement(measured: dict[str, float], predicted: dict[str, float]) -> tuple[int, list[str]]:
    """Return the pairs whose measured times are more than APART apart, and those that are predicted in the other order."""
    apart, wrong = 0, []
    for a, b in itertools.combinations(measured, 2):
        slow, fast = (a, b) if measured[a] > measured[b] else (b, a)
        if measured[slow] > APART * measured[fast]:
            apart += 1
            if predicted[slow] <= predicted[fast]:
                wrong.append(f"{slow} is slower than {fast}: {measured[slow] / measured[fast]:.2f} times")
    return apart, wrong


def bytes_agree(result: dict[str, Any]) -> bool:
    """Whether every rank sent what was planned, but for the rounding of an average over a period."""
    return all(
        abs(sent - planned) < 1
        for found in result["measured"].values()
        for sent, planned in zip(found["bytes_sent"], found["planned_bytes"], strict=True)
    )


def describe(results: list[dict[str, Any]]) -> tuple[str, int]:
    """The Markdown, and the number of pairs in the wrong order."""
    text, total, failures = "", 0, 0
    for result in results:
        rows = []
        for name, found in result["measured"].items():
            guess = result["predicted"][name]
            parts = ", ".join(f"{kind} {1000 * s:.1f}" for kind, s in guess["parts"].items() if s >= 5e-5)
            rows.append(
                [
                    name,
                    f"{1000 * found['median']:.1f}",
                    f"{1000 * min(found['seconds']):.1f} .. {1000 * max(found['seconds']):.1f}",
                    f"{1000 * guess['seconds']:.1f}",
                    f"{guess['seconds'] / found['median']:.2f}",
                    f"{max(found['bytes_sent']):,.0f}",
                    f"{max(found['planned_bytes']):,}",
                    parts,
                ]
            )
        head = ["configuration", "ms/epoch (median)", "min .. max", "predicted ms", "predicted / measured"]
        head += ["bytes sent", "planned", "predicted parts, ms"]
        measured = {name: found["median"] for name, found in result["measured"].items()}
        apart, wrong = agreement(measured, {n: p["seconds"] for n, p in result["predicted"].items()})
        total, failures = total + apart, failures + len(wrong)
        text += f"## {result['graph']}, {result['ranks']} ranks\n\n{table(head, rows)}\n"
        text += f"{apart} pairs differ by more than {APART - 1:.0%}; predicted in the other order: {len(wrong)}. "
        text += "".join(f"{line}. " for line in wrong)
        text += f"Bytes {'as planned' if bytes_agree(result) else 'NOT as planned'}.\n\n"
    return f"{total - failures} of {total} pairs are predicted in the measured order.\n\n" + text, failures


def main() -> None:
    args = parse()
    kinds = TOY if args.quick else GENERATED
    names = args.graphs.split(",") if args.graphs else [*(REAL if args.root and not args.quick else ()), *kinds]
    record: dict[str, Any] = {"surroundings": surroundings(), "results": []}
    with cache_folder(args.cache) as cache:
        machine = tuned(args, cache)
        record["machine"] = Path(machine).read_text() if Path(machine).is_file() else machine
        for name in names:
            store = make_graph(name, args.root, cache, kinds)
            record["results"] += [measure(store, int(ranks), args, machine) for ranks in args.ranks.split(",")]
    body, _ = describe(record["results"])
    body += f"## The machine's file\n\n```\n{record['machine']}\n```\n"
    write_report("strategies", "Strategies: measured and predicted", body, record, args.out)
    if not all(bytes_agree(result) for result in record["results"]):
        sys.exit("bytes sent differ from the plan")


if __name__ == "__main__":
    main()
