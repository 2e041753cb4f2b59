"""What comparing digests adds to the first read of a store: seconds with and without, interleaved, medians and spread.

`python bench/store_read.py --gib 1` writes a store of random features to a temporary folder and reads it in windows, as
set-up does; `--cold` drops its pages from the cache before each read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import ArrayRows
from mggcn.graph.file_rows import FileRows
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.graph.trusted import record_of

WIDTH = 256
WINDOW = 16 << 20


def read_all(store: Path, compared: bool, cold: bool) -> tuple[float, float]:
    """Open the store and read its features; return the seconds of both."""
    path = store / "features.npy"
    record_of(store).unlink(missing_ok=True)  # else a file that was compared before is trusted
    if cold:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages that are not written stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    rows = open_store(store).features
    opened = time.perf_counter()
    assert isinstance(rows, FileRows)
    rows = rows if compared else replace(rows, checked=None)
    step = WINDOW // (4 * WIDTH)
    for first in range(0, rows.shape[0], step):
        rows.read(first, first + step)
    return opened - start, time.perf_counter() - opened


def reopened(store: Path) -> float:
    """Return the seconds of opening a store whose files were compared before."""
    start = time.perf_counter()
    open_store(store)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the store is written, the disk that is measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = int(args.gib * 2**30 / (4 * WIDTH))
        features = np.random.default_rng(17).random((rows, WIDTH), np.float32)
        store = Path(folder) / "store"
        graph = from_arrays(edges=np.array([[0, 1], [1, 0]]), num_vertices=rows)
        write_store(replace(graph, features=ArrayRows(features)), store)
        found: dict[bool, list[float]] = {True: [], False: []}
        opens = []
        for _ in range(args.repeats):
            for compared in (False, True):
                opened, seconds = read_all(store, compared, args.cold)
                opens.append(opened)
                found[compared].append(seconds)
        again = [reopened(store) for _ in range(args.repeats)]
    for compared, seconds in found.items():
        rate = args.gib / statistics.median(seconds)
        print(
            f"{'with' if compared else 'without'} digests: median {statistics.median(seconds):.3f} s "
            f"({min(seconds):.3f} to {max(seconds):.3f}), {rate:.2f} GiB/s"
        )
    print(f"opening, nothing compared before: median {1e3 * statistics.median(opens):.1f} ms")
    print(f"opening again: median {1e3 * statistics.median(again):.1f} ms")
    print(f"ratio of medians {statistics.median(found[True]) / statistics.median(found[False]):.3f}")


if __name__ == "__main__":
    main()
