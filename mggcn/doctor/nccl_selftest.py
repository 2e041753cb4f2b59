"""NCCL's self-test, a program of its own: it may hang or end the process. Prints one line of JSON.

    python -m mggcn.doctor.nccl_selftest NUM_GPUS

All GPUs are driven by this one process, each adds its rank + 1: every element must become n (n + 1) / 2.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.cuda import nccl

COUNT = 1 << 16
"""Elements per GPU: enough for every channel to have its part."""


def main(num_gpus: int) -> dict[str, Any]:
    """All-reduce on all GPUs; return NCCL's version and the GPUs whose sums are wrong, or the error."""
    try:
        buffers = [torch.full((COUNT,), gpu + 1.0, device=f"cuda:{gpu}") for gpu in range(num_gpus)]
        nccl.all_reduce(buffers)
        right = num_gpus * (num_gpus + 1) / 2
        wrong = [gpu for gpu, buffer in enumerate(buffers) if not bool((buffer == right).all())]
        return {"version": ".".join(map(str, nccl.version())), "wrong": wrong}
    except Exception as error:  # of whatever class torch makes of NCCL's
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
