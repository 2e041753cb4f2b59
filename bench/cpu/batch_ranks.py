"""Epochs on batches by ranks and threads of one machine: two ranks of one thread beside one rank of one thread.

A rank draws and gathers its batches on threads of its own beside its steps. A rank of one thread that has the machine to
itself thus uses a second core; bound to one core it does not, and that is what two ranks on two cores are compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

from bench.cpu.ranks import trained
from bench.graphs import GENERATED, made_store
from bench.report import MIB, milliseconds, parse, spread, surroundings, table, verdict, write_report

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


def measure(name: str, args: Any) -> dict[str, list[dict[str, Any]]]:
    """Whole runs on a graph with so many training vertices that an epoch has STEPS steps, one of each in turn."""
    made = GENERATED[name].scaled(args.scale)
    train = min(STEPS * BATCH / made.vertices, 0.5)
    store = made_store(name, dataclasses.replace(made, train=train), args.cache)
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in RUNS}
    for number in range(args.rounds):
        for label, (ranks, threads, transport, batches) in RUNS.items():
            print(f"{name}, round {number + 1} of {args.rounds}: {label}", file=sys.stderr)
            run = {"run.ranks": ranks, "run.threads": threads, "run.transport": transport, "run.batches": batches}
            with bound(label == ALONE):
                found = trained(store, {**SETTINGS, "sample.batch": BATCH, **run}, EPOCHS)
            runs[label].append(found)
    return runs


def described(name: str, runs: dict[str, list[dict[str, Any]]]) -> str:
    """A section of the report: seconds of each, how many times as fast it is as one rank, and whether that is enough."""
    times = {label: spread([run["seconds_per_epoch"] for run in found]) for label, found in runs.items()}
    base, free = (times[label]["median"] for label in (ALONE, FREE))
    rows = [
        [label, *milliseconds(of), f"{base / of['median']:.2f}", f"{free / of['median']:.2f}", _peak(runs[label])]
        for label, of in times.items()
    ]
    head = ["ranks x threads", "ms an epoch (median)", "min .. max", f"times {ALONE}", f"times {FREE}"]
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
