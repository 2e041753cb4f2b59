"""The full-batch table of "Classic GNNs are Strong Baselines" (Luo, Shi & Wu 2024): published settings, splits and scores.

Each recipe is recipes/classic/<graph>-<model>.toml; a run trains one of its splits or seeds, and its score is the test
score at the best validation epoch. A run that is done is a file of its own in bench/results/recipes, and is not done
again: the command goes on where it was ended, commands that run at once share the runs, and --report writes the table of
what there is. The cheapest recipes come first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from bench.graphs import find_data
from bench.peers import recipe_pyg
from bench.report import RESULTS, ROOT, listed, parse, surroundings, table, write_report
from mggcn.config import Config, from_tables
from mggcn.config.files import from_toml
from mggcn.graph.store import open_store
from mggcn.runs.train import prepare_run, run_training

RECIPES = ROOT / "recipes" / "classic"
PUBLISHED = {
    "chameleon_filtered-gat": (44.13, 4.17),
    "chameleon_filtered-sage": (44.81, 4.74),
    "chameleon_filtered-gcn": (46.29, 3.40),
    "squirrel_filtered-sage": (40.78, 1.47),
    "amazon_photo-gat": (96.60, 0.33),
    "amazon_photo-sage": (96.78, 0.23),
    "squirrel_filtered-gcn": (45.01, 1.63),
    "amazon_computers-gat": (94.09, 0.37),
    "minesweeper-gcn": (97.86, 0.24),
    "minesweeper-sage": (97.77, 0.62),
    "amazon_computers-sage": (93.25, 0.14),
    "minesweeper-gat": (97.73, 0.73),
    "coauthor_cs-gat": (96.21, 0.14),
    "squirrel_filtered-gat": (41.73, 2.07),
    "amazon_photo-gcn": (96.10, 0.46),
    "coauthor_cs-sage": (96.38, 0.11),
    "coauthor_cs-gcn": (96.17, 0.06),
    "amazon_computers-gcn": (93.99, 0.12),
}
"""Mean and deviation of the published test scores, in %, the cheapest recipe first."""
SPLITS = {"chameleon_filtered": 10, "squirrel_filtered": 10, "minesweeper": 3}
"""Graphs whose runs are the first splits of those given, as published; each other one has one split."""
SEEDS = 5
"""Runs on a graph of one split, where three were published."""
BINARY = ("coauthor_cs",)
"""Graphs whose counts were read as 1 (torch_geometric.io.read_npz)."""


def runs_of(recipe: str) -> list[dict[str, int]]:
    """Split and seed of every run."""
    splits = SPLITS.get(graph_of(recipe), 0)
    return [{"split": k if splits else 0, "seed": k + 1} for k in range(splits or SEEDS)]


def graph_of(recipe: str) -> str:
    return recipe.rpartition("-")[0]


def store_of(graph: str, data: Path, folder: Path) -> Path:
    """Return a copy of a graph's folder, with the features that were published with."""
    store = folder / "stores" / graph
    if not store.exists():
        made = store.with_name(f"{graph}.part")
        shutil.copytree(data / graph, made, dirs_exist_ok=True, ignore=shutil.ignore_patterns("partitions"))
        if graph in BINARY:
            values = made / "features_data.npy"
            ones = (np.load(values, allow_pickle=False) > 0).astype(np.float32)
            values.unlink()
            np.save(values, ones)
        made.rename(store)
    return store


def config_of(recipe: str, run: dict[str, int], threads: int, epochs: int) -> Config:
    train = {"seed": run["seed"]} | ({"epochs": epochs} if epochs else {})
    tables = {"data": {"split": run["split"]}, "train": train, "run": {"threads": threads}}
    return from_tables(tables, from_toml(RECIPES / f"{recipe}.toml"))


def trained(recipe: str, run: dict[str, int], store: Path, folder: Path, args: Any) -> dict[str, Any]:
    """Train one run and return its row."""
    config = config_of(recipe, run, args.threads, args.epochs)
    if args.pyg:
        return {**run, "settings": digest_of(recipe), **recipe_pyg.trained(config, store)}
    shutil.rmtree(folder, ignore_errors=True)
    graph, began = open_store(store), time.perf_counter()
    result = run_training(prepare_run(config, graph, store, folder), graph, quiet=True)
    shutil.rmtree(folder)
    return {
        **run,
        "settings": digest_of(recipe),
        **{name: result["best"][name] for name in ("epoch", "train", "val", "test")},
        "last": result["final"]["test"],
        "metric": result["metric"],
        "epochs": result["epochs"],
        "seconds": time.perf_counter() - began,
        "seconds_per_epoch": result["seconds_per_epoch"],
    }


def row_file(folder: Path, recipe: str, run: dict[str, int], pyg: bool) -> Path:
    return folder / ("rows-pyg" if pyg else "rows") / f"{recipe}-{run['split']}-{run['seed']}.json"


def digest_of(recipe: str) -> str:
    """What the recipe's file sets, whatever its comments."""
    tables = tomllib.loads((RECIPES / f"{recipe}.toml").read_text())
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]


def row_of(recipe: str, run: dict[str, int], args: Any, pyg: bool = False) -> dict[str, Any] | None:
    """The row of a run; None if there is none, or it was trained with other settings."""
    file, epochs = row_file(args.rows, recipe, run, pyg), config_of(recipe, run, args.threads, args.epochs).train.epochs
    if not file.exists():
        return None
    row: dict[str, Any] = json.loads(file.read_text())
    return row if (row["epochs"], row["settings"]) == (epochs, digest_of(recipe)) else None


