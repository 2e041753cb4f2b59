"""Test accuracy of whole trainings by settings: the same seeds, in pairs, in turn; seconds of an epoch beside it.

recipes     Kipf and Welling's settings on Cora and CiteSeer, at the last epoch too
precisions  fp32, mixed and bf16, with the bytes that two ranks send
delayed     DistGNN's delays on four ranks (its table 5), against one rank
batches     the whole graph beside sampled batches, each with its own learning rate; seconds until a score is reached
sizes       the same on generated graphs of 0.1, 0.6 and 2.4 million vertices
history     batches of four ranks beside one rank's: exact ones, by macrobatches of an epoch (BatchGNN), of seeds that are
            dealt by ranges (DistDGL), and with rows of other ranks from a cache (DistGNN-MB), or without
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.graphs import find_data, store_of
from bench.report import ROOT, listed, parse, surroundings, table, write_report
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.config import Config, from_tables
from mggcn.config.files import from_toml
from mggcn.files import write_text
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.store import open_store
from mggcn.runs.train import prepare_run, run_training

Tables = dict[str, dict[str, Any]]
KIPF = {"cora": ("cora-kipf", 0.815), "citeseer": ("citeseer-kipf", 0.703)}
"""Recipe and published test accuracy: Kipf and Welling 2017, table 2."""
GCN: Tables = {
    "model": {"hidden": [64], "dropout": 0.5},
    "train": {"lr": 0.01, "weight_decay": 5e-4, "epochs": 300},
}
SAGE: Tables = {
    "model": {"kind": "sage", "hidden": [64], "dropout": 0.5},
    "train": {"lr": 0.005, "weight_decay": 5e-5, "epochs": 200},
}
SAGE_MEAN = {"kind": "sage", "aggregator": "mean", "self_loops": False, "dropout": 0.5}
SAMPLE = {"batch": 128, "fanout": [10, 5]}
SAMPLE_LARGE = {"batch": 1024, "fanout": [15, 10, 5]}
TIMED = ("batches", "sizes", "delayed", "history")
"""Experiments that ask how soon a score is reached."""
FOUR = {"ranks": 4, "threads": 1, "transport": "threads", "strategy": "delayed"}
SAMPLED = {"ranks": 4, "threads": 1, "transport": "threads"}


@dataclass(frozen=True)
class Experiment:
    """Graphs with the seeds of each, and run settings by contender, the base first."""

    graphs: dict[str, int]
    runs: dict[str, dict[str, Any]]
    tables: Tables
    """Settings where a graph has no recipe."""
    own: dict[str, Tables] = field(default_factory=dict)
    """Further settings of contenders, or of a contender on one graph ("graph, contender")."""
    longer: dict[str, int] = field(default_factory=dict)
    """How many times the epochs of batches a graph gets that has fewer batches in one."""
    divided: bool = False
    """Whether each seed divides the vertices anew, 60 % for training and 20 % for validation."""


EXPERIMENTS = {
    "recipes": Experiment(dict.fromkeys(KIPF, 10), {"recipe": {}}, GCN),
    "precisions": Experiment(
        {"cora": 10, "citeseer": 10, "amazon_computers": 3, "coauthor_cs": 3},
        {precision: {"precision": precision} for precision in ("fp32", "mixed", "bf16")},
        GCN,
    ),
    "delayed": Experiment(
        dict.fromkeys(("dblp", "coauthor_cs", "facebook_pages", "amazon_computers"), 5),
        {
            "P = 1": {"threads": 1},
            "cd-0": {**FOUR, "delay": "0"},
            "cd-5 reuse": {**FOUR, "delay": "5", "stale_aggregates": "reuse"},
            "cd-5 discard": {**FOUR, "delay": "5", "stale_aggregates": "discard"},
            "0c": {**FOUR, "delay": "none"},
            "cd-10 discard": {**FOUR, "delay": "10", "stale_aggregates": "discard"},
        },
        SAGE,
    ),
    "batches": Experiment(
        dict.fromkeys(("coauthor_cs", "amazon_computers", "facebook_pages", "twitch_de", "dblp"), 5),
        {"whole graph": {}, "batches": {}, "LABOR batches": {}},
        {"model": SAGE_MEAN | {"hidden": [128]}},
        {
            "whole graph": {"train": {"lr": 0.01, "epochs": 200}},
            "batches": {"train": {"lr": 0.003, "epochs": 30}, "sample": SAMPLE},
            "LABOR batches": {"train": {"lr": 0.003, "epochs": 30}, "sample": SAMPLE | {"draw": "labor-one"}},
            "amazon_computers, whole graph": {"train": {"lr": 0.003, "epochs": 600}},
        },
        divided=True,
    ),
    "history": Experiment(
        dict.fromkeys(("dblp", "cora_ml", "uai2010", "amazon_photo"), 5),
        {
            "one rank": {"threads": 1},
            "exact": SAMPLED,
            "macrobatches": SAMPLED,
            "ranges": SAMPLED,
            "history": SAMPLED,
            "history METIS": {**SAMPLED, "order": "metis-balanced"},
            "dropped": SAMPLED,
            "dropped METIS": {**SAMPLED, "order": "metis-balanced"},
        },
        {
            "model": SAGE_MEAN | {"hidden": [128]},
            "train": {"lr": 0.003, "epochs": 30},
        },
        {
            "one rank": {"sample": SAMPLE},
            "exact": {"sample": SAMPLE},
            "macrobatches": {"sample": SAMPLE | {"rows": "owners", "macro": 0}},
            "ranges": {"sample": SAMPLE | {"deal": "ranges"}},
            "history": {"sample": SAMPLE | {"halo": "history"}},
            "history METIS": {"sample": SAMPLE | {"halo": "history"}},
            "dropped": {"sample": SAMPLE | {"halo": "history", "history_lines": 1, "history_rows": 1}},
            "dropped METIS": {"sample": SAMPLE | {"halo": "history", "history_lines": 1, "history_rows": 1}},
        },
    ),
    "sizes": Experiment(
        {"community 0.1 M": 5, "community 0.6 M": 5, "community 2.4 M": 1},
        {"whole graph": {}, "batches": {}, "LABOR batches": {}},
        {"model": SAGE_MEAN | {"hidden": [64, 64]}},
        {
            "whole graph": {"train": {"lr": 0.01, "epochs": 100}},
            "batches": {"train": {"lr": 0.003, "epochs": 5}, "sample": SAMPLE_LARGE},
            "LABOR batches": {"train": {"lr": 0.003, "epochs": 5}, "sample": SAMPLE_LARGE | {"draw": "labor-one"}},
        },
        longer={"community 0.1 M": 8, "community 0.6 M": 2},
    ),
}
STRATEGIES, WIDE = ("broadcast", "halo", "slice", "delayed"), [128, 128]
GOAL = 0.3
"""Points that the mean accuracy in mixed may lie from that in fp32."""


def config_of(what: str, graph: str, label: str, train: dict[str, Any], threads: int) -> Config:
    experiment = EXPERIMENTS[what]
    recipe = graph in KIPF and what != "delayed"
    base = from_toml(ROOT / "recipes" / f"{KIPF[graph][0]}.toml") if recipe else from_tables(experiment.tables)
    for of in (label, f"{graph}, {label}"):
        base = from_tables(experiment.own.get(of, {}), base)
    if base.sample.batch and "epochs" not in train:
        train = train | {"epochs": base.train.epochs * experiment.longer.get(graph, 1)}
    return from_tables({"train": train, "run": {"threads": threads} | experiment.runs[label]}, base)


def divided(graph: Graph, seed: int) -> Graph:
    """The graph with 60 % of its vertices for training and 20 % for validation."""
    place = np.random.default_rng(seed).permutation(graph.num_vertices) / graph.num_vertices
    bounds = {"train": (0.0, 0.6), "val": (0.6, 0.8), "test": (0.8, 1.0)}
    masks = {name: ArrayRows(((low <= place) & (place < high))[None]) for name, (low, high) in bounds.items()}
    return replace(graph, splits=masks)


def trained(graph: Graph, config: Config) -> dict[str, Any]:
    """Test scores at the best validation epoch and the last, and seconds per epoch of one run; its curve."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        result = run_training(prepare_run(config, graph, None, run), graph, quiet=True)
        history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    scores = {when: result[when]["test"] for when in ("best", "final")}
    seconds = itertools.accumulate(row["seconds"] for row in history)
    curve = [[s, row["val"]] for s, row in zip(seconds, history, strict=True)]
    return {**scores, "seconds": result["seconds_per_epoch"], "curve": curve}


