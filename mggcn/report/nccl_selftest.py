"""NCCL's self-test, a program of its own: it may hang or end the process. Prints one line of JSON.

    python -m mggcn.report.nccl_selftest NUM_GPUS

All GPUs are driven by this one process, each adds its rank + 1: every element must become n (n + 1) / 2.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COUNT = 1 << 16
"""Elements per GPU: enough for every channel to have its part."""


def all_reduce(torch: Any, cupy: Any, nccl: Any, num_gpus: int) -> list[int]:
    """All-reduce on all GPUs; return those whose sums are wrong. Needs none of CuPy's own kernels, as runs do not."""
    communicators = nccl.NcclCommunicator.initAll(num_gpus)
    buffers = [torch.full((COUNT,), gpu + 1.0, device=f"cuda:{gpu}") for gpu in range(num_gpus)]
    nccl.groupStart()
    for gpu, (communicator, buffer) in enumerate(zip(communicators, buffers, strict=True)):
        with cupy.cuda.Device(gpu), torch.cuda.device(gpu):
            at, stream = buffer.data_ptr(), torch.cuda.current_stream().cuda_stream
            communicator.allReduce(at, at, COUNT, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)
    nccl.groupEnd()
    right = num_gpus * (num_gpus + 1) / 2
    wrong = [gpu for gpu, buffer in enumerate(buffers) if not bool((buffer == right).all())]
    for communicator in communicators:
        communicator.destroy()
    return wrong


def libraries(maps: Iterable[str]) -> list[str]:
    """Return the distinct NCCL libraries among a process's memory maps."""
    fields = (line.split(maxsplit=5) for line in maps)
    paths = {parts[5].strip() for parts in fields if len(parts) == 6}
    return sorted(path for path in paths if re.fullmatch(r"libnccl\.so[.\d]*", Path(path).name))


def main(num_gpus: int, maps: Path = Path("/proc/self/maps")) -> dict[str, Any]:
    """Run the test; return version, wrong GPUs and libraries, or the error."""
    try:
        torch = importlib.import_module("torch")  # before CuPy, as in a run: torch's NCCL is then everybody's
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
        if not nccl.available:
            return {"error": "CuPy finds no libnccl.so.2"}
        version = int(nccl.get_version())
        wrong = all_reduce(torch, cupy, nccl, num_gpus)
    except Exception as error:  # NCCL's errors are CuPy's classes, which exist only once it is imported.
        return {"error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        return {"version": version, "wrong": wrong, "libraries": libraries(maps.read_text().splitlines())}
    return {"version": version, "wrong": wrong, "libraries": []}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