@contextlib.contextmanager
def occupied(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Whether this process has the folder for itself, by a lock that ends with it at the latest."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def measure(names: list[str], data: Path, args: Any) -> None:
    """Train every run that has no row yet and that no other process trains."""
    around = surroundings()
    for turn in zip_longest(*([(recipe, run) for run in runs_of(recipe)] for recipe in names)):
        for recipe, run in filter(None, turn):
            file = row_file(args.rows, recipe, run, args.pyg)
            with occupied(args.scratch / "taken" / f"{file.parent.name}-{file.stem}") as alone:
                if not alone or row_of(recipe, run, args, args.pyg) is not None:
                    continue
                with occupied(args.scratch / "stores", wait=True):
                    store = store_of(graph_of(recipe), data, args.scratch)
                folder = args.scratch / f"run-{file.stem}"
                row = trained(recipe, run, store, folder, args) | {"commit": around["commit"]}
                file.parent.mkdir(parents=True, exist_ok=True)
                part = file.with_suffix(".part")
                part.write_text(json.dumps(row, indent=1) + "\n")
                os.replace(part, file)
                print(recipe, row, file=sys.stderr, flush=True)


def found_rows(names: list[str], args: Any, pyg: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Rows that are there, by recipe."""
    return {
        recipe: [row for run in runs_of(recipe) if (row := row_of(recipe, run, args, pyg)) is not None]
        for recipe in names
    }


def mean_of(rows: list[dict[str, Any]]) -> tuple[float, str]:
    """The mean test score in %, and in words with its deviation."""
    tests = [100 * row["test"] for row in rows]
    mean = statistics.fmean(tests)
    return mean, f"{mean:.2f} +- {statistics.stdev(tests):.2f}" if len(tests) > 1 else f"{mean:.2f}"


def line_of(recipe: str, rows: list[dict[str, Any]], of_pyg: list[dict[str, Any]]) -> list[Any]:
    mean, deviation = PUBLISHED[recipe]
    theirs, runs = f"{mean:.2f} +- {deviation:.2f}", len(runs_of(recipe))
    same = [row for row in rows if any((row["split"], row["seed"]) == (one["split"], one["seed"]) for one in of_pyg)]
    counted = f"{len(of_pyg)} run{'s' * (len(of_pyg) > 1)}"
    layers = f"{mean_of(of_pyg)[1]} ({counted}, ours {mean_of(same)[0]:.2f})" if same else ""
    if not rows:
        return [recipe, f"0 of {runs}", "not run", layers, theirs, "", "", "", ""]
    ours, in_words = mean_of(rows)
    verdict = "met" if ours >= mean - deviation else "MISSED"
    return [
        recipe,
        f"{len(rows)} of {runs}",
        in_words,
        layers,
        theirs,
        f"{ours - mean:+.2f}",
        verdict if len(rows) == runs else f"{verdict} so far",
        f"{statistics.fmean(row['seconds'] for row in rows):.0f}",
        f"{1e3 * statistics.median(row['seconds_per_epoch'] for row in rows):.1f}",
    ]


def report(names: list[str], args: Any) -> None:
    rows, of_pyg = found_rows(names, args), found_rows(names, args, pyg=True)
    head = [
        "recipe",
        "runs",
        "ours, %",
        "PyG's layers, %",
        "published, %",
        "difference",
        "mean - deviation",
        "s/run",
        "ms/epoch",
    ]
    commits, of_layers = (
        ", ".join(sorted({row["commit"][:12] + row["commit"][40:] for found in runs.values() for row in found}))
        or "none"
        for runs in (rows, of_pyg)
    )
    body = (
        "Test score at the best validation epoch, in % (ROC AUC of minesweeper, else accuracy), means and deviations over "
        "the published splits, or over seeds on the one split. A goal is met at the published mean less one published "
        "deviation. An epoch is a step and an evaluation of all vertices; seconds are of a machine that others used. PyG's "
        "layers were trained by us with the same settings on the same splits, from PyG's initial weights.\n\n"
        f"Commits of the rows: {commits}; of PyG's: {of_layers}.\n\n"
    )
    body += table(head, [line_of(recipe, found, of_pyg[recipe]) for recipe, found in rows.items()])
    record = {"surroundings": surroundings(), "recipes": rows, "of_pyg": of_pyg}
    write_report("recipes", "Recipes", body, record, args.out)


def main(arguments: list[str] | None = None) -> None:
    own: dict[str, dict[str, Any]] = {
        "only": {"default": "", "help": "names of some recipes"},
        "rows": {"type": Path, "default": RESULTS / "recipes", "help": "folder that keeps rows"},
        "scratch": {
            "type": Path,
            "default": ROOT / "build" / "recipes",
            "help": "folder of stores and unfinished runs",
        },
        "epochs": {"type": int, "default": 0, "help": "fewer, to see that it runs; 0: the recipes'"},
        "pyg": {"action": "store_true", "help": "train with PyTorch Geometric's layers"},
        "report": {"action": "store_true", "help": "write the table of the rows that are there, and train nothing"},
    }
    args = parse(__doc__, "threads", "data", arguments=arguments, **own)
    names, data = listed(args.only, list(PUBLISHED)), find_data(args.data)
    if not args.report:
        if data is None:
            sys.exit("there is no folder of real graphs: set MGGCN_DATA or --data")
        measure(names, data, args)
    report(names, args)


if __name__ == "__main__":
    main()
