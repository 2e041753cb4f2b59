"""Training epochs side by side: mggcn by its settings, and other libraries, each in a process of its own, in turn.

All contenders of a case train the same network from the same weights; their losses must agree. Ratios are over the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.cpu import ceilings
from bench.process import Lost, Worker, alternate, for_each, started
from bench.report import MIB, marked, milliseconds, spread, table

OWN = "mggcn"
TOLERANCE, TOLERANCES = 1e-4, {"bf16": 2e-2, "mixed": 2e-2}
COMPARED_EPOCHS = 3
WARM_UP = 2
"""Epochs that are not timed."""
Found = dict[str, Any]
Start = Callable[[str], Worker]
"""Starts a contender under a setting of glibc."""


@dataclass(frozen=True)
class Case:
    """A network on a graph, and goals: how many times faster than DGL and PyG, in bf16 than DGL, share of the bound.

    2x512: two layers, the hidden one 512 wide. `vertices` and `edges`: how many times those of the graph.
    """

    graph: str
    hidden: tuple[int, ...]
    over_dgl: float | None = None
    over_pyg: float | None = None
    bf16_over_dgl: float | None = None
    of_bound: float | None = None
    vertices: float = 1.0
    edges: float = 1.0

    @property
    def name(self) -> str:
        grown = "" if self.edges == 1.0 else f", edges x {self.edges:g}"
        grown += "" if self.vertices == 1.0 else f", vertices x {self.vertices:g}"
        return f"{self.graph} {len(self.hidden) + 1}x{self.hidden[0]}{grown}"


@dataclass(frozen=True)
class Contenders:
    """What starts the contenders of a case; `python` is the interpreter of the other libraries."""

    case: Case
    store: Path
    threads: int
    python: str = ""
    machine: str = "assumed-cpu"

    @property
    def weights(self) -> str:
        """The file of the initial weights, which one of mggcn's contenders writes and the others read."""
        return f"{self.store}-{'-'.join(map(str, self.case.hidden))}.npz"

    def own(self, run: dict[str, Any], *, keep: bool = False, **more: Any) -> Start:
        job = {"store": str(self.store), "hidden": self.case.hidden, "run": run, "machine": self.machine, **more}
        job["weights"] = self.weights if keep else None
        return lambda malloc: Worker("bench.worker", malloc, self.threads, job)

    def peer(self, library: str, **more: Any) -> Start:
        job = {"store": str(self.store), "hidden": self.case.hidden, "weights": self.weights, **more}
        job["classes"] = classes_of(self.store)
        return lambda malloc: Worker(f"bench.peers.worker_{library}", malloc, self.threads, job, self.python)


def classes_of(store: Path) -> int:
    """Columns of the last layer: as the store says, or one more than the largest label."""
    import numpy as np

    known = json.loads((store / "meta.json").read_text()).get("num_classes")
    return int(known or np.load(store / "labels.npy").max() + 1)


