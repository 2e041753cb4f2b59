"""The kernels of a device for tensors outside of a run: the one module of this room that names concrete classes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from mggcn.assemble.plan import figures_here, threads_per_rank
from mggcn.backend.base import KernelBackend
from mggcn.backend.cuda.base import Device
from mggcn.backend.cuda.sizes import workspace_bytes
from mggcn.comm.base import Communicator
from mggcn.config import Config, RunConfig
from mggcn.errors import BackendError
from mggcn.memory.device import STORAGE
from mggcn.train.runtime import DTYPES

BackendOf = Callable[[torch.dtype, int], KernelBackend]
"""Gives the kernels for a storage type and sparse products of a width. Raises: BackendError for other types."""
TYPES = (torch.float32, torch.float64, torch.bfloat16)
NARROWEST = 128
"""Work space for hub rows is as wide as a product, rounded up to a power of two, but not less than this."""


def backends(device: str | torch.device, threads: int, num_edges: int) -> BackendOf:
    """Return a function that returns the kernels of a device and makes them only once.

    threads: of the CPU; 0 takes torch's. num_edges: of the largest sparse product.
    Raises: BackendError if the device is unknown or not there.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu(threads or torch.get_num_threads())
    if device.type == "cuda":
        return _cuda(device.index or 0, num_edges)
    raise BackendError(f'expected device "cpu" or "cuda", got "{device}"; move the tensors to one of these')


def _cpu(threads: int) -> BackendOf:
    from mggcn.backend.cpu.backend import CpuBackend

    figures = figures_here(Config(run=RunConfig(threads=threads)))
    made = functools.cache(lambda dtype: CpuBackend(dtype, threads, figures=figures))

    def backend_of(dtype: torch.dtype, cols: int) -> KernelBackend:
        _check(dtype, "CPU")
        return made(dtype)

    return backend_of


def _cuda(index: int, num_edges: int) -> BackendOf:
    from mggcn.backend.cuda.backend import CudaBackend
    from mggcn.backend.cuda.device import CudaDevice

    device = CudaDevice(index, capture=False)

    @functools.cache
    def made(dtype: torch.dtype, cols: int) -> KernelBackend:
        item = 8 if dtype == torch.float64 else 4
        return CudaBackend(dtype, device, workspace_bytes(num_edges, cols, item))

    def backend_of(dtype: torch.dtype, cols: int) -> KernelBackend:
        _check(dtype, "GPU")
        return made(dtype, max(NARROWEST, 1 << (cols - 1).bit_length()))

    return backend_of


def rank_backend(
    config: Config, comm: Communicator, device_of: Callable[[Config, Communicator], Device], num_edges: int, cols: int
) -> KernelBackend:
    """Return the kernels of one rank of a shared graph, for sparse products of at most these edges and columns."""
    dtype = DTYPES[STORAGE[config.run.precision]]
    if config.run.device == "cpu":
        from mggcn.backend.cpu.backend import CpuBackend

        return CpuBackend(dtype, threads_per_rank(config), figures=figures_here(config))
    from mggcn.backend.cuda.backend import CudaBackend

    item = 8 if dtype == torch.float64 else 4
    return CudaBackend(dtype, device_of(config, comm), workspace_bytes(num_edges, cols, item))


def _check(dtype: torch.dtype, where: str) -> None:
    if dtype not in TYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in TYPES)
        raise BackendError(
            f"a {where}'s kernels take {names}, got {str(dtype).removeprefix('torch.')}; convert the tensor"
        )
