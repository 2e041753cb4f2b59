"""The graphs of bench/gpu.py: synthetic ones with the extents of known ones, kept in a folder, and real ones if there are.

Vertices, edges (undirected), features and classes of ogbn-arxiv, ogbn-products, Reddit and Cora. Ids are random, so
that neighbours lie anywhere, but in arxiv-ordered: the arxiv-like graph numbered community by community, so that most lie
near each other, as they do in many real graphs.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import WORKLOADS, Workload, make_store

from mggcn.graph.csr import CSR, ArrayRows
from mggcn.graph.store import open_store, write_store
from mggcn.model.runtime import require

Array = npt.NDArray[Any]
ROOT = Path(__file__).resolve().parents[1]

SYNTHETIC = {
    "cora": Workload("cora-like", 2_708, 5_278, 1_433, 7, (16,)),
    "arxiv-like": WORKLOADS["arxiv-like"],
    "arxiv-ordered": WORKLOADS["arxiv-like"],
    "products-like": Workload("products-like", 2_449_029, 61_859_140, 100, 47, (256, 256)),
    "reddit-like": Workload("reddit-like", 232_965, 57_307_946, 602, 41, (512,)),
}
ORDERED = "arxiv-ordered"
REAL = ("cora", "cnr_2000")
"""Graphs that are taken from the data folder if it has them."""


def data_folder() -> Path | None:
    """The folder of the real graphs: $MGGCN_DATA, build/data in the checkout, or shared/data beside it."""
    given = os.environ.get("MGGCN_DATA")
    places = [Path(given)] if given else [ROOT / "build" / "data", ROOT.parent / "shared" / "data"]
    return next((place for place in places if place.is_dir()), None)


def real_store(name: str, data: str) -> Path | None:
    """The store of a real graph, None if there is none."""
    found = Path(data) / name
    return found if data and name in REAL and (found / "meta.json").is_file() else None


def workload(name: str, scale: float) -> Workload:
    """A synthetic graph at a scale; a toy has vertices for its classes, and as many edges as fit. Cora shrinks later."""
    work = SYNTHETIC[name]
    if scale == 1.0:
        return work
    small = work.scaled(min(1.0, 1000 * scale) if name == "cora" else scale)
    vertices = max(small.vertices, 4 * work.classes)
    return dataclasses.replace(small, vertices=vertices, edges=min(small.edges, vertices * (vertices - 1) // 8))


def available(name: str, data: str) -> bool:
    """Whether there is such a graph here."""
    return name in SYNTHETIC or real_store(name, data) is not None


def find_store(name: str, scale: float, cache: str, data: str) -> Path:
    """The store of a graph that has been prepared."""
    key = workload(name, scale).key
    return real_store(name, data) or Path(cache) / (f"ordered-{key}" if name == ORDERED else key)


def prepare_store(name: str, scale: float, cache: Path, data: str) -> None:
    """Generate a graph unless it is there."""
    if real_store(name, data) is not None:
        return
    made, store = make_store(workload(name, scale), cache), find_store(name, scale, str(cache), data)
    if not store.exists():
        subprocess.run([sys.executable, __file__, str(made), str(store)], check=True)


def write_ordered(source: Path, target: Path) -> None:
    """Write a symmetric store with its vertices numbered class by class."""
    graph = open_store(source)
    labels = require(graph.labels).array()
    order = np.argsort(labels, kind="stable")
    indptr, indices = structure(source)
    ones = np.ones(indices.size, dtype=np.float32)
    adj = sp.csr_matrix((ones, indices, indptr), shape=(labels.size, labels.size))[order][:, order].tocsr()
    adj.sort_indices()
    csr = CSR(ArrayRows(adj.indptr.astype(np.int64)), ArrayRows(adj.indices.astype(np.int32)), None, labels.size)
    splits = {name: ArrayRows(rows.array()[:, order].copy()) for name, rows in graph.splits.items()}
    features = ArrayRows(require(graph.features).array()[order])
    ordered = dataclasses.replace(
        graph, name=ORDERED, adj=csr, adj_t=csr, features=features, labels=ArrayRows(labels[order]), splits=splits
    )
    write_store(ordered, target)


class Preparation:
    """Generates graphs in the background, a few at a time, in the order in which they will be needed."""

    def __init__(self, names: Sequence[str], scale: float, cache: Path, data: str, at_once: int = 2) -> None:
        self._errors: dict[str, str] = {}
        self._done = {name: threading.Event() for name in dict.fromkeys(names)}
        self._waiting = iter(list(self._done))
        self._next = threading.Lock()
        self._how = (scale, cache, data)
        for _ in range(at_once):
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        scale, cache, data = self._how
        while True:
            with self._next:
                name = next(self._waiting, None)
            if name is None:
                return
            try:
                prepare_store(name, scale, cache, data)
            except Exception as error:  # whatever goes wrong with one graph, the others are still made
                self._errors[name] = str(error)
            self._done[name].set()

    def ready(self, name: str) -> bool:
        """Whether a graph is there now."""
        return self._done[name].is_set() and name not in self._errors

    def wait(self, name: str, until: float) -> str:
        """Wait for a graph until time.monotonic() passes `until`; return why it is not there, "" if it is."""
        if not self._done[name].wait(max(0.0, until - time.monotonic())):
            return "its graph was not generated in time"
        return self._errors.get(name, "")


def structure(store: Path) -> tuple[Array, Array]:
    """The CSR of a store's rows of in-neighbours, without self-loops added: int64 row pointers, int32 columns."""
    end = "_t" if (store / "indptr_t.npy").exists() else ""
    indptr, indices = (np.load(store / f"{name}{end}.npy") for name in ("indptr", "indices"))
    return indptr.astype(np.int64, copy=False), indices.astype(np.int32, copy=False)


if __name__ == "__main__":
    write_ordered(Path(sys.argv[1]), Path(sys.argv[2]))
