"""Settings of the GPU benchmark's dry runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from bench.gpu.lab import Settings

SCALE = 1e-4


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings of a dry run on emulated kernels, no real graphs, one round."""
    cache = tmp_path_factory.mktemp("graphs")
    return Settings("emulated", SCALE, 1, 120.0, str(cache), "", quick=True)


@pytest.fixture(autouse=True)
def searched() -> Iterator[None]:
    """A Lab takes what is there out of the garbage collector's search: put it back."""
    yield
    gc.unfreeze()
