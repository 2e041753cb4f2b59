"""One page about several runs: scores and settings in a table, curves over each other; of a sweep heat maps, too."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mggcn.errors import RunError
from mggcn.files import write_bytes
from mggcn.planning.task import LOWER_IS_BETTER
from mggcn.report.chart import COLOURS, Line, line_chart
from mggcn.report.curves import mean_of, points
from mggcn.report.markup import escape, page, prose, shaded_table, table
from mggcn.report.page import setting_text
from mggcn.report.run_folder import RunRecord, changed_settings, read_run
from mggcn.report.scores import best_scores, show
from mggcn.runs.sweep import Sweep, Trial
from mggcn.runs.sweep_folder import trial_folder

_SPLITS = ("val", "test")
_MOST_VALUES = 16
"""Values of a setting in a heat map: more, such as draws from a range, have no cell in common."""


def write_comparison(runs: Sequence[Path], path: Path) -> Path:
    """Write a page that compares runs, in the order given. Raises: RunError if one is not a run, or is named twice."""
    records = [read_run(run) for run in runs]
    names = _short_names(runs)
    changed = [changed_settings(record) for record in records]
    differ = [
        name for name in dict.fromkeys(itertools.chain(*changed)) if len({repr(c.get(name)) for c in changed}) > 1
    ]
    metrics = dict.fromkeys(record.metric for record in records)
    rows = []
    for name, record, settings in zip(names, records, changed, strict=True):
        found = best_scores(record.result) if record.result else {}
        about = (record.plan["graph"]["name"], record.metric, len(record.runs[min(record.runs)]))
        rows.append((name, *about, *(show(found.get(split)) for split in _SPLITS), *_values(settings, differ)))
    head = ("run", "graph", "metric", "epochs", *_SPLITS, *differ)
    notes = [f"{name}: {note}" for name, record in zip(names, records, strict=True) for note in record.notes]
    if len(metrics) > 1:
        notes.insert(0, f"These runs are scored by {' and '.join(metrics)}, which do not compare.")
    body = [
        f"<h1>{len(runs)} runs</h1>",
        *(f'<p class="note">{prose(note)}</p>' for note in notes),
        table(head, rows, numeric=range(3, 6)),
        "<p>Settings are those in which the runs differ; - stands for the default.</p>",
        *_curves(list(zip(names, records, strict=True))),
    ]
    return _write(path, page(f"mggcn: {', '.join(names)}", body))


def write_sweep_page(sweep: Sweep, path: Path) -> Path:
    """Write the page of a sweep: the best trial's score, the table, the best trials' curves, and each pair of settings."""
    order = sweep.ranked
    records, notes = [], [f"{sweep.sampling[0].upper()}{sweep.sampling[1:]}."] if sweep.sampling else []
    for trial in [trial for trial in order if trial.result is not None][:COLOURS]:
        try:
            records.append((f"trial {trial.number}", read_run(trial_folder(sweep.folder, trial.number))))
        except RunError as error:
            notes.append(str(error))
    names = list(dict.fromkeys(itertools.chain(*(trial.settings for trial in sweep.trials))))
    body = [
        *_best(sweep),
        f"<h1>{escape(sweep.folder.resolve().name)}: {len(sweep.trials)} trials</h1>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        *(_heat_map(sweep, *pair) for pair in itertools.combinations(names, 2)),
        *(_curves(records, f"of the {len(records)} best trials" if len(records) > 1 else "") if records else ()),
        "<h2>Trials</h2>",
        _trials(sweep, order, names),
    ]
    return _write(path, page(f"mggcn sweep {sweep.folder.resolve().name}", body))


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, text.encode(errors="replace"), durable=False)
    except OSError as error:
        raise RunError(f"cannot write the page {path}: {error}") from error
    return path


def _short_names(runs: Sequence[Path]) -> list[str]:
    """Return the folders' own names, with those above them where two are alike. Raises: RunError for one folder twice."""
    folders = [run.resolve() for run in runs]
    if len(set(folders)) < len(folders):
        twice = next(run for run in folders if folders.count(run) > 1)
        raise RunError(f"{twice} is named twice; name every run to compare once")
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def _values(settings: dict[str, Any], names: Iterable[str]) -> list[str]:
    return [setting_text(settings[name]) or "none" if name in settings else "-" for name in names]


