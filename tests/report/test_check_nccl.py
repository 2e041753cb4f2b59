"""check_nccl.py and the program that it starts, with stand-ins for the wheels, CuPy and NCCL."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mggcn.host import python
from mggcn.report import check_nccl, nccl_selftest
from mggcn.report.findings import Finding

FINE = Finding("CuPy", "ok", "")
ABSENT = Finding("CuPy", "missing", "not installed")


def install(monkeypatch: pytest.MonkeyPatch, **wheels: str) -> None:
    versions = {f"nvidia-nccl-{cuda}": version for cuda, version in wheels.items()}
    monkeypatch.setattr(check_nccl, "installed_version", versions.get)


def test_one_wheel_of_torchs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, cu13="2.27.7")
    assert check_nccl.check_nccl_packages(FINE, (13, 0)) == Finding("NCCL", "ok", "nvidia-nccl-cu13 2.27.7")
    assert check_nccl.check_nccl_packages(FINE, None).state == "ok"
    wrong = check_nccl.check_nccl_packages(FINE, (12, 8))
    assert (wrong.state, wrong.detail) == ("broken", "nvidia-nccl-cu13 2.27.7; torch is built for CUDA 12")
    assert wrong.remedy.endswith("nvidia-nccl-cu12")
    assert check_nccl.check_nccl_packages(ABSENT, (12, 8)).state == "missing"


def test_two_wheels_share_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, cu12="2.27.3", cu13="2.27.7")
    both = check_nccl.check_nccl_packages(FINE, (13, 0))
    assert both.state == "broken"
    assert both.detail == "several are installed: nvidia-nccl-cu12 2.27.3, nvidia-nccl-cu13 2.27.7"
    assert both.remedy.startswith("they share a file: pip uninstall nvidia-nccl-cu12 nvidia-nccl-cu13")
    assert both.remedy.endswith("nvidia-nccl-cu13")
    assert check_nccl.check_nccl_packages(ABSENT, None).state == "missing", "a CPU machine is healthy all the same"


def test_a_system_library_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert check_nccl.check_nccl_packages(FINE, (12, 8)).state == "ok"
    assert check_nccl.check_nccl_packages(ABSENT, None).state == "missing"


def answering(answer: object) -> Callable[[list[str], float], str]:
    return lambda command, limit_s: f"a warning of a library\n{json.dumps(answer)}\n"


def look(answer: object, num_gpus: int = 2) -> Finding:
    return check_nccl.check_nccl(FINE, num_gpus, answering(answer))


def test_self_test_findings() -> None:
    one = ["/site/nvidia/nccl/lib/libnccl.so.2"]
    fine = look({"version": 22703, "wrong": [], "libraries": one})
    assert fine == Finding("NCCL self-test", "ok", f"2.27.3, 2 GPUs, {one[0]}")
    assert look({"version": 22703, "wrong": [1], "libraries": one}).detail == "wrong sums on GPUs [1]"
    two = look({"version": 22703, "wrong": [], "libraries": [*one, "/usr/lib/libnccl.so.2"]})
    assert two.state == "broken"
    assert "2 NCCLs in one process" in two.detail
    error = {"error": "NcclError: unhandled system error"}
    assert (look(error).state, look(error, num_gpus=1).state) == ("broken", "missing")
    assert check_nccl.check_nccl(ABSENT, 2).state == "missing"


def test_a_test_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is kept by the real runner; the program is one that sleeps."""

    def sleeping(command: list[str], limit_s: float) -> str:
        return check_nccl.run_command([sys.executable, "-c", "import time; time.sleep(60)"], limit_s)

    finding = check_nccl.check_nccl(FINE, 8, sleeping, limit_s=0.2)
    assert (finding.state, finding.detail) == ("broken", "no result within 0 s on 8 GPUs")
    assert "NCCL_DEBUG=INFO" in finding.remedy


@pytest.mark.parametrize(
    ("code", "said"), [("import os; os.abort()", "code -6"), ("print('no JSON')", "it died"), ("pass", "it died")]
)
def test_a_test_that_dies_is_reported(code: str, said: str) -> None:
    def dying(command: list[str], limit_s: float) -> str:
        return check_nccl.run_command([sys.executable, "-c", code], limit_s)

    finding = check_nccl.check_nccl(FINE, 2, dying)
    assert finding.state == "broken"
    assert said in finding.detail


