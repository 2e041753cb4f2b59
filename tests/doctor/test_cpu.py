"""cpu.py and the memory of host.py with planted faults."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.utils import collect_env

from mggcn.backend.cpu import cores, kept_figures
from mggcn.backend.cpu.figures import ASSUMED
from mggcn.doctor import cpu
from mggcn.host import MachineMemory, machine_memory
from tests.machines import XEON, ZEN3

GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nHugePages_Total:  0\n"
KERNELS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ((KERNELS[:1], None, False, False), "by torch, bfloat16 converted for it"),
        ((KERNELS[:2], ZEN3, False, False), "by avx2, bfloat16 by avx2; AMX not shown"),
        ((KERNELS[:4], None, False, False), "by avx512, bfloat16 by avx512 until it is measured"),
        ((KERNELS, XEON, True, True), "by avx512, bfloat16 by amx; AMX granted"),
        ((KERNELS[:4], XEON, True, False), "by avx512, bfloat16 by avx512; AMX refused"),
    ],
)
def test_dense_products_are_named(units: Any, expected: str) -> None:
    """Fails if doctor names other kernels for a type than run, or says of AMX what the system did not."""
    finding = cpu.check_dense(lambda: cpu.DenseUnits(*units))
    assert finding.state == "ok"
    assert expected in finding.detail


def test_rates_of_fewer_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if doctor says that nothing was measured after runs that took some of the cores."""
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    monkeypatch.setattr(kept_figures, "kept_figures", lambda host: ZEN3 if host.threads == 3 else None)
    assert cpu.check_rates().detail.startswith("3 threads; rows of 256 bytes")


def test_measured_rates_are_shown() -> None:
    """Fails if doctor shows other rates than were measured, or takes a machine that was not measured for a broken one."""
    xeon = cpu.check_rates(lambda: cpu.DenseUnits(KERNELS, XEON, True, True))
    for told in (
        "57 from 256 KiB",
        "7 from 256 MiB",
        "passes 16 GB/s",
        "bf16 sums amx 400",
        "mggcn tune",
        "1 thread; ",
    ):
        assert told in xeon.detail
    for figures in (None, ASSUMED):
        none = cpu.check_rates(functools.partial(cpu.DenseUnits, KERNELS, figures, True, True))
        assert (none.state, none.detail[:8]) == ("ok", "none yet")
        assert ("had the cores" in none.detail) == (figures is ASSUMED)


def _map(path: str) -> str:
    return f"7f3a00000000-7f3a00021000 r-xp 00000000 08:01 131 {' ' * 20}{path}\n"


def test_openmp_runtimes(tmp_path: Path) -> None:
    """The same file mapped twice counts once; names that merely contain omp do not count."""
    torch, other = "/site/torch/lib/libgomp-a34b3233.so.1", "/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0"
    noise = ["/lib/libcomposite.so.1", "/lib/libdecomp.so", "/a folder/libompl.so", "[heap]", ""]
    maps = tmp_path / "maps"
    maps.write_text("".join(map(_map, [torch, torch, *noise])))
    assert cpu.check_openmp(maps).detail == f"one runtime, {torch}"
    maps.write_text("".join(map(_map, [torch, other, "/opt/with space/libiomp5.so (deleted)", "/x/libomp.so"])))
    finding = cpu.check_openmp(maps)
    assert finding.state == "broken"
    assert finding.detail.startswith("4 runtimes in one process: /opt/with space/libiomp5.so, ")
    maps.write_text("".join(map(_map, noise)))
    assert cpu.check_openmp(maps).state == "broken"
    assert cpu.check_openmp(tmp_path / "absent").state == "missing"


def test_gloo_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise RuntimeError("[gloo] Unable to resolve hostname")

    monkeypatch.setattr(distributed, "init_process_group", fail)
    finding = cpu.check_gloo()
    assert finding.state == "broken"
    assert "Unable to resolve hostname" in finding.detail
    assert "GLOO_SOCKET_IFNAME" in finding.remedy
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    assert cpu.check_gloo().state == "missing"


def test_gloo_leaves_no_process_group() -> None:
    assert cpu.check_gloo().state == "ok"
    assert not distributed.is_initialized()


def test_the_system_is_named_and_too_many_threads_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the processor or its memory nodes are not named, or a setting that slows runs down passes without a word."""
    monkeypatch.setattr(collect_env, "get_cpu_info", lambda run: "Model name: A 1000\nNUMA:\n  NUMA node(s):  2\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    finding = cpu.check_system()
    assert finding.state == "ok"
    assert ", A 1000, 2 NUMA nodes, " in finding.detail
    assert "more threads than cores" in finding.remedy
    monkeypatch.setattr(collect_env, "get_cpu_info", lambda run: "sh: lscpu: not found")
    monkeypatch.delenv("OMP_NUM_THREADS")
    finding = cpu.check_system()
    assert (finding.remedy, finding.state) == ("", "ok")
    assert "NUMA" not in finding.detail


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_without_cgroup(tmp_path: Path) -> None:
    assert machine_memory(_machine(tmp_path, {})) == MachineMemory(16 * GIB, 8 * GIB, None)
    assert machine_memory(tmp_path / "absent") is None
    assert cpu.check_memory(tmp_path / "absent").state == "missing"


def test_memory_of_cgroup_v2_takes_the_tightest(tmp_path: Path) -> None:
    """The parent's limit counts too, and page cache that can be given back does not count as used."""
    folder = "sys/fs/cgroup/slice"
    files = {
        "proc/self/cgroup": "0::/slice/job\n",
        f"{folder}/memory.max": f"{4 * GIB}\n",
        f"{folder}/memory.current": f"{3 * GIB}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
        f"{folder}/job/memory.max": "max\n",
        f"{folder}/job/memory.current": f"{GIB}\n",
    }
    root = _machine(tmp_path, files)
    assert machine_memory(root) == MachineMemory(16 * GIB, 3 * GIB, 4 * GIB)
    assert cpu.check_memory(root).detail == "3.00 GiB free of 16.0 GiB, cgroup limit 4.00 GiB"


def test_memory_of_cgroup_v1_in_a_container(tmp_path: Path) -> None:
    """/proc names the host's path, which does not exist inside: the root of the mount holds the limit."""
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:devices:/docker/ab\n4:memory:/docker/ab\n0::/\n",
        f"{folder}/memory.limit_in_bytes": f"{GIB}\n",
        f"{folder}/memory.usage_in_bytes": f"{GIB // 2}\n",
        f"{folder}/memory.stat": "total_inactive_file 0\n",
    }
    root = _machine(tmp_path, files)
    assert machine_memory(root) == MachineMemory(16 * GIB, GIB // 2, GIB)
    assert "little is free" in cpu.check_memory(root).remedy
    (root / folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine_memory(root) == MachineMemory(16 * GIB, 8 * GIB, None)


def test_memory_of_this_machine() -> None:
    finding = cpu.check_memory()
    assert finding.state == "ok"
    assert re.match(r"[\d.]+ \w?i?B free of ", finding.detail)
