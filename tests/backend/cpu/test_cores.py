"""Ranks are bound to cores of one memory node, where a machine has several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mggcn.assemble import plan as assemble
from mggcn.backend.cpu.cores import cores_beside, cores_in, cores_of_rank, nodes
from mggcn.config import Config, RunConfig
from mggcn.runs import torchrun, worker
from tests.backend.gpu_libraries import Card, Machine


def _system(folder: Path, lists: list[str], threads_per_core: int = 1) -> Path:
    """A machine as Linux describes it: a core list for each node; second threads are the upper half of the numbers."""
    cores = sorted(core for text in lists for core in cores_in(text))
    physical = len(cores) // threads_per_core
    for number, text in enumerate(lists):
        (folder / "node" / f"node{number}").mkdir(parents=True)
        (folder / "node" / f"node{number}" / "cpulist").write_text(text + "\n")
    for core in cores:
        place = folder / "cpu" / f"cpu{core}" / "topology"
        place.mkdir(parents=True)
        place.joinpath("thread_siblings_list").write_text(
            ",".join(map(str, range(core % physical, len(cores), physical)))
        )
    return folder


def test_nodes_of_a_machine(tmp_path: Path) -> None:
    """Fails if nodes are read in the order of their names, or second threads come before free physical cores."""
    two = _system(tmp_path / "two", ["0-3,8-11", "4-7,12-15"], threads_per_core=2)
    assert nodes(two) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    many = _system(tmp_path / "many", [str(k) for k in range(12)])
    assert nodes(many) == [[k] for k in range(12)]
    memory_only = _system(tmp_path / "memory", ["0-1", ""])
    assert nodes(memory_only) == [[0, 1]]
    assert nodes(tmp_path / "absent") == []


def test_ranks_share_no_core_and_stay_on_a_node() -> None:
    """Fails if two ranks get a core, one rank gets cores of two nodes, or nodes get unequal shares."""
    free = [list(range(16)), list(range(16, 32))]
    for ranks, threads in ((2, 16), (2, 8), (4, 8), (3, 5), (32, 1)):
        given = [cores_of_rank(rank, ranks, threads, free) for rank in range(ranks)]
        used = [core for cores in given for core in cores]
        assert len(used) == len(set(used)) == ranks * threads
        homes = [{core // 16 for core in cores} for cores in given]
        assert all(len(home) == 1 for home in homes)
        assert abs(homes.count({0}) - homes.count({1})) <= 1


@pytest.mark.parametrize(
    ("ranks", "threads", "free"),
    [
        (2, 4, [list(range(8))]),
        (4, 9, [list(range(16)), list(range(16, 32))]),
        (1, 20, [[0] * 16, [1] * 16]),
        (1, 1, []),
    ],
)
def test_ranks_that_do_not_fit_are_not_bound(ranks: int, threads: int, free: list[list[int]]) -> None:
    """Fails if a rank is squeezed into fewer cores than it has threads, or bound where there is one memory."""
    assert {tuple(cores_of_rank(rank, ranks, threads, free)) for rank in range(ranks)} == {()}


@pytest.mark.parametrize(
    ("run", "bound"),
    [
        ({}, [(1, 2, 3)]),
        ({"bind": "off"}, []),
        ({"device": "cuda", "transport": "nccl"}, [("0000:1b:00.0", 3)]),
        ({"device": "cuda", "transport": "nccl", "bind": "off"}, []),
    ],
)
def test_a_rank_is_bound_unless_the_run_says_otherwise(
    run: dict[str, Any], bound: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if run.bind = off is not heeded, or a rank is not bound without it, on a GPU to the cores beside its own."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(assemble, "visible_gpus", Machine([Card(7, 0), Card(0x1B, 0)]).visible)
    config = Config(run=RunConfig(ranks=2, threads=3, **run))
    monkeypatch.setattr(worker, "read_run", lambda folder: (config, {}, {}))
    for name in ("bind_rank", "bind_beside_gpu"):
        monkeypatch.setattr(assemble, name, lambda *arguments: found.append(arguments))
    monkeypatch.setattr(worker, "rank_main", lambda *arguments, **options: 0)
    monkeypatch.setattr(worker.native, "limit_spinning", lambda: None)
    arguments = ["train", "folder", "--rank", "1", "--size", "2", "--rendezvous", "file", "--arguments", "{}"]
    monkeypatch.setattr(sys, "argv", ["worker", *arguments])
    assert worker.main() == 0
    assert found == bound


def test_a_rank_without_its_gpu_goes_on_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what is wrong with a GPU ends a rank before it can report, or a rank is bound beside another's GPU."""
    monkeypatch.setattr(assemble, "bind_beside_gpu", lambda *arguments: pytest.fail("bound"))
    config = Config(run=RunConfig(device="cuda", transport="nccl", ranks=2))
    for shown in ([Card(7, 0)], []):
        monkeypatch.setattr(assemble, "visible_gpus", Machine(shown).visible)
        assemble.bind_process(config, 1)


