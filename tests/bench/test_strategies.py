"""How bench/strategies.py judges predictions; what it measures needs ranks and minutes."""

from __future__ import annotations

from typing import Any

from tests.bench.conftest import BENCH  # noqa: F401  (puts bench/ on the path)

import strategies  # isort: skip


def test_pairs_in_the_wrong_order_are_counted() -> None:
    """Fails if a pair within 20 % is judged, or one beyond it is not."""
    measured = {"a": 1.0, "b": 1.1, "c": 2.0}
    assert strategies.agreement(measured, {"a": 3.0, "b": 2.0, "c": 4.0}) == (2, [])
    apart, wrong = strategies.agreement(measured, {"a": 3.0, "b": 5.0, "c": 4.0})
    assert apart == 2
    assert wrong == ["c is slower than b: 1.82 times"]


def test_configurations() -> None:
    """Fails if a strategy, an order or a delay is left out."""
    found = strategies.configurations(["halo", "delayed"], ["random", "none"])
    assert list(found) == ["halo random", "halo none", "delayed none", "delayed 0", "delayed 5"]
    assert found["delayed 5"] == {"strategy": "delayed", "delay": "5"}


def result(sent: float) -> dict[str, Any]:
    measured = {"halo random": {"median": 0.2, "seconds": [0.1, 0.3], "bytes_sent": [sent], "planned_bytes": [100]}}
    parts = {"sparse": 0.1, "messages": 0.0}
    predicted = {"halo random": {"seconds": 0.1, "parts": parts, "link_s": 0.0}}
    return {"graph": "some", "ranks": 2, "measured": measured, "predicted": predicted}


def test_the_report_says_what_differs() -> None:
    """Fails if bytes that differ from the plan are called planned, or figures land in other columns."""
    text, failures = strategies.describe([result(100.0)])
    assert failures == 0
    assert "| halo random | 200.0 | 100.0 .. 300.0 | 100.0 | 0.50 | 100 | 100 | sparse 100.0 |" in text
    assert "Bytes as planned" in text
    assert "Bytes NOT as planned" in strategies.describe([result(104.0)])[0]