def measure(what: str, name: str, args: Any) -> dict[str, Any]:
    """All runs of a graph: contenders alternate, so that what else the machine does meets all of them."""
    experiment = EXPERIMENTS[what]
    labels = listed(args.runs, list(experiment.runs))
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    store = store_of(name, args)
    kept = json.loads(args.kept.read_text()) if args.kept is not None and args.kept.exists() else {}
    for seed in range(1, 1 + (args.seeds or experiment.graphs[name])):
        graph = open_store(store)
        graph = divided(graph, seed) if experiment.divided else graph
        for label in labels:
            train = {"seed": seed} | ({"epochs": args.epochs} if args.epochs else {})
            key = f"{what}, {name}, {label}, {train}"
            if key not in kept:
                kept[key] = trained(graph, config_of(what, name, label, train, args.threads))
                print(what, name, seed, label, kept[key]["best"], file=sys.stderr)
                if args.kept is not None:
                    write_text(args.kept, json.dumps(kept))
            runs[label].append(kept[key])
    return {"graph": name, "runs": runs, "sent": sent(what, name, store) if what == "precisions" else {}}


def sent(what: str, name: str, store: Path) -> dict[str, dict[str, int]]:
    """Planned bytes, which are those sent, of two ranks in a training epoch: by strategy and widths, then by contender."""
    graph, found = open_store(store), {}
    for strategy, hidden in itertools.product(STRATEGIES, (None, WIDE)):
        cells = {}
        for label in EXPERIMENTS[what].runs:
            two = {"run": {"ranks": 2, "strategy": strategy}}
            config = from_tables(two, config_of(what, name, label, {}, 1))
            config = resolve(from_tables({"model": {"hidden": hidden}} if hidden else {}, config), graph)
            plan, _ = plan_graph(config, graph)
            cells[label] = sum(rank.bytes_sent(rank.train) for rank in plan.ranks)
        found[f"{strategy} {'x'.join(map(str, config.model.hidden))}"] = cells
    return found