@pytest.mark.full
def test_the_program_answers_without_cupy() -> None:
    """Runs as the doctor starts it; where CuPy and a GPU are there, it passes."""
    command = [*python("mggcn.report.nccl_selftest"), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert ("error" in answer) != (answer.get("wrong") == [])


class FakeGpus:
    """CuPy, NCCL and torch's GPUs on host memory; `lost` is a rank whose buffer NCCL forgets. CuPy has no arrays."""

    def __init__(self, lost: int | None = None, available: bool = True) -> None:
        self.available = available
        self.buffers: list[torch.Tensor] = []
        self.reduced: list[int] = []
        self.destroyed = 0
        self.lost = lost

    def full(self, shape: tuple[int], value: float, device: str) -> torch.Tensor:
        assert device == f"cuda:{len(self.buffers)}"
        self.buffers.append(torch.full(shape, value))
        return self.buffers[-1]

    def group_end(self) -> None:
        total = sum(self.buffers[rank].clone() for rank in self.reduced)
        for rank in self.reduced:
            if rank != self.lost:
                self.buffers[rank].copy_(total)

    @property
    def cupy(self) -> Any:
        return SimpleNamespace(cuda=SimpleNamespace(Device=nullcontext))

    @property
    def torch(self) -> Any:
        stream = SimpleNamespace(cuda_stream=0)
        return SimpleNamespace(full=self.full, cuda=SimpleNamespace(device=nullcontext, current_stream=lambda: stream))

    @property
    def nccl(self) -> Any:
        def init_all(count: int) -> list[Any]:
            def all_reduce(send: int, out: int, count: int, kind: str, total: str, stream: int) -> None:
                assert (send, count, kind, total) == (out, nccl_selftest.COUNT, "f32", "sum")
                self.reduced.append([buffer.data_ptr() for buffer in self.buffers].index(send))

            def destroy() -> None:
                self.destroyed += 1

            return [SimpleNamespace(allReduce=all_reduce, destroy=destroy) for _ in range(count)]

        return SimpleNamespace(
            available=self.available,
            NcclCommunicator=SimpleNamespace(initAll=init_all),
            groupStart=lambda: None,
            groupEnd=self.group_end,
            NCCL_FLOAT32="f32",
            NCCL_SUM="sum",
            get_version=lambda: 22703,
        )


@pytest.mark.parametrize("count", [1, 5])
def test_sums_of_all_gpus_are_compared(count: int) -> None:
    gpus = FakeGpus()
    assert nccl_selftest.all_reduce(gpus.torch, gpus.cupy, gpus.nccl, count) == []
    assert (gpus.reduced, gpus.destroyed) == (list(range(count)), count)
    assert float(gpus.buffers[-1][0]) == count * (count + 1) / 2


def test_a_wrong_sum_is_found() -> None:
    gpus = FakeGpus(lost=3)
    assert nccl_selftest.all_reduce(gpus.torch, gpus.cupy, gpus.nccl, 5) == [3]


def test_the_program_reports_version_and_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    modules: dict[str, Any] = {}

    def start(gpus: FakeGpus) -> None:
        modules.update({"torch": gpus.torch, "cupy": gpus.cupy, "cupy.cuda.nccl": gpus.nccl})

    start(FakeGpus())
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    maps = tmp_path / "maps"
    paths = ["/a b/libnccl.so.2", "/a b/libnccl.so.2", "/usr/lib/libnccl.so.2.27.3", "/x/nccl.cpython-311.so", "[heap]"]
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 131 {path}\n" for path in paths))
    assert nccl_selftest.main(2, maps) == {
        "version": 22703,
        "wrong": [],
        "libraries": ["/a b/libnccl.so.2", "/usr/lib/libnccl.so.2.27.3"],
    }
    start(FakeGpus())
    assert nccl_selftest.main(2, tmp_path / "absent")["libraries"] == []
    start(FakeGpus(available=False))
    assert nccl_selftest.main(2, maps) == {"error": "CuPy finds no libnccl.so.2"}
