"""The ways that bench/blocks.py sweeps; what it measures needs minutes."""

from __future__ import annotations

from mggcn.backend.cpu.machine import Caches
from mggcn.backend.cpu.variants import ahead_of
from mggcn.backend.spmm_choice import SpmmChoice
from tests.bench.conftest import BENCH  # noqa: F401  (puts bench/ on the path)

import blocks  # isort: skip


def test_panels_fit_the_cache() -> None:
    """Fails if a panel is swept that products refuse, a possible one is left out, or none fetches ahead."""
    caches = Caches(own_bytes=32_000, shared_bytes=128_000)
    found = blocks.ways(128, 1000, caches)
    assert [name for name in found if "panels" in name] == ["panels of 64 B", "panels of 128 B"]
    assert found["panels of 64 B"] == SpmmChoice("panels", 16, 1, ahead_of(64, 64_000, caches))
    assert found["panels of 64 B"].ahead > 0
    assert [name for name in blocks.ways(32, 1000, Caches(32_000, 10**6)) if "panels" in name] == ["panels of 64 B"]
    plain = [way for name, way in found.items() if "block" in name and "ahead" not in name]
    assert [(way.blocks, way.ahead) for way in plain] == [(count, 0) for count in blocks.COUNTS]
    assert found["1 block, fetched ahead"] == SpmmChoice("rows", 0, 1, ahead_of(512, 512_000, caches))
