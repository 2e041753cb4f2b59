"""What a run has found out about its sparse products: kept beside the store and in the run folder, and as text."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from mggcn.assemble import host_of
from mggcn.backend.cpu.explore import Trial
from mggcn.backend.cpu.findings import Findings
from mggcn.backend.cpu.table import RUN_FILE, STORE_FILE, outdated, write_choices
from mggcn.config import Config
from mggcn.errors import RunError, StoreError
from mggcn.graph.csr import Graph
from mggcn.graph.store import store_folder
from mggcn.train.log import write_json

SUMMARY_FILE = "tuning.json"
"""In a run folder: what tuning cost so far and how many products it tried, for result.json."""
log = logging.getLogger(__name__)


def save_tuning(findings: Findings, config: Config, graph: Graph, folder: Path) -> str:
    """Add what was found to the tables of the graph's store and of the run folder, and say so in one line.

    A store that cannot be written is worth a warning. Raises: StoreError or RunError if the run folder cannot be written.
    """
    if not findings.trials:
        return told(findings)
    write_json(folder / SUMMARY_FILE, findings.summary(summary_of(folder)))
    kept, host = findings.kept(), host_of(config)
    places: list[str] = []
    if kept:
        write_choices(folder / RUN_FILE, host, kept)
        places.append(str(folder / RUN_FILE))
        beside = store_folder(graph)
        try:
            if beside is not None:
                write_choices(beside / STORE_FILE, host, kept)
                places.append(str(beside / STORE_FILE))
        except StoreError as error:
            log.warning("%s", error)
    return f"{told(findings)}; {'kept in ' + ' and '.join(places) if places else 'nothing was kept'}"


def summary_of(folder: Path) -> dict[str, float]:
    """Return what tuning has cost a run so far, over all its parts; empty if it has tried nothing."""
    try:
        summary: dict[str, float] = json.loads((folder / SUMMARY_FILE).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / SUMMARY_FILE} cannot be read ({error}); remove it") from error
    return summary


def outdated_table(graph: Graph, folder: Path) -> str:
    """Return which table, of the run folder or beside the graph's store, is another version's, in words; "" if none is."""
    beside = store_folder(graph)
    return outdated(folder / RUN_FILE) or ("" if beside is None else outdated(beside / STORE_FILE))


def told(findings: Findings) -> str:
    """Return what exploring cost, and how many products take another way than the model's, in words."""
    found = findings.summary()
    if not found["products"] and findings.untried:
        return "tuning has tried nothing: the epochs were too few"
    if not found["products"]:
        return (
            "nothing was left to tune: all sparse products of these epochs were measured before, or have one way only"
        )
    text = (
        f"{findings.cost}: {found['beaten']} of {found['products']} sparse products take another way than the model's"
    )
    return text + (f", {found['unfinished']} left open" if found["unfinished"] else "")


def product_lines(findings: Findings) -> list[str]:
    """Return the table of what was timed, every way's seconds, and the model's reasons."""
    from mggcn.planning.text import table

    header = ("rank", "rows", "columns", "nonzeros", "width", "bytes", "the model's way", "ms", "fastest", "ms", "gain")
    rows = [
        (
            rank,
            f"{trial.key.rows:,}",
            f"{trial.key.columns:,}",
            f"{trial.key.nnz:,}",
            trial.key.width,
            trial.key.item,
            trial.ways[0].text,
            _ms(trial, 0),
            trial.winner.text if trial.beaten else "the same",
            _ms(trial, trial.fastest),
            f"{trial.gain:.2f}" + (", left open" if trial.kept is None else ", kept" if trial.beaten else ""),
        )
        for rank, trial in findings.trials
    ]
    timed = [f"  {number}: {_timed(trial)}" for number, (_, trial) in enumerate(findings.trials, start=1)]
    reasons = dict.fromkeys(
        f"  {trial.ways[0].text} (width {trial.key.width}): {trial.ways[0].reason}" for _, trial in findings.trials
    )
    return [
        *table(header, rows),
        "least ms of each way, by line of the table:",
        *timed,
        "why the model chose:",
        *reasons,
    ]


def _timed(trial: Trial) -> str:
    """Every way that was called, and how often."""
    called = [
        (way.text, values, k) for k, (way, values) in enumerate(zip(trial.ways, trial.seconds, strict=True)) if values
    ]
    return "; ".join(f"{text} {_ms(trial, k)} ({len(values)})" for text, values, k in called)


def _ms(trial: Trial, way: int) -> str:
    return f"{1e3 * min(trial.seconds[way]):.2f}" if trial.seconds[way] else "-"
