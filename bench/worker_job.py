"""A whole run as `mggcn train` does it, in a fresh process: plan, run folder, ranks, epochs, one evaluation at the end.

Usage: worker_job.py STORE JSON-OF-SETTINGS; prints planned and measured bytes as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path


def main() -> None:
    from mggcn import native

    native.limit_spinning()
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store
    from mggcn.jobs import train as training

    store, config = Path(sys.argv[1]), from_tables(json.loads(sys.argv[2]))
    graph = open_store(store)
    with tempfile.TemporaryDirectory() as temporary:
        planned = training.prepare_run(config, graph, store, Path(temporary) / "run")
        result = training.run_training(planned, graph, quiet=True)
        ranks = json.loads((planned.folder / "plan.json").read_text())["per_rank"]
    largest = max(ranks, key=lambda rank: rank["total_bytes"])
    known = ("arena_bytes", "paper_bytes", "regions", "setup_bytes")
    found = ("planned_peak_bytes", "measured_peak_bytes", "seconds_per_epoch", "setup_seconds")
    print(json.dumps({k: largest[k] for k in known} | {k: result[k] for k in found}))


if __name__ == "__main__":
    main()
