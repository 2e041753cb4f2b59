"""The graphs of all benchmarks: generated ones with the extents of known ones, and real ones if there are.

A graph is made by a process of its own (`python -m bench.graphs`): what that takes is in no contender's memory. Ids of
generated graphs are random, so that neighbours lie anywhere.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import ROOT, SEED


@dataclass(frozen=True)
class Made:
    """Extents of a generated graph; `edges` counts undirected ones. Without features it gets drawn ones."""

    vertices: int
    edges: int
    features: int
    classes: int
    train: float = 0.1
    homophily: float = 0.7
    power: float = 2.6
    kind: str = "community"
    by_class: bool = False
    """Numbered class by class, so that most neighbours lie near each other, as in many real graphs."""
    train_by: str = "random"
    """Which vertices train, as `mggcn generate community --train-by` says."""
    relations: int = 0
    """Relations of the edges, which then have one direction."""
    directed: bool = False
    """Edges of an R-MAT in one direction."""
    bare: bool = False
    """Without features, for rows that are learned."""
    hub: int = 0
    """Neighbours that one vertex is given; 0: as many as it drew."""

    def scaled(self, vertices: float, edges: float | None = None) -> Made:
        """The same with fewer or more vertices and edges; a toy has vertices for its classes, and as many edges as fit."""
        if vertices == 1.0 and edges in (None, 1.0):
            return self
        n = max(round(self.vertices * vertices), 4 * self.classes)
        most = n * (n - 1) // 8
        hub = round(self.hub * n / self.vertices)
        return dataclasses.replace(self, vertices=n, edges=min(most, round(self.edges * (edges or vertices))), hub=hub)

    @property
    def key(self) -> str:
        *values, hub = dataclasses.astuple(self)
        return "-".join(str(value) for value in (*values, *([f"hub{hub}"] if hub else []), SEED))


GENERATED = {
    "arxiv-like": Made(169_343, 1_170_000, 128, 40, train=0.54),
    "reddit-like": Made(58_000, 7_150_000, 602, 41, train=0.66),
    "reddit-like, 128 features": Made(58_000, 7_150_000, 0, 41),
    "products-like": Made(600_000, 7_500_000, 0, 600, homophily=0.8, power=2.5),
    "products-like, 8 % train": Made(600_000, 7_500_000, 100, 47, train=0.08),
    "products-like, 0.2 % train": Made(600_000, 7_500_000, 100, 47, train=0.002),
    "R-MAT, 2^17": Made(2**17, 2**21, 0, 40, kind="rmat"),
    "community": Made(60_000, 600_000, 64, 10),
    "community 0.1 M": Made(100_000, 1_250_000, 64, 47, train=0.08),
    "community 0.6 M": Made(600_000, 7_500_000, 64, 47, train=0.08),
    "community 2.4 M": Made(2_449_029, 61_859_140, 64, 47, train=0.08),
    "hubs": Made(2**15, 2**19, 64, 10, kind="rmat"),
    "dense": Made(8_000, 1_600_000, 64, 10, homophily=0.5),
    # Graphs of the papers' experiments; docs/store.md has the same as commands of mggcn generate.
    "papers-like": Made(1_110_000, 16_160_000, 128, 172, train=0.011, train_by="community"),
    "products-like, best sold train": Made(600_000, 7_500_000, 100, 47, train=0.08, train_by="degree"),
    "LDBC-like": Made(2**18, 7 * 2**18, 135, 10, train=0.008, kind="rmat", directed=True),
    "AM-like": Made(88_168, 566_868, 0, 11, train=0.009, relations=133, bare=True),
    "community 0.1 M, no features": Made(100_000, 1_250_000, 0, 47, train=0.08, bare=True),
}
DRAWN = {"features": 128, "classes": 40, "train": 0.54}
"""What a graph without features gets: random ones, as many as arxiv has; they cost what others would."""
RELABELLED = ", relabelled"
"""Behind the name of a real graph: with random ids."""


def find_data(folder: Path | None = None) -> Path | None:
    """Return the folder of the real graphs: as given, $MGGCN_DATA, build/data, or shared/data beside the repository."""
    given = folder or os.environ.get("MGGCN_DATA")
    places = [given] if given else [ROOT / "build" / "data", ROOT.parent / "shared" / "data"]
    return next((Path(place) for place in places if Path(place).is_dir()), None)


def available(graph: str, data: Path | None) -> bool:
    """Whether a graph can be made: generated, or in the folder of real ones."""
    return graph in GENERATED or (data is not None and (data / graph.removesuffix(RELABELLED)).is_dir())


def store_of(graph: str, args: Any, *, vertices: float = 1.0, edges: float = 1.0) -> Path:
    """Return a graph's store in the cache folder, made unless it is there.

    args.scale is of vertices and edges of generated graphs; `vertices` and `edges` are times that again.
    """
    if graph in GENERATED:
        scale = getattr(args, "scale", 1.0)
        return made_store(graph, GENERATED[graph].scaled(scale * vertices, scale * edges), args.cache)
    store = Path(args.cache) / f"real-{short(graph)}"
    if not store.exists():
        data = find_data(args.data)
        _in_process(
            store, source=str(data and data / graph.removesuffix(RELABELLED)), relabel=graph.endswith(RELABELLED)
        )
    return store


def made_store(name: str, made: Made, cache: str | Path) -> Path:
    """Return the store of a generated graph, made unless it is there."""
    store = Path(cache) / f"{short(name)}-{made.key}"
    if not store.exists():
        _in_process(store, made=dataclasses.asdict(made))
    return store


def short(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in name)


def _in_process(store: Path, **job: Any) -> None:
    print(f"making {store.name}", file=sys.stderr)
    store.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bench.graphs", json.dumps(job | {"store": str(store)})]
    subprocess.run(command, check=True, cwd=ROOT)


def make(store: str, made: dict[str, Any] | None = None, source: str = "", relabel: bool = False) -> None:
    """Write the store of a generated graph, or a copy of a real one beside which partitions may be kept."""
    import numpy as np

    from mggcn.graph.relabel import relabelled
    from mggcn.graph.store import open_store, write_store

    if made is None:
        if (Path(source) / "labels.npy").exists() and not relabel:
            shutil.copytree(source, store, ignore=shutil.ignore_patterns("partitions", "tuned.json"))
            return
        graph = open_store(source)
        if relabel:
            order = np.random.default_rng(SEED).permutation(graph.num_vertices)
            graph = dataclasses.replace(relabelled(graph, order), ids=None)
    else:
        graph = generated(Made(**made), Path(store).name)
    bare = made is not None and made.get("bare", False)
    write_store(graph if bare or graph.features is not None else with_features(graph), store)


def generated(made: Made, name: str) -> Any:
    import numpy as np

    from mggcn.graph.generate import community, rmat
    from mggcn.graph.relabel import relabelled

    if made.kind == "rmat":
        scale, factor = max(4, round(math.log2(made.vertices))), max(1, made.edges // made.vertices)
        sizes: dict[str, Any] = {"num_features": made.features, "num_classes": made.classes if made.features else 0}
        return rmat(scale, factor, seed=SEED, symmetric=not made.directed, train=made.train, **sizes)
    extents = (made.vertices, made.edges, made.features, made.classes)
    shares: dict[str, Any] = {"homophily": made.homophily, "power": made.power, "train": made.train}
    shares |= {"train_by": made.train_by, "num_relations": made.relations}
    graph = community(*extents, seed=SEED, name=name, **shares)
    if made.hub:
        graph = with_hub(graph, made.hub)
    if not made.by_class:
        return graph
    order = np.argsort(graph.labels.array(), kind="stable")  # type: ignore[union-attr]  # a community graph has labels
    return dataclasses.replace(relabelled(graph, order), ids=None)


def with_hub(graph: Any, hub: int) -> Any:
    """Add edges of vertex 0 of an undirected graph to the first vertices that are no neighbours, up to `hub` neighbours."""
    import numpy as np

    from mggcn.graph.pairs import csr_from_keys

    n, indptr, indices = graph.num_vertices, graph.adj.indptr.array(), graph.adj.indices.array()
    strangers = np.setdiff1d(np.arange(1, n), indices[: indptr[1]])[: hub - int(indptr[1])]
    keys = np.repeat(np.arange(n), np.diff(indptr)) * n + indices
    adj = csr_from_keys(np.sort(np.concatenate([keys, strangers, strangers * n])), n)
    return dataclasses.replace(graph, adj=adj, adj_t=adj)


def with_features(graph: Any) -> Any:
    """Give a graph that has none random features, labels and a split."""
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