@pytest.mark.parametrize(("device", "bound"), [("cpu", []), ("cuda", [1])])
def test_torchruns_ranks_are_bound_beside_their_gpus(
    device: Any, bound: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if ranks on several nodes are left to the system, or one on CPUs, which its starter places, is moved."""
    found: list[int] = []
    for name, answer in {"torchrun_env": (1, 2, 1), "check_available": None, "torchrun_main": 0}.items():
        monkeypatch.setattr(torchrun, name, lambda *arguments, answer=answer: answer)
    monkeypatch.setattr(torchrun, "bind_process", lambda config, rank: found.append(rank))
    request = torchrun.Request(config=Config(run=RunConfig(device=device)), store=Path)
    assert torchrun.train_under_torchrun(request) == (0, None)
    assert found == bound


def _gpu(folder: Path, cores: str, node: int) -> Path:
    """A PCI device as Linux describes it."""
    (folder / "0000:1b:00.0").mkdir(parents=True)
    (folder / "0000:1b:00.0" / "local_cpulist").write_text(f"{cores}\n")
    (folder / "0000:1b:00.0" / "numa_node").write_text(f"{node}\n")
    return folder


def test_cores_beside_a_gpu(tmp_path: Path) -> None:
    """Fails if the cores of another node are taken for a GPU's, or those that a virtual machine makes up."""
    assert cores_beside("0000:1b:00.0", _gpu(tmp_path / "told", "24-26,72-73", 1)) == [24, 25, 26, 72, 73]
    assert cores_beside("0000:1b:00.0", _gpu(tmp_path / "virtual", "0-15", -1)) == []
    assert cores_beside("0000:07:00.0", tmp_path / "told") == []
    assert cores_beside("0000:1b:00.0", _gpu(tmp_path / "strange", "none", 0)) == []


def test_a_process_is_bound_beside_its_gpu(tmp_path: Path) -> None:
    """Fails if it is not, or where that cannot gain: no node apart, cores that it may not use, more threads than cores."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("this process may use one core")
    first, every = str(allowed[0]), ",".join(map(str, allowed))
    cases = {"beside": (f"{first},9999", 1), "every": (every, 1), "elsewhere": ("9999", 1), "few": (first, 2)}
    code = (
        "import os, sys, pathlib\n"
        "from mggcn.backend.cpu.cores import bind_beside_gpu, usable_cores\n"
        "bound = bind_beside_gpu('0000:1b:00.0', int(sys.argv[2]), pathlib.Path(sys.argv[1]))\n"
        "print(bound, sorted(os.sched_getaffinity(0)), usable_cores())\n"
    )
    for name, (cores, threads) in cases.items():
        devices = _gpu(tmp_path / name, cores, 0)
        command = [sys.executable, "-c", code, str(devices), str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        bound = allowed[:1] if name == "beside" else []
        assert done.stdout.strip() == f"{bound} {bound or allowed} {len(allowed)}", name


def test_a_bound_process_still_counts_all_cores(tmp_path: Path) -> None:
    """Fails if a rank that was bound takes the share of a share, or is not bound."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("this process may use one core")
    system = _system(tmp_path, [str(core) for core in allowed])
    code = (
        "import os, sys, pathlib\n"
        "from mggcn.backend.cpu.cores import bind_rank, usable_cores\n"
        "bound = bind_rank(1, 2, 1, pathlib.Path(sys.argv[1]))\n"
        "print(bound, sorted(os.sched_getaffinity(0)), usable_cores())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(system)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[allowed[1]]} {[allowed[1]]} {len(allowed)}"
