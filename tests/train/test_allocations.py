"""From the third epoch on, training asks nobody for more than 64 KiB at a time: all large things were made before.

An evaluation by blocks holds no more than its region of the plan.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from mggcn.assemble.rank import Rank
from mggcn.backend.cpu.backend import CpuBackend
from tests.feed.test_sampled import sampled
from tests.graphs import on_ranks
from tests.model.test_rgcn import typed_graph

HERE = Path(__file__).resolve().parent
BOUND = 64 << 10
FAST = ["dense-input-dropout", "batches"]
FULL = ["two-ranks-cd-2", "two-ranks-shared-batches", "batches-rgcn", "batches-stored"]
EVALUATIONS = ["evaluation-gat", "evaluation-rgcn", "evaluation-permuted"]
SLOW = [
    "batch-norm",
    "two-ranks-slice",
    "batches-sparse-bf16",
    "gat",
    "gatv2",
    "two-ranks-rgcn",
    "batches-sparse-dropout",
    "batches-full",
]
SLOW += ["bf16", "two-ranks-gat-cd-0", "batches-gat", "two-ranks-batches"]
SLOW += ["batches-fp64", "aggregate-first", "layer-norm-gin"]
SLOW += ["dense", "sparse-input-dropout", "two-ranks-halo", "two-ranks-dropout", "two-ranks-batch-norm-cd-0"]
SLOW += ["dropout", "sparse", "mlp", "sgd", "two-ranks", "two-ranks-bf16", "two-ranks-cd-0"]


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled malloc watcher."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the malloc watcher needs Linux and a C compiler `cc`")
    library = tmp_path_factory.mktemp("watcher") / "watch_malloc.so"
    options = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
    command = [compiler, *options, "-o", str(library), str(HERE / "watch_malloc.c")]
    subprocess.run(command, check=True)
    return library


Found = tuple[dict[str, Any], str]


def watched(watcher: Path, *arguments: str) -> Found:
    """Train cases in a process of their own: what the worker found of each, and the backtraces of large blocks."""
    # PYTHONMALLOC: else Python takes arenas of 1 MiB for small objects and hides who asked for how much.
    env = {**os.environ, "LD_PRELOAD": str(watcher), "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-m", "tests.train.allocation_worker", *arguments]
    done = subprocess.run(
        command, env=env, cwd=HERE.parents[1], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def trained(watcher: Path) -> Callable[..., Found]:
    """All cases of a list in one process, once."""
    return functools.cache(functools.partial(watched, watcher))


@pytest.mark.parametrize(
    "case",
    [
        *FAST,
        *(pytest.param(case, marks=pytest.mark.full) for case in FULL),
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_epochs_allocate_nothing_large(trained: Callable[..., Found], case: str) -> None:
    """Fails on an op with a temporary of the size of a block of rows, and on a library that packs into fresh memory."""
    results, stderr = trained(*next(cases for cases in (FAST, FULL, SLOW) if case in cases))
    found = results[case]
    assert found["blocks"] > 0, "the watcher saw nothing at all: it was not preloaded"
    assert found["largest"] <= BOUND, f"{case}: {found['largest']} bytes; by op: {found['ops']}\n{stderr[:6000]}"


@pytest.mark.parametrize("case", EVALUATIONS)
def test_an_evaluation_by_blocks_holds_what_is_planned(trained: Callable[..., Found], case: str) -> None:
    """Fails if outputs of stages, scores or a chunk take more memory of any library than their region of the plan."""
    found = trained(*EVALUATIONS)[0][case]
    assert 0.8 * found["planned"] < found["most"] <= found["planned"] + BOUND, found


@pytest.mark.full
def test_a_tensor_beyond_the_plan_of_an_evaluation_is_caught(watcher: Path) -> None:
    """Fails if memory of torch that a chunk takes is not seen."""
    found = watched(watcher, "evaluation-permuted", "--plant")[0]["evaluation-permuted"]
    assert found["most"] > found["planned"] + (2 << 20)


@pytest.mark.full
def test_a_planted_temporary_is_caught(watcher: Path) -> None:
    """Fails if the watcher or the naming of the guilty op has gone blind."""
    results, stderr = watched(watcher, "two-ranks", "--plant")
    for found in results.values():
        assert found["largest"] >= 1 << 20
        assert found["ops"]["greedy"] >= 1 << 20
    assert "called from" in stderr


@pytest.mark.parametrize("batches", ["independent", "cooperative"])
def test_products_do_not_become_more_with_steps(batches: Literal["independent", "cooperative"]) -> None:
    """Fails if something is recorded for the sizes of every batch, which the largest block of a step does not show."""
    config = sampled(1 + (batches == "cooperative"), {"kind": "rgcn", "hidden": (8,)}, (3, 2), batch=9)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, batches=batches))

    def products(rank: Rank) -> list[int]:
        found = []
        for epoch in range(4):
            rank.trainer.step(epoch)
            backend = rank.trainer.runtime.backend
            assert isinstance(backend, CpuBackend)
            found.append(len(backend.sparse_products.products))
        assert rank.trainer.steps > 2
        return found

    for found in on_ranks(config, typed_graph("random"), products):
        assert found[1] == found[-1] > 0
