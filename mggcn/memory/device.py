"""Kinds of devices as a plan sees them, and the types that a precision stores and sums in. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mggcn.backend.cpu.cores import usable_cores
from mggcn.config import Config, RunConfig
from mggcn.host import compiles_modules
from mggcn.memory.units import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModel:
    """Fixed costs and sizes of one kind of device."""

    process_bytes: int
    """A process before it holds any data."""
    rank_bytes: int
    """Bytes that the libraries add for every rank of a process."""
    most_block_rows: int
    """Rows of a block of a dense product, at most: what follows the product finds the block in the cache."""
    cache_bytes: int
    """Bytes of the cache that a block may fill, which is written in place; its rows are a power of two, whole tiles."""
    partials: int
    """Row chunks whose column sums are added in a fixed order: KernelBackend.partials."""
    is_host: bool
    """Whether the device uses the host's memory, in which set-up reads and sorts."""

    def block_rows(self, row_bytes: int) -> int:
        """Return the rows of a block whose rows take `row_bytes`."""
        fitting = max(TILE_ROWS, self.cache_bytes // row_bytes)
        return min(self.most_block_rows, 1 << fitting.bit_length() - 1)


COMPILING_BYTES = 6 * MIB
"""What a process has beside `process_bytes` where Python compiles what it imports: 179 MiB in all (torch 2.13)."""
TILE_ROWS = 128
"""Rows of the result that a block of threads computes in cuBLAS's products."""
ANY = 2**62

DEVICES = {
    # Python, torch, its math libraries and their work space, without pages of files, which the system takes back as it
    # needs: 167 MiB once torch is imported, 166 to 174 with what allocators keep of set-up (torch 2.13, glibc 2.36).
    # 2048 rows: 2 MiB at width 256.
    "cpu": DeviceModel(
        process_bytes=176 * MIB, rank_bytes=0, most_block_rows=2048, cache_bytes=ANY, partials=64, is_host=True
    ),
    # Context, cuBLAS and kernels of a process; cuBLAS takes 32 MiB of work space per stream. 20 MiB: half of an A100's
    # L2, each half of which may hold a copy. An H100's 25 MiB give the same powers of two at most widths, so a plan is the
    # same wherever it is made: 16384 rows at width 256 in float32, whose 256 tiles of 128 x 128 are two rounds of its 132
    # multiprocessors. Estimates: docs/gpu.md says what was measured.
    "cuda": DeviceModel(
        process_bytes=868 * MIB,
        rank_bytes=32 * MIB,
        most_block_rows=ANY,
        cache_bytes=20 * MIB,
        partials=1024,
        is_host=False,
    ),
}


def runtime_bytes(device: str) -> int:
    """Return the bytes of a process of this machine before it holds any data."""
    return DEVICES[device].process_bytes + COMPILING_BYTES * compiles_modules()


STORAGE = {"fp32": "fp32", "tf32": "fp32", "mixed": "fp32", "bf16": "bf16", "fp64": "fp64"}
"""Type of activations and gradients of activations that stay on a rank by run.precision."""
OPERAND = STORAGE | {"mixed": "bf16"}
"""Type of what is multiplied with the graph, and so of messages, by run.precision."""
DENSE = {"fp32": "fp32", "tf32": "tf32", "mixed": "fp32", "bf16": "bf16", "fp64": "fp64"}
"""Name of the rate of dense products in a machine's file by run.precision."""
TF32_PARTS = {"fp32": 2, "tf32": 1, "mixed": 2, "bf16": 2}
"""Numbers of TF32 that a float32 is the sum of in a GPU's own dense products, by run.precision."""
REAL = {"fp32": "fp32", "tf32": "fp32", "mixed": "fp32", "bf16": "fp32", "fp64": "fp64"}
"""Type of sums, scales, edge values, weights and their gradients by run.precision."""


def scale_dtype(precision: str) -> str:
    """Return NumPy's name of the type of scales and edge values by run.precision."""
    return {"fp32": "float32", "fp64": "float64"}[REAL[precision]]


def threads_of(run: RunConfig) -> int:
    """Return the threads of one rank: as set, or an equal share of the cores that this process may use."""
    return run.threads or max(1, usable_cores() // run.ranks)


def runs_nccl(run: RunConfig) -> bool:
    """Return whether NCCL moves the messages of a run, as `auto` chooses on several GPUs."""
    return run.transport == "nccl" or (run.transport == "auto" and run.ranks > 1 and not DEVICES[run.device].is_host)


def not_captured(config: Config) -> str:
    """Return why a GPU's steps are launched op by op, not as one captured CUDA graph each; "" if they are captured."""
    run = config.run
    if run.timeline:
        return "the timeline measures each op"
    if run.transport == "threads":
        return "ranks that are threads meet on the host in every message"
    if config.sample.batch:
        if config.shares_batches:
            return "ranks exchange other numbers of rows in every batch"
        return "a relation has other rows in every batch" if config.model.typed else ""
    return (
        "delayed aggregates send something else in every epoch"
        if run.strategy == "delayed" and run.delay_epochs
        else ""
    )


def launching(config: Config) -> str:
    """Return in words how a GPU's epochs or steps are launched; "" for a device that computes during each call."""
    if DEVICES[config.run.device].is_host:
        return ""
    a_step, two = ("a step", "two steps") if config.sample.batch else ("an epoch", "two epochs")
    reason = not_captured(config)
    return f"{a_step} is " + (f"launched op by op: {reason}" if reason else f"captured as a CUDA graph after {two}")
