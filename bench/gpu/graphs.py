"""The graphs and networks of the GPU's benchmark: real ones if there are, else synthetic ones.

Vertices, edges, features and classes of ogbn-arxiv, ogbn-products, Reddit and Cora; arxiv-ordered is numbered community by
community, arxiv-hubs has a longest row of 13,410 entries, as ogbn-arxiv has of 13,161 and arxiv-like of 5,211. one-hub has
one of 20,000 and no other beyond 100. products-hubs has one of 17,623, as ogbn-products of 17,481, in a tenth of its
vertices and edges: of all of them PyG's GAT would hold 541 GiB of rows for each edge, of a tenth 54, its maximum 100.
"""

from __future__ import annotations

import threading
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.graphs import Made, made_store
from mggcn.config import RunConfig

SYNTHETIC = {
    "cora": Made(2_708, 5_278, 1_433, 7),
    "arxiv-like": Made(169_343, 1_170_000, 128, 40),
    "arxiv-ordered": Made(169_343, 1_170_000, 128, 40, by_class=True),
    "arxiv-hubs": Made(169_343, 1_170_000, 128, 40, homophily=0.3, power=2.3),
    "one-hub": Made(169_343, 1_170_000, 128, 40, power=10.0, hub=20_000),
    "products-hubs": Made(244_903, 6_185_914, 100, 47, homophily=0.3, power=2.7),
    "products-like": Made(2_449_029, 61_859_140, 100, 47),
    "reddit-like": Made(232_965, 57_307_946, 602, 41),
}
ORDERED = "arxiv-ordered"
REAL = ("cora", "cnr_2000")
"""Graphs that are taken from the data folder if it has them."""
CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "cora 2x16": ("cora", (16,)),
    "arxiv-like 3x256": ("arxiv-like", (256, 256)),
    "arxiv-ordered 3x256": ("arxiv-ordered", (256, 256)),
    "products-like 3x256": ("products-like", (256, 256)),
    "reddit-like 2x16": ("reddit-like", (16,)),
    "reddit-like 2x512": ("reddit-like", (512,)),
}
"""The acceptance cases of training epochs (layers x width): a graph and the hidden widths."""
HUBS = ("arxiv-hubs", "one-hub", "products-hubs")
LAYERS: dict[str, tuple[str, tuple[int, ...], str]] = {
    f"{graph} {kind} 3x256": (graph, (256, 256), kind) for graph in HUBS for kind in ("gat", "sage-max")
}
"""Likewise of layers that walk the rows of the graph in their own ways, by their names in bench.peers.attention.MODELS:
attention and GraphSAGE's maximum. In float32 alone: attention's rows have no room for bfloat16."""
PRECISIONS = tuple(
    name
    for name in ("fp32", "mixed", "bf16", "tf32")
    if name in typing.get_args(typing.get_type_hints(RunConfig)["precision"])
)
"""Those of run.precision that are measured; tf32 last, whose setting is the process's."""


def real_store(name: str, data: str) -> Path | None:
    """The store of a real graph, None if there is none."""
    found = Path(data) / name
    return found if data and name in REAL and (found / "meta.json").is_file() else None


def workload(name: str, scale: float) -> Made:
    """A synthetic graph at a scale; Cora shrinks later."""
    return SYNTHETIC[name].scaled(min(1.0, 1000 * scale) if name == "cora" else scale)


def available(name: str, data: str) -> bool:
    """Whether there is such a graph here."""
    return name in SYNTHETIC or real_store(name, data) is not None


def find_store(name: str, scale: float, cache: str | Path, data: str) -> Path:
    """The store of a graph, generated unless it is there."""
    return real_store(name, data) or made_store(name, workload(name, scale), cache)


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
        while True:
            with self._next:
                name = next(self._waiting, None)
            if name is None:
                return
            try:
                find_store(name, *self._how)
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


def structure(store: Path) -> tuple[Any, Any]:
    """The CSR of a store's rows of in-neighbours, without self-loops added: int64 row pointers, int32 columns."""
    end = "_t" if (store / "indptr_t.npy").exists() else ""
    indptr, indices = (np.load(store / f"{name}{end}.npy") for name in ("indptr", "indices"))
    return indptr.astype(np.int64, copy=False), indices.astype(np.int32, copy=False)
