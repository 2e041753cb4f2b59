"""The doctor on this machine, in a fresh process, and what it says about planted faults."""

import functools
import json
import subprocess
import sys
from typing import Any

import pytest

from mggcn.backend.cpu import cores, kept_figures
from mggcn.backend.cpu.figures import ASSUMED
from mggcn.report import doctor
from mggcn.report.findings import Finding, exit_status, guarded, render
from tests.machines import XEON, ZEN3

_CODE = """
import dataclasses, json, sys
from mggcn.report.doctor import diagnose, exit_status, render
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
    required = [
        "Python",
        "numpy",
        "scipy",
        "torch",
        "safetensors",
        "tomli-w",
        "CPU kernels",
        "numpy <-> torch",
    ]
    for name in [*required, "OpenMP", "gloo", "cores", "memory"]:
        assert findings[name].state == "ok", findings[name]
    assert findings["CPU kernels"].detail == "avx2, /somewhere/libmggcn_cpu.so"
    assert findings["gloo"].detail == "self-test passed"
    if "GPU" in findings:
        assert not cupy, "CuPy is not imported without a driver"
    else:
        assert {"CuPy", "NCCL", "torch CUDA"} <= set(findings)
    assert {"matplotlib", "torch_geometric"} <= set(findings)


@pytest.mark.parametrize(
    ("driver", "cuda", "cupy", "short"),
    [(False, None, [], True), (True, None, [], False), (False, (13, 0), [], False), (False, None, ["cupy 14"], False)],
)
def test_a_machine_without_a_gpu_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, driver: bool, cuda: tuple[int, int] | None, cupy: list[str], short: bool
) -> None:
    """Fails if eight things are missing that nobody needs, or if a half-installed GPU is passed over in silence."""
    monkeypatch.setattr(doctor.check_gpu, "find_driver", lambda: doctor.check_gpu.Driver((13, 0)) if driver else None)
    monkeypatch.setattr(doctor.check_cuda, "cuda_version", lambda: cuda)
    monkeypatch.setattr(doctor.check_cuda, "installed_cupy", lambda: cupy)
    findings = doctor._gpu(has_torch=True, compute=False)
    assert (len(findings) == 1) == short
    if short:
        assert (findings[0].state, findings[0].detail) == ("ok", "none here: runs use the CPU")
    else:
        assert {"NVIDIA driver", "CuPy", "NCCL"} <= {finding.name for finding in findings}


def test_a_library_that_does_not_load_is_broken() -> None:
    def library() -> tuple[str, str]:
        raise OSError("libgomp.so.1: cannot open shared object file")

    findings = {finding.name: finding for finding in doctor.diagnose(library)}
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
    assert findings["gloo"] == Finding(
        "gloo", "missing", "not checked, because torch does not work", "repair torch first"
    )
    assert findings["memory"].state == "ok"


def test_default_library_is_the_installed_one() -> None:
    """Skips where mggcn is imported from a checkout that was never built."""
    finding = doctor.check_cpu.check_kernels(doctor.check_cpu.native_library)
    if finding.state != "ok":
        pytest.skip(f"the CPU kernels are not built here: {finding.detail}")
    assert finding.detail.endswith(".so")


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
    finding = doctor.check_cpu.check_dense(lambda: doctor.check_cpu.DenseUnits(*units))
    assert finding.state == "ok"
    assert expected in finding.detail


def test_rates_of_fewer_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if doctor says that nothing was measured after runs that took some of the cores."""
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    monkeypatch.setattr(kept_figures, "kept_figures", lambda host: ZEN3 if host.threads == 3 else None)
    assert doctor.check_cpu.check_rates().detail.startswith("3 threads; rows of 256 bytes")


def test_measured_rates_are_shown() -> None:
    """Fails if doctor shows other rates than were measured, or takes a machine that was not measured for a broken one."""
    xeon = doctor.check_cpu.check_rates(lambda: doctor.check_cpu.DenseUnits(KERNELS, XEON, True, True))
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
        none = doctor.check_cpu.check_rates(
            functools.partial(doctor.check_cpu.DenseUnits, KERNELS, figures, True, True)
        )
        assert (none.state, none.detail[:8]) == ("ok", "none yet")
        assert ("had the cores" in none.detail) == (figures is ASSUMED)


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


@pytest.mark.full
def test_quick_look_uses_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a health check beside a training computes on its GPUs, or starts NCCL there."""
    asked: dict[str, bool] = {}

    def look(name: str, driver: object, *rest: object) -> Finding:
        asked[name] = bool(rest[-1])
        return Finding(name, "ok", "")

    monkeypatch.setattr(doctor.check_cuda, "installed_cupy", lambda: ["cupy 14"])
    monkeypatch.setattr(doctor.check_cuda, "check_torch_cuda", lambda *args: look("torch", *args))
    monkeypatch.setattr(doctor.check_cuda, "check_cupy", lambda *args: look("CuPy", *args))
    monkeypatch.setattr(doctor.check_cuda, "check_sources", lambda *args: look("kernels", *args))
    names = [finding.name for finding in doctor.diagnose(lambda: ("x", "baseline"), compute=False)]
    assert asked == {"torch": False, "CuPy": False, "kernels": False}
    assert "NCCL" in names
    assert "NCCL self-test" not in names
    assert "NCCL self-test" in [finding.name for finding in doctor.diagnose(lambda: ("x", "baseline"))]
