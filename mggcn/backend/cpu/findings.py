"""What all ranks of a run have found out about the ways of their sparse products. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from mggcn.backend.cpu.explore import Exploration, Trial
from mggcn.backend.cpu.variants import SpmmChoice, SpmmKey

NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Findings:
    """What all ranks have found: (rank, trial) of every product for which there was more than one way."""

    trials: tuple[tuple[int, Trial], ...]
    cost_s: float
    """Seconds that exploring cost the rank where it cost most."""
    epoch_s: float
    """Seconds of this rank's fastest epoch."""
    untried: int = 0
    """Products of all ranks that nobody knows and that were not begun."""

    @property
    def cost_epochs(self) -> float:
        return self.cost_s / self.epoch_s if self.cost_s else 0.0

    @property
    def cost(self) -> str:
        """The cost in words."""
        seconds = f"{self.cost_s:.1f} s" if self.cost_s >= 1 else f"{1e3 * self.cost_s:.1f} ms"
        return f"tuning cost {seconds}, {self.cost_epochs:.1f} epochs"

    def summary(self, before: Mapping[str, float] = NOTHING) -> dict[str, float]:
        """Return the cost, and of how many products another way than the model's is taken, as result.json holds them.

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
        return {trial.key: way for trial in ordered if (way := trial.kept) is not None}


def findings(ranks: Iterable[dict[str, Any]]) -> Findings:
    """Return the findings of all ranks, from what `found` returned on each, in their order."""
    told = list(ranks)
    dearest = max(told, key=lambda one: one["cost_s"])
    trials = tuple((rank, Trial.of(plain)) for rank, one in enumerate(told) for plain in one["trials"])
    return Findings(trials, dearest["cost_s"], dearest["epoch_s"], sum(one["untried"] for one in told))


def found(exploration: Exploration) -> dict[str, Any]:
    """Return what a rank has found as what JSON holds."""
    trials = [trial.plain() for trial in exploration.trials if len(trial.ways) > 1]
    return {
        "trials": trials,
        "cost_s": exploration.cost_s,
        "epoch_s": exploration.epoch_s,
        "untried": exploration.untried,
    }
