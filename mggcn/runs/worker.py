"""A rank process: `python -m mggcn.runs.worker JOB FOLDER --rank R --size P --rendezvous FILE`, started by mggcn itself."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mggcn import native, output
from mggcn.assemble.plan import bind_process, dense_products
from mggcn.comm.rank import rank_main, ready_for_signals
from mggcn.runs.folder import read_run

if TYPE_CHECKING:
    from mggcn.comm.base import Communicator


def main() -> int:
    """Parse the arguments from the parent process and run the rank."""
    output.settle()
    ready_for_signals()
    native.limit_spinning()
    parser = argparse.ArgumentParser(prog="mggcn.runs.worker")
    parser.add_argument("job", choices=("train", "predict"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--arguments", type=json.loads, required=True)
    a = parser.parse_args()
    config, _, _ = read_run(a.folder)
    bind_process(config, a.rank)

    def body(comm: Communicator) -> None:
        if a.job == "train":
            from mggcn.runs.train import train_worker

            train_worker(comm, a.folder, **a.arguments)
        else:
            from mggcn.runs.predict import predict_worker

            with dense_products(config):
                predict_worker(comm, a.folder, a.arguments)

    return rank_main(a.rank, a.size, a.rendezvous, config.run.timeout_s, a.folder, body, transport=config.run.transport)


if __name__ == "__main__":
    sys.exit(main())
