"""The graphs and networks of the comparisons with other libraries, and what is to be reached on them.

Generated graphs have random ids and the share of training vertices of the graph that they are like. 2x512: two layers, the
hidden one 512 wide; 3x256: three layers, both hidden ones 256 wide.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, SEED, WORKLOADS

COMMUNITIES: dict[str, dict[str, Any]] = {
    name: {
        "num_vertices": work.vertices,
        "num_edges": work.edges,
        "num_features": work.features,
        "num_classes": work.classes,
        "train": train,
    }
    for (name, work), train in zip(WORKLOADS.items(), (0.54, 0.66), strict=True)
} | {
    "products-like": {
        "num_vertices": 600_000,
        "num_edges": 7_500_000,
        "num_features": 1,
        "num_classes": 600,
        "homophily": 0.8,
        "power": 2.5,
        "train": 0.08,
    }
}
"""Arguments of mggcn.graph.generate.community; of products only the graph is made like."""
REAL = ("cnr_2000", "dblp_2010", "amazon_computers")
DRAWN = {"features": 128, "classes": 40, "train": 0.54}
"""What a real graph without features gets: random ones, as many as arxiv has."""
SPMM_GRAPHS = (*COMMUNITIES, *REAL)
CACHE = HERE.parent / "build" / "graphs"


@dataclass(frozen=True)
class Case:
    """A network on a graph, and goals: how many times faster than DGL and PyG, in bf16 than DGL, share of the bound."""

    graph: str
    hidden: tuple[int, ...]
    over_dgl: float | None = None
    over_pyg: float | None = None
    bf16_over_dgl: float | None = None
    of_bound: float | None = None

    @property
    def name(self) -> str:
        return f"{self.graph} {len(self.hidden) + 1}x{self.hidden[0]}"


CASES = {
    case.name: case
    for case in (
        Case("reddit-like", (512,), 4.0, 6.0, of_bound=0.75),
        Case("reddit-like", (256, 256), 3.0, 6.0, of_bound=0.75),
        Case("arxiv-like", (16,), 2.0, 4.0),
        Case("arxiv-like", (512,), 1.5, 2.5, bf16_over_dgl=2.5, of_bound=0.6),
        Case("arxiv-like", (256, 256), 1.5, 2.5, bf16_over_dgl=2.5, of_bound=0.6),
        Case("cnr_2000", (128, 128)),
        Case("dblp_2010", (128, 128)),
        Case("amazon_computers", (512, 512)),
    )
}
MEMORY_OF_DGL = 0.6
"""Largest accepted peak memory of a process, over that of DGL's."""


def find_data(folder: Path | None = None) -> Path | None:
    """Return the folder of the real graphs: as given, $MGGCN_DATA, or ../shared/data beside the repository."""
    places = [folder, os.environ.get("MGGCN_DATA"), HERE.parents[1] / "shared" / "data"]
    return next((Path(place) for place in places if place and Path(place).is_dir()), None)


def available(graph: str, data: Path | None) -> bool:
    """Whether a graph can be made: generated, or in the folder of real ones."""
    return graph in COMMUNITIES or (data is not None and (data / graph).is_dir())


def store_of(graph: str, cache: Path, scale: float = 1.0, data: Path | None = None, **sizes: float) -> Path:
    """Return a graph's store in the cache, made in a process of its own unless it is there.

    scale: of vertices and edges of a generated graph; sizes: num_vertices or num_edges times that again.
    """
    arguments: dict[str, Any] = {}
    if graph in COMMUNITIES:
        arguments = dict(COMMUNITIES[graph])
        for key in ("num_vertices", "num_edges"):
            arguments[key] = round(arguments[key] * scale * sizes.get(key, 1.0))
        arguments["num_vertices"] = max(arguments["num_vertices"], arguments["num_classes"])
        arguments["seed"] = SEED
    numbers = [str(value) for value in arguments.values()]
    store = cache / "-".join(["peers", graph, *numbers])
    if not store.exists():
        print(f"making {store.name}", file=sys.stderr)
        cache.mkdir(parents=True, exist_ok=True)
        source = "" if data is None else str(data / graph)
        job = json.dumps({"arguments": arguments, "source": source, "store": str(store)})
        subprocess.run([sys.executable, str(HERE / "peers_cases.py"), job], check=True)
    return store


def make(arguments: dict[str, Any], source: str, store: str) -> None:
    """Write the store of a generated graph, or a copy of a real one beside which partitions may be kept."""
    from mggcn.graph.generate import community
    from mggcn.graph.store import open_store, write_store

    if arguments:
        write_store(community(**arguments, name=Path(store).name), store)
    elif (Path(source) / "labels.npy").exists():
        shutil.copytree(source, store, ignore=shutil.ignore_patterns("partitions"))
    else:
        write_store(with_features(open_store(source)), store)


def with_features(graph: Any) -> Any:
    """Give a graph that has none random features, labels and a split: they cost what others would."""
    import dataclasses

    import numpy as np

    from mggcn.graph.csr import ArrayRows

    rng, n, classes = np.random.default_rng(SEED), graph.num_vertices, int(DRAWN["classes"])
    return dataclasses.replace(
        graph,
        features=ArrayRows(rng.standard_normal((n, int(DRAWN["features"])), np.float32)),
        labels=ArrayRows(rng.integers(classes, size=n)),
        splits={"train": ArrayRows(rng.random((1, n)) < DRAWN["train"])},
        num_classes=classes,
        meta={},
    )


if __name__ == "__main__":
    make(**json.loads(sys.argv[1]))
