"""What all ranks of a run have found out about the variants of their sparse products, and as text. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey
from mggcn.planning.text import table
from mggcn.tuning.exploration import Exploration, Trial

SIZES: Final = ("rows", "columns", "nonzeros", "width", "bytes")
COLUMNS: Final = ("rank", *SIZES, "the model's variant", "ms", "fastest", "ms", "gain")


@dataclass(frozen=True, slots=True)
class Findings:
    """What all ranks have found: (rank, trial) of every product for which there was more than one variant."""

    trials: tuple[tuple[int, Trial], ...]
    cost_s: float
    """Seconds that exploring cost the rank where it cost most."""
    epoch_s: float
    """Seconds of that rank's fastest epoch."""
    untried: int = 0
    """Products, over all ranks, without a measured variant that were never timed."""

    @property
    def cost_epochs(self) -> float:
        return self.cost_s / self.epoch_s if self.cost_s else 0.0

    def summary(self, before: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the cost, and of how many products another variant than the model's is taken, as result.json holds them.

        products: how many were tried. unfinished: those that are left open. before: what the same run, interrupted since,
        had found; what it had left open is tried again.
        """
        new = {
            "seconds": self.cost_s,
            "epochs": self.cost_epochs,
            "products": len(self.trials),
            "unfinished": sum(trial.kept is None for _, trial in self.trials),
            "beaten": sum(trial.beaten for _, trial in self.trials),
        }
        if not before:
            return new
        both = {name: before[name] + new[name] for name in ("seconds", "epochs", "beaten")}
        return new | both | {"products": before["products"] - before["unfinished"] + new["products"]}

    def kept(self) -> dict[SpmmKey, SpmmChoice]:
        """Return what a table gets. Of products that look alike, on several ranks, the one that gained most decides."""
        ordered = sorted((trial for _, trial in self.trials), key=lambda trial: trial.gain)
        return {trial.key: variant for trial in ordered if (variant := trial.kept) is not None}

    @property
    def text(self) -> str:
        """What exploring cost, and how many products take another variant than the model's, in words."""
        if not self.trials and self.untried:
            return "tuning has tried nothing: the epochs were too few"
        if not self.trials:
            return "nothing was left to tune: all sparse products of these epochs were measured before, or have one variant"
        found = self.summary()
        seconds = f"{self.cost_s:.1f} s" if self.cost_s >= 1 else f"{1e3 * self.cost_s:.1f} ms"
        return (
            f"tuning cost {seconds}, {self.cost_epochs:.1f} epochs: {found['beaten']} of {found['products']} sparse "
            "products take another variant than the model's"
            + (f", {found['unfinished']} left open" if found["unfinished"] else "")
        )

    def lines(self) -> list[str]:
        """Return the table of what was timed, every variant's seconds, and the model's reasons."""
        rows, timed = [], []
        reasons: dict[str, None] = {}
        for number, (rank, trial) in enumerate(self.trials, start=1):
            key, model = trial.key, trial.variants[0]
            sizes = (f"{key.rows:,}", f"{key.columns:,}", f"{key.nnz:,}", key.width, key.item)
            fastest = trial.winner.text if trial.beaten else "the same"
            verdict = ", left open" if trial.kept is None else ", kept" if trial.beaten else ""
            seconds = (_ms(trial, 0), fastest, _ms(trial, trial.fastest), f"{trial.gain:.2f}{verdict}")
            rows.append((rank, *sizes, model.text, *seconds))
            called = [
                f"{variant.text} {_ms(trial, k)} ({len(trial.seconds[k])})"
                for k, variant in enumerate(trial.variants)
                if trial.seconds[k]
            ]
            timed.append(f"  {number}: {'; '.join(called)}")
            reasons[f"  {model.text} (width {key.width}): {model.reason}"] = None
        return [
            *table(COLUMNS, rows),
            "least ms of each variant, by line of the table:",
            *timed,
            "why the model chose:",
            *reasons,
        ]


def _ms(trial: Trial, variant: int) -> str:
    return f"{1e3 * trial.least_s(variant):.2f}" if trial.seconds[variant] else "-"


def to_json(exploration: Exploration) -> str:
    """Return what a rank has found, for `from_json` on another."""
    trials = [dataclasses.asdict(trial) for trial in exploration.trials if len(trial.variants) > 1]
    plain = [{name: trial[name] for name in ("key", "variants", "seconds", "stopped")} for trial in trials]
    return json.dumps(
        {"trials": plain, "cost_s": exploration.cost_s, "epoch_s": exploration.epoch_s, "untried": exploration.untried}
    )


def from_json(texts: Iterable[str]) -> Findings:
    """Return the findings of all ranks, from what `to_json` returned on each, in their order."""
    ranks = [json.loads(text) for text in texts]
    trials = [
        (rank, Trial(SpmmKey(**t["key"]), tuple(SpmmChoice(**v) for v in t["variants"]), t["seconds"], t["stopped"]))
        for rank, found in enumerate(ranks)
        for t in found["trials"]
    ]
    dearest = max(ranks, key=lambda found: float(found["cost_s"]))
    untried = sum(found["untried"] for found in ranks)
    return Findings(tuple(trials), dearest["cost_s"], dearest["epoch_s"], untried)
