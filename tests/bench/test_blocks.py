"""The ways that bench/blocks.py sweeps; what it measures needs minutes."""

from __future__ import annotations

from mggcn.backend.cpu_choice import SpmmChoice
from tests.bench.conftest import BENCH  # noqa: F401  (puts bench/ on the path)

import blocks  # isort: skip


def test_panels_fit_the_cache() -> None:
    """Fails if a panel is swept that products refuse, or one that they do not is left out."""
    found = blocks.ways(128, 1000, 128_000)
    assert [name for name in found if "panels" in name] == ["panels of 64 B", "panels of 128 B"]
    assert found["panels of 64 B"] == SpmmChoice("panels", 16)
    assert [name for name in blocks.ways(32, 1000, 10**6) if "panels" in name] == ["panels of 64 B"]
    assert [way.blocks for name, way in found.items() if "block" in name] == list(blocks.COUNTS)
