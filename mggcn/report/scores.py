"""What a run scored, as HTML: the test score first, best and last epoch, classes and their confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mggcn.graph.class_names import recorded_names
from mggcn.planning.task import LOWER_IS_BETTER
from mggcn.report.markup import details, escape, prose, shaded_table, table
from mggcn.report.run_folder import Json, RunRecord

_SPLITS = ("test", "val", "train")
_ERRORS = (*LOWER_IS_BETTER, "r2")
"""Scores that are no share of the vertices."""


def best_scores(result: Json) -> Json:
    """Return the scores of the weights that `predict` uses; for several repeats, means."""
    if "runs" in result:
        mean = result.get("mean")
        found = mean.get("best", mean) if isinstance(mean, Mapping) else {"test": mean}
        return dict(found) if isinstance(found, Mapping) else {}
    best = result["best"]
    return dict(best if best.get("val") is not None else result["final"])


def places(metric: str, count: int | None) -> int:
    """Return how many decimals a score of `count` vertices deserves: 0.97 of a hundred, 0.815 of a thousand."""
    if metric in _ERRORS or not count:
        return 4
    return min(max(math.ceil(math.log10(count)), 1), 4)


def split_sizes(record: RunRecord) -> dict[str, int]:
    """Return how many vertices of one class each a split has, as far as the run recorded them."""
    if record.plan["graph"].get("task", "classes") != "classes":
        return {}
    splits = (record.result or {}).get("per_class", {})
    return {name: sum(scores["support"]) for name, scores in splits.items()}


def headline(record: RunRecord) -> Iterable[str]:
    """Yield the score of the test vertices in large figures, or that of another split if there are none."""
    if record.result is None:
        return
    scores, sizes, metric = best_scores(record.result), split_sizes(record), record.metric
    found = [split for split in _SPLITS if isinstance(scores.get(split), int | float)]
    if not found:
        return
    shown = {split: f"{scores[split]:.{places(metric, sizes.get(split))}f}" for split in found}
    first, *others = found
    rest = "".join(f", {split} {shown[split]}" for split in others)
    yield (
        f'<p class="score"><strong>{shown[first]}</strong> {first} {escape(metric)}{_spread(record.result, first)}'
        f"{rest}{_when(record.result)}</p>"
    )


def _spread(result: Json, split: str) -> str:
    if "runs" not in result:
        return ""
    std = result.get("std")
    found = std.get("best", std) if isinstance(std, Mapping) else {split: std}
    deviation = found.get(split) if isinstance(found, Mapping) else None
    shown = f" ± {deviation:.4f}" if isinstance(deviation, int | float) else ""
    return f"{shown}, mean of {len(result['runs'])} runs"


def _when(result: Json) -> str:
    if "runs" in result:
        return ""
    chosen = result["best"].get("val") is not None
    return f" at the best validation, epoch {result['best']['epoch']}" if chosen else " after the last epoch"


def score_table(record: RunRecord) -> str:
    """Return a table of the scores of the best and last epoch, or of every repeat."""
    result: Json = record.result or {}
    if "runs" in result:
        return _repeats(result)
    final = {"epoch": result.get("epochs", "last"), **result["final"]}
    sizes = split_sizes(record)

    def shown(entry: Json, split: str) -> str:
        value = entry.get(split)
        return f"{value:.{places(record.metric, sizes.get(split))}f}" if isinstance(value, float) else show(value)

    rows = [
        (label, entry.get("epoch"), *(shown(entry, split) for split in ("train", "val", "test")))
        for label, entry in (("best validation", result["best"]), ("last epoch", final))
        if entry is final or entry.get("val") is not None
    ]
    return table((record.metric, "epoch", "train", "val", "test"), rows, numeric=range(1, 5))


def _repeats(result: Json) -> str:
    """One row for each run and one for mean and deviation, which may be numbers or tables of numbers."""
    rows = [(f"run {number}", show(_scored(run))) for number, run in enumerate(result["runs"])]
    rows += [(key, show(result[key])) for key in ("mean", "std") if key in result]
    return table((f"{len(result['runs'])} runs", str(result["metric"])), rows)


def _scored(run: Any) -> Any:
    """Return what a repeat scored: its best epoch if it recorded one."""
    return run["best"] if isinstance(run, Mapping) and "best" in run else run


def show(value: Any) -> str:
    """Return a score, or a table or list of scores, as text."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(show, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def class_scores(record: RunRecord) -> Iterable[str]:
    """Yield the scores of each class or label of the splits, beside the confusion matrix; only one split is unfolded."""
    splits = (record.result or {}).get("per_class", {})
    one = "label" if record.plan["graph"].get("task") == "labels" else "class"
    shown = [name for name in _SPLITS if name in splits]
    if shown:
        yield f"<h2>Scores of each {one}</h2>"
        taken = f"Of the weights that `mggcn predict` takes. A {one} that is never predicted has the precision 0."
        yield f"<p>{prose(taken)}</p>"
    for split in shown:
        body = _class_table(one, splits[split], class_names(record, len(splits[split]["support"])))
        yield f"<h3>{split}</h3>{body}" if split == shown[0] else details(f"{split} vertices", body)


def link_scores(record: RunRecord) -> Iterable[str]:
    """Yield the table of all scores of a run that predicts links."""
    splits = (record.result or {}).get("links", {})
    shown = [name for name in _SPLITS if name in splits]
    if shown:
        yield "<h2>Scores of links</h2>"
        yield f"<p>{prose('Of the weights that `mggcn predict` takes, against the fixed negatives of the store.')}</p>"
        rows = [(metric, *(show(splits[name].get(metric)) for name in shown)) for metric in splits[shown[0]]]
        yield table(("", *shown), rows, numeric=range(1, 1 + len(shown)))


def class_names(record: RunRecord, count: int) -> list[str]:
    """Return the names of classes or labels: the graph's, else their numbers."""
    return list(recorded_names(record.plan.get("class_names"), count)) or list(map(str, range(count)))


def _class_table(one: str, scores: Json, names: list[str]) -> str:
    columns = (scores[key] for key in ("precision", "recall", "f1", "support"))
    rows = [
        (name, *(f"{value:.{places('', support)}f}" for value in values), f"{support:,}")
        for name, (*values, support) in zip(names, zip(*columns, strict=True), strict=True)
    ]
    listed = table((one, "precision", "recall", "F1", "vertices"), rows, numeric=range(1, 5))
    if one == "label":
        return listed
    if (matrix := scores.get("confusion")) is None:
        return f"{listed}<p>There are too many classes for a confusion matrix.</p>"
    lines = [
        (name, [f"{count:,}" for count in row], [count / max(sum(row), 1) for count in row])
        for name, row in zip(names, matrix, strict=True)
    ]
    confusion = shaded_table(("is \\ predicted", *names), lines)
    return f'<div class="columns">{listed}<div class="wide">{confusion}</div></div>'
