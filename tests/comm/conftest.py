from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comm.pool import GlooPool
from tests.comm.worlds import Gloo, Nccl, SingleWorld, Store, Threads, World


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
    "store-1",
    "store-3",
    "nccl-1",
    "nccl-2",
    "nccl-3",
)


def make_world(name: str, request: pytest.FixtureRequest) -> World:
    kind, size = name.split("-")
    if kind == "single":
        return SingleWorld()
    if kind == "threads":
        return Threads(int(size))
    if kind == "store":
        return Store(int(size))
    if kind == "nccl":
        return Nccl(int(size))
    return Gloo(request.getfixturevalue("gloo_pool"), int(size))


@pytest.fixture(params=ALL_WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    return make_world(request.param, request)


@pytest.fixture(params=[name for name in ALL_WORLDS if not name.endswith("-1")])
def world_of_many(request: pytest.FixtureRequest) -> World:
    return make_world(request.param, request)


@pytest.fixture(params=[name for name in ALL_WORLDS if not name.startswith("store")])
def world_of_buffers(request: pytest.FixtureRequest) -> World:
    """All but the store, which makes copies of its small messages."""
    return make_world(request.param, request)
