"""check_packages.py, check_cpu.py and machine_memory.py with planted faults."""

import importlib
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from torch import distributed

from mggcn.host import MachineMemory, machine_memory
from mggcn.report import check_cpu, check_packages

GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nHugePages_Total:  0\n"


def test_versions_are_those_of_pyproject() -> None:
    """Fails if pyproject.toml asks for other versions than the doctor."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = dict(requirement.split(">=") for requirement in project["dependencies"])
    assert asked == {name: least for name, (_, least) in check_packages.REQUIRED.items()}
    assert project["requires-python"] == ">=" + ".".join(map(str, check_packages.PYTHON))
    for name, (least, extra, _) in check_packages.OPTIONAL.items():
        assert f"{name}>={least}" in project["optional-dependencies"][extra]
    assert {"cuda12", "cuda13"} <= set(project["optional-dependencies"])


def test_old_python() -> None:
    finding = check_packages.check_python((3, 10, 12))
    assert (finding.state, finding.detail) == ("broken", "3.10.12, expected 3.11 or newer")
    assert check_packages.check_python((3, 11, 0)).state == "ok"


def test_old_and_absent_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1.9.5")
    finding = check_packages.check_required("numpy")
    assert (finding.state, finding.remedy) == ("broken", 'pip install "numpy>=1.26"')
    finding = check_packages.check_optional("matplotlib")
    assert (finding.state, finding.detail) == ("missing", "1.9.5, expected 3.8 or newer")

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert check_packages.check_required("numpy").state == "broken"
    assert "mggcn[pyg]" in check_packages.check_optional("torch_geometric").remedy

    def unloadable(name: str) -> None:
        raise OSError("libopenblas.so.0: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", unloadable)
    assert "libopenblas" in check_packages.check_required("numpy").detail


@pytest.mark.parametrize(
    ("version", "least", "enough"),
    [("2.13.0+cpu", "2.6", True), ("2.5.1", "2.6", False), ("2.6", "2.6", True), ("10.0rc1", "9.1", True),
     ("2.6.0a0+git12", "2.6", True), ("1.26.4", "1.3", True)],
)  # fmt: skip
def test_version_order(version: str, least: str, enough: bool) -> None:
    assert check_packages.is_at_least(version, least) is enough


def _map(path: str) -> str:
    return f"7f3a00000000-7f3a00021000 r-xp 00000000 08:01 131 {' ' * 20}{path}\n"


def test_openmp_runtimes(tmp_path: Path) -> None:
    """The same file mapped twice counts once; names that merely contain omp do not count."""
    torch, other = "/site/torch/lib/libgomp-a34b3233.so.1", "/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0"
    noise = ["/lib/libcomposite.so.1", "/lib/libdecomp.so", "/a folder/libompl.so", "[heap]", ""]
    maps = tmp_path / "maps"
    maps.write_text("".join(map(_map, [torch, torch, *noise])))
    assert check_cpu.check_openmp(maps).detail == f"one runtime, {torch}"
    maps.write_text("".join(map(_map, [torch, other, "/opt/with space/libiomp5.so (deleted)", "/x/libomp.so"])))
    finding = check_cpu.check_openmp(maps)
    assert finding.state == "broken"
    assert finding.detail.startswith("4 runtimes in one process: /opt/with space/libiomp5.so, ")
    maps.write_text("".join(map(_map, noise)))
    assert check_cpu.check_openmp(maps).state == "broken"
    assert check_cpu.check_openmp(tmp_path / "absent").state == "missing"


def test_gloo_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise RuntimeError("[gloo] Unable to resolve hostname")

    monkeypatch.setattr(distributed, "init_process_group", fail)
    finding = check_cpu.check_gloo()
    assert finding.state == "broken"
    assert "Unable to resolve hostname" in finding.detail
    assert "GLOO_SOCKET_IFNAME" in finding.remedy
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    assert check_cpu.check_gloo().state == "missing"


def test_gloo_leaves_no_process_group() -> None:
    assert check_cpu.check_gloo().state == "ok"
    assert not distributed.is_initialized()


def test_cores_warn_of_too_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    finding = check_cpu.check_cores()
    assert finding.state == "ok"
    assert "more threads than cores" in finding.remedy
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert check_cpu.check_cores().remedy == ""


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_without_cgroup(tmp_path: Path) -> None:
    assert machine_memory(_machine(tmp_path, {})) == MachineMemory(16 * GIB, 8 * GIB, None)
    assert machine_memory(tmp_path / "absent") is None
    assert check_cpu.check_memory(tmp_path / "absent").state == "missing"


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
    assert check_cpu.check_memory(root).detail == "3.00 GiB free of 16.0 GiB, cgroup limit 4.00 GiB"


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
    assert "little is free" in check_cpu.check_memory(root).remedy
    (root / folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine_memory(root) == MachineMemory(16 * GIB, 8 * GIB, None)


def test_memory_of_this_machine() -> None:
    finding = check_cpu.check_memory()
    assert finding.state == "ok"
    assert re.match(r"[\d.]+ \w?i?B free of ", finding.detail)
