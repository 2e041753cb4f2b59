"""What the GPU can do at best: copies, rows gathered at random, dense products, launches.

Every other part is judged by these figures, and bench/notes/0005-gpu-epoch.md predicts from them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.lab import Lab, attempt, tf32
from bench.gpu.predict import FUSED
from mggcn.backend.base import Epilogue, Gradient
from mggcn.backend.cuda.dense_blocks import dense_bytes
from mggcn.backend.cuda.dense_products import DenseProducts
from mggcn.backend.cuda.rows import PARTIALS
from mggcn.memory.device import TF32_PARTS

GB = 1e9
ROW_BYTES = (64, 128, 256, 512, 1024, 2048)
DEGREE = 32
"""Rows summed into one: about the degree of a real graph, so that writing the results costs little."""
PRODUCTS = {
    "h W, 256 x 256": (256, 256, "nn"),
    "h W, 100 x 256": (100, 256, "nn"),
    "h W, 602 x 512": (602, 512, "nn"),
    "h W, 256 x 40": (256, 40, "nn"),
    "g W^T, 256 x 256": (256, 256, "nt"),
    "h^T g, 256 x 256": (256, 256, "tn"),
    "h^T g, 602 x 512": (602, 512, "tn"),
}
"""Dense products of the acceptance cases with all rows of the graph: widths and which side is transposed."""
PRECISIONS = {"fp32": (torch.float32, False), "tf32": (torch.float32, True), "bf16": (torch.bfloat16, False)}


def measure(lab: Lab, case: str) -> None:
    """Write rows of the kinds copy, read, gather, gemm and launch."""
    size = 1 << (18 if lab.emulated else 30)
    attempt(lab, {"kind": "copy", "bytes": 2 * size}, copy, lab, size)
    attempt(lab, {"kind": "read", "bytes": size}, read, lab, size)
    footprints = {"a quarter of L2": lab.device.traits.l2_bytes // 4, "4 L2": 4 * lab.device.traits.l2_bytes}
    footprints["2 GiB"] = 2 << 30
    if lab.emulated:
        footprints = {"16 KiB": 1 << 14, "64 KiB": 1 << 16}
    for where, footprint in footprints.items():
        for row_bytes in ROW_BYTES:
            what = {"kind": "gather", "footprint": where, "row_bytes": row_bytes}
            attempt(lab, what, gather, lab, row_bytes, footprint)
    rows = 64 if lab.emulated else 1 << 20
    for name, shape in PRODUCTS.items():
        for precision in PRECISIONS:
            what = {"kind": "gemm", "product": name, "rows": rows, "precision": precision}
            attempt(lab, what, dense_product, lab, rows, shape, precision)
    if lab.device.block_kernels is not None:
        for precision in PRECISIONS:
            for name in FUSED:
                what = {"kind": "fused", "product": name, "rows": rows, "precision": precision}
                attempt(lab, what, fused_product, lab, rows, name, precision)
    attempt(lab, {"kind": "launch"}, launches, lab)


def copy(lab: Lab, size: int) -> dict[str, Any]:
    source, target = lab.random(size // 4096, 1024), lab.random(size // 4096, 1024)
    found = lab.time_calls([lambda: target.copy_(source)])
    return {**found, "gb_per_s": 2 * size / found["median"] / GB}


def read(lab: Lab, size: int) -> dict[str, Any]:
    source = lab.random(size // 4096, 1024)
    found = lab.time_calls([lambda: torch.sum(source)])
    return {**found, "gb_per_s": size / found["median"] / GB}


def gather(lab: Lab, row_bytes: int, footprint: int) -> dict[str, Any]:
    """Rows of `row_bytes` at random out of `footprint` bytes; the bytes are those of the rows, as for a sparse product."""
    device, vectors = lab.device.torch_device, row_bytes // 16
    gathered = 1 << (14 if lab.emulated else 30)
    groups = max(1, gathered // (row_bytes * DEGREE))
    dense = lab.random(footprint // row_bytes, row_bytes // 4)
    index = torch.randint(dense.shape[0], (groups * DEGREE,), dtype=torch.int32, device=device)
    out = torch.empty(groups, row_bytes // 4, device=device)
    kernel = lab.device.compile(Path(__file__).with_name("gather.cu"), ()).get_function("gather")
    grid = (-(-groups * vectors // 128),)

    def call() -> None:
        addresses = (np.uint64(t.data_ptr()) for t in (index, dense, out))
        kernel(grid, (128,), (*addresses, np.int64(groups), np.int32(DEGREE), np.int32(vectors)), shared_mem=0)

    found = lab.time_calls([call])
    check(out[:2], dense[index[: 2 * DEGREE].long()].view(-1, DEGREE, row_bytes // 4).sum(1)[:2])
    nbytes = groups * DEGREE * (row_bytes + 4) + out.nbytes
    return {**found, "bytes": nbytes, "gb_per_s": nbytes / found["median"] / GB}


def check(got: Tensor, expected: Tensor) -> None:
    """Raise ValueError if a kernel that is being timed computes something else."""
    if not torch.allclose(got.float(), expected.float(), rtol=1e-4, atol=1e-3):
        raise ValueError("the timed kernel is wrong")


def dense_product(lab: Lab, rows: int, shape: tuple[int, int, str], precision: str) -> dict[str, Any]:
    d, e, form = shape
    dtype, allow = PRECISIONS[precision]
    h, g, w = lab.random(rows, d, dtype), lab.random(rows, e, dtype), lab.random(d, e, dtype)
    call: dict[str, Callable[[], object]] = {
        "nn": lambda: torch.mm(h, w, out=g),
        "nt": lambda: torch.mm(g, w.t(), out=h),
        "tn": lambda: torch.mm(h.t(), g, out=w),
    }
    with tf32(allow):
        found = lab.time_calls([call[form]])
    flop, nbytes = 2 * rows * d * e, rows * (d + e) * dtype.itemsize
    rates = {"tflop_per_s": flop / found["median"] / 1e12, "gb_per_s": nbytes / found["median"] / GB}
    return {**found, "flop": flop, "bytes": nbytes, **rates}


def fused_product(lab: Lab, rows: int, name: str, precision: str) -> dict[str, Any]:
    dtype, width, device = PRECISIONS[precision][0], 256, lab.device.torch_device
    h, g, w = (lab.random(n, width, dtype) for n in (rows, rows, width))
    room = torch.empty(dense_bytes(width, width, dtype.itemsize), dtype=torch.uint8, device=device)
    kernels = lab.device.block_kernels
    assert kernels is not None
    products = DenseProducts(kernels, room, TF32_PARTS[precision])
    bias, partials = torch.zeros(width, device=device), torch.zeros(PARTIALS, width, dtype=torch.float64, device=device)
    call: dict[str, Callable[[], object]] = {
        FUSED[0]: lambda: products.rows(h, w, g, epilogue=Epilogue(bias=bias, relu=True)),
        FUSED[1]: lambda: products.rows_grad(g, w.t(), h, Gradient(partials=partials)),
    }
    found = lab.time_calls([call[name]])
    flop = 2 * rows * width**2
    return {**found, "flop": flop, "tflop_per_s": flop / found["median"] / 1e12}


def launches(lab: Lab) -> dict[str, Any]:
    """Seconds of a kernel that does nothing much, in a long chain: as nodes of a graph, and launched by torch."""
    x = torch.zeros(64, device=lab.device.torch_device)
    captured = lab.time_calls([lambda: x.add_(1)] * (2 if lab.emulated else 200))
    count = 2 if lab.emulated else 2000
    start = lab.device.timestamp()
    for _ in range(count):
        x.add_(1)
    end = lab.device.timestamp()
    lab.device.synchronize()
    return {**captured, "launched": end.seconds_since(start) / count}
