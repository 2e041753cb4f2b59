"""How bench/precisions.py pairs its runs; what it measures needs real graphs and minutes."""

from __future__ import annotations

from typing import Any

from tests.bench.conftest import BENCH  # noqa: F401  (puts bench/ on the path)

import precisions  # isort: skip


def found(mixed: float) -> dict[str, Any]:
    tests = {"fp32": (0.8, 0.9), "mixed": (0.8 + mixed, 0.9 + mixed), "bf16": (0.7, 0.95)}
    runs = {p: [{"test": test, "seconds": 0.002 * k} for k, test in enumerate(t, 1)] for p, t in tests.items()}
    sent = {p: dict.fromkeys(precisions.STRATEGIES, n) for p, n in (("fp32", 2048), ("mixed", 1024), ("bf16", 1000))}
    return {"graph": "some", "runs": runs, "sent": sent}


def test_differences_are_those_of_pairs() -> None:
    """Fails if a seed is compared with another one, or a difference beyond the goal passes."""
    text, missed = precisions.describe([found(0.002)])
    assert missed == []
    assert "within 0.3 points: met" in text
    assert "| some | mixed | 2 | 85.20 +- 5.00 | +0.20 +- 0.00 | +0.20 .. +0.20 | 3.00 |" in text
    assert "| some | bf16 | 2 | 82.50 +- 12.50 | -2.50 +- 7.50 | -10.00 .. +5.00 | 3.00 |" in text
    assert "| some | halo | 2,048 | 1,024 | 1,000 |" in text
    text, missed = precisions.describe([found(-0.004)])
    assert missed == ["some"]
    assert "missed on some" in text
