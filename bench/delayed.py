"""DistGNN's delayed aggregates: accuracy (its Table 5), time and memory (PartitionStats 5, 6, Table 6), and slow networks.

accuracy: GraphSAGE with the GCN aggregator, P = 4, seeds 1 .. SEEDS, test score of the best validation epoch. cost: one
epoch and the planned memory of each delay, P = 1, 2, 4. lag: cd-0 and cd-5 where every message takes a set time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import MIB, spread, surroundings, table, write_report
from lagging import LaggingCommunicator

from mggcn.assemble import plan_graph, resolve
from mggcn.assemble_rank import make_rank
from mggcn.comm.base import Communicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, from_tables
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store
from mggcn.jobs.train import prepare_run, run_training
from mggcn.partition.base import Partition
from mggcn.planning.run import RunPlan

ROOT = Path(__file__).resolve().parents[1]
ACCURACY = ("dblp", "coauthor_cs", "facebook_pages", "amazon_computers")
COST = ("amazon_computers", "facebook_pages")
RANKS = 4
DELAYS = (
    ("cd-0", "0", "reuse"),
    ("cd-5 reuse", "5", "reuse"),
    ("cd-5 discard", "5", "discard"),
    ("0c", "none", "reuse"),
)
DELAYS_ACCURACY = (*DELAYS, ("cd-10 discard", "10", "discard"))
LAG_EPOCHS = 30


def config_of(ranks: int, delay: str, stale: str, **train: Any) -> Config:
    run = {"ranks": ranks, "threads": 1, "transport": "threads" if ranks > 1 else "single"}
    strategy = {"strategy": "delayed", "delay": delay, "stale_aggregates": stale} if ranks > 1 else {}
    model = {"kind": "sage", "hidden": [64], "dropout": 0.5}
    tables = {"model": model, "train": {"lr": 0.005, "weight_decay": 5e-5} | train, "run": run | strategy}
    return from_tables(tables)


def copied(data: Path, name: str, folder: Path) -> Path:
    """A store's copy: cuts are kept beside it."""
    target = folder / name
    if not target.exists():
        shutil.copytree(data / name, target)
    return target


def trained(store: Path, config: Config) -> dict[str, Any]:
    graph = open_store(store)
    with tempfile.TemporaryDirectory() as folder:
        planned = prepare_run(config, graph, store, Path(folder) / "run")
        return run_training(planned, graph, quiet=True)


