"""Records what a CUDA build of torch has of NCCL, in torch_nccl.json: `python -m tests.comm.torch_nccl`, with such a torch.

No GPU is needed; CI, whose torch has no NCCL, compares its own with the record (test_nccl.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RECORD = Path(__file__).with_suffix(".json")


def settings() -> list[str]:
    """Return the environment variables that this torch reads, as its headers name them."""
    headers = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d").glob("*.hpp")
    return sorted({name for header in headers for name in re.findall(r'"(TORCH_(?:NCCL|FR)_\w+)"', header.read_text())})


def found() -> dict[str, Any]:
    """Return the attributes of ProcessGroupNCCL and its Options, and the environment variables that it reads."""
    classes = {"ProcessGroupNCCL": dist.ProcessGroupNCCL, "Options": dist.ProcessGroupNCCL.Options}
    return {
        "torch": torch.__version__,
        "attributes": {
            name: sorted(each for each in dir(kind) if not each.startswith("__") and "pybind11" not in each)
            for name, kind in classes.items()
        },
        "settings": settings(),
    }


if __name__ == "__main__":
    RECORD.write_text(json.dumps(found()) + "\n")
