"""Configurations in which every pair of values of two settings occurs at least once."""

from __future__ import annotations

import itertools
import random
from typing import Any

AXES: dict[str, tuple[Any, ...]] = {
    "kind": ("gcn", "sage", "mlp"),
    "hidden": ((), (7,), (16, 5), (5, 16), (9, 33, 6)),
    "norm": ("symmetric", "mean"),
    "self_loops": (True, False),
    "bias": (True, False),
    "dropout": (0.0, 0.5),
    "input_dropout": (0.0, 0.4),
    "products": ("auto", "gemm-first", "aggregate-first"),
    "sparse": (False, True),
    "edges": ("random", "directed", "weighted", "sparse"),
    "precision": ("fp32", "fp64", "bf16"),
    "ranks": (1, 2, 3),
    "order": ("random", "permute", "none", "locality"),
    "strategy": ("broadcast", "halo", "slice", "delayed-0", "delayed-2", "delayed-none"),
    "prune": ("auto", "off"),
    "optimizer": ("adam", "adamw", "sgd"),
}
Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def allowed(case: Case) -> bool:
    """Whether the settings go together."""
    if case["kind"] == "sage" and not (case["self_loops"] and case["norm"] == "mean"):
        return False
    return case["ranks"] > 1 or case["strategy"] in ("broadcast", "halo", "slice")


def pairs(case: Case) -> set[Pair]:
    """All pairs of settings of a case."""
    return set(itertools.combinations(case.items(), 2))


def covering_array(at_least: int = 96, seed: int = 8219) -> list[Case]:
    """Return cases that cover every pair which an allowed case has, greedily, and random ones up to `at_least`."""
    rng = random.Random(seed)

    def drawn() -> Case:
        while True:
            case = {name: rng.choice(values) for name, values in AXES.items()}
            if allowed(case):
                return case

    missing = set().union(*(pairs(drawn()) for _ in range(4000)))
    cases = []
    while missing:
        best = max((drawn() for _ in range(60)), key=lambda case: len(pairs(case) & missing))
        if pairs(best) & missing:
            cases.append(best)
            missing -= pairs(best)
    return cases + [drawn() for _ in range(at_least - len(cases))]


def name_of(case: Case) -> str:
    """Return a case in one line, as a key."""
    return " ".join(f"{name}={value}" for name, value in case.items()).replace(", ", ",")
