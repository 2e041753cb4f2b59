"""Fixtures that every room uses, and what lets the tests run in a checkout that is not installed."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mggcn import native
from mggcn.host import user_cache
from tests import forked
from tests.covering import drawn, everything_runs, mark_full
from tests.machines import keep_recorded

native.limit_spinning()  # processes that share the cores: before any test loads torch

NEEDS = {
    "torch_geometric": [
        *("graph/test_convert.py", "graph/test_join.py", "graph/test_relations.py", "graph/sources/test_tables.py"),
        *("interop/test_beside_pyg.py", "interop/test_pyg_module.py", "interop/test_weights.py", "api/test_trainer.py"),
    ],
    "matplotlib": ["report/test_breakdown.py", "report/test_gantt.py", "report/test_plots.py"],
    "tensorboard": ["train/test_tensorboard.py"],
    "shtab": ["cli/test_completion.py"],
    "sklearn": ["train/test_class_scores.py", "train/test_metrics.py"],
    "ogb": ["train/test_link_metrics.py"],
}
"""Test files that compare with a package which the GPU tests (-m cuda) do without."""
MISSING = {name: files for name, files in NEEDS.items() if importlib.util.find_spec(name) is None}
collect_ignore = [file for files in MISSING.values() for file in files]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the processor and the kernels that run on it, and say which test files are left out, and why."""
    from mggcn.backend.cpu.machine import has_amx, processor_name

    here = f"processor: {processor_name()}, {'has AMX' if has_amx() else 'no AMX'}"
    if not config.option.collectonly:
        here += f"; kernels: {native.sets_in_use()}, of {', '.join(native.dense_isas())}"
    return [here, *(f"{name} is not installed: without {', '.join(files)}" for name, files in MISSING.items())]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without pytest-timeout, its setting in pyproject.toml means nothing rather than being an error."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take; needs pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """Compile kernels to run if mggcn is not installed; heed Ctrl-C; name the marker of pytest-timeout if it is missing.

    Garbage is not collected before the tests are: what imports leave lasts, and looking for it takes a fifth of their time.
    """
    gc.disable()
    if not config.option.collectonly:
        native.installed_or_built()
        cache = tempfile.TemporaryDirectory(prefix="mggcn-tests-")
        config.add_cleanup(cache.cleanup)
        keep_recorded(Path(cache.name))
        forked.install()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell: tests interrupt commands
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: seconds this test may take; needs pytest-timeout")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make test-all` the cases that no covering array needs."""
    mark_full(items)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name torch's types, whichever folders are collected: a test has one id, which also seeds what it draws."""
    if (type(val).__module__, type(val).__name__) != ("torch", "dtype"):
        return None
    from tests.backend.cases import type_name

    return type_name(val)  # type: ignore[arg-type]


def pytest_collection_finish() -> None:
    """Take what collecting made out of the garbage collector's sight: tests that collect take a third of a second less."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _nothing_found_before() -> None:
    """Have each test find out for itself: what runs keep of a graph is known by its digest, and tests share graphs."""
    for path in user_cache().glob("partitions/*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@functools.cache
def missing_gpu() -> str:
    """Return what running on a GPU lacks here; "" if nothing."""
    from mggcn.backend.cuda.presence import missing_for_cuda

    return missing_for_cuda()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, and say what is missing."""
    if item.get_closest_marker("cuda") or item.get_closest_marker("nccl"):
        if missing_gpu():
            pytest.skip(missing_gpu())


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Callable[[Iterable[Any], int], list[Any]]:
    """sample(cases, count): a part that each test case draws for itself, twice as large under `make test-all`; with
    -m "" all cases.
    """

    def sampled(cases: Iterable[Any], count: int) -> list[Any]:
        everything = "not slow" not in request.config.getoption("markexpr")
        listed = list(cases)
        count *= len(listed) if everything else 2 if everything_runs(request.config) else 1
        return drawn(listed, count, request.node.nodeid)

    return sampled


@pytest.fixture
def part(request: pytest.FixtureRequest) -> list[str]:
    """Arguments of a program that checks many things: all under `make test-all`, else ten of them."""
    return [] if everything_runs(request.config) else ["10"]


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of the real graphs: $MGGCN_DATA, build/data, or shared/data beside the repository."""
    checkout = Path(__file__).resolve().parents[1]
    places = (checkout / "build" / "data", checkout.parent / "shared" / "data")
    default = next((place for place in places if (place / "cora" / "meta.json").is_file()), places[-1])
    root = Path(os.environ.get("MGGCN_DATA", default))
    if not (root / "cora" / "meta.json").is_file():
        reason = f"no real graphs in {root}; set MGGCN_DATA to a folder that holds cora/, amazon_photo/, ..."
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return root
