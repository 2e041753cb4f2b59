"""`mggcn doctor`: what is installed, which device and transport work, and how to mend what does not. No network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mggcn.report import check_cpu, check_cuda, check_gpu, check_nccl, check_packages
from mggcn.report.findings import Finding, exit_status, guarded, render

__all__ = ["Finding", "diagnose", "exit_status", "render"]


def diagnose(library: check_cpu.KernelLibrary = check_cpu.native_library, compute: bool = True) -> list[Finding]:
    """Look at everything that a run needs or can use; `library` loads the CPU kernels.

    Without `compute` the GPUs are queried but not used, so that a training that runs on them is not disturbed.

    Cost: seconds, most of them for importing torch. A check that needs torch is skipped if torch does not import.
    """
    packages = [guarded(name, partial(check_packages.check_required, name)) for name in check_packages.REQUIRED]
    has_torch = all(finding.state == "ok" for finding in packages if finding.name == "torch")
    # Before the OpenMP check, which counts what torch and the kernels have loaded.
    kernels = guarded("CPU kernels", partial(check_cpu.check_kernels, library))
    return [
        guarded("Python", check_packages.check_python),
        *packages,
        kernels,
        *(_with_kernels() if kernels.state == "ok" else []),
        *(_with_torch() if has_torch else [_skipped(name) for name in ("OpenMP", "gloo", "cores")]),
        guarded("memory", check_cpu.check_memory),
        *_gpu(has_torch, compute),
        *(guarded(name, partial(check_packages.check_optional, name)) for name in check_packages.OPTIONAL),
    ]


def _with_kernels() -> list[Finding]:
    return [guarded("dense products", check_cpu.check_dense), guarded("measured rates", check_cpu.check_rates)]


def _with_torch() -> list[Finding]:
    checks: dict[str, Callable[[], Finding]] = {
        "numpy <-> torch": check_packages.check_exchange,
        "OpenMP": check_cpu.check_openmp,
        "gloo": check_cpu.check_gloo,
        "cores": check_cpu.check_cores,
    }
    return [guarded(name, check) for name, check in checks.items()]


def _gpu(has_torch: bool, compute: bool) -> list[Finding]:
    driver = check_gpu.find_driver()
    torch_cuda = check_cuda.cuda_version() if has_torch else None
    if driver is None and torch_cuda is None and not check_cuda.installed_cupy():
        return [Finding("GPU", "ok", "none here: runs use the CPU")]
    torch = partial(check_cuda.check_torch_cuda, driver, compute)
    torch_works = guarded("torch CUDA", torch) if has_torch else _skipped("torch CUDA")
    cupy = guarded("CuPy", partial(check_cuda.check_cupy, driver, torch_cuda, compute))
    kernels = partial(check_cuda.check_sources, cupy, compute)
    self_test = partial(check_nccl.check_nccl, cupy, len(driver.gpus) if driver else 0)
    return [
        guarded("NVIDIA driver", partial(check_gpu.check_driver, driver)),
        guarded("GPUs", partial(check_gpu.check_gpus, driver)),
        guarded("peer access", partial(check_gpu.check_peers, driver)),
        torch_works,
        cupy,
        guarded("CUDA kernels", kernels) if has_torch else _skipped("CUDA kernels"),
        guarded("NCCL", partial(check_nccl.check_nccl_packages, cupy, torch_cuda)),
        *([guarded("NCCL self-test", self_test)] if compute else []),
    ]


def _skipped(name: str) -> Finding:
    return Finding(name, "missing", "not checked, because torch does not work", "repair torch first")
