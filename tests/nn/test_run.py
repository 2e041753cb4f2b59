"""Ranks of every kind run a function of one's own, and its failures come back."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mggcn.errors import CommError, ConfigError, GraphError
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.nn import PartitionedGraph, aggregate, run
from tests.nn.test_aggregate import graph_of

REPOSITORY = Path(__file__).resolve().parents[2]


def sums(part: PartitionedGraph, width: int) -> tuple[int, float, bool]:
    """Something that needs all ranks: picklable, for ranks that are processes."""
    x = torch.ones(part.num_rows, width, dtype=part.dtype, requires_grad=True)
    aggregate(x, part).sum().backward()
    assert x.grad is not None
    return part.rank, part.total(x.grad.sum()).item(), torch.autograd.is_multithreading_enabled()


def fail(part: PartitionedGraph) -> None:
    if part.rank == 1:
        raise ValueError("the second rank's own mistake")
    part.total(1.0)


def leave(part: PartitionedGraph) -> None:
    if part.rank == 1:
        os._exit(7)
    part.total(1.0)


def leave_in_silence(part: PartitionedGraph) -> None:
    os._exit(0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_threads(ranks: int) -> None:
    """Fails if threads get parts of other ranks, or the caller's torch settings are left changed."""
    before = torch.get_num_threads()
    graph = graph_of("random")
    found = run(functools.partial(sums, width=3), graph, ranks=ranks, precision="fp64", threads=1)
    assert found == [(rank, 3.0 * graph.num_edges, False) for rank in range(ranks)]
    assert torch.get_num_threads() == before
    assert torch.autograd.is_multithreading_enabled()


def tensors(part: PartitionedGraph, width: int) -> dict[str, Any]:
    rows = torch.ones(300_000)[::2]
    return {"sums": sums(part, width), "gathered": part.gather(part.ids), "total": part.total(1.0), "rows": rows}


@pytest.mark.parametrize("transport", ["threads", pytest.param("gloo", marks=pytest.mark.full)])
def test_tensors_come_back(transport: str, tmp_path: Path) -> None:
    """Fails if ranks do not come up with their parts of a store, or what one returns is gone with its process."""
    graph = graph_of("weighted")
    wanted = 2 * float(graph.adj.values.array().sum())  # type: ignore[union-attr]
    write_store(graph, tmp_path / "store")
    store, body = open_store(tmp_path / "store"), functools.partial(tensors, width=2)
    for rank, found in enumerate(run(body, store, ranks=2, transport=transport, precision="fp64", threads=1)):
        assert found["sums"][:2] == (rank, pytest.approx(wanted, rel=1e-5))
        assert found["gathered"].tolist() == list(range(37))
        assert found["total"].item() == 2
        assert found["rows"].sum().item() == 150_000
        assert transport == "threads" or found["rows"].untyped_storage().nbytes() == 600_000


def returns_what_stays(part: PartitionedGraph) -> Any:
    return lambda: part


@pytest.mark.slow
def test_results_that_cannot_travel_are_refused() -> None:
    """Fails if the rank ends in an error of pickle's."""
    with pytest.raises(ConfigError, match=r"body runs in rank processes, .* picklable"):
        run(returns_what_stays, graph_of("random"), ranks=2, transport="gloo", threads=1, timeout_s=60)


def one_goes_home(part: PartitionedGraph) -> None:
    if part.rank == 0:
        part.total(1.0)


def one_is_late(part: PartitionedGraph) -> None:
    if part.rank == 1:
        time.sleep(5)
    part.total(1.0)


@pytest.mark.parametrize(
    ("body", "transport", "timeout_s", "message"),
    [
        (one_goes_home, "threads", 600.0, r"rank 0 waits in call 1 .* for rank 1, which ended without"),
        (one_is_late, "threads", 0.5, r"rank 0 waited 0\.5 s for rank 1 in call 1 "),
        pytest.param(*(one_goes_home, "gloo", 6.0, r"rank 0 waited 6 s for rank 1 in call 1 "), marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_does_not_come_is_named(
    body: Callable[[PartitionedGraph], None], transport: str, timeout_s: float, message: str
) -> None:
    """Fails if the others wait longer than they were told to, or for one that has returned, or the wrong one is blamed."""
    with pytest.raises(CommError, match=message):
        run(body, graph_of("random"), ranks=2, transport=transport, threads=1, timeout_s=timeout_s)


@pytest.mark.parametrize("transport", ["threads", pytest.param("gloo", marks=pytest.mark.slow)])
def test_the_first_error_comes_back(transport: str) -> None:
    """Fails if a rank's error is lost behind those that follow from it, or the others wait for their time limit."""
    start = time.monotonic()
    with pytest.raises(ValueError, match="the second rank's own mistake"):
        run(fail, graph_of("random"), ranks=3, transport=transport, threads=1, timeout_s=120)
    assert time.monotonic() - start < 90


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (leave, "rank 1 ended with exit code 7 and did not say why; its output is above"),
        pytest.param(*(leave_in_silence, "rank 0 exited with code 0 before the work was done"), marks=pytest.mark.slow),
    ],
)
def test_a_process_that_vanishes_is_named(body: Callable[[PartitionedGraph], None], message: str) -> None:
    """Fails if a rank that leaves without a word leaves the caller waiting, or is taken for one with a result."""
    with pytest.raises(CommError, match=message):
        run(body, graph_of("random"), ranks=2, transport="gloo", threads=1, timeout_s=60)


def test_what_cannot_travel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a function that no process can find ends in an error of pickle's."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    with pytest.raises(ConfigError, match="must be picklable: one at the top of a module"):
        run(lambda part: part.rank, graph_of("random"), ranks=2, transport="gloo")


TORCHRUN = """
import os, pathlib, sys
from mggcn.nn import run
from tests.nn.test_aggregate import graph_of
from tests.nn.test_run import sums
found = run(lambda part: sums(part, 3), graph_of("random"), ranks=7, precision="fp64", threads=1)
pathlib.Path(sys.argv[1], "found-" + os.environ["RANK"]).write_text(repr(found))
"""


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """Fails if a script under torchrun starts ranks of its own, or is not the rank that it was told to be."""
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = 3.0 * graph_of("random").num_edges
    found = [(tmp_path / f"found-{rank}").read_text() for rank in range(2)]
    assert found == [f"[(0, {wanted}, False)]", f"[(1, {wanted}, False)]"]


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (ConfigError, "transport must be one of auto", {"transport": "mpi"}),
        (ConfigError, "unknown setting 'strategi'; known are strategy, order", {"strategi": "halo"}),
        (ConfigError, "norm must be one of none, mean, symmetric", {"norm": "both"}),
        (ConfigError, "strategy must be one of broadcast, halo, slice, delayed, got 'auto'", {"strategy": "auto"}),
        (ConfigError, "run.order expects one of", {"order": "magic"}),
        (ConfigError, "precision tf32", {"precision": "tf32"}),
        (ConfigError, "run.ranks must lie in", {"ranks": 0}),
    ],
)
def test_settings_that_do_not_fit_are_refused(error: type[Exception], message: str, settings: dict[str, Any]) -> None:
    """Fails if a wrong setting is accepted, or surfaces only on the ranks."""
    with pytest.raises(error, match=message):
        run(lambda part: None, graph_of("random"), **settings)


def test_what_is_no_graph_is_refused() -> None:
    """Fails if something else than a graph reaches the partition."""
    with pytest.raises(GraphError, match=r"expected a graph from mggcn\.load"):
        run(lambda part: None, torch.ones(2, 2))  # type: ignore[arg-type]
