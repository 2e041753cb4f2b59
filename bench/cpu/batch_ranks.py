"""Epochs on batches by ranks and threads of one machine: two ranks of one thread beside one rank of one thread.

A rank draws and gathers its batches on threads of its own beside its steps. A rank of one thread that has the machine to
itself thus uses a second core; bound to one core it does not, and that is what two ranks on two cores are compared with.
Batches of half the seeds do not have half the rows, since their neighbourhoods overlap: what a rank computes for them,
beside what one rank alone does, is the most that ranks could gain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.cpu.ranks import trained
from bench.graphs import GENERATED, made_store
from bench.report import MIB, milliseconds, parse, spread, surroundings, table, verdict, write_report
from mggcn.assemble.plan import plan_graph, this_machine
from mggcn.config import Config
from mggcn.config.files import with_settings
from mggcn.graph.store import open_store
from mggcn.planning.batches import mean_stack

GRAPHS = ("arxiv-like", "products-like, 8 % train")
BATCH, STEPS, EPOCHS = 1024, 16, 3
"""Training vertices of a step, steps of an epoch, epochs of a run, whose median counts."""
SETTINGS = {
    "model.kind": "sage",
    "model.aggregator": "mean",
    "model.self_loops": "false",
    "model.hidden": "128,128",
    "sample.fanout": "15,10,5",
}
ALONE, FREE = "1 x 1, one core", "1 x 1"
RUNS: dict[str, tuple[int, int, str, str]] = {
    ALONE: (1, 1, "single", "independent"),
    FREE: (1, 1, "single", "independent"),
    "1 x 2": (1, 2, "single", "independent"),
    "2 x 1, threads, independent": (2, 1, "threads", "independent"),
    "2 x 1, threads, cooperative": (2, 1, "threads", "cooperative"),
    "2 x 1, gloo, independent": (2, 1, "gloo", "independent"),
    "2 x 1, gloo, cooperative": (2, 1, "gloo", "cooperative"),
}
"""Ranks, threads of each, run.transport, run.batches."""
GOAL = 1.5


@contextlib.contextmanager
def bound(one_core: bool) -> Iterator[None]:
    """Bind what is started meanwhile to one of the cores, or leave it all of them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)} if one_core else before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def settings_of(label: str) -> dict[str, Any]:
    """The settings of one of RUNS."""
    ranks, threads, transport, batches = RUNS[label]
    run = {"run.ranks": ranks, "run.threads": threads, "run.transport": transport, "run.batches": batches}
    return {**SETTINGS, "sample.batch": BATCH, **run}


def drawn(store: Path, label: str) -> int:
    """Edges of a rank's step, of batches that are drawn to plan the run: to these its work is in proportion."""
    config = with_settings(Config(), [f"{key}={value}" for key, value in settings_of(label).items()])
    plan, _ = plan_graph(config, open_store(store), this_machine(config))
    if plan.stack is None:
        sys.exit("a run on batches is planned without any")
    return sum(size.edges for size in mean_stack(plan.stack).capacities)


def measure(name: str, args: Any) -> dict[str, list[dict[str, Any]]]:
    """Whole runs on a graph with so many training vertices that an epoch has STEPS steps, one of each in turn."""
    made = GENERATED[name].scaled(args.scale)
    train = min(STEPS * BATCH / made.vertices, 0.5)
    store = made_store(name, dataclasses.replace(made, train=train), args.cache)
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in RUNS}
    edges = {label: drawn(store, label) for label in RUNS}
    for number in range(args.rounds):
        for label in RUNS:
            print(f"{name}, round {number + 1} of {args.rounds}: {label}", file=sys.stderr)
            with bound(label == ALONE):
                found = trained(store, settings_of(label), EPOCHS)
            kept = {key: found[key] for key in ("seconds_per_epoch", "measured_peak_bytes")}
            runs[label].append(kept | {"edges": edges[label]})
    return runs


def described(name: str, runs: dict[str, list[dict[str, Any]]]) -> str:
    """A section of the report: seconds of each, how many times as fast it is as one rank, and whether that is enough."""
    times = {label: spread([run["seconds_per_epoch"] for run in found]) for label, found in runs.items()}
    base, free = (times[label]["median"] for label in (ALONE, FREE))
    edges = {label: found[0]["edges"] for label, found in runs.items()}
    rows = [
        [
            *(label, *milliseconds(of), f"{base / of['median']:.2f}", f"{free / of['median']:.2f}"),
            *(f"{edges[label]:,}", f"{edges[ALONE] / edges[label]:.2f}", _peak(runs[label])),
        ]
        for label, of in times.items()
    ]
    head = ["ranks x threads", "ms an epoch (median)", "min .. max", f"times {ALONE}", f"times {FREE}"]
    head += ["edges of a rank's step", "times fewer"]
    text = f"## {name}\n\n{table([*head, 'peak MiB of a process'], rows)}\n"
    several = [label for label, (ranks, *_) in RUNS.items() if ranks > 1]
    return text + "".join(verdict(f"{label}, over {ALONE}", base / times[label]["median"], GOAL) for label in several)


def _peak(found: list[dict[str, Any]]) -> str:
    return f"{max(run['measured_peak_bytes'] for run in found) / MIB:.0f}"


def main(arguments: list[str] | None = None) -> None:
    args = parse(__doc__, "scale", "rounds", "cache", arguments=arguments)
    record: dict[str, Any] = {"surroundings": surroundings()}
    record["runs"] = {name: measure(name, args) for name in GRAPHS}
    body = (
        f"GraphSAGE (mean) of three layers of width 128, fan-outs 15,10,5, {BATCH:,} seeds a step, {STEPS} steps an epoch; "
        f"seconds are the median of {EPOCHS} epochs of a run, drawing and gathering included.\n\n"
    )
    body += "\n".join(described(name, runs) for name, runs in record["runs"].items())
    write_report("batch-ranks", "Ranks and threads of one machine, on batches", body, record, args.out)


if __name__ == "__main__":
    main()