def _curves(records: Sequence[tuple[str, RunRecord]], which: str = "") -> Iterable[str]:
    """Yield the charts of loss and scores, a colour for each run; of repeats their mean."""
    yield f"<h2>{escape(f'Curves {which}'.strip())}</h2>"
    titles = {"loss": "training loss", "val": f"val {records[0][1].metric}", "test": f"test {records[0][1].metric}"}
    charts = []
    for key, title in titles.items():
        lines = []
        for number, (name, record) in enumerate(records):
            x, y = mean_of([points(epochs, key) for epochs in record.runs.values()])
            lines.append(Line(name, x.tolist(), y.tolist(), number))
        charts.append(line_chart(title, lines, logarithmic=key == "loss"))
    yield f'<div class="charts">{"".join(charts)}</div>'


def _best(sweep: Sweep) -> Iterable[str]:
    if (best := sweep.best) is None:
        yield '<p class="note">No trial has a validation score to choose by.</p>'
        return
    test, val = best.scores["test"], best.scores["val"]
    shown, split, rest = (val, "val", "") if test is None else (test, "test", f", val {show(val)}")
    settings = ", ".join(f"{name} {setting_text(value)}" for name, value in best.settings.items())
    yield (
        f'<p class="score"><strong>{show(shown)}</strong> {split} {escape(sweep.metric)}{rest} '
        f"of trial {best.number}, the best by validation: {escape(settings)}</p>"
    )


def _heat_map(sweep: Sweep, down: str, across: str) -> str:
    """Return the best validation score for each pair of values of two settings, darker the better."""
    values = [_distinct(sweep.trials, name) for name in (down, across)]
    if any(not 2 <= len(found) <= _MOST_VALUES for found in values):
        return ""
    sign = -1 if sweep.metric in LOWER_IS_BETTER else 1
    best: dict[tuple[str, str], float] = {}
    for trial in sweep.trials:
        score, cell = trial.scores["val"], (setting_text(trial.settings[down]), setting_text(trial.settings[across]))
        if score is not None and sign * score > sign * best.get(cell, -sign * float("inf")):
            best[cell] = score
    if not best:
        return ""
    low, high = sorted((sign * min(best.values()), sign * max(best.values())))
    rows = []
    for one in values[0]:
        found = [best.get((one, other)) for other in values[1]]
        shades = [0.0 if s is None else 0.1 + 0.9 * (sign * s - low) / ((high - low) or 1.0) for s in found]
        rows.append((one, [show(score) for score in found], shades))
    title = f"val {sweep.metric} by {down} (down) and {across} (across)"
    return f"<h2>{escape(title)}</h2>" + shaded_table((down, *values[1]), rows)


def _distinct(trials: Iterable[Trial], name: str) -> list[str]:
    found = {setting_text(trial.settings[name]): trial.settings[name] for trial in trials if name in trial.settings}
    numeric = all(isinstance(value, int | float) for value in found.values())
    return sorted(found, key=lambda text: found[text]) if numeric else list(found)


def _trials(sweep: Sweep, order: Sequence[Trial], names: Sequence[str]) -> str:
    rows = []
    for trial in order:
        row = trial.row(sweep.metric)
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
        scores = [show(row[split]) for split in _SPLITS]
        ends = (row["epochs"] or "", seconds, row["state"], row["reason"])
        rows.append((trial.number, *_values(trial.settings, names), *scores, *ends))
    head = ("trial", *names, *(f"{split} {sweep.metric}" for split in _SPLITS), "epochs", "seconds", "state", "reason")
    return table(head, rows, numeric=range(len(names) + 1, len(names) + 5))
