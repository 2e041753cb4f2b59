"""Trainings for items that compare scores: contenders of an accuracy experiment (bench/cpu/accuracy.py), in points."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

from bench.cpu import accuracy
from bench.graphs import available, find_data

Points = dict[str, list[float]]


def points(what: str, runs: tuple[str, ...], epochs: int, args: Any) -> tuple[Points, str]:
    """Return by contender the points of test accuracy from the first one, a number for each graph, and the report.

    Of all graphs that are there with five seeds, at a scale of 1; else of one, with one seed and a part of the epochs.
    Without a folder of real graphs: no points.
    """
    data, experiment = find_data(args.data), accuracy.EXPERIMENTS[what]
    names = [name for name in ("reddit", "ogbn-arxiv", *experiment.graphs) if available(name, data)]
    whole = args.scale >= 1
    fewer = args.epochs or (0 if whole else max(2, round(epochs * args.scale)))
    own = {"seeds": 5 if whole else 1, "epochs": fewer, "runs": ",".join(runs), "kept": None}
    told = SimpleNamespace(**{**vars(args), **own})
    results = [accuracy.measure(what, name, told) for name in (names if whole else names[-1:])]
    found: Points = {label: [] for label in runs} if results else {}
    for result in results:
        means = {label: statistics.fmean(run["best"] for run in of) for label, of in result["runs"].items()}
        for label in found:
            found[label].append(100 * (means[label] - means[runs[0]]))
    return found, accuracy.describe(what, results)