def rows_of(found: dict[str, Any]) -> list[list[Any]]:
    """A row for each contender: scores, their difference from the first seed by seed, seconds."""
    base = [run["best"] for run in next(iter(found["runs"].values()))]
    rows = []
    for label, runs in found["runs"].items():
        best, final = ([100 * run[when] for run in runs] for when in ("best", "final"))
        pairs = [b - 100 * a for a, b in zip(base, best, strict=True)]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0
        cells = [f"{statistics.fmean(of):.2f} +- {statistics.pstdev(of):.2f}" for of in (best, final)]
        cells += [f"{statistics.fmean(pairs):+.2f} +- {error:.2f}", f"{min(pairs):+.2f} .. {max(pairs):+.2f}"]
        rows.append(
            [found["graph"], label, len(runs), *cells, f"{1e3 * statistics.median(r['seconds'] for r in runs):.2f}"]
        )
    return rows


def until_reached(found: dict[str, Any]) -> tuple[float, dict[str, list[float]]]:
    """Return the score a point below the best mean of validation, and the training seconds of each run until it has it.

    Seconds are by contender, a number for each seed: inf for one that never has.
    """
    wanted = max(map(best_of, found["runs"].values())) - 0.01
    return wanted, {
        label: [next((s for s, v in run["curve"] if v >= wanted), math.inf) for run in runs]
        for label, runs in found["runs"].items()
    }


