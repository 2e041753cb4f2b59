"""A rank process: `python -m mggcn.worker JOB FOLDER --rank R --size P --rendezvous FILE`, started by mggcn itself."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mggcn.jobs import worker_main


def main() -> int:
    """Parse what the parent passed and run the rank."""
    parser = argparse.ArgumentParser(prog="mggcn.worker")
    parser.add_argument("job", choices=("train", "predict"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--arguments", type=json.loads, default={})
    a = parser.parse_args()
    return worker_main(a.job, a.folder, a.rank, a.size, a.rendezvous, a.quiet, a.arguments)


if __name__ == "__main__":
    sys.exit(main())
