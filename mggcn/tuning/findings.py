"""What all ranks of a run have found out about the variants of their sparse products, and as text. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey
from mggcn.tuning.exploration import Exploration, Trial


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of all ranks: (rank, trial) of every product that was tried."""

    trials: tuple[tuple[int, Trial], ...]
    cost_s: float
    """Seconds that exploring cost the rank where it cost most."""
    epoch_s: float
    """Seconds of that rank's fastest epoch."""

    def summary(self, before: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the cost, and how many products take a variant other than the model's, for result.json.

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
        """Return the choices to record. Of equal products on several ranks, the one that gained most decides."""
        ordered = sorted((trial for _, trial in self.trials if trial.known), key=lambda trial: trial.gain)
        return {trial.key: trial.winner for trial in ordered}

    @property
    def text(self) -> str:
        """Describe in words the cost of exploring, and how many products take a variant other than the model's."""
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
        """Return a line for each product: what the model chose and why, the least ms of each variant (and its calls), and
        which one is taken.
        """
        found = []
        for rank, trial in self.trials:
            key, model = trial.key, trial.variants[0]
            timed = zip(trial.variants, trial.seconds, strict=True)
            called = "; ".join(f"{variant.text} {1e3 * min(s):.2f} ({len(s)})" for variant, s in timed if s)
            found.append(
                f"rank {rank}: {key.rows:,} x {key.columns:,}, {key.nnz:,} nonzeros, width {key.width}, {key.item} bytes; "
                f"the model: {model.text}, {model.reason}; ms: {called}; "
                + (f"taken: {trial.winner.text}, {trial.winner.reason}" if trial.known else "left open")
            )
        return found


def to_json(exploration: Exploration) -> str:
    """Return a rank's findings as JSON, for `from_json` on another rank."""
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
