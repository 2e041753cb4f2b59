"""Train on P ranks that torchrun starts: torchrun --nproc-per-node 2 examples/torchrun_train.py STORE RUN.

Without a STORE that exists, a graph is generated there. The same without a script: torchrun --nproc-per-node 2 -m mggcn
train STORE --out RUN. Without torchrun mggcn starts the ranks itself: mggcn train STORE --out RUN --ranks 2.
"""

import json
import os
import sys
import time
from pathlib import Path

from mggcn.cli.entry import main as mggcn


def main():
    if len(sys.argv) != 3 or "RANK" not in os.environ:
        print("usage: torchrun --nproc-per-node P examples/torchrun_train.py STORE RUN", file=sys.stderr)
        return 2
    store, run = Path(sys.argv[1]), Path(sys.argv[2])
    first = os.environ["RANK"] == "0"
    if first and not store.exists():
        mggcn(["generate", "community", str(store), "--vertices", "2000", "--edges", "20000"])
    while not store.exists():  # a store appears whole, by renaming
        time.sleep(0.1)

    # Every rank makes this call; the ranks find each other by torchrun's environment, and rank 0 prints and writes.
    code = mggcn(["train", str(store), "--out", str(run), "--epochs", "40", "--set", "model.hidden=32"])
    if first and code == 0:
        result = json.loads((run / "result.json").read_text())
        print(f"test accuracy {result['best']['test']:.3f} on {os.environ['WORLD_SIZE']} ranks")
    return code


if __name__ == "__main__":
    sys.exit(main())