def best_of(runs: list[dict[str, Any]]) -> float:
    """The best validation score of a run, on average."""
    return statistics.fmean(max(v for _, v in run["curve"]) for run in runs)


def reached(found: dict[str, Any]) -> list[list[Any]]:
    """A row for each contender: training seconds until validation is within a point of the best mean, median over seeds."""
    rows, (wanted, seconds) = [], until_reached(found)
    for label, times in seconds.items():
        middle, best = statistics.median(times), best_of(found["runs"][label])
        shown = "never" if math.isinf(middle) else f"{middle:.2f}"
        rows.append(
            [found["graph"], label, f"{100 * best:.2f}", f"{100 * wanted:.2f}", shown, sum(map(math.isinf, times))]
        )
    return rows


def missed(results: list[dict[str, Any]]) -> list[str]:
    """Graphs on which mixed misses the goal."""
    means = {
        found["graph"]: {k: statistics.fmean(r["best"] for r in v) for k, v in found["runs"].items()}
        for found in results
    }
    return [
        graph for graph, mean in means.items() if "mixed" in mean and abs(100 * (mean["mixed"] - mean["fp32"])) > GOAL
    ]


def describe(what: str, results: list[dict[str, Any]]) -> str:
    head = [
        "graph",
        "run",
        "seeds",
        "test at best validation, %",
        "last epoch",
        "points from the first",
        "of a seed",
        "ms/epoch",
    ]
    text = f"## {what}\n\n" + table(head, [row for found in results for row in rows_of(found)]) + "\n"
    if what == "recipes":
        text += "Published: " + ", ".join(f"{graph} {100 * score:.1f} %" for graph, (_, score) in KIPF.items()) + ".\n"
    if what in TIMED:
        text += "Training seconds, without evaluations, until a score within a point of the best mean is reached:\n\n"
        head = ["graph", "run", "best validation, %", "reached at, %", "s", "seeds that never did"]
        text += table(head, [row for found in results for row in reached(found)])
    if what == "precisions":
        verdict = f"MISSED on {', '.join(missed(results))}" if missed(results) else "met"
        text += f"Goal, mixed within {GOAL} points: {verdict}.\n\n"
        rows = [
            [f["graph"], how, *(f"{n:,}" for n in cells.values())] for f in results for how, cells in f["sent"].items()
        ]
        text += "Bytes sent in an epoch by two ranks together, sums of gradients included:\n\n"
        text += table(["graph", "strategy, hidden widths", *EXPERIMENTS[what].runs], rows)
    return text


def main(arguments: list[str] | None = None) -> None:
    own: dict[str, dict[str, Any]] = {
        "what": {"default": ",".join(EXPERIMENTS), "help": "experiments"},
        "graphs": {"default": "", "help": "names of some of the graphs (default: all)"},
        "runs": {"default": "", "help": "names of some of the settings (default: all)"},
        "seeds": {"type": int, "default": 0, "help": "0: as published"},
        "epochs": {"type": int, "default": 0, "help": "fewer, to see that it runs; 0: the recipes'"},
        "kept": {"type": Path, "help": "file of finished runs, which are not run again: a call that was ended goes on"},
    }
    args = parse(__doc__, "threads", "data", "cache", arguments=arguments, **own)
    whats = listed(args.what, list(EXPERIMENTS))
    if find_data(args.data) is None and whats != ["sizes"]:
        sys.exit("there is no folder of real graphs: set MGGCN_DATA or --data")
    record: dict[str, Any] = {"surroundings": surroundings()}
    for what in whats:
        graphs = [g for g in EXPERIMENTS[what].graphs if not args.graphs or g in args.graphs.split(",")]
        record[what] = [measure(what, name, args) for name in graphs]
    body = "\n".join(describe(what, record[what]) for what in whats)
    write_report("-".join(["accuracy", *whats]), "Test accuracy", body, record, args.out)


if __name__ == "__main__":
    main()
