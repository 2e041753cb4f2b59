"""The doctor on this machine, in a fresh process, and what it says about planted faults."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mggcn.doctor import cpu, diagnose, gpu, packages
from mggcn.doctor.findings import Finding, exit_status, guarded, render
from tests.doctor.test_gpu import CPU_BUILD, NOTHING

_CODE = """
import dataclasses, json, sys
from mggcn.doctor.diagnose import diagnose, exit_status
def library():
    {library}
findings = diagnose(library)
print(json.dumps([[dataclasses.asdict(f) for f in findings], exit_status(findings), "cupy" in sys.modules]))
"""


def run_doctor(library: str, before: str = "") -> tuple[dict[str, Finding], int, bool]:
    """Run the doctor in its own process, as the command does: this one has loaded other tests' libraries."""
    code = before + _CODE.format(library=library)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    findings, status, cupy = json.loads(done.stdout)
    return {finding["name"]: Finding(**finding) for finding in findings}, status, cupy


def test_this_machine_is_healthy() -> None:
    """Every required check passes here; what is missing names a remedy or is a consequence of having no GPU."""
    findings, status, cupy = run_doctor("return '/somewhere/libmggcn_cpu.so', 'avx2'")
    assert status == 0, [finding for finding in findings.values() if finding.state == "broken"]
    required = ["Python", "numpy", "scipy", "torch", "safetensors", "tomli-w", "filelock", "pooch", "CPU kernels"]
    for name in [*required, "system", "OpenMP", "gloo", "memory"]:
        assert findings[name].state == "ok", findings[name]
    assert findings["CPU kernels"].detail == "avx2, /somewhere/libmggcn_cpu.so"
    assert findings["gloo"].detail == "self-test passed"
    if "GPU" in findings:
        assert not cupy, "CuPy is not imported without a driver"
    else:
        assert {"CuPy", "NCCL", "torch CUDA"} <= set(findings)
    assert {"matplotlib", "torch_geometric"} <= set(findings)


@pytest.mark.parametrize("case", ["nothing", "driver", "CUDA", "CuPy"])
def test_a_machine_without_a_gpu_gets_one_line(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Fails if six things are missing that nobody needs, or if a half-installed GPU is passed over in silence."""
    found = {"driver": CPU_BUILD, "CUDA": gpu.Machine(None, "", cuda="13.0")}.get(case, NOTHING)
    monkeypatch.setattr(gpu, "find_machine", lambda: found)
    monkeypatch.setattr(gpu, "installed_version", lambda name: "14" if (case, name) == ("CuPy", "cupy") else None)
    findings = diagnose._gpu(compute=False)
    if case == "nothing":
        assert findings == [Finding("GPU", "ok", "none here: runs use the CPU")]
    else:
        assert {"GPUs", "torch CUDA", "CuPy", "NCCL"} <= {finding.name for finding in findings}


def test_a_library_that_does_not_load_is_broken() -> None:
    def library() -> tuple[str, str]:
        raise OSError("libgomp.so.1: cannot open shared object file")

    findings = {finding.name: finding for finding in diagnose.diagnose(library)}
    assert exit_status(list(findings.values())) == 1
    assert findings["CPU kernels"].state == "broken"
    assert "libgomp.so.1" in findings["CPU kernels"].detail
    assert "reinstall" in findings["CPU kernels"].remedy
    # OpenMP aside: other tests of this process may have loaded another runtime.
    assert {f.name for f in findings.values() if f.state == "broken"} <= {"CPU kernels", "OpenMP"}


def test_without_torch_the_rest_is_still_looked_at() -> None:
    findings, status, _ = run_doctor("return 'x', 'baseline'", before="import sys; sys.modules['torch'] = None\n")
    assert status == 1
    assert findings["torch"].state == "broken"
    assert 'pip install "torch>=' in findings["torch"].remedy
    skipped = ("missing", "not checked, because torch does not work", "repair torch first")
    assert all(findings[name] == Finding(name, *skipped) for name in ("gloo", "GPU"))
    assert findings["memory"].state == "ok"


def test_without_metadata_the_rest_is_still_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a checkout that was not installed ends in a traceback."""

    def absent(name: str) -> None:
        raise packages.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.metadata, "requires", absent)
    findings = {finding.name: finding for finding in diagnose.diagnose(lambda: ("x", "baseline"), compute=False)}
    assert findings["packages"].state == "missing"
    assert findings["gloo"].state == "ok"


def test_default_library_is_the_installed_one() -> None:
    """Skips where mggcn is imported from a checkout that was never built."""
    finding = cpu.check_kernels(cpu.native_library)
    if finding.state != "ok":
        pytest.skip(f"the CPU kernels are not built here: {finding.detail}")
    assert finding.detail.endswith(".so")


def test_a_check_that_fails_is_a_finding() -> None:
    def fail() -> Finding:
        raise ZeroDivisionError("planted")

    finding = guarded("planet", fail)
    assert (finding.state, finding.detail) == ("broken", "ZeroDivisionError: planted")
    assert exit_status([finding]) == 1


def test_render_and_status() -> None:
    fine = Finding("Python", "ok", "3.12.1")
    absent = Finding("CuPy", "missing", "not\ninstalled", 'pip install "mggcn[cuda12]" ' + "word " * 40)
    bad = Finding("gloo", "broken", "no host", "edit /etc/hosts")
    text = render([fine, absent])
    assert text.splitlines()[:2] == ["ok      Python  3.12.1", "missing CuPy    not installed"]
    assert '-> pip install "mggcn[cuda12]"' in text
    assert text.endswith("mggcn works here; optional and absent: CuPy\n")
    assert max(map(len, text.splitlines())) <= 120
    assert render([fine, absent, bad]).endswith("1 broken: gloo\n")
    assert (exit_status([fine, absent]), exit_status([bad]), exit_status([])) == (0, 1, 0)
    assert render([fine]).endswith("mggcn works here\n")


def test_quick_look_uses_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a health check beside a training computes on its GPUs, or starts NCCL there."""
    asked: dict[str, bool] = {}

    def look(name: str) -> None:
        def check(*arguments: object) -> Finding:
            asked[name] = bool(arguments[-1])
            return Finding(name, "ok", "")

        monkeypatch.setattr(gpu, name, check)

    for name in ("check_torch", "check_cupy", "check_sources", "check_nccl"):
        look(name)
    monkeypatch.setattr(gpu, "find_machine", lambda: CPU_BUILD)
    for compute in (False, True):
        diagnose._gpu(compute)
        assert asked == dict.fromkeys(("check_torch", "check_cupy", "check_sources", "check_nccl"), compute)
