"""Test scores of the recipes on the real graphs: mean and deviation over seeds, against what was published."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from common import surroundings, table, write_report

from mggcn.config import from_tables
from mggcn.config_files import from_toml
from mggcn.graph.store import open_store
from mggcn.jobs.train import prepare_run, run_training

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = {"cora-kipf": ("cora", 0.815), "citeseer-kipf": ("citeseer", 0.703)}
"""Store and published test accuracy: Kipf and Welling 2017, table 2."""


def run_recipe(name: str, data: Path, repeat: int) -> dict[str, Any]:
    config = from_toml(ROOT / "recipes" / f"{name}.toml")
    config = from_tables({"train": {"repeat": repeat}, "run": {"threads": 1}}, config)
    store = data / PUBLISHED[name][0]
    graph = open_store(store)
    with tempfile.TemporaryDirectory() as folder:
        planned = prepare_run(config, graph, store, Path(folder) / "run")
        return run_training(planned, graph, quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("MGGCN_DATA", ROOT.parent / "shared" / "data"))
    )
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    args = parser.parse_args()
    found = {name: run_recipe(name, args.data, args.repeat) for name in PUBLISHED}
    rows = [
        [
            name,
            *(f"{r['mean'][k]['test']:.4f} +- {r['std'][k]['test']:.4f}" for k in ("final", "best")),
            PUBLISHED[name][1],
        ]
        for name, r in found.items()
    ]
    head = ["recipe", "test, last epoch", "test, best validation", "published"]
    body = f"Public splits, {args.repeat} seeds from 1, one thread.\n\n" + table(head, rows)
    write_report("recipes", "Recipes", body, {"surroundings": surroundings(), "results": found}, args.out)


if __name__ == "__main__":
    main()
