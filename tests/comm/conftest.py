from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comm.pool import GlooPool
from tests.comm.worlds import Gloo, Nccl, SingleWorld, Threads, World


@pytest.fixture(scope="session")
def gloo_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    """Four processes for all gloo tests; a test that fails leaves fresh ones to the next."""
    folder: Path = tmp_path_factory.mktemp("gloo")
    pool = GlooPool(4, folder)
    yield pool
    pool.close()


ALL_WORLDS = (
    "single-1",
    "threads-1",
    "threads-2",
    "threads-3",
    "threads-5",
    "gloo-2",
    "gloo-3",
    "nccl-1",
    "nccl-2",
    "nccl-3",
)


def make_world(name: str, request: pytest.FixtureRequest, *, lazy: bool = False) -> World:
    kind, size = name.split("-")
    if kind == "single":
        return SingleWorld()
    if kind == "threads":
        return Threads(int(size))
    if kind == "nccl":
        return Nccl(int(size), lazy=lazy)
    return Gloo(request.getfixturevalue("gloo_pool"), int(size))


@pytest.fixture(params=ALL_WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    return make_world(request.param, request)


@pytest.fixture(params=ALL_WORLDS)
def failing_world(request: pytest.FixtureRequest) -> World:
    """Where a wait of the host for its device would not end: cases synchronize instead, as ranks on GPUs do."""
    return make_world(request.param, request, lazy=True)


@pytest.fixture(params=[name for name in ALL_WORLDS if not name.endswith("-1")])
def world_of_many(request: pytest.FixtureRequest) -> World:
    """As `failing_world`, of several ranks."""
    return make_world(request.param, request, lazy=True)
