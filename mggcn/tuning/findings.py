"""What all ranks of a run have found out about the variants of their sparse products, and as text. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey
from mggcn.planning.text import table
from mggcn.tuning.exploration import Exploration, Trial

COLUMNS: Final = ("rank", "rows", "columns", "nonzeros", "width", "bytes", "the model's variant", "taken", "gain")


@dataclass(frozen=True, slots=True)
class Findings:
    """What all ranks have found: (rank, trial) of every product that was tried."""

    trials: tuple[tuple[int, Trial], ...]
    cost_s: float
    """Seconds that exploring cost the rank where it cost most."""
    epoch_s: float
    """Seconds of that rank's fastest epoch."""

    def summary(self, before: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the cost, and of how many products another variant than the model's is taken, as result.json holds them.

        products: how many were tried. unfinished: those that are left open. before: what the same run, interrupted since,
        had found; what it had left open is tried again.
        """
        new = {
            "seconds": self.cost_s,
            "epochs": self.cost_s / self.epoch_s if self.cost_s else 0.0,
            "products": len(self.trials),
            "unfinished": sum(not trial.known for _, trial in self.trials),
            "beaten": sum(trial.beaten for _, trial in self.trials),
        }
        if not before:
            return new
        both = {name: before[name] + new[name] for name in ("seconds", "epochs", "beaten")}
        return new | both | {"products": before["products"] - before["unfinished"] + new["products"]}

    def kept(self) -> dict[SpmmKey, SpmmChoice]:
        """Return what a table gets. Of products that look alike, on several ranks, the one that gained most decides."""
        ordered = sorted((trial for _, trial in self.trials if trial.known), key=lambda trial: trial.gain)
        return {trial.key: trial.winner for trial in ordered}

    @property
    def text(self) -> str:
        """What exploring cost, and how many products take another variant than the model's, in words."""
        if not self.trials:
            return (
                "no variant was left to try: all sparse products were measured before, have one, or have too few calls"
            )
        found = self.summary()
        seconds = f"{self.cost_s:.1f} s" if self.cost_s >= 1 else f"{1e3 * self.cost_s:.1f} ms"
        left = f", {found['unfinished']} left open" if found["unfinished"] else ""
        return (
            f"trying variants cost {seconds}, {found['epochs']:.1f} epochs: {found['beaten']} of {found['products']} "
            f"sparse products take another one than the model's{left}"
        )

    def lines(self) -> list[str]:
        """Return the table of what was timed, every variant's seconds, and the model's reasons."""
        rows, timed = [], []
        for number, (rank, trial) in enumerate(self.trials, start=1):
            key, model = trial.key, trial.variants[0]
            taken = trial.variants[trial.fastest].text if trial.beaten else "the same"
            verdict = f"{trial.gain:.2f}" + (", left open" if not trial.known else ", kept" if trial.beaten else "")
            sizes = f"{key.rows:,}", f"{key.columns:,}", f"{key.nnz:,}", key.width, key.item
            rows.append((rank, *sizes, model.text, taken, verdict))
            called = [
                f"{variant.text} {1e3 * trial.least_s(k):.2f} ({len(trial.seconds[k])})"
                for k, variant in enumerate(trial.variants)
                if trial.seconds[k]
            ]
            timed.append(f"  {number}: {'; '.join(called)}; the model: {model.reason}")
        return [*table(COLUMNS, rows), "least ms of each variant (and calls), by line of the table:", *timed]


def to_json(exploration: Exploration) -> str:
    """Return what a rank has found, for `from_json` on another."""
    trials = [dataclasses.asdict(trial) for trial in exploration.trials]
    return json.dumps({"trials": trials, "cost_s": exploration.cost_s, "epoch_s": exploration.epoch_s})


def from_json(texts: Iterable[str]) -> Findings:
    """Return the findings of all ranks, from what `to_json` returned on each, in their order."""
    ranks = [json.loads(text) for text in texts]

    def trial(plain: dict[str, Any]) -> Trial:
        variants = tuple(SpmmChoice(**variant) for variant in plain["variants"])
        return Trial(**plain | {"key": SpmmKey(**plain["key"]), "variants": variants})

    trials = [(rank, trial(plain)) for rank, found in enumerate(ranks) for plain in found["trials"]]
    dearest = max(ranks, key=lambda found: float(found["cost_s"]))
    return Findings(tuple(trials), dearest["cost_s"], dearest["epoch_s"])