def extents(store: Path) -> tuple[int, int]:
    """Vertices and nonzeros, without self-loops."""
    import numpy as np

    arrays = (np.load(store / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices"))
    indptr, indices = (int(array.size) for array in arrays)
    return indptr - 1, indices


def compare(starts: dict[str, Start], rounds: int, malloc: str = "tuned", *, alone: bool = False) -> Found:
    """Start every contender, alternate their epochs, end them; `alone`: one after the other.

    One that cannot start, fails or dies is left out.
    """
    found: Found = {"malloc": malloc, "alone": alone, "left_out": {}}
    for group in [{name: start} for name, start in starts.items()] if alone else [starts]:
        lost: Lost = {}
        with started({name: partial(start, malloc) for name, start in group.items()}, lost) as workers:
            for_each(workers, lost, lambda _, worker: worker.ask("forget"))
            epochs = alternate(workers, WARM_UP + rounds, lost)
            merge(found, "prepared", {name: worker.ready for name, worker in workers.items()})
        merge(found, "left_out", lost)
        merge(found, "epochs", epochs)
    epochs = found["epochs"]
    timed = {name: [run["seconds"] for run in runs[WARM_UP:]] for name, runs in epochs.items()}
    found["seconds"] = {name: spread(values) for name, values in timed.items()}
    found["peak_bytes"] = {name: runs[-1]["memory"]["VmHWM"] for name, runs in epochs.items()}
    return found | {"loss_error": loss_errors(epochs)}


def merge(found: Found, key: str, more: Found) -> None:
    found[key] = found.get(key, {}) | more


def loss_errors(epochs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Largest relative difference of each contender's loss from the first one's over the first epochs; NaN stays."""
    losses = {name: [run["loss"] for run in runs[:COMPARED_EPOCHS]] for name, runs in epochs.items()}
    base = next(iter(losses.values()), [])
    return {name: worst([a / b - 1 for a, b in zip(other, base, strict=True)]) for name, other in losses.items()}


def worst(differences: list[float]) -> float:
    """The largest of the differences; NaN if one is."""
    return next((d for d in differences if d != d), max(map(abs, differences), default=0.0))


def wrong(results: list[Found]) -> list[str]:
    """Contenders whose losses are not those of the first."""
    return [
        f"{found['case']}, {name}: losses differ by {error:.1e}"
        for found in results
        for name, error in found["loss_error"].items()
        if not error <= found.get("tolerance", TOLERANCES.get(found["prepared"][name].get("precision"), TOLERANCE))
    ]


def bound_of(found: Found, name: str, figures: Found | None) -> dict[str, float] | None:
    """The bounds of one of mggcn's rows in float32: the ceilings are of nothing else."""
    ready = found["prepared"][name]
    return ceilings.bounds(figures, ready["work"]) if figures and ready.get("precision") == "fp32" else None


HEAD = ("contender", "ms/epoch (median)", "min .. max", "CPU ms, least", "time / first", "of the bound", "in cache")
HEAD += ("peak MiB", "without imports", "planned MiB", "first's peak / this", "plan s", "set-up s", "loss apart")


def rows_of(found: Found, threads: int, figures: Found | None = None) -> list[list[Any]]:
    """The table's lines of one comparison."""
    lines: list[list[Any]] = []
    first = next(iter(found["seconds"]), "")
    for name, seconds in found["seconds"].items():
        ready, peak = found["prepared"][name], found["peak_bytes"][name]
        bound = bound_of(found, name, figures)
        cpu = min(run["cpu_seconds"] for run in found["epochs"][name][WARM_UP:]) / threads
        own = "planned_bytes" in ready
        beside = [run.get("beside", 0.0) for run in found["epochs"][name][WARM_UP:]]
        lines.append(
            [
                marked(name + (" (alone)" if found["alone"] else ""), beside),
                *milliseconds(seconds),
                f"{1e3 * cpu:.1f}",
                f"{seconds['median'] / found['seconds'][first]['median']:.2f}",
                *(f"{bound[key] / seconds['median']:.2f}" if bound else "" for key in ("total", "cached")),
                f"{peak / MIB:.0f}",
                f"{(peak - ready['imported']) / MIB:.0f}",
                f"{ready['planned_bytes'] / MIB:.0f}" if own else "",
                f"{found['peak_bytes'][first] / peak:.2f}",
                *(f"{ready[key]:.2f}" if own else "" for key in ("plan_seconds", "rank_seconds")),
                f"{found['loss_error'][name]:.0e}",
            ]
        )
    return lines


def described(found: Found, threads: int, figures: Found | None = None) -> str:
    """A comparison's table, and who is not in it."""
    text = table(HEAD, lines) if (lines := rows_of(found, threads, figures)) else ""
    return text + "".join(f"\nLeft out: {name}: {why}.\n" for name, why in found["left_out"].items())