def accuracy(data: Path, folder: Path, args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    runs = []
    for name in ACCURACY:
        store = copied(data, name, folder)
        for label, delay, stale in (("P = 1", "0", "reuse"), *DELAYS_ACCURACY):
            config = config_of(1 if label == "P = 1" else RANKS, delay, stale, repeat=args.seeds, epochs=args.epochs)
            result = trained(store, config)
            tests = [run["best"]["test"] for run in result.get("runs", [result])]
            runs.append({"graph": name, "run": label, "test": tests, "epoch_s": result["seconds_per_epoch"]})
            print(f"{name} {label}: {statistics.fmean(tests):.4f} {result['seconds_per_epoch']:.3f} s", file=sys.stderr)
    labels = ["P = 1", *(label for label, *_ in DELAYS_ACCURACY)]
    rows = []
    for name in ACCURACY:
        found = {run["run"]: run["test"] for run in runs if run["graph"] == name}
        cells = [f"{100 * statistics.fmean(found[k]):.2f} +- {100 * statistics.pstdev(found[k]):.2f}" for k in labels]
        rows.append([name, *cells])
    return "## Test accuracy, per cent\n\n" + table(["graph", *labels], rows), runs


def cost(data: Path, folder: Path, args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    runs, rows = [], []
    for name in COST:
        store = copied(data, name, folder)
        for ranks in (1, 2, 4):
            for label, delay, stale in DELAYS if ranks > 1 else (("P = 1", "0", "reuse"),):
                config = config_of(ranks, delay, stale, epochs=30, eval_every=0)
                plan, _ = plan_graph(resolve(config, open_store(store)), open_store(store))
                rank = plan.largest
                seconds = trained(store, config)["seconds_per_epoch"]
                kept = rank.regions.get("messages and sums in flight", 0)
                moving = rank.total_bytes - rank.regions["runtime"]
                split = getattr(plan.figures, "split", (0,))[rank.rank] / rank.model.rows
                runs.append({"graph": name, "ranks": ranks, "run": label, "epoch_s": seconds, "rank_bytes": moving})
                cells = [f"{seconds * 1e3:.1f}", f"{moving / MIB:.1f}", f"{kept / MIB:.1f}", f"{split:.0%}"]
                rows.append([name, ranks, label, *cells, f"{rank.bytes_sent(rank.train) / MIB:.2f}"])
    head = ["graph", "P", "run", "ms / epoch", "MiB of a rank", "of it in flight", "split rows", "MiB sent / epoch"]
    note = "P ranks are threads of this machine's cores: more ranks than cores share them.\n\n"
    return "## Time and memory\n\n" + note + table(head, rows), runs


def lagged(
    config: Config, graph: Graph, plan: RunPlan, partition: Partition, seconds: float, comm: Communicator
) -> list[float]:
    """Train on one rank; return the seconds of each epoch."""
    rank = make_rank(config, graph, plan, partition, LaggingCommunicator(comm, seconds))
    found = []
    for epoch in range(LAG_EPOCHS):
        began = time.perf_counter()
        rank.trainer.step(epoch)
        found.append(time.perf_counter() - began)
    rank.trainer.runtime.training.state()  # every message has come
    return found


def lag(data: Path, folder: Path, args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Epoch seconds of two ranks with messages that are on their way for 0 or LAG seconds."""
    store = copied(data, "amazon_computers", folder)
    graph = open_store(store)
    runs, rows = [], []
    for label, delay in (("cd-0", "0"), ("cd-5", "5")):
        config = resolve(config_of(2, delay, "reuse", epochs=LAG_EPOCHS), graph)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden=(128, 128)))
        plan, partition = plan_graph(config, graph)
        medians = {}
        for seconds in (0.0, args.lag):
            epochs = run_threads(2, partial(lagged, config, graph, plan, partition, seconds), 120)[0]
            medians[seconds] = spread(epochs[10:])["median"]
            runs.append({"run": label, "lag_s": seconds, "epochs_s": epochs})
        messages = plan.ranks[0].messages(plan.ranks[0].train) - 2
        times = [f"{medians[0.0] * 1e3:.0f}", f"{medians[args.lag] * 1e3:.0f}"]
        ratio, paid = medians[args.lag] / medians[0.0], (medians[args.lag] - medians[0.0]) / args.lag
        rows.append([label, messages, *times, f"{ratio:.2f}", f"{paid:.2f}"])
    head = ["run", "messages", "ms without", f"ms with {args.lag * 1e3:.0f} ms", "ratio", "lags paid"]
    title = "## A network on which every message takes a while (amazon_computers, 128,128, P = 2)\n\n"
    return title + table(head, rows), runs


PARTS = {"accuracy": accuracy, "cost": cost, "lag": lag}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("MGGCN_DATA", ROOT.parent / "shared" / "data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--parts", default=",".join(PARTS), help="of: " + ", ".join(PARTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--lag", type=float, default=0.2, help="seconds that a message takes")
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    args = parser.parse_args()
    record: dict[str, Any] = {"surroundings": surroundings()}
    body = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.parts.split(","):
            text, record[name] = PARTS[name](args.data, Path(folder), args)
            body.append(text)
    chosen = args.parts.replace(",", "-")
    write_report(
        "delayed" if chosen == "-".join(PARTS) else f"delayed-{chosen}",
        "Delayed aggregates",
        "\n".join(body),
        record,
        args.out,
    )


if __name__ == "__main__":
    main()
