"""Test accuracy with bf16, the order by locality and pruning on, against float32 without them: the same seeds, in pairs."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import surroundings, table, write_report

from mggcn.config import Config, from_tables
from mggcn.config_files import from_toml
from mggcn.graph.store import open_store
from mggcn.jobs.train import prepare_run, run_training

ROOT = Path(__file__).resolve().parents[1]
EPOCHS = 300
# Graph, recipe or None for a GCN of one hidden layer, seeds.
GRAPHS = {
    "cora": ("cora-kipf", 10),
    "citeseer": ("citeseer-kipf", 10),
    "amazon_computers": (None, 3),
    "coauthor_cs": (None, 3),
}
GCN = {
    "model": {"hidden": [64], "dropout": 0.5},
    "train": {"lr": 0.01, "weight_decay": 5e-4, "epochs": EPOCHS},
}
PLAIN = {"precision": "fp32", "order": "none", "prune": "off"}
SWITCHED = {"precision": "bf16", "order": "locality", "prune": "auto"}


def config_of(recipe: str | None, seeds: int, run: dict[str, Any], threads: int) -> Config:
    base = from_tables(GCN) if recipe is None else from_toml(ROOT / "recipes" / f"{recipe}.toml")
    return from_tables({"train": {"repeat": seeds}, "run": {"threads": threads} | run}, base)


def scores(store: Path, config: Config) -> list[float]:
    """Test accuracy of each seed, at the best validation epoch."""
    graph = open_store(store)
    with tempfile.TemporaryDirectory() as folder:
        planned = prepare_run(config, graph, store, Path(folder) / "run")
        result = run_training(planned, graph, quiet=True)
    return [run["best"]["test"] for run in result.get("runs", [result])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("MGGCN_DATA", ROOT.parent / "shared" / "data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    parser.add_argument("--seeds", type=int, default=0, help="default: ten on Cora and CiteSeer, three on the others")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    args = parser.parse_args()
    results, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.graphs.split(","):
            recipe, seeds = GRAPHS[name]
            # Orders are kept beside the store.
            store = Path(shutil.copytree(args.data / name, Path(folder) / name))
            found = {}
            for label, run in (("plain", PLAIN), ("switched", SWITCHED)):
                found[label] = scores(store, config_of(recipe, args.seeds or seeds, run, args.threads))
                print(name, label, found[label], file=sys.stderr)
            pairs = [100 * (b - a) for a, b in zip(found["plain"], found["switched"], strict=True)]
            cells = [f"{100 * statistics.fmean(v):.2f} +- {100 * statistics.pstdev(v):.2f}" for v in found.values()]
            mean = statistics.fmean(pairs)
            rows.append([name, len(pairs), *cells, f"{mean:+.2f}", f"{min(pairs):+.2f} .. {max(pairs):+.2f}"])
            results.append({"graph": name, "test": found})
    head = [
        "graph",
        "seeds",
        "float32, nothing else",
        "bf16, locality, pruning",
        "mean difference, points",
        "of a seed",
    ]
    note = "Test accuracy in per cent at the best validation epoch. Recipes of Kipf and Welling for Cora and CiteSeer; "
    note += f"elsewhere one hidden layer of 64, dropout 0.5, {EPOCHS} epochs.\n\n"
    record = {"surroundings": surroundings(), "results": results}
    write_report("switches", "Accuracy of the switches", note + table(head, rows), record, args.out)


if __name__ == "__main__":
    main()
