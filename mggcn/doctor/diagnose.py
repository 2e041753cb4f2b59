"""`mggcn doctor`: what is installed, which device and transport work, and how to mend what does not. No network."""

from __future__ import annotations

from functools import partial

from mggcn.doctor import cpu, gpu, packages
from mggcn.doctor.findings import Finding, exit_status, guarded, render

__all__ = ["Finding", "diagnose", "exit_status", "render"]


def diagnose(library: cpu.KernelLibrary = cpu.native_library, compute: bool = True) -> list[Finding]:
    """Look at everything that a run needs or can use; `library` loads the CPU kernels.

    Without `compute` the GPUs are queried but not used, so that a training that runs on them is not disturbed.

    Cost: seconds, most of them for importing torch. A check that needs torch is skipped if torch does not import.
    """
    try:
        needed, optional = packages.check_packages()
    except ImportError as error:  # mggcn runs from a checkout, or there is no `packaging`
        told = f"versions are not compared: {error}"
        needed, optional = [Finding("packages", "missing", told, "install mggcn: docs/install.md")], []
    # Before the OpenMP check, which counts what torch and the kernels have loaded.
    kernels = guarded("CPU kernels", partial(cpu.check_kernels, library))
    with_kernels = {"dense products": cpu.check_dense, "measured rates": cpu.check_rates}
    with_torch = {"system": cpu.check_system, "OpenMP": cpu.check_openmp, "gloo": cpu.check_gloo}
    has_torch = packages.has_torch()
    return [
        *needed,
        kernels,
        *(guarded(name, check) for name, check in with_kernels.items() if kernels.state == "ok"),
        *(guarded(name, check) if has_torch else _skipped(name) for name, check in with_torch.items()),
        guarded("memory", cpu.check_memory),
        *(_gpu(compute) if has_torch else [_skipped("GPU")]),
        *optional,
    ]


def _gpu(compute: bool) -> list[Finding]:
    machine = gpu.find_machine()
    if not (machine.driver or machine.gpus or machine.cuda or gpu.installed(gpu.CUPY)):
        return [Finding("GPU", "ok", "none here: runs use the CPU")]
    cupy = guarded("CuPy", partial(gpu.check_cupy, machine, compute))
    return [
        guarded("GPUs", partial(gpu.check_gpus, machine)),
        guarded("peer access", partial(gpu.check_peers, machine)),
        guarded("torch CUDA", partial(gpu.check_torch, machine, compute)),
        cupy,
        guarded("CUDA kernels", partial(gpu.check_sources, cupy, compute)),
        guarded("NCCL", partial(gpu.check_nccl, machine, compute)),
    ]


def _skipped(name: str) -> Finding:
    return Finding(name, "missing", "not checked, because torch does not work", "repair torch first")
